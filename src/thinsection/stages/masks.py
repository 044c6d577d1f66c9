"""Tissue of a slide from the default detector, and types for tissue from other sources."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from PIL import Image

from thinsection.files.atomic import atomic_path
from thinsection.qc.tissue import TissueConfig, TissueMask, tissue_mask
from thinsection.report.picture import PICTURE, save_picture, slide_picture
from thinsection.report.stored import read_mask
from thinsection.slide import Slide
from thinsection.slide.readers import AUTO
from thinsection.stages.labels import join_label, variant
from thinsection.stages.stage import (
    Output,
    Reads,
    SlideWork,
    Stage,
)
from thinsection.store.ledger import SLIDES
from thinsection.types import MaskFrame, PlainValues

if TYPE_CHECKING:
    from thinsection.qc import QcResult

# stage that gives the tissue: the detector, annotations, a network or quality control
MaskStage = Stage[TissueMask]


@dataclass(frozen=True, kw_only=True)
class TissueStage(Stage[TissueMask]):
    """`slides/ID/tissue.png` and `picture.jpg`; value: a `TissueMask`."""

    title: ClassVar[str] = "tissue"
    reads: ClassVar[Reads] = "slide"

    config: TissueConfig
    reader: str = AUTO  # requested reader

    @property
    def label(self) -> str:
        """Part of a grid's name for the tissue settings; '' at the defaults."""
        return join_label(variant(self.config), reader_label(self.reader))

    @cached_property
    def address(self) -> str:
        return join_label(f"{SLIDES}/tissue", self.label)

    @cached_property
    def settings(self) -> PlainValues:
        return {"tissue": asdict(self.config), "reader": self.reader}

    def make(self, work: SlideWork) -> Output[TissueMask]:
        """Detects the tissue on one thumbnail. Memory: as `tissue_mask`."""
        slide = work.opened
        tissue = self.find(work, slide)
        slide_id = work.entry.slide_id
        mask_name = self._name(slide_id, "tissue", "png")
        picture_name = self._name(slide_id, PICTURE, "jpg")
        with atomic_path(work.path(mask_name)) as tmp:
            Image.fromarray(tissue.mask.astype(np.uint8) * 255).save(tmp)
        picture = slide_picture(slide, tissue.thumbnail)
        save_picture(work.path(picture_name), picture)
        facts = {
            "tissue_fraction": round(tissue.tissue_fraction, 6),
            "stain": tissue.stain,
            "pen_fraction": round(tissue.pen_fraction, 6),
            "mask_mpp": tissue.mask_mpp,
            "size_l0": tissue.frame.size_l0,
            "warnings": tissue.warning,
        }
        return Output(files=(mask_name, picture_name), facts=facts, value=tissue)

    def find(self, work: SlideWork, slide: Slide) -> TissueMask:
        """Tissue of the opened slide."""
        return tissue_mask(slide, self.config)

    def load(self, work: SlideWork) -> TissueMask:
        """Reads the exact mask; its thumbnail is made from the stored picture."""
        slide_id = work.entry.slide_id
        mask = read_mask(work.path(self._name(slide_id, "tissue", "png")))
        picture_name = self._name(slide_id, PICTURE, "jpg")
        if not work.path(picture_name).is_file():
            # folders of older versions have no picture
            picture_name = self._name(slide_id, "thumbnail", "jpg")
        with Image.open(work.path(picture_name)) as picture:
            small = picture.convert("RGB").resize(mask.shape[::-1])
        facts = work.ledger.stages[self.address].facts
        return TissueMask(
            mask=mask,
            frame=MaskFrame(size_th=mask.shape[::-1], size_l0=tuple(facts["size_l0"])),
            mask_mpp=facts["mask_mpp"] and tuple(facts["mask_mpp"]),
            thumbnail=np.array(small),
            stain=facts["stain"],
            pen_fraction=facts["pen_fraction"],
            # folders of older versions have no warning
            warning=facts.get("warnings", ""),
        )

    def _name(self, slide_id: str, stem: str, suffix: str) -> str:
        return f"{SLIDES}/{slide_id}/{join_label(stem, self.label)}.{suffix}"


@dataclass(frozen=True, kw_only=True)
class CheckedTissue(TissueMask):
    """Tissue that passed quality control; it replaces the default tissue mask."""

    qc: QcResult  # masks of the checks, scores and warnings


def reader_label(reader: str) -> str:
    """Part of a name for the requested reader; '' if the reader is chosen automatically."""
    return "" if reader == AUTO else reader
