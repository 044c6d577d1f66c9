"""A bounded queue that can be closed from either side: what threads of the stream talk through."""

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ChannelClosed(Exception):
    """The channel was closed: nothing will come, and nothing is taken any more."""


class Channel(Generic[T]):
    """First in, first out, or last in, first out; `put` waits for room, `get` for an item.

    `finish` lets readers drain what is there and then raises; `close` raises at once on both
    sides, so that no thread of a stopped stream waits for ever.

    Memory: at most `capacity` items (unbounded for None).
    """

    def __init__(self, capacity: int | None = None, *, newest_first: bool = False) -> None:
        self._capacity, self._newest_first = capacity, newest_first
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._finished = False

    def put(self, item: T) -> None:
        """Appends the item, waiting for room.

        Raises:
            ChannelClosed: the channel was closed or finished.
        """
        with self._changed:
            while self._full() and not self._closed:
                self._changed.wait()
            if self._closed or self._finished:
                raise ChannelClosed
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> T:
        """The next item, waiting for one.

        Raises:
            ChannelClosed: the channel was closed, or finished and drained.
        """
        with self._changed:
            while not self._items and not self._closed and not self._finished:
                self._changed.wait()
            if self._closed or not self._items:
                raise ChannelClosed
            item = self._items.pop() if self._newest_first else self._items.popleft()
            self._changed.notify_all()
            return item

    def finish(self) -> None:
        """Says that nothing more will be put."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def close(self) -> list[T]:
        """Wakes everybody with ChannelClosed; returns the items that nobody took."""
        with self._changed:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return left

    def _full(self) -> bool:
        return self._capacity is not None and len(self._items) >= self._capacity
