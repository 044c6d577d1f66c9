"""Tables that stages write for a folder beside the summary: of measures and of quality control.

measures_GRID.csv has each slide's distance from the usual values; qc_NAME.csv and qc_NAME.html
have its verdict.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from thinsection.cells.table import PREFIX
from thinsection.config import coerce, nearest
from thinsection.errors import ConfigError, StoreError
from thinsection.files.atomic import read_table, write_table
from thinsection.qc import qc_fail
from thinsection.qc.checks.check import QcCheck, Score
from thinsection.qc.edits import EDITED_AREAS
from thinsection.qc.histoqc_pictures import notes_on_row
from thinsection.qc.pipeline import Usable
from thinsection.qc.result import usable_mm2
from thinsection.qc.rules import QcRule, is_known_column, notes_on_rules, parse_rule
from thinsection.report.qc_sheet import (
    Usual,
    deviations,
    judge_rows,
    usual_of,
    write_qc_csv,
    write_qc_sheet,
)
from thinsection.report.stored import QC_FILE, has_qc, read_qc
from thinsection.report.verdict import VerdictRule, load_rules
from thinsection.stages.stage import AnyStage
from thinsection.store.ledger import SLIDES, SlideLedger, load_ledgers
from thinsection.store.outcome import KnownSlide
from thinsection.store.tile_tables import MEASURED, TILES
from thinsection.tiles.filters import MEASURES
from thinsection.tiles.transforms import STAIN_COLUMNS
from thinsection.types import Document, counted

# ends of the facts about cells that the page of quality control shows
_CELL_VALUES = (":count", ":per_mm2", ":area_um2_mean")
MEASURED_COLUMNS = (*STAIN_COLUMNS, *MEASURES)
# column -> columns that enter the distance
DISTANCES = {
    "measures_distance": MEASURED_COLUMNS,
    "measures_stain_distance": STAIN_COLUMNS,
}

Row = Mapping[str, float]


def measures_table(out: Path, grid: str) -> Path:
    """Path of the table of measures for a grid."""
    return out / f"{MEASURED}_{grid}.csv"


def write_measures(
    out: Path,
    slides: Sequence[KnownSlide],
    address: str,
    reference: Path | None,
) -> None:
    """Writes `measures_GRID.csv` with one row per slide of the folder that has a tile.

    Args:
        out: the results folder.
        slides: all slides of the folder.
        address: address of the measures of a grid.
        reference: results folder whose slides define the usual values; None takes those of `out`.

    Memory: some kB per slide of the folder and of the reference.
    """
    stored = measures_of([slide.ledger for slide in slides], address)
    usual_rows = stored
    if reference is not None:
        usual_rows = measures_of(load_ledgers(reference), address)
    measured = [slide for slide in slides if slide.slide_id in stored]
    rows = [stored[slide.slide_id] for slide in measured]
    distances_of_rows = distances(rows, list(usual_rows.values()))
    lines = [
        {"slide_id": slide.slide_id, **slide.more, **row, **row_distances}
        for slide, row, row_distances in zip(
            measured, rows, distances_of_rows, strict=True
        )
    ]
    more: dict[str, None] = {}
    for slide in measured:
        more |= dict.fromkeys(slide.more)
    columns = ("slide_id", *DISTANCES, *MEASURED_COLUMNS, *more)
    write_table(measures_table(out, address.partition("/")[0]), lines, columns)


def check_reference(folder: Path, address: str) -> None:
    """Raises an error if a folder for comparison has no measures of this address.

    Raises:
        ConfigError: it has none.
        StoreError: it is not a results folder.
    """
    if not (folder / SLIDES).is_dir():
        raise StoreError(
            f"measures_reference must be a results folder that contains {SLIDES}/, got "
            f"{str(folder)!r}"
        )
    if not measures_of(load_ledgers(folder), address):
        raise ConfigError(
            f"measures_reference must contain {address}, got none in {str(folder)!r}; run "
            "it with measures=True and the same tile settings"
        )


def measures_of(ledgers: Iterable[SlideLedger], address: str) -> dict[str, Row]:
    """Measures from each ledger; slides without measures or tiles are left out."""
    rows: dict[str, Row] = {}
    for ledger in ledgers:
        record = ledger.stages.get(address)
        facts = record.facts if record else {}
        row = {name: facts[name] for name in MEASURED_COLUMNS if name in facts}
        if row:
            rows[ledger.slide_id] = row
    return rows


def distances(rows: Sequence[Row], reference: Sequence[Row]) -> list[dict[str, float]]:
    """Two distances of each slide from the reference: in all measures, and in the stains alone.

    The distance is the root of the mean of z² over the columns that the slide has, where
    z = (value - median) / (1.4826 MAD). The median, and MAD, the median absolute deviation, come
    from the reference's slides; the divisor is at least 0.001 max(1, |median|). Fewer than 5
    slides do not define usual values, so that there is no distance.
    """
    usual = {
        name: usual_of([row.get(name) for row in reference])
        for name in MEASURED_COLUMNS
    }
    distances_of_rows = []
    for row in rows:
        row_distances = {}
        for name, columns in DISTANCES.items():
            distance = _distance(row, columns, usual)
            if distance is not None:
                row_distances[name] = distance
        distances_of_rows.append(row_distances)
    return distances_of_rows


def _distance(
    row: Row, columns: Sequence[str], usual: Mapping[str, Usual]
) -> float | None:
    """Root mean square of a slide's deviations; None if no column can be compared."""
    squares = []
    for name in columns:
        usual_values = usual[name]
        if name in row and usual_values:
            squares.append(deviations(row[name], usual_values) ** 2)
    if not squares:
        return None
    return math.sqrt(sum(squares) / len(squares))


