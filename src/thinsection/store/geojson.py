"""Masks as GeoJSON that QuPath opens as annotations."""

import json
from pathlib import Path
from typing import Any

from thinsection.qc.polygons import MaskPolygon, Ring, mask_polygons
from thinsection.store.atomic import write_text
from thinsection.types import MaskArray, MaskFrame

TISSUE_COLOR = (0, 160, 80)


def mask_feature_collection(
    mask: MaskArray, frame: MaskFrame, *, name: str, color: tuple[int, int, int] = TISSUE_COLOR
) -> dict[str, Any]:
    """The mask as a GeoJSON FeatureCollection of one annotation, or of none if it is empty.

    Coordinates are level-0 px, x to the right and y down, as QuPath reads them. Pieces are
    polygons of one MultiPolygon (a Polygon if there is one piece), each with its holes.

    Args:
        mask: bool (H, W).
        frame: where the mask lies on its slide.
        name: name of the annotation's class.
        color: RGB of the class, 0 to 255.
    """
    polygons = [_coordinates(polygon) for polygon in mask_polygons(mask, frame)]
    if not polygons:
        return {"type": "FeatureCollection", "features": []}
    geometry = (
        {"type": "Polygon", "coordinates": polygons[0]}
        if len(polygons) == 1
        else {"type": "MultiPolygon", "coordinates": polygons}
    )
    properties = {
        "objectType": "annotation",
        "name": name,
        "classification": {"name": name, "color": list(color)},
    }
    feature = {"type": "Feature", "geometry": geometry, "properties": properties}
    return {"type": "FeatureCollection", "features": [feature]}


def write_mask_geojson(
    path: Path,
    mask: MaskArray,
    frame: MaskFrame,
    *,
    name: str,
    color: tuple[int, int, int] = TISSUE_COLOR,
) -> None:
    """Writes the mask as GeoJSON, atomically; see `mask_feature_collection`.

    Memory: O(H * W + corners of the mask), the text included.
    """
    collection = mask_feature_collection(mask, frame, name=name, color=color)
    write_text(path, json.dumps(collection, allow_nan=False) + "\n")


def _coordinates(polygon: MaskPolygon) -> list[list[list[float]]]:
    return [_closed(polygon.exterior_l0), *(_closed(hole) for hole in polygon.holes_l0)]


def _closed(ring: Ring) -> list[list[float]]:
    """Corners with the first repeated, to 1/1000 px."""
    points: list[list[float]] = ring.round(3).tolist()
    return [*points, points[0]]
