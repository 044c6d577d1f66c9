"""Finds the printed dots of a frame on the glass, as around the capture areas of Visium slides.

They are round, of one size, and lie in straight rows with equal steps. Measured on three pictures
of others, the dots are about 105 µm wide, and 140 to 146 µm apart.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace, morphology
from thinsection.arrays.filters import box_mirrored
from thinsection.arrays.labels import RunRegions

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_Regions = RunRegions | morphology.LabelledRegions

# A dot is darker than the mean of a window of this edge, which holds about one dot.
_WINDOW_UM = 150.0
# Diameters of dots. The cores of a tissue microarray are wider. In smaller dots than so many px, a
# circle is not told from other shapes.
_LEAST_UM = 40.0
_MOST_UM = 170.0
_LEAST_PX = 2.5
# A dot is at most so many times as long as wide, and has at least this part of the area of the
# ellipse with its spread.
_LENGTH = 1.7
_FILLED = 0.85
# Neighbours have diameters that differ by at most this factor, and centres that are at most so many
# diameters apart.
_ONE_SIZE = 1.4
_STEP = 2.8
# Dots whose neighbours are searched together.
_BLOCK = 128
# A row: this many dots. Each step differs from the one before by at most a part of its length, and
# all steps together lead nearly straight from the first dot to the last.
_ROW = 10
_EQUAL = 0.2
_STRAIGHT = 0.98
# On a slide with such a row, shorter rows of dots of the same size are print, too: tissue may cover
# the rest of them.
_SHORT_ROW = 4
# Dots of the same size are of the frame too, if the gap to a dot of a row, or to one that is joined
# to it in this way, is at most so many diameters.
_GAP = 1.0
# What a dot's blurred rim adds on each side.
_RIM_UM = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dots:
    """Round pieces that may be dots."""

    number: _Indices  # number of the region, (N,)
    place: _Floats  # centre: y, x, px (N, 2)
    diameter: _Floats  # px (N,)

    def chosen(self, keep: _Bools) -> "_Dots":
        return _Dots(
            number=self.number[keep],
            place=self.place[keep],
            diameter=self.diameter[keep],
        )


def find_printed_dots(
    ns: ArrayNamespace, density: Array, stained: Array, px_um: float
) -> Array:
    """The mask of printed dots, with their rims; empty if there is no row of ten dots.

    Args:
        ns: device.
        density: smooth density relative to glass, float32 (H, W).
        stained: bool (H, W); dots lie only here.
        px_um: µm per px.

    Memory: 10 bytes per px, and about 1 kB for each round piece.
    """
    edge_px = max(5, 2 * round((_WINDOW_UM / px_um - 1) / 2) + 1)
    spots = stained & (density > box_mirrored(ns, density, edge_px))
    regions = morphology.regions_of(ns, spots, connectivity=8)
    dots = _round_pieces(ns.download(regions.moments()), px_um)
    in_row = _in_rows(dots, _ROW)
    if not in_row.any():
        return ns.xp.zeros_like(stained)
    usual = np.median(dots.diameter[in_row])
    dots = dots.chosen(_is_one_size(dots.diameter / usual))
    rows = _shown(ns, regions, dots.number[_in_rows(dots, _SHORT_ROW)])
    printed = _shown(ns, regions, dots.number)
    joined = morphology.dilated_by_disk(ns, printed, max(1.0, _GAP / 2 * float(usual)))
    printed &= morphology.mostly(ns, joined, rows, 0.0)
    return morphology.dilated_by_disk(ns, printed, max(1.0, _RIM_UM / px_um))


def _shown(ns: ArrayNamespace, regions: _Regions, numbers: _Indices) -> Array:
    """The mask of regions with these numbers."""
    keep = np.zeros(regions.count + 1, dtype=bool)
    keep[numbers] = True
    return regions.mask(ns.upload(keep))


def _round_pieces(sums: _Floats, px_um: float) -> _Dots:
    """The regions that are as round and as large as a dot; `sums` are their moments."""
    area = np.maximum(sums[0], 1)
    y = sums[1] / area
    x = sums[2] / area
    # a pixel has a spread of its own, 1/12 along each axis
    yy = sums[3] / area - y**2 + 1 / 12
    xx = sums[4] / area - x**2 + 1 / 12
    xy = sums[5] / area - x * y
    half = np.hypot((yy - xx) / 2, xy)
    most = (yy + xx) / 2 + half
    least = (yy + xx) / 2 - half
    diameter = 2 * np.sqrt(sums[0] / np.pi)
    is_round = most <= _LENGTH**2 * least
    is_round &= sums[0] >= _FILLED * 4 * np.pi * np.sqrt(most * least)
    is_round &= diameter >= max(_LEAST_UM / px_um, _LEAST_PX)
    is_round &= diameter <= _MOST_UM / px_um
    number = np.flatnonzero(is_round)
    number = number[np.argsort(y[number], kind="stable")]
    return _Dots(
        number=number,
        place=np.stack([y, x], axis=1)[number],
        diameter=diameter[number],
    )


def _is_one_size(ratio: _Floats) -> _Bools:
    return (ratio <= _ONE_SIZE) & (ratio >= 1 / _ONE_SIZE)


def _in_rows(dots: _Dots, num_dots: int) -> _Bools:
    """True for dots that lie in a straight row of at least `num_dots` with equal steps, (N,)."""
    found = np.zeros(len(dots.number), dtype=bool)
    start, end = _steps(dots)
    if not len(start):
        return found
    step = dots.place[end] - dots.place[start]
    length = np.linalg.norm(step, axis=1)
    following = _following(start, end, step)
    # numbers of the steps of each row so far
    row = [np.arange(len(start))]
    way = length
    for _ in range(num_dots - 2):
        goes_on = following[row[-1]] >= 0
        row = [steps[goes_on] for steps in row]
        row.append(following[row[-1]])
        way = way[goes_on] + length[row[-1]]
    direct = dots.place[end[row[-1]]] - dots.place[start[row[0]]]
    is_straight = np.linalg.norm(direct, axis=1) >= _STRAIGHT * way
    for steps in row:
        found[start[steps[is_straight]]] = True
        found[end[steps[is_straight]]] = True
    return found


def _steps(dots: _Dots) -> tuple[_Indices, _Indices]:
    """Numbers of the dots at the start and at the end of each step, (S,), ordered by start."""
    starts = [np.empty(0, dtype=np.int64)]
    ends = [np.empty(0, dtype=np.int64)]
    y = dots.place[:, 0]
    reach = _STEP * float(dots.diameter.max(initial=0.0))
    for first in range(0, len(y), _BLOCK):
        last = min(first + _BLOCK, len(y)) - 1
        low = int(np.searchsorted(y, y[first] - reach))
        high = int(np.searchsorted(y, y[last] + reach, side="right"))
        own = slice(first, last + 1)
        delta = dots.place[None, low:high] - dots.place[own, None]
        distance = np.linalg.norm(delta, axis=2)
        diameter = dots.diameter[own, None]
        is_step = _is_one_size(dots.diameter[None, low:high] / diameter)
        is_step &= (distance > 0) & (distance <= _STEP * diameter)
        start, end = np.nonzero(is_step)
        starts.append(start + first)
        ends.append(end + low)
    return np.concatenate(starts), np.concatenate(ends)


def _following(start: _Indices, end: _Indices, step: _Floats) -> _Indices:
    """Number of the step that goes on from each with equal length and direction; -1: none."""
    num_dots = int(max(start.max(), end.max())) + 1
    first = np.searchsorted(start, np.arange(num_dots))
    slot = np.arange(len(start)) - first[start]
    # numbers of the steps from each dot, -1 where it has no more
    steps_of = np.full((num_dots, int(slot.max()) + 1), -1)
    steps_of[start, slot] = np.arange(len(start))
    following = steps_of[end]
    change = np.linalg.norm(step[following] - step[:, None], axis=2)
    change[following < 0] = np.inf
    best = change.argmin(axis=1)[:, None]
    is_equal = change.min(axis=1) <= _EQUAL * np.linalg.norm(step, axis=1)
    return np.where(is_equal, np.take_along_axis(following, best, axis=1)[:, 0], -1)
