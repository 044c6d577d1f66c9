"""Pictures of whole slides: what was found, drawn over the tissue, with scale bar and legend.

One way for the overview, quality control, heatmaps and notebooks: a `Picture` of at most
`LONG_SIDE` px and layers, of which each knows how to paint itself, become one image. Below it a
strip says how long a millimetre is and what the colours mean; the px above it are the slide's.
"""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from thinsection.errors import StoreError, rewording
from thinsection.files.atomic import atomic_path
from thinsection.qc.tissue import Color
from thinsection.slide import Slide, read_resized
from thinsection.slide.geometry import best_level
from thinsection.store.ledger import SlideLedger
from thinsection.types import CoordsL0, MaskArray, Mpp, RgbArray, Size

Numbers = npt.NDArray[np.floating]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Boxes = npt.NDArray[np.int64]  # (N, 4): left, top, right, bottom, px
LONG_SIDE = 1600  # px of a picture, never more than the slide has
PICTURE = "picture"  # how the names of stored pictures begin
OUTLINE: Color = (0, 110, 72)
TILE: Color = (32, 96, 200)
_ENOUGH, _GIANT_PX = 1000, 50_000_000  # px of a thumbnail's long side, px of a level
_QUALITY = 90  # of stored pictures
_BAND_ROWS = 128  # of a picture that are computed together
_LEAST_EDGE = 6  # px of a tile below which borders would be all that is seen
_INK, _PAPER = (29, 39, 51), (255, 255, 255)
_COLORMAPS = {  # nine steps each, of matplotlib's maps of these names
    "viridis": "440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725",
    "magma": "000004 1d1147 51127c 832681 b73779 e75263 fc8961 fec488 fcfdbf",
    "coolwarm": "3b4cc0 6282ea 8db0fe b9d0f9 dddcdc f5c4ac f4987a dd5f4b b40426",
    "turbo": "30123b 466be3 28bceb 32f298 a4fc3c eecf3a fb7e21 d02f05 7a0403",
}
COLORMAPS = tuple(_COLORMAPS)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A whole slide at a size that can be looked at."""

    rgb: RgbArray  # uint8 (H, W, 3)
    size_l0: Size
    slide_mpp: Mpp | None = None  # without it there is no scale bar

    @property
    def size(self) -> Size:
        """(width, height), px."""
        return self.rgb.shape[1], self.rgb.shape[0]


def slide_picture(slide: Slide, thumbnail: RgbArray | None = None) -> RgbArray:
    """The slide with `LONG_SIDE` px along its long side, or as many as it has, uint8 (H, W, 3).

    It is read from the fitting level, in strips, or made of a thumbnail that is large enough: of
    `_ENOUGH` px where that level is so large that to read it once more would cost seconds. By URL
    no finer level is fetched than the thumbnail was made of, and level 0 not once more: a picture
    of few px then.

    Memory: that of `read_resized`: 160 MiB and the picture, whatever the slide's size.

    Raises SlideReadError: the slide's pixels cannot be decoded.
    """
    shrink, enough = max(1.0, max(slide.size) / LONG_SIDE), LONG_SIDE
    if math.prod(best_level(slide.levels, shrink).size) > _GIANT_PX:
        enough = _ENOUGH
    if thumbnail is not None and slide.source is not None:
        made_of = best_level(slide.levels, max(slide.size) / max(thumbnail.shape[:2]))
        shrink = max(shrink, made_of.downsample)
        enough = enough if made_of.index else 0
    size = (
        max(1, round(slide.size[0] / shrink)),
        max(1, round(slide.size[1] / shrink)),
    )
    if thumbnail is None or max(thumbnail.shape[:2]) < min(enough, max(size)):
        return read_resized(slide, size)
    image = Image.fromarray(thumbnail)
    image.thumbnail(size, Image.Resampling.LANCZOS)
    return np.asarray(image)


def save_picture(path: Path, rgb: RgbArray) -> None:
    """Writes a picture of a slide as a JPEG, atomically."""
    with atomic_path(path) as tmp:
        Image.fromarray(rgb).save(tmp, format="JPEG", quality=_QUALITY)


def picture_files(folder: Path) -> tuple[Path, ...]:
    """The picture in a slide's folder, and the mask that it was stored with; empty without one.

    Folders of before have a thumbnail only.
    """
    places = [folder, *sorted(folder.glob("qc_*"))]
    for kind in (PICTURE, "thumbnail"):
        for path in (
            path for place in places for path in sorted(place.glob(f"{kind}*.jpg"))
        ):
            tissue = path.with_name(path.stem.replace(kind, "tissue") + ".png")
            masks = (
                tissue,
                *(path.with_name(f"mask_{name}.png") for name in ("kept", "use")),
            )
            return (path, *[mask for mask in masks if mask.is_file()][:1])
    return ()


def thumbnail_file(folder: Path) -> Path | None:
    """The smallest picture of the whole slide in its folder, whichever stage left it; or None."""
    for pattern in ("thumbnail*.jpg", f"{PICTURE}*.jpg", f"qc_*/{PICTURE}*.jpg"):
        found = sorted(folder.glob(pattern))
        if found:
            return found[0]
    return None


def open_picture(ledger: SlideLedger) -> Picture:
    """The stored picture of a slide of a results folder, to draw on.

    Raises StoreError: it has none, or it is damaged.
    """
    slide, files = ledger.slide, picture_files(ledger.path.parent)
    if not files or not slide.get("width"):
        raise StoreError(
            f"picture of {ledger.slide_id!r} must be there, got none; run it first"
        )
    readable = rewording(
        "picture must be readable", files[0], OSError, error=StoreError
    )
    with readable, Image.open(files[0]) as file:
        rgb = np.array(file.convert("RGB"))
    mpp = (slide["mpp_x"], slide["mpp_y"]) if slide.get("mpp_x") else None
    return Picture(rgb=rgb, size_l0=(slide["width"], slide["height"]), slide_mpp=mpp)


def read_mask(path: Path) -> MaskArray:
    """A mask that was stored as a picture, bool (H, W)."""
    with Image.open(path) as file:
        return np.asarray(file.convert("L")) > 0


@dataclass(frozen=True)
class Outline:
    """The smooth border of a mask (H, W) that shows the whole slide at any resolution."""

    mask: MaskArray
    label: str = ""
    color: Color = OUTLINE
    width: float = 3.0  # px

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws it, with a light rim so that it is seen on any stain."""
        if not self.mask.any():
            return
        field = np.pad(
            _smooth(self.mask, image.size), 1
        )  # tissue at the edge has a border too
        for top in range(0, image.height, _BAND_ROWS):
            band = field[top : top + _BAND_ROWS + 2].astype(np.float32)
            slope = np.hypot(*np.gradient(band))[1:-1, 1:-1]
            distance = np.abs(band[1:-1, 1:-1] - 127.5) / np.maximum(slope, 1e-3)
            rim = _PAPER, self.width + 2, 0.7
            for color, width, opacity in rim, (self.color, self.width, 1.0):
                _blend(
                    image,
                    color,
                    np.clip(width / 2 + 0.5 - distance, 0, 1) * opacity,
                    top,
                )


