"""What a run says of each slide, the one failure record, and the tables that are made of them."""

import math
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from thinsection.config import coerce, from_mapping
from thinsection.errors import ConfigError, QcExclusion, StoreError, require
from thinsection.files.atomic import read_table, write_json, write_table
from thinsection.files.json_text import read_json
from thinsection.qc import qc_fail
from thinsection.qc.checks.check import Score
from thinsection.qc.engine import QcRule, parse_rule
from thinsection.report import qc_files
from thinsection.report.qc_files import QC_FORMAT, QC_JSON, Usual
from thinsection.report.verdict import load_rules
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.facts import OF_COHORTS, ledger_facts
from thinsection.stages.graph import mask_stage, measures_stage
from thinsection.stages.masks import QcStage
from thinsection.stages.measures import STAIN_COLUMNS, MeasuresStage
from thinsection.stages.spec import RunSpec
from thinsection.store.claims import equal_slides
from thinsection.store.ledger import (
    FAILURE_NAME,
    SLIDES,
    SlideLedger,
    load_ledgers,
)
from thinsection.store.tile_tables import MEASURED, TILES
from thinsection.tiles.measures import MEASURES

SUMMARY_COLUMNS = (
    *("slide_id", "slide_path", "status", "patient_id", "label", "split"),
    *("reader", "width", "height", "mpp_x", "mpp_y", "vendor", "grid", "tile_mpp"),
    *(
        "stain",
        "tissue_fraction",
        "num_tiles",
        "features",
        "slide_features",
        "also",
        "warnings",
    ),
)
FAILED_COLUMNS = ("slide_id", "slide_path", "stage", "error", "details")
LOST_STAGE = "worker"
_OF_COHORT = ("slide_path", *OF_COHORTS)  # what a cohort says of each slide
_MEASURED = (*STAIN_COLUMNS, *MEASURES)
_DISTANCES = {"measures_distance": _MEASURED, "measures_stain_distance": STAIN_COLUMNS}

Row = Mapping[str, float]
Status = Literal["done", "skipped", "empty", "excluded", "failed"]


@dataclass(frozen=True, kw_only=True)
class SlideResult:
    """The end of one slide in one run: plain values that travel between processes."""

    slide_id: str  # as in the cohort, like the path
    slide_path: str
    status: Status  # 'empty': now or before no tile was found; 'excluded' by a QC rule
    stage: str = (
        ""  # where it failed: open, tissue, qc, tile, decode, encode, aggregate, ...
    )
    error: str = ""  # the message, one line, '' unless failed
    facts: dict[str, Any] = field(default_factory=dict)  # what the summary shows
    # that it took beyond the slide before it, with which it overlaps; 0 where unknown
    seconds: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, entry: SlideEntry, status: Status, **more: Any) -> "SlideResult":
        """The end of a slide of the cohort."""
        if (
            status in ("done", "skipped")
            and more.get("facts", {}).get("num_tiles") == 0
        ):
            status = "empty"
        return cls(
            slide_id=entry.slide_id, slide_path=entry.slide_path, status=status, **more
        )


def describe(result: SlideResult) -> str:
    """One line on a slide that ended."""
    name, facts = result.slide_id, result.facts
    match result.status:
        case "failed":
            return f"{name}: failed ({result.stage}): {result.error}"
        case "excluded":
            return f"{name}: {result.error}"
        case "empty":
            return f"{name}: empty: {facts.get('warnings') or 'no tile holds enough tissue'}"
    count = ""
    if (tiles := facts.get("num_tiles")) is not None:
        count = f", {tiles} tiles"
    elif (usable := facts.get("pixels_to_use")) is not None:
        count = f", {usable:.0f} px to use"
    if fetched := facts.get("fetched_bytes"):
        share = f"{fetched / facts['file_bytes']:.0%} of the file"
        count += f", {share} fetched in {facts['requests']} requests"
    count += f", {facts['stain']}" if facts.get("stain") else ""
    if pen := facts.get("pen_fraction"):
        count += f", pen on {pen:.1%} left out"
    if result.status == "skipped":
        return f"{name}: done before with the same settings and input, skipped{count}"
    warning = f" (warning: {facts['warnings']})" if facts.get("warnings") else ""
    return f"{name}: done{count}{warning}"


