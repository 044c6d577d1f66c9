"""Decoded segments that regions cut: each is decoded once, and its memory is used again at once."""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from thinsection.types import RgbArray

Counts = npt.NDArray[np.int64]  # how often each segment is asked for
State = Enum("State", ("NEW", "BUSY", "READY"))
NEW, BUSY, READY = State


class Segments(Protocol):
    """What decodes the segments of one level."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a segment."""

    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """Fills arrays of that shape."""


class _Held:
    """A segment's px, and who needs them."""

    __slots__ = ("index", "kept", "pixels", "readers", "state")

    def __init__(self, index: int, pixels: RgbArray) -> None:
        self.index, self.pixels = index, pixels
        self.readers, self.kept, self.state = 0, False, NEW


class SegmentCache:
    """Segments of a slide between the first region that cuts them and the last. Thread-safe.

    Where it is known what will be asked for (`expect`) a segment goes with its last use. Others
    stay where they were cut, until room is needed: the least recently used go first.

    Memory: `num_bytes`, or what threads read at the moment where that is more.
    """

    def __init__(self, num_bytes: int) -> None:
        self._total, self._used = num_bytes, 0  # bytes of what is held, and spare
        self._held: OrderedDict[tuple[Segments, int], _Held] = OrderedDict()
        self._spare: list[RgbArray] = []  # the last one is still in the CPU's caches
        self._expected: dict[Segments, memoryview] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._held)

    def expect(self, segments: Segments, counts: Counts) -> None:
        """Says how often each segment will be asked for, beside what was said before."""
        with self._changed:
            counts = counts + np.asarray(self._expected.get(segments, 0))
            # Python's numbers come out of a memoryview quicker than out of an array
            self._expected[segments] = counts.data

    @contextmanager
    def taken(self, segments: Segments, uses: Mapping[int, int]) -> Iterator[list[RgbArray]]:
        """The px of some segments, to be read within the block.

        Args:
            segments: of one level.
            uses: which of them, and how many regions cut each; 0: one takes it whole.
        """
        found = []
        with self._changed:
            for index in uses:
                held = self._held.get((segments, index))
                if held is None:
                    held = self._held[segments, index] = _Held(index, self._array(segments.shape))
                held.readers += 1
                found.append(held)
        try:
            self._make_ready(segments, found)
            yield [held.pixels for held in found]
        finally:
            with self._changed:
                expected = self._expected.get(segments)
                for held, times in zip(found, uses.values()):
                    held.readers -= 1
                    _note_use(held, times, expected)
                    if not held.readers:
                        self._let_go((segments, held.index), held)

    def _array(self, shape: tuple[int, int, int]) -> RgbArray:
        """Memory for a segment: spare, or of one that may go, or new."""
        num_bytes = math.prod(shape)
        while True:
            if self._spare:
                pixels = self._spare.pop()
            elif self._used + num_bytes <= self._total or not (oldest := self._oldest()):
                self._used += num_bytes
                return np.empty(shape, dtype=np.uint8)
            else:
                pixels = self._held.pop(oldest).pixels
            if pixels.shape == shape:
                return pixels
            self._used -= pixels.nbytes

    def _oldest(self) -> tuple[Segments, int] | None:
        """What was used the longest ago, of what nobody reads."""
        return next((key for key, held in self._held.items() if not held.readers), None)

    def _make_ready(self, segments: Segments, found: list[_Held]) -> None:
        """Decodes what nobody is at, and waits for the rest; what another failed at is tried."""
        while missing := [held for held in found if held.state is not READY]:
            with self._changed:
                mine = [held for held in missing if held.state is NEW]
                for held in mine:
                    held.state = BUSY
                if not mine:
                    self._changed.wait_for(lambda: any(h.state is not BUSY for h in missing))
                    continue
            state = NEW
            try:
                segments.decode([held.index for held in mine], [held.pixels for held in mine])
                state = READY
            finally:
                with self._changed:
                    for held in mine:
                        held.state = state
                    self._changed.notify_all()

    def _let_go(self, key: tuple[Segments, int], held: _Held) -> None:
        """Keeps what somebody will want, as the youngest; makes the memory of the rest spare."""
        if held.kept and held.state is READY:
            self._held.move_to_end(key)
            return
        del self._held[key]
        if self._used <= self._total:
            self._spare.append(held.pixels)
        else:
            self._used -= held.pixels.nbytes


def _note_use(held: _Held, times: int, expected: memoryview | None) -> None:
    """Whether a segment that was used now is worth keeping: 0 times is once, and wholly."""
    left = 0 if expected is None else expected[held.index]
    if expected is None or left == 0:
        held.kept |= times > 0
    else:
        expected[held.index] = left = max(0, left - max(1, times))
        held.kept = left > 0
