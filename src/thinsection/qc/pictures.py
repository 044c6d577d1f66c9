"""Pictures of masks over the work image."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from thinsection.types import MaskArray, RgbArray

Color = tuple[int, int, int]  # RGB, 0 to 255
TISSUE_COLOR: Color = (0, 160, 80)
_DIMMED = 0.35  # share of its own colour that a px out of use keeps


def overlay(
    rgb: RgbArray, mask_use: MaskArray, tints: Iterable[tuple[MaskArray, Color]] = ()
) -> RgbArray:
    """The picture: out of use dimmed and tinted by the mask that took it, the rest outlined."""
    picture = rgb.astype(np.float32)
    tint = np.full_like(picture, 255.0)
    for mask, color in tints:
        tint[mask & ~mask_use] = color
    out_of_use = ~mask_use
    picture[out_of_use] = picture[out_of_use] * _DIMMED + tint[out_of_use] * (1 - _DIMMED) * 0.9
    picture[_outline(mask_use)] = TISSUE_COLOR
    return np.clip(picture, 0, 255).astype(np.uint8)


def _outline(mask: MaskArray) -> MaskArray:
    """Px of the mask with a 4-neighbour outside it."""
    padded = np.pad(mask, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return np.asarray(mask & ~inner)


def histogram_picture(density: npt.NDArray[Any], *, size: tuple[int, int] = (420, 200)) -> RgbArray:
    """Steps of the density of R, G and B, (bins, 3), over 0 to 255."""
    width, height = size
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    highest = max(float(density.max()), 1e-12)
    for channel, color in enumerate(("#c0392b", "#27ae60", "#2e5fc0")):
        points: list[tuple[float, float]] = []
        for n, value in enumerate(density[:, channel]):
            y = height - 12 - (height - 24) * float(value) / highest
            points += [(n * width / len(density), y), ((n + 1) * width / len(density), y)]
        draw.line(points, fill=color, width=2)
    draw.line([(0, height - 12), (width, height - 12)], fill="#888888")
    return np.asarray(image)
