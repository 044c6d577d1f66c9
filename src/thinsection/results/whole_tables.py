"""Columns of a whole table, a row per tile, as columns of each slide in the order of its tiles."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.config import nearest
from thinsection.errors import InvalidInputError
from thinsection.results.columns import Colors
from thinsection.results.frames import TableRows
from thinsection.store.tiles_h5 import TilesFile
from thinsection.types import counted

_SHOWN = 3  # rows that a message names
# reads the tiles of a slide on a grid
ReadTiles = Callable[[str, str], TilesFile]
# slide, column, its values in the order of the slide's tiles, its colours
SlideColumn = tuple[str, str, Any, Colors | None]


def columns_of_slides(
    rows: TableRows,
    grid: str,
    slides: Sequence[str],
    read_tiles: ReadTiles,
    *,
    columns: Sequence[str] | None,
    colors: Mapping[str, Colors] | None,
    partial: bool,
) -> Iterator[SlideColumn]:
    """Yields each column of each slide; all rows are matched before the first one.

    Args:
        rows: rows of the table.
        grid: grid of the tiles.
        slides: slides of the folder that have tiles in this grid.
        read_tiles: reads the tiles of a slide.
        columns: names of columns; None for all.
        colors: colours by column.
        partial: True if tiles may lack a row.

    Raises InvalidInputError: no such column, a row without a tile, or a tile without a row.
    """
    names = list(rows.columns) if columns is None else list(columns)
    for name in (*names, *(colors or {})):
        if name not in rows.columns:
            raise InvalidInputError(
                f"columns must be of the table, got {name!r}{nearest(name, rows.columns)}"
            )
    if not names or not len(rows.slide_ids):
        raise InvalidInputError(
            "table must have a row per tile and a column besides slide_id, x and y, got "
            f"{counted(len(rows.slide_ids), 'row')} and {counted(len(names), 'column')}"
        )
    named = dict.fromkeys(rows.slide_ids.tolist())
    for slide_id in named:
        if slide_id not in slides:
            count = int((rows.slide_ids == slide_id).sum())
            raise InvalidInputError(
                f"rows must be of slides with tiles in {grid}, got "
                f"{counted(count, 'row')} of {slide_id!r}{nearest(slide_id, slides)}; pass "
                'their grid, grid="...", or leave these rows out'
            )
    order = {
        slide_id: _row_of_tiles(rows, slide_id, grid, read_tiles, partial=partial)
        for slide_id in named
    }
    for slide_id, row_of_tile in order.items():
        for name in names:
            values = _in_order(rows.columns[name], row_of_tile)
            yield slide_id, name, values, _colors_of(rows, name, values, colors)


def _row_of_tiles(
    rows: TableRows,
    slide_id: str,
    grid: str,
    read_tiles: ReadTiles,
    *,
    partial: bool,
) -> npt.NDArray[np.int64]:
    """Row of the table for each tile of a slide; -1 for a tile without one."""
    table_rows = np.flatnonzero(rows.slide_ids == slide_id)
    tiles = read_tiles(slide_id, grid)
    tile_of = {
        corner: row for row, corner in enumerate(map(tuple, tiles.coords_l0.tolist()))
    }
    row_of_tile = np.full(len(tile_of), -1, dtype=np.int64)
    lost = []
    for row in table_rows.tolist():
        corner = tuple(rows.coords_l0[row].tolist())
        tile = tile_of.get(corner, -1)
        if tile < 0:
            lost.append(corner)
        elif row_of_tile[tile] >= 0:
            raise InvalidInputError(
                f"rows must name each tile once, got the tile at {corner} of {slide_id!r} "
                "twice; drop one of them"
            )
        else:
            row_of_tile[tile] = row
    if lost:
        shown = ", ".join(map(str, lost[:_SHOWN]))
        raise InvalidInputError(
            f"rows must be tiles of {grid}, got {len(lost)} of {len(table_rows)} at other "
            f'places in {slide_id!r}: {shown}; pass the grid of the table: grid="..."'
        )
    num_without = int((row_of_tile < 0).sum())
    if num_without and not partial:
        raise InvalidInputError(
            f"each tile of {slide_id!r} must have a row, got none for {num_without} of "
            f"{len(row_of_tile)}; pass partial=True to leave these tiles without a value"
        )
    return row_of_tile


def _in_order(column: Any, row_of_tile: npt.NDArray[np.int64]) -> Any:
    """Values of a pandas column in the order of a slide's tiles; missing where there is no row."""
    plain = column.reset_index(drop=True)
    if (row_of_tile >= 0).all():
        return plain.iloc[row_of_tile]
    if plain.dtype.kind == "b":
        plain = plain.astype("boolean")
    # -1 is no label of the new index, so that pandas gives a missing value
    return plain.reindex(row_of_tile)


def _colors_of(
    rows: TableRows, name: str, values: Any, colors: Mapping[str, Colors] | None
) -> Colors | None:
    """Colours of a column: given ones, else those of the AnnData if they fit its categories."""
    if colors and name in colors:
        return colors[name]
    stored = rows.colors.get(name)
    categories = getattr(values.dtype, "categories", None)
    if stored is None or categories is None or len(stored) != len(categories):
        return None
    return dict(zip(map(str, categories), stored))
