"""Slide as deep-zoom tiles: the file's own JPEG segments if possible, else encoded here."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import simplejpeg
from PIL import Image

from thinsection.errors import InvalidInputError
from thinsection.slide import Slide
from thinsection.slide.geometry import best_level, l0_from_lv
from thinsection.types import MIB, RgbArray, Size

# edge of tiles that are encoded here, in pixels
EDGE = 512
_QUALITY = 85
# smallest and largest edge of segments that are sent as tiles
_SEGMENT_PX = range(128, 1025)
# edge of a region that is read in one step before it is reduced
_READ_PX = 2048
# largest memory of one picture while it is made: a region that is read, and what it is reduced to
PICTURE_BYTES = 14 * MIB
# longest edge of a crop in level-0 pixels
_MAX_CROP_PX = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoomLevel:
    """Level that the browser can request; its tiles are a grid from the top-left corner."""

    # level-0 pixels per pixel
    downsample: float
    # width in pixels
    size: Size
    # height in pixels
    tile: Size = (EDGE, EDGE)
    # level of the file whose segments are its tiles
    stored: int | None = None


class BytesCache:
    """Cache of bytes by key; drops the least recently used first. Thread-safe.

    Threads that ask for the same key at once wait for the one that computes it.

    Memory:
        `num_bytes`.
    """

    def __init__(self, num_bytes: int) -> None:
        self._max_bytes = num_bytes
        self._used_bytes = 0
        self._made = threading.Condition()
        self._in_work: set[Hashable] = set()
        self._values: OrderedDict[Hashable, bytes] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """Bytes for a key; computed now if they are not cached."""
        with self._made:
            while key in self._in_work:
                self._made.wait()
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            self._in_work.add(key)
        try:
            data = make()
            with self._made:
                self._keep(key, data)
        finally:
            with self._made:
                self._in_work.discard(key)
                self._made.notify_all()
        return data

    def _keep(self, key: Hashable, data: bytes) -> None:
        self._values[key] = data
        self._used_bytes += len(data)
        while self._used_bytes > self._max_bytes:
            _, oldest = self._values.popitem(last=False)
            self._used_bytes -= len(oldest)


class DeepZoom:
    """Tiles of an open slide as JPEG. Thread-safe.

    `levels` are, coarsest first, the slide's own levels, halvings between them, and halvings of the
    smallest one.

    Memory:
        `PICTURE_BYTES` while a picture is made, and the reader's own memory.
    """

    def __init__(self, slide: Slide) -> None:
        self.slide = slide
        self._sources = (*slide.levels, *slide.reduced)
        self.levels = tuple(_zoom_levels(slide))[::-1]

    def tile(self, index: int, column: int, row: int) -> bytes:
        """Tile of a level as a JPEG, cut at the edge of the slide.

        Raises:
            InvalidInputError: there is no such tile.
            SlideReadError: the pixels cannot be decoded.
        """
        level = self.levels[index]
        tile_width, tile_height = level.tile
        x = column * tile_width
        y = row * tile_height
        width = min(tile_width, level.size[0] - x)
        height = min(tile_height, level.size[1] - y)
        if width <= 0 or height <= 0:
            raise InvalidInputError(
                f"tile must be within {level.size} px, got {(column, row)}"
            )
        stored = None
        if level.stored is not None and (width, height) == level.tile:
            stored = self.slide.stored_jpeg(level.stored, column, row)
        return stored or encode(self._pixels(level.downsample, x, y, (width, height)))

    def crop(self, x: int, y: int, size_l0: Size, edge_px: int) -> bytes:
        """Region of level 0 as a JPEG whose longer edge is at most `edge_px`."""
        if min(size_l0) <= 0 or max(size_l0) > _MAX_CROP_PX:
            raise InvalidInputError(
                f"crop must have edges of 1 to {_MAX_CROP_PX} px, got {size_l0}"
            )
        downsample = max(1.0, max(size_l0) / edge_px)
        width = max(1, round(size_l0[0] / downsample))
        height = max(1, round(size_l0[1] / downsample))
        pixels = self._pixels(
            downsample, x / downsample, y / downsample, (width, height)
        )
        return encode(pixels)

    def _pixels(self, downsample: float, x: float, y: float, size: Size) -> RgbArray:
        """Region at any downsample, reduced in parts from the best level.

        Args:
            downsample: level-0 pixels per pixel.
            x: left edge in pixels at that downsample.
            y: top edge in pixels at that downsample.
            size: width and height in pixels at that downsample.
        """
        # a level of the slide with that downsample, else the best one to reduce
        level = best_level(self._sources, downsample)
        for own_level in self.slide.levels:
            if own_level.downsample == downsample:
                level = own_level
        ratio = downsample / level.downsample
        region = np.empty((size[1], size[0], 3), dtype=np.uint8)
        step = max(1, int(_READ_PX / ratio))
        for top in range(0, size[1], step):
            for left in range(0, size[0], step):
                part = region[top : top + step, left : left + step]
                height, width = part.shape[:2]
                origin_l0 = (
                    l0_from_lv((x + left) * downsample, 1),
                    l0_from_lv((y + top) * downsample, 1),
                )
                read_size = (math.ceil(width * ratio), math.ceil(height * ratio))
                pixels = self.slide.read_region(origin_l0, level.index, read_size)
                if pixels.shape != part.shape:
                    image = Image.fromarray(pixels)
                    reduced = image.resize((width, height), Image.Resampling.BOX)
                    pixels = np.asarray(reduced)
                part[:] = pixels
        return region


def encode(pixels: RgbArray) -> bytes:
    """Encodes a picture (H, W, 3) as a JPEG."""
    contiguous = np.ascontiguousarray(pixels)
    return bytes(
        simplejpeg.encode_jpeg(contiguous, quality=_QUALITY, colorsubsampling="420")
    )


def _zoom_levels(slide: Slide) -> Iterator[ZoomLevel]:
    """Levels of the slide and the halvings between them, finest first."""
    next_downsamples = [level.downsample for level in slide.levels[1:]]
    for level, next_downsample in zip(slide.levels, [*next_downsamples, math.inf]):
        downsample = level.downsample
        size = level.size
        finest = ZoomLevel(downsample=downsample, size=size)
        edges = level.segment or (0, 0)
        has_good_edges = all(edge in _SEGMENT_PX for edge in edges)
        # the file's segments can be sent unchanged
        if has_good_edges and slide.stored_jpeg(level.index, 0, 0):
            finest = replace(finest, tile=edges, stored=level.index)
        yield finest
        downsample *= 2
        while downsample < 0.75 * next_downsample and max(size) > EDGE:
            size = (
                math.ceil(slide.size[0] / downsample),
                math.ceil(slide.size[1] / downsample),
            )
            yield ZoomLevel(downsample=downsample, size=size)
            downsample *= 2
