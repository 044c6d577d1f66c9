"""Checks of what goes into a slide encoder, at one place and before any arithmetic."""

from typing import Any

import numpy as np
import torch

from thinsection.errors import InvalidInputError
from thinsection.types import CoordsL0

CHECK_ROWS = 2048  # rows a block of the finiteness check: its copies stay below 16 MiB


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
