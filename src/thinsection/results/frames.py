"""Tiles of slides as tables of pandas, AnnData and geopandas, and the rows of such tables.

A row is a tile, named `<slide_id>:<x>x<y>` by the corner of the tile in level-0 px. By this name,
or by columns `slide_id`, `x` and `y`, rows of a table find their tiles again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.extras import importing
from thinsection.files.atomic import KeepingFile
from thinsection.store.ledger import OF_COHORTS, SlideLedger
from thinsection.store.tile_tables import EmbeddingRows
from thinsection.store.tiles_h5 import Embeddings, TilesFile
from thinsection.tiles.categories import Categories, joined_categories
from thinsection.types import CoordsL0

if TYPE_CHECKING:
    import anndata
    import geopandas
    import pandas

_KEYS = ("slide_id", "x", "y")
# rows of embeddings that are copied in one step
_BLOCK_ROWS = 2048
# attributes of an array in a file of AnnData
H5AD_ARRAY = {"encoding-type": "array", "encoding-version": "0.2.0"}
_CORNER = re.compile(r"(-?\d+)x(-?\d+)")


@dataclass(frozen=True, kw_only=True)
class SlideRows:
    """Tiles of one slide with all their columns, and their embeddings if they are wanted."""

    ledger: SlideLedger
    tiles: TilesFile
    embeddings: EmbeddingRows | None = None
    encoder: str = ""  # encoder of the embeddings

    @property
    def slide_id(self) -> str:
        """Id of the slide."""
        return self.ledger.slide_id


def row_names(slide_id: str, coords_l0: CoordsL0) -> list[str]:
    """Names of the rows of a slide: 's1:512x0'."""
    return [f"{slide_id}:{x}x{y}" for x, y in coords_l0.tolist()]


def shared_categories(parts: Sequence[SlideRows]) -> dict[str, Categories]:
    """Categories of each column, joined over the slides that have them."""
    by_column: dict[str, list[Categories]] = {}
    for part in parts:
        for name, categories in part.tiles.categories.items():
            by_column.setdefault(name, []).append(categories)
    return {name: joined_categories(found) for name, found in by_column.items()}


def to_pandas(
    parts: Sequence[SlideRows], *, with_corners: bool, only_shared: bool
) -> pandas.DataFrame:
    """A row per tile: slide, corner, patient, label, split, and the columns of the tile tables.

    Args:
        parts: the slides.
        with_corners: adds the columns `x` and `y`.
        only_shared: leaves out columns that a slide lacks; else they are NaN there.

    Memory: the columns of all slides, twice while they are joined.
    """
    with importing("data frames", "pandas"):
        import pandas as pd
    categories = shared_categories(parts)
    tables = []
    for part in parts:
        if not len(part.tiles.coords_l0):
            continue  # it has no row
        coords_l0 = part.tiles.coords_l0
        columns: dict[str, object] = {"slide_id": part.slide_id}
        if with_corners:
            columns |= {"x": coords_l0[:, 0], "y": coords_l0[:, 1]}
        for name in OF_COHORTS:
            columns[name] = part.ledger.slide.get(name)
        for name, values in part.tiles.columns.items():
            if name in part.tiles.categories:
                words = part.tiles.values(name)
                columns[name] = pd.Categorical(words, categories[name].names)
            else:
                columns[name] = values
        names = row_names(part.slide_id, coords_l0)
        tables.append(pd.DataFrame(columns, index=names))
    if not tables:
        return pd.DataFrame(columns=["slide_id"])
    join = "inner" if only_shared else "outer"
    table = pd.concat(tables, join=join)
    for name, named in categories.items():
        if name in table:  # a slide without the column has made words of it
            table[name] = pd.Categorical(table[name], named.names)
    for name in ("slide_id", *OF_COHORTS):
        table[name] = table[name].astype("string").astype("category")
    return table


def to_anndata(parts: Sequence[SlideRows], address: str) -> anndata.AnnData:
    """X = embeddings, obsm['spatial'] = corners in level-0 px, obs = patients and columns.

    `uns['NAME_colors']` has the colours of a column of categories, as scanpy reads them.

    Memory: the embeddings of all slides, and a block of rows.
    """
    shape, dtype = _embeddings_shape(parts)
    x = np.empty(shape, dtype)
    for rows, block in _embedding_blocks(parts):
        x[rows] = block
    return _anndata(parts, address, x)


def write_anndata(parts: Sequence[SlideRows], address: str, path: Path) -> int:
    """Writes the table of `to_anndata` as .h5ad; returns the number of its rows.

    Memory: a block of embeddings, and the columns and names of all tiles.
    """
    import h5py

    shape, dtype = _embeddings_shape(parts)
    _anndata(parts, address, None).write_h5ad(path)
    with KeepingFile(path, "r+") as raw, h5py.File(raw, "r+") as file:
        if "X" in file:
            del file["X"]
        x = file.create_dataset("X", shape, dtype)
        x.attrs.update(H5AD_ARRAY)
        for rows, block in _embedding_blocks(parts):
            x[rows] = block
    return shape[0]


def _embeddings_shape(
    parts: Sequence[SlideRows],
) -> tuple[tuple[int, int], np.dtype[np.generic]]:
    """Shape and type of the embeddings of all slides."""
    stored = [part.embeddings for part in parts if part.embeddings is not None]
    num_rows = sum(len(rows) for rows in stored)
    widths = sorted({rows.shape[1] for rows in stored})
    if len(widths) > 1:
        raise InvalidInputError(
            f"embeddings of all slides must have the same channels, got {widths}; pass slides "
            "of one encoder"
        )
    return (num_rows, widths[0]), np.result_type(*(rows.dtype for rows in stored))


def _embedding_blocks(parts: Sequence[SlideRows]) -> Iterator[tuple[slice, Embeddings]]:
    """Blocks of the embeddings of all slides, with their places."""
    start = 0
    for part in parts:
        assert part.embeddings is not None
        for block in part.embeddings.blocks(_BLOCK_ROWS):
            yield slice(start, start + len(block)), block
            start += len(block)


def _anndata(
    parts: Sequence[SlideRows], address: str, x: Embeddings | None
) -> anndata.AnnData:
    """AnnData of the tiles; without X it has a column for each channel nevertheless."""
    with importing("AnnData", "anndata"):
        import anndata
        import pandas as pd
    obs = to_pandas(parts, with_corners=False, only_shared=True)
    (_, num_channels), _ = _embeddings_shape(parts)
    uns = {"encoder": parts[-1].encoder, "features": address}
    return anndata.AnnData(
        X=x,
        obs=obs,
        var=pd.DataFrame(index=pd.RangeIndex(num_channels).astype(str)),
        obsm={"spatial": np.concatenate([part.tiles.coords_l0 for part in parts])},
        uns={**uns, **color_lists(parts, obs)},
    )


def color_lists(
    parts: Sequence[SlideRows], obs: pandas.DataFrame
) -> dict[str, list[str]]:
    """Colours of columns of categories under the names that scanpy uses."""
    return {
        f"{name}_colors": list(categories.colors)
        for name, categories in shared_categories(parts).items()
        if name in obs
    }


def to_geopandas(parts: Sequence[SlideRows]) -> geopandas.GeoDataFrame:
    """Tiles as squares in level-0 px, with the columns of `to_pandas`.

    Memory: about 1 kB per tile.
    """
    with importing("tables of shapes", "geopandas"):
        import geopandas
        import shapely
    table = to_pandas(parts, with_corners=True, only_shared=False)
    boxes: list[Any] = []
    for part in parts:
        ends = part.tiles.coords_l0 + np.array(part.tiles.size_l0)
        boxes += shapely.box(*part.tiles.coords_l0.T, *ends.T).tolist()
    return geopandas.GeoDataFrame(table, geometry=boxes)


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """Columns of a table, and the tile of each of its rows."""

    columns: Mapping[str, Any]  # pandas Series by name
    slide_ids: npt.NDArray[Any]  # (R,) words
    coords_l0: CoordsL0  # (R, 2)
    colors: Mapping[str, Any]  # colours of categories, by column
    features: str = ""  # address of the embeddings that the table had


def rows_of_table(table: Any) -> TableRows:
    """Rows of a table of pandas, pyarrow or another package with `to_pandas`, or of AnnData.

    Raises InvalidInputError: it is no such table, or its rows do not name their tiles.
    """
    colors: dict[str, Any] = {}
    features = ""
    if hasattr(table, "obs") and hasattr(table, "uns"):
        for name in table.obs.columns:
            if f"{name}_colors" in table.uns:
                colors[name] = [str(color) for color in table.uns[f"{name}_colors"]]
        features = str(table.uns.get("features", ""))
        table = table.obs
    elif not hasattr(table, "iloc") and hasattr(table, "to_pandas"):
        with importing("data frames", "pandas"):
            table = table.to_pandas()
    if hasattr(table, "to_frame") and not hasattr(table, "columns"):
        table = table.to_frame()  # one column of pandas, adata.obs["leiden"]
    if not hasattr(table, "iloc") or not hasattr(table, "columns"):
        raise InvalidInputError(
            "table must be of pandas, pyarrow or AnnData, got "
            f"{type(table).__name__}; pass adata.obs[['leiden']] or a DataFrame"
        )
    names = [str(name) for name in table.columns]
    if len(set(names)) != len(names):
        raise InvalidInputError(
            f"table must have different names of columns, got {', '.join(names)}"
        )
    if set(_KEYS) <= set(names):
        slide_ids = np.array([str(word) for word in table["slide_id"]], dtype=object)
        corners = [np.asarray(table[axis].to_numpy(), np.float64) for axis in "xy"]
        coords = np.stack(corners, axis=1).reshape(-1, 2)
        if not (np.isfinite(coords).all() and (coords == coords.round()).all()):
            raise InvalidInputError(
                "columns x and y must be whole numbers, the corners of tiles in level-0 px, got "
                "others; copy them from results.to_pandas()"
            )
        coords_l0 = coords.astype(np.int64)
    else:
        slide_ids, coords_l0 = _tiles_of_names([str(name) for name in table.index])
    columns = {
        name: table[column]
        for name, column in zip(names, table.columns)
        if name not in _KEYS
    }
    return TableRows(
        columns=columns,
        slide_ids=slide_ids,
        coords_l0=coords_l0,
        colors=colors,
        features=features,
    )


def _tiles_of_names(names: Sequence[str]) -> tuple[npt.NDArray[Any], CoordsL0]:
    """Slide and corner of each row, from its name."""
    slide_ids = []
    corners = []
    for name in names:
        slide_id, _, corner = name.rpartition(":")
        match = _CORNER.fullmatch(corner)
        if match is None or not slide_id:
            raise InvalidInputError(
                f"rows must be named '<slide_id>:<x>x<y>' as those of results.to_pandas() and "
                f"of our AnnData, got {name!r}; keep this index, or add the columns slide_id, x "
                "and y"
            )
        slide_ids.append(slide_id)
        corners.append((int(match[1]), int(match[2])))
    coords_l0 = np.array(corners, dtype=np.int64).reshape(-1, 2)
    return np.array(slide_ids, dtype=object), coords_l0
