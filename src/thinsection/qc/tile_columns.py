"""How much of each tile each check touched."""

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.qc.engine import QcResult
from thinsection.types import CoordsL0, MaskArray, MaskFrame


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
        name: mask_share(mask, result.frame, coords_l0, tile_px_l0)
        for name, mask in result.masks.items()
        if name not in filling
    }


def mask_share(
    mask: MaskArray, frame: MaskFrame, coords_l0: CoordsL0, tile_px_l0: int
) -> npt.NDArray[np.float32]:
    """Share of each tile's area inside the mask, float32 (N,), by an integral image."""
    integral = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1))
    np.cumsum(np.cumsum(mask, axis=0), axis=1, out=integral[1:, 1:])
    scale_x, scale_y = frame.downsample_xy
    left, top = coords_l0[:, 0] / scale_x, coords_l0[:, 1] / scale_y
    right, bottom = left + tile_px_l0 / scale_x, top + tile_px_l0 / scale_y
    covered = (
        _at(integral, bottom, right)
        - _at(integral, top, right)
        - _at(integral, bottom, left)
        + _at(integral, top, left)
    )
    area = (tile_px_l0 / scale_x) * (tile_px_l0 / scale_y)
    return np.clip(covered / area, 0, 1).astype(np.float32)


def _at(
    integral: npt.NDArray[np.float64], y: npt.NDArray[np.float64], x: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The integral image at fractional places: between px it grows bilinearly."""
    y = np.clip(y, 0, integral.shape[0] - 1)
    x = np.clip(x, 0, integral.shape[1] - 1)
    y0 = np.minimum(y.astype(np.int64), integral.shape[0] - 2)
    x0 = np.minimum(x.astype(np.int64), integral.shape[1] - 2)
    fy, fx = y - y0, x - x0
    upper = integral[y0, x0] * (1 - fx) + integral[y0, x0 + 1] * fx
    lower = integral[y0 + 1, x0] * (1 - fx) + integral[y0 + 1, x0 + 1] * fx
    return np.asarray(upper * (1 - fy) + lower * fy)
