"""What every slide encoder offers, which tile embeddings it was made for, and those by name.

Shapes: N tiles of one slide, D channels of a tile embedding, D' of the slide embedding.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from thinsection.errors import (
    ConfigError,
    InvalidInputError,
    UnknownEncoderError,
    WeightsError,
    require,
)
from thinsection.registry import Entry, Registry
from thinsection.types import GIB, CoordsL0, Size
from thinsection.weights.origin import Origin

if TYPE_CHECKING:
    import torch

    TileEmbeddings: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
else:
    TileEmbeddings: TypeAlias = Any

SlideEmbedding = npt.NDArray[np.float32]  # (D',)
Precision = Literal["auto", "fp32", "bf16"]
DEFAULT_BUDGET_BYTES = GIB  # working memory of one `encode` beyond weights and inputs
MPP_TOLERANCE = 0.1  # relative: 0.5 µm/px covers scanners from 0.45 to 0.55


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a slide encoder is built with; `load_slide_encoder` has the meaning of each."""

    weights: str | Path | None = None
    device: str = "auto"
    precision: Precision = "auto"
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    pretrained: bool = True
    output: str = ""  # which of its outputs, where it has several; "": its first


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Size of a slide's tiles and the step from one to the next: (width, height), level-0 px."""

    size_l0: Size
    stride_l0: Size | None = None  # None where nobody says

    def __post_init__(self) -> None:
        _check_pixels("tile_px_l0", self.size_l0)
        if self.stride_l0 is not None:
            _check_pixels("stride_l0", self.stride_l0)

    @classmethod
    def square(cls, tile_px_l0: int, stride_l0: int | None = None) -> "TileLayout":
        """Layout of square tiles with the same step along x and y."""
        if stride_l0 is None:
            return cls((tile_px_l0, tile_px_l0))
        return cls((tile_px_l0, tile_px_l0), (stride_l0, stride_l0))


