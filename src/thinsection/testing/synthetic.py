"""Synthetic slides: one of arrays, pyramids whose px tell their position, and an H&E-like slide.

The last two are real TIFF files that every reader opens; nothing of them comes from a real slide.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt
import simplejpeg
import tifffile
from PIL import Image
from scipy import fft, ndimage

from thinsection.slide import Slide
from thinsection.types import Level, MaskArray, Mpp, RgbArray, Size

_UM_PER_CM = 10_000.0
_STRIP_ROWS = 32
_TILE_PX = 256  # of the H&E-like slide
_APERIO = "Aperio Image Library v12.0.0"
_JPEG_QUALITY = 80
# codecs that are told to lose nothing; 34927 and 52546 are older codes of the two
_LOSSLESS = ("webp", 34927, "jpegxl", 52546)
# Aperio's codes of JPEG 2000: pixels as RGB, or as Y, Cb and Cr
_APERIO_2000_RGB = 33005
_APERIO_2000_YCBCR = 33003
_TEXTURE_PX = 1024  # period of the H&E-like texture
# Level-0 px of one px of the tissue mask: its borders are whole px down to downsample 16.
_MASK_PX = 16
_WHITE = (243, 242, 244)
_STROMA = np.array((219, 150, 190))
_EPITHELIUM = np.array((176, 112, 176))
_NUCLEUS = np.array((88, 58, 130))
# (center x, center y, radius) of the tissue fragments, as fractions of the slide
_FRAGMENTS = ((0.3, 0.35, 0.26), (0.7, 0.6, 0.28), (0.72, 0.2, 0.12))


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
        self._arrays = tuple(levels)
        height, width = levels[0].shape[:2]
        described = []
        for index, pixels in enumerate(levels):
            h, w = pixels.shape[:2]
            downsample = (width / w + height / h) / 2
            described.append(
                Level(index=index, size=(w, h), downsample=downsample, segment=segment)
            )
        super().__init__(name, described, slide_mpp=slide_mpp)

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles the slide with its arrays, since it has no file."""
        if self._closed:
            self._check_copied()
        return _empty_slide, (type(self),), dict(self.__dict__)

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        x, y = origin_lv
        height, width = out.shape[:2]
        out[:] = self._arrays[level][y : y + height, x : x + width]


def _empty_slide(kind: type[ArraySlide]) -> ArraySlide:
    """A slide without values, which a copy or pickle sets."""
    return kind.__new__(kind)


