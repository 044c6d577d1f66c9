"""Scores of predicted risk and survival at a time, with cases censored before it weighted out.

Each is a scorer: it maps weights of cases (B, n) to scores (B,), so that one set of draws gives
its interval. The censoring is estimated on the same cases and under the same weights. With every
case counted once the scores are those of scikit-survival.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    Scorer,
    Weights,
    ratio,
    weighted_auroc,
)

MIN_OF_EACH = 5  # cases with an event before a time, and under observation after it


def usable_times(
    event: Flags, time: FloatVector, candidates: Sequence[float]
) -> list[float]:
    """Candidate times with at least MIN_OF_EACH events before and cases after them."""
    kept = []
    for t in candidates:
        before = int((event & (time <= t)).sum())
        after = int((time > t).sum())
        if min(before, after) >= MIN_OF_EACH:
            kept.append(float(t))
    return kept


def uncensored_share(
    event: Flags, time: FloatVector, weights: Weights, until: FloatVector
) -> FloatVector:
    """Kaplan-Meier share of cases (B, T) that are not censored up to times (T,).

    Where an event and a censoring have one time, the event comes first. Memory: 6 (B, n).
    """
    times, place = np.unique(time, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(len(times)))
    ordered = weights[:, order].astype(np.float64)
    of_time = np.add.reduceat(ordered, starts, axis=1)
    died = np.add.reduceat(ordered * event[order], starts, axis=1)
    at_risk = of_time[:, ::-1].cumsum(axis=1)[:, ::-1] - died
    censored_here = np.bincount(place, ~event, len(times)) > 0
    # sums of floats leave a rest where nobody is censored
    left = np.where(censored_here, 1 - ratio(of_time - died, at_risk), 1.0)
    share = np.cumprod(np.clip(left, 0, 1), axis=1)
    share = np.concatenate([np.ones((len(weights), 1)), share], axis=1)
    return np.asarray(share[:, np.searchsorted(times, until, side="right")])


def auroc_until(event: Flags, time: FloatVector, risk: FloatVector, t: float) -> Scorer:
    """AUROC of risk (n,) for an event up to a time, against cases observed beyond it.

    Memory: 8 (B, n). Source: Uno et al., JASA 102 (2007): cumulative/dynamic.
    """
    is_known = (event & (time <= t)) | (time > t)  # not censored before the time
    positive = (time <= t)[is_known]

    def score(weights: Weights) -> FloatVector:
        share = uncensored_share(event, time, weights, time[is_known])
        share[:, ~positive] = 1.0  # the same for all that are beyond the time
        weighted = ratio(weights[:, is_known], share)
        return weighted_auroc(risk[is_known], positive, weighted)

    return score


def brier_at(
    event: Flags, time: FloatVector, survival: FloatVector, t: float
) -> Scorer:
    """Mean squared error of predicted survival (n,) at a time.

    Memory: 8 (B, n). Source: Graf et al., Statistics in Medicine 18 (1999).
    """
    died = event & (time <= t)
    alive = time > t

    def score(weights: Weights) -> FloatVector:
        share = partial(uncensored_share, event, time, weights)
        lost = weights * died * survival**2
        kept = weights * alive * (1 - survival) ** 2
        error = ratio(lost, share(time)) + ratio(kept, share(np.array([t])))
        return np.asarray(error.sum(axis=1) / weights.sum(axis=1))

    return score
