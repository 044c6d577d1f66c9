"""The direct TIFF reader: the file's own tiles or strips, decoded straight into place."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from PIL import Image

from thinsection.files.sources import ByteSource, FileSource
from thinsection.slide.base import GRAY, WHITE, Slide
from thinsection.slide.segments import Decoder, SegmentedSlide
from thinsection.slide.tiff_codecs import (
    JPEG,
    NOT_BY_TIFFFILE,
    RAW,
    REFUSALS,
    SEPARATE,
    fill_of,
    jpeg_head,
)
from thinsection.slide.tiff_layout import TiffLayout, read_layout
from thinsection.types import MIB, Level, Mpp, RgbArray

# segments that stand side by side in the file are read by one request: threads that decode meet
# at every call of the system, because each gives the interpreter's lock away and waits for it
MAX_READ_BYTES = MIB
_MAX_GAP_BYTES = 512  # that writers leave between segments
_BY_DCT = (2, 4, 8)  # for which libjpeg-turbo is quicker than for a whole segment
_Target = tuple[int, RgbArray]  # a segment, and where it goes


class SegmentDecoder(Decoder):
    """Decodes segments of one level, whole: also what the file has beyond the image's border."""

    def __init__(self, level: Level, page: Any, source: ByteSource) -> None:
        assert level.segment is not None
        super().__init__(level.size, level.segment, source.name)
        self._source, self._page = source, page
        self._offsets, self._counts = tuple(page.dataoffsets), tuple(page.databytecounts)
        self.sparse, code = 0 in self._counts, int(page.compression)
        self._fill_segment = fill_of(page, self.segment)
        self._raw = code in RAW and self._fill_segment is not None and page.predictor == 1
        self._only_here = code in NOT_BY_TIFFFILE

    def is_empty(self, index: int) -> bool:
        """Whether the file holds no bytes of a segment: nothing was scanned there, it is white."""
        return self.sparse and index < len(self._counts) and not self._counts[index]

    def jpeg(self, index: int) -> bytes | None:
        """As of the base class; colours that stand apart are none."""
        page, count = self._page, (*self._counts[index : index + 1], 0)[0]
        if not count or int(page.compression) not in JPEG or page.planarconfig == SEPARATE:
            return None
        data = memoryview(self._source.read_at(self._offsets[index], count))
        return b"".join((jpeg_head(page), data[2:])) if self._fill_segment else None

    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """Fills `outs`, each (segment height, width, 3), with the segments row * columns + column.

        Memory: `MAX_READ_BYTES` of compressed segments, or one that is larger.
        """
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
        return all(o.flags.c_contiguous and self._counts[i] == o.nbytes for i, o in together)

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
        try:
            pixels = self._pixels(index, data, out)
        except REFUSALS as error:
            raise self._error(index, str(error)) from None
        if pixels is out:
            return
        rows, columns = min(len(pixels), len(out)), min(pixels.shape[1], out.shape[1])
        if not np.may_share_memory(pixels, out):
            out[:rows, :columns] = pixels[:rows, :columns, :3]
        out[rows:] = WHITE  # this is the last strip
        out[:rows, columns:] = WHITE

    def _pixels(self, index: int, data: memoryview, out: RgbArray) -> np.ndarray:
        """(height, width, samples), one of them or RGB(A); in `out` where it can be."""
        if self._fill_segment is not None:
            contiguous = out if out.flags.c_contiguous else np.empty(out.shape, dtype=np.uint8)
            try:
                return self._fill_segment(data, contiguous)
            except REFUSALS:
                if self._only_here:
                    raise
        found = self._page.decode(bytes(data), index, jpegtables=self._page.jpegtables)
        return np.asarray(found[0][0])


