"""Annotations of a slide: polygons in level-0 px by class, and their settings."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinsection.config import option
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.slide.annotation_files import SUFFIXES, read_shapes
from thinsection.slide.cohort import SlideEntry
from thinsection.types import Json, Size, counted

if TYPE_CHECKING:
    from shapely import Geometry, Polygon

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
        "Keep only tiles in these annotations (GeoJSON, XML of ASAP or ImageScope, mask "
        "images, CSV of boxes): a file, a folder with SLIDE_ID.geojson, or a "
        "column of the cohort table with their paths.",
        daily=True,
    )
    include_class: tuple[str, ...] = option(
        (), "Use only annotations of this class; repeat the option for several."
    )
    exclude_class: tuple[str, ...] = option(
        ("Ignore*", "exclusion"),
        "Remove annotations of this class from the others; repeat the option for several.",
    )
    mend_regions: bool = option(
        False, "Repair polygons that cross themselves. By default they are an error."
    )

    def __post_init__(self) -> None:
        for role in ROLES:  # a worker may have another current folder
            source = getattr(self, role)
            if source and Path(source).exists():
                object.__setattr__(self, role, str(Path(source).resolve()))

    def file(self, role: str, entry: SlideEntry) -> Path:
        """Returns the file with the annotations of a slide; InvalidInputError: there is none."""
        source: str = getattr(self, role)
        path = Path(source)
        if not path.exists():
            path = Path(entry.folder, entry.more.get(source) or source)
        elif path.is_dir():
            candidates = [path / f"{entry.slide_id}{suffix}" for suffix in SUFFIXES]
            path = next(filter(Path.is_file, candidates), candidates[0])
        if not path.is_file():
            raise InvalidInputError(
                f"{role} must exist for every slide, got no file {str(path)!r} for "
                f"{entry.slide_id!r}"
            )
        return path

    def check(self, entries: Sequence[SlideEntry]) -> None:
        """Refuses what can be there for no slide, or for one of several, before any work."""
        for role in ROLES:
            source = getattr(self, role)
            if source is None:
                continue
            path = Path(source)
            if not path.exists() and not any(source in entry.more for entry in entries):
                raise ConfigError(
                    f"{role} must be a file, a folder, or a column of the cohort, got {source!r}"
                )
            is_of_one_slide = path.is_file() and path.suffix.lower() != ".csv"
            if is_of_one_slide and len(entries) > 1:
                raise ConfigError(
                    f"{role} must belong to one slide, got one file for {len(entries)} slides; "
                    f"pass a folder of SLIDE_ID{path.suffix}"
                )


@dataclass(frozen=True, kw_only=True)
class Regions:
    """Areas of a slide by class.

    Attributes:
        classes: shapely's geometries in level-0 px, by class; '' is the area of no class.
        notes: what was left out, in words.
    """

    classes: "Mapping[str, Geometry]" = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def area(
        self, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> "Geometry":
        """Returns the union of the included classes (of all, if none is named) less the excluded.

        A class is named by its own name, or by that of one that it is a class of.
        """
        import shapely

        included = self._union(include or tuple(self.classes))
        return shapely.difference(included, self._union(exclude))

    def _union(self, names: Sequence[str]) -> "Geometry":
        import shapely

        # 'a: b' is 'a: b' or below it: with ': ' after both no other name begins so
        prefixes = tuple(f"{name}: " for name in names)
        areas = [
            area
            for name, area in self.classes.items()
            if f"{name}: ".startswith(prefixes)
        ]
        return shapely.union_all(areas)


def read_regions(
    path: Path, size_l0: Size, *, slide_id: str = "", mend: bool = False
) -> Regions:
    """Reads what a file says of a slide of that size; the suffix says how to read it.

    Points, lines and what lies off the slide are left out with a word, as are QuPath's detections.

    Args:
        path: GeoJSON, XML of ASAP or ImageScope, a mask's picture, or a CSV of boxes.
        size_l0: (width, height) of the slide, level-0 px.
        slide_id: the slide; of a CSV with a column slide_id its rows are taken.
        mend: make polygons that cross themselves valid, instead of refusing them.

    Memory: the file, and of a mask 4 bytes a px.

    Raises:
        InvalidInputError: names the file, the feature and what is wrong with it.
    """
    import shapely

    shapes = read_shapes(path, size_l0, slide_id)
    slide = shapely.box(0, 0, *size_l0)
    left_out = Counter[str]()  # by kind: point, line, detection
    num_outside = 0
    areas: dict[str, list[Polygon]] = {}  # by class, in the order of the file
    holes: dict[str, list[Polygon]] = {}
    for shape in shapes:
        if shape.ignored:
            left_out[shape.ignored] += 1
            continue
        name = f" {shape.class_name!r}" if shape.class_name else ""
        place = f"{shape.place}{name} of {str(path)!r}"
        polygons = [
            polygon
            if isinstance(polygon, shapely.Polygon)
            else _make_polygon(polygon, place, mend)
            for polygon in shape.polygons
        ]
        if not shapely.intersects(shapely.union_all(polygons), slide):
            num_outside += 1
            continue
        areas.setdefault(shape.class_name, [])
        holes.setdefault(shape.class_name, [])
        target = holes if shape.is_hole else areas
        target[shape.class_name] += polygons
    classes = {}
    for class_name, polygons in areas.items():
        classes[class_name] = shapely.difference(
            shapely.union_all(polygons), shapely.union_all(holes[class_name])
        )
    notes = [
        f"{counted(number, kind)} ignored in {path.name}"
        for kind, number in left_out.items()
    ]
    if num_outside:
        outside = counted(num_outside, "annotation")
        notes.append(f"{outside} outside the slide ignored in {path.name}")
    return Regions(classes=classes, notes=tuple(notes))


def _make_polygon(rings: Json, place: str, mend: bool) -> "Polygon":
    """Returns a polygon with its holes; InvalidInputError: it is none."""
    import shapely

    if not isinstance(rings, list):
        rings = [rings]
    outer, *inner = [_check_ring(ring, place) for ring in rings]
    polygon = shapely.Polygon(outer, inner)
    if not polygon.is_valid and mend:
        polygon = shapely.make_valid(polygon).buffer(0)  # areas alone
    if not polygon.is_valid:
        raise InvalidInputError(
            f"polygon must not cross itself, got {shapely.is_valid_reason(polygon)} in {place}; "
            "repair it, or pass --mend-regions"
        )
    return polygon


def _check_ring(ring: Json, place: str) -> NDArray[np.float64]:
    """Returns the points of a ring, (N, 2); InvalidInputError: they are none."""
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
