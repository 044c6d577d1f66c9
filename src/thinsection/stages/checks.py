"""Quality control of a slide: its tissue after the checks, and pictures of what they marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from thinsection import qc
from thinsection.errors import QcExclusion
from thinsection.qc.rules import parse_rule, qc_fail
from thinsection.qc.segmenter_classes import ClassMap
from thinsection.report.draw import write_drawing
from thinsection.report.layers import overlay_layers
from thinsection.report.picture import PICTURE_NAME, slide_picture
from thinsection.report.qc_files import load_qc, write_qc
from thinsection.report.qc_pictures import write_qc_pictures
from thinsection.report.stored import QC_FILE, open_picture
from thinsection.slide import Slide
from thinsection.slide.geometry import mean_mpp
from thinsection.slide.readers import AUTO
from thinsection.stages.labels import join_label, short_hash, slug
from thinsection.stages.masks import CheckedTissue, reader_label
from thinsection.stages.stage import (
    Output,
    Reads,
    SlideWork,
    Stage,
)
from thinsection.store.ledger import SLIDES
from thinsection.store.outcome import KnownSlide
from thinsection.tiles import TileTable
from thinsection.tiles.table import Columns
from thinsection.types import PlainValues

if TYPE_CHECKING:
    from thinsection.qc import Pipeline, QcResult


@dataclass(frozen=True, kw_only=True)
class QcStage(Stage[CheckedTissue]):
    """`qc.zip` and `picture.jpg` in `slides/ID/qc_NAME/`; value: a `CheckedTissue`."""

    title: ClassVar[str] = "qc"
    reads: ClassVar[Reads] = "slide"

    pipeline: Pipeline
    source: str  # name of the preset, or its TOML file
    # True applies every check, even one that removes most of the tissue
    strict: bool = False
    # a slide is left out if one of these rules applies; the rules do not change the result
    rules: tuple[str, ...] = ()
    # TOML file with the rules for the verdicts; None takes the built-in ones
    verdict_rules: Path | None = None
    reader: str = AUTO  # requested reader
    device: str = "cpu"  # device that computes the checks
    # segmentation whose classes the pipeline uses; None if it uses none
    segments: Stage[ClassMap] | None = None

    @property
    def name(self) -> str:
        """Name of the preset, or of its file with a hash of the content."""
        name = self.source
        if name not in qc.preset_names():
            content = qc.pipeline_identity(self.pipeline)["pipeline"]
            if self.segments is not None:
                content = [content, self.segments.address]
            name = f"{slug(Path(self.source).stem)}-{short_hash(content)}"
        return join_label(name, "strict" if self.strict else "")

    @property
    def label(self) -> str:
        """Part of a grid's name for the checks that made its mask: 'qc-auto'."""
        return join_label(f"qc-{self.name}", reader_label(self.reader))

    @cached_property
    def address(self) -> str:
        return join_label(f"{SLIDES}/qc_{self.name}", reader_label(self.reader))

    @cached_property
    def settings(self) -> PlainValues:
        settings = {"qc": qc.pipeline_identity(self.pipeline), "reader": self.reader}
        return settings | {"strict": True} if self.strict else settings

    def make(self, work: SlideWork) -> Output[CheckedTissue]:
        """Runs the checks. Memory: as `run_qc`."""
        slide = work.opened
        result = self.check(work, slide)
        folder = self.folder(work.entry.slide_id)
        picture = slide_picture(slide, result.rgb)
        write_qc(result, work.path(folder), key=work.result_key(self), picture=picture)
        facts = {
            "tissue_fraction": round(float(result.tissue.mask.mean()), 6),
            "pixels_to_use": result.scores["pixels_to_use"],
            "stain": result.scores.get("stain", ""),
            "warnings": "; ".join(result.warnings),
        }
        return Output(
            files=(f"{folder}/{PICTURE_NAME}", f"{folder}/{QC_FILE}"),
            facts=facts,
            value=_checked_tissue(result),
        )

    def check(self, work: SlideWork, slide: Slide) -> QcResult:
        """Runs the checks on the opened slide, and stores nothing."""
        segmentation = None
        if self.segments is not None:
            segmentation = work.value(self.segments)
        return qc.run_qc(
            slide,
            self.pipeline,
            slide_mpp=mean_mpp(work.entry.slide_mpp),
            device=self.device,
            strict=self.strict,
            segmentation=segmentation,
        )

    def load(self, work: SlideWork) -> CheckedTissue:
        """Reads the tissue from the files; it equals the result of the checks."""
        folder = self.folder(work.entry.slide_id)
        return _checked_tissue(load_qc(work.path(folder)))

    def judge(self, work: SlideWork) -> None:
        """Raises QcExclusion, with rule and value, if a rule excludes the slide.

        An excluded slide gets no overview, so the marks of the checks are drawn here.
        """
        if not self.rules:
            return
        work.stage_title = self.title
        row = work.value(self).qc.row
        for rule in self.rules:
            if not qc_fail(row, rule):
                continue
            overlay = QcOverlayStage(qc=self)
            if not work.is_done(overlay):
                work.perform(overlay)
            work.stage_title = self.title
            column = parse_rule(rule).column
            raise QcExclusion(f"excluded by {rule!r}: {column} is {row[column]}")

    def check_run(self) -> None:
        """Parses the rules of `--qc-fail`, and trains the pixel models that the checks need."""
        for rule in self.rules:
            parse_rule(rule)
        qc.prepare_models(self.pipeline)

    def write_tables(self, out: Path, slides: Sequence[KnownSlide]) -> dict[str, str]:
        """Writes `qc_NAME.csv` and `qc_NAME.html`; returns the unusable slides, and why."""
        # imported here: it loads the HTML templates' code, which a worker does not need
        from thinsection.stages.own_tables import write_qc_tables

        return write_qc_tables(
            out,
            slides,
            self,
            fail_rules=self.rules,
            verdict_rules=self.verdict_rules,
        )

    def tile_columns(self, work: SlideWork, table: TileTable) -> Columns:
        """For each check, the share of each tile that it removed."""
        result = work.value(self).qc
        shares = qc.tile_qc_columns(result, table.coords_l0, table.plan.size_l0[0])
        return {f"qc_{name}": share for name, share in shares.items()}


