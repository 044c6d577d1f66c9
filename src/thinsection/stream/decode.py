"""Reading the tiles of a batch: one by one, or a region cut into them."""

import numpy as np
from PIL import Image

from thinsection.slide import Slide
from thinsection.slide.geometry import ReadPlan, l0_from_lv
from thinsection.stream.regions import Region
from thinsection.types import CoordsL0, CoordsLv, RgbArray, TileArray


def decode_run(slide: Slide, plan: ReadPlan, coords_l0: CoordsL0, out: TileArray) -> None:
    """Reads tiles one by one into `out`.

    Args:
        slide: the opened slide.
        plan: its read plan.
        coords_l0: int64 (b, 2), the tiles' corners.
        out: uint8 (b, tile_px, tile_px, 3).

    Memory: one tile of the level where tiles are resampled, else none.
    """
    if not plan.resamples:
        slide.read_regions(coords_l0, plan.level, out=out)
        return
    pixels = np.empty((*plan.size_lv[::-1], 3), dtype=np.uint8)
    for (x, y), tile in zip(coords_l0.tolist(), out):
        slide.read_region((x, y), plan.level, plan.size_lv, out=pixels)
        tile[:] = resample(pixels, plan.tile_px)


def decode_region(
    slide: Slide, plan: ReadPlan, region: Region, corners_lv: CoordsLv, out: TileArray
) -> None:
    """Reads a region and cuts its tiles into `out`.

    A tile of a region is, to the bit, the tile read by itself: each is cut out first and resampled
    (Lanczos, anti-aliased) within its own borders.

    Args:
        slide: the opened slide.
        plan: its read plan.
        region: what to read.
        corners_lv: int64 (b, 2), the tiles' corners on the plan's level.
        out: uint8 (b, tile_px, tile_px, 3).

    Memory: the region and one tile of the level.
    """
    x0, y0 = region.origin_lv
    origin_l0 = (l0_from_lv(x0, plan.downsample), l0_from_lv(y0, plan.downsample))
    alone = len(out) == 1 and not plan.resamples
    target = out[0] if alone else None
    pixels = slide.read_region(origin_l0, plan.level, region.size_lv, out=target)
    if alone:
        return
    width, height = plan.size_lv
    for (x, y), tile in zip((corners_lv - region.origin_lv).tolist(), out):
        cut = pixels[y : y + height, x : x + width]
        tile[:] = resample(cut, plan.tile_px) if plan.resamples else cut


def resample(pixels: RgbArray, tile_px: int) -> RgbArray:
    """Reduces (h, w, 3) to (tile_px, tile_px, 3) with Pillow's anti-aliased Lanczos filter."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((tile_px, tile_px), Image.Resampling.LANCZOS))
