"""A slide of real tissue in any size: a mosaic of pieces of OpenSlide's CMU-1-Small-Region.

That test slide is small and is found through `THINSECTION_TEST_SLIDES`. Squares are cut out of it,
half of them mirrored, and laid side by side in random order, as 256 px JPEG tiles in the form of
the file: quality 30, R, G and B without subsampling, tables once per level. Squares begin at blocks
of the file's JPEG. So a pixel has the bytes that it has there, and costs a decoder the same. Pixels
of a lower level are means of those of level 0.
"""

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile

from thinsection.slide import open_slide
from thinsection.testing.synthetic import split_jpeg, write_he_slide
from thinsection.types import RgbArray, Size

SOURCE = "CMU-1-Small-Region.svs"
DOWNSAMPLES = (1, 4, 16)
QUALITY = 30  # of the CMU slide
YCBCR_QUALITY = 80  # of most 40x archives
TILE_PX = 256
_SQUARE_PX = 1024  # edge of a square, level-0 px
_BLOCK_PX = 8  # edge of a block of the file's JPEG, px
_NUM_SQUARES = 64  # different squares; their tiles are encoded once
REAL, GENERATED = "real", "generated"
SUBSAMPLED = "real_420"  # the mosaic with YCbCr 4:2:0 of quality 80


def source() -> Path | None:
    """The real test slide, if it is there."""
    folder = os.environ.get("THINSECTION_TEST_SLIDES")
    if folder is None or not (Path(folder) / SOURCE).is_file():
        return None
    return Path(folder) / SOURCE


def write_slides(
    folder: Path, name: str, size: Size, *, mpp: float, seed: int = 1
) -> dict[str, Path]:
    """Writes NAME-real.svs, where the test slide is there, and NAME-generated.svs.

    Returns: 'real' and 'generated' -> path, the real one first.
    """
    paths = {}
    if source() is not None:
        paths[REAL] = folder / f"{name}-{REAL}.svs"
        write_mosaic(paths[REAL], size, mpp=mpp, seed=seed)
    paths[GENERATED] = folder / f"{name}-{GENERATED}.svs"
    write_he_slide(paths[GENERATED], size, mpp=mpp, seed=seed)
    return paths


def described(paths: dict[str, Path], size: Size) -> dict[str, Any]:
    """Size of the slides and their bytes per level-0 px, for a JSON; why there is no real one."""
    made: dict[str, Any] = {}
    for kind, path in paths.items():
        bytes_per_px = path.stat().st_size / (size[0] * size[1])
        made[kind] = {"bytes_per_px": round(bytes_per_px, 4)}
    if REAL in made:
        made[REAL]["mosaic_of"] = SOURCE
    else:
        made[REAL] = f"not measured: THINSECTION_TEST_SLIDES has no {SOURCE}"
    return {"slide_px": size, "slides": made}


def reduced(square: RgbArray) -> dict[int, RgbArray]:
    """Downsample -> a square (H, H, 3) at that downsample, by means."""
    levels = {1: square}
    for downsample in DOWNSAMPLES[1:]:
        edge = len(square) // downsample
        blocks = square.reshape(edge, downsample, edge, downsample, 3)
        means = blocks.mean(axis=(1, 3), dtype=np.float32)
        levels[downsample] = np.rint(means).astype(np.uint8)
    return levels


