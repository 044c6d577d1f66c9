"""Finds cells that were cut at the seams of a segmentation by tiles, and where the seams lie.

A cut leaves a straight side along x or y. A nucleus has such a side by nature too, but anywhere; at
a seam there are many, and seams have one distance.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinsection.cells.outlines import Flags, Outlines
from thinsection.types import Floats

LEFT, TOP, RIGHT, BOTTOM = range(4)
SIDES = ("left", "top", "right", "bottom")
AXES = (("x", (LEFT, RIGHT)), ("y", (TOP, BOTTOM)))
# share of its box that a straight side takes to show a seam
STRONG_SHARE = 0.5
# the same for a side at a known seam: the first value that few sides reach there by chance
CUT_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MAX_BY_CHANCE = 3e-4  # per cell
_MIN_LENGTH_PX = 3.0
_STRAIGHT = 0.01  # how far a straight side may deviate, as a share of the box
REACH_PX = 1.5  # how far a side may lie from its seam
# bounds of the distance of seams
_MIN_PERIOD_PX = 100
_MAX_PERIOD_PX = 20_000.0
_MAX_BINS = 1 << 19
_SMOOTH_PX = 101
_NUM_CANDIDATES = 16
# smallest number of sides on the seams of a period, and by how many standard deviations they exceed
# those elsewhere
_MIN_SIDES = 8
_MIN_Z = 7.0
_MIN_RATIO = 1.75  # of sides at a line to those at any other place
_MAX_LINES = 16  # in one period
_MUCH_BETTER = 1.05

Straight = npt.NDArray[np.float64]  # (N, 4): left, top, right, bottom


@dataclass(frozen=True, kw_only=True)
class Seams:
    """Lines along one axis at which sides of cells lie: some lines in each period.

    Attributes:
        period: distance after which the lines repeat, level-0 px.
        after: places of the lines within a period, for sides that begin at a seam (left, top).
        before: the same for sides that end at a seam (right, bottom).
        num_sides: number of straight sides on the lines.
    """

    period: float
    after: tuple[float, ...]
    before: tuple[float, ...]
    num_sides: int

    def covered(self, *, before: bool) -> float:
        """Share of all places that lie at a line."""
        lines = self.before if before else self.after
        return min(1.0, 2 * REACH_PX * len(lines) / self.period)

    def holds(self, positions: Floats, *, before: bool) -> Flags:
        """True for each side at one of the lines; `before` for right and bottom sides."""
        is_held = np.zeros(len(positions), dtype=bool)
        for offset in self.before if before else self.after:
            distance = (positions - offset + self.period / 2) % self.period
            is_held |= np.abs(distance - self.period / 2) <= REACH_PX
        return is_held


def straight_sides(outlines: Outlines, bounds: Floats) -> Straight:
    """Length, px, of the part of each outline that lies straight on each side of its box.

    Memory: some 100 bytes per point.
    """
    counts = outlines.num_points
    points = outlines.points
    cell = np.repeat(np.arange(len(outlines)), counts)
    following = outlines.next_rows()
    size = bounds[:, 2:] - bounds[:, :2]
    lengths = np.zeros((len(outlines), 4))
    for side in range(4):
        axis = side % 2
        reach = _STRAIGHT * size[:, axis]
        on_side = np.abs(points[:, axis] - bounds[cell, side]) <= reach[cell]
        both = np.flatnonzero(on_side & on_side[following])
        along = np.abs(points[following[both], 1 - axis] - points[both, 1 - axis])
        np.add.at(lengths[:, side], cell[both], along)
    return lengths


def shares_of(lengths: Straight, bounds: Floats) -> Straight:
    """Straight length of each side as a share of the box; 0 where it is too short to tell."""
    size = bounds[:, 2:] - bounds[:, :2]
    extent = size[:, [1, 0, 1, 0]]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = lengths / extent
    is_clear = (lengths >= _MIN_LENGTH_PX) & np.isfinite(shares)
    return np.asarray(np.where(is_clear, shares, 0.0))


class StraightSides:
    """Places of all sides that are straight enough to be a cut.

    Memory: 8 bytes per such side.
    """

    def __init__(self) -> None:
        self._positions: list[list[Floats]] = [[] for _ in SIDES]

    def add(self, shares: Straight, bounds: Floats) -> None:
        """Takes the sides of cells, each of which is seen once."""
        for side in range(4):
            is_strong = shares[:, side] >= STRONG_SHARE
            self._positions[side].append(bounds[is_strong, side])

    def seams(self) -> dict[str, Seams]:
        """Seams along x and along y; without an axis that has none."""
        seams = {}
        for axis, (after, before) in AXES:
            found = find_seams(
                np.concatenate([*self._positions[after], np.zeros(0)]),
                np.concatenate([*self._positions[before], np.zeros(0)]),
            )
            if found is not None:
                seams[axis] = found
        return seams


def find_seams(after: Floats, before: Floats) -> Seams | None:
    """Lines of equal distance at which more sides lie than elsewhere; None for none.

    Args:
        after: places of left (or top) sides.
        before: places of right (or bottom) sides.
    """
    positions = np.concatenate([after, before])
    if len(positions) < _MIN_SIDES:
        return None
    extent = float(np.ptp(positions))
    best_period = 0.0
    best_score = 0.0
    # a longer period has the lines of a shorter one several times
    for period in sorted(_candidates(positions)):
        # half a px at the far end of the slide
        step = 0.5 * period / max(extent, period)
        for refined in period + step * np.arange(-3, 4):
            score = _fold(after, refined)[0] + _fold(before, refined)[0]
            if score > best_score * _MUCH_BETTER:
                best_period = float(refined)
                best_score = score
    if best_score == 0:
        return None
    for _ in range(2):
        best_period = _fitted_period(after, before, best_period)
    _, lines_after = _fold(after, best_period)
    _, lines_before = _fold(before, best_period)
    seams = Seams(
        period=best_period, after=lines_after, before=lines_before, num_sides=0
    )
    num_sides = np.count_nonzero(seams.holds(after, before=False))
    num_sides += np.count_nonzero(seams.holds(before, before=True))
    return replace(seams, num_sides=int(num_sides))


def _candidates(positions: Floats) -> list[float]:
    """Distances at which the places of sides repeat, the most frequent ones.

    A distance is read from the autocorrelation, then from twice, four times, ... the distance, so
    that it is exact over the whole slide.

    Memory: 60 bytes per px of the slide's longer edge.
    """
    low = float(positions.min())
    extent = float(np.ptp(positions)) + 1
    longest = int(min(_MAX_PERIOD_PX, extent / 2, _MAX_BINS))
    if longest <= _MIN_PERIOD_PX:
        return []
    num_bins = int(min(extent, _MAX_BINS)) + 1
    places = np.minimum((positions - low).astype(np.int64), num_bins - 1)
    histogram = np.bincount(places, minlength=num_bins).astype(np.float64)
    histogram = _mean_of(histogram, 3)
    # the density of cells changes slowly; a seam is narrow
    histogram -= _mean_of(histogram, _SMOOTH_PX)
    spectrum = np.fft.rfft(histogram, 2 ** int(np.ceil(np.log2(2 * num_bins))))
    products = np.fft.irfft(np.abs(spectrum) ** 2)[:num_bins]
    left = products[:longest].copy()
    left[:_MIN_PERIOD_PX] = -np.inf
    periods = []
    for _ in range(_NUM_CANDIDATES):
        lag = int(np.argmax(left))
        if left[lag] <= 0:
            break
        left[max(0, lag - 3) : lag + 4] = -np.inf
        periods.append(_exact_period(products, float(lag)))
    return periods


def _fitted_period(after: Floats, before: Floats, period: float) -> float:
    """Period that fits the sides near the lines best, by least squares."""
    numbers = [np.zeros(0)]
    places = [np.zeros(0)]
    for positions in (after, before):
        for line in _fold(positions, period)[1]:
            number = np.round((positions - line) / period)
            near = np.abs(positions - line - number * period) <= 2 * REACH_PX
            # each line has a place of its own
            numbers.append(number[near] - number[near].mean())
            places.append(positions[near] - positions[near].mean())
    number = np.concatenate(numbers)
    spread = float(number @ number)
    if spread == 0:
        return period
    return float(number @ np.concatenate(places) / spread)


def _exact_period(products: Floats, period: float) -> float:
    """Period near a first guess, from the place of the autocorrelation's top at multiples of it."""
    multiple = 1
    while 2 * multiple * period + 8 < len(products):
        multiple *= 2
        guess = round(multiple * period)
        near = products[guess - 4 : guess + 5]
        if near.max() <= 0:
            break
        period = (guess - 4 + float(np.argmax(near))) / multiple
    return period


