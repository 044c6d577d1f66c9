"""What goes into a slide encoder: checked before any arithmetic, and tiles to tokens.

Shapes: N tiles, M tokens (occupied grid cells), D channels.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thinsection.errors import InvalidInputError
from thinsection.types import CoordsL0

CHECK_ROWS = 2048  # rows a block of the finiteness check: its copies stay below 16 MiB
BLOCK_ROWS = 1024  # tokens a block of the pass that looks for all-zero cells


def checked_slide(
    tile_embeddings: Any, coords_l0: Any, tile_px_l0: Any, *, tile_dim: int | None = None
) -> tuple[torch.Tensor, CoordsL0, int]:
    """Embeddings (N, D), which share memory with the input, int64 (N, 2) on the host, and the edge.

    Memory: one bool block of CHECK_ROWS x D.

    Raises:
        InvalidInputError: not a non-empty (N, D) float array, of another D, or not finite; not one
            pair of integers per tile embedding; not a positive int.
    """
    tiles = _checked_embeddings(tile_embeddings, tile_dim)
    array = coords_l0.cpu().numpy() if isinstance(coords_l0, torch.Tensor) else coords_l0
    array = np.asarray(array)
    if array.dtype.kind not in "iu" or array.ndim != 2 or array.shape[1] != 2:
        got = f"{array.dtype} {array.shape}"
        raise InvalidInputError(f"coords_l0 must be int64 of shape (N, 2), got {got}")
    if len(array) != len(tiles):
        rule = f"have one row per tile embedding ({len(tiles)})"
        raise InvalidInputError(f"coords_l0 must {rule}, got {len(array)}")
    is_int = isinstance(tile_px_l0, int | np.integer) and not isinstance(tile_px_l0, bool)
    if not is_int or tile_px_l0 <= 0:
        raise InvalidInputError(f"tile_px_l0 must be an int > 0, got {tile_px_l0!r}")
    return tiles, array.astype(np.int64), int(tile_px_l0)


def _checked_embeddings(found: Any, tile_dim: int | None) -> torch.Tensor:
    if isinstance(found, np.ndarray):
        # torch would warn of a view of foreign memory that is not writeable
        found = _from_numpy(found if found.flags.writeable else found.copy())
    if not isinstance(found, torch.Tensor):
        kind = type(found).__name__
        raise InvalidInputError(f"tile_embeddings must be an array or a tensor, got {kind}")
    shape = tuple(found.shape)
    if not found.is_floating_point() or len(shape) != 2 or 0 in shape:
        rule = f"float of shape (N, {'D' if tile_dim is None else tile_dim}) with N >= 1"
        got = f"{str(found.dtype).removeprefix('torch.')} {shape}"
        raise InvalidInputError(f"tile_embeddings must be {rule}, got {got}")
    if tile_dim is not None and shape[1] != tile_dim:
        remedy = "were they made by another tile encoder?"
        message = f"tile_embeddings must be of shape (N, {tile_dim}), got {shape}; {remedy}"
        raise InvalidInputError(message)
    for rows in row_blocks(shape[0], CHECK_ROWS):
        finite = found[rows].isfinite().all(1)
        if not bool(finite.all()):
            row = rows.start + int((~finite).nonzero()[0, 0])
            raise InvalidInputError(f"tile_embeddings must be finite, got NaN or inf in row {row}")
    return found


def _from_numpy(array: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:
        got = f"{array.dtype} {array.shape}"
        message = f"tile_embeddings must be float of shape (N, D), got {got}"
        raise InvalidInputError(message) from None


def row_blocks(num_rows: int, size: int) -> list[slice]:
    """Slices of at most `size` that cover 0..num_rows."""
    return [slice(i, min(i + size, num_rows)) for i in range(0, num_rows, size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrid:
    """Which tiles make up which token: one per occupied cell, row-major, without a dense grid."""

    cells: npt.NDArray[np.int64]  # (M, 2), of each token; smallest row and column seen 0
    order: npt.NDArray[np.int64]  # (N'), tiles sorted by token, without those of all-zero cells
    starts: npt.NDArray[np.int64]  # (M + 1), token m sums up tiles order[starts[m]:starts[m + 1]]

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
