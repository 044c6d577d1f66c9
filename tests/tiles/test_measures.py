"""Measures of tiles against the same written px by px; rules on them as pixel filters."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from skimage.color import hed_from_rgb

from thinsection.errors import ConfigError
from thinsection.testing.synthetic import ArraySlide
from thinsection.tiles.filters import (
    MEASURES,
    kept_by_rules,
    load_filters,
    measure_tiles,
)
from thinsection.tiles.grid import TilesConfig, tile_grid


def plain(tile: np.ndarray) -> list[float]:
    """The measures of a tile, in float64, by their definitions."""
    px = tile.reshape(-1, 3).astype(np.float64)
    shares = np.log(np.maximum(px / 255, 1e-6)) / np.log(1e-6)
    gray = tile.astype(np.float64) @ (0.2125, 0.7154, 0.0721) / 255
    once, twice = (gaussian_filter(gray, s, mode="nearest", truncate=4) for s in (1, 2))
    ratios = []
    for y in range(0, tile.shape[0], 32):
        for x in range(0, tile.shape[1], 32):
            block = np.s_[y : y + 32, x : x + 32]
            fine, coarse = (
                abs(gray - once)[block].mean(),
                abs(once - twice)[block].mean(),
            )
            ratios.append(fine / (coarse + 0.006))
    colours = [px.mean(axis=0), px.std(axis=0), px.min(axis=0), px.max(axis=0)]
    return [
        *np.concatenate([*colours, (shares @ hed_from_rgb).mean(axis=0)]),
        np.median(ratios),
    ]


def pictures(edge_px: int, count: int = 6) -> np.ndarray:
    rng = np.random.default_rng(edge_px)
    found = []
    for n in range(count):
        noise = gaussian_filter(
            rng.normal(size=(edge_px, edge_px, 3)), (n / 2, n / 2, 0)
        )
        found.append(
            np.clip(150 + 40 * noise / noise.std() + 20 * rng.normal(size=3), 0, 255)
        )
    return np.stack(found).astype(np.uint8)


@pytest.mark.parametrize("edge_px", [256, 224, 75, 31])
def test_measures_are_those_of_the_plain_definitions(edge_px: int) -> None:
    tiles = pictures(edge_px)
    tiles[0, :5, :5] = 0  # black, where a logarithm has no value
    want = np.array([plain(tile) for tile in tiles])
    found = measure_tiles(tiles)
    assert found.shape == (len(tiles), len(MEASURES)) and found.dtype == np.float32
    np.testing.assert_allclose(found[:, :-1], want[:, :-1], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        found[:, -1], want[:, -1], rtol=2e-4
    )  # float32 on the way


def test_equal_px_have_a_deviation_of_exactly_zero() -> None:
    tiles = np.full((1, 97, 97, 3), (201, 77, 3), np.uint8)
    found = dict(zip(MEASURES, measure_tiles(tiles)[0].tolist()))
    assert [found[f"px_std_{c}"] for c in ("red", "green", "blue")] == [0, 0, 0]
    assert (
        found["px_min_green"] == found["px_mean_green"] == found["px_max_green"] == 77
    )


def test_a_tile_has_the_same_measures_alone_in_any_batch_and_under_any_names() -> None:
    tiles = pictures(128)
    whole = measure_tiles(tiles)
    for n in range(len(tiles)):
        np.testing.assert_array_equal(measure_tiles(tiles[n : n + 1])[0], whole[n])
    names = ("px_focus", "px_eosin", "px_min_blue")
    picked = whole[:, [MEASURES.index(name) for name in names]]
    np.testing.assert_array_equal(measure_tiles(tiles, names), picked)


def test_the_focus_falls_with_blur() -> None:
    sharp = pictures(256, 1)
    blurred = [
        gaussian_filter(sharp[0].astype(np.float32), (s, s, 0)) for s in (0, 1, 2, 4)
    ]
    focus = measure_tiles(np.stack(blurred).astype(np.uint8), ("px_focus",))[:, 0]
    assert (np.diff(focus) < 0).all()


def test_a_rule_on_a_measure_keeps_exactly_the_tiles_that_it_holds_for() -> None:
    tiles = pictures(64, 12)
    focus = measure_tiles(tiles, ("px_focus",))[:, 0]
    limit = float(np.sort(focus)[6])
    (keeps,) = load_filters(["tissue", f"px_focus>={limit!r}", "tissue_fraction>0.3"])
    np.testing.assert_array_equal(keeps(tiles), focus >= limit)


def test_rules_on_measures_wait_for_px_and_a_near_miss_names_them() -> None:
    slide = ArraySlide([np.zeros((300, 400, 3), np.uint8)])
    table = tile_grid(slide, TilesConfig(tile_px=64))
    assert kept_by_rules(table, ["px_focus>9"]).all()
    with pytest.raises(ConfigError, match="did you mean 'px_focus'"):
        kept_by_rules(table, ["px_focsu>9"])
