"""One picture per slide: thumbnail, tissue outline, and the tiles that were taken."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from thinsection.files.atomic import atomic_path
from thinsection.qc.tissue import TissueMask
from thinsection.tiles import TileTable
from thinsection.types import RgbArray

LONG_SIDE = 1600  # px of the picture
OUTLINE = (0, 90, 60)
TILE = (32, 96, 200)
_TILE_ALPHA = 0.28


def draw_overview(path: Path, tissue: TissueMask, table: TileTable) -> None:
    """Writes the picture as PNG, atomically.

    Memory: O(picture), at most 1600 px along its long side.
    """
    image = Image.fromarray(overview(tissue, table))
    with atomic_path(path) as tmp:
        image.save(tmp)


def overview(tissue: TissueMask, table: TileTable) -> RgbArray:
    """The picture as uint8 (H, W, 3): tiles shaded blue with thin borders, the tissue outlined."""
    thumbnail = Image.fromarray(tissue.thumbnail)
    factor = LONG_SIDE / max(thumbnail.size)
    size = (max(1, round(thumbnail.width * factor)), max(1, round(thumbnail.height * factor)))
    base = thumbnail.resize(size, Image.Resampling.LANCZOS)
    shade = Image.new("L", size, 0)
    borders = Image.new("L", size, 0)
    draw_shade, draw_borders = ImageDraw.Draw(shade), ImageDraw.Draw(borders)
    scale = np.array(size) / np.array(tissue.frame.size_l0)
    edge = np.array(table.plan.size_l0) * scale
    alpha = round(255 * _TILE_ALPHA)
    for x, y in (table.coords_l0 * scale).tolist():
        box = (round(x), round(y), round(x + edge[0]) - 1, round(y + edge[1]) - 1)
        box = (*box[:2], max(box[2], box[0]), max(box[3], box[1]))
        draw_shade.rectangle(box, fill=alpha)
        draw_borders.rectangle(box, outline=160)
    base.paste(Image.new("RGB", size, TILE), mask=shade)
    if edge.min() >= 6:  # finer grids would be borders only
        base.paste(Image.new("RGB", size, TILE), mask=borders)
    mask = Image.fromarray(tissue.mask.astype(np.uint8) * 255).resize(
        size, Image.Resampling.NEAREST
    )
    inside = np.asarray(mask) > 0
    outline = inside ^ ndimage.binary_erosion(inside, iterations=2)
    pixels = np.array(base)
    pixels[outline] = OUTLINE
    return pixels
