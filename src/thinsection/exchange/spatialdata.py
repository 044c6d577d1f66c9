"""Exports results as SpatialData: a Zarr store per slide, with coordinates in level-0 px and µm.

    ID.zarr   shapes `tiles`: squares, with the columns of the tile table
              shapes `outlines`: tissue, quality control and drawn regions, by `class`
              table `embeddings`: X, obs and obsm['spatial'], which annotates `tiles`
              on request shapes `cells` and table `cell_measures`: outlines and measures of cells
              attrs: the slide's file, keys of the results in the store, and `thinsection_columns`:
              our names of the columns that SpatialData does not allow

SpatialData allows letters, digits, '_', '-' and '.' in names. In ours ':' becomes '.', and each
other character '_': `heatmap_m:score_T cell` is `heatmap_m.score_T_cell`. If two names become the
same, the later one gets a number: `a_b_2`.

Pixels are not copied. The coordinate system `global` is in level-0 px, `um` in µm.
"""

import json
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import thinsection
from thinsection.cells.table import class_codes
from thinsection.errors import (
    InvalidInputError,
    OverwriteError,
    StoreError,
)
from thinsection.exchange.cells import ExportedCells, numbers
from thinsection.exchange.qupath import outlines_of
from thinsection.extras import importing
from thinsection.files.atomic import TMP_MARK, output_errors, read_json
from thinsection.results.folder import (
    Listener,
    Results,
    cells_address,
    leaving_out,
    open_results,
)
from thinsection.results.frames import SlideRows, color_lists, to_geopandas, to_pandas
from thinsection.store.ledger import OF_COHORTS, SlideLedger
from thinsection.store.tile_tables import OWN_COLUMN
from thinsection.types import Document

if TYPE_CHECKING:
    import geopandas

_ATTRIBUTES = "thinsection"
_COLUMNS = "thinsection_columns"
_TILES = "tiles"
_CELLS = "cells"
_CELL_TABLE = "cell_measures"  # another name, as SpatialData asks
_SHAPES_FILE = "shapes.parquet"
_ROWS_PER_CHUNK = 65_536
_SHAPES_COLUMNS = ("geometry", "id", "class")
# facts about the slide's file
_SLIDE_FACTS = (
    "slide_path", "width", "height", "mpp_x", "mpp_y", "reader", "rendering",
)  # fmt: skip


def export_spatialdata(
    folder: str | Path,
    out: str | Path,
    *,
    features: str | None = None,
    cells: str | None = None,
    on_left_out: Listener | None = None,
) -> int:
    """Writes `ID.zarr` for each slide; returns the number of this folder's slides in `out`.

    A store is written completely or not at all. An existing store is kept if it was made from the
    same results, and never replaced.

    Args:
        folder: a results folder.
        out: folder of the stores.
        features: 'GRID/features_NAME' or NAME; None if there is one, or to export only tiles.
        cells: name of the cells that are written too; None writes none.
        on_left_out: called with a line for each slide that is left out; with None that is an error.

    Memory:
        One slide: twice its embeddings, 8 N D bytes, and about 1 kB per tile for shapes. Cells are
        written 65,536 at a time.

    Raises:
        MissingDependencyError: spatialdata is not installed.
        StoreError: nothing to export, or an existing store was made from other results.
        InvalidInputError: several embeddings and no name given.
    """
    with importing("this export", "spatialdata"):
        import spatialdata as _  # noqa: F401
    out = Path(out)
    results = open_results(folder)
    grid, address = results.choose_tiles(features)
    count = 0
    for slide_id, ledger in results.ledgers.items():
        with leaving_out(slide_id, on_left_out):
            ledger.check()
            if (address or f"{grid}/{_TILES}") in ledger.stages:
                target = out / f"{slide_id}.zarr"
                _write_store(results, ledger, grid, address, target, cells_name=cells)
                count += 1
    if not count:
        raise StoreError(f"folder must contain tiles, got none in {str(folder)!r}")
    return count


