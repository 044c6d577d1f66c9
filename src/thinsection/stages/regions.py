"""What people drew on a slide, and what networks say of its px: regions, classes, tissue."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays.polygons import coverage, rasterised
from thinsection.errors import require
from thinsection.files.atomic import atomic_path
from thinsection.qc.tissue import TISSUE_COLOR, Shares, TissueMask, work_frame
from thinsection.report.draw import Picture, Tint, slide_picture, write_drawing
from thinsection.segment import Segmentation, Segmenter, segment
from thinsection.segment.segmenter import SegmentConfig
from thinsection.slide.annotations import ROLES, Regions, RegionsConfig, read_regions
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.readers import AUTO
from thinsection.stages.labels import join_label, short_hash, slug, variant
from thinsection.stages.masks import QcStage, TissueStage
from thinsection.stages.stage import Output, SlideWork, Stage
from thinsection.store.geojson import annotation, write_features, write_masks_geojson
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES
from thinsection.stream import StreamConfig
from thinsection.tiles import TileTable
from thinsection.types import CoordsL0, MaskFrame, Size

ROI_SHARE = "roi_fraction"  # column: the share of a tile that the regions cover
_COLORS = (TISSUE_COLOR, (200, 0, 0), (150, 200, 150), (0, 110, 220), (240, 160, 0))
_NOT_RESULTS = ("segmenters", "segment_weights", "segment_memory", "tissue_segmenter")


def drawn_sums(config: RegionsConfig, entry: SlideEntry) -> dict[str, str]:
    """Hash of what was drawn on a slide, by role. Raises InvalidInputError: nothing was."""
    return {
        role: file_sum(config.file(role, entry))
        for role in ROLES
        if getattr(config, role)
    }


@dataclass(frozen=True, kw_only=True)
class RegionsStage(Stage):
    """`slides/ID/ROLE_NAME.geojson`; value: the `Regions`.

    The file's bytes are in the key; where it lies, and the classes, in the name.
    """

    title: ClassVar[str] = "regions"
    reads = "slide"

    config: RegionsConfig
    role: str  # 'tissue' or 'roi'

    @property
    def drawn(self) -> str:
        return self.role

    @property
    def settings(self) -> Mapping[str, Any]:
        return {name: v for name, v in asdict(self.config).items() if name not in ROLES}

    @property
    def label(self) -> str:
        """What of a grid's name says what was drawn: 'roi-drawn-1a2b3c'."""
        given = getattr(self.config, self.role)
        return (
            f"{self.role}-{slug(Path(given).stem)}-{short_hash([given, self.settings])}"
        )

    @property
    def address(self) -> str:
        return f"{SLIDES}/{self.label}"

    def run(self, work: SlideWork) -> Output:
        """Reads the file of the slide."""
        name = f"{SLIDES}/{work.entry.slide_id}/{self.label}.geojson"
        found = self._read(work, self.config.file(self.role, work.entry))
        drawn = zip(found.classes.items(), cycle(_COLORS))
        write_features(
            work.path(name), [annotation(g, n, color) for (n, g), color in drawn]
        )
        # the pixels tell an edit from another slide
        facts = {"pixels": str(work.source), "warnings": "; ".join(found.notes)}
        return Output(files=(name,), facts=facts, value=found)

    def load(self, work: SlideWork) -> Regions:
        """The stored polygons."""
        (name,) = work.ledger.stages[self.address].files
        return self._read(work, work.path(name))

    def _read(self, work: SlideWork, path: Path) -> Regions:
        size = work.ledger.slide["width"], work.ledger.slide["height"]
        slide_id, mend = work.entry.slide_id, self.config.mend_regions
        found = read_regions(path, size, slide_id=slide_id, mend=mend)
        named = {name or self.role: area for name, area in found.classes.items()}
        return Regions(classes=named, notes=found.notes)

    def area(self, work: SlideWork) -> Any:
        """The included classes less the excluded ones."""
        config, found = self.config, work.value(self)
        return found.area(config.include_class, config.exclude_class)

    def tile_columns(
        self, work: SlideWork, table: TileTable
    ) -> Mapping[str, npt.NDArray]:
        """The share of each tile in each class, and of `--roi` in all that is included."""
        boxes, classes = (table.coords_l0, table.plan.size_l0), work.value(self).classes
        named = {
            f"class_{slug(name)}": area
            for name, area in classes.items()
            if name != self.role
        }
        got = f"{', '.join(map(repr, classes))} in {work.entry.slide_id!r}"
        differ = len(named) == len(classes.keys() - {self.role})
        require(differ, "classes must differ as names", got)
        areas = {ROI_SHARE: self.area(work)} | named if self.role == "roi" else named
        return {name: coverage(area, *boxes) for name, area in areas.items()}


