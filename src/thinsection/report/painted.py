"""A slide with values over it as a pyramidal OME-TIFF, painted and written tile by tile."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.errors import InvalidInputError
from thinsection.report.layers import Classes, TileLayer
from thinsection.slide import Slide
from thinsection.slide.convert import (
    COARSEST_PX,
    SEGMENT_PX,
    encoded_picture,
    write_ome_tiff,
)
from thinsection.slide.geometry import ReadPlan, best_level
from thinsection.slide.resize import read_tiles
from thinsection.types import Mpp, RgbArray, Size, format_mpp

# pixels of the picture along the edge of a tile, unless the resolution is chosen
TILE_EDGE_PX = 32
_QUALITY = 95
# a segment is read in at most so many parts along each axis, so that a part of it stays small
_MOST_PARTS = 16
# largest edge of a part in pixels of the level that is read
_PART_LV_PX = 2048


@dataclass(frozen=True)
class _Painted:
    """A slide with a layer over it, at one resolution.

    Attributes:
        slide: the opened slide.
        layer: values, whose limits are the same in every part.
        segment_l0: level-0 pixels that one segment of SEGMENT_PX pixels covers.
    """

    slide: Slide
    layer: TileLayer
    segment_l0: Size

    @property
    def size(self) -> Size:
        """(width, height) in pixels."""
        width, height = (
            math.ceil(size * SEGMENT_PX / segment)
            for size, segment in zip(self.slide.size, self.segment_l0, strict=True)
        )
        return width, height

    @property
    def half(self) -> "_Painted":
        """The same at half the resolution."""
        width, height = self.segment_l0
        return replace(self, segment_l0=(2 * width, 2 * height))

    def read(self, corner: tuple[int, int]) -> RgbArray:
        """Painted segment (SEGMENT_PX, SEGMENT_PX, 3) at (x, y) in pixels.

        Memory: the segment, _PART_LV_PX² pixels of the level that is read, and 50 bytes per pixel.
        """
        x, y = corner
        width_l0, height_l0 = self.segment_l0
        origin_l0 = np.array([x // SEGMENT_PX * width_l0, y // SEGMENT_PX * height_l0])
        image = Image.fromarray(self._read_slide(origin_l0))
        first = self.layer.coords_l0 - origin_l0
        is_inside = (first < self.segment_l0).all(axis=1)
        is_inside &= (first + self.layer.tile_size_l0 > 0).all(axis=1)
        part = _tiles_of(self.layer, is_inside, first[is_inside])
        if part is not None:
            part.paint(image, self.segment_l0)
        return np.asarray(image)

    def _read_slide(
        self, origin_l0: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    ) -> RgbArray:
        """Segment of the slide alone, read in parts."""
        downsample = min(self.segment_l0) / SEGMENT_PX
        level = best_level(self.slide.levels, downsample)
        largest_lv = max(self.segment_l0) / level.downsample
        parts = 1
        while parts < _MOST_PARTS and largest_lv > parts * _PART_LV_PX:
            parts *= 2
        part_px = SEGMENT_PX // parts
        width_l0, height_l0 = (edge // parts for edge in self.segment_l0)
        plan = ReadPlan(
            tile_px=part_px,
            tile_mpp=None,
            level=level.index,
            downsample=level.downsample,
            size_lv=(
                max(part_px, round(width_l0 / level.downsample)),
                max(part_px, round(height_l0 / level.downsample)),
            ),
            size_l0=(width_l0, height_l0),
            stride_l0=(width_l0, height_l0),
        )
        segment = np.empty((SEGMENT_PX, SEGMENT_PX, 3), dtype=np.uint8)
        pixels = np.empty((1, part_px, part_px, 3), dtype=np.uint8)
        for row in range(parts):
            for column in range(parts):
                corner = origin_l0 + np.array([column * width_l0, row * height_l0])
                read_tiles(self.slide, plan, corner[None], pixels)
                rows = slice(row * part_px, (row + 1) * part_px)
                columns = slice(column * part_px, (column + 1) * part_px)
                segment[rows, columns] = pixels[0]
        return segment


def write_painted(
    path: Path, slide: Slide, layer: TileLayer, *, mpp: float | None = None
) -> None:
    """Writes a slide with a layer over it as OME-TIFF, with its resolution, atomically.

    Each level of the pyramid is painted at its own resolution. Segments are JPEG.

    Args:
        path: the file.
        slide: the opened slide.
        layer: values of its tiles.
        mpp: µm/px of the picture; None gives a tile an edge of TILE_EDGE_PX pixels.

    Memory: for each CPU two segments, _PART_LV_PX² pixels of the slide, and 50 bytes per pixel of a
    segment; 100 bytes per tile of the layer.

    Raises:
        InvalidInputError: a resolution that is finer than the slide's, or without the slide's.
    """
    painted = _Painted(slide, _with_limits(layer), _segment_l0(slide, layer, mpp))
    levels = [*_levels(painted)]
    resolution = None
    if slide.slide_mpp is not None:
        resolution = _mpp_of(painted, slide.slide_mpp)
    pictures = [
        encoded_picture(level.size, partial(level.read), quality=_QUALITY)
        for level in levels
    ]
    write_ome_tiff(path, pictures, resolution, tags=True)


def _levels(painted: _Painted) -> Iterator[_Painted]:
    """The resolutions of the pyramid, finest first."""
    yield painted
    while max(painted.size) > COARSEST_PX:
        painted = painted.half
        yield painted


def _segment_l0(slide: Slide, layer: TileLayer, mpp: float | None) -> Size:
    """Level-0 pixels of a segment: a multiple of _MOST_PARTS, and at least its own pixels."""
    if mpp is None:
        edges = [SEGMENT_PX * edge / TILE_EDGE_PX for edge in layer.tile_size_l0]
    elif slide.slide_mpp is None:
        raise InvalidInputError(
            f"mpp must be left out for a slide without a resolution, got {mpp:g}; open the slide "
            "with slide_mpp=(x, y)"
        )
    elif not mpp >= min(slide.slide_mpp) * (1 - 1e-9):
        raise InvalidInputError(
            f"mpp must be >= that of the slide, {format_mpp(slide.slide_mpp)}, got {mpp:g}; "
            "upsampling is not supported"
        )
    else:
        edges = [SEGMENT_PX * mpp / own for own in slide.slide_mpp]
    width, height = (
        max(SEGMENT_PX, round(edge / _MOST_PARTS) * _MOST_PARTS) for edge in edges
    )
    return width, height


def _mpp_of(painted: _Painted, slide_mpp: Mpp) -> Mpp:
    """µm/px of a painted slide, along x and y."""
    width_l0, height_l0 = painted.segment_l0
    return (
        slide_mpp[0] * width_l0 / SEGMENT_PX,
        slide_mpp[1] * height_l0 / SEGMENT_PX,
    )


def _with_limits(layer: TileLayer) -> TileLayer:
    """The layer with the limits of all its values, which each part of it keeps."""
    if isinstance(layer, Classes):
        return layer
    return replace(layer, limits=layer.shown_limits)


def _tiles_of(
    layer: TileLayer,
    is_inside: "np.ndarray[tuple[int], np.dtype[np.bool_]]",
    coords_l0: "np.ndarray[tuple[int, int], np.dtype[np.int64]]",
) -> TileLayer | None:
    """Some tiles of a layer with other corners; None for no tile."""
    if not is_inside.any():
        return None
    if isinstance(layer, Classes):
        return replace(layer, coords_l0=coords_l0, codes=layer.codes[is_inside])
    return replace(layer, coords_l0=coords_l0, values=layer.values[is_inside])
