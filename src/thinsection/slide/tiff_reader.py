"""The direct TIFF reader: the file's own segments (tiles or strips), decoded straight into place.

A segment that a region cuts is kept for a while, since its other part will be asked for soon.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from thinsection.errors import SlideOpenError, SlideReadError
from thinsection.files.sources import ByteSource, FileSource
from thinsection.slide.base import WHITE, Slide
from thinsection.slide.tiff_layout import TiffLayout, TiffLevel, read_layout
from thinsection.types import MIB, Mpp, RgbArray, TileArray

CACHE_BYTES = 48 * MIB  # of decoded segments that a region cut, per slide
# a strip or tile must fit a budget that the user never sees; larger ones are refused on opening
MAX_SEGMENT_BYTES = 128 * MIB
# segments that stand side by side in the file are read by one request: threads that decode meet
# at every call of the system, because each gives the interpreter's lock away and waits for it
MAX_READ_BYTES = MIB
_MAX_GAP_BYTES = 512  # that writers leave between segments
_JPEG, _RGB = 7, 2
# Adobe's APP14 with transform 0: "these are R, G, B"; without it a decoder takes them for YCbCr
_APP14_RGB = bytes.fromhex("ffee000e41646f626500640000000000")


class SegmentCache:
    """Least recently used decoded segments within a number of bytes. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes, self._used_bytes = budget_bytes, 0
        self._items: OrderedDict[tuple[int, int, int], RgbArray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int, int]) -> RgbArray | None:
        """The segment, or None."""
        with self._lock:
            if (found := self._items.get(key)) is not None:
                self._items.move_to_end(key)
            return found

    def put(self, key: tuple[int, int, int], pixels: RgbArray) -> None:
        """Keeps a segment and drops the oldest ones beyond the budget."""
        with self._lock:
            if key in self._items or pixels.nbytes > self._budget_bytes:
                return
            self._items[key] = pixels
            self._used_bytes += pixels.nbytes
            while self._used_bytes > self._budget_bytes:
                self._used_bytes -= self._items.popitem(last=False)[1].nbytes


