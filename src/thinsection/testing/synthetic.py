"""Synthetic slides: pyramids whose px are a function of position, and an H&E-like slide.

Both are real TIFF files that every reader opens; nothing of them comes from a real slide.
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

from thinsection.testing.array_slide import position_pixels
from thinsection.types import Mpp, RgbArray, Size

_UM_PER_CM = 10_000.0
_STRIP_ROWS = 32
_APERIO_JPEG2000_RGB = 33005  # TIFF compression code
_TEXTURE_PX = 1024  # period of the H&E-like texture
_MASK_PX = 16  # level-0 px of one px of the tissue mask: borders are whole px down to 16x
_WHITE = (243, 242, 244)
Color = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class PyramidKind:
    """How a synthetic pyramid is stored.

    Attributes:
        tile: (height, width) of TIFF tiles, multiples of 16; None writes strips of 32 rows.
        compression: tifffile's name: 'jpeg', 'lzw', 'deflate', 'jpeg2000' (lossless, with
            Aperio's code, which OpenSlide reads with `aperio`), None.
        ycbcr: JPEG as YCbCr 4:2:0 in place of RGB.
        jpeg_tables: tables once per level and abbreviated YCbCr tiles, as scanners write them.
        mpp: (x, y) µm/px written to the resolution tags; None writes none.
        aperio: an Aperio description in place of the tags (its one MPP is mpp[0]).
    """

    downsamples: tuple[int, ...] = (1, 4)
    tile: tuple[int, int] | None = (256, 256)
    compression: str | None = "jpeg"
    ycbcr: bool = True
    jpeg_tables: bool = False
    quality: int = 80
    mpp: Mpp | None = (0.5, 0.5)
    aperio: bool = False


def write_pyramid(path: Path, size: Size, kind: PyramidKind | None = None) -> list[RgbArray]:
    """Writes a pyramid whose px are `position_pixels` of each level, and returns the levels.

    Memory: all levels; for small slides.
    """
    kind = kind or PyramidKind()
    width, height = size
    sizes = [(max(1, width // down), max(1, height // down)) for down in kind.downsamples]
    levels = [position_pixels(level_size) for level_size in sizes]
    with tifffile.TiffWriter(path, bigtiff=False) as writer:
        for index, pixels in enumerate(levels):
            options = _options(kind, size, index)
            stored: RgbArray | Iterator[bytes] = pixels
            if kind.jpeg_tables and kind.tile is not None:
                encoded = [_jpeg(tile, kind.quality) for tile in _tiles(pixels, kind.tile)]
                options |= {"jpegtables": _split_jpeg(encoded[0])[0]}
                stored = (_split_jpeg(data)[1] for data in encoded)
            elif kind.compression == "jpeg2000":
                stored = _jpeg2000_segments(pixels, kind.tile)
            elif kind.compression == "jpeg" and kind.ycbcr:
                stored = _to_ycbcr(pixels)
            writer.write(stored, shape=pixels.shape, dtype=np.uint8, **options)
    return levels


def _tiles(pixels: RgbArray, tile: tuple[int, int]) -> Iterator[RgbArray]:
    """Tiles of (height, width), row by row; the border is padded with black."""
    rows, columns = tile
    height, width = pixels.shape[:2]
    padded = np.pad(pixels, ((0, -height % rows), (0, -width % columns), (0, 0)))
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            yield np.ascontiguousarray(padded[top : top + rows, left : left + columns])


def _jpeg2000_segments(pixels: RgbArray, tile: tuple[int, int] | None) -> Iterator[bytes]:
    strips = (pixels[top : top + _STRIP_ROWS] for top in range(0, len(pixels), _STRIP_ROWS))
    for block in strips if tile is None else _tiles(pixels, tile):
        yield bytes(imagecodecs.jpeg2k_encode(block, level=0, codecformat="j2k", mct=False))


def _jpeg(block: RgbArray, quality: int) -> bytes:
    return bytes(simplejpeg.encode_jpeg(block, quality=quality, colorsubsampling="420"))


def _split_jpeg(data: bytes) -> tuple[bytes, bytes]:
    """(tables, abbreviated image): the DQT and DHT segments apart from everything else."""
    soi, eoi = b"\xff\xd8", b"\xff\xd9"
    tables, rest, at = [soi], [soi], 2
    while data[at + 1] != 0xDA:  # SOS: entropy-coded data follow
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        (tables if data[at + 1] in (0xDB, 0xC4) else rest).append(data[at:end])
        at = end
    return b"".join([*tables, eoi]), b"".join([*rest, data[at:]])


def _to_ycbcr(pixels: RgbArray) -> RgbArray:
    """JPEG's YCbCr, which tifffile stores as it comes."""
    return np.asarray(Image.fromarray(pixels).convert("YCbCr"))


