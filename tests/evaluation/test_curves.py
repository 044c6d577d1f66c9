import numpy as np
from scipy.stats import norm
from sklearn.metrics import precision_recall_curve, roc_curve
from tests.support.units import units

from thinsection.evaluation import curves
from thinsection.evaluation.curves import calibration_band, precision_band, roc_band
from thinsection.evaluation.intervals import Sampling


def cohort(
    seed: int, cases: int, share: float
) -> tuple[np.ndarray, np.ndarray, Sampling]:
    """A binormal model (d' = 1.2) and its true probabilities."""
    rng = np.random.default_rng(seed)
    truth = np.arange(cases) < round(share * cases)
    score = rng.normal(size=cases) + 1.2 * truth
    log_odds = np.log(share / (1 - share)) + 1.2 * score - 0.72
    sampling = Sampling.of_rows(units(cases, "cases"), classes=truth)
    return truth, 1 / (1 + np.exp(-log_odds)), sampling


def test_curves_pass_through_the_points_of_scikit_learn() -> None:
    truth, p, sampling = cohort(0, 60, 0.4)
    p = p.round(1)  # with ties
    x, y, _ = roc_curve(truth, p, drop_intermediate=False)
    last = np.r_[np.diff(x) > 0, True]
    first = np.r_[True, np.diff(x) > 0]
    band = roc_band(truth, p, sampling, seed=0)
    inner = ~np.isin(band.x, x)
    lines = np.interp(band.x, x[last & first], y[last & first])
    if (last & first).all():
        np.testing.assert_allclose(band.y, lines, atol=1e-12)
    upper = np.array([y[x <= g].max() for g in band.x])
    assert (band.y >= upper - 1e-12).all()
    np.testing.assert_allclose(band.y[~inner], upper[~inner], atol=1e-12)
    precision, recall, _ = precision_recall_curve(truth, p)
    precision, recall = precision[:-1][::-1], recall[:-1][::-1]
    expected = [precision[np.argmax(recall >= g - 1e-12)] for g in curves.GRID]
    found = precision_band(truth, p, sampling, seed=0).y
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_bands_of_roc_and_calibration_hold_the_truth_in_95_of_100() -> None:
    at = np.arange(5, 46, 5)
    true_rate = norm.cdf(norm.ppf(curves.GRID[at]) + 1.2)
    roc_held, bins_held = [], []
    for seed in range(40):
        truth, p, sampling = cohort(seed, 60, 0.4)
        band = roc_band(truth, p, sampling, seed=0)
        roc_held.append((band.low[at] <= true_rate) & (true_rate <= band.high[at]))
        rng = np.random.default_rng(seed)
        event = rng.random(60) < p
        drawn = calibration_band(event, p, Sampling.of_rows(units(60)), seed=0)
        bins_held.append((drawn.low <= drawn.x) & (drawn.x <= drawn.high))
    assert np.mean(roc_held) >= 0.92
    assert np.mean(bins_held) >= 0.92


def test_a_bin_without_events_has_a_bound_above_0() -> None:
    truth = np.repeat([False, True], 20)
    p = np.linspace(0.01, 0.99, 40)
    band = calibration_band(truth, p, Sampling.of_rows(units(40)), seed=0)
    assert band.y[0] == 0
    assert 0.2 < band.high[0] < 0.6