@dataclass(frozen=True)
class Tint:
    """A colour over a mask (H, W) that shows the whole slide at any resolution."""

    mask: MaskArray
    label: str = ""
    color: Color = OUTLINE
    opacity: float = 0.55

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws it."""
        alpha = _smooth(self.mask, image.size).astype(np.float32) * (self.opacity / 255)
        _blend(image, self.color, alpha)


@dataclass(frozen=True)
class Tiles:
    """Tiles as thin lines, lightly shaded; of very small ones only the shade."""

    coords_l0: CoordsL0
    tile_size_l0: Size
    label: str = ""
    color: Color = TILE

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws them; neighbours share a line."""
        boxes = _boxes(self.coords_l0, self.tile_size_l0, image.size, size_l0)
        lined = min(np.array(self.tile_size_l0) * image.size / size_l0) >= _LEAST_EDGE
        lines, shade = (Image.new("L", image.size, 0) for _ in range(2))
        draw_lines, draw_shade = ImageDraw.Draw(lines), ImageDraw.Draw(shade)
        for x0, y0, x1, y1 in boxes.tolist():
            draw_shade.rectangle((x0, y0, x1 - 1, y1 - 1), fill=20 if lined else 71)
            if lined:
                draw_lines.rectangle((x0, y0, x1, y1), outline=150)
        for opacity in (shade, lines):
            image.paste(self.color, (0, 0, *image.size), opacity)


