"""Pictures of probes: what they are computed from."""

import numpy as np
import pytest
from sksurv.nonparametric import kaplan_meier_estimator

from thinsection.probe.plots import kaplan_meier, plane


def test_kaplan_meier_is_scikit_survivals_at_every_event() -> None:
    rng = np.random.default_rng(0)
    event, time = rng.random(60) < 0.5, rng.integers(1, 20, 60).astype(float)
    times, share = kaplan_meier(event, time)
    expected_times, expected = kaplan_meier_estimator(event, time)
    at, own = np.isin(expected_times, time[event]), np.isin(times, time[event])
    np.testing.assert_array_equal(times[own], expected_times[at])
    np.testing.assert_allclose(share[own], expected[at])
    assert (times[0], share[0], times[-1]) == (0, 1, time.max())


def test_without_events_nothing_falls() -> None:
    times, share = kaplan_meier(np.zeros(3, bool), np.array([1.0, 5, 2]))
    assert (times[0], times[-1]) == (0, 5)
    assert (share == 1).all()


def test_the_map_shows_the_axes_of_most_variance_with_a_fixed_sign() -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(50, 6)) * [1, 9, 1, 4, 1, 1]).astype(np.float32)
    points, method, names = plane(x, seed=0)
    if method != "PCA":
        pytest.skip("umap-learn is installed and draws the map instead")
    assert abs(np.corrcoef(points[:, 0], x[:, 1])[0, 1]) > 0.99
    assert abs(np.corrcoef(points[:, 1], x[:, 3])[0, 1]) > 0.97
    np.testing.assert_allclose(plane(x[::-1], seed=0)[0][::-1], points, atol=1e-4)
    assert "of the variance" in names[0]
