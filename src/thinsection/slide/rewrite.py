"""TIFFs written anew: segments of another file are copied as they are, never decoded."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import numpy as np
import simplejpeg
import tifffile

from thinsection.errors import InvalidInputError
from thinsection.files.sources import ByteSource
from thinsection.machine import cpu_count
from thinsection.slide.tiff_codecs import JPEG
from thinsection.types import RgbArray, Size

EDGE = 512  # px of the tiles that are encoded here
_YCBCR = 6
_COLOUR = {"colorspace": "RGB", "colorsubsampling": "422"}
_SAMPLING = ((1, 1), (2, 1), (2, 2), (4, 1))  # that tifffile writes


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image of a file that is written: its segments in order, and how they are to be read."""

    options: Mapping[str, Any]  # of TiffWriter.write
    segments: Callable[[], Iterator[bytes]]

    @property
    def is_grey(self) -> bool:
        """Whether it has one sample a px."""
        return len(self.options["shape"]) == 2

    def write(self, file: tifffile.TiffWriter, **more: Any) -> None:
        """Appends it. Memory: one segment, or `encoded`'s."""
        file.write(self.segments(), software=False, **{**self.options, **more})


def copied(page: Any, source: ByteSource, *, name: str) -> Picture:
    """A page of an open TIFF whose colours stand together, byte by byte.

    InvalidInputError where it has no px, or what cannot be said again.
    """
    samples = page.samplesperpixel
    shape: tuple[int, ...] = (page.imagelength, page.imagewidth)
    options: dict[str, Any] = {
        "shape": (*shape, samples) if samples > 1 else shape,
        "dtype": page.dtype,
        "photometric": int(page.photometric),
        "extrasamples": page.extrasamples or None,
        "compression": int(page.compression),
        "predictor": int(page.predictor) if page.predictor > 1 else None,
        "jpegtables": page.jpegtables,
        "iccprofile": page.iccprofile,
        "resolution": page.resolution,
        "resolutionunit": int(page.resolutionunit),
    }
    strips = {"rowsperstrip": min(page.rowsperstrip or page.imagelength, page.imagelength)}
    options |= {"tile": (page.tilelength, page.tilewidth)} if page.is_tiled else strips
    if int(page.compression) in JPEG and samples == 3:
        sampling = page.subsampling if int(page.photometric) == _YCBCR else (1, 1)
        if sampling is not None and tuple(sampling) not in _SAMPLING:
            raise InvalidInputError(f"chroma sampling must be one of {_SAMPLING}, got {sampling}")
        options["subsampling"] = sampling
        options["compressionargs"] = {"outcolorspace": int(page.photometric)}
    places = list(zip(page.dataoffsets, page.databytecounts))

    def segments() -> Iterator[bytes]:
        for offset, count in places:
            yield source.read_at(offset, count) if count else b""

    if not any(count for _, count in places):
        raise InvalidInputError(f"an image must have px, got an empty one in {name!r}")
    return Picture(options=options, segments=segments)


def encoded(
    size: Size, read: Callable[[int, int, int], RgbArray], *, quality: int, grey: bool = False
) -> Picture:
    """An image whose tiles are read (x, y, edge in its px) and encoded as JPEG.

    Memory: a tile, read and encoded, for each CPU, and what `read` takes.
    """

    def tile(place: tuple[int, int]) -> bytes:
        y, x = place
        pixels = read(x, y, EDGE)
        pixels = np.ascontiguousarray(pixels[..., :1] if grey else pixels)
        kind = {"colorspace": "GRAY", "colorsubsampling": "Gray"} if grey else _COLOUR
        return bytes(simplejpeg.encode_jpeg(pixels, quality=quality, **kind))

    def segments() -> Iterator[bytes]:
        workers = cpu_count()
        places = product(range(0, size[1], EDGE), range(0, size[0], EDGE))
        with ThreadPoolExecutor(workers) as pool:
            while together := list(islice(places, 2 * workers)):
                yield from pool.map(tile, together)

    options = {
        "shape": size[::-1] if grey else (*size[::-1], 3),
        "dtype": np.uint8,
        "photometric": "minisblack" if grey else "rgb",
        "compression": "jpeg",
        "subsampling": None if grey else (2, 1),
        "tile": (EDGE, EDGE),
    }
    return Picture(options=options, segments=segments)
