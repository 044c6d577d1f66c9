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
    """Tiles start to stop (left out) of a batch, which one read serves and are then cut out of it.

    Origin (x, y) and size (width, height) of the region are px of the plan's level.
    """

    start: int
    stop: int
    origin_lv: tuple[int, int]
    size_lv: Size


@dataclass(frozen=True, slots=True)
class TileRun:
    """Tiles start to stop (left out) of a batch that share no segment: each is read by itself."""

    start: int
    stop: int


Reads = Sequence[RegionRead | TileRun]


def plan_batch(
    coords_l0: CoordsL0, plan: ReadPlan, *, segment: Size | None = None
) -> tuple[CoordsLv, list[Reads]]:
    """The corners of a batch's tiles on their level, and its reads, grouped as threads take them.

    Args:
        coords_l0: int64 (B, 2), of the batch.
        segment: (width, height) of the file's own tiles on that level; where each tile is made of
            whole ones, none is shared.

    Returns:
        int64 (B, 2), and groups of about `_TASK_TILES` tiles that together cover all, in order.
    """
    corners_lv = origins_lv(coords_l0, plan.downsample)
    count = len(corners_lv)
    if segment is not None and not (np.vstack([corners_lv, plan.size_lv]) % segment).any():
        starts = range(0, count, _TASK_TILES)
        return corners_lv, [(TileRun(i, min(i + _TASK_TILES, count)),) for i in starts]
    return corners_lv, list(_grouped(plan_regions(coords_l0, corners_lv, plan)))


def plan_regions(coords_l0: CoordsL0, corners_lv: CoordsLv, plan: ReadPlan) -> Iterator[RegionRead]:
    """Regions that cover these tiles, in order, each within `REGION_BYTES`."""
    block = np.array(plan.stride_l0, dtype=np.int64) * BLOCK_TILES
    keys = coords_l0 // block
    cuts = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
    for first, last in pairwise([0, *cuts.tolist(), len(keys)]):
        yield from _split(corners_lv, plan, first, last)


def _grouped(regions: Iterable[RegionRead]) -> Iterator[Reads]:
    group: list[RegionRead] = []
    for region in regions:
        group.append(region)
        if group[-1].stop - group[0].start >= _TASK_TILES:
            yield group
            group = []
    if group:
        yield group


def _split(corners_lv: CoordsLv, plan: ReadPlan, start: int, stop: int) -> Iterator[RegionRead]:
    """Halves a run until its bounding box is small and full enough."""
    count = stop - start
    if not count:
        return
    low, high = corners_lv[start:stop].min(axis=0), corners_lv[start:stop].max(axis=0)
    (x, y), (width, height) = low.tolist(), (high + plan.size_lv - low).tolist()
    wasteful = width * height > _MAX_WASTE * count * plan.size_lv[0] * plan.size_lv[1]
    if count > 1 and (wasteful or width * height * CHANNELS > REGION_BYTES):
        middle = start + count // 2
        yield from _split(corners_lv, plan, start, middle)
        yield from _split(corners_lv, plan, middle, stop)
    else:
        yield RegionRead(start, stop, (x, y), (width, height))


def decode_region(
    slide: Slide, plan: ReadPlan, region: RegionRead, corners_lv: CoordsLv, out: TileArray
) -> None:
    """Reads a region and cuts the tiles at `corners_lv` into `out`, uint8 (b, tile_px, tile_px, 3).

    A tile of a region is, to the bit, the tile read by itself: each is cut out first and resampled
    (Lanczos, anti-aliased) within its own borders.

    Memory: the region and one tile of the level.
    """
    x0, y0 = region.origin_lv
    origin_l0 = (l0_from_lv(x0, plan.downsample), l0_from_lv(y0, plan.downsample))
    alone = out[0] if len(out) == 1 and not plan.resamples else None
    pixels = slide.read_region(origin_l0, plan.level, region.size_lv, out=alone)
    if alone is not None:
        return
    width, height = plan.size_lv
    for (x, y), tile in zip((corners_lv - region.origin_lv).tolist(), out):
        cut = pixels[y : y + height, x : x + width]
        tile[:] = resample(cut, plan.tile_px) if plan.resamples else cut