@dataclass(frozen=True)
class Values:
    """A number per tile as a colour; overlapping tiles are averaged, NaN is left out."""

    coords_l0: CoordsL0
    tile_size_l0: Size
    values: Numbers  # (N,)
    label: str = ""
    colormap: str = "turbo"  # of `COLORMAPS`
    limits: tuple[float, float] | None = (
        None  # values of the first and last colour; None: theirs
    )
    opacity: float = 0.5

    @property
    def shown_limits(self) -> tuple[float, float]:
        """`limits`, or the least and the greatest value."""
        known = self.values[np.isfinite(self.values)]
        return self.limits or (
            (float(known.min()), float(known.max())) if len(known) else (0, 1)
        )

    @property
    def only_value(self) -> str:
        """What all tiles have in common, where there is no scale to show; '' where there is one."""
        if not np.isfinite(self.values).any():
            return "no value"
        low, high = self.shown_limits
        return f"{low:.3g}" if low == high else ""

    def paint(self, image: Image.Image, size_l0: Size) -> None:
        """Draws them. Memory: 40 bytes a px, and 100 a tile."""
        known = np.isfinite(self.values)
        boxes = _boxes(self.coords_l0[known], self.tile_size_l0, image.size, size_l0)
        total, count = (
            _box_sums(boxes, v, image.size) for v in (self.values[known], 1.0)
        )
        low, high = self.shown_limits
        mean = total / np.maximum(count, 1)
        colors = colorize((mean - low) / ((high - low) or 1.0), self.colormap)
        alpha = Image.fromarray(
            np.where(count > 0.5, round(255 * self.opacity), 0).astype("u1")
        )
        image.paste(Image.fromarray(colors), (0, 0), alpha)


Layer = (
    Outline | Tint | Tiles | Values
)  # what is drawn over a picture; the first one lowest
Part = tuple[
    str, int, str, Layer | None
]  # of the strip below: words, width of a sign, words


def colorize(shares: Numbers, colormap: str) -> npt.NDArray[np.uint8]:
    """Colours, uint8 (..., 3), of numbers in [0, 1]; what lies outside has the end's colour."""
    table = np.array(
        [list(bytes.fromhex(color)) for color in _COLORMAPS[colormap].split()]
    )
    at, all_256 = np.linspace(0, 1, len(table)), np.linspace(0, 1, 256)
    fine = np.stack([np.interp(all_256, at, column) for column in table.T], axis=1)
    return np.asarray(
        fine.round().astype(np.uint8)[(np.clip(shares, 0, 1) * 255).astype(np.uint8)]
    )


def paint(picture: Picture, layers: Sequence[Layer]) -> RgbArray:
    """The picture with the layers over it, first one lowest, uint8 (H, W, 3); no legend.

    Memory: about 60 bytes a px of the picture (160 MB at most), and what layers say.
    """
    image = Image.fromarray(picture.rgb)
    for layer in layers:
        layer.paint(image, picture.size_l0)
    return np.asarray(image)


