"""Pure geometry of reading: units, resolutions, choice of a level, and the read plan of a slide.

Coordinate systems, by suffix of a name: `_l0` px of level 0, `_lv` px of a pyramid level, `_tl` px
of a finished tile.
"""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinsection.errors import InvalidInputError, MissingMppError, UpsamplingError
from thinsection.types import CoordsL0, CoordsLv, Level, Mpp, PointL0, Size

# Numbers that differ by a smaller share count as equal: 0.2498 and 0.25 µm/px, or levels of 1999
# and 2000 px. 0.5 % of a 256 px tile is 1.3 px.
ROUNDING = 0.005
# Largest side and largest area of a level: 2 m, and 26 x 26 cm, at 0.25 µm/px. A file that declares
# more is damaged, and would ask for endless memory and time.
MAX_SIDE_PX = 1 << 23
MAX_PX = 1 << 40
MAX_MPP = 20.0  # µm/px; the macro of a slide has about 25
MIN_MPP = 0.01  # µm/px; light resolves .2 µm
_MAX_MPP_RATIO = 4.0  # largest ratio of the µm/px along the two axes
_UM_PX_TIMES_POWER = 10.0  # 10x is 1 µm/px by the convention of most scanners
_EXACT = 1e-9  # relative difference that is only floating-point error


def nominal_mpp(objective_power: float) -> float:
    """Returns the µm/px that an objective power usually means: 0.5 for 20x.

    It is a guess, so a caller that uses it must warn.
    """
    if not 0 < objective_power < math.inf:
        raise InvalidInputError(f"objective_power must be > 0, got {objective_power!r}")
    return _UM_PX_TIMES_POWER / objective_power


def nominal_power(mpp: float) -> float:
    """Returns the objective power that a resolution usually means: 20 for 0.5 µm/px."""
    return _UM_PX_TIMES_POWER / mpp


def positive_number(text: str | None) -> float | None:
    """Parses a number of a file's metadata; None if it is no number, not positive or not finite.

    Scanners in some countries write a decimal comma: '0,4990'.
    """
    if not text:
        return None
    try:
        value = float(text.replace(",", "."))
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def mean_mpp(mpp: Mpp | None) -> float | None:
    """Returns the mean resolution of both axes, µm/px; None stays None."""
    return None if mpp is None else sum(mpp) / 2


def plausible_mpp(mpp: Mpp | None) -> tuple[Mpp | None, str]:
    """Returns a file's resolution and '', or None and a note if no slide has such a resolution.

    Programs without a known resolution write 72, 96 or 300 dpi: 352.8, 264.6 or 84.67 µm/px.
    """
    if mpp is None:
        return None, ""
    doubt = ""
    if max(mpp) > MAX_MPP:
        dpi = round(UM_PER_INCH / max(mpp))
        doubt = f"{max(mpp):.4g} µm/px ({dpi} dpi)"
    elif min(mpp) < MIN_MPP or max(mpp) > _MAX_MPP_RATIO * min(mpp):
        doubt = f"{mpp[0]:.4g} x {mpp[1]:.4g} µm/px"
    if not doubt:
        return mpp, ""
    note = (
        f"the file states {doubt}, which is not possible for a slide, so its resolution counts as "
        "missing"
    )
    return None, note


def l0_from_lv(value_lv: float, downsample: float) -> int:
    """Converts a position on a level to level-0 px."""
    return round(value_lv * downsample)


def corner_l0(level: Level, x_lv: float, y_lv: float) -> PointL0:
    """Converts a point of a level to level-0 px."""
    return (l0_from_lv(x_lv, level.downsample), l0_from_lv(y_lv, level.downsample))


def lv_from_l0(value_l0: float, downsample: float) -> int:
    """Converts a level-0 position to px of a level; every reader rounds by this rule."""
    return round(value_l0 / downsample)


