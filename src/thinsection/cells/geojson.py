"""Reads cells from GeoJSON, as QuPath, StarDist, CellViT and others write it.

A detection or cell is one cell. Annotations and features without a kind are cells only in a file
without detections; then each polygon of an annotation with several is a cell, because CellViT
writes all cells of a class as one annotation. Such an annotation may have gigabytes of text, with
its class behind the polygons. A second stream over the file reads ahead and finds the class.

Source: QuPath's GsonTools (kinds of objects, measurements, nucleusGeometry); RFC 7946.
"""

import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from thinsection.cells.batch import CellBatch
from thinsection.cells.collect import NOT_NUMBERS, CellCollector
from thinsection.cells.json_stream import (
    MAX_VALUE_CHARS,
    JsonStream,
    LongItemError,
    open_bytes,
    open_json,
)
from thinsection.slide.annotation_formats import class_name_of
from thinsection.types import MIB, Json

CELL_KINDS = ("cell", "detection")
# kinds that QuPath until 0.3 wrote as the id of a feature
_OLD_IDS = {
    "PathDetectionObject": "detection",
    "PathCellObject": "cell",
    "PathTileObject": "tile",
    "PathAnnotationObject": "annotation",
    "TMACoreObject": "TMA core",
}
_ANNOTATIONS = ("annotation", "unknown", "")
# type of the parts of a geometry that has several
_PART_KINDS = {"MultiPolygon": "Polygon", "MultiPoint": "Point"}
_CELL_WORDS = re.compile(
    rb'"objectType"\s*:\s*"(?:cell|detection)"|"Path(?:Detection|Cell)Object"'
)
_LONGEST_WORDS = 64  # bytes that a match may cross a border of pieces
# properties that are no measurements
_NOT_MEASURED = (
    "objectType", "classification", "class", "class_name", "label", "name", "color", "isLocked",
    "measurements", "childObjects", "metadata", "probability",
)  # fmt: skip
_CLASS_NAMES = ("class_name", "class", "cell_type")
_PROBABILITIES = ("Detection probability", "probability")


def has_detections(path: Path) -> bool:
    """True if a GeoJSON file names a detection or cell; reads the bytes up to the first."""
    tail = b""
    with open_bytes(path) as file:
        while data := file.read(4 * MIB):
            if _CELL_WORDS.search(tail + data):
                return True
            tail = data[-_LONGEST_WORDS:]
    return False


def read_geojson_cells(path: Path) -> Iterator[CellBatch]:
    """Yields the cells of a GeoJSON file, which may be packed by gzip.

    Memory: some 100 MiB, whatever the size of the file and of its features.

    Raises:
        ValueError: the text is no GeoJSON; the message has the place.
    """
    collector = CellCollector()
    annotations_count = not has_detections(path)
    with open_json(path) as stream, closing(_facts_of_long_features(path)) as facts:
        for feature in _features(stream):
            if isinstance(feature, _LongFeature):
                adding = _add_long_feature(
                    feature, next(facts), collector, annotations_count
                )
                for _ in adding:
                    if collector.is_full:
                        yield collector.take()
            else:
                _add_feature(feature, collector, annotations_count)
            if collector.is_full:
                yield collector.take()
        if stream.peek():
            raise stream.error("JSON must end")
    yield collector.take()


@dataclass(frozen=True, slots=True)
class _LongFeature:
    """A feature that is too long to be read as a whole; the stream stands at its beginning."""

    stream: JsonStream

    def pieces(self, facts: dict[str, Json]) -> Iterator[Json]:
        """Yields the polygons or points of the feature, and puts everything else into `facts`."""
        for name in self.stream.members():
            if name != "geometry" or self.stream.peek() != "{":
                facts[name] = self.stream.value()
                continue
            geometry: dict[str, Json] = {}
            for key in self.stream.members():
                if key != "coordinates" or self.stream.peek() != "[":
                    geometry[key] = self.stream.value()
                    continue
                for _ in self.stream.items():
                    yield self.stream.value()
            facts[name] = geometry


