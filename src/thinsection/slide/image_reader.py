"""Plain images: PNG and JPEG, decoded once, and single-level TIFFs, streamed strip by strip."""

import threading
from pathlib import Path

import imagecodecs
import numpy as np
import simplejpeg

from thinsection.errors import SlideOpenError, SlideReadError
from thinsection.slide.base import Slide
from thinsection.slide.tiff_reader import TiffSlide
from thinsection.types import GIB, Level, Mpp, RgbArray, Size

# PNG and JPEG cannot be decoded in part: what a whole one may take
MAX_DECODED_BYTES = 2 * GIB
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


class FlatTiffSlide(TiffSlide):
    """A TIFF of one level, strips or tiles."""

    reader = "image"

    def __init__(self, path: str, *, slide_mpp: Mpp | None = None) -> None:
        super().__init__(path, slide_mpp=slide_mpp)
        if len(self.levels) > 1:
            self.close()
            raise SlideOpenError(f"image: a TIFF of {len(self.levels)} levels; use reader 'tiff'")


class FlatSlide(Slide):
    """A PNG or JPEG. Thread-safe.

    Memory: 3 bytes per px of the whole image from the first read on; an image of more than 2 GiB is
    refused on opening.
    """

    reader = "image"

    def __init__(self, path: str, *, slide_mpp: Mpp | None = None) -> None:
        head = _read_head(path)
        self._kind = "png" if head.startswith(_PNG) else "jpeg"
        size = _png_size(head) if self._kind == "png" else _jpeg_size(path)
        if size[0] * size[1] * 3 > MAX_DECODED_BYTES:
            raise SlideOpenError(
                f"image: {size[0]} x {size[1]} px of {self._kind.upper()} cannot be read in parts; "
                "convert it to a tiled TIFF"
            )
        level = Level(index=0, size=size, downsample=1.0)
        super().__init__(path, [level], slide_mpp=slide_mpp)
        self._pixels: RgbArray | None = None
        self._lock = threading.Lock()

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        x, y = origin_lv
        out[:] = self._decoded()[y : y + out.shape[0], x : x + out.shape[1]]

    def _decoded(self) -> RgbArray:
        with self._lock:
            pixels: RgbArray = self._pixels if self._pixels is not None else self._decode()
            self._pixels = pixels
            return pixels

    def _decode(self) -> RgbArray:
        data = Path(self.slide_path).read_bytes()
        try:
            if self._kind == "jpeg":
                pixels: RgbArray = simplejpeg.decode_jpeg(data, "RGB")
            else:
                pixels = _as_rgb(imagecodecs.png_decode(data))
        except (ValueError, RuntimeError) as error:
            raise SlideReadError(
                f"image must be whole, got {error} in {Path(self.slide_path).name!r}"
            ) from None
        if pixels.shape[:2] != self.size[::-1]:
            raise SlideReadError(
                f"image must have {self.size} px, got {pixels.shape[1::-1]} in {self.slide_path!r}"
            )
        return np.asarray(pixels)

    def close(self) -> None:
        """Lets the decoded image go."""
        super().close()
        with self._lock:
            self._pixels = None


def open_image(path: str, *, slide_mpp: Mpp | None = None) -> Slide:
    """A PNG, JPEG or single-level TIFF.

    Raises:
        SlideOpenError: it is none of these.
    """
    head = _read_head(path)
    if head.startswith(_TIFF):
        return FlatTiffSlide(path, slide_mpp=slide_mpp)
    if head.startswith((_PNG, _JPEG)):
        return FlatSlide(path, slide_mpp=slide_mpp)
    raise SlideOpenError("image: not a PNG, JPEG or TIFF")


def _read_head(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(64)
    except OSError as error:
        raise SlideOpenError(f"image: {error}") from None


def _png_size(head: bytes) -> Size:
    if len(head) < 26 or head[12:16] != b"IHDR":
        raise SlideOpenError("image: a PNG without its header; the file is truncated")
    return (int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big"))


def _jpeg_size(path: str) -> Size:
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(Path(path).read_bytes())
    except (ValueError, RuntimeError) as error:
        raise SlideOpenError(f"image: not a readable JPEG: {error}") from None
    return (width, height)


def _as_rgb(pixels: np.ndarray) -> RgbArray:
    """uint8 (H, W, 3) from gray, gray with alpha, RGB or RGBA of 8 or 16 bits; on white."""
    if pixels.dtype == np.uint16:
        pixels = (pixels >> 8).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ValueError(f"px of type {pixels.dtype}")
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    color, alpha = pixels, None
    if pixels.shape[2] in (2, 4):
        color, alpha = pixels[..., :-1], pixels[..., -1:]
    color = np.broadcast_to(color, (*color.shape[:2], 3))
    if alpha is not None and alpha.min() < 255:
        mixed = color * (alpha / 255.0) + (255.0 - alpha)
        color = np.rint(mixed).astype(np.uint8)
    return np.ascontiguousarray(color)
