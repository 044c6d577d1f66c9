"""Exports results to QuPath: a GeoJSON per slide, outlines as annotations, tiles as detections.

A QuPath project stores its objects in Java's serialised form (`data.qpdata`), which only QuPath can
write. Therefore a script imports the files into any project that contains the slides.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np

from thinsection.config import nearest
from thinsection.errors import InvalidInputError, StoreError
from thinsection.exchange.peer_export import nothing_exported, noting
from thinsection.files.atomic import read_json, write_text
from thinsection.qc.edits import outline_measurements
from thinsection.report.stored import features_of_masks, outline_files
from thinsection.results.choice import say_choice
from thinsection.results.folder import (
    Listener,
    Results,
    leaving_out,
    open_results,
)
from thinsection.store.geojson import (
    Feature,
    TileClass,
    classes_of_column,
    tile_features,
    write_features,
)
from thinsection.store.tiles_h5 import TilesFile
from thinsection.tiles.table import Column

# prefix of class columns -> smallest value; the largest value gives the class of a tile
_CLASS_COLUMNS = {"score_": 0.0, "class_": 0.5}
SCRIPT = "import_into_qupath.groovy"
_GROOVY = """\
// QuPath: Automate > Script editor, open this file, then Run > Run for project.
def files = [
%s
]
def name = files[getProjectEntry().getImageName()]
if (name) importObjectsFromFile(buildFilePath(%s, name))
else print 'nothing of ' + getProjectEntry().getImageName()
"""


def export_qupath(
    folder: str | Path,
    out: str | Path,
    *,
    grid: str | None = None,
    classes: str | None = None,
    on_left_out: Listener | None = None,
) -> int:
    """Writes `ID.geojson` per slide and a script that imports them; returns the number of slides.

    Annotations are the outlines of tissue, quality control, segmenters, and files read by --roi.
    Detections are the tiles of a grid with every column of numbers as a measurement. Columns of
    categories are no measurements; one of them can give the tiles their classes, with its colours.

    Files of an earlier export are overwritten.

    Args:
        folder: a results folder.
        out: folder of the files.
        grid: name of the grid; None if there is at most one.
        classes: column of categories that gives the class of each tile: 'leiden'. None takes the
            one that there is, and of several the first by name; a line on standard error says so.
            Without any, the class of a tile is that of its largest `score_*`, or the `class_*`
            that covers half of it, or its `cluster`.
        on_left_out: called with each slide that cannot be exported; with None that is an error.

    Memory:
        A slide's columns, and about 250 bytes per tile for its corner and class. `thinsection plan
        --command 'export qupath'` predicts the peak.
    """
    out = Path(out)
    results = open_results(folder)
    if results.grids or grid:
        grid = results.choose_grid(grid)
    classes = _choose_classes(results, grid, classes)
    reasons: list[str] = []
    listener = noting(reasons, on_left_out)
    files: dict[str, str] = {}  # image name -> GeoJSON
    for slide_id, ledger in results.ledgers.items():
        with leaving_out(slide_id, listener):
            ledger.check()
            name = f"{slide_id}.geojson"
            outlines = [
                _marked(feature) for feature in outlines_of(results, slide_id, grid)
            ]
            tiles: Iterator[Feature] = iter(())
            if f"{grid}/tiles" in ledger.stages:
                table = results.tiles(slide_id, grid)
                tile_classes = _classes_of_tiles(table, classes)
                tiles = tile_features(
                    table, "detection", digits=7, classes=tile_classes
                )
            write_features(out / name, chain(outlines, tiles))
            image = Path(str(ledger.slide.get("slide_path", slide_id))).name
            files[image] = name
    if not files:
        raise nothing_exported(Path(folder), "QuPath", reasons)
    lines = [f"    {_groovy(image)}: {_groovy(name)}" for image, name in files.items()]
    script = _GROOVY % (",\n".join(lines), _groovy(str(out.resolve())))
    write_text(out / SCRIPT, script)
    return len(files)


def _marked(feature: Feature) -> Feature:
    """An outline with measurements of its shape, by which `--qc-edits` knows it again."""
    import shapely

    properties = dict(feature["properties"])
    area = shapely.geometry.shape(feature["geometry"])
    measurements = properties.get("measurements", {})
    properties["measurements"] = measurements | outline_measurements(area)
    return feature | {"properties": properties}


def _groovy(text: str) -> str:
    """Returns a string literal for Groovy, without interpolation."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def outlines_of(results: Results, slide_id: str, grid: str | None) -> list[Feature]:
    """Outlines from which a slide's grid was made; without a grid, all outlines."""
    ledger = results.ledgers[slide_id]
    tiles = ledger.stages.get(f"{grid}/tiles")
    if tiles is None:
        addresses = list(ledger.stages)
    else:
        addresses = []
        for need in tiles.needs:
            addresses += [*ledger.stages[need].needs, need]
    features: list[Feature] = []
    for address in addresses:
        files = outline_files(ledger, address)
        for path in files:
            features += read_json(path)["features"]
        if not files:
            features += features_of_masks(ledger, address)
    return features


def _choose_classes(
    results: Results, grid: str | None, classes: str | None
) -> str | None:
    """Column of categories that gives the classes; None if there is none.

    Raises InvalidInputError: no slide has such a column of categories.
    """
    found: set[str] = set()
    for slide_id, ledger in results.ledgers.items():
        if f"{grid}/tiles" in ledger.stages:
            # a damaged slide is reported when it is exported
            with suppress(StoreError):
                for table in results.tile_tables(slide_id, grid):
                    found |= set(map(table.label, table.categories()))
    columns = sorted(found)
    if classes is not None and classes not in found:
        raise InvalidInputError(
            f"classes must be a column of categories, got {classes!r}"
            f"{nearest(classes, columns)}; write one with results.write_column"
        )
    if classes is None and len(columns) > 1:
        say_choice(
            f"classes of tiles are those of {columns[0]!r}, the first of {len(columns)} "
            f'columns of categories; classes="..." chooses: {", ".join(columns)}'
        )
    return classes or next(iter(columns), None)


def _classes_of_tiles(table: TilesFile, column: str | None) -> list[TileClass]:
    """Class of each tile; [] if no column gives classes."""
    if column is None:
        return [TileClass(name) for name in _tile_classes(table.columns)]
    if column not in table.categories:
        return []
    return classes_of_column(table, column)


def _tile_classes(columns: Mapping[str, Column]) -> list[str]:
    """Class of each tile by the names of columns, '' for no class; [] if none gives classes."""
    for prefix, least in _CLASS_COLUMNS.items():
        shares_by_class = {}
        for name, column in columns.items():
            if prefix in name:
                shares_by_class[name.rpartition(prefix)[2]] = column
        if shares_by_class:
            classes = list(shares_by_class)
            shares = np.nan_to_num(np.stack(list(shares_by_class.values())))
            indices = shares.argmax(axis=0).tolist()
            largest = shares.max(axis=0).tolist()
            return [
                classes[index] if share >= least else ""
                for index, share in zip(indices, largest)
            ]
    for name, column in columns.items():
        if name.rpartition(":")[2] == "cluster":
            return [f"Cluster {value:g}" for value in column]
    return []
