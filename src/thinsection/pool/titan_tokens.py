"""Tokens of a slide for TITAN: tiles summed up by grid cell, without a dense grid.

Shapes: N tiles, M tokens, D channels.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.attention.blocks import blocks_of
from thinsection.errors import InvalidInputError
from thinsection.types import CoordsL0, Size

BLOCK_ROWS = 1024  # tokens a block of the pass that looks for all-zero cells


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrid:
    """The tiles that make up each of M tokens: one token per occupied cell, row-major."""

    # (M, 2), of each token; the smallest row and column of the tiles are 0
    cells: npt.NDArray[np.int64]
    # tiles sorted by token, without those of all-zero cells
    order: npt.NDArray[np.int64]
    # (M + 1), token m sums up tiles order[starts[m]:starts[m + 1]]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.cells)

    def features(
        self,
        tiles: Tensor,
        rows: slice,
        *,
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """Summed tile embeddings (m, D) of a slice of tokens. Memory: the slice's tiles, twice."""
        starts = self.starts[rows.start : rows.stop + 1]
        num_tokens = len(starts) - 1
        picked = torch.from_numpy(self.order[starts[0] : starts[-1]]).to(tiles.device)
        values = tiles.index_select(0, picked).to(device, dtype)
        if len(picked) == num_tokens:
            # one tile a cell: nothing to add up
            return values
        token_of_tile = np.repeat(np.arange(num_tokens), np.diff(starts))
        sums = values.new_zeros(num_tokens, values.shape[1])
        return sums.index_add_(0, torch.from_numpy(token_of_tile).to(device), values)


def token_grid(tiles: Tensor, coords_l0: CoordsL0, *, stride_l0: Size) -> TokenGrid:
    """Tokens of a slide, one per cell of the size of the tiles' stride.

    Tiles that share a cell add up; cells that sum to zero drop out.

    Memory: 5 N int64, and BLOCK_ROWS x D floats; never rows x columns of the slide.
    Raises InvalidInputError: all cells sum to zero.
    """
    cells = (coords_l0 - coords_l0.min(0)) // np.array(stride_l0)
    num_columns = int(cells[:, 1].max()) + 1
    cell_number = cells[:, 0] * num_columns + cells[:, 1]
    order = np.argsort(cell_number, kind="stable")
    first_of_cell = np.flatnonzero(np.diff(cell_number[order], prepend=-1))
    grid = TokenGrid(
        cells=cells[order[first_of_cell]],
        order=order,
        starts=np.append(first_of_cell, len(order)),
    )
    is_kept = _nonzero_tokens(grid, tiles)
    if not is_kept.any():
        raise InvalidInputError(
            "tile_embeddings must contain a row that is not all zero, got none"
        )
    if is_kept.all():
        return grid
    counts = np.diff(grid.starts)
    return TokenGrid(
        cells=grid.cells[is_kept],
        order=grid.order[np.repeat(is_kept, counts)],
        starts=np.append(0, np.cumsum(counts[is_kept])),
    )


def _nonzero_tokens(grid: TokenGrid, tiles: Tensor) -> npt.NDArray[np.bool_]:
    """Tokens (M,) that do not sum to zero in every channel."""
    parts = []
    for rows in blocks_of(len(grid), BLOCK_ROWS):
        sums = grid.features(tiles, rows, device="cpu", dtype=torch.float32)
        parts.append((sums != 0).any(1).numpy())
    return np.concatenate(parts)


def check_no_overlap(coords_l0: CoordsL0, size_l0: Size) -> None:
    """Raise InvalidInputError where most steps within rows or columns are shorter than a tile.

    Cells of the size of a tile would then add neighbouring tiles up to one token. Tiles of several
    grids, as CLAM lays one per piece of tissue, may share a cell now and then, as in TITAN's code.
    """
    for axis in (0, 1):
        step = _median_step(coords_l0, axis)
        if step is not None and step < size_l0[axis]:
            raise InvalidInputError(
                "coords_l0 must be those of tiles without overlap for slide encoder 'titan', "
                f"got steps of {step} px between tiles of {size_l0[axis]} px; pass stride_l0, "
                "or tiles that state it"
            )


def _median_step(coords_l0: CoordsL0, axis: int) -> int | None:
    """Median distance to the next tile along an axis; None where no two tiles are in line."""
    places = np.unique(coords_l0, axis=0)
    order = np.lexsort((places[:, axis], places[:, 1 - axis]))
    steps = np.diff(places[order], axis=0)
    in_line = steps[:, 1 - axis] == 0
    if not in_line.any():
        return None
    return int(np.median(steps[in_line, axis]))
