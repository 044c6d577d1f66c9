"""One picture per slide: thumbnail, tissue outline, and the tiles that were taken."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from thinsection.files.atomic import atomic_path
from thinsection.types import CoordsL0, MaskArray, RgbArray, Size

LONG_SIDE = 1600  # px of the picture
OUTLINE = (0, 90, 60)
TILE = (32, 96, 200)
_SHADE, _BORDER = 71, 160  # opacity of a tile and of its border, of 255


def draw_overview(
    path: Path,
    thumbnail: RgbArray,
    mask: MaskArray,
    coords_l0: CoordsL0,
    *,
    tile_size_l0: Size,
    size_l0: Size,
) -> None:
    """Writes a PNG, atomically: tiles shaded blue with thin borders, the tissue outlined.

    Thumbnail, uint8 (H, W, 3), and mask, True = tissue, show the whole slide, each at its own
    resolution. Sizes are (width, height); tiles have their top-left corners at coords_l0.

    Memory: O(picture), at most 1600 px along its long side.
    """
    from scipy import ndimage

    base = Image.fromarray(thumbnail)
    factor = LONG_SIDE / max(base.size)
    size = (max(1, round(base.width * factor)), max(1, round(base.height * factor)))
    base, shade = base.resize(size, Image.Resampling.LANCZOS), Image.new("L", size, 0)
    borders, blue = Image.new("L", size, 0), Image.new("RGB", size, TILE)
    draw_shade, draw_borders = ImageDraw.Draw(shade), ImageDraw.Draw(borders)
    scale = np.array(size) / np.array(size_l0)
    edge = np.array(tile_size_l0) * scale
    first, end = np.rint(coords_l0 * scale), np.rint(coords_l0 * scale + edge)
    for box in np.hstack([first, np.maximum(first, end - 1)]).astype(int).tolist():
        draw_shade.rectangle(box, fill=_SHADE)
        draw_borders.rectangle(box, outline=_BORDER)
    base.paste(blue, mask=shade)
    if edge.min() >= 6:  # finer grids would be borders only
        base.paste(blue, mask=borders)
    gray = Image.fromarray(mask).convert("L").resize(size, Image.Resampling.NEAREST)
    pixels, inside = np.array(base), np.asarray(gray) > 0
    pixels[inside ^ ndimage.binary_erosion(inside, iterations=2)] = OUTLINE
    with atomic_path(path) as tmp:
        Image.fromarray(pixels).save(tmp)
