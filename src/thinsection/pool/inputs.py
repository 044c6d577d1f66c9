"""Checks of what goes into a slide encoder, at one place and before any arithmetic."""

from typing import Any

import numpy as np
import torch

from thinsection.errors import InvalidInputError
from thinsection.types import CoordsL0

CHECK_ROWS = 2048  # rows a block of the finiteness check: its copies stay below 16 MiB


def checked_embeddings(tile_embeddings: Any, *, tile_dim: int | None = None) -> torch.Tensor:
    """The embeddings (N, D) as a tensor; shares memory with the input.

    Memory: one bool block of CHECK_ROWS x D.

    Raises:
        InvalidInputError: not a non-empty (N, D) float array, of another D, or not finite.
    """
    if isinstance(tile_embeddings, np.ndarray):
        if not tile_embeddings.flags.writeable:  # torch would warn; a view of foreign memory
            tile_embeddings = tile_embeddings.copy()
        tile_embeddings = _from_numpy(tile_embeddings)
    if not isinstance(tile_embeddings, torch.Tensor):
        kind = type(tile_embeddings).__name__
        raise InvalidInputError(f"tile_embeddings must be an array or a tensor, got {kind}")
    shape = tuple(tile_embeddings.shape)
    if not tile_embeddings.is_floating_point() or len(shape) != 2 or 0 in shape:
        wide = "D" if tile_dim is None else tile_dim
        got = f"{str(tile_embeddings.dtype).removeprefix('torch.')} {shape}"
        rule = f"float of shape (N, {wide}) with N >= 1"
        raise InvalidInputError(f"tile_embeddings must be {rule}, got {got}")
    if tile_dim is not None and shape[1] != tile_dim:
        remedy = "were they made by another tile encoder?"
        message = f"tile_embeddings must be of shape (N, {tile_dim}), got {shape}; {remedy}"
        raise InvalidInputError(message)
    for start in range(0, shape[0], CHECK_ROWS):
        finite = tile_embeddings[start : start + CHECK_ROWS].isfinite().all(1)
        if not bool(finite.all()):
            row = start + int((~finite).nonzero()[0, 0])
            raise InvalidInputError(f"tile_embeddings must be finite, got NaN or inf in row {row}")
    return tile_embeddings


def checked_coords(coords_l0: Any, num_tiles: int) -> CoordsL0:
    """The coordinates as int64 (N, 2) in host memory.

    Raises:
        InvalidInputError: not integer, not (N, 2), or not one per tile embedding.
    """
    array = coords_l0.cpu().numpy() if isinstance(coords_l0, torch.Tensor) else coords_l0
    array = np.asarray(array)
    if array.dtype.kind not in "iu" or array.ndim != 2 or array.shape[1] != 2:
        got = f"{array.dtype} {array.shape}"
        raise InvalidInputError(f"coords_l0 must be int64 of shape (N, 2), got {got}")
    if array.shape[0] != num_tiles:
        rule = f"have one row per tile embedding ({num_tiles})"
        raise InvalidInputError(f"coords_l0 must {rule}, got {array.shape[0]}")
    return array.astype(np.int64)


def checked_tile_px(tile_px_l0: Any) -> int:
    """The tile edge as a positive int.

    Raises:
        InvalidInputError: not an integer, or not positive.
    """
    is_int = isinstance(tile_px_l0, int | np.integer) and not isinstance(tile_px_l0, bool)
    if not is_int or tile_px_l0 <= 0:
        raise InvalidInputError(f"tile_px_l0 must be an int > 0, got {tile_px_l0!r}")
    return int(tile_px_l0)


def _from_numpy(array: Any) -> Any:
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise InvalidInputError(
            f"tile_embeddings must be float of shape (N, D), got {array.dtype} {array.shape}"
        ) from None