def _options(kind: PyramidKind, size: Size, index: int) -> dict[str, Any]:
    """Of `TiffWriter.write`, for the level of that index."""
    jpeg2000 = kind.compression == "jpeg2000"
    options: dict[str, Any] = {
        **{"metadata": None, "software": False, "photometric": "rgb"},
        "compression": _APERIO_JPEG2000_RGB if jpeg2000 else kind.compression,
        "subfiletype": int(index > 0),
    }
    if kind.compression == "jpeg":
        options["compressionargs"] = {"level": kind.quality}
        if kind.ycbcr:
            options |= {"photometric": "ycbcr", "subsampling": (2, 2)}
    options |= {"tile": kind.tile} if kind.tile else {"rowsperstrip": _STRIP_ROWS}
    if kind.aperio:
        mpp = "" if kind.mpp is None else f"|MPP = {kind.mpp[0]}"
        about = f"{size[0]}x{size[1]} synthetic|AppMag = 20{mpp}"
        options["description"] = f"Aperio Image Library v12.0.0\r\n{about}"
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
    quality: int = 80,
    white: int | None = None,
) -> None:
    """Writes an H&E-like slide: pink and purple tissue with nuclei in several fragments, on white.

    An Aperio-like pyramid of 256 px JPEG tiles, YCbCr 4:2:0, with MPP and AppMag.

    Args:
        path: a .svs or .tif file.
        size: (width, height) of level 0.
        seed: of texture and fragments.
        mpp: µm per level-0 px.
        downsamples: of the levels, powers of two up to 16.
        quality: of JPEG.
        white: value of the background; None takes a scanner's usual light gray.

    Memory: about 150 MiB, whatever the size; tiles are generated while they are written.
    """
    rng = np.random.default_rng(seed)
    texture = he_texture(rng)
    mask = tissue_fragments(size, rng)
    background = _WHITE if white is None else (white, white, white)
    description = (
        f"Aperio Image Library v12.0.0\r\n{size[0]}x{size[1]} [0,0 {size[0]}x{size[1]}] (256x256) "
        f"JPEG/YCC Q={quality}|AppMag = {10 / mpp:g}|MPP = {mpp:g}"
    )
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for index, down in enumerate(downsamples):
            level_size = (size[0] // down, size[1] // down)
            writer.write(
                _he_tiles(texture, mask, down, level_size, background),
                shape=(level_size[1], level_size[0], 3),
                dtype=np.uint8,
                tile=(256, 256),
                photometric="ycbcr",
                subsampling=(2, 2),
                compression="jpeg",
                compressionargs={"level": quality},
                description=description if index == 0 else None,
                metadata=None,
                software=False,
                subfiletype=int(index > 0),
            )


def he_texture(rng: np.random.Generator, edge: int = _TEXTURE_PX) -> RgbArray:
    """A periodic H&E-like texture, uint8 (edge, edge, 3): stroma, epithelium, nuclei."""
    stroma, epithelium, nucleus = ((219, 150, 190), (176, 112, 176), (88, 58, 130))
    zones = _smooth(rng, edge, 60.0)
    fibres = _smooth(rng, edge, 3.0)
    mix = np.clip(zones * 0.8 + 0.5, 0, 1)[..., None]
    color = np.array(stroma) * (1 - mix) + np.array(epithelium) * mix
    color += fibres[..., None] * np.array((9.0, 13.0, 8.0))
    spots = np.zeros((edge, edge), dtype=bool)
    chance = rng.random(edge * edge // 900)
    rows, columns = rng.integers(0, edge, (len(chance), 2)).T
    kept = (zones[rows, columns] > 0) | (chance < 0.35)
    spots[rows[kept], columns[kept]] = True
    blurred = ndimage.gaussian_filter(spots.astype(np.float32), 4.0, mode="wrap")
    inside = np.clip((blurred * 2 * np.pi * 16 - 0.35) * 4, 0, 1)[..., None]
    color = color * (1 - inside) + (np.array(nucleus) + fibres[..., None] * 8) * inside
    color += rng.normal(0, 3, color.shape)
    return np.asarray(np.clip(np.rint(color), 0, 255).astype(np.uint8))


def _smooth(rng: np.random.Generator, edge: int, sigma: float) -> np.ndarray:
    noise = rng.normal(size=(edge, edge)).astype(np.float32)
    field = ndimage.gaussian_filter(noise, sigma, mode="wrap")
    return np.asarray(field / field.std())


def tissue_fragments(size: Size, rng: np.random.Generator) -> np.ndarray:
    """Bool (ceil(H / 16), ceil(W / 16)): a few ragged fragments with holes, about a third of it."""
    height, width = -(-size[1] // _MASK_PX), -(-size[0] // _MASK_PX)
    y, x = np.mgrid[0:height, 0:width]
    rough = ndimage.gaussian_filter(rng.normal(size=(height, width)), max(height, width) / 60)
    rough = rough / rough.std() if rough.std() > 0 else rough
    mask = np.zeros((height, width), dtype=bool)
    for center_x, center_y, radius in ((0.3, 0.35, 0.26), (0.7, 0.6, 0.28), (0.72, 0.2, 0.12)):
        dx, dy = (x - center_x * width) / width, (y - center_y * height) / height
        mask |= np.hypot(dx, dy) + rough * 0.035 < radius
    holes = ndimage.gaussian_filter(rng.normal(size=(height, width)), max(height, width) / 90)
    return np.asarray(mask & (holes < 1.6 * holes.std()))


def _he_tiles(
    texture: RgbArray, mask: np.ndarray, down: int, level_size: Size, background: Color
) -> Iterator[RgbArray]:
    """Tiles of one level, row by row, padded to 256 px."""
    edge, cell = _TEXTURE_PX // down, _MASK_PX // down
    small = texture.reshape(edge, down, edge, down, 3).mean(axis=(1, 3)).astype(np.uint8)
    period = np.tile(small, (256 // edge + 2, 256 // edge + 2, 1))
    for y, x in product(range(0, level_size[1], 256), range(0, level_size[0], 256)):
        top, left, count = y // cell, x // cell, -(-256 // cell)
        piece = mask[top : top + count, left : left + count]
        inside = piece.repeat(cell, axis=0).repeat(cell, axis=1)[:256, :256]
        tile = np.full((256, 256, 3), background, dtype=np.uint8)
        rows, columns = inside.shape
        source = period[y % edge :, x % edge :][:rows, :columns]
        np.copyto(tile[:rows, :columns], source, where=inside[..., None])
        yield _to_ycbcr(tile)