@dataclass(frozen=True, kw_only=True)
class QcPicturesStage(Stage[None]):
    """`slides/ID/qc_NAME/*.png`: pictures of the checks' masks and tables, on request."""

    title: ClassVar[str] = "qc pictures"
    reads: ClassVar[Reads] = "slide"

    qc: QcStage

    @cached_property
    def address(self) -> str:
        return f"{self.qc.address}_pictures"

    def make(self, work: SlideWork) -> Output[None]:
        """Writes the pictures; runs the checks again if their result was read back."""
        result = work.value(self.qc).qc
        if result.is_stored:
            result = self.qc.check(work, work.opened)
        folder = self.qc.folder(work.entry.slide_id)
        names = write_qc_pictures(result, work.path(folder))
        return Output(files=tuple(f"{folder}/{name}" for name in names))


@dataclass(frozen=True, kw_only=True)
class QcOverlayStage(Stage[None]):
    """`slides/ID/qc_NAME/overlay.jpg`: the marks of the checks, for a run without tiles."""

    title: ClassVar[str] = "overview"
    reads: ClassVar[Reads] = "store"

    qc: QcStage

    @cached_property
    def address(self) -> str:
        return f"{self.qc.address}_overlay"

    def make(self, work: SlideWork) -> Output[None]:
        """Draws from stored files only."""
        name = f"{self.qc.folder(work.entry.slide_id)}/overlay.jpg"
        layers = overlay_layers(work.value(self.qc).qc)
        write_drawing(work.path(name), open_picture(work.ledger), layers)
        return Output(files=(name,))


def _checked_tissue(result: QcResult) -> CheckedTissue:
    return CheckedTissue(**vars(result.tissue), qc=result)
