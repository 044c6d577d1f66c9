"""Cells counted in tiles, against loops over every pair."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from thinsection.cells.count import (
    TileCounts,
    TileFinder,
    count_cells,
    per_mm2,
    tissue_mm2,
)
from thinsection.errors import InvalidInputError
from thinsection.types import CoordsL0, Size

CLASSES = ("tumour", "immune", "stroma")


@dataclass(frozen=True)
class _Tiles:
    coords_l0: CoordsL0
    size_l0: Size


def _grid(size_l0: Size, stride: Size, *, count: int = 7, keep: float = 0.8) -> _Tiles:
    """A grid with gaps, in an order of its own."""
    rng = np.random.default_rng(5)
    x, y = np.meshgrid(np.arange(count) * stride[0], np.arange(count + 2) * stride[1])
    coords = np.stack((x.ravel(), y.ravel()), axis=1).astype(np.int64)
    coords = coords[rng.random(len(coords)) < keep]
    rng.shuffle(coords)
    return _Tiles(coords, size_l0)


GRIDS = {
    "apart": _grid((60, 40), (60, 40)),
    "gaps": _grid((60, 40), (75, 90)),
    "half": _grid((60, 40), (30, 20)),
    "third": _grid((60, 40), (20, 13)),
    "irregular": _Tiles(np.random.default_rng(1).integers(-50, 300, (60, 2)), (60, 40)),
}


def _points(tiles: _Tiles, number: int) -> np.ndarray:
    """Points on whole and half pixels, so that many lie on borders and between centres."""
    rng = np.random.default_rng(2)
    most = int(tiles.coords_l0.max()) + 90
    return rng.integers(-120, 2 * most, (number, 2)) / 2


def _home(tiles: _Tiles, x: float, y: float) -> tuple[int, list[int]]:
    """Row by a loop over all tiles, and all rows that hold the point."""
    width, height = tiles.size_l0
    held = []
    for row, (left, top) in enumerate(tiles.coords_l0.tolist()):
        if left <= x < left + width and top <= y < top + height:
            dx = (x - left - width / 2) / width
            dy = (y - top - height / 2) / height
            held.append((round(dx * dx + dy * dy, 9), row))
    return (min(held)[1] if held else -1), sorted(row for _, row in held)


def _batches(
    points: np.ndarray, classes: list[str | None], areas: np.ndarray, *, rows: int
) -> list[pa.RecordBatch]:
    table = pa.table(
        {
            "x_l0": points[:, 0].astype(np.float64),
            "y_l0": points[:, 1].astype(np.float64),
            "class": pa.array(classes).dictionary_encode(),
            "area_um2": areas.astype(np.float32),
        }
    )
    return list(table.to_batches(max_chunksize=rows))


def _cells(tiles: _Tiles, number: int = 2000, rows: int = 300) -> list[pa.RecordBatch]:
    rng = np.random.default_rng(3)
    classes = [(*CLASSES, None)[i] for i in rng.integers(0, 4, number)]
    areas = rng.normal(80, 9, number)
    areas[::17] = np.nan
    return _batches(_points(tiles, number), classes, areas, rows=rows)


@pytest.mark.parametrize("name", GRIDS)
def test_a_point_belongs_to_the_nearest_tile_that_holds_it(name: str) -> None:
    tiles = GRIDS[name]
    points = _points(tiles, 1500)
    home, (cells, rows) = TileFinder(tiles).find(points)
    expected = [_home(tiles, x, y) for x, y in points.tolist()]
    assert home.tolist() == [row for row, _ in expected]
    pairs = sorted(zip(cells.tolist(), rows.tolist()))
    assert pairs == [(i, row) for i, (_, held) in enumerate(expected) for row in held]
    assert (home < 0).any()
    assert (home >= 0).sum() > 200
    several = any(len(held) > 1 for _, held in expected)
    assert several == (name not in ("apart", "gaps"))


def test_the_right_and_the_lower_border_belong_to_the_next_tile() -> None:
    tiles = _Tiles(np.array([[0, 0], [60, 0], [0, 40]]), (60, 40))
    points = np.array(
        [(59.999, 0), (60, 0), (0, 39.999), (0, 40), (60, 40), (-0.001, 0)]
    )
    home, _ = TileFinder(tiles).find(points)
    assert home.tolist() == [0, 1, 0, 2, -1, -1]


def test_of_two_centres_at_the_same_distance_the_earlier_row_has_the_cell() -> None:
    coords = np.array([[0, 0], [30, 0]])
    point = np.array([[45.0, 20.0]])
    for order in ([0, 1], [1, 0]):
        home, _ = TileFinder(_Tiles(coords[order], (60, 40))).find(point)
        assert home.tolist() == [0]
    nearer, _ = TileFinder(_Tiles(coords, (60, 40))).find(np.array([[46.0, 20.0]]))
    assert nearer.tolist() == [1]


@pytest.mark.parametrize("name", GRIDS)
def test_counts_and_sums_equal_those_of_a_loop(name: str) -> None:
    tiles = GRIDS[name]
    batches = _cells(tiles)
    counts = count_cells(batches, tiles, CLASSES)
    num_tiles = len(tiles.coords_l0)
    count = np.zeros((num_tiles, 4), int)
    held_areas: list[list[float]] = [[] for _ in range(num_tiles)]
    held_classes: list[list[int]] = [[] for _ in range(num_tiles)]
    num_outside = 0
    for cell in pa.Table.from_batches(batches).to_pylist():
        home, held = _home(tiles, cell["x_l0"], cell["y_l0"])
        code = (*CLASSES, None).index(cell["class"])
        num_outside += home < 0
        if home >= 0:
            count[home, code] += 1
        for row in held:
            held_classes[row].append(code)
            if not np.isnan(cell["area_um2"]):
                held_areas[row].append(cell["area_um2"])
    assert np.array_equal(counts.count, count)
    assert counts.num_in_no_tile == num_outside
    assert counts.count.sum() + num_outside == counts.num_cells == 2000
    mean, std = counts.areas_um2()
    shares = counts.shares()
    num_empty = 0
    for row in range(num_tiles):
        assert counts.num_held[row].sum() == len(held_classes[row])
        if not held_areas[row]:
            num_empty += 1
            assert np.isnan(mean[row])
            assert np.isnan(std[row])
            continue
        assert mean[row] == pytest.approx(np.mean(held_areas[row]), rel=1e-9)
        assert std[row] == pytest.approx(np.std(held_areas[row]), rel=1e-6, abs=1e-6)
        of_class = np.bincount(held_classes[row], minlength=4)[:3]
        assert shares[row] == pytest.approx(of_class / len(held_classes[row]))
    assert num_empty < num_tiles


def _same(a: TileCounts, b: TileCounts) -> None:
    assert np.array_equal(a.count, b.count)
    assert np.array_equal(a.num_held, b.num_held)
    np.testing.assert_allclose(a.areas_um2(), b.areas_um2(), rtol=1e-9, atol=1e-6)


def test_the_size_of_batches_and_the_order_of_tiles_change_nothing() -> None:
    tiles = GRIDS["half"]
    whole = count_cells(_cells(tiles, rows=5000), tiles, CLASSES)
    _same(whole, count_cells(_cells(tiles, rows=7), tiles, CLASSES))
    order = np.random.default_rng(8).permutation(len(tiles.coords_l0))
    mixed = count_cells(
        _cells(tiles), _Tiles(tiles.coords_l0[order], (60, 40)), CLASSES
    )
    # a tie is decided by the row, so only what a tile holds is the same
    assert np.array_equal(mixed.num_held, whole.num_held[order])
    assert mixed.count.sum() == whole.count.sum()


def test_equal_areas_have_no_spread() -> None:
    tiles = GRIDS["apart"]
    areas = np.full(500, 123456.7)
    batches = _batches(_points(tiles, 500), ["immune"] * 500, areas, rows=50)
    mean, std = count_cells(batches, tiles, CLASSES).areas_um2()
    assert np.nanmax(std) == 0
    assert np.nanmin(mean) == pytest.approx(123456.7)


def test_densities_are_per_mm2_of_tissue_at_both_resolutions() -> None:
    tiles = _Tiles(np.array([[0, 0], [1000, 0], [2000, 0]]), (1000, 500))
    area = tissue_mm2(tiles, np.array([1.0, 0.25, 0.0], np.float32), (0.5, 0.4))
    assert area == pytest.approx([0.1, 0.025, 0.0])
    density = per_mm2(np.array([10, 10, 10]), area)
    assert density[:2] == pytest.approx([100, 400])
    assert np.isnan(density[2])
    assert np.isnan(tissue_mm2(tiles, np.ones(3), None)).all()


def test_no_cells_and_no_tiles_give_empty_counts() -> None:
    tiles = GRIDS["apart"]
    empty = count_cells([], tiles, CLASSES)
    assert empty.count.shape == (len(tiles.coords_l0), 4)
    assert empty.num_cells == empty.count.sum() == 0
    assert np.isnan(empty.areas_um2()).all()
    nowhere = _Tiles(np.empty((0, 2), np.int64), (60, 40))
    counts = count_cells(_cells(tiles), nowhere, CLASSES)
    assert counts.num_in_no_tile == counts.num_cells == 2000


def test_words_without_a_dictionary_are_counted_too() -> None:
    tiles = GRIDS["apart"]
    table = pa.Table.from_batches(_cells(tiles))
    plain = table.set_column(2, "class", table["class"].cast(pa.string()))
    _same(
        count_cells(plain.to_batches(), tiles, CLASSES),
        count_cells(table.to_batches(), tiles, CLASSES),
    )


def test_a_class_that_the_table_does_not_name_is_refused() -> None:
    tiles = GRIDS["apart"]
    with pytest.raises(
        InvalidInputError, match="class of a cell must be one of 'tumour'"
    ):
        count_cells(_cells(tiles), tiles, ("tumour",))
