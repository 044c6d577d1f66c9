"""What people drew on a slide: QuPath's GeoJSON, XML of ASAP and ImageScope, masks, boxes (CSV).

Every file becomes polygons in level-0 px by class. A class of a class is told as QuPath does
('Tumor: Invasive'), also of ASAP's groups in groups. Other people's files are read with suspicion:
XML without entities, finite numbers, valid polygons; an error names the file and the feature.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from thinsection.arrays.polygons import mask_outlines
from thinsection.config import option
from thinsection.errors import ConfigError, InvalidInputError, require, rewording
from thinsection.files.atomic import read_table
from thinsection.files.json_text import parse_json
from thinsection.slide.cohort import SlideEntry
from thinsection.types import MaskFrame, Size

ROLES = ("tissue", "roi")  # settings that name files
_FARTHEST = 1e7  # px from the origin: a hundred times a large slide
_ASPECT = 0.02  # relative difference between a mask's aspect and the slide's
_ANGLES = np.linspace(0, 2 * np.pi, 129)[:-1]
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
_BOXES = (("x", "y", "width", "height"), ("x_min", "y_min", "x_max", "y_max"))
_OF_CLASS = ("class", "label", "classification", "name")
_FAULTS = (OSError, ValueError, TypeError, SyntaxError, RecursionError)
_DAMAGE = (*_FAULTS, csv.Error, Image.DecompressionBombError)
# what it is in its file, class, polygons as lists of rings (None: no area), whether it is a hole
_Shape = tuple[str, str, Sequence[Any] | None, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionsConfig:
    """What people drew, in place of what we find or beside it."""

    tissue: str | None = option(
        None,
        "Tissue as drawn: GeoJSON, ASAP's or ImageScope's XML, a mask's picture, a CSV of boxes; a "
        "folder with one a slide (SLIDE_ID.geojson), or the cohort's column of such paths.",
    )
    roi: str | None = option(
        None,
        "Regions in the same forms: tiles in them are kept, their classes are columns.",
    )
    include_class: tuple[str, ...] = option(
        (), "Only areas of this class; repeat for several."
    )
    exclude_class: tuple[str, ...] = option(
        ("Ignore*", "exclusion"),
        "Areas of this class are taken away; repeat for several.",
    )
    mend_regions: bool = option(False, "Make polygons that cross themselves valid.")

    def __post_init__(self) -> None:
        for role in ROLES:  # a worker may have another current folder
            if (given := getattr(self, role)) and Path(given).exists():
                object.__setattr__(self, role, str(Path(given).resolve()))

    def file(self, role: str, entry: SlideEntry) -> Path:
        """Where what was drawn on a slide lies; InvalidInputError where there is none."""
        path = Path(given := getattr(self, role))
        if not path.exists():
            path = Path(entry.folder, entry.more.get(given) or given)
        elif path.is_dir():
            names = [path / f"{entry.slide_id}{suffix}" for suffix in _READERS]
            path = next(filter(Path.is_file, names), names[0])
        got = f"none at {str(path)!r} for {entry.slide_id!r}"
        require(path.is_file(), f"{role} must be there for every slide", got)
        return path

    def check(self, entries: Sequence[SlideEntry]) -> None:
        """Refuses what can be there for no slide, or for one of several, before any work."""
        for role in ROLES:
            if (given := getattr(self, role)) is None:
                continue
            path, rule = (
                Path(given),
                f"{role} must be a file, a folder, or a column of the cohort",
            )
            known = path.exists() or any(given in e.more for e in entries)
            require(known, rule, repr(given), error=ConfigError)
            alone = (
                path.is_file() and path.suffix.lower() != ".csv" and len(entries) > 1
            )
            got = f"one file for {len(entries)} slides; pass a folder of SLIDE_ID{path.suffix}"
            require(not alone, f"{role} must be of one slide", got, error=ConfigError)


@dataclass(frozen=True, kw_only=True)
class Regions:
    """Areas of a slide by class; '' is of no class."""

    classes: Mapping[str, Any] = field(
        default_factory=dict
    )  # shapely's polygons, level-0 px
    notes: tuple[str, ...] = ()  # what was left out, in words

    def area(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Any:
        """The union of the classes that are included (of all, if none is named) less the others.

        A class is named by its own name, or by that of one that it is a class of.
        """
        import shapely

        def union(names: Sequence[str]) -> Any:
            # 'a: b' is 'a: b' or below it: with ': ' after both no other name begins so
            begins = tuple(f"{name}: " for name in names)
            found = (g for n, g in self.classes.items() if f"{n}: ".startswith(begins))
            return shapely.union_all(list(found))

        return shapely.difference(union(include or tuple(self.classes)), union(exclude))


def read_regions(
    path: Path, size_l0: Size, *, slide_id: str = "", mend: bool = False
) -> Regions:
    """What a file says of a slide of that size; the suffix says how to read it.

    Points, lines and what lies off the slide are left out with a word, as are QuPath's detections.
    Of a CSV with a column slide_id its rows are taken; `mend` makes polygons that cross themselves
    valid instead of refusing them. Memory: the file, and of a mask 4 bytes a px. Raises
    InvalidInputError: names the file, the feature and what is wrong with it.
    """
    import shapely

    read = _READERS.get(path.suffix.lower())
    require(read, f"suffix must be one of {' '.join(_READERS)}", repr(str(path)))
    rule = f"regions must be readable {path.suffix}"
    with rewording(rule, path, *_DAMAGE, error=InvalidInputError):
        shapes = list(read(path, size_l0, slide_id)) if read else []
    slide, left, areas = (
        shapely.box(0, 0, *size_l0),
        Counter[str](),
        dict[str, list[list[Any]]](),
    )
    for what, name, polygons, away in shapes:
        if polygons is None:
            left[f"{what.split()[0]}s ignored"] += 1
            continue
        where = (
            f"{what} {name!r} of {str(path)!r}" if name else f"{what} of {str(path)!r}"
        )
        made = [
            p if isinstance(p, shapely.Polygon) else _polygon(p, where, mend)
            for p in polygons
        ]
        if not shapely.intersects(shapely.union_all(made), slide):
            left["areas off the slide ignored"] += 1
            continue
        areas.setdefault(name, [[], []])[away] += made
    classes = {
        n: shapely.difference(*map(shapely.union_all, both))
        for n, both in areas.items()
    }
    notes = tuple(f"{count} {what} in {path.name}" for what, count in left.items())
    return Regions(classes=classes, notes=notes)


def _polygon(rings: Sequence[Any], where: str, mend: bool) -> Any:
    """One polygon with its holes; InvalidInputError for what is none."""
    import shapely

    lines = []
    for ring in rings if isinstance(rings, list) else [rings]:
        try:
            points = np.array([point[:2] for point in ring], dtype=np.float64).reshape(
                -1, 2
            )
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            what = f"ring must be [x, y] numbers, got {error} in {where}"
            raise InvalidInputError(what) from None
        near = (abs(points) <= _FARTHEST).all(axis=1)
        rule = f"coordinates must be finite and within {_FARTHEST:,.0f} px"
        require(near.all(), rule, f"{points[~near][:1].tolist()} in {where}")
        distinct = len(np.unique(points, axis=0))
        require(
            distinct > 2, "ring must have 3 different points", f"{distinct} in {where}"
        )
        lines.append(points)
    polygon = shapely.Polygon(lines[0], lines[1:])
    if not polygon.is_valid and mend:
        polygon = shapely.make_valid(polygon).buffer(0)  # areas alone
    got = f"{shapely.is_valid_reason(polygon)} in {where}; mend it, or pass --mend-regions"
    require(polygon.is_valid, "polygon must not cross itself", got)
    return polygon


def _geojson(path: Path, size_l0: Size, slide_id: str) -> Iterator[_Shape]:
    document = parse_json(path.read_text(encoding="utf-8-sig"))
    features = (
        document.get("features", [document]) if isinstance(document, dict) else document
    )
    got = f"{type(features).__name__} in {str(path)!r}"
    require(isinstance(features, list), "GeoJSON must hold a list of features", got)
    for number, feature in enumerate(features):
        yield from _feature(feature, f"feature {number}", path)


def _feature(feature: Any, what: str, path: Path) -> Iterator[_Shape]:
    place = f"as {what} of {str(path)!r}"

    def table(of: Any, key: str) -> Any:
        found = of.get(key) if isinstance(of, dict) else of
        require(
            isinstance(found or {}, dict),
            f"{key} must be a table",
            f"{found!r:.60} {place}",
        )
        return found or {}

    bare = (
        isinstance(feature, dict)
        and "geometry" not in feature
        and "coordinates" in feature
    )
    properties = {} if bare else table(feature, "properties")
    geometry = feature if bare else table(feature, "geometry")
    named = properties.get("classification")
    if isinstance(named, dict):
        names = named.get("names")  # of a derived class
        named = (
            ": ".join(map(str, names)) if isinstance(names, list) else named.get("name")
        )
    kind, parts = geometry.get("type"), geometry.get("coordinates")
    plain = str(kind).removeprefix("Multi").removesuffix("String")
    if properties.get("objectType", "annotation") not in ("annotation", "unknown"):
        yield f"{properties['objectType']} {what}", "", None, False
    elif kind == "GeometryCollection":
        for part in geometry.get("geometries") or ():
            yield from _feature(
                {"properties": properties, "geometry": part}, what, path
            )
    elif kind in ("Polygon", "MultiPolygon"):
        parts = [parts] if kind == "Polygon" else parts
        whole = isinstance(parts, list) and all(parts)
        require(whole, "coordinates must be rings", f"{parts!r:.60} {place}")
        yield what, str(named or properties.get("label") or ""), parts, False
    else:
        known = plain in ("Point", "Line")
        require(known, "geometry must be one of GeoJSON", f"{kind!r} {place}")
        yield f"{plain.lower()} {what}", "", None, False
    for number, child in enumerate(properties.get("childObjects") or ()):
        yield from _feature(child, f"{what}.{number}", path)


class _NoDoctype(ElementTree.TreeBuilder):
    """Refuses a document type, and so any entity, before it is read."""

    def doctype(self, *_: object) -> None:
        raise InvalidInputError("XML must have no document type, got one")


def _xml(path: Path, size_l0: Size, slide_id: str) -> Iterator[_Shape]:
    try:
        parser = ElementTree.XMLParser(target=_NoDoctype())
        root = ElementTree.fromstring(path.read_bytes(), parser)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error} in {str(path)!r}") from None
    readers = {"ASAP_Annotations": _asap, "Annotations": _imagescope}
    got = f"<{root.tag}> in {str(path)!r}"
    require(root.tag in readers, "XML must be ASAP's or ImageScope's", got)
    return readers[root.tag](root)


def _asap(root: Any) -> Iterator[_Shape]:
    above = {g.get("Name"): g.get("PartOfGroup") for g in root.iter("Group")}
    for number, one in enumerate(root.iter("Annotation")):
        what, kind = f"annotation {number}", one.get("Type", "")
        names: list[str] = []
        group = one.get("PartOfGroup")
        while group in above and group not in names:
            names.insert(0, group)
            group = above[group]
        points = sorted(one.iter("Coordinate"), key=lambda p: float(p.get("Order", 0)))
        ring = [[p.get("X"), p.get("Y")] for p in points]
        area = kind in ("Polygon", "Spline", "Rectangle")
        what = what if area else f"{kind.lower() or 'unknown'} {what}"
        yield what, ": ".join(names), [[ring]] if area else None, False


def _imagescope(root: Any) -> Iterator[_Shape]:
    for layer in root.iter("Annotation"):
        for number, region in enumerate(layer.iter("Region")):
            kind, name = (
                region.get("Type", "0"),
                layer.get("Name") or region.get("Text") or "",
            )
            what = f"region {region.get('Id', number)} of layer {layer.get('Id', '?')}"
            ring = [[v.get("X"), v.get("Y")] for v in region.iter("Vertex")]
            if kind not in ("0", "1", "2"):  # an arrow, a ruler
                yield f"measure {what}", name, None, False
                continue
            if kind == "2":  # two corners of its box
                corners = np.array(ring, dtype=np.float64).reshape(2, 2)
                ring = (
                    corners.mean(axis=0) + np.ptp(corners, axis=0) / 2 * _CIRCLE
                ).tolist()
            yield what, name, [[ring]], region.get("NegativeROA") == "1"


def _boxes(path: Path, size_l0: Size, slide_id: str) -> Iterator[_Shape]:
    rows = read_table(path)
    columns = next((c for c in _BOXES if rows and set(c) <= set(rows[0])), None)
    rule = f"boxes must have columns {' or '.join(','.join(c) for c in _BOXES)}"
    require(
        columns or not rows, rule, f"{list(rows[0]) if rows else []} in {str(path)!r}"
    )
    for number, row in enumerate(rows, start=2):
        if row.get("slide_id", slide_id) != slide_id:
            continue
        with rewording(
            f"line {number} must hold numbers", path, *_DAMAGE, error=InvalidInputError
        ):
            x, y, right, bottom = (float(row[name]) for name in columns or ())
        right, bottom = (
            (x + right, y + bottom) if columns == _BOXES[0] else (right, bottom)
        )
        name = next((row[c] for c in _OF_CLASS if row.get(c)), "")
        yield (
            f"line {number}",
            name,
            [[[[x, y], [right, y], [right, bottom], [x, bottom]]]],
            False,
        )


def _mask(path: Path, size_l0: Size, slide_id: str) -> Iterator[_Shape]:
    """Px of one value are a class by it; of one value only, of no class."""
    with Image.open(path) as picture:
        one = picture.mode in ("1", "L", "P", "I;16", "I")  # Pillow's limit of px holds
        values = np.asarray(picture) if one else np.zeros(0)
        got = f"{picture.mode} in {str(path)!r}; save labels as grey values"
    require(values.ndim == 2, "mask must have one channel", got)
    height, width = values.shape
    off = abs(width * size_l0[1] / (height * size_l0[0]) - 1)
    got = f"{width} x {height} px for {size_l0[0]} x {size_l0[1]} in {str(path)!r}"
    require(off <= _ASPECT, "mask must cover the whole slide", got)
    frame = MaskFrame(size_th=(width, height), size_l0=size_l0)
    found = [value for value in np.unique(values).tolist() if value]
    for value in found:
        outlines = mask_outlines(values == value, frame, least_iou=1.0)
        yield (
            f"value {value}",
            str(value) if len(found) > 1 else "",
            list(outlines.geoms),
            False,
        )


_Reader = Callable[[Path, Size, str], Iterator[_Shape]]
_READERS: dict[str, _Reader] = {
    **dict.fromkeys((".geojson", ".json"), _geojson),
    **{".xml": _xml, ".csv": _boxes},
    **dict.fromkeys((".png", ".tif", ".tiff", ".bmp"), _mask),
}
