"""Connected regions of a mask on the host, as runs, numbered as SciPy numbers them.

A run is a row's longest stretch of pixels side by side. Regions have far fewer runs than pixels, so
their areas and moments come from runs, and no picture of labels is in memory.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.arrays.bands import row_bands
from thinsection.types import MaskArray

_Indices = npt.NDArray[np.int64]
_Places = npt.NDArray[np.int32]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRegions:
    """Regions 1 to `count` of a mask, in the order of their first pixels, row by row."""

    shape: tuple[int, int]  # (H, W) of the mask
    count: int
    # of each run, from top to bottom and from left to right, int32 (runs,)
    row: _Places
    start: _Places  # first column
    end: _Places  # column behind the last one
    region: _Places

    def areas(self) -> _Indices:
        """Pixels of each region, (count + 1,); 0 for number 0."""
        return self._sums(self.end - self.start).astype(np.int64)

    def hits(self, marked: MaskArray) -> _Indices:
        """Pixels of each region that are marked, (count + 1,); 0 for number 0.

        Memory: 4 bytes per pixel of a band, and 24 bytes per run.
        """
        in_run = np.empty(len(self.row), dtype=np.int64)
        width = self.shape[1]
        for band in row_bands(self.shape[0]):
            runs = self._runs(band.inside)
            num_before = np.zeros(marked[band.inside].size + 1, dtype=np.int32)
            np.cumsum(marked[band.inside], dtype=np.int32, out=num_before[1:])
            line = (self.row[runs] - band.inside.start) * width
            in_run[runs] = num_before[line + self.end[runs]]
            in_run[runs] -= num_before[line + self.start[runs]]
        return self._sums(in_run).astype(np.int64)

    def moments(self) -> _Floats:
        """Per region the sums of 1, y, x, y², x² and xy over its pixels, (6, count + 1).

        Sums of whole numbers are exact in any order, up to 2**53.
        """
        y = self.row.astype(np.int64)
        first = self.start.astype(np.int64)
        last = self.end.astype(np.int64) - 1
        num = last - first + 1
        x = (first + last) * num // 2
        xx = _sum_of_squares(last) - _sum_of_squares(first - 1)
        return np.stack(
            [self._sums(values) for values in (num, y * num, x, y * y * num, xx, y * x)]
        )

    def boxes(self) -> list[tuple[slice, slice]]:
        """Rows and columns of the smallest box around each region, from region 1 on."""
        height, width = self.shape
        top = np.full(self.count + 1, height, dtype=np.int32)
        left = np.full(self.count + 1, width, dtype=np.int32)
        bottom = np.zeros(self.count + 1, dtype=np.int32)
        right = np.zeros(self.count + 1, dtype=np.int32)
        np.minimum.at(top, self.region, self.row)
        np.maximum.at(bottom, self.region, self.row + 1)
        np.minimum.at(left, self.region, self.start)
        np.maximum.at(right, self.region, self.end)
        sides = np.stack([top, bottom, left, right], axis=1)[1:].tolist()
        return [
            (slice(first_row, end_row), slice(first_column, end_column))
            for first_row, end_row, first_column, end_column in sides
        ]

    def at_border(self) -> npt.NDArray[np.bool_]:
        """True for regions that touch the picture's border, (count + 1,)."""
        height, width = self.shape
        touches = (self.row == 0) | (self.row == height - 1)
        touches |= (self.start == 0) | (self.end == width)
        keep = np.zeros(self.count + 1, dtype=bool)
        keep[self.region[touches]] = True
        return keep

    def mask(self, keep: npt.NDArray[np.bool_]) -> MaskArray:
        """The regions that are True in `keep`, (count + 1,), as a mask, bool (H, W)."""
        mask = np.empty(self.shape, dtype=bool)
        kept = keep[self.region].astype(np.int8)
        for band in row_bands(self.shape[0]):
            self._fill(mask.view(np.int8), kept, band.inside)
        return mask

    def labels(self) -> npt.NDArray[np.int32]:
        """The number of each pixel's region, 0 outside, int32 (H, W)."""
        labels = np.empty(self.shape, dtype=np.int32)
        for band in row_bands(self.shape[0]):
            self._fill(labels, self.region, band.inside)
        return labels

    def _fill(
        self,
        picture: npt.NDArray[np.signedinteger],
        values: npt.NDArray[np.signedinteger],
        rows: slice,
    ) -> None:
        """Writes the value of each run into some rows of a picture, and 0 outside of runs."""
        runs = self._runs(rows)
        height = rows.stop - rows.start
        changes = np.zeros((height, self.shape[1] + 1), dtype=picture.dtype)
        row = self.row[runs] - rows.start
        changes[row, self.start[runs]] = values[runs]
        changes[row, self.end[runs]] -= values[runs]
        np.cumsum(changes[:, :-1], axis=1, dtype=picture.dtype, out=picture[rows])

    def _runs(self, rows: slice) -> slice:
        """The runs of some rows."""
        first, stop = np.searchsorted(self.row, [rows.start, rows.stop])
        return slice(int(first), int(stop))

    def _sums(self, values: npt.NDArray[np.integer]) -> _Floats:
        """Sum over the runs of each region, (count + 1,)."""
        sums = np.bincount(self.region, weights=values, minlength=self.count + 1)
        return sums.astype(np.float64, copy=False)


