"""Where the tissue of a slide is: by the default detector, or as what passed quality control."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.errors import QcExclusion
from thinsection.files.atomic import TMP_MARK, atomic_path
from thinsection.qc import (
    Pipeline,
    QcResult,
    pipeline_identity,
    qc_fail,
    run_qc,
    tile_qc_columns,
)
from thinsection.qc.engine import parse_rule
from thinsection.qc.pipeline import preset_names
from thinsection.qc.tissue import TISSUE_COLOR, TissueConfig, TissueMask, tissue_mask
from thinsection.report.draw import PICTURE, read_mask, save_picture, slide_picture
from thinsection.report.qc_files import load_qc, write_qc
from thinsection.slide.geometry import mean_mpp
from thinsection.slide.readers import AUTO
from thinsection.stages.labels import join_label, short_hash, slug, variant
from thinsection.stages.stage import Output, SlideWork, Stage
from thinsection.store.geojson import write_masks_geojson
from thinsection.store.ledger import SLIDES
from thinsection.tiles import TileTable
from thinsection.types import MaskFrame


@dataclass(frozen=True, kw_only=True)
class TissueStage(Stage):
    """`slides/ID/tissue.png`, `.geojson`, `thumbnail.jpg`, `picture.jpg`; value: a `TissueMask`."""

    title: ClassVar[str] = "tissue"
    reads = "slide"

    config: TissueConfig
    reader: str = AUTO  # that was asked for

    @property
    def label(self) -> str:
        """What of a grid's name says how its tissue was found; '' at the defaults."""
        return join_label(variant(self.config), _chosen(self.reader))

    @property
    def address(self) -> str:
        return join_label(f"{SLIDES}/tissue", self.label)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"tissue": asdict(self.config), "reader": self.reader}

    def run(self, work: SlideWork) -> Output:
        """Finds the tissue on one thumbnail. Memory: that of `tissue_mask`."""
        tissue = self.find(work)
        mask, outline, thumbnail, picture = names = self._names(work.entry.slide_id)
        with atomic_path(work.path(mask)) as tmp:
            Image.fromarray(tissue.mask.astype(np.uint8) * 255).save(tmp)
        with atomic_path(work.path(thumbnail)) as tmp:
            Image.fromarray(tissue.thumbnail).save(tmp, quality=85)
        assert work.slide is not None
        save_picture(work.path(picture), slide_picture(work.slide, tissue.thumbnail))
        outlines = [("Tissue", tissue.mask, TISSUE_COLOR)]
        write_masks_geojson(work.path(outline), outlines, tissue.frame)
        share, pen = round(tissue.tissue_fraction, 6), round(tissue.pen_fraction, 6)
        facts = {"tissue_fraction": share, "stain": tissue.stain, "pen_fraction": pen}
        facts |= {"mask_mpp": tissue.mask_mpp, "size_l0": tissue.frame.size_l0}
        return Output(files=names, facts=facts, value=tissue)

    def find(self, work: SlideWork) -> TissueMask:
        """The tissue of the opened slide."""
        assert work.slide is not None
        return tissue_mask(work.slide, self.config)

    def load(self, work: SlideWork) -> TissueMask:
        """The mask to the bit; the thumbnail as its JPEG has it."""
        mask_name, _, thumbnail_name, _ = self._names(work.entry.slide_id)
        mask = read_mask(work.path(mask_name))
        with Image.open(work.path(thumbnail_name)) as picture:
            thumbnail = np.array(picture)
        facts = work.ledger.stages[self.address].facts
        frame = MaskFrame(size_th=mask.shape[::-1], size_l0=tuple(facts["size_l0"]))
        told = {name: facts[name] for name in ("stain", "pen_fraction")}
        mpp = facts["mask_mpp"] and tuple(facts["mask_mpp"])
        return TissueMask(
            mask=mask, frame=frame, mask_mpp=mpp, thumbnail=thumbnail, **told
        )

    def tile_columns(
        self, work: SlideWork, table: TileTable
    ) -> Mapping[str, npt.NDArray]:
        """Further columns of the tile table: none."""
        return {}

    def _names(self, slide_id: str) -> tuple[str, str, str, str]:
        def name(stem: str, end: str) -> str:
            return f"{SLIDES}/{slide_id}/{join_label(stem, self.label)}.{end}"

        first = name("tissue", "png"), name("tissue", "geojson")
        return *first, name("thumbnail", "jpg"), name(PICTURE, "jpg")


