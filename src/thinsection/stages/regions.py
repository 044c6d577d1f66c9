"""Annotations of a slide, its pixel classes from networks, and tissue from either."""

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from PIL import Image

from thinsection.arrays.polygons import coverage
from thinsection.errors import InvalidInputError
from thinsection.files.atomic import atomic_path
from thinsection.qc.own_tissue import AnnotatedTissue, Tissue, annotated_tissue
from thinsection.qc.segmenter_classes import resampled
from thinsection.qc.tissue import TISSUE_COLOR, TissueMask, work_frame
from thinsection.report.draw import write_drawing
from thinsection.report.layers import Tint
from thinsection.report.picture import Picture, slide_picture
from thinsection.segment import Segmentation, Segmenter, segment
from thinsection.slide import Slide
from thinsection.slide.annotation_formats import is_halo
from thinsection.slide.annotations import (
    ROLES,
    Regions,
    RegionsConfig,
    camelyon_cut_outs,
    named_classes,
    read_regions,
)
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.readers import AUTO
from thinsection.stages.config import SegmentConfig
from thinsection.stages.labels import join_label, short_hash, slug, variant
from thinsection.stages.masks import MaskStage, TissueStage
from thinsection.stages.stage import Output, Reads, SlideWork, Stage
from thinsection.stages.tiles import ROI_SHARE
from thinsection.store.geojson import annotation, write_features, write_masks_geojson
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, SlideLedger
from thinsection.tiles import StreamConfig, TileTable
from thinsection.tiles.table import Columns
from thinsection.types import MaskFrame, PlainValues

if TYPE_CHECKING:
    from shapely import Geometry


_COLORS = (TISSUE_COLOR, (200, 0, 0), (150, 200, 150), (0, 110, 220), (240, 160, 0))


