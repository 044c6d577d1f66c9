"""Plain images: PNG and JPEG, decoded once, and single-level TIFFs, streamed strip by strip."""

import threading
from pathlib import Path

import imagecodecs
import numpy as np
import simplejpeg

from thinsection.errors import SlideOpenError, SlideReadError
from thinsection.slide.base import GRAY, Slide
from thinsection.slide.formats.alpha import on_white
from thinsection.slide.formats.image_header import JPEG_MAGIC, PNG_MAGIC, read_header
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.slide.pictures import only_picture
from thinsection.types import GIB, Level, Mpp, RgbArray

# PNG and JPEG cannot be decoded in part: what a whole one may take
MAX_DECODED_BYTES = 2 * GIB
_STRIP_PX = 1 << 18  # that become RGB at once
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_DEEP = "16 bits a channel, of which the upper 8 are shown"  # a note


class FlatSlide(Slide):
    """A PNG or JPEG. Thread-safe.

    Memory: `held_bytes` while it is decoded, which a run charges to its `--memory`: 3 bytes per px;
    of a PNG its own where these are more (8 of RGBA in 16 bits), or beside them where these are
    less (1 of gray); of a JPEG in several scans (a progressive one) 2 bytes for each coefficient as
    well, 3 per px at 4:2:0 and 6 at 4:4:4. Over 2 GiB it is refused on opening. While it is
    decoded, the file's bytes as well.
    """

    reader = "image"

    def __init__(self, path: str, slide_mpp: Mpp | None) -> None:
        self._path = Path(path)
        file_bytes = self._path.stat().st_size
        with self._path.open("rb") as file:
            header = read_header(file, file_bytes)
        width, height = header.size
        self._is_png = header.kind == "PNG"
        self.held_bytes = header.peak_bytes
        if file_bytes < header.least_file_bytes or width * height < 1:
            raise SlideOpenError(
                f"image: {width} x {height} px of {header.kind} cannot fit in so small a file; "
                "it is damaged or truncated"
            )
        if self.held_bytes > MAX_DECODED_BYTES:
            raise SlideOpenError(
                f"image: {width} x {height} px of {header.kind} cannot be read in parts; "
                "convert it to a tiled TIFF"
            )
        super().__init__(
            path,
            [Level(index=0, size=header.size, downsample=1.0)],
            slide_mpp=slide_mpp,
            orientation=header.orientation,
        )
        notes = []
        if header.deep:
            notes.append(_DEEP)
        if header.gray:
            notes.append(GRAY)
        self.notes = tuple(notes)
        self._pixels: RgbArray | None = None
        self._lock = threading.Lock()

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        x, y = origin_lv
        with self._lock:
            if self._pixels is None:
                self._pixels = self._decode()
            pixels = self._pixels
        out[:] = pixels[y : y + out.shape[0], x : x + out.shape[1]]

    def _decode(self) -> RgbArray:
        data = self._path.read_bytes()
        try:
            if self._is_png:
                pixels = _decode_png(data)
            else:
                pixels = np.asarray(simplejpeg.decode_jpeg(data, "RGB"))
        except (ValueError, RuntimeError) as error:
            raise self._unreadable(f"image must be complete, got {error}") from None
        size = pixels.shape[1::-1]
        if size != self.size:
            raise SlideReadError(
                f"image must have {self.size} px, got {size} in {self.slide_path!r}"
            )
        return pixels

    def close(self) -> None:
        """Lets the decoded image go."""
        super().close()
        with self._lock:
            self._pixels = None


def open_image(
    path: str, *, slide_mpp: Mpp | None = None, image: str | None = None
) -> Slide:
    """Opens a PNG, JPEG or single-level TIFF; SlideOpenError for what is none of these."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise SlideOpenError(f"image: {error}") from None
    if head.startswith((PNG_MAGIC, JPEG_MAGIC)):
        only_picture(image, "image", path)
        return FlatSlide(path, slide_mpp)
    if not head.startswith(_TIFF):
        raise SlideOpenError("image: not a PNG, JPEG or TIFF")
    slide = TiffSlide(path, slide_mpp=slide_mpp, image=image)
    slide.reader = "image"
    if len(slide.levels) > 1:
        slide.close()
        raise SlideOpenError(
            f"image: a TIFF of {len(slide.levels)} levels; use reader 'tiff'"
        )
    return slide


def _decode_png(data: bytes) -> RgbArray:
    """Decodes gray, gray with alpha, RGB or RGBA of 8 or 16 bits to uint8 (H, W, 3), on white.

    Memory: the px as they are stored; where these are 3 bytes and more, the result takes their
    place, else 3 bytes per px beside them.
    """
    pixels = np.atleast_3d(imagecodecs.png_decode(data))
    if pixels.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"px of type {pixels.dtype}")
    if pixels.dtype == np.uint8 and pixels.shape[2] == 3:
        return pixels
    height, width, samples = pixels.shape
    out = np.empty((height, width, 3), np.uint8)
    if samples * pixels.itemsize >= 3:
        # a strip of `out` then ends where the px left to read begin
        out = pixels.reshape(-1).view(np.uint8)[: out.size].reshape(out.shape)
    rows = max(1, _STRIP_PX // width)
    for top in range(0, height, rows):
        strip = pixels[top : top + rows]
        if strip.dtype == np.uint16:
            strip = (strip >> 8).astype(np.uint8)
        out[top : top + rows] = on_white(strip)
    return out
