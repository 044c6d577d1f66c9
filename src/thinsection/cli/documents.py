"""JSON documents that commands print with `--json`: one dataclass for each kind.

`kind` names the document, and `version` its form. A new field keeps the version. A field that is
renamed or removed, or that gets another type or meaning, raises the version.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from thinsection.errors import with_options
from thinsection.types import Document, Mpp, Size

if TYPE_CHECKING:
    from typing import Self  # not in Python 3.10

    from _typeshed import DataclassInstance

    from thinsection.cells.check import CellsFindings
    from thinsection.cli.command_memory import StoredSize
    from thinsection.cli.command_time import CommandTime
    from thinsection.encode.check import Check
    from thinsection.evaluation.audit import Audit
    from thinsection.evaluation.label_report import LabelReport
    from thinsection.results.folder import FolderRow, Results
    from thinsection.results.records import Record
    from thinsection.results.verify import Damage
    from thinsection.run.calibration import Calibration
    from thinsection.run.cost import MemoryPlan
    from thinsection.run.ending import RunSummary
    from thinsection.run.merge import MergeSummary
    from thinsection.run.plan import RunPlan
    from thinsection.slide import Picture, Slide
    from thinsection.store.outcome import SlideResult
    from thinsection.usage.analysis import Efficiency


Row = TypeVar("Row")


def copied(cls: type[Row], source: object, **others: object) -> Row:
    """Part of a document: its fields are the attributes of an object, or are in `others`."""
    values = dict(others)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        has_default = field.default is not dataclasses.MISSING
        if field.name not in others and not has_default:
            values[field.name] = getattr(source, field.name)
    return cls(**values)


def print_document(document: "DataclassInstance") -> None:
    """Prints a document on standard output; characters beyond ASCII are escaped."""
    print(json.dumps(dataclasses.asdict(document), indent=2, allow_nan=False))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Slide that has no result, and the reason."""

    slide_id: str
    error: str


def _failures(errors: Mapping[str, str]) -> tuple[Failure, ...]:
    return tuple(Failure(slide_id=name, error=error) for name, error in errors.items())


