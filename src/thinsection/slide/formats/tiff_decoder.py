"""Segments of a TIFF: groups them into read requests, and decodes them into arrays.

Each common compression has its own function. Unusual segments (other numbers of samples,
predictors or bit orders) are decoded by tifffile.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import imagecodecs
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image
from tifffile import FileHandle, TiffPage

from thinsection.files.sources import ByteSource
from thinsection.slide.base import WHITE, on_white
from thinsection.slide.formats.jpeg_streams import (
    Buffer,
    Colours,
    JpegHeader,
    find_contradiction,
    read_jpeg_header,
    with_colours,
)
from thinsection.slide.formats.segments import Decoder
from thinsection.slide.formats.tiff_pages import (
    APERIO_YCBCR,
    BYTES,
    DEFLATE,
    JPEG,
    LZW,
    PICTURE_CODECS,
    RAW,
    RGB,
    SEPARATE,
    SLOW_CODECS,
    YCBCR,
    alpha_of,
)
from thinsection.types import KIB, MIB, Level, RgbArray, Size

Pixels = NDArray[np.uint8]  # (height, width, samples)
# Decodes bytes into `out`, a C-contiguous array (height, width, 3). Returns `out`, or a smaller
# array if a JPEG ends at the border of the picture. Raises one of `REFUSALS` if the bytes are not
# such a segment.
Codec = Callable[[memoryview, RgbArray], Pixels]
REFUSALS = (ValueError, RuntimeError, TypeError)

_RGB_SAMPLES = 3
_NO_PREDICTOR = 1
_HORIZONTAL_PREDICTOR = (
    2  # each pixel is stored as its difference from its left neighbour
)
_USUAL_FILL_ORDER = 1
# largest part of a JPEG that is searched for its colour markers
_MAX_HEADER_BYTES = 4 * KIB
# codecs that would otherwise start their own threads
_ONE_THREAD = ("jpeg2k", "jpegxl")

# Factors of Y, Cb, Cr and 1; a row each for R, G and B. They give the same values as OpenSlide's
# tables for every Y, Cb and Cr; those round halves away from zero (the only half is 1.772 * 125).
_BLUE = 1.772 + 1e-6
_GREEN_OFFSET = (0.34414 + 0.71414) * 128
_RGB_OF_YCBCR = (
    1, 0, 1.402, -1.402 * 128,
    1, -0.34414, -0.71414, _GREEN_OFFSET,
    1, _BLUE, 0, -_BLUE * 128,
)  # fmt: skip
_J2K_START = b"\xff\x4f\xff\x51"  # start of a JPEG 2000 codestream: SOC, SIZ
_J2K_HEAD_BYTES = 512  # a codestream begins within these bytes, also in a JP2
_J2K_SIZE = struct.Struct(">4I")  # fields of SIZ: right, bottom, left, top of the image
_J2K_CHROMA_STEP = 46  # offset in SIZ of the width in px of one Cb sample

# Header of a TIFF with one strip: byte order, version, offset of the directory, number of tags, ten
# tags, no further directory, bits of the three samples.
_TIFF_HEADER = struct.Struct("<2sHIH" + "HHII" * 10 + "I3H")
_SHORT = 3  # codes of tag types
_LONG = 4
# Neighbouring segments are read in one request: each system call makes a decoding thread give up
# Python's global interpreter lock and wait for it again.
MAX_READ_BYTES = MIB
_MAX_GAP_BYTES = 512  # largest gap between neighbouring segments
_Target = tuple[int, RgbArray]  # index of a segment, and the array that it fills


def codec_of(page: TiffPage, segment: Size) -> Codec | None:
    """Returns the decoder for segments of (width, height); None if tifffile decodes them."""
    compression = int(page.compression)
    samples = page.samplesperpixel
    if compression in JPEG and samples in (1, _RGB_SAMPLES):
        shown = "GRAY" if samples == 1 else "RGB"
        return partial(_decode_jpeg, JpegStreams(page), shown, segment)
    is_usual = (
        samples == _RGB_SAMPLES
        and page.planarconfig != SEPARATE
        and page.fillorder == _USUAL_FILL_ORDER
        and page.predictor in (_NO_PREDICTOR, _HORIZONTAL_PREDICTOR)
    )
    if not is_usual:
        return None
    if compression in LZW:
        return partial(_decode_lzw, segment, page.predictor)
    if compression in BYTES:
        has_differences = page.predictor == _HORIZONTAL_PREDICTOR
        return partial(_decode_bytes, compression, has_differences)
    if compression in APERIO_YCBCR:
        return _decode_aperio_ycbcr
    return partial(_unpack, PICTURE_CODECS[compression])


class _Start(NamedTuple):
    """How a segment begins, up to the marker of its first scan; most of a page begin alike."""

    stored: bytes
    complete: bytes  # what a complete JPEG has in its place
    size: Size


class JpegStreams:
    """JPEG segments of a page, with the colour space that the page states."""

    def __init__(self, page: TiffPage) -> None:
        is_ycbcr = int(page.photometric) == YCBCR
        self.colours: Colours = "YCbCr" if is_ycbcr else "RGB"
        self.tables: JpegHeader | None = None
        if page.jpegtables:
            self.tables = read_jpeg_header(page.jpegtables)
        self._last: _Start | None = None

    def whole(self, data: Buffer) -> tuple[bytes, Size]:
        """Returns a segment as a complete JPEG, and its (width, height).

        Raises:
            ValueError: the segment is not a JPEG.
        """
        last = self._last
        if last is not None and data[: len(last.stored)] == last.stored:
            return b"".join((last.complete, data[len(last.stored) :])), last.size
        header = read_jpeg_header(data)
        jpeg = with_colours(header, self.colours, self.tables)
        if header.scan:
            num_bytes = header.scan + 2
            start = jpeg[: len(jpeg) - (len(data) - num_bytes)]
            self._last = _Start(bytes(data[:num_bytes]), start, header.size)
        return jpeg, header.size


def colour_note(page: TiffPage, file: FileHandle) -> str:
    """Returns a note if the first stored JPEG of a page states another colour space than the page.

    Returns '' if both agree, or if the JPEG cannot be parsed.
    """
    if int(page.compression) not in JPEG:
        return ""
    stored = [place for place, count in enumerate(page.databytecounts) if count]
    if not stored:
        return ""
    first = stored[0]
    num_bytes = page.databytecounts[first]
    file.seek(page.dataoffsets[first])
    streams = JpegStreams(page)
    try:
        header = read_jpeg_header(file.read(min(num_bytes, _MAX_HEADER_BYTES)))
    except ValueError:  # reading the region raises the error
        return ""
    return find_contradiction(header, streams.colours, streams.tables)


def _decode_jpeg(
    streams: JpegStreams, shown: str, segment: Size, data: memoryview, out: RgbArray
) -> Pixels:
    jpeg, (width, height) = streams.whole(data)
    if width > segment[0] or height > segment[1]:
        raise ValueError(f"a JPEG of {(width, height)} px, expected {segment}")
    # if `out` is smaller, the JPEG decoder makes a half, a quarter or an eighth of the size itself
    factor = segment[0] // out.shape[1]
    size = (-(-width // factor), -(-height // factor))
    # at the border of the picture, a JPEG may be smaller than the segment
    is_whole = size == (out.shape[1], out.shape[0])
    buffer = out
    if shown != "RGB" or not is_whole:
        samples = 1 if shown == "GRAY" else _RGB_SAMPLES
        buffer = np.empty((size[1], size[0], samples), dtype=np.uint8)
    min_width = size[0] if factor > 1 else 0
    pixels = simplejpeg.decode_jpeg(jpeg, shown, min_width=min_width, buffer=buffer)
    if pixels.shape[:2] != size[::-1]:
        raise ValueError(f"a JPEG of {pixels.shape[1::-1]} px, expected {size}")
    return out if buffer is out else np.asarray(pixels)


def _decode_bytes(
    compression: int, has_differences: bool, data: memoryview, out: RgbArray
) -> Pixels:
    """Decodes a compression of plain bytes, which may be differences along the rows."""
    flat = out.reshape(-1)
    is_raw = compression in RAW
    if is_raw:
        unpacked = np.frombuffer(data, np.uint8)
    else:
        codec = "deflate" if compression in DEFLATE else "zstd"
        unpacked = _unpack(codec, data, flat)
    if len(unpacked) != len(flat):
        raise ValueError(f"{len(unpacked)} bytes, expected {len(flat)}")
    if is_raw:
        flat[:] = unpacked
    if has_differences:
        imagecodecs.delta_decode(out, axis=-2, out=out)
    return out


def _decode_lzw(
    segment: Size, predictor: int, data: memoryview, out: RgbArray
) -> Pixels:
    """Decodes LZW with libtiff, as a TIFF with one strip: 1.5 times as fast as imagecodecs."""
    width, height = segment
    header_bytes = _TIFF_HEADER.size
    tags = (
        (256, _LONG, 1, width),
        (257, _LONG, 1, height),
        (258, _SHORT, _RGB_SAMPLES, header_bytes - 6),  # bits are at its end
        (259, _LONG, 1, LZW[0]),
        (262, _LONG, 1, RGB),
        (273, _LONG, 1, header_bytes),  # offset of the strip
        (277, _LONG, 1, _RGB_SAMPLES),
        (278, _LONG, 1, height),  # rows per strip
        (279, _LONG, 1, len(data)),
        (317, _LONG, 1, predictor),
    )
    header = _TIFF_HEADER.pack(
        b"II", 42, 8, len(tags), *chain.from_iterable(tags), 0, 8, 8, 8
    )
    return np.asarray(imagecodecs.tiff_decode(header + data, out=out))


def _decode_aperio_ycbcr(data: memoryview, out: RgbArray) -> Pixels:
    """Decodes Y, Cb and Cr to RGB with OpenSlide's rounding; subsampled chroma as in OpenJPEG."""
    _unpack("jpeg2k", data, out)
    if data[:4] == _J2K_START and data[_J2K_CHROMA_STEP] == 1:
        out[:] = np.asarray(Image.fromarray(out).convert("RGB", _RGB_OF_YCBCR))
    return out


