"""Quality control of a slide: its tissue after the checks, and pictures of what they marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from thinsection import qc
from thinsection.errors import (
    ConfigError,
    InvalidInputError,
    QcExclusion,
    StoreError,
)
from thinsection.files.atomic import read_table
from thinsection.qc.edits import (
    EDITED_AREAS,
    NO_EDITS,
    ROLE,
    QcEdit,
    edits_file,
    edits_key,
    first_names,
    read_edits,
)
from thinsection.qc.histoqc_image import read_work_images
from thinsection.qc.histoqc_pictures import notes_on_absent
from thinsection.qc.result import QcResult
from thinsection.qc.rules import notes_on_rules, parse_rule, qc_fail, unjudging_check
from thinsection.qc.segmenter_classes import ClassMap
from thinsection.report.draw import write_drawing
from thinsection.report.layers import overlay_layers
from thinsection.report.picture import PICTURE_NAME, slide_picture
from thinsection.report.qc_files import load_qc, write_qc, write_values
from thinsection.report.qc_pictures import SMALL_EDGE_PX, write_qc_pictures
from thinsection.report.stored import QC_FILE, open_picture, read_qc
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
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
from thinsection.store.identity import file_sum
from thinsection.store.ledger import SLIDES, SlideLedger, load_ledger
from thinsection.store.outcome import KnownSlide
from thinsection.tiles import TileTable
from thinsection.tiles.table import Columns
from thinsection.types import Document, PlainValues, counted

if TYPE_CHECKING:
    from thinsection.qc import Pipeline

# facts of a corrected slide: hash of the corrections, of their file, and key of the slide's pixels
_KEY_FACT = "edits_key"
_FILE_FACT = "edits_sha256"
_SLIDE_FACT = "pixels"


@dataclass(frozen=True, kw_only=True)
class QcStage(Stage[CheckedTissue]):
    """`qc.zip` and `picture.jpg` in `slides/ID/qc_NAME/`; value: a `CheckedTissue`."""

    title: ClassVar[str] = "qc"
    reads: ClassVar[Reads] = "slide"

    pipeline: Pipeline
    source: str  # name of the preset, or its TOML file
    # True applies every check, even one that removes most of the tissue
    strict: bool = False
    # checks of `pipeline` that remove what they find because the run asks for it
    removes: tuple[str, ...] = ()
    # a slide is left out if one of these rules applies; the rules do not change the result
    rules: tuple[str, ...] = ()
    # TOML file with the rules for the verdicts; None takes the built-in ones
    verdict_rules: Path | None = None
    reader: str = AUTO  # requested reader
    device: str = "cpu"  # device that computes the checks
    # segmentation whose classes the pipeline uses; None if it uses none
    segments: Stage[ClassMap] | None = None
    # corrections of people: a file, a folder or a column; 'none' drops stored ones, None keeps them
    edits: str | None = None

    @property
    def name(self) -> str:
        """Name of the preset, or of its file with a hash of the content."""
        name = self.source
        if name not in qc.preset_names():
            content = qc.pipeline_identity(self.pipeline)["pipeline"]
            if self.segments is not None:
                content = [content, self.segments.address]
            name = slug(Path(self.source).stem)
            # `thinsection qc` writes pipelines into files whose name has the hash already
            if not name.endswith(f"-{short_hash(content)}"):
                name = f"{name}-{short_hash(content)}"
        elif self.removes:
            name = join_label(name, "remove", *self.removes)
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

    @property
    def annotation_setting(self) -> str:
        return ROLE

    def annotation_hash(self, entry: SlideEntry, ledger: SlideLedger) -> str:
        """Hash of the wanted corrections; without a file for this slide, of the stored ones."""
        if self.edits == NO_EDITS:
            return ""
        path = self._edits_file(entry)
        record = ledger.stages.get(self.address)
        facts: Document = {} if record is None else record.facts
        if path is None:
            if record is not None:
                return str(facts.get(_KEY_FACT, ""))
            return edits_key(self._stored_edits(ledger.out, entry.slide_id))
        if _FILE_FACT in facts and facts[_FILE_FACT] == file_sum(path):
            return str(facts[_KEY_FACT])
        return edits_key(read_edits(path, self._check_names))

    @property
    def _check_names(self) -> list[str]:
        return self.pipeline.editable_checks

    def _edits_file(self, entry: SlideEntry) -> Path | None:
        """File with the corrections of a slide that the run names; None: it names none."""
        return None if self.edits is None else edits_file(self.edits, entry)

    def _stored_edits(self, out: Path, slide_id: str) -> tuple[QcEdit, ...]:
        """Corrections in the slide's `qc.zip`, also in one that no ledger lists."""
        folder = out / self.folder(slide_id)
        # a missing or damaged file has none
        with suppress(StoreError):
            return read_qc(folder).edits
        return ()

    def _wanted_edits(self, work: SlideWork) -> tuple[QcEdit, ...]:
        """Corrections of the slide.

        Raises InvalidInputError: they are not valid, or changed after the run has begun.
        """
        wanted_key = work.source.annotation_hashes.get(ROLE, "")
        if not wanted_key:
            return ()
        slide_id = work.entry.slide_id
        path = self._edits_file(work.entry)
        if path is None:
            edits = self._stored_edits(work.out, slide_id)
            if edits_key(edits) != wanted_key:
                raise InvalidInputError(
                    f"stored corrections of {slide_id!r} must be in {QC_FILE}, got others or "
                    'none; pass qc_edits=... with the files, or qc_edits="none"'
                )
            return edits
        size_l0 = (work.ledger.slide["width"], work.ledger.slide["height"])
        edits = read_edits(path, self._check_names, size_l0)
        if edits_key(edits) != wanted_key:
            raise InvalidInputError(
                f"{ROLE} must not change during a run, got other corrections of {slide_id!r} in "
                f"{str(path)!r}; run the same command again"
            )
        return edits

    def say_kept_edits(
        self, out: Path, slide_ids: Iterable[str], on_message: Callable[[str], None]
    ) -> None:
        """Says which slides keep their stored corrections because they have no file.

        Memory: one ledger at a time.
        """
        kept = []
        for slide_id in slide_ids:
            # a damaged ledger is an error of its slide
            with suppress(StoreError):
                record = load_ledger(out, slide_id).stages.get(self.address)
                if record is not None and record.facts.get(EDITED_AREAS):
                    kept.append(slide_id)
        if kept:
            verb = "keeps its" if len(kept) == 1 else "keep their"
            on_message(
                f"{ROLE}: {first_names(kept)} {verb} stored corrections, because there is "
                "no file; a file without annotations removes them"
            )

    def _notes_on_others(self, work: SlideWork) -> list[str]:
        """Sentences on corrections that are stored with other checks of the slide."""
        notes = []
        for address, record in work.ledger.stages.items():
            num_areas = record.facts.get(EDITED_AREAS)
            if num_areas and address != self.address:
                notes.append(
                    f"{address.rpartition('/')[2]} has {counted(num_areas, 'corrected area')}, "
                    f"which qc_{self.name} does not use; to use them, pass their file"
                )
        return notes

    def _key_with(self, work: SlideWork, edits: str) -> str:
        """Key of the result with corrections of this hash; '' is that of the checks alone."""
        return self.key(replace(work.source, annotation_hashes={ROLE: edits}))

    def is_only_edited(self, work: SlideWork) -> bool:
        record = work.ledger.stages[self.address]
        return record.key == self._key_with(work, record.facts.get(_KEY_FACT, ""))

    def take_over(self, work: SlideWork) -> QcResult | tuple[QcEdit, ...] | None:
        """The stored answers of the checks, if they would be the same again, or the corrections.

        Raises InvalidInputError: the corrections do not fit the checks, or the stored ones were
        drawn on another slide file.
        """
        work.fetch(self)
        edits = self._wanted_edits(work)
        facts = work.ledger.stages[self.address].facts
        is_stored = self._edits_file(work.entry) is None
        if edits and is_stored and facts.get(_SLIDE_FACT) != work.source.key:
            raise InvalidInputError(
                f"stored corrections must belong to the slide's file, got those of another file "
                f"or resolution for {work.entry.slide_id!r}; pass qc_edits=... with new files, or "
                'qc_edits="none"'
            )
        if work.resumes and self.is_only_edited(work):
            # a damaged result is made again, and so is one of older versions
            folder = work.path(self.folder(work.entry.slide_id))
            with suppress(StoreError, ConfigError):
                if (folder / PICTURE_NAME).is_file():
                    return load_qc(folder).with_edits(edits)
        return edits or None

    def make(self, work: SlideWork) -> Output[CheckedTissue]:
        """Runs the checks, or takes their stored masks if only the corrections have changed.

        Memory: as `run_qc`.
        """
        folder = self.folder(work.entry.slide_id)
        key = self._key_with(work, "")
        taken = work.taken_over.get(self.address)
        if isinstance(taken, QcResult):
            result = taken
            write_values(result, work.path(folder), key=key)
        else:
            slide = work.opened
            edits = self._wanted_edits(work)
            result = self.check(work, slide).with_edits(edits)
            picture = slide_picture(slide, result.rgb)
            write_qc(result, work.path(folder), key=key, picture=picture)
        facts = {
            "tissue_fraction": round(float(result.tissue.mask.mean()), 6),
            "pixels_to_use": result.scores["pixels_to_use"],
            "stain": result.scores.get("stain", ""),
            "warnings": "; ".join(result.warnings),
        }
        if self.edits is None and not result.edits:
            work.run_notes += self._notes_on_others(work)
        if result.edits:
            facts[EDITED_AREAS] = len(result.edits)
            facts[_KEY_FACT] = edits_key(result.edits)
            facts[_SLIDE_FACT] = work.source.key
            path = self._edits_file(work.entry)
            if path is not None:
                facts[_FILE_FACT] = file_sum(path)
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
            column = parse_rule(rule).column
            checks = self.pipeline.checks
            if not qc_fail(row, rule, checks=checks):
                name = unjudging_check(row, column, checks)
                if name:
                    work.run_notes.append(
                        f"rule {rule!r} was not applied, because {name} did not judge the slide"
                    )
                continue
            overlay = QcOverlayStage(qc=self)
            if not work.is_done(overlay):
                work.perform(overlay)
            work.stage_title = self.title
            value = row.get(column, 0.0)
            raise QcExclusion(f"excluded by {rule!r}: {column} is {value}")

    @property
    def notes(self) -> list[str]:
        return notes_on_absent(self.pipeline.checks)

    def check_run(self) -> None:
        """Parses the rules of `--qc-fail`, and trains the pixel models that the checks need."""
        for rule in self.rules:
            parse_rule(rule)
        qc.prepare_models(self.pipeline)

    def say_unapplied_rules(self, out: Path, on_message: Callable[[str], None]) -> None:
        """Names the rules of `--qc-fail` whose column is not in the table of the folder."""
        if not self.rules:
            return
        table = out / f"{self.address.removeprefix(f'{SLIDES}/')}.csv"
        rows = read_table(table) if table.is_file() else []
        if any(row["status"] == "done" for row in rows):
            for line in notes_on_rules(rows[0], self.rules, self.pipeline.checks):
                on_message(line)

    def write_tables(self, out: Path, slides: Sequence[KnownSlide]) -> dict[str, str]:
        """Writes `qc_NAME.csv` and `qc_NAME.html`; returns the unusable slides, and why."""
        # imported here: it loads the HTML templates' code, which a worker does not need
        from thinsection.stages.own_tables import write_qc_tables

        return write_qc_tables(
            out,
            slides,
            self,
            checks=self.pipeline.checks,
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
            result = self.qc.check(work, work.opened).with_edits(result.edits)
        folder = self.qc.folder(work.entry.slide_id)
        (small,) = read_work_images(work.opened, [SMALL_EDGE_PX])
        names = write_qc_pictures(result, work.path(folder), small=small)
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
