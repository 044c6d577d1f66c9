"""The direct TIFF reader: the file's own JPEG tiles, decoded straight into place."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.errors import SlideOpenError
from thinsection.files.sources import ByteSource, FileSource
from thinsection.slide.base import Slide
from thinsection.slide.segments import SegmentCache, SegmentDecoder
from thinsection.slide.tiff_layout import TiffLayout, read_layout
from thinsection.types import MIB, Mpp, RgbArray, TileArray

CACHE_BYTES = 48 * MIB  # of decoded segments that a region cut, per slide
# a strip or tile must fit a budget that the user never sees; larger ones are refused on opening
MAX_SEGMENT_BYTES = 128 * MIB


class TiffSlide(Slide):
    """A tiled or striped TIFF, read segment by segment. Thread-safe.

    Args:
        path: file.
        slide_mpp: overrides the file's.
        source: where bytes come from; a local file by default.
        handle: a binary file object for the metadata; the local file by default.

    Memory: `CACHE_BYTES` of decoded segments; per reading thread one decoded segment and
    `segments.MAX_READ_BYTES` of compressed ones, or one that is larger.
    """

    reader = "tiff"

    def __init__(
        self,
        path: str,
        *,
        slide_mpp: Mpp | None = None,
        source: ByteSource | None = None,
        handle: Any = None,
    ) -> None:
        layout = open_layout(path, handle)
        largest = max(s.segment[0] * s.segment[1] * 3 for s in layout.levels)
        if largest > MAX_SEGMENT_BYTES:
            raise SlideOpenError(
                f"tiff: its largest strip or tile is {largest >> 20} MiB, more than "
                f"{MAX_SEGMENT_BYTES >> 20}; convert it to a tiled TIFF"
            )
        self._source = source or FileSource(path)
        self._cache = SegmentCache(CACHE_BYTES)
        super().__init__(
            path,
            [item.level for item in layout.levels],
            slide_mpp=slide_mpp or layout.slide_mpp,
            objective_power=layout.objective_power,
            vendor=layout.vendor,
            properties=layout.properties,
        )
        self._decoders = [SegmentDecoder(item, self._source) for item in layout.levels]
        self._associated = layout.associated

    @property
    def associated_names(self) -> tuple[str, ...]:
        return tuple(sorted(self._associated))

    def associated_image(self, name: str) -> RgbArray:
        """See `Slide.associated_image`."""
        item = self._associated.get(name)
        if item is None:
            return super().associated_image(name)
        decoder = SegmentDecoder(item, self._source)
        (columns, rows), (width, height) = item.grid, item.segment
        padded = np.empty((rows * height, columns * width, 3), dtype=np.uint8)
        for row in range(rows):
            for column in range(columns):
                top, left = row * height, column * width
                decoder.decode(column, row, padded[top : top + height, left : left + width])
        size = item.level.size
        return np.ascontiguousarray(padded[: size[1], : size[0]])

    def _fill_all(self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray) -> None:
        decoder = self._decoders[level]
        width, height = decoder.segment
        aligned = out.shape[1:3] == (height, width)
        if aligned and not any(x % width or y % height for x, y in origins_lv):
            places = [y // height * decoder.columns + x // width for x, y in origins_lv]
            decoder.decode_all(places, out)
            return
        super()._fill_all(origins_lv, level, out)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        decoder = self._decoders[level]
        seg_width, seg_height = decoder.segment
        x, y = origin_lv
        height, width = out.shape[:2]
        for row in range(y // seg_height, -(-(y + height) // seg_height)):
            top = row * seg_height
            y0, y1 = max(y, top), min(y + height, top + seg_height)
            for column in range(x // seg_width, -(-(x + width) // seg_width)):
                left = column * seg_width
                x0, x1 = max(x, left), min(x + width, left + seg_width)
                target = out[y0 - y : y1 - y, x0 - x : x1 - x]
                if (x1 - x0, y1 - y0) == decoder.segment:
                    decoder.decode(column, row, target)
                    continue
                pixels = self._segment(level, column, row)
                target[:] = pixels[y0 - top : y1 - top, x0 - left : x1 - left]

    def _segment(self, level: int, column: int, row: int) -> RgbArray:
        """A decoded segment that a region cuts: its other part will be asked for soon."""
        key = (level, column, row)
        pixels = self._cache.get(key)
        if pixels is None:
            decoder = self._decoders[level]
            pixels = np.empty((*decoder.segment[::-1], 3), dtype=np.uint8)
            decoder.decode(column, row, pixels)
            self._cache.put(key, pixels)
        return pixels

    def close(self) -> None:
        """Closes the file; reads that other threads have begun end well."""
        super().close()
        self._source.close()


def open_layout(path: str, handle: Any = None) -> TiffLayout:
    """The layout of a local file, or of an opened binary file object (which stays open)."""
    name = Path(path).name
    if handle is not None:
        return read_layout(handle, name)
    try:
        with Path(path).open("rb") as opened:
            return read_layout(opened, name)
    except OSError as error:  # SlideOpenError is one; its text already says all
        if isinstance(error, SlideOpenError):
            raise
        raise SlideOpenError(f"tiff: {error}") from None
