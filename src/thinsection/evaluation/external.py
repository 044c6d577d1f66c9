"""Scores of a locked model on new cases: thresholds, calibration, recalibration, decisions.

Everything here works on arrays: the truth of n cases, the predictions of a fixed model, and the
patient of each case, which is the unit of every interval. Only the lines and curves of calibration
are fitted to these cases, to describe them. Discrimination (AUROC, average precision,
c-index) comes from `metrics` and `intervals`, survival from `survival`.

Shapes: n cases, T thresholds, G places of a grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import Groups, Unit
from thinsection.evaluation.curves import Band
from thinsection.evaluation.intervals import (
    TAIL,
    Sampling,
    interval,
    why_missing,
)
from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    IndexArray,
    Weights,
    ratio,
)
from thinsection.types import Floats

BINS = 10  # largest number of bins of a calibration curve
MIN_OF_EACH = (
    5  # smallest number of events, and of cases without one, for a calibration line
)
# smallest distance of a probability from 0 and 1 before its logit is taken
PROBABILITY_CLIP = 1e-7
PROPORTION_METHOD = "Wilson's score interval, jackknife"
NEWTON_STEPS = 100
NEWTON_TOLERANCE = 1e-10
KNOTS = (0.1, 0.5, 0.9)  # quantiles of the predicted log odds (Harrell)
PLACES = 51  # number of points of the smooth curve
FOLDS = 10  # number of folds of patients, for recalibrated probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its 95 % confidence interval; its ends are NaN if there is none."""

    value: float
    low: float
    high: float
    cases: int  # number of cases
    units: int  # number of patients of these cases, or of other units if patients are unknown
    unit: Unit  # kind of the units
    method: str  # method of the interval; '' if there is none
    hits: int | None = None  # number of cases that a proportion counts
    missing: str = ""  # reason why there is no interval


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBin:
    """Cases of similar predicted probability."""

    predicted: float  # mean predicted probability
    observed: Estimate  # observed frequency


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationLine:
    """Calibration line; intercept 0 and slope 1 if predictions are right on average."""

    # calibration in the large: the intercept with the slope fixed at 1
    intercept: Estimate
    slope: Estimate


@dataclass(frozen=True, kw_only=True)
class DecisionCurve:
    """Net benefit at each threshold probability, all arrays (T,)."""

    thresholds: FloatVector
    model: FloatVector
    low: FloatVector  # pointwise 95 % interval of `model`; NaN if there is none
    high: FloatVector
    treat_all: FloatVector  # net benefit of acting on every case; acting on none has 0
    called: IndexArray  # number of cases that reach the threshold
    events: IndexArray  # number of positive cases among them


def proportion(hits: Flags, groups: Groups) -> Estimate:
    """Share of the cases (n,) that are hits, with the interval of `intervals.interval`.

    The interval is Wilson's, with the variance between patients. The value is NaN without cases.
    """
    values = hits.astype(np.float64)

    def share(weights: Weights) -> FloatVector:
        return ratio(weights @ values, weights.sum(axis=1), empty=np.nan)

    bounds = interval(Sampling.of_rows(groups), share, "proportion")
    return Estimate(
        value=float(values.mean()) if len(values) else np.nan,
        low=bounds.low,
        high=bounds.high,
        cases=len(values),
        units=groups.total,
        unit=groups.unit,
        method=bounds.method and PROPORTION_METHOD,
        hits=int(hits.sum()),
        missing=bounds.missing,
    )