def _check_pixels(name: str, lengths: Size) -> None:
    for length in lengths:
        is_int = isinstance(length, int | np.integer) and not isinstance(length, bool)
        if not is_int or length <= 0:
            raise InvalidInputError(f"{name} must be an int > 0, got {length!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expects:
    """The tiles and the tile encoder that a slide encoder was trained on; None = any."""

    tile_encoders: tuple[str, ...] | None = (
        None  # names of those whose embeddings it takes
    )
    tile_dim: int | None = None  # channels D of a tile embedding
    tile_px: int | None = None  # edge of a tile, px at `tile_mpp`
    tile_mpp: float | None = None  # µm/px


class SlideEncoder(ABC):
    """Tile embeddings and coordinates in, one embedding per slide out."""

    name: str  # in the registry
    dim: int | None = (
        None  # channels D' of the slide embedding; None: the tile embedding's D
    )
    expects: Expects = Expects()
    weights_hash: str | None = None  # in hex; None where it has no weights
    precision: str = "fp32"  # or bf16: what matrix products are computed in
    origin: Origin = Origin()  # of the weights; `load_slide_encoder` sets it
    # raised where the same tiles and weights give another embedding than in earlier releases
    version: int = 1
    has_outputs: bool = False  # whether 'NAME:OUTPUT' chooses one of several embeddings

    @abstractmethod
    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Slide embedding (D',) of one slide.

        Args:
            tile_embeddings: (N, D), N >= 1, float16, bfloat16, float32 or float64, all finite.
            coords_l0: int64 (N, 2), top-left corners of the tiles, level-0 px.
            tile_px_l0: edge of a tile, level-0 px.
        """

    def encode_tiles(
        self,
        tile_embeddings: TileEmbeddings,
        coords_l0: CoordsL0,
        layout: TileLayout,
    ) -> SlideEmbedding:
        """Slide embedding (D',), as `encode`, of tiles whose layout is known.

        An encoder that needs the step between tiles, or tiles that are not square, overrides this.
        """
        return self.encode(tile_embeddings, coords_l0, tile_px_l0=layout.size_l0[0])

    @classmethod
    def load(cls, options: LoadOptions) -> "SlideEncoder":
        """The encoder for `load_slide_encoder`; this is for one that has no weights."""
        rule, got = (
            f"slide encoder {cls.name!r} has no weights",
            repr(str(options.weights)),
        )
        require(
            options.weights is None,
            rule,
            f"{got}; leave weights out",
            error=WeightsError,
        )
        return cls()

    @property
    def identity(self) -> dict[str, str]:
        """Values that decide a slide embedding beside its tiles; and the hub's `revision`."""
        identity = self.origin.identity(
            self.name, precision=self.precision, weights_hash=self.weights_hash
        )
        if self.version > 1:
            identity["version"] = str(self.version)
        return identity

    def label(self, features_label: str) -> str:
        """A folder's name: 'mean-uni2_h', or bare 'titan' on the tiles that it was trained on."""
        return slide_encoder_identity(self).label(features_label)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideEncoderIdentity:
    """A slide encoder as its results name it, without its weights."""

    name: str  # in the registry
    own_label: str  # in the names of folders: 'titan_bf16'
    identity: Mapping[str, str]  # see `SlideEncoder.identity`
    expects: Expects

    def label(self, features_label: str) -> str:
        """A folder's name: 'mean-uni2_h', or bare 'titan' on the tiles that it was trained on."""
        if features_label in (self.expects.tile_encoders or ()):
            return self.own_label
        return f"{self.own_label}-{features_label}"


def slide_encoder_identity(slide_encoder: SlideEncoder) -> SlideEncoderIdentity:
    """Identity of a loaded slide encoder."""
    own_label = slide_encoder.origin.label(
        slide_encoder.name,
        precision=slide_encoder.precision,
        weights_hash=slide_encoder.weights_hash,
    )
    return SlideEncoderIdentity(
        name=slide_encoder.name,
        own_label=own_label,
        identity=slide_encoder.identity,
        expects=slide_encoder.expects,
    )


def check_fit(
    slide_encoder: SlideEncoder | SlideEncoderIdentity,
    tile_encoder_name: str | None,
    tile_px: int | None,
    tile_mpp: float | None,
) -> tuple[str, ...]:
    """Warnings, one sentence each, where the tiles differ from what the slide encoder expects.

    What is not known (None) cannot be checked: a warning. Embeddings of a wrong tile encoder mean
    nothing to it: an InvalidInputError.
    """
    wants, name = slide_encoder.expects, slide_encoder.name
    warnings, known = list[str](), wants.tile_encoders or ()
    takes = " or ".join(known)
    if known and tile_encoder_name is None:
        warnings.append(
            f"slide encoder {name!r} takes embeddings of {takes}; theirs is unknown"
        )
    elif known:
        taken = _plain(str(tile_encoder_name)) in map(_plain, known)
        remedy = f"embed the tiles with {takes}, or choose another slide encoder"
        rule = f"tile encoder must be {takes} for slide encoder {name!r}"
        require(taken, rule, f"{tile_encoder_name!r}; {remedy}")
    trained = f"slide encoder {name!r} was trained on"
    if wants.tile_px is not None and tile_px != wants.tile_px:
        got = "an unknown size" if tile_px is None else f"{tile_px} px"
        warnings.append(f"{trained} {wants.tile_px} px tiles, got {got}")
    near = math.isclose(tile_mpp or 0, wants.tile_mpp or 0, rel_tol=MPP_TOLERANCE)
    if wants.tile_mpp is not None and not near:
        got = "an unknown resolution" if tile_mpp is None else f"{tile_mpp:g} µm/px"
        warnings.append(f"{trained} tiles at {wants.tile_mpp:g} µm/px, got {got}")
    return tuple(warnings)


def _plain(name: str) -> str:
    """The name as compared: lower case, letters and digits only (CONCH_v1.5 is conch_v15)."""
    return "".join(c for c in name.lower() if c.isalnum())


_OURS = {
    "pooling:Mean": "Mean over tiles.",
    "pooling:Max": "Largest value of each channel.",
    "pooling:Abmil": "Attention pooling with your own weights=FILE.",
    "titan:Titan": "TITAN, 768-d, on tiles of conch_v15; CC-BY-NC-ND-4.0.",
    "gigapath:GigaPath": (
        "Prov-GigaPath's LongNet, mean over tiles, 768-d, on tiles of gigapath; "
        "gigapath:cls for the class token, gigapath:mean-5-11 for layers; Apache-2.0."
    ),
}


def _entries() -> Iterator[Entry]:
    for place, line in _OURS.items():
        module, _, kind = place.partition(":")
        target, extra = (
            f"thinsection.pool.{place}SlideEncoder",
            "hub" * (module != "pooling"),
        )
        yield Entry(name=kind.lower(), help=line, target=target, extra=extra or None)


SLIDE_ENCODERS: Registry[type[SlideEncoder]] = Registry(
    "slide encoder", "thinsection.slide_encoders", _entries, error=UnknownEncoderError
)


def check_slide_encoder(name: str) -> None:
    """Looks a name up, without importing the slide encoder.

    Raises UnknownEncoderError: no slide encoder is called so.
    """
    SLIDE_ENCODERS.entry(name.partition(":")[0])


def load_slide_encoder(
    name: str,
    *,
    weights: str | Path | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    pretrained: bool = True,
) -> SlideEncoder:
    """The slide encoder of that name, ready to encode.

    Args:
        name: of ours or of another package's; `thinsection models` lists them. 'NAME:OUTPUT'
            takes another output than the first: 'gigapath:cls' (see `GigaPathSlideEncoder`).
        weights: file, folder, or hub repository `owner/name@COMMIT`; None takes the published
            repository at the pinned commit, where there is one (titan, gigapath).
        device: 'auto' (CUDA where there is one, else the CPU) or a torch device.
        precision: of matrix products; 'auto' is fp32. Softmax and sums stay in fp32.
        budget_bytes: working memory of one `encode` beyond weights and inputs.
        pretrained: False gives seeded random weights, for tests and dry runs only.

    Raises UnknownEncoderError, ConfigError, DeviceError, WeightsError, MissingDependencyError.
    """
    from thinsection.weights.placement import (
        resolve_device,
    )  # torch, which names do not need

    allowed = get_args(Precision)
    rule = f"precision must be one of {', '.join(allowed)}"
    require(precision in allowed, rule, repr(precision), error=ConfigError)
    require(
        budget_bytes > 0, "budget_bytes must be > 0", budget_bytes, error=ConfigError
    )
    registered_name, _, output = name.partition(":")
    encoder_class = SLIDE_ENCODERS.load(registered_name)
    fits = isinstance(encoder_class, type) and issubclass(encoder_class, SlideEncoder)
    require(
        fits,
        f"slide encoder {registered_name!r} must be a subclass of SlideEncoder",
        encoder_class,
    )
    if output and not encoder_class.has_outputs:
        raise ConfigError(
            f"slide encoder {registered_name!r} must be named without an output, "
            f"got {name!r}; it has one only"
        )
    where = str(resolve_device(device, mps=False))
    encoder = encoder_class.load(
        LoadOptions(weights, where, precision, budget_bytes, pretrained, output)
    )
    seed = 0 if not pretrained and encoder.weights_hash is not None else None
    encoder.origin = replace(encoder.origin, own_weights=weights is not None, seed=seed)
    return encoder
