"""Scores of a locked model on new cases: thresholds, calibration, decisions, survival.

Everything here works on arrays: the truth of n independent cases beside what a fixed model
predicted for them. Nothing is fitted to these cases but the calibration line, which describes
them. Discrimination (AUROC, average precision, c-index) comes from `metrics` and `intervals`.

Shapes: n cases, T times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.metrics import Flags, FloatVector, IndexArray

LEVEL = 0.95
BINS = 10  # of a calibration curve, at most
SURVIVAL_BINS = 5  # of survival, at most
MIN_OF_BIN = 10  # cases in a bin of survival
MIN_OF_EACH = 5  # events, and cases without one, for a calibration line
# nearest that a probability comes to 0 or 1 when its logit is taken
PROBABILITY_CLIP = 1e-7
NEWTON_STEPS = 100
NEWTON_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its 95 % confidence interval; NaN ends where none can be given."""

    value: float
    low: float
    high: float
    cases: int  # that it was computed from
    method: str  # of the interval


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBin:
    """Cases of similar predicted probability."""

    predicted: float  # mean predicted probability
    observed: Estimate  # observed frequency


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationLine:
    """Calibration: 0 and 1 where predictions are right on average."""

    # of probabilities with the slope fixed at 1: calibration in the large
    intercept: Estimate
    slope: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionCurve:
    """Net benefit at each threshold probability, all arrays (T,)."""

    thresholds: FloatVector
    model: FloatVector
    treat_all: FloatVector  # of acting on every case; acting on none has 0


def proportion(successes: int, cases: int) -> Estimate:
    """Share of successes with the exact interval of Clopper and Pearson (1934).

    Its coverage is at least 95 % for any number of cases. No cases give NaN.
    """
    from scipy.stats import beta

    if cases == 0:
        return Estimate(
            value=np.nan, low=np.nan, high=np.nan, cases=0, method="Clopper-Pearson"
        )
    tail = (1 - LEVEL) / 2
    low = 0.0
    if successes > 0:
        low = float(beta.ppf(tail, successes, cases - successes + 1))
    high = 1.0
    if successes < cases:
        high = float(beta.ppf(1 - tail, successes + 1, cases - successes))
    return Estimate(
        value=successes / cases,
        low=low,
        high=high,
        cases=cases,
        method="Clopper-Pearson",
    )


def threshold_metrics(truth: Flags, called: Flags) -> dict[str, Estimate]:
    """Accuracy, sensitivity, specificity, PPV and NPV of calls (n,) at a fixed threshold."""
    right = truth == called
    return {
        "accuracy": proportion(int(right.sum()), len(truth)),
        "sensitivity": proportion(int(right[truth].sum()), int(truth.sum())),
        "specificity": proportion(int(right[~truth].sum()), int((~truth).sum())),
        "ppv": proportion(int(right[called].sum()), int(called.sum())),
        "npv": proportion(int(right[~called].sum()), int((~called).sum())),
    }


def youden_threshold(truth: Flags, probability: FloatVector) -> float:
    """The threshold with the largest sensitivity + specificity, midway between two probabilities.

    Of equal ones the nearest to 0.5. It is chosen on validation cases and then fixed.
    Raises InvalidInputError: only one class.
    """
    if truth.all() or not truth.any():
        raise InvalidInputError(
            f"cases must belong to two classes for a threshold, got {int(truth.sum())} positive "
            f"of {len(truth)}"
        )
    distinct = np.unique(probability)
    middle = (distinct[1:] + distinct[:-1]) / 2
    ends = ([distinct[0] / 2], [(1 + distinct[-1]) / 2])
    thresholds = np.concatenate([ends[0], middle, ends[1]])
    called = probability >= thresholds[:, None]
    sensitivity = (called & truth).sum(axis=1) / truth.sum()
    specificity = (~called & ~truth).sum(axis=1) / (~truth).sum()
    gain = sensitivity + specificity
    best = np.flatnonzero(gain >= gain.max() - 1e-12)
    return float(thresholds[best[np.abs(thresholds[best] - 0.5).argmin()]])


def _logit(probability: FloatVector) -> FloatVector:
    clipped = np.clip(probability, PROBABILITY_CLIP, 1 - PROBABILITY_CLIP)
    return np.asarray(np.log(clipped / (1 - clipped)))


