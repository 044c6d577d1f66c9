"""Values that the stream's threads share: memory, a queue, an allowance of bytes, a timer.

Peak = slots * batch + scratch, with

    batch   = batch_size * tile_px² * 3          bytes of decoded tiles
    scratch = for each worker, source pixels of the tiles that one call resamples: at most 2.5 MiB,
              or one tile if a tile alone is larger. Workers take turns if memory is short.

A slot is a buffer for one batch, which is being decoded, waits, or is being transferred. The
stream allocates these bytes, and `thinsection plan` shows them. Readers bound their own caches of
decoded segments.
"""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from thinsection.config import option
from thinsection.errors import BudgetError, ConfigError
from thinsection.machine import cpu_count
from thinsection.slide.geometry import ReadPlan
from thinsection.slide.resize import tiles_at_once
from thinsection.types import MIB, counted, format_bytes, parse_bytes

T = TypeVar("T")


class ChannelClosed(Exception):
    """The channel was closed: nothing will come, and nothing is taken any more."""


class Channel(Generic[T]):
    """Queue of at most `capacity` items; `newest_first` makes it a stack.

    `finish` lets readers drain the queue and then raises; `close` raises at once on both
    sides, so that no thread of a stopped stream waits for ever. Iteration ends in either
    case.
    """

    def __init__(
        self, capacity: float = math.inf, *, newest_first: bool = False
    ) -> None:
        self._capacity = capacity
        self._newest_first = newest_first
        self._items: deque[T] = deque()
        lock = threading.Lock()
        self._filled = threading.Condition(lock)
        self._drained = threading.Condition(lock)
        self._closed = False
        self._finished = False

    def __iter__(self) -> Iterator[T]:
        with suppress(ChannelClosed):
            while True:
                yield self.get()

    def put(self, item: T) -> None:
        """Appends an item, waiting for room; ChannelClosed where the channel is closed."""
        with self._filled:
            while len(self._items) >= self._capacity and not self._closed:
                self._drained.wait()
            if self._closed or self._finished:
                raise ChannelClosed
            self._items.append(item)
            self._filled.notify()

    def get(self) -> T:
        """Takes the next item, waiting for one; ChannelClosed if none will come."""
        with self._filled:
            while not self._items and not self._closed and not self._finished:
                self._filled.wait()
            if self._closed or not self._items:
                raise ChannelClosed
            item = self._items.pop() if self._newest_first else self._items.popleft()
            self._drained.notify()
            return item

    def finish(self) -> None:
        """Tells readers that nothing more will be put."""
        with self._filled:
            self._finished = True
            self._filled.notify_all()

    def close(self) -> list[T]:
        """Wakes every thread with ChannelClosed; returns the items that nobody took."""
        with self._filled:
            self._closed = True
            remaining = list(self._items)
            self._items.clear()
            self._filled.notify_all()
            self._drained.notify_all()
            return remaining


class MemoryAllowance:
    """Bytes that threads take and return.

    Requests are granted in their order, so that many small ones cannot keep a large one waiting for
    ever. A request for more than `total` is granted once all bytes are free.
    """

    def __init__(self, num_bytes: int) -> None:
        self.total: float = num_bytes
        self._used = 0
        self._waiting: deque[object] = deque()
        self._freed = threading.Condition()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Holds so many bytes within the block; waits until they are free.

        A block that holds bytes must not wait for more of them.
        """
        ticket = object()
        with self._freed:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or (
                    self._used and self._used + num_bytes > self.total
                ):
                    self._freed.wait()
                self._used += num_bytes
            finally:
                self._waiting.remove(ticket)
                self._freed.notify_all()
        try:
            yield
        finally:
            with self._freed:
                self._used -= num_bytes
                self._freed.notify_all()


class StepTimer:
    """Adds up the seconds of each step of the stream, over all threads.

    Names of steps: prepare_busy (open, tissue, grid), decode_busy, decode_wait (for a free batch),
    encode_wait (for a decoded batch), transfer_busy, encode_busy, write_busy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the block's wall-clock time to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds to `name`."""
        with self._lock:
            self._seconds[name] += seconds

    def seconds(self) -> dict[str, float]:
        """The sums so far, by name."""
        with self._lock:
            return dict(sorted(self._seconds.items()))


