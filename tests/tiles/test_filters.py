"""Pixel filters against the rule written with NumPy's own functions."""

import numpy as np
import pytest

from thinsection.errors import ConfigError
from thinsection.testing.synthetic import ArraySlide
from thinsection.tiles import TilesConfig, tile_grid
from thinsection.tiles.filters import (
    _percentile,
    contrast,
    is_rule,
    kept_by_rules,
    load_filters,
)


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


@pytest.mark.parametrize("percent", [0.0, 5.0, 37.0, 50.0, 100.0])
@pytest.mark.parametrize("num_values", [1, 2, 7, 60])
def test_percentiles_are_numpys(percent: float, num_values: int) -> None:
    values = np.random.default_rng(num_values).integers(0, 256, (5, num_values))
    counts = np.stack([np.bincount(row, minlength=256) for row in values])
    got = _percentile(counts.cumsum(axis=1), percent)
    np.testing.assert_allclose(got, np.percentile(values, percent, axis=1), rtol=1e-12)


def test_rules_on_columns_keep_the_tiles_for_which_all_of_them_hold() -> None:
    table = tile_grid(
        ArraySlide([np.zeros((300, 400, 3), np.uint8)]), TilesConfig(tile_px=64)
    )
    place = np.arange(len(table))
    table = table.with_columns({"place": place, "odd": place % 2})
    keep = kept_by_rules(table, ["tissue", "place>=3", "odd==1", "px_focus>9"])
    np.testing.assert_array_equal(keep, (place >= 3) & (place % 2 == 1))
    with pytest.raises(ConfigError, match=r"must name a column, got 'plaec'.*'place'"):
        kept_by_rules(table, ["plaec>3"])


def test_the_mask_filter_needs_no_pixels_and_unknown_names_are_refused() -> None:
    assert load_filters(["tissue"]) == ()
    assert load_filters(["tissue", "contrast"]) == (contrast,)
    with pytest.raises(ConfigError, match=r"got 'contrats'; did you mean 'contrast'"):
        load_filters(["contrats"])


def test_a_rule_on_pixels_keeps_the_tiles_for_which_it_holds() -> None:
    reds = [10, 100, 101, 250]
    tiles = np.zeros((4, 3, 5, 3), np.uint8)
    tiles[..., 0] = np.array(reds)[:, None, None]
    tiles[..., 1] = 200
    (keep,) = load_filters(["px_mean_red>100"])
    assert keep(tiles).tolist() == [False, False, True, True]


def test_a_rule_on_a_column_of_the_table_needs_no_pixels() -> None:
    assert load_filters(["epithelium>0.3"]) == ()


def test_rules_on_pixels_come_after_the_other_filters() -> None:
    first, rule = load_filters(["px_max_blue<9", "tissue", "contrast"])
    assert first is contrast
    assert rule(np.zeros((2, 4, 4, 3), np.uint8)).tolist() == [True, True]


@pytest.mark.parametrize("text", ["a<1", "a>1", "a<=1", "a>=1", "a==1"])
def test_a_comparison_is_a_rule(text: str) -> None:
    assert is_rule(text)


@pytest.mark.parametrize("text", ["tissue", "contrast", "my_filter-2"])
def test_a_name_is_no_rule(text: str) -> None:
    assert not is_rule(text)


def test_tiles_that_no_rule_names_are_all_kept() -> None:
    table = tile_grid(
        ArraySlide([np.zeros((300, 400, 3), np.uint8)]), TilesConfig(tile_px=64)
    )
    assert kept_by_rules(table, []).tolist() == [True] * len(table)
