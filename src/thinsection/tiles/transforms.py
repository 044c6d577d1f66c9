"""Stain normalisation of tiles between reading and encoding; off by default.

The stain statistics of a slide are estimated once, from tissue pixels at a stated resolution.
Every tile is then mapped, pixel by pixel, to the statistics of the target, so that differently
stained slides look alike to the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, assert_never

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, get_namespace
from thinsection.config import option
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc.own_tissue import AnyTissue, Tissue, as_tissue
from thinsection.qc.tissue import box_fractions, tissue_mask
from thinsection.slide import Slide, open_slide
from thinsection.slide.geometry import ROUNDING, plan_read
from thinsection.slide.resize import read_tiles
from thinsection.tiles.grid import grid_coords, mask_and_frame
from thinsection.types import CoordsL0, MaskArray, MaskFrame, Size, TileArray

TileTransform = Callable[[TileArray], TileArray]  # uint8 (B, H, W, 3), changed in place
Px = npt.NDArray[np.uint8]  # (n, 3)
Vector = tuple[float, ...]

# edge of each field that is read for the estimate, px
_SAMPLE_PX = 256
# largest number of pixels for an estimate, spread over all fields
_MAX_PX = 1 << 20
# Pixels that are mapped in one step, so that their float32 values stay in a core's cache.
_CHUNK_PX = 1 << 15
# limit far above the brightest pixel; a map between very similar stains may exceed it
_MAX_LOG = 12.0
# Brightness of glass without tissue, of 255.
_WHITE = 240.0
# Pixels with a lower density in some channel are glass.
_MIN_DENSITY = 0.15
# smallest angle between two stains; H&E has about 20 degrees, noise of a single stain 1 to 3
_MIN_ANGLE_DEG = 4.0
# smallest number of tissue pixels for an estimate
_MIN_PX = 256
# smallest standard deviation along a colour axis; real slides have 0.02 to 0.6
_MIN_SPREAD = 1e-3

_LMS_FROM_RGB = np.array(
    [
        [0.3811, 0.5783, 0.0402],
        [0.1967, 0.7244, 0.0782],
        [0.0241, 0.1288, 0.8444],
    ]
)
_AXES_FROM_LMS = np.array([[1, 1, 1], [1, 1, -2], [1, -1, 0]]) / np.sqrt(
    [[3], [6], [2]]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StainConfig:
    """Settings of stain normalisation."""

    stain_norm: Literal["none", "macenko", "reinhard"] = option(
        "none", "Stain normalisation of the tiles before they are encoded.", daily=True
    )
    stain_reference: str | None = option(
        None,
        "Image or slide with the stain to which tiles are normalised. [default: a "
        "published standard]",
    )
    stain_mpp: float = option(
        1.0, "Resolution in µm/px at which the stain of a slide is estimated."
    )
    stain_places: int = option(
        64,
        "Number of fields of 256 x 256 px in the tissue from which the stain is "
        "estimated.",
    )

    def __post_init__(self) -> None:
        if not 0 < self.stain_mpp < math.inf:
            raise ConfigError(f"stain.stain_mpp must be > 0, got {self.stain_mpp}")
        if self.stain_places < 1:
            raise ConfigError(
                f"stain.stain_places must be >= 1, got {self.stain_places}"
            )
        if self.stain_norm == "none" and self.stain_reference is not None:
            raise ConfigError(
                "stain.stain_reference must be combined with a method, got "
                f"{self.stain_reference!r} and 'none'; set stain.stain_norm"
            )


@dataclass(frozen=True, kw_only=True)
class StainTransform:
    """Map of uint8 pixels I, in place: M⁻¹ exp(A log(M (I + offset)) + b). Thread-safe."""

    # A, (3, 3); None: tiles are not changed
    matrix: npt.NDArray[np.float64] | None = None
    # b, (3,)
    shift: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    # added to a channel before the logarithm; sums below 1 count as 1
    offset: float = 0.0
    # M, (3, 3); None: the identity
    mix: npt.NDArray[np.float64] | None = None
    # reason why tiles are not changed; None if they are changed
    warning: str | None = None
    # arrays of a device; use `replace` to change the device
    ns: ArrayNamespace = field(default_factory=get_namespace)

    def __call__(self, tiles: TileArray) -> TileArray:
        """Changes the colours of tiles (B, H, W, 3) and returns the same array.

        The result equals float64 arithmetic, except that pixels within 1e-3 of the middle between
        two values may differ by 1.

        Memory: 1.5 MiB per thread, independent of the size of the tiles.
        """
        is_rgb = tiles.dtype == np.uint8 and tiles.shape[-1] == 3
        if not is_rgb or not tiles.flags.c_contiguous:
            raise InvalidInputError(
                f"tiles must be contiguous uint8 (B, H, W, 3), "
                f"got {tiles.dtype} {tiles.shape}"
            )
        if self.matrix is None:
            return tiles
        xp = self.ns.xp
        matrix = xp.asarray(self.matrix.T, dtype=xp.float32)
        shift = xp.asarray(self.shift, dtype=xp.float32)
        mix = None
        unmix = None
        if self.mix is not None:
            mix = xp.asarray(self.mix.T, dtype=xp.float32)
            unmix = xp.linalg.inv(mix)
        px = tiles.reshape(-1, 3)
        for start in range(0, len(px), _CHUNK_PX):
            chunk = px[start : start + _CHUNK_PX]
            values = _log(xp, chunk.astype(xp.float32), self.offset, mix) @ matrix
            values += shift
            xp.minimum(values, _MAX_LOG, out=values)
            xp.exp(values, out=values)
            if unmix is not None:
                values = values @ unmix
            xp.rint(values, out=values)
            xp.clip(values, 0, 255, out=values)
            chunk[...] = values.astype(xp.uint8)
        return tiles


def _log(xp: Array, values: Array, offset: float, mix: Array | None) -> Array:
    """Computes log(M (I + offset)) of pixels (n, 3), which are overwritten."""
    values += offset
    xp.maximum(values, 1.0, out=values)
    if mix is not None:
        values = values @ mix
    return xp.log(values, out=values)


# names of the values of `StainVectors` in a slide's facts and in tables
STAIN_COLUMNS = (
    "macenko_hematoxylin_red",
    "macenko_hematoxylin_green",
    "macenko_hematoxylin_blue",
    "macenko_eosin_red",
    "macenko_eosin_green",
    "macenko_eosin_blue",
    "macenko_hematoxylin_strength",
    "macenko_eosin_strength",
)


@dataclass(frozen=True, slots=True)
class StainVectors:
    """Two stains as optical densities of R, G, B per unit of stain, and their strengths."""

    hematoxylin: Vector  # length about 1
    eosin: Vector
    strengths: Vector  # 99th percentile of the amount of each stain

    @classmethod
    def estimate(cls, px: Px, slide: str) -> StainVectors:
        """Estimates the stains of pixels (n, 3) from the angles of their optical densities.

        Source: Macenko et al., A method for normalizing histology slides for
            quantitative analysis, ISBI 2009; alpha 1, beta 0.15 and white 240 as in its
            common implementations.
        """
        density = -np.log((px.astype(np.float64) + 1.0) / _WHITE)
        density = density[(density >= _MIN_DENSITY).all(axis=1)]
        if len(density) < _MIN_PX:
            raise _degenerate(
                slide, f"{len(density)} stained pixels", f">= {_MIN_PX} of"
            )
        _, axes = np.linalg.eigh(np.cov(density.T))
        # the two axes with the largest variance, the larger one first; their signs are arbitrary
        plane = axes[:, :0:-1]
        plane = plane * np.where(plane.sum(axis=0) < 0, -1.0, 1.0)
        along, across = (density @ plane).T
        low, high = np.percentile(np.arctan2(across, along), (1, 99))
        angle_deg = math.degrees(high - low)
        if angle_deg < _MIN_ANGLE_DEG:
            raise _degenerate(slide, f"hues {angle_deg:.1f}° apart", "two stains in")
        ends = [plane @ (math.cos(angle), math.sin(angle)) for angle in (low, high)]
        # hematoxylin absorbs more red
        hematoxylin, eosin = sorted(ends, key=lambda vector: -vector[0])
        unmixing = np.linalg.pinv(np.stack([hematoxylin, eosin], axis=1))
        strengths = np.percentile(density @ unmixing.T, 99, axis=0)
        if strengths.min() <= 0:
            raise _degenerate(
                slide, f"amounts of {strengths.tolist()}", "two stains in"
            )
        return cls(
            hematoxylin=tuple(hematoxylin.tolist()),
            eosin=tuple(eosin.tolist()),
            strengths=tuple(strengths.tolist()),
        )

    def transform_to(self, target: StainVectors) -> StainTransform:
        """Map from these stain statistics to those of the target."""
        amounts = np.linalg.pinv(np.stack([self.hematoxylin, self.eosin], axis=1))
        scaled = amounts * np.divide(target.strengths, self.strengths)[:, None]
        matrix = np.stack([target.hematoxylin, target.eosin], axis=1) @ scaled
        # log(I / white) becomes matrix @ log(I / white); the white moves into the shift
        shift = math.log(_WHITE) * (1.0 - matrix.sum(axis=1))
        return StainTransform(matrix=matrix, shift=shift, offset=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColourMoments:
    """Mean and standard deviation along the axes l, α and β.

    The axes are light, yellow-blue and red-green.
    """

    mean: Vector
    spread: Vector

    @classmethod
    def estimate(cls, px: Px, slide: str) -> ColourMoments:
        """Estimates the moments of pixels (n, 3).

        Source: Reinhard et al., Color transfer between images, 2001; the axes are those
            of Ruderman et al., Statistics of cone responses to natural images, 1998.
        """
        if len(px) < _MIN_PX:
            raise _degenerate(slide, f"{len(px)} px", f">= {_MIN_PX} px of")
        lms = _log(np, px.astype(np.float64), 0.0, _LMS_FROM_RGB.T)
        axes = lms @ _AXES_FROM_LMS.T
        mean = axes.mean(axis=0)
        spread = axes.std(axis=0)
        if spread.min() < _MIN_SPREAD:
            raise _degenerate(
                slide, f"spreads of {spread.round(5).tolist()}", "several colours in"
            )
        return cls(mean=tuple(mean.tolist()), spread=tuple(spread.tolist()))

    def transform_to(self, target: ColourMoments) -> StainTransform:
        """Map from these stain statistics to those of the target."""
        ratio = np.divide(target.spread, self.spread)
        lms_from_axes = np.linalg.inv(_AXES_FROM_LMS)
        matrix = lms_from_axes @ (ratio[:, None] * _AXES_FROM_LMS)
        shift = lms_from_axes @ (np.array(target.mean) - ratio * self.mean)
        return StainTransform(matrix=matrix, shift=shift, mix=_LMS_FROM_RGB)


def _degenerate(slide: str, value: str, rule: str) -> InvalidInputError:
    return InvalidInputError(
        f"stain normalisation must have {rule} the tissue, got {value} in {slide!r}; remove the "
        "slide from the run, or set stain.stain_norm to 'none'"
    )


StainStatistics = StainVectors | ColourMoments

# Macenko: the reference of mitkovetta/staining-normalization, which its Python ports also
# use. Reinhard: TCGA-A2-A3XS-DX1 of Amgad et al. 2019, which the tests of HistomicsTK
# use.
STANDARDS: dict[str, StainStatistics] = {
    "macenko": StainVectors(
        hematoxylin=(0.5626, 0.7201, 0.4062),
        eosin=(0.2159, 0.8012, 0.5581),
        strengths=(1.9705, 1.0308),
    ),
    "reinhard": ColourMoments(
        mean=(8.74108109, -0.12440419, 0.0444982),
        spread=(0.6135447, 0.10989545, 0.0286032),
    ),
}


def fit_stain(
    slide: Slide,
    tissue: AnyTissue | None,
    config: StainConfig,
    *,
    target: StainStatistics | None = None,
) -> StainTransform:
    """Fits the map from the slide's stain statistics to those of the target; it is deterministic.

    For a slide without tissue, the map changes nothing and has a `warning`.

    Args:
        slide: opened slide.
        tissue: as for `tile_grid`; None uses the whole slide.
        config: method, and how the slide is sampled.
        target: result of `stain_target`, to compute it only once for many slides.

    Memory: at most 40 MiB for 2**20 px, beside that of the reader.

    Raises:
        InvalidInputError: the tissue has only one stain, or none, such as on a grey slide.
        SlideReadError: a sampled field cannot be decoded.
    """
    if config.stain_norm == "none":
        return StainTransform()
    within = None if tissue is None else as_tissue(slide, tissue)
    px = sample_px(slide, within, config)
    if len(px) == 0:
        return StainTransform(
            warning="no tissue to estimate the stains from, so tiles are not changed"
        )
    target = target or stain_target(config)
    if isinstance(target, StainVectors):
        return StainVectors.estimate(px, slide.slide_path).transform_to(target)
    if isinstance(target, ColourMoments):
        return ColourMoments.estimate(px, slide.slide_path).transform_to(target)
    assert_never(target)


def stain_target(config: StainConfig) -> StainStatistics:
    """The target stain statistics: a published standard, or those of a reference slide.

    Raises:
        SlideOpenError: the reference cannot be opened.
        InvalidInputError: no method is set, or the reference does not have two stains.
    """
    standard = STANDARDS.get(config.stain_norm)
    if standard is None:
        raise InvalidInputError(
            f"stain_norm must be a method, got {config.stain_norm!r}"
        )
    if config.stain_reference is None:
        return standard
    with open_slide(config.stain_reference) as slide:
        px = sample_px(slide, tissue_mask(slide), config)
    return type(standard).estimate(px, config.stain_reference)


def sample_px(slide: Slide, tissue: Tissue | None, config: StainConfig) -> Px:
    """Samples tissue pixels, uint8 (n, 3), from fields that are spread evenly over the tissue.

    At most 2**20 pixels are sampled. They are read at `stain_mpp`, or at level 0 if level 0 is
    coarser or has no mpp.
    """
    finest_mpp = max(slide.slide_mpp) if slide.slide_mpp else math.inf
    reads_mpp = config.stain_mpp >= finest_mpp * (1 - ROUNDING)
    plan = plan_read(
        slide.levels,
        slide.slide_mpp,
        tile_px=_SAMPLE_PX,
        tile_mpp=config.stain_mpp if reads_mpp else None,
    )
    if tissue is None:
        frame = MaskFrame(size_th=(1, 1), size_l0=slide.size)
        tissue = (np.ones((1, 1), dtype=bool), frame)
    mask, frame = mask_and_frame(tissue)
    coords_l0 = grid_coords(slide.size, plan, pad=True)
    places = _spread_places(
        mask, frame, coords_l0, plan.size_l0, most=config.stain_places
    )
    step = max(1, math.ceil(len(places) * _SAMPLE_PX**2 / _MAX_PX))
    samples = [np.empty((0, 3), dtype=np.uint8)]
    tile = np.empty((1, _SAMPLE_PX, _SAMPLE_PX, 3), dtype=np.uint8)
    # pixels beyond the slide fall on an added row and column, which are not tissue
    padded_mask = np.pad(mask, ((0, 1), (0, 1)))
    centres_l0 = (np.arange(_SAMPLE_PX)[:, None] + 0.5) / _SAMPLE_PX * plan.size_l0
    for place in places:
        read_tiles(slide, plan, place[None], tile)
        centres_th = ((place + centres_l0) / frame.downsample_xy).astype(np.int64)
        columns, rows = np.minimum(centres_th, frame.size_th).T
        in_tissue = padded_mask[rows[:, None], columns]
        samples.append(tile[0][in_tissue][::step])
    return np.concatenate(samples)


def _spread_places(
    mask: MaskArray, frame: MaskFrame, coords_l0: CoordsL0, size_l0: Size, *, most: int
) -> CoordsL0:
    """Evenly spread fields that are at least half tissue; if none is, fields with any tissue."""
    shares = box_fractions(mask, frame, coords_l0, size_l0)
    mostly_tissue = shares >= 0.5
    places = coords_l0[mostly_tissue if mostly_tissue.any() else shares > 0]
    count = min(len(places), most)
    return places[np.linspace(0, len(places) - 1, count).round().astype(np.int64)]
