"""Synthetic slides: one of arrays, pyramids whose px tell their position, and an H&E-like slide.

The last two are real TIFF files that every reader opens; nothing of them comes from a real slide.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import simplejpeg
import tifffile
from PIL import Image
from scipy import ndimage

from thinsection.slide import Slide
from thinsection.types import Level, Mpp, RgbArray, Size

_UM_PER_CM = 10_000.0
_STRIP_ROWS = 32
_APERIO = "Aperio Image Library v12.0.0"
_QUALITY = 80  # of JPEG
_LOSSLESS = (
    "webp",
    34927,
    "jpegxl",
    52546,
)  # are written so; by number: older codes of these
_TEXTURE_PX = 1024  # period of the H&E-like texture
_MASK_PX = (
    16  # level-0 px of one px of the tissue mask: borders are whole px down to 16x
)
_WHITE = (243, 242, 244)


class ArraySlide(Slide):
    """A slide whose levels are arrays, uint8 (H, W, 3), finest first: exact px without a file.

    `name` is its `slide_path`, `segment` the announced storage tile of every level.
    """

    reader = "array"

    def __init__(
        self,
        levels: Sequence[RgbArray],
        *,
        slide_mpp: Mpp | None = (0.5, 0.5),
        name: str = "array.svs",
        segment: Size | None = None,
    ) -> None:
        self._arrays, (height, width) = tuple(levels), levels[0].shape[:2]
        described = []
        for index, (h, w) in enumerate(pixels.shape[:2] for pixels in levels):
            down = (width / w + height / h) / 2
            described.append(
                Level(index=index, size=(w, h), downsample=down, segment=segment)
            )
        super().__init__(name, described, slide_mpp=slide_mpp)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        (x, y), (height, width) = origin_lv, out.shape[:2]
        out[:] = self._arrays[level][y : y + height, x : x + width]


def position_pixels(size: Size) -> RgbArray:
    """An image (H, W, 3) whose value is a function of (x, y): every misplaced px shows."""
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    return np.stack(
        [x % 251, y % 241, (x // 16 * 7 + y // 16 * 13) % 256], axis=2
    ).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class PyramidKind:
    """How a synthetic pyramid is stored.

    `compression` is tifffile's name or number: 'jpeg', 'lzw', 'deflate', 'zstd', 'webp', 'jpegxl'
    (both lossless), 'jpeg2000' (lossless, with Aperio's code, which OpenSlide reads with `aperio`;
    with `ycbcr_2000` as Y, Cb and Cr), None.
    """

    downsamples: tuple[int, ...] = (1, 4)
    tile: tuple[int, int] | None = (
        256,
        256,
    )  # (height, width), multiples of 16; None: strips
    compression: str | int | None = "jpeg"
    ycbcr: bool = True  # JPEG as YCbCr 4:2:0 in place of RGB
    ycbcr_2000: bool = False  # Aperio's code 33003 in place of 33005
    differences: bool = False  # of neighbours are stored: TIFF's predictor 2
    jpeg_tables: bool = (
        False  # once per level, and abbreviated YCbCr tiles, as scanners write them
    )
    mpp: Mpp | None = (
        0.5,
        0.5,
    )  # (x, y) µm/px, in the resolution tags; None writes none
    orientation: int = 1  # of TIFF's tag 274, in every page; 1 writes none
    aperio: bool = (
        False  # an Aperio description in place of the tags (its one MPP is mpp[0])
    )


def write_pyramid(
    path: Path, size: Size, kind: PyramidKind | None = None
) -> list[RgbArray]:
    """Writes levels of `position_pixels` and returns them. Memory: all; for small slides."""
    kind = kind or PyramidKind()
    sizes = [
        (max(1, size[0] // down), max(1, size[1] // down)) for down in kind.downsamples
    ]
    levels = [position_pixels(level_size) for level_size in sizes]
    write_levels(path, levels, kind)
    return levels


def write_levels(path: Path, levels: Sequence[RgbArray], kind: PyramidKind) -> None:
    """Writes these levels, finest first, one for each downsample of the kind."""
    size = levels[0].shape[1], levels[0].shape[0]
    with tifffile.TiffWriter(path, bigtiff=False) as writer:
        for index, pixels in enumerate(levels):
            options = _options(kind, size, index)
            is_ycbcr = kind.ycbcr if kind.compression == "jpeg" else kind.ycbcr_2000
            stored: Any = _to_ycbcr(pixels) if is_ycbcr else pixels
            if kind.jpeg_tables and kind.tile is not None:
                split = [_split_jpeg(tile) for tile in _tiles(pixels, kind.tile)]
                options |= {"jpegtables": split[0][0]}
                stored = (image for _, image in split)
            elif kind.compression == "jpeg2000":
                stored = _jpeg2000_segments(stored, kind.tile)
            writer.write(stored, shape=pixels.shape, dtype=np.uint8, **options)


def _tiles(pixels: RgbArray, tile: tuple[int, int]) -> Iterator[RgbArray]:
    """Tiles of (height, width), row by row; the border is padded with black."""
    (rows, columns), (height, width) = tile, pixels.shape[:2]
    padded = np.pad(pixels, ((0, -height % rows), (0, -width % columns), (0, 0)))
    for top, left in product(range(0, height, rows), range(0, width, columns)):
        yield np.ascontiguousarray(padded[top : top + rows, left : left + columns])


def _jpeg2000_segments(
    pixels: RgbArray, tile: tuple[int, int] | None
) -> Iterator[bytes]:
    strips = (
        pixels[top : top + _STRIP_ROWS] for top in range(0, len(pixels), _STRIP_ROWS)
    )
    for block in strips if tile is None else _tiles(pixels, tile):
        yield bytes(
            imagecodecs.jpeg2k_encode(block, level=0, codecformat="j2k", mct=False)
        )


def _split_jpeg(pixels: RgbArray) -> tuple[bytes, bytes]:
    """A JPEG as (tables, abbreviated image): the DQT and DHT segments apart from the rest."""
    data = simplejpeg.encode_jpeg(pixels, quality=_QUALITY, colorsubsampling="420")
    tables, rest, at = b"\xff\xd8", b"\xff\xd8", 2
    while data[at + 1] != 0xDA:  # SOS: entropy-coded data follow
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        is_table = data[at + 1] in (0xDB, 0xC4)
        tables, rest = (
            tables + data[at:end] * is_table,
            rest + data[at:end] * (not is_table),
        )
        at = end
    return tables + b"\xff\xd9", rest + data[at:]


def _to_ycbcr(pixels: RgbArray) -> RgbArray:
    """JPEG's YCbCr, which tifffile stores as it comes."""
    return np.asarray(Image.fromarray(pixels).convert("YCbCr"))