QcRow = dict[str, Score]


def qc_table_name(stage: AnyStage) -> str:
    """Name of the table and the page of a stage, without suffix: 'qc_auto'."""
    return stage.address.removeprefix(f"{SLIDES}/")


def write_qc_tables(
    out: Path,
    slides: Sequence[KnownSlide],
    stage: AnyStage,
    *,
    checks: Sequence[QcCheck],
    fail_rules: Sequence[str],
    verdict_rules: Path | None,
) -> dict[str, str]:
    """Writes qc_NAME.csv and qc_NAME.html for all slides that quality control has checked.

    If the folder has measures of tiles that passed the same checks, these become further columns.

    Args:
        out: the results folder.
        slides: all slides of the folder.
        stage: stage of quality control.
        checks: checks of the stage's pipeline.
        fail_rules: rules of `--qc-fail`.
        verdict_rules: TOML file with the rules for the verdicts; None takes the built-in ones.

    Returns:
        The slides with the verdict `exclude` that no rule of `--qc-fail` excludes, and why.
    """
    rows = qc_rows(slides, stage)
    measured = _measured_columns(out, slides, stage.address)
    failing = failing_rules(rows, fail_rules, checks)
    for row in rows:
        slide_id = str(row["slide_id"])
        row.update(measured.get(slide_id, {}))
        fails = [str(rule) for failing_id, rule in failing if failing_id == slide_id]
        row["fails"] = "|".join(fails)
    rules = load_rules(verdict_rules)
    name = qc_table_name(stage)
    cells = _cell_values(slides, stage.address)
    rows = judge_rows(rows, rules)
    # after the verdicts: a slide is not odd because it has many cells
    for row in rows:
        row.update(cells.get(str(row["slide_id"]), {}))
    write_qc_csv(out / f"{name}.csv", rows)
    write_qc_sheet(
        out / f"{name}.html",
        rows,
        title="Quality control",
        rules=rules,
        overviews=_overviews(slides, stage),
        notes=[
            *_notes_of_page(rows, checks),
            *_notes_on_fail_rules(rows, fail_rules, checks),
            *_notes_on_verdict_rules(rows, rules if verdict_rules else (), checks),
        ],
    )
    return {
        str(row["slide_id"]): str(row["why"])
        for row in rows
        if row["verdict"] == "exclude" and not row["fails"]
    }


def _notes_of_page(rows: Sequence[QcRow], checks: Sequence[QcCheck]) -> list[str]:
    """Notes on checks that were left out, each with the number of slides."""
    checked = [row for row in rows if row["status"] == "done"]
    num_slides: Counter[str] = Counter()
    for row in checked:
        num_slides.update(notes_on_row(checks, row))
    slides = counted(len(checked), "slide")
    return [f"{number} of {slides}: {note}" for note, number in num_slides.items()]


def _notes_on_fail_rules(
    rows: Sequence[QcRow], rules: Sequence[str], checks: Sequence[QcCheck]
) -> list[str]:
    """Notes on rules of `--qc-fail` whose column no checked slide has."""
    checked = [row for row in rows if row["status"] == "done"]
    if not checked:
        return []
    return notes_on_rules({name for row in checked for name in row}, rules, checks)


def _notes_on_verdict_rules(
    rows: Sequence[QcRow], rules: Sequence[VerdictRule], checks: Sequence[QcCheck]
) -> list[str]:
    """Notes on a user's rules for verdicts whose column no slide has."""
    checked = [row for row in rows if row["status"] == "done"]
    notes = []
    for rule in rules:
        column = parse_rule(rule.rule).column
        if checked and not any(is_known_column(row, column, checks) for row in checked):
            names = dict.fromkeys(name for row in checked for name in row)
            notes.append(
                f"the rule {rule.rule!r} for verdicts never applies, because no slide has the "
                f"column {column!r}{nearest(column, names)}"
            )
    return notes


