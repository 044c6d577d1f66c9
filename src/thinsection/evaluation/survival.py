"""Survival of cases: scores of predicted risks, Kaplan-Meier, hazard ratio, predicted survival.

A scorer maps weights of cases (B, n) to scores (B,), which gives its interval. Scores at a time use
inverse probability of censoring weights. The censoring is estimated on the same cases and with the
same weights. If every case counts once, the scores equal those of scikit-survival. The patient of
each case is the unit of every interval.

Shapes: n cases, T times, G patients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.evaluation.cases import Groups
from thinsection.evaluation.external import (
    NEWTON_STEPS,
    NEWTON_TOLERANCE,
    CalibrationBin,
    Estimate,
)
from thinsection.evaluation.intervals import TAIL
from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    IndexArray,
    Scorer,
    Weights,
    ratio,
    weighted_auroc,
)
from thinsection.types import Floats

PAIRS = 2**20  # pairs of cases, or of a case and a time, that are held at a time
SURVIVAL_BINS = 5  # largest number of bins of a survival calibration
MIN_OF_BIN = 10  # smallest number of cases in a bin
PERFECT = 30.0  # log hazard ratio from which the values are taken to order all events perfectly
MIN_OF_EACH = (
    5  # smallest number of events before a time, and of cases observed after it
)


def comparable_pairs(
    event: Flags, time: FloatVector, fold: IndexArray | None = None
) -> Iterator[tuple[slice, Flags]]:
    """Rows i and (rows, n) flags: True where case i is known to have its event before case j.

    Case i had the event and time_i < time_j, or the times are equal and j was censored; with
    `fold` (n,) both were scored by the same model. Memory: 4 bytes for each of PAIRS pairs.
    """
    for rows in row_blocks(len(time), len(time), PAIRS):
        earlier = time[rows, None] < time
        tied = (time[rows, None] == time) & ~event
        pairs = event[rows, None] & (earlier | tied)
        if fold is not None:
            pairs &= fold[rows, None] == fold
        yield rows, np.asarray(pairs)


def row_blocks(num_rows: int, num_columns: int, most: int) -> Iterator[slice]:
    """Slices of rows of a matrix, of at most `most` values each, or of one row."""
    step = max(1, most // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def martingale_residuals(event: Flags, time: FloatVector) -> FloatVector:
    """Observed minus expected events of each case, (n,), for a hazard that depends on time alone.

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
    """Harrell's c-index of n cases under weights (B, n); a pair has the product of its weights.

    A comparable pair (i, j) counts 1 if risk_i > risk_j, and 0.5 if the risks are equal. With
    `fold` (n,) only risks of the same model are compared, and a fold counts by its pairs. The score
    is NaN if no pair is comparable.

    Memory: 32 PAIRS bytes, and 8 (B, n).

    Source: Harrell et al., "Evaluating the yield of medical tests", JAMA 247 (1982).
    """

    def weighted(weights: Weights) -> FloatVector:
        top, bottom = np.zeros((2, len(weights)))
        for rows, pairs in comparable_pairs(event, time, fold):
            comparable = pairs.astype(np.float64)
            concordant = comparable * (np.sign(risk[rows, None] - risk) / 2 + 0.5)
            top += ((weights @ concordant.T) * weights[:, rows]).sum(axis=1)
            bottom += ((weights @ comparable.T) * weights[:, rows]).sum(axis=1)
        return ratio(top, bottom, empty=np.nan)

    return weighted


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalCurve:
    """Kaplan-Meier estimate of one group, all arrays (T,)."""

    times: FloatVector
    survival: FloatVector
    low: FloatVector  # log-log interval
    high: FloatVector
    at_risk: npt.NDArray[np.int64]  # cases under observation just before each time
    cases: int
    events: int


def survival_curve(event: Flags, time: FloatVector, groups: Groups) -> SurvivalCurve:
    """Kaplan-Meier estimate at each distinct time, with log-log intervals.

    The variance of the log survival is the sum of squares of its derivatives by the weight of each
    patient. It is Greenwood's variance if each patient has one case.

    Memory: 32 bytes for each of PAIRS pairs of a case and a time, or for all of one patient.

    Source: Kaplan and Meier, JASA 53 (1958); Kalbfleisch and Prentice (1980); Williams, Biometrics
    51 (1995): clusters.
    """
    from scipy.special import ndtri

    times = np.unique(time)
    at_risk = len(time) - np.searchsorted(np.sort(time), times, side="left")
    died = np.array([int(event[time == t].sum()) for t in times])
    survival = np.cumprod(1 - died / at_risk)
    hazard = died / at_risk
    squares = np.zeros(len(times))
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = 1 / (at_risk - died)
        order = np.argsort(groups.codes, kind="stable")
        counts = np.bincount(groups.codes, minlength=groups.total)
        ends = np.cumsum(counts)
        starts = ends - counts
        for patients in row_blocks(groups.total, len(times), PAIRS):
            rows = order[starts[patients.start] : ends[patients.stop - 1]]
            surplus = (time[rows, None] == times) & event[rows, None]
            residual = surplus - (time[rows, None] >= times) * hazard
            of_patient = np.zeros((patients.stop - patients.start, len(times)))
            np.add.at(of_patient, groups.codes[rows] - patients.start, residual)
            squares += (np.cumsum(of_patient * weight, axis=1) ** 2).sum(axis=0)
        spread = np.sqrt(squares) / np.log(survival)
        reach = float(ndtri(1 - TAIL)) * spread
        low = survival ** np.exp(-reach)
        high = survival ** np.exp(reach)
    # before the first event everybody lives; at 0 there is no log of the survival
    certain = (survival == 1) | (survival == 0)
    low = np.where(certain, survival, low)
    high = np.where(certain, survival, high)
    return SurvivalCurve(
        times=times,
        survival=np.asarray(survival, dtype=np.float64),
        low=low,
        high=high,
        at_risk=at_risk,
        cases=len(time),
        events=int(event.sum()),
    )


