"""Reading with resampling: tiles under a read plan, and the whole slide at a small size."""

import math
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image

from thinsection.errors import InvalidInputError
from thinsection.slide.geometry import ReadPlan, best_level, l0_from_lv
from thinsection.types import MIB, CoordsL0, Level, RgbArray, Size, TileArray

if TYPE_CHECKING:
    from thinsection.slide.base import Slide

_STRIP_BYTES, _SEGMENTS_BYTES = (
    8 * MIB,
    128 * MIB,
)  # of source rows; of a whole row of segments
_EXACT_BYTES = (
    128 * MIB
)  # of rows that were reduced along x and wait to be reduced along y
_LANCZOS_SUPPORT = 3.0
_GIANT_PX = 100_000_000  # of a level; reading them all takes seconds to minutes
_COARSE = (8, 4, 2)  # what a JPEG can be decoded at; twice the px remain for the filter
Resample = Literal["exact", "fast"]
Box = tuple[float, float, float, float]  # left, upper, right and lower edge, px


def read_resized(slide: "Slide", size_th: Size) -> RgbArray:
    """The slide resampled to exactly `size_th`, uint8 (H, W, 3).

    The coarsest level that is not coarser than wanted is read once, strip by strip, reduced along x
    and then along y. That equals Pillow's `resize(size_th, LANCZOS)` of the whole level to the bit
    where the aspect is about kept (Pillow 13 reduces along y first where the height shrinks much
    more than the width). Where the rows reduced along x exceed 128 MiB (a huge slide without
    levels) they are reduced along y in parts, and single values may differ by 1. A level of 100 Mpx
    and more that would shrink 16 times and more is read at an eighth (or a quarter, a half) where
    the reader can (`Slide.coarse`): its px are means of 8 x 8, empty segments cost nothing. Memory:
    about 30 MiB for strips (more where one row of segments has more), 128 MiB for reduced rows, and
    the result. Raises InvalidInputError: a size that is empty or larger than the slide.
    """
    (width, height), (width_th, height_th) = slide.size, size_th
    if not (1 <= width_th <= width and 1 <= height_th <= height):
        rule = f"from (1, 1) to {slide.size}, got {size_th} in {slide.slide_path!r}"
        raise InvalidInputError(f"size_th must be {rule}")
    level = best_level(slide.levels, min(width / width_th, height / height_th))
    if math.prod(level.size) >= _GIANT_PX:
        shrink = min(level.size[0] / width_th, level.size[1] / height_th)
        coarse = (
            slide.coarse(level.index, factor)
            for factor in _COARSE
            if shrink >= 2 * factor
        )
        level = next(filter(None, coarse), level)
    rows_at_once = height_th
    if level.size[1] * width_th * 3 > _EXACT_BYTES:
        scale = level.size[1] / height_th
        rows_at_once = max(
            1, int((_EXACT_BYTES / (3 * width_th) - 2 * _reach(scale)) / scale)
        )
    starts = range(0, height_th, rows_at_once)
    parts = [
        _rows(slide, level, size_th, y, min(height_th, y + rows_at_once))
        for y in starts
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _rows(
    slide: "Slide", level: Level, size_th: Size, first: int, last: int
) -> RgbArray:
    """Rows [first, last) of the result, from the source rows that their filter reaches."""
    (width_th, height_th), (width, height) = size_th, level.size
    scale = height / height_th
    top = max(0, math.floor(first * scale - _reach(scale)))
    bottom = min(height, math.ceil(last * scale + _reach(scale)))
    rows = np.empty((bottom - top, width_th, 3), dtype=np.uint8)
    at_once = _strip_rows(level)
    cuts = range((top // at_once + 1) * at_once, bottom, at_once)
    for y, end in pairwise([top, *cuts, bottom]):
        origin_l0 = (0, l0_from_lv(y, level.downsample))
        strip = slide.read_region(origin_l0, level.index, (width, end - y))
        rows[y - top : end - top] = _resize(strip, (width_th, end - y))
    box = (0.0, first * scale - top, float(width_th), last * scale - top)
    return _resize(
        rows, (width_th, last - first), None if last - first == height_th else box
    )


def _reach(scale: float) -> float:
    """Source rows beyond a result row that its filter takes in."""
    return _LANCZOS_SUPPORT * max(scale, 1.0) + 1


def _strip_rows(level: Level) -> int:
    """Rows of a level that are read at once; strips of them end where the file's segments end."""
    row_bytes = 3 * level.size[0]
    segment_rows = level.segment[1] if level.segment else 1
    if segment_rows * row_bytes > _SEGMENTS_BYTES:
        # each strip decodes these segments anew: as few strips as may be
        return max(1, _SEGMENTS_BYTES // row_bytes)
    rows = _STRIP_BYTES // row_bytes
    return max(segment_rows, rows // segment_rows * segment_rows)


def _resize(pixels: RgbArray, size: Size, box: Box | None = None) -> RgbArray:
    return np.asarray(
        Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS, box=box)
    )


def read_tiles(
    slide: "Slide", plan: ReadPlan, coords_l0: CoordsL0, out: TileArray
) -> None:
    """Reads tiles by their corners one by one into `out`, uint8 (b, tile_px, tile_px, 3).

    Memory: one tile of the level where tiles are resampled, else none.
    """
    if not plan.resamples:
        slide.read_regions(coords_l0, plan.level, out=out)
        return
    pixels = np.empty((*plan.size_lv[::-1], 3), dtype=np.uint8)
    for (x, y), tile in zip(coords_l0.tolist(), out):
        slide.read_region((x, y), plan.level, plan.size_lv, out=pixels)
        resample(pixels, tile)


def resample(pixels: RgbArray, out: RgbArray) -> None:
    """Reduces (h, w, 3) into `out`, (h', w', 3), uint8, by an anti-aliased Lanczos filter.

    It is Pillow's filter in PyTorch's integer arithmetic: on tissue at most one level of 255 from
    Pillow's result, on noise two, in the mean below .02; in a sixth of the time.
    """
    import torch  # takes a second, and tiles as they are do not need it

    source, target = (
        torch.from_numpy(part)[None].permute(0, 3, 1, 2) for part in (pixels, out)
    )
    lanczos = torch.ops.aten._upsample_lanczos2d_aa.out
    lanczos(source, list(out.shape[:2]), False, None, None, out=target)


@cache
def resample_filter(how: Resample = "exact") -> str:
    """How tiles are resampled, with the library that does it: part of what embeddings are."""
    lanczos = "lanczos, torch " + ".".join(version("torch").split(".")[:2])
    return lanczos if how == "exact" else f"jpeg dct, then {lanczos}"
