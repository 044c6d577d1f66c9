"""Interface of slide encoders, the tile embeddings that each was trained on, and their registry.

Shapes: N tiles of one slide, D channels of a tile embedding, D' of the slide embedding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    TypeAlias,
    cast,
    get_args,
    runtime_checkable,
)

import numpy as np
import numpy.typing as npt

from thinsection.config import read_toml
from thinsection.errors import (
    ConfigError,
    InvalidInputError,
    UnknownEncoderError,
    WeightsError,
    naming_part,
)
from thinsection.extras import Need
from thinsection.registry import Entry, Registry
from thinsection.types import GIB, CoordsL0, Size, shortened
from thinsection.weights.origin import Origin

if TYPE_CHECKING:
    import torch

    TileEmbeddings: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
else:
    TileEmbeddings: TypeAlias = Any

BLOCK_ROWS = 8192  # tiles a block: a float32 copy of 8192 x 1536 is 48 MiB
CHECK_ROWS = 2048  # rows a block of the finiteness check: its copies stay below 16 MiB


@runtime_checkable
class RowBlocks(Protocol):
    """Tile embeddings (N, D) on disk, such as `EmbeddingRows`, which are read in blocks."""

    def __len__(self) -> int: ...

    def check(self) -> None:
        """Raises an error if the file is damaged or a value is not finite."""

    def blocks(self, num_rows: int) -> Iterator[npt.NDArray[Any]]:
        """Yields all rows in blocks of `num_rows`."""


SlideEmbedding = npt.NDArray[np.float32]  # (D',)
Precision = Literal["auto", "fp32", "bf16"]
DEFAULT_BUDGET_BYTES = GIB  # working memory of one `encode` beyond weights and inputs
MPP_TOLERANCE = 0.1  # relative tolerance: 0.5 µm/px accepts scanners from 0.45 to 0.55


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Arguments of a slide encoder; `load_slide_encoder` explains each."""

    weights: str | Path | None = None
    device: str = "auto"
    precision: Precision = "auto"
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    pretrained: bool = True
    output: str = ""  # name of one of its outputs; "": the first


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Size of a slide's tiles and the step from one to the next: (width, height), level-0 px."""

    size_l0: Size
    stride_l0: Size | None = None  # None if unknown

    def __post_init__(self) -> None:
        for length in self.size_l0:
            check_pixels("tile_px_l0", length)
        for length in self.stride_l0 or ():
            check_pixels("stride_l0", length)

    @classmethod
    def square(cls, tile_px_l0: int, stride_l0: int | None = None) -> TileLayout:
        """Layout of square tiles with the same step along x and y."""
        if stride_l0 is None:
            return cls((tile_px_l0, tile_px_l0))
        return cls((tile_px_l0, tile_px_l0), (stride_l0, stride_l0))


@contextmanager
def naming_slide(index: int) -> Iterator[None]:
    """Adds the slide's index to errors that are raised in the block."""
    try:
        yield
    except InvalidInputError as error:
        error.add_note(f"slide {index} of the patient")
        raise


def check_pixels(name: str, length: object) -> int:
    """Returns a length in pixels as an int. Raises InvalidInputError: it is no int > 0."""
    is_bool = isinstance(length, bool)
    if not isinstance(length, int | np.integer) or is_bool or length <= 0:
        raise InvalidInputError(f"{name} must be an int > 0, got {length!r}")
    return int(length)


def check_form(
    dtype: str, shape: tuple[int, ...], *, is_floating: bool, dim: int | None = None
) -> None:
    """Raises InvalidInputError: the embeddings are not floating-point (N, D), or D is not `dim`."""
    if not is_floating or len(shape) != 2 or 0 in shape:
        wanted = "D" if dim is None else dim
        raise InvalidInputError(
            f"tile_embeddings must be float of shape (N, {wanted}) with N >= 1, got {dtype} {shape}"
        )
    if dim is not None and shape[1] != dim:
        raise InvalidInputError(
            f"tile_embeddings must be of shape (N, {dim}), got {shape}; check which tile "
            "encoder made them"
        )


def not_finite(row: int) -> InvalidInputError:
    """The error of a tile embedding with NaN or infinity."""
    return InvalidInputError(
        f"tile_embeddings must be finite, got NaN or inf in row {row}"
    )