class _PlanarDecoder(SegmentDecoder):
    """Red, green and blue stand in segments of their own, one colour after the other.

    Memory: one segment beside those of `SegmentDecoder`.
    """

    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """See `SegmentDecoder.decode`."""
        for index, out in zip(indices, outs):
            plane = np.empty(out.shape, dtype=np.uint8)
            for colour in range(3):
                super().decode([index + colour * len(self._offsets) // 3], [plane])
                out[..., colour] = plane[..., 0]


def _decoder(level: Level, page: Any, source: ByteSource) -> SegmentDecoder:
    kind = _PlanarDecoder if page.planarconfig == SEPARATE else SegmentDecoder
    return kind(level, page, source)


class _CoarseDecoder(SegmentDecoder):
    """The same segments at a fraction: a JPEG's by its DCT, others' reduced once decoded.

    Memory: one whole segment beside those of `SegmentDecoder`.
    """

    def __init__(self, level: Level, page: Any, source: ByteSource, factor: int) -> None:
        super().__init__(level, page, source)
        self._factor, self._whole, self._raw = factor, self.segment, False
        self.size = (level.size[0] // factor, level.size[1] // factor)
        self.segment = (self.segment[0] // factor, self.segment[1] // factor)
        self._by_dct = int(page.compression) in JPEG

    def _decode_one(self, index: int, data: memoryview, out: RgbArray) -> None:
        if self._by_dct:
            super()._decode_one(index, data, out)
            return
        whole = np.empty((*self._whole[::-1], 3), dtype=np.uint8)
        super()._decode_one(index, data, whole)
        out[:] = np.asarray(Image.fromarray(whole).reduce(self._factor))


class _CoarseSlide(Slide):
    """One level of a TIFF at a fraction of its size; open as long as the slide."""

    def __init__(self, slide: "TiffSlide", decoder: _CoarseDecoder) -> None:
        level = Level(index=0, size=decoder.size, downsample=1.0, segment=decoder.segment)
        super().__init__(slide.slide_path, [level], slide_mpp=None)
        self._slide, self.decoder = slide, decoder

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        self._slide._fill_from(self.decoder, [origin_lv], out[None])


class TiffSlide(SegmentedSlide):
    """A tiled or striped TIFF, read segment by segment. Thread-safe.

    Its bytes come from `source` and its metadata from `handle`, by default from the local file; a
    `layout` stands for what these say.

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
        layout: TiffLayout | None = None,
    ) -> None:
        layout = layout or read_layout(path, slide_mpp, handle)
        self._source = source or FileSource(path)
        pages = zip(layout.levels, layout.pages)
        decoders = [_decoder(*pair, self._source) for pair in pages]
        super().__init__(path, layout.levels, decoders, **layout.facts)
        self._icc_profile = layout.icc_profile
        if any(page.samplesperpixel == 1 for page in layout.pages):
            self.notes = (GRAY,)
        self._pages, self.checked = layout.pages, layout.checked
        self._others, self.associated_names = layout.associated, tuple(sorted(layout.associated))

    def icc_profile(self) -> bytes | None:
        """As of the base class."""
        return self._icc_profile

    def _associated(self, name: str) -> RgbArray:
        decoder = _decoder(*self._others[name], self._source)
        image = np.empty((*decoder.size[::-1], 3), dtype=np.uint8)
        self._fill_from(decoder, [(0, 0)], image[None])
        return image

    def coarse(self, level: int, factor: int) -> Slide | None:
        """See `Slide.coarse`: where segments can be divided by the factor."""
        decoder = self._decoders[level]
        if any(px % factor for px in decoder.segment) or isinstance(decoder, _PlanarDecoder):
            return None
        args = (self.levels[level], self._pages[level], self._source, factor)
        return _CoarseSlide(self, _CoarseDecoder(*args))

    @cached_property
    def reduced(self) -> tuple[Level, ...]:
        """JPEG segments at the fractions of their DCT; made when they are first asked for."""
        found = []
        jpegs = [lv for lv in self.levels if int(self._pages[lv.index].compression) in JPEG]
        for level, factor in product(reversed(jpegs), _BY_DCT):  # the least to read comes first
            coarse = self.coarse(level.index, factor)
            if isinstance(coarse, _CoarseSlide) and 0 not in coarse.size:
                self._decoders.append(coarse.decoder)
                index, down = len(self._decoders) - 1, level.downsample * factor
                found.append(replace(coarse.levels[0], index=index, downsample=down))
        return tuple(found)

    def close(self) -> None:
        """Closes the file; reads that other threads have begun end well."""
        super().close()
        self._source.close()