def record_failure(
    out: Path, entry: SlideEntry, stage: str, error: BaseException
) -> SlideResult:
    """Writes `slides/ID/failure.json` (stage, message, traceback, entry) and returns the result."""
    excluded = isinstance(error, QcExclusion)
    message = (
        str(error)
        if excluded
        else f"{type(error).__name__}: {error}".replace("\n", " ")
    )
    status: Status = "excluded" if excluded else "failed"
    trace = "".join(traceback.format_exception(error))
    document = {
        "status": status,
        "stage": stage,
        "error": message,
        "entry": asdict(entry),
    }
    write_json(failure_path(out, entry.slide_id), document | {"traceback": trace})
    return SlideResult.of(entry, status, stage=stage, error=message)


def failure_path(out: Path, slide_id: str) -> Path:
    """`OUT/slides/ID/failure.json`."""
    return out / SLIDES / slide_id / FAILURE_NAME


def read_failure(out: Path, slide_id: str) -> SlideResult | None:
    """The failure that is recorded of a slide; None where there is none, or it is not readable."""
    try:
        document = _failure_document(out, slide_id)
        path = str(document["entry"]["slide_path"])
        told = {name: document[name] for name in ("status", "stage", "error")}
        return from_mapping(
            SlideResult, {"slide_id": slide_id, "slide_path": path, **told}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_failed_entry(out: Path, slide_id: str) -> SlideEntry | None:
    """The cohort's row of a slide whose failure is recorded; None as of `read_failure`."""
    try:
        document = _failure_document(out, slide_id)
        return from_mapping(SlideEntry, document["entry"] | {"slide_id": slide_id})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _failure_document(out: Path, slide_id: str) -> Any:
    return read_json(failure_path(out, slide_id))


@dataclass(frozen=True, kw_only=True)
class KnownSlide:
    """What a results folder says of a slide, whichever invocation brought it there."""

    slide_id: str
    ledger: SlideLedger  # empty where the slide failed before any stage was done
    failure: SlideResult | None  # of the last invocation that looked at it
    cohort: Mapping[str, Any]  # slide_path, patient_id, label and split
    more: Mapping[str, str]  # further columns of the cohort table

    @property
    def slide_path(self) -> str:
        """The slide's file, '' where nobody noted it."""
        return str(self.cohort.get("slide_path") or "")


def known_slides(out: Path) -> list[KnownSlide]:
    """Every slide of a results folder, by slide id: what tables and pages are made of.

    Memory: some kB per slide.
    """
    ledgers = {ledger.slide_id: ledger for ledger in load_ledgers(out)}
    failed = {path.parent.name for path in (out / SLIDES).glob(f"*/{FAILURE_NAME}")}
    slides = list[KnownSlide]()
    for slide_id in sorted(ledgers.keys() | failed):
        ledger = ledgers.get(slide_id) or SlideLedger(out=out, slide_id=slide_id)
        failure = read_failure(out, slide_id) if slide_id in failed else None
        entry = read_failed_entry(out, slide_id) if failure is not None else None
        cohort = {name: ledger.slide.get(name) for name in _OF_COHORT}
        more = dict(ledger.slide.get("more") or {})
        if entry is not None:  # newer than what the ledger says
            named = {name: getattr(entry, name) for name in _OF_COHORT}
            cohort |= {name: value for name, value in named.items() if value}
            more |= entry.more
        slides.append(
            KnownSlide(
                slide_id=slide_id,
                ledger=ledger,
                failure=failure,
                cohort=cohort,
                more=more,
            )
        )
    return slides


def write_tables(
    out: Path, slides: Sequence[KnownSlide], waiting: Sequence[SlideEntry] = ()
) -> list[tuple[str, ...]]:
    """Writes summary.csv (a row per slide and grid) and failed.csv (a row per failed slide).

    Slides of earlier runs keep their rows; the files are replaced atomically. What comes back are
    the groups of slides whose content is equal: their rows name the others among the warnings.

    Args:
        out: the results folder.
        slides: all of the folder, see `known_slides`.
        waiting: slides of this invocation that have not ended: 'missing', whatever is there.

    Memory: some kB per slide.
    """
    equal = equal_slides(slide.ledger for slide in slides)
    twins = {slide_id: ids for ids in equal for slide_id in ids}
    waiting_ids = {entry.slide_id for entry in waiting}
    rows = list[dict[str, Any]]()
    failed = list[dict[str, Any]]()
    for slide in slides:
        row = {"slide_id": slide.slide_id, **slide.cohort, **slide.more}
        for grid_row in grid_rows(slide.ledger):
            status = _status(slide, grid_row, waits=slide.slide_id in waiting_ids)
            warnings = _with_twins(grid_row.get("warnings", ""), slide.slide_id, twins)
            rows.append(row | {"status": status} | grid_row | {"warnings": warnings})
        if slide.failure is not None:
            details = failure_path(out, slide.slide_id).relative_to(out)
            failed.append(
                {**slide.more, **asdict(slide.failure), "details": str(details)}
            )
    known_ids = {slide.slide_id for slide in slides}
    for entry in waiting:
        if entry.slide_id not in known_ids:
            rows.append({**asdict(entry), **entry.more, "status": "missing"})
    more = dict.fromkeys(name for slide in slides for name in slide.more)
    more |= dict.fromkeys(name for entry in waiting for name in entry.more)
    rows.sort(key=lambda row: str(row["slide_id"]))
    write_table(out / "summary.csv", rows, (*SUMMARY_COLUMNS, *more))
    write_table(out / "failed.csv", failed, (*FAILED_COLUMNS, *more))
    return equal


def _with_twins(
    warnings: str, slide_id: str, twins: Mapping[str, tuple[str, ...]]
) -> str:
    """A slide's warnings, and the slides of the same content."""
    others = [one for one in twins.get(slide_id, ()) if one != slide_id]
    told = f"the same content as {', '.join(others)}" if others else ""
    return "; ".join(text for text in (warnings, told) if text)


def _status(slide: KnownSlide, grid_row: Mapping[str, Any], *, waits: bool) -> str:
    """What became of a slide in a grid, by what lies in the folder."""
    if slide.failure is not None:
        return slide.failure.status
    if waits or not slide.ledger.stages:
        return "missing"
    return "empty" if grid_row.get("num_tiles") == 0 else "done"


def grid_rows(ledger: SlideLedger) -> Iterator[dict[str, Any]]:
    """What a slide has, a row per tile grid; one row for a slide without any.

    Columns `features` and `slide_features` name what lies in the folders of these names, `also`
    the other folders of the grid that hold a file of the slide.
    """
    slide = {name: value for name, value in ledger.slide.items() if value is not None}
    slide = slide.pop("more", {}) | slide
    grids = {
        a.split("/")[0]: None for a in ledger.stages if not a.startswith(f"{SLIDES}/")
    }
    if not grids:
        yield slide | ledger_facts(ledger, list(ledger.stages)) | {"grid": ""}
    for grid in grids:
        folders = [a.split("/")[1] for a in ledger.stages if a.startswith(f"{grid}/")]
        tiles = ledger.stages.get(f"{grid}/tiles")
        addresses = [
            *(tiles.needs if tiles else ()),
            *(f"{grid}/{name}" for name in folders),
        ]
        columns = {"grid": grid}
        for kind in ("features", "slide_features"):
            named = [
                n.removeprefix(f"{kind}_") for n in folders if n.startswith(f"{kind}_")
            ]
            columns[kind] = "|".join(named)
        others = (
            n
            for n in folders
            if not n.startswith(("features_", "slide_features_", "tiles"))
        )
        yield (
            slide
            | ledger_facts(ledger, addresses)
            | columns
            | {"also": "|".join(others)}
        )


def qc_stage(spec: RunSpec) -> QcStage:
    """The stage of a run's quality control."""
    stage = mask_stage(spec)
    assert isinstance(stage, QcStage)
    return stage


def qc_table_name(stage: QcStage) -> str:
    """How the table and the page of a stage are called, without suffix: 'qc_auto'."""
    return stage.address.removeprefix(f"{SLIDES}/")


def write_qc_tables(out: Path, slides: Sequence[KnownSlide], spec: RunSpec) -> None:
    """Writes qc_NAME.csv and qc_NAME.html of all slides that quality control has looked at.

    Where the folder has measures of tiles that passed the same checks, they are further columns.
    """
    stage = qc_stage(spec)
    rows = qc_rows(slides, stage)
    measured = _measured_columns(out, slides, stage.address)
    failing = failing_rules(rows, spec.qc.qc_fail)
    for row in rows:
        row.update(measured.get(str(row["slide_id"]), {}))
        row["fails"] = "|".join(
            str(rule) for slide, rule in failing if slide == row["slide_id"]
        )
    rules = load_rules(spec.qc.qc_rules)
    name = qc_table_name(stage)
    rows = qc_files.judged(rows, rules)
    qc_files.write_qc_csv(out / f"{name}.csv", rows)
    qc_files.write_qc_sheet(
        out / f"{name}.html", rows, title="Quality control", rules=rules
    )


def qc_rows(slides: Sequence[KnownSlide], stage: QcStage) -> list[dict[str, Score]]:
    """The line of each slide of a folder: what its qc.json says, or why there is none."""
    rows = list[dict[str, Score]]()
    for slide in slides:
        folder = stage.folder(slide.slide_id)
        found = _qc_columns(slide, slide.ledger.out / folder / QC_JSON)
        if found:
            first = {
                "slide_id": slide.slide_id,
                "slide_path": slide.slide_path,
                "folder": folder,
            }
            rows.append({**first, **slide.more, **found})
    return rows


def _qc_columns(slide: KnownSlide, path: Path) -> dict[str, Score]:
    """Status, warnings and scores of a slide; empty where quality control never saw it."""
    try:
        document = _qc_document(path)
    except ConfigError as damage:  # the slide's own, no other row suffers
        return {"status": "failed", "warnings": f"{QC_JSON} is damaged: {damage}"}
    if document is not None:
        warnings = "|".join(document["warnings"])
        return {
            "status": "done",
            **document["facts"],
            **document["scores"],
            "warnings": warnings,
        }
    if slide.failure is not None and slide.failure.status == "failed":
        return {"status": "failed", "warnings": slide.failure.error}
    return {}


def _measured_columns(
    out: Path, slides: Sequence[KnownSlide], mask_address: str
) -> dict[str, Row]:
    """By slide, what measures_GRID.csv says, of the first grid whose tiles a mask decided."""
    grids = set[str]()
    for slide in slides:
        for address, record in slide.ledger.stages.items():
            grid, _, name = address.partition("/")
            if name == TILES and mask_address in record.needs:
                grids.add(grid)
    columns = dict[str, Row]()
    for grid in sorted(grids):
        table = measures_table(out, grid)
        for line in read_table(table) if table.is_file() else ():
            named = {n: line.get(n, "") for n in (*_DISTANCES, *_MEASURED)}
            numbers = {name: float(text) for name, text in named.items() if text}
            columns.setdefault(line["slide_id"], numbers)
    return columns


def _qc_document(path: Path) -> dict[str, Any] | None:
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return None
    known: dict[str, Any] = coerce(document, dict[str, Any], QC_JSON)
    if known.get("format") != QC_FORMAT:
        return None
    kinds = {
        "facts": dict[str, Any],
        "scores": dict[str, Any],
        "warnings": tuple[str, ...],
    }
    return {name: coerce(known.get(name), kind, name) for name, kind in kinds.items()}


def failing_rules(
    rows: list[dict[str, Score]], rules: Sequence[str]
) -> list[tuple[str, QcRule]]:
    """(slide_id, rule) for each rule that holds for a slide that was looked at."""
    parsed = [parse_rule(rule) for rule in rules]
    done = [row for row in rows if row["status"] == "done"]
    return [
        (str(row["slide_id"]), rule)
        for row in done
        for rule in parsed
        if qc_fail(row, rule)
    ]


def measures_table(out: Path, grid: str) -> Path:
    """Path of the table of measures of a grid."""
    return out / f"{MEASURED}_{grid}.csv"


def write_measures(out: Path, slides: Sequence[KnownSlide], spec: RunSpec) -> None:
    """Writes `measures_GRID.csv`, a row per slide of the folder that has a tile.

    Memory: some kB per slide of the folder and of the reference's.
    """
    stage = measures_stage(spec)
    stored = measures_of([slide.ledger for slide in slides], stage)
    reference = stored
    if spec.output.measures_reference is not None:
        reference = measured_slides(spec.output.measures_reference, stage)
    measured = [slide for slide in slides if slide.slide_id in stored]
    rows = [stored[slide.slide_id] for slide in measured]
    far = distances(rows, list(reference.values()))
    lines = [
        {"slide_id": slide.slide_id, **slide.more, **row, **distance}
        for slide, row, distance in zip(measured, rows, far, strict=True)
    ]
    more = dict.fromkeys(name for slide in measured for name in slide.more)
    columns = ("slide_id", *_DISTANCES, *_MEASURED, *more)
    write_table(measures_table(out, stage.tiles.grid), lines, columns)


def check_reference(spec: RunSpec) -> None:
    """Refuses a reference that has no measures of this run's grid.

    Raises:
        ConfigError: so it is, or measures are not asked for.
        StoreError: it is no results folder.
    """
    if (folder := spec.output.measures_reference) is None:
        return
    asked, got = spec.output.measures, "none; pass --measures"
    require(asked, "measures_reference must go with measures", got, error=ConfigError)
    rule = f"measures_reference must be a results folder with {SLIDES}/ in it"
    require((folder / SLIDES).is_dir(), rule, repr(str(folder)), error=StoreError)
    stage = measures_stage(spec)
    got = f"none in {str(folder)!r}; run it with --measures and the same settings of tiles"
    rule = f"measures_reference must hold {stage.address}"
    require(measured_slides(folder, stage), rule, got, error=ConfigError)


def measured_slides(folder: Path, stage: MeasuresStage) -> dict[str, Row]:
    """What the stage's results say of each slide of a folder that has them and a tile."""
    return measures_of(load_ledgers(folder), stage)


def measures_of(ledgers: Iterable[SlideLedger], stage: MeasuresStage) -> dict[str, Row]:
    """What the stage's results say of each slide that has them and a tile."""
    rows = dict[str, Row]()
    for ledger in ledgers:
        record = ledger.stages.get(stage.address)
        facts = record.facts if record else {}
        row = {name: facts[name] for name in _MEASURED if name in facts}
        if row:
            rows[ledger.slide_id] = row
    return rows


def distances(rows: Sequence[Row], reference: Sequence[Row]) -> list[dict[str, float]]:
    """Per slide its distance to the reference: in all measures, and in the stains' alone.

    The root of the mean of z² over the columns that the slide has, z = (value - median) /
    (1.4826 MAD): median, and MAD the median absolute deviation, are of the reference's slides,
    the divisor is at least 0.001 max(1, |median|). Fewer than 5 slides say nothing of what is
    usual: there is no distance then.
    """
    usual = {
        name: qc_files.usual_of([row.get(name) for row in reference])
        for name in _MEASURED
    }
    named = [
        {n: _distance(row, of, usual) for n, of in _DISTANCES.items()} for row in rows
    ]
    return [{name: d for name, d in found.items() if d is not None} for found in named]


def _distance(
    row: Row, names: Sequence[str], usual: Mapping[str, Usual]
) -> float | None:
    known = [
        (row[name], found) for name in names if name in row and (found := usual[name])
    ]
    squares = [qc_files.deviations(value, found) ** 2 for value, found in known]
    return math.sqrt(sum(squares) / len(squares)) if squares else None
