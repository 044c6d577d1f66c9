"""What the stream may take, as formulas, and which tiles it reads together, planned over a batch.

Peak = slots * batch + workers * scratch, with
    batch   = batch_size * tile_px² * 3                   bytes of decoded tiles
    scratch = region + one tile of the level that is read
A slot is a batch that is being decoded, waits, or is being transferred. The stream allocates by
these and `thinsection plan` shows them; readers bound their own caches of decoded segments.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from thinsection.config import option
from thinsection.errors import BudgetError, ConfigError
from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan, l0_from_lv, origins_lv
from thinsection.slide.resize import read_tiles, resample
from thinsection.tiles.grid import BLOCK_TILES
from thinsection.types import MIB, CoordsL0, CoordsLv, Size, TileArray
from thinsection.units import format_bytes, parse_bytes

CHANNELS = 3
# one region per read: large enough that tiles share segments, small enough to stay in a cache
REGION_BYTES = 16 * MIB
MIN_SLOTS, MAX_SLOTS = 3, 5  # more only moves decoded tiles out of the caches
# a region may cover this many times the px of its tiles: reading a gap is cheaper than decoding
# the segments along a cut twice
_MAX_WASTE = 1.3
# handing work to a thread costs some µs: worth it for about a ms of decoding
_TASK_TILES = 8


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBudget:
    """What the stream may allocate: batch buffers, and scratch of each decoding thread."""

    slots: int
    batch_bytes: int  # of one slot
    scratch_bytes: int  # of one worker
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Settings of the stream from slides to batches."""

    memory: str = option("2GiB", "Host memory for decoded tiles, whatever the slides' size.")
    decode_workers: int = option(0, "Threads that decode tiles; 0: one per CPU of this process.")
    prefetch_slides: int = option(2, "Slides that are opened and tiled ahead.")

    def __post_init__(self) -> None:
        parse_bytes(self.memory, name="stream.memory")
        for name, least in (("decode_workers", 0), ("prefetch_slides", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"stream.{name} must be >= {least}, got {value}")

    def budget(self, batch_size: int, *, tile_px: int, scratch_bytes: int) -> StreamBudget:
        """Divides the memory into batch buffers and scratch.

        Raises:
            BudgetError: not even `MIN_SLOTS` batches fit; says what would.
        """
        memory, workers = parse_bytes(self.memory), self.decode_workers or cpu_count()
        batch_bytes, scratch = batch_size * tile_px * tile_px * CHANNELS, workers * scratch_bytes
        slots = min(MAX_SLOTS, (memory - scratch) // batch_bytes)
        if slots < MIN_SLOTS:
            least = format_bytes(MIN_SLOTS * batch_bytes + scratch)
            work = f"batches of {batch_size} tiles of {tile_px} px and {workers} decode workers"
            remedy = "raise --memory or lower --batch-size or --decode-workers"
            got = f"{format_bytes(memory)}; {remedy}"
            raise BudgetError(f"memory must be >= {least} for {work}, got {got}")
        sizes = {"batch_bytes": batch_bytes, "scratch_bytes": scratch_bytes, "workers": workers}
        return StreamBudget(slots=slots, **sizes)


def scratch_bytes(plan: ReadPlan) -> int:
    """Decoding scratch of one worker under a read plan."""
    tile_bytes = plan.size_lv[0] * plan.size_lv[1] * CHANNELS
    return max(REGION_BYTES, tile_bytes) + tile_bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Tiles start to stop (left out) of a batch, cut out of one region or each read by itself.

    The region is in px of the plan's level; None where no two tiles share a segment of the file.
    """

    start: int
    stop: int
    origin_lv: tuple[int, int] | None = None
    size_lv: Size | None = None


def plan_batch(
    coords_l0: CoordsL0, plan: ReadPlan, *, segment: Size | None = None
) -> list[list[Read]]:
    """The reads of a batch, in order, in groups of about `_TASK_TILES` tiles as threads take them.

    `segment` is the size of the file's own tiles on the level: tiles made of whole ones share none.
    """
    corners_lv, count = origins_lv(coords_l0, plan.downsample), len(coords_l0)
    if segment is not None and not (np.vstack([corners_lv, plan.size_lv]) % segment).any():
        starts = range(0, count, _TASK_TILES)
        return [[Read(start, min(start + _TASK_TILES, count))] for start in starts]
    groups: list[list[Read]] = [[]]
    for read in plan_regions(coords_l0, corners_lv, plan):
        if groups[-1] and groups[-1][-1].stop - groups[-1][0].start >= _TASK_TILES:
            groups.append([])
        groups[-1].append(read)
    return groups


def plan_regions(coords_l0: CoordsL0, corners_lv: CoordsLv, plan: ReadPlan) -> Iterator[Read]:
    """Regions that cover these tiles, in order, each within `REGION_BYTES`."""
    block = np.array(plan.stride_l0, dtype=np.int64) * BLOCK_TILES
    keys = coords_l0 // block
    cuts = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
    for first, last in pairwise([0, *cuts.tolist(), len(keys)]):
        yield from _split(corners_lv, plan, first, last)


def _split(corners_lv: CoordsLv, plan: ReadPlan, start: int, stop: int) -> Iterator[Read]:
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
        yield Read(start, stop, (x, y), (width, height))


def execute_read(
    slide: Slide, plan: ReadPlan, read: Read, coords_l0: CoordsL0, out: TileArray
) -> None:
    """Reads the tiles at `coords_l0` into `out`, uint8 (b, tile_px, tile_px, 3).

    A tile of a region is, to the bit, the tile read by itself: each is cut out first and resampled
    (Lanczos, anti-aliased) within its own borders.

    Memory: the region and one tile of the level.
    """
    if read.origin_lv is None or read.size_lv is None:
        read_tiles(slide, plan, coords_l0, out)
        return
    x0, y0 = read.origin_lv
    origin_l0 = (l0_from_lv(x0, plan.downsample), l0_from_lv(y0, plan.downsample))
    alone = out[0] if len(out) == 1 and not plan.resamples else None
    pixels = slide.read_region(origin_l0, plan.level, read.size_lv, out=alone)
    if alone is not None:
        return
    width, height = plan.size_lv
    corners = origins_lv(coords_l0, plan.downsample) - read.origin_lv
    for (x, y), tile in zip(corners.tolist(), out):
        cut = pixels[y : y + height, x : x + width]
        tile[:] = resample(cut, plan.tile_px) if plan.resamples else cut