def draw(picture: Picture, layers: Sequence[Layer], *, caption: str = "") -> RgbArray:
    """`paint`, and below it a strip with caption, scale bar, legend and colour bars.

    The strip's height depends on what it says; px above it are at their place on the slide.
    """
    painted, (width, height) = paint(picture, layers), picture.size
    size = min(26, max(12, round(max(width, height) / 60)))
    font, gap, line, x, y = (
        ImageFont.load_default(size),
        round(0.4 * size),
        2 * size,
        0,
        0,
    )
    strip = Image.new("RGB", (width, line * (2 + len(layers))), _PAPER)
    pen, parts = ImageDraw.Draw(strip), _strip_parts(picture, layers, size)
    if caption:
        text = _shortened(_ascii(caption), font, width - 4 * gap)
        pen.text((2 * gap, size // 2), text, fill=_INK, font=font)
        y = line
    for left, sign, right, layer in parts:
        first = round(font.getlength(left)) + gap * bool(left)
        wide = first + sign + gap + round(font.getlength(right)) + 3 * gap
        if x and x + wide > width - 2 * gap:
            x, y = 0, y + line
        at, top = x + 2 * gap, y + size // 2
        pen.text((at, top), left, fill=_INK, font=font)
        _sign(pen, (at + first, top + size // 6, at + first + sign, top + size), layer)
        pen.text((at + first + sign + gap, top), right, fill=_INK, font=font)
        x += wide
    return np.concatenate([painted, np.asarray(strip)[: y + line if parts else y]])


def write_drawing(
    path: Path, picture: Picture, layers: Sequence[Layer], *, caption: str = ""
) -> None:
    """Writes `draw` as a PNG, atomically."""
    image = Image.fromarray(draw(picture, layers, caption=caption))
    with atomic_path(path) as tmp:
        image.save(tmp, format="PNG", compress_level=4)


def _ascii(text: str) -> str:
    """Text without accents and other signs: the font that comes with Pillow knows ASCII."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _shortened(text: str, font: Font, width: int) -> str:
    """Text that is at most `width` px long; a longer one ends in dots."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


def _strip_parts(picture: Picture, layers: Sequence[Layer], size: int) -> list[Part]:
    """What stands below a picture: words, width of a sign, words; the bar, then the legend."""
    parts: list[Part] = []
    if picture.slide_mpp is not None:
        px_mm = picture.size[0] / (picture.size_l0[0] * picture.slide_mpp[0] / 1000)
        length = nice_length(0.18 * picture.size[0] / px_mm)
        parts.append(("", round(length * px_mm), f"{length:g} mm", None))
    for layer in (one for one in layers if one.label):
        label = _ascii(layer.label)
        if isinstance(layer, Values) and layer.only_value:
            words = f"{label}: {layer.only_value}"
            parts.append(("", round(1.1 * size), words, layer))
        elif isinstance(layer, Values):
            low, high = layer.shown_limits
            parts.append((f"{label}  {low:.3g}", 7 * size, f"{high:.3g}", layer))
        else:
            parts.append(("", round(1.1 * size), label, layer))
    return parts


def _sign(
    pen: ImageDraw.ImageDraw, box: tuple[int, int, int, int], layer: Layer | None
) -> None:
    """The sign of a layer in the legend; without one the scale bar."""
    x0, y0, x1, y1 = box
    if layer is None:
        pen.line((x0, y1 - 3, x1, y1 - 3), fill=_INK, width=4)
        for x in (x0, x1):
            pen.line((x, y0 + 2, x, y1), fill=_INK, width=2)
    elif isinstance(layer, Values):
        shares = np.linspace(0, 0 if layer.only_value else 1, x1 - x0)
        colors = colorize(shares, layer.colormap).tolist()
        for x, color in enumerate(colors, x0):
            pen.line((x, y0, x, y1), fill=_over_white(color, max(layer.opacity, 0.8)))
    else:
        fill = layer.opacity if isinstance(layer, Tint) else 0.1
        width = 3 if isinstance(layer, Outline) else int(isinstance(layer, Tiles))
        pen.rectangle(
            box, fill=_over_white(layer.color, fill), outline=layer.color, width=width
        )


def nice_length(most: float) -> float:
    """The largest 1, 2 or 5 times a power of ten that is not more."""
    power = 10.0 ** np.floor(np.log10(most))
    return float(
        round(max(f for f in (1, 2, 5) if f * power <= most * (1 + 1e-9)) * power, 12)
    )


def _smooth(mask: MaskArray, size: Size) -> npt.NDArray[np.uint8]:
    """The mask at another size, without steps: (H, W), 0 to 255, its border at 127.5."""
    grown = max(1.0, size[0] / mask.shape[1], size[1] / mask.shape[0])
    how = Image.Resampling.BILINEAR if grown > 1 else Image.Resampling.BOX
    image = Image.fromarray(mask).convert("L").resize(size, how)
    return np.asarray(image.filter(ImageFilter.GaussianBlur(0.9 * grown)))


def _blend(image: Image.Image, color: Color, alpha: Numbers, top: int = 0) -> None:
    """Paints rows from `top` on, in the opacity of each px."""
    opacity = Image.fromarray((alpha * 255 + 0.5).astype(np.uint8))
    image.paste(color, (0, top, image.width, top + opacity.height), opacity)


def _over_white(color: Sequence[int], opacity: float) -> tuple[int, ...]:
    return tuple(round(255 - (255 - value) * opacity) for value in color)


def _boxes(coords_l0: CoordsL0, tile_size_l0: Size, size: Size, size_l0: Size) -> Boxes:
    """(N, 4): left, top, right, bottom of tiles in px of a picture, at least one px each."""
    scale = np.array(size) / np.array(size_l0)
    first = np.rint(coords_l0 * scale)
    end = np.maximum(np.rint((coords_l0 + np.array(tile_size_l0)) * scale), first + 1)
    return np.hstack([first, end]).astype(np.int64)


def _box_sums(
    boxes: Boxes, values: Numbers | float, size: Size
) -> npt.NDArray[np.float64]:
    """Per px, the sum of the values of the boxes that it lies in: an integral of their corners."""
    width, height = size
    corners = np.zeros((height + 1, width + 1))
    x0, x1 = np.clip(boxes[:, [0, 2]].T, 0, width)
    y0, y1 = np.clip(boxes[:, [1, 3]].T, 0, height)
    for y, x, sign in ((y0, x0, 1), (y0, x1, -1), (y1, x0, -1), (y1, x1, 1)):
        np.add.at(corners, (y, x), sign * np.asarray(values))
    return np.asarray(corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1])
