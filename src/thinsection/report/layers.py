"""Layers that paint themselves over a slide's picture: outlines, tints, tiles, values, classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from thinsection.arrays.packed import PackedArray
from thinsection.qc.edits import EDIT_COLORS, edit_masks
from thinsection.qc.tissue import UNJUDGED_COLOR, Color, diagonal_stripes
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
from thinsection.tiles.categories import NONE, Categories
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
# opacity of categories over the slide; the tissue must stay visible
_CLASS_OPACITY = 0.5
# largest number of categories in a legend
_MAX_NAMED = 30


def short_number(value: float) -> str:
    """Three digits of a number; the digits before the point if there are more of them."""
    if 1e3 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.3g}"


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

    mask: MaskArray | PackedArray
    label: str = ""
    color: Color = OUTLINE
    opacity: float = 0.55

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws the colour."""
        cover = _smooth_resize(self.mask, image.size).astype(np.float32)
        _blend(image, self.color, cover * (self.opacity / 255))


@dataclass(frozen=True)
class Stripes:
    """Diagonal stripes over a mask (H, W), which covers the whole slide at any resolution."""

    mask: MaskArray
    label: str = ""
    color: Color = UNJUDGED_COLOR
    opacity: float = 0.75

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws the stripes; the tissue stays visible between them."""
        cover = _smooth_resize(self.mask, image.size).astype(np.float32)
        step_px = max(6, max(image.size) // 120)
        cover *= diagonal_stripes(cover.shape, step_px)
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


class Pixels(NamedTuple):
    """Colours of a picture with their opacities."""

    colors: npt.NDArray[np.uint8]  # (H, W, 3)
    alpha: npt.NDArray[np.uint8]  # (H, W)


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
        return short_number(low) if low == high else ""

    def shares(self, values: Numbers) -> Numbers:
        """Places of values on the scale, 0 to 1 between the limits."""
        low, high = self.shown_limits
        return np.asarray((values - low) / ((high - low) or 1.0))

    @property
    def tile_rgba(self) -> npt.NDArray[np.uint8]:
        """Colour and opacity of each tile, uint8 (N, 4); a tile without a value is transparent."""
        finite = np.isfinite(self.values)
        shares = self.shares(np.where(finite, self.values, 0.0))
        alpha = np.where(finite, self._alpha(shares), 0).astype(np.uint8)
        return np.hstack([colorize(shares, self.colormap), alpha[:, None]])

    def _alpha(self, shares: Numbers) -> Numbers:
        return np.asarray(np.rint(255 * opacities(shares, self.kind)))

    def pixels(self, boxes: Boxes, size: Size) -> Pixels:
        """Colours and opacities of pixels, for tiles whose places in pixels are given.

        Memory:
            50 bytes per pixel.
        """
        finite = np.isfinite(self.values)
        total = _box_sums(boxes[finite], self.values[finite], size)
        count = _box_sums(boxes[finite], 1.0, size)
        shares = self.shares(total / np.maximum(count, 1))
        colors = colorize(shares, self.colormap)
        alpha = np.where(count > 0.5, self._alpha(shares), 0)
        return Pixels(colors, alpha.astype(np.uint8))

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws the values.

        Memory:
            50 bytes per pixel, and 100 per tile.
        """
        _paste_tiles(self, image, size_l0)


