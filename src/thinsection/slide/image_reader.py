"""Plain images: PNG and JPEG, decoded once, and single-level TIFFs, streamed strip by strip."""

import threading
from pathlib import Path

import imagecodecs
import numpy as np
import simplejpeg

from thinsection.errors import SlideOpenError, SlideReadError
from thinsection.slide.base import Slide, on_white
from thinsection.slide.tiff_reader import TiffSlide
from thinsection.types import GIB, Level, Mpp, RgbArray, Size

# PNG and JPEG cannot be decoded in part: what a whole one may take
MAX_DECODED_BYTES = 2 * GIB
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


class FlatSlide(Slide):
    """A PNG or JPEG. Thread-safe.

    Memory: 3 bytes per px of the image from the first read on; over 2 GiB it is refused on opening.
    """

    reader = "image"

    def __init__(self, path: str, head: bytes, slide_mpp: Mpp | None) -> None:
        self._png = head.startswith(_PNG)
        size = width, height = _size(path, head)
        if width * height * 3 > MAX_DECODED_BYTES:
            what = f"{width} x {height} px of {'PNG' if self._png else 'JPEG'}"
            rule = "cannot be read in parts; convert it to a tiled TIFF"
            raise SlideOpenError(f"image: {what} {rule}")
        super().__init__(path, [Level(index=0, size=size, downsample=1.0)], slide_mpp=slide_mpp)
        self._pixels: RgbArray | None = None
        self._lock = threading.Lock()

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        x, y = origin_lv
        with self._lock:
            pixels = self._pixels = self._decode() if self._pixels is None else self._pixels
        out[:] = pixels[y : y + out.shape[0], x : x + out.shape[1]]

    def _decode(self) -> RgbArray:
        data = Path(self.slide_path).read_bytes()
        try:
            pixels = _decode_png(data) if self._png else simplejpeg.decode_jpeg(data, "RGB")
        except (ValueError, RuntimeError) as error:
            raise self._unreadable(f"image must be whole, got {error}") from None
        if pixels.shape[:2] != self.size[::-1]:
            got = f"{pixels.shape[1::-1]} in {self.slide_path!r}"
            raise SlideReadError(f"image must have {self.size} px, got {got}")
        return np.asarray(pixels)

    def close(self) -> None:
        """Lets the decoded image go."""
        super().close()
        with self._lock:
            self._pixels = None


def open_image(path: str, *, slide_mpp: Mpp | None = None) -> Slide:
    """A PNG, JPEG or single-level TIFF; SlideOpenError for what is none of these."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise SlideOpenError(f"image: {error}") from None
    if head.startswith((_PNG, _JPEG)):
        return FlatSlide(path, head, slide_mpp)
    if not head.startswith(_TIFF):
        raise SlideOpenError("image: not a PNG, JPEG or TIFF")
    slide = TiffSlide(path, slide_mpp=slide_mpp)
    slide.reader = "image"
    if len(slide.levels) > 1:
        slide.close()
        raise SlideOpenError(f"image: a TIFF of {len(slide.levels)} levels; use reader 'tiff'")
    return slide


def _size(path: str, head: bytes) -> Size:
    if head.startswith(_PNG):
        if len(head) < 26 or head[12:16] != b"IHDR":
            raise SlideOpenError("image: a PNG without its header; the file is truncated")
        return (int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big"))
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(Path(path).read_bytes())
    except (ValueError, RuntimeError) as error:
        raise SlideOpenError(f"image: not a readable JPEG: {error}") from None
    return (width, height)


def _decode_png(data: bytes) -> RgbArray:
    """uint8 (H, W, 3) from gray, gray with alpha, RGB or RGBA of 8 or 16 bits; on white."""
    pixels = np.atleast_3d(imagecodecs.png_decode(data))
    if pixels.dtype == np.uint16:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ValueError(f"px of type {pixels.dtype}")
    return np.ascontiguousarray(np.broadcast_to(on_white(pixels), (*pixels.shape[:2], 3)))