def calibration_line(
    truth: Flags, probability: FloatVector, groups: Groups
) -> CalibrationLine | None:
    """Calibration intercept and slope of n cases; None with fewer than 5 patients of a class.

    The intervals are those of a cluster sandwich over patients: the model whose variance Wald's
    would take is wrong where predictions are. Student's t has the units less the coefficients.

    The slope is that of a logistic regression of the truth on the logit of the predicted
    probability, the intercept that of one with this logit as offset. None too where the logits
    separate the classes, as the slope is then infinite.
    Source: Cox, Biometrika 45 (1958); Van Calster et al., BMC Medicine 17 (2019); Liang and Zeger,
    Biometrika 73 (1986); the correction for few units is that of MacKinnon and White (1985), HC1.
    """
    codes = groups.codes
    units_of_class = [len(np.unique(codes[rows])) for rows in (truth, ~truth)]
    if min(units_of_class) < MIN_OF_EACH:
        return None
    logits = _logit(probability)
    y = truth.astype(np.float64)
    ones = np.ones((len(y), 1))
    with_slope = _logistic_fit(np.column_stack([ones, logits]), y, np.zeros(len(y)))
    in_the_large = _logistic_fit(ones, y, logits)
    if with_slope is None or in_the_large is None:
        return None
    return CalibrationLine(
        intercept=_sandwich(ones, y, logits, in_the_large, codes, place=0),
        slope=_sandwich(
            np.column_stack([ones, logits]),
            y,
            np.zeros(len(y)),
            with_slope,
            codes,
            place=1,
        ),
    )


def _logistic_fit(
    x: npt.NDArray[np.float64], y: FloatVector, offset: FloatVector
) -> FloatVector | None:
    """Coefficients by Newton's method; None where it does not converge."""
    beta = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        probability = 1 / (1 + np.exp(-np.clip(x @ beta + offset, -700, 700)))
        weight = probability * (1 - probability)
        information = x.T @ (weight[:, None] * x)
        if np.linalg.cond(information) > 1e12:
            return None
        step = np.linalg.solve(information, x.T @ (y - probability))
        # a long step overshoots where probabilities are extreme
        beta = beta + step / max(1.0, float(np.abs(step).max()) / 4)
        if np.abs(step).max() < NEWTON_TOLERANCE:
            return beta
    return None


def _sandwich(
    x: npt.NDArray[np.float64],
    y: FloatVector,
    offset: FloatVector,
    beta: FloatVector,
    codes: IndexArray,
    *,
    place: int,
) -> Estimate:
    """A coefficient with the interval of a cluster sandwich."""
    from scipy.stats import t

    probability = 1 / (1 + np.exp(-np.clip(x @ beta + offset, -700, 700)))
    bread = np.linalg.inv(x.T @ ((probability * (1 - probability))[:, None] * x))
    units = int(codes.max()) + 1
    score = np.zeros((units, x.shape[1]))
    np.add.at(score, codes, x * (y - probability)[:, None])
    degrees = units - x.shape[1]
    covariance = bread @ (score.T @ score) @ bread * units / degrees
    reach = float(t.ppf(1 - (1 - LEVEL) / 2, degrees) * covariance[place, place] ** 0.5)
    value = float(beta[place])
    return Estimate(
        value=value,
        low=value - reach,
        high=value + reach,
        cases=len(y),
        method="cluster sandwich",
    )


