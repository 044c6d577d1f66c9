"""Annotations of a slide: polygons in level-0 px by class, and their settings."""

import difflib
import os
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinsection.config import option
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.files.missing_cells import is_missing
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.ids import KnownIds
from thinsection.types import Json, Size, counted

if TYPE_CHECKING:
    from shapely import Geometry, Polygon

    from thinsection.slide.annotation_formats import Shape

ROLES = ("tissue", "roi")  # settings that name files
_FARTHEST = 1e7  # px from the origin: a hundred times a large slide


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionsConfig:
    """Annotations of people, in place of the detected tissue or beside it."""

    tissue: str | None = option(
        None,
        "Use your annotations of the tissue in place of the detector; same files as --roi.",
    )
    roi: str | None = option(
        None,
        "Keep only tiles in these annotations (GeoJSON, XML of ASAP, ImageScope or HALO, mask "
        "images, CSV of boxes): a file, a folder with SLIDE_ID.geojson, or a "
        "column of the cohort table with their paths.",
        daily=True,
    )
    include_class: tuple[str, ...] = option(
        (),
        "Use only annotations of this class, in any capitals; repeat the option for several. "
        "A class that no slide has is an error.",
    )
    exclude_class: tuple[str, ...] = option(
        ("Ignore*", "exclusion"),
        "Remove annotations of this class, in any capitals, from the others; repeat the option "
        "for several.",
    )
    mend_regions: bool = option(
        False, "Repair polygons that cross themselves. By default they are an error."
    )

    def __post_init__(self) -> None:
        for role in ROLES:
            object.__setattr__(self, role, absolute_source(getattr(self, role)))

    def files(self, role: str, entry: SlideEntry) -> list[Path]:
        """Returns the files with the annotations of a slide; the first is the one that is read.

        Raises:
            InvalidInputError: there is none.
        """
        return annotation_files(getattr(self, role), role, entry)

    def check(self, entries: Sequence[SlideEntry]) -> None:
        """Refuses settings that fit no slide, or only one of several slides, before any work.

        Memory: one file of annotations at a time; they are read only if classes are included.
        """
        roles = [role for role in ROLES if getattr(self, role) is not None]
        if not roles:
            return
        # most runs have no annotations, and import nothing that reads them
        from thinsection.slide.annotation_files import BOX_SUFFIXES, check_box_slides

        for role in roles:
            path = Path(getattr(self, role))
            if path.is_file() and path.suffix.lower() in BOX_SUFFIXES:
                check_box_slides(path, [entry.slide_id for entry in entries])
            else:
                check_source(getattr(self, role), role, entries)
            if self.include_class:
                self._check_classes(role, entries)

    def _check_classes(self, role: str, entries: Sequence[SlideEntry]) -> None:
        """Refuses a class to include that no slide has; stops reading when each class was seen."""
        from thinsection.slide.annotation_files import read_class_names

        classes: set[str] = set()
        for entry in entries:
            try:
                path = self.files(role, entry)[0]
                classes |= read_class_names(path, entry.slide_id)
            except InvalidInputError:
                return  # this slide will fail, and its classes are not known
            named = [
                named_classes([name], sorted(classes)) for name in self.include_class
            ]
            if all(named):
                return
        check_classes(self.include_class, classes)


def absolute_source(source: str | None) -> str | None:
    """Returns the absolute path of a file or folder; a worker may have another current folder."""
    if source and Path(source).exists():
        return str(Path(source).resolve())
    return source


