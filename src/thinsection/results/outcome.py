"""Results of a run, slide by slide, and the record of a failure."""

import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from thinsection.config import from_mapping
from thinsection.errors import QcExclusion, error_words
from thinsection.files.atomic import read_json, write_json
from thinsection.files.urls import without_secrets
from thinsection.slide.cohort import SlideEntry
from thinsection.store.ledger import FAILURE_NAME, SLIDES
from thinsection.types import Document, counted

LOST_STAGE = "worker"

Status = Literal["done", "skipped", "empty", "excluded", "failed"]


@dataclass(frozen=True, kw_only=True)
class SlideResult:
    """Result of one slide in one run, as plain values that travel between processes."""

    slide_id: str  # id from the cohort, as is the path
    slide_path: str
    # 'empty': no tile was found, now or earlier; 'excluded': by a QC rule
    status: Status
    # stage of the failure: open, tissue, qc, tile, decode, encode, aggregate, ...
    stage: str = ""
    error: str = ""  # message in one line; '' unless the slide failed
    facts: Document = field(default_factory=dict)  # facts for the summary
    # seconds since the slide before it ended, as slides overlap; 0 if unknown
    seconds: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, entry: SlideEntry, status: Status, facts: Document) -> "SlideResult":
        """Result of a slide of the cohort that did not fail."""
        if status in ("done", "skipped") and facts.get("num_tiles") == 0:
            status = "empty"
        return cls(
            slide_id=entry.slide_id,
            slide_path=entry.slide_path,
            status=status,
            facts=facts,
        )


def slides_done(results: Sequence[SlideResult], things: str = "slides") -> str:
    """'12 of 12 slides': those with all their results, each counted once."""
    ids = {result.slide_id for result in results}
    failed = {result.slide_id for result in results if result.status == "failed"}
    return f"{len(ids - failed)} of {len(ids)} {things}"


def describe(result: SlideResult) -> str:
    """Describes a finished slide in one line."""
    name = result.slide_id
    facts = result.facts
    match result.status:
        case "failed":
            return f"{name}: failed ({result.stage}): {result.error}"
        case "excluded":
            return f"{name}: {result.error}"
        case "empty":
            reason = facts.get("warnings") or "no tile contains enough tissue"
            return f"{name}: empty: {reason}"
        case "skipped":
            before = (
                "skipped, an earlier run completed it with the same settings and input"
            )
            return f"{name}: {before}{_counts(facts)}"
    warning = f" (warning: {facts['warnings']})" if facts.get("warnings") else ""
    return f"{name}: done{_counts(facts)}{warning}"


def _counts(facts: Document) -> str:
    """Counts of a slide for the end of a line: ', 120 tiles, H&E'."""
    parts = []
    if facts.get("num_tiles") is not None:
        parts.append(counted(facts["num_tiles"], "tile"))
    elif facts.get("pixels_to_use") is not None:
        parts.append(f"{facts['pixels_to_use']:.0f} pixels to use")
    if facts.get("fetched_bytes"):
        share = facts["fetched_bytes"] / facts["file_bytes"]
        parts.append(
            f"{share:.0%} of the file fetched in {counted(facts['requests'], 'request')}"
        )
    if facts.get("stain"):
        parts.append(facts["stain"])
    if facts.get("pen_fraction"):
        parts.append(f"pen on {facts['pen_fraction']:.1%} of it removed")
    return "".join(f", {part}" for part in parts)


def record_failure(
    out: Path, entry: SlideEntry, stage: str, error: BaseException
) -> SlideResult:
    """Writes `slides/ID/failure.json` (stage, message, traceback, entry) and returns the result."""
    status: Status = "failed"
    message = without_secrets(error_words(error))
    if isinstance(error, QcExclusion):
        status = "excluded"
    document = {
        "status": status,
        "stage": stage,
        "error": message,
        "entry": asdict(entry),
        "traceback": without_secrets("".join(traceback.format_exception(error))),
    }
    write_json(failure_path(out, entry.slide_id), document)
    return SlideResult(
        slide_id=entry.slide_id,
        slide_path=entry.slide_path,
        status=status,
        stage=stage,
        error=message,
    )


def failure_path(out: Path, slide_id: str) -> Path:
    """`OUT/slides/ID/failure.json`."""
    return out / SLIDES / slide_id / FAILURE_NAME


def read_failure(out: Path, slide_id: str) -> SlideResult | None:
    """Recorded failure of a slide; None if there is none, or it is not readable."""
    try:
        document = read_json(failure_path(out, slide_id))
        values = {
            "slide_id": slide_id,
            "slide_path": str(document["entry"]["slide_path"]),
            "status": document["status"],
            "stage": document["stage"],
            "error": document["error"],
        }
        return from_mapping(SlideResult, values)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_failed_entry(out: Path, slide_id: str) -> SlideEntry | None:
    """Cohort row of a slide with a recorded failure; None as for `read_failure`."""
    try:
        document = read_json(failure_path(out, slide_id))
        return from_mapping(SlideEntry, document["entry"] | {"slide_id": slide_id})
    except (OSError, ValueError, KeyError, TypeError):
        return None