def _write_store(
    results: Results,
    ledger: SlideLedger,
    grid: str,
    address: str,
    target: Path,
    *,
    cells_name: str | None,
) -> None:
    """Writes the store of one slide, or checks the existing store."""
    import spatialdata
    from spatialdata.models import ShapesModel

    # addresses and keys of the results, in the form that JSON stores
    addresses = [f"{grid}/{_TILES}", *([address] if address else [])]
    own_columns = f"{grid}/{OWN_COLUMN}"
    addresses += [name for name in ledger.stages if name.startswith(own_columns)]
    cells = None
    if cells_name is not None:
        table = results.cells(ledger.slide_id, cells_name)
        cells = ExportedCells(table=table, tiles=results.tiles(ledger.slide_id, grid))
        addresses.append(cells_address(cells_name))
    made_from = {
        "version": thinsection.__version__,
        "slide_id": ledger.slide_id,
        "results": {name: ledger.stages[name].key for name in addresses},
    }
    if target.exists():
        try:
            stored = read_json(target / "zarr.json")["attributes"][_ATTRIBUTES]
        except (OSError, ValueError, KeyError, TypeError):
            stored = None  # a store of another program
        if stored != made_from:
            raise OverwriteError(
                f"store must be new or of the same results, got another one at "
                f'{str(target)!r}; pass another out="..."'
            )
        return
    rows = SlideRows(ledger=ledger, tiles=results.tiles(ledger.slide_id, grid))
    names = allowed_names(rows.tiles.columns)
    frame = to_geopandas([rows]).reset_index(drop=True)
    frame = frame[[*rows.tiles.columns, "geometry"]].rename(columns=names)
    systems = _transformations(ledger)
    shapes = {_TILES: ShapesModel.parse(frame, transformations=systems)}
    outlines = _outline_shapes(results, ledger, grid)
    if outlines is not None:
        shapes["outlines"] = outlines
    tables = {"embeddings": _table(results, rows, names, address)}
    if cells is not None:
        shapes[_CELLS] = _placeholder(systems)
        tables[_CELL_TABLE] = _one_cell(cells)
    renamed = {new: name for name, new in names.items() if new != name}
    facts: Document = {"slide_id": ledger.slide_id}
    for name in _SLIDE_FACTS:
        facts[name] = ledger.slide.get(name)
    data = spatialdata.SpatialData(
        shapes=shapes,
        tables=tables,
        attrs={"slide": facts, _ATTRIBUTES: made_from, _COLUMNS: renamed},
    )
    unfinished = target.with_name(f".{target.name}{TMP_MARK}{secrets.token_hex(4)}")
    with output_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            data.write(unfinished, consolidate_metadata=cells is None)
            if cells is not None:
                write_shapes(unfinished / "shapes" / _CELLS / _SHAPES_FILE, cells)
                write_cell_arrays(unfinished / "tables" / _CELL_TABLE, cells)
                data.write_consolidated_metadata()
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _placeholder(systems: dict[str, Any]) -> "geopandas.GeoDataFrame":
    """Shapes of one cell, in place of a million: their file is written part by part."""
    import geopandas
    import shapely
    from spatialdata.models import ShapesModel

    frame = geopandas.GeoDataFrame(geometry=[shapely.box(0, 0, 1, 1)])
    return ShapesModel.parse(frame, transformations=systems)


