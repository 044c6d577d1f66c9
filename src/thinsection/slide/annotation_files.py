"""Files of annotations: QuPath's GeoJSON, XML of ASAP and ImageScope, masks, boxes (CSV).

Every form becomes shapes in level-0 px. A class of a class is named as QuPath does
('Tumor: Invasive'), also of ASAP's groups in groups. Other people's files are read with suspicion:
XML without entities, errors that name the file and the feature.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from thinsection.arrays.polygons import mask_outlines
from thinsection.errors import InvalidInputError, rewording
from thinsection.files.atomic import read_table
from thinsection.files.json_text import parse_json
from thinsection.types import Json, MaskFrame, Size

if TYPE_CHECKING:
    from shapely import Polygon

_ASPECT_TOLERANCE = 0.02  # between a mask's aspect and the slide's
_ANGLES = np.linspace(0, 2 * np.pi, 129)[:-1]
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
_SIZE_COLUMNS = ("x", "y", "width", "height")
_CORNER_COLUMNS = ("x_min", "y_min", "x_max", "y_max")
_CLASS_COLUMNS = ("class", "label", "classification", "name")
_DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    RecursionError,
    csv.Error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One annotation, before its coordinates are checked.

    Attributes:
        place: what it is in its file: 'feature 3', 'line 7'.
        class_name: its class; '' where it has none.
        polygons: each a list of rings as the file has them, or a polygon.
        is_hole: True where it is taken away from its class.
        ignored: kind of what has no area and is left out: 'point', 'line'; else ''.
    """

    place: str
    class_name: str = ""
    polygons: "Sequence[Json | Polygon]" = ()
    is_hole: bool = False
    ignored: str = ""