def hazard_ratio(
    event: Flags, time: FloatVector, value: FloatVector, groups: Groups
) -> Estimate | None:
    """Hazard ratio for one unit of `value` (n,), with Efron's ties; None if it is not finite.

    The interval is Wald's. Where a patient has several cases it is that of the robust variance of
    Lin and Wei over patients, with Student's t.

    Memory: n. Source: Cox (1972); Efron, JASA 72 (1977); Lin and Wei, JASA 84 (1989).
    """
    from scipy.special import ndtri, stdtrit

    order = np.argsort(-time, kind="stable")
    ordered_event = event[order]
    centred = value[order] - value.mean()
    last_of_time = np.flatnonzero(np.r_[np.diff(time[order]) != 0, True])
    beta = 0.0
    step = np.inf
    for _ in range(NEWTON_STEPS):
        sets = _risk_sets(ordered_event, centred, last_of_time, beta)
        at_risk, first, second = sets.moments
        mean = first / at_risk
        score = float((centred[sets.cases] - mean).sum())
        information = float((second / at_risk - mean**2).sum())
        if information < 1e-12 or abs(beta) > PERFECT:
            return None
        if abs(step) < NEWTON_TOLERANCE:
            break
        step = score / information
        beta += float(np.clip(step, -2, 2))
    else:
        return None
    units = groups.total
    variance = 1 / information
    reach = float(ndtri(1 - TAIL))
    method = "Wald"
    if 1 < units < len(event):
        residual = _score_residuals(ordered_event, centred, last_of_time, beta)
        of_patient = np.bincount(groups.codes[order], residual)
        variance = float(of_patient @ of_patient) / information**2 * units / (units - 1)
        reach = float(stdtrit(units - 1, 1 - TAIL))
        method = "robust variance of Lin and Wei"
    error = reach * variance**0.5
    return Estimate(
        value=float(np.exp(beta)),
        low=float(np.exp(beta - error)),
        high=float(np.exp(beta + error)),
        cases=len(event),
        units=units,
        unit=groups.unit,
        method=method,
    )


class _RiskSets(NamedTuple):
    """Cases at risk at each of E events, without a share of the tied ones (Efron)."""

    cases: IndexArray  # (E,) with the event
    place: IndexArray  # (E,) time of each
    share: FloatVector  # (E,) of the tied cases that are no longer at risk
    # (3, E) sums over the cases at risk of their weights, times the value, times its square
    moments: Floats


def _risk_sets(
    event: Flags, value: FloatVector, last_of_time: IndexArray, beta: float
) -> _RiskSets:
    """Risk sets of Efron's partial likelihood; cases (n,) in order, the latest first."""
    cases = np.flatnonzero(event)
    place = np.searchsorted(last_of_time, cases)
    share = (np.arange(len(cases)) - np.searchsorted(place, place)) / np.bincount(
        place
    )[place]
    weight = np.exp(beta * value)
    of_case = np.stack([weight, weight * value, weight * value**2])
    tied = np.stack([np.bincount(place, row[cases])[place] for row in of_case])
    at_risk = np.cumsum(of_case, axis=1)[:, last_of_time[place]]
    return _RiskSets(cases, place, share, at_risk - share * tied)


def _score_residuals(
    event: Flags, value: FloatVector, last_of_time: IndexArray, beta: float
) -> FloatVector:
    """Part (n,) of each case in the score of Efron's likelihood; cases as for `_risk_sets`.

    It is the case's own event minus the events expected of it while it was at risk.
    """
    cases, place, share, (at_risk, first, _) = _risk_sets(
        event, value, last_of_time, beta
    )
    weight = np.exp(beta * value)
    mean = first / at_risk

    def by_time(parts: FloatVector) -> FloatVector:
        sums = np.bincount(place, parts, minlength=len(last_of_time))
        return sums.astype(np.float64)

    # a share of the cases with the same time is no longer at risk
    own = value[cases]
    no_longer_at_risk = (
        own * by_time(share / at_risk)[place] - by_time(share * mean / at_risk)[place]
    )
    expected = by_time(mean)[place] / np.bincount(place)[place]
    residual = np.zeros(len(value))
    residual[cases] = own - expected + weight[cases] * no_longer_at_risk
    # a case is at risk at its own time and at all earlier ones, which stand after it
    until = np.searchsorted(last_of_time, np.arange(len(value)))
    hazard = by_time(1 / at_risk)[::-1].cumsum()[::-1][until]
    moment = by_time(mean / at_risk)[::-1].cumsum()[::-1][until]
    return np.asarray(residual - weight * (value * hazard - moment))


