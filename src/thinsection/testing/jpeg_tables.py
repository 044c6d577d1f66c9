"""JPEG as most scanners store it in TIFF: tables once per page, the tiles without them."""

from collections.abc import Iterator

import numpy as np
import simplejpeg

from thinsection.types import RgbArray


def abbreviated_tiles(
    pixels: RgbArray, tile: tuple[int, int], quality: int
) -> tuple[bytes, Iterator[bytes]]:
    """(the page's JPEGTables, its YCbCr 4:2:0 tiles without tables, row by row).

    Args:
        pixels: one level.
        tile: (height, width) of a tile; the border is padded with black.
        quality: of JPEG.
    """
    tables, _ = split_jpeg(_encode(np.zeros((16, 16, 3), np.uint8), quality))
    height, width = pixels.shape[:2]
    padded = np.pad(pixels, ((0, -height % tile[0]), (0, -width % tile[1]), (0, 0)))

    def tiles() -> Iterator[bytes]:
        for top in range(0, height, tile[0]):
            for left in range(0, width, tile[1]):
                block = padded[top : top + tile[0], left : left + tile[1]]
                yield split_jpeg(_encode(np.ascontiguousarray(block), quality))[1]

    return tables, tiles()


def split_jpeg(data: bytes) -> tuple[bytes, bytes]:
    """(tables, abbreviated image): the DQT and DHT segments apart from everything else."""
    soi, eoi = b"\xff\xd8", b"\xff\xd9"
    tables, rest, at = [soi], [soi], 2
    while data[at + 1] != 0xDA:  # SOS: entropy-coded data follow
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        (tables if data[at + 1] in (0xDB, 0xC4) else rest).append(data[at:end])
        at = end
    return b"".join([*tables, eoi]), b"".join([*rest, data[at:]])


def _encode(block: RgbArray, quality: int) -> bytes:
    return bytes(simplejpeg.encode_jpeg(block, quality=quality, colorsubsampling="420"))
