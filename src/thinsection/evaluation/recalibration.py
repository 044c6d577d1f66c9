"""Smooth calibration curve, and what recalibration on the tested cases would change.

The patient of each case is the unit of every interval.

Shapes: n cases, G places of a grid.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.evaluation.cases import Groups
from thinsection.evaluation.curves import Band
from thinsection.evaluation.external import (
    MIN_OF_EACH,
    Estimate,
    coefficient,
    logistic_fit,
    logit,
)
from thinsection.evaluation.metrics import Flags, FloatVector

KNOTS = (0.1, 0.5, 0.9)  # quantiles of the predicted log odds (Harrell)
PLACES = 51  # of the smooth curve
FOLDS = 10  # of patients, for recalibrated probabilities


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

    A logistic regression on a restricted cubic spline of the predicted log odds, with a cluster
    sandwich over patients; a straight line where the knots coincide. None with fewer than 5
    patients of a class, or where it does not converge.

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
    observed, low, high = (1 / (1 + np.exp(-end)) for end in ends)
    return Band(x=place, y=observed, low=low, high=high)


def _spline_columns(x: FloatVector, knots: FloatVector) -> npt.NDArray[np.float64]:
    """Columns (n, 3) of a spline of 3 knots that is a straight line beyond the outer ones.

    (n, 2), the straight line alone, where two knots coincide.
    """
    line = np.column_stack([np.ones(len(x)), x])
    first, middle, last = knots
    if min(middle - first, last - middle) < 1e-6 * max(1.0, last - first):
        return line

    def cube(knot: float) -> FloatVector:
        return np.asarray(np.maximum(x - knot, 0) ** 3)

    inner = cube(first)
    inner -= cube(middle) * (last - first) / (last - middle)
    inner += cube(last) * (middle - first) / (last - middle)
    return np.column_stack([line, inner / (last - first) ** 2])


def recalibrated(
    truth: Flags, probability: FloatVector, groups: Groups
) -> Recalibration | None:
    """Recalibration fitted on these cases; None where a fit does not converge.

    The coefficients are those of all cases. The probability of a case is that of coefficients from
    the other patients, so that scores after recalibration are not those of its own fit.

    Source: Cox, Biometrika 45 (1958); Steyerberg, "Clinical Prediction Models", 2019, chapter 20.
    """
    codes = groups.codes
    y = truth.astype(np.float64)
    x = np.column_stack([np.ones(len(y)), logit(probability)])
    whole = logistic_fit(x, y, np.zeros(len(y)), codes)
    if whole is None:
        return None
    units = int(codes.max()) + 1
    # a fixed order: the same cases have the same folds
    fold_of_unit = np.random.default_rng(0).permutation(units) % FOLDS
    fold = fold_of_unit[codes]
    log_odds = np.empty(len(y))
    for number in np.unique(fold):
        others = fold != number
        rest = logistic_fit(
            x[others], y[others], np.zeros(int(others.sum())), _ranks(codes[others])
        )
        if rest is None:
            return None
        log_odds[~others] = x[~others] @ rest.coefficients
    return Recalibration(
        intercept=coefficient(whole, 0, groups),
        slope=coefficient(whole, 1, groups),
        probability=1 / (1 + np.exp(-np.clip(log_odds, -700, 700))),
    )


def _ranks(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.unique(codes, return_inverse=True)[1].astype(np.int64)
