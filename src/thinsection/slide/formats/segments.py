"""Reads slides whose levels are stored as a grid of segments.

A segment is one tile or strip of the slide file, and is always decoded whole. If a region uses only
a part of a segment, the segment stays in memory until other regions have used its other parts.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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

# decoded segments in memory, for each slide
CACHE_BYTES = 64 * MIB
# a segment must fit a budget that the user never sees; larger ones are refused
MAX_SEGMENT_BYTES = 128 * MIB
# segments decoded in one step; a larger segment is decoded alone
_DECODED_AT_ONCE_BYTES = 4 * MIB
# tiles whose uses of segments are counted in one step
_TILES_AT_ONCE = 1 << 16


def _ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class Decoder(ABC):
    """Decodes segments of one level. Segments at the border reach beyond the image.

    Attributes:
        size: (width, height) of the level, px.
        segment: (width, height) of a segment, px.
        columns: segments in a row of the grid.
        rows: rows of the grid.
        sparse: True if some segments may be empty.
    """

    def __init__(self, level: Level, name: str) -> None:
        assert level.segment is not None
        self.size = level.size
        self.segment = level.segment
        self.columns = _ceil_div(self.size[0], self.segment[0])
        self.rows = _ceil_div(self.size[1], self.segment[1])
        self.sparse = False
        self._name = name

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the array of a segment, (height, width, 3)."""
        return (self.segment[1], self.segment[0], 3)

    def is_empty(self, index: int) -> bool:
        """True if the file stores no data for a segment; the segment is then white."""
        return False

    @abstractmethod
    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """Decodes segments into arrays.

        Args:
            indices: index of each segment, row * columns + column.
            outs: an array of `shape` for each segment.
        """

    def jpeg(self, index: int) -> bytes | None:
        """Returns the stored bytes of a segment if they are a complete JPEG, else None."""
        return None

    def _error(self, index: int, reason: str) -> SlideReadError:
        row, column = divmod(index, self.columns)
        return SlideReadError(
            f"segment must be decodable, got {reason} at column {column}, row {row} of a level of "
            f"{self.size} px in {Path(self._name).name!r}; the file is damaged or truncated"
        )


class _CacheEntry:
    """A segment in the cache.

    Attributes:
        index: index of the segment in its level.
        pixels: pixels of the segment, valid once `is_ready`.
        num_borrowers: number of `borrow` blocks that use it at the moment.
        is_decoding: True while a thread decodes it.
        is_ready: True once it is decoded.
        stays: True if it stays in the cache after the last block that uses it.
    """

    __slots__ = ("index", "is_decoding", "is_ready", "num_borrowers", "pixels", "stays")

    def __init__(self, index: int, pixels: RgbArray) -> None:
        self.index = index
        self.pixels = pixels
        self.num_borrowers = 0
        self.is_decoding = False
        self.is_ready = False
        self.stays = False


