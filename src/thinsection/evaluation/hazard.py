"""Survival of cases: Kaplan-Meier, hazard ratio, baseline hazard, predicted survival.

The patient of each case is the unit of every interval.

Shapes: n cases, T times, G patients.
"""

from dataclasses import dataclass

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
from thinsection.evaluation.metrics import Flags, FloatVector

SURVIVAL_BINS = 5  # of a calibration of survival, at most
MIN_OF_BIN = 10  # cases in a bin
PERFECT = 30.0  # log hazard ratio from which on the values order the events perfectly


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
    patient. Where each patient has one case this is Greenwood's variance.

    Memory: 16 n T. Source: Kaplan and Meier, JASA 53 (1958); Kalbfleisch and Prentice (1980);
    Williams, Biometrics 51 (1995): clusters.
    """
    from scipy.stats import norm

    times = np.unique(time)
    at_risk = len(time) - np.searchsorted(np.sort(time), times, side="left")
    died = np.array([int(event[time == t].sum()) for t in times])
    survival = np.cumprod(1 - died / at_risk)
    hazard = died / at_risk
    surplus = (time[:, None] == times) & event[:, None]
    residual = surplus - (time[:, None] >= times) * hazard
    of_patient = np.zeros((groups.total, len(times)))
    np.add.at(of_patient, groups.codes, residual)
    with np.errstate(divide="ignore", invalid="ignore"):
        influence = np.cumsum(of_patient / (at_risk - died), axis=1)
        spread = np.sqrt((influence**2).sum(axis=0)) / np.log(survival)
        reach = float(norm.ppf(1 - TAIL)) * spread
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
    from scipy.stats import norm, t

    order = np.argsort(-time, kind="stable")
    ordered_event = event[order]
    centred = value[order] - value.mean()
    last_of_time = np.flatnonzero(np.r_[np.diff(time[order]) != 0, True])
    beta = 0.0
    step = np.inf
    for _ in range(NEWTON_STEPS):
        score, information = _efron(ordered_event, centred, last_of_time, beta)
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
    reach = float(norm.ppf(1 - TAIL))
    method = "Wald"
    if 1 < units < len(event):
        residual = _score_residuals(ordered_event, centred, last_of_time, beta)
        of_patient = np.bincount(groups.codes[order], residual)
        variance = float(of_patient @ of_patient) / information**2 * units / (units - 1)
        reach = float(t.ppf(1 - TAIL, units - 1))
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


def _score_residuals(
    event: Flags, value: FloatVector, last_of_time: npt.NDArray[np.int64], beta: float
) -> FloatVector:
    """Part (n,) of each case in the score of Efron's likelihood; cases as for `_efron`.

    A case's own event less what was expected of it while it was at risk.
    """
    weight = np.exp(beta * value)
    sums = np.cumsum(np.stack([weight, weight * value]), axis=1)
    starts = np.r_[0, last_of_time[:-1] + 1]
    hazard = np.zeros(len(last_of_time))  # of each time, and times the mean value
    moment = np.zeros(len(last_of_time))
    residual = np.zeros(len(value))
    for place, (first, last) in enumerate(zip(starts, last_of_time, strict=True)):
        tied = np.arange(first, last + 1)[event[first : last + 1]]
        share = np.arange(len(tied)) / max(1, len(tied))
        at_risk = sums[0, last] - share * weight[tied].sum()
        mean = (sums[1, last] - share * (weight * value)[tied].sum()) / at_risk
        hazard[place] = (1 / at_risk).sum()
        moment[place] = (mean / at_risk).sum()
        # of tied cases a share is no longer at risk
        left = (share / at_risk * (value[tied][:, None] - mean)).sum(axis=1)
        expected = mean.mean() if len(tied) else 0.0
        residual[tied] = value[tied] - expected + weight[tied] * left
    # a case is at risk at its own time and at all earlier ones, which stand after it
    until = np.repeat(np.arange(len(last_of_time)), last_of_time - starts + 1)
    total_hazard = hazard[::-1].cumsum()[::-1][until]
    total_moment = moment[::-1].cumsum()[::-1][until]
    return np.asarray(residual - weight * (value * total_hazard - total_moment))


def _efron(
    event: Flags, value: FloatVector, last_of_time: npt.NDArray[np.int64], beta: float
) -> tuple[float, float]:
    """Score and information of Efron's partial likelihood; cases in order, the latest first."""
    weight = np.exp(beta * value)
    sums = np.cumsum(np.stack([weight, weight * value, weight * value**2]), axis=1)
    score = 0.0
    information = 0.0
    first = 0
    for last in last_of_time:
        tied = np.arange(first, last + 1)[event[first : last + 1]]
        first = last + 1
        if not len(tied):
            continue
        risk = sums[:, last]
        moments = np.stack(
            [weight[tied], weight[tied] * value[tied], weight[tied] * value[tied] ** 2]
        )
        risk_of_tied = moments.sum(axis=1)
        for i in range(len(tied)):
            s0, s1, s2 = risk - risk_of_tied * (i / len(tied))
            score -= s1 / s0
            information += s2 / s0 - (s1 / s0) ** 2
        score += float(value[tied].sum())
    return score, information


def breslow_baseline(
    event: Flags, time: FloatVector, log_risk: FloatVector
) -> tuple[FloatVector, FloatVector]:
    """Times (T,) of events and the cumulative baseline hazard (T,) at them.

    Fitted on training cases by risks of models that have not seen them.
    Source: Breslow, JRSS B 34 (1972).
    """
    times = np.unique(time[event])
    weight = np.exp(log_risk)
    at_risk = np.array([weight[time >= t].sum() for t in times])
    died = np.array([np.count_nonzero(event & (time == t)) for t in times])
    return times, np.cumsum(died / at_risk)


def survival_probability(
    baseline: tuple[FloatVector, FloatVector], log_risk: FloatVector, times: FloatVector
) -> npt.NDArray[np.float64]:
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