@dataclass(frozen=True, kw_only=True)
class ResultsRow:
    """One folder of results, for all slides."""

    address: str
    num_slides: int
    num_bytes: int
    encoder: str | None
    dim: int | None
    slide_encoder: str | None
    slide_dim: int | None

    @classmethod
    def of(cls, row: "FolderRow") -> "Self":
        """Row for a folder of results."""
        names = ("encoder", "dim", "slide_encoder", "slide_dim")
        facts: Document = {name: row.facts.get(name) for name in names}
        return copied(cls, row, **facts)


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One command that worked in a results folder."""

    record: str
    command: str | None
    started: str | None
    seconds: float | None
    counts: dict[str, int] | None

    @classmethod
    def of(cls, record: "Record") -> "Self":
        """Invocation from its record."""
        names = ("command", "started", "seconds", "counts")
        facts: Document = {name: record.document.get(name) for name in names}
        return cls(record=record.folder.name, **facts)


@dataclass(frozen=True, kw_only=True)
class LsDocument:
    """Content of a results folder."""

    kind: Literal["ls"] = "ls"
    version: Literal[1] = 1
    folder: str
    num_slides: int
    slide_ids: tuple[str, ...]
    results: tuple[ResultsRow, ...]
    failures: tuple[Failure, ...]
    invocations: tuple[Invocation, ...]

    @classmethod
    def of(cls, folder: str, results: "Results") -> "Self":
        """Document of a folder or URL."""
        return cls(
            folder=folder,
            num_slides=len(results.slides),
            slide_ids=results.slides,
            results=tuple(ResultsRow.of(row) for row in results.folders),
            failures=_failures(results.failures()),
            invocations=tuple(Invocation.of(record) for record in results.records),
        )


@dataclass(frozen=True, kw_only=True)
class PlannedSlide:
    """Slide of a plan."""

    slide_id: str
    num_tiles: int


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Request of each array task of `thinsection slurm submit` with the same arguments."""

    num_tasks: int
    cpus: int
    memory_bytes: int
    gpus: int
    walltime_s: int
    directives: tuple[str, ...]
    origins: tuple[str, ...]
    nodes: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class PlanDocument:
    """Predicted memory and time of a run, or of a command that reads stored embeddings.

    Of such a command `work_s` is the time after the start, and the seconds of the steps of a run
    are 0.
    """

    kind: Literal["plan"] = "plan"
    version: Literal[1] = 1
    command: str = "run"
    num_slides: int
    num_tiles: int
    host_bytes: int
    host_parts: dict[str, int]
    gpu: str | None
    gpu_bytes: int
    gpu_parts: dict[str, int]
    seconds: float
    start_s: float
    prepare_s: float
    decode_s: float
    encode_s: float
    work_s: float
    measured_on: str
    load: float
    slides: tuple[PlannedSlide, ...]
    unreadable: tuple[Failure, ...]
    warnings: tuple[str, ...]
    advice: tuple[str, ...]
    qc_device: str
    job: JobPlan | None

    @classmethod
    def of(cls, plan: "RunPlan", job: JobPlan | None) -> "Self":
        """Document of a plan."""
        memory = plan.memory
        return copied(
            cls,
            plan.time,
            num_slides=len(plan.slides),
            num_tiles=sum(slide.num_tiles for slide in plan.slides),
            host_bytes=memory.host_bytes,
            host_parts=memory.host,
            gpu=None if plan.gpu is None else plan.gpu.name,
            gpu_bytes=memory.gpu_bytes,
            gpu_parts=memory.gpu,
            seconds=plan.time.wall_s,
            work_s=plan.time.wall_s - plan.time.start_s,
            measured_on=plan.measured_on,
            load=plan.load,
            slides=tuple(copied(PlannedSlide, slide) for slide in plan.slides),
            unreadable=_failures(plan.unreadable),
            warnings=plan.warnings,
            advice=plan.advice,
            qc_device=plan.qc_device,
            job=job,
        )

    @classmethod
    def of_command(
        cls,
        command: str,
        size: "StoredSize",
        memory: "MemoryPlan",
        time: "CommandTime",
        machine: "Calibration",
    ) -> "Self":
        """Document of the plan of another command than `run`."""
        return cls(
            command=command,
            num_slides=len(size.num_tiles),
            num_tiles=sum(size.num_tiles),
            host_bytes=memory.host_bytes,
            host_parts=dict(memory.host),
            gpu=None,
            gpu_bytes=0,
            gpu_parts={},
            seconds=time.wall_s,
            start_s=time.start_s,
            prepare_s=0.0,
            decode_s=0.0,
            encode_s=0.0,
            work_s=time.work_s,
            measured_on=machine.measured_on,
            load=machine.load,
            slides=(),
            unreadable=(),
            warnings=time.warnings,
            advice=(),
            qc_device="",
            job=None,
        )


