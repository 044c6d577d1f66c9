"""Drawn slides: their textures have the bytes that scipy's filter gives them."""

import numpy as np
import pytest
from scipy import ndimage

from thinsection.testing import synthetic


def scipys_blur(field: np.ndarray, sigma: float) -> np.ndarray:
    return np.asarray(ndimage.gaussian_filter(field, sigma, mode="wrap"))


@pytest.mark.parametrize("sigma", [1.3, 3.0, 60.0])
def test_a_periodic_blur_is_scipys(sigma: float) -> None:
    """Also where the filter is longer than the picture."""
    field = np.random.default_rng(4).normal(size=(310, 520)).astype(np.float32)
    found = synthetic._periodic_blur(field, sigma)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, scipys_blur(field, sigma), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_texture_has_the_bytes_of_scipys_filter(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texture = synthetic.he_texture(np.random.default_rng(seed))
    monkeypatch.setattr(synthetic, "_periodic_blur", scipys_blur)
    expected = synthetic.he_texture(np.random.default_rng(seed))
    assert texture.shape == (1024, 1024, 3)
    assert texture.tobytes() == expected.tobytes()
