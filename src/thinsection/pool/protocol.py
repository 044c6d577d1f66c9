"""What every slide encoder offers, and what it says of the tile embeddings that it was made for.

Shapes: N tiles of one slide, D channels of a tile embedding, D' of the slide embedding.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from thinsection.types import CoordsL0

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


@runtime_checkable
class SlideEncoder(Protocol):
    """Tile embeddings and coordinates in, one embedding per slide out."""

    @property
    def name(self) -> str:
        """Name in the registry."""
        ...

    @property
    def dim(self) -> int | None:
        """Channels D' of the slide embedding; None where it is the tile embedding's D."""
        ...

    @property
    def expects(self) -> Expects:
        """What it was trained on."""
        ...

    @property
    def weights_hash(self) -> str | None:
        """SHA-256 over names, shapes, dtypes and bytes of the weights; None where it has none."""
        ...

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
        ...
