"""The tile grid: complete, inside, in blocks, and filtered by tissue."""

import numpy as np
import pytest

from thinsection.errors import ConfigError, InvalidInputError, UpsamplingError
from thinsection.testing.synthetic import ArraySlide
from thinsection.tiles import TilesConfig, TileTable, tile_grid
from thinsection.types import MaskFrame

SIZE = (1000, 700)


def slide(**options: object) -> ArraySlide:
    return ArraySlide([np.zeros((SIZE[1], SIZE[0], 3), np.uint8)], **options)  # type: ignore[arg-type]


def test_the_grid_holds_every_whole_tile_once_and_none_that_sticks_out() -> None:
    table = tile_grid(slide(), TilesConfig(tile_px=64))
    want = {(x, y) for x in range(0, 937, 64) for y in range(0, 637, 64)}
    assert len(table) == len(want)
    assert set(map(tuple, table.coords_l0.tolist())) == want


def test_padding_adds_the_tiles_that_the_border_cuts() -> None:
    table = tile_grid(slide(), TilesConfig(tile_px=64, edge="pad"))
    assert len(table) == 16 * 11
    assert table.coords_l0.max(axis=0).tolist() == [960, 640]


def test_tiles_come_in_blocks_so_that_neighbours_are_read_together() -> None:
    coords = tile_grid(slide(), TilesConfig(tile_px=32)).coords_l0
    first = coords[:64]
    assert first.max() == 7 * 32
    assert first[:9].tolist() == [[x * 32, 0] for x in range(8)] + [[0, 32]]


def test_overlapping_tiles_start_closer_together() -> None:
    coords = tile_grid(slide(), TilesConfig(tile_px=64, overlap=16)).coords_l0
    assert sorted(set(coords[:, 0].tolist()))[:3] == [0, 48, 96]


def test_only_tiles_with_enough_tissue_stay() -> None:
    mask = np.zeros((70, 100), dtype=bool)
    mask[:, :32] = True
    frame = MaskFrame(size_th=(100, 70), size_l0=SIZE)
    config = TilesConfig(tile_px=64, min_tissue_fraction=0.6)
    table = tile_grid(slide(), config, tissue=(mask, frame))
    assert sorted(set(table.coords_l0[:, 0].tolist())) == [0, 64, 128, 192, 256][:5]
    assert (table.columns["tissue_fraction"] >= 0.6).all()


def test_an_empty_mask_gives_an_empty_table() -> None:
    frame = MaskFrame(size_th=(100, 70), size_l0=SIZE)
    mask = np.zeros((70, 100), dtype=bool)
    config = TilesConfig(tile_px=64, min_tissue_fraction=0.0)
    table = tile_grid(slide(), config, tissue=(mask, frame))
    assert table.coords_l0.shape == (0, 2)
    assert table.coords_l0.dtype == np.int64


def test_a_slide_of_one_tile_has_one_and_a_smaller_one_none() -> None:
    one = ArraySlide([np.zeros((64, 64, 3), np.uint8)])
    assert tile_grid(one, TilesConfig(tile_px=64)).coords_l0.tolist() == [[0, 0]]
    assert len(tile_grid(one, TilesConfig(tile_px=65))) == 0


def test_a_mask_of_another_shape_is_refused() -> None:
    frame = MaskFrame(size_th=(100, 70), size_l0=SIZE)
    with pytest.raises(InvalidInputError, match=r"bool of shape \(70, 100\)"):
        tile_grid(slide(), TilesConfig(), tissue=(np.zeros((100, 70), bool), frame))


def test_upsampling_names_the_slide() -> None:
    with pytest.raises(UpsamplingError, match=r"array\.svs"):
        tile_grid(slide(slide_mpp=(0.5, 0.5)), TilesConfig(tile_mpp="0.25"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tile_px": 0}, "tile_px must be >= 1"),
        ({"overlap": 256}, "overlap must be in"),
        ({"tile_mpp": "fine"}, "'native', got 'fine'"),
        ({"tile_mpp": "-1"}, "'native', got '-1'"),
        ({"min_tissue_fraction": 1.5}, "min_tissue_fraction"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TilesConfig(**settings)  # type: ignore[arg-type]


def test_coordinates_of_another_type_are_refused() -> None:
    plan = tile_grid(slide(), TilesConfig(tile_px=64)).plan
    with pytest.raises(
        InvalidInputError, match=r"int64 of shape \(N, 2\), got float32 \(3, 2\)"
    ):
        TileTable(coords_l0=np.zeros((3, 2), np.float32), plan=plan)  # type: ignore[arg-type]
