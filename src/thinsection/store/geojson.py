"""Masks as GeoJSON that QuPath opens as annotations: smooth outlines in level-0 px."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.arrays.polygons import mask_outlines
from thinsection.files.atomic import atomic_path, write_text
from thinsection.qc.tissue import Color
from thinsection.store.tiles_h5 import TilesFile
from thinsection.types import MaskArray, MaskFrame


def write_masks_geojson(
    path: Path, masks: Iterable[tuple[str, MaskArray, Color]], frame: MaskFrame
) -> None:
    """Writes masks as one FeatureCollection of annotations, atomically; empty ones are left out.

    A mask is its name (of annotation and class), bool (H, W), and color; its pieces are polygons of
    one MultiPolygon. Memory: O(H * W + corners of all masks), the text included.
    """
    drawn = (
        (mask_outlines(m, frame), name, color) for name, m, color in masks if m.any()
    )
    write_features(path, [annotation(*each) for each in drawn])


def write_features(path: Path, features: list[dict[str, Any]]) -> None:
    """Writes a FeatureCollection, atomically."""
    collection = {"type": "FeatureCollection", "features": features}
    write_text(path, json.dumps(collection, allow_nan=False) + "\n")


def annotation(polygons: Any, name: str, color: Color) -> dict[str, Any]:
    """A feature of QuPath: shapely's polygons (of one piece: a Polygon) of a class."""
    import shapely

    parts = list(shapely.get_parts(polygons))
    shape = shapely.geometry.mapping(
        parts[0] if len(parts) == 1 else shapely.MultiPolygon(parts)
    )
    kind = {"name": name, "color": list(color)}
    properties = {"objectType": "annotation", "name": name, "classification": kind}
    return {"type": "Feature", "geometry": shape, "properties": properties}


def tile_features(
    table: TilesFile, kind: str, *, digits: int, classes: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Tiles as QuPath's features, columns as measurements but for NaN; a class of '' is none."""
    (width, height), columns = table.size_l0, table.columns.items()
    corners = [(0, 0), (width, 0), (width, height), (0, height), (0, 0)]
    for i, (x, y) in enumerate(table.coords_l0.tolist()):
        ring = [[x + dx, y + dy] for dx, dy in corners]
        known = {
            n: float(f"{v[i]:.{digits}g}") for n, v in columns if np.isfinite(v[i])
        }
        named = (
            {"classification": {"name": classes[i]}} if classes and classes[i] else {}
        )
        properties = {"objectType": kind, **named, "measurements": known}
        shape = {"type": "Polygon", "coordinates": [ring]}
        yield {"type": "Feature", "geometry": shape, "properties": properties}


def write_tiles_geojson(path: Path, table: TilesFile) -> None:
    """Writes tiles as QuPath's tile objects, atomically. Memory: that of one tile's text."""
    with atomic_path(path) as tmp, tmp.open("w", encoding="utf-8") as file:
        file.write('{"type": "FeatureCollection", "features": [\n')
        for i, feature in enumerate(tile_features(table, "tile", digits=6)):
            file.write(",\n" * (i > 0) + json.dumps(feature, allow_nan=False))
        file.write("\n]}\n")