def find_regions(mask: MaskArray, *, corners: bool) -> RunRegions:
    """The connected regions of a mask, bool (H, W); `corners` also joins pixels at a corner.

    Memory: 5 bytes per pixel of a band, and up to 130 bytes per run.
    """
    row, start, end = _find_runs(mask)
    first = _joined(*_touching(row, start, end, mask.shape[1], corners), len(row))
    is_first = first == np.arange(len(row))
    number = np.cumsum(is_first, dtype=np.int32)
    return RunRegions(
        shape=mask.shape,
        count=int(np.count_nonzero(is_first)),
        row=row,
        start=start,
        end=end,
        region=number[first],
    )


def _find_runs(mask: MaskArray) -> tuple[_Places, _Places, _Places]:
    """Row, first column and column behind the last one of each run, band by band."""
    height, width = mask.shape
    parts = [np.empty((3, 0), dtype=np.int32)]
    for band in row_bands(height):
        # one pixel outside on each side, so that a run never crosses from row to row
        padded = np.zeros((band.inside.stop - band.inside.start, width + 2), np.int8)
        padded[:, 1:-1] = mask[band.inside]
        # places on one line, row after row, because NumPy searches a line faster than a picture
        steps = np.diff(padded, axis=1).ravel()
        row, start = np.divmod(np.flatnonzero(steps == 1), width + 1)
        end = np.flatnonzero(steps == -1) % (width + 1)
        row += band.inside.start
        parts.append(np.stack([row, start, end]).astype(np.int32))
    row, start, end = np.concatenate(parts, axis=1)
    return row, start, end


def _sum_of_squares(last: _Indices) -> _Indices:
    """1 + 4 + 9 + ... up to the square of each number; 0 for -1."""
    return last * (last + 1) * (2 * last + 1) // 6


def _touching(
    row: _Places, start: _Places, end: _Places, width: int, corners: bool
) -> tuple[_Indices, _Indices]:
    """Pairs of runs that touch: each run, and those of the row above it."""
    reach = 1 if corners else 0
    # places of all runs on one line, row after row; gaps keep rows apart
    line = width + 4
    begin = row.astype(np.int64) * line
    above = begin - line
    first = np.searchsorted(begin + end, above + start - reach, side="right")
    last = np.searchsorted(begin + start, above + end + reach, side="left")
    count = np.maximum(last - first, 0)
    lower = np.repeat(np.arange(len(row)), count)
    nth = np.arange(len(lower)) - np.repeat(np.cumsum(count) - count, count)
    return lower, np.repeat(first, count) + nth


def _joined(lower: _Indices, upper: _Indices, num_runs: int) -> _Indices:
    """First run of the region of each run.

    Each run points at an earlier run of its region, at last at the first one. A round lets the
    first runs of two regions that touch point at the earlier of both, and then shortens all paths.
    """
    first = np.arange(num_runs)
    while len(lower):
        a = first[lower]
        b = first[upper]
        np.minimum.at(first, np.maximum(a, b), np.minimum(a, b))
        while True:
            shorter = first[first]
            if np.array_equal(shorter, first):
                break
            first = shorter
        apart = first[lower] != first[upper]
        lower = lower[apart]
        upper = upper[apart]
    return first