def annotation_files(
    source: str, role: str, entry: SlideEntry, *, required: bool = True
) -> list[Path]:
    """Returns the files with the annotations of a slide; the first one has the plainest name.

    Args:
        source: a file, a folder, or a column of the cohort.
        role: setting that names the source, for messages.
        entry: the slide.
        required: False returns [] for a slide whose cell has no value, or whose name is nearly
            that of no file in the folder.

    Raises:
        InvalidInputError: there is none.
    """
    path = Path(source)
    if path.is_dir():
        return _files_in(path, role, entry, required=required)
    hint = ""
    if not path.exists():
        cell = entry.more.get(source)
        path = Path(entry.folder, cell or source)
        has_none = not cell or (is_missing(cell) and not path.is_file())
        if has_none and not required:
            return []
        if cell:
            hint = f"; correct the path in the column {source!r}"
            hint += "" if required else ", or leave the cell empty"
    if not path.is_file():
        rule = "exist for every slide" if required else "exist if the column names it"
        raise _no_file(role, path, entry, rule, hint)
    return [path]


def check_source(source: str, role: str, entries: Sequence[SlideEntry]) -> None:
    """Refuses a source that does not exist, or one file for several slides.

    Raises:
        ConfigError: the message names the source.
    """
    path = Path(source)
    if not path.exists() and not any(source in entry.more for entry in entries):
        raise ConfigError(
            f"{role} must be a file, a folder, or a column of the cohort that is not empty, got "
            f"{source!r}"
        )
    if path.is_file() and len(entries) > 1:
        raise ConfigError(
            f"{role} must belong to one slide, got one file for {len(entries)} slides; "
            f"pass a folder of SLIDE_ID{path.suffix}"
        )


def _files_in(
    folder: Path, role: str, entry: SlideEntry, *, required: bool
) -> list[Path]:
    """Returns the files in a folder with the name of a slide, in the order of their formats."""
    from thinsection.slide.annotation_files import SUFFIXES

    # 'ID.geojson', 'ID.svs.geojson'
    names = dict.fromkeys((entry.slide_id, Path(entry.slide_path).name))
    candidates = [folder / f"{name}{suffix}" for name in names for suffix in SUFFIXES]
    paths = [path for path in candidates if path.is_file()]
    stems: list[str] = []
    if not paths:  # 'ID.XML'
        meant = KnownIds([entry.slide_id])
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() in SUFFIXES:
                stems.append(path.stem)
                if meant.find(path.stem) and path.is_file():
                    paths.append(path)
    slide_path = os.path.realpath(entry.slide_path)
    paths = [path for path in paths if os.path.realpath(path) != slide_path]
    if not paths:
        similar = KnownIds(stems).similar(entry.slide_id)
        if required or similar:
            hint = f"; did you mean {similar!r}?" if similar else ""
            rule = (
                "exist for every slide" if required else "have the slide's exact name"
            )
            raise _no_file(role, candidates[0], entry, rule, hint)
    return paths


def _no_file(
    role: str, path: Path, entry: SlideEntry, rule: str, hint: str
) -> InvalidInputError:
    return InvalidInputError(
        f"{role} must {rule}, got no file {str(path)!r} for {entry.slide_id!r}{hint}"
    )


