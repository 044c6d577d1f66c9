"""Masks and tiles as GeoJSON that QuPath opens, in level-0 px."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinsection.files.atomic import atomic_path
from thinsection.qc.tissue import Color
from thinsection.store.tiles_h5 import TilesFile
from thinsection.types import Document, MaskArray, MaskFrame

if TYPE_CHECKING:
    from shapely import Geometry

Feature = Document


def write_masks_geojson(
    path: Path, masks: Iterable[tuple[str, MaskArray, Color]], frame: MaskFrame
) -> None:
    """Writes masks as one FeatureCollection of annotations, atomically.

    A mask is given by its name (of annotation and class), its array bool (H, W), and its color. Its
    pieces are the polygons of one MultiPolygon. Empty masks are left out.

    Memory: O(H * W + corners of all masks), the text included.
    """
    write_features(path, mask_features(masks, frame))


def mask_features(
    masks: Iterable[tuple[str, MaskArray, Color]], frame: MaskFrame
) -> list[Feature]:
    """Masks as annotations; see `write_masks_geojson`.

    Memory: O(H * W + corners of all masks).
    """
    from thinsection.arrays.polygons import mask_outlines

    features: list[Feature] = []
    for name, mask, color in masks:
        if mask.any():
            features.append(annotation(mask_outlines(mask, frame), name, color))
    return features


def write_features(
    path: Path, features: Iterable[Feature], *, in_lines: bool = False
) -> None:
    """Writes features one after another as a FeatureCollection, atomically.

    Args:
        path: path of the file.
        features: the features.
        in_lines: puts each feature on a line of its own.

    Memory: the text of one feature.
    """
    line = "\n" if in_lines else ""
    with atomic_path(path) as tmp, tmp.open("w", encoding="utf-8") as file:
        file.write(f'{{"type": "FeatureCollection", "features": [{line}')
        separator = ""
        for feature in features:
            file.write(separator + json.dumps(feature, allow_nan=False))
            separator = f",{line or ' '}"
        file.write(f"{line}]}}\n")


def annotation(polygons: "Geometry", name: str, color: Color) -> Feature:
    """A QuPath annotation of a class; a geometry with one piece becomes a Polygon."""
    import shapely

    parts = list(shapely.get_parts(polygons))
    shape = parts[0] if len(parts) == 1 else shapely.MultiPolygon(parts)
    return {
        "type": "Feature",
        "geometry": shapely.geometry.mapping(shape),
        "properties": {
            "objectType": "annotation",
            "name": name,
            "classification": {"name": name, "color": list(color)},
        },
    }


@dataclass(frozen=True)
class TileClass:
    """Class of a tile in QuPath."""

    name: str = ""  # '' means no class
    color: Color | None = None  # red, green and blue; None lets QuPath choose


def tile_features(
    table: TilesFile,
    kind: str,
    *,
    digits: int,
    classes: Sequence[TileClass] = (),
    colors: Sequence[Color | None] = (),
) -> Iterator[Feature]:
    """Tiles as QuPath's features; finite numbers become measurements, categories do not.

    `classes` has the class of each tile, `colors` the colour of each tile without a class; None
    lets QuPath choose.
    """
    numbers = {
        name: column
        for name, column in table.columns.items()
        if name not in table.categories
    }
    width, height = table.size_l0
    corners = ((0, 0), (width, 0), (width, height), (0, height), (0, 0))
    for index, (x, y) in enumerate(table.coords_l0.tolist()):
        measurements = {}
        for name, column in numbers.items():
            value = float(column[index])
            if np.isfinite(value):
                measurements[name] = float(f"{value:.{digits}g}")
        properties: Document = {"objectType": kind}
        if classes and classes[index].name:
            classification: Document = {"name": classes[index].name}
            color = classes[index].color
            if color is not None:
                classification["color"] = list(color)
            properties["classification"] = classification
        elif colors and colors[index] is not None:
            properties["color"] = list(colors[index] or ())
        properties["measurements"] = measurements
        ring = [[x + dx, y + dy] for dx, dy in corners]
        yield {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": properties,
        }


def classes_of_column(table: TilesFile, column: str) -> list[TileClass]:
    """Class of each tile, with its colour, by a column of categories."""
    categories = table.categories[column]
    kinds = [
        TileClass(name, categories.rgb(code))
        for code, name in enumerate(categories.names)
    ]
    kinds.append(TileClass())  # the last one: code -1
    return [kinds[code] for code in table.columns[column].tolist()]


def write_tiles_geojson(path: Path, table: TilesFile) -> None:
    """Writes tiles as QuPath's tile objects, atomically; the first categories are their classes.

    Memory: the text of one tile.
    """
    classes: list[TileClass] = []
    for column in table.categories:
        classes = classes or classes_of_column(table, column)
    features = tile_features(table, "tile", digits=6, classes=classes)
    write_features(path, features, in_lines=True)