def threshold_metrics(
    truth: Flags, called: Flags, groups: Groups
) -> dict[str, Estimate]:
    """Accuracy, sensitivity, specificity, PPV and NPV of calls (n,) at a fixed threshold."""
    right = truth == called
    cases_by_metric = {
        "accuracy": np.ones(len(truth), dtype=bool),
        "sensitivity": truth,
        "specificity": ~truth,
        "ppv": called,
        "npv": ~called,
    }
    return {
        name: proportion(right[cases], groups.take(np.flatnonzero(cases)))
        for name, cases in cases_by_metric.items()
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


def logit(probability: FloatVector) -> FloatVector:
    """Log odds of probabilities, which stay PROBABILITY_CLIP away from 0 and 1."""
    clipped = np.clip(probability, PROBABILITY_CLIP, 1 - PROBABILITY_CLIP)
    return np.log(clipped / (1 - clipped))


def calibration_line(
    truth: Flags, probability: FloatVector, groups: Groups
) -> CalibrationLine | None:
    """Calibration intercept and slope of n cases; None with fewer than 5 patients of a class.

    The slope comes from a logistic regression of the truth on the logit of the predicted
    probability. The intercept comes from a regression with this logit as offset. None also if the
    logits separate the classes, since the slope is then infinite.

    The intervals use the cluster sandwich variance over patients, since Wald's variance is wrong
    for predictions that are not calibrated. The degrees of freedom of Student's t are the number of
    units minus the number of coefficients.

    Source: Cox, Biometrika 45 (1958); Van Calster et al., BMC Medicine 17 (2019); Liang and Zeger,
    Biometrika 73 (1986); the correction for few units is that of MacKinnon and White (1985), HC1.
    """
    codes = groups.codes
    units_of_class = [len(np.unique(codes[rows])) for rows in (truth, ~truth)]
    if min(units_of_class) < MIN_OF_EACH:
        return None
    logits = logit(probability)
    y = truth.astype(np.float64)
    ones = np.ones((len(y), 1))
    both = np.column_stack([ones, logits])
    with_slope = logistic_fit(both, y, np.zeros(len(y)), codes)
    in_the_large = logistic_fit(ones, y, logits, codes)
    if with_slope is None or in_the_large is None:
        return None
    return CalibrationLine(
        intercept=coefficient(in_the_large, 0, groups),
        slope=coefficient(with_slope, 1, groups),
    )


class Fit(NamedTuple):
    """Coefficients of a regression with their covariance by a cluster sandwich."""

    coefficients: FloatVector  # (P,)
    covariance: Floats  # (P, P)
    reach: float  # quantile of Student's t for an interval


def logistic_fit(
    x: Floats, y: FloatVector, offset: FloatVector, codes: IndexArray
) -> Fit | None:
    """Logistic regression of y (n,) on columns (n, P) by Newton's method.

    None if it does not converge. `codes` has the unit of each case, (n,), see `Groups.codes`.
    """
    beta = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        probability = _share(x @ beta + offset)
        weight = probability * (1 - probability)
        information = x.T @ (weight[:, None] * x)
        if np.linalg.cond(information) > 1e12:
            return None
        step = np.linalg.solve(information, x.T @ (y - probability))
        # a long step overshoots where probabilities are extreme
        beta = beta + step / max(1.0, float(np.abs(step).max()) / 4)
        if np.abs(step).max() < NEWTON_TOLERANCE:
            return _sandwich(beta, information, x * (y - probability)[:, None], codes)
    return None


def _sandwich(
    beta: FloatVector,
    information: Floats,
    scores: Floats,
    codes: IndexArray,
) -> Fit:
    """Fit with the covariance of a cluster sandwich, from the score (n, P) of each case."""
    from scipy.special import stdtrit

    units = int(codes.max()) + 1
    score = np.zeros((units, scores.shape[1]))
    np.add.at(score, codes, scores)
    degrees = max(1, units - scores.shape[1])
    bread = np.linalg.inv(information)
    covariance = bread @ (score.T @ score) @ bread * units / degrees
    return Fit(beta, covariance, float(stdtrit(degrees, 1 - TAIL)))


def coefficient(fit: Fit, place: int, groups: Groups) -> Estimate:
    """A coefficient of a fit with its interval."""
    value = float(fit.coefficients[place])
    reach = fit.reach * float(fit.covariance[place, place]) ** 0.5
    return Estimate(
        value=value,
        low=value - reach,
        high=value + reach,
        cases=len(groups.of_row),
        units=groups.total,
        unit=groups.unit,
        method="cluster sandwich",
    )


def calibration_curve(
    truth: Flags, probability: FloatVector, groups: Groups
) -> list[CalibrationBin]:
    """Observed frequency by bins of equally many cases, in order of predicted probability."""
    order = np.argsort(probability, kind="stable")
    parts = np.array_split(order, min(BINS, max(1, len(order) // MIN_OF_EACH)))
    return [
        CalibrationBin(
            predicted=float(probability[rows].mean()),
            observed=proportion(truth[rows], groups.take(rows)),
        )
        for rows in parts
    ]


def decision_curve(
    truth: Flags,
    probability: FloatVector,
    sampling: Sampling | None,
    thresholds: Sequence[float] = (),
) -> DecisionCurve:
    """Net benefit of acting on cases whose probability reaches a threshold.

    Net benefit = TP / n - FP / n * t / (1 - t). Without `thresholds` from 0.01 to 0.99. It is a
    mean over cases, so that its variance is that of sums over patients. None has no interval.

    Memory: 16 n T. Source: Vickers and Elkin, Medical Decision Making 26 (2006).
    """
    t = np.array(thresholds) if len(thresholds) else np.arange(1, 100) / 100
    called = probability >= t[:, None]
    odds = t / (1 - t)
    gain = np.where(truth, 1.0, -odds[:, None]) * called
    model = gain.mean(axis=1)
    reach = np.full(len(t), np.nan)
    if sampling is not None and not why_missing(sampling):
        reach = _reach_of_means(gain - model[:, None], sampling)
    prevalence = truth.mean()
    return DecisionCurve(
        thresholds=t,
        model=model,
        low=model - reach,
        high=model + reach,
        treat_all=prevalence - (1 - prevalence) * odds,
        called=called.sum(axis=1),
        events=(called & truth).sum(axis=1),
    )


def _reach_of_means(deviations: Floats, sampling: Sampling) -> FloatVector:
    """Half of the 95 % interval of T means, from the deviations (T, n) of cases from them."""
    from scipy.special import stdtrit

    units = sampling.units
    sums = np.zeros((units, len(deviations)))
    np.add.at(sums, sampling.codes, deviations.T)
    variance = (sums**2).sum(axis=0) * units / (units - 1) / deviations.shape[1] ** 2
    variance *= sampling.fold_inflation()
    return np.asarray(float(stdtrit(units - 1, 1 - TAIL)) * np.sqrt(variance))


def difference(first: Estimate, second: Estimate) -> tuple[float, float, float]:
    """Difference of two independent proportions with its 95 % interval.

    Source: Newcombe, Statistics in Medicine 17 (1998), 873: method 10, from the interval of each.
    """
    value = first.value - second.value
    down = np.hypot(first.value - first.low, second.high - second.value)
    up = np.hypot(first.high - first.value, second.value - second.low)
    return value, value - float(down), value + float(up)


def value_line(
    measured: FloatVector, predicted: FloatVector, groups: Groups
) -> CalibrationLine | None:
    """Least-squares line of measured on predicted values (n,), by a cluster sandwich.

    None with fewer than 5 patients, or if all predictions are equal.
    """
    if groups.total < MIN_OF_EACH or not np.ptp(predicted):
        return None
    x = np.column_stack([np.ones(len(predicted)), predicted])
    information = x.T @ x
    beta = np.linalg.solve(information, x.T @ measured)
    residual = measured - x @ beta
    fit = _sandwich(beta, information, x * residual[:, None], groups.codes)
    return CalibrationLine(
        intercept=coefficient(fit, 0, groups), slope=coefficient(fit, 1, groups)
    )


@dataclass(frozen=True, kw_only=True)
class Recalibration:
    """Logistic recalibration: log odds = intercept + slope x predicted log odds."""

    intercept: Estimate
    slope: Estimate
    # (n,) recalibrated on the patients of the other FOLDS - 1 folds
    probability: FloatVector


def smooth_calibration(
    truth: Flags, probability: FloatVector, groups: Groups
) -> Band | None:
    """Observed frequency (G,) by predicted probability, with a pointwise band.

    The curve is a logistic regression on a restricted cubic spline of the predicted log odds, with
    a cluster sandwich over patients. It is a straight line if the knots coincide. None with fewer
    than 5 patients of a class, or if it does not converge.

    Source: Harrell, "Regression Modeling Strategies", 2015; Van Calster et al., Journal of Clinical
    Epidemiology 74 (2016): flexible calibration curves.
    """
    codes = groups.codes
    if min(len(np.unique(codes[rows])) for rows in (truth, ~truth)) < MIN_OF_EACH:
        return None
    place = np.linspace(probability.min(), probability.max(), PLACES)
    log_odds = logit(probability)
    knots = np.quantile(log_odds, KNOTS)
    y = truth.astype(np.float64)
    basis = _spline_columns(log_odds, knots)
    fit = logistic_fit(basis, y, np.zeros(len(y)), codes)
    grid = _spline_columns(logit(place), knots)
    if fit is None:
        basis, grid = basis[:, :2], grid[:, :2]
        fit = logistic_fit(basis, y, np.zeros(len(y)), codes)
    if fit is None:
        return None
    middle = grid @ fit.coefficients
    error = np.sqrt(((grid @ fit.covariance) * grid).sum(axis=1))
    ends = (middle, middle - fit.reach * error, middle + fit.reach * error)
    observed, low, high = map(_share, ends)
    return Band(x=place, y=observed, low=low, high=high)


def _share(log_odds: FloatVector) -> FloatVector:
    """Probability of log odds; far ones do not overflow."""
    share: FloatVector = 1 / (1 + np.exp(-np.clip(log_odds, -700, 700)))
    return share


def _spline_columns(x: FloatVector, knots: FloatVector) -> Floats:
    """Columns (n, 3) of a spline of 3 knots that is a straight line beyond the outer ones.

    (n, 2), the straight line alone, where two knots coincide.
    """
    line = np.column_stack([np.ones(len(x)), x])
    first, middle, last = knots
    if min(middle - first, last - middle) < 1e-6 * max(1.0, last - first):
        return line

    def cube(knot: float) -> FloatVector:
        return np.maximum(x - knot, 0) ** 3

    inner = cube(first)
    inner -= cube(middle) * (last - first) / (last - middle)
    inner += cube(last) * (middle - first) / (last - middle)
    return np.column_stack([line, inner / (last - first) ** 2])


def recalibrated(
    truth: Flags, probability: FloatVector, groups: Groups
) -> Recalibration | None:
    """Recalibration fitted on these cases; None where a fit does not converge.

    The coefficients are fitted on all cases. The probability of a case comes from coefficients that
    were fitted on other patients, so that scores after recalibration are not too optimistic.

    Source: Cox, Biometrika 45 (1958); Steyerberg, "Clinical Prediction Models", 2019, chapter 20.
    """
    codes = groups.codes
    y = truth.astype(np.float64)
    x = np.column_stack([np.ones(len(y)), logit(probability)])
    whole = logistic_fit(x, y, np.zeros(len(y)), codes)
    if whole is None:
        return None
    units = int(codes.max()) + 1
    # the seed is fixed, so that the same cases have the same folds
    fold_of_unit = np.random.default_rng(0).permutation(units) % FOLDS
    fold = fold_of_unit[codes]
    log_odds = np.empty(len(y))
    for number in np.unique(fold):
        in_train = fold != number
        unit = np.unique(codes[in_train], return_inverse=True)[1].astype(np.int64)
        fit = logistic_fit(x[in_train], y[in_train], np.zeros(len(unit)), unit)
        if fit is None:
            return None
        log_odds[~in_train] = x[~in_train] @ fit.coefficients
    return Recalibration(
        intercept=coefficient(whole, 0, groups),
        slope=coefficient(whole, 1, groups),
        probability=_share(log_odds),
    )
