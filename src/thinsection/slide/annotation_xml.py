"""Annotations in XML: ASAP, ImageScope and HALO.

ImageScope and HALO write the same document with other words: ImageScope numbers its kinds of
regions and calls a point `Vertex`, HALO names them and calls it `V`.

Source: ASAP's writer, pyhaloxml's reader, and files of the three programs.
"""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from thinsection.errors import InvalidInputError
from thinsection.slide.annotation_shapes import Shape, ellipse_ring, rectangle_ring
from thinsection.types import Json

_NO_GROUP = ("", "None")
_ASAP_AREAS = ("polygon", "spline", "rectangle")
# kinds of ImageScope by number, and of HALO by name
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
    """Refuses a document type, and so any entity, before it is read."""

    def doctype(self, *_: object) -> None:
        raise InvalidInputError("XML must have no document type, got one")


def read_xml(path: Path) -> Iterator[Shape]:
    """Yields the shapes of a file of ASAP, ImageScope or HALO.

    Raises:
        InvalidInputError: the file is of none of them.
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
    """Tells whether HALO wrote a file: by its suffix, or by how it calls points."""
    if path.suffix.lower() == ".annotations":
        return True
    with path.open("rb") as file:
        return path.suffix.lower() == ".xml" and b"<V " in file.read(1 << 20)


def _points(element: ElementTree.Element) -> Json:
    """Returns [x, y] of each point as numbers, where it has them."""
    points = []
    for vertex in element.iter():
        if vertex.tag in ("Coordinate", "Vertex", "V"):
            points.append([_number(vertex.get("X")), _number(vertex.get("Y"))])
    return points


def _number(text: str | None) -> float | str | None:
    """Returns a number; a text that is none as it is, for the message of the check."""
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
        names = _asap_groups(annotation.get("PartOfGroup"), parents)
        yield Shape(place=place, class_name=": ".join(names), polygons=[[ring]])


def _asap_groups(
    innermost: str | None, parents: dict[str | None, str | None]
) -> list[str]:
    """Returns the names of the groups in groups that an annotation is in, the outermost first.

    A group counts by its name, whether the file lists it among its groups or not.
    """
    names: list[str] = []
    group = innermost
    while group is not None and group not in _NO_GROUP and group not in names:
        names.insert(0, group)
        group = parents.get(group)
    return names


# ImageScope and HALO


def _read_regions(root: ElementTree.Element) -> Iterator[Shape]:
    for layer_number, layer in enumerate(root.iter("Annotation")):
        layer_name = layer.get("Name", "")
        layer_id = layer.get("Id") or layer_name or layer_number
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
                class_name=layer_name or region.get("Text") or _description(layer),
                polygons=[[ring]],
                layer=layer_number,
                is_hole=region.get("NegativeROA", "0").lower() in ("1", "true"),
            )


def _description(layer: ElementTree.Element) -> str:
    """Returns what ImageScope's table of layers calls a layer that has no name."""
    for attributes in layer.findall("Attributes"):
        for attribute in attributes.findall("Attribute"):
            if attribute.get("Name", "").lower() in ("description", "name"):
                return attribute.get("Value") or ""
    return ""
