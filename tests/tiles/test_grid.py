"""The tile grid: complete, inside, in blocks, and filtered by tissue."""

import numpy as np
import pytest

from thinsection.errors import (
    ConfigError,
    InvalidInputError,
    MissingMppError,
    UpsamplingError,
)
from thinsection.qc.tissue import TissueMask
from thinsection.testing.synthetic import ArraySlide
from thinsection.tiles import TilesConfig, TileTable, tile_grid
from thinsection.tiles.grid import grid_coords, mask_and_frame, mpp_of_magnification
from thinsection.types import Level, MaskFrame

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
        ({"tile_px": 0}, "tile_px must be >= 1, got 0"),
        ({"overlap": 256}, r"overlap must be in \[0, tile_px\), got 256"),
        ({"overlap": -1}, r"overlap must be in \[0, tile_px\), got -1"),
        ({"mpp_tolerance": 0.31}, r"mpp_tolerance must be in \[0, 0.3\], got 0.31"),
        ({"mpp_tolerance": -0.01}, r"mpp_tolerance must be in \[0, 0.3\], got -0.01"),
        ({"tile_mpp": "fine"}, "'native', got 'fine'"),
        ({"tile_mpp": "-1"}, "'native', got '-1'"),
        ({"min_tissue_fraction": 1.5}, r"min_tissue_fraction must be in \[0, 1\]"),
        ({"min_tissue_fraction": -0.1}, r"min_tissue_fraction must be in \[0, 1\]"),
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


@pytest.mark.parametrize(
    "settings",
    [
        {"tile_px": 1},
        {"tile_px": 2, "overlap": 1},
        {"mpp_tolerance": 0.0},
        {"mpp_tolerance": 0.3},
        {"min_tissue_fraction": 0.0},
        {"min_tissue_fraction": 1.0},
        {"tile_mpp": "native"},
    ],
)
def test_settings_at_their_limits_are_taken(settings: dict[str, object]) -> None:
    config = TilesConfig(**settings)  # type: ignore[arg-type]
    for name, value in settings.items():
        assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("coords_l0", "value"),
    [
        (np.zeros((3, 2), np.int32), r"int32 \(3, 2\)"),
        (np.zeros((3, 3), np.int64), r"int64 \(3, 3\)"),
        (np.zeros((3, 2, 1), np.int64), r"int64 \(3, 2, 1\)"),
    ],
)
def test_coordinates_of_another_shape_are_refused(
    coords_l0: np.ndarray, value: str
) -> None:
    plan = tile_grid(slide(), TilesConfig(tile_px=64)).plan
    with pytest.raises(InvalidInputError, match=f"of shape \\(N, 2\\), got {value}"):
        TileTable(coords_l0=coords_l0, plan=plan)


def test_a_table_keeps_its_columns_in_step_with_its_tiles() -> None:
    table = tile_grid(slide(), TilesConfig(tile_px=64))
    place = np.arange(len(table), dtype=np.float32)
    table = table.with_columns({"place": place})
    assert list(table.columns) == ["tissue_fraction", "place"]
    last = table.select(place > len(table) - 3)
    assert last.columns["place"].tolist() == [len(table) - 2, len(table) - 1]
    np.testing.assert_array_equal(last.coords_l0, table.coords_l0[-2:])
    with pytest.raises(InvalidInputError, match=r"'place' must have shape \(2,\)"):
        last.with_columns({"place": place})


