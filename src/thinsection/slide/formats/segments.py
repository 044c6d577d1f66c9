"""Slides stored as a grid of segments, each decoded whole and once: what their readers share.

A segment that a region cuts is kept while its other parts will be asked for.
"""

import math
import threading
from abc import abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import SlideReadError
from thinsection.slide.base import WHITE, Slide
from thinsection.slide.geometry import ReadPlan, origins_lv
from thinsection.types import MIB, CoordsL0, Level, RgbArray, TileArray

CACHE_BYTES = 64 * MIB  # of decoded segments that a region cut, per slide
# a segment must fit a budget that the user never sees; larger ones are refused
MAX_SEGMENT_BYTES = 128 * MIB
_TOGETHER_BYTES = (
    4 * MIB
)  # of decoded segments before regions are cut from them, or a larger one
_TILES_AT_ONCE = 1 << 16  # whose corners are looked at together
# along one axis: a segment, what is taken of it, where it goes, whether that is all of it
_Cut = tuple[int, slice, slice, bool]
_Piece = tuple[
    tuple[int, slice, slice], tuple[slice, slice]
]  # of `out`, and of a segment


class Decoder:
    """Decodes segments of one level, whole, also beyond the border; a subclass fills `decode`."""

    def __init__(self, level: Level, name: str) -> None:
        assert level.segment is not None
        self.size, self.segment, self._name, self.sparse = (
            level.size,
            level.segment,
            name,
            False,
        )
        self.columns, self.rows = (
            -(-px // edge) for px, edge in zip(self.size, self.segment)
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a segment."""
        return (self.segment[1], self.segment[0], 3)

    def is_empty(self, index: int) -> bool:
        """Whether nothing is stored of a segment: nothing was scanned there, it is white."""
        return False

    @abstractmethod
    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """Fills `outs`, each of `shape`, with the segments row * columns + column."""

    def jpeg(self, index: int) -> bytes | None:
        """A segment's bytes as they are stored, as a JPEG of its own; None if it is none."""
        return None

    def _error(self, index: int, why: str) -> SlideReadError:
        row, column = divmod(index, self.columns)
        place = f"column {column}, row {row} of a level of {self.size} px"
        got = f"{why} at {place} in {Path(self._name).name!r}"
        remedy = "the file is damaged or truncated"
        return SlideReadError(f"segment must be decodable, got {got}; {remedy}")


class _Held:
    """A segment's px, who reads them now, and whether another region will."""

    __slots__ = ("busy", "index", "kept", "pixels", "readers", "ready")

    def __init__(self, index: int, pixels: RgbArray) -> None:
        self.index, self.pixels, self.readers = index, pixels, 0
        self.kept = self.busy = self.ready = False


class SegmentCache:
    """Segments of a slide between the first region that cuts them and the last. Thread-safe.

    Where it is known what will be asked for (`expect`) a segment goes with its last use. Others
    stay where they were cut, until room is needed: the least recently used go first. Memory:
    `num_bytes`, or what threads read at the moment where that is more.
    """

    def __init__(self, num_bytes: int) -> None:
        self._total, self._used = num_bytes, 0  # bytes of what is held, and spare
        self._held: OrderedDict[tuple[Decoder, int], _Held] = OrderedDict()
        self._spare: list[RgbArray] = []  # the last one is still in the CPU's caches
        self._expected: dict[Decoder, memoryview] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._held)

    def expect(self, decoder: Decoder, counts: npt.NDArray[np.int64]) -> None:
        """Says how often each segment will be asked for, beside what was said before."""
        with self._changed:
            counts = counts + np.asarray(self._expected.get(decoder, 0))
            # Python's numbers come out of a memoryview quicker than out of an array
            self._expected[decoder] = counts.data

    @contextmanager
    def taken(
        self, decoder: Decoder, uses: Mapping[int, int]
    ) -> Iterator[list[RgbArray]]:
        """The px of some segments, to be read within the block.

        Args:
            decoder: of their level.
            uses: which of them, and how many regions cut each; 0: one takes it whole.
        """
        found = []
        with self._changed:
            for index in uses:
                held = self._held.get((decoder, index))
                if held is None:
                    held = self._held[decoder, index] = _Held(
                        index, self._array(decoder.shape)
                    )
                held.readers += 1
                found.append(held)
        try:
            self._make_ready(decoder, found)
            yield [held.pixels for held in found]
        finally:
            with self._changed:
                for held, times in zip(found, uses.values()):
                    self._let_go(decoder, held, times)

    def _array(self, shape: tuple[int, int, int]) -> RgbArray:
        """Memory for a segment: spare, or of the oldest that nobody reads, or new."""
        num_bytes = math.prod(shape)
        while True:
            idle = (key for key, held in self._held.items() if not held.readers)
            if self._spare:
                pixels = self._spare.pop()
            elif self._used + num_bytes <= self._total or not (
                oldest := next(idle, None)
            ):
                self._used += num_bytes
                return np.empty(shape, dtype=np.uint8)
            else:
                pixels = self._held.pop(oldest).pixels
            if pixels.shape == shape:
                return pixels
            self._used -= pixels.nbytes

    def _make_ready(self, decoder: Decoder, found: list[_Held]) -> None:
        """Decodes what nobody is at, and waits for the rest; what another failed at is tried."""
        while missing := [held for held in found if not held.ready]:
            with self._changed:
                mine = [held for held in missing if not (held.busy or held.ready)]
                for held in mine:
                    held.busy = True
                if not mine:
                    self._changed.wait_for(lambda: not all(h.busy for h in missing))
                    continue
            ready = False
            try:
                decoder.decode(
                    [held.index for held in mine], [held.pixels for held in mine]
                )
                ready = True
            finally:
                with self._changed:
                    for held in mine:
                        held.busy, held.ready = False, ready
                    self._changed.notify_all()

    def _let_go(self, decoder: Decoder, held: _Held, times: int) -> None:
        """Keeps what somebody will want, as the youngest; makes the memory of the rest spare."""
        expected, held.readers = self._expected.get(decoder), held.readers - 1
        if expected is None or not (left := expected[held.index]):
            held.kept |= times > 0  # worth keeping where a region cut it
        else:
            expected[held.index] = left = max(0, left - max(1, times))
            held.kept = left > 0
        if held.readers:
            return
        if held.kept and held.ready:
            self._held.move_to_end((decoder, held.index))
            return
        del self._held[decoder, held.index]
        if self._used <= self._total:
            self._spare.append(held.pixels)
        else:
            self._used -= held.pixels.nbytes


class SegmentedSlide(Slide):
    """A slide whose levels are grids of segments, one decoder for each. Thread-safe.

    Memory: `CACHE_BYTES` of decoded segments, and per reading thread one.
    """

    def __init__(
        self,
        path: str,
        levels: Sequence[Level],
        decoders: Iterable[Decoder],
        **facts: Any,
    ) -> None:
        super().__init__(path, levels, **facts)
        self._decoders, self._cut = list(decoders), SegmentCache(CACHE_BYTES)

    def expect(self, coords_l0: CoordsL0, plan: ReadPlan) -> None:
        """Counts how often the tiles cut each segment.

        Memory: 8 bytes for each segment of the level, for as long as the slide is open.
        """
        self._check(plan.level)
        decoder, size = self._decoders[plan.level], np.array(plan.size_lv)
        grid, edge = (
            np.array((decoder.columns, decoder.rows)),
            np.array(decoder.segment),
        )
        changes = np.zeros(
            grid[::-1] + 1, dtype=np.int64
        )  # of the count, from place to place
        for start in range(0, len(coords_l0), _TILES_AT_ONCE):
            origins = origins_lv(
                coords_l0[start : start + _TILES_AT_ONCE], plan.downsample
            )
            if plan.size_lv == decoder.segment and not (origins % edge).any():
                continue  # decoded straight into place
            x0, y0 = np.clip(origins // edge, 0, grid).T
            x1, y1 = np.clip(-(-(origins + size) // edge), 0, grid).T
            for x, y, change in ((x0, y0, 1), (x1, y0, -1), (x0, y1, -1), (x1, y1, 1)):
                np.add.at(changes, (y, x), change)
        if changes.any():
            counts = changes.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
            self._cut.expect(decoder, counts.ravel())

    def stored_jpeg(self, level: int, column: int, row: int) -> bytes | None:
        """As of the base class."""
        self._check(level)
        decoder = self._decoders[level]
        with self._reading(f"segment {column}, {row} of level {level}"):
            return (
                None if self.rendering else decoder.jpeg(row * decoder.columns + column)
            )

    def _fill_all(
        self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray
    ) -> None:
        decoder = self._decoders[level]
        width, height = decoder.segment
        aligned = out.shape[1:3] == (height, width)
        if aligned and not any(x % width or y % height for x, y in origins_lv):
            places = [y // height * decoder.columns + x // width for x, y in origins_lv]
            decoder.decode(places, out)
            return
        self._gather(decoder, origins_lv, out)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        self._gather(self._decoders[level], [origin_lv], out[None])

    def _gather(
        self, decoder: Decoder, origins: Sequence[tuple[int, int]], out: TileArray
    ) -> None:
        """Fills regions from the segments that they touch, each of which is looked up once."""
        columns, edges, size = decoder.columns, decoder.segment, decoder.size
        sparse, (height, width) = decoder.sparse, out.shape[1:3]
        pieces, whole = defaultdict[int, list[_Piece]](list), set[int]()
        for place, (x, y) in enumerate(origins):
            across = _cuts(x, width, edges[0], size[0])
            for row, taken_y, to_y, all_y in _cuts(y, height, edges[1], size[1]):
                for column, taken_x, to_x, all_x in across:
                    index, target = row * columns + column, (place, to_y, to_x)
                    if sparse and decoder.is_empty(index):
                        out[target] = WHITE
                        continue
                    pieces[index].append((target, (taken_y, taken_x)))
                    if all_y and all_x:
                        whole.add(index)
        indices, at_once = (
            sorted(pieces),
            max(1, _TOGETHER_BYTES // math.prod(decoder.shape)),
        )
        for start in range(0, len(indices), at_once):
            together = indices[start : start + at_once]
            uses = {
                index: 0 if index in whole else len(pieces[index]) for index in together
            }
            with self._cut.taken(decoder, uses) as arrays:
                for index, pixels in zip(together, arrays):
                    for target, source in pieces[index]:
                        out[target] = pixels[source]


@lru_cache(maxsize=1024)  # rows and columns of a grid come again and again
def _cuts(start: int, length: int, edge: int, size: int) -> list[_Cut]:
    """The segments of `edge` px that [start, start + length) touches along an axis of `size` px."""
    found = []
    for index in range(start // edge, -(-(start + length) // edge)):
        left = index * edge
        first, last = max(start, left), min(start + length, left + edge)
        whole = last - first == min(edge, size - left)
        taken, to = slice(first - left, last - left), slice(first - start, last - start)
        found.append((index, taken, to, whole))
    return found
