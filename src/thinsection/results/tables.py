"""Tables of a results folder: summary.csv and failed.csv."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from thinsection.files.atomic import write_table
from thinsection.qc.edits import EDITED_AREAS
from thinsection.results.cell_columns import add_cell_columns
from thinsection.slide.cohort import SlideEntry
from thinsection.store.ledger import SLIDES, SlideLedger
from thinsection.store.outcome import KnownSlide, failure_path, ledger_facts
from thinsection.store.slide_ids import equal_slides
from thinsection.types import Document

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
    cells = add_cell_columns(rows)
    columns = [*SUMMARY_COLUMNS, *cells, *more]
    if any(row.get(EDITED_AREAS) for row in rows):
        columns.insert(len(SUMMARY_COLUMNS), EDITED_AREAS)
        for row in rows:
            if row["status"] in ("done", "empty", "excluded"):
                row.setdefault(EDITED_AREAS, 0)
    write_table(out / "summary.csv", rows, columns)
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
        for folder in folders:
            address = f"{grid}/{folder}"
            needs = ledger.stages[address].needs
            addresses += [need for need in needs if need.startswith(f"{SLIDES}/")]
            addresses.append(address)
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
