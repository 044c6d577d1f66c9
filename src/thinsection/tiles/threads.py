"""Values that the stream's threads share: a queue, bytes to take turns with, a clock."""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

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
        """Takes the next item, waiting for one; ChannelClosed where none will come."""
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
    """Bytes that threads take in turns; a request for more than all of them waits alone."""

    def __init__(self, num_bytes: int) -> None:
        self.total: float = num_bytes
        self._used = 0
        self._freed = threading.Condition()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Holds so many bytes within the block; waits until they are free."""
        with self._freed:
            while self._used and self._used + num_bytes > self.total:
                self._freed.wait()
            self._used += num_bytes
        try:
            yield
        finally:
            with self._freed:
                self._used -= num_bytes
                self._freed.notify_all()


class StageClock:
    """Sum of seconds by name over all threads.

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
        """The sums so far, by name."""
        with self._lock:
            return dict(sorted(self._seconds.items()))
