"""GeoJSON as QuPath reads it."""

import json
from pathlib import Path

import numpy as np
import pytest

from thinsection.store.geojson import write_mask_geojson
from thinsection.types import MaskFrame

FRAME = MaskFrame(size_th=(30, 20), size_l0=(307, 203))


def test_a_mask_is_one_annotation_with_a_class_and_closed_rings(tmp_path: Path) -> None:
    mask = np.zeros((20, 30), dtype=bool)
    mask[2:12, 3:20] = True
    mask[5:9, 6:12] = False
    mask[6, 8] = True
    path = tmp_path / "m.geojson"
    write_mask_geojson(path, mask, FRAME, name="Tissue", color=(1, 2, 3))
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
    write_mask_geojson(path, np.ones((20, 30), dtype=bool), FRAME, name="t")
    (feature,) = json.loads(path.read_text())["features"]
    assert feature["geometry"]["type"] == "Polygon"
    assert feature["geometry"]["coordinates"][0][2] == [307.0, 203.0]
    write_mask_geojson(path, np.zeros((20, 30), dtype=bool), FRAME, name="t")
    assert json.loads(path.read_text()) == {"type": "FeatureCollection", "features": []}
