"""Pure geometry of reading: resolutions, level choice, and the read plan made once per slide."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinsection.errors import MissingMppError, UpsamplingError, require
from thinsection.types import CoordsL0, CoordsLv, Level, Mpp, PointL0, Size

# What differs by less is the same number, written otherwise: 0.2498 for 0.25 µm/px, a level of 1999
# px for one of 2000. 0.5 % of a 256 px tile is 1.3 px.
ROUNDING = 0.005
# A level may have 2 m along a side and 26 x 26 cm in all, at 0.25 µm/px. A file that declares more
# is damaged, and would ask for memory and time without end.
MAX_SIDE_PX = 1 << 23
MAX_PX = 1 << 40
MAX_MPP = 20.0  # µm/px; the macro of a slide has about 25
_UM_PER_INCH = 25_400.0
_UM_PX_TIMES_POWER = 10.0  # 10x is 1 µm/px by the convention of most scanners


def nominal_mpp(objective_power: float) -> float:
    """The µm/px that an objective power usually means (20x: 0.5). A guess: warn when it is used."""
    known = 0 < objective_power < math.inf
    require(known, "objective_power must be > 0", repr(objective_power))
    return _UM_PX_TIMES_POWER / objective_power


def nominal_power(mpp: float) -> float:
    """The objective power that a resolution usually means (0.5 µm/px: 20); for file attributes."""
    return _UM_PX_TIMES_POWER / mpp


def positive_number(text: str | None) -> float | None:
    """The number that a file's metadata hold; None where it is none, or not positive and finite.

    Scanners in some countries write a decimal comma: '0,4990'.
    """
    try:
        value = float(text.replace(",", ".")) if text else 0.0
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def mean_mpp(mpp: Mpp | None) -> float | None:
    """One resolution, µm/px, for px that need not be square; None stays None."""
    return None if mpp is None else sum(mpp) / 2


def believed_mpp(mpp: Mpp | None) -> tuple[Mpp | None, str]:
    """What a file says of its resolution, or None and a sentence where no slide has that.

    Programs that know none write 72, 96 or 300 dpi: 352.8, 264.6 or 84.67 µm/px.
    """
    if mpp is None or max(mpp) <= MAX_MPP:
        return mpp, ""
    dpi = round(_UM_PER_INCH / max(mpp))
    said = f"the file says {max(mpp):.4g} µm/px ({dpi} dpi)"
    return None, f"{said}, which no slide has: taken as missing"


def l0_from_lv(value_lv: float, downsample: float) -> int:
    """Level-0 px of a px position on a level."""
    return round(value_lv * downsample)


def corner_l0(level: Level, x_lv: float, y_lv: float) -> PointL0:
    """The level-0 px of a point of a level."""
    return (l0_from_lv(x_lv, level.downsample), l0_from_lv(y_lv, level.downsample))


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
    tile_mpp: (
        float | None
    )  # its true resolution, µm/px; None: 'native' of a slide without one
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
    """The coarsest level that is not coarser than wanted (within `ROUNDING`)."""
    fit = [lv for lv in levels if lv.downsample <= downsample * (1 + ROUNDING)]
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
    mpp_tolerance: float = ROUNDING,
    slide: str = "slide",
    hint: str = "",
) -> ReadPlan:
    """Chooses level and resampling for tiles of `tile_px` at `tile_mpp`.

    The level that is nearest to `tile_mpp`, within the tolerance, is read as it is, and `tile_mpp`
    of the plan is then that level's. Where there is none, the coarsest level that is finer is
    reduced with an anti-aliasing filter.

    Args:
        levels, slide_mpp: of the slide, finest first.
        tile_px, tile_mpp: of a finished tile; None reads level 0 as it is ('native').
        overlap: px of a finished tile shared with the next one.
        mpp_tolerance: relative difference that counts as none; rounding always does.
        slide, hint: name, and what is known of a missing mpp, for messages.

    Raises:
        InvalidInputError: tile_px, tile_mpp or overlap out of range.
        MissingMppError: `tile_mpp` is given and the slide has none.
        UpsamplingError: `tile_mpp` is finer than the slide.
    """
    require(tile_px >= 1, "tile_px must be >= 1", tile_px)
    fits = 0 <= overlap < tile_px
    require(fits, "overlap must be in [0, tile_px)", f"{overlap} of {tile_px}")
    known = tile_mpp is None or 0 < tile_mpp < math.inf
    require(known, "tile_mpp must be > 0", repr(tile_mpp))
    if tile_mpp is None:
        x = y = 1.0
    elif slide_mpp is None:
        remedy = "add a slide_mpp column to the cohort, or use --tile-mpp native"
        what = f"slide_mpp is missing in {slide!r}{f' ({hint})' if hint else ''}"
        raise MissingMppError(f"{what}; pass --slide-mpp, {remedy}")
    else:
        tolerance = max(mpp_tolerance, ROUNDING) + 1e-9  # 0.525 is 5 % more than 0.5
        x, y = _ratios(levels, slide_mpp, tile_mpp, tolerance, slide)
    level, step, mpp = best_level(levels, min(x, y)), tile_px - overlap, None
    if slide_mpp is not None:
        mpp = (x * slide_mpp[0] + y * slide_mpp[1]) / 2
        mpp = (
            tile_mpp if tile_mpp and math.isclose(mpp, tile_mpp, rel_tol=1e-9) else mpp
        )
    return ReadPlan(
        tile_px=tile_px,
        tile_mpp=mpp,
        level=level.index,
        downsample=level.downsample,
        size_lv=(_lv_px(tile_px, x, level), _lv_px(tile_px, y, level)),
        size_l0=(round(tile_px * x), round(tile_px * y)),
        stride_l0=(max(1, round(step * x)), max(1, round(step * y))),
    )


def _ratios(
    levels: Sequence[Level],
    slide_mpp: Mpp,
    tile_mpp: float,
    tolerance: float,
    slide: str,
) -> tuple[float, float]:
    """Level-0 px per tile px along x and y: a level's own where one is near enough."""
    off = [
        max(abs(m * lv.downsample / tile_mpp - 1) for m in slide_mpp) for lv in levels
    ]
    nearest = min(range(len(levels)), key=off.__getitem__)
    if off[nearest] <= tolerance:
        down = _whole(levels[nearest].downsample)
        return down, down
    if (coarsest := max(slide_mpp)) > tile_mpp * (1 + tolerance):
        rule = f">= {coarsest:.4g}, got {tile_mpp:g} in {slide!r}"
        remedy = f"ask for --tile-mpp {coarsest:.4g} or native, or for a higher --mpp-tolerance"
        raise UpsamplingError(
            f"tile_mpp must be {rule}; upsampling is not supported: {remedy}"
        )
    x, y = (_whole(max(1.0, tile_mpp / mpp)) for mpp in slide_mpp)
    return x, y


def _whole(ratio: float) -> float:
    """The ratio, or the whole number that it is but for rounding."""
    nearest = max(1, round(ratio))
    return float(nearest) if abs(ratio / nearest - 1) <= ROUNDING else ratio


def _lv_px(tile_px: int, ratio: float, level: Level) -> int:
    """Px to read on the level for one tile edge; exact where the level's resolution is wanted."""
    wanted = ratio / level.downsample
    return tile_px if abs(wanted - 1) <= ROUNDING else max(1, round(tile_px * wanted))