def check_coords(coords_l0: object, num_tiles: int) -> CoordsL0:
    """int64 (N, 2). Raises InvalidInputError: another shape or type, or not one row per tile."""
    coords = np.asarray(coords_l0)
    if coords.dtype.kind not in "iu" or coords.ndim != 2 or coords.shape[1] != 2:
        raise InvalidInputError(
            f"coords_l0 must be int64 of shape (N, 2), got {coords.dtype} {coords.shape}"
        )
    if len(coords) != num_tiles:
        raise InvalidInputError(
            f"coords_l0 must have one row per tile embedding ({num_tiles}), got {len(coords)}"
        )
    return coords.astype(np.int64)


def check_num_coords(num_coords: int, num_tiles: int) -> None:
    """Raises InvalidInputError: not one row of coordinates per tile on disk, or no tile."""
    if not num_tiles or num_coords != num_tiles:
        raise InvalidInputError(
            f"coords_l0 must have one row per tile embedding ({num_tiles}), and at least one, "
            f"got {num_coords}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expects:
    """The tiles and the tile encoder that a slide encoder was trained on; None = any."""

    tile_encoders: tuple[str, ...] | None = None  # encoders whose embeddings it takes
    tile_dim: int | None = None  # channels D of a tile embedding
    tile_px: int | None = None  # edge of a tile, px at `tile_mpp`
    tile_mpp: float | None = None  # µm/px
    other_mpps: tuple[float, ...] = ()  # further µm/px that its authors use


# tile embeddings, coordinates and layout of a slide
TiledSlide: TypeAlias = "tuple[TileEmbeddings, CoordsL0, TileLayout]"


class SlideEncoder(ABC):
    """Computes one embedding per slide from its tile embeddings and coordinates."""

    name: str  # name in the registry
    # channels D' of the slide embedding; None: the same as D of the tile embedding
    dim: int | None = None
    expects: Expects = Expects()
    weights_hash: str | None = None  # in hex; None without weights
    precision: str = "fp32"  # precision of matrix products: fp32 or bf16
    origin: Origin = Origin()  # origin of the weights; set by `load_slide_encoder`
    # increased when the same tiles and weights give another embedding than in earlier releases
    version: int = 1
    # True if `fuse` takes slide embeddings; False if it takes the result of `case_state`
    fuses_embeddings: bool = True
    # True if `encode` also takes `RowBlocks`
    reads_blocks: bool = False
    has_outputs: bool = False  # True if 'NAME:OUTPUT' chooses one of several embeddings

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
        """Slide embedding (D',) of tiles whose layout is known; otherwise as `encode`.

        An encoder that needs the step between tiles, or tiles that are not square, overrides this.
        """
        with naming_part("slide encoder", self.name, self):
            return self.encode(tile_embeddings, coords_l0, tile_px_l0=layout.size_l0[0])

    def encode_case(self, slides: Iterable[TiledSlide]) -> SlideEmbedding:
        """Embedding (D',) of all slides of a case, at least one.

        One slide is in memory at a time.
        """
        states = []
        for index, (tiles, coords, layout) in enumerate(slides):
            with naming_slide(index):
                states.append(self.case_state(tiles, coords, layout))
        return self.fuse(np.stack(states))

    def case_state(
        self,
        tile_embeddings: TileEmbeddings,
        coords_l0: CoordsL0,
        layout: TileLayout,
    ) -> npt.NDArray[np.float32]:
        """State (C,) of one slide that `fuse` takes; by default the slide embedding."""
        return self.encode_tiles(tile_embeddings, coords_l0, layout)

    def fuse(self, states: npt.NDArray[np.float32]) -> SlideEmbedding:
        """Embedding (D',) of a case from the states (S, C) of its slides; by default their mean.

        An encoder that was trained on cases overrides this method and `case_state`.
        """
        mean = states.mean(0, dtype=np.float64).astype(np.float32)
        return cast(SlideEmbedding, mean)

    @classmethod
    def load(cls, options: LoadOptions) -> SlideEncoder:
        """Loads the encoder for `load_slide_encoder`; overridden if there are weights."""
        if options.weights is not None:
            raise WeightsError(
                f"weights must be omitted for slide encoder {cls.name!r}, which has none, got "
                f"{str(options.weights)!r}"
            )
        return cls()

    def __repr__(self) -> str:
        facts = [
            "slide embeddings" if self.dim is None else f"{self.dim}-d",
            self.precision,
        ]
        expects = self.expects
        if expects.tile_encoders:
            facts.append(f"tiles of {shortened(expects.tile_encoders)}")
        if expects.tile_px is not None:
            mpp = "" if expects.tile_mpp is None else f" at {expects.tile_mpp:g} µm/px"
            facts.append(f"{expects.tile_px} px{mpp}")
        return f"<{self.name}: {', '.join(facts)}>"

    @property
    def identity(self) -> dict[str, str]:
        """Everything that decides a slide embedding beside the tiles; and the hub's `revision`."""
        identity = self.origin.identity(
            self.name, precision=self.precision, weights_hash=self.weights_hash
        )
        if self.version > 1:
            identity["version"] = str(self.version)
        return identity

    def label(self, features_label: str) -> str:
        """Name for a folder: 'mean-uni2_h', or just 'titan' on the tiles it was trained on."""
        return slide_encoder_identity(self).label(features_label)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideEncoderIdentity:
    """Name and identity of a slide encoder, without its weights."""

    name: str  # name in the registry
    own_label: str  # name in folders: 'titan_bf16'
    identity: Mapping[str, str]  # see `SlideEncoder.identity`
    expects: Expects

    def label(self, features_label: str) -> str:
        """Name for a results folder: 'mean-uni2_h', or just 'titan' on the tiles it was trained on.

        If a slide encoder was trained on several tile encoders, as COBRA was, the name of the tile
        encoder is part of the folder's name, so that different embeddings never share a folder.
        """
        names = self.expects.tile_encoders or ()
        takes_one = self.expects.tile_dim is not None or len(names) == 1
        if takes_one and features_label in names:
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
    slide_encoder: SlideEncoder | SlideEncoderIdentity | type[SlideEncoder],
    tile_encoder_name: str | None,
    tile_px: int | None,
    tile_mpp: float | None,
    *,
    file: Path | None = None,
) -> tuple[str, ...]:
    """Refuses tiles that a slide encoder was not trained on; warns if a value is unknown.

    Args:
        slide_encoder: the encoder, its class, or its identity.
        tile_encoder_name: encoder of the tile embeddings; None = unknown.
        tile_px: edge of a tile, px at `tile_mpp`; None = unknown.
        tile_mpp: µm/px; None = unknown. Accepted within 10 %.
        file: file of the embeddings, to name it in errors.

    Returns:
        A warning for each unknown value for which the slide encoder needs a certain one.

    Raises InvalidInputError: tile encoder, tile size or resolution differs from the expected one.
    """
    expects = slide_encoder.expects
    name = slide_encoder.name
    place = f" in {str(file)!r}" if file else ""
    warnings = []
    if expects.tile_encoders:
        takes = " or ".join(expects.tile_encoders)
        if tile_encoder_name is None:
            warnings.append(
                f"slide encoder {name!r} expects embeddings of {takes}; the encoder of these "
                "embeddings is unknown"
            )
        elif _plain(tile_encoder_name) not in map(_plain, expects.tile_encoders):
            raise InvalidInputError(
                f"tile encoder must be {takes} for slide encoder {name!r}, got "
                f"{tile_encoder_name!r}{place}; embed the tiles with {takes} "
                f'(encoders="{expects.tile_encoders[0]}"), or choose another slide encoder'
            )
    if expects.tile_px is not None:
        if tile_px is None:
            warnings.append(
                f"slide encoder {name!r} expects tiles of {expects.tile_px} px; the size of these "
                "tiles is unknown"
            )
        elif tile_px != expects.tile_px:
            raise InvalidInputError(
                f"tile_px must be {expects.tile_px} for slide encoder {name!r}, got "
                f"{tile_px}{place}; embed tiles with "
                f"tile_px={expects.tile_px}, or choose another slide encoder"
            )
    if expects.tile_mpp is not None:
        accepted = (expects.tile_mpp, *expects.other_mpps)
        words = " or ".join(f"{mpp:.3g}" for mpp in accepted)
        if tile_mpp is None:
            warnings.append(
                f"slide encoder {name!r} expects tiles at {words} µm/px; the "
                "resolution of these tiles is unknown"
            )
        elif not any(
            math.isclose(tile_mpp, mpp, rel_tol=MPP_TOLERANCE) for mpp in accepted
        ):
            raise InvalidInputError(
                f"tile_mpp must be {words} for slide encoder {name!r}, got "
                f"{tile_mpp:g}{place}; embed tiles with "
                f"tile_mpp={expects.tile_mpp:g}, or choose another slide encoder"
            )
    return tuple(warnings)


