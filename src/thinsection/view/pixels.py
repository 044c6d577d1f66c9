"""A slide as deep-zoom tiles: the file's own JPEG segments where they fit, else encoded here."""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image

from thinsection.errors import InvalidInputError, require
from thinsection.slide import Slide
from thinsection.slide.geometry import ROUNDING, best_level, l0_from_lv
from thinsection.types import RgbArray, Size

EDGE = 512  # px of the tiles that are encoded here
_QUALITY = 85
_SEGMENT_PX = range(128, 1025)  # edges of segments that make good tiles
_MOST_REDUCED = 4  # times, at once; a tile that is coarser is made of four finer ones


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoomLevel:
    """One level of what the browser asks for; its tiles are a grid from the top-left corner."""

    downsample: float  # level-0 px per px
    size: Size  # px
    tile: Size  # of a tile, px
    stored: int | None  # level of the file whose segments its tiles are


class JpegCache:
    """Encoded pictures by key; the least recently used go first. Thread-safe.

    Memory: `num_bytes`.
    """

    def __init__(self, num_bytes: int) -> None:
        self._total, self._used, self._lock = num_bytes, 0, threading.Lock()
        self._held: OrderedDict[object, bytes] = OrderedDict()

    def get(self, key: object) -> bytes | None:
        """What was put there, if it is still held."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: object, data: bytes) -> bytes:
        """Keeps it; returns it."""
        with self._lock:
            self._used += len(data) - len(self._held.pop(key, b""))
            self._held[key] = data
            while self._used > self._total:
                self._used -= len(self._held.popitem(last=False)[1])
        return data


class DeepZoom:
    """The tiles of an open slide, as JPEG. Thread-safe.

    `levels` are, coarsest first, the slide's own and halves between them and below the last.

    Memory: of a tile that is encoded up to 16 times its px (13 MiB) beside the reader's own.
    """

    def __init__(self, slide: Slide) -> None:
        self.slide, self.levels = slide, tuple(_zoom_levels(slide))[::-1]

    def tile(self, index: int, column: int, row: int) -> bytes:
        """A tile of a level as a JPEG: px beyond the slide are cut off.

        Raises:
            InvalidInputError: no such tile.
            SlideReadError: it cannot be decoded.
        """
        require(0 <= index < len(self.levels), f"level must be < {len(self.levels)}", index)
        level = self.levels[index]
        (x, y), (width, height) = np.multiply((column, row), level.tile).tolist(), level.size
        inside = 0 <= x < width and 0 <= y < height
        require(inside, f"tile must lie in {level.size} px", (column, row))
        size = min(level.tile[0], width - x), min(level.tile[1], height - y)
        if level.stored is not None and size == level.tile:
            if stored := self.slide.stored_jpeg(level.stored, column, row):
                return stored
        return encode(self._pixels(index, x, y, size))

    def crop(self, x: int, y: int, size_l0: Size, edge_px: int) -> bytes:
        """A region of level 0 at no more than about `edge_px`, as a JPEG.

        Raises InvalidInputError: it is empty or outside, or no level is small enough to read it.
        """
        inside = -size_l0[0] < x < self.slide.size[0] and -size_l0[1] < y < self.slide.size[1]
        require(inside and min(size_l0) > 0, "crop must lie in the slide", (x, y, *size_l0))
        down = max(1.0, max(size_l0) / edge_px)
        level = best_level([*self.slide.levels, *self.slide.reduced], down)
        size = tuple(max(1, round(edge / level.downsample)) for edge in size_l0)
        require(max(size) <= 4 * EDGE, f"crop must be at most {4 * EDGE} px of a level", size)
        picture = Image.fromarray(self.slide.read_region((x, y), level.index, (size[0], size[1])))
        picture.thumbnail((edge_px, edge_px))
        return encode(np.asarray(picture))

    def _pixels(self, index: int, x: int, y: int, size: Size) -> RgbArray:
        """A region of a level; read from the file's level that is best for it."""
        down = self.levels[index].downsample
        own = [level for level in self.slide.levels if level.downsample == down]
        found = own[0] if own else best_level([*self.slide.levels, *self.slide.reduced], down)
        ratio = down / found.downsample
        if ratio > _MOST_REDUCED * (1 + ROUNDING):
            return self._of_finer(index + 1, 2 * x, 2 * y, size)
        exact = abs(ratio - 1) <= ROUNDING
        wanted = size if exact else (math.ceil(size[0] * ratio), math.ceil(size[1] * ratio))
        origin = (l0_from_lv(x, down), l0_from_lv(y, down))
        pixels = self.slide.read_region(origin, found.index, wanted)
        if exact:
            return pixels
        return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))

    def _of_finer(self, index: int, x: int, y: int, size: Size) -> RgbArray:
        """A region of the level above, from its four quarters: no more px are held at once."""
        out, half = np.empty((*size[::-1], 3), dtype=np.uint8), EDGE // 2
        (right, below) = self.levels[index].size
        for top in range(0, size[1], half):
            for left in range(0, size[0], half):
                part = out[top : top + half, left : left + half]
                (h, w), (x0, y0) = part.shape[:2], (x + 2 * left, y + 2 * top)
                finer = self._pixels(
                    index, x0, y0, (min(2 * w, right - x0), min(2 * h, below - y0))
                )
                picture = Image.fromarray(finer).resize((w, h), Image.Resampling.BOX)
                part[:] = np.asarray(picture)
        return out


def encode(pixels: RgbArray) -> bytes:
    """A picture (H, W, 3) as a JPEG."""
    data = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=_QUALITY, colorsubsampling="420"
    )
    return bytes(data)


def _zoom_levels(slide: Slide) -> Iterator[ZoomLevel]:
    """Finest first."""
    ends = [level.downsample for level in slide.levels[1:]]
    for level, end in zip(slide.levels, [*ends, math.inf]):
        stored = level.segment is not None and all(px in _SEGMENT_PX for px in level.segment)
        stored = stored and slide.stored_jpeg(level.index, 0, 0) is not None
        tile = level.segment if stored and level.segment else (EDGE, EDGE)
        down, size = level.downsample, level.size
        yield ZoomLevel(downsample=down, size=size, tile=tile, stored=level.index if stored else None)
        while (down := 2 * down) < 0.75 * end and max(size) > EDGE:
            size = (max(1, math.ceil(slide.size[0] / down)), max(1, math.ceil(slide.size[1] / down)))
            yield ZoomLevel(downsample=down, size=size, tile=(EDGE, EDGE), stored=None)
