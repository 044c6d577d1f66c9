"""The tile table: positions of one slide's tiles, values that are stored with them, and parents.

The parent of a tile is the tile of a coarser grid that holds its centre.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.files.pages import NOTEBOOK_EDGE_PX, notebook_html
from thinsection.slide.geometry import ReadPlan
from thinsection.types import (
    CoordsL0,
    RgbArray,
    Size,
    counted,
    format_mpp,
    shortened,
)

Column = npt.NDArray[Any]  # (N,), numbers of any type
Columns = Mapping[str, Column]  # name -> (N,), a value per tile


@dataclass(frozen=True, kw_only=True)
class TileTable:
    """Tiles of one slide, in the order in which they are read and stored.

    `columns` holds values per tile ('tissue_fraction', QC checks): name -> (N,) array.
    Memory: 16 bytes per tile and the columns' items.
    """

    coords_l0: CoordsL0  # int64 (N, 2), x and y of top-left corners in level-0 px
    plan: ReadPlan
    columns: Mapping[str, Column] = field(default_factory=dict)
    # width and height in level-0 px, and name, of the slide on which `tile_grid` made the tiles, so
    # that they are not taken for tiles of another slide; None is not compared
    slide_size_l0: Size | None = None
    slide_name: str | None = None

    def __post_init__(self) -> None:
        check_coords(self.coords_l0)
        shape = (len(self),)
        for name, column in self.columns.items():
            if column.shape != shape:
                raise InvalidInputError(
                    f"column {name!r} must have shape {shape}, got {column.shape}"
                )

    @property
    def size_l0(self) -> Size:
        """Width and height of a tile in level-0 px.

        Examples:
            >>> tiles.size_l0
            (128, 128)
        """
        return self.plan.size_l0

    def __len__(self) -> int:
        return int(self.coords_l0.shape[0])

    def __getitem__(
        self, rows: int | slice | npt.NDArray[np.bool_] | npt.NDArray[np.integer]
    ) -> TileTable:
        """Returns the table of one tile, of a slice of tiles, or as `select` does.

        Raises:
            IndexError: there is no such row.
        """
        if isinstance(rows, int | np.integer):
            row = range(len(self))[rows]
            rows = slice(row, row + 1)
        columns = {name: column[rows] for name, column in self.columns.items()}
        return replace(self, coords_l0=self.coords_l0[rows], columns=columns)

    def __iter__(self) -> Iterator[TileTable]:
        """Yields the table of each tile."""
        for row in range(len(self)):
            yield self[row]

    def __repr__(self) -> str:
        return f"TileTable({', '.join(self._facts())})"

    def _repr_html_(self) -> str:
        return notebook_html(self._map(), "TileTable", self._facts())

    def _map(self) -> RgbArray | None:
        """A map of the tiles, darker where more of a tile is tissue; None without tiles."""
        if not len(self):
            return None
        from PIL import Image, ImageDraw

        size_l0 = np.array(self.plan.size_l0)
        factor = NOTEBOOK_EDGE_PX / int((self.coords_l0 + size_l0).max())
        corners = self.coords_l0 * factor
        ends = (self.coords_l0 + size_l0) * factor
        shares = self.columns.get("tissue_fraction", np.ones(len(self)))
        shades = 235 - np.nan_to_num(shares, nan=1.0).clip(0, 1) * 150
        width, height = np.ceil(ends.max(axis=0)).astype(int).tolist()
        picture = Image.new("RGB", (width, height), "white")
        draw = ImageDraw.Draw(picture)
        for start, end, shade in zip(corners.tolist(), ends.tolist(), shades.tolist()):
            color = (round(shade), 100, round(shade))
            draw.rectangle((*start, *end), fill=color, outline="white")
        return np.asarray(picture)

    def _facts(self) -> list[str]:
        mpp = self.plan.tile_mpp
        resolution = format_mpp(None if mpp is None else (mpp, mpp))
        facts = [
            f"{counted(len(self), 'tile')} of {self.plan.tile_px} px at {resolution}"
        ]
        if len(self):
            left, top = self.coords_l0.min(axis=0).tolist()
            right, bottom = (self.coords_l0.max(axis=0) + self.plan.size_l0).tolist()
            facts.append(f"x {left} to {right} and y {top} to {bottom} in level-0 px")
        facts.append(f"columns: {shortened(self.columns)}")
        return facts

    def select(
        self, keep: npt.NDArray[np.bool_] | npt.NDArray[np.integer]
    ) -> TileTable:
        """Returns the table of the tiles that a mask (N,) or an array of rows picks.

        Examples:
            >>> full = tiles.select(tiles.coords_l0[:, 0] >= 640)
            >>> int(full.coords_l0[:, 0].min())
            640
        """
        return self[keep]

    def with_columns(self, columns: Mapping[str, Column]) -> TileTable:
        """Returns the table with further columns.

        Examples:
            >>> more = tiles.with_columns({"x": tiles.coords_l0[:, 0]})
            >>> [*more.columns]
            ['tissue_fraction', 'x']
        """
        return replace(self, columns={**self.columns, **columns})


def check_coords(coords_l0: npt.NDArray[np.generic]) -> None:
    """Raises InvalidInputError unless the array is int64 of shape (N, 2)."""
    if coords_l0.dtype != np.int64 or coords_l0.ndim != 2 or coords_l0.shape[1] != 2:
        raise InvalidInputError(
            "coords_l0 must be int64 of shape (N, 2), "
            f"got {coords_l0.dtype} {tuple(coords_l0.shape)}"
        )


# Centres lie on half pixels and borders on whole ones. With this shift, in level-0 px, no centre
# lies on a border, and a tile holds its left and its upper border.
_SHIFT = 0.25


class Tiles(Protocol):
    """Tiles of one slide: a `TileTable`, or `results.tiles(...)`."""

    @property
    def coords_l0(self) -> CoordsL0:
        """Top-left corners, int64 (N, 2)."""

    @property
    def size_l0(self) -> Size:
        """Width and height of a tile in level-0 px."""


def parent_rows(tiles: Tiles, parents: Tiles) -> npt.NDArray[np.int64]:
    """Finds the parent of each tile: the tile of a coarser grid that holds its centre.

    All grids of a slide start at (0, 0). So with 0.5 and 2 µm/px each parent covers 4 x 4 tiles. If
    parents overlap, several may hold the centre. The one with the nearest centre is taken.

    Args:
        tiles: the N tiles of the finer grid.
        parents: the M tiles of the coarser grid of the same slide.

    Returns:
        Row of each tile's parent in the table `parents`, int64 (N,); -1 for a tile without one.

    Memory: about 100 bytes per tile and per parent.

    Raises:
        InvalidInputError: the parents are smaller than the tiles, or of a slide of another size.
    """
    # takes a third of a second to import
    from scipy.spatial import cKDTree

    size = getattr(tiles, "slide_size_l0", None)
    size_of_parents = getattr(parents, "slide_size_l0", None)
    if size and size_of_parents and tuple(size) != tuple(size_of_parents):
        raise InvalidInputError(
            f"parents must be of the slide of the tiles, got slides of {tuple(size_of_parents)} "
            f"and {tuple(size)} level-0 px; pass two grids of one slide"
        )
    size_l0 = np.array(parents.size_l0)
    if (size_l0 < tiles.size_l0).any():
        raise InvalidInputError(
            f"parents must be at least as large as the tiles, got {tuple(parents.size_l0)} for "
            f"{tuple(tiles.size_l0)} level-0 px; pass the finer grid first"
        )
    rows = np.full(len(tiles.coords_l0), -1, dtype=np.int64)
    if len(parents.coords_l0) == 0 or len(rows) == 0:
        return rows
    centres = tiles.coords_l0 + np.array(tiles.size_l0) / 2 + _SHIFT
    parent_centres = parents.coords_l0 + size_l0 / 2
    # in units of a parent's edge, a parent is all that is nearer than 1/2 in both axes
    distances, nearest = cKDTree(parent_centres / size_l0).query(
        centres / size_l0, p=np.inf
    )
    is_inside = distances < 0.5
    rows[is_inside] = nearest[is_inside]
    return rows
