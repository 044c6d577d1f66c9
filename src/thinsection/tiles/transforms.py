"""What happens to tiles between reading and encoding: stain normalisation, off by default.

The look of a slide is estimated once, from px of its tissue at a stated resolution; every tile is
then mapped, px by px, to the target's look, so that differently stained slides are encoded alike.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, get_namespace
from thinsection.config import option
from thinsection.errors import ConfigError, InvalidInputError, require
from thinsection.qc.tissue import box_fractions, tissue_mask
from thinsection.slide import Slide, open_slide
from thinsection.slide.geometry import ROUNDING, plan_read
from thinsection.slide.resize import read_tiles
from thinsection.tiles.grid import Tissue, grid_coords, mask_and_frame
from thinsection.types import MaskFrame, TileArray

TileTransform = Callable[[TileArray], TileArray]  # uint8 (B, H, W, 3), changed in place

_SAMPLE_PX = 256  # edge of one place that is read to estimate a look
_MAX_PX = 1 << 20  # that a look is estimated from, spread over all places
_CHUNK_PX = (
    1 << 15
)  # mapped at once: the float32 values in between stay in a core's cache
_MAX_LOG = (
    12.0  # far above the brightest px: what a map of two very near stains may exceed
)
_WHITE = 240.0  # what glass without tissue transmits, of 255
_MIN_DENSITY = 0.15  # px that absorb less in some channel are glass
_MIN_ANGLE_DEG = (
    4.0  # between two stains; H&E has about 20, the noise of one stain 1 to 3
)
_MIN_PX = 256  # of tissue, for a look
_MIN_SPREAD = 1e-3  # of a colour axis; real slides have 0.02 to 0.6

Px = npt.NDArray[np.uint8]  # (n, 3)
Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StainConfig:
    """Settings of stain normalisation."""

    stain_norm: Literal["none", "macenko", "reinhard"] = option(
        "none", "Stain normalisation of tiles before they are encoded."
    )
    stain_reference: str | None = option(
        None,
        "Picture or slide whose look is the target; without one, a published standard.",
    )
    stain_mpp: float = option(
        1.0, "Resolution at which a slide's look is estimated, µm/px."
    )
    stain_places: int = option(
        64, "Places of 256 x 256 px over the tissue that are read for it."
    )

    def __post_init__(self) -> None:
        check = partial(require, error=ConfigError)
        check(
            0 < self.stain_mpp < math.inf, "stain.stain_mpp must be > 0", self.stain_mpp
        )
        check(
            self.stain_places >= 1, "stain.stain_places must be >= 1", self.stain_places
        )
        fits = self.stain_norm != "none" or self.stain_reference is None
        got = f"{self.stain_reference!r} and 'none'; set stain.stain_norm"
        check(fits, "stain.stain_reference must go with a method", got)


@dataclass(frozen=True, kw_only=True)
class StainTransform:
    """Maps px I of uint8 tiles in place to M⁻¹ exp(A log(M (I + offset)) + b). Thread-safe."""

    matrix: npt.NDArray[np.float64] | None = (
        None  # A, (3, 3); None leaves tiles as they are
    )
    shift: npt.NDArray[np.float64] = field(
        default_factory=lambda: np.zeros(3)
    )  # b, (3,)
    offset: float = (
        0.0  # added to a channel before its logarithm; what stays below 1 counts as 1
    )
    mix: npt.NDArray[np.float64] | None = None  # M, (3, 3); None for the identity
    warning: str | None = (
        None  # why tiles are left as they are; None where they are not
    )
    ns: ArrayNamespace = field(
        default_factory=get_namespace
    )  # of another device: `replace` it

    def __call__(self, tiles: TileArray) -> TileArray:
        """The same array, (B, H, W, 3), with other colours.

        Equal to float64 arithmetic, but px within 1e-3 of the middle of two values may differ by 1.
        Memory: 1.5 MiB a thread, whatever the tiles' size.
        """
        if (
            tiles.dtype != np.uint8
            or tiles.shape[-1] != 3
            or not tiles.flags.c_contiguous
        ):
            rule = "contiguous uint8 (B, H, W, 3)"
            raise InvalidInputError(
                f"tiles must be {rule}, got {tiles.dtype} {tiles.shape}"
            )
        if self.matrix is None:
            return tiles
        xp = self.ns.xp
        matrix, shift = (
            xp.asarray(a, dtype=xp.float32) for a in (self.matrix.T, self.shift)
        )
        mix = None if self.mix is None else xp.asarray(self.mix.T, dtype=xp.float32)
        unmix = None if mix is None else xp.linalg.inv(mix)
        px = tiles.reshape(-1, 3)
        for start in range(0, len(px), _CHUNK_PX):
            part = px[start : start + _CHUNK_PX]
            values = _log(xp, part.astype(xp.float32), self.offset, mix) @ matrix
            values += shift
            xp.exp(xp.minimum(values, _MAX_LOG, out=values), out=values)
            values = values if unmix is None else values @ unmix
            part[...] = xp.clip(xp.rint(values, out=values), 0, 255, out=values).astype(
                xp.uint8
            )
        return tiles


def _log(xp: Array, values: Array, offset: float, mix: Array | None) -> Array:
    """log(M (I + offset)) of px (n, 3), which are overwritten."""
    values += offset
    xp.maximum(values, 1.0, out=values)
    values = values if mix is None else values @ mix
    return xp.log(values, out=values)


@dataclass(frozen=True, slots=True)
class StainVectors:
    """Two stains, as optical density of R, G, B per unit, and how strong they get."""

    hematoxylin: Vector  # of length about 1
    eosin: Vector
    strengths: Vector  # 99th percentile of the amount of either

    @classmethod
    def of(cls, px: Px, where: str) -> "StainVectors":
        """The stains of px (n, 3), by the angles of their optical densities.

        Source: Macenko et al., A method for normalizing histology slides for quantitative
            analysis, ISBI 2009; alpha 1, beta 0.15 and white 240 as in its common implementations.
        """
        density = -np.log((px.astype(np.float64) + 1.0) / _WHITE)
        density = density[(density >= _MIN_DENSITY).all(axis=1)]
        if len(density) < _MIN_PX:
            raise _degenerate(
                where, f"{len(density)} px that absorb light", f">= {_MIN_PX} of"
            )
        _, axes = np.linalg.eigh(np.cov(density.T))
        plane = axes[:, :0:-1]  # the two of largest variance, the larger one first
        plane = plane * np.where(
            plane.sum(axis=0) < 0, -1.0, 1.0
        )  # their sign is arbitrary
        angles = np.arctan2(*(density @ plane).T[::-1])
        low, high = np.percentile(angles, (1, 99))
        if math.degrees(high - low) < _MIN_ANGLE_DEG:
            raise _degenerate(
                where, f"hues {math.degrees(high - low):.1f}° apart", "two stains in"
            )
        ends = [plane @ (math.cos(angle), math.sin(angle)) for angle in (low, high)]
        first, second = sorted(
            ends, key=lambda v: -v[0]
        )  # hematoxylin absorbs more red
        amounts = density @ np.linalg.pinv(np.stack([first, second], axis=1)).T
        strengths = np.percentile(amounts, 99, axis=0)
        if strengths.min() <= 0:
            raise _degenerate(
                where, f"amounts of {strengths.tolist()}", "two stains in"
            )
        return cls(*(tuple(values.tolist()) for values in (first, second, strengths)))

    def to(self, target: "StainLook") -> StainTransform:
        """What gives tiles of this look the target's."""
        assert isinstance(target, StainVectors)
        amounts = np.linalg.pinv(np.stack([self.hematoxylin, self.eosin], axis=1))
        scaled = amounts * (np.divide(target.strengths, self.strengths))[:, None]
        matrix = np.stack([target.hematoxylin, target.eosin], axis=1) @ scaled
        # log(I / white) = matrix @ log(I / white), with the white moved into the shift
        shift = math.log(_WHITE) * (1.0 - matrix.sum(axis=1))
        return StainTransform(matrix=matrix, shift=shift, offset=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColourMoments:
    """Mean and standard deviation along the axes l, α and β: light, yellow-blue, red-green."""

    mean: Vector
    spread: Vector

    @classmethod
    def of(cls, px: Px, where: str) -> "ColourMoments":
        """The moments of px (n, 3).

        Source: Reinhard et al., Color transfer between images, 2001; the axes are those of
            Ruderman et al., Statistics of cone responses to natural images, 1998.
        """
        if len(px) < _MIN_PX:
            raise _degenerate(where, f"{len(px)} px", f">= {_MIN_PX} px of")
        axes = _log(np, px.astype(np.float64), 0.0, _LMS_FROM_RGB.T) @ _AXES_FROM_LMS.T
        mean, spread = axes.mean(axis=0), axes.std(axis=0)
        if spread.min() < _MIN_SPREAD:
            raise _degenerate(
                where, f"spreads of {spread.round(5).tolist()}", "several colours in"
            )
        return cls(mean=tuple(mean.tolist()), spread=tuple(spread.tolist()))

    def to(self, target: "StainLook") -> StainTransform:
        """What gives tiles of this look the target's."""
        assert isinstance(target, ColourMoments)
        ratio, back = (
            np.divide(target.spread, self.spread),
            np.linalg.inv(_AXES_FROM_LMS),
        )
        matrix = back @ (ratio[:, None] * _AXES_FROM_LMS)
        shift = back @ (np.array(target.mean) - ratio * self.mean)
        return StainTransform(matrix=matrix, shift=shift, mix=_LMS_FROM_RGB)


StainLook = StainVectors | ColourMoments

_LMS = [[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]]
_LMS_FROM_RGB = np.array(_LMS)
_AXES_FROM_LMS = np.array([[1, 1, 1], [1, 1, -2], [1, -1, 0]]) / np.sqrt(
    [[3], [6], [2]]
)

# Macenko: the reference of mitkovetta/staining-normalization, which its Python ports share.
# Reinhard: TCGA-A2-A3XS-DX1 of Amgad et al. 2019, the standard of HistomicsTK's tests.
_LIGHT = (8.74108109, -0.12440419, 0.0444982)
STANDARDS: dict[str, StainLook] = {
    "macenko": StainVectors(
        (0.5626, 0.7201, 0.4062), (0.2159, 0.8012, 0.5581), (1.9705, 1.0308)
    ),
    "reinhard": ColourMoments(mean=_LIGHT, spread=(0.6135447, 0.10989545, 0.0286032)),
}


def fit_stain(
    slide: Slide,
    tissue: Tissue | None,
    config: StainConfig,
    *,
    target: StainLook | None = None,
) -> StainTransform:
    """What gives the tiles of a slide the target's look, the same to the bit each time.

    A slide without tissue gets one that changes nothing and says so in `warning`.

    Args:
        slide: opened.
        tissue: a mask and its frame, or a `TissueMask`; None takes the whole slide.
        config: method and how the slide is sampled.
        target: from `stain_target`, where it was made once for many slides.

    Memory: 40 MiB for 2**20 px at most, beside the reader's own.

    Raises:
        InvalidInputError: the tissue has one stain, or none, such as a grey slide.
        SlideReadError: a place cannot be decoded.
    """
    if config.stain_norm == "none":
        return StainTransform()
    px = sample_px(slide, tissue, config)
    if len(px) == 0:
        warning = "no tissue to estimate the stains from: tiles are left as they are"
        return StainTransform(warning=warning)
    look = type(STANDARDS[config.stain_norm]).of(px, slide.slide_path)
    return look.to(target or stain_target(config))


def stain_target(config: StainConfig) -> StainLook:
    """The look that tiles are given: a published standard, or that of the reference.

    Raises SlideOpenError (the reference), InvalidInputError (no method; it has not two stains).
    """
    if (standard := STANDARDS.get(config.stain_norm)) is None:
        raise InvalidInputError(
            f"stain_norm must be a method, got {config.stain_norm!r}"
        )
    if config.stain_reference is None:
        return standard
    with open_slide(config.stain_reference) as slide:
        px = sample_px(slide, tissue_mask(slide), config)
    return type(standard).of(px, config.stain_reference)


def sample_px(slide: Slide, tissue: Tissue | None, config: StainConfig) -> Px:
    """Px of the tissue, uint8 (n, 3), n <= 2**20, from places spread evenly over it.

    They are read at `stain_mpp`, or at level 0 where that is coarser or has no mpp.
    """
    finest = max(slide.slide_mpp or (math.inf,)) * (1 - ROUNDING)
    mpp = config.stain_mpp if config.stain_mpp >= finest else None
    plan = plan_read(slide.levels, slide.slide_mpp, tile_px=_SAMPLE_PX, tile_mpp=mpp)
    if tissue is None:
        tissue = (
            np.ones((1, 1), dtype=bool),
            MaskFrame(size_th=(1, 1), size_l0=slide.size),
        )
    mask, frame = mask_and_frame(tissue)
    places = grid_coords(slide.size, plan, pad=True)
    shares = box_fractions(mask, frame, places, plan.size_l0)
    places = places[shares >= 0.5 if (shares >= 0.5).any() else shares > 0]
    count = min(len(places), config.stain_places)
    places = places[np.linspace(0, len(places) - 1, count).round().astype(np.int64)]
    step = max(1, math.ceil(count * _SAMPLE_PX**2 / _MAX_PX))
    found = [np.empty((0, 3), dtype=np.uint8)]
    tile = np.empty((1, _SAMPLE_PX, _SAMPLE_PX, 3), dtype=np.uint8)
    padded = np.pad(mask, ((0, 1), (0, 1)))  # what lies beyond the slide is no tissue
    centres_l0 = (np.arange(_SAMPLE_PX)[:, None] + 0.5) / _SAMPLE_PX * plan.size_l0
    for place in places:
        read_tiles(slide, plan, place[None], tile)
        centres_th = ((place + centres_l0) / frame.downsample_xy).astype(np.int64)
        columns, rows = np.minimum(centres_th, frame.size_th).T
        found.append(tile[0][padded[rows[:, None], columns]][::step])
    return np.concatenate(found)


def _degenerate(where: str, got: str, rule: str) -> InvalidInputError:
    remedy = "leave the slide out, or set stain.stain_norm to 'none'"
    got = f"{got} in {where!r}; {remedy}"
    return InvalidInputError(
        f"stain normalisation must have {rule} the tissue, got {got}"
    )