def _facts_of_long_features(path: Path) -> Generator[dict[str, Json]]:
    """Yields each long feature of a file without its coordinates."""
    with open_json(path) as stream:
        for feature in _features(stream):
            if isinstance(feature, _LongFeature):
                facts: dict[str, Json] = {}
                for _ in feature.pieces(facts):
                    pass
                yield facts


def _feature(stream: JsonStream) -> "Json | _LongFeature":
    """Reads the next feature, if it is not too long."""
    try:
        return stream.value()
    except LongItemError:
        if stream.peek() != "{":
            raise
        return _LongFeature(stream)


def _features(stream: JsonStream) -> Iterator["Json | _LongFeature"]:
    """Yields the features of a list or a collection, or a lone feature.

    The caller reads the pieces of a long feature before it takes the next feature.
    """
    if stream.peek() == "[":
        for _ in stream.items():
            item = _feature(stream)
            if isinstance(item, dict) and "features" in item:
                yield from item["features"] or ()
            else:
                yield item
        return
    if stream.peek() != "{":
        raise stream.error("GeoJSON must be a list or a table of features")
    lone: dict[str, Json] = {}
    has_features = False
    for name in stream.members():
        if name == "features" and stream.peek() == "[":
            has_features = True
            for _ in stream.items():
                yield _feature(stream)
        else:
            try:
                lone[name] = stream.value()
            except LongItemError:
                limit_mib = MAX_VALUE_CHARS >> 20
                raise stream.error(
                    f"a feature that stands alone must have at most {limit_mib} MiB of text (put "
                    "[ before it and ] behind it, and it is read piece by piece)"
                ) from None
    if not has_features and "type" in lone:
        yield lone


def _add_feature(
    feature: Json, collector: CellCollector, annotations_count: bool
) -> None:
    """Adds the cells of a feature and of the objects below it."""
    if not isinstance(feature, dict):
        collector.refused["that are no features"] += 1
        return
    properties = _properties(feature)
    kind = _kind_of(feature, properties)
    if kind in CELL_KINDS:
        _add_cell(feature, properties, collector)
    elif kind in _ANNOTATIONS and annotations_count:
        _add_annotation(feature, properties, kind, collector)
    else:
        _count_other_object(kind, collector)
    for child in properties.get("childObjects") or ():
        _add_feature(child, collector, annotations_count)


def _add_long_feature(
    feature: _LongFeature,
    facts: dict[str, Json],
    collector: CellCollector,
    annotations_count: bool,
) -> Iterator[None]:
    """Adds each polygon or point of a long annotation, and yields after each.

    Raises:
        ValueError: it is a single cell, or has no polygons and points.
    """
    properties = _properties(facts)
    kind = _kind_of(facts, properties)
    geometry_kind = str((facts.get("geometry") or {}).get("type"))
    part_kind = _PART_KINDS.get(geometry_kind)
    is_read = kind in _ANNOTATIONS and annotations_count
    if (is_read and not _has_cells(kind, part_kind)) or kind in CELL_KINDS:
        raise feature.stream.error(
            f"a {kind or 'feature without objectType'} of type {geometry_kind} must have at most "
            f"{MAX_VALUE_CHARS >> 20} MiB of text"
        )
    if not is_read:
        _count_other_object(kind, collector)
    for piece in feature.pieces({}):
        if is_read:
            one = {"geometry": {"type": part_kind, "coordinates": piece}}
            _add_cell(one, properties, collector)
        yield
    for child in properties.get("childObjects") or ():
        _add_feature(child, collector, annotations_count)


def _properties(feature: dict[str, Json]) -> dict[str, Json]:
    """Properties of a feature; empty if it has none."""
    properties = feature.get("properties")
    return properties if isinstance(properties, dict) else {}


def _kind_of(feature: dict[str, Json], properties: dict[str, Json]) -> Json:
    """Kind of object that a feature is; '' if it states none."""
    kind = properties.get("objectType")
    if kind is None:
        kind = _OLD_IDS.get(str(feature.get("id")), "")
    return kind


def _count_other_object(kind: Json, collector: CellCollector) -> None:
    collector.refused[f"that are {kind or 'unknown'} objects"[:80]] += 1


def _has_cells(kind: Json, part_kind: str | None) -> bool:
    """True if each part of an annotation is a cell; `part_kind` is the type of its parts."""
    return part_kind == "Point" or (part_kind is not None and bool(kind))