def write_shapes(path: Path, cells: ExportedCells) -> None:
    """Writes the outlines of cells as the GeoParquet file of a shapes element.

    Memory: 65,536 cells.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    geometry = {"encoding": "WKB", "geometry_types": ["Polygon"], "crs": None}
    geo = {
        "version": "1.1.0",
        "primary_column": "geometry",
        "columns": {"geometry": geometry},
    }
    fields = [cells.table.schema.field(name) for name in _SHAPES_COLUMNS]
    schema = pa.schema(fields, metadata={b"geo": json.dumps(geo).encode()})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for block in cells.blocks([*_SHAPES_COLUMNS]):
            columns = [block.batch.column(name) for name in _SHAPES_COLUMNS]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _one_cell(cells: ExportedCells) -> Any:
    """Table of one cell, with the columns of the table of all: its arrays are written later."""
    import anndata
    import pandas as pd
    from spatialdata.models import TableModel

    names = list(allowed_names(cells.table.measures).values())
    obs = pd.DataFrame(
        {
            "region": pd.Categorical([_CELLS]),
            "cell": np.zeros(1, dtype=np.int64),
            "class": pd.Categorical([None], categories=list(cells.table.classes)),
            "probability": np.zeros(1, dtype=np.float32),
            # its row in the table of the tiles, -1 in no tile
            "tile": np.zeros(1, dtype=np.int64),
        },
        index=["0"],
    )
    table = anndata.AnnData(
        X=np.zeros((1, len(names)), dtype=np.float32),
        obs=obs,
        var=pd.DataFrame(index=names),
        obsm={"spatial": np.zeros((1, 2))},
        uns={"cells": cells.table.name},
    )
    return TableModel.parse(
        table, region=_CELLS, region_key="region", instance_key="cell"
    )


def write_cell_arrays(path: Path, cells: ExportedCells) -> None:
    """Writes the arrays of a table of cells in place of those of one cell.

    Memory: two chunks of 65,536 cells.
    """
    import zarr

    table = zarr.open_group(path, mode="r+", use_consolidated=False)
    num_cells = cells.table.num_cells
    arrays = {
        name: _longer_array(table, name, num_cells)
        for name in (
            "X", "obsm/spatial", "obs/_index", "obs/region/codes", "obs/cell",
            "obs/class/codes", "obs/probability", "obs/tile",
        )
    }  # fmt: skip
    for block in cells.blocks(["class", "probability", *cells.table.measures]):
        numbers_of_rows = np.arange(block.rows.start, block.rows.stop)
        values = {
            "X": cells.values(block),
            "obsm/spatial": block.centers_l0,
            "obs/_index": numbers_of_rows.astype(str).astype(object),
            "obs/region/codes": np.zeros(len(numbers_of_rows)),
            "obs/cell": numbers_of_rows,
            "obs/class/codes": class_codes(block.batch),
            "obs/probability": numbers(block.batch.column("probability")),
            "obs/tile": block.tile_rows,
        }
        for name, array in arrays.items():
            array[block.rows] = values[name]


def _longer_array(table: Any, name: str, num_rows: int) -> Any:
    """Array of a Zarr group that replaces one of a single row, with its type and attributes."""
    one_row = table[name]
    return table.create_array(
        name,
        shape=(num_rows, *one_row.shape[1:]),
        chunks=(min(num_rows, _ROWS_PER_CHUNK), *one_row.shape[1:]),
        dtype=one_row.metadata.data_type,
        attributes=dict(one_row.attrs),
        overwrite=True,
    )


def allowed_names(names: Iterable[str]) -> dict[str, str]:
    """Names that SpatialData allows, by our name; no two differ only in capitals."""
    allowed: dict[str, str] = {}
    # columns of the table that have a meaning of their own
    taken = {"region", "tile", "slide_id", "geometry", "_index", *OF_COHORTS}
    for name in names:
        word = re.sub(r"[^A-Za-z0-9_.-]", "_", name.replace(":", "."))
        if word.startswith("__"):  # reserved
            word = f"column{word}"
        number = 1
        new = word
        while new.lower() in taken:
            number += 1
            new = f"{word}_{number}"
        taken.add(new.lower())
        allowed[name] = new
    return allowed


def _transformations(ledger: SlideLedger) -> dict[str, Any]:
    """Coordinate systems of shapes in level-0 px; `um` only if the resolution is known."""
    from spatialdata.transformations import Identity, Scale

    systems: dict[str, Any] = {"global": Identity()}
    mpp_x = ledger.slide.get("mpp_x")
    mpp_y = ledger.slide.get("mpp_y")
    if mpp_x and mpp_y:
        systems["um"] = Scale([mpp_x, mpp_y], axes=("x", "y"))
    return systems


def _outline_shapes(
    results: Results, ledger: SlideLedger, grid: str
) -> "geopandas.GeoDataFrame | None":
    """Outlines by class, a row for each polygon; None if there are none."""
    import geopandas
    import shapely
    from spatialdata.models import ShapesModel

    polygons = []
    classes = []
    for feature in outlines_of(results, ledger.slide_id, grid):
        shape = shapely.geometry.shape(feature["geometry"])
        name = feature["properties"].get("classification", {}).get("name", "")
        for part in shapely.get_parts(shape).tolist():
            polygons.append(part)
            classes.append(name)
    if not polygons:
        return None
    frame = geopandas.GeoDataFrame({"class": classes}, geometry=polygons)
    return ShapesModel.parse(frame, transformations=_transformations(ledger))


def _table(
    results: Results, rows: SlideRows, names: dict[str, str], address: str
) -> Any:
    """AnnData whose rows annotate the tiles; `names` are the allowed names of columns."""
    import anndata
    import pandas as pd
    from spatialdata.models import TableModel

    num_tiles = len(rows.tiles.coords_l0)
    obs = to_pandas([rows], with_corners=False, only_shared=True)
    colors = {
        f"{names[key.removesuffix('_colors')]}_colors": value
        for key, value in color_lists([rows], obs).items()
    }
    unknown = [name for name in OF_COHORTS if rows.ledger.slide.get(name) is None]
    obs = obs.drop(columns=unknown).rename(columns=names)
    obs.index = [str(row) for row in range(num_tiles)]
    obs["region"] = pd.Categorical([_TILES] * num_tiles)
    obs["tile"] = np.arange(num_tiles)
    values = None
    encoder = ""
    if address:
        stored = results.tile_embeddings(rows.slide_id, address)
        if stored.features is None or len(stored.coords_l0) != num_tiles:
            raise InvalidInputError(
                f"embeddings must have a row for each of the {num_tiles} tiles, got "
                f"{len(stored.coords_l0)} in {address!r} of {rows.slide_id!r}"
            )
        values = stored.features.astype(np.float32)
        encoder = str(stored.attributes.get("encoder", ""))
    table = anndata.AnnData(
        X=values,
        obs=obs,
        obsm={"spatial": rows.tiles.coords_l0},
        uns={"encoder": encoder, "features": address, **colors},
    )
    return TableModel.parse(
        table, region=_TILES, region_key="region", instance_key="tile"
    )
