"""Annotations in GeoJSON, as QuPath and others write it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from thinsection.errors import InvalidInputError
from thinsection.files.json_text import parse_json
from thinsection.slide.annotation_shapes import Shape
from thinsection.types import Json

# what QuPath calls its objects: as objectType, and until 0.3 as the id of the feature
_ANNOTATIONS = ("annotation", "unknown")
_OLD_IDS = {
    "PathDetectionObject": "detection",
    "PathCellObject": "cell",
    "PathTileObject": "tile",
    "TMACoreObject": "tma_core",
}
_WITHOUT_AREA = {
    "Point": "point",
    "MultiPoint": "point",
    "LineString": "line",
    "MultiLineString": "line",
}
_GEOMETRIES = ("Polygon", "MultiPolygon", "GeometryCollection", *_WITHOUT_AREA)


def read_geojson(path: Path) -> Iterator[Shape]:
    """Yields the shapes of a file: collections in collections, features, or bare geometries.

    Raises:
        InvalidInputError: names the feature and what is wrong with it.
    """
    document = parse_json(path.read_text(encoding="utf-8-sig"))
    if not isinstance(document, list | dict):
        raise InvalidInputError(
            f"GeoJSON must contain a list of features, got {type(document).__name__} in "
            f"{str(path)!r}"
        )
    for number, feature in enumerate(features_of(document, path)):
        yield from _read_feature(feature, f"feature {number}", path)


def features_of(document: Json, path: Path) -> Iterator[Json]:
    """Yields the features of a list or a collection, and of the collections in it."""
    if isinstance(document, dict) and "features" in document:
        document = document["features"] or []
        if not isinstance(document, list):
            raise InvalidInputError(
                f"GeoJSON must contain a list of features, got {type(document).__name__} in "
                f"{str(path)!r}"
            )
    if not isinstance(document, list):
        yield document
        return
    for item in document:
        if isinstance(item, dict) and "features" in item:
            yield from features_of(item, path)
        else:
            yield item


def _read_feature(feature: Json, name: str, path: Path) -> Iterator[Shape]:
    """Yields the shapes of a feature, and of the objects below it."""
    place = f"as {name} of {str(path)!r}"
    is_bare_geometry = (
        isinstance(feature, dict)
        and "geometry" not in feature
        and feature.get("type") in _GEOMETRIES
    )
    if is_bare_geometry:
        properties: dict[str, Json] = {}
        geometry = feature
    else:
        properties = _table(feature, "properties", place)
        geometry = _table(feature, "geometry", place)
    old_id = feature.get("id") if isinstance(feature, dict) else None
    kind = _OLD_IDS.get(str(old_id), "annotation")
    kind = properties.get("objectType", kind)
    if kind not in _ANNOTATIONS:
        yield Shape(place=name, ignored=str(kind))
    else:
        for shape in _read_geometry(geometry, name, place):
            yield replace(
                shape, class_name=class_name_of(properties), properties=properties
            )
    for number, child in enumerate(properties.get("childObjects") or ()):
        yield from _read_feature(child, f"{name}.{number}", path)


def _read_geometry(geometry: dict[str, Json], name: str, place: str) -> Iterator[Shape]:
    """Yields the shapes of a geometry, and of those in a collection of geometries."""
    kind = geometry.get("type")
    if not geometry:  # RFC 7946, 3.2: an object that has no place
        yield Shape(place=name, ignored="object", reason="without geometry")
    elif kind == "GeometryCollection":
        parts = geometry.get("geometries") or ()
        for part in parts:
            inner = _table({"geometry": part}, "geometry", place)
            yield from _read_geometry(inner, name, place)
        if not parts:
            yield Shape(place=name, ignored="object", reason="with an empty geometry")
    elif kind in ("Polygon", "MultiPolygon"):
        polygons = geometry.get("coordinates")
        # RFC 7946, 3.1: no coordinates are no geometry
        is_empty = isinstance(polygons, list) and not any(polygons)
        if kind == "Polygon":
            polygons = [polygons]
        if is_empty:
            yield Shape(place=name, ignored="object", reason="with an empty geometry")
        elif not isinstance(polygons, list) or not all(polygons):
            raise InvalidInputError(
                f"coordinates must be rings, got {polygons!r:.60} {place}"
            )
        else:
            yield Shape(place=name, polygons=polygons)
    elif kind in _WITHOUT_AREA:
        yield Shape(place=name, ignored=_WITHOUT_AREA[kind])
    else:
        raise InvalidInputError(
            f"geometry must be a GeoJSON type, got {kind!r} {place}"
        )


def _table(feature: Json, key: str, place: str) -> dict[str, Json]:
    """Returns a table of a feature, {} where it has none of that name."""
    value = feature.get(key) if isinstance(feature, dict) else feature
    if not value:
        return {}
    if not isinstance(value, dict):
        raise InvalidInputError(f"{key} must be a table, got {value!r:.60} {place}")
    return value


def class_name_of(properties: Mapping[str, Json]) -> str:
    """Returns the class that QuPath, or another program, gives a feature."""
    classification = properties.get("classification")
    if isinstance(classification, dict):
        names = classification.get("names")  # of a derived class
        if isinstance(names, list):
            classification = ": ".join(map(str, names))
        else:
            classification = classification.get("name")
    return str(classification or properties.get("label") or "")