def calibration_curve(truth: Flags, probability: FloatVector) -> list[CalibrationBin]:
    """Observed frequency by bins of equally many cases, in order of predicted probability."""
    order = np.argsort(probability, kind="stable")
    parts = np.array_split(order, min(BINS, max(1, len(order) // MIN_OF_EACH)))
    return [
        CalibrationBin(
            predicted=float(probability[rows].mean()),
            observed=proportion(int(truth[rows].sum()), len(rows)),
        )
        for rows in parts
    ]


def decision_curve(
    truth: Flags, probability: FloatVector, thresholds: Sequence[float] = ()
) -> DecisionCurve:
    """Net benefit of acting on cases whose probability reaches a threshold.

    Net benefit = TP / n - FP / n * t / (1 - t). Without `thresholds` from 0.01 to 0.99.
    Source: Vickers and Elkin, Medical Decision Making 26 (2006).
    """
    t = np.array(thresholds) if len(thresholds) else np.arange(1, 100) / 100
    called = probability >= t[:, None]
    odds = t / (1 - t)
    true_positives = (called & truth).mean(axis=1)
    false_positives = (called & ~truth).mean(axis=1)
    prevalence = truth.mean()
    return DecisionCurve(
        thresholds=t,
        model=true_positives - false_positives * odds,
        treat_all=prevalence - (1 - prevalence) * odds,
    )


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


def survival_curve(event: Flags, time: FloatVector) -> SurvivalCurve:
    """Kaplan-Meier estimate at each distinct time, with log-log intervals by Greenwood's variance.

    Source: Kaplan and Meier, JASA 53 (1958); Kalbfleisch and Prentice (1980).
    """
    from scipy.stats import norm

    times = np.unique(time)
    at_risk = len(time) - np.searchsorted(np.sort(time), times, side="left")
    died = np.array([int(event[time == t].sum()) for t in times])
    survival = np.cumprod(1 - died / at_risk)
    with np.errstate(divide="ignore", invalid="ignore"):
        greenwood = np.cumsum(died / (at_risk * (at_risk - died)))
        spread = np.sqrt(greenwood) / np.log(survival)
        reach = float(norm.ppf(1 - (1 - LEVEL) / 2)) * spread
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
    event: Flags, time: FloatVector, value: FloatVector
) -> Estimate | None:
    """Hazard ratio for one unit of `value` (n,), Efron's ties, Wald interval; None if not finite.

    Memory: n. Source: Cox (1972); Efron, JASA 72 (1977).
    """
    from scipy.stats import norm

    order = np.argsort(-time, kind="stable")
    ordered_event = event[order]
    ordered_value = value[order]
    centred = ordered_value - ordered_value.mean()
    last_of_time = np.flatnonzero(np.r_[np.diff(time[order]) != 0, True])
    beta = 0.0
    for _ in range(NEWTON_STEPS):
        score, information = _efron(ordered_event, centred, last_of_time, beta)
        if information < 1e-12:
            return None
        step = score / information
        beta += float(np.clip(step, -2, 2))
        if abs(beta) > 30:  # the values order the events perfectly
            return None
        if abs(step) < NEWTON_TOLERANCE:
            reach = float(norm.ppf(1 - (1 - LEVEL) / 2)) / float(np.sqrt(information))
            return Estimate(
                value=float(np.exp(beta)),
                low=float(np.exp(beta - reach)),
                high=float(np.exp(beta + reach)),
                cases=len(event),
                method="Wald",
            )
    return None


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
    event: Flags, time: FloatVector, survival: FloatVector, t: float
) -> list[CalibrationBin]:
    """Kaplan-Meier survival at a time by bins of equally many cases, by predicted survival (n,)."""
    order = np.argsort(survival, kind="stable")
    parts = np.array_split(order, min(SURVIVAL_BINS, max(1, len(order) // MIN_OF_BIN)))
    calibration = []
    for rows in parts:
        curve = survival_curve(event[rows], time[rows])
        place = int(np.searchsorted(curve.times, t, side="right")) - 1
        observed = Estimate(
            value=float(curve.survival[place]) if place >= 0 else 1.0,
            low=float(curve.low[place]) if place >= 0 else 1.0,
            high=float(curve.high[place]) if place >= 0 else 1.0,
            cases=len(rows),
            method="Kaplan-Meier, log-log",
        )
        predicted = float(survival[rows].mean())
        calibration.append(CalibrationBin(predicted=predicted, observed=observed))
    return calibration


def value_line(measured: FloatVector, predicted: FloatVector) -> CalibrationLine | None:
    """Least-squares line of measured on predicted values (n,), with Student's intervals.

    None with fewer than 5 cases, or where all predictions are equal.
    """
    from scipy.stats import linregress, t

    n = len(measured)
    if n < MIN_OF_EACH or not np.ptp(predicted):
        return None
    fit = linregress(predicted, measured)
    quantile = float(t.ppf(1 - (1 - LEVEL) / 2, n - 2))
    estimates = []
    for value, error in (
        (fit.intercept, fit.intercept_stderr),
        (fit.slope, fit.stderr),
    ):
        estimates.append(
            Estimate(
                value=float(value),
                low=float(value - quantile * error),
                high=float(value + quantile * error),
                cases=n,
                method="least squares",
            )
        )
    return CalibrationLine(intercept=estimates[0], slope=estimates[1])
