"""What a run says of each slide, and the tables that are made of it."""

import csv
import io
import json
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from thinsection.errors import QcExclusion
from thinsection.files.atomic import write_json, write_text
from thinsection.slide.cohort import SlideEntry
from thinsection.store.ledger import load_ledger

ERROR_NAME, TRACEBACK_NAME = "error.json", "traceback.txt"
SUMMARY_COLUMNS = (
    *("slide_id", "slide_path", "status", "patient_id", "label", "split"),
    *("reader", "width", "height", "mpp_x", "mpp_y", "vendor", "tissue_fraction", "num_tiles"),
    *("encoder", "dim", "slide_encoder", "slide_dim", "warnings"),
)
FAILED_COLUMNS = ("slide_id", "slide_path", "stage", "error", "traceback")

FIRST_STAGE = "tissue"

Status = Literal["done", "skipped", "excluded", "failed"]


@dataclass(frozen=True, kw_only=True)
class SlideResult:
    """The end of one slide in one run: plain values that travel between processes.

    Attributes:
        slide_id, slide_path: as in the cohort.
        status: 'done' now, 'skipped' because it was done before, 'excluded' by a QC rule, 'failed'.
        stage: where it failed: open, tissue, qc, tile, decode, encode, aggregate, write.
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
    """Writes error.json and traceback.txt into the slide's folder and returns the result."""
    folder = out / entry.slide_id
    excluded = isinstance(error, QcExclusion)
    message = str(error) if excluded else f"{type(error).__name__}: {error}".replace("\n", " ")
    result = SlideResult(
        slide_id=entry.slide_id,
        slide_path=entry.slide_path,
        status="excluded" if excluded else "failed",
        stage=stage,
        error=message,
    )
    write_text(folder / TRACEBACK_NAME, "".join(traceback.format_exception(error)))
    write_json(folder / ERROR_NAME, asdict(result))
    return result


def clear_failure(out: Path, slide_id: str) -> None:
    """Removes what an earlier failure of the slide left."""
    for name in (ERROR_NAME, TRACEBACK_NAME):
        (out / slide_id / name).unlink(missing_ok=True)


def read_result(out: Path, entry: SlideEntry, stage: str) -> SlideResult | None:
    """The state of a slide as its folder tells it; None where it was not finished nor failed."""
    folder = out / entry.slide_id
    try:
        return SlideResult(**json.loads((folder / ERROR_NAME).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        pass
    ledger = load_ledger(folder)
    if stage not in ledger.stages:
        return None
    facts = dict(ledger.slide)
    for record in ledger.stages.values():
        facts |= record.facts
    return SlideResult(
        slide_id=entry.slide_id, slide_path=entry.slide_path, status="done", facts=facts
    )


def write_tables(out: Path, entries: Sequence[SlideEntry], results: Iterable[SlideResult]) -> None:
    """Writes summary.csv (a row per slide) and failed.csv (a row per failed one), atomically."""
    by_id = {result.slide_id: result for result in results}
    rows, failed = [], []
    known = {entry.slide_id for entry in entries}
    others = [entry for entry in _entries_in(out) if entry.slide_id not in known]
    for entry in others:  # of earlier runs on this folder: their rows stay
        found = read_result(out, entry, FIRST_STAGE)
        if found:
            by_id[entry.slide_id] = found
    for entry in [*entries, *others]:
        result = by_id.get(entry.slide_id)
        row = {name: value for name, value in asdict(entry).items() if name in SUMMARY_COLUMNS}
        row["status"] = result.status if result else "missing"
        if result:
            row |= {k: v for k, v in result.facts.items() if k in SUMMARY_COLUMNS and k not in row}
        rows.append(row)
        if result and result.status in ("failed", "excluded"):
            failed.append(
                {
                    "slide_id": entry.slide_id,
                    "slide_path": entry.slide_path,
                    "stage": result.stage,
                    "error": result.error,
                    "traceback": f"{entry.slide_id}/{TRACEBACK_NAME}",
                }
            )
    write_text(out / "summary.csv", _csv(SUMMARY_COLUMNS, rows))
    write_text(out / "failed.csv", _csv(FAILED_COLUMNS, failed))


def _entries_in(out: Path) -> list[SlideEntry]:
    """Slides that have a folder in the output, from what the folder says of them."""
    found = []
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        slide = load_ledger(folder).slide
        if not slide:
            try:
                slide = json.loads((folder / ERROR_NAME).read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):
                continue
        found.append(
            SlideEntry(
                slide_id=folder.name,
                slide_path=str(slide.get("slide_path", "")),
                patient_id=slide.get("patient_id"),
                label=slide.get("label"),
                split=slide.get("split"),
            )
        )
    return found


def _csv(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