class SegmentCache:
    """Decoded segments of a slide that regions may still use. Thread-safe.

    A segment whose uses were announced by `expect` is dropped after its last use. Any other segment
    that was used in part stays until memory is needed. The least recently used ones are dropped
    first.

    Memory: `num_bytes`, or the segments that are borrowed at the moment if these are more.
    """

    def __init__(self, num_bytes: int) -> None:
        self._max_bytes = num_bytes
        # bytes of all entries and of the free arrays
        self._allocated_bytes = 0
        # the least recently used entry is the first
        self._entries: OrderedDict[tuple[Decoder, int], _CacheEntry] = OrderedDict()
        # arrays for reuse; the last one is taken first, as it is still in the CPU's caches
        self._free_arrays: list[RgbArray] = []
        # number of announced uses of each segment; reading one number is faster from a memoryview
        # than from an array
        self._expected: dict[Decoder, memoryview] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._entries)

    def expect(self, decoder: Decoder, counts: npt.NDArray[np.int64]) -> None:
        """Announces the number of uses of each segment, in addition to earlier announcements."""
        with self._changed:
            total = counts + np.asarray(self._expected.get(decoder, 0))
            self._expected[decoder] = total.data

    @contextmanager
    def borrow(
        self, decoder: Decoder, num_uses: Mapping[int, int], whole: Collection[int]
    ) -> Iterator[list[RgbArray]]:
        """Yields the pixels of segments in the order of `num_uses`, for use within the block.

        Args:
            decoder: decoder of their level.
            num_uses: by the index of a segment, number of regions that use it in this block.
            whole: indices of the segments that a region uses whole. These do not stay in the cache,
                unless further uses were announced.
        """
        entries = []
        with self._changed:
            for index in num_uses:
                entry = self._entries.get((decoder, index))
                if entry is None:
                    entry = _CacheEntry(index, self._allocate(decoder.shape))
                    self._entries[decoder, index] = entry
                entry.num_borrowers += 1
                entries.append(entry)
        try:
            self._decode_missing(decoder, entries)
            yield [entry.pixels for entry in entries]
        finally:
            with self._changed:
                for entry in entries:
                    self._count_uses(
                        decoder,
                        entry,
                        num_uses[entry.index],
                        is_whole=entry.index in whole,
                    )
                    self._give_back(decoder, entry)

    def _allocate(self, shape: tuple[int, int, int]) -> RgbArray:
        """Returns an array for a segment: a used one of the same shape, or a new one.

        Used arrays of another shape, which are segments of another level, are deallocated until
        there is room for a new one. `_allocated_bytes` counts each array once from its allocation
        to its deallocation, also while it is free or passes from one segment to the next.
        """
        num_bytes = math.prod(shape)
        while True:
            pixels = self._reclaim_array(num_bytes)
            if pixels is None:
                self._allocated_bytes += num_bytes
                return np.empty(shape, dtype=np.uint8)
            if pixels.shape == shape:
                return pixels
            self._allocated_bytes -= pixels.nbytes

    def _reclaim_array(self, num_bytes: int) -> RgbArray | None:
        """Returns an array that nobody uses; may drop the least recently used segment for it.

        Returns None if `num_bytes` more can be allocated within the limit. Returns None also if
        every array is in use; the limit is then exceeded.
        """
        if self._free_arrays:
            return self._free_arrays.pop()
        if self._allocated_bytes + num_bytes <= self._max_bytes:
            return None
        for key, entry in self._entries.items():
            if entry.num_borrowers == 0:
                del self._entries[key]
                return entry.pixels
        return None

    def _decode_missing(self, decoder: Decoder, entries: Sequence[_CacheEntry]) -> None:
        """Returns when all entries are decoded.

        This thread decodes the entries that no other thread decodes, then waits for the others. If
        another thread fails at an entry, this one tries it.
        """
        while True:
            missing = [entry for entry in entries if not entry.is_ready]
            if not missing:
                return
            claimed = self._claim_entries(missing)
            if claimed:
                self._decode_claimed(decoder, claimed)

    def _claim_entries(self, missing: Sequence[_CacheEntry]) -> list[_CacheEntry]:
        """Marks entries as decoded by this thread, and returns them.

        If other threads decode all of them, waits until one of these is done or has failed, and
        returns no entries.
        """
        with self._changed:
            claimed = []
            for entry in missing:
                if not (entry.is_decoding or entry.is_ready):
                    entry.is_decoding = True
                    claimed.append(entry)
            if not claimed:
                while all(entry.is_decoding for entry in missing):
                    self._changed.wait()
            return claimed

    def _decode_claimed(self, decoder: Decoder, entries: Sequence[_CacheEntry]) -> None:
        """Decodes entries, and wakes the threads that wait for them, also after an error."""
        is_ready = False
        try:
            decoder.decode(
                [entry.index for entry in entries], [entry.pixels for entry in entries]
            )
            is_ready = True
        finally:
            with self._changed:
                for entry in entries:
                    entry.is_decoding = False
                    entry.is_ready = is_ready
                self._changed.notify_all()

    def _count_uses(
        self, decoder: Decoder, entry: _CacheEntry, num_uses: int, *, is_whole: bool
    ) -> None:
        """Subtracts uses from the announced ones, and decides whether the segment stays."""
        expected = self._expected.get(decoder)
        num_expected = 0 if expected is None else expected[entry.index]
        if expected is not None and num_expected > 0:
            num_left = max(0, num_expected - num_uses)
            expected[entry.index] = num_left
            entry.stays = num_left > 0
        elif not is_whole:
            # a region used a part of it, so the neighbouring region may be read next
            entry.stays = True

    def _give_back(self, decoder: Decoder, entry: _CacheEntry) -> None:
        """Ends one block's use of an entry; after the last, keeps the entry or frees its array."""
        entry.num_borrowers -= 1
        if entry.num_borrowers > 0:
            return
        if entry.stays and entry.is_ready:
            # the most recently used entry is the last
            self._entries.move_to_end((decoder, entry.index))
            return
        del self._entries[decoder, entry.index]
        if self._allocated_bytes <= self._max_bytes:
            self._free_arrays.append(entry.pixels)
        else:
            self._allocated_bytes -= entry.pixels.nbytes


