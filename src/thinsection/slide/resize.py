"""Reading with resampling: tiles under a read plan, and the whole slide at a small size.

For a notebook, `slide.tiles(tiles)[i]` is the picture of one tile.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import Literal, Protocol, overload

import numpy as np
from PIL import Image, ImageDraw

from thinsection.errors import InvalidInputError
from thinsection.files.pages import NOTEBOOK_EDGE_PX, notebook_html
from thinsection.slide.geometry import ReadPlan, best_level, l0_from_lv
from thinsection.slide.lanczos import reduce_tiles
from thinsection.slide.same_slide import check_same_slide
from thinsection.types import (
    MIB,
    CoordsL0,
    Level,
    RgbArray,
    Size,
    TileArray,
    counted,
)

_STRIP_BYTES = 8 * MIB  # most bytes of source rows that are read at once
_SEGMENTS_BYTES = 128 * MIB  # most bytes of a whole row of segments
# most bytes of rows that are reduced along x and wait to be reduced along y
_EXACT_BYTES = 128 * MIB
_RESAMPLED_BYTES = 5 * MIB // 2  # most source bytes of tiles that one call resamples
# Source bytes of tiles that NumPy reduces before PyTorch is imported, 43 tiles of 508 px. Such a
# tile takes 7 CPU-ms in NumPy and .25 in PyTorch, whose import takes 1.2 CPU-s.
_NUMPY_BYTES = 32 * MIB
_LANCZOS_SUPPORT = 3.0
_GIANT_PX = 100_000_000  # pixels of a giant level; reading it takes seconds to minutes
_OUTLINE = (0, 110, 220)  # RGB of the outlines of tiles
# factors at which a JPEG can be decoded; the filter still gets twice the px
_COARSE = (8, 4, 2)
Resample = Literal["exact", "fast"]
Box = tuple[float, float, float, float]  # left, upper, right and lower edge, px


class Pyramid(Protocol):
    """Methods that resampling needs of a slide; `thinsection.slide.Slide` has them."""

    slide_path: str
    levels: tuple[Level, ...]
    size: Size

    def coarse(self, level: int, factor: int) -> Level | None:
        """See `Slide.coarse`."""

    def read_region(
        self,
        origin_l0: tuple[int, int],
        level: int,
        size: Size,
        *,
        out: RgbArray | None = None,
    ) -> RgbArray:
        """See `Slide.read_region`."""

    def read_regions(self, origins_l0: CoordsL0, level: int, *, out: TileArray) -> None:
        """See `Slide.read_regions`."""


def read_resized(slide: Pyramid, size_th: Size) -> RgbArray:
    """Reads the slide resampled to exactly `size_th`, uint8 (H, W, 3).

    The coarsest level that is fine enough is read once, strip by strip. It is reduced along x and
    then along y. The result equals Pillow's `resize(size_th, LANCZOS)` of the whole level to the
    bit, if the aspect ratio is about the same. (Pillow 13 reduces along y first if the height
    shrinks much more than the width.) If the rows that are reduced along x exceed 128 MiB (a huge
    slide without levels), they are reduced along y in parts, and single values may differ by 1.

    A level of at least 100 Mpx that would shrink at least 16 times is read at an eighth (or a
    quarter, or a half) of its size, if the reader can do so (`Slide.coarse`). Then its px are means
    of 8 x 8 px, and empty segments cost nothing.

    Memory: about 30 MiB for strips (more if one row of segments has more), 128 MiB for reduced
    rows, and the result.

    Raises:
        InvalidInputError: a size that is empty or larger than the slide.
    """
    width, height = slide.size
    width_th, height_th = size_th
    if not (1 <= width_th <= width and 1 <= height_th <= height):
        raise InvalidInputError(
            f"size_th must be from (1, 1) to {slide.size}, got {size_th} in {slide.slide_path!r}"
        )
    level = _level_to_read(slide, size_th)
    # number of result rows that are made from one array of rows reduced along x
    rows_at_once = height_th
    row_bytes = 3 * width_th
    if level.size[1] * row_bytes > _EXACT_BYTES:
        scale = level.size[1] / height_th
        num_rows = (_EXACT_BYTES / row_bytes - 2 * _reach(scale)) / scale
        rows_at_once = max(1, int(num_rows))
    parts = []
    for first in range(0, height_th, rows_at_once):
        last = min(height_th, first + rows_at_once)
        parts.append(_read_rows(slide, level, size_th, first, last))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _level_to_read(slide: Pyramid, size_th: Size) -> Level:
    """Returns the coarsest level that is fine enough, or a fraction of it if it is a giant."""
    width_th, height_th = size_th
    level = best_level(
        slide.levels, min(slide.size[0] / width_th, slide.size[1] / height_th)
    )
    if math.prod(level.size) < _GIANT_PX:
        return level
    shrink = min(level.size[0] / width_th, level.size[1] / height_th)
    for factor in _COARSE:
        coarse = slide.coarse(level.index, factor) if shrink >= 2 * factor else None
        if coarse is not None:
            return coarse
    return level


def _read_rows(
    slide: Pyramid, level: Level, size_th: Size, first: int, last: int
) -> RgbArray:
    """Returns rows [first, last) of the result, from the source rows within reach of the filter."""
    width_th, height_th = size_th
    width, height = level.size
    scale = height / height_th
    top = max(0, math.floor(first * scale - _reach(scale)))
    bottom = min(height, math.ceil(last * scale + _reach(scale)))
    rows = np.empty((bottom - top, width_th, 3), dtype=np.uint8)
    strip_rows = _strip_rows(level)
    # strips end at multiples of their height, because the file's segments end there
    borders = range((top // strip_rows + 1) * strip_rows, bottom, strip_rows)
    for y, end in pairwise([top, *borders, bottom]):
        origin_l0 = (0, l0_from_lv(y, level.downsample))
        strip = slide.read_region(origin_l0, level.index, (width, end - y))
        rows[y - top : end - top] = _lanczos(strip, (width_th, end - y))
    if last - first == height_th:
        return _lanczos(rows, size_th)
    box = (0.0, first * scale - top, float(width_th), last * scale - top)
    return _lanczos(rows, (width_th, last - first), box)


def _reach(scale: float) -> float:
    """Returns the number of source rows on each side of a result row that its filter uses."""
    return _LANCZOS_SUPPORT * max(scale, 1.0) + 1


def _strip_rows(level: Level) -> int:
    """Returns the number of rows of a level to read at once: whole rows of segments if they fit."""
    row_bytes = 3 * level.size[0]
    segment_rows = level.segment[1] if level.segment else 1
    if segment_rows * row_bytes > _SEGMENTS_BYTES:
        # each strip decodes these segments again, so there are as few strips as possible
        return max(1, _SEGMENTS_BYTES // row_bytes)
    rows = _STRIP_BYTES // row_bytes
    return max(segment_rows, rows // segment_rows * segment_rows)


def _lanczos(pixels: RgbArray, size: Size, box: Box | None = None) -> RgbArray:
    image = Image.fromarray(pixels)
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS, box=box))


def tiles_at_once(plan: ReadPlan) -> int:
    """Returns the number of tiles that one call resamples with the same weights of the filter."""
    width, height = plan.size_lv
    return max(1, _RESAMPLED_BYTES // (width * height * 3))


def read_tiles(
    slide: Pyramid, plan: ReadPlan, coords_l0: CoordsL0, out: TileArray
) -> None:
    """Reads tiles by their corners into `out`, uint8 (b, tile_px, tile_px, 3).

    Memory: `tiles_at_once` tiles of the level if tiles are resampled, else none.
    """
    if not plan.resamples:
        slide.read_regions(coords_l0, plan.level, out=out)
        return
    width, height = plan.size_lv
    step = tiles_at_once(plan)
    pixels = np.empty((min(step, len(out)), height, width, 3), dtype=np.uint8)
    for start in range(0, len(out), step):
        tiles = out[start : start + step]
        source = pixels[: len(tiles)]
        slide.read_regions(coords_l0[start : start + step], plan.level, out=source)
        resample(source, tiles)


class FewTiles:
    """Bytes that may still be resampled without PyTorch; shared by the threads of a process."""

    def __init__(self, most_bytes: int) -> None:
        self._bytes_left = most_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """True if so many are left; then they are taken."""
        with self._lock:
            if num_bytes > self._bytes_left:
                return False
            self._bytes_left -= num_bytes
            return True


_FIRST_TILES = FewTiles(_NUMPY_BYTES)


def resample(pixels: TileArray, out: TileArray) -> None:
    """Reduces (b, h, w, 3) into `out`, (b, h', w', 3), uint8, by an anti-aliased Lanczos filter.

    It is Pillow's filter in PyTorch's integer arithmetic, in a sixth of the time. On tissue the
    values differ from Pillow's by at most 2 of 255, and by less than .02 in the mean. The first
    tiles of a process without PyTorch get the same bytes from NumPy (`lanczos`).
    """
    if "torch" not in sys.modules and _FIRST_TILES.take(pixels.nbytes):
        reduce_tiles(pixels, out)
        return
    import torch  # takes a second, and a process with few tiles does not need it

    source = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    target = torch.from_numpy(out).permute(0, 3, 1, 2)
    lanczos = torch.ops.aten._upsample_lanczos2d_aa.out
    lanczos(source, list(out.shape[1:3]), False, None, None, out=target)


@cache
def resample_filter(resampling: Resample = "exact") -> str:
    """Returns the name of the filter and its library, which is part of the keys of embeddings."""
    torch_version = ".".join(version("torch").split(".")[:2])
    lanczos = f"lanczos, torch {torch_version}"
    return lanczos if resampling == "exact" else f"jpeg dct, then {lanczos}"


class PlannedTiles(Protocol):
    """Tiles with the plan by which they are read: a `TileTable`, or tiles of a results folder."""

    @property
    def coords_l0(self) -> CoordsL0: ...

    @property
    def plan(self) -> ReadPlan | None: ...


class TilePictures:
    """The pictures of a slide's tiles; each is read when it is indexed.

    `pictures[i]` is uint8 (tile_px, tile_px, 3), `pictures[i:j]` uint8 (b, tile_px, tile_px, 3).
    The pixels equal those of `iter_tiles`. Memory: the tiles that are indexed.
    """

    def __init__(self, slide: Pyramid, tiles: PlannedTiles) -> None:
        check_same_slide(slide, tiles)
        plan = getattr(tiles, "plan", None)
        if not isinstance(plan, ReadPlan):
            raise InvalidInputError(
                "tiles must be the result of tile_grid or of results.tiles, got "
                f"{type(tiles).__name__}"
            )
        is_of_slide = plan.level >= len(slide.levels) or math.isclose(
            slide.levels[plan.level].downsample, plan.downsample
        )
        if not is_of_slide or (tiles.coords_l0 > slide.size).any():
            raise InvalidInputError(
                f"tiles must be of this slide, got tiles of another one for {slide.slide_path!r}"
            )
        self._slide = slide
        self.plan = plan
        self.coords_l0 = tiles.coords_l0

    def __len__(self) -> int:
        return len(self.coords_l0)

    def __iter__(self) -> Iterator[RgbArray]:
        for place in range(len(self)):
            yield self[place]

    @overload
    def __getitem__(self, index: int) -> RgbArray: ...

    @overload
    def __getitem__(self, index: slice) -> TileArray: ...

    def __getitem__(self, index: int | slice) -> TileArray:
        if not isinstance(index, slice):
            place = range(len(self))[
                index
            ]  # raises IndexError, also of a negative number
            return np.asarray(self[place : place + 1][0])
        coords_l0 = self.coords_l0[index]
        edge = self.plan.tile_px
        pixels = np.empty((len(coords_l0), edge, edge, 3), dtype=np.uint8)
        if len(pixels):
            read_tiles(self._slide, self.plan, coords_l0, pixels)
        return pixels

    def __repr__(self) -> str:
        return f"TilePictures({counted(len(self), 'tile')} of {self.plan.tile_px} px)"

    def _repr_html_(self) -> str:
        """Returns a thumbnail of the slide with the tiles outlined."""
        width, height = self._slide.size
        factor = min(1.0, NOTEBOOK_EDGE_PX / max(width, height))
        size_th = (max(1, round(width * factor)), max(1, round(height * factor)))
        picture = Image.fromarray(read_resized(self._slide, size_th))
        draw = ImageDraw.Draw(picture)
        for x, y in self.coords_l0.tolist():
            right = x + self.plan.size_l0[0]
            bottom = y + self.plan.size_l0[1]
            box = [value * factor for value in (x, y, right, bottom)]
            draw.rectangle(box, outline=_OUTLINE)
        return notebook_html(np.asarray(picture), repr(self), ["pictures[0] is a tile"])