def origins_lv(coords_l0: CoordsL0, downsample: float) -> CoordsLv:
    """Applies `lv_from_l0` to the corner of each tile, int64 (N, 2)."""
    # rint rounds halves to even, as Python's round does
    return np.rint(coords_l0 / downsample).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """Plan of how each tile of one slide is read; made once, before any work.

    Attributes:
        tile_px: edge of a finished tile, px.
        tile_mpp: true resolution of a finished tile, µm/px; None if that of the slide is missing.
        level: index of the pyramid level that is read.
        downsample: level-0 px per px of that level.
        size_lv: px of that level that a tile covers; (tile_px, tile_px) without resampling.
        size_l0: level-0 px that a tile covers.
        stride_l0: (x, y) distance from one tile to the next, level-0 px.
    """

    tile_px: int
    tile_mpp: float | None
    level: int
    downsample: float
    size_lv: Size
    size_l0: Size
    stride_l0: tuple[int, int]

    @property
    def resamples(self) -> bool:
        """True if a tile is resized after it was read."""
        return self.size_lv != (self.tile_px, self.tile_px)


def best_level(levels: Sequence[Level], downsample: float) -> Level:
    """Returns the coarsest level whose downsample is at most `downsample`, within `ROUNDING`."""
    limit = downsample * (1 + ROUNDING)
    fine_enough = [level for level in levels if level.downsample <= limit]
    if not fine_enough:
        raise UpsamplingError(f"downsample must be >= 1, got {downsample:g}")
    return max(fine_enough, key=lambda level: level.downsample)


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

    If a level has `tile_mpp` within the tolerance, the nearest such level is read without
    resampling, and `tile_mpp` of the plan is the resolution of that level. If there is none, the
    coarsest finer level is read and reduced with an anti-aliasing filter.

    Args:
        levels: levels of the slide, finest first.
        slide_mpp: (x, y) µm per level-0 px, or None if it is missing.
        tile_px: edge of a finished tile, px.
        tile_mpp: wanted resolution, µm/px; None reads level 0 without resampling ('native').
        overlap: overlap of neighbouring finished tiles, px.
        mpp_tolerance: relative difference of two resolutions that counts as equal, at least
            `ROUNDING`.
        slide: name of the slide, for messages.
        hint: reason why the resolution may be missing, for messages.

    Raises:
        InvalidInputError: tile_px, tile_mpp or overlap out of range.
        MissingMppError: `tile_mpp` is given, and `slide_mpp` is missing.
        UpsamplingError: `tile_mpp` is finer than the slide.
    """
    if tile_px < 1:
        raise InvalidInputError(f"tile_px must be >= 1, got {tile_px}")
    if not 0 <= overlap < tile_px:
        raise InvalidInputError(
            f"overlap must be in [0, tile_px), got {overlap} of {tile_px}"
        )
    if tile_mpp is not None and not 0 < tile_mpp < math.inf:
        raise InvalidInputError(f"tile_mpp must be > 0, got {tile_mpp!r}")
    if tile_mpp is None:
        x_ratio = 1.0
        y_ratio = 1.0
    elif slide_mpp is None:
        reason = f" ({hint})" if hint else ""
        raise MissingMppError(
            f"slide_mpp is missing in {slide!r}{reason}; pass slide_mpp=..., add a slide_mpp "
            'column to the cohort, or use tile_mpp="native"'
        )
    else:
        # with `_EXACT`, 0.525 is within 5 % of 0.5 in spite of rounding errors
        tolerance = max(mpp_tolerance, ROUNDING) + _EXACT
        x_ratio, y_ratio = _ratios(levels, slide_mpp, tile_mpp, tolerance, slide)
    level = best_level(levels, min(x_ratio, y_ratio))
    stride_tl = tile_px - overlap
    true_mpp = None
    if slide_mpp is not None:
        true_mpp = (x_ratio * slide_mpp[0] + y_ratio * slide_mpp[1]) / 2
        if tile_mpp is not None and math.isclose(true_mpp, tile_mpp, rel_tol=_EXACT):
            true_mpp = tile_mpp
    return ReadPlan(
        tile_px=tile_px,
        tile_mpp=true_mpp,
        level=level.index,
        downsample=level.downsample,
        size_lv=(_lv_px(tile_px, x_ratio, level), _lv_px(tile_px, y_ratio, level)),
        size_l0=(round(tile_px * x_ratio), round(tile_px * y_ratio)),
        stride_l0=(round(stride_tl * x_ratio), round(stride_tl * y_ratio)),
    )


def _ratios(
    levels: Sequence[Level],
    slide_mpp: Mpp,
    tile_mpp: float,
    tolerance: float,
    slide: str,
) -> tuple[float, float]:
    """Returns level-0 px per tile px along x and y.

    If a level has the wanted resolution within the tolerance, this is the downsample of that level.
    """
    nearest = min(levels, key=lambda level: _mpp_error(level, slide_mpp, tile_mpp))
    if _mpp_error(nearest, slide_mpp, tile_mpp) <= tolerance:
        ratio = _whole_if_near(nearest.downsample)
        return (ratio, ratio)
    coarser_axis_mpp = max(slide_mpp)
    if coarser_axis_mpp > tile_mpp * (1 + tolerance):
        raise UpsamplingError(
            f"tile_mpp must be >= {coarser_axis_mpp:.4g}, got {tile_mpp:g} in {slide!r}; "
            f"upsampling is not supported: pass tile_mpp={coarser_axis_mpp:.4g} or native, or "
            "a higher mpp_tolerance=..."
        )
    x_mpp, y_mpp = slide_mpp
    return (
        _whole_if_near(max(1.0, tile_mpp / x_mpp)),
        _whole_if_near(max(1.0, tile_mpp / y_mpp)),
    )


def _mpp_error(level: Level, slide_mpp: Mpp, tile_mpp: float) -> float:
    """Returns the relative difference of a level's resolution from `tile_mpp`; the larger axis."""
    return max(abs(mpp * level.downsample / tile_mpp - 1) for mpp in slide_mpp)


