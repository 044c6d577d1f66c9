"""Outlines are valid and keep their mask; px inside and areas are those of shapely."""

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import ndimage

from thinsection.arrays.polygons import (
    LEAST_IOU,
    cell_areas,
    coverage,
    mask_outlines,
    overlap,
    rasterised,
    window_of,
)
from thinsection.errors import InvalidInputError
from thinsection.types import MaskArray, MaskFrame

MASKS = hnp.arrays(bool, st.tuples(st.integers(1, 23), st.integers(1, 29)))


def framed(mask: MaskArray) -> MaskFrame:
    """Level-0 px that are not square, and no whole number of them a mask px."""
    height, width = mask.shape
    return MaskFrame(size_th=(width, height), size_l0=(7 * width + 3, 9 * height + 2))


def blobs(
    seed: int, shape: tuple[int, int] = (230, 170), sigma: float = 5
) -> MaskArray:
    return (
        ndimage.gaussian_filter(np.random.default_rng(seed).random(shape), sigma) > 0.5
    )


def inside(polygons: object, frame: MaskFrame) -> MaskArray:
    """Which px centres shapely says are inside."""
    x, y = (np.arange(n) + 0.5 for n in frame.size_th)
    x, y = np.meshgrid(x * frame.downsample_xy[0], y * frame.downsample_xy[1])
    return shapely.contains_xy(polygons, x.ravel(), y.ravel()).reshape(x.shape)


@given(MASKS)
def test_outlines_of_any_mask_are_valid_and_keep_it_with_every_piece_and_hole(
    mask: MaskArray,
) -> None:
    frame = framed(mask)
    found = mask_outlines(mask, frame)
    assert found.is_valid
    assert overlap(inside(found, frame), mask) >= LEAST_IOU
    assert len(found.geoms) == ndimage.label(mask)[1]
    around = ndimage.label(~np.pad(mask, 1), structure=np.ones((3, 3)))[1]
    assert sum(len(piece.interiors) for piece in found.geoms) == around - 1


@given(MASKS)
def test_rasterising_takes_the_px_whose_centres_are_inside(mask: MaskArray) -> None:
    frame = framed(mask)
    found = mask_outlines(mask, frame)
    assert np.array_equal(rasterised(found, frame), inside(found, frame))


@pytest.mark.parametrize("seed", range(5))
def test_outlines_of_blobs_are_smooth_with_far_fewer_corners_than_px_edges(
    seed: int,
) -> None:
    mask = blobs(seed)
    frame = framed(mask)
    found = mask_outlines(mask, frame)
    edges = sum(
        np.count_nonzero(np.diff(np.pad(mask, 1), axis=axis)) for axis in (0, 1)
    )
    assert shapely.get_num_coordinates(found) < edges / 4
    assert overlap(inside(found, frame), mask) >= LEAST_IOU
    assert found.area == pytest.approx(mask.mean() * np.prod(frame.size_l0), rel=0.01)


def test_a_pair_that_touches_at_a_corner_stays_two_pieces() -> None:
    mask = np.zeros((40, 50), dtype=bool)
    mask[5:20, 5:25] = mask[20:35, 25:45] = True
    found = mask_outlines(mask, framed(mask))
    assert len(found.geoms) == 2
    assert found.is_valid


def test_an_island_in_a_hole_lies_in_the_hole() -> None:
    mask = np.zeros((60, 70), dtype=bool)
    mask[5:55, 5:65], mask[15:45, 15:55], mask[25:35, 25:45] = True, False, True
    outer, island = mask_outlines(mask, framed(mask)).geoms
    assert (len(outer.interiors), len(island.interiors)) == (1, 0)
    assert shapely.Polygon(outer.interiors[0]).contains(island)


@pytest.mark.parametrize("seed", range(5))
def test_coverage_of_boxes_is_the_area_that_shapely_cuts(seed: int) -> None:
    rng, mask = np.random.default_rng(seed), blobs(seed, (40, 30), 2)
    found = mask_outlines(mask, framed(mask))
    coords, size = rng.integers(-50, 400, (200, 2)), (int(rng.integers(1, 90)), 37)
    boxes = shapely.box(*coords.T, *(coords + size).T)
    wanted = shapely.area(shapely.intersection(found, boxes)) / np.prod(size)
    assert coverage(found, coords, size) == pytest.approx(wanted, abs=1e-6)


def test_edges_on_the_lines_of_the_cells_count_once() -> None:
    square = shapely.Polygon(
        [(2, 1), (2, 3), (5, 3), (5, 1)], [[(3, 1.5), (4, 1.5), (4, 3)]]
    )
    cells = cell_areas(square, np.arange(7.0), np.arange(5.0))
    assert cells.sum() == pytest.approx(square.area)
    assert cells[1:3, 2].tolist() == pytest.approx([1, 1])
    assert not cells[[0, 3]].any()


def test_what_lies_outside_of_the_cells_adds_nothing_and_an_edge_left_of_them_does() -> (
    None
):
    wide = shapely.box(-10, -10, 10, 10)
    assert cell_areas(wide, np.array([0.0, 4]), np.array([0.0, 3])).tolist() == [[12]]
    assert coverage(wide, np.array([[20, 20], [8, -12]]), (4, 4)).tolist() == [0, 0.25]
    assert coverage(wide, np.zeros((0, 2), dtype=np.int64), (4, 4)).shape == (0,)


def test_collections_of_polygons_and_multipolygons_are_taken_apart() -> None:
    parts = shapely.GeometryCollection([shapely.box(0, 0, 2, 2), shapely.Point(9, 9)])
    both = shapely.GeometryCollection(
        [parts, shapely.MultiPolygon([shapely.box(4, 0, 6, 2)])]
    )
    frame = MaskFrame(size_th=(8, 3), size_l0=(8, 3))
    assert rasterised(both, frame).sum() == 8


def test_an_empty_mask_has_no_outline_and_a_full_one_the_whole_slide() -> None:
    mask = np.zeros((40, 70), dtype=bool)
    frame = framed(mask)
    assert mask_outlines(mask, frame).is_empty
    assert not rasterised(shapely.MultiPolygon(), frame).any()
    assert rasterised(mask_outlines(~mask, frame), frame).all()


def test_a_mask_of_another_size_than_its_frame_is_refused() -> None:
    frame = MaskFrame(size_th=(4, 7), size_l0=(40, 70))
    with pytest.raises(
        InvalidInputError, match=r"mask must be bool of shape \(7, 4\), got bool"
    ):
        mask_outlines(np.zeros((4, 7), dtype=bool), frame)


def test_a_window_has_the_same_pixels_as_the_whole_and_misses_none() -> None:
    rng = np.random.default_rng(0)
    frame = framed(np.zeros((23, 31), bool))
    width, height = frame.size_l0
    for _ in range(60):
        corners = rng.uniform((-80, -80), (width + 80, height + 80), (2, 2))
        radii = rng.uniform(3, 70, 2)
        first, second = (shapely.Point(*c).buffer(r) for c, r in zip(corners, radii))
        ring = first.difference(first.centroid.buffer(radii[0] / 2))
        area = shapely.GeometryCollection([ring, shapely.MultiPolygon([second])])
        whole = rasterised(area, frame)
        assert np.array_equal(whole, inside(shapely.union_all([ring, second]), frame))
        window = window_of(area, frame)
        assert np.array_equal(rasterised(area, frame, window), whole[window])
        assert whole[window].sum() == whole.sum()
    assert rasterised(shapely.Point(-99, -99).buffer(5), frame).sum() == 0
    assert window_of(shapely.Polygon(), frame) == (slice(0, 0), slice(0, 0))