@dataclass(frozen=True)
class Classes:
    """Category per tile as a colour; where tiles overlap, that of most tiles, else the first.

    Attributes:
        coords_l0: int64 (N, 2), corners of the tiles.
        tile_size_l0: edges of every tile in level-0 pixels.
        codes: (N,), place of each tile's category; -1 for a tile without one.
        categories: their names and colours.
        label: name of the column; '' for none.
    """

    coords_l0: CoordsL0
    tile_size_l0: Size
    codes: npt.NDArray[np.integer]
    categories: Categories
    label: str = ""

    @property
    def shown(self) -> list[int]:
        """Codes of the categories that tiles have, in their order."""
        return [code for code in np.unique(self.codes).tolist() if code != NONE]

    @property
    def tile_rgba(self) -> npt.NDArray[np.uint8]:
        """Colour and opacity of each tile, uint8 (N, 4)."""
        colours: npt.NDArray[np.uint8] = self._table[self.codes]
        return colours

    @property
    def swatches(self) -> list[Swatch]:
        """Colours with names and numbers of tiles, for a legend; the largest `_MAX_NAMED`."""
        counts = {code: int((self.codes == code).sum()) for code in self.shown}
        largest = sorted(counts, key=lambda code: -counts[code])[:_MAX_NAMED]
        swatches = []
        for code, count in counts.items():
            if code in largest:
                label = f"{self.categories.names[code]}: {counted(count, 'tile')}"
                color = self.categories.rgb(code)
                swatches.append(Swatch(label, color, _CLASS_OPACITY))
        return swatches

    @property
    def _table(self) -> npt.NDArray[np.uint8]:
        """Colour and opacity of each code, (K + 1, 4); the last one is transparent, for -1."""
        alpha = round(255 * _CLASS_OPACITY)
        codes = range(len(self.categories.names))
        rows = [(*self.categories.rgb(code), alpha) for code in codes]
        return np.array([*rows, (0, 0, 0, 0)], dtype=np.uint8)

    def pixels(self, boxes: Boxes, size: Size) -> Pixels:
        """Colours and opacities of pixels, for tiles whose places in pixels are given.

        Memory:
            40 bytes per pixel.
        """
        most = np.zeros((size[1], size[0]))
        winner = np.full((size[1], size[0]), NONE)
        for code in self.shown:
            count = _box_sums(boxes[self.codes == code], 1.0, size)
            wins = count > most + 0.5  # sums of corners are rounded
            winner[wins] = code
            most[wins] = count[wins]
        rgba = self._table[winner]
        return Pixels(rgba[..., :3], rgba[..., 3])

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws the categories.

        Memory:
            40 bytes per pixel, and 100 per tile.
        """
        _paste_tiles(self, image, size_l0)


@dataclass(frozen=True, slots=True)
class Swatch:
    """A colour of a legend with its name."""

    label: str
    color: Color
    opacity: float


# layers of one value per tile
TileLayer = Values | Classes
# layers over a picture, the lowest one first
Layer = Outline | Tint | Stripes | Tiles | Values | Classes


def paint(picture: Picture, layers: Sequence[Layer]) -> RgbArray:
    """Picture with layers over it, the lowest one first, uint8 (H, W, 3), without a legend.

    Memory:
        About 60 bytes per pixel of the picture (160 MB at most), and the memory of the layers.
    """
    image = Image.fromarray(picture.rgb)
    for layer in layers:
        layer.paint(image, picture.size_l0)
    return np.asarray(image)


def _paste_tiles(layer: TileLayer, image: Image.Image, size_l0: Size) -> None:
    """Pastes the colours of tiles with their opacities."""
    boxes = _tile_boxes(layer.coords_l0, layer.tile_size_l0, image.size, size_l0)
    pixels = layer.pixels(boxes, image.size)
    colors = Image.fromarray(np.ascontiguousarray(pixels.colors))
    mask = Image.fromarray(np.ascontiguousarray(pixels.alpha))
    image.paste(colors, (0, 0), mask)


def _smooth_resize(mask: MaskArray | PackedArray, size: Size) -> npt.NDArray[np.uint8]:
    """Mask at another size with smooth edges: (H, W), 0 to 255, with the border at 127.5."""
    pixels = mask.unpacked() if isinstance(mask, PackedArray) else mask
    growth = max(1.0, size[0] / mask.shape[1], size[1] / mask.shape[0])
    resampling = Image.Resampling.BILINEAR if growth > 1 else Image.Resampling.BOX
    image = Image.fromarray(pixels).convert("L").resize(size, resampling)
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
    """Layers of the overlay: passed tissue is unchanged, other areas lighter, the largest first.

    What a check only shows has its colour over the tissue. Stripes mark tissue that a check did
    not judge.
    """
    use = result.mask_use
    num_px = max(1, use.size)
    glass_checks = {
        check.name
        for check in result.pipeline.checks
        if check.removes_glass or check.fills
    }
    # packed, so that one mask is in memory when the layers are painted one by one
    removed: dict[str, PackedArray] = {}
    counts: dict[str, int] = {}
    for name, mask in result.masks.items():
        if name not in glass_checks and name not in result.shown:
            area = mask & ~use
            counts[name] = int(area.sum())
            removed[name] = PackedArray.of(area)
    layers: list[Layer] = [Tint(~use, color=(255, 255, 255), opacity=0.5)]
    for name in sorted(counts, key=lambda name: -counts[name]):
        if counts[name]:
            words = name.replace("_", " ")
            label = f"{words}, {counts[name] / num_px:.2%} of the slide"
            layers.append(Tint(removed[name], label, result.colors[name]))
    for name in sorted(result.shown & result.masks.keys()):
        area = result.masks[name] & use
        if area.any():
            words = name.replace("_", " ")
            label = f"{words} (only shown), {area.mean():.2%} of the slide"
            packed = PackedArray.of(area)
            layers.append(Tint(packed, label, result.colors[name], opacity=0.35))
    unjudged = result.unjudged_tissue & use
    if unjudged.any():
        names = [n for n, area in result.unjudged.items() if (area & use).any()]
        label = f"not judged ({', '.join(names)}), {unjudged.mean():.2%} of the slide"
        layers.append(Stripes(unjudged, label.replace("_", " ")))
    noun = "tissue without artefacts" if removed else "tissue"
    layers.append(Outline(use, f"{noun}, {use.mean():.1%} of the slide"))
    for action, words in (("keep", "kept by hand"), ("remove", "removed by hand")):
        edits = [edit for edit in result.edits if edit.action == action]
        if edits:
            areas = edit_masks(edits, result.frame)
            mask = areas.kept(*areas.keep) | areas.removed(*areas.remove)
            label = f"{words}, {counted(len(edits), 'area')}"
            layers.append(Outline(mask, label, EDIT_COLORS[action], width=2.0))
    return layers
