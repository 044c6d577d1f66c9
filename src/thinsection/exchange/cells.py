"""Exports the cells of a results folder as AnnData, with the tile of each cell and a graph.

    ID.h5ad   X: areas and other measures, those of the source included
              obs: class, probability, slide_id, and tile: the row name of the cell's tile in the
              AnnData of the tiles, missing if the cell lies in none
              obsm['spatial']: centroids in level-0 px
              obsp: distances and connectivities of the nearest cells, on request

The file is written part by part, so that its size does not decide the memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinsection.cells.count import TileFinder
from thinsection.cells.table import CellTable, centers_of, class_codes
from thinsection.errors import StoreError
from thinsection.extras import require_packages
from thinsection.files.atomic import KeepingFile, atomic_path
from thinsection.results.folder import Listener, Results, leaving_out, open_results
from thinsection.results.frames import H5AD_ARRAY, row_names
from thinsection.store.tiles_h5 import TilesFile
from thinsection.types import MIB, Floats

if TYPE_CHECKING:
    import h5py
    import pyarrow

_WORDS = {"encoding-type": "string-array", "encoding-version": "0.2.0"}
_CATEGORIES = {
    "encoding-type": "categorical",
    "encoding-version": "0.2.0",
    "ordered": False,
}
_FRAME = {"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"}
_DICT = {"encoding-type": "dict", "encoding-version": "0.1.0"}
_CSR = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0"}
_GRAPH_BYTES = 32 * MIB  # of a block of rows of the graph
_EMPTY_PARTS = ("layers", "varm", "varp")


@dataclass(frozen=True)
class CellBlock:
    """Some cells of a slide, as exports need them; rows from `start` on."""

    start: int
    batch: "pyarrow.RecordBatch"
    centers_l0: Floats  # (n, 2)
    tile_rows: npt.NDArray[np.int64]  # (n,), row of the tile of each cell; -1 for none

    @property
    def rows(self) -> slice:
        """Place of the cells in the table."""
        return slice(self.start, self.start + len(self.centers_l0))


@dataclass(frozen=True)
class ExportedCells:
    """Cells of one slide, and the tiles of a grid of it; None for a slide without tiles."""

    table: CellTable
    tiles: TilesFile | None

    @property
    def tile_names(self) -> list[str]:
        """Names of the tiles, as those of the rows of their AnnData."""
        if self.tiles is None:
            return []
        return row_names(self.table.slide_id, self.tiles.coords_l0)

    def blocks(self, columns: list[str]) -> Iterator[CellBlock]:
        """Yields the cells with these columns, at most 65,536 at a time.

        Memory: one block, and 40 bytes per tile.
        """
        finder = None if self.tiles is None else TileFinder(self.tiles)
        start = 0
        for batch in self.table.batches(["x_l0", "y_l0", *columns]):
            centers = centers_of(batch)
            rows = np.full(len(centers), -1, dtype=np.int64)
            if finder is not None:
                rows, _ = finder.find(centers)
            yield CellBlock(start, batch, centers, rows)
            start += len(centers)

    def values(self, block: CellBlock) -> npt.NDArray[np.float32]:
        """Measures of a block, (n, M); NaN where one is not known."""
        columns = [numbers(block.batch.column(name)) for name in self.table.measures]
        return np.stack(columns, axis=1).astype(np.float32)


def exported_cells(
    results: Results, slide_id: str, name: str | None, features: str | None
) -> ExportedCells:
    """Cells of a slide, with the tiles of the grid of these embeddings.

    Raises:
        StoreError: the slide has no cells.
        ChoiceError: several tables of cells or grids, and no name.
    """
    table = results.cells(slide_id, name)
    tiles = None
    if results.grids:
        grid, _ = results.choose_tiles(features)
        tiles = results.tiles(slide_id, grid)
    return ExportedCells(table=table, tiles=tiles)


def export_cells_anndata(
    folder: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    features: str | None = None,
    neighbors: int = 0,
    on_damage: Listener | None = None,
) -> int:
    """Writes `ID.h5ad` for each slide with cells; returns their number.

    Args:
        folder: a results folder.
        out: folder of the files.
        name: name of the cells; None if each slide has one table of them.
        features: embeddings of the tiles that are named, or a part of their name, such as that of
            their grid; None for those of the newest run.
        neighbors: number of nearest cells of each cell in the graph; 0 writes none.
        on_damage: called with a line for each damaged slide, which is left out; with None that is
            an error.

    Memory: 65,536 cells, and 100 bytes per tile; with a graph 32 MiB and 100 bytes per cell more.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        StoreError: no slide has cells.
        ChoiceError: a slide has several tables of cells, and no name is given.
    """
    require_packages("cells", "pyarrow")
    out = Path(out)
    results = open_results(folder)
    count = 0
    for slide_id in slides_with_cells(results):
        with leaving_out(slide_id, on_damage):
            cells = exported_cells(results, slide_id, name, features)
            with atomic_path(out / f"{slide_id}.h5ad") as tmp:
                _write_h5ad(tmp, cells, neighbors)
            count += 1
    return count


def slides_with_cells(results: Results) -> list[str]:
    """Slides that have cells. Raises StoreError: there are none."""
    slides = [slide for slide in results if results.cell_names(slide)]
    if not slides:
        raise StoreError(
            f"folder must contain cells, got none in {str(results.folder)!r}; run again with "
            "cells=..."
        )
    return slides


def _write_h5ad(path: Path, cells: ExportedCells, neighbors: int) -> None:
    """Writes the file of AnnData, block by block."""
    import h5py

    num_cells = cells.table.num_cells
    classes = list(cells.table.classes)
    with KeepingFile(path, "w+") as raw, h5py.File(raw, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        for part in (*_EMPTY_PARTS, "obsp", "uns"):
            file.create_group(part).attrs.update(_DICT)
        shape = (num_cells, len(cells.table.measures))
        x = _array(file, "X", shape, np.float32)
        var = _frame(file, "var", [])
        _words(var, "_index", cells.table.measures)
        names = ["class", "probability", "slide_id", "tile"]
        obs = _frame(file, "obs", names)
        ids = obs.create_dataset("_index", (num_cells,), h5py.string_dtype())
        ids.attrs.update(_WORDS)
        probability = _array(obs, "probability", (num_cells,), np.float32)
        codes = _categorical(obs, "class", num_cells, classes)
        _categorical(obs, "slide_id", num_cells, [cells.table.slide_id])[...] = 0
        tile_codes = _categorical(obs, "tile", num_cells, cells.tile_names)
        obsm = file.create_group("obsm")
        obsm.attrs.update(_DICT)
        spatial = _array(obsm, "spatial", (num_cells, 2), np.float64)
        columns = ["id", "class", "probability", *cells.table.measures]
        for block in cells.blocks(columns):
            x[block.rows] = cells.values(block)
            ids[block.rows] = block.batch.column("id").to_pylist()
            probability[block.rows] = numbers(block.batch.column("probability"))
            codes[block.rows] = class_codes(block.batch)
            tile_codes[block.rows] = block.tile_rows
            spatial[block.rows] = block.centers_l0
        for key, word in (
            ("cells", cells.table.name),
            ("slide_id", cells.table.slide_id),
        ):
            entry = file["uns"].create_dataset(key, data=word)
            entry.attrs.update({"encoding-type": "string", "encoding-version": "0.2.0"})
        if neighbors:
            _write_graph(file["obsp"], spatial[...], cells.table, neighbors)


def _write_graph(
    group: "h5py.Group", centers_l0: Floats, table: CellTable, neighbors: int
) -> None:
    """Writes the nearest cells of each cell, as squidpy names them; distances in µm."""
    from thinsection.tiles.graph import nearest_blocks

    num_cells = len(centers_l0)
    num_edges_each = max(0, min(neighbors, num_cells - 1))
    num_edges = num_cells * num_edges_each
    matrices = []
    for name in ("spatial_distances", "spatial_connectivities"):
        matrix = group.create_group(name)
        matrix.attrs.update({**_CSR, "shape": (num_cells, num_cells)})
        matrix.create_dataset("data", (num_edges,), np.float64)
        matrix.create_dataset("indices", (num_edges,), np.int64)
        matrix["indptr"] = np.arange(num_cells + 1) * num_edges_each
        matrices.append(matrix)
    distances, connectivities = matrices
    for block in nearest_blocks(
        centers_l0,
        k=neighbors,
        slide_mpp=table.slide_mpp,
        budget_bytes=_GRAPH_BYTES,
    ):
        edges = slice(
            block.targets.start * num_edges_each, block.targets.stop * num_edges_each
        )
        distances["data"][edges] = block.distances.ravel()
        connectivities["data"][edges] = np.ones(block.distances.size)
        for matrix in matrices:
            matrix["indices"][edges] = block.rows.ravel()


def numbers(column: "pyarrow.Array") -> npt.NDArray[Any]:
    """Values of a column of numbers; NaN where they are null."""
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float32)


def _array(
    group: "h5py.Group", name: str, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> "h5py.Dataset":
    dataset = group.create_dataset(name, shape, dtype)
    dataset.attrs.update(H5AD_ARRAY)
    return dataset


def _frame(group: "h5py.Group", name: str, columns: list[str]) -> "h5py.Group":
    import h5py

    frame = group.create_group(name)
    frame.attrs.update(_FRAME)
    frame.attrs["column-order"] = np.array(columns, dtype=h5py.string_dtype())
    return frame


def _words(group: "h5py.Group", name: str, words: list[str]) -> None:
    import h5py

    dataset = group.create_dataset(name, (len(words),), h5py.string_dtype())
    if words:
        dataset[...] = words
    dataset.attrs.update(_WORDS)


def _categorical(
    group: "h5py.Group", name: str, num_rows: int, categories: list[str]
) -> "h5py.Dataset":
    """Makes a column of categories; returns the codes to fill in."""
    column = group.create_group(name)
    column.attrs.update(_CATEGORIES)
    _words(column, "categories", categories)
    return _array(column, "codes", (num_rows,), np.int32)
