"""Pictures of probes: what they are computed from."""

import numpy as np
import pytest

from thinsection.probe.plots import plane


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