def read_shapes(path: Path, size_l0: Size, slide_id: str) -> list[Shape]:
    """Reads the shapes of a file by its suffix; of a CSV the rows of one slide.

    Raises:
        InvalidInputError: names the file, the feature and what is wrong with it.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise InvalidInputError(
            f"suffix must be one of {' '.join(_READERS)}, got {str(path)!r}"
        )
    rule = f"regions must be readable {path.suffix}"
    with rewording(rule, path, *_DAMAGE, error=InvalidInputError):
        return list(read(path, size_l0, slide_id))


def _without_area(kind: str, place: str) -> Shape:
    first_word = f"{kind} {place}".split()[0]
    return Shape(place=place, ignored=first_word)


# GeoJSON


def _read_geojson(path: Path, size_l0: Size, slide_id: str) -> Iterator[Shape]:
    document = parse_json(path.read_text(encoding="utf-8-sig"))
    features = document
    if isinstance(document, dict):
        features = document.get("features", [document])
    if not isinstance(features, list):
        raise InvalidInputError(
            f"GeoJSON must contain a list of features, got {type(features).__name__} in "
            f"{str(path)!r}"
        )
    for number, feature in enumerate(features):
        yield from _read_feature(feature, f"feature {number}", path)


def _read_feature(feature: Json, name: str, path: Path) -> Iterator[Shape]:
    """Yields the shapes of a feature, and of the objects below it."""
    place = f"as {name} of {str(path)!r}"
    is_bare_geometry = (
        isinstance(feature, dict)
        and "geometry" not in feature
        and "coordinates" in feature
    )
    if is_bare_geometry:
        properties = {}
        geometry = feature
    else:
        properties = _table(feature, "properties", place)
        geometry = _table(feature, "geometry", place)
    kind = geometry.get("type")
    object_type = properties.get("objectType", "annotation")
    if object_type not in ("annotation", "unknown"):
        yield _without_area(object_type, name)
    elif kind == "GeometryCollection":
        for part in geometry.get("geometries") or ():
            inner = {"properties": properties, "geometry": part}
            yield from _read_feature(inner, name, path)
    elif kind in ("Polygon", "MultiPolygon"):
        coordinates = geometry.get("coordinates")
        polygons = [coordinates] if kind == "Polygon" else coordinates
        if not isinstance(polygons, list) or not all(polygons):
            raise InvalidInputError(
                f"coordinates must be rings, got {polygons!r:.60} {place}"
            )
        yield Shape(place=name, class_name=_class_name(properties), polygons=polygons)
    else:
        plain_kind = str(kind).removeprefix("Multi").removesuffix("String")
        if plain_kind not in ("Point", "Line"):
            raise InvalidInputError(
                f"geometry must be a GeoJSON type, got {kind!r} {place}"
            )
        yield _without_area(plain_kind.lower(), name)
    for number, child in enumerate(properties.get("childObjects") or ()):
        yield from _read_feature(child, f"{name}.{number}", path)


def _table(feature: Json, key: str, place: str) -> dict[str, Json]:
    """Returns a table of a feature, {} where it has none of that name."""
    value = feature.get(key) if isinstance(feature, dict) else feature
    if not value:
        return {}
    if not isinstance(value, dict):
        raise InvalidInputError(f"{key} must be a table, got {value!r:.60} {place}")
    return value


def _class_name(properties: dict[str, Json]) -> str:
    """Returns the class that QuPath, or another program, gives a feature."""
    classification = properties.get("classification")
    if isinstance(classification, dict):
        names = classification.get("names")  # of a derived class
        if isinstance(names, list):
            classification = ": ".join(map(str, names))
        else:
            classification = classification.get("name")
    return str(classification or properties.get("label") or "")


# XML


class _NoDoctype(ElementTree.TreeBuilder):
    """Refuses a document type, and so any entity, before it is read."""

    def doctype(self, *_: object) -> None:
        raise InvalidInputError("XML must have no document type, got one")


def _read_xml(path: Path, size_l0: Size, slide_id: str) -> Iterator[Shape]:
    try:
        parser = ElementTree.XMLParser(target=_NoDoctype())
        root = ElementTree.fromstring(path.read_bytes(), parser)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error} in {str(path)!r}") from None
    if root.tag == "ASAP_Annotations":
        return _read_asap(root)
    if root.tag == "Annotations":
        return _read_imagescope(root)
    raise InvalidInputError(
        f"XML must be in the form of ASAP or ImageScope, got <{root.tag}> in {str(path)!r}"
    )


def _read_asap(root: ElementTree.Element) -> Iterator[Shape]:
    parents = {
        group.get("Name"): group.get("PartOfGroup") for group in root.iter("Group")
    }
    for number, annotation in enumerate(root.iter("Annotation")):
        place = f"annotation {number}"
        kind = annotation.get("Type", "")
        if kind not in ("Polygon", "Spline", "Rectangle"):
            yield _without_area(kind.lower() or "unknown", place)
            continue
        points = sorted(
            annotation.iter("Coordinate"),
            key=lambda point: float(point.get("Order", 0)),
        )
        ring = [[point.get("X"), point.get("Y")] for point in points]
        names = _asap_groups(annotation.get("PartOfGroup"), parents)
        yield Shape(place=place, class_name=": ".join(names), polygons=[[ring]])


def _asap_groups(
    innermost: str | None, parents: dict[str | None, str | None]
) -> list[str]:
    """Returns the names of the groups in groups that an annotation is in, the outermost first."""
    names: list[str] = []
    group = innermost
    while group is not None and group in parents and group not in names:
        names.insert(0, group)
        group = parents[group]
    return names


def _read_imagescope(root: ElementTree.Element) -> Iterator[Shape]:
    for layer in root.iter("Annotation"):
        for number, region in enumerate(layer.iter("Region")):
            kind = region.get("Type", "0")
            place = f"region {region.get('Id', number)} of layer {layer.get('Id', '?')}"
            if kind not in ("0", "1", "2"):  # an arrow, a ruler
                yield _without_area("measure", place)
                continue
            ring = [
                [vertex.get("X"), vertex.get("Y")] for vertex in region.iter("Vertex")
            ]
            yield Shape(
                place=place,
                class_name=layer.get("Name") or region.get("Text") or "",
                polygons=[[_ellipse(ring) if kind == "2" else ring]],
                is_hole=region.get("NegativeROA") == "1",
            )


def _ellipse(corners: Json) -> Json:
    """Returns the ring of an ellipse from two corners of its box."""
    box = np.array(corners, dtype=np.float64).reshape(2, 2)
    radii = np.ptp(box, axis=0) / 2
    return (box.mean(axis=0) + radii * _CIRCLE).tolist()


# boxes and masks


def _read_boxes(path: Path, size_l0: Size, slide_id: str) -> Iterator[Shape]:
    rows = read_table(path)
    header = list(rows[0]) if rows else []
    columns = _SIZE_COLUMNS
    if not set(columns) <= set(header):
        columns = _CORNER_COLUMNS
    if rows and not set(columns) <= set(header):
        raise InvalidInputError(
            f"boxes must have columns {','.join(_SIZE_COLUMNS)} or {','.join(_CORNER_COLUMNS)}, "
            f"got {header} in {str(path)!r}"
        )
    for line, row in enumerate(rows, start=2):
        if row.get("slide_id", slide_id) != slide_id:
            continue
        rule = f"line {line} must have numbers"
        with rewording(rule, path, *_DAMAGE, error=InvalidInputError):
            left, top, right, bottom = (float(row[name]) for name in columns)
        if columns == _SIZE_COLUMNS:
            right += left
            bottom += top
        ring = [[left, top], [right, top], [right, bottom], [left, bottom]]
        names = (row[name] for name in _CLASS_COLUMNS if row.get(name))
        yield Shape(place=f"line {line}", class_name=next(names, ""), polygons=[[ring]])


def _read_mask(path: Path, size_l0: Size, slide_id: str) -> Iterator[Shape]:
    """Yields the px of each value as a class of that name; of one value only, of no class."""
    with Image.open(path) as picture:  # Pillow's limit of px holds
        if picture.mode not in ("1", "L", "P", "I;16", "I"):
            raise InvalidInputError(
                f"mask must have one channel, got {picture.mode} in {str(path)!r}; "
                "save labels as grey values"
            )
        values = np.asarray(picture)
    height, width = values.shape
    aspect = width * size_l0[1] / (height * size_l0[0])
    if abs(aspect - 1) > _ASPECT_TOLERANCE:
        raise InvalidInputError(
            f"mask must cover the whole slide, got {width} x {height} px for {size_l0[0]} x "
            f"{size_l0[1]} in {str(path)!r}"
        )
    frame = MaskFrame(size_th=(width, height), size_l0=size_l0)
    labels = [value for value in np.unique(values).tolist() if value]
    for label in labels:
        outlines = mask_outlines(values == label, frame, least_iou=1.0)
        yield Shape(
            place=f"value {label}",
            class_name=str(label) if len(labels) > 1 else "",
            polygons=list(outlines.geoms),
        )


_READERS: dict[str, Callable[[Path, Size, str], Iterator[Shape]]] = {
    ".geojson": _read_geojson,
    ".json": _read_geojson,
    ".xml": _read_xml,
    ".csv": _read_boxes,
    ".png": _read_mask,
    ".tif": _read_mask,
    ".tiff": _read_mask,
    ".bmp": _read_mask,
}
SUFFIXES = tuple(_READERS)