@dataclass(frozen=True)
class Finding:
    """Something that works on this machine, or is missing."""

    area: str
    name: str
    usable: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class DoctorDocument:
    """State of this machine."""

    kind: Literal["doctor"] = "doctor"
    version: Literal[1] = 1
    thinsection_version: str
    python_version: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class EncoderRow:
    """Declared tile encoder."""

    name: str
    dim: int
    tile_px: int
    tile_mpp: float | None
    input_px: int
    pooling: str
    supports_tokens: bool
    num_params: int | None
    licence: str
    source: str
    repo: str | None
    revision: str | None
    weights_files: tuple[str, ...]
    gated: bool
    pin: str
    needs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ModelsDocument:
    """Encoders by name."""

    kind: Literal["models"] = "models"
    version: Literal[1] = 1
    encoders: tuple[EncoderRow, ...]
    plugins: dict[str, str]
    slide_encoders: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """Condition for loading an encoder."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class ModelsCheckDocument:
    """Answer to the question whether an encoder loads here."""

    kind: Literal["models-check"] = "models-check"
    version: Literal[1] = 1
    name: str
    loads: bool
    checks: tuple[CheckRow, ...]

    @classmethod
    def of(cls, name: str, checks: Sequence["Check"]) -> "Self":
        """Document of the checks of an encoder."""
        rows = tuple(copied(CheckRow, check) for check in checks)
        return cls(name=name, loads=all(row.ok for row in rows), checks=rows)


@dataclass(frozen=True, kw_only=True)
class ShareRow:
    """Requested and used amount of one resource, in words."""

    name: str
    requested: str
    used: str
    fraction: float | None


@dataclass(frozen=True, kw_only=True)
class NextRequest:
    """Resources that the next job of this kind should request."""

    cpus: int
    memory_bytes: int
    gpus: int
    walltime_s: int
    sbatch: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EfficiencyDocument:
    """What the last run requested, and what it used."""

    kind: Literal["efficiency"] = "efficiency"
    version: Literal[1] = 1
    record: str
    page: str
    shares: tuple[ShareRow, ...]
    bottleneck: str
    warnings: tuple[str, ...]
    seconds: float
    stage_seconds: dict[str, float]
    next_request: NextRequest | None

    @classmethod
    def of(cls, analysis: "Efficiency", page: Path) -> "Self":
        """Document of an analysis."""
        request = analysis.next_request
        next_request = None
        if request is not None:
            next_request = copied(NextRequest, request, sbatch=request.sbatch_lines())
        return copied(
            cls,
            analysis,
            record=page.parent.name,
            page=str(page),
            shares=tuple(copied(ShareRow, share) for share in analysis.shares),
            seconds=analysis.wall_s,
            stage_seconds=dict(analysis.stage_seconds),
            next_request=next_request,
        )


@dataclass(frozen=True, kw_only=True)
class DamageRow:
    """File that is damaged or missing."""

    file: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class VerifyDocument:
    """Comparison of files with their checksums."""

    kind: Literal["verify"] = "verify"
    version: Literal[1] = 1
    folder: str
    num_checksums: int
    damaged: tuple[DamageRow, ...]
    versions: tuple[str, ...]

    @classmethod
    def of(
        cls,
        folder: Path,
        checked: int,
        damaged: Sequence["Damage"],
        versions: Sequence[str],
    ) -> "Self":
        """Document of a comparison."""
        rows = tuple(copied(DamageRow, row) for row in damaged)
        return cls(
            folder=str(folder),
            num_checksums=checked,
            damaged=rows,
            versions=tuple(versions),
        )


@dataclass(frozen=True, kw_only=True)
class SlideRow:
    """Outcome of one slide in a run."""

    slide_id: str
    slide_path: str
    status: Literal["done", "skipped", "empty", "excluded", "failed"]
    stage: str
    error: str
    num_tiles: int | None
    warnings: str
    seconds: float

    @classmethod
    def of(cls, result: "SlideResult") -> "Self":
        """Row for a result."""
        facts = result.facts
        return copied(
            cls,
            result,
            num_tiles=facts.get("num_tiles"),
            warnings=facts.get("warnings") or "",
        )


@dataclass(frozen=True, kw_only=True)
class RunDocument:
    """Outcome of a run."""

    kind: Literal["run"] = "run"
    version: Literal[1] = 1
    out: str
    record: str
    exit_code: int
    seconds: float
    counts: dict[str, int]
    slides: tuple[SlideRow, ...]
    equal_slides: tuple[tuple[str, ...], ...]
    unusable: dict[str, str]
    stage_seconds: dict[str, float]

    @classmethod
    def of(cls, summary: "RunSummary") -> "Self":
        """Document of a finished run."""
        return copied(
            cls,
            summary,
            out=str(summary.out),
            record=summary.record.name,
            slides=tuple(SlideRow.of(result) for result in summary.results),
            unusable=dict(summary.unusable),
        )


@dataclass(frozen=True, kw_only=True)
class MergedSlideRow:
    """Outcome of one slide in a merge."""

    slide_id: str
    status: Literal["taken", "kept", "left-out"]
    source: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class MergeDocument:
    """Outcome of a merge."""

    kind: Literal["merge"] = "merge"
    version: Literal[1] = 1
    out: str
    counts: dict[str, int]
    slides: tuple[MergedSlideRow, ...]
    num_files: int
    num_bytes: int

    @classmethod
    def of(cls, summary: "MergeSummary") -> "Self":
        """Document of a finished merge."""
        slides = tuple(copied(MergedSlideRow, slide) for slide in summary.slides)
        return copied(cls, summary, out=str(summary.out), slides=slides)


def _extent(size: Size, mpp: Mpp | None) -> dict[str, float | None]:
    """Width, height and resolution of a picture, as its fields."""
    mpp_x, mpp_y = mpp or (None, None)
    return {"width": size[0], "height": size[1], "mpp_x": mpp_x, "mpp_y": mpp_y}


@dataclass(frozen=True, kw_only=True)
class LevelInfo:
    """One level of a slide."""

    width: int
    height: int
    downsample: float


@dataclass(frozen=True, kw_only=True)
class PictureInfo:
    """One picture of a file, and the rule by which it has its role."""

    number: int
    name: str
    role: str
    rule: str
    width: int
    height: int
    mpp_x: float | None
    mpp_y: float | None
    num_levels: int
    is_shown: bool

    @classmethod
    def of(cls, picture: "Picture", shown: "Picture | None") -> "Self":
        """Picture of an inventory."""
        return copied(
            cls,
            picture,
            **_extent(picture.size, picture.mpp),
            num_levels=max(1, len(picture.levels)),
            is_shown=picture == shown,
        )


@dataclass(frozen=True, kw_only=True)
class SlideInfo:
    """One file: the picture that is read, and the other pictures in it."""

    slide_path: str
    reader: str
    choice: str
    width: int
    height: int
    mpp_x: float | None
    mpp_y: float | None
    mpp_source: str
    objective_power: float | None
    vendor: str | None
    levels: tuple[LevelInfo, ...]
    pictures: tuple[PictureInfo, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, slide: "Slide", slide_path: str) -> "Self":
        """Information on an opened slide."""
        levels = []
        for level in slide.levels:
            width, height = level.size
            levels.append(copied(LevelInfo, level, width=width, height=height))
        pictures = [
            PictureInfo.of(picture, slide.picture) for picture in slide.pictures
        ]
        return copied(
            cls,
            slide,
            slide_path=slide_path,
            **_extent(slide.size, slide.slide_mpp),
            levels=tuple(levels),
            pictures=tuple(pictures),
        )


@dataclass(frozen=True, kw_only=True)
class UnopenedFile:
    """File that no reader opens, and why."""

    slide_path: str
    error: str


@dataclass(frozen=True, kw_only=True)
class InfoDocument:
    """Pictures, levels and resolution of slide files."""

    kind: Literal["info"] = "info"
    version: Literal[1] = 1
    slides: tuple[SlideInfo, ...]
    failures: tuple[UnopenedFile, ...]


@dataclass(frozen=True, kw_only=True)
class CopiedSlides:
    """Two slides of different patients that look like copies."""

    slides: tuple[str, ...]
    share_of_tiles: float
    by: str


@dataclass(frozen=True, kw_only=True)
class SitesByClass:
    """Patients by site and class, and the test of their association."""

    sites: tuple[str, ...]
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    p_value: float
    test: str
    cramers_v: float


@dataclass(frozen=True, kw_only=True)
class AuditDocument:
    """Findings of an audit before training."""

    kind: Literal["audit"] = "audit"
    version: Literal[1] = 1
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    unknown: tuple[str, ...]
    copies: tuple[CopiedSlides, ...]
    sites: SitesByClass | None
    left_out: dict[str, str]

    @classmethod
    def of(cls, audit: "Audit") -> "Self":
        """Document of an audit."""
        copies = []
        for names, copy in zip(audit.copied_slides, audit.copies, strict=True):
            row = CopiedSlides(slides=names, share_of_tiles=copy.tiles, by=copy.by)
            copies.append(row)
        sites = audit.sites
        return copied(
            cls,
            audit,
            copies=tuple(copies),
            sites=None if sites is None else copied(SitesByClass, sites),
            left_out=dict(audit.left_out),
        )


@dataclass(frozen=True, kw_only=True)
class LabelReading:
    """How one value of a column, or a range of numbers, is read."""

    column: str
    value: str
    rows: int
    reading: str
    becomes: str


@dataclass(frozen=True, kw_only=True)
class LabelsDocument:
    """How a table of labels is read."""

    kind: Literal["labels"] = "labels"
    version: Literal[1] = 1
    file: str
    key: str
    num_rows: int
    task: str
    num_used: int
    summary: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    readings: tuple[LabelReading, ...]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, report: "LabelReport") -> "Self":
        """Document of a report."""
        table = report.table
        values = report.values
        readings = [
            copied(LabelReading, reading, rows=reading.count)
            for reading in values.readings
        ]
        return cls(
            file=str(table.path),
            key=table.key_column,
            num_rows=len(report.rows),
            task=values.kind,
            num_used=len(values.rows),
            summary=report.summary,
            notes=(*table.notes, *values.notes),
            warnings=values.warnings,
            readings=tuple(readings),
            problems=tuple(map(with_options, (*values.problems, *values.questions))),
        )


@dataclass(frozen=True, kw_only=True)
class SeamLines:
    """Lines along one axis at which cells end."""

    axis: str
    period_px: float
    after_px: tuple[float, ...]
    before_px: tuple[float, ...]
    num_sides: int


@dataclass(frozen=True, kw_only=True)
class DoubtfulCell:
    """A cell that a check names."""

    kind: str
    cell_id: str
    x_l0: float
    y_l0: float


@dataclass(frozen=True, kw_only=True)
class UnreadCells:
    """File of cells that cannot be read, and why."""

    file: str
    error: str


@dataclass(frozen=True, kw_only=True)
class CheckedCells:
    """Findings in one file of cells."""

    file: str
    format: str
    num_read: int
    num_cells: int
    unusable: dict[str, int]
    simplified: dict[str, int]
    num_doubled_pairs: int
    num_by_kind: dict[str, int]
    seams: tuple[SeamLines, ...]
    cut_share: float | None
    num_cut_by_chance: float
    num_facing_pairs: int
    median_area_px: float | None
    outside_slide: int | None
    examples: tuple[DoubtfulCell, ...]

    @classmethod
    def of(cls, findings: "CellsFindings") -> "Self":
        """Findings in one file."""
        seams = [
            SeamLines(
                axis=axis,
                period_px=lines.period,
                after_px=lines.after,
                before_px=lines.before,
                num_sides=lines.num_sides,
            )
            for axis, lines in findings.seams.items()
        ]
        examples = [copied(DoubtfulCell, example) for example in findings.examples]
        return copied(cls, findings, seams=tuple(seams), examples=tuple(examples))


@dataclass(frozen=True, kw_only=True)
class CellsCheckDocument:
    """Findings of `thinsection cells check`."""

    kind: Literal["cells-check"] = "cells-check"
    version: Literal[1] = 1
    files: tuple[CheckedCells, ...]
    failures: tuple[UnreadCells, ...]


# kind -> its class; the page "JSON for scripts" and the tests go through this table
DOCUMENTS: Mapping[str, "type[DataclassInstance]"] = {
    document.kind: document
    for document in (
        RunDocument,
        PlanDocument,
        LsDocument,
        MergeDocument,
        VerifyDocument,
        EfficiencyDocument,
        InfoDocument,
        DoctorDocument,
        ModelsDocument,
        ModelsCheckDocument,
        AuditDocument,
        LabelsDocument,
        CellsCheckDocument,
    )
}