class SegmentDecoder:
    """Decodes the segments of one level into arrays of (segment height, segment width, 3).

    What a segment holds beyond the image's border is whatever the file has there.
    """

    def __init__(self, level: TiffLevel, source: ByteSource) -> None:
        page = level.page
        self.segment, self.columns = level.segment, level.grid[0]  # px; segments in a row
        self._size, self._source, self._page = level.level.size, source, page
        self._offsets, self._counts = tuple(page.dataoffsets), tuple(page.databytecounts)
        self._jpeg = int(page.compression) == _JPEG and page.samplesperpixel == 3
        app14 = _APP14_RGB if int(page.photometric) == _RGB else b""
        tables = (page.jpegtables or b"")[2:-2]  # without its own SOI and EOI
        self._head = b"\xff\xd8" + app14 + tables

    def decode(self, column: int, row: int, out: RgbArray) -> None:
        """Fills `out`, (segment height, segment width, 3), perhaps strided; see `decode_all`."""
        self.decode_all([row * self.columns + column], [out])

    def decode_all(self, indices: Sequence[int], outs: Iterable[RgbArray]) -> None:
        """Fills each of `outs` with the segment of that number: row * columns + column.

        Memory: `MAX_READ_BYTES` of compressed segments, or one that is larger.

        Raises:
            SlideReadError: a segment is missing, truncated or damaged.
        """
        targets = iter(outs)
        for together in self._reads(indices):
            start = self._offsets[together[0]]
            length = self._offsets[together[-1]] + self._counts[together[-1]] - start
            data = memoryview(self._source.read_at(start, length) if length else b"")
            for index in together:
                begin = self._offsets[index] - start
                self._decode_one(index, data[begin : begin + self._counts[index]], next(targets))

    def _reads(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Segments, in order, in the groups that one request fetches."""
        together: list[int] = []
        first = end = 0
        for index in indices:
            if index >= len(self._offsets):
                raise self._error(index, "no such segment")
            begin, count = self._offsets[index], self._counts[index]
            adjacent = 0 <= begin - end <= _MAX_GAP_BYTES
            if together and not (adjacent and begin + count - first <= MAX_READ_BYTES):
                yield together
                together = []
            if not together:
                first = begin
            together.append(index)
            end = begin + count
        if together:
            yield together

    def _decode_one(self, index: int, data: memoryview, out: RgbArray) -> None:
        if not data:  # sparse: nothing was scanned here
            out[:] = WHITE
            return
        try:
            if self._jpeg:
                self._decode_jpeg(data, out)
            else:
                self._decode_other(bytes(data), index, out)
        except (ValueError, RuntimeError, TypeError) as error:
            raise self._error(index, str(error)) from None

    def _decode_jpeg(self, data: memoryview, out: RgbArray) -> None:
        joined = b"".join((self._head, data[2:]))
        if out.flags.c_contiguous:
            decoded = simplejpeg.decode_jpeg(joined, "RGB", buffer=out)
        else:
            decoded = simplejpeg.decode_jpeg(joined, "RGB")
            out[: len(decoded)] = decoded
        if decoded.shape[1] != out.shape[1]:
            raise ValueError(f"a JPEG of {decoded.shape[1]} columns, expected {out.shape[1]}")
        out[len(decoded) :] = WHITE  # the last strip has fewer rows

    def _decode_other(self, data: bytes, index: int, out: RgbArray) -> None:
        decoded, _, _ = self._page.decode(data, index, jpegtables=self._page.jpegtables)
        if decoded is None:
            out[:] = WHITE
            return
        pixels = decoded[0]  # (height, width, samples), one of them or RGB(A)
        rows, columns = min(len(pixels), len(out)), min(pixels.shape[1], out.shape[1])
        if rows < len(out) or columns < out.shape[1]:  # the last strip has fewer rows
            out[:] = WHITE
        out[:rows, :columns] = pixels[:rows, :columns, :3]

    def _error(self, index: int, why: str) -> SlideReadError:
        row, column = divmod(index, self.columns)
        name = Path(self._source.name).name
        return SlideReadError(
            f"segment must be decodable, got {why} at column {column}, row {row} of a level of "
            f"{self._size} px in {name!r}; the file is damaged or truncated"
        )


class TiffSlide(Slide):
    """A tiled or striped TIFF, read segment by segment. Thread-safe.

    Its bytes come from `source` and its metadata from `handle`, by default from the local file.

    Memory: `CACHE_BYTES` of decoded segments; per reading thread one decoded segment and
    `MAX_READ_BYTES` of compressed ones, or one that is larger.
    """

    reader = "tiff"

    def __init__(
        self,
        path: str,
        *,
        slide_mpp: Mpp | None = None,
        source: ByteSource | None = None,
        handle: Any = None,
    ) -> None:
        layout = open_layout(path, handle)
        largest = max(s.segment[0] * s.segment[1] * 3 for s in layout.levels)
        if largest > MAX_SEGMENT_BYTES:
            raise SlideOpenError(
                f"tiff: its largest strip or tile is {largest >> 20} MiB, more than "
                f"{MAX_SEGMENT_BYTES >> 20}; convert it to a tiled TIFF"
            )
        self._source = source or FileSource(path)
        self._cache = SegmentCache(CACHE_BYTES)
        levels = [item.level for item in layout.levels]
        super().__init__(path, levels, slide_mpp=slide_mpp or layout.slide_mpp, **layout.facts)
        self._decoders = [SegmentDecoder(item, self._source) for item in layout.levels]
        self._associated = layout.associated
        self.associated_names = tuple(sorted(layout.associated))

    def associated_image(self, name: str) -> RgbArray:
        """See `Slide.associated_image`."""
        item = self._associated.get(name)
        if item is None:
            return super().associated_image(name)
        decoder = SegmentDecoder(item, self._source)
        (columns, rows), (width, height) = item.grid, item.segment
        padded = np.empty((rows * height, columns * width, 3), dtype=np.uint8)
        for row, column in np.ndindex(rows, columns):
            top, left = row * height, column * width
            decoder.decode(column, row, padded[top : top + height, left : left + width])
        size = item.level.size
        return np.ascontiguousarray(padded[: size[1], : size[0]])

    def _fill_all(self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray) -> None:
        decoder = self._decoders[level]
        width, height = decoder.segment
        aligned = out.shape[1:3] == (height, width)
        if aligned and not any(x % width or y % height for x, y in origins_lv):
            places = [y // height * decoder.columns + x // width for x, y in origins_lv]
            decoder.decode_all(places, out)
            return
        super()._fill_all(origins_lv, level, out)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        decoder = self._decoders[level]
        seg_width, seg_height = decoder.segment
        x, y = origin_lv
        height, width = out.shape[:2]
        for row in range(y // seg_height, -(-(y + height) // seg_height)):
            top = row * seg_height
            y0, y1 = max(y, top), min(y + height, top + seg_height)
            for column in range(x // seg_width, -(-(x + width) // seg_width)):
                left = column * seg_width
                x0, x1 = max(x, left), min(x + width, left + seg_width)
                target = out[y0 - y : y1 - y, x0 - x : x1 - x]
                if (x1 - x0, y1 - y0) == decoder.segment:
                    decoder.decode(column, row, target)
                    continue
                pixels = self._segment(level, column, row)
                target[:] = pixels[y0 - top : y1 - top, x0 - left : x1 - left]

    def _segment(self, level: int, column: int, row: int) -> RgbArray:
        """A decoded segment that a region cuts."""
        key = (level, column, row)
        pixels = self._cache.get(key)
        if pixels is None:
            decoder = self._decoders[level]
            pixels = np.empty((*decoder.segment[::-1], 3), dtype=np.uint8)
            decoder.decode(column, row, pixels)
            self._cache.put(key, pixels)
        return pixels

    def close(self) -> None:
        """Closes the file; reads that other threads have begun end well."""
        super().close()
        self._source.close()


def open_layout(path: str, handle: Any = None) -> TiffLayout:
    """The layout of a local file, or of an opened binary file object (which stays open)."""
    name = Path(path).name
    if handle is not None:
        return read_layout(handle, name)
    try:
        with Path(path).open("rb") as opened:
            return read_layout(opened, name)
    except SlideOpenError:  # is an OSError; its text already says all
        raise
    except OSError as error:
        raise SlideOpenError(f"tiff: {error}") from None
