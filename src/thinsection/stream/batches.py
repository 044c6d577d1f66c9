"""What the stream takes and yields, batches in the making, and what threads share: queue, clock."""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.slide import Slide
from thinsection.tiles import TileTable
from thinsection.tiles.transforms import TileTransform
from thinsection.types import CoordsL0, TileArray

T = TypeVar("T")
Indices = npt.NDArray[np.int64]  # (b,), places in a tile table


@dataclass(kw_only=True, eq=False)
class SlideTiles:
    """An opened slide and the tiles to read from it."""

    key: Any  # whatever the caller knows the slide by; comes back with every event
    slide: Slide | None  # None where no tile of it is to be read
    table: TileTable | None  # may be empty; None with no slide
    transform: TileTransform | None = None  # changes kept tiles, in the decode workers
    # told of kept tiles before `transform`, with their places in the table, in the decode workers
    measure: Callable[[Indices, TileArray], None] | None = None
    owned: bool = True  # whether the stream closes the slide when it is done with it
    error: Exception | None = field(
        default=None, init=False
    )  # that decoding met: it is given up

    @property
    def num_tiles(self) -> int:
        """Tiles to read."""
        return 0 if self.table is None else len(self.table)

    def close(self) -> None:
        """Closes the slide where it is the stream's."""
        if self.owned and self.slide is not None:
            self.slide.close()


@dataclass(frozen=True, kw_only=True)
class SlideStarted:
    """The first event of a slide that could be opened."""

    key: Any
    num_tiles: int


@dataclass
class TileBatch:
    """Decoded tiles of one slide, in table order."""

    key: Any  # of its slide
    indices: Indices  # int64 (b,), the tiles' places in the table
    coords_l0: CoordsL0  # int64 (b, 2)
    tiles: TileArray  # (b, tile_px, tile_px, 3), a view of a buffer that `release` gives back
    _release: Callable[[], None] = field(repr=False)
    _released: bool = field(default=False, repr=False)

    def __len__(self) -> int:
        return len(self.indices)

    def release(self) -> None:
        """Gives the buffer back, once; `tiles` must not be used afterwards."""
        if not self._released:
            self._released = True
            self._release()


@dataclass(frozen=True, kw_only=True)
class SlideFinished:
    """Every batch of the slide was yielded."""

    key: Any


@dataclass(frozen=True, kw_only=True)
class SlideFailed:
    """The slide could not be prepared (by `prepare`) or decoded; no event of it follows."""

    key: Any
    stage: str
    error: Exception


StreamEvent = SlideStarted | TileBatch | SlideFinished | SlideFailed


class DecodedBatch:
    """Tiles of a slide, in table order, while workers decode them, and after.

    Of `buffer` (batch_size, tile_px, tile_px, 3) the first b are used, `keep` (b,) is False where a
    filter refused the tile, `done` is set when none of the tasks is left.
    """

    def __init__(
        self, source: SlideTiles, indices: Indices, buffer: TileArray, tasks: int
    ) -> None:
        self.source, self.indices, self.buffer = source, indices, buffer
        self.keep = np.ones(len(indices), dtype=np.bool_)
        self.done, self._lock, self._tasks = threading.Event(), threading.Lock(), tasks

    def finish_one(self) -> None:
        """Counts one task as done."""
        with self._lock:
            self._tasks -= 1
            if self._tasks == 0:
                self.done.set()


