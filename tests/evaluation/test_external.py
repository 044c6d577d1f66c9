"""Figures of a locked model on new cases equal those of other packages, and cover known truth."""

import numpy as np
import pytest
from scipy.stats import binomtest, t, ttest_1samp
from sklearn.calibration import calibration_curve as sklearn_curve
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix, roc_curve
from tests.support.units import units

from thinsection.errors import InvalidInputError
from thinsection.evaluation.external import (
    Estimate,
    calibration_curve,
    calibration_line,
    decision_curve,
    difference,
    proportion,
    threshold_metrics,
    value_line,
    youden_threshold,
)
from thinsection.evaluation.intervals import Sampling


def cases(seed: int, n: int, *, slope: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Truth and predicted probabilities whose calibration slope is 1 / `slope`."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(size=n) * 1.5 - 0.5
    truth = rng.random(n) < 1 / (1 + np.exp(-logit))
    return truth, 1 / (1 + np.exp(-logit * slope))


def patients_with_cases(
    rng: np.random.Generator, patients: int, several: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Truth, predicted probability (too extreme) and patient of cases that share a part."""
    patient = np.repeat(np.arange(patients), several)
    logit = rng.normal(size=patients)[patient] + 0.5 * rng.normal(size=len(patient))
    truth = rng.random(len(patient)) < 1 / (1 + np.exp(-logit))
    return truth, 1 / (1 + np.exp(-1.5 * logit)), patient


@pytest.mark.parametrize(("successes", "n"), [(0, 17), (13, 17), (17, 17), (51, 200)])
def test_a_proportion_of_patients_with_one_case_is_nearly_wilsons(
    successes: int, n: int
) -> None:
    found = proportion(np.arange(n) < successes, units(n, "patients"))
    assert found.value == successes / n
    assert (found.hits, found.cases, found.units) == (successes, n, n)
    wilson = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    width = found.high - found.low
    assert found.low <= found.value <= found.high
    assert wilson.high - wilson.low <= width * 1.02
    assert width <= 1.15 * (wilson.high - wilson.low)


def test_a_proportion_of_repeated_cases_has_the_interval_of_the_patients() -> None:
    """Each patient four times tells no more than each patient once."""
    hits = np.random.default_rng(3).random(30) < 0.7
    once = proportion(hits, units(30))
    four = np.repeat(np.arange(30), 4)
    found = proportion(hits[four], units(four.tolist()))
    assert (found.value, found.cases, found.units) == (once.value, 120, 30)
    assert (found.low, found.high) == pytest.approx((once.low, once.high), abs=1e-6)
    as_cases = proportion(hits[four], units(120))
    assert as_cases.high - as_cases.low < 0.6 * (found.high - found.low)


def correlated_hits(
    rng: np.random.Generator, patients: int, cases: int, share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Hits and patients of cases whose correlation within a patient is .5."""
    own = rng.beta(share, 1 - share, patients)
    patient = np.repeat(np.arange(patients), cases)
    return rng.random(len(patient)) < own[patient], patient


@pytest.mark.check
@pytest.mark.parametrize("cases", [1, 4])
@pytest.mark.parametrize("share", [0.6, 0.9])
def test_proportions_cover_the_truth(cases: int, share: float) -> None:
    rng = np.random.default_rng(4)
    held = 0
    by_case = 0
    for _ in range(400):
        hits, patient = correlated_hits(rng, 30, cases, share)
        found = proportion(hits, units(patient.tolist()))
        held += found.low <= share <= found.high
        alone = proportion(hits, units(len(hits)))
        by_case += alone.low <= share <= alone.high
    assert held >= 0.93 * 400
    assert cases == 1 or by_case < 0.85 * 400  # the simulation notices the wrong unit


def test_a_proportion_of_no_cases_has_no_value() -> None:
    found = proportion(np.zeros(0, bool), units(0))
    assert np.isnan([found.value, found.low, found.high]).all() and found.cases == 0
    assert found.missing


def test_figures_at_a_threshold_are_those_of_the_confusion_matrix() -> None:
    truth, probability = cases(1, 300)
    called = probability >= 0.4
    tn, fp, fn, tp = confusion_matrix(truth, called).ravel()
    found = threshold_metrics(truth, called, units(300))
    assert {name: estimate.value for name, estimate in found.items()} == {
        "accuracy": (tp + tn) / 300,
        "sensitivity": tp / (tp + fn),
        "specificity": tn / (tn + fp),
        "ppv": tp / (tp + fp),
        "npv": tn / (tn + fn),
    }
    assert found["ppv"].cases == tp + fp


def test_the_youden_threshold_gains_as_much_as_the_best_point_of_the_roc_curve() -> (
    None
):
    truth, probability = cases(2, 80)
    threshold = youden_threshold(truth, probability)
    found = threshold_metrics(truth, probability >= threshold, units(80))
    false_positive, true_positive, _ = roc_curve(truth, probability)
    gain = found["sensitivity"].value + found["specificity"].value - 1
    assert gain == pytest.approx((true_positive - false_positive).max(), abs=1e-12)
    assert (
        threshold not in probability
    )  # midway: the same calls on either side of rounding
    with pytest.raises(
        InvalidInputError, match="two classes for a threshold, got 0 positive"
    ):
        youden_threshold(np.zeros(5, bool), np.linspace(0, 1, 5))


def test_the_calibration_slope_is_scikit_learns_logistic_regression() -> None:
    truth, probability = cases(3, 400, slope=2.0)
    logit = np.log(probability / (1 - probability))[:, None]
    model = LogisticRegression(C=np.inf, tol=1e-12, max_iter=10_000)
    model.fit(logit, truth)
    line = calibration_line(truth, probability, units(len(truth)))
    assert line is not None
    assert line.slope.value == pytest.approx(model.coef_[0, 0], abs=1e-6)
    assert line.slope.low < 0.5 < line.slope.high  # the truth of this simulation
    # with its intercept, probabilities have the mean of the truth
    shifted = 1 / (1 + np.exp(-(logit[:, 0] + line.intercept.value)))
    assert shifted.mean() == pytest.approx(truth.mean(), abs=1e-9)


def test_the_slopes_interval_covers_the_truth() -> None:
    """200 external cohorts of 100 cases: at least .92 of 95 % intervals hold the true slope."""
    held = 0
    for seed in range(200):
        truth, probability = cases(1000 + seed, 100, slope=1.25)
        line = calibration_line(truth, probability, units(len(truth)))
        assert line is not None
        held += line.slope.low <= 1 / 1.25 <= line.slope.high
    assert held >= 184


def test_the_sandwich_of_patients_is_that_of_repeated_rows() -> None:
    """Rows that patients repeat give the interval of the patients, but for HC1's correction."""
    truth, probability = cases(5, 60, slope=1.0)
    once = calibration_line(truth, probability, units(60))
    four = np.repeat(np.arange(60), 4)
    line = calibration_line(truth[four], probability[four], units(four.tolist()))
    assert once is not None
    assert line is not None
    assert line.slope.low == pytest.approx(once.slope.low, abs=1e-6)
    assert line.intercept.high == pytest.approx(once.intercept.high, abs=1e-6)
    apart = calibration_line(truth[four], probability[four], units(240))
    assert apart is not None
    assert apart.slope.high - apart.slope.low < 0.6 * (line.slope.high - line.slope.low)


def test_the_sandwich_is_the_white_estimator_by_hand() -> None:
    truth, probability = cases(6, 80, slope=1.0)
    line = calibration_line(truth, probability, units(80))
    assert line is not None
    logit = np.log(probability / (1 - probability))
    fitted = 1 / (1 + np.exp(-(logit + line.intercept.value)))
    residual = truth - fitted
    error = (residual @ residual) ** 0.5 / (fitted * (1 - fitted)).sum()
    reach = t.ppf(0.975, 79) * error * (80 / 79) ** 0.5
    assert line.intercept.high - line.intercept.value == pytest.approx(reach)


def test_no_calibration_line_where_classes_are_few_or_separated() -> None:
    probability = np.linspace(0.01, 0.99, 40)
    assert calibration_line(probability > 0.95, probability, units(40)) is None
    assert calibration_line(probability > 0.5, probability, units(40)) is None


def test_calibration_bins_are_scikit_learns_quantile_bins() -> None:
    truth, probability = cases(4, 200)
    observed, predicted = sklearn_curve(
        truth, probability, n_bins=10, strategy="quantile"
    )
    bins = calibration_curve(truth, probability, units(200))
    np.testing.assert_allclose([b.predicted for b in bins], predicted, atol=1e-12)
    np.testing.assert_allclose([b.observed.value for b in bins], observed, atol=1e-12)
    assert all(b.observed.low <= b.observed.value <= b.observed.high for b in bins)


def wilson(hits: int, n: int) -> Estimate:
    bounds = binomtest(hits, n).proportion_ci(0.95, method="wilson")
    return Estimate(
        value=hits / n,
        low=bounds.low,
        high=bounds.high,
        cases=n,
        units=n,
        unit="cases",
        method="",
    )


def test_a_difference_of_proportions_is_newcombes_published_example() -> None:
    """Newcombe 1998, table II, method 10: 56/70 - 48/80 and 9/10 - 3/10."""
    assert difference(wilson(56, 70), wilson(48, 80)) == pytest.approx(
        (0.2, 0.0524, 0.3339), abs=5e-5
    )
    assert difference(wilson(9, 10), wilson(3, 10)) == pytest.approx(
        (0.6, 0.1705, 0.8090), abs=5e-5
    )


def test_net_benefit_of_known_calls() -> None:
    truth = np.array([True, True, False, False])
    probability = np.array([0.9, 0.4, 0.6, 0.1])
    curve = decision_curve(truth, probability, None, [0.5, 0.2])
    # at .5: one true and one false positive; at .2: two and one
    np.testing.assert_allclose(curve.model, [0.25 - 0.25, 0.5 - 0.25 * 0.25])
    np.testing.assert_allclose(curve.treat_all, [0.0, 0.5 - 0.5 * 0.25])
    assert curve.called.tolist() == [2, 3] and curve.events.tolist() == [1, 2]
    assert np.isnan(curve.low).all()


def test_the_band_of_net_benefit_is_students_interval_of_a_mean() -> None:
    truth, probability = cases(11, 120)
    curve = decision_curve(truth, probability, Sampling.of_rows(units(120)), [0.3])
    gain = np.where(truth, 1.0, -3 / 7) * (probability >= 0.3)
    judge = ttest_1samp(gain, 0).confidence_interval(0.95)
    assert curve.model[0] == pytest.approx(gain.mean(), abs=1e-12)
    assert (curve.low[0], curve.high[0]) == pytest.approx(
        (judge.low, judge.high), abs=1e-9
    )


@pytest.mark.check
@pytest.mark.parametrize("several", [1, 4])
def test_the_band_of_net_benefit_covers_the_truth(several: int) -> None:
    """60 patients of 1 or 4 cases with a risk in common; the truth is that of 400,000 cases."""
    thresholds = [0.2, 0.4, 0.6]
    truth, probability, _ = patients_with_cases(np.random.default_rng(1), 400_000, 1)
    true = decision_curve(truth, probability, None, thresholds).model
    rng = np.random.default_rng(2)
    held = np.zeros(3)
    for _ in range(300):
        truth, probability, patient = patients_with_cases(rng, 60, several)
        sampling = Sampling.of_rows(units(patient.tolist()))
        curve = decision_curve(truth, probability, sampling, thresholds)
        held += (curve.low <= true) & (true <= curve.high)
    assert (held >= 0.92 * 300).all()
    assert (held <= 0.99 * 300).all()


def test_the_line_of_values_covers_a_known_slope_and_needs_spread() -> None:
    held = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        predicted = rng.normal(size=30)
        line = value_line(
            0.5 * predicted + 1 + rng.normal(size=30), predicted, units(30)
        )
        assert line is not None
        held += line.slope.low <= 0.5 <= line.slope.high
    assert held >= 184
    assert value_line(np.arange(6.0), np.ones(6), units(6)) is None
