"""Pure geometry of reading: resolutions, level choice, and the read plan made once per slide."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinsection.errors import InvalidInputError, MissingMppError, UpsamplingError
from thinsection.types import CoordsL0, CoordsLv, Level, Mpp, Size

# A resolution that differs by less than this is the same one: scanners write 0.2498 for 0.25.
# 0.5 % of a 256 px tile is 1.3 px.
MPP_TOLERANCE = 0.005
_UM_PX_TIMES_POWER = 10.0  # 10x is 1 µm/px by the convention of most scanners


def nominal_mpp(objective_power: float) -> float:
    """The µm/px that an objective power usually means (20x: 0.5). A guess: warn when it is used."""
    if not (objective_power > 0 and math.isfinite(objective_power)):
        raise InvalidInputError(f"objective_power must be > 0, got {objective_power!r}")
    return _UM_PX_TIMES_POWER / objective_power


def nominal_power(mpp: float) -> float:
    """The objective power that a resolution usually means (0.5 µm/px: 20); for file attributes."""
    return _UM_PX_TIMES_POWER / mpp


def positive_number(text: str | None) -> float | None:
    """The number that a file's metadata hold; None where it is none, or not positive and finite."""
    try:
        value = float(text) if text else 0.0
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def mean_mpp(mpp: Mpp | None) -> float | None:
    """One resolution, µm/px, for px that need not be square; None stays None."""
    return None if mpp is None else sum(mpp) / 2


def l0_from_lv(value_lv: float, downsample: float) -> int:
    """Level-0 px of a px position on a level."""
    return round(value_lv * downsample)


def lv_from_l0(value_l0: float, downsample: float) -> int:
    """Px position on a level of a level-0 position; the rule of every reader."""
    return round(value_l0 / downsample)


def origins_lv(coords_l0: CoordsL0, downsample: float) -> CoordsLv:
    """`lv_from_l0` of each tile's corner, int64 (N, 2)."""
    # rint rounds halves to even, as Python's round
    return np.rint(coords_l0 / downsample).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """How each tile of one slide is read; made once, before any work."""

    tile_px: int  # edge of a finished tile, px
    tile_mpp: float | None  # its resolution, µm/px; None: 'native' of a slide that has none
    level: int  # of the pyramid, that is read
    downsample: float  # level-0 px per px of that level
    size_lv: Size  # to read on that level; (tile_px, tile_px) without resampling
    size_l0: Size  # that a tile covers in level-0 px
    stride_l0: tuple[int, int]  # (x, y) from one tile to the next in level-0 px

    @property
    def resamples(self) -> bool:
        """Whether a tile is resized after it was read."""
        return self.size_lv != (self.tile_px, self.tile_px)


def best_level(levels: Sequence[Level], downsample: float) -> Level:
    """The coarsest level that is not coarser than wanted (within `MPP_TOLERANCE`)."""
    fit = [lv for lv in levels if lv.downsample <= downsample * (1 + MPP_TOLERANCE)]
    if not fit:
        raise UpsamplingError(f"downsample must be >= 1, got {downsample:g}")
    return max(fit, key=lambda lv: lv.downsample)


def plan_read(
    levels: Sequence[Level],
    slide_mpp: Mpp | None,
    *,
    tile_px: int,
    tile_mpp: float | None,
    overlap: int = 0,
    slide: str = "slide",
) -> ReadPlan:
    """Chooses level and resampling for tiles of `tile_px` at `tile_mpp`.

    The coarsest level that is not coarser than `tile_mpp` is read and, where it is finer, reduced
    with an anti-aliasing filter.

    Args:
        levels, slide_mpp: of the slide, finest first.
        tile_px: edge of a finished tile, px.
        tile_mpp: its resolution, µm/px; None reads level 0 as it is ('native').
        overlap: px of a finished tile shared with the next one.
        slide: name for messages.

    Raises:
        InvalidInputError: tile_px, tile_mpp or overlap out of range.
        MissingMppError: `tile_mpp` is given and the slide has none.
        UpsamplingError: `tile_mpp` is finer than the slide.
    """
    if tile_px < 1:
        raise InvalidInputError(f"tile_px must be >= 1, got {tile_px}")
    if not 0 <= overlap < tile_px:
        raise InvalidInputError(f"overlap must be in [0, tile_px), got {overlap} of {tile_px}")
    if tile_mpp is None:
        x = y = 1.0
    elif not (tile_mpp > 0 and math.isfinite(tile_mpp)):
        raise InvalidInputError(f"tile_mpp must be > 0, got {tile_mpp!r}")
    elif slide_mpp is None:
        remedy = "add a slide_mpp column to the cohort, or use --tile-mpp native"
        raise MissingMppError(f"slide_mpp is missing in {slide!r}; pass --slide-mpp, {remedy}")
    else:
        x, y = (_ratio(tile_mpp, mpp, slide) for mpp in slide_mpp)
    level = best_level(levels, min(x, y))
    step = tile_px - overlap
    return ReadPlan(
        tile_px=tile_px,
        tile_mpp=mean_mpp(slide_mpp) if tile_mpp is None else tile_mpp,
        level=level.index,
        downsample=level.downsample,
        size_lv=(_lv_px(tile_px, x, level), _lv_px(tile_px, y, level)),
        size_l0=(round(tile_px * x), round(tile_px * y)),
        stride_l0=(max(1, round(step * x)), max(1, round(step * y))),
    )


def _ratio(tile_mpp: float, mpp: float, slide: str) -> float:
    """Level-0 px per tile px along one axis, snapped to a whole number within the tolerance."""
    ratio = tile_mpp / mpp
    if ratio < 1 - MPP_TOLERANCE:
        rule = f">= {mpp:.4g}, got {tile_mpp:g} in {slide!r}"
        raise UpsamplingError(f"tile_mpp must be {rule}; upsampling is not supported")
    nearest = max(1, round(ratio))
    return float(nearest) if abs(ratio / nearest - 1) <= MPP_TOLERANCE else ratio


def _lv_px(tile_px: int, ratio: float, level: Level) -> int:
    """Px to read on the level for one tile edge; exact where the level's resolution is wanted."""
    wanted = ratio / level.downsample
    return tile_px if abs(wanted - 1) <= MPP_TOLERANCE else max(1, round(tile_px * wanted))