def check_jpeg2000_size(data: memoryview | bytes | bytearray, out: Pixels) -> None:
    """Checks that a JPEG 2000 image fits into `out` (H, W, ...); its decoder does not check that.

    Raises ValueError: the header states a larger image, for which gigabytes might be allocated.
    """
    head = bytes(data[:_J2K_HEAD_BYTES])
    start = head.find(_J2K_START)
    size = head[start + 8 : start + 24]
    if start < 0 or len(size) < _J2K_SIZE.size:
        return
    right, bottom, left, top = _J2K_SIZE.unpack(size)
    width, height = right - left, bottom - top
    if width > out.shape[1] or height > out.shape[0]:
        raise ValueError(
            f"JPEG 2000 of {width} x {height} px, expected {out.shape[1]} x {out.shape[0]}"
        )


def _unpack(codec: str, data: memoryview, out: Pixels) -> Pixels:
    """Decodes with imagecodecs, without further threads."""
    decode = getattr(imagecodecs, f"{codec}_decode")
    if codec == "jpeg2k":
        check_jpeg2000_size(data, out)
    if codec in _ONE_THREAD:
        return np.asarray(decode(data, out=out, numthreads=1))
    return np.asarray(decode(data, out=out))


class SegmentDecoder(Decoder):
    """Decodes whole segments of one level, with the part beyond the border of the image.

    With a factor, segments are decoded at a fraction of their size. A JPEG decoder does this
    itself; other segments are decoded whole and then reduced, which takes memory for one of them.
    """

    def __init__(
        self, level: Level, page: TiffPage, source: ByteSource, factor: int = 1
    ) -> None:
        stored = (int(page.imagewidth), int(page.imagelength))
        super().__init__(level, source.name, stored=stored)
        compression = int(page.compression)
        self._source = source
        self._page = page
        self._factor = factor
        self._offsets = tuple(page.dataoffsets)
        self._counts = tuple(page.databytecounts)
        self.sparse = 0 in self._counts
        self.slow = compression in SLOW_CODECS
        self._codec = codec_of(page, self.segment)
        # None if segments are not complete JPEGs: another compression, or one plane for each colour
        self._jpegs: JpegStreams | None = None
        if compression in JPEG and page.planarconfig != SEPARATE:
            self._jpegs = JpegStreams(page)
        self._alpha = alpha_of(page)
        # no fallback for JPEGs: tifffile would decode them to other pixel values
        self._codec_only = compression in (*JPEG, *APERIO_YCBCR)
        # True if the stored bytes are exactly those of the decoded array
        self._is_raw = (
            factor == 1
            and compression in RAW
            and page.predictor == 1
            and self._codec is not None
        )
        # shape of the whole segment before it is reduced; None if it is decoded at its final size
        self._whole_shape: tuple[int, int, int] | None = None
        if factor > 1:
            if compression not in JPEG:
                self._whole_shape = self.shape
            width, height = self.size
            self.size = (width // factor, height // factor)
            self.segment = (self.segment[0] // factor, self.segment[1] // factor)

    def is_empty(self, index: int) -> bool:
        """Tells whether the file stores no bytes for a segment: nothing was scanned there."""
        return self.sparse and index < len(self._counts) and not self._counts[index]

    def jpeg(self, index: int) -> bytes | None:
        """See `Decoder.jpeg`; None if each colour is a plane of its own."""
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
                segment = data[begin : begin + self._counts[index]]
                self._decode_segment(index, segment, out)
                yield

    def _fill_arrays_as_stored(self, group: Sequence[_Target], length: int) -> bool:
        """Tells whether segments are stored without gaps, with exactly the arrays' bytes."""
        if length != sum(out.nbytes for _, out in group):
            return False
        return all(
            out.flags.c_contiguous and self._counts[index] == out.nbytes
            for index, out in group
        )

    def _requests(self, indices: Iterable[int]) -> list[list[int]]:
        """Groups segments, in order, by the read request that fetches them."""
        groups: list[list[int]] = []
        first = 0  # first byte of the last group
        end = 0  # byte after the last group
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

    def _decode_segment(self, index: int, data: memoryview, out: RgbArray) -> None:
        """Decodes a segment and reduces it by the factor into `out`."""
        if self._whole_shape is None:
            self._decode_whole(index, data, out)
            return
        whole = np.empty(self._whole_shape, dtype=np.uint8)
        self._decode_whole(index, data, whole)
        out[:] = np.asarray(Image.fromarray(whole).reduce(self._factor))

    def _decode_whole(self, index: int, data: memoryview, out: RgbArray) -> None:
        """Decodes a segment into `out`, and fills the rest of `out` with white."""
        try:
            pixels = self._pixels(index, data, out)
        except REFUSALS as error:
            raise self._error(index, str(error)) from None
        if pixels is out:
            return
        rows = min(len(pixels), len(out))
        columns = min(pixels.shape[1], out.shape[1])
        # part of the segment that lies inside the picture
        row, column = divmod(index % (self.columns * self.rows), self.columns)
        # above 1 if `out` is still to be reduced
        scale = out.shape[1] // self.segment[0]
        inside = (
            scale * min(self.segment[0], self.size[0] - column * self.segment[0]),
            scale * min(self.segment[1], self.size[1] - row * self.segment[1]),
        )
        if columns < inside[0] or rows < inside[1]:
            raise self._error(index, f"{columns} x {rows} of {inside} px")
        if not np.may_share_memory(pixels, out):
            colours = pixels[:rows, :columns]
            if self._alpha is None:
                out[:rows, :columns] = colours[..., :3]  # the fourth sample is dropped
            else:
                is_premultiplied = self._alpha == "premultiplied"
                out[:rows, :columns] = on_white(colours, premultiplied=is_premultiplied)
        out[rows:] = WHITE  # the area beyond the border of the picture
        out[:rows, columns:] = WHITE

    def _pixels(self, index: int, data: memoryview, out: RgbArray) -> Pixels:
        """Decodes to (height, width, 1, 3 or 4 samples); into `out` if possible."""
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
    """Decoder of a page with separate planes for R, G and B. Memory: one more segment."""

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
    """Returns the decoder for a page's segments."""
    if page.planarconfig == SEPARATE:
        return PlanarDecoder(level, page, source)
    return SegmentDecoder(level, page, source)
