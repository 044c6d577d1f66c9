"""Corrections of quality control that a person drew: areas where checks are overruled.

An annotation is a correction if its class is `keep`, `remove`, `keep CHECK` or `remove CHECK`:

    keep CHECK     CHECK removes nothing here; a pixel comes back if no other check removes it
    remove CHECK   here is what CHECK looks for; it is removed
    keep           tissue, whatever the checks say
    remove         no tissue, whatever the checks say

Where areas overlap, `remove` wins. The outlines that we export carry measurements of their shape.
An outline that still has this shape is no correction; one that was changed is an error.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np

from thinsection.config import nearest
from thinsection.errors import ConfigError, InvalidInputError, rewording
from thinsection.types import Document, Json, MaskArray, MaskFrame, Size

# What reads annotations is imported where it is used: every process that checks a slide imports
# this file, and most slides have no corrections.
if TYPE_CHECKING:
    from shapely import Geometry

    from thinsection.slide.annotation_formats import Shape
    from thinsection.slide.cohort import SlideEntry

Action = Literal["keep", "remove"]
# value of the setting that drops stored corrections
NO_EDITS = "none"
ROLE = "qc_edits"
# column with the number of corrected areas of a slide
EDITED_AREAS = "edited_areas"
SUFFIXES = (".geojson", ".json")
# forms in which QuPath compresses GeoJSON
_PACKED = (".gz", ".zip")
# colour of areas to keep, and of areas to remove
EDIT_COLORS: Mapping[str, tuple[int, int, int]] = {
    "keep": (0, 150, 70),
    "remove": (200, 0, 110),
}
# kinds of QuPath's objects that no person draws
_NOT_DRAWN = ("detection", "cell", "tile", "tile_detection", "tmaCore", "tma_core")
# measurements of an exported outline, by which an unchanged one is recognised
_AREA = "outline area px^2"
_LEFT = "outline left px"
_TOP = "outline top px"
# QuPath keeps coordinates as float32: largest shift of a border, level-0 px
_SHIFT_PX = 0.02
# largest shift of an outline that nobody moved, level-0 px
_MOVED_PX = 0.5
# decimals of level-0 px by which two corrections are the same
_DECIMALS = 2
_DAMAGE = (OSError, ValueError, TypeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class QcEdit:
    """One area that a person corrected, with who drew it, and when."""

    action: Action
    # check that it is about; '' for all checks
    check: str
    # in level-0 pixels
    area: Geometry
    # name in the annotation's metadata, or the owner of the file
    author: str = ""
    # time at which the file was written: ISO 8601, UTC
    time: str = ""
    # name and SHA-256 of the file that it was read from
    file: str = ""
    sha256: str = ""

    @property
    def class_name(self) -> str:
        """Class of the annotation: 'keep', 'remove ink'."""
        return f"{self.action} {self.check}".strip()

    @property
    def metadata(self) -> dict[str, str]:
        """Who and when, and the file, as QuPath's metadata of an annotation."""
        return {
            "author": self.author,
            "time": self.time,
            "file": self.file,
            "sha256": self.sha256,
        }


def edits_key(edits: Iterable[QcEdit]) -> str:
    """Hash of classes and areas; '' without corrections. Order, author and file do not count."""
    import shapely

    parts = []
    for edit in edits:
        rounded = shapely.set_precision(edit.area, 10**-_DECIMALS, mode="pointwise")
        parts.append([edit.class_name, shapely.normalize(rounded).wkt])
    if not parts:
        return ""
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()[:24]


def check_edits_exist(source: str | None, entries: Sequence[SlideEntry]) -> None:
    """Refuses a source that does not exist, or one file for several slides.

    Raises ConfigError: the message names the source.
    """
    if source not in (None, NO_EDITS):
        from thinsection.slide.annotations import check_source

        check_source(source, ROLE, entries)


