"""Outlines of masks: exact, simple rings, holes and islands, axes right; as QuPath reads them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import ndimage
from skimage.draw import polygon2mask

from thinsection.errors import InvalidInputError
from thinsection.store.geojson import mask_polygons, write_masks_geojson
from thinsection.types import MaskArray, MaskFrame

MASKS = hnp.arrays(bool, st.tuples(st.integers(1, 13), st.integers(1, 17)))


def own_frame(mask: MaskArray) -> MaskFrame:
    size = (mask.shape[1], mask.shape[0])
    return MaskFrame(size_th=size, size_l0=size)


def rasterised(mask: MaskArray, scale: tuple[int, int] = (1, 1)) -> np.ndarray:
    """How many polygons cover each px centre, by scikit-image's own point-in-polygon rule."""
    frame = MaskFrame(
        size_th=mask.shape[::-1], size_l0=(mask.shape[1] * scale[0], mask.shape[0] * scale[1])
    )
    cover = np.zeros(mask.shape, dtype=int)
    for polygon in mask_polygons(mask, frame):
        for sign, ring in [(1, polygon[0]), *((-1, hole) for hole in polygon[1:])]:
            rows_columns = ring[:, ::-1] / np.array(scale[::-1]) - 0.5
            cover += sign * polygon2mask(mask.shape, rows_columns).astype(int)
    return cover


@given(MASKS)
def test_rasterising_the_polygons_gives_the_mask_back(mask: MaskArray) -> None:
    assert np.array_equal(rasterised(mask), mask.astype(int))


def area(ring: np.ndarray) -> float:
    """With its sign: holes have less than none."""
    (x, y), (next_x, next_y) = ring.T, np.roll(ring, -1, axis=0).T
    return float((x * next_y - y * next_x).sum() / 2)


@given(MASKS)
def test_there_is_one_polygon_for_each_piece_and_one_ring_or_more_for_each_hole(
    mask: MaskArray,
) -> None:
    polygons = mask_polygons(mask, own_frame(mask))
    assert len(polygons) == ndimage.label(mask)[1]
    assert sum(area(ring) for polygon in polygons for ring in polygon) == mask.sum()
    assert all(area(p[0]) > 0 > max(map(area, p[1:]), default=-1) for p in polygons)


@given(MASKS)
def test_every_ring_is_simple_and_turns_at_every_corner(mask: MaskArray) -> None:
    for polygon in mask_polygons(mask, own_frame(mask)):
        for ring in polygon:
            assert len(np.unique(ring, axis=0)) == len(ring) >= 4
            steps = np.roll(ring, -1, axis=0) - ring
            assert ((steps != 0).sum(axis=1) == 1).all()
            assert (np.abs((steps * np.roll(steps, 1, axis=0)).sum(axis=1)) == 0).all()


def test_an_island_in_a_hole_is_a_piece_of_its_own() -> None:
    mask = np.zeros((9, 11), dtype=bool)
    mask[1:8, 1:10] = True
    mask[2:7, 2:9] = False
    mask[4, 5] = True
    outer, island = mask_polygons(mask, own_frame(mask))
    assert (len(outer), len(island)) == (2, 1)
    assert (island[0].min(axis=0) == (5, 4)).all()
    assert (island[0].max(axis=0) == (6, 5)).all()


def test_a_hole_that_touches_the_outside_at_a_corner_splits_the_ring() -> None:
    mask = np.ones((3, 4), dtype=bool)
    mask[0, 0] = mask[1, 1] = False
    (polygon,) = mask_polygons(mask, own_frame(mask))
    exterior, hole = polygon
    assert (len(exterior), len(hole)) == (6, 4)


def test_corners_are_level_0_px_with_x_along_the_width() -> None:
    mask = np.zeros((10, 20), dtype=bool)
    mask[2:4, 15:18] = True
    frame = MaskFrame(size_th=(20, 10), size_l0=(205, 71))
    ((exterior,),) = mask_polygons(mask, frame)
    assert exterior.min(axis=0) == pytest.approx((15 * 10.25, 2 * 7.1))
    assert exterior.max(axis=0) == pytest.approx((18 * 10.25, 4 * 7.1))


def test_an_empty_mask_has_no_polygons() -> None:
    mask = np.zeros((4, 7), dtype=bool)
    assert mask_polygons(mask, own_frame(mask)) == []


def test_a_mask_of_another_size_than_its_frame_is_refused() -> None:
    frame = MaskFrame(size_th=(4, 7), size_l0=(40, 70))
    with pytest.raises(InvalidInputError, match=r"mask must be bool of shape \(7, 4\), got bool"):
        mask_polygons(np.zeros((4, 7), dtype=bool), frame)


FRAME = MaskFrame(size_th=(30, 20), size_l0=(307, 203))


def test_a_mask_is_one_annotation_with_a_class_and_closed_rings(tmp_path: Path) -> None:
    mask = np.zeros((20, 30), dtype=bool)
    mask[2:12, 3:20] = True
    mask[5:9, 6:12] = False
    mask[6, 8] = True
    path = tmp_path / "m.geojson"
    write_masks_geojson(path, [("Tissue", mask, (1, 2, 3))], FRAME)
    (feature,) = json.loads(path.read_text())["features"]
    assert feature["properties"]["objectType"] == "annotation"
    assert feature["properties"]["classification"] == {"name": "Tissue", "color": [1, 2, 3]}
    assert feature["geometry"]["type"] == "MultiPolygon"
    outer, island = feature["geometry"]["coordinates"]
    assert (len(outer), len(island)) == (2, 1)
    assert all(ring[0] == ring[-1] for ring in (*outer, *island))
    assert max(x for x, _ in outer[0]) == pytest.approx(20 * 307 / 30, abs=1e-3)
    assert max(y for _, y in outer[0]) == pytest.approx(12 * 203 / 20, abs=1e-3)


def test_one_piece_is_a_polygon_and_an_empty_mask_an_empty_collection(tmp_path: Path) -> None:
    path = tmp_path / "m.geojson"
    write_masks_geojson(path, [("t", np.ones((20, 30), dtype=bool), (1, 2, 3))], FRAME)
    (feature,) = json.loads(path.read_text())["features"]
    assert feature["geometry"]["type"] == "Polygon"
    assert feature["geometry"]["coordinates"][0][2] == [307.0, 203.0]
    write_masks_geojson(path, [("t", np.zeros((20, 30), dtype=bool), (1, 2, 3))], FRAME)
    assert json.loads(path.read_text()) == {"type": "FeatureCollection", "features": []}
