"""What a run says of each slide, the one failure record, and the tables that are made of them."""

import json
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from thinsection.config import coerce, from_mapping
from thinsection.errors import ConfigError, QcExclusion, StoreError, require
from thinsection.files.atomic import write_json, write_table
from thinsection.qc import qc_fail
from thinsection.qc.checks.check import Score
from thinsection.qc.engine import QcRule, parse_rule
from thinsection.report import qc_files
from thinsection.report.qc_files import QC_FORMAT, QC_JSON, Usual
from thinsection.report.verdict import load_rules
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.leaves import STAIN_COLUMNS, MeasuresStage
from thinsection.stages.masks import QcStage
from thinsection.stages.request import Models, mask_stage, stages_of
from thinsection.stages.stage import ledger_facts
from thinsection.store.ledger import SLIDES, SlideLedger, load_ledgers
from thinsection.store.tile_tables import MEASURED
from thinsection.tiles.grid import MEASURES

FAILURE_NAME = "failure.json"
SUMMARY_COLUMNS = (
    *("slide_id", "slide_path", "status", "patient_id", "label", "split"),
    *("reader", "width", "height", "mpp_x", "mpp_y", "vendor", "grid", "tile_mpp"),
    *("stain", "tissue_fraction", "num_tiles", "features", "slide_features", "also", "warnings"),
)
FAILED_COLUMNS = ("slide_id", "slide_path", "stage", "error", "details")
LOST_STAGE = "worker"
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
    stage: str = ""  # where it failed: open, tissue, qc, tile, decode, encode, aggregate, ...
    error: str = ""  # the message, one line, '' unless failed
    facts: dict[str, Any] = field(default_factory=dict)  # what the summary shows
    # that it took beyond the slide before it, with which it overlaps; 0 where unknown
    seconds: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, entry: SlideEntry, status: Status, **more: Any) -> "SlideResult":
        """The end of a slide of the cohort."""
        if status in ("done", "skipped") and more.get("facts", {}).get("num_tiles") == 0:
            status = "empty"
        return cls(slide_id=entry.slide_id, slide_path=entry.slide_path, status=status, **more)


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
    rows, failed = list[dict[str, Any]](), list[dict[str, Any]]()
    for slide_id in [*given, *others]:
        result, entry = by_id.get(slide_id) or read_failure(out, slide_id), given.get(slide_id)
        ledger = ledgers.get(slide_id) or SlideLedger(out=out, slide_id=slide_id)
        first = {"slide_id": slide_id, "slide_path": result.slide_path if result else ""}
        said = dict(entry.more) if entry else {}
        first |= asdict(entry) | said if entry else {}
        status: str = result.status if result else "missing"
        if result is None and entry is None and ledger.stages:  # of this run nobody has said so
            empty = ledger_facts(ledger, ledger.stages).get("num_tiles") == 0
            status = "empty" if empty else "done"
        rows += [first | {"status": status} | row for row in grid_rows(ledger)]
        if result and result.status in ("failed", "excluded"):
            details = failure_path(out, slide_id).relative_to(out)
            failed.append(said | asdict(result) | {"details": str(details)})
    more = dict.fromkeys(n for lg in ledgers.values() for n in lg.slide.get("more", ()))
    more |= dict.fromkeys(n for entry in entries for n in entry.more)
    write_table(out / "summary.csv", rows, (*SUMMARY_COLUMNS, *more))
    write_table(out / "failed.csv", failed, (*FAILED_COLUMNS, *more))


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
        columns = {"grid": grid}
        for kind in ("features", "slide_features"):
            named = [n.removeprefix(f"{kind}_") for n in folders if n.startswith(f"{kind}_")]
            columns[kind] = "|".join(named)
        others = (n for n in folders if not n.startswith(("features_", "slide_features_", "tiles")))
        yield slide | ledger_facts(ledger, addresses) | columns | {"also": "|".join(others)}


def qc_stage(config: RunConfig) -> QcStage:
    """The stage of a run's quality control."""
    stage = mask_stage(config)
    assert isinstance(stage, QcStage)
    return stage