def _options(kind: PyramidKind, size: Size, index: int) -> dict[str, Any]:
    """Of `TiffWriter.write`, for the level of that index."""
    compression = {"jpeg2000": 33003 if kind.ycbcr_2000 else 33005}  # Aperio's codes
    options: dict[str, Any] = {
        "metadata": None,
        "software": False,
        "photometric": "rgb",
    }
    options |= {"compression": compression.get(str(kind.compression), kind.compression)}
    options |= {"subfiletype": int(index > 0), "predictor": kind.differences or None}
    if kind.orientation != 1:
        options["extratags"] = [(274, "H", 1, kind.orientation, True)]
    if kind.compression in _LOSSLESS:
        options["compressionargs"] = {"lossless": True}
    if kind.compression == "jpeg":
        options["compressionargs"] = {"level": _QUALITY}
        options |= {"photometric": "ycbcr", "subsampling": (2, 2)} if kind.ycbcr else {}
    options |= {"tile": kind.tile} if kind.tile else {"rowsperstrip": _STRIP_ROWS}
    if kind.aperio:
        mpp = "" if kind.mpp is None else f"|MPP = {kind.mpp[0]}"
        about = f"{size[0]}x{size[1]} synthetic|AppMag = 20{mpp}"
        options["description"] = f"{_APERIO}\r\n{about}"
    elif kind.mpp is not None:
        um = [mpp * kind.downsamples[index] for mpp in kind.mpp]
        pixels_per_cm = (_UM_PER_CM / um[0], _UM_PER_CM / um[1])
        options |= {"resolution": pixels_per_cm, "resolutionunit": "CENTIMETER"}
    return options


def write_he_slide(
    path: Path,
    size: Size,
    *,
    seed: int = 0,
    mpp: float = 0.5,
    downsamples: Sequence[int] = (1, 4, 16),
    white: int | None = None,
) -> None:
    """Writes an H&E-like slide: pink and purple tissue with nuclei in several fragments, on white.

    An Aperio-like pyramid (.svs or .tif) of 256 px JPEG tiles, YCbCr 4:2:0, with MPP and AppMag.
    `seed` decides texture and fragments, `mpp` is of level 0, `downsamples` are powers of two up to
    16, `white` is the value of the background (None: a scanner's light gray). Memory: about 150
    MiB, whatever the size; tiles are generated while they are written.
    """
    rng = np.random.default_rng(seed)
    texture, mask = he_texture(rng), tissue_fragments(size, rng)
    background = _WHITE if white is None else (white, white, white)
    kind = PyramidKind(downsamples=tuple(downsamples), mpp=None)
    extent = f"{size[0]}x{size[1]}"
    image = f"{extent} [0,0 {extent}] (256x256) JPEG/YCC Q={_QUALITY}"
    description = f"{_APERIO}\r\n{image}|AppMag = {10 / mpp:g}|MPP = {mpp:g}"
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for index, down in enumerate(downsamples):
            width, height = size[0] // down, size[1] // down
            tiles = _he_tiles(texture, mask, down, (width, height), background)
            options = _options(kind, size, index) | {"shape": (height, width, 3)}
            about = description if index == 0 else None
            writer.write(tiles, dtype=np.uint8, description=about, **options)


