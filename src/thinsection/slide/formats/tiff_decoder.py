"""Segments of a TIFF's level: which bytes are read by one request, and how they become pixels."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from PIL import Image
from tifffile import TiffPage

from thinsection.files.sources import ByteSource
from thinsection.slide.base import WHITE
from thinsection.slide.formats import tiff_pages
from thinsection.slide.formats.alpha import on_white
from thinsection.slide.formats.segments import Decoder
from thinsection.slide.formats.tiff_codecs import (
    REFUSALS,
    JpegStreams,
    Pixels,
    codec_of,
)
from thinsection.types import MIB, Level, RgbArray, Size

# segments that stand side by side in the file are read by one request: threads that decode meet
# at every call of the system, because each gives the interpreter's lock away and waits for it
MAX_READ_BYTES = MIB
_MAX_GAP_BYTES = 512  # that writers leave between segments
_Target = tuple[int, RgbArray]  # index of a segment, and the array that it fills


class SegmentDecoder(Decoder):
    """Decodes segments of one level, whole: also what the file has beyond the image's border.

    With a factor they are decoded at that fraction: a JPEG's by its DCT, others' reduced once
    decoded, which takes the memory of a whole segment.
    """

    def __init__(
        self, level: Level, page: TiffPage, source: ByteSource, factor: int = 1
    ) -> None:
        super().__init__(level, source.name)
        # a level without its padding has fewer columns than its page
        self.columns = -(-int(page.imagewidth) // self.segment[0])
        self.rows = -(-int(page.imagelength) // self.segment[1])
        compression = int(page.compression)
        self._source = source
        self._page = page
        self._factor = factor
        self._offsets = tuple(page.dataoffsets)
        self._counts = tuple(page.databytecounts)
        self.sparse = 0 in self._counts
        self._codec = codec_of(page, self.segment)
        # segments that are no JPEG of their own: of another compression, or of one colour each
        self._jpegs: JpegStreams | None = None
        if compression in tiff_pages.JPEG and page.planarconfig != tiff_pages.SEPARATE:
            self._jpegs = JpegStreams(page)
        self._alpha = tiff_pages.alpha_of(page)
        # of JPEGs tifffile would give other px
        self._codec_only = compression in (*tiff_pages.JPEG, *tiff_pages.APERIO_YCBCR)
        # whether the file's bytes are those of the array
        self._is_raw = (
            factor == 1
            and compression in tiff_pages.RAW
            and page.predictor == 1
            and self._codec is not None
        )
        # shape to decode a segment in before it is reduced; None where it is decoded reduced
        self._whole_shape: tuple[int, int, int] | None = None
        if factor > 1:
            if compression not in tiff_pages.JPEG:
                self._whole_shape = self.shape
            width, height = self.size
            self.size = (width // factor, height // factor)
            self.segment = (self.segment[0] // factor, self.segment[1] // factor)

    def is_empty(self, index: int) -> bool:
        """Tells whether the file holds no bytes of a segment: nothing was scanned there."""
        return self.sparse and index < len(self._counts) and not self._counts[index]

    def jpeg(self, index: int) -> bytes | None:
        """See `Decoder.jpeg`; colours that stand apart are no JPEG of their own."""
        if self._jpegs is None or self._codec is None or index >= len(self._counts):
            return None
        num_bytes = self._counts[index]
        if not num_bytes:
            return None
        data = memoryview(self._source.read_at(self._offsets[index], num_bytes))
        jpeg, size = self._jpegs.whole(data)
        return jpeg if size == self.segment else None

    def decode(
        self, indices: Sequence[int], outs: Iterable[RgbArray]
    ) -> Iterator[None]:
        """See `Decoder.decode`. Memory: `MAX_READ_BYTES` of stored segments, or a larger one."""
        arrays = iter(outs)
        for group in self._requests(indices):
            start = self._offsets[group[0]]
            length = self._offsets[group[-1]] + self._counts[group[-1]] - start
            targets: Iterable[_Target] = zip(group, arrays)
            if self._is_raw:
                targets = list(targets)
                if self._fill_arrays_as_stored(targets, length):
                    self._source.read_into(start, [out for _, out in targets])
                    for _ in targets:
                        yield
                    continue
            data = memoryview(self._source.read_at(start, length))
            for index, out in targets:
                begin = self._offsets[index] - start
                self._decode_one(index, data[begin : begin + self._counts[index]], out)
                yield

    def _fill_arrays_as_stored(self, group: Sequence[_Target], length: int) -> bool:
        """Tells whether the file's bytes of segments, without a gap, are those of the arrays."""
        if length != sum(out.nbytes for _, out in group):
            return False
        return all(
            out.flags.c_contiguous and self._counts[index] == out.nbytes
            for index, out in group
        )

    def _requests(self, indices: Iterable[int]) -> list[list[int]]:
        """Returns segments, in order, in the groups that one request fetches."""
        groups: list[list[int]] = []
        first = 0  # byte at which the last group begins
        end = 0  # byte at which it ends
        for index in indices:
            if index >= len(self._offsets):
                raise self._error(index, "no such segment")
            begin = self._offsets[index]
            count = self._counts[index]
            is_adjacent = 0 <= begin - end <= _MAX_GAP_BYTES
            fits = begin + count - first <= MAX_READ_BYTES
            if not (groups and is_adjacent and fits):
                groups.append([])
                first = begin
            groups[-1].append(index)
            end = begin + count
        return groups

    def _decode_one(self, index: int, data: memoryview, out: RgbArray) -> None:
        """Fills `out` with a segment, reduced by the factor."""
        if self._whole_shape is None:
            self._decode_whole(index, data, out)
            return
        whole = np.empty(self._whole_shape, dtype=np.uint8)
        self._decode_whole(index, data, whole)
        out[:] = np.asarray(Image.fromarray(whole).reduce(self._factor))

    def _decode_whole(self, index: int, data: memoryview, out: RgbArray) -> None:
        """Fills `out` with what a segment holds, and with white beside it."""
        try:
            pixels = self._pixels(index, data, out)
        except REFUSALS as error:
            raise self._error(index, str(error)) from None
        if pixels is out:
            return
        rows = min(len(pixels), len(out))
        columns = min(pixels.shape[1], out.shape[1])
        inside = self._size_inside(index, out)
        if columns < inside[0] or rows < inside[1]:
            raise self._error(index, f"{columns} x {rows} of {inside} px")
        if not np.may_share_memory(pixels, out):
            out[:rows, :columns] = self._colours(pixels[:rows, :columns])
        out[rows:] = WHITE  # beyond the border of the picture
        out[:rows, columns:] = WHITE

    def _size_inside(self, index: int, out: RgbArray) -> Size:
        """Returns (width, height) of the part of a segment that lies inside the picture, px.

        `out` is of a whole segment, or of one that is still to be reduced.
        """
        row, column = divmod(index % (self.columns * self.rows), self.columns)
        scale = out.shape[1] // self.segment[0]
        width = min(self.segment[0], self.size[0] - column * self.segment[0])
        height = min(self.segment[1], self.size[1] - row * self.segment[1])
        return (width * scale, height * scale)

    def _colours(self, pixels: Pixels) -> Pixels:
        """Returns decoded px without their fourth sample; on white where it is alpha."""
        if self._alpha is None:
            return pixels[..., :3]
        return on_white(pixels, premultiplied=self._alpha == "premultiplied")

    def _pixels(self, index: int, data: memoryview, out: RgbArray) -> Pixels:
        """Decodes (height, width, samples), one of them or RGB(A); in `out` where it can be."""
        if self._codec is not None:
            target = out
            if not out.flags.c_contiguous:
                target = np.empty(out.shape, dtype=np.uint8)
            try:
                return self._codec(data, target)
            except REFUSALS:
                if self._codec_only:
                    raise
        page = self._page
        decoded = page.decode(bytes(data), index, jpegtables=page.jpegtables)
        return np.asarray(decoded[0][0])


class PlanarDecoder(SegmentDecoder):
    """Decoder of red, green and blue in segments of their own. Memory: one segment more."""

    def decode(
        self, indices: Sequence[int], outs: Iterable[RgbArray]
    ) -> Iterator[None]:
        """See `Decoder.decode`."""
        segments_per_plane = len(self._offsets) // 3
        for index, out in zip(indices, outs):
            plane = np.empty(out.shape, dtype=np.uint8)
            for colour in range(3):
                in_plane = index + colour * segments_per_plane
                if self.is_empty(in_plane):
                    plane[:] = WHITE
                else:
                    deque(super().decode([in_plane], [plane]), maxlen=0)
                out[..., colour] = plane[..., 0]
            yield


def decoder_of(level: Level, page: TiffPage, source: ByteSource) -> SegmentDecoder:
    """Returns the decoder of a page's segments."""
    if page.planarconfig == tiff_pages.SEPARATE:
        return PlanarDecoder(level, page, source)
    return SegmentDecoder(level, page, source)