def write_qc_tables(
    out: Path, entries: Sequence[SlideEntry], config: RunConfig, measured: Mapping[str, Row]
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
    rules, name = load_rules(config.qc.qc_rules), f"qc_{stage.name}"
    rows = qc_files.judged(rows, rules)
    qc_files.write_qc_csv(out / f"{name}.csv", rows)
    qc_files.write_qc_sheet(out / f"{name}.html", rows, title="Quality control", rules=rules)


def qc_rows(out: Path, entries: Sequence[SlideEntry], stage: QcStage) -> list[dict[str, Score]]:
    """The line of each slide: what its qc.json says, or why there is none."""
    rows = list[dict[str, Score]]()
    for entry in entries:
        folder, found = stage.folder(entry.slide_id), dict[str, Any]()
        try:
            if (document := _qc_document(out / folder / QC_JSON)) is not None:
                found = {"status": "done", **document["facts"], **document["scores"]}
                found["warnings"] = "|".join(document["warnings"])
            elif (failure := read_failure(out, entry.slide_id)) is not None:
                found["warnings"] = failure.error
        except ConfigError as damage:  # this slide's own
            found["warnings"] = f"{QC_JSON} is damaged: {damage}"
        if found:
            of_slide = {"slide_id": entry.slide_id, "slide_path": entry.slide_path}
            rows.append({**of_slide, "folder": folder, **entry.more, "status": "failed"} | found)
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


def failing_rules(rows: list[dict[str, Score]], rules: Sequence[str]) -> list[tuple[str, QcRule]]:
    """(slide_id, rule) for each rule that holds for a slide that was looked at."""
    parsed = [parse_rule(rule) for rule in rules]
    done = [row for row in rows if row["status"] == "done"]
    return [(str(row["slide_id"]), rule) for row in done for rule in parsed if qc_fail(row, rule)]


def write_measures(out: Path, entries: Sequence[SlideEntry], config: RunConfig) -> dict[str, Row]:
    """Writes `measures_GRID.csv`, a row per slide of the run that has a tile; the rows by slide.

    Memory: some kB per slide of the folder and of the reference's.
    """
    stage = _stage(config)
    stored, folder = measured_slides(out, stage), config.output.measures_reference
    known = [entry for entry in entries if entry.slide_id in stored]
    rows = [stored[entry.slide_id] for entry in known]
    reference = rows if folder is None else list(measured_slides(folder, stage).values())
    rows = [{**row, **far} for row, far in zip(rows, distances(rows, reference))]
    lines = [{"slide_id": e.slide_id, **e.more, **row} for e, row in zip(known, rows)]
    more = dict.fromkeys(name for entry in entries for name in entry.more)
    columns = ("slide_id", *_DISTANCES, *_MEASURED, *more)
    write_table(out / f"{MEASURED}_{stage.tiles.grid}.csv", lines, columns)
    return {entry.slide_id: row for entry, row in zip(known, rows)}


def check_reference(config: RunConfig) -> None:
    """Refuses a reference that has no measures of this run's grid.

    Raises:
        ConfigError: so it is, or measures are not asked for.
        StoreError: it is no results folder.
    """
    if (folder := config.output.measures_reference) is None:
        return
    asked, got = config.output.measures, "none; pass --measures"
    require(asked, "measures_reference must go with measures", got, error=ConfigError)
    rule = f"measures_reference must be a results folder with {SLIDES}/ in it"
    require((folder / SLIDES).is_dir(), rule, repr(str(folder)), error=StoreError)
    stage = _stage(config)
    got = f"none in {str(folder)!r}; run it with --measures and the same settings of tiles"
    rule = f"measures_reference must hold {stage.address}"
    require(measured_slides(folder, stage), rule, got, error=ConfigError)


def measured_slides(folder: Path, stage: MeasuresStage) -> dict[str, Row]:
    """What the stage's results say of each slide that has them and a tile."""
    known = ((lg.slide_id, lg.stages.get(stage.address)) for lg in load_ledgers(folder))
    facts = {slide_id: record.facts for slide_id, record in known if record}
    rows = {name: {n: f[n] for n in _MEASURED if n in f} for name, f in facts.items()}
    return {slide_id: row for slide_id, row in rows.items() if row}


def distances(rows: Sequence[Row], reference: Sequence[Row]) -> list[dict[str, float]]:
    """Per slide its distance to the reference: in all measures, and in the stains' alone.

    The root of the mean of z² over the columns that the slide has, z = (value - median) /
    (1.4826 MAD): median, and MAD the median absolute deviation, are of the reference's slides,
    the divisor is at least 0.001 max(1, |median|). Fewer than 5 slides say nothing of what is
    usual: there is no distance then.
    """
    usual = {name: qc_files.usual_of([row.get(name) for row in reference]) for name in _MEASURED}
    named = [{n: _distance(row, of, usual) for n, of in _DISTANCES.items()} for row in rows]
    return [{name: d for name, d in found.items() if d is not None} for found in named]


def _distance(row: Row, names: Sequence[str], usual: Mapping[str, Usual]) -> float | None:
    known = [(row[name], found) for name in names if name in row and (found := usual[name])]
    squares = [qc_files.deviations(value, found) ** 2 for value, found in known]
    return math.sqrt(sum(squares) / len(squares)) if squares else None


def _stage(config: RunConfig) -> MeasuresStage:
    stages = stages_of(config, "tile", Models())
    return next(stage for stage in stages if isinstance(stage, MeasuresStage))
