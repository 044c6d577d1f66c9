"""Reading one region and cutting it into tiles."""

import numpy as np
from PIL import Image

from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan, l0_from_lv
from thinsection.stream.regions import Region
from thinsection.types import RgbArray


def decode_region(
    slide: Slide, plan: ReadPlan, region: Region, corners_lv: np.ndarray, out: RgbArray
) -> None:
    """Reads a region and writes its tiles into `out`.

    A tile of a region is, to the bit, the tile read by itself: each is cut out first and resampled
    (Lanczos, anti-aliased) within its own borders.

    Args:
        slide: the opened slide.
        plan: its read plan.
        region: what to read.
        corners_lv: int64 (stop - start, 2), the tiles' corners on the plan's level.
        out: uint8 (stop - start, tile_px, tile_px, 3).

    Memory: the region and one tile of the level.
    """
    if len(out) == 1 and not plan.resamples:
        read_level(slide, plan, region.origin_lv, region.size_lv, out=out[0])
        return
    pixels = read_level(slide, plan, region.origin_lv, region.size_lv)
    width, height = plan.size_lv
    for corner, tile in zip(corners_lv - region.origin_lv, out):
        x, y = int(corner[0]), int(corner[1])
        cut = pixels[y : y + height, x : x + width]
        tile[:] = resample(cut, plan.tile_px) if plan.resamples else cut


def read_level(
    slide: Slide,
    plan: ReadPlan,
    origin_lv: tuple[int, int],
    size_lv: tuple[int, int],
    *,
    out: RgbArray | None = None,
) -> RgbArray:
    """A region by its position on the plan's level."""
    origin_l0 = (
        l0_from_lv(origin_lv[0], plan.downsample),
        l0_from_lv(origin_lv[1], plan.downsample),
    )
    return slide.read_region(origin_l0, plan.level, size_lv, out=out)


def resample(pixels: RgbArray, tile_px: int) -> RgbArray:
    """Reduces (h, w, 3) to (tile_px, tile_px, 3) with Pillow's anti-aliased Lanczos filter."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((tile_px, tile_px), Image.Resampling.LANCZOS))
