"""The direct TIFF reader: the file's own segments (tiles or strips), decoded straight into place.

A segment that a region cuts is kept while its other parts will be asked for.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from thinsection.errors import SlideReadError
from thinsection.files.sources import ByteSource, FileSource
from thinsection.slide.base import GRAY, WHITE, Slide
from thinsection.slide.geometry import ReadPlan, origins_lv
from thinsection.slide.tiff_cache import SegmentCache
from thinsection.slide.tiff_codecs import JPEG, NOT_BY_TIFFFILE, RAW, REFUSALS, SEPARATE, fill_of
from thinsection.slide.tiff_layout import TiffLayout, read_layout
from thinsection.types import MIB, CoordsL0, Level, Mpp, RgbArray, TileArray

CACHE_BYTES = 64 * MIB  # of decoded segments that a region cut, per slide
# segments that stand side by side in the file are read by one request: threads that decode meet
# at every call of the system, because each gives the interpreter's lock away and waits for it
MAX_READ_BYTES = MIB
_MAX_GAP_BYTES = 512  # that writers leave between segments
_TOGETHER_BYTES = 4 * MIB  # of decoded segments before regions are cut from them, or a larger one
_BY_DCT = (2, 4, 8)  # for which libjpeg-turbo is quicker than for a whole segment
_TILES_AT_ONCE = 1 << 16  # whose corners are looked at together
_Target = tuple[int, RgbArray]  # a segment, and where it goes
# along one axis: a segment, what is taken of it, where it goes, whether that is all of it
_Cut = tuple[int, slice, slice, bool]
_Piece = tuple[tuple[int, slice, slice], tuple[slice, slice]]  # of `out`, and of a segment


class SegmentDecoder:
    """Decodes segments of one level, whole: also what the file has beyond the image's border."""

    def __init__(self, level: Level, page: Any, source: ByteSource) -> None:
        assert level.segment is not None
        self.size, self.segment, self._source, self._page = level.size, level.segment, source, page
        self.columns, self.rows = (-(-px // edge) for px, edge in zip(self.size, self.segment))
        self._offsets, self._counts = tuple(page.dataoffsets), tuple(page.databytecounts)
        self.sparse, code = 0 in self._counts, int(page.compression)
        self._fill_segment = fill_of(page, self.segment)
        self._raw = code in RAW and self._fill_segment is not None and page.predictor == 1
        self._only_here = code in NOT_BY_TIFFFILE

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a segment."""
        return (self.segment[1], self.segment[0], 3)

    def is_empty(self, index: int) -> bool:
        """Whether the file holds no bytes of a segment: nothing was scanned there, it is white."""
        return self.sparse and index < len(self._counts) and not self._counts[index]

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

    def _error(self, index: int, why: str) -> SlideReadError:
        row, column = divmod(index, self.columns)
        place = f"column {column}, row {row} of a level of {self.size} px"
        got = f"{why} at {place} in {Path(self._source.name).name!r}"
        remedy = "the file is damaged or truncated"
        return SlideReadError(f"segment must be decodable, got {got}; {remedy}")


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


class TiffSlide(Slide):
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
        super().__init__(path, layout.levels, **layout.facts)
        self._icc_profile = layout.icc_profile
        if any(page.samplesperpixel == 1 for page in layout.pages):
            self.notes = (GRAY,)
        self._source = source or FileSource(path)
        self._pages = layout.pages
        pages = zip(layout.levels, layout.pages)
        self._decoders = [_decoder(*pair, self._source) for pair in pages]
        self.checked = layout.checked
        self._cut = SegmentCache(CACHE_BYTES)
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

    def expect(self, coords_l0: CoordsL0, plan: ReadPlan) -> None:
        """Counts how often the tiles cut each segment.

        Memory: 8 bytes for each segment of the level, for as long as the slide is open.
        """
        self._check(plan.level)
        decoder, size = self._decoders[plan.level], np.array(plan.size_lv)
        grid, edge = np.array((decoder.columns, decoder.rows)), np.array(decoder.segment)
        changes = np.zeros(grid[::-1] + 1, dtype=np.int64)  # of the count, from place to place
        for start in range(0, len(coords_l0), _TILES_AT_ONCE):
            origins = origins_lv(coords_l0[start : start + _TILES_AT_ONCE], plan.downsample)
            if plan.size_lv == decoder.segment and not (origins % edge).any():
                continue  # decoded straight into place
            x0, y0 = np.clip(origins // edge, 0, grid).T
            x1, y1 = np.clip(-(-(origins + size) // edge), 0, grid).T
            for x, y, change in ((x0, y0, 1), (x1, y0, -1), (x0, y1, -1), (x1, y1, 1)):
                np.add.at(changes, (y, x), change)
        if changes.any():
            counts = changes.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
            self._cut.expect(decoder, counts.ravel())

    def _fill_all(self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray) -> None:
        decoder = self._decoders[level]
        width, height = decoder.segment
        aligned = out.shape[1:3] == (height, width)
        if aligned and not any(x % width or y % height for x, y in origins_lv):
            places = [y // height * decoder.columns + x // width for x, y in origins_lv]
            decoder.decode(places, out)
            return
        self._fill_from(decoder, origins_lv, out)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        self._fill_from(self._decoders[level], [origin_lv], out[None])

    def _fill_from(
        self, decoder: SegmentDecoder, origins: Sequence[tuple[int, int]], out: TileArray
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
        indices, at_once = sorted(pieces), max(1, _TOGETHER_BYTES // math.prod(decoder.shape))
        for start in range(0, len(indices), at_once):
            together = indices[start : start + at_once]
            uses = {index: 0 if index in whole else len(pieces[index]) for index in together}
            with self._cut.taken(decoder, uses) as arrays:
                for index, pixels in zip(together, arrays):
                    for target, source in pieces[index]:
                        out[target] = pixels[source]

    def close(self) -> None:
        """Closes the file; reads that other threads have begun end well."""
        super().close()
        self._source.close()


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
