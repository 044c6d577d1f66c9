"""Figures of a locked model on new cases equal those of other packages, and cover known truth."""

import numpy as np
import pytest
from scipy.stats import binomtest, t
from sklearn.calibration import calibration_curve as sklearn_curve
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix, roc_curve
from tests.support.units import units

from thinsection.errors import InvalidInputError
from thinsection.evaluation.external import (
    breslow_baseline,
    calibration_curve,
    calibration_line,
    decision_curve,
    hazard_ratio,
    proportion,
    survival_bins,
    survival_curve,
    survival_probability,
    threshold_metrics,
    value_line,
    youden_threshold,
)


def cases(seed: int, n: int, *, slope: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Truth and predicted probabilities whose calibration slope is 1 / `slope`."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(size=n) * 1.5 - 0.5
    truth = rng.random(n) < 1 / (1 + np.exp(-logit))
    return truth, 1 / (1 + np.exp(-logit * slope))


def follow_up(seed: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Event, time with ties, log risk."""
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=n)
    death = rng.exponential(np.exp(-0.8 * risk) * 60)
    censored = rng.uniform(10, 120, size=n)
    time = np.ceil(np.minimum(death, censored))
    return death <= censored, time, risk


@pytest.mark.parametrize(("successes", "n"), [(0, 7), (3, 7), (7, 7), (51, 200)])
def test_proportions_have_scipys_exact_interval(successes: int, n: int) -> None:
    found = proportion(successes, n)
    expected = binomtest(successes, n).proportion_ci(0.95, method="exact")
    assert found.value == successes / n
    assert (found.low, found.high) == pytest.approx(
        (expected.low, expected.high), abs=1e-12
    )


def test_a_proportion_of_no_cases_has_no_value() -> None:
    found = proportion(0, 0)
    assert np.isnan([found.value, found.low, found.high]).all() and found.cases == 0


def test_figures_at_a_threshold_are_those_of_the_confusion_matrix() -> None:
    truth, probability = cases(1, 300)
    called = probability >= 0.4
    tn, fp, fn, tp = confusion_matrix(truth, called).ravel()
    found = threshold_metrics(truth, called)
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
    found = threshold_metrics(truth, probability >= threshold)
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
    bins = calibration_curve(truth, probability)
    np.testing.assert_allclose([b.predicted for b in bins], predicted, atol=1e-12)
    np.testing.assert_allclose([b.observed.value for b in bins], observed, atol=1e-12)
    assert all(b.observed.low <= b.observed.value <= b.observed.high for b in bins)


def test_net_benefit_of_known_calls() -> None:
    truth = np.array([True, True, False, False])
    probability = np.array([0.9, 0.4, 0.6, 0.1])
    curve = decision_curve(truth, probability, [0.5, 0.2])
    # at .5: one true and one false positive; at .2: two and one
    np.testing.assert_allclose(curve.model, [0.25 - 0.25, 0.5 - 0.25 * 0.25])
    np.testing.assert_allclose(curve.treat_all, [0.0, 0.5 - 0.5 * 0.25])


def test_survival_curves_are_scikit_survivals() -> None:
    nonparametric = pytest.importorskip("sksurv.nonparametric")
    event, time, _ = follow_up(5, 90)
    times, survival, ends = nonparametric.kaplan_meier_estimator(
        event, time, conf_type="log-log"
    )
    found = survival_curve(event, time)
    np.testing.assert_array_equal(found.times, times)
    np.testing.assert_allclose(found.survival, survival, atol=1e-12)
    np.testing.assert_allclose(found.low, ends[0], atol=1e-9)
    np.testing.assert_allclose(found.high, ends[1], atol=1e-9)
    assert found.at_risk[0] == 90 and found.events == event.sum()


def test_the_hazard_ratio_is_lifelines_with_ties() -> None:
    pandas = pytest.importorskip("pandas")
    lifelines = pytest.importorskip("lifelines")
    event, time, risk = follow_up(6, 120)
    table = pandas.DataFrame({"event": event, "time": time, "risk": risk})
    fitted = lifelines.CoxPHFitter().fit(
        table, "time", "event", fit_options={"precision": 1e-12}
    )
    found = hazard_ratio(event, time, risk)
    assert found is not None
    assert found.value == pytest.approx(float(fitted.hazard_ratios_["risk"]), abs=1e-8)
    low, high = np.exp(fitted.confidence_intervals_.loc["risk"])
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-7)


@pytest.mark.check
def test_the_hazard_ratios_interval_covers_the_truth_and_a_perfect_order_has_none() -> (
    None
):
    held = 0
    for seed in range(200):
        event, time, risk = follow_up(2000 + seed, 60)
        found = hazard_ratio(event, time, risk)
        assert found is not None
        held += found.low <= np.exp(0.8) <= found.high
    assert held >= 184
    time = np.arange(1.0, 21.0)
    assert hazard_ratio(np.ones(20, bool), time, -time) is None


def test_a_baseline_gives_scikit_survivals_predicted_survival() -> None:
    linear = pytest.importorskip("sksurv.linear_model")
    from sksurv.util import Surv

    event, time, value = follow_up(7, 80)
    model = linear.CoxPHSurvivalAnalysis(ties="breslow", tol=1e-12, n_iter=1000)
    model.fit(value[:, None], Surv.from_arrays(event, time))
    log_risk = model.predict(value[:, None])
    baseline = breslow_baseline(event, time, log_risk)
    times = np.array([5.0, 20.0, 44.0])
    ours = survival_probability(baseline, log_risk, times)
    for row, function in zip(
        ours, model.predict_survival_function(value[:, None]), strict=True
    ):
        np.testing.assert_allclose(row, function(times), atol=1e-9)


def test_bins_of_predicted_survival_hold_lifelines_estimates() -> None:
    lifelines = pytest.importorskip("lifelines")
    event, time, risk = follow_up(8, 100)
    survival = np.exp(-0.4 * np.exp(risk))
    bins = survival_bins(event, time, survival, 30.0)
    order = np.argsort(survival, kind="stable")
    for one, rows in zip(bins, np.array_split(order, 5), strict=True):
        fitter = lifelines.KaplanMeierFitter().fit(time[rows], event[rows])
        assert one.observed.value == pytest.approx(
            float(fitter.predict(30.0)), abs=1e-12
        )
        assert one.predicted == pytest.approx(survival[rows].mean())
        assert one.observed.low <= one.observed.value <= one.observed.high


def test_the_line_of_values_covers_a_known_slope_and_needs_spread() -> None:
    held = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        predicted = rng.normal(size=30)
        line = value_line(0.5 * predicted + 1 + rng.normal(size=30), predicted)
        assert line is not None
        held += line.slope.low <= 0.5 <= line.slope.high
    assert held >= 184
    assert value_line(np.arange(6.0), np.ones(6)) is None
