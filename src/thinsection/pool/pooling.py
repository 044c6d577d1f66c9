"""Slide encoders without weights, and the check of input that all slide encoders share.

Shapes: N tiles of one slide, D channels of a tile embedding.
"""

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor

from thinsection.errors import InvalidInputError
from thinsection.pool.encoder import (
    BLOCK_ROWS,
    RowBlocks,
    SlideEmbedding,
    SlideEncoder,
    TileEmbeddings,
    check_pixels,
)
from thinsection.types import CoordsL0

CHECK_ROWS = 2048  # rows a block of the finiteness check: its copies stay below 16 MiB


class MeanSlideEncoder(SlideEncoder):
    """The mean over tiles, summed in float64, so that the order of tiles does not matter."""

    name = "mean"
    reads_blocks = True

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Mean (D,) float32. Memory: one float64 block of BLOCK_ROWS x D."""
        # one sum: a small result of each block would keep the heap from using freed blocks again
        total = None
        for block in checked_blocks(tile_embeddings, coords_l0, tile_px_l0):
            if total is None:
                total = torch.zeros_like(block[0], dtype=torch.float64)
            total += block.double().sum(0)
        assert total is not None
        return as_numpy(total / len(coords_l0))


class MaxSlideEncoder(SlideEncoder):
    """The largest value of each channel over tiles."""

    name = "max"
    reads_blocks = True

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Maximum (D,) float32. Memory: one block of BLOCK_ROWS x D."""
        largest = None
        for block in checked_blocks(tile_embeddings, coords_l0, tile_px_l0):
            if largest is None:
                largest = block[0].clone()
            torch.maximum(largest, block.amax(0), out=largest)
        assert largest is not None
        return as_numpy(largest)


def checked_blocks(
    tile_embeddings: object, coords_l0: CoordsL0, tile_px_l0: int
) -> Iterator[Tensor]:
    """Yields blocks of BLOCK_ROWS embeddings, which are checked as by `checked_slide`.

    Rows on disk are read block by block.
    """
    if not isinstance(tile_embeddings, RowBlocks):
        tiles, _, _ = checked_slide(tile_embeddings, coords_l0, tile_px_l0)
        yield from torch.split(tiles, BLOCK_ROWS)
        return
    check_pixels("tile_px_l0", tile_px_l0)
    num_rows = len(tile_embeddings)
    if not num_rows or len(coords_l0) != num_rows:
        raise InvalidInputError(
            f"coords_l0 must have one row per tile embedding ({num_rows}), and at least one, "
            f"got {len(coords_l0)}"
        )
    tile_embeddings.check()
    for block in tile_embeddings.blocks(BLOCK_ROWS):
        yield torch.from_numpy(block)


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
    for number, block in enumerate(torch.split(tiles, CHECK_ROWS)):
        bad_rows = (~block.isfinite().all(1)).nonzero()
        if len(bad_rows):
            row = number * CHECK_ROWS + int(bad_rows[0, 0])
            raise InvalidInputError(
                f"tile_embeddings must be finite, got NaN or inf in row {row}"
            )
    return tiles


def as_numpy(vector: Tensor) -> SlideEmbedding:
    """Vector as float32 on the host."""
    return cast(SlideEmbedding, vector.float().cpu().numpy())