@dataclass(frozen=True, kw_only=True)
class RegionsStage(Stage[Regions]):
    """`slides/ID/ROLE_NAME.geojson`; value: the `Regions`.

    The key depends on the file's bytes. The folder's name depends on its path and on the classes.
    """

    title: ClassVar[str] = "regions"
    reads: ClassVar[Reads] = "slide"

    config: RegionsConfig
    role: str  # 'tissue' or 'roi'

    @property
    def annotation_setting(self) -> str:
        return self.role

    def annotation_hash(self, entry: SlideEntry, ledger: SlideLedger) -> str:
        return file_sum(self.config.files(self.role, entry)[0])

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

    def make(self, work: SlideWork) -> Output[Regions]:
        """Reads the annotations of the slide."""
        name = f"{SLIDES}/{work.entry.slide_id}/{self.label}.geojson"
        path, *others = self.config.files(self.role, work.entry)
        if work.entry.slide_path.lower().endswith(".mrxs") and is_halo(path):
            # Source: dlup, issue 160: HALO counts from the corner of the scanned area
            raise InvalidInputError(
                f"coordinates of {self.role} must start at the slide's corner, got {str(path)!r} "
                f"of HALO for a MIRAX slide in {work.entry.slide_id!r}; export GeoJSON from QuPath"
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
        """Notes on the classes that are joined, or on included classes that this slide lacks."""
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
        areas_by_class = {
            name: area for name, area in classes.items() if name != self.role
        }
        columns = {f"class_{slug(name)}": area for name, area in areas_by_class.items()}
        if len(columns) < len(areas_by_class):
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


# Settings that say which network segments the slide, and how it is run. They are not part of the
# label, since they are in it otherwise or do not change the result.
_NOT_IN_LABEL = (
    "segmenters",
    "segment_weights",
    "segment_memory",
    "tissue_segmenter",
    "trust_code",  # the segmenter's identity has the hash of the file
)


@dataclass(frozen=True, kw_only=True)
class SegmentStage(Stage[Segmentation]):
    """`slides/ID/segment_NAME/`: labels.tif, overlay.png, a PNG per class; a `Segmentation`."""

    title: ClassVar[str] = "segment"
    reads: ClassVar[Reads] = "slide"

    segmenter: Segmenter
    config: SegmentConfig
    # windows inside this mask are computed; None computes all
    mask: MaskStage | None
    reader: str = AUTO  # requested reader
    stream: StreamConfig = field(default_factory=StreamConfig)

    @property
    def label(self) -> str:
        """Name of the network, with the settings that differ from the defaults."""
        changed = variant(self.config, leave_out=_NOT_IN_LABEL)
        return join_label(slug(self.segmenter.label), changed)

    @cached_property
    def address(self) -> str:
        name = f"{SLIDES}/segment_{self.label}"
        if self.mask is not None:
            return join_label(name, self.mask.label)
        return join_label(
            name, "everywhere", "" if self.reader == AUTO else self.reader
        )

    @cached_property
    def settings(self) -> PlainValues:
        return {
            "segmenter": self.segmenter.identity,
            "share_mpp": self.config.segment_mpp,
            "reader": self.reader,
        }

    def is_same_network(self, other: "SegmentStage") -> bool:
        """True if the other stage has the same network with the same weights."""
        return self.segmenter.identity == other.segmenter.identity

    def make(self, work: SlideWork) -> Output[Segmentation]:
        """Runs the network. Memory: as `segment`."""
        slide = work.opened
        labels_name = f"{self.folder(work.entry.slide_id)}/labels.tif"
        with atomic_path(work.path(labels_name)) as tmp:
            segmentation = segment(
                slide,
                self.segmenter,
                labels_path=tmp,
                share_mpp=self.config.segment_mpp,
                memory=self.config.segment_memory,
                tissue=self._tissue(work, slide),
                stream=self.stream,
            )
        names = (labels_name, *self._write(work, slide, segmentation))
        facts: dict[str, object] = {
            f"fraction_{name}": round(fraction, 6)
            for name, fraction in segmentation.fractions.items()
        }
        facts["map"] = {
            "size_l0": segmentation.frame.size_l0,
            "size": segmentation.size,
        }
        return Output(files=names, facts=facts, value=segmentation)

    def _tissue(self, work: SlideWork, slide: Slide) -> Tissue:
        """Mask of the windows to compute: the tissue, or the whole slide."""
        if self.mask is not None:
            return work.value(self.mask)
        frame = MaskFrame(size_th=(1, 1), size_l0=slide.size)
        return np.ones((1, 1), dtype=np.bool_), frame

    def _write(
        self, work: SlideWork, slide: Slide, segmentation: Segmentation
    ) -> tuple[str, ...]:
        """Writes a picture, outlines, and each class's share as grey values; gives their names."""
        folder = self.folder(work.entry.slide_id)
        colors = segmentation.colors
        # the frame may extend beyond the slide
        down_x, down_y = segmentation.frame.downsample_xy
        width = math.ceil(slide.size[0] / down_x)
        height = math.ceil(slide.size[1] / down_y)
        layers = [
            Tint(segmentation.mask(name)[:height, :width], name, color)
            for name, color in colors.items()
        ]
        base = Picture(
            rgb=slide_picture(slide), size_l0=slide.size, slide_mpp=slide.slide_mpp
        )
        overlay_name = f"{folder}/overlay.png"
        write_drawing(work.path(overlay_name), base, layers)
        share_names = [
            f"{folder}/share_{slug(name)}.png" for name in segmentation.classes
        ]
        for name, pixels in zip(share_names, segmentation.shares):
            with atomic_path(work.path(name)) as tmp:
                Image.fromarray(pixels).save(tmp, format="PNG")
        outlines_name = f"{folder}/outlines.geojson"
        masks = [
            (name, segmentation.mask(name), color) for name, color in colors.items()
        ]
        write_masks_geojson(work.path(outlines_name), masks, segmentation.frame)
        return (overlay_name, *share_names, outlines_name)

    def load(self, work: SlideWork) -> Segmentation:
        """Reads the classes from the files; they equal the network's result."""
        facts = work.ledger.stages[self.address].facts["map"]
        folder = work.path(self.folder(work.entry.slide_id))
        spec = self.segmenter.spec
        shares = []
        for name in spec.classes:
            with Image.open(folder / f"share_{slug(name)}.png") as picture:
                shares.append(np.array(picture))
        stack = np.stack(shares)
        return Segmentation(
            classes=spec.classes,
            shares=stack,
            frame=MaskFrame(
                size_th=stack.shape[:0:-1], size_l0=tuple(facts["size_l0"])
            ),
            size=tuple(facts["size"]),
            mpp=spec.mpp,
            num_windows=0,
        )

    def tile_columns(self, work: SlideWork, table: TileTable) -> Columns:
        """Share of each tile in each class."""
        segmentation = work.value(self)
        return segmentation.tile_columns(table.coords_l0, table.plan.size_l0)


@dataclass(frozen=True, kw_only=True)
class SegmentedTissueStage(TissueStage):
    """Tissue from the classes of a network; it replaces the detector's result."""

    segments: SegmentStage  # segmentation of the whole slide

    @property
    def label(self) -> str:
        return join_label(f"tissue-{self.segments.label}", super().label)

    def find(self, work: SlideWork, slide: Slide) -> TissueMask:
        """Mask of the pixels that have a class, at the detector's resolution."""
        segmentation = work.value(self.segments)
        where = work_frame(slide, self.config.mask_mpp)
        labels = resampled(segmentation.labels, segmentation.frame, where.frame)
        return TissueMask(
            mask=np.asarray(labels > 0),
            frame=where.frame,
            mask_mpp=where.mask_mpp,
            thumbnail=where.thumbnail,
        )
