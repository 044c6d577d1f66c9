"""A slide with values over it as SVG: tiles are rectangles with their values, sizes are in mm."""

import base64
import html
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.files.atomic import atomic_path
from thinsection.report.draw import legend_colors, nice_length
from thinsection.report.layers import Boxes, Classes, TileLayer, short_number
from thinsection.report.picture import Picture, fitted_jpeg
from thinsection.report.values import Numbers

_PICTURE_BYTES = 2_000_000  # largest size of the embedded picture
# cells of overlapping tiles, which are computed together
_MOST_CELLS = 4_000_000
_LEGEND_COLORS = 32
# shares of the drawing's longer edge: text, gaps, scale bar, colour bar
_TEXT = 0.018
_GAP = 0.012
_BAR = 0.18


def write_svg(
    path: Path, picture: Picture, layer: TileLayer, *, caption: str = ""
) -> None:
    """Writes a slide with one rectangle per tile, a legend and a scale bar, atomically.

    The drawing is as large as the slide, in mm; without a resolution a pixel is 1 µm. A rectangle
    has the value of its tile as its title, which browsers show. Where tiles overlap, the rectangles
    are the cells between their edges, with the mean of the values there.

    Memory: the picture; 100 bytes per tile, and 60 per cell if tiles overlap.

    Raises:
        InvalidInputError: tiles overlap at so many different places that there are too many cells.
    """
    mpp_x, mpp_y = picture.slide_mpp or (1.0, 1.0)
    width = picture.size_l0[0] * mpp_x / 1000
    height = picture.size_l0[1] * mpp_y / 1000
    unit = max(width, height)
    legend = [*_legend(layer, picture.slide_mpp is not None, width, height, caption)]
    total_height = height + legend_height(layer, unit)
    with atomic_path(path) as tmp, tmp.open("w", encoding="utf-8") as file:
        file.write(
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'width="{width:.6g}mm" height="{total_height:.6g}mm" '
            f'viewBox="0 0 {width:.6g} {total_height:.6g}">\n'
        )
        jpeg = base64.b64encode(fitted_jpeg(picture.rgb, _PICTURE_BYTES)).decode()
        file.write(
            f'<image width="{width:.6g}" height="{height:.6g}" preserveAspectRatio="none" '
            f'href="data:image/jpeg;base64,{jpeg}"/>\n'
        )
        scale = f"{mpp_x / 1000:.9g} {mpp_y / 1000:.9g}"
        # rectangles are in level-0 pixels
        file.write(
            f'<g id="tiles" transform="scale({scale})" shape-rendering="crispEdges">\n'
        )
        _write_cells(file, layer)
        file.write("</g>\n")
        file.writelines(legend)
        file.write("</svg>\n")


def legend_height(layer: TileLayer, unit: float) -> float:
    """Height of the strip below the slide: caption, scale bar, and a line per sign."""
    lines = 2 + (len(layer.swatches) if isinstance(layer, Classes) else 1)
    return lines * (_TEXT + _GAP) * unit + _GAP * unit


def _write_cells(file: TextIO, layer: TileLayer) -> None:
    """Writes a rectangle for each tile with a value, or for each cell of overlapping tiles."""
    boxes, rgba, titles = _cells(layer)
    for (left, top, right, bottom), color, title in zip(
        boxes.tolist(), rgba.tolist(), titles, strict=True
    ):
        red, green, blue, alpha = color
        if alpha == 0:
            continue
        file.write(
            f'<rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" '
            f'fill="#{red:02x}{green:02x}{blue:02x}" fill-opacity="{alpha / 255:.3g}">'
            f"<title>{html.escape(title)}</title></rect>\n"
        )


