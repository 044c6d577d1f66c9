"""Slides of a results folder, and the tables summary.csv and failed.csv."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from thinsection.files.atomic import write_table
from thinsection.files.urls import is_url
from thinsection.results.outcome import (
    SlideResult,
    failure_path,
    read_failed_entry,
    read_failure,
)
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.facts import OF_COHORTS, ledger_facts
from thinsection.store.claims import equal_slides, slide_place
from thinsection.store.ledger import FAILURE_NAME, SLIDES, SlideLedger, load_ledgers
from thinsection.types import Document, PlainValues

SUMMARY_COLUMNS = (
    "slide_id",
    "slide_path",
    "image",
    "status",
    "patient_id",
    "label",
    "split",
    "reader",
    "width",
    "height",
    "mpp_x",
    "mpp_y",
    "vendor",
    "grid",
    "tile_mpp",
    "stain",
    "tissue_fraction",
    "num_tiles",
    "features",
    "slide_features",
    "also",
    "warnings",
)
FAILED_COLUMNS = ("slide_id", "slide_path", "stage", "error", "details")
_COHORT_COLUMNS = ("slide_path", "image", *OF_COHORTS)  # cohort columns of each slide


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


def write_tables(
    out: Path, slides: Sequence[KnownSlide], waiting: Sequence[SlideEntry] = ()
) -> list[tuple[str, ...]]:
    """Writes summary.csv (a row per slide and grid) and failed.csv (a row per failed slide).

    Slides of earlier runs keep their rows; the files are replaced atomically. Returns the groups
    of slides with equal content; the warnings in their rows name each other.

    Args:
        out: the results folder.
        slides: all slides of the folder, see `known_slides`.
        waiting: slides of this invocation that have not ended; their status is 'missing'.

    Memory: some kB per slide.
    """
    equal = equal_slides(slide.ledger for slide in slides)
    equal_to = {slide_id: ids for ids in equal for slide_id in ids}
    waiting_ids = {entry.slide_id for entry in waiting}
    rows: list[Document] = []
    failed = []
    for slide in slides:
        others = [
            slide_id
            for slide_id in equal_to.get(slide.slide_id, ())
            if slide_id != slide.slide_id
        ]
        note = f"same content as {', '.join(others)}" if others else ""
        for grid_row in grid_rows(slide.ledger):
            row = {"slide_id": slide.slide_id, **slide.cohort, **slide.more}
            row["status"] = "empty" if grid_row.get("num_tiles") == 0 else "done"
            if slide.slide_id in waiting_ids or not slide.ledger.stages:
                row["status"] = "missing"
            if slide.failure is not None:
                row["status"] = slide.failure.status
            row |= grid_row
            row["slide_path"] = slide.path_in_tables
            warnings = (grid_row.get("warnings", ""), note)
            row["warnings"] = "; ".join(text for text in warnings if text)
            rows.append(row)
        if slide.failure is not None:
            details = failure_path(out, slide.slide_id).relative_to(out)
            row = {**slide.more, **asdict(slide.failure), "details": str(details)}
            failed.append(row | {"slide_path": slide.path_in_tables})
    known_ids = {slide.slide_id for slide in slides}
    for entry in waiting:
        if entry.slide_id not in known_ids:
            rows.append({**asdict(entry), **entry.more, "status": "missing"})
    more: dict[str, None] = {}
    for slide in slides:
        more |= dict.fromkeys(slide.more)
    for entry in waiting:
        more |= dict.fromkeys(entry.more)
    rows.sort(key=lambda row: str(row["slide_id"]))
    write_table(out / "summary.csv", rows, (*SUMMARY_COLUMNS, *more))
    write_table(out / "failed.csv", failed, (*FAILED_COLUMNS, *more))
    return equal


def grid_rows(ledger: SlideLedger) -> Iterator[Document]:
    """Facts of a slide, with one row per tile grid, and one row for a slide without grids.

    Columns `features` and `slide_features` list the folders with these prefixes; `also` lists
    the other folders of the grid that contain a file of the slide.
    """
    slide = {name: value for name, value in ledger.slide.items() if value is not None}
    slide = slide.pop("more", {}) | slide
    folders_of: dict[str, list[str]] = {}  # folders by grid
    for address in ledger.stages:
        grid, _, folder = address.partition("/")
        if grid != SLIDES:
            folders_of.setdefault(grid, []).append(folder)
    if not folders_of:
        yield slide | ledger_facts(ledger, list(ledger.stages)) | {"grid": ""}
    for grid, folders in folders_of.items():
        tiles = ledger.stages.get(f"{grid}/tiles")
        addresses = list(tiles.needs) if tiles else []
        addresses += [f"{grid}/{folder}" for folder in folders]
        row = slide | ledger_facts(ledger, addresses)
        row["grid"] = grid
        row["features"] = _without_prefix(folders, "features_")
        row["slide_features"] = _without_prefix(folders, "slide_features_")
        named = ("features_", "slide_features_", "tiles")
        others = [folder for folder in folders if not folder.startswith(named)]
        row["also"] = "|".join(others)
        yield row


def _without_prefix(folders: Sequence[str], prefix: str) -> str:
    """Names of folders with a prefix, without the prefix, as a table cell."""
    labels = [
        folder.removeprefix(prefix) for folder in folders if folder.startswith(prefix)
    ]
    return "|".join(labels)
