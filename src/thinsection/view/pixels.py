"""A slide as deep-zoom tiles: the file's own JPEG segments where they fit, else encoded here."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import simplejpeg
from PIL import Image

from thinsection.errors import require
from thinsection.slide import Slide
from thinsection.slide.geometry import best_level, l0_from_lv
from thinsection.types import RgbArray, Size

EDGE = 512  # px of the tiles that are encoded here
_QUALITY = 85
_SEGMENT_PX = range(128, 1025)  # edges of segments that make good tiles
_READ_PX = 2048  # edge of what is read at once to be reduced
_MOST_CROP_PX = 1 << 15  # edge of a crop, level-0 px


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoomLevel:
    """One level of what the browser asks for; its tiles are a grid from the top-left corner."""

    downsample: float  # level-0 px per px
    size: Size  # px
    tile: Size = (EDGE, EDGE)  # px
    stored: int | None = None  # level of the file whose segments its tiles are


class BytesCache:
    """Bytes by key; the least recently used go first. Thread-safe. Memory: `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        self._total, self._used, self._lock = num_bytes, 0, threading.Lock()
        self._held: OrderedDict[tuple, bytes] = OrderedDict()

    def get(self, key: tuple, make: Callable[[], bytes]) -> bytes:
        """What is held; made now where nothing is."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        data = make()
        with self._lock:
            self._used += len(data) - len(self._held.pop(key, b""))
            self._held[key] = data
            while self._used > self._total:
                self._used -= len(self._held.popitem(last=False)[1])
        return data


class DeepZoom:
    """The tiles of an open slide, as JPEG. Thread-safe.

    `levels` are, coarsest first, the slide's own and halves between them and below the last.

    Memory: of a picture that is made, 14 MiB beside the reader's own.
    """

    def __init__(self, slide: Slide) -> None:
        self.slide, self._sources = slide, (*slide.levels, *slide.reduced)
        self.levels = tuple(_zoom_levels(slide))[::-1]

    def tile(self, index: int, column: int, row: int) -> bytes:
        """A tile of a level as a JPEG, cut off where the slide ends.

        Raises InvalidInputError: no such tile; SlideReadError: it cannot be decoded.
        """
        level = self.levels[index]
        (x, y), edges = (column * level.tile[0], row * level.tile[1]), level.tile
        size = min(edges[0], level.size[0] - x), min(edges[1], level.size[1] - y)
        require(min(size) > 0, f"tile must lie in {level.size} px", (column, row))
        data = None
        if level.stored is not None and size == level.tile:
            data = self.slide.stored_jpeg(level.stored, column, row)
        return data or encode(self._pixels(level.downsample, x, y, size))

    def crop(self, x: int, y: int, size_l0: Size, edge_px: int) -> bytes:
        """A region of level 0 as a JPEG whose longer edge is at most `edge_px`."""
        rule = f"crop must have edges of 1 to {_MOST_CROP_PX} px"
        require(0 < min(size_l0) <= max(size_l0) <= _MOST_CROP_PX, rule, size_l0)
        down = max(1.0, max(size_l0) / edge_px)
        width, height = (max(1, round(edge / down)) for edge in size_l0)
        return encode(self._pixels(down, x / down, y / down, (width, height)))

    def _pixels(self, downsample: float, x: float, y: float, size: Size) -> RgbArray:
        """A region at any downsample, reduced in parts from the best level."""
        own = [level for level in self.slide.levels if level.downsample == downsample]
        level = own[0] if own else best_level(self._sources, downsample)
        ratio, out = (
            downsample / level.downsample,
            np.empty((*size[::-1], 3), dtype=np.uint8),
        )
        step = max(1, int(_READ_PX / ratio))
        for top, left in product(range(0, size[1], step), range(0, size[0], step)):
            part = out[top : top + step, left : left + step]
            place = ((x + left) * downsample, (y + top) * downsample)
            origin = (l0_from_lv(place[0], 1), l0_from_lv(place[1], 1))
            read = math.ceil(part.shape[1] * ratio), math.ceil(part.shape[0] * ratio)
            pixels = self.slide.read_region(origin, level.index, read)
            if pixels.shape != part.shape:
                reduced = Image.fromarray(pixels).resize(
                    part.shape[1::-1], Image.Resampling.BOX
                )
                pixels = np.asarray(reduced)
            part[:] = pixels
        return out


def encode(pixels: RgbArray) -> bytes:
    """A picture (H, W, 3) as a JPEG."""
    how = {"quality": _QUALITY, "colorsubsampling": "420"}
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), **how))


def _zoom_levels(slide: Slide) -> Iterator[ZoomLevel]:
    """Finest first."""
    ends = [level.downsample for level in slide.levels[1:]]
    for level, end in zip(slide.levels, [*ends, math.inf]):
        down, size, edges = level.downsample, level.size, level.segment
        if (
            edges
            and set(edges) <= set(_SEGMENT_PX)
            and slide.stored_jpeg(level.index, 0, 0)
        ):
            yield ZoomLevel(downsample=down, size=size, tile=edges, stored=level.index)
        else:
            yield ZoomLevel(downsample=down, size=size)
        while (down := 2 * down) < 0.75 * end and max(size) > EDGE:
            size = (math.ceil(slide.size[0] / down), math.ceil(slide.size[1] / down))
            yield ZoomLevel(downsample=down, size=size)
