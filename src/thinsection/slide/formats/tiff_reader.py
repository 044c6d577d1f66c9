"""The direct TIFF reader: the file's own tiles or strips, decoded straight into place.

A function for each compression decodes the usual segment, whole and of three samples; tifffile
decodes the others.
"""

import struct
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from itertools import product
from typing import Any

import imagecodecs
import numpy as np
import simplejpeg
from PIL import Image

from thinsection.files.sources import ByteSource, FileSource
from thinsection.slide.base import GRAY, WHITE
from thinsection.slide.formats import tiff_layout as tiff
from thinsection.slide.formats.alpha import on_white
from thinsection.slide.formats.segments import Decoder, SegmentedSlide
from thinsection.slide.formats.tiff_layout import TiffLayout, read_layout
from thinsection.slide.orientation import turn_pixels
from thinsection.types import MIB, Level, Mpp, RgbArray, Size

# segments that stand side by side in the file are read by one request: threads that decode meet
# at every call of the system, because each gives the interpreter's lock away and waits for it
MAX_READ_BYTES = MIB
_MAX_GAP_BYTES = 512  # that writers leave between segments
_BY_DCT = (2, 4, 8)  # for which libjpeg-turbo is quicker than for a whole segment
_Target = tuple[int, RgbArray]  # a segment, and where it goes
# Decodes bytes into `out`, C-contiguous (height, width, 3), and gives the px: all of `out`, or of a
# JPEG its first rows. What is no such segment raises one of `_REFUSALS`.
_Fill = Callable[[Any, RgbArray], np.ndarray]
_REFUSALS = (ValueError, RuntimeError, TypeError)
# Adobe's APP14 with transform 0: "these are R, G, B"; without it a decoder takes them for YCbCr
_APP14_RGB = bytes.fromhex("ffee000e41646f626500640000000000")
# Rows of factors of Y, Cb, Cr and 1: for every Y, Cb and Cr they give what OpenSlide's tables give,
# which round halves away from zero (there is one: 1.772 * 125).
_BLUE = 1.772 + 1e-6
_RGB_OF_YCBCR = (
    *(1, 0, 1.402, -1.402 * 128),
    *(1, -0.34414, -0.71414, (0.34414 + 0.71414) * 128),
    *(1, _BLUE, 0, -_BLUE * 128),
)
_J2K = b"\xff\x4f\xff\x51"  # a JPEG 2000 codestream: SOC, SIZ
_J2K_CHROMA_STEP = 46  # where its SIZ says how many px wide one px of Cb is
_LZW_HEAD = struct.Struct("<2sHIH" + "HHII" * 10 + "I3H")  # of a TIFF of one strip