def _overviews(slides: Sequence[KnownSlide], stage: AnyStage) -> dict[str, str]:
    """Path of the first overview of each slide that shows the marks of these checks."""
    paths: dict[str, str] = {}
    for slide in slides:
        for address, record in slide.ledger.stages.items():
            is_overview = address.endswith("/overviews") and record.files
            if is_overview and stage.address in record.needs:
                paths.setdefault(slide.slide_id, next(iter(record.files)))
    return paths


def qc_rows(slides: Sequence[KnownSlide], stage: AnyStage) -> list[QcRow]:
    """Row of each slide of a folder: its stored values, or why there are none."""
    rows: list[QcRow] = []
    for slide in slides:
        folder = stage.folder(slide.slide_id)
        columns = _qc_columns(slide, slide.ledger.out / folder)
        if columns:
            row: QcRow = {
                "slide_id": slide.slide_id,
                "slide_path": slide.path_in_tables,
                "folder": folder,
            }
            rows.append(row | dict(slide.more) | columns)
    # a table with corrected slides says of each slide how many areas were corrected
    if any(EDITED_AREAS in row for row in rows):
        for row in rows:
            if row["status"] == "done":
                row[EDITED_AREAS] = int(row.get(EDITED_AREAS, 0))
    return rows


def _qc_columns(slide: KnownSlide, folder: Path) -> QcRow:
    """Status, warnings and scores of a slide; empty if quality control did not check it."""
    if not has_qc(folder):
        if slide.failure is not None and slide.failure.status == "failed":
            return {"status": "failed", "warnings": slide.failure.error}
        return {}
    try:
        document = coerce(read_qc(folder).document, Document, QC_FILE)
        facts = coerce(document.get("facts"), Document, "facts")
        scores = coerce(document.get("scores"), Document, "scores")
        warnings = coerce(document.get("warnings"), tuple[str, ...], "warnings")
        pipeline = coerce(document["pipeline"], Document, "pipeline")
        form = coerce(
            pipeline.get("pixels_to_use", "absolute"), Usable, "pixels_to_use"
        )
        edits = coerce(document.get("edits", {}), Document, "edits")
        if edits:
            scores = scores | coerce(edits["scores"], Document, "edits.scores")
            warnings += coerce(edits["warnings"], tuple[str, ...], "edits.warnings")
        size_l0 = coerce(document["size_l0"], tuple[int, int], "size_l0")
        size_th = coerce(document["size_th"], tuple[int, int], "size_th")
    except (ConfigError, KeyError, StoreError) as damage:
        # only this slide is damaged; other rows stay
        return {"status": "failed", "warnings": f"{QC_FILE} is damaged: {damage}"}
    columns: QcRow = {"status": "done", **facts, **scores}
    columns |= usable_mm2(facts, scores, form, size_l0, size_th)
    columns["warnings"] = "|".join(warnings)
    return columns


def _measured_columns(
    out: Path, slides: Sequence[KnownSlide], mask_address: str
) -> dict[str, dict[str, float]]:
    """Rows of measures_GRID.csv by slide, for the first grid that is based on a tissue mask."""
    grids = set()
    for slide in slides:
        for address, record in slide.ledger.stages.items():
            grid, _, name = address.partition("/")
            if name == TILES and mask_address in record.needs:
                grids.add(grid)
    columns: dict[str, dict[str, float]] = {}
    for grid in sorted(grids):
        table = measures_table(out, grid)
        for line in read_table(table) if table.is_file() else ():
            numbers = {
                name: float(line[name])
                for name in (*DISTANCES, *MEASURED_COLUMNS)
                if line.get(name)
            }
            columns.setdefault(line["slide_id"], numbers)
    return columns


def _cell_values(
    slides: Sequence[KnownSlide], mask_address: str
) -> dict[str, dict[str, float]]:
    """Number, density and area of the cells of each slide, by slide id.

    The density is of the tissue that these checks have left.
    """
    values: dict[str, dict[str, float]] = {}
    for slide in slides:
        stages = slide.ledger.stages
        for address, record in stages.items():
            if mask_address not in record.needs or f"/{PREFIX}" not in address:
                continue
            for need in record.needs:
                facts = record.facts
                if need in stages:
                    facts = stages[need].facts | facts
                for name, value in facts.items():
                    of_cells = name.startswith(PREFIX) and name.endswith(_CELL_VALUES)
                    if of_cells and value is not None:
                        values.setdefault(slide.slide_id, {})[name] = float(value)
    return values


def failing_rules(
    rows: Sequence[QcRow], rules: Sequence[str], checks: Sequence[QcCheck] = ()
) -> list[tuple[str, QcRule]]:
    """(slide_id, rule) for each rule that applies to a checked slide."""
    parsed = [parse_rule(rule) for rule in rules]
    failing = []
    for row in rows:
        if row["status"] != "done":
            continue
        for rule in parsed:
            if qc_fail(row, rule, checks=checks):
                failing.append((str(row["slide_id"]), rule))
    return failing
