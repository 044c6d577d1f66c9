"""Pictures of whole slides: results drawn over the slide, with scale bar and legend.

The overview, quality control, heatmaps and notebooks all use it. A `Picture` of at most `LONG_SIDE`
pixels and layers, each of which paints itself, become one image. A strip below it has the scale bar
and the legend of the colours. The pixels above the strip are those of the slide.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from thinsection.files.atomic import atomic_path, write_bytes
from thinsection.report.layers import (
    Classes,
    Layer,
    Outline,
    Stripes,
    Swatch,
    Tiles,
    Tint,
    Values,
    paint,
    short_number,
)
from thinsection.report.picture import Picture, fitted_jpeg
from thinsection.report.values import colorize, opacities
from thinsection.types import RgbArray

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
# left, top, right, bottom in pixels
Box = tuple[int, int, int, int]

_INK = (29, 39, 51)
_PAPER = (255, 255, 255)
# around the scale of values, which is white where nothing is painted
_FRAME = (140, 148, 158)
# largest size of a drawing as a JPEG in bytes
_JPEG_BYTES = 90_000
# largest share of a picture's width for its scale bar
_BAR_SHARE = 0.18


@dataclass(frozen=True)
class _Part:
    """Part of the strip: text, a sign, text.

    Attributes:
        left: text before the sign.
        sign_px: width of the sign in pixels.
        right: text after the sign.
        layer: layer that the sign explains; None for the scale bar.
    """

    left: str
    sign_px: int
    right: str
    layer: Layer | Swatch | None


def draw(picture: Picture, layers: Sequence[Layer], *, caption: str = "") -> RgbArray:
    """Draws `paint`, and below it a strip with caption, scale bar, legend and colour bars.

    The strip's height depends on its text; pixels above it keep their place on the slide.
    """
    painted = paint(picture, layers)
    width = picture.size[0]
    font_px = min(26, max(12, round(max(picture.size) / 60)))
    font = ImageFont.load_default(font_px)
    gap = round(0.4 * font_px)
    line_px = 2 * font_px
    lines = _wrapped(_ascii(caption), font, width - 4 * gap)
    # a line for each layer, or for each category of it
    num_signs = sum(
        len(layer.swatches) if isinstance(layer, Classes) else 1 for layer in layers
    )
    height = line_px * (1 + len(lines) + num_signs)
    strip = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(strip)
    x = 0
    y = 0
    for line in lines:
        text = line
        if font.getlength(line) > width - 4 * gap:
            while text and font.getlength(text + "...") > width - 4 * gap:
                text = text[:-1]
            text += "..."
        pen.text((2 * gap, y + font_px // 2), text, fill=_INK, font=font)
        y += line_px
    parts = _strip_parts(picture, layers, font_px)
    for part in parts:
        left_px = round(font.getlength(part.left)) + (gap if part.left else 0)
        right_px = round(font.getlength(part.right))
        part_px = left_px + part.sign_px + gap + right_px + 3 * gap
        if x and x + part_px > width - 2 * gap:
            x = 0
            y += line_px
        start = x + 2 * gap
        top = y + font_px // 2
        sign_start = start + left_px
        sign_end = sign_start + part.sign_px
        pen.text((start, top), part.left, fill=_INK, font=font)
        sign_box = (sign_start, top + font_px // 6, sign_end, top + font_px)
        _draw_sign(pen, sign_box, part.layer)
        pen.text((sign_end + gap, top), part.right, fill=_INK, font=font)
        x += part_px
    strip_px = y + line_px if parts else y
    return np.concatenate([painted, np.asarray(strip)[:strip_px]])


def write_drawing(
    path: Path, picture: Picture, layers: Sequence[Layer], *, caption: str = ""
) -> None:
    """Writes the image of `draw` atomically: a PNG, or for `.jpg` a JPEG of at most 90 kB."""
    drawing = draw(picture, layers, caption=caption)
    if path.suffix == ".jpg":
        write_bytes(path, fitted_jpeg(drawing, _JPEG_BYTES))
        return
    with atomic_path(path) as tmp:
        Image.fromarray(drawing).save(tmp, format="PNG", compress_level=4)


def _ascii(text: str) -> str:
    """Text in ASCII, since Pillow's own font has no accents or other signs."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _wrapped(text: str, font: Font, width: int) -> list[str]:
    """Lines of at most `width` pixels, broken at ' | '; a longer part is a line of its own."""
    lines: list[str] = []
    for part in filter(None, text.split(" | ")):
        longer = f"{lines[-1]} | {part}" if lines else part
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _strip_parts(
    picture: Picture, layers: Sequence[Layer], font_px: int
) -> list[_Part]:
    """Parts of the strip: the scale bar, then the legend."""
    parts: list[_Part] = []
    if picture.slide_mpp is not None:
        width_mm = picture.size_l0[0] * picture.slide_mpp[0] / 1000
        px_per_mm = picture.size[0] / width_mm
        length_mm = nice_length(_BAR_SHARE * picture.size[0] / px_per_mm)
        parts.append(_Part("", round(length_mm * px_per_mm), f"{length_mm:g} mm", None))
    square_px = round(1.1 * font_px)
    for layer in layers:
        label = _ascii(layer.label)
        if isinstance(layer, Classes):
            for swatch in layer.swatches:
                parts.append(_Part("", square_px, _ascii(swatch.label), swatch))
            continue
        if not layer.label:
            continue
        if isinstance(layer, Values) and layer.only_value:
            words = f"{label}: {layer.only_value}"
            parts.append(_Part("", square_px, words, layer))
        elif isinstance(layer, Values):
            low, high = layer.shown_limits
            left = f"{label}  {short_number(low)}"
            parts.append(_Part(left, 7 * font_px, short_number(high), layer))
        else:
            parts.append(_Part("", square_px, label, layer))
    return parts


