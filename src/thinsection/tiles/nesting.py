"""Parents of tiles: the tile of a coarser grid that holds the centre of a tile."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.types import CoordsL0, Size

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
        InvalidInputError: the parents are smaller than the tiles.
    """
    # takes a third of a second to import
    from scipy.spatial import cKDTree

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
