"""Masks as GeoJSON that QuPath opens as annotations."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from thinsection.files.atomic import write_text
from thinsection.qc.polygons import MaskPolygon, Ring, mask_polygons
from thinsection.types import MaskArray, MaskFrame

Color = tuple[int, int, int]  # RGB, 0 to 255
TISSUE_COLOR: Color = (0, 160, 80)


def mask_feature(
    mask: MaskArray, frame: MaskFrame, *, name: str, color: Color = TISSUE_COLOR
) -> dict[str, Any] | None:
    """The mask as one GeoJSON annotation, or None if it is empty.

    Coordinates are level-0 px, x to the right and y down, as QuPath reads them. Pieces are
    polygons of one MultiPolygon (a Polygon if there is one piece), each with its holes.

    Args:
        mask: bool (H, W).
        frame: where the mask lies on its slide.
        name: name of the annotation and of its class.
        color: of the class.
    """
    polygons = [_coordinates(polygon) for polygon in mask_polygons(mask, frame)]
    if not polygons:
        return None
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
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def write_masks_geojson(
    path: Path, masks: Iterable[tuple[str, MaskArray, Color]], frame: MaskFrame
) -> None:
    """Writes masks as one FeatureCollection, atomically; empty masks are left out.

    Args:
        path: of the file.
        masks: name, mask and color of each.
        frame: of all of them.

    Memory: O(H * W + corners of all masks), the text included.
    """
    features = [mask_feature(mask, frame, name=name, color=color) for name, mask, color in masks]
    collection = {"type": "FeatureCollection", "features": [f for f in features if f is not None]}
    write_text(path, json.dumps(collection, allow_nan=False) + "\n")


def write_mask_geojson(
    path: Path, mask: MaskArray, frame: MaskFrame, *, name: str, color: Color = TISSUE_COLOR
) -> None:
    """Writes one mask as a FeatureCollection of one annotation, or of none if it is empty.

    Memory: O(H * W + corners of the mask), the text included.
    """
    write_masks_geojson(path, [(name, mask, color)], frame)


def _coordinates(polygon: MaskPolygon) -> list[list[list[float]]]:
    return [_closed(polygon.exterior_l0), *(_closed(hole) for hole in polygon.holes_l0)]


def _closed(ring: Ring) -> list[list[float]]:
    """Corners with the first repeated, to 1/1000 px."""
    points: list[list[float]] = ring.round(3).tolist()
    return [*points, points[0]]
