"""Smooth calibration curves and recalibration: other packages, identities, simulated truth."""

import numpy as np
import pytest
from scipy.interpolate import CubicSpline
from sklearn.linear_model import LogisticRegression
from tests.support.units import units

from thinsection.evaluation.external import (
    calibration_line,
    recalibrated,
    smooth_calibration,
)


def patients_with_cases(
    rng: np.random.Generator, patients: int, several: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Truth, predicted probability (too extreme, too high) and patient of cases."""
    patient = np.repeat(np.arange(patients), several)
    logit = rng.normal(size=patients)[patient] + 0.5 * rng.normal(size=len(patient))
    truth = rng.random(len(patient)) < 1 / (1 + np.exp(-logit))
    return truth, 1 / (1 + np.exp(-(1.5 * logit + 0.5))), patient


def log_odds(probability: np.ndarray) -> np.ndarray:
    return np.log(probability / (1 - probability))


def unpenalised(x: np.ndarray, truth: np.ndarray) -> LogisticRegression:
    model = LogisticRegression(C=np.inf, tol=1e-12, max_iter=10_000)
    return model.fit(x, truth)


def test_recalibration_is_scikit_learns_and_its_slope_that_of_the_line() -> None:
    truth, probability, _ = patients_with_cases(np.random.default_rng(0), 300, 1)
    found = recalibrated(truth, probability, units(300))
    line = calibration_line(truth, probability, units(300))
    assert found is not None and line is not None
    judge = unpenalised(log_odds(probability)[:, None], truth)
    assert found.intercept.value == pytest.approx(judge.intercept_[0], abs=1e-6)
    assert found.slope.value == pytest.approx(judge.coef_[0, 0], abs=1e-6)
    assert (found.slope.low, found.slope.high) == (line.slope.low, line.slope.high)
    # the truth of the simulation: logit = (predicted - 0.5) / 1.5
    assert found.slope.low < 1 / 1.5 < found.slope.high
    assert found.intercept.low < -0.5 / 1.5 < found.intercept.high


def test_a_case_is_recalibrated_by_other_patients_alone() -> None:
    truth, probability, patient = patients_with_cases(np.random.default_rng(2), 60, 3)
    groups = units([f"{p:03}" for p in patient])
    found = recalibrated(truth, probability, groups)
    assert found is not None
    own = patient == 7
    flipped = recalibrated(np.where(own, ~truth, truth), probability, groups)
    assert flipped is not None
    np.testing.assert_allclose(flipped.probability[own], found.probability[own])
    assert not np.allclose(flipped.probability[~own], found.probability[~own])
    after = calibration_line(truth, found.probability, groups)
    assert after is not None and after.slope.low < 1 < after.slope.high


def test_the_smooth_curve_is_that_of_scipys_natural_spline() -> None:
    """Any basis of the cubic splines that are straight beyond the outer knots has one fit."""
    truth, probability, _ = patients_with_cases(np.random.default_rng(3), 250, 1)
    band = smooth_calibration(truth, probability, units(250))
    assert band is not None
    x = log_odds(probability)
    knots = np.quantile(x, (0.1, 0.5, 0.9))
    grid = log_odds(band.x)
    columns = [CubicSpline(knots, row, bc_type="natural") for row in np.eye(3)]

    def basis(z: np.ndarray) -> np.ndarray:
        straight = []
        for column in columns:
            value = column(np.clip(z, knots[0], knots[-1]))
            below = np.minimum(z - knots[0], 0) * column(knots[0], 1)
            above = np.maximum(z - knots[-1], 0) * column(knots[-1], 1)
            straight.append(value + below + above)
        return np.column_stack(straight)

    judge = LogisticRegression(
        C=np.inf, tol=1e-12, max_iter=10_000, fit_intercept=False
    )
    judge.fit(basis(x), truth)
    expected = judge.predict_proba(basis(grid))[:, 1]
    np.testing.assert_allclose(band.y, expected, atol=1e-5)
    assert (band.low <= band.y).all() and (band.y <= band.high).all()


def test_few_patients_or_equal_probabilities_have_no_curve_or_a_line() -> None:
    truth, probability, _ = patients_with_cases(np.random.default_rng(4), 40, 1)
    few = np.zeros(40, bool)
    few[:4] = True
    assert smooth_calibration(few, probability, units(40)) is None
    rounded = np.where(probability < 0.5, 0.3, 0.7)
    band = smooth_calibration(truth, rounded, units(40))
    assert band is not None  # two values: the line through both frequencies
    assert band.y[0] == pytest.approx(truth[rounded == 0.3].mean(), abs=1e-6)
    assert band.y[-1] == pytest.approx(truth[rounded == 0.7].mean(), abs=1e-6)


@pytest.mark.check
@pytest.mark.parametrize("several", [1, 4])
def test_the_band_of_the_smooth_curve_covers_the_truth(several: int) -> None:
    """At three predicted probabilities; the truth is the formula of the simulation."""
    rng = np.random.default_rng(5)
    places = np.array([0.3, 0.5, 0.8])
    true = 1 / (1 + np.exp(-(log_odds(places) - 0.5) / 1.5))
    held = np.zeros(3)
    for _ in range(300):
        truth, probability, patient = patients_with_cases(rng, 120, several)
        band = smooth_calibration(truth, probability, units(patient.tolist()))
        assert band is not None
        low = np.interp(places, band.x, band.low)
        high = np.interp(places, band.x, band.high)
        held += (low <= true) & (true <= high)
    assert (held >= 0.92 * 300).all()
    assert (held <= 0.99 * 300).all()
