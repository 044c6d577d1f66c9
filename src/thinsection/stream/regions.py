"""Which tiles are read together: pure planning of regions over a tile table."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from thinsection.slide.geometry import ReadPlan
from thinsection.stream.budget import CHANNELS, REGION_BYTES
from thinsection.tiles.grid import BLOCK_TILES
from thinsection.tiles.table import TileTable
from thinsection.types import Size

# a region may cover this many times the px of its tiles: reading a gap is cheaper than decoding
# the segments along a cut twice
_MAX_WASTE = 1.3
# handing work to a thread costs some µs: worth it for about a ms of decoding
_TASK_TILES = 8


@dataclass(frozen=True, slots=True)
class Region:
    """A run of consecutive tiles that one read serves.

    Attributes:
        start, stop: the tiles of the table, half open.
        origin_lv: (x, y) of the region on the plan's level.
        size_lv: (width, height) of it, px.
    """

    start: int
    stop: int
    origin_lv: tuple[int, int]
    size_lv: Size


def origins_lv(table: TileTable) -> np.ndarray:
    """int64 (N, 2): each tile's corner on the plan's level, rounded as `lv_from_l0` does."""
    # rint rounds halves to even, as Python's round
    return np.rint(table.coords_l0 / table.plan.downsample).astype(np.int64)


def plan_regions(
    table: TileTable, start: int, stop: int, *, segment: Size | None = None
) -> Iterator[Region]:
    """Regions that cover tiles [start, stop), in order, each within `REGION_BYTES`.

    Args:
        table: the tiles.
        start, stop: the part of it that one batch takes.
        segment: (width, height) of the file's own tiles on that level; where a tile is exactly
            one of them it is read by itself, straight into its batch.
    """
    plan = table.plan
    corners = origins_lv(table.select(np.arange(start, stop)))
    if segment is not None and _is_segment(plan, corners, segment):
        for index, (x, y) in enumerate(corners.tolist(), start):
            yield Region(index, index + 1, (x, y), plan.size_lv)
        return
    block = np.array(plan.stride_l0, dtype=np.int64) * BLOCK_TILES
    keys = table.coords_l0[start:stop] // block
    cuts = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
    bounds = [0, *cuts.tolist(), stop - start]
    for first, last in pairwise(bounds):
        for a, b in _split(corners, plan, first, last):
            low = corners[a:b].min(axis=0)
            high = corners[a:b].max(axis=0) + plan.size_lv
            origin, extent = low.tolist(), (high - low).tolist()
            yield Region(start + a, start + b, (origin[0], origin[1]), (extent[0], extent[1]))


def batched_regions(regions: Iterable[Region]) -> Iterator[tuple[Region, ...]]:
    """Regions in groups of about `_TASK_TILES` tiles: what a worker takes at once."""
    group: list[Region] = []
    for region in regions:
        group.append(region)
        if group[-1].stop - group[0].start >= _TASK_TILES:
            yield tuple(group)
            group = []
    if group:
        yield tuple(group)


def _is_segment(plan: ReadPlan, corners: np.ndarray, segment: Size) -> bool:
    return segment == plan.size_lv and not (corners % np.array(segment)).any()


def _split(corners: np.ndarray, plan: ReadPlan, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Halves a run until its bounding box is small and full enough."""
    count = stop - start
    if count <= 1:
        if count:
            yield start, stop
        return
    extent = corners[start:stop].max(axis=0) + plan.size_lv - corners[start:stop].min(axis=0)
    area = int(extent[0]) * int(extent[1])
    wasteful = area > _MAX_WASTE * count * plan.size_lv[0] * plan.size_lv[1]
    if wasteful or area * CHANNELS > REGION_BYTES:
        middle = start + count // 2
        yield from _split(corners, plan, start, middle)
        yield from _split(corners, plan, middle, stop)
    else:
        yield start, stop