def squares_of(path: Path, rng: np.random.Generator) -> list[dict[int, RgbArray]]:
    """Squares of the slide at random places, each at all downsamples.

    A square that begins near an edge goes on at the other edge. So all pixels are as likely.

    Memory: the slide, 20 MB, and 3 MiB for each of the 64 squares.
    """
    with open_slide(path) as slide:
        image = slide.read_region((0, 0), 0, slide.size)
    rows, columns = (length // _BLOCK_PX for length in image.shape[:2])
    image = image[: rows * _BLOCK_PX, : columns * _BLOCK_PX]
    found = []
    for number in range(_NUM_SQUARES):
        top = int(rng.integers(rows)) * _BLOCK_PX
        left = int(rng.integers(columns)) * _BLOCK_PX
        square = np.roll(image, (-top, -left), axis=(0, 1))[:_SQUARE_PX, :_SQUARE_PX]
        if number % 2:
            square = square[:, ::-1]
        found.append(reduced(np.ascontiguousarray(square)))
    return found


def write_mosaic(
    path: Path, size: Size, *, mpp: float, seed: int = 1, ycbcr: bool = False
) -> None:
    """Writes a mosaic with levels 1, 4 and 16, like a scan of Aperio's.

    Args:
        path: of the file.
        size: (width, height) of level 0.
        mpp: µm/px that the file states for level 0; the pixels were scanned at 0.499.
        seed: decides places and order of the squares.
        ycbcr: store YCbCr with chroma at half the resolution, and quality 80.

    Memory: some 300 MB, whatever the size; tiles are written row by row.
    """
    found = source()
    if found is None:
        raise FileNotFoundError(f"THINSECTION_TEST_SLIDES must have {SOURCE}")
    rng = np.random.default_rng(seed)
    squares = squares_of(found, rng)
    shape = (-(-size[1] // _SQUARE_PX) + 4, -(-size[0] // _SQUARE_PX) + 4)
    order = rng.integers(len(squares), size=shape)  # 4 more fill the last tile
    extent = f"{size[0]}x{size[1]}"
    quality = YCBCR_QUALITY if ycbcr else QUALITY
    colors = "YCC" if ycbcr else "RGB"
    image = f"{extent} [0,0 {extent}] ({TILE_PX}x{TILE_PX}) JPEG/{colors} Q={quality}"
    description = f"Aperio Image Library v12.0.0\r\n{image}"
    description += f"|AppMag = {10 / mpp:g}|MPP = {mpp:g}"
    tables, _ = split_jpeg(_encoded(squares[0][1][:TILE_PX, :TILE_PX], ycbcr=ycbcr))
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for index, downsample in enumerate(DOWNSAMPLES):
            width, height = (length // downsample for length in size)
            writer.write(
                _tiles(squares, order, downsample, (width, height), ycbcr=ycbcr),
                shape=(height, width, 3),
                dtype=np.uint8,
                tile=(TILE_PX, TILE_PX),
                photometric="ycbcr" if ycbcr else "rgb",
                subsampling=(2, 2) if ycbcr else None,
                compression="jpeg",
                compressionargs=None if ycbcr else {"outcolorspace": "RGB"},
                jpegtables=tables,
                description=description if index == 0 else None,
                subfiletype=int(index > 0),
                metadata=None,
                software=False,
            )


def _tiles(
    squares: list[dict[int, RgbArray]],
    order: np.ndarray,
    downsample: int,
    size: Size,
    *,
    ycbcr: bool,
) -> Iterator[bytes]:
    """Encoded tiles of one level, row by row; equal tiles are encoded once."""
    edge = _SQUARE_PX // downsample
    per_tile = -(-TILE_PX // edge)  # squares along a tile
    encoded: dict[bytes, bytes] = {}
    for y, x in product(range(0, size[1], TILE_PX), range(0, size[0], TILE_PX)):
        row, column = y // edge, x // edge
        numbers = order[row : row + per_tile, column : column + per_tile]
        top, left = y % edge, x % edge
        key = numbers.tobytes() + bytes([top // TILE_PX, left // TILE_PX])
        if key not in encoded:
            rows = [
                np.hstack([squares[number][downsample] for number in line])
                for line in numbers
            ]
            tile = np.vstack(rows)[top : top + TILE_PX, left : left + TILE_PX]
            encoded[key] = split_jpeg(_encoded(tile, ycbcr=ycbcr))[1]
        yield encoded[key]


def _encoded(tile: RgbArray, *, ycbcr: bool) -> bytes:
    """A JPEG with the default Huffman tables: of R, G and B as they are, or of YCbCr 4:2:0."""
    return bytes(
        imagecodecs.jpeg8_encode(
            np.ascontiguousarray(tile),
            level=YCBCR_QUALITY if ycbcr else QUALITY,
            colorspace="RGB",
            outcolorspace="YCBCR" if ycbcr else "RGB",
            subsampling="420" if ycbcr else "444",
            optimize=False,
        )
    )
