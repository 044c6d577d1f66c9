"""Annotations of a slide, and tissue that is annotated."""

from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from thinsection.arrays.polygons import coverage
from thinsection.errors import InvalidInputError
from thinsection.qc.own_tissue import AnnotatedTissue, annotated_tissue
from thinsection.qc.tissue import TISSUE_COLOR
from thinsection.slide import Slide
from thinsection.slide.annotation_xml import is_halo
from thinsection.slide.annotations import (
    ROLES,
    Regions,
    RegionsConfig,
    camelyon_cut_outs,
    named_classes,
    read_regions,
)
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.labels import join_label, short_hash, slug
from thinsection.stages.masks import Columns, TissueStage
from thinsection.stages.stage import Output, SlideStage, SlideWork
from thinsection.store.geojson import annotation, write_features
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES
from thinsection.tiles import TileTable
from thinsection.types import PlainValues

if TYPE_CHECKING:
    from shapely import Geometry

# name of the column with the share of a tile that the annotations cover
ROI_SHARE = "roi_fraction"
_COLORS = (TISSUE_COLOR, (200, 0, 0), (150, 200, 150), (0, 110, 220), (240, 160, 0))


def annotation_sums(config: RegionsConfig, entry: SlideEntry) -> dict[str, str]:
    """Hash of the annotation file of a slide, by role. Raises InvalidInputError: there is none."""
    return {
        role: file_sum(config.files(role, entry)[0])
        for role in ROLES
        if getattr(config, role)
    }


@dataclass(frozen=True, kw_only=True)
class RegionsStage(SlideStage[Regions]):
    """`slides/ID/ROLE_NAME.geojson`; value: the `Regions`.

    The key depends on the file's bytes. The folder's name depends on its path and on the classes.
    """

    title: ClassVar[str] = "regions"

    config: RegionsConfig
    role: str  # 'tissue' or 'roi'

    @property
    def annotation_setting(self) -> str:
        return self.role

    @cached_property
    def settings(self) -> PlainValues:
        settings = asdict(self.config)
        for role in ROLES:
            del settings[role]
        return settings

    @property
    def label(self) -> str:
        """Part of a grid's name for the annotations: 'roi-annotations-1a2b3c'."""
        place = getattr(self.config, self.role)
        settings_hash = short_hash([place, self.settings])
        return f"{self.role}-{slug(Path(place).stem)}-{settings_hash}"

    @cached_property
    def address(self) -> str:
        return f"{SLIDES}/{self.label}"

    def run(self, work: SlideWork, slide: Slide) -> Output[Regions]:
        """Reads the annotations of the slide."""
        name = f"{SLIDES}/{work.entry.slide_id}/{self.label}.geojson"
        path, *others = self.config.files(self.role, work.entry)
        if work.entry.slide_path.lower().endswith(".mrxs") and is_halo(path):
            # Source: dlup, issue 160: HALO counts from the corner of the scanned area
            raise InvalidInputError(
                f"{self.role} must count from the slide's corner, got {str(path)!r} of HALO for a "
                f"MIRAX slide in {work.entry.slide_id!r}; export GeoJSON from QuPath"
            )
        regions = self._read(work, path)
        features = [
            annotation(area, class_name, color)
            for (class_name, area), color in zip(
                regions.classes.items(), cycle(_COLORS)
            )
        ]
        write_features(work.path(name), features)
        # the hash of the pixels distinguishes edited annotations from another slide
        notes = [*regions.notes, *self._choices(regions)]
        if others:
            names = ", ".join(other.name for other in others)
            notes.append(
                f"{path.name} is read, not {names} beside it; a column of the cohort names others"
            )
        facts = {"pixels": work.source.key, "warnings": "; ".join(notes)}
        return Output(files=(name,), facts=facts, value=regions)

    def load(self, work: SlideWork) -> Regions:
        """The stored polygons."""
        (name,) = work.ledger.stages[self.address].files
        return self._read(work, work.path(name))

    def _read(self, work: SlideWork, path: Path) -> Regions:
        regions = read_regions(
            path,
            (work.ledger.slide["width"], work.ledger.slide["height"]),
            slide_id=work.entry.slide_id,
            mend=self.config.mend_regions,
        )
        classes = {name or self.role: area for name, area in regions.classes.items()}
        return Regions(classes=classes, notes=regions.notes)

    def _choices(self, regions: Regions) -> list[str]:
        """Says which classes are joined, and which included ones this slide has not."""
        classes = tuple(regions.classes)
        include = self.config.include_class
        absent = [name for name in include if not named_classes([name], classes)]
        if absent:
            return [f"no annotation of class {', '.join(map(repr, absent))}"]
        if include:
            return []
        left_out = named_classes(self.config.exclude_class, classes)
        left_out += camelyon_cut_outs(classes)
        joined = [repr(name) for name in classes if name not in left_out]
        if len(joined) < 2:
            return []
        return [
            f"annotations of {len(joined)} classes are joined ({', '.join(joined)}); "
            "--include-class chooses"
        ]

    def area(self, work: SlideWork) -> "Geometry":
        """Area of the included classes without the excluded ones, as a shapely geometry.

        It is empty for a slide that has none of the included classes.
        """
        regions = work.value(self)
        include = self.config.include_class
        classes = tuple(regions.classes)
        present = [name for name in include if named_classes([name], classes)]
        if include and not present:
            return Regions().area()
        return regions.area(present, self.config.exclude_class)

    def tile_columns(self, work: SlideWork, table: TileTable) -> Columns:
        """Share of each tile in each class; for `--roi` also the share in all included classes."""
        classes = work.value(self).classes
        areas: dict[str, Geometry] = {}
        if self.role == "roi":
            areas[ROI_SHARE] = self.area(work)
        named = {name: area for name, area in classes.items() if name != self.role}
        columns = {f"class_{slug(name)}": area for name, area in named.items()}
        if len(columns) < len(named):
            raise InvalidInputError(
                f"classes must give different column names, got {', '.join(map(repr, classes))} "
                f"in {work.entry.slide_id!r}"
            )
        return {
            name: coverage(area, table.coords_l0, table.plan.size_l0)
            for name, area in (areas | columns).items()
        }


@dataclass(frozen=True, kw_only=True)
class AnnotatedTissueStage(TissueStage):
    """Tissue that a person annotated; it replaces the detector's result."""

    regions: RegionsStage

    @property
    def label(self) -> str:
        return join_label(self.regions.label, super().label)

    def find(self, work: SlideWork, slide: Slide) -> AnnotatedTissue:
        """Annotated polygons and their mask."""
        return annotated_tissue(slide, self.regions.area(work), self.config)

    def load(self, work: SlideWork) -> AnnotatedTissue:
        """Stored polygons and their mask."""
        return AnnotatedTissue(**vars(super().load(work)), area=self.regions.area(work))

    def tile_columns(self, work: SlideWork, table: TileTable) -> Columns:
        """Share of each tile in each class."""
        return self.regions.tile_columns(work, table)
