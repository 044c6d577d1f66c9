"""Slide encoders without weights: mean and maximum over tiles. PyTorch is not imported here.

Shapes: N tiles of one slide, D channels of a tile embedding.
"""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from thinsection.pool.encoder import (
    BLOCK_ROWS,
    CHECK_ROWS,
    RowBlocks,
    SlideEmbedding,
    SlideEncoder,
    TileEmbeddings,
    check_coords,
    check_form,
    check_num_coords,
    check_pixels,
    not_finite,
)
from thinsection.types import CoordsL0

Block = npt.NDArray[Any]  # (B, D), floating-point


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
                total = np.zeros(block.shape[1])
            total += block.sum(axis=0, dtype=np.float64)
        assert total is not None
        return cast(SlideEmbedding, (total / len(coords_l0)).astype(np.float32))


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
                largest = block[0].copy()
            np.maximum(largest, block.max(axis=0), out=largest)
        assert largest is not None
        return cast(SlideEmbedding, largest.astype(np.float32))


def checked_blocks(
    tile_embeddings: object, coords_l0: CoordsL0, tile_px_l0: int
) -> Iterator[Block]:
    """Yields blocks of BLOCK_ROWS embeddings, which are checked as by `checked_slide`.

    Rows on disk are read block by block; tensors become arrays.
    """
    if isinstance(tile_embeddings, RowBlocks):
        check_pixels("tile_px_l0", tile_px_l0)
        check_num_coords(len(coords_l0), len(tile_embeddings))
        tile_embeddings.check()
        yield from tile_embeddings.blocks(BLOCK_ROWS)
        return
    if isinstance(tile_embeddings, np.ndarray):
        tiles = tile_embeddings
        check_form(str(tiles.dtype), tiles.shape, is_floating=tiles.dtype.kind == "f")
        for start in range(0, len(tiles), CHECK_ROWS):
            finite = np.isfinite(tiles[start : start + CHECK_ROWS]).all(axis=1)
            if not finite.all():
                raise not_finite(start + int(finite.argmin()))
        check_coords(coords_l0, len(tiles))
        check_pixels("tile_px_l0", tile_px_l0)
    else:
        from thinsection.pool.pooling import checked_slide

        checked, _, _ = checked_slide(tile_embeddings, coords_l0, tile_px_l0)
        tiles = (
            checked.cpu().numpy()
            if checked.itemsize > 2
            else checked.float().cpu().numpy()
        )
    for start in range(0, len(tiles), BLOCK_ROWS):
        yield tiles[start : start + BLOCK_ROWS]