def position_pixels(size: Size) -> RgbArray:
    """An image (H, W, 3) whose value is a function of (x, y): every misplaced px shows."""
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    blocks = (x // 16 * 7 + y // 16 * 13) % 256
    return np.stack([x % 251, y % 241, blocks], axis=2).astype(np.uint8)


def reduced_pixels(pixels: RgbArray, size: Size, downsample: int) -> RgbArray:
    """Every n-th px of a picture, as a level of that size: no px is changed by the reduction."""
    rows = pixels[::downsample, ::downsample][: size[1], : size[0]]
    return np.ascontiguousarray(rows)


@dataclass(frozen=True, kw_only=True)
class PyramidKind:
    """How a synthetic pyramid is stored.

    Attributes:
        downsamples: of the levels, finest first.
        tile: (height, width), multiples of 16; None: strips.
        compression: tifffile's name or number: 'jpeg', 'lzw', 'deflate', 'zstd', 'webp', 'jpegxl'
            (both lossless), 'jpeg2000' (lossless, with Aperio's code, which OpenSlide reads with
            `aperio`), None.
        ycbcr: JPEG as YCbCr 4:2:0 in place of RGB.
        ycbcr_2000: JPEG 2000 as Y, Cb and Cr: Aperio's code 33003 in place of 33005.
        differences: differences of neighbours are stored: TIFF's predictor 2.
        jpeg_tables: tables once per level, and abbreviated YCbCr tiles, as scanners write them.
        mpp: (x, y) µm/px, in the resolution tags; None writes none.
        orientation: TIFF's tag 274, in every page; 1 writes none.
        aperio: an Aperio description in place of the resolution tags (its one MPP is mpp[0]).
    """

    downsamples: tuple[int, ...] = (1, 4)
    tile: tuple[int, int] | None = (256, 256)
    compression: str | int | None = "jpeg"
    ycbcr: bool = True
    ycbcr_2000: bool = False
    differences: bool = False
    jpeg_tables: bool = False
    mpp: Mpp | None = (0.5, 0.5)
    orientation: int = 1
    aperio: bool = False


def write_pyramid(
    path: str | Path, size: Size, kind: PyramidKind | None = None
) -> list[RgbArray]:
    """Writes `position_pixels`, on lower levels every n-th of them, and returns the levels.

    Memory: every level as an array; for small slides.
    """
    if kind is None:
        kind = PyramidKind()
    finest = position_pixels(size)
    levels = []
    for downsample in kind.downsamples:
        width = max(1, size[0] // downsample)
        height = max(1, size[1] // downsample)
        levels.append(reduced_pixels(finest, (width, height), downsample))
    write_levels(path, levels, kind)
    return levels


def write_levels(
    path: str | Path, levels: Sequence[RgbArray], kind: PyramidKind
) -> None:
    """Writes these levels, finest first, one for each downsample of the kind."""
    height, width = levels[0].shape[:2]
    with tifffile.TiffWriter(path, bigtiff=False) as writer:
        for index, pixels in enumerate(levels):
            options = _write_options(kind, (width, height), index)
            stored: Any = pixels
            if kind.jpeg_tables and kind.tile is not None:
                tables, images = _abbreviated_jpegs(_tiles(pixels, kind.tile))
                options["jpegtables"] = tables
                stored = iter(images)
            else:
                is_jpeg = kind.compression == "jpeg"
                if kind.ycbcr if is_jpeg else kind.ycbcr_2000:
                    stored = _to_ycbcr(pixels)
                if kind.compression == "jpeg2000":
                    stored = _jpeg2000_segments(stored, kind.tile)
            writer.write(stored, shape=pixels.shape, dtype=np.uint8, **options)


def _tiles(pixels: RgbArray, tile: tuple[int, int]) -> Iterator[RgbArray]:
    """Tiles of (height, width), row by row; the border is padded with black."""
    rows, columns = tile
    height, width = pixels.shape[:2]
    padded = np.pad(pixels, ((0, -height % rows), (0, -width % columns), (0, 0)))
    for top, left in product(range(0, height, rows), range(0, width, columns)):
        yield np.ascontiguousarray(padded[top : top + rows, left : left + columns])


def _jpeg2000_segments(
    pixels: RgbArray, tile: tuple[int, int] | None
) -> Iterator[bytes]:
    tops = range(0, len(pixels), _STRIP_ROWS)
    strips = (pixels[top : top + _STRIP_ROWS] for top in tops)
    for block in strips if tile is None else _tiles(pixels, tile):
        encoded = imagecodecs.jpeg2k_encode(
            block, level=0, codecformat="j2k", mct=False
        )
        yield bytes(encoded)


def _abbreviated_jpegs(tiles: Iterator[RgbArray]) -> tuple[bytes, list[bytes]]:
    """The tables that JPEGs of these tiles share, and each JPEG without them."""
    tables = b""
    images = []
    for tile in tiles:
        data = simplejpeg.encode_jpeg(
            tile, quality=_JPEG_QUALITY, colorsubsampling="420"
        )
        tables, image = split_jpeg(data)
        images.append(image)
    return tables, images


def split_jpeg(data: bytes) -> tuple[bytes, bytes]:
    """A JPEG as (tables, abbreviated image): the DQT and DHT segments apart from the others."""
    tables = b"\xff\xd8"
    image = b"\xff\xd8"
    start = 2
    while data[start + 1] != 0xDA:  # SOS: entropy-coded data follow
        end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        if data[start + 1] in (0xDB, 0xC4):
            tables += data[start:end]
        else:
            image += data[start:end]
        start = end
    return tables + b"\xff\xd9", image + data[start:]


def _to_ycbcr(pixels: RgbArray) -> RgbArray:
    """Pixels in JPEG's YCbCr, which tifffile stores as they are."""
    return np.asarray(Image.fromarray(pixels).convert("YCbCr"))


def _write_options(kind: PyramidKind, size: Size, index: int) -> dict[str, object]:
    """Arguments of `TiffWriter.write` for the level of that index."""
    options: dict[str, object] = {
        "metadata": None,
        "software": False,
        "photometric": "rgb",
        "compression": kind.compression,
        "subfiletype": int(index > 0),
        "predictor": kind.differences or None,
    }
    if kind.tile is None:
        options["rowsperstrip"] = _STRIP_ROWS
    else:
        options["tile"] = kind.tile
    if kind.orientation != 1:
        options["extratags"] = [(274, "H", 1, kind.orientation, True)]
    if kind.compression == "jpeg2000":
        code = _APERIO_2000_YCBCR if kind.ycbcr_2000 else _APERIO_2000_RGB
        options["compression"] = code
    elif kind.compression in _LOSSLESS:
        options["compressionargs"] = {"lossless": True}
    elif kind.compression == "jpeg":
        options["compressionargs"] = {"level": _JPEG_QUALITY}
        if kind.ycbcr:
            options["photometric"] = "ycbcr"
            options["subsampling"] = (2, 2)
    if kind.aperio:
        mpp = "" if kind.mpp is None else f"|MPP = {kind.mpp[0]}"
        extent = f"{size[0]}x{size[1]}"
        options["description"] = f"{_APERIO}\r\n{extent} synthetic|AppMag = 20{mpp}"
    elif kind.mpp is not None:
        downsample = kind.downsamples[index]
        x, y = (_UM_PER_CM / (mpp * downsample) for mpp in kind.mpp)
        options["resolution"] = (x, y)
        options["resolutionunit"] = "CENTIMETER"
    return options


def write_he_slide(
    path: str | Path,
    size: Size,
    *,
    seed: int = 0,
    mpp: float = 0.5,
    downsamples: Sequence[int] = (1, 4, 16),
    white: int | None = None,
) -> None:
    """Writes an H&E-like slide: pink and purple tissue with nuclei in several fragments, on white.

    An Aperio-like pyramid (.svs or .tif) of 256 px JPEG tiles, YCbCr 4:2:0, with MPP and AppMag.

    Args:
        path: of the file.
        size: (width, height) of level 0.
        seed: decides texture and fragments.
        mpp: µm/px of level 0.
        downsamples: powers of two up to 16.
        white: value of the background; None: a scanner's light gray.

    Memory: about 150 MiB, whatever the size; tiles are generated while they are written. The
    textures of the last eight seeds are kept, 3 MiB each.
    """
    texture, rng = _texture_of_seed(seed)
    mask = tissue_fragments(size, copy.deepcopy(rng))
    background = _WHITE if white is None else (white, white, white)
    kind = PyramidKind(downsamples=tuple(downsamples), mpp=None)
    extent = f"{size[0]}x{size[1]}"
    image = f"{extent} [0,0 {extent}] (256x256) JPEG/YCC Q={_JPEG_QUALITY}"
    description = f"{_APERIO}\r\n{image}|AppMag = {10 / mpp:g}|MPP = {mpp:g}"
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for index, downsample in enumerate(downsamples):
            width = size[0] // downsample
            height = size[1] // downsample
            writer.write(
                _he_tiles(texture, mask, downsample, (width, height), background),
                shape=(height, width, 3),
                dtype=np.uint8,
                description=description if index == 0 else None,
                **_write_options(kind, size, index),
            )


@lru_cache(maxsize=8)
def _texture_of_seed(seed: int) -> tuple[RgbArray, np.random.Generator]:
    """The texture of a seed, and its generator after it: a texture takes a second to make."""
    rng = np.random.default_rng(seed)
    return he_texture(rng), rng


def he_texture(rng: np.random.Generator) -> RgbArray:
    """A periodic H&E-like texture, uint8 (1024, 1024, 3): stroma, epithelium, nuclei."""
    zones = _smooth_noise(rng, 60.0)
    fibres = _smooth_noise(rng, 3.0)
    epithelium = np.clip(zones * 0.8 + 0.5, 0, 1)[..., None]
    color = _STROMA * (1 - epithelium) + _EPITHELIUM * epithelium
    color += fibres[..., None] * np.array((9.0, 13.0, 8.0))
    nuclei = _nuclei(zones, rng)[..., None]
    color = color * (1 - nuclei) + (_NUCLEUS + fibres[..., None] * 8) * nuclei
    color += rng.normal(0, 3, color.shape)
    return np.asarray(np.clip(np.rint(color), 0, 255).astype(np.uint8))


def _nuclei(
    zones: npt.NDArray[np.float32], rng: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Share of nucleus in each px, 0 to 1: many in epithelium, a third as many in stroma."""
    centers = np.zeros(zones.shape, dtype=np.float32)
    chance = rng.random(centers.size // 900)
    rows, columns = rng.integers(0, _TEXTURE_PX, (len(chance), 2)).T
    kept = (zones[rows, columns] > 0) | (chance < 0.35)
    centers[rows[kept], columns[kept]] = 1
    blurred = ndimage.gaussian_filter(centers, 4.0, mode="wrap")
    return np.asarray(np.clip((blurred * 2 * np.pi * 16 - 0.35) * 4, 0, 1))


def _smooth_noise(rng: np.random.Generator, sigma: float) -> npt.NDArray[np.float32]:
    """Periodic noise (1024, 1024) of unit variance, smooth over `sigma` px."""
    noise = rng.normal(size=(_TEXTURE_PX, _TEXTURE_PX)).astype(np.float32)
    field = _periodic_blur(noise, sigma)
    return np.asarray(field / field.std())


def _periodic_blur(
    field: npt.NDArray[np.float32], sigma: float
) -> npt.NDArray[np.float32]:
    """`ndimage.gaussian_filter(field, sigma, mode="wrap")`, by Fourier transforms.

    At a sigma of 60 px the filter has 481 weights, and takes ten times as long. Rows and columns
    are computed in float64 and rounded to float32, as scipy does.
    """
    radius = int(4 * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    weights /= weights.sum()
    for axis in (0, 1):
        length = field.shape[axis]
        kernel = np.zeros(length)
        np.add.at(kernel, offsets % length, weights)
        response = np.expand_dims(fft.rfft(kernel), 1 - axis)
        spectrum = fft.rfft(field.astype(np.float64), axis=axis) * response
        field = fft.irfft(spectrum, length, axis=axis).astype(np.float32)
    return field


def tissue_fragments(size: Size, rng: np.random.Generator) -> MaskArray:
    """Bool (ceil(H / 16), ceil(W / 16)): a few ragged fragments with holes, about a third of it."""
    height = -(-size[1] // _MASK_PX)
    width = -(-size[0] // _MASK_PX)
    y, x = np.mgrid[0:height, 0:width]
    longest = max(height, width)
    noise = rng.normal(size=(height, width))
    rough = ndimage.gaussian_filter(noise, longest / 60)
    rough = rough / (rough.std() or 1.0)
    mask = np.zeros((height, width), dtype=bool)
    for center_x, center_y, radius in _FRAGMENTS:
        dx = (x - center_x * width) / width
        dy = (y - center_y * height) / height
        mask |= np.hypot(dx, dy) + rough * 0.035 < radius
    holes = ndimage.gaussian_filter(rng.normal(size=(height, width)), longest / 90)
    return np.asarray(mask & (holes < 1.6 * holes.std()))


def _he_tiles(
    texture: RgbArray,
    mask: MaskArray,
    downsample: int,
    level_size: Size,
    background: tuple[int, int, int],
) -> Iterator[RgbArray]:
    """Tiles of one level in YCbCr, row by row, padded to 256 px."""
    period_px = _TEXTURE_PX // downsample
    cell_px = _MASK_PX // downsample
    small = texture
    if downsample > 1:
        blocks = texture.reshape(period_px, downsample, period_px, downsample, 3)
        small = blocks.mean(axis=(1, 3)).astype(np.uint8)
    repeats = _TILE_PX // period_px + 2
    periods = np.tile(small, (repeats, repeats, 1))
    cells = -(-_TILE_PX // cell_px)
    width, height = level_size
    for y, x in product(range(0, height, _TILE_PX), range(0, width, _TILE_PX)):
        piece = mask[y // cell_px :, x // cell_px :][:cells, :cells]
        inside = piece.repeat(cell_px, axis=0).repeat(cell_px, axis=1)
        inside = inside[:_TILE_PX, :_TILE_PX]
        rows, columns = inside.shape
        source = periods[y % period_px :, x % period_px :][:rows, :columns]
        tile = np.full((_TILE_PX, _TILE_PX, 3), background, dtype=np.uint8)
        np.copyto(tile[:rows, :columns], source, where=inside[..., None])
        yield _to_ycbcr(tile)
