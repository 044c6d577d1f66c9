"""Functions that the memory tests run in processes of their own."""

from collections.abc import Iterator
from pathlib import Path

import imagecodecs
import numpy as np
import tifffile

from thinsection.errors import SlideReadError
from thinsection.slide import open_slide


def write_flat(path: Path, width: int, height: int, compression: str | None) -> None:
    """A striped TIFF of one level, written strip by strip."""

    def strips() -> Iterator[bytes]:
        row = (np.arange(width * 3).reshape(width, 3) % 251).astype(np.uint8)
        for top in range(0, height, 64):
            block = np.tile(row.ravel(), min(64, height - top)).tobytes()
            yield block if compression is None else bytes(imagecodecs.lzw_encode(block))

    with tifffile.TiffWriter(path, bigtiff=True) as tiff:
        tiff.write(
            strips(),
            shape=(height, width, 3),
            dtype=np.uint8,
            photometric="rgb",
            rowsperstrip=64,
            compression=compression,
            metadata=None,
        )


def read_flat(path: str) -> list[int]:
    """A thumbnail and a few regions of a flat TIFF."""
    with open_slide(path) as slide:
        width, height = slide.size
        thumbnail = slide.thumbnail((400, 400))
        for y in range(0, height - 256, height // 20):
            slide.read_region((width // 3, y), 0, (256, 256))
        return list(thumbnail.shape)


def read_corner(path: str) -> list[int]:
    """A corner of an image that is decoded whole."""
    with open_slide(path) as slide:
        return list(slide.read_region((0, 0), 0, (9, 9)).shape)


def read_refused(path: str) -> str:
    """What a slide that cannot be decoded says."""
    with open_slide(path, reader="tiff") as slide:
        try:
            slide.read_region((0, 0), 0, slide.size)
        except SlideReadError as error:
            return str(error)
    return ""