def _plain(name: str) -> str:
    """The name as it is compared: lower case, letters and digits only (CONCH_v1.5 is conch_v15)."""
    return "".join(c for c in name.lower() if c.isalnum())


def _entries() -> list[Entry]:
    """Entries of `slide_encoders.toml` beside this file."""
    rows = read_toml(Path(__file__).with_name("slide_encoders.toml"))["slide_encoder"]
    return [Entry(**row) for row in rows]


# these take the embeddings of any tile encoder
WITHOUT_WEIGHTS = ("mean", "max", "abmil")
_IN_NUMPY = ("mean", "max")
SLIDE_ENCODERS: Registry[type[SlideEncoder]] = Registry(
    "slide encoder",
    "thinsection.slide_encoders",
    _entries,
    error=UnknownEncoderError,
)


def check_slide_encoder(name: str) -> None:
    """Raise UnknownEncoderError if no slide encoder has this name, without importing any."""
    SLIDE_ENCODERS.entry(name.partition(":")[0])


def needs_of_slide_encoder(name: str, *, from_hub: bool) -> Need:
    """Packages that it takes to load a slide encoder; `from_hub`: with its published weights."""
    entry = SLIDE_ENCODERS.entry(name.partition(":")[0])
    packages = entry.needs
    if from_hub and entry.name not in WITHOUT_WEIGHTS:
        packages = (*packages, "huggingface_hub")
    return f"slide encoder {name!r}", packages


