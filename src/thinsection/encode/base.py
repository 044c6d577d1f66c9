"""`TileEncoder`: the interface of tile encoders for the pipeline. PyTorch is not imported here.

Shapes: B tiles, [B, H, W, 3] uint8 in; embeddings [B, D] and tokens [B, T, C] float32 out.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image, ImageDraw

from thinsection.encode.engine_choice import engine_version
from thinsection.encode.registry import (
    EncoderIdentity,
    EncoderSpec,
    declared_encoders,
)
from thinsection.encode.sizes import CPU_TILES
from thinsection.errors import InvalidInputError
from thinsection.files.pages import notebook_html
from thinsection.types import RgbArray, TileArray
from thinsection.weights.origin import Origin

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from thinsection.encode.preprocessing import TilePixels


@dataclass(frozen=True, slots=True)
class NumpyDevice:
    """Device of an encoder that computes by NumPy alone, on the CPU; `NUMPY` is the only one."""

    type: str = "cpu"
    index: None = None

    def __str__(self) -> str:
        return self.type

    def __reduce__(self) -> str:
        """Returns its name: a copy, or one sent to another process, is `NUMPY` itself."""
        return "NUMPY"


# Any: type checkers then accept `device = NUMPY`, and `device` is PyTorch's for all other classes
NUMPY: Any = NumpyDevice()


class TileEncoder(ABC):
    """Encoder from tiles to one vector per tile. The same batch gives the same bytes.

    An encoder of another package sets `spec` and defines `encode`; docs/encoders.md has the
    shortest one. It overrides `encode_with_tokens` if it has a dense map. Attributes may be set in
    the class or in `__init__`.

    Attributes:
        spec: name, length of an embedding, and the tiles for which the encoder was made.
        device: device on which it computes. A class that sets it computes nowhere else. With
            `device = NUMPY` it gets arrays in a run and gives arrays, and PyTorch is not imported.
        precision: precision of matrix products: fp32, fp16, bf16 or fp8.
        version: stands for code that no weights stand for. Change it whenever the same tiles give
            other embeddings than before; stored ones are then computed again.
        origin: origin of the weights; `load_encoder` sets it.
        engine: name and version, and why no other engine is used. It is recorded, but is not part
            of the identity: in fp32, engines differ only as sums in another order do.
        fingerprint: result of the comparison with the encoder's fingerprint, in words; 'none' if
            it has none. It is recorded, but is not part of the identity either.
    """

    spec: EncoderSpec
    device: torch.device
    precision: str
    version: str = ""
    origin: Origin = Origin()
    engine: str = engine_version("torch")
    fingerprint: str = "none"
    # True for a network or function of the session (`make_encoder`)
    is_own: ClassVar[bool] = False

    def __init_subclass__(cls, **options: object) -> None:
        """Sets the engine of a class that computes by NumPy."""
        super().__init_subclass__(**options)
        if getattr(cls, "device", None) is NUMPY and "engine" not in vars(cls):
            cls.engine = engine_version("numpy")

    def __init__(
        self, *, device: str | torch.device = "cpu", precision: str = "fp32"
    ) -> None:
        """Sets where it computes; a subclass then makes its network."""
        if not hasattr(type(self), "device"):
            import torch

            self.device = torch.device(device)
        self.precision = precision

    @cached_property
    def weights_hash(self) -> str:
        """sha256 of the weights of all networks among the attributes; '' if there is none.

        An encoder with weights elsewhere sets this attribute itself.
        """
        if self.device is NUMPY:
            return ""
        from torch import nn

        from thinsection.weights.files import hash_networks

        values = vars(self).values()
        return hash_networks([v for v in values if isinstance(v, nn.Module)])

    @abstractmethod
    def encode(self, tiles_u8: TilePixels) -> Tensor:
        """Embeddings of tiles.

        Args:
            tiles_u8: uint8 [B, H, W, 3], a tensor or a NumPy array. In a run it is a tensor, on
                `device` if that is a GPU, or an array if `device` is NUMPY.

        Returns:
            Floating-point numbers [B, D] on `device`. A run takes a NumPy array as well.
        """

    def encode_with_tokens(self, tiles_u8: TilePixels) -> tuple[Tensor, Tensor]:
        """Embeddings, exactly those of `encode`, and tokens float32 [B, T, C], from one pass.

        Tokens are patch tokens in row-major order, without prefix tokens, or the positions of a
        feature map.

        Raises InvalidInputError: the encoder has no dense map.
        """
        declared = declared_encoders().items()
        names = [name for name, spec in declared if spec.supports_tokens]
        raise InvalidInputError(
            f"encoder must have patch tokens, got {self.spec.name!r}; "
            f"these have: {', '.join(names)}"
        )

    def encode_tokens(self, tiles_u8: TilePixels) -> Tensor:
        """float32 [B, T, C] on `device`: only the tokens of `encode_with_tokens`."""
        return self.encode_with_tokens(tiles_u8)[1]

    @property
    def dim(self) -> int:
        """Length D of an embedding."""
        return self.spec.dim

    @property
    def has_tokens(self) -> bool:
        """True if it has a dense map: its spec says so, and its class defines it."""
        method = type(self).encode_with_tokens
        return (
            self.spec.supports_tokens and method is not TileEncoder.encode_with_tokens
        )

    @property
    def identity(self) -> dict[str, str]:
        """All that decides an embedding, and the hub's `revision`.

        These are name, weights_hash, precision and preprocessing, as JSON. Preprocessing is
        included because a checkpoint's folder defines it, under any name.
        """
        identity = self.origin.identity(
            self.spec.name, precision=self.precision, weights_hash=self.weights_hash
        )
        preprocessing = dict(self.spec.preprocessing)
        if self.version:
            preprocessing["version"] = self.version
        return identity | {"preprocessing": json.dumps(preprocessing, sort_keys=True)}

    @property
    def provenance(self) -> dict[str, str]:
        """Identity, engine and fingerprint, as results and records state them."""
        return self.identity | {
            "engine": self.engine,
            "fingerprint": self.fingerprint,
        }

    @property
    def label(self) -> str:
        """Readable name, unique among the encoders of a run, also for a folder of results.

        Examples: 'uni2_h', 'uni2_h_bf16', 'uni_w1a2b3c'.
        """
        # hashing is slow, and the label contains the hash only for own weights
        weights_hash = self.weights_hash if self.origin.own_weights else None
        return self.origin.label(
            self.spec.name, precision=self.precision, weights_hash=weights_hash
        )

    def __repr__(self) -> str:
        return f"<{self.spec.name}: {self.dim}-d, {self.precision} on {self.device}, {self.engine}>"

    def _repr_html_(self) -> str:
        """Returns its facts beside a picture of a tile and of the part that the network sees."""
        spec = self.spec
        mpp = f" at {spec.tile_mpp:g} µm/px" if spec.tile_mpp else ""
        lines = [
            f"tiles of {spec.tile_px} px{mpp}, {spec.input_px} px to the network",
            f"embeddings of {self.dim} numbers",
            f"{self.precision} on {self.device}, {self.engine}",
            f"weights {self.weights_hash[:12]}" if self.weights_hash else "no weights",
        ]
        return notebook_html(_picture(spec), self.label, lines)


def encoder_identity(encoder: TileEncoder) -> EncoderIdentity:
    """Identity of a loaded encoder."""
    return EncoderIdentity(
        name=encoder.spec.name,
        label=encoder.label,
        provenance=encoder.provenance,
        supports_tokens=encoder.has_tokens,
        files=encoder.origin.files,
    )


def _picture(spec: EncoderSpec) -> RgbArray:
    """A tile with the outline of the network's input, and a bar for the vector."""
    edge = 160
    margin = 20
    (tile,) = random_tiles(min(spec.tile_px, edge))[:1]
    picture = Image.new("RGB", (2 * edge, edge + 2 * margin), "white")
    picture.paste(Image.fromarray(tile).resize((edge, edge)), (margin, margin))
    shown = edge * min(1.0, spec.input_px / (spec.resize_px or spec.tile_px))
    rest = (edge - shown) / 2
    draw = ImageDraw.Draw(picture)
    low = margin + rest
    high = margin + edge - rest - 1
    draw.rectangle((low, low, high, high), outline="white", width=3)
    middle = margin + edge // 2
    arrow = edge + margin + 15
    draw.line((arrow, middle, arrow + 50, middle), fill="black", width=2)
    draw.polygon(
        [(arrow + 50, middle - 6), (arrow + 62, middle), (arrow + 50, middle + 6)],
        fill="black",
    )
    bar = (arrow + 75, margin, arrow + 87, margin + edge)
    draw.rectangle(bar, fill=(32, 96, 200))
    return np.asarray(picture)


def random_tiles(edge: int) -> TileArray:
    """uint8 (CPU_TILES, edge, edge, 3): patches of 16 pixels in random colours, with fine noise."""
    rng = np.random.default_rng(0)
    patches = -(-edge // 16)
    shape = (CPU_TILES, patches, patches, 3)
    colours = rng.integers(0, 225, shape, dtype=np.uint8)
    tiles = colours.repeat(16, axis=1).repeat(16, axis=2)[:, :edge, :edge]
    return tiles + rng.integers(0, 31, tiles.shape, dtype=np.uint8)