@pytest.mark.parametrize("pad", [False, True])
def test_the_order_is_by_block_then_row_then_column(pad: bool) -> None:
    oblong = slide(slide_mpp=(0.5, 0.25))
    plan = TilesConfig(tile_px=20, overlap=4).plan(oblong)
    assert (plan.size_l0, plan.stride_l0) == ((20, 40), (16, 32))
    order = [
        (row // 8, column // 8, row, column)
        for row in range(-(-SIZE[1] // 32))
        for column in range(-(-SIZE[0] // 16))
        if pad or (row * 32 + 40 <= SIZE[1] and column * 16 + 20 <= SIZE[0])
    ]
    want = [[column * 16, row * 32] for _, _, row, column in sorted(order)]
    assert grid_coords(SIZE, plan, pad=pad).tolist() == want


def test_padding_adds_nothing_where_the_tiles_fill_the_slide() -> None:
    exact = ArraySlide([np.zeros((40, 80, 3), np.uint8)])
    table = tile_grid(exact, TilesConfig(tile_px=20, edge="pad"))
    assert len(table) == 8
    assert table.coords_l0.max(axis=0).tolist() == [60, 20]


def test_a_tile_with_exactly_the_least_tissue_stays() -> None:
    mask = np.zeros((70, 100), dtype=bool)
    mask[:, :48] = True  # one tile and a half, of 320 px
    frame = MaskFrame(size_th=(100, 70), size_l0=(1000, 700))
    config = TilesConfig(tile_px=320, min_tissue_fraction=0.5)
    table = tile_grid(slide(), config, tissue=(mask, frame))
    assert sorted(set(table.coords_l0[:, 0].tolist())) == [0, 320]
    np.testing.assert_array_equal(
        np.unique(table.columns["tissue_fraction"]), np.float32([0.5, 1.0])
    )


def test_without_a_mask_nothing_is_said_of_tissue() -> None:
    table = tile_grid(slide(), TilesConfig(tile_px=64))
    assert np.isnan(table.columns["tissue_fraction"]).all()


def test_a_tissue_mask_and_its_pair_give_the_same_tiles() -> None:
    mask = np.zeros((70, 100), dtype=bool)
    mask[20:50, 30:80] = True
    frame = MaskFrame(size_th=(100, 70), size_l0=SIZE)
    picture = np.zeros((70, 100, 3), np.uint8)
    tissue = TissueMask(mask=mask, frame=frame, mask_mpp=None, thumbnail=picture)
    assert mask_and_frame(tissue) == (mask, frame)
    config = TilesConfig(tile_px=64)
    by_mask = tile_grid(slide(), config, tissue=tissue)
    by_pair = tile_grid(slide(), config, tissue=(mask, frame))
    assert 0 < len(by_mask) < len(tile_grid(slide(), config))
    np.testing.assert_array_equal(by_mask.coords_l0, by_pair.coords_l0)


def test_a_mask_of_another_type_is_refused() -> None:
    frame = MaskFrame(size_th=(100, 70), size_l0=SIZE)
    with pytest.raises(InvalidInputError, match=r"bool of shape .* got uint8"):
        mask_and_frame((np.zeros((70, 100), np.uint8), frame))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["20", "20x", "20X"])
def test_a_magnification_is_taken_as_its_usual_resolution(text: str) -> None:
    mpp, notice = mpp_of_magnification(text)
    assert mpp == "0.5"
    assert notice.startswith(f"--mag {text} sets --tile-mpp 0.5 (µm/px)")


@pytest.mark.parametrize("text", ["fine", "0", "-20x"])
def test_what_is_no_magnification_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"mag must be .* got '{text}'"):
        mpp_of_magnification(text)


def test_a_missing_resolution_names_the_slide_and_what_its_objective_means() -> None:
    bare = slide(slide_mpp=None)
    bare.objective_power = 40.0
    with pytest.raises(
        MissingMppError,
        match=r"in 'array\.svs' \(at 40x it is usually 0.25 µm/px\)",
    ):
        tile_grid(bare, TilesConfig())
    with pytest.raises(MissingMppError, match=r"in 'array\.svs'; pass"):
        tile_grid(slide(slide_mpp=None), TilesConfig())
    assert len(tile_grid(bare, TilesConfig(tile_mpp="native"))) == 6


def test_the_tolerance_and_the_overlap_reach_the_plan() -> None:
    near = slide(slide_mpp=(0.48, 0.48))
    assert TilesConfig(tile_px=64).plan(near).size_l0 == (64, 64)
    strict = TilesConfig(tile_px=64, mpp_tolerance=0.0, overlap=32)
    assert strict.plan(near).size_l0 == (67, 67)
    assert strict.plan(near).stride_l0 == (33, 33)


def test_only_fast_reading_uses_levels_that_the_decoder_makes() -> None:
    class Reducing(ArraySlide):
        reduced = (Level(index=-1, size=(500, 350), downsample=2.0),)

    level = Reducing([np.zeros((SIZE[1], SIZE[0], 3), np.uint8)])
    exact = TilesConfig(tile_px=64, tile_mpp="1.0")
    fast = TilesConfig(tile_px=64, tile_mpp="1.0", resample="fast")
    assert exact.plan(level).level == 0
    assert fast.plan(level).level == -1
