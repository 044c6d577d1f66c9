"""What a run says of each slide, the one failure record, and the tables that are made of both."""

import json
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from thinsection.errors import QcExclusion
from thinsection.files.atomic import write_json
from thinsection.files.tables import write_table
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.labels import features_label
from thinsection.stages.stage import ledger_facts
from thinsection.store.ledger import SLIDES, SlideLedger, load_ledger, load_ledgers

FAILURE_NAME = "failure.json"
SUMMARY_COLUMNS = (
    *("slide_id", "slide_path", "status", "patient_id", "label", "split"),
    *("reader", "width", "height", "mpp_x", "mpp_y", "vendor", "grid", "tissue_fraction"),
    *("num_tiles", "features", "slide_features", "also", "warnings"),
)
FAILED_COLUMNS = ("slide_id", "slide_path", "stage", "error", "details")
LOST_STAGE = "worker"

Status = Literal["done", "skipped", "excluded", "failed"]


@dataclass(frozen=True, kw_only=True)
class SlideResult:
    """The end of one slide in one run: plain values that travel between processes.

    Attributes:
        slide_id, slide_path: as in the cohort.
        status: 'done' now, 'skipped' because it was done before, 'excluded' by a QC rule, 'failed'.
        stage: where it failed: open, tissue, qc, tile, decode, encode, aggregate, write, ...
        error: the message, one line, '' unless failed.
        facts: what the summary shows.
    """

    slide_id: str
    slide_path: str
    status: Status
    stage: str = ""
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def record_failure(out: Path, entry: SlideEntry, stage: str, error: BaseException) -> SlideResult:
    """Writes `slides/ID/failure.json` (stage, message, traceback, entry) and returns the result."""
    excluded = isinstance(error, QcExclusion)
    message = str(error) if excluded else f"{type(error).__name__}: {error}".replace("\n", " ")
    result = SlideResult(
        slide_id=entry.slide_id,
        slide_path=entry.slide_path,
        status="excluded" if excluded else "failed",
        stage=stage,
        error=message,
    )
    document = {
        **{name: getattr(result, name) for name in ("status", "stage", "error")},
        "entry": asdict(entry),
        "traceback": "".join(traceback.format_exception(error)),
    }
    write_json(failure_path(out, entry.slide_id), document)
    return result


def failure_path(out: Path, slide_id: str) -> Path:
    """`OUT/slides/ID/failure.json`."""
    return out / SLIDES / slide_id / FAILURE_NAME


def clear_failure(out: Path, slide_id: str) -> None:
    """Removes what an earlier failure of the slide left."""
    failure_path(out, slide_id).unlink(missing_ok=True)


def read_failure(out: Path, slide_id: str) -> SlideResult | None:
    """The failure that is recorded of a slide; None where there is none, or it is not readable."""
    try:
        document = json.loads(failure_path(out, slide_id).read_text(encoding="utf-8"))
        return SlideResult(
            slide_id=slide_id,
            slide_path=str(document["entry"]["slide_path"]),
            **{name: document[name] for name in ("status", "stage", "error")},
        )
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
        first["status"] = result.status if result else "done" if ledger.stages else "missing"
        rows += [first | row for row in grid_rows(ledger)]
        if result and result.status in ("failed", "excluded"):
            details = failure_path(out, slide_id).relative_to(out)
            failed.append(asdict(result) | {"details": str(details)})
    write_table(out / "summary.csv", rows, SUMMARY_COLUMNS)
    write_table(out / "failed.csv", failed, FAILED_COLUMNS)


def grid_rows(ledger: SlideLedger) -> Iterator[dict[str, Any]]:
    """What a slide has, a row per tile grid; one row for a slide without any.

    Columns `features` and `slide_features` name what lies in the folders of these names, `also`
    the other folders of the grid that hold a file of the slide.
    """
    slide = {name: value for name, value in ledger.slide.items() if value is not None}
    grids = {a.split("/")[0]: None for a in ledger.stages if not a.startswith(f"{SLIDES}/")}
    if not grids:
        yield slide | ledger_facts(ledger, list(ledger.stages)) | {"grid": ""}
    for grid in grids:
        folders = [a.split("/")[1] for a in ledger.stages if a.startswith(f"{grid}/")]
        tiles = ledger.stages.get(f"{grid}/tiles")
        addresses = [*(tiles.needs if tiles else ()), *(f"{grid}/{name}" for name in folders)]
        pooled = [n.removeprefix("slide_features_") for n in folders if n.startswith("slide_")]
        features = [features_label(n) for n in folders if n.startswith("features_")]
        also = [n for n in folders if not n.startswith(("features_", "slide_features_", "tiles"))]
        yield (
            slide
            | ledger_facts(ledger, addresses)
            | {
                "grid": grid,
                "features": "|".join(features),
                "slide_features": "|".join(pooled),
                "also": "|".join(also),
            }
        )


def done_result(out: Path, entry: SlideEntry, addresses: Sequence[str]) -> SlideResult | None:
    """The result of a slide whose ledger names all these stages and that has no failure."""
    if read_failure(out, entry.slide_id) is not None:
        return None
    ledger = load_ledger(out, entry.slide_id)
    if not all(address in ledger.stages for address in addresses):
        return None
    facts = ledger_facts(ledger, list(addresses))
    return SlideResult(
        slide_id=entry.slide_id, slide_path=entry.slide_path, status="done", facts=facts
    )
