"""Layers that paint themselves over a slide's picture: outlines, tints, tiles, values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from thinsection.qc.tissue import Color
from thinsection.report.picture import Picture
from thinsection.report.values import (
    COLORMAP_OF_KIND,
    Limits,
    Numbers,
    ValueKind,
    colorize,
    limits_up_to,
    opacities,
)
from thinsection.tiles.categories import Categories
from thinsection.types import CoordsL0, MaskArray, RgbArray, Size, counted

if TYPE_CHECKING:
    from thinsection.qc.result import QcResult

# (N, 4): left, top, right, bottom in pixels
Boxes = npt.NDArray[np.int64]

OUTLINE: Color = (0, 110, 72)
TILE: Color = (32, 96, 200)
_RIM: Color = (255, 255, 255)
# rows of a picture that are computed together
_BAND_ROWS = 128
# tiles smaller than this in pixels would show nothing but borders
_LEAST_EDGE_PX = 6
# opacities out of 255: shade of tiles with and without lines, and their lines
_SHADE_WITH_LINES = 20
_SHADE_ALONE = 71
_LINE_OPACITY = 150
# largest number of categories in a legend
_MAX_NAMED = 30


@dataclass(frozen=True)
class Outline:
    """Smooth border of a mask (H, W), which covers the whole slide at any resolution."""

    mask: MaskArray
    label: str = ""
    color: Color = OUTLINE
    # pixels
    width: float = 3.0

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws the border with a light rim, so that it is visible on any stain."""
        if not self.mask.any():
            return
        # tissue at the edge of the slide has a border, too
        field = np.pad(_smooth_resize(self.mask, image.size), 1)
        for top in range(0, image.height, _BAND_ROWS):
            band = field[top : top + _BAND_ROWS + 2].astype(np.float32)
            slope = np.hypot(*np.gradient(band))[1:-1, 1:-1]
            distance = np.abs(band[1:-1, 1:-1] - 127.5) / np.maximum(slope, 1e-3)
            rim = np.clip((self.width + 2) / 2 + 0.5 - distance, 0, 1)
            _blend(image, _RIM, rim * 0.7, top)
            line = np.clip(self.width / 2 + 0.5 - distance, 0, 1)
            _blend(image, self.color, line, top)


@dataclass(frozen=True)
class Tint:
    """Colour over a mask (H, W), which covers the whole slide at any resolution."""

    mask: MaskArray
    label: str = ""
    color: Color = OUTLINE
    opacity: float = 0.55

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws the colour."""
        cover = _smooth_resize(self.mask, image.size).astype(np.float32)
        _blend(image, self.color, cover * (self.opacity / 255))


@dataclass(frozen=True)
class Tiles:
    """Tiles as thin lines with a light shade; very small tiles have only the shade."""

    coords_l0: CoordsL0
    tile_size_l0: Size
    label: str = ""
    color: Color = TILE

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws the tiles; neighbours share a line."""
        boxes = _tile_boxes(self.coords_l0, self.tile_size_l0, image.size, size_l0)
        edges_px = np.array(self.tile_size_l0) * image.size / size_l0
        has_lines = min(edges_px) >= _LEAST_EDGE_PX
        shade = Image.new("L", image.size, 0)
        lines = Image.new("L", image.size, 0)
        draw_shade = ImageDraw.Draw(shade)
        draw_lines = ImageDraw.Draw(lines)
        fill = _SHADE_WITH_LINES if has_lines else _SHADE_ALONE
        for left, top, right, bottom in boxes.tolist():
            draw_shade.rectangle((left, top, right - 1, bottom - 1), fill=fill)
            if has_lines:
                draw_lines.rectangle((left, top, right, bottom), outline=_LINE_OPACITY)
        for opacity in (shade, lines):
            image.paste(self.color, (0, 0, *image.size), opacity)


@dataclass(frozen=True)
class Values:
    """Number per tile as a colour; overlapping tiles are averaged, NaN is left out.

    Attributes:
        coords_l0: int64 (N, 2), corners of the tiles.
        tile_size_l0: edges of every tile in level-0 pixels.
        values: (N,).
        label: text in the legend; '' for no text.
        kind: decides the colours, and whether the opacity grows with the value.
        limits: values of the first and last colour; None uses those of the values.
    """

    coords_l0: CoordsL0
    tile_size_l0: Size
    values: Numbers
    label: str = ""
    kind: ValueKind = "measure"
    limits: Limits | None = None

    @property
    def colormap(self) -> str:
        """Name of the colour map, which is also matplotlib's."""
        return COLORMAP_OF_KIND[self.kind]

    @property
    def shown_limits(self) -> Limits:
        """`limits`, or those of the values."""
        if self.limits:
            return self.limits
        finite = self.values[np.isfinite(self.values)]
        if not len(finite):
            return 0, 1
        highest = float(np.abs(finite).max() if self.kind == "signed" else finite.max())
        return limits_up_to(self.kind, highest, float(finite.min()))

    @property
    def only_value(self) -> str:
        """Value that all tiles share, so that no scale is needed; '' if values differ."""
        finite = self.values[np.isfinite(self.values)]
        if not len(finite):
            return "no value"
        low, high = float(finite.min()), float(finite.max())
        return f"{low:.3g}" if low == high else ""

    def shares(self, values: Numbers) -> Numbers:
        """Places of values on the scale, 0 to 1 between the limits."""
        low, high = self.shown_limits
        return np.asarray((values - low) / ((high - low) or 1.0))

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws the values.

        Memory:
            50 bytes per pixel, and 100 per tile.
        """
        finite = np.isfinite(self.values)
        boxes = _tile_boxes(
            self.coords_l0[finite], self.tile_size_l0, image.size, size_l0
        )
        total = _box_sums(boxes, self.values[finite], image.size)
        count = _box_sums(boxes, 1.0, image.size)
        shares = self.shares(total / np.maximum(count, 1))
        colors = colorize(shares, self.colormap)
        alpha = np.where(count > 0.5, np.rint(255 * opacities(shares, self.kind)), 0)
        mask = Image.fromarray(alpha.astype(np.uint8))
        image.paste(Image.fromarray(colors), (0, 0), mask)


@dataclass(frozen=True)
class Shade:
    """Tiles filled with one colour, such as those of one category."""

    coords_l0: CoordsL0
    tile_size_l0: Size
    label: str = ""
    color: Color = TILE
    opacity: float = 0.5

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws the tiles without borders."""
        boxes = _tile_boxes(self.coords_l0, self.tile_size_l0, image.size, size_l0)
        cover = Image.new("L", image.size, 0)
        draw = ImageDraw.Draw(cover)
        for left, top, right, bottom in boxes.tolist():
            box = (left, top, right - 1, bottom - 1)
            draw.rectangle(box, fill=round(255 * self.opacity))
        image.paste(self.color, (0, 0, *image.size), cover)


