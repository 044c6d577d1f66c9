"""One picture per slide: thumbnail, tissue outline, and the tiles that were taken."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from thinsection.files.atomic import atomic_path
from thinsection.types import CoordsL0, MaskArray, RgbArray, Size

LONG_SIDE = 1600  # px of the picture
OUTLINE = (0, 90, 60)
TILE = (32, 96, 200)
_TILE_ALPHA = 71  # of 255


def draw_overview(
    path: Path,
    thumbnail: RgbArray | Path,
    mask: MaskArray,
    coords_l0: CoordsL0,
    *,
    tile_size_l0: Size,
    size_l0: Size,
) -> None:
    """Writes the picture of `overview` as PNG, atomically; the thumbnail may be a picture file.

    Memory: O(picture), at most 1600 px along its long side.
    """
    if isinstance(thumbnail, Path):
        with Image.open(thumbnail) as picture:
            thumbnail = np.asarray(picture.convert("RGB"))
    pixels = overview(thumbnail, mask, coords_l0, tile_size_l0=tile_size_l0, size_l0=size_l0)
    with atomic_path(path) as tmp:
        Image.fromarray(pixels).save(tmp)


def overview(
    thumbnail: RgbArray,
    mask: MaskArray,
    coords_l0: CoordsL0,
    *,
    tile_size_l0: Size,
    size_l0: Size,
) -> RgbArray:
    """Tiles shaded blue with thin borders, the tissue outlined: uint8 (H, W, 3).

    Args:
        thumbnail: uint8 (H, W, 3) of the whole slide.
        mask: bool, True = tissue, of the whole slide at any resolution.
        coords_l0: (N, 2) x, y of the tiles' top-left corners, level-0 px.
        tile_size_l0: (width, height) of a tile, level-0 px.
        size_l0: (width, height) of the slide's level 0.
    """
    small = Image.fromarray(thumbnail)
    factor = LONG_SIDE / max(small.size)
    size = (max(1, round(small.width * factor)), max(1, round(small.height * factor)))
    base = small.resize(size, Image.Resampling.LANCZOS)
    shade, borders = Image.new("L", size, 0), Image.new("L", size, 0)
    draw_shade, draw_borders = ImageDraw.Draw(shade), ImageDraw.Draw(borders)
    scale = np.array(size) / np.array(size_l0)
    edge = np.array(tile_size_l0) * scale
    for x, y in (coords_l0 * scale).tolist():
        left, top = round(x), round(y)
        right, bottom = round(x + edge[0]) - 1, round(y + edge[1]) - 1
        box = (left, top, max(left, right), max(top, bottom))
        draw_shade.rectangle(box, fill=_TILE_ALPHA)
        draw_borders.rectangle(box, outline=160)
    base.paste(Image.new("RGB", size, TILE), mask=shade)
    if edge.min() >= 6:  # finer grids would be borders only
        base.paste(Image.new("RGB", size, TILE), mask=borders)
    gray = Image.fromarray(mask).convert("L").resize(size, Image.Resampling.NEAREST)
    pixels, inside = np.array(base), np.asarray(gray) > 0
    pixels[inside ^ ndimage.binary_erosion(inside, iterations=2)] = OUTLINE
    return pixels
