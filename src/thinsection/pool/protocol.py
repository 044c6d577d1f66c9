"""What every slide encoder offers, and what it says of the tile embeddings that it was made for.

Shapes: N tiles of one slide, D channels of a tile embedding, D' of the slide embedding.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thinsection.types import CoordsL0
from thinsection.weights.origin import Origin

if TYPE_CHECKING:
    import torch

    TileEmbeddings: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
else:
    TileEmbeddings: TypeAlias = Any

SlideEmbedding = npt.NDArray[np.float32]  # (D',)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expects:
    """The tiles and the tile encoder that a slide encoder was trained on; None = any.

    Attributes:
        tile_encoders: names of tile encoders whose embeddings it takes.
        tile_dim: channels D of a tile embedding.
        tile_px: edge of a tile, px at `tile_mpp`.
        tile_mpp: resolution of a tile, µm/px.
    """

    tile_encoders: tuple[str, ...] | None = None
    tile_dim: int | None = None
    tile_px: int | None = None
    tile_mpp: float | None = None


class SlideEncoder(ABC):
    """Tile embeddings and coordinates in, one embedding per slide out.

    Attributes:
        name: in the registry.
        dim: channels D' of the slide embedding; None where it is the tile embedding's D.
        expects: what it was trained on.
        weights_hash: of its weights, in hex; None where it has none.
        precision: fp32 or bf16: what matrix products are computed in.
        origin: of the weights; `load_slide_encoder` sets it.
    """

    name: str
    dim: int | None = None
    expects: Expects = Expects()
    weights_hash: str | None = None
    precision: str = "fp32"
    origin: Origin = Origin()

    @abstractmethod
    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Slide embedding (D',) of one slide.

        Args:
            tile_embeddings: (N, D), N >= 1, float16, bfloat16, float32 or float64, all finite.
            coords_l0: int64 (N, 2), top-left corners of the tiles, level-0 px.
            tile_px_l0: edge of a tile, level-0 px.

        Raises:
            InvalidInputError: shapes, dtypes or values are not as above.
        """

    @property
    def identity(self) -> dict[str, str]:
        """What decides a slide embedding beside its tiles: name, weights_hash, precision; and the
        hub's `revision`."""
        return self.origin.identity(
            self.name, precision=self.precision, weights_hash=self.weights_hash
        )

    def label(self, features_label: str) -> str:
        """A readable name for a folder of slide embeddings made of those tile embeddings.

        'mean-uni2_h'; and bare 'titan' where the tile encoder is the one that it was trained on.
        """
        own = self.origin.label(self.name, precision=self.precision, weights_hash=self.weights_hash)
        if features_label in (self.expects.tile_encoders or ()):
            return own
        return f"{own}-{features_label}"
