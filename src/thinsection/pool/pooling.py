"""The check of input that all slide encoders on PyTorch share.

Shapes: N tiles of one slide, D channels of a tile embedding.
"""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from thinsection.errors import InvalidInputError
from thinsection.pool.encoder import (
    CHECK_ROWS,
    SlideEmbedding,
    check_coords,
    check_form,
    check_pixels,
    not_finite,
)
from thinsection.types import CoordsL0


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
    coords = check_coords(coords_l0, len(tiles))
    return tiles, coords, check_pixels("tile_px_l0", tile_px_l0)


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
    dtype = str(tiles.dtype).removeprefix("torch.")
    check_form(
        dtype, tuple(tiles.shape), is_floating=tiles.is_floating_point(), dim=tile_dim
    )
    for number, block in enumerate(torch.split(tiles, CHECK_ROWS)):
        bad_rows = (~block.isfinite().all(1)).nonzero()
        if len(bad_rows):
            raise not_finite(number * CHECK_ROWS + int(bad_rows[0, 0]))
    return tiles


def as_numpy(vector: Tensor) -> SlideEmbedding:
    """Vector as float32 on the host."""
    return cast(SlideEmbedding, vector.float().cpu().numpy())