def _draw_sign(
    pen: ImageDraw.ImageDraw, box: Box, layer: Layer | Swatch | None
) -> None:
    """Draws the sign of a layer in the legend, or the scale bar if there is no layer."""
    left, top, right, bottom = box
    if layer is None:
        pen.line((left, bottom - 3, right, bottom - 3), fill=_INK, width=4)
        for x in (left, right):
            pen.line((x, top + 2, x, bottom), fill=_INK, width=2)
    elif isinstance(layer, Values):
        for x, color in enumerate(legend_colors(layer, right - left), left):
            pen.line((x, top, x, bottom), fill=tuple(color))
        pen.rectangle(box, outline=_FRAME)
    elif isinstance(layer, Stripes):
        edge_px = bottom - top
        for x in range(left - edge_px, right, 5):
            start = (max(x, left), bottom - max(left - x, 0))
            end_x = min(x + edge_px, right)
            pen.line((*start, end_x, bottom - (end_x - x)), fill=layer.color, width=2)
        pen.rectangle(box, outline=layer.color)
    elif not isinstance(layer, Classes):
        opacity = layer.opacity if isinstance(layer, Tint | Swatch) else 0.1
        line_px = 0
        if isinstance(layer, Outline):
            line_px = 3
        elif isinstance(layer, Tiles):
            line_px = 1
        fill = tuple(round(255 - (255 - value) * opacity) for value in layer.color)
        pen.rectangle(box, fill=fill, outline=layer.color, width=line_px)


def legend_colors(layer: Values, count: int) -> list[list[int]]:
    """Colours of the scale of values over white, from the first to the last; or the only one."""
    shares = np.linspace(0, 1, count)
    if layer.only_value:
        finite = layer.values[np.isfinite(layer.values)]
        only = float(layer.shares(finite)[0]) if len(finite) else 0.0
        shares = np.full(count, only)
    # a measure is as strong on white as it looks over tissue
    alpha = np.maximum(opacities(shares, layer.kind), 0.8 * (layer.kind == "measure"))
    colors = colorize(shares, layer.colormap) * alpha[:, None] + 255 * (
        1 - alpha[:, None]
    )
    return [[round(value) for value in color] for color in colors.tolist()]


def nice_length(most: float) -> float:
    """Largest number of the form 1, 2 or 5 times a power of ten that is not larger."""
    power = 10.0 ** np.floor(np.log10(most))
    fitting = [step for step in (1, 2, 5) if step * power <= most * (1 + 1e-9)]
    return float(round(max(fitting) * power, 12))
