"""Masks as GeoJSON that QuPath opens as annotations: smooth outlines in level-0 px."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from thinsection.arrays.polygons import mask_outlines
from thinsection.files.atomic import write_text
from thinsection.qc.tissue import Color
from thinsection.types import MaskArray, MaskFrame


def write_masks_geojson(
    path: Path, masks: Iterable[tuple[str, MaskArray, Color]], frame: MaskFrame
) -> None:
    """Writes masks as one FeatureCollection of annotations, atomically; empty ones are left out.

    Coordinates are level-0 px, x to the right and y down, as QuPath reads them. A mask is its name
    (of annotation and class), bool (H, W), and color; its pieces are polygons of one MultiPolygon.

    Memory: O(H * W + corners of all masks), the text included.
    """
    features = [
        annotation(mask_outlines(m, frame), name, color) for name, m, color in masks if m.any()
    ]
    write_features(path, features)


def write_features(path: Path, features: list[dict[str, Any]]) -> None:
    """Writes a FeatureCollection, atomically."""
    collection = {"type": "FeatureCollection", "features": features}
    write_text(path, json.dumps(collection, allow_nan=False) + "\n")


def annotation(polygons: Any, name: str, color: Color) -> dict[str, Any]:
    """A feature of QuPath: shapely's polygons (of one piece: a Polygon) of a class."""
    import shapely

    geometry = shapely.geometry.mapping(polygons.geoms[0] if len(polygons.geoms) == 1 else polygons)
    classification = {"name": name, "color": list(color)}
    return {
        "type": "Feature",
        "geometry": geometry,
        "properties": {"objectType": "annotation", "name": name, "classification": classification},
    }