def check_edits_source(
    source: str, entries: Sequence[SlideEntry], on_message: Callable[[str], None]
) -> list[str]:
    """Refuses a source of corrections that fits no slide, or one file of several slides.

    Says which files are not read, and that a folder is not the column of the same name.

    Args:
        source: a file, a folder, or a column of the cohort.
        entries: slides with the ids under which their results are stored.
        on_message: called with each line.

    Returns:
        Ids of the slides that have no file.

    Raises:
        ConfigError: the source does not exist, has a file for none of the slides or one file for
            several, or a slide's file is compressed.
    """
    from thinsection.slide.annotations import annotation_files

    check_edits_exist(source, entries)
    if source == NO_EDITS:
        return []
    slides_by_file: dict[Path, list[str]] = {}
    without_file: list[SlideEntry] = []
    is_faulty = False
    for entry in entries:
        try:
            paths = annotation_files(source, ROLE, entry, required=False)
        except InvalidInputError:
            # this slide will fail with this reason
            is_faulty = True
            continue
        if not paths:
            without_file.append(entry)
        for path in paths:
            slides_by_file.setdefault(path.resolve(), []).append(entry.slide_id)
    folder = Path(source)
    if folder.is_dir():
        _refuse_packed(folder, without_file)
        _name_unused(folder, slides_by_file, on_message)
        if any(folder.name in entry.more for entry in entries):
            on_message(
                f"{ROLE}: the folder {source!r} is read, and not the column {folder.name!r} of "
                "the cohort"
            )
    for path, slide_ids in slides_by_file.items():
        if len(slide_ids) > 1:
            raise ConfigError(
                f"{ROLE} must have a file of its own for each slide, got {str(path)!r} for "
                f"{' and '.join(map(repr, slide_ids[:3]))}; name the files SLIDE_ID.geojson, or "
                "write other paths into the column"
            )
    if not slides_by_file and not is_faulty:
        names = ", ".join(entry.slide_id for entry in entries[:3])
        raise ConfigError(
            f"{ROLE} must have a file for one of the slides, got none for {names} in {source!r}; "
            "name it SLIDE_ID.geojson"
        )
    return [entry.slide_id for entry in without_file]


def _refuse_packed(folder: Path, without_file: Iterable[SlideEntry]) -> None:
    """Raises ConfigError: the corrections of a slide lie in a folder, but are compressed."""
    names = set()
    for entry in without_file:
        names |= {entry.slide_id, Path(entry.slide_path).name}
    for path in sorted(folder.iterdir()):
        packed = Path(path.stem)
        is_packed = path.suffix.lower() in _PACKED
        is_named = packed.suffix.lower() in SUFFIXES and packed.stem in names
        if (is_packed and is_named) or (path.stem in names and _holds_geojson(path)):
            raise ConfigError(
                f"{ROLE} must be GeoJSON ({' or '.join(SUFFIXES)}), got {str(path)!r}; "
                "unpack it, or move it out of the folder"
            )


def _holds_geojson(path: Path) -> bool:
    """True for a zip file with a GeoJSON file in it; it reads only the list of its files."""
    if path.suffix.lower() != ".zip":
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (*_DAMAGE, NotImplementedError, zipfile.BadZipFile):
        return False
    return any(name.lower().endswith(SUFFIXES[0]) for name in names)


def _name_unused(
    folder: Path, used: Collection[Path], on_message: Callable[[str], None]
) -> None:
    """Says which files of a folder fit no slide."""
    unused = []
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in SUFFIXES and path.resolve() not in used:
            unused.append(path.name)
    if unused:
        verb = "fits" if len(unused) == 1 else "fit"
        on_message(
            f"{ROLE}: {first_names(unused)} in {str(folder)!r} {verb} no slide of this run"
        )


