"""How much memory the stream takes, as formulas; the stream allocates by them, the plan shows them.

Peak = slots * batch + workers * scratch, with
    batch   = batch_size * tile_px² * 3                   bytes of decoded tiles
    scratch = region + one tile of the level that is read
A slot is a batch that is being decoded, waits, or is being transferred. Readers bound their own
caches of decoded segments.
"""

import os
from dataclasses import dataclass

from thinsection.config import option
from thinsection.errors import BudgetError, ConfigError
from thinsection.slide.geometry import ReadPlan
from thinsection.types import MIB
from thinsection.units import format_bytes, parse_bytes

CHANNELS = 3
# one region per read: large enough that tiles share segments, small enough to stay in a cache
REGION_BYTES = 16 * MIB
MIN_SLOTS, MAX_SLOTS = 3, 5  # more only moves decoded tiles out of the caches


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Settings of the stream from slides to batches."""

    memory: str = option("2GiB", "Host memory for decoded tiles, whatever the slides' size.")
    decode_workers: int = option(0, "Threads that decode tiles; 0: one per CPU of this process.")
    prefetch_slides: int = option(2, "Slides that are opened and tiled ahead.")

    def __post_init__(self) -> None:
        parse_bytes(self.memory, name="stream.memory")
        if self.decode_workers < 0:
            raise ConfigError(f"stream.decode_workers must be >= 0, got {self.decode_workers}")
        if self.prefetch_slides < 1:
            raise ConfigError(f"stream.prefetch_slides must be >= 1, got {self.prefetch_slides}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBudget:
    """What the stream may allocate: batch buffers, and scratch of each decoding thread."""

    slots: int
    batch_bytes: int  # of one slot
    scratch_bytes: int  # of one worker
    workers: int

    @property
    def peak_bytes(self) -> int:
        """Most that the stream holds at once."""
        return self.slots * self.batch_bytes + self.workers * self.scratch_bytes


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stream_budget(
    *, budget_bytes: int, batch_size: int, tile_px: int, workers: int, scratch_bytes: int
) -> StreamBudget:
    """Divides a budget into batch buffers and scratch.

    Raises:
        BudgetError: not even `MIN_SLOTS` batches fit; says what would.
    """
    batch_bytes = batch_size * tile_px * tile_px * CHANNELS
    slots = min(MAX_SLOTS, (budget_bytes - workers * scratch_bytes) // batch_bytes)
    sizes = {"batch_bytes": batch_bytes, "scratch_bytes": scratch_bytes, "workers": workers}
    if slots < MIN_SLOTS:
        least = StreamBudget(slots=MIN_SLOTS, **sizes).peak_bytes
        raise BudgetError(
            f"memory must be >= {format_bytes(least)} for batches of {batch_size} tiles of "
            f"{tile_px} px and {workers} decode workers, got {format_bytes(budget_bytes)}; "
            "raise --memory or lower --batch-size or --decode-workers"
        )
    return StreamBudget(slots=slots, **sizes)


def scratch_bytes(plan: ReadPlan) -> int:
    """Decoding scratch of one worker under a read plan."""
    tile_bytes = plan.size_lv[0] * plan.size_lv[1] * CHANNELS
    return max(REGION_BYTES, tile_bytes) + tile_bytes
