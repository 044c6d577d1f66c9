"""Scores of predicted risks against times to an event."""

import numpy as np

from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    IndexArray,
    Scorer,
    Weights,
    ratio,
)


def comparable_pairs(
    event: Flags, time: FloatVector, fold: IndexArray | None = None
) -> Flags:
    """(n, n), True where case i is known to have its event before case j.

    Case i had the event and time_i < time_j, or the times are equal and j was censored; with
    `fold` (n,) both were scored by the same model. Memory: 4 n².
    """
    earlier = time[:, None] < time
    tied = (time[:, None] == time) & ~event
    pairs = event[:, None] & (earlier | tied)
    if fold is not None:
        pairs &= fold[:, None] == fold
    return np.asarray(pairs)


def martingale_residuals(event: Flags, time: FloatVector) -> FloatVector:
    """Observed minus expected events of each case, (n,), where nothing but time decides.

    The expectation is the cumulative hazard of Nelson and Aalen at the time of the case. A case
    with an early event has a value near 1. Memory: O(n).

    Source: Therneau, Grambsch and Fleming, Biometrika 77 (1990).
    """
    times, place = np.unique(time, return_inverse=True)
    cases = np.bincount(place, minlength=len(times))
    events = np.bincount(place, weights=event, minlength=len(times))
    at_risk = len(time) - np.cumsum(cases) + cases
    hazard = np.cumsum(events / at_risk)
    return np.asarray(event - hazard[place])


def concordance(
    event: Flags,
    time: FloatVector,
    risk: FloatVector,
    fold: IndexArray | None = None,
) -> Scorer:
    """Harrell's c-index of n cases under weights (B, n): a pair weighs as its cases do.

    A comparable pair (i, j) is concordant by 1 where risk_i > risk_j and by 0.5 where they are
    equal. With `fold` (n,) only risks of the same model are compared, and a fold counts by its
    pairs.

    NaN where no pair is comparable: it needs an event before another case's time. Memory: 16 n².
    Source: Harrell et al., "Evaluating the yield of medical tests", JAMA 247 (1982).
    """
    comparable = comparable_pairs(event, time, fold).astype(np.float64)
    concordant = comparable * (np.sign(risk[:, None] - risk) / 2 + 0.5)

    def weighted(weights: Weights) -> FloatVector:
        top = ((weights @ concordant) * weights).sum(axis=1)
        bottom = ((weights @ comparable) * weights).sum(axis=1)
        return ratio(top, bottom, empty=np.nan)

    return weighted
