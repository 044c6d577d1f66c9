"""What readers of segments share: slides stored as a grid of pieces, each decoded whole and once.

A segment that a region cuts is kept while its other parts will be asked for.
"""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.errors import SlideReadError
from thinsection.slide.base import WHITE, Slide
from thinsection.slide.geometry import ReadPlan, origins_lv
from thinsection.slide.tiff_cache import SegmentCache
from thinsection.types import MIB, CoordsL0, Level, RgbArray, Size, TileArray

CACHE_BYTES = 64 * MIB  # of decoded segments that a region cut, per slide
# a segment must fit a budget that the user never sees; larger ones are refused
MAX_SEGMENT_BYTES = 128 * MIB
_TOGETHER_BYTES = 4 * MIB  # of decoded segments before regions are cut from them, or a larger one
_TILES_AT_ONCE = 1 << 16  # whose corners are looked at together
# along one axis: a segment, what is taken of it, where it goes, whether that is all of it
_Cut = tuple[int, slice, slice, bool]
_Piece = tuple[tuple[int, slice, slice], tuple[slice, slice]]  # of `out`, and of a segment


class Decoder:
    """Decodes segments of one level, whole: also what lies beyond the image's border.

    A subclass fills `decode`; `sparse` where it has empty segments.
    """

    def __init__(self, size: Size, segment: Size, name: str) -> None:
        self.size, self.segment, self._name, self.sparse = size, segment, name, False
        self.columns, self.rows = (-(-px // edge) for px, edge in zip(size, segment))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a segment."""
        return (self.segment[1], self.segment[0], 3)

    def is_empty(self, index: int) -> bool:
        """Whether nothing is stored of a segment: nothing was scanned there, it is white."""
        return False

    @abstractmethod
    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """Fills `outs`, each of `shape`, with the segments row * columns + column."""

    def jpeg(self, index: int) -> bytes | None:
        """A segment's bytes as they are stored, as a JPEG of its own; None if it is none."""
        return None

    def _error(self, index: int, why: str) -> SlideReadError:
        row, column = divmod(index, self.columns)
        place = f"column {column}, row {row} of a level of {self.size} px"
        got = f"{why} at {place} in {Path(self._name).name!r}"
        remedy = "the file is damaged or truncated"
        return SlideReadError(f"segment must be decodable, got {got}; {remedy}")


class SegmentedSlide(Slide):
    """A slide whose levels are grids of segments, one decoder for each. Thread-safe.

    Memory: `CACHE_BYTES` of decoded segments, and per reading thread one.
    """

    def __init__(
        self, path: str, levels: Sequence[Level], decoders: Iterable[Decoder], **facts: Any
    ) -> None:
        super().__init__(path, levels, **facts)
        self._decoders = list(decoders)
        self._cut = SegmentCache(CACHE_BYTES)

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

    def stored_jpeg(self, level: int, column: int, row: int) -> bytes | None:
        """As of the base class."""
        self._check(level)
        decoder = self._decoders[level]
        with self._reading(f"segment {column}, {row} of level {level}"):
            return decoder.jpeg(row * decoder.columns + column)

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
        self, decoder: Decoder, origins: Sequence[tuple[int, int]], out: TileArray
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
