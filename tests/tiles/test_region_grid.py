"""Regions hold whole squares of tiles, in the order in which encoders of regions read them."""

import numpy as np
import pytest

from thinsection.errors import ConfigError
from thinsection.slide.resize import read_tiles
from thinsection.stages.labels import grid_label
from thinsection.testing.synthetic import ArraySlide
from thinsection.tiles import TilesConfig, TileTable, tile_grid
from thinsection.tiles.grid import region_means

SIZE = (1000, 700)
CONFIG = TilesConfig(tile_px=64, region_px=256)


def pixels(size: tuple[int, int]) -> np.ndarray:
    """Picture whose pixels differ: red and green tell x and y, blue their block."""
    y, x = np.mgrid[: size[1], : size[0]]
    return np.stack([x % 251, y % 241, (x // 251 + 7 * (y // 241)) % 256], -1).astype(
        np.uint8
    )


SLIDE = ArraySlide([pixels(SIZE)])


def tiles_of(table: TileTable, slide: ArraySlide = SLIDE) -> np.ndarray:
    edge = table.plan.tile_px
    out = np.empty((len(table), edge, edge, 3), np.uint8)
    read_tiles(slide, table.plan, table.coords_l0, out)
    return out


def test_the_tiles_of_a_region_are_those_of_its_picture_in_hipts_order() -> None:
    """HIPT_4K.forward unfolds the picture of a region and flattens rows before columns."""
    torch = pytest.importorskip("torch")
    regions = tile_grid(SLIDE, TilesConfig(tile_px=256))
    tiles = tile_grid(SLIDE, CONFIG)
    assert len(tiles) == 16 * len(regions) == 16 * 6
    pictures = torch.from_numpy(tiles_of(regions)).permute(0, 3, 1, 2)
    unfolded = pictures.unfold(2, 64, 64).unfold(3, 64, 64)
    theirs = unfolded.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 64, 64)
    ours = torch.from_numpy(tiles_of(tiles)).permute(0, 3, 1, 2)
    assert torch.equal(ours, theirs)


def test_the_columns_say_the_place_of_a_tile_in_its_region() -> None:
    table = tile_grid(SLIDE, CONFIG)
    columns = table.columns
    corners = table.coords_l0.reshape(-1, 16, 2)[:, 0]
    steps = table.coords_l0 - corners[columns["region"]]
    np.testing.assert_array_equal(steps[:, 0], 64 * columns["region_column"])
    np.testing.assert_array_equal(steps[:, 1], 64 * columns["region_row"])
    assert np.unique(columns["region"], return_counts=True)[1].tolist() == [16] * 6
    places = (
        16 * columns["region"] + 4 * columns["region_row"] + columns["region_column"]
    )
    np.testing.assert_array_equal(places, np.arange(len(table)))


def test_a_region_is_kept_whole_where_enough_of_it_is_tissue() -> None:
    mask = np.zeros((175, 250), dtype=bool)
    mask[:64, :40] = True  # 4 slide pixels each: 160 of 256 columns of the first region
    mask[:64, 64:90] = True  # 104 of 256 columns of the second one
    table = tile_grid(SLIDE, CONFIG, tissue=(mask, 2.0))
    assert set(table.columns["region"].tolist()) == {0}
    shares = table.columns["tissue_fraction"].reshape(4, 4)
    assert table.coords_l0.max(axis=0).tolist() == [192, 192]
    np.testing.assert_allclose(shares[0], [1, 1, 0.5, 0], atol=1e-6)
    assert shares.mean() == pytest.approx(160 / 256)
    more = tile_grid(SLIDE, CONFIG, tissue=(mask, 2.0), min_tissue_fraction=0.4)
    assert set(more.columns["region"].tolist()) == {0, 1}


def test_padding_keeps_regions_at_the_border_and_fills_them_with_white() -> None:
    table = tile_grid(SLIDE, CONFIG, edge="pad")
    assert len(table) == 16 * 4 * 3
    outside = (table.coords_l0 >= SIZE).any(axis=1)
    assert 0 < outside.sum() < len(table)
    assert (tiles_of(table)[outside] == 255).all()


def test_a_slide_that_is_smaller_than_a_region_has_no_tile() -> None:
    table = tile_grid(SLIDE, tile_px=64, region_px=1024)
    assert (len(table), table.columns["region"].dtype) == (0, np.int32)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"region_px": 100}, "region_px must be a multiple of tile_px 64, got 100"),
        ({"region_px": -64}, "region_px must be a multiple of tile_px 64, got -64"),
        (
            {"region_px": 256, "overlap": 8},
            "overlap must be 0 with regions, got 8",
        ),
    ],
)
def test_regions_that_do_not_fit_are_refused(
    settings: dict[str, int], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        TilesConfig(tile_px=64, **settings)


def test_the_mean_of_a_region_is_that_of_its_tiles() -> None:
    table = tile_grid(SLIDE, CONFIG)
    values = np.random.default_rng(0).random(len(table)).astype(np.float32)
    means = region_means(table.columns, values)
    want = np.repeat(values.reshape(-1, 16).mean(axis=1), 16)
    np.testing.assert_allclose(means, want, rtol=1e-6)
    kept = table.select(values > 0.5)
    for number in np.unique(kept.columns["region"]):
        rows = kept.columns["region"] == number
        mean = region_means(kept.columns, values[values > 0.5])[rows]
        np.testing.assert_allclose(mean, values[values > 0.5][rows].mean(), rtol=1e-6)
    plain = tile_grid(SLIDE, tile_px=64)
    assert region_means(plain.columns, values) is values


def test_regions_have_a_folder_of_their_own() -> None:
    assert grid_label(CONFIG, "") == "64px_0.5mpp_256px_regions"
    assert grid_label(TilesConfig(), "") == "256px_0.5mpp"
