"""Measures of slides side by side: a table of them, and how far each lies from what is usual."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from thinsection.errors import ConfigError, StoreError, require
from thinsection.files.atomic import write_table
from thinsection.report.qc_files import Usual, deviations, usual_of
from thinsection.slide.cohort import SlideEntry
from thinsection.stages.config import RunConfig
from thinsection.stages.measures import STAIN_COLUMNS, MeasuresStage
from thinsection.stages.request import Models, stages_of
from thinsection.store.ledger import SLIDES, load_ledgers
from thinsection.store.tile_tables import MEASURED
from thinsection.tiles.measures import MEASURES

Row = Mapping[str, float]

_MEASURED = (*STAIN_COLUMNS, *MEASURES)
_DISTANCES = {"measures_distance": _MEASURED, "measures_stain_distance": STAIN_COLUMNS}


def write_measures(out: Path, entries: Sequence[SlideEntry], config: RunConfig) -> dict[str, Row]:
    """Writes `measures_GRID.csv`, a row per slide of the run that has a tile; the rows by slide.

    Memory: some kB per slide of the folder and of the reference's.
    """
    stage = _stage(config)
    stored, folder = measured_slides(out, stage), config.output.measures_reference
    rows = {e.slide_id: stored[e.slide_id] for e in entries if e.slide_id in stored}
    reference = rows if folder is None else measured_slides(folder, stage)
    far = distances(list(rows.values()), list(reference.values()))
    found: dict[str, Row] = {
        slide_id: {**rows[slide_id], **each} for slide_id, each in zip(rows, far)
    }
    more = {entry.slide_id: entry.more for entry in entries}
    lines = [{"slide_id": slide_id, **more[slide_id], **row} for slide_id, row in found.items()]
    columns = (
        "slide_id",
        *_DISTANCES,
        *_MEASURED,
        *dict.fromkeys(n for m in more.values() for n in m),
    )
    write_table(out / f"{MEASURED}_{stage.tiles.grid}.csv", lines, columns)
    return found


def check_reference(config: RunConfig) -> None:
    """Refuses a reference that has no measures of this run's grid.

    Raises:
        ConfigError: so it is, or measures are not asked for.
        StoreError: it is no results folder.
    """
    folder = config.output.measures_reference
    if folder is None:
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
    found = {}
    for ledger in load_ledgers(folder):
        if (record := ledger.stages.get(stage.address)) is not None:
            found[ledger.slide_id] = {n: record.facts[n] for n in _MEASURED if n in record.facts}
    return {slide_id: row for slide_id, row in found.items() if row}


def distances(rows: Sequence[Row], reference: Sequence[Row]) -> list[dict[str, float]]:
    """Per slide its distance to the reference: in all measures, and in the stains' alone.

    The root of the mean of z² over the columns that the slide has, z = (value - median) /
    (1.4826 MAD): median, and MAD the median absolute deviation, are of the reference's slides,
    the divisor is at least 0.001 max(1, |median|). Fewer than 5 slides say nothing of what is
    usual: there is no distance then.
    """
    usual = {name: usual_of([row.get(name) for row in reference]) for name in _MEASURED}
    named = [{n: _distance(row, of, usual) for n, of in _DISTANCES.items()} for row in rows]
    return [{name: d for name, d in found.items() if d is not None} for found in named]


def _distance(row: Row, names: Sequence[str], usual: Mapping[str, Usual]) -> float | None:
    known = [(row[name], found) for name in names if name in row and (found := usual[name])]
    squares = [deviations(value, found) ** 2 for value, found in known]
    return math.sqrt(sum(squares) / len(squares)) if squares else None


def _stage(config: RunConfig) -> MeasuresStage:
    stages = stages_of(config, "tile", Models())
    return next(stage for stage in stages if isinstance(stage, MeasuresStage))
