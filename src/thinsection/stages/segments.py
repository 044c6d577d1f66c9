"""Pixel classes of a slide from segmentation networks, and tissue from such classes."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from PIL import Image

from thinsection.files.atomic import atomic_path
from thinsection.qc.own_tissue import Tissue
from thinsection.qc.segmenter_classes import resampled
from thinsection.qc.tissue import TissueMask, work_frame
from thinsection.report.draw import write_drawing
from thinsection.report.layers import Tint
from thinsection.report.picture import Picture, slide_picture
from thinsection.segment import Segmentation, Segmenter, segment
from thinsection.segment.segmenter import SegmentConfig
from thinsection.slide import Slide
from thinsection.slide.readers import AUTO
from thinsection.stages.labels import join_label, slug, variant
from thinsection.stages.masks import Columns, QcStage, TissueStage
from thinsection.stages.stage import Output, SlideStage, SlideWork
from thinsection.store.geojson import write_masks_geojson
from thinsection.store.ledger import SLIDES
from thinsection.tiles import StreamConfig, TileTable
from thinsection.types import MaskFrame, PlainValues

# settings of how and by which network is segmented; the label does not contain them
_NOT_RESULTS = (
    "segmenters",
    "segment_weights",
    "segment_memory",
    "tissue_segmenter",
    "trust_code",  # the segmenter's identity has the hash of the file
)


@dataclass(frozen=True, kw_only=True)
class SegmentStage(SlideStage[Segmentation]):
    """`slides/ID/segment_NAME/`: labels.tif, overlay.png, a PNG per class; a `Segmentation`."""

    title: ClassVar[str] = "segment"

    segmenter: Segmenter
    config: SegmentConfig
    # windows inside this mask are computed; None computes all
    mask: TissueStage | QcStage | None
    reader: str = AUTO  # requested reader
    stream: StreamConfig = field(default_factory=StreamConfig)

    @property
    def label(self) -> str:
        """Name of the network, with the settings that differ from the defaults."""
        changed = variant(self.config, leave_out=_NOT_RESULTS)
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

    def run(self, work: SlideWork, slide: Slide) -> Output[Segmentation]:
        """Runs the network. Memory: as `segment`."""
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
        """Tissue wherever there is any class, at the detector's resolution."""
        segmentation = work.value(self.segments)
        where = work_frame(slide, self.config.mask_mpp)
        labels = resampled(segmentation.labels, segmentation.frame, where.frame)
        return TissueMask(
            mask=np.asarray(labels > 0),
            frame=where.frame,
            mask_mpp=where.mask_mpp,
            thumbnail=where.thumbnail,
        )
