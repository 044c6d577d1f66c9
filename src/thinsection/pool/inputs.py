"""What slide encoders share: checks of their input, and softmax sums over blocks of tiles.

Shapes: N tiles, D channels of a tile embedding; n tiles of a block, A scores of a tile, E channels
of a value.
"""

import numpy as np
import torch
from torch import Tensor

from thinsection.attention.blocks import blocks_of
from thinsection.errors import InvalidInputError
from thinsection.pool.encoder import check_pixels
from thinsection.types import CoordsL0

CHECK_ROWS = 2048  # rows a block of the finiteness check: its copies stay below 16 MiB


def checked_slide(
    tile_embeddings: object,
    coords_l0: object,
    tile_px_l0: object,
    *,
    tile_dim: int | None = None,
) -> tuple[Tensor, CoordsL0, int]:
    """Embeddings (N, D), which share memory with the input, int64 (N, 2) on the host, the edge.

    Raises InvalidInputError: a shape, dtype or value does not fit; D is not `tile_dim`.
    """
    tiles = _checked_embeddings(tile_embeddings, tile_dim)
    if isinstance(coords_l0, Tensor):
        coords_l0 = coords_l0.cpu().numpy()
    coords = np.asarray(coords_l0)
    if coords.dtype.kind not in "iu" or coords.ndim != 2 or coords.shape[1] != 2:
        raise InvalidInputError(
            f"coords_l0 must be int64 of shape (N, 2), got {coords.dtype} {coords.shape}"
        )
    if len(coords) != len(tiles):
        raise InvalidInputError(
            f"coords_l0 must have one row per tile embedding ({len(tiles)}), got {len(coords)}"
        )
    return tiles, coords.astype(np.int64), check_pixels("tile_px_l0", tile_px_l0)


def _checked_embeddings(values: object, tile_dim: int | None) -> Tensor:
    if isinstance(values, np.ndarray):
        # torch takes real numbers of at most 8 bytes
        if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
            raise InvalidInputError(
                f"tile_embeddings must be float of shape (N, D), got {values.dtype} {values.shape}"
            )
        # torch would warn of a view of foreign memory that is not writeable
        values = torch.from_numpy(values if values.flags.writeable else values.copy())
    if not isinstance(values, Tensor):
        raise InvalidInputError(
            f"tile_embeddings must be an array or a tensor, got {type(values).__name__}"
        )
    tiles = values
    shape = tuple(tiles.shape)
    if not tiles.is_floating_point() or len(shape) != 2 or 0 in shape:
        dim = "D" if tile_dim is None else tile_dim
        dtype = str(tiles.dtype).removeprefix("torch.")
        raise InvalidInputError(
            f"tile_embeddings must be float of shape (N, {dim}) with N >= 1, got {dtype} {shape}"
        )
    if tile_dim is not None and shape[1] != tile_dim:
        raise InvalidInputError(
            f"tile_embeddings must be of shape (N, {tile_dim}), got {shape}; check which tile "
            "encoder made them"
        )
    for rows in blocks_of(len(tiles), CHECK_ROWS):
        bad_rows = (~tiles[rows].isfinite().all(1)).nonzero()
        if len(bad_rows):
            row = rows.start + int(bad_rows[0, 0])
            raise InvalidInputError(
                f"tile_embeddings must be finite, got NaN or inf in row {row}"
            )
    return tiles


class SoftmaxSums:
    """A weighted sum of values for each score; the weights are a softmax over all tiles.

    The result does not depend on where the blocks end, except in the last bits.

    Memory: A (E + 2) float64, whatever the number of tiles.
    Source: Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
    """

    def __init__(self) -> None:
        self._largest: Tensor | None = None  # (A,), of all scores so far
        self._weights = torch.empty(0)  # (A,), sums of exp(score - largest)
        self._sums = torch.empty(0)  # (A, E), sums of exp(score - largest) * value

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Adds a block of tiles.

        Args:
            scores: (n, A).
            values: (n, E) for all scores, or (n, A, E) with values of its own for each.
        """
        scores = scores.double()
        largest = scores.amax(0)
        if self._largest is not None:
            largest = torch.maximum(largest, self._largest)
        weights = (scores - largest).exp()
        # products in the values' own precision, their sum over blocks in float64
        of_values = weights.to(values.dtype)
        if values.ndim == 2:
            sums = (of_values.T @ values).double()
        else:
            sums = torch.einsum("na,nae->ae", of_values, values).double()
        totals = weights.sum(0)
        if self._largest is not None:
            earlier = (self._largest - largest).exp()
            totals += earlier * self._weights
            sums += earlier[:, None] * self._sums
        self._largest = largest
        self._weights = totals
        self._sums = sums

    def result(self) -> Tensor:
        """Weighted sums (A, E) float64 of all tiles so far."""
        return self._sums / self._weights[:, None]