@dataclass(frozen=True, kw_only=True)
class DrawnTissue(TissueMask):
    """The polygons, beside their px at the detector's resolution, which are for pictures."""

    area: Any  # shapely's

    def fractions(self, coords_l0: CoordsL0, size_l0: Size) -> Shares:
        return coverage(self.area, coords_l0, size_l0)


@dataclass(frozen=True, kw_only=True)
class DrawnTissueStage(TissueStage):
    """Tissue as somebody drew it, in the place of our detector's answer."""

    regions: RegionsStage

    @property
    def label(self) -> str:
        return join_label(self.regions.label, super().label)

    def find(self, work: SlideWork) -> DrawnTissue:
        """The polygons and their px."""
        assert work.slide is not None
        area = self.regions.area(work)
        where = work_frame(work.slide, self.config.mask_mpp)
        return DrawnTissue(
            mask=rasterised(area, where.frame),
            frame=where.frame,
            mask_mpp=where.mask_mpp,
            thumbnail=where.thumbnail,
            area=area,
        )

    def load(self, work: SlideWork) -> DrawnTissue:
        """The stored polygons and mask."""
        return DrawnTissue(**vars(super().load(work)), area=self.regions.area(work))

    def tile_columns(
        self, work: SlideWork, table: TileTable
    ) -> Mapping[str, npt.NDArray]:
        """Each class's share of each tile."""
        return self.regions.tile_columns(work, table)


