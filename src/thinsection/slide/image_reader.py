"""Plain images: PNG and JPEG, decoded once, and single-level TIFFs, streamed strip by strip."""

import math
import threading
from pathlib import Path

import imagecodecs
import numpy as np
import simplejpeg

from thinsection.errors import SlideOpenError, SlideReadError, require
from thinsection.slide.base import GRAY, Slide, on_white
from thinsection.slide.tiff_reader import TiffSlide
from thinsection.types import GIB, Level, Mpp, RgbArray, Size

# PNG and JPEG cannot be decoded in part: what a whole one may take
MAX_DECODED_BYTES = 2 * GIB
_STRIP_PX = 1 << 18  # that become RGB at once
# What a byte of a file can hold: deflated bytes; px of a JPEG, of which encoders get 256 of blank
# grey into a byte
_MAX_DEFLATED, _MAX_JPEG_PX = 1040, 2048
_PNG_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_PNG_DEPTH, _PNG_KIND, _PNG_GRAY = 24, 25, (0, 4)  # bytes of its header; without, with alpha
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


class FlatSlide(Slide):
    """A PNG or JPEG. Thread-safe.

    Memory: `held_bytes` from the first read on, which a run charges to its `--memory`: 3 bytes per
    px, or its own where these are more (8 of RGBA in 16 bits); over 2 GiB it is refused on opening.
    While it is decoded, the file's bytes as well.
    """

    reader = "image"

    def __init__(self, path: str, head: bytes, slide_mpp: Mpp | None) -> None:
        self._path, self._png = Path(path), head.startswith(_PNG)
        size, px_bytes = _png_size(head) if self._png else (_jpeg_size(self._path), 3.0)
        width, height = size
        self.held_bytes = math.ceil(width * height * max(3.0, px_bytes))
        what = f"image: {width} x {height} px of {'PNG' if self._png else 'JPEG'}"
        if self.held_bytes > MAX_DECODED_BYTES:
            raise SlideOpenError(f"{what} cannot be read in parts; convert it to a tiled TIFF")
        least = px_bytes / _MAX_DEFLATED if self._png else 1 / _MAX_JPEG_PX
        if not 1 <= width * height <= self._path.stat().st_size / least:
            raise SlideOpenError(f"{what} are not in so small a file; it is damaged or truncated")
        super().__init__(path, [Level(index=0, size=size, downsample=1.0)], slide_mpp=slide_mpp)
        if self._png:
            deep = "16 bits a channel, of which the upper 8 are shown"
            notes = [deep] * (head[_PNG_DEPTH] == 16) + [GRAY] * (head[_PNG_KIND] in _PNG_GRAY)
            self.notes = tuple(notes)
        self._pixels: RgbArray | None = None
        self._lock = threading.Lock()

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        x, y = origin_lv
        with self._lock:
            pixels = self._pixels = self._decode() if self._pixels is None else self._pixels
        out[:] = pixels[y : y + out.shape[0], x : x + out.shape[1]]

    def _decode(self) -> RgbArray:
        data = self._path.read_bytes()
        try:
            pixels = _decode_png(data) if self._png else simplejpeg.decode_jpeg(data, "RGB")
        except (ValueError, RuntimeError) as error:
            raise self._unreadable(f"image must be whole, got {error}") from None
        found, rule = pixels.shape[1::-1], f"image must have {self.size} px"
        require(found == self.size, rule, f"{found} in {self.slide_path!r}", error=SlideReadError)
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


def _png_size(head: bytes) -> tuple[Size, float]:
    """Of a PNG, and the bytes of a px as it stores them, by its header's bits and colour type."""
    if len(head) < 26 or head[12:16] != b"IHDR":
        raise SlideOpenError("image: a PNG without its header; the file is truncated")
    size = (int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big"))
    return size, head[_PNG_DEPTH] * _PNG_SAMPLES.get(head[_PNG_KIND], 4) / 8


def _jpeg_size(path: Path) -> Size:
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(path.read_bytes())
    except (ValueError, RuntimeError) as error:
        raise SlideOpenError(f"image: not a readable JPEG: {error}") from None
    return (width, height)


def _decode_png(data: bytes) -> RgbArray:
    """uint8 (H, W, 3) from gray, gray with alpha, RGB or RGBA of 8 or 16 bits; on white.

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
        out = pixels.reshape(-1).view(np.uint8)[: out.size].reshape(out.shape)
    rows = max(1, _STRIP_PX // width)
    for top in range(0, height, rows):  # a strip of `out` ends where the px left to read begin
        strip = pixels[top : top + rows]
        strip = (strip >> 8).astype(np.uint8) if strip.dtype == np.uint16 else strip
        out[top : top + rows] = on_white(strip)
    return out
