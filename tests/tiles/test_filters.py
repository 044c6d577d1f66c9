"""Pixel filters against the rule written with NumPy's own functions."""

import numpy as np
import pytest

from thinsection.errors import ConfigError
from thinsection.tiles.filters import contrast, load_filters


def plain_rule(tile: np.ndarray) -> bool:
    return bool(
        tile.min() < 135
        and tile.max() >= 255
        and np.percentile(tile, 5) < 162
        and np.median(tile) < 225
    )


def test_contrast_keeps_exactly_what_the_plain_rule_keeps() -> None:
    rng = np.random.default_rng(1)
    tiles = []
    for _ in range(400):
        low, high = sorted(rng.integers(0, 256, 2))
        tile = rng.integers(low, high + 1, (9, 7, 3))
        tile.flat[rng.integers(tile.size, size=3)] = rng.choice(
            [0, 134, 135, 254, 255], 3
        )
        bright = rng.random(tile.shape) < rng.random()
        tile[bright] = rng.choice([161, 162, 224, 225, 240])
        tiles.append(tile.astype(np.uint8))
    batch = np.stack(tiles)
    want = np.array([plain_rule(tile) for tile in batch])
    assert 20 < want.sum() < 380
    np.testing.assert_array_equal(contrast(batch), want)


def test_percentiles_interpolate_between_order_statistics() -> None:
    tile = np.full((4, 5, 3), 162, np.uint8)  # 60 values; the 5th percentile is at 2.95
    tile.flat[:3] = [0, 0, 100]
    tile.flat[-1] = 255
    assert contrast(tile[None])[0] == plain_rule(tile)


def test_the_mask_filter_needs_no_pixels_and_unknown_names_are_refused() -> None:
    assert load_filters(["tissue"]) == ()
    assert load_filters(["tissue", "contrast"]) == (contrast,)
    with pytest.raises(ConfigError, match=r"got 'contrats'; did you mean 'contrast'"):
        load_filters(["contrats"])