class SegmentedSlide(Slide):
    """A slide whose levels are grids of segments, with one decoder for each level. Thread-safe.

    Memory: `CACHE_BYTES` of decoded segments, and one more segment for each reading thread.
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
        """Counts how many tiles use each segment, and announces it to the cache.

        Memory: 8 bytes for each segment of the level, as long as the slide is open.
        """
        self._open_level(plan.level)
        decoder = self._decoders[plan.level]
        size = np.array(plan.size_lv)
        segment = np.array(decoder.segment)
        grid_size = np.array((decoder.columns, decoder.rows))
        # a 2-D difference array; its cumulative sums are the numbers of tiles
        changes = np.zeros((decoder.rows + 1, decoder.columns + 1), dtype=np.int64)
        for start in range(0, len(coords_l0), _TILES_AT_ONCE):
            coords = coords_l0[start : start + _TILES_AT_ONCE]
            origins = origins_lv(coords, plan.downsample)
            if plan.size_lv == decoder.segment and not (origins % segment).any():
                # each tile is a whole segment, which is decoded without the cache
                continue
            first_segments = origins // segment
            # place of the first segment behind each tile
            end_segments = (origins + size - 1) // segment + 1
            left, top = np.clip(first_segments, 0, grid_size).T
            right, bottom = np.clip(end_segments, 0, grid_size).T
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
        # a rendering (colour profile, channels) changes the stored pixels
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
        is_segment_size = out.shape[1:3] == (height, width)
        if is_segment_size and not any(x % width or y % height for x, y in origins_lv):
            indices = [
                y // height * decoder.columns + x // width for x, y in origins_lv
            ]
            decoder.decode(indices, out)
            return
        self._assemble(decoder, origins_lv, out)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        self._assemble(self._decoders[level], [origin_lv], out[None])

    def _assemble(
        self, decoder: Decoder, origins: Sequence[tuple[int, int]], out: TileArray
    ) -> None:
        """Fills regions with the parts of segments that they cover; borrows each segment once."""
        size = (out.shape[2], out.shape[1])
        parts = _cut_regions(decoder, origins, size)
        for target in parts.empty:
            out[target] = WHITE
        indices = sorted(parts.pieces)
        step = max(1, _DECODED_AT_ONCE_BYTES // math.prod(decoder.shape))
        for start in range(0, len(indices), step):
            group = indices[start : start + step]
            num_uses = {
                # a segment that one region uses whole counts as one use
                index: 1 if index in parts.whole else len(parts.pieces[index])
                for index in group
            }
            with self._cache.borrow(decoder, num_uses, parts.whole) as segments:
                for index, pixels in zip(group, segments):
                    for target, source in parts.pieces[index]:
                        out[target] = pixels[source]


# number of a region, and rows and columns of its pixels
_Target = tuple[int, slice, slice]
# rows and columns of a segment's pixels
_Source = tuple[slice, slice]


@dataclass(frozen=True)
class _Parts:
    """Parts of segments that fill some regions.

    Attributes:
        pieces: by the index of a segment, the place of each of its parts in a region (target) and
            in the segment (source).
        whole: indices of the segments that one region uses whole.
        empty: parts of regions for which the file stores no data.
    """

    pieces: dict[int, list[tuple[_Target, _Source]]]
    whole: set[int]
    empty: list[_Target]


def _cut_regions(
    decoder: Decoder, origins: Sequence[tuple[int, int]], size: tuple[int, int]
) -> _Parts:
    """Returns the parts of segments that fill regions of one size."""
    width, height = size
    segment_width, segment_height = decoder.segment
    level_width, level_height = decoder.size
    pieces = defaultdict[int, list[tuple[_Target, _Source]]](list)
    whole: set[int] = set()
    empty: list[_Target] = []
    for number, (x, y) in enumerate(origins):
        cuts_x = _cut_axis(x, width, segment_width, level_width)
        cuts_y = _cut_axis(y, height, segment_height, level_height)
        for row, source_y, target_y, is_whole_y in cuts_y:
            for column, source_x, target_x, is_whole_x in cuts_x:
                index = row * decoder.columns + column
                target = (number, target_y, target_x)
                if decoder.sparse and decoder.is_empty(index):
                    empty.append(target)
                    continue
                pieces[index].append((target, (source_y, source_x)))
                if is_whole_y and is_whole_x:
                    whole.add(index)
    return _Parts(pieces, whole, empty)


class _Cut(NamedTuple):
    """Overlap of a region with one segment, along one axis.

    Attributes:
        place: number of the segment along the axis.
        source: overlap in pixels of the segment.
        target: overlap in pixels of the region.
        is_whole: True if the overlap is all of the segment that lies in the image.
    """

    place: int
    source: slice
    target: slice
    is_whole: bool


# cached, because all regions in a row or column of a grid have the same cuts
@lru_cache(maxsize=1024)
def _cut_axis(
    start: int, length: int, segment_length: int, image_length: int
) -> list[_Cut]:
    """Cuts [start, start + length) at the borders of segments, along one axis, in pixels."""
    cuts = []
    end = start + length
    for place in range(start // segment_length, _ceil_div(end, segment_length)):
        segment_start = place * segment_length
        segment_end = segment_start + segment_length
        cut_start = max(start, segment_start)
        cut_end = min(end, segment_end)
        length_in_image = min(segment_end, image_length) - segment_start
        cuts.append(
            _Cut(
                place=place,
                source=slice(cut_start - segment_start, cut_end - segment_start),
                target=slice(cut_start - start, cut_end - start),
                is_whole=cut_end - cut_start == length_in_image,
            )
        )
    return cuts