def first_names(names: Sequence[str]) -> str:
    """Three names at most: 'a, b, c and 2 more'."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def edits_file(source: str, entry: SlideEntry) -> Path | None:
    """File with the corrections of a slide; None if the folder or column has none for it.

    Raises:
        InvalidInputError: several files fit the slide, or the file is no GeoJSON.
    """
    from thinsection.slide.annotations import annotation_files

    paths = annotation_files(source, ROLE, entry, required=False)
    if not paths:
        return None
    path, *others = paths
    if others:
        names = ", ".join(repr(each.name) for each in paths)
        raise InvalidInputError(
            f"{ROLE} must have one file for each slide, got {names} for {entry.slide_id!r} in "
            f"{str(path.parent)!r}; join them or remove one"
        )
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInputError(
            f"{ROLE} must be GeoJSON ({' or '.join(SUFFIXES)}), got {str(path)!r}"
        )
    return path


def read_edits(
    path: str | Path, checks: Sequence[str], size_l0: Size | None = None
) -> tuple[QcEdit, ...]:
    """Reads the corrections in a GeoJSON file, for example of QuPath.

    Args:
        path: the file. Detections and unchanged outlines of an export are no corrections.
        checks: names of the checks that may be corrected.
        size_l0: (width, height) of the slide; areas outside it are refused. None does not check.

    Raises:
        InvalidInputError: an annotation is no correction, or not valid. The message names the file,
            the feature and the classes that are allowed.
    """
    from thinsection.slide.annotation_formats import read_geojson

    path = Path(path)
    edits = []
    advice = (
        "; export the annotations from QuPath again, as GeoJSON in UTF-8 (without corrections "
        'the file is {"type": "FeatureCollection", "features": []})'
    )
    with rewording(
        f"{ROLE} must be readable", path, *_DAMAGE, error=InvalidInputError, more=advice
    ):
        content = path.read_bytes()
        shapes = list(read_geojson(path))
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    file_values = {
        "author": _owner(path),
        "time": written.isoformat(timespec="seconds"),
        "file": path.name,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    for shape in shapes:
        edit = _edit_of(shape, path, checks, file_values)
        if edit is None:
            continue
        if size_l0 is not None:
            _refuse_outside(edit, shape, path, size_l0)
        edits.append(edit)
    return tuple(edits)


def _owner(path: Path) -> str:
    """Name of the user whose file it is; '' if the system does not know it."""
    try:
        return path.owner()
    except (KeyError, NotImplementedError, OSError):
        return ""


def _edit_of(
    shape: Shape, path: Path, checks: Sequence[str], file_values: Mapping[str, str]
) -> QcEdit | None:
    """Correction of a shape; None for a detection or an unchanged outline of an export."""
    import shapely

    from thinsection.slide.annotations import make_polygon

    class_words = f" {shape.class_name!r}" if shape.class_name else ""
    place = f"{shape.place}{class_words} of {str(path)!r}"
    if shape.ignored in _NOT_DRAWN:
        return None
    if shape.ignored:
        noun = f"{shape.ignored} {shape.reason}".strip()
        article = "an" if noun[0] in "aeiou" else "a"
        raise InvalidInputError(
            f"{ROLE} must be areas, got {article} {noun} as {place}; draw an area"
        )
    polygons = [
        polygon
        if isinstance(polygon, shapely.Polygon)
        else make_polygon(
            polygon, place, advice="draw it again as areas that do not cross themselves"
        )
        for polygon in shape.polygons
    ]
    area = shapely.union_all(polygons)
    is_exported = _is_exported(shape.properties)
    is_unchanged = is_exported and _has_shape(area, shape.properties)
    words = shape.class_name.replace(":", " ").split(maxsplit=1)
    action = words[0].casefold() if words else ""
    if action not in get_args(Action):
        if is_unchanged:
            return None
        if is_exported:
            raise InvalidInputError(
                f"an outline of the export must stay as it was, got a changed one as {place}; "
                f"draw an area of class {_allowed(checks)} in its place"
            )
        raise InvalidInputError(
            f"{ROLE} must have the class {_allowed(checks)}, "
            f"got{class_words or ' no class'} as {place}; "
            "set its class, or leave the annotation out of the file"
        )
    check = ""
    if len(words) > 1:
        check = _named_check(words[1], checks, place)
    values = dict(file_values)
    metadata = shape.properties.get("metadata")
    if isinstance(metadata, dict):
        # a correction that comes back unchanged keeps who drew it, and when
        names = tuple(values) if is_unchanged else ()
        if not is_exported:
            names = ("author",)
        for name in names:
            if isinstance(metadata.get(name), str):
                values[name] = str(metadata[name])
    return QcEdit(
        action=cast(Action, action),
        check=check,
        area=area,
        author=values["author"],
        time=values["time"],
        file=values["file"],
        sha256=values["sha256"],
    )


def _allowed(checks: Sequence[str]) -> str:
    words = "'keep', 'remove', 'keep CHECK' or 'remove CHECK'"
    return f"{words}, where CHECK is one of {', '.join(checks) or 'no check'}"


def _named_check(name: str, checks: Sequence[str], place: str) -> str:
    """Check of the pipeline that a class names. Raises InvalidInputError: there is none."""
    if name in checks:
        return name
    meant = [check for check in checks if _fold(check) == _fold(name)]
    if len(meant) == 1:
        return meant[0]
    hint = nearest(name, checks)
    if "did you mean" not in hint:
        # the known names follow in any case
        hint = ""
    raise InvalidInputError(
        f"{ROLE} must name a check that marks areas, got {name!r} as {place}{hint}; "
        f"the class is {_allowed(checks)}"
    )


def _fold(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").split())


def check_names(edits: Iterable[QcEdit], checks: Sequence[str]) -> None:
    """Raises InvalidInputError: a correction is about a check that marks no areas."""
    for edit in edits:
        if edit.check and edit.check not in checks:
            _named_check(edit.check, checks, f"{edit.class_name!r} of {edit.file!r}")


def _refuse_outside(edit: QcEdit, shape: Shape, path: Path, size_l0: Size) -> None:
    import shapely

    width, height = size_l0
    if not shapely.intersects(edit.area, shapely.box(0, 0, width, height)):
        raise InvalidInputError(
            f"{ROLE} must lie on the slide of {width} x {height} px, got "
            f"{tuple(edit.area.bounds)} as {shape.place} {shape.class_name!r} of {str(path)!r}; "
            "coordinates are level-0 pixels"
        )


# exported outlines


def outline_measurements(area: Geometry) -> dict[str, float]:
    """Measurements by which an exported outline is recognised if nobody changed it."""
    left, top, _, _ = area.bounds
    return {_AREA: float(area.area), _LEFT: float(left), _TOP: float(top)}


def _is_exported(properties: Mapping[str, Json]) -> bool:
    return _AREA in _measurements(properties)


def _measurements(properties: Mapping[str, Json]) -> dict[str, Json]:
    """Measurements by name; QuPath before 0.4 writes a list of names and values."""
    measurements = properties.get("measurements")
    if isinstance(measurements, list):
        pairs = [item for item in measurements if isinstance(item, dict)]
        return {str(item.get("name")): item.get("value") for item in pairs}
    return measurements if isinstance(measurements, dict) else {}


def _has_shape(area: Geometry, properties: Mapping[str, Json]) -> bool:
    """True if area and place are those of the measurements."""
    measured = _measurements(properties)
    for name, value in outline_measurements(area).items():
        before = measured.get(name)
        limit = _SHIFT_PX * area.length if name == _AREA else _MOVED_PX
        if not isinstance(before, int | float) or abs(before - value) > limit:
            return False
    return True


# stored corrections


def edit_feature(edit: QcEdit) -> Document:
    """A correction as a QuPath annotation, which `read_edits` reads back."""
    import shapely

    return {
        "type": "Feature",
        "geometry": shapely.geometry.mapping(edit.area),
        "properties": {
            "objectType": "annotation",
            "name": edit.class_name,
            "classification": {
                "name": edit.class_name,
                "color": list(EDIT_COLORS[edit.action]),
            },
            "measurements": outline_measurements(edit.area),
            "metadata": edit.metadata,
        },
    }


def edit_of_feature(feature: Document) -> QcEdit:
    """A stored correction. Raises KeyError, TypeError, ValueError: it is damaged."""
    import shapely

    from thinsection.slide.annotation_formats import class_name_of

    properties = feature["properties"]
    action, _, check = class_name_of(properties).partition(" ")
    if action not in get_args(Action):
        raise ValueError(f"{action!r} is no correction")
    metadata = properties["metadata"]
    return QcEdit(
        action=cast(Action, action),
        check=check,
        area=shapely.geometry.shape(feature["geometry"]),
        author=metadata["author"],
        time=metadata["time"],
        file=metadata["file"],
        sha256=metadata["sha256"],
    )


# masks


@dataclass(frozen=True, kw_only=True)
class EditMasks:
    """Corrections as masks, bool (H, W): by check, '' for all checks."""

    keep: Mapping[str, MaskArray]
    remove: Mapping[str, MaskArray]
    frame: MaskFrame

    def kept(self, *names: str) -> MaskArray:
        """Union of the areas to keep that are about these names."""
        return self._union(self.keep, names)

    def removed(self, *names: str) -> MaskArray:
        """Union of the areas to remove that are about these names."""
        return self._union(self.remove, names)

    def _union(self, areas: Mapping[str, MaskArray], names: Sequence[str]) -> MaskArray:
        width, height = self.frame.size_th
        union = np.zeros((height, width), dtype=np.bool_)
        for name in names:
            if name in areas:
                union |= areas[name]
        return union


def edit_masks(edits: Iterable[QcEdit], frame: MaskFrame) -> EditMasks:
    """Pixels whose centres lie in the areas. Memory: a mask for each class of corrections."""
    import shapely

    from thinsection.arrays.polygons import rasterised

    areas: dict[Action, dict[str, list[Geometry]]] = {"keep": {}, "remove": {}}
    for edit in edits:
        areas[edit.action].setdefault(edit.check, []).append(edit.area)
    masks: dict[Action, dict[str, MaskArray]] = {}
    for action, by_check in areas.items():
        masks[action] = {
            check: rasterised(shapely.GeometryCollection(parts), frame)
            for check, parts in by_check.items()
        }
    return EditMasks(keep=masks["keep"], remove=masks["remove"], frame=frame)
