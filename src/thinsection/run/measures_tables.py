"""Tables of the slides' measures, and each slide's distance from the usual values."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from thinsection.errors import ConfigError, StoreError
from thinsection.files.atomic import write_table
from thinsection.report.qc_sheet import Usual, deviations, usual_of
from thinsection.results.tables import KnownSlide
from thinsection.stages.graph import measures_stages
from thinsection.stages.measures import STAIN_COLUMNS, MeasuresStage
from thinsection.stages.spec import RunSpec
from thinsection.store.ledger import SLIDES, SlideLedger, load_ledgers
from thinsection.store.tile_tables import MEASURED
from thinsection.tiles.measures import MEASURES

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
    stage: MeasuresStage,
    reference: Path | None,
) -> None:
    """Writes `measures_GRID.csv` with one row per slide of the folder that has a tile.

    Args:
        out: the results folder.
        slides: all slides of the folder.
        stage: stage of the measures for the run's grid.
        reference: results folder whose slides define the usual values; None takes those of `out`.

    Memory: some kB per slide of the folder and of the reference.
    """
    stored = measures_of([slide.ledger for slide in slides], stage)
    usual_rows = stored if reference is None else measured_slides(reference, stage)
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
    write_table(measures_table(out, stage.tiles.grid), lines, columns)


def check_reference(spec: RunSpec) -> None:
    """Raises an error if a reference has no measures for this run's grid.

    Raises:
        ConfigError: it has none, or the run computes no measures.
        StoreError: it is not a results folder.
    """
    folder = spec.output.measures_reference
    if folder is None:
        return
    if not spec.output.measures:
        raise ConfigError(
            "measures_reference must be combined with measures, got it alone; pass --measures"
        )
    if not (folder / SLIDES).is_dir():
        raise StoreError(
            f"measures_reference must be a results folder that contains {SLIDES}/, got "
            f"{str(folder)!r}"
        )
    for stage in measures_stages(spec):
        if measured_slides(folder, stage):
            continue
        raise ConfigError(
            f"measures_reference must contain {stage.address}, got none in {str(folder)!r}; run "
            "it with --measures and the same tile settings"
        )


def measured_slides(folder: Path, stage: MeasuresStage) -> dict[str, Row]:
    """Measures of each slide of a folder; slides without measures or tiles are left out."""
    return measures_of(load_ledgers(folder), stage)


def measures_of(ledgers: Iterable[SlideLedger], stage: MeasuresStage) -> dict[str, Row]:
    """Measures from each ledger; slides without measures or tiles are left out."""
    rows: dict[str, Row] = {}
    for ledger in ledgers:
        record = ledger.stages.get(stage.address)
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
