"""Which tiles are read together, planned purely over the corners of one batch; and the reading."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan, l0_from_lv, origins_lv
from thinsection.slide.resize import resample
from thinsection.stream.budget import CHANNELS, REGION_BYTES
from thinsection.tiles.grid import BLOCK_TILES
from thinsection.types import CoordsL0, CoordsLv, Size, TileArray

# a region may cover this many times the px of its tiles: reading a gap is cheaper than decoding
# the segments along a cut twice
_MAX_WASTE = 1.3
# handing work to a thread costs some µs: worth it for about a ms of decoding
_TASK_TILES = 8


@dataclass(frozen=True, slots=True)
class RegionRead:
    """Consecutive tiles that one read serves, and are then cut out of it.

    Attributes:
        start, stop: the tiles, half open, counted from the batch's first.
        origin_lv: (x, y) of the region on the plan's level.
        size_lv: (width, height) of it, px.
    """

    start: int
    stop: int
    origin_lv: tuple[int, int]
    size_lv: Size


@dataclass(frozen=True, slots=True)
class TileRun:
    """Consecutive tiles that share no segment of the file, so that each is read by itself.

    Attributes:
        start, stop: the tiles, half open, counted from the batch's first.
    """

    start: int
    stop: int


Reads = Sequence[RegionRead | TileRun]


def plan_batch(
    coords_l0: CoordsL0, plan: ReadPlan, *, segment: Size | None = None
) -> tuple[CoordsLv, list[Reads]]:
    """The corners of a batch's tiles on their level, and its reads, grouped as threads take them.

    Args:
        coords_l0: int64 (B, 2), of the batch.
        plan: how they are read.
        segment: (width, height) of the file's own tiles on that level; where each tile is made of
            whole ones, none is shared.

    Returns:
        int64 (B, 2), and groups of about `_TASK_TILES` tiles that together cover all, in order.
    """
    corners_lv = origins_lv(coords_l0, plan.downsample)
    count = len(corners_lv)
    if segment is not None and _of_whole_segments(plan, corners_lv, segment):
        starts = range(0, count, _TASK_TILES)
        return corners_lv, [(TileRun(i, min(i + _TASK_TILES, count)),) for i in starts]
    return corners_lv, list(_grouped(plan_regions(coords_l0, corners_lv, plan)))


def plan_regions(coords_l0: CoordsL0, corners_lv: CoordsLv, plan: ReadPlan) -> Iterator[RegionRead]:
    """Regions that cover these tiles, in order, each within `REGION_BYTES`."""
    block = np.array(plan.stride_l0, dtype=np.int64) * BLOCK_TILES
    keys = coords_l0 // block
    cuts = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
    for first, last in pairwise([0, *cuts.tolist(), len(keys)]):
        for start, stop in _split(corners_lv, plan, first, last):
            low = corners_lv[start:stop].min(axis=0)
            high = corners_lv[start:stop].max(axis=0) + plan.size_lv
            origin, extent = low.tolist(), (high - low).tolist()
            yield RegionRead(start, stop, (origin[0], origin[1]), (extent[0], extent[1]))


def _grouped(regions: Iterable[RegionRead]) -> Iterator[Reads]:
    group: list[RegionRead] = []
    for region in regions:
        group.append(region)
        if group[-1].stop - group[0].start >= _TASK_TILES:
            yield group
            group = []
    if group:
        yield group


def _of_whole_segments(plan: ReadPlan, corners_lv: CoordsLv, segment: Size) -> bool:
    aligned = not (plan.size_lv[0] % segment[0] or plan.size_lv[1] % segment[1])
    return aligned and not (corners_lv % segment).any()


def _split(
    corners_lv: CoordsLv, plan: ReadPlan, start: int, stop: int
) -> Iterator[tuple[int, int]]:
    """Halves a run until its bounding box is small and full enough."""
    count = stop - start
    if count <= 1:
        if count:
            yield start, stop
        return
    low, high = corners_lv[start:stop].min(axis=0), corners_lv[start:stop].max(axis=0)
    extent = high + plan.size_lv - low
    area = int(extent[0]) * int(extent[1])
    wasteful = area > _MAX_WASTE * count * plan.size_lv[0] * plan.size_lv[1]
    if wasteful or area * CHANNELS > REGION_BYTES:
        middle = start + count // 2
        yield from _split(corners_lv, plan, start, middle)
        yield from _split(corners_lv, plan, middle, stop)
    else:
        yield start, stop


def decode_region(
    slide: Slide, plan: ReadPlan, region: RegionRead, corners_lv: CoordsLv, out: TileArray
) -> None:
    """Reads a region and cuts its tiles into `out`.

    A tile of a region is, to the bit, the tile read by itself: each is cut out first and resampled
    (Lanczos, anti-aliased) within its own borders.

    Args:
        slide: the opened slide.
        plan: its read plan.
        region: what to read.
        corners_lv: int64 (b, 2), the tiles' corners on the plan's level.
        out: uint8 (b, tile_px, tile_px, 3).

    Memory: the region and one tile of the level.
    """
    x0, y0 = region.origin_lv
    origin_l0 = (l0_from_lv(x0, plan.downsample), l0_from_lv(y0, plan.downsample))
    alone = len(out) == 1 and not plan.resamples
    target = out[0] if alone else None
    pixels = slide.read_region(origin_l0, plan.level, region.size_lv, out=target)
    if alone:
        return
    width, height = plan.size_lv
    for (x, y), tile in zip((corners_lv - region.origin_lv).tolist(), out):
        cut = pixels[y : y + height, x : x + width]
        tile[:] = resample(cut, plan.tile_px) if plan.resamples else cut