def breslow_baseline(
    event: Flags, time: FloatVector, log_risk: FloatVector
) -> tuple[FloatVector, FloatVector]:
    """Times (T,) of events and the cumulative baseline hazard (T,) at them.

    The risks must be those of models that were not trained on these cases.

    Source: Breslow, JRSS B 34 (1972).
    """
    times = np.unique(time[event])
    weight = np.exp(log_risk)
    at_risk = np.array([weight[time >= t].sum() for t in times])
    died = np.array([np.count_nonzero(event & (time == t)) for t in times])
    return times, np.cumsum(died / at_risk)


def survival_probability(
    baseline: tuple[FloatVector, FloatVector], log_risk: FloatVector, times: FloatVector
) -> Floats:
    """Predicted survival (n, T) of cases at times, by a baseline of `breslow_baseline`."""
    event_times, hazard = baseline
    place = np.searchsorted(event_times, times, side="right")
    at_times = np.concatenate([[0.0], hazard])[place]
    return np.asarray(np.exp(-np.exp(log_risk)[:, None] * at_times))


def survival_bins(
    event: Flags, time: FloatVector, survival: FloatVector, t: float, groups: Groups
) -> list[CalibrationBin]:
    """Kaplan-Meier survival at a time by bins of equally many cases, by predicted survival (n,)."""
    order = np.argsort(survival, kind="stable")
    parts = np.array_split(order, min(SURVIVAL_BINS, max(1, len(order) // MIN_OF_BIN)))
    calibration = []
    for rows in parts:
        patients = groups.take(rows)
        curve = survival_curve(event[rows], time[rows], patients)
        place = int(np.searchsorted(curve.times, t, side="right")) - 1
        observed = Estimate(
            value=float(curve.survival[place]) if place >= 0 else 1.0,
            low=float(curve.low[place]) if place >= 0 else 1.0,
            high=float(curve.high[place]) if place >= 0 else 1.0,
            cases=len(rows),
            units=patients.total,
            unit=patients.unit,
            method="Kaplan-Meier, log-log",
        )
        predicted = float(survival[rows].mean())
        calibration.append(CalibrationBin(predicted=predicted, observed=observed))
    return calibration


def usable_times(
    event: Flags, time: FloatVector, candidates: Sequence[float]
) -> list[float]:
    """Candidate times with at least MIN_OF_EACH events before and cases after them."""
    usable = []
    for t in candidates:
        before = int((event & (time <= t)).sum())
        after = int((time > t).sum())
        if min(before, after) >= MIN_OF_EACH:
            usable.append(float(t))
    return usable


def uncensored_share(
    event: Flags, time: FloatVector, weights: Weights, until: FloatVector
) -> FloatVector:
    """Kaplan-Meier share of cases (B, T) that are not censored up to times (T,).

    At the same time, an event comes before a censoring.

    Memory: 6 (B, n).
    """
    times, place = np.unique(time, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(len(times)))
    ordered = weights[:, order].astype(np.float64)
    of_time = np.add.reduceat(ordered, starts, axis=1)
    died = np.add.reduceat(ordered * event[order], starts, axis=1)
    at_risk = of_time[:, ::-1].cumsum(axis=1)[:, ::-1] - died
    censored_here = np.bincount(place, ~event, len(times)) > 0
    # without censoring the factor is exactly 1, which sums of floats may miss
    factor = np.where(censored_here, 1 - ratio(of_time - died, at_risk), 1.0)
    share = np.cumprod(np.clip(factor, 0, 1), axis=1)
    share = np.concatenate([np.ones((len(weights), 1)), share], axis=1)
    return share[:, np.searchsorted(times, until, side="right")]


def auroc_until(event: Flags, time: FloatVector, risk: FloatVector, t: float) -> Scorer:
    """AUROC of risk (n,) for an event up to a time, against cases observed beyond it.

    Memory: 8 (B, n). Source: Uno et al., JASA 102 (2007): cumulative/dynamic.
    """
    is_known = (event & (time <= t)) | (time > t)  # not censored before the time
    positive = (time <= t)[is_known]

    def score(weights: Weights) -> FloatVector:
        share = uncensored_share(event, time, weights, time[is_known])
        share[:, ~positive] = (
            1.0  # cases observed beyond the time all have the same share
        )
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
        error_of_died = weights * died * survival**2
        error_of_alive = weights * alive * (1 - survival) ** 2
        error = ratio(error_of_died, share(time)) + ratio(
            error_of_alive, share(np.array([t]))
        )
        return np.asarray(error.sum(axis=1) / weights.sum(axis=1))

    return score
