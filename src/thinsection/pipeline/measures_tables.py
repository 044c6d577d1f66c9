"""Tables of the measures of a folder's slides, and how far each slide is from the usual."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from thinsection.errors import ConfigError, StoreError
from thinsection.files.atomic import write_table
from thinsection.pipeline.tables import KnownSlide
from thinsection.report.qc_sheet import Usual, deviations, usual_of
from thinsection.stages.graph import measures_stage
from thinsection.stages.measures import STAIN_COLUMNS, MeasuresStage
from thinsection.stages.spec import RunSpec
from thinsection.store.ledger import SLIDES, SlideLedger, load_ledgers
from thinsection.store.tile_tables import MEASURED
from thinsection.tiles.measures import MEASURES

MEASURED_COLUMNS = (*STAIN_COLUMNS, *MEASURES)
# column -> columns over which the distance is taken
DISTANCES = {
    "measures_distance": MEASURED_COLUMNS,
    "measures_stain_distance": STAIN_COLUMNS,
}

Row = Mapping[str, float]


def measures_table(out: Path, grid: str) -> Path:
    """Path of the table of measures of a grid."""
    return out / f"{MEASURED}_{grid}.csv"


def write_measures(
    out: Path,
    slides: Sequence[KnownSlide],
    stage: MeasuresStage,
    reference: Path | None,
) -> None:
    """Writes `measures_GRID.csv`, a row per slide of the folder that has a tile.

    Args:
        out: the results folder.
        slides: all of the folder.
        stage: measures of the run's grid.
        reference: results folder whose slides are the usual; None takes those of `out`.

    Memory: some kB per slide of the folder and of the reference's.
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
    """Refuses a reference that has no measures of this run's grid.

    Raises:
        ConfigError: it has none, or measures are not asked for.
        StoreError: it is no results folder.
    """
    folder = spec.output.measures_reference
    if folder is None:
        return
    if not spec.output.measures:
        raise ConfigError(
            "measures_reference must go with measures, got none; pass --measures"
        )
    if not (folder / SLIDES).is_dir():
        raise StoreError(
            f"measures_reference must be a results folder with {SLIDES}/ in it, "
            f"got {str(folder)!r}"
        )
    stage = measures_stage(spec)
    if not measured_slides(folder, stage):
        raise ConfigError(
            f"measures_reference must hold {stage.address}, got none in {str(folder)!r}; "
            "run it with --measures and the same settings of tiles"
        )


def measured_slides(folder: Path, stage: MeasuresStage) -> dict[str, Row]:
    """Measures of each slide of a folder that has them and a tile."""
    return measures_of(load_ledgers(folder), stage)


def measures_of(ledgers: Iterable[SlideLedger], stage: MeasuresStage) -> dict[str, Row]:
    """Measures of each slide whose ledger has them and a tile."""
    rows: dict[str, Row] = {}
    for ledger in ledgers:
        record = ledger.stages.get(stage.address)
        facts = record.facts if record else {}
        row = {name: facts[name] for name in MEASURED_COLUMNS if name in facts}
        if row:
            rows[ledger.slide_id] = row
    return rows


def distances(rows: Sequence[Row], reference: Sequence[Row]) -> list[dict[str, float]]:
    """Per slide its distance to the reference: in all measures, and in the stains' alone.

    The root of the mean of z² over the columns that the slide has, z = (value - median) /
    (1.4826 MAD): median, and MAD the median absolute deviation, are of the reference's slides,
    the divisor is at least 0.001 max(1, |median|). Fewer than 5 slides say nothing of what is
    usual: there is no distance then.
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
    """Root mean square of a slide's deviations; None where no column can be compared."""
    squares = []
    for name in columns:
        usual_values = usual[name]
        if name in row and usual_values:
            squares.append(deviations(row[name], usual_values) ** 2)
    if not squares:
        return None
    return math.sqrt(sum(squares) / len(squares))
