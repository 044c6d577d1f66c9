"""Finds the printed dots of a frame on the glass, as around the capture areas of Visium slides.

They are round, of one size, lie on glass, and in straight rows with equal steps. Measured on three
pictures of others, the dots are about 105 µm wide, and 140 to 146 µm apart. Fibres of muscle and
lobules are as round and as regular, but tissue is around them.
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
# Dots whose neighbours are searched together, and steps that are continued together.
_BLOCK = 128
_STEPS_BLOCK = 4_096
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
# Around a dot is a window of this edge. What shows there is glass that is wider than a dot, as the
# gaps between cells are not, and stain outside of round pieces and their rims. In a row of ten,
# more than the first share of it is glass. Around all other dots of the frame, more than the second
# is glass: tissue may lie beside them.
_AROUND_UM = 700.0
_WIDE_GLASS_UM = 100.0
_STAINED_RIM_UM = 16.0
_MOSTLY_GLASS = 0.5
_SOME_GLASS = 0.2
# What a dot's blurred rim adds on each side.
_RIM_UM = 32.0
# Print is at most this part of all that is stained: .28 on real slides, and nearly all of an array
# of round pieces of tissue.
_MOST_PRINT = 0.4


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
    """The mask of printed dots, with their rims; empty if there is no row of ten dots on glass.

    It is also empty if it has more than two fifths of all that is stained.

    Args:
        ns: device.
        density: smooth density relative to glass, float32 (H, W).
        stained: bool (H, W); dots lie only here, and the rest is glass.
        px_um: µm per px.

    Memory: 20 bytes per px, up to 3 kB for each round piece with glass around it, and 6 MB.
    """
    nowhere = ns.xp.zeros_like(stained)
    edge_px = _odd_px(_WINDOW_UM / px_um)
    spots = stained & (density > box_mirrored(ns, density, edge_px))
    regions = morphology.regions_of(ns, spots, connectivity=8)
    del spots  # frees memory
    sums = regions.moments()
    spreads = morphology.spreads(ns, sums)
    dots = _round_pieces(ns.download(sums), ns.download(spreads), px_um)
    if len(dots.number) < _ROW:
        return nowhere
    pieces = _shown(ns, regions, dots.number)
    glass = _share_of_glass(ns, dots, pieces, stained, px_um)
    del pieces  # frees memory
    on_glass = dots.chosen(glass > _MOSTLY_GLASS)
    in_row = _in_rows(on_glass, _ROW)
    if not in_row.any():
        return nowhere
    usual = np.median(on_glass.diameter[in_row])
    dots = dots.chosen((glass > _SOME_GLASS) & _is_one_size(dots.diameter / usual))
    rows = _shown(ns, regions, dots.number[_in_rows(dots, _SHORT_ROW)])
    printed = _shown(ns, regions, dots.number)
    joined = morphology.dilated_by_disk(ns, printed, max(1.0, _GAP / 2 * float(usual)))
    printed &= morphology.mostly(ns, joined, rows, 0.0)
    printed = morphology.dilated_by_disk(ns, printed, max(1.0, _RIM_UM / px_um))
    is_much = int((printed & stained).sum()) > _MOST_PRINT * int(stained.sum())
    return nowhere if is_much else printed


def _odd_px(edge_px: float) -> int:
    """The nearest odd number of px, at least 5."""
    return max(5, 2 * round((edge_px - 1) / 2) + 1)


def _share_of_glass(
    ns: ArrayNamespace, dots: _Dots, pieces: Array, stained: Array, px_um: float
) -> _Floats:
    """Share of wide glass in what shows around each dot, (N,).

    `pieces` is the mask of all round pieces.
    """
    radius_px = max(1.0, _WIDE_GLASS_UM / 2 / px_um)
    glass = morphology.opened_by_disk(ns, ~stained, radius_px)
    shows = morphology.dilated_by_disk(ns, pieces, max(1.0, _STAINED_RIM_UM / px_um))
    shows = (stained & ~shows) | glass
    edge_px = _odd_px(_AROUND_UM / px_um)
    y, x = ns.upload(np.rint(dots.place.T).astype(np.int64))

    def around(mask: Array) -> _Floats:
        share = box_mirrored(ns, mask.astype(ns.xp.float32), edge_px)[y, x]
        return np.asarray(ns.download(share), dtype=np.float64)

    return around(glass) / np.maximum(around(shows), 1e-6)


def _shown(ns: ArrayNamespace, regions: _Regions, numbers: _Indices) -> Array:
    """The mask of regions with these numbers."""
    keep = np.zeros(regions.count + 1, dtype=bool)
    keep[numbers] = True
    return regions.mask(ns.upload(keep))


def _round_pieces(sums: _Floats, spreads: _Floats, px_um: float) -> _Dots:
    """The regions that are as round and as large as a dot, by their moments and spreads."""
    area = np.maximum(sums[0], 1)
    y = sums[1] / area
    x = sums[2] / area
    most, least = spreads
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
    # the first and the last step of each row so far
    first = np.arange(len(start))
    last = first
    way = length
    for _ in range(num_dots - 2):
        goes_on = following[last] >= 0
        first = first[goes_on]
        last = following[last[goes_on]]
        way = way[goes_on] + length[last]
    direct = np.linalg.norm(dots.place[end[last]] - dots.place[start[first]], axis=1)
    # along the straight rows once more
    steps = first[direct >= _STRAIGHT * way]
    found[start[steps]] = True
    for _ in range(num_dots - 2):
        found[end[steps]] = True
        steps = following[steps]
    found[end[steps]] = True
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
    following = np.empty_like(start)
    for low in range(0, len(start), _STEPS_BLOCK):
        own = slice(low, low + _STEPS_BLOCK)
        onward = steps_of[end[own]]
        change = np.linalg.norm(step[onward] - step[own, None], axis=2)
        change[onward < 0] = np.inf
        best = change.argmin(axis=1)[:, None]
        is_equal = change.min(axis=1) <= _EQUAL * np.linalg.norm(step[own], axis=1)
        onward = np.take_along_axis(onward, best, axis=1)[:, 0]
        following[own] = np.where(is_equal, onward, -1)
    return following