CHANNELS = 3
MIN_SLOTS = 3
# more slots would only move decoded tiles out of the CPU's caches
MAX_SLOTS = 5
# Largest number of source bytes (decoded pixels) of one tile.
MAX_SCRATCH = 32 * MIB
# Smallest number of tiles in a task. To hand work to a thread costs some µs, which is little
# against about a ms of decoding.
MIN_TASK_TILES = 8
# Largest number of tiles in a task, so that several threads share a large batch.
MAX_TASK_TILES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBudget:
    """Bytes that the stream may allocate: batch buffers, and scratch of its workers."""

    slots: int
    batch_bytes: int  # bytes of one slot
    scratch_bytes: int  # bytes of all workers; a worker waits while none are left
    workers: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all batch buffers and of the scratch."""
        return self.slots * self.batch_bytes + self.scratch_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Settings of the stream from slides to batches."""

    memory: str = option(
        "2GiB",
        "Memory for decoded tiles, whatever the size of the slides. The encoder needs "
        "memory in addition.",
        daily=True,
    )
    decode_threads: int = option(
        0,
        "Threads that decode tiles; 0 means one for each CPU. Raise it if the GPU "
        "waits.",
    )
    prefetch_slides: int = option(
        2,
        "Slides that are opened and tiled before the encoder needs them. Raise it for "
        "many small slides.",
    )

    def __post_init__(self) -> None:
        parse_bytes(self.memory, name="stream.memory")
        if self.decode_threads < 0:
            raise ConfigError(
                f"stream.decode_threads must be >= 0, got {self.decode_threads}"
            )
        if self.prefetch_slides < 1:
            raise ConfigError(
                f"stream.prefetch_slides must be >= 1, got {self.prefetch_slides}"
            )

    def budget(self, batch_size: int, *, tile_px: int, tile_bytes: int) -> StreamBudget:
        """Divides the memory into batch buffers and scratch, and sets the threads.

        By default no more threads decode than there are CPUs, nor than tasks in all slots. If the
        memory does not hold a tile for each thread, the threads take turns.

        Args:
            batch_size: tiles of a batch.
            tile_px: edge of a finished tile.
            tile_bytes: most source bytes that a worker resamples in one call, of one or more tiles
                (`resample_scratch_bytes`).

        Raises:
            BudgetError: `MIN_SLOTS` batches and one tile do not fit into the memory; the message
                says how much memory they need.
        """
        memory = parse_bytes(self.memory)
        batch_bytes = batch_size * tile_px * tile_px * CHANNELS
        slots = min(MAX_SLOTS, (memory - tile_bytes) // batch_bytes)
        if slots < MIN_SLOTS:
            least = format_bytes(MIN_SLOTS * batch_bytes + tile_bytes)
            batches = f"batches of {counted(batch_size, 'tile')}"
            remedy = "raise memory=..."
            if batch_size > 1:
                remedy += " or lower batch_size=..."
            raise BudgetError(
                f"memory must be >= {least} for {batches} of {tile_px} px, got "
                f"{format_bytes(memory)}; {remedy}"
            )
        num_tasks = slots * -(-batch_size // MIN_TASK_TILES)
        workers = self.decode_threads or min(cpu_count(), num_tasks)
        return StreamBudget(
            slots=slots,
            batch_bytes=batch_bytes,
            scratch_bytes=min(workers * tile_bytes, memory - slots * batch_bytes),
            workers=workers,
        )

    def largest_batch(self, *, tile_px: int, tile_bytes: int) -> int:
        """Largest batch size with which `MIN_SLOTS` buffers fit into the memory; at least 1.

        The memory also holds `tile_bytes`, the source of one call, see `budget`.
        """
        room = parse_bytes(self.memory) - tile_bytes
        return max(1, room // (MIN_SLOTS * tile_px * tile_px * CHANNELS))


def resample_scratch_bytes(plan: ReadPlan) -> int:
    """Bytes of the source pixels that one call resamples; 0 if the plan does not resample."""
    if not plan.resamples:
        return 0
    width, height = plan.size_lv
    return tiles_at_once(plan) * width * height * CHANNELS


def split_tasks(num_tiles: int, workers: int) -> list[slice]:
    """Splits a batch's tiles, in order, into one part per worker.

    A part has `MIN_TASK_TILES` to `MAX_TASK_TILES` tiles; the last may be smaller.
    """
    share = -(-num_tiles // workers)
    step = max(MIN_TASK_TILES, min(MAX_TASK_TILES, share))
    return [
        slice(start, min(start + step, num_tiles))
        for start in range(0, num_tiles, step)
    ]