def check_declared_fit(name: str, tile_encoder_name: str, tile_px: int) -> None:
    """Checks the fit as `check_fit` does, for a registered slide encoder that is not loaded.

    Raises InvalidInputError: its class states that it was trained on other tiles.
    """
    entry = SLIDE_ENCODERS.entry(name.partition(":")[0])
    if entry.name in WITHOUT_WEIGHTS:
        return  # fits all tiles; loading the class of abmil would import torch
    check_fit(_load_class(entry.name), tile_encoder_name, tile_px, None)


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
            repository at the pinned commit, if there is one (titan, gigapath).
        device: 'auto' (CUDA if there is one, else the CPU) or a torch device.
        precision: of matrix products; 'auto' is fp32. Softmax and sums stay in fp32.
        budget_bytes: working memory of one `encode` beyond weights and inputs.
        pretrained: False gives seeded random weights, for tests and dry runs only.

    Raises UnknownEncoderError, ConfigError, DeviceError, WeightsError, MissingDependencyError.
    """
    if precision not in get_args(Precision):
        allowed = ", ".join(get_args(Precision))
        raise ConfigError(f"precision must be one of {allowed}, got {precision!r}")
    if budget_bytes <= 0:
        raise ConfigError(f"budget_bytes must be > 0, got {budget_bytes}")
    registered_name, _, output = name.partition(":")
    encoder_class = _load_class(registered_name)
    if output and not encoder_class.has_outputs:
        raise ConfigError(
            f"slide encoder {registered_name!r} must be named without an output, because it has "
            f"only one, got {name!r}"
        )
    options = LoadOptions(
        weights=weights,
        device=_device_for(registered_name, device),
        precision=precision,
        budget_bytes=budget_bytes,
        pretrained=pretrained,
        output=output,
    )
    encoder = encoder_class.load(options)
    seed = 0 if not pretrained and encoder.weights_hash is not None else None
    encoder.origin = replace(encoder.origin, own_weights=weights is not None, seed=seed)
    return encoder


def pools_by_torch(name: str) -> bool:
    """False for a slide encoder that computes by NumPy alone."""
    return name.partition(":")[0] not in _IN_NUMPY


def _device_for(name: str, device: str) -> str:
    """Device for a slide encoder; for those in NumPy PyTorch is not imported to find it."""
    if not pools_by_torch(name) and str(device) in ("auto", "cpu"):
        return "cpu"
    from thinsection.weights.placement import resolve_device

    return str(resolve_device(device, mps=False))


def _load_class(name: str) -> type[SlideEncoder]:
    """Class of a registered name; checked, because other packages can register anything."""
    encoder_class: object = SLIDE_ENCODERS.load(name)
    if not (
        isinstance(encoder_class, type) and issubclass(encoder_class, SlideEncoder)
    ):
        raise InvalidInputError(
            f"slide encoder {name!r} must be a subclass of SlideEncoder, got {encoder_class}"
        )
    return encoder_class
