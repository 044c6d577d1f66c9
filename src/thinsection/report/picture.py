"""Pictures of whole slides: made from a slide, and written as small JPEGs."""

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.files.atomic import write_bytes
from thinsection.slide import Slide, read_resized
from thinsection.slide.geometry import best_level
from thinsection.types import Mpp, RgbArray, Size

# long side of a picture in pixels, or that of the slide if it is smaller
LONG_SIDE = 1600
# prefixes of the names of stored pictures
PICTURE = "picture"
PICTURE_NAME = f"{PICTURE}.jpg"
# pictures of what each check marked; older versions wrote a PNG
OVERLAYS = ("overlay.jpg", "overlay.png")
# long side in pixels from which a thumbnail is used, if the level has more pixels than the second
_FAIR_LONG_SIDE = 1000
_GIANT_LEVEL_PX = 50_000_000
# qualities of a stored JPEG that are tried before it gets fewer pixels
_JPEG_QUALITIES = (85, 75, 65)
# largest size of a stored picture in bytes
_PICTURE_BYTES = 120_000


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Whole slide at a size for viewing."""

    # uint8 (H, W, 3)
    rgb: RgbArray
    size_l0: Size
    # None means no scale bar
    slide_mpp: Mpp | None = None

    @property
    def size(self) -> Size:
        """(width, height) in pixels."""
        return self.rgb.shape[1], self.rgb.shape[0]


def slide_picture(slide: Slide, thumbnail: RgbArray | None = None) -> RgbArray:
    """Slide with `LONG_SIDE` pixels along its long side, or all it has, uint8 (H, W, 3).

    It is read in strips from the best level, or made from a thumbnail that is large enough. If
    reading that level would take seconds, a thumbnail of 1000 pixels is enough. For a URL, no level
    is downloaded that is finer than the thumbnail's, and level 0 is not downloaded twice; the
    picture may then be small.

    Memory:
        As `read_resized`: 160 MiB and the picture, for a slide of any size.

    Raises:
        SlideReadError: the slide's pixels cannot be decoded.
    """
    shrink = max(1.0, max(slide.size) / LONG_SIDE)
    enough_px = LONG_SIDE
    if math.prod(best_level(slide.levels, shrink).size) > _GIANT_LEVEL_PX:
        enough_px = _FAIR_LONG_SIDE
    if thumbnail is not None and slide.source is not None:
        thumbnail_downsample = max(slide.size) / max(thumbnail.shape[:2])
        thumbnail_level = best_level(slide.levels, thumbnail_downsample)
        shrink = max(shrink, thumbnail_level.downsample)
        if thumbnail_level.index == 0:
            enough_px = 0
    width = max(1, round(slide.size[0] / shrink))
    height = max(1, round(slide.size[1] / shrink))
    least_px = min(enough_px, max(width, height))
    if thumbnail is None or max(thumbnail.shape[:2]) < least_px:
        return read_resized(slide, (width, height))
    image = Image.fromarray(thumbnail)
    image.thumbnail((width, height), Image.Resampling.LANCZOS)
    return np.asarray(image)


def save_picture(path: Path, rgb: RgbArray) -> None:
    """Writes a picture of a slide as a JPEG of at most 120 kB, atomically."""
    write_bytes(path, fitted_jpeg(rgb, _PICTURE_BYTES))


def fitted_jpeg(rgb: RgbArray, most_bytes: int) -> bytes:
    """JPEG of at most so many bytes; a picture full of detail has a lower quality or fewer pixels.

    Memory:
        The picture once more, and the JPEG.
    """
    image = Image.fromarray(rgb)
    while True:
        for quality in _JPEG_QUALITIES:
            buffer = io.BytesIO()
            image.save(buffer, format="JPEG", quality=quality)
            if buffer.tell() <= most_bytes:
                return buffer.getvalue()
        shrink = min(0.9, math.sqrt(most_bytes / buffer.tell()))
        size = [max(1, round(edge * shrink)) for edge in image.size]
        if max(size) == 1:  # the header alone is larger
            return buffer.getvalue()
        image = image.resize((size[0], size[1]), Image.Resampling.LANCZOS)