def _whole_if_near(ratio: float) -> float:
    """Returns the ratio, or the nearest whole number if they are equal within `ROUNDING`."""
    nearest = round(ratio)  # at least 1, because ratios are at least 1
    return float(nearest) if abs(ratio / nearest - 1) <= ROUNDING else ratio


def _lv_px(tile_px: int, ratio: float, level: Level) -> int:
    """Returns the px of the level that the edge of a tile covers.

    It is `tile_px` if the level has the wanted resolution, so that nothing is resampled.
    """
    lv_px_per_tile_px = ratio / level.downsample
    if abs(lv_px_per_tile_px - 1) <= ROUNDING:
        return tile_px
    return round(tile_px * lv_px_per_tile_px)


UM_PER_INCH = 25_400.0
# µm per unit, by the names that files use, in lower case and without a plural s
_UM_PER_UNIT: dict[str, float] = {}
for _um, _names in {
    1e6: "m meter metre",
    1e5: "dm decimeter decimetre",
    1e4: "cm centimeter centimetre",
    1e3: "mm millimeter millimetre",
    1.0: "um μm micron micrometer micrometre",
    1e-3: "nm nanometer nanometre",
    1e-4: "å angstrom ångström ångstrom",
    1e-6: "pm picometer picometre",
    UM_PER_INCH: 'in inch inche "',
}.items():
    _UM_PER_UNIT |= dict.fromkeys(_names.split(), _um)
# µm per unit, by the number of TIFF's ResolutionUnit: inch, cm
_OF_RESOLUTION_UNIT = {2: UM_PER_INCH, 3: 1e4}
_HUGE = ("Mm", "Pm")  # megametre and petametre of OME, not to be read as mm and pm


def um_per_unit(unit: str | int | None) -> float | None:
    r"""Returns µm per unit of length; None for no unit of length ('pixel', 'reference frame').

    Args:
        unit: a name in any capitals, its plural, the sign of µ or Å in any of its Unicode forms,
            ImageJ's '\\u00B5m'; or the number of a TIFF's ResolutionUnit.
    """
    if unit is None:
        return None
    if isinstance(unit, int):
        return _OF_RESOLUTION_UNIT.get(unit)
    if unit.strip() in _HUGE:
        return None
    # the micro sign becomes the Greek letter, the ångström sign the letter Å
    name = unicodedata.normalize("NFKC", unit.replace("\\u00B5", "\u00b5"))
    name = name.strip().strip("\0").casefold()
    return _UM_PER_UNIT.get(name) or _UM_PER_UNIT.get(name.removesuffix("s"))
