"""Annotations in GeoJSON, as QuPath and others write it, and in XML of ASAP, ImageScope and HALO.

ImageScope and HALO write the same structure with other names: ImageScope has numbers for the kinds
of regions and calls a point `Vertex`; HALO has names for the kinds and calls a point `V`.

Source: ASAP's writer, pyhaloxml's reader, and files of the programs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from thinsection.types import Json

if TYPE_CHECKING:
    from shapely import Polygon
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from thinsection.errors import InvalidInputError
from thinsection.files.atomic import parse_json

_ANGLES = np.linspace(0, 2 * np.pi, 129)[:-1]
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
_NUM_BOX_CORNERS = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One annotation, before its coordinates are checked.

    Attributes:
        place: position in the file, for messages: 'feature 3', 'line 7'.
        class_name: class of the annotation; '' if it has none.
        properties: other values of the annotation, unchanged.
        polygons: each is a list of rings as in the file, or a polygon.
        layer: number of the group of shapes from which a hole is cut out.
        is_hole: True if the shape is cut out of the areas of its layer, whatever their class.
        ignored: noun for a shape without area, which is left out: 'point', 'line', 'object'; '' for
            other shapes.
        reason: text after the noun in a note: 'without geometry'.
    """

    place: str
    class_name: str = ""
    properties: Mapping[str, Json] = field(default_factory=dict)
    polygons: "Sequence[Json | Polygon]" = ()
    layer: int = 0
    is_hole: bool = False
    ignored: str = ""
    reason: str = ""


def box_ring(left: float, top: float, right: float, bottom: float) -> Json:
    """Returns the ring of a box."""
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def rectangle_ring(points: Json) -> Json:
    """Returns the ring of a rectangle, which is given by four or by two opposite corners."""
    if len(points) != 2:
        return points
    (left, top), (right, bottom) = points
    return box_ring(left, top, right, bottom)


def ellipse_ring(points: Json) -> Json:
    """Returns the ring of an ellipse that is given by two or four corners of its box.

    More points are the outline itself.
    """
    if len(points) not in _NUM_BOX_CORNERS:
        return points
    corners = np.array(points, dtype=np.float64).reshape(-1, 2)
    low = corners.min(axis=0)
    high = corners.max(axis=0)
    return ((low + high) / 2 + (high - low) / 2 * _CIRCLE).tolist()


# QuPath's names for kinds of objects: in objectType, and until QuPath 0.3 in the id of a feature
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
        InvalidInputError: the message names the feature and the fault.
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
    """Yields the shapes of a geometry, also of geometries in a collection."""
    kind = geometry.get("type")
    if not geometry:  # RFC 7946, 3.2: an object without a location
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
        # RFC 7946, 3.1: empty coordinates count as no geometry
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
    """Returns a table of a feature; {} if the feature has no table with this key."""
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
        names = classification.get(
            "names"
        )  # names of a derived class and its base classes
        if isinstance(names, list):
            classification = ": ".join(map(str, names))
        else:
            classification = classification.get("name")
    return str(classification or properties.get("label") or "")


_NO_GROUP = ("", "None")
_ASAP_AREAS = ("polygon", "spline", "rectangle")
# kinds of regions: ImageScope's by number, HALO's by name
_REGION_KINDS = {
    "0": "polygon",
    "1": "rectangle",
    "2": "ellipse",
    "3": "arrow",
    "4": "line",
    "5": "point",
    "freehand": "polygon",
    "pin": "point",
    "ruler": "line",
}
_REGION_AREAS = ("polygon", "rectangle", "ellipse")


class _NoDoctype(ElementTree.TreeBuilder):
    """Refuses a document type before it is read, so that no entity can be declared."""

    def doctype(self, *_: object) -> None:
        raise InvalidInputError("XML must have no document type, got one")


def read_xml(path: Path) -> Iterator[Shape]:
    """Yields the shapes of a file of ASAP, ImageScope or HALO.

    Raises:
        InvalidInputError: none of these programs wrote the file.
    """
    try:
        parser = ElementTree.XMLParser(target=_NoDoctype())
        root = ElementTree.fromstring(path.read_bytes(), parser)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error} in {str(path)!r}") from None
    if root.tag == "ASAP_Annotations":
        return _read_asap(root)
    if root.tag == "Annotations":
        return _read_regions(root)
    raise InvalidInputError(
        "XML must be in the form of HALO, ASAP or ImageScope, got "
        f"<{root.tag}> in {str(path)!r}"
    )


def is_halo(path: Path) -> bool:
    """Tells whether HALO wrote a file, by its suffix or by its name for points."""
    if path.suffix.lower() == ".annotations":
        return True
    with path.open("rb") as file:
        return path.suffix.lower() == ".xml" and b"<V " in file.read(1 << 20)


def _points(element: ElementTree.Element) -> Json:
    """Returns [x, y] of each point, as numbers if possible."""
    points = []
    for vertex in element.iter():
        if vertex.tag in ("Coordinate", "Vertex", "V"):
            points.append([_number(vertex.get("X")), _number(vertex.get("Y"))])
    return points


def _number(text: str | None) -> float | str | None:
    """Returns a number; a text that is no number is returned unchanged, for a later message."""
    try:
        return float(text or "")
    except ValueError:
        return text


# ASAP


def _read_asap(root: ElementTree.Element) -> Iterator[Shape]:
    parents = {
        group.get("Name"): group.get("PartOfGroup") for group in root.iter("Group")
    }
    for number, annotation in enumerate(root.iter("Annotation")):
        place = f"annotation {number}"
        kind = annotation.get("Type", "").lower()
        if kind not in _ASAP_AREAS:
            yield Shape(place=place, ignored=kind or "annotation of no type")
            continue
        coordinates = annotation.iter("Coordinate")
        ordered = ElementTree.Element("Coordinates")
        ordered.extend(
            sorted(coordinates, key=lambda point: float(point.get("Order", 0)))
        )
        ring = _points(ordered)
        if kind == "rectangle":
            ring = rectangle_ring(ring)
        # groups within groups, the outermost first; a group that the file does not list counts too
        names: list[str] = []
        group = annotation.get("PartOfGroup")
        while group is not None and group not in _NO_GROUP and group not in names:
            names.insert(0, group)
            group = parents.get(group)
        yield Shape(place=place, class_name=": ".join(names), polygons=[[ring]])


# ImageScope and HALO


def _read_regions(root: ElementTree.Element) -> Iterator[Shape]:
    for layer_number, layer in enumerate(root.iter("Annotation")):
        layer_name = layer.get("Name", "")
        layer_id = layer.get("Id") or layer_name or layer_number
        # name of a layer without a name in ImageScope's table of layers
        description = ""
        for attribute in layer.iterfind("Attributes/Attribute"):
            if attribute.get("Name", "").lower() in ("description", "name"):
                description = attribute.get("Value") or ""
                break
        for number, region in enumerate(layer.iter("Region")):
            place = f"region {region.get('Id', number)} of layer {layer_id}"
            kind = region.get("Type", "0").lower()
            kind = _REGION_KINDS.get(kind, kind)
            if kind not in _REGION_AREAS:
                yield Shape(place=place, ignored=kind or "region of no type")
                continue
            ring = _points(region)
            if kind == "rectangle":
                ring = rectangle_ring(ring)
            elif kind == "ellipse":
                ring = ellipse_ring(ring)
            yield Shape(
                place=place,
                class_name=layer_name or region.get("Text") or description,
                polygons=[[ring]],
                layer=layer_number,
                is_hole=region.get("NegativeROA", "0").lower() in ("1", "true"),
            )