class SegmentDecoder(Decoder):
    """Decodes segments of one level, whole: also what the file has beyond the image's border.

    With a factor they are decoded at that fraction: a JPEG's by its DCT, others' reduced once
    decoded, which takes the memory of a whole segment.
    """

    def __init__(
        self, level: Level, page: Any, source: ByteSource, factor: int = 1
    ) -> None:
        super().__init__(level, source.name)
        self._source, self._page, self._factor, whole = (
            source,
            page,
            factor,
            self.segment,
        )
        self._offsets, self._counts = (
            tuple(page.dataoffsets),
            tuple(page.databytecounts),
        )
        self.sparse, code = 0 in self._counts, int(page.compression)
        self._fill_segment = _fill_of(page, whole)
        self._alpha = tiff.alpha_of(page)
        plain = factor == 1 and code in tiff.RAW and page.predictor == 1
        self._raw = plain and self._fill_segment is not None
        self._only_here = code in (
            *tiff.JPEG,
            *tiff.APERIO_YCBCR,
        )  # tifffile would give other px
        if factor > 1:
            width, height = self.size
            self.size = (width // factor, height // factor)
            self.segment = (whole[0] // factor, whole[1] // factor)
        self._reduced_from = whole if factor > 1 and code not in tiff.JPEG else None

    def is_empty(self, index: int) -> bool:
        """Whether the file holds no bytes of a segment: nothing was scanned there, it is white."""
        return self.sparse and index < len(self._counts) and not self._counts[index]

    def jpeg(self, index: int) -> bytes | None:
        """As of the base class; colours that stand apart are none."""
        page, count = self._page, (*self._counts[index : index + 1], 0)[0]
        is_jpeg = (
            int(page.compression) in tiff.JPEG and page.planarconfig != tiff.SEPARATE
        )
        if not (count and is_jpeg and self._fill_segment):
            return None
        data = memoryview(self._source.read_at(self._offsets[index], count))
        return b"".join((_jpeg_head(page), data[2:]))

    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """See `Decoder.decode`. Memory: `MAX_READ_BYTES` of stored segments, or a larger one."""
        stored = []
        for index, out in zip(indices, outs):
            if self.is_empty(index):
                out[:] = WHITE
            else:
                stored.append((index, out))
        for together in self._requests(stored):
            first, last = together[0][0], together[-1][0]
            start = self._offsets[first]
            length = self._offsets[last] + self._counts[last] - start
            if self._are_as_stored(together, length):
                self._source.read_into(start, [out for _, out in together])
                continue
            data = memoryview(self._source.read_at(start, length))
            for index, out in together:
                begin = self._offsets[index] - start
                self._decode_one(index, data[begin : begin + self._counts[index]], out)

    def _are_as_stored(self, together: list[_Target], length: int) -> bool:
        """Whether the file's bytes of these segments, without a gap, are those of the arrays."""
        if not self._raw or length != sum(out.nbytes for _, out in together):
            return False
        return all(
            o.flags.c_contiguous and self._counts[i] == o.nbytes for i, o in together
        )

    def _requests(self, stored: Iterable[_Target]) -> list[list[_Target]]:
        """Segments, in order, in the groups that one request fetches."""
        groups: list[list[_Target]] = []
        first = end = 0
        for index, out in stored:
            if index >= len(self._offsets):
                raise self._error(index, "no such segment")
            begin, count = self._offsets[index], self._counts[index]
            adjacent = 0 <= begin - end <= _MAX_GAP_BYTES
            if not (groups and adjacent and begin + count - first <= MAX_READ_BYTES):
                groups.append([])
                first = begin
            groups[-1].append((index, out))
            end = begin + count
        return groups

    def _decode_one(self, index: int, data: memoryview, out: RgbArray) -> None:
        into = out
        if self._reduced_from:
            into = np.empty((*self._reduced_from[::-1], 3), dtype=np.uint8)
        try:
            pixels = self._pixels(index, data, into)
        except _REFUSALS as error:
            raise self._error(index, str(error)) from None
        if pixels is not into:
            rows, columns = (
                min(len(pixels), len(into)),
                min(pixels.shape[1], into.shape[1]),
            )
            if not np.may_share_memory(pixels, into):
                into[:rows, :columns] = self._colours(pixels[:rows, :columns])
            into[rows:] = WHITE  # this is the last strip
            into[:rows, columns:] = WHITE
        if into is not out:
            out[:] = np.asarray(Image.fromarray(into).reduce(self._factor))

    def _colours(self, pixels: np.ndarray) -> np.ndarray:
        """Decoded px without their fourth sample; on white where it is alpha."""
        if self._alpha is None:
            return pixels[..., :3]
        return on_white(pixels, premultiplied=self._alpha == "premultiplied")

    def _pixels(self, index: int, data: memoryview, out: RgbArray) -> np.ndarray:
        """(height, width, samples), one of them or RGB(A); in `out` where it can be."""
        if self._fill_segment is not None:
            contiguous = (
                out if out.flags.c_contiguous else np.empty(out.shape, dtype=np.uint8)
            )
            try:
                return self._fill_segment(data, contiguous)
            except _REFUSALS:
                if self._only_here:
                    raise
        found = self._page.decode(bytes(data), index, jpegtables=self._page.jpegtables)
        return np.asarray(found[0][0])


class _PlanarDecoder(SegmentDecoder):
    """Red, green and blue stand in segments of their own. Memory: one segment beside the base's."""

    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """See `Decoder.decode`."""
        for index, out in zip(indices, outs):
            plane = np.empty(out.shape, dtype=np.uint8)
            for colour in range(3):
                super().decode([index + colour * len(self._offsets) // 3], [plane])
                out[..., colour] = plane[..., 0]


def _decoder(level: Level, page: Any, source: ByteSource) -> SegmentDecoder:
    kind = _PlanarDecoder if page.planarconfig == tiff.SEPARATE else SegmentDecoder
    return kind(level, page, source)


class TiffSlide(SegmentedSlide):
    """A tiled or striped TIFF, read segment by segment. Thread-safe.

    Its bytes come from `source` and its metadata from `handle`, by default from the local file; a
    `layout` stands for what these say. Memory: `CACHE_BYTES` of decoded segments; per reading
    thread one decoded segment and `MAX_READ_BYTES` of compressed ones, or one that is larger.
    """

    reader = "tiff"
    _has_coarse = False  # whether levels that are no `reduced` ones were asked for

    def __init__(
        self,
        path: str,
        *,
        slide_mpp: Mpp | None = None,
        source: ByteSource | None = None,
        handle: Any = None,
        layout: TiffLayout | None = None,
    ) -> None:
        layout = self._layout = layout or read_layout(path, slide_mpp, handle)
        self._source = source or FileSource(path)
        decoders = [
            _decoder(*pair, self._source) for pair in zip(layout.levels, layout.pages)
        ]
        super().__init__(path, layout.levels, decoders, **layout.facts)
        if any(page.samplesperpixel == 1 for page in layout.pages):
            self.notes = (GRAY,)
        self.checked, self.associated_names = (
            layout.checked,
            tuple(sorted(layout.associated)),
        )

    def icc_profile(self) -> bytes | None:
        """As of the base class."""
        return self._layout.icc_profile

    def _associated(self, name: str) -> RgbArray:
        level, page = self._layout.associated[name]
        decoder = _decoder(level, page, self._source)
        image = np.empty((*decoder.size[::-1], 3), dtype=np.uint8)
        self._gather(decoder, [(0, 0)], image[None])
        turned = turn_pixels(image, tiff.orientation_of(page))
        return np.ascontiguousarray(turned)

    def coarse(self, level: int, factor: int) -> Level | None:
        """See `Slide.coarse`: where segments can be divided by the factor."""
        self._has_coarse = not self.rendering
        return self._fractions.get((level, factor)) if self._has_coarse else None

    @property
    def reduced(self) -> tuple[Level, ...]:
        """JPEG segments at the fractions of their DCT."""
        return tuple(
            made for (level, _), made in self._fractions.items() if self._is_jpeg(level)
        )

    @property
    def _further(self) -> tuple[Level, ...]:
        return tuple(self._fractions.values()) if self._has_coarse else self.reduced

    def _is_jpeg(self, level: int) -> bool:
        return int(self._layout.pages[level].compression) in tiff.JPEG

    @cached_property
    def _fractions(self) -> dict[tuple[int, int], Level]:
        """Levels at a fraction by level and factor, JPEGs first; made when one is asked for."""
        pages, decoders, found = (
            self._layout.pages,
            self._decoders[: len(self.levels)],
            {},
        )
        each = product(
            range(len(pages))[::-1], _BY_DCT
        )  # the least to read comes first
        for index, factor in sorted(each, key=lambda pair: not self._is_jpeg(pair[0])):
            level, planar = (
                self.levels[index],
                isinstance(decoders[index], _PlanarDecoder),
            )
            rest = any(px % factor for px in decoders[index].segment)
            if not (rest or planar or min(level.size) < factor):
                made = SegmentDecoder(level, pages[index], self._source, factor)
                down = level.downsample * factor
                found[index, factor] = Level(
                    index=len(decoders),
                    size=made.size,
                    downsample=down,
                    segment=made.segment,
                )
                decoders.append(made)
        self._decoders = decoders
        return found

    def close(self) -> None:
        """Closes the file; reads that other threads have begun end well."""
        super().close()
        self._source.close()


def _fill_of(page: Any, segment: Size) -> _Fill | None:
    """The function that decodes a page's segments of (width, height); None: tifffile does."""
    code, predictor, samples = (
        int(page.compression),
        page.predictor,
        page.samplesperpixel,
    )
    if samples in (1, 3) and code in tiff.JPEG:
        return partial(
            _jpeg, _jpeg_head(page), "GRAY" if samples == 1 else "RGB", segment[0]
        )
    usual = (
        page.planarconfig != tiff.SEPARATE
        and page.fillorder == 1
        and predictor in (1, 2)
    )
    if samples != 3 or not usual:
        return None
    if code in tiff.LZW:
        return partial(_lzw, segment, predictor)
    if code in tiff.BYTES:
        return partial(_bytes, code, predictor == 2)
    return (
        _aperio_ycbcr
        if code in tiff.APERIO_YCBCR
        else partial(_unpacked, tiff.PICTURES[code])
    )


def _jpeg_head(page: Any) -> bytes:
    """What makes a JPEG of its own of a segment of the page, in the place of its first 2 bytes."""
    app14 = _APP14_RGB if int(page.photometric) == tiff.RGB else b""
    return (
        b"\xff\xd8" + app14 + (page.jpegtables or b"")[2:-2]
    )  # without its own SOI and EOI


def _jpeg(
    head: bytes, colours: str, width: int, data: Any, out: RgbArray
) -> np.ndarray:
    # a smaller `out` takes the coarser px of a smaller DCT: a half, a quarter or an eighth
    least = out.shape[1] if out.shape[1] < width else 0
    # a JPEG that is larger than this memory is refused before it is decoded
    into = out if colours == "RGB" else np.empty((*out.shape[:2], 1), dtype=np.uint8)
    whole = b"".join((head, data[2:]))
    pixels = simplejpeg.decode_jpeg(whole, colours, min_width=least, buffer=into)
    if pixels.shape[1] != out.shape[1] or len(pixels) > len(out):
        size, expected = pixels.shape[1::-1], out.shape[1::-1]
        raise ValueError(f"a JPEG of {size} px, expected {expected}")
    return out if into is out and len(pixels) == len(out) else np.asarray(pixels)


def _bytes(code: int, differences: bool, data: Any, out: RgbArray) -> np.ndarray:
    """Of a compression of bytes, perhaps of each px's difference from the one to its left."""
    flat = out.reshape(-1)
    decode = "deflate" if code in tiff.DEFLATE else "zstd"
    found = (
        np.frombuffer(data, np.uint8)
        if code in tiff.RAW
        else _unpacked(decode, data, flat)
    )
    if len(found) != len(flat):
        raise ValueError(f"{len(found)} bytes, expected {len(flat)}")
    if code in tiff.RAW:
        flat[:] = found
    if differences:
        imagecodecs.delta_decode(out, axis=-2, out=out)
    return out


def _lzw(segment: Size, predictor: int, data: Any, out: RgbArray) -> np.ndarray:
    """By libtiff, as a TIFF of one strip in memory: about 1.5 times as fast as imagecodecs' own."""
    (width, height), number, bits_at = (
        segment,
        (4, 1),
        _LZW_HEAD.size - 6,
    )  # of the three samples
    size = (256, *number, width, 257, *number, height, 258, 3, 3, bits_at)
    kind = (
        259,
        *number,
        *tiff.LZW,
        262,
        *number,
        tiff.RGB,
        273,
        *number,
        _LZW_HEAD.size,
    )
    strip = (277, *number, 3, 278, *number, height, 279, *number, len(data))
    tags = (*size, *kind, *strip, 317, *number, predictor)
    stored = _LZW_HEAD.pack(b"II", 42, 8, 10, *tags, 0, 8, 8, 8) + data
    return np.asarray(imagecodecs.tiff_decode(stored, out=out))


def _unpacked(codec: str, data: Any, out: RgbArray) -> np.ndarray:
    """By imagecodecs, in this thread alone."""
    alone = {"numthreads": 1} if codec in ("jpeg2k", "jpegxl") else {}
    return np.asarray(getattr(imagecodecs, f"{codec}_decode")(data, out=out, **alone))


def _aperio_ycbcr(data: Any, out: RgbArray) -> np.ndarray:
    """Y, Cb and Cr of one size become RGB as OpenSlide rounds them, others as OpenJPEG does."""
    _unpacked("jpeg2k", data, out)
    if data[:4] == _J2K and data[_J2K_CHROMA_STEP] == 1:
        out[:] = np.asarray(Image.fromarray(out).convert("RGB", _RGB_OF_YCBCR))
    return out
