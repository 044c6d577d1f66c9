"""What networks say of a slide's px: maps and shares of classes, and tissue by a network."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.files.atomic import atomic_path
from thinsection.qc.tissue import TissueMask, work_frame
from thinsection.report.draw import Picture, Tint, slide_picture, write_drawing
from thinsection.segment import Segmentation, Segmenter, segment
from thinsection.segment.segmenter import SegmentConfig
from thinsection.slide.readers import AUTO
from thinsection.stages.labels import join_label, slug, variant
from thinsection.stages.masks import QcStage, TissueStage
from thinsection.stages.stage import Output, SlideWork, Stage
from thinsection.store.geojson import write_masks_geojson
from thinsection.store.ledger import SLIDES
from thinsection.stream import StreamConfig
from thinsection.tiles import TileTable
from thinsection.types import MaskFrame

_NOT_RESULTS = ("segmenters", "segment_weights", "segment_memory", "tissue_segmenter")


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
        found = {"segmenter": self.segmenter.identity, "share_mpp": self.config.segment_mpp}
        return found | {"reader": self.reader}

    def run(self, work: SlideWork) -> Output:
        """Runs the network. Memory: that of `segment`."""
        assert work.slide is not None
        everywhere = MaskFrame(size_th=(1, 1), size_l0=work.slide.size)
        whole = (np.ones((1, 1), dtype=np.bool_), everywhere)
        labels = f"{self._folder(work)}/labels.tif"
        with atomic_path(work.path(labels)) as tmp:
            found = segment(
                work.slide,
                self.segmenter,
                tissue=work.value(self.mask) if self.mask else whole,
                labels_path=tmp,
                share_mpp=self.config.segment_mpp,
                memory=self.config.segment_memory,
                stream=self.stream,
            )
        names = (labels, *self._write(work, found))
        facts = {f"fraction_{name}": round(f, 6) for name, f in found.fractions.items()}
        geometry = {"size_l0": found.frame.size_l0, "size": found.size}
        return Output(files=names, facts=facts | {"map": geometry}, value=found)

    def _folder(self, work: SlideWork) -> str:
        address = self.address.removeprefix(f"{SLIDES}/")
        return f"{SLIDES}/{work.entry.slide_id}/{address}"

    def _write(self, work: SlideWork, found: Segmentation) -> tuple[str, ...]:
        """A picture, outlines, and each class's share as grey values; their names."""
        folder, colors = self._folder(work), found.colors
        assert work.slide is not None
        ends = zip(work.slide.size, found.frame.downsample_xy)  # the frame may reach beyond
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
        shares, spec = [], self.segmenter.spec
        for name in spec.classes:
            with Image.open(work.path(f"{self._folder(work)}/share_{slug(name)}.png")) as picture:
                shares.append(np.array(picture))
        stack = np.stack(shares)
        frame = MaskFrame(size_th=stack.shape[:0:-1], size_l0=tuple(facts["size_l0"]))
        values: dict[str, Any] = {"size": tuple(facts["size"]), "mpp": spec.mpp, "num_windows": 0}
        return Segmentation(classes=spec.classes, shares=stack, frame=frame, **values)

    def tile_columns(self, work: SlideWork, table: TileTable) -> Mapping[str, npt.NDArray]:
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
        frame: MaskFrame = where["frame"]
        centres = [
            ((np.arange(n) + 0.5) * theirs / down).astype(np.int64)
            for n, theirs, down in zip(
                frame.size_th, frame.downsample_xy, found.frame.downsample_xy
            )
        ]
        x, y = (np.minimum(c, n - 1) for c, n in zip(centres, found.frame.size_th))
        return TissueMask(mask=np.asarray(found.labels[y[:, None], x] > 0), **where)
