"""Labels of connected regions on the host, numbered as SciPy numbers them, without its import."""

import numpy as np
import numpy.typing as npt

from thinsection.types import MaskArray

_Indices = npt.NDArray[np.int64]


def label_regions(
    mask: MaskArray, *, corners: bool
) -> tuple[npt.NDArray[np.int32], int]:
    """Labels int32 (H, W), 0 outside, and their count; `corners` also joins pixels at a corner.

    Regions are numbered in the order of their first pixels, row by row. Pixels are joined as runs:
    a run is a row's longest stretch of pixels side by side.

    Memory: 9 bytes per pixel and 60 bytes per run.
    """
    height, width = mask.shape
    # one pixel outside on each side, so that a run never crosses from row to row
    padded = np.zeros((height, width + 2), dtype=np.int8)
    padded[:, 1:-1] = mask
    steps = np.diff(padded, axis=1)
    row, start = np.nonzero(steps == 1)
    end = np.nonzero(steps == -1)[1]
    region = _joined(*_touching(row, start, end, width, corners), len(row))
    first_runs, number = np.unique(region, return_inverse=True)
    changes = np.zeros((height, width + 1), dtype=np.int32)
    changes[row, start] = number + 1
    changes[row, end] -= (number + 1).astype(np.int32)
    labels = np.cumsum(changes, axis=1, dtype=np.int32)[:, :-1]
    return np.ascontiguousarray(labels), len(first_runs)


def _touching(
    row: _Indices, start: _Indices, end: _Indices, width: int, corners: bool
) -> tuple[_Indices, _Indices]:
    """Pairs of runs that touch: each run, and those of the row above it."""
    reach = 1 if corners else 0
    # places of all runs on one line, row after row; gaps keep rows apart
    line = width + 4
    above = (row - 1) * line
    first = np.searchsorted(row * line + end, above + start - reach, side="right")
    last = np.searchsorted(row * line + start, above + end + reach, side="left")
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
