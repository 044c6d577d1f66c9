"""Tiles to tokens: one per occupied grid cell, in row-major order, without a dense grid.

Shapes: N tiles, M tokens (occupied cells), D channels.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from thinsection.errors import InvalidInputError
from thinsection.pool.inputs import row_blocks
from thinsection.types import CoordsL0

BLOCK_ROWS = 1024  # tokens a block of the pass that looks for all-zero cells


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrid:
    """Which tiles make up which token.

    Attributes:
        cells: int64 (M, 2), grid cell of each token, row-major, smallest row and column seen 0.
        order: int64 (N'), tiles sorted by token; tiles of all-zero cells are left out.
        starts: int64 (M + 1), token m is the sum of tiles order[starts[m]:starts[m + 1]].
    """

    cells: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.cells)

    def features(
        self, tiles: torch.Tensor, rows: slice, *, device: str | torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        """Summed tile embeddings (m, D) of a slice of tokens.

        Memory: the tiles of the slice, twice.
        """
        starts = self.starts[rows.start : rows.stop + 1]
        picked = torch.from_numpy(self.order[starts[0] : starts[-1]]).to(tiles.device)
        values = tiles.index_select(0, picked).to(device, dtype)
        if len(picked) == len(starts) - 1:  # one tile a cell: nothing to add up
            return values
        token = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        total = values.new_zeros(len(starts) - 1, values.shape[1])
        return total.index_add_(0, torch.from_numpy(token).to(device), values)


def token_grid(tiles: torch.Tensor, coords_l0: CoordsL0, *, tile_px_l0: int) -> TokenGrid:
    """The tokens of a slide: tiles that share a cell add up, cells that sum to zero drop out.

    Memory: 5 N int64, and BLOCK_ROWS x D floats; never rows x columns of the slide.

    Raises:
        InvalidInputError: every tile embedding is zero.
    """
    cells = (coords_l0 - coords_l0.min(0)) // tile_px_l0
    key = cells[:, 0] * (int(cells[:, 1].max()) + 1) + cells[:, 1]
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    grid = TokenGrid(cells=cells[order[first]], order=order, starts=np.append(first, len(order)))
    blocks = row_blocks(len(grid), BLOCK_ROWS)
    sums = (grid.features(tiles, rows, device="cpu", dtype=torch.float32) for rows in blocks)
    kept = np.concatenate([(block != 0).any(1).numpy() for block in sums])
    if not kept.any():
        raise InvalidInputError("tile_embeddings must hold a row that is not all zero, got none")
    if kept.all():
        return grid
    counts = np.diff(grid.starts)
    return TokenGrid(
        cells=grid.cells[kept],
        order=grid.order[np.repeat(kept, counts)],
        starts=np.append(0, np.cumsum(counts[kept])),
    )