class Scratch:
    """Bytes that threads take in turns; who asks for more than all of them gets them alone."""

    def __init__(self, num_bytes: int) -> None:
        self.total: float = num_bytes
        self._used, self._freed = 0, threading.Condition()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Holds so many bytes within the block; waits until they are free."""
        with self._freed:
            self._freed.wait_for(
                lambda: not self._used or self._used + num_bytes <= self.total
            )
            self._used += num_bytes
        try:
            yield
        finally:
            with self._freed:
                self._used -= num_bytes
                self._freed.notify_all()


class BatchPacker:
    """Closes the gaps that filters leave, so that all batches of a slide but its last are full.

    Memory: none of its own; the batch that is being filled is one of the stream's buffers, which
    goes to `give_back` when it is free again. A row that closes a gap is copied once.
    """

    def __init__(self, give_back: Callable[[TileArray], None]) -> None:
        self._give_back = give_back
        self._filling: DecodedBatch | None = (
            None  # its indices: of the buffer's first rows
        )

    def add(self, batch: DecodedBatch) -> Iterator[TileBatch]:
        """Takes a decoded batch and its buffer; yields what is full."""
        kept, filling = np.flatnonzero(batch.keep), self._filling
        if filling is not None and len(kept):
            filled = len(filling.indices)
            taken, kept = np.split(kept, [len(filling.buffer) - filled])
            _move(batch.buffer, taken, filling.buffer, filled)
            filling.indices = np.append(filling.indices, batch.indices[taken])
            yield from self._full()
        if len(kept) == 0:
            self._give_back(batch.buffer)
            return
        _move(batch.buffer, kept, batch.buffer, 0)
        batch.indices = batch.indices[kept]
        self._filling = batch
        yield from self._full()

    def finish(self) -> Iterator[TileBatch]:
        """Yields the last batch of a slide, which may be smaller; none of a slide that failed."""
        filling, self._filling = self._filling, None
        if filling is None:
            return
        source, indices, buffer = filling.source, filling.indices, filling.buffer
        if source.error is not None or source.table is None:
            self._give_back(buffer)
            return
        coords_l0, tiles = source.table.coords_l0[indices], buffer[: len(indices)]
        release = partial(self._give_back, buffer)
        yield TileBatch(source.key, indices, coords_l0, tiles, _release=release)

    def _full(self) -> Iterator[TileBatch]:
        if self._filling is not None and len(self._filling.indices) == len(
            self._filling.buffer
        ):
            yield from self.finish()


def _move(source: TileArray, rows: Indices, target: TileArray, start: int) -> None:
    """Copies rows to `target[start:]`; within one array a row only moves towards the front."""
    for place, row in enumerate(rows.tolist(), start):
        if source is not target or row != place:
            target[place] = source[row]


class ChannelClosed(Exception):
    """The channel was closed: nothing will come, and nothing is taken any more."""


class Channel(Generic[T]):
    """First in, first out, or last in, first out, of at most `capacity` items.

    `finish` lets readers drain what is there and then raises; `close` raises at once on both
    sides, so that no thread of a stopped stream waits for ever. Iteration ends in either case.
    """

    def __init__(
        self, capacity: float = math.inf, *, newest_first: bool = False
    ) -> None:
        self._capacity, self._newest_first = capacity, newest_first
        self._items: deque[T] = deque()
        lock = threading.Lock()
        self._filled, self._drained = (
            threading.Condition(lock),
            threading.Condition(lock),
        )
        self._closed = self._finished = False

    def __iter__(self) -> Iterator[T]:
        with suppress(ChannelClosed):
            while True:
                yield self.get()

    def put(self, *items: T) -> None:
        """Appends items, waiting for room for each; ChannelClosed where it is closed."""
        with self._filled:
            for item in items:
                while len(self._items) >= self._capacity and not self._closed:
                    self._drained.wait()
                if self._closed or self._finished:
                    raise ChannelClosed
                self._items.append(item)
                self._filled.notify()

    def get(self) -> T:
        """The next item, waiting for one; ChannelClosed where none will come."""
        with self._filled:
            while not self._items and not self._closed and not self._finished:
                self._filled.wait()
            if self._closed or not self._items:
                raise ChannelClosed
            item = self._items.pop() if self._newest_first else self._items.popleft()
            self._drained.notify()
            return item

    def finish(self) -> None:
        """Says that nothing more will be put."""
        with self._filled:
            self._finished = True
            self._filled.notify_all()

    def close(self) -> list[T]:
        """Wakes everybody with ChannelClosed; returns the items that nobody took."""
        with self._filled:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._filled.notify_all()
            self._drained.notify_all()
            return left


class StageClock:
    """Adds up seconds by name over all threads.

    Names: prepare_busy (open, tissue, grid), decode_busy, decode_wait (for a free batch),
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
        """What was added up so far, by name."""
        with self._lock:
            return dict(sorted(self._seconds.items()))