@dataclass(frozen=True, kw_only=True)
class CheckedTissue(TissueMask):
    """What passed quality control, in the place of the default tissue mask."""

    qc: QcResult  # masks of the checks, scores and warnings


@dataclass(frozen=True, kw_only=True)
class QcStage(Stage):
    """`slides/ID/qc_NAME/`: masks, pictures, `qc.json`; value: a `CheckedTissue`."""

    title: ClassVar[str] = "qc"
    reads = "slide"

    pipeline: Pipeline
    source: str  # the preset's name, or the TOML file that it came from
    strict: bool = False  # no guard: a check may take most of the tissue
    rules: tuple[
        str, ...
    ] = ()  # where one holds the slide is left out; no part of the result
    reader: str = AUTO  # that was asked for
    device: str = "cpu"  # where the checks are computed

    @property
    def name(self) -> str:
        """The preset's name, or that of the file with a hash of what it says."""
        hashed = (
            f"{slug(Path(self.source).stem)}-{short_hash(self.pipeline.as_mapping())}"
        )
        name = self.source if self.source in preset_names() else hashed
        return join_label(name, "strict" if self.strict else "")

    @property
    def label(self) -> str:
        """What of a grid's name says which checks made its mask: 'qc-auto'."""
        return join_label(f"qc-{self.name}", _chosen(self.reader))

    @property
    def address(self) -> str:
        return join_label(f"{SLIDES}/qc_{self.name}", _chosen(self.reader))

    @property
    def settings(self) -> Mapping[str, Any]:
        strict = {"strict": True} if self.strict else {}
        return {"qc": pipeline_identity(self.pipeline), "reader": self.reader, **strict}

    def run(self, work: SlideWork) -> Output:
        """Runs the checks. Memory: that of `run_qc`."""
        assert work.slide is not None
        how: dict[str, Any] = {"device": self.device, "strict": self.strict}
        mpp, folder = mean_mpp(work.entry.slide_mpp), self.folder(work.entry.slide_id)
        result = run_qc(work.slide, self.pipeline, slide_mpp=mpp, **how)
        picture = slide_picture(work.slide, result.rgb)
        write_qc(result, work.path(folder), key=work.key(self), picture=picture)
        names = sorted(
            p.name for p in work.path(folder).iterdir() if TMP_MARK not in p.name
        )
        scores, share = result.scores, round(float(result.tissue.mask.mean()), 6)
        facts = {"tissue_fraction": share, "pixels_to_use": scores["pixels_to_use"]}
        facts |= {
            "stain": scores.get("stain", ""),
            "warnings": "; ".join(result.warnings),
        }
        files = tuple(f"{folder}/{name}" for name in names)
        return Output(files=files, facts=facts, value=_checked(result))

    def load(self, work: SlideWork) -> CheckedTissue:
        """What the files say; equal to what the checks found."""
        return _checked(load_qc(work.path(self.folder(work.entry.slide_id))))

    def check_rules(self, work: SlideWork) -> None:
        """Leaves the slide out where a rule holds: QcExclusion with the rule and the value."""
        row = work.value(self).qc.row
        for rule in self.rules:
            if qc_fail(row, rule):
                column = parse_rule(rule).column
                raise QcExclusion(f"left out by {rule!r}: {column} is {row[column]}")

    def tile_columns(
        self, work: SlideWork, table: TileTable
    ) -> Mapping[str, npt.NDArray]:
        """Per check, the share of each tile that it took."""
        found: CheckedTissue = work.value(self)
        columns = tile_qc_columns(found.qc, table.coords_l0, table.plan.size_l0[0])
        return {f"qc_{name}": share for name, share in columns.items()}


def _checked(result: QcResult) -> CheckedTissue:
    return CheckedTissue(**vars(result.tissue), qc=result)


def _chosen(reader: str) -> str:
    return "" if reader == AUTO else reader
