"""Survival figures equal those of other packages, and their intervals cover known truth."""

import numpy as np
import pytest
from tests.support.units import units

from thinsection.evaluation.survival import (
    breslow_baseline,
    hazard_ratio,
    survival_bins,
    survival_curve,
    survival_probability,
)


def follow_up(seed: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Event, time with ties, log risk."""
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=n)
    death = rng.exponential(np.exp(-0.8 * risk) * 60)
    censored = rng.uniform(10, 120, size=n)
    time = np.ceil(np.minimum(death, censored))
    return death <= censored, time, risk


def test_survival_curves_are_lifelines() -> None:
    lifelines = pytest.importorskip("lifelines")
    event, time, _ = follow_up(5, 90)
    fitter = lifelines.KaplanMeierFitter().fit(time, event)
    found = survival_curve(event, time, units(len(event)))
    np.testing.assert_array_equal(found.times, np.unique(time))
    np.testing.assert_allclose(found.survival, fitter.predict(found.times), atol=1e-12)
    ends = fitter.confidence_interval_.loc[found.times].to_numpy()
    np.testing.assert_allclose(found.low, ends[:, 0], atol=1e-9)
    np.testing.assert_allclose(found.high, ends[:, 1], atol=1e-9)
    assert found.at_risk[0] == 90 and found.events == event.sum()


def test_the_hazard_ratio_is_lifelines_with_ties() -> None:
    pandas = pytest.importorskip("pandas")
    lifelines = pytest.importorskip("lifelines")
    event, time, risk = follow_up(6, 120)
    table = pandas.DataFrame({"event": event, "time": time, "risk": risk})
    fitted = lifelines.CoxPHFitter().fit(
        table, "time", "event", fit_options={"precision": 1e-12}
    )
    found = hazard_ratio(event, time, risk, units(len(event)))
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
        found = hazard_ratio(event, time, risk, units(len(event)))
        assert found is not None
        held += found.low <= np.exp(0.8) <= found.high
    assert held >= 184
    time = np.arange(1.0, 21.0)
    assert hazard_ratio(np.ones(20, bool), time, -time, units(20)) is None


def test_a_baseline_gives_lifelines_predicted_survival() -> None:
    pandas = pytest.importorskip("pandas")
    lifelines = pytest.importorskip("lifelines")
    event, time, value = follow_up(7, 80)
    table = pandas.DataFrame({"event": event, "time": time, "value": value})
    model = lifelines.CoxPHFitter().fit(table, "time", "event")
    log_risk = model.predict_log_partial_hazard(table).to_numpy()
    baseline = breslow_baseline(event, time, log_risk)
    times = np.unique(time)[[2, 20, 40]]  # between them lifelines interpolates
    ours = survival_probability(baseline, log_risk, times)
    theirs = model.predict_survival_function(table, times=times).to_numpy().T
    np.testing.assert_allclose(ours, theirs, atol=1e-9)


def test_bins_of_predicted_survival_hold_lifelines_estimates() -> None:
    lifelines = pytest.importorskip("lifelines")
    event, time, risk = follow_up(8, 100)
    survival = np.exp(-0.4 * np.exp(risk))
    bins = survival_bins(event, time, survival, 30.0, units(100))
    order = np.argsort(survival, kind="stable")
    for one, rows in zip(bins, np.array_split(order, 5), strict=True):
        fitter = lifelines.KaplanMeierFitter().fit(time[rows], event[rows])
        assert one.observed.value == pytest.approx(
            float(fitter.predict(30.0)), abs=1e-12
        )
        assert one.predicted == pytest.approx(survival[rows].mean())
        assert one.observed.low <= one.observed.value <= one.observed.high


def clustered(
    rng: np.random.Generator, patients: int, several: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Event, time without ties, value and patient; the cases of a patient share a frailty."""
    patient = np.repeat(np.arange(patients), several)
    value = (rng.random(patients) < 0.5).astype(float)[patient]
    frailty = rng.gamma(2, 0.5, patients)[patient]
    death = rng.exponential(1 / (frailty * np.exp(0.7 * value)))
    censored = rng.uniform(0.2, 3, len(patient))
    return death <= censored, np.minimum(death, censored), value, patient


def test_the_robust_variance_of_patients_is_lifelines() -> None:
    pandas = pytest.importorskip("pandas")
    lifelines = pytest.importorskip("lifelines")
    event, time, value, patient = clustered(np.random.default_rng(1), 40, 3)
    table = pandas.DataFrame({"e": event, "t": time, "x": value, "c": patient})
    judge = lifelines.CoxPHFitter().fit(
        table, "t", "e", cluster_col="c", fit_options={"precision": 1e-12}
    )
    found = hazard_ratio(event, time, value, units(patient.tolist()))
    assert found is not None
    assert (found.units, found.cases) == (40, 120)
    assert np.log(found.value) == pytest.approx(judge.params_["x"], abs=1e-9)
    from scipy.stats import t

    # ours has the correction for few patients, and Student's t
    error = np.log(found.high / found.value) / t.ppf(0.975, 39) * (39 / 40) ** 0.5
    assert error == pytest.approx(judge.standard_errors_["x"], rel=1e-6)


def test_score_residuals_with_ties_sum_to_the_score_and_repeats_change_nothing() -> (
    None
):
    event, time, risk = follow_up(9, 60)
    once = hazard_ratio(event, time, risk, units(60))
    assert once is not None and once.method == "Wald"
    two = np.repeat(np.arange(60), 2)
    found = hazard_ratio(event[two], time[two] + 0.0, risk[two], units(two.tolist()))
    assert found is not None and found.method.startswith("robust")
    assert found.units == 60
    by_case = hazard_ratio(event[two], time[two], risk[two], units(120))
    assert by_case is not None
    assert by_case.high / by_case.low < found.high / found.low


def test_the_band_of_a_survival_curve_is_that_of_the_patients() -> None:
    event, time, _ = follow_up(10, 50)
    once = survival_curve(event, time, units(50))
    three = np.repeat(np.arange(50), 3)
    found = survival_curve(event[three], time[three], units(three.tolist()))
    np.testing.assert_allclose(found.survival, once.survival, atol=1e-12)
    np.testing.assert_allclose(found.low, once.low, atol=1e-9)
    np.testing.assert_allclose(found.high, once.high, atol=1e-9)
    by_case = survival_curve(event[three], time[three], units(150))
    assert (by_case.high - by_case.low <= found.high - found.low + 1e-12).all()


@pytest.mark.check
@pytest.mark.parametrize("several", [1, 4])
def test_intervals_of_survival_cover_the_truth(several: int) -> None:
    """60 patients; the true ratio is that of 20,000 cases, the true survival a formula."""
    event, time, value, _ = clustered(np.random.default_rng(0), 20_000, 1)
    whole = hazard_ratio(event, time, value, units(20_000))
    assert whole is not None
    at = 0.8
    # mean of exp(-frailty x hazard) of a gamma frailty, in both halves
    survival = [(1 + at * np.exp(0.7 * half) / 2) ** -2 for half in (0, 1)]
    true_share = float(np.mean(survival))
    rng = np.random.default_rng(3)
    held = np.zeros(2)
    for _ in range(300):
        event, time, value, patient = clustered(rng, 60, several)
        patients = units(patient.tolist())
        ratio = hazard_ratio(event, time, value, patients)
        assert ratio is not None
        held[0] += ratio.low <= whole.value <= ratio.high
        curve = survival_curve(event, time, patients)
        place = np.searchsorted(curve.times, at, side="right") - 1
        held[1] += curve.low[place] <= true_share <= curve.high[place]
    assert (held >= 0.92 * 300).all()
    assert (held <= 0.99 * 300).all()