@dataclass(frozen=True, kw_only=True)
class Regions:
    """Areas of a slide by class.

    Attributes:
        classes: shapely's geometries in level-0 px, by class; '' is the area of no class.
        notes: sentences on shapes that were left out and on choices.
    """

    classes: "Mapping[str, Geometry]" = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def area(
        self, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> "Geometry":
        """Returns the union of the included classes (of all, if none is named) less the excluded.

        Classes are named as in `named_classes`. CAMELYON16's group `_2` is cut out unless it is
        included by its name.

        Raises:
            InvalidInputError: the annotations do not have an included class.
        """
        import shapely

        names = tuple(self.classes)
        included = list(names)
        if include:
            check_classes(include, names)
            included = named_classes(include, names, other=exclude)
        excluded = named_classes(exclude, names, other=include)
        cut_out = []
        for name in (*excluded, *camelyon_cut_outs(names)):
            if not _is_asked_for(name, include, exclude):
                cut_out.append(self.classes[name])
        area = shapely.union_all([self.classes[name] for name in included])
        return shapely.difference(area, shapely.union_all(cut_out))


def named_classes(
    names: Sequence[str], classes: Sequence[str], *, other: Sequence[str] = ()
) -> list[str]:
    """Returns the classes that are named, in any capitals.

    A subclass is named by its own name, by the name of its class, or by both: 'Tumor: Invasive' is
    named by 'Tumor', 'Invasive' or 'Tumor: Invasive'.

    Args:
        names: the names.
        classes: classes of the annotations.
        other: names in the opposite setting; a class whose exact name is there is not returned.
    """
    chosen = []
    for class_name in classes:
        is_exact = any(_is_of(class_name, name) for name in names)
        is_others = any(_is_of(class_name, name) for name in other)
        folded = _fold(class_name)
        is_alike = any(_is_of(folded, _fold(name)) for name in names)
        if is_exact or (is_alike and not is_others):
            chosen.append(class_name)
    return chosen


def _is_asked_for(
    class_name: str, include: Sequence[str], exclude: Sequence[str]
) -> bool:
    """Tells whether a class that would be cut out is included by its own name."""
    own_names = (_fold(class_name), _fold(class_name.rpartition(": ")[2]))
    is_named = any(_fold(name) in own_names for name in include)
    is_spelled_by_exclude = any(_is_of(class_name, name) for name in exclude)
    is_spelled_by_include = any(_is_of(class_name, name) for name in include)
    return is_named and (is_spelled_by_include or not is_spelled_by_exclude)


def check_classes(names: Sequence[str], classes: Collection[str]) -> None:
    """Refuses a name that names none of the classes.

    Raises:
        InvalidInputError: the message lists the classes.
    """
    for name in names:
        if named_classes([name], tuple(classes)):
            continue
        known = sorted(filter(None, classes))
        by_folded = {_fold(known_name): known_name for known_name in known}
        close = difflib.get_close_matches(_fold(name), by_folded, n=1)
        remedy = "the annotations have no class"
        if known:
            remedy = f"the classes are {', '.join(map(repr, known))}"
        if close:
            remedy = f"did you mean {by_folded[close[0]]!r}? {remedy}"
        raise InvalidInputError(
            f"include_class must be a class of the annotations, got {name!r}; {remedy}"
        )


def camelyon_cut_outs(classes: Collection[str]) -> list[str]:
    """Returns the classes that CAMELYON16 draws to cut them out of its tumours.

    Source: README of CAMELYON16: groups _0 and _1 are tumour, areas of _2 are cut out of these.
    """
    groups = set(classes) - {""}
    is_camelyon = {"_2"} < groups <= {"_0", "_1", "_2"}
    return ["_2"] if is_camelyon else []


def _fold(class_name: str) -> str:
    return " ".join(unicodedata.normalize("NFC", class_name).casefold().split())


def _is_of(class_name: str, name: str) -> bool:
    """Tells whether a name is a part of a class 'a: b: c', such as 'a: b', 'b' or 'c'."""
    return f": {name}: " in f": {class_name}: "


def read_regions(
    path: str | Path, size_l0: Size, *, slide_id: str = "", mend: bool = False
) -> Regions:
    """Reads the annotations of a slide from a file, by the suffix of the file.

    Points, lines, shapes outside the slide and QuPath's detections are left out, with a note.

    Args:
        path: GeoJSON, XML of ASAP, ImageScope or HALO, a mask's picture, or a table of boxes.
        size_l0: (width, height) of the slide, level-0 px.
        slide_id: the slide; selects the rows of a table with a column slide_id.
        mend: True makes polygons that cross themselves valid; False refuses them.

    Memory: the file; for a mask also 4 bytes a px.

    Raises:
        InvalidInputError: the message names the file, the feature and the fault.
    """
    import shapely

    from thinsection.slide.annotation_files import read_shapes

    path = Path(path)
    left_out = Counter[tuple[str, str]]()  # count by noun and reason
    areas: list[tuple[Shape, Geometry]] = []
    holes: dict[int, list[Geometry]] = {}  # layer -> holes in it
    for shape in read_shapes(path, size_l0, slide_id):
        if shape.ignored:
            left_out[shape.ignored, shape.reason] += 1
            continue
        name = f" {shape.class_name!r}" if shape.class_name else ""
        place = f"{shape.place}{name} of {str(path)!r}"
        polygons = [
            polygon
            if isinstance(polygon, shapely.Polygon)
            else make_polygon(polygon, place, mend=mend)
            for polygon in shape.polygons
        ]
        area = shapely.union_all(polygons)
        if shape.is_hole:
            holes.setdefault(shape.layer, []).append(area)
        else:
            areas.append((shape, area))
    slide = shapely.box(0, 0, *size_l0)
    by_class: dict[str, list[Geometry]] = {}  # class -> areas, in the order of the file
    for shape, area in areas:
        if not shapely.intersects(area, slide):
            left_out["annotation", "outside the slide"] += 1
            continue
        # an island in a hole is kept
        cutting = [
            hole
            for hole in holes.get(shape.layer, ())
            if shapely.intersects(hole, area)
            and not shapely.contains_properly(hole, area)
        ]
        cut = shapely.difference(area, shapely.union_all(cutting)) if cutting else area
        if cut.is_empty:
            left_out["annotation", "that lies in a hole"] += 1
        by_class.setdefault(shape.class_name, []).append(cut)
    for layer, layer_holes in holes.items():
        parts = [area for shape, area in areas if shape.layer == layer]
        tree = shapely.STRtree(parts)
        for hole in layer_holes:
            if not len(tree.query(hole, predicate="intersects")):
                left_out["hole", "that lies in no area"] += 1
    classes = {name: shapely.union_all(parts) for name, parts in by_class.items()}
    notes = []
    for (noun, reason), number in left_out.items():
        words = " ".join(filter(None, (counted(number, noun), reason)))
        notes.append(f"{words} ignored in {path.name}")
    if not areas and not left_out:
        of_slide = f" of {slide_id!r}" if slide_id else ""
        notes.append(f"no annotation{of_slide} in {path.name}")
    for name in camelyon_cut_outs(classes):
        others = " and ".join(sorted(set(classes) - {name, ""}))
        notes.append(
            f"group {name} is cut out of {others} in {path.name}, as in CAMELYON16; "
            f"--include-class {name} takes it"
        )
    return Regions(classes=classes, notes=tuple(notes))


def make_polygon(
    rings: Json,
    place: str,
    *,
    mend: bool = False,
    advice: str = "repair it, or pass mend_regions=True",
) -> "Polygon":
    """Returns a polygon with its holes. Raises InvalidInputError: the rings are no polygon."""
    import shapely

    if not isinstance(rings, list):
        rings = [rings]
    outer, *inner = [_check_ring(ring, place) for ring in rings]
    polygon = shapely.Polygon(outer, inner)
    if not polygon.is_valid and mend:
        polygon = shapely.make_valid(polygon).buffer(0)  # keeps areas only
    if not polygon.is_valid:
        raise InvalidInputError(
            f"polygon must not cross itself, got {shapely.is_valid_reason(polygon)} in {place}; "
            f"{advice}"
        )
    return polygon


def _check_ring(ring: Json, place: str) -> NDArray[np.float64]:
    """Returns the points of a ring, (N, 2). Raises InvalidInputError: it is no ring."""
    try:
        pairs = [point[:2] for point in ring]
        points = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise InvalidInputError(
            f"ring must be [x, y] numbers, got {error} in {place}"
        ) from None
    is_near = (abs(points) <= _FARTHEST).all(axis=1)
    if not is_near.all():
        raise InvalidInputError(
            f"coordinates must be finite and within {_FARTHEST:,.0f} px, "
            f"got {points[~is_near][:1].tolist()} in {place}"
        )
    num_different = len(np.unique(points, axis=0))
    if num_different < 3:
        raise InvalidInputError(
            f"ring must have 3 different points, got {num_different} in {place}"
        )
    return points
