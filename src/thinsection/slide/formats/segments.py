"""Reads slides whose levels are stored as a grid of segments.

A segment is one tile or strip of the slide file, and is always decoded whole. If a region uses only
a part of a segment, the segment stays in memory until other regions have used its other parts.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.errors import SlideReadError
from thinsection.machine import cpu_count
from thinsection.slide.base import WHITE, Slide
from thinsection.slide.formats.kept_segments import KeptFile
from thinsection.slide.geometry import ReadPlan, origins_lv
from thinsection.types import MIB, CoordsL0, Level, RgbArray, Size, TileArray

# Most bytes of decoded segments in memory, for each slide; see `cache_bytes`.
CACHE_BYTES = 64 * MIB
_LEAST_CACHE_BYTES = 16 * MIB
_CACHE_SEGMENTS = 80
_CACHE_BYTES_PER_CPU = 4 * MIB
# Slides with a larger segment are refused, because each reading thread holds a decoded segment.
MAX_SEGMENT_BYTES = 128 * MIB
# segments decoded in one step; a larger segment is decoded alone
_DECODED_AT_ONCE_BYTES = 4 * MIB
# tiles whose uses of segments are counted in one step
_TILES_AT_ONCE = 1 << 16


def cache_bytes(segment_bytes: int) -> int:
    """Bytes of decoded segments that a slide keeps.

    A row of tile blocks shares a row of segments with the next one, at 0.5 µm/px one of some 17. To
    keep this row for a wide slide takes more memory, and is no faster than to decode it twice.
    Large segments, and many threads, need more.
    """
    wanted = max(
        _LEAST_CACHE_BYTES,
        _CACHE_SEGMENTS * segment_bytes,
        _CACHE_BYTES_PER_CPU * _num_cpus(),
    )
    return min(CACHE_BYTES, wanted)


@cache
def _num_cpus() -> int:
    """CPUs of this process. To read them takes longer than to open a small slide."""
    return cpu_count()


def _ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class Decoder:
    """Decodes segments of one level. Segments at the border reach beyond the image.

    Attributes:
        size: (width, height) of the level, px.
        segment: (width, height) of a segment, px.
        columns: segments in a row of the grid.
        rows: rows of the grid.
        sparse: True if some segments may be empty.
        slow: True if to decode a segment takes far longer than to read its pixels from a disk.
    """

    slow = False

    def __init__(self, level: Level, name: str, *, stored: Size | None = None) -> None:
        assert level.segment is not None
        # a level without its padding has fewer segments than its file stores
        width, height = stored or level.size
        self.size = level.size
        self.segment = level.segment
        self.columns = _ceil_div(width, self.segment[0])
        self.rows = _ceil_div(height, self.segment[1])
        self.sparse = False
        self._name = name

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the array of a segment, (height, width, 3)."""
        return (self.segment[1], self.segment[0], 3)

    def index(self, column: int, row: int) -> int:
        """Returns the index of the segment at a place in the grid."""
        return row * self.columns + column

    def is_empty(self, index: int) -> bool:
        """True if the file stores no data for a segment; the segment is then white."""
        return False

    def decode(
        self, indices: Sequence[int], outs: Iterable[RgbArray]
    ) -> Iterator[None]:
        """Decodes segments into arrays, and yields after each.

        Args:
            indices: `index` of each segment; none `is_empty`.
            outs: an array of `shape` for each segment. One is taken when it is needed, so one
                array may be given again and again.
        """
        for index, out in zip(indices, outs):
            self._decode_one(index, out)
            yield

    def _decode_one(self, index: int, out: RgbArray) -> None:
        """Decodes a segment into an array; for subclasses that leave `decode` as it is."""
        raise NotImplementedError

    def jpeg(self, index: int) -> bytes | None:
        """Returns the stored bytes of a segment if they are a complete JPEG, else None."""
        return None

    def keep(self, index: int, pixels: RgbArray) -> None:
        """Takes the pixels of a segment that the cache drops, although it is used again."""

    def _error(self, index: int, reason: str) -> SlideReadError:
        row, column = divmod(index, self.columns)
        return SlideReadError(
            f"segment must be decodable, got {reason} at column {column}, row {row} of a level of "
            f"{self.size} px in {Path(self._name).name!r}; the file is damaged or truncated"
        )