def _mean_of(values: Floats, width: int) -> Floats:
    """Mean over so many values around each."""
    return np.convolve(values, np.full(width, 1 / width), mode="same")


def _fold(positions: Floats, period: float) -> tuple[float, tuple[float, ...]]:
    """Excess of sides at lines within a period, in standard deviations; and these lines.

    The excess is over the most frequent of the other places, so that places on a coarse grid, which
    outlines of a coarse mask have, count for nothing.
    """
    if len(positions) < _MIN_SIDES:
        return 0.0, ()
    num_bins = max(16, int(period))
    scale = num_bins / period
    phases = positions % period
    counts = np.bincount(
        (phases * scale).astype(np.int64) % num_bins, minlength=num_bins
    )
    windows = counts + np.roll(counts, 1) + np.roll(counts, -1)
    left = windows.copy()
    tops = []
    for _ in range(min(_MAX_LINES, num_bins // 16)):
        top = int(np.argmax(left))
        tops.append(top)
        left[(top + np.arange(-4, 5)) % num_bins] = -1
    others = left[left >= 0]
    mean = 3 * len(positions) / num_bins
    usual = max(float(np.quantile(others, 0.99)), mean)
    excess = 0.0
    lines = []
    for top in tops:
        peak = int(windows[top])
        least = max(_MIN_SIDES, usual + _MIN_Z * np.sqrt(usual + 1), _MIN_RATIO * usual)
        if peak < least:
            break
        excess += peak - usual
        center = (top + 0.5) / scale
        distance = (phases - center + period / 2) % period - period / 2
        near = distance[np.abs(distance) <= 2 * REACH_PX]
        lines.append(float((center + np.median(near)) % period))
    score = excess / np.sqrt(excess + len(lines) * usual + 1)
    return float(score), tuple(sorted(lines))


def facing_pairs(
    shares: Straight, lengths: Straight, bounds: Floats
) -> npt.NDArray[np.int64]:
    """Pairs (K, 2) of cells whose straight sides face each other and have the same ends.

    Such are the two parts of a cell that was cut, wherever the seam lies.
    """
    from scipy.spatial import cKDTree

    pairs = []
    for axis, (after, before) in enumerate(sides for _, sides in AXES):
        along = 1 - axis
        first = np.flatnonzero(shares[:, before] >= STRONG_SHARE)
        second = np.flatnonzero(shares[:, after] >= STRONG_SHARE)
        if not len(first) or not len(second):
            continue

        def places(
            rows: npt.NDArray[np.int64], side: int, along: int = along
        ) -> Floats:
            ends = bounds[rows][:, [along, along + 2]]
            return np.column_stack([bounds[rows, side], ends])

        first_places = places(first, before)
        second_places = places(second, after)
        near = cKDTree(second_places).query_ball_point(first_places, 8.0, p=np.inf)
        for row, others in enumerate(near):
            for other in others:
                i = int(first[row])
                j = int(second[other])
                length = min(lengths[i, before], lengths[j, after])
                reach = max(REACH_PX, 0.15 * length)
                difference = np.abs(first_places[row] - second_places[other])
                if i != j and (difference <= reach).all():
                    pairs.append((i, j))
    return np.array(sorted(set(pairs)), dtype=np.int64).reshape(-1, 2)