def _cells(
    layer: TileLayer,
) -> tuple[Boxes, "np.ndarray[tuple[int, int], np.dtype[np.uint8]]", Iterator[str]]:
    """Boxes in level-0 pixels, their colours, and the words of each."""
    boxes = np.hstack([layer.coords_l0, layer.coords_l0 + layer.tile_size_l0])
    if not _overlap(layer):
        return boxes, layer.tile_rgba, _tile_words(layer)
    x = np.unique(boxes[:, [0, 2]])
    y = np.unique(boxes[:, [1, 3]])
    if len(x) * len(y) > _MOST_CELLS:
        raise InvalidInputError(
            f"overlapping tiles must have at most {_MOST_CELLS} cells for SVG, got "
            f"{len(x) * len(y)}; write .png or .ome.tif"
        )
    places = np.stack(
        [
            np.searchsorted(x, boxes[:, 0]),
            np.searchsorted(y, boxes[:, 1]),
            np.searchsorted(x, boxes[:, 2]),
            np.searchsorted(y, boxes[:, 3]),
        ],
        axis=1,
    )
    pixels = layer.pixels(places, (len(x) - 1, len(y) - 1))
    rows, columns = np.nonzero(pixels.alpha)
    cells = np.stack([x[columns], y[rows], x[columns + 1], y[rows + 1]], axis=1)
    alpha = pixels.alpha[rows, columns, None]
    rgba = np.hstack([pixels.colors[rows, columns], alpha])
    return cells, rgba, iter([layer.label] * len(cells))


def _overlap(layer: TileLayer) -> bool:
    """True if two tiles share pixels."""
    from scipy.spatial import cKDTree

    if len(layer.coords_l0) < 2:
        return False
    places = layer.coords_l0 / np.array(layer.tile_size_l0)
    distances, _ = cKDTree(places).query(places, k=2, p=np.inf)
    return bool((distances[:, 1] < 1 - 1e-9).any())


def _tile_words(layer: TileLayer) -> Iterator[str]:
    """The value of each tile, as a browser shows it."""
    if isinstance(layer, Classes):
        names = layer.categories.labels(layer.codes)
        yield from (str(name) for name in names)
        return
    values: Numbers = layer.values
    for value in values.tolist():
        yield f"{layer.label} {value:.6g}".strip()


def _legend(
    layer: TileLayer, has_scale: bool, width: float, height: float, caption: str
) -> Iterator[str]:
    """Caption, scale bar, and colour bar or names, below the slide; in mm."""
    unit = max(width, height)
    text = _TEXT * unit
    line = (_TEXT + _GAP) * unit
    left = _GAP * unit
    y = height + _GAP * unit + text
    yield f'<g id="legend" font-family="sans-serif" font-size="{text:.4g}" fill="#1d2733">\n'
    yield _words(left, y, caption)
    y += line
    if has_scale:
        length = nice_length(_BAR * width)
        yield (
            f'<rect x="{left:.5g}" y="{y - text / 4:.5g}" width="{length:.5g}" '
            f'height="{text / 5:.4g}"/>\n'
        )
        yield _words(2 * left + length, y, f"{length:g} mm")
    y += line
    if isinstance(layer, Classes):
        for swatch in layer.swatches:
            color = "#{:02x}{:02x}{:02x}".format(*swatch.color)
            yield (
                f'<rect x="{left:.5g}" y="{y - text:.5g}" width="{text:.4g}" '
                f'height="{text:.4g}" fill="{color}" fill-opacity="{swatch.opacity:g}"/>\n'
            )
            yield _words(2 * left + text, y, swatch.label)
            y += line
    elif layer.only_value:
        yield _words(left, y, f"{layer.label}: {layer.only_value}")
    else:
        yield from _color_bar(layer, left, y, text, unit)
    yield "</g>\n"


def _color_bar(
    layer: TileLayer, left: float, y: float, text: float, unit: float
) -> Iterator[str]:
    """The scale of numbers, with its ends."""
    if isinstance(layer, Classes):
        return
    low, high = layer.shown_limits
    step = _BAR * unit / _LEGEND_COLORS
    for place, (red, green, blue) in enumerate(legend_colors(layer, _LEGEND_COLORS)):
        yield (
            f'<rect x="{left + place * step:.5g}" y="{y - text:.5g}" width="{step * 1.05:.5g}" '
            f'height="{text:.4g}" fill="#{red:02x}{green:02x}{blue:02x}"/>\n'
        )
    end = 2 * left + _LEGEND_COLORS * step
    yield _words(end, y, f"{layer.label}  {short_number(low)} to {short_number(high)}")


def _words(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.5g}" y="{y:.5g}">{html.escape(words)}</text>\n'
