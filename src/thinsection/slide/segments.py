"""The segments (tiles or strips) of a TIFF: read, decoded, and kept where a region cut them."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import simplejpeg

from thinsection.errors import SlideReadError
from thinsection.files.sources import ByteSource
from thinsection.slide.base import WHITE
from thinsection.slide.tiff_layout import TiffLevel
from thinsection.types import RgbArray

_JPEG, _RGB = 7, 2
# Adobe's APP14 with transform 0: "these are R, G, B"; without it a decoder takes them for YCbCr
_APP14_RGB = bytes.fromhex("ffee000e41646f626500640000000000")
# segments that stand side by side in the file are read by one request: threads that decode meet
# at every call of the system, because each gives the interpreter's lock away and waits for it
MAX_READ_BYTES = 1 << 20
_MAX_GAP_BYTES = 512  # that writers leave between segments


class SegmentCache:
    """Least recently used decoded segments within a number of bytes. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes, self._used_bytes = budget_bytes, 0
        self._items: OrderedDict[tuple[int, int, int], RgbArray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int, int]) -> RgbArray | None:
        """The segment, or None."""
        with self._lock:
            found = self._items.get(key)
            if found is not None:
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
                _, dropped = self._items.popitem(last=False)
                self._used_bytes -= dropped.nbytes


class SegmentDecoder:
    """Decodes the segments of one level into arrays of (segment height, segment width, 3).

    What a segment holds beyond the image's border is whatever the file has there.

    Attributes:
        segment: (width, height) of one, px.
        columns: number of segments in a row.
    """

    def __init__(self, level: TiffLevel, source: ByteSource) -> None:
        self.segment = level.segment
        self._size = level.level.size
        self.columns = level.grid[0]
        self._source = source
        self._page = level.page
        self._offsets, self._counts = level.offsets, level.counts
        self._jpeg = int(level.page.compression) == _JPEG and level.page.samplesperpixel == 3
        tables = level.page.jpegtables or b""
        self._head = b"\xff\xd8"
        if int(level.page.photometric) == _RGB:
            self._head += _APP14_RGB
        self._head += tables[2:-2]  # without its own SOI and EOI

    def decode(self, column: int, row: int, out: RgbArray) -> None:
        """Fills `out`, (segment height, segment width, 3), perhaps strided.

        Raises:
            SlideReadError: the segment is missing, truncated or damaged.
        """
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
            if together and not (
                0 <= begin - end <= _MAX_GAP_BYTES and begin + count - first <= MAX_READ_BYTES
            ):
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
        pixels = decoded[0]  # (height, width, samples); the last strip has fewer rows
        if pixels.shape[2] == 1:
            pixels = np.broadcast_to(pixels, (*pixels.shape[:2], 3))
        rows, columns = min(len(pixels), len(out)), min(pixels.shape[1], out.shape[1])
        if rows < len(out) or columns < out.shape[1]:
            out[:] = WHITE
        out[:rows, :columns] = pixels[:rows, :columns, :3]

    def _error(self, index: int, why: str) -> SlideReadError:
        row, column = divmod(index, self.columns)
        name = Path(self._source.name).name
        return SlideReadError(
            f"segment must be decodable, got {why} at column {column}, row {row} of a level of "
            f"{self._size} px in {name!r}; the file is damaged or truncated"
        )
