"""The tissue of a slide by the default detector: mask, outline, thumbnail."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.files.atomic import atomic_path
from thinsection.qc.tissue import TISSUE_COLOR, TissueConfig, TissueMask, tissue_mask
from thinsection.stages.labels import join_label, variant
from thinsection.stages.stage import Output, Reads, SlideWork, Stage
from thinsection.store.geojson import write_masks_geojson
from thinsection.store.ledger import SLIDES
from thinsection.tiles import TileTable
from thinsection.types import MaskFrame


@dataclass(frozen=True, kw_only=True)
class TissueStage(Stage):
    """`slides/ID/tissue.png`, `.geojson` and `thumbnail.jpg`; value: a `TissueMask`.

    Attributes:
        config: of the detector.
        reader: that was asked for.
    """

    title: ClassVar[str] = "tissue"

    config: TissueConfig
    reader: str = "auto"

    @property
    def label(self) -> str:
        """What of a grid's name says how its tissue was found; '' at the defaults."""
        return join_label(variant(self.config), "" if self.reader == "auto" else self.reader)

    @property
    def reads(self) -> Reads:
        return "slide"

    @property
    def address(self) -> str:
        return join_label(f"{SLIDES}/tissue", self.label)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"tissue": asdict(self.config), "reader": self.reader}

    def run(self, work: SlideWork) -> Output:
        """Finds the tissue on one thumbnail.

        Memory: that of `tissue_mask`.
        """
        assert work.slide is not None
        tissue = tissue_mask(work.slide, self.config)
        mask, outline, thumbnail = names = self._names(work.entry.slide_id)
        with atomic_path(work.path(mask)) as tmp:
            Image.fromarray(tissue.mask.astype(np.uint8) * 255).save(tmp)
        with atomic_path(work.path(thumbnail)) as tmp:
            Image.fromarray(tissue.thumbnail).save(tmp, quality=85)
        outlines = [("Tissue", tissue.mask, TISSUE_COLOR)]
        write_masks_geojson(work.path(outline), outlines, tissue.frame)
        facts = {
            "tissue_fraction": round(tissue.tissue_fraction, 6),
            "threshold": tissue.threshold,
            "mask_mpp": tissue.mask_mpp,
            "size_l0": tissue.frame.size_l0,
        }
        return Output(files=names, facts=facts, value=tissue)

    def tile_columns(self, work: SlideWork, table: TileTable) -> Mapping[str, npt.NDArray]:
        """Further columns of the tile table: none."""
        return {}

    def load(self, work: SlideWork) -> TissueMask:
        """The mask to the bit; the thumbnail as its JPEG has it."""
        mask_name, _, thumbnail_name = self._names(work.entry.slide_id)
        facts = work.ledger.stages[self.address].facts
        with Image.open(work.path(mask_name)) as picture:
            mask = np.asarray(picture) > 0
        with Image.open(work.path(thumbnail_name)) as picture:
            thumbnail = np.array(picture)
        width, height = facts["size_l0"]
        mpp = facts["mask_mpp"]
        return TissueMask(
            mask=mask,
            frame=MaskFrame(size_th=(mask.shape[1], mask.shape[0]), size_l0=(width, height)),
            mask_mpp=None if mpp is None else (mpp[0], mpp[1]),
            thumbnail=thumbnail,
            threshold=facts["threshold"],
        )

    def _names(self, slide_id: str) -> tuple[str, str, str]:
        folder = f"{SLIDES}/{slide_id}"
        return (
            f"{folder}/{join_label('tissue', self.label)}.png",
            f"{folder}/{join_label('tissue', self.label)}.geojson",
            f"{folder}/{join_label('thumbnail', self.label)}.jpg",
        )
