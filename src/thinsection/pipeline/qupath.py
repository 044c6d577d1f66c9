"""Results as QuPath reads them: a GeoJSON a slide, outlines as annotations, tiles as detections.

A QuPath project keeps its objects in Java's serialised form (`data.qpdata`), which nobody else can
write; a script imports the files into whatever project the slides are in.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import StoreError, require
from thinsection.files.atomic import write_text
from thinsection.files.json_text import read_json
from thinsection.pipeline.folder import (
    Listener,
    Results,
    leaving_out,
    one_address,
    open_results,
)
from thinsection.store.geojson import tile_features, write_features

# families of columns of which the largest names a tile, and how large it must be
_NAMING = (("score_", 0.0), ("class_", 0.5))
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
    folder: Path,
    out: Path,
    *,
    grid: str | None = None,
    on_left_out: Listener | None = None,
) -> int:
    """Number of slides whose `ID.geojson` is now in a folder, beside a script that imports them.

    Annotations are the outlines of tissue, quality control, regions and segmenters; detections are
    the tiles of a grid with every per-tile column as a measurement. The class of a tile is that of
    its largest `score_*`, or of the `class_*` that covers half of it, or its `cluster`.

    Files of an earlier export are replaced. `grid` is None where there is one, or none;
    `on_left_out` is told of each slide that cannot be exported: with None that is an error.

    Memory: a slide's columns as text, about 30 bytes a value and 250 a tile.
    """
    results, files = open_results(folder), dict[str, str]()
    named = one_address(results.grids, grid, "grid") if results.grids or grid else None
    for slide_id, ledger in results.ledgers.items():
        with leaving_out(slide_id, on_left_out, StoreError, ValueError):
            write_features(
                out / f"{slide_id}.geojson", _features(results, slide_id, named)
            )
            image = Path(str(ledger.slide.get("slide_path", slide_id))).name
            files[image] = f"{slide_id}.geojson"
    rule = "folder must hold slides with results"
    require(files, rule, f"none in {str(folder)!r}", error=StoreError)
    pairs = ",\n".join(
        f"    {_groovy(image)}: {_groovy(name)}" for image, name in files.items()
    )
    write_text(out / SCRIPT, _GROOVY % (pairs, _groovy(str(out.resolve()))))
    return len(files)


def _groovy(text: str) -> str:
    """The text as a string of Groovy, in which nothing is replaced."""
    return (
        "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
    )


def _features(
    results: Results, slide_id: str, grid: str | None
) -> list[dict[str, Any]]:
    stages, features = results.ledgers[slide_id].stages, list[dict[str, Any]]()
    tiles = stages.get(f"{grid}/tiles")
    of_grid = (
        [a for need in tiles.needs for a in (*stages[need].needs, need)]
        if tiles
        else stages
    )
    for name in [name for address in of_grid for name in stages[address].files]:
        if name.endswith(".geojson"):
            features += read_json(results.folder / name)["features"]
    if tiles:
        table = results.tiles(slide_id, grid)
        classes = _classes(table.columns)
        features += tile_features(table, "detection", digits=7, classes=classes)
    return features


def _classes(columns: Mapping[str, npt.NDArray]) -> list[str]:
    """The class of each tile, '' of none; [] where no column names any."""
    for prefix, least in _NAMING:
        of = {n.rpartition(prefix)[2]: c for n, c in columns.items() if prefix in n}
        if of:
            names, shares = list(of), np.nan_to_num(np.stack(list(of.values())))
            best = zip(shares.argmax(axis=0).tolist(), shares.max(axis=0).tolist())
            return [names[which] if most >= least else "" for which, most in best]
    found = (c for n, c in columns.items() if n.rpartition(":")[2] == "cluster")
    return [f"Cluster {value:g}" for value in next(found, [])]