# layers over a picture, the lowest one first
Layer = Outline | Tint | Tiles | Values | Shade


def category_layers(
    coords_l0: CoordsL0,
    tile_size_l0: Size,
    codes: npt.NDArray[np.integer],
    categories: Categories,
) -> list[Layer]:
    """A layer for each category that the tiles have; the legend names the largest `_MAX_NAMED`."""
    counts = {code: int((codes == code).sum()) for code in range(len(categories.names))}
    largest = sorted(counts, key=lambda code: -counts[code])[:_MAX_NAMED]
    layers: list[Layer] = []
    for code, count in counts.items():
        if not count:
            continue
        label = ""
        if code in largest:
            label = f"{categories.names[code]}: {counted(count, 'tile')}"
        color = categories.rgb(code)
        layers.append(Shade(coords_l0[codes == code], tile_size_l0, label, color))
    return layers


def paint(picture: Picture, layers: Sequence[Layer]) -> RgbArray:
    """Picture with layers over it, the lowest one first, uint8 (H, W, 3), without a legend.

    Memory:
        About 60 bytes per pixel of the picture (160 MB at most), and the memory of the layers.
    """
    image = Image.fromarray(picture.rgb)
    for layer in layers:
        layer.paint(image, picture.size_l0)
    return np.asarray(image)


def _smooth_resize(mask: MaskArray, size: Size) -> npt.NDArray[np.uint8]:
    """Mask at another size with smooth edges: (H, W), 0 to 255, with the border at 127.5."""
    growth = max(1.0, size[0] / mask.shape[1], size[1] / mask.shape[0])
    resampling = Image.Resampling.BILINEAR if growth > 1 else Image.Resampling.BOX
    image = Image.fromarray(mask).convert("L").resize(size, resampling)
    return np.asarray(image.filter(ImageFilter.GaussianBlur(0.9 * growth)))


def _blend(image: Image.Image, color: Color, alpha: Numbers, top: int = 0) -> None:
    """Paints rows from `top` on, with an opacity per pixel."""
    opacity = Image.fromarray((alpha * 255 + 0.5).astype(np.uint8))
    image.paste(color, (0, top, image.width, top + opacity.height), opacity)


def _tile_boxes(
    coords_l0: CoordsL0, tile_size_l0: Size, size: Size, size_l0: Size
) -> Boxes:
    """(N, 4): left, top, right, bottom of tiles in pixels of a picture, at least one pixel each."""
    scale = np.array(size) / np.array(size_l0)
    first = np.rint(coords_l0 * scale)
    end = np.maximum(np.rint((coords_l0 + np.array(tile_size_l0)) * scale), first + 1)
    return np.hstack([first, end]).astype(np.int64)


def _box_sums(
    boxes: Boxes, values: Numbers | float, size: Size
) -> npt.NDArray[np.float64]:
    """Sum of the values of all boxes over each pixel, by a cumulative sum of their corners."""
    width, height = size
    corners = np.zeros((height + 1, width + 1))
    left, right = np.clip(boxes[:, [0, 2]].T, 0, width)
    top, bottom = np.clip(boxes[:, [1, 3]].T, 0, height)
    np.add.at(corners, (top, left), np.asarray(values))
    np.add.at(corners, (top, right), -np.asarray(values))
    np.add.at(corners, (bottom, left), -np.asarray(values))
    np.add.at(corners, (bottom, right), np.asarray(values))
    return np.asarray(corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1])


def overlay_layers(result: QcResult) -> list[Layer]:
    """Layers of the overlay: passed tissue is unchanged, other areas lighter, the largest first."""
    use = result.mask_use
    num_px = max(1, use.size)
    glass_checks = {
        check.name
        for check in result.pipeline.checks
        if check.removes_glass or check.fills
    }
    removed = {
        name: mask & ~use
        for name, mask in result.masks.items()
        if name not in glass_checks
    }
    counts = {name: int(mask.sum()) for name, mask in removed.items()}
    layers: list[Layer] = [Tint(~use, color=(255, 255, 255), opacity=0.5)]
    for name in sorted(counts, key=lambda name: -counts[name]):
        if counts[name]:
            words = name.replace("_", " ")
            label = f"{words}, {counts[name] / num_px:.2%} of the slide"
            layers.append(Tint(removed[name], label, result.colors[name]))
    noun = "tissue without artefacts" if removed else "tissue"
    layers.append(Outline(use, f"{noun}, {use.mean():.1%} of the slide"))
    return layers
