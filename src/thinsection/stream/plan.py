"""What the stream may take, as formulas, and which tiles of a batch a thread reads at a time.

Peak = slots * batch + scratch, with
    batch   = batch_size * tile_px² * 3          bytes of decoded tiles
    scratch = one tile of the level that is read, for as many workers as the memory holds
A slot is a batch that is being decoded, waits, or is being transferred. The stream allocates by
these and `thinsection plan` shows them; readers bound their own caches of decoded segments.
"""

from dataclasses import dataclass

from thinsection.config import option
from thinsection.errors import BudgetError, ConfigError
from thinsection.machine import cpu_count
from thinsection.slide.geometry import ReadPlan
from thinsection.types import MIB
from thinsection.units import format_bytes, parse_bytes

CHANNELS = 3
MIN_SLOTS, MAX_SLOTS = 3, 5  # more only moves decoded tiles out of the caches
MAX_SCRATCH = 32 * MIB  # of decoded px that one tile may be made of
# handing work to a thread costs some µs: worth it for about a ms of decoding
_TASK_TILES = 8
_MOST_TILES = 32  # so that a large batch is not one thread's alone for long


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBudget:
    """What the stream may allocate: batch buffers, and scratch that its workers share."""

    slots: int
    batch_bytes: int  # of one slot
    scratch_bytes: int  # of all workers; who finds none left waits
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

    def budget(self, batch_size: int, *, tile_px: int, tile_bytes: int) -> StreamBudget:
        """Divides the memory into batch buffers and scratch, and says how many threads decode.

        By default there are no more of them than CPUs, nor than tasks in all slots. Where the
        memory does not hold a tile for each, they take turns. `tile_bytes` is the most that one
        tile is made of on the level that is read.

        Raises BudgetError: not even `MIN_SLOTS` batches and one such tile fit; says what would.
        """
        memory, batch_bytes = parse_bytes(self.memory), batch_size * tile_px * tile_px * CHANNELS
        slots = min(MAX_SLOTS, (memory - tile_bytes) // batch_bytes)
        if slots < MIN_SLOTS:
            least = format_bytes(MIN_SLOTS * batch_bytes + tile_bytes)
            rule = f"must be >= {least} for batches of {batch_size} tiles of {tile_px} px"
            remedy = "raise --memory or lower --batch-size"
            raise BudgetError(f"memory {rule}, got {format_bytes(memory)}; {remedy}")
        tasks = slots * -(-batch_size // _TASK_TILES)
        workers = self.decode_workers or min(cpu_count(), tasks)
        scratch = min(workers * tile_bytes, memory - slots * batch_bytes)
        sizes = {"batch_bytes": batch_bytes, "scratch_bytes": scratch, "workers": workers}
        return StreamBudget(slots=slots, **sizes)

    def largest_batch(self, *, tile_px: int, tile_bytes: int) -> int:
        """Tiles of a batch that the memory holds `MIN_SLOTS` of beside one tile, at least 1."""
        room = parse_bytes(self.memory) - tile_bytes
        return max(1, room // (MIN_SLOTS * tile_px * tile_px * CHANNELS))


def read_bytes(plan: ReadPlan) -> int:
    """What one tile is made of on the level that is read; 0 where it is decoded into place."""
    return plan.size_lv[0] * plan.size_lv[1] * CHANNELS if plan.resamples else 0


def tasks_of(num_tiles: int, workers: int) -> list[slice]:
    """A batch's tiles, in order, in parts as threads take them: a part for each, if not too few."""
    step = max(_TASK_TILES, min(_MOST_TILES, -(-num_tiles // workers)))
    return [slice(start, min(start + step, num_tiles)) for start in range(0, num_tiles, step)]