class KeptDecoder(Decoder):
    """A decoder that writes what it has decoded to a file, and reads it there the next time.

    Memory: 8 bytes for each segment of the level.

    Attributes:
        keeps_new: True if all segments that are decoded are kept; else those that the cache drops
            before their last use.
    """

    def __init__(self, decoder: Decoder, file: KeptFile) -> None:
        # a decoder like the other one, whose level and name are not needed again
        self.size = decoder.size
        self.segment = decoder.segment
        self.columns = decoder.columns
        self.rows = decoder.rows
        self.sparse = decoder.sparse
        self.keeps_new = True
        self._decoder = decoder
        self._file = file
        # -1: not in the file
        self._places = np.full(self.columns * self.rows, -1, dtype=np.int64)

    def is_empty(self, index: int) -> bool:
        """See `Decoder.is_empty`."""
        return self._decoder.is_empty(index)

    def jpeg(self, index: int) -> bytes | None:
        """See `Decoder.jpeg`."""
        return self._decoder.jpeg(index)

    def decode(
        self, indices: Sequence[int], outs: Iterable[RgbArray]
    ) -> Iterator[None]:
        """See `Decoder.decode`; segments of the file are read from it."""
        arrays = iter(outs)
        for is_kept, group in groupby(indices, key=self._is_kept):
            if is_kept:
                for index, out in zip(group, arrays):
                    self._file.read(int(self._places[index]), out)
                    yield
            else:
                yield from self._decode_and_keep(list(group), arrays)

    def _is_kept(self, index: int) -> bool:
        return 0 <= index < len(self._places) and self._places[index] >= 0

    def _decode_and_keep(
        self, indices: Sequence[int], arrays: Iterator[RgbArray]
    ) -> Iterator[None]:
        given: list[RgbArray] = []

        def give_each() -> Iterator[RgbArray]:
            for out in arrays:
                given.append(out)
                yield out

        for index, _ in zip(indices, self._decoder.decode(indices, give_each())):
            pixels = given.pop(0)
            if self.keeps_new:
                self.keep(index, pixels)
            yield

    def keep(self, index: int, pixels: RgbArray) -> None:
        """See `Decoder.keep`."""
        if not self._is_kept(index):
            place = self._file.write(pixels)
            if place is not None:
                self._places[index] = place


@dataclass(slots=True, eq=False)
class _CacheEntry:
    """A segment in the cache.

    Attributes:
        index: index of the segment in its level.
        pixels: pixels of the segment, valid once `is_ready`; None until it is decoded.
        num_borrowers: number of `borrow` calls that use it at the moment.
        is_decoding: True while a thread decodes it.
        is_ready: True once it is decoded.
        stays: True if it stays in the cache after the last call that uses it.
    """

    index: int
    pixels: RgbArray | None = None
    num_borrowers: int = 0
    is_decoding: bool = False
    is_ready: bool = False
    stays: bool = False