@dataclass(frozen=True, kw_only=True)
class SegmentStage(Stage):
    """`slides/ID/segment_NAME/`: labels.tif, overlay.png, a PNG per class; a `Segmentation`."""

    title: ClassVar[str] = "segment"
    reads = "slide"

    segmenter: Segmenter
    config: SegmentConfig
    mask: TissueStage | QcStage | None  # where windows are computed; None: everywhere
    reader: str = AUTO  # that was asked for
    stream: StreamConfig = field(default_factory=StreamConfig)

    @property
    def label(self) -> str:
        """Name of the network, with what differs from the defaults."""
        rest = variant(self.config, leave_out=_NOT_RESULTS)
        return join_label(slug(self.segmenter.label), rest)

    @property
    def address(self) -> str:
        where = "everywhere" if self.mask is None else self.mask.label
        reader = "" if self.reader == AUTO or self.mask is not None else self.reader
        return join_label(f"{SLIDES}/segment_{self.label}", where, reader)

    @property
    def settings(self) -> Mapping[str, Any]:
        found = {
            "segmenter": self.segmenter.identity,
            "share_mpp": self.config.segment_mpp,
        }
        return found | {"reader": self.reader}

    def run(self, work: SlideWork) -> Output:
        """Runs the network. Memory: that of `segment`."""
        assert work.slide is not None
        everywhere = MaskFrame(size_th=(1, 1), size_l0=work.slide.size)
        whole = (np.ones((1, 1), dtype=np.bool_), everywhere)
        labels, config = f"{self.folder(work.entry.slide_id)}/labels.tif", self.config
        how: dict[str, Any] = {
            "share_mpp": config.segment_mpp,
            "memory": config.segment_memory,
        }
        how |= {
            "tissue": work.value(self.mask) if self.mask else whole,
            "stream": self.stream,
        }
        with atomic_path(work.path(labels)) as tmp:
            found = segment(work.slide, self.segmenter, labels_path=tmp, **how)
        names = (labels, *self._write(work, found))
        facts = {f"fraction_{name}": round(f, 6) for name, f in found.fractions.items()}
        geometry = {"size_l0": found.frame.size_l0, "size": found.size}
        return Output(files=names, facts=facts | {"map": geometry}, value=found)

    def _write(self, work: SlideWork, found: Segmentation) -> tuple[str, ...]:
        """A picture, outlines, and each class's share as grey values; their names."""
        folder, colors = self.folder(work.entry.slide_id), found.colors
        assert work.slide is not None
        ends = zip(
            work.slide.size, found.frame.downsample_xy
        )  # the frame may reach beyond
        width, height = (math.ceil(end / down) for end, down in ends)
        parts = {name: found.mask(name)[:height, :width] for name in colors}
        rgb, mpp = slide_picture(work.slide), work.slide.slide_mpp
        base = Picture(rgb=rgb, size_l0=work.slide.size, slide_mpp=mpp)
        overlay = f"{folder}/overlay.png"
        layers = [Tint(there, name, colors[name]) for name, there in parts.items()]
        write_drawing(work.path(overlay), base, layers)
        shares = [f"{folder}/share_{slug(name)}.png" for name in found.classes]
        for path, pixels in zip(shares, found.shares):
            with atomic_path(work.path(path)) as tmp:
                Image.fromarray(pixels).save(tmp, format="PNG")
        outlines = f"{folder}/outlines.geojson"
        masks = [(name, found.mask(name), color) for name, color in colors.items()]
        write_masks_geojson(work.path(outlines), masks, found.frame)
        return (overlay, *shares, outlines)

    def load(self, work: SlideWork) -> Segmentation:
        """What the files say; equal to what the network gave."""
        facts = work.ledger.stages[self.address].facts["map"]
        folder, spec = work.path(self.folder(work.entry.slide_id)), self.segmenter.spec
        shares = []
        for name in spec.classes:
            with Image.open(folder / f"share_{slug(name)}.png") as picture:
                shares.append(np.array(picture))
        stack = np.stack(shares)
        frame = MaskFrame(size_th=stack.shape[:0:-1], size_l0=tuple(facts["size_l0"]))
        values: dict[str, Any] = {
            "size": tuple(facts["size"]),
            "mpp": spec.mpp,
            "num_windows": 0,
        }
        return Segmentation(classes=spec.classes, shares=stack, frame=frame, **values)

    def tile_columns(
        self, work: SlideWork, table: TileTable
    ) -> Mapping[str, npt.NDArray]:
        """Per class, the share of each tile."""
        found: Segmentation = work.value(self)
        return found.tile_columns(table.coords_l0, table.plan.size_l0)


@dataclass(frozen=True, kw_only=True)
class SegmentedTissueStage(TissueStage):
    """The classes of a network in the place of our tissue detector's answer."""

    segments: SegmentStage  # over the whole slide

    @property
    def label(self) -> str:
        return join_label(f"tissue-{self.segments.label}", super().label)

    def find(self, work: SlideWork) -> TissueMask:
        """Tissue where any class is, at the detector's resolution."""
        slide, found = work.slide, work.value(self.segments)
        assert slide is not None
        where = work_frame(slide, self.config.mask_mpp)
        ours, theirs = where.frame, found.frame
        axes = zip(ours.size_th, ours.downsample_xy, theirs.downsample_xy)
        centres = [
            ((np.arange(n) + 0.5) * own / down).astype(np.int64)
            for n, own, down in axes
        ]
        x, y = (np.minimum(c, n - 1) for c, n in zip(centres, theirs.size_th))
        return TissueMask(
            mask=np.asarray(found.labels[y[:, None], x] > 0),
            frame=where.frame,
            mask_mpp=where.mask_mpp,
            thumbnail=where.thumbnail,
        )
