"""Regions: squares of whole tiles, for encoders that read all tiles of a region (HIPT, TITAN)."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from thinsection.slide.geometry import ReadPlan
from thinsection.tiles.table import Column
from thinsection.types import CoordsL0, Size

REGION = "region"
REGION_ROW = "region_row"
REGION_COLUMN = "region_column"


def region_plan(plan: ReadPlan, tiles_across: int) -> ReadPlan:
    """Plan of the tiles with the size and the step of a region, to lay regions side by side."""
    width, height = plan.size_l0
    step_x, step_y = plan.stride_l0
    size_l0 = (
        width + (tiles_across - 1) * step_x,
        height + (tiles_across - 1) * step_y,
    )
    stride_l0 = (tiles_across * step_x, tiles_across * step_y)
    return replace(plan, size_l0=size_l0, stride_l0=stride_l0)


def tiles_of_regions(
    corners_l0: CoordsL0, stride_l0: Size, tiles_across: int
) -> CoordsL0:
    """Corners of the tiles of each region, row by row, int64 (R * tiles_across², 2).

    Embeddings (N, D) in this order are regions by `reshape(-1, tiles_across, tiles_across, D)`.

    Args:
        corners_l0: top-left corners of the regions, int64 (R, 2).
        stride_l0: step from one tile to the next.
        tiles_across: tiles along the edge of a region.
    """
    rows, columns = np.divmod(np.arange(tiles_across**2), tiles_across)
    steps = np.stack([columns, rows], axis=1) * np.array(stride_l0)
    coords_l0: CoordsL0 = (corners_l0[:, None] + steps).reshape(-1, 2)
    return coords_l0


def region_columns(num_regions: int, tiles_across: int) -> dict[str, Column]:
    """Columns of the table of regions: number of the region, row and column in it, int32 (N,)."""
    tiles_of_each = tiles_across**2
    rows, columns = np.divmod(np.arange(tiles_of_each, dtype=np.int32), tiles_across)
    numbers = np.arange(num_regions, dtype=np.int32)
    return {
        REGION: np.repeat(numbers, tiles_of_each),
        REGION_ROW: np.tile(rows, num_regions),
        REGION_COLUMN: np.tile(columns, num_regions),
    }


def region_means(columns: Mapping[str, Column], values: Column) -> Column:
    """Mean of `values` (N,) over the region of each tile; without regions, the values."""
    if REGION not in columns:
        return values
    numbers = columns[REGION]
    sums = np.bincount(numbers, weights=values)
    counts = np.bincount(numbers)
    return (sums / np.maximum(counts, 1))[numbers]
