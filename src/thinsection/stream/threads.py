"""What threads of the stream share: a bounded queue that either side can close, and a clock."""

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
    """First in, first out, or last in, first out; `put` waits for room, `get` for an item.

    `finish` lets readers drain what is there and then raises; `close` raises at once on both
    sides, so that no thread of a stopped stream waits for ever.

    Memory: at most `capacity` items (unbounded by default).
    """

    def __init__(self, capacity: float = math.inf, *, newest_first: bool = False) -> None:
        self._capacity, self._newest_first = capacity, newest_first
        self._items: deque[T] = deque()
        lock = threading.Lock()
        self._filled, self._drained = threading.Condition(lock), threading.Condition(lock)
        self._closed = self._finished = False

    def __iter__(self) -> Iterator[T]:
        """Items until the channel is closed, or finished and drained."""
        with suppress(ChannelClosed):
            while True:
                yield self.get()

    def put(self, *items: T) -> None:
        """Appends items, waiting for room for each.

        Raises:
            ChannelClosed: the channel was closed or finished.
        """
        with self._filled:
            for item in items:
                while len(self._items) >= self._capacity and not self._closed:
                    self._drained.wait()
                if self._closed or self._finished:
                    raise ChannelClosed
                self._items.append(item)
                self._filled.notify()

    def get(self) -> T:
        """The next item, waiting for one.

        Raises:
            ChannelClosed: the channel was closed, or finished and drained.
        """
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
