"""95 % confidence bands of ROC, precision-recall and calibration curves.

A point of a curve jumps from case to case, so that it has no derivative by the weights of the
cases. Its variance comes from resamples of the units (`intervals.Sampling.weights`), and its bounds
from `intervals.bounds_of` for a share. A band is pointwise: it does not hold for the whole curve at
once.

Shapes: n rows, G places of a grid, B resamples.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.evaluation.intervals import (
    Sampling,
    bounds_of,
    drawn_variance,
    why_missing,
)
from thinsection.evaluation.metrics import Flags, FloatVector, ratio
from thinsection.types import Floats

DRAWS = 500  # number of resamples
GRID = np.linspace(0.0, 1.0, 51)
BINS = 10  # largest number of bins of a calibration curve
MIN_IN_BIN = 8  # smallest number of rows in a bin


@dataclass(frozen=True, kw_only=True)
class Band:
    """A curve with its pointwise bounds, all arrays (G,); bounds are NaN if there are none."""

    x: FloatVector
    y: FloatVector
    low: FloatVector
    high: FloatVector


def roc_band(
    truth: Flags, probability: FloatVector, sampling: Sampling | None, *, seed: int
) -> Band:
    """True positive rate at each false positive rate of GRID; all rows are pooled."""
    return _band(truth, probability, sampling, seed=seed, precision=False)


def precision_band(
    truth: Flags, probability: FloatVector, sampling: Sampling | None, *, seed: int
) -> Band:
    """Precision at each recall of GRID; all rows are pooled."""
    return _band(truth, probability, sampling, seed=seed, precision=True)


def _band(
    truth: Flags,
    probability: FloatVector,
    sampling: Sampling | None,
    *,
    seed: int,
    precision: bool,
) -> Band:
    ones = np.ones((1, len(truth)))
    points = _curves(truth, probability, ones, precision=precision)[0]
    low = np.full(len(GRID), np.nan)
    high = np.full(len(GRID), np.nan)
    if sampling is not None and not why_missing(sampling):
        blocks = [
            _curves(truth, probability, weights, precision=precision)
            for weights in sampling.weights(seed, DRAWS)
        ]
        resampled = np.concatenate(blocks)
        for i, point in enumerate(points):
            bounds = bounds_of(
                float(point),
                drawn_variance(resampled[:, i], sampling),
                sampling,
                "share",
            )
            low[i], high[i] = bounds
    return Band(x=GRID, y=points, low=low, high=high)


def _curves(
    truth: Flags,
    probability: FloatVector,
    weights: Floats,
    *,
    precision: bool,
) -> Floats:
    """Curves (B, G) under weights (B, n)."""
    order = np.argsort(-probability, kind="stable")
    last_of_tie = np.flatnonzero(np.r_[np.diff(probability[order]) != 0, True])
    ordered = weights[:, order]
    hits = np.cumsum(ordered * truth[order], axis=1)[:, last_of_tie]
    alarms = np.cumsum(ordered * ~truth[order], axis=1)[:, last_of_tie]
    recall = ratio(hits, hits[:, -1:])
    if not precision:
        x = np.c_[np.zeros(len(weights)), ratio(alarms, alarms[:, -1:])]
        y = np.c_[np.zeros(len(weights)), recall]
        # at a step the curve has the upper value, which the threshold at the step reaches
        return np.stack([_upper(a, b) for a, b in zip(x, y, strict=True)])
    share = ratio(hits, hits + alarms)
    curves = []
    for recall_of_draw, share_of_draw in zip(recall, share, strict=True):
        index = np.searchsorted(recall_of_draw, GRID - 1e-12, side="left")
        curves.append(share_of_draw[np.minimum(index, len(share_of_draw) - 1)])
    return np.stack(curves)


def _upper(x: FloatVector, y: FloatVector) -> FloatVector:
    """y at each point of GRID by linear interpolation; at a step the upper value; x ascends."""
    right = np.searchsorted(x, GRID, side="right")
    left = right - 1
    right = np.minimum(right, len(x) - 1)
    share = ratio(GRID - x[left], x[right] - x[left])
    return y[left] + share * (y[right] - y[left])


def calibration_band(
    truth: Flags,
    probability: FloatVector,
    sampling: Sampling,
    *,
    seed: int,
) -> Band:
    """Observed frequency by mean predicted probability, in bins of equally many rows."""
    order = np.argsort(probability, kind="stable")
    count = min(BINS, max(2, len(order) // MIN_IN_BIN))
    parts = np.array_split(order, count)
    rows = [_bin(truth, probability, sampling, part, seed) for part in parts]
    x, y, low, high = np.array(rows).T
    return Band(x=x, y=y, low=low, high=high)


def _bin(
    truth: Flags,
    probability: FloatVector,
    sampling: Sampling,
    part: npt.NDArray[np.int64],
    seed: int,
) -> tuple[float, float, float, float]:
    """Predicted probability, observed frequency and its bounds, of the rows of a bin."""
    codes = np.unique(sampling.codes[part], return_inverse=True)[1].astype(np.int64)
    bin_sampling = Sampling(codes=codes, unit=sampling.unit, folds=sampling.folds)
    predicted = float(probability[part].mean())
    observed = float(truth[part].mean())
    if why_missing(bin_sampling):
        return predicted, observed, np.nan, np.nan
    resampled = np.concatenate(
        [
            ratio(weights @ truth[part], weights.sum(axis=1))
            for weights in bin_sampling.weights(seed, DRAWS)
        ]
    )
    low, high = bounds_of(
        observed, drawn_variance(resampled, bin_sampling), bin_sampling, "share"
    )
    return predicted, observed, low, high
