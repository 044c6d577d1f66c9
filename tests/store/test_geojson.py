"""Masks as annotations that QuPath reads."""

import json
from pathlib import Path

import numpy as np
import pytest
import shapely

from thinsection.store.geojson import write_masks_geojson
from thinsection.types import MaskFrame

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
    assert feature["properties"]["classification"] == {
        "name": "Tissue",
        "color": [1, 2, 3],
    }
    assert feature["geometry"]["type"] == "MultiPolygon"
    outer, island = feature["geometry"]["coordinates"]
    assert (len(outer), len(island)) == (2, 1)
    assert all(ring[0] == ring[-1] for ring in (*outer, *island))
    (found,) = shapely.from_geojson(path.read_text()).geoms
    right, bottom = found.bounds[2:]
    assert (right, bottom) == pytest.approx((20 * 307 / 30, 12 * 203 / 20), abs=1)


def test_one_piece_is_a_polygon_and_an_empty_mask_an_empty_collection(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.geojson"
    write_masks_geojson(path, [("t", np.ones((20, 30), dtype=bool), (1, 2, 3))], FRAME)
    (feature,) = json.loads(path.read_text())["features"]
    assert feature["geometry"]["type"] == "Polygon"
    assert shapely.geometry.shape(feature["geometry"]).bounds == (0, 0, 307, 203)
    write_masks_geojson(path, [("t", np.zeros((20, 30), dtype=bool), (1, 2, 3))], FRAME)
    assert json.loads(path.read_text()) == {"type": "FeatureCollection", "features": []}
