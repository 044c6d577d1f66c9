"""What a run says of each slide, the one failure record, and the tables that are made of both."""

import json
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from thinsection.config import coerce, from_mapping
from thinsection.errors import ConfigError, QcExclusion
from thinsection.files.atomic import write_json, write_table
from thinsection.qc import qc_fail
from thinsection.qc.checks.check import Score
from thinsection.qc.engine import QcRule, parse_rule
from thinsection.report.qc_files import QC_FORMAT, QC_JSON, judged, write_qc_csv, write_qc_sheet
from thinsection.report.verdict import load_rules
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.masks import QcStage
from thinsection.stages.request import mask_stage
from thinsection.stages.stage import ledger_facts
from thinsection.store.ledger import SLIDES, SlideLedger, load_ledgers

FAILURE_NAME = "failure.json"
SUMMARY_COLUMNS = (
    *("slide_id", "slide_path", "status", "patient_id", "label", "split"),
    *("reader", "width", "height", "mpp_x", "mpp_y", "vendor", "grid", "tile_mpp"),
    *("stain", "tissue_fraction", "num_tiles", "features", "slide_features", "also", "warnings"),
)
FAILED_COLUMNS = ("slide_id", "slide_path", "stage", "error", "details")
LOST_STAGE = "worker"

Status = Literal["done", "skipped", "empty", "excluded", "failed"]


@dataclass(frozen=True, kw_only=True)
class SlideResult:
    """The end of one slide in one run: plain values that travel between processes.

    Attributes:
        slide_id, slide_path: as in the cohort.
        status: 'done' now, 'skipped' because it was done before, 'empty' (now or before) where no
            tile was found, 'excluded' by a QC rule, 'failed'.
        stage: where it failed: open, tissue, qc, tile, decode, encode, aggregate, write, ...
        error: the message, one line, '' unless failed.
        facts: what the summary shows.
        seconds: that it took beyond the slide before it, with which it overlaps; 0 where unknown.
    """

    slide_id: str
    slide_path: str
    status: Status
    stage: str = ""
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, entry: SlideEntry, status: Status, **more: Any) -> "SlideResult":
        """The end of a slide of the cohort."""
        if status in ("done", "skipped") and more.get("facts", {}).get("num_tiles") == 0:
            status = "empty"
        return cls(slide_id=entry.slide_id, slide_path=entry.slide_path, status=status, **more)


def describe(result: SlideResult) -> str:
    """One line on a slide that ended."""
    if result.status == "failed":
        return f"{result.slide_id}: failed ({result.stage}): {result.error}"
    if result.status == "excluded":
        return f"{result.slide_id}: {result.error}"
    facts = result.facts
    if result.status == "empty":
        why = facts.get("warnings") or "no tile holds enough tissue"
        return f"{result.slide_id}: empty: {why}"
    count = f", {facts['num_tiles']} tiles" if facts.get("num_tiles") is not None else ""
    if not count and facts.get("pixels_to_use") is not None:
        count = f", {facts['pixels_to_use']:.0f} px to use"
    if facts.get("fetched_bytes"):
        share = facts["fetched_bytes"] / facts["file_bytes"]
        count += f", {share:.0%} of the file fetched in {facts['requests']} requests"
    count += f", {facts['stain']}" if facts.get("stain") else ""
    if pen := facts.get("pen_fraction"):
        count += f", pen on {pen:.1%} left out"
    warning = f" (warning: {facts['warnings']})" if facts.get("warnings") else ""
    if result.status == "skipped":
        return f"{result.slide_id}: done before with the same settings and input, skipped{count}"
    return f"{result.slide_id}: done{count}{warning}"


def record_failure(out: Path, entry: SlideEntry, stage: str, error: BaseException) -> SlideResult:
    """Writes `slides/ID/failure.json` (stage, message, traceback, entry) and returns the result."""
    excluded = isinstance(error, QcExclusion)
    message = str(error) if excluded else f"{type(error).__name__}: {error}".replace("\n", " ")
    status: Status = "excluded" if excluded else "failed"
    trace = "".join(traceback.format_exception(error))
    document = {"status": status, "stage": stage, "error": message, "entry": asdict(entry)}
    write_json(failure_path(out, entry.slide_id), document | {"traceback": trace})
    return SlideResult.of(entry, status, stage=stage, error=message)


def failure_path(out: Path, slide_id: str) -> Path:
    """`OUT/slides/ID/failure.json`."""
    return out / SLIDES / slide_id / FAILURE_NAME


def read_failure(out: Path, slide_id: str) -> SlideResult | None:
    """The failure that is recorded of a slide; None where there is none, or it is not readable."""
    try:
        document = json.loads(failure_path(out, slide_id).read_text(encoding="utf-8"))
        told = {name: document[name] for name in ("status", "stage", "error")}
        path = str(document["entry"]["slide_path"])
        return from_mapping(SlideResult, {"slide_id": slide_id, "slide_path": path, **told})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_tables(out: Path, entries: Sequence[SlideEntry], results: Iterable[SlideResult]) -> None:
    """Writes summary.csv (a row per slide and grid) and failed.csv (a row per failed slide).

    Slides of earlier runs keep their rows; the files are replaced atomically.

    Memory: some kB per slide.
    """
    by_id = {result.slide_id: result for result in results}
    given = {entry.slide_id: entry for entry in entries}
    ledgers = {ledger.slide_id: ledger for ledger in load_ledgers(out)}
    recorded = {path.parent.name for path in (out / SLIDES).glob(f"*/{FAILURE_NAME}")}
    others = sorted((ledgers.keys() | recorded) - given.keys())
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for slide_id in [*given, *others]:
        result = by_id.get(slide_id) or read_failure(out, slide_id)
        ledger = ledgers.get(slide_id) or SlideLedger(out=out, slide_id=slide_id)
        first = {"slide_id": slide_id, "slide_path": result.slide_path if result else ""}
        if slide_id in given:
            first |= asdict(given[slide_id])
            first |= dict(given[slide_id].more)
        known = slide_id not in given  # of this run nobody has said so
        first["status"] = result.status if result else _stored_status(ledger if known else None)
        rows += [first | row for row in grid_rows(ledger)]
        if result and result.status in ("failed", "excluded"):
            details = failure_path(out, slide_id).relative_to(out)
            said = given[slide_id].more if slide_id in given else {}
            failed.append({**said} | asdict(result) | {"details": str(details)})
    more = dict.fromkeys(n for lg in ledgers.values() for n in lg.slide.get("more", ()))
    more |= dict.fromkeys(n for entry in entries for n in entry.more)
    write_table(out / "summary.csv", rows, (*SUMMARY_COLUMNS, *more))
    write_table(out / "failed.csv", failed, (*FAILED_COLUMNS, *more))


