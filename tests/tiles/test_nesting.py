"""Parents of tiles: as integer division says where grids nest, and as shapely says elsewhere."""

from dataclasses import dataclass

import numpy as np
import pytest
import shapely

from thinsection.errors import InvalidInputError
from thinsection.testing.synthetic import ArraySlide
from thinsection.tiles import parent_rows, tile_grid
from thinsection.types import CoordsL0, Size


@dataclass
class Boxes:
    """Tiles of a table that is no `TileTable`."""

    coords_l0: CoordsL0
    size_l0: Size


def slide(mpp: tuple[float, float] = (0.5, 0.5)) -> ArraySlide:
    return ArraySlide([np.zeros((1400, 2100, 3), np.uint8)], slide_mpp=mpp)


def test_each_parent_has_four_by_four_tiles_where_the_ratio_is_four() -> None:
    fine = tile_grid(slide(), tile_px=64, tile_mpp=0.5)
    coarse = tile_grid(slide(), tile_px=64, tile_mpp=2.0)
    rows = parent_rows(fine, coarse)
    has_parent = rows >= 0
    np.testing.assert_array_equal(
        coarse.coords_l0[rows[has_parent]], fine.coords_l0[has_parent] // 256 * 256
    )
    counts = np.bincount(rows[has_parent], minlength=len(coarse))
    assert counts.tolist() == [16] * len(coarse)
    # the border cuts a coarse tile, of which some fine tiles are whole
    beyond = (fine.coords_l0 // 256 * 256 + 256 > (2100, 1400)).any(axis=1)
    np.testing.assert_array_equal(beyond, ~has_parent)
    assert beyond.any()


@pytest.mark.parametrize(
    ("mpp", "fine_mpp", "coarse_mpp"),
    [
        ((0.2527, 0.2527), 0.5, 2.0),
        ((0.25, 0.26), 0.5, 1.3),
        ((0.5, 0.5), 0.5, 1.5),  # an odd ratio
        ((0.5, 0.5), 0.75, 1.0),  # centres on borders
        ((0.5, 0.5), 0.5, 0.5),
    ],
)
def test_a_parent_is_the_box_that_holds_the_centre(
    mpp: tuple[float, float], fine_mpp: float, coarse_mpp: float
) -> None:
    fine = tile_grid(slide(mpp), tile_px=32, tile_mpp=fine_mpp)
    coarse = tile_grid(slide(mpp), tile_px=32, tile_mpp=coarse_mpp)
    kept = np.random.default_rng(1).random(len(coarse)) < 0.8
    coarse = coarse.select(kept)
    ends = coarse.coords_l0 + coarse.size_l0
    boxes = shapely.box(*coarse.coords_l0.T, *ends.T)
    # just right of and below the centre, because a box holds its left and upper border
    points = shapely.points(fine.coords_l0 + np.array(fine.size_l0) / 2 + 1e-3)
    which_point, which_box = shapely.STRtree(boxes).query(points, predicate="within")
    want = np.full(len(fine), -1)
    want[which_point] = which_box
    assert len(set(which_point)) == len(which_point)  # one box at most
    np.testing.assert_array_equal(parent_rows(fine, coarse), want)
    assert (want >= 0).any()


def test_of_overlapping_parents_one_that_holds_the_centre_is_given() -> None:
    rng = np.random.default_rng(2)
    corners = rng.integers(0, 400, (40, 2))
    tiles = Boxes(rng.integers(0, 500, (300, 2)), (10, 10))
    parents = Boxes(corners, (100, 100))
    rows = parent_rows(tiles, parents)
    offsets = tiles.coords_l0[:, None] + 5 - corners
    holds = ((offsets >= 0) & (offsets < 100)).all(axis=2)
    np.testing.assert_array_equal(rows >= 0, holds.any(axis=1))
    found = np.flatnonzero(rows >= 0)
    assert holds[found, rows[found]].all()
    assert 0 < len(found) < len(rows)


def test_without_tiles_or_parents_there_is_no_parent() -> None:
    none = Boxes(np.empty((0, 2), np.int64), (100, 100))
    tiles = Boxes(np.array([[0, 0]]), (10, 10))
    assert parent_rows(tiles, none).tolist() == [-1]
    assert parent_rows(none, none).shape == (0,)


def test_grids_in_the_wrong_order_are_refused() -> None:
    fine = tile_grid(slide(), tile_px=64, tile_mpp=0.5)
    coarse = tile_grid(slide(), tile_px=64, tile_mpp=2.0)
    rule = r"parents must be at least as large as the tiles, got \(64, 64\) for \(256, 256\)"
    with pytest.raises(InvalidInputError, match=rule):
        parent_rows(coarse, fine)