def _add_annotation(
    feature: dict[str, Json],
    properties: dict[str, Json],
    kind: Json,
    collector: CellCollector,
) -> None:
    """Adds the cell of a feature, or one for each of its polygons or points."""
    geometry = feature.get("geometry")
    if not isinstance(geometry, dict):
        geometry = {}
    parts = geometry.get("coordinates")
    part_kind = _PART_KINDS.get(str(geometry.get("type")))
    if not _has_cells(kind, part_kind) or not isinstance(parts, list):
        _add_cell(feature, properties, collector)
        return
    for part in parts:
        one = {"geometry": {"type": part_kind, "coordinates": part}}
        _add_cell(one, properties, collector)


def _add_cell(
    feature: dict[str, Json], properties: dict[str, Json], collector: CellCollector
) -> None:
    """Adds one cell."""
    ring, center = _ring(feature.get("geometry"), collector)
    if ring is None and center is None:
        return
    nucleus = None
    if feature.get("nucleusGeometry"):
        nucleus, _ = _ring(feature["nucleusGeometry"], CellCollector())
    cell_id = feature.get("id")
    if cell_id is not None and cell_id in _OLD_IDS:
        cell_id = None
    class_name = class_name_of(properties)
    for name in _CLASS_NAMES:
        if not class_name and isinstance(properties.get(name), str):
            class_name = properties[name]
    measurements = _measurements(properties)
    probability = float("nan")
    for name in _PROBABILITIES:
        value = measurements.get(name, properties.get(name))
        if isinstance(value, int | float):
            probability = float(value)
            break
    collector.add(
        ring,
        cell_id=None if cell_id is None else str(cell_id),
        class_name=class_name,
        center=center,
        nucleus=nucleus,
        probability=probability,
        measurements=measurements,
    )


def _ring(
    geometry: Json, collector: CellCollector
) -> tuple[list[Json] | None, tuple[float, float] | None]:
    """Outer ring of a geometry, or the place of a point; (None, None) if there is neither."""
    kind = geometry.get("type") if isinstance(geometry, dict) else None
    coordinates = geometry.get("coordinates") if isinstance(geometry, dict) else None
    if kind == "Point" and isinstance(coordinates, list) and len(coordinates) >= 2:
        return None, (coordinates[0], coordinates[1])
    if kind == "MultiPolygon" and isinstance(coordinates, list):
        pieces = [piece for piece in coordinates if piece]
        if len(pieces) > 1:
            collector.changed["of several pieces: the largest is kept"] += 1
            pieces.sort(key=_size_of_piece)
        coordinates = pieces[-1] if pieces else None
    elif kind != "Polygon":
        coordinates = None
    if not coordinates:
        reason = "without an outline"
        if kind not in (None, "Polygon", "MultiPolygon"):
            reason = f"with a {kind} as outline"
        collector.refused[reason[:80]] += 1
        return None, None
    if not isinstance(coordinates, list) or not isinstance(coordinates[0], list):
        collector.refused[NOT_NUMBERS] += 1
        return None, None
    if len(coordinates) > 1:
        collector.changed["with holes, which are filled"] += 1
    return coordinates[0] or None, None


def _size_of_piece(piece: Json) -> float:
    """Area of the outer ring of a piece; 0 where it is none."""
    try:
        ring = piece[0]
        twice = 0.0
        for (x, y, *_), (next_x, next_y, *_) in pairwise(ring):
            twice += x * next_y - next_x * y
    except (TypeError, ValueError, LookupError):
        return 0.0
    return abs(twice)


def _measurements(properties: Mapping[str, Json]) -> Mapping[str, Json]:
    """Measurements of an object: QuPath's, or the numbers among its properties."""
    measured = properties.get("measurements")
    if isinstance(measured, list):  # until QuPath 0.3
        pairs = [pair for pair in measured if isinstance(pair, dict)]
        return {str(pair.get("name")): pair.get("value") for pair in pairs}
    if isinstance(measured, dict):
        return measured
    return {
        name: value
        for name, value in properties.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in _NOT_MEASURED
    }
