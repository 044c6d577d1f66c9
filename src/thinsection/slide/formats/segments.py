"""Slides stored as a grid of segments, each decoded whole and once: what their readers share.

A segment that a region cuts is kept while its other parts will be asked for.
"""

import math
import threading
from abc import abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.errors import SlideReadError
from thinsection.slide.base import WHITE, Slide
from thinsection.slide.geometry import ReadPlan, origins_lv
from thinsection.types import MIB, CoordsL0, Level, Mpp, RgbArray, TileArray

CACHE_BYTES = 64 * MIB  # of decoded segments that a region cut, per slide
# a segment must fit a budget that the user never sees; larger ones are refused
MAX_SEGMENT_BYTES = 128 * MIB
# of decoded segments before regions are cut from them; or one that is larger
_DECODED_AT_ONCE_BYTES = 4 * MIB
_TILES_AT_ONCE = 1 << 16  # whose corners are looked at in one step


class Decoder:
    """Decodes segments of one level, whole, also beyond the border; a subclass fills `decode`.

    Attributes:
        size: (width, height) of the level, px.
        segment: (width, height) of a segment, px.
        columns: segments in a row of the grid.
        rows: rows of the grid.
        sparse: True where some segments may be empty.
    """

    def __init__(self, level: Level, name: str) -> None:
        assert level.segment is not None
        self.size = level.size
        self.segment = level.segment
        self.columns = -(-self.size[0] // self.segment[0])
        self.rows = -(-self.size[1] // self.segment[1])
        self.sparse = False
        self._name = name

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the array of a segment."""
        return (self.segment[1], self.segment[0], 3)

    def is_empty(self, index: int) -> bool:
        """Tells whether nothing is stored of a segment: nothing was scanned there, it is white."""
        return False

    @abstractmethod
    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """Fills `outs`, each of `shape`, with the segments row * columns + column."""

    def jpeg(self, index: int) -> bytes | None:
        """Returns a segment as it is stored, as a JPEG of its own; None if it is none."""
        return None

    def _error(self, index: int, reason: str) -> SlideReadError:
        row, column = divmod(index, self.columns)
        return SlideReadError(
            f"segment must be decodable, got {reason} at column {column}, row {row} of a level of "
            f"{self.size} px in {Path(self._name).name!r}; the file is damaged or truncated"
        )


class _Held:
    """A segment in the cache.

    Attributes:
        index: number of the segment.
        pixels: its pixels, valid once it is ready.
        readers: how many blocks read it now.
        busy: a thread decodes it.
        ready: it is decoded.
        kept: another region will ask for it.
    """

    __slots__ = ("busy", "index", "kept", "pixels", "readers", "ready")

    def __init__(self, index: int, pixels: RgbArray) -> None:
        self.index = index
        self.pixels = pixels
        self.readers = 0
        self.busy = False
        self.ready = False
        self.kept = False


class SegmentCache:
    """Segments of a slide between the first region that cuts them and the last. Thread-safe.

    Where it is known what will be asked for (`expect`) a segment goes with its last use. Others
    stay where they were cut, until room is needed: the least recently used go first. Memory:
    `num_bytes`, or what threads read at the moment where that is more.
    """

    def __init__(self, num_bytes: int) -> None:
        self._total = num_bytes
        self._used = 0  # bytes of what is held, and of what is spare
        self._held: OrderedDict[tuple[Decoder, int], _Held] = OrderedDict()
        self._spare: list[RgbArray] = []  # the last one is still in the CPU's caches
        # how often each segment will be asked for; Python's numbers come out of a memoryview
        # quicker than out of an array
        self._expected: dict[Decoder, memoryview] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._held)

    def expect(self, decoder: Decoder, counts: npt.NDArray[np.int64]) -> None:
        """Adds how often each segment will be asked for to what was announced before."""
        with self._changed:
            total = counts + np.asarray(self._expected.get(decoder, 0))
            self._expected[decoder] = total.data

    @contextmanager
    def taken(
        self, decoder: Decoder, uses: Mapping[int, int]
    ) -> Iterator[list[RgbArray]]:
        """Yields the pixels of some segments, to be read within the block.

        Args:
            decoder: decoder of their level.
            uses: how many regions cut each segment, by its index; 0: one takes it whole.
        """
        taken = []
        with self._changed:
            for index in uses:
                held = self._held.get((decoder, index))
                if held is None:
                    held = _Held(index, self._array(decoder.shape))
                    self._held[decoder, index] = held
                held.readers += 1
                taken.append(held)
        try:
            self._make_ready(decoder, taken)
            yield [held.pixels for held in taken]
        finally:
            with self._changed:
                for held, num_uses in zip(taken, uses.values()):
                    self._release(decoder, held, num_uses)

    def _array(self, shape: tuple[int, int, int]) -> RgbArray:
        """Returns memory for a segment: taken back from another one, or new."""
        num_bytes = math.prod(shape)
        while True:
            pixels = self._take_back(num_bytes)
            if pixels is None:
                self._used += num_bytes
                return np.empty(shape, dtype=np.uint8)
            if pixels.shape == shape:
                return pixels
            self._used -= pixels.nbytes  # segments of another level: let go

    def _take_back(self, num_bytes: int) -> RgbArray | None:
        """Returns memory that nobody reads; None where new memory fits, or all of it is read."""
        if self._spare:
            return self._spare.pop()
        if self._used + num_bytes <= self._total:
            return None
        for key, held in self._held.items():  # the oldest first
            if not held.readers:
                del self._held[key]
                return held.pixels
        return None

    def _make_ready(self, decoder: Decoder, taken: Sequence[_Held]) -> None:
        """Decodes what no other thread decodes, and waits for the rest.

        What another thread failed at is tried here.
        """
        while True:
            missing = [held for held in taken if not held.ready]
            if not missing:
                return
            with self._changed:
                mine = [held for held in missing if not (held.busy or held.ready)]
                for held in mine:
                    held.busy = True
                while not mine and all(held.busy for held in missing):
                    self._changed.wait()
            if not mine:
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
                        held.busy = False
                        held.ready = ready
                    self._changed.notify_all()

    def _release(self, decoder: Decoder, held: _Held, num_uses: int) -> None:
        """Keeps what will be asked for, as the youngest; makes the memory of the rest spare."""
        held.readers -= 1
        expected = self._expected.get(decoder)
        num_expected = 0 if expected is None else expected[held.index]
        if expected is not None and num_expected:
            left = max(0, num_expected - max(1, num_uses))
            expected[held.index] = left
            held.kept = left > 0
        elif num_uses:
            held.kept = True  # a region cut it, so its neighbour may be next
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
        *,
        slide_mpp: Mpp | None,
        objective_power: float | None = None,
        vendor: str | None = None,
        properties: Mapping[str, str] | None = None,
        orientation: int = 1,
    ) -> None:
        super().__init__(
            path,
            levels,
            slide_mpp=slide_mpp,
            objective_power=objective_power,
            vendor=vendor,
            properties=properties,
            orientation=orientation,
        )
        self._decoders = list(decoders)
        self._cache = SegmentCache(CACHE_BYTES)

    def expect(self, coords_l0: CoordsL0, plan: ReadPlan) -> None:
        """Counts how often the tiles cut each segment.

        Memory: 8 bytes for each segment of the level, for as long as the slide is open.
        """
        self._open_level(plan.level)
        decoder = self._decoders[plan.level]
        size = np.array(plan.size_lv)
        segment = np.array(decoder.segment)
        last = np.array((decoder.columns, decoder.rows))
        # changes of the count from place to place, along x and y; their sums are the counts
        changes = np.zeros((decoder.rows + 1, decoder.columns + 1), dtype=np.int64)
        for start in range(0, len(coords_l0), _TILES_AT_ONCE):
            coords = coords_l0[start : start + _TILES_AT_ONCE]
            origins = origins_lv(coords, plan.downsample)
            if plan.size_lv == decoder.segment and not (origins % segment).any():
                continue  # decoded straight into place
            left, top = np.clip(origins // segment, 0, last).T
            right, bottom = np.clip(-(-(origins + size) // segment), 0, last).T
            np.add.at(changes, (top, left), 1)
            np.add.at(changes, (top, right), -1)
            np.add.at(changes, (bottom, left), -1)
            np.add.at(changes, (bottom, right), 1)
        if changes.any():
            counts = changes.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
            self._cache.expect(decoder, counts.ravel())

    def stored_jpeg(self, level: int, column: int, row: int) -> bytes | None:
        """See `Slide.stored_jpeg`."""
        self._open_level(level)
        if self.rendering:
            return None
        decoder = self._decoders[level]
        with self._reading(f"segment {column}, {row} of level {level}"):
            return decoder.jpeg(row * decoder.columns + column)

    def _fill_all(
        self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray
    ) -> None:
        decoder = self._decoders[level]
        width, height = decoder.segment
        is_segment = out.shape[1:3] == (height, width)
        if is_segment and not any(x % width or y % height for x, y in origins_lv):
            indices = [
                y // height * decoder.columns + x // width for x, y in origins_lv
            ]
            decoder.decode(indices, out)
            return
        self._gather(decoder, origins_lv, out)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        self._gather(self._decoders[level], [origin_lv], out[None])

    def _gather(
        self, decoder: Decoder, origins: Sequence[tuple[int, int]], out: TileArray
    ) -> None:
        """Fills regions from the segments that they touch, each of which is looked up once."""
        parts = _cut_regions(decoder, origins, (out.shape[2], out.shape[1]))
        for target in parts.empty:
            out[target] = WHITE
        indices = sorted(parts.pieces)
        step = max(1, _DECODED_AT_ONCE_BYTES // math.prod(decoder.shape))
        for start in range(0, len(indices), step):
            group = indices[start : start + step]
            uses = {
                index: 0 if index in parts.whole else len(parts.pieces[index])
                for index in group
            }
            with self._cache.taken(decoder, uses) as segments:
                for index, pixels in zip(group, segments):
                    for target, source in parts.pieces[index]:
                        out[target] = pixels[source]


_Target = tuple[int, slice, slice]  # number of a region, its rows and columns
_Source = tuple[slice, slice]  # rows and columns of a segment


@dataclass(frozen=True)
class _Parts:
    """Parts of segments from which regions are put together.

    Attributes:
        pieces: by the index of a segment: where its parts go, and which parts these are.
        whole: segments that a region takes whole.
        empty: parts of regions of which the file has nothing.
    """

    pieces: dict[int, list[tuple[_Target, _Source]]]
    whole: set[int]
    empty: list[_Target]


def _cut_regions(
    decoder: Decoder, origins: Sequence[tuple[int, int]], size: tuple[int, int]
) -> _Parts:
    """Returns which parts of which segments fill regions of one size."""
    width, height = size
    edge_x, edge_y = decoder.segment
    size_x, size_y = decoder.size
    columns = decoder.columns
    sparse = decoder.sparse
    pieces = defaultdict[int, list[tuple[_Target, _Source]]](list)
    whole: set[int] = set()
    empty: list[_Target] = []
    for number, (x, y) in enumerate(origins):
        across = _cuts(x, width, edge_x, size_x)
        for row, source_y, target_y, all_y in _cuts(y, height, edge_y, size_y):
            for column, source_x, target_x, all_x in across:
                index = row * columns + column
                target = (number, target_y, target_x)
                if sparse and decoder.is_empty(index):
                    empty.append(target)
                    continue
                pieces[index].append((target, (source_y, source_x)))
                if all_y and all_x:
                    whole.add(index)
    return _Parts(pieces, whole, empty)


class _Cut(NamedTuple):
    """Part of a segment along one axis that a region takes."""

    place: int  # of the segment along the axis
    source: slice  # of the segment
    target: slice  # of the region
    is_whole: bool  # whether it is all of the segment that lies in the image


@lru_cache(maxsize=1024)  # rows and columns of a grid come again and again
def _cuts(start: int, length: int, edge: int, size: int) -> list[_Cut]:
    """Cuts [start, start + length) by segments of `edge` px, along an axis of `size` px."""
    cuts = []
    for place in range(start // edge, -(-(start + length) // edge)):
        left = place * edge
        first = max(start, left)
        last = min(start + length, left + edge)
        cuts.append(
            _Cut(
                place=place,
                source=slice(first - left, last - left),
                target=slice(first - start, last - start),
                is_whole=last - first == min(edge, size - left),
            )
        )
    return cuts