class SegmentCache:
    """Decoded segments of a slide that regions may still use. Thread-safe.

    A segment whose uses were announced by `expect` is dropped after its last use. Any other segment
    that was used in part stays until memory is needed; the least recently used ones are dropped
    first. When none of these is left, the announced segment that is needed last is dropped, and is
    decoded again then.

    Memory: `max_bytes`, or the segments that are borrowed at the moment if these are more.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # bytes of all entries and of the free arrays
        self._allocated_bytes = 0
        # the least recently used entry is the first
        self._entries: OrderedDict[tuple[Decoder, int], _CacheEntry] = OrderedDict()
        # arrays for reuse; the last one is taken first, as it is still in the CPU's caches
        self._free_arrays: list[RgbArray] = []
        # number of announced uses of each segment; reading one number is faster from a memoryview
        # than from an array
        self._expected: dict[Decoder, memoryview] = {}
        # place of the last announced use of each segment in the order of all uses
        self._last_uses: dict[Decoder, memoryview] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._entries)

    def expect(
        self,
        decoder: Decoder,
        counts: npt.NDArray[np.int32],
        last_uses: npt.NDArray[np.int32],
    ) -> None:
        """Announces uses of segments, in addition to earlier announcements.

        Args:
            decoder: decoder of their level.
            counts: uses of each segment.
            last_uses: place of the last of them among all uses; -1 without any.
        """
        with self._changed:
            total = counts.copy()
            announced = self._expected.get(decoder)
            latest = last_uses.copy()
            if announced is not None:
                total += np.asarray(announced)
                np.maximum(latest, self._last_uses[decoder], out=latest)
            self._expected[decoder] = total.data
            self._last_uses[decoder] = latest.data

    def borrow(
        self, decoder: Decoder, num_uses: Mapping[int, int], whole: Collection[int]
    ) -> Iterator[tuple[int, RgbArray]]:
        """Yields the index and the pixels of each segment.

        The pixels may be used until the next segment is asked for. Segments of the cache come
        first, then those that this thread decodes, then those that another thread was decoding. If
        another thread fails at a segment, this one tries it.

        Args:
            decoder: decoder of their level.
            num_uses: number of regions that use a segment, by the segment's index; segments are
                decoded in the order of the keys.
            whole: indices of the segments that a region uses whole. These do not stay in the cache,
                unless further uses were announced.
        """
        borrowed = self._borrow_entries(decoder, num_uses)
        claimed: list[_CacheEntry] = []
        try:
            while borrowed:
                ready = [entry for entry in borrowed.values() if entry.is_ready]
                for entry in ready:
                    assert entry.pixels is not None
                    yield entry.index, entry.pixels
                with self._changed:
                    for entry in ready:
                        del borrowed[entry.index]
                        self._end_use(decoder, entry, num_uses, whole)
                    claimed = []
                    for entry in borrowed.values():
                        if not (entry.is_decoding or entry.is_ready):
                            entry.is_decoding = True
                            claimed.append(entry)
                    if borrowed and not claimed:
                        # until another thread has decoded one, or has failed at it
                        while all(entry.is_decoding for entry in borrowed.values()):
                            self._changed.wait()
                        continue
                arrays = self._allocate_each(claimed, decoder.shape)
                indices = [entry.index for entry in claimed]
                decoded = decoder.decode(indices, arrays)
                for entry, _ in zip(claimed, decoded, strict=True):
                    assert entry.pixels is not None
                    yield entry.index, entry.pixels
                    with self._changed:
                        entry.is_decoding = False
                        entry.is_ready = True
                        del borrowed[entry.index]
                        self._end_use(decoder, entry, num_uses, whole)
                        self._changed.notify_all()
        finally:
            # nothing is left here, unless an error was raised
            if borrowed:
                with self._changed:
                    for entry in claimed:
                        entry.is_decoding = False
                    for entry in borrowed.values():
                        self._end_use(decoder, entry, num_uses, whole)
                    self._changed.notify_all()

    def _borrow_entries(
        self, decoder: Decoder, indices: Iterable[int]
    ) -> dict[int, _CacheEntry]:
        """Returns the entries of segments, by index; those of new segments are not ready."""
        borrowed = {}
        with self._changed:
            for index in indices:
                entry = self._entries.get((decoder, index))
                if entry is None:
                    entry = _CacheEntry(index)
                    self._entries[decoder, index] = entry
                entry.num_borrowers += 1
                borrowed[index] = entry
        return borrowed

    def _allocate_each(
        self, entries: Iterable[_CacheEntry], shape: tuple[int, int, int]
    ) -> Iterator[RgbArray]:
        """Yields the array of each entry, which gets one only when it is asked for."""
        for entry in entries:
            if entry.pixels is None:
                with self._changed:
                    entry.pixels = self._allocate(shape)
            yield entry.pixels

    def _allocate(self, shape: tuple[int, int, int]) -> RgbArray:
        """Returns an array for a segment: a used one of the same shape, or a new one.

        `_allocated_bytes` counts each array once from its allocation to its deallocation, also
        while it is free or passes from one segment to the next.
        """
        num_bytes = math.prod(shape)
        room_bytes = self._max_bytes - num_bytes
        while self._free_arrays or self._allocated_bytes > room_bytes:
            pixels = self._take_unused_array()
            if pixels is None:
                # every array is in use, so the new one exceeds the limit
                break
            if pixels.shape == shape:
                return pixels
            # deallocate an array of another level to make room
            self._allocated_bytes -= pixels.nbytes
        self._allocated_bytes += num_bytes
        return np.empty(shape, dtype=np.uint8)

    def _take_unused_array(self) -> RgbArray | None:
        """Takes a free array, else drops a segment that no call uses and takes its array.

        Returns None if every array is in use.
        """
        if self._free_arrays:
            return self._free_arrays.pop()
        needed_last: tuple[Decoder, int] | None = None
        latest = -1
        for key, entry in self._entries.items():
            if entry.num_borrowers > 0:
                continue
            decoder, index = key
            expected = self._expected.get(decoder)
            if expected is None or expected[index] == 0:
                return self._entries.pop(key).pixels
            last_use = self._last_uses[decoder][index]
            if last_use > latest:
                needed_last = key
                latest = last_use
        if needed_last is None:
            return None
        decoder, index = needed_last
        pixels = self._entries.pop(needed_last).pixels
        if pixels is not None:
            decoder.keep(index, pixels)
        return pixels

    def clear(self) -> None:
        """Drops all segments that no call uses."""
        with self._changed:
            while self._entries or self._free_arrays:
                pixels = self._take_unused_array()
                if pixels is None:
                    break
                self._allocated_bytes -= pixels.nbytes

    def _end_use(
        self,
        decoder: Decoder,
        entry: _CacheEntry,
        num_uses: Mapping[int, int],
        whole: Collection[int],
    ) -> None:
        """Ends the use of an entry by a call; after the last, keeps the entry or frees its array.

        Subtracts the uses from the announced ones, and decides whether the segment stays.
        """
        index = entry.index
        expected = self._expected.get(decoder)
        if expected is None or expected[index] == 0:
            # No use was announced. If a region used a part of the segment, its neighbour may be
            # read next.
            if index not in whole:
                entry.stays = True
        else:
            num_left = max(0, expected[index] - num_uses[index])
            expected[index] = num_left
            entry.stays = num_left > 0
        entry.num_borrowers -= 1
        if entry.num_borrowers > 0:
            return
        if entry.stays and entry.is_ready:
            # the most recently used entry is the last
            self._entries.move_to_end((decoder, index))
            return
        del self._entries[decoder, index]
        pixels = entry.pixels
        # `borrow` has the entry until its last segment, and must not keep the array alive
        entry.pixels = None
        if pixels is None:
            return
        if self._allocated_bytes <= self._max_bytes:
            self._free_arrays.append(pixels)
        else:
            self._allocated_bytes -= pixels.nbytes


class SegmentedSlide(Slide):
    """A slide whose levels are grids of segments, with one decoder for each level. Thread-safe.

    Memory: `cache_bytes` of decoded segments, at most 64 MiB, and one more segment for each reading
    thread.
    """

    def _read_by(self, levels: Sequence[Level], decoders: Iterable[Decoder]) -> None:
        """Sets the levels and their decoders; a reader calls this when it opens the slide."""
        self.levels = tuple(levels)
        self.size = self.levels[0].size
        self._decoders = list(decoders)
        self.cache_bytes = cache_bytes(
            max((math.prod(decoder.shape) for decoder in self._decoders), default=0)
        )
        self._cache = SegmentCache(self.cache_bytes)

    def expect(self, coords_l0: CoordsL0, plan: ReadPlan) -> None:
        """Counts how many tiles use each segment, and announces it to the cache.

        Memory: 8 bytes for each segment of the level, as long as the slide is open.
        """
        self._open_level(plan.level)
        decoder = self._decoders[plan.level]
        tile_size = np.array(plan.size_lv)
        segment = np.array(decoder.segment)
        grid_size = np.array((decoder.columns, decoder.rows))
        counts = np.zeros((decoder.rows, decoder.columns), dtype=np.int32)
        last_uses = np.full_like(counts, -1)
        for start in range(0, len(coords_l0), _TILES_AT_ONCE):
            coords = coords_l0[start : start + _TILES_AT_ONCE]
            origins = origins_lv(coords, plan.downsample)
            if plan.size_lv == decoder.segment and not (origins % segment).any():
                # each tile is a whole segment, which is decoded without the cache
                continue
            first_segments = np.clip(origins // segment, 0, grid_size)
            last_segments = (origins + tile_size - 1) // segment
            end_segments = np.clip(last_segments + 1, 0, grid_size)
            tiles = np.arange(start, start + len(coords), dtype=np.int32)
            # a tile uses a rectangle of segments
            columns, rows = (end_segments - first_segments).max(axis=0).tolist()
            for right, down in product(range(columns), range(rows)):
                x = first_segments[:, 0] + right
                y = first_segments[:, 1] + down
                is_used = (x < end_segments[:, 0]) & (y < end_segments[:, 1])
                used = (y[is_used], x[is_used])
                np.add.at(counts, used, 1)
                np.maximum.at(last_uses, used, tiles[is_used])
        if counts.any():
            self._cache.expect(decoder, counts.ravel(), last_uses.ravel())

    def drop_decoded(self) -> None:
        """See `Slide.drop_decoded`."""
        self._cache.clear()

    @contextmanager
    def keeping_decoded(self, levels: Collection[int], folder: Path) -> Iterator[None]:
        """See `Slide.keeping_decoded`: levels whose `Decoder.slow` is True."""
        slow = [level for level in sorted(levels) if self._decoders[level].slow]
        if not slow:
            yield
            return
        file = KeptFile(folder)
        self.on_close.callback(file.close)
        kept = []
        for level in slow:
            decoder = KeptDecoder(self._decoders[level], file)
            self._decoders[level] = decoder
            kept.append(decoder)
        try:
            yield
        finally:
            for decoder in kept:
                decoder.keeps_new = False

    def stored_jpeg(self, level: int, column: int, row: int) -> bytes | None:
        """See `Slide.stored_jpeg`."""
        self._open_level(level)
        # a rendering (colour profile, channels) changes the stored pixels
        if self.rendering:
            return None
        decoder = self._decoders[level]
        with self._reading(f"segment {column}, {row} of level {level}"):
            return decoder.jpeg(decoder.index(column, row))

    def _fill_all(
        self, origins: Sequence[tuple[int, int]], level: int, out: TileArray
    ) -> None:
        """Fills regions of one size; regions that are whole segments bypass the cache."""
        decoder = self._decoders[level]
        indices = _whole_segments(decoder, origins, (out.shape[2], out.shape[1]))
        if indices is None:
            self._assemble(decoder, origins, out)
            return
        stored = []
        for index, region in zip(indices, out):
            if decoder.sparse and decoder.is_empty(index):
                region[:] = WHITE
            else:
                stored.append((index, region))
        regions = [region for _, region in stored]
        for _ in decoder.decode([index for index, _ in stored], regions):
            pass

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        """Fills one region."""
        self._assemble(self._decoders[level], [origin_lv], out[None])

    def _assemble(
        self, decoder: Decoder, origins: Sequence[tuple[int, int]], out: TileArray
    ) -> None:
        """Fills regions from the segments that they overlap; borrows each segment once."""
        size = (out.shape[2], out.shape[1])
        by_segment, whole, empty = _find_overlaps(decoder, origins, size)
        for in_region in empty:
            out[in_region] = WHITE
        indices = sorted(by_segment)
        step = max(1, _DECODED_AT_ONCE_BYTES // math.prod(decoder.shape))
        for start in range(0, len(indices), step):
            group = indices[start : start + step]
            num_uses = {index: len(by_segment[index]) for index in group}
            # each segment is used as soon as it is decoded, while it is in the CPU's caches
            for index, pixels in self._cache.borrow(decoder, num_uses, whole):
                for in_region, in_segment in by_segment[index]:
                    out[in_region] = pixels[in_segment]


def _whole_segments(
    decoder: Decoder, origins: Sequence[tuple[int, int]], size: tuple[int, int]
) -> list[int] | None:
    """Returns the segment of each region; None if some region is not exactly one segment."""
    if size != decoder.segment:
        return None
    indices = []
    for x, y in origins:
        column, x_in_segment = divmod(x, size[0])
        row, y_in_segment = divmod(y, size[1])
        if x_in_segment or y_in_segment:
            return None
        indices.append(decoder.index(column, row))
    return indices


# index of a region, and the rows and columns of an overlap in this region
_InRegion = tuple[int, slice, slice]
# rows and columns of an overlap in a segment
_InSegment = tuple[slice, slice]


def _find_overlaps(
    decoder: Decoder, origins: Sequence[tuple[int, int]], size: tuple[int, int]
) -> tuple[dict[int, list[tuple[_InRegion, _InSegment]]], set[int], list[_InRegion]]:
    """Finds the overlaps of regions of one size with the segments of a level.

    Returns all overlaps of a segment by its index, the indices of the segments that one region
    uses whole, and the overlaps with segments for which the file stores no data.
    """
    by_segment: dict[int, list[tuple[_InRegion, _InSegment]]] = {}
    whole: set[int] = set()
    empty: list[_InRegion] = []
    width, height = size
    segment_width, segment_height = decoder.segment
    level_width, level_height = decoder.size
    for region, (x, y) in enumerate(origins):
        columns = _find_axis_overlaps(x, width, segment_width, level_width)
        rows = _find_axis_overlaps(y, height, segment_height, level_height)
        for row, column in product(rows, columns):
            index = decoder.index(column.segment, row.segment)
            in_region = (region, row.in_region, column.in_region)
            if decoder.sparse and decoder.is_empty(index):
                empty.append(in_region)
                continue
            overlap = (in_region, (row.in_segment, column.in_segment))
            by_segment.setdefault(index, []).append(overlap)
            if row.is_whole and column.is_whole:
                whole.add(index)
    return by_segment, whole, empty


class _AxisOverlap(NamedTuple):
    """Overlap of a region with one segment, along one axis.

    Attributes:
        segment: column or row of the segment in the grid.
        in_segment: pixels of the overlap, counted from the start of the segment.
        in_region: pixels of the overlap, counted from the start of the region.
        is_whole: True if the overlap is all of the segment that lies in the image.
    """

    segment: int
    in_segment: slice
    in_region: slice
    is_whole: bool


# cached, because all regions in a row or column of a grid have the same overlaps
@lru_cache(maxsize=1024)
def _find_axis_overlaps(
    start: int, length: int, segment_length: int, image_length: int
) -> list[_AxisOverlap]:
    """Finds the overlaps of the pixels [start, start + length) with segments, along one axis."""
    overlaps = []
    end = start + length
    first_segment = start // segment_length
    end_segment = _ceil_div(end, segment_length)
    for segment in range(first_segment, end_segment):
        segment_start = segment * segment_length
        segment_end = segment_start + segment_length
        overlap_start = max(start, segment_start)
        overlap_end = min(end, segment_end)
        length_in_image = min(segment_end, image_length) - segment_start
        overlaps.append(
            _AxisOverlap(
                segment=segment,
                in_segment=slice(
                    overlap_start - segment_start, overlap_end - segment_start
                ),
                in_region=slice(overlap_start - start, overlap_end - start),
                is_whole=overlap_end - overlap_start == length_in_image,
            )
        )
    return overlaps
