"""Facts of slides, their results in a run, records of failures, and the slides of a folder."""

import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from thinsection.config import from_mapping
from thinsection.errors import QcExclusion, error_words
from thinsection.files.atomic import read_json, write_json
from thinsection.files.urls import is_url, without_secrets
from thinsection.slide.cohort import SlideEntry
from thinsection.store.ledger import (
    FAILURE_NAME,
    OF_COHORTS,
    SLIDES,
    SlideLedger,
    load_ledgers,
)
from thinsection.store.slide_ids import slide_place
from thinsection.types import Document, PlainValues, counted

if TYPE_CHECKING:
    from thinsection.slide import Slide

LOST_STAGE = "worker"
# fact of a column that the caller has stored: its name, type, categories and colours; no table of
# slides has it
COLUMN_FACT = "column"
_COHORT_COLUMNS = ("slide_path", "image", *OF_COHORTS)  # cohort columns of each slide

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
        parts.append(f"{facts['pixels_to_use']:,.0f} pixels of usable tissue")
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


@dataclass(frozen=True, kw_only=True)
class KnownSlide:
    """Slide of a results folder, from any invocation."""

    slide_id: str
    ledger: SlideLedger  # empty if the slide failed before any stage was done
    failure: SlideResult | None  # failure in the last invocation that processed it
    cohort: PlainValues  # slide_path, image, patient_id, label and split
    more: Mapping[str, str]  # further columns of the cohort table

    @property
    def slide_path(self) -> str:
        """Path of the slide's file, '' if it is not recorded."""
        return str(self.cohort.get("slide_path") or "")

    @property
    def path_in_tables(self) -> str:
        """Path of the slide's file for the tables of the folder.

        It is relative to the folder if the slide lies beside or below it, so that a project that
        moves as a whole keeps its paths; then the table is also a cohort.
        """
        home = self.ledger.out.absolute()
        facts = self.ledger.slide | {"slide_path": self.slide_path}
        path = slide_place(replace(self.ledger, slide=facts))
        is_local = path and not is_url(path) and Path(path).exists()
        if is_local and Path(path).absolute().is_relative_to(home.parent):
            return os.path.relpath(Path(path).absolute(), home)
        return self.slide_path


def known_slides(
    out: Path, read: Mapping[str, SlideLedger] | None = None
) -> list[KnownSlide]:
    """Every slide of a results folder by slide id, for tables and pages.

    Args:
        out: the results folder.
        read: ledgers, by slide id, that were read before and are not read again.

    Memory: some kB per slide.
    """
    ledgers = {ledger.slide_id: ledger for ledger in load_ledgers(out, read)}
    failed = {path.parent.name for path in (out / SLIDES).glob(f"*/{FAILURE_NAME}")}
    slides = []
    for slide_id in sorted(ledgers.keys() | failed):
        ledger = ledgers.get(slide_id) or SlideLedger(out=out, slide_id=slide_id)
        failure = read_failure(out, slide_id) if slide_id in failed else None
        entry = None if failure is None else read_failed_entry(out, slide_id)
        cohort = {name: ledger.slide.get(name) for name in _COHORT_COLUMNS}
        more = dict(ledger.slide.get("more") or {})
        if entry is not None:
            # the entry of a failure is newer than the ledger
            for name in _COHORT_COLUMNS:
                cohort[name] = getattr(entry, name) or cohort[name]
            more |= entry.more
        slide = KnownSlide(
            slide_id=slide_id, ledger=ledger, failure=failure, cohort=cohort, more=more
        )
        slides.append(slide)
    return slides


def slide_facts(slide: "Slide", entry: SlideEntry, ledger: SlideLedger) -> Document:
    """Facts of an opened slide, without the columns that the ledger copies from the cohort."""
    mpp_x, mpp_y = slide.slide_mpp or (None, None)
    levels = [
        {"size": list(level.size), "downsample": level.downsample}
        for level in slide.levels
    ]
    facts: Document = {
        "slide_id": entry.slide_id,
        "slide_path": entry.slide_path,
        "image": entry.image,
        "reader": slide.reader,
        "width": slide.size[0],
        "height": slide.size[1],
        "levels": levels,
        "mpp_x": mpp_x,
        "mpp_y": mpp_y,
        "objective_power": slide.objective_power,
        "vendor": slide.vendor,
        "rendering": slide.rendering,
        "warnings": "; ".join(slide.notes),
    }
    for name in (*OF_COHORTS, "more"):
        facts[name] = ledger.slide.get(name)
    return facts


def ledger_facts(ledger: SlideLedger, addresses: Iterable[str]) -> Document:
    """Facts of the slide and of its stages; later stages win, and warnings are joined.

    With stages of several tile grids, their tiles are added up, and warnings name the grid. Tiles
    count once in each grid, also where the embeddings of another tool repeat their number.
    """
    merged: Document = {}
    recorded = {
        name: ledger.stages[name] for name in addresses if name in ledger.stages
    }
    grids = dict.fromkeys(map(grid_of, recorded))
    has_several_grids = len(grids.keys() - {""}) > 1
    warnings = [ledger.damage, ledger.slide.get("warnings") or ""]
    merged.update(ledger.slide)
    num_tiles: dict[str, int] = {}  # by grid
    for address, record in recorded.items():
        merged.update(record.facts)
        merged.pop(COLUMN_FACT, None)
        grid = grid_of(address)
        if "num_tiles" in record.facts:
            num_tiles.setdefault(grid, record.facts["num_tiles"])
        if address == f"{grid}/tiles":
            num_tiles[grid] = record.facts.get("num_tiles", 0)
        warning = record.facts.get("warnings") or ""
        if warning and grid and has_several_grids:
            warning = f"{grid}: {warning}"
        warnings.append(warning)
    if "num_tiles" in merged:
        merged["num_tiles"] = sum(num_tiles.values())
    different = dict.fromkeys(text for text in warnings if text)
    return merged | {"warnings": "; ".join(different)}


def grid_of(address: str) -> str:
    """Tile grid in the address of a stage; '' for a stage that belongs to none."""
    grid = address.partition("/")[0]
    return "" if grid == SLIDES else grid


def cohort_facts(entry: SlideEntry, ledger: SlideLedger) -> Document:
    """Columns of the cohort; `more` keeps columns that only an earlier cohort had."""
    facts = {name: getattr(entry, name) for name in OF_COHORTS}
    facts = {name: value for name, value in facts.items() if value is not None}
    return facts | {"more": {**ledger.slide.get("more", {}), **entry.more}}