def he_texture(rng: np.random.Generator) -> RgbArray:
    """A periodic H&E-like texture, uint8 (1024, 1024, 3): stroma, epithelium, nuclei."""
    stroma, epithelium, nucleus = np.array(
        [(219, 150, 190), (176, 112, 176), (88, 58, 130)]
    )
    zones, fibres = _smooth(rng, 60.0), _smooth(rng, 3.0)
    mix = np.clip(zones * 0.8 + 0.5, 0, 1)[..., None]
    color = stroma * (1 - mix) + epithelium * mix
    color += fibres[..., None] * np.array((9.0, 13.0, 8.0))
    spots = np.zeros(zones.shape, dtype=np.float32)
    chance = rng.random(spots.size // 900)
    rows, columns = rng.integers(0, _TEXTURE_PX, (len(chance), 2)).T
    kept = (zones[rows, columns] > 0) | (chance < 0.35)
    spots[rows[kept], columns[kept]] = 1
    blurred = ndimage.gaussian_filter(spots, 4.0, mode="wrap")
    inside = np.clip((blurred * 2 * np.pi * 16 - 0.35) * 4, 0, 1)[..., None]
    color = color * (1 - inside) + (nucleus + fibres[..., None] * 8) * inside
    color += rng.normal(0, 3, color.shape)
    return np.asarray(np.clip(np.rint(color), 0, 255).astype(np.uint8))


def _smooth(rng: np.random.Generator, sigma: float) -> np.ndarray:
    noise = rng.normal(size=(_TEXTURE_PX, _TEXTURE_PX)).astype(np.float32)
    field = ndimage.gaussian_filter(noise, sigma, mode="wrap")
    return np.asarray(field / field.std())


def tissue_fragments(size: Size, rng: np.random.Generator) -> np.ndarray:
    """Bool (ceil(H / 16), ceil(W / 16)): a few ragged fragments with holes, about a third of it."""
    height, width = -(-size[1] // _MASK_PX), -(-size[0] // _MASK_PX)
    y, x = np.mgrid[0:height, 0:width]
    rough = ndimage.gaussian_filter(
        rng.normal(size=(height, width)), max(height, width) / 60
    )
    rough = rough / (rough.std() or 1.0)
    mask = np.zeros((height, width), dtype=bool)
    for center_x, center_y, radius in (
        (0.3, 0.35, 0.26),
        (0.7, 0.6, 0.28),
        (0.72, 0.2, 0.12),
    ):
        dx, dy = (x - center_x * width) / width, (y - center_y * height) / height
        mask |= np.hypot(dx, dy) + rough * 0.035 < radius
    holes = ndimage.gaussian_filter(
        rng.normal(size=(height, width)), max(height, width) / 90
    )
    return np.asarray(mask & (holes < 1.6 * holes.std()))


def _he_tiles(
    texture: RgbArray,
    mask: np.ndarray,
    down: int,
    level_size: Size,
    background: tuple[int, ...],
) -> Iterator[RgbArray]:
    """Tiles of one level, row by row, padded to 256 px."""
    edge, cell = _TEXTURE_PX // down, _MASK_PX // down
    small = (
        texture.reshape(edge, down, edge, down, 3).mean(axis=(1, 3)).astype(np.uint8)
    )
    period = np.tile(small, (256 // edge + 2, 256 // edge + 2, 1))
    for y, x in product(range(0, level_size[1], 256), range(0, level_size[0], 256)):
        piece = mask[y // cell :, x // cell :][: -(-256 // cell), : -(-256 // cell)]
        inside = piece.repeat(cell, axis=0).repeat(cell, axis=1)[:256, :256]
        tile, (rows, columns) = (
            np.full((256, 256, 3), background, dtype=np.uint8),
            inside.shape,
        )
        source = period[y % edge :, x % edge :][:rows, :columns]
        np.copyto(tile[:rows, :columns], source, where=inside[..., None])
        yield _to_ycbcr(tile)
