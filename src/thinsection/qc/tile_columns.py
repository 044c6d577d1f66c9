"""How much of each tile each check touched."""

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.qc.coverage import box_fractions
from thinsection.qc.engine import QcResult
from thinsection.types import CoordsL0


def tile_qc_columns(
    result: QcResult, coords_l0: CoordsL0, tile_px_l0: int
) -> dict[str, npt.NDArray[np.float32]]:
    """Per check, the share of each tile's area that it touched, float32 (N,) in [0, 1].

    Checks that only measure, or that fill holes, have no column. The share is exact: px of the
    mask that a tile's border cuts count by the part inside. Area outside the slide counts as
    untouched.

    Args:
        result: of `run_qc`.
        coords_l0: (N, 2) x, y of the tiles' top-left corners, level-0 px.
        tile_px_l0: edge of a tile, level-0 px.

    Memory: O(H * W + N) for each check.

    Raises:
        InvalidInputError: coords_l0 is not (N, 2), or the tile has no size.
    """
    if coords_l0.ndim != 2 or coords_l0.shape[1] != 2:
        got = f"{coords_l0.dtype} {coords_l0.shape}"
        raise InvalidInputError(f"coords_l0 must be int64 of shape (N, 2), got {got}")
    if tile_px_l0 <= 0:
        raise InvalidInputError(f"tile_px_l0 must be > 0, got {tile_px_l0}")
    filling = {c.name for c in result.pipeline.checks if c.kind == "fill_holes"}
    return {
        name: box_fractions(mask, result.frame, coords_l0, (tile_px_l0, tile_px_l0))
        for name, mask in result.masks.items()
        if name not in filling
    }