def _stored_status(ledger: SlideLedger | None) -> str:
    """Of a slide of an earlier run."""
    if ledger is None or not ledger.stages:
        return "missing"
    return "empty" if ledger_facts(ledger, ledger.stages).get("num_tiles") == 0 else "done"


def grid_rows(ledger: SlideLedger) -> Iterator[dict[str, Any]]:
    """What a slide has, a row per tile grid; one row for a slide without any.

    Columns `features` and `slide_features` name what lies in the folders of these names, `also`
    the other folders of the grid that hold a file of the slide.
    """
    slide = {name: value for name, value in ledger.slide.items() if value is not None}
    slide = slide.pop("more", {}) | slide
    grids = {a.split("/")[0]: None for a in ledger.stages if not a.startswith(f"{SLIDES}/")}
    if not grids:
        yield slide | ledger_facts(ledger, list(ledger.stages)) | {"grid": ""}
    for grid in grids:
        folders = [a.split("/")[1] for a in ledger.stages if a.startswith(f"{grid}/")]
        tiles = ledger.stages.get(f"{grid}/tiles")
        addresses = [*(tiles.needs if tiles else ()), *(f"{grid}/{name}" for name in folders)]
        also = [n for n in folders if not n.startswith(("features_", "slide_features_", "tiles"))]
        columns = {
            "features": _named(folders, "features_"),
            "slide_features": _named(folders, "slide_features_"),
            "also": "|".join(also),
        }
        yield slide | ledger_facts(ledger, addresses) | {"grid": grid} | columns


def _named(folders: Iterable[str], prefix: str) -> str:
    return "|".join(name.removeprefix(prefix) for name in folders if name.startswith(prefix))


def qc_stage(config: RunConfig) -> QcStage:
    """The stage of a run's quality control."""
    stage = mask_stage(config)
    assert isinstance(stage, QcStage)
    return stage


def write_qc_tables(
    out: Path,
    entries: Sequence[SlideEntry],
    config: RunConfig,
    measured: Mapping[str, Mapping[str, float]],
) -> None:
    """Writes qc_NAME.csv and qc_NAME.html of the slides that quality control has looked at.

    `measured` has further columns of a slide's row, by slide.
    """
    stage = qc_stage(config)
    rows = qc_rows(out, entries, stage)
    failing = failing_rules(rows, config.qc.qc_fail)
    for row in rows:
        row.update(measured.get(str(row["slide_id"]), {}))
        row["fails"] = "|".join(str(rule) for slide, rule in failing if slide == row["slide_id"])
    rules = load_rules(config.qc.qc_rules)
    rows = judged(rows, rules)
    write_qc_csv(out / f"qc_{stage.name}.csv", rows)
    write_qc_sheet(out / f"qc_{stage.name}.html", rows, title="Quality control", rules=rules)


def qc_rows(out: Path, entries: Sequence[SlideEntry], stage: QcStage) -> list[dict[str, Score]]:
    """The line of each slide: what its qc.json says, or why there is none."""
    rows: list[dict[str, Score]] = []
    for entry in entries:
        folder = stage.folder(entry.slide_id)
        row: dict[str, Score] = {"slide_id": entry.slide_id, "slide_path": entry.slide_path}
        row |= {"folder": folder, **entry.more}
        try:
            document = _qc_document(out / folder / QC_JSON)
        except ConfigError as damage:  # this slide's own
            rows.append({**row, "status": "failed", "warnings": f"{QC_JSON} is damaged: {damage}"})
            continue
        if document is not None:
            found = {**document["facts"], **document["scores"]}
            warnings = "|".join(document["warnings"])
            rows.append({**row, "status": "done", **found, "warnings": warnings})
        elif (failure := read_failure(out, entry.slide_id)) is not None:
            rows.append({**row, "status": "failed", "warnings": failure.error})
    return rows


def _qc_document(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known: dict[str, Any] = coerce(document, dict[str, Any], QC_JSON)
    if known.get("format") != QC_FORMAT:
        return None
    kinds = {"facts": dict[str, Any], "scores": dict[str, Any], "warnings": tuple[str, ...]}
    return {name: coerce(known.get(name), kind, name) for name, kind in kinds.items()}


def failing_rules(
    rows: Sequence[dict[str, Score]], rules: Sequence[str]
) -> list[tuple[str, QcRule]]:
    """(slide_id, rule) for each rule that holds for a slide that was looked at."""
    parsed = [parse_rule(rule) for rule in rules]
    done = [row for row in rows if row["status"] == "done"]
    return [(str(row["slide_id"]), rule) for row in done for rule in parsed if qc_fail(row, rule)]
