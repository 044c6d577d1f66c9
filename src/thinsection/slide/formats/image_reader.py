"""Plain images: PNG and JPEG, decoded once, and single-level TIFFs, streamed strip by strip.

The header states the size, the orientation and the memory that decoding takes. To find it, only the
heads of chunks and segments are read.

Source: PNG (W3C, third edition), chunks IHDR, tRNS, eXIf; ITU-T T.81 (JPEG), annex B; libjpeg's
jdcoefct.c, which keeps the coefficients of the whole image if they come in several scans.
"""

import math
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import imagecodecs
import numpy as np
import simplejpeg
from PIL import Image

from thinsection.errors import SlideOpenError, SlideReadError
from thinsection.slide.base import GRAY, Slide, on_white
from thinsection.slide.formats.jpeg_streams import BARE, END, FRAMES, START_OF_SCAN
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.slide.orientation import ORIENTATION_TAG, UPRIGHT, known_orientation
from thinsection.slide.pictures import only_picture
from thinsection.types import GIB, Level, Mpp, RgbArray, Size

# most memory for decoding a PNG or JPEG, which cannot be decoded in parts
MAX_DECODED_BYTES = 2 * GIB
_STRIP_PX = 1 << 18  # pixels that are converted to RGB at once
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_DEEP = "16 bits a channel, of which the upper 8 are shown"  # a note
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
JPEG_MAGIC = b"\xff\xd8\xff"
# Most data that one byte of a file can hold: bytes after inflating, and pixels of a JPEG. Encoders
# store 256 pixels of blank grey in a byte.
_MAX_DEFLATED = 1040
_MAX_JPEG_PX = 2048
_RGB_BYTES = 3  # bytes of a decoded pixel
# larger EXIF segments hold a preview, and are not searched for the orientation tag
_MAX_EXIF_BYTES = 1 << 20
# samples of a decoded pixel, by colour type
_PNG_SAMPLES = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
_PNG_GRAY = (0, 4)  # colour types: without and with alpha
_PNG_PALETTE = 3
_PNG_IHDR_BYTES = 13
_JPEG_APP1 = 0xE1
_EXIF_MAGIC = b"Exif\0\0"
_JPEG_PROGRESSIVE = frozenset((0xC2, 0xC6, 0xCA, 0xCE))
_BLOCK_PX = 8  # edge of a block of coefficients
_BLOCK_BYTES = 128  # 64 coefficients of 16 bits


class FlatSlide(Slide):
    """A PNG or JPEG. Thread-safe.

    Memory: `held_bytes` while it is decoded, which a run counts in its `--memory`, and the file's
    bytes. `held_bytes` is 3 bytes per px. A PNG with more bytes per px takes these instead (8 for
    RGBA in 16 bits); a PNG with fewer takes these in addition (1 for gray). A JPEG in several scans
    (a progressive one) takes 2 bytes for each coefficient in addition: 3 per px at 4:2:0, 6 at
    4:4:4. A file that needs more than 2 GiB is refused when it is opened.
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
        """Frees the decoded image."""
        super().close()
        with self._lock:
            self._pixels = None


def open_image(
    path: str, *, slide_mpp: Mpp | None = None, image: str | None = None
) -> Slide:
    """Opens a PNG, JPEG or single-level TIFF. Raises SlideOpenError: the file is none of these."""
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

    Memory: the stored px. If they have at least 3 bytes each, the result overwrites them; otherwise
    the result takes 3 bytes per px in addition.
    """
    pixels = np.atleast_3d(imagecodecs.png_decode(data))
    if pixels.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"px of type {pixels.dtype}")
    if pixels.dtype == np.uint8 and pixels.shape[2] == 3:
        return pixels
    height, width, samples = pixels.shape
    out = np.empty((height, width, 3), np.uint8)
    if samples * pixels.itemsize >= 3:
        # a strip of `out` ends before the px that are not read yet
        out = pixels.reshape(-1).view(np.uint8)[: out.size].reshape(out.shape)
    rows = max(1, _STRIP_PX // width)
    for top in range(0, height, rows):
        strip = pixels[top : top + rows]
        if strip.dtype == np.uint16:
            strip = (strip >> 8).astype(np.uint8)
        out[top : top + rows] = on_white(strip)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """Header of a file with one picture."""

    kind: str  # 'PNG' or 'JPEG'
    size: Size  # size of the stored picture, before it is turned upright
    orientation: int  # number of the EXIF tag
    peak_bytes: (
        int  # memory that decoding takes beside the file's bytes, the result included
    )
    least_file_bytes: float  # a smaller file cannot hold so many pixels
    gray: bool = False
    deep: bool = False  # True for 16 bits a channel


def read_header(file: BinaryIO, file_bytes: int) -> ImageHeader:
    """Returns the header of an opened PNG or JPEG.

    Args:
        file: the file, at its start; it must be seekable.
        file_bytes: size of the file.

    Memory: one EXIF segment, at most 1 MiB.

    Raises:
        SlideOpenError: neither a PNG nor a JPEG, or its header is damaged.
    """
    magic = file.read(len(PNG_MAGIC))
    if magic == PNG_MAGIC:
        return _read_png(file, file_bytes)
    if magic.startswith(JPEG_MAGIC):
        file.seek(2)
        return _read_jpeg(file)
    raise SlideOpenError("image: not a PNG or JPEG")


def _read_png(file: BinaryIO, file_bytes: int) -> ImageHeader:
    head = b""
    orientation = UPRIGHT
    has_transparent_colour = False
    place = len(PNG_MAGIC)
    while place + 8 <= file_bytes:
        file.seek(place)
        start = file.read(8)
        if len(start) < 8:
            break
        length, name = struct.unpack(">I4s", start)
        place += 12 + length  # length, name; check sum after the data
        if not head:
            if name != b"IHDR" or length != _PNG_IHDR_BYTES:
                break
            head = file.read(length)
        elif name == b"tRNS":
            has_transparent_colour = True
        elif name == b"eXIf" and length <= _MAX_EXIF_BYTES:
            orientation = _exif_orientation(file.read(length))
    if len(head) < _PNG_IHDR_BYTES:
        raise SlideOpenError("image: a PNG without its header; the file is truncated")
    width, height, bits, colour_type = struct.unpack(">IIBB", head[:10])
    # those of RGBA where PNG does not know the type
    samples = _PNG_SAMPLES.get(colour_type, 4)
    stored_px_bytes = (1 if colour_type == _PNG_PALETTE else samples) * bits / 8
    decoded_px_bytes = (samples + has_transparent_colour) * (2 if bits == 16 else 1)
    if decoded_px_bytes < _RGB_BYTES:  # RGB is then made beside it, else in its place
        decoded_px_bytes += _RGB_BYTES
    return ImageHeader(
        kind="PNG",
        size=(width, height),
        orientation=orientation,
        peak_bytes=width * height * decoded_px_bytes,
        least_file_bytes=width * height * stored_px_bytes / _MAX_DEFLATED,
        gray=colour_type in _PNG_GRAY,
        deep=bits == 16,
    )


def _read_jpeg(file: BinaryIO) -> ImageHeader:
    frame_marker = 0
    frame = b""
    exif = b""
    components_in_scan = 0
    for marker, data in _jpeg_segments(file):
        if marker in FRAMES and not frame:
            frame_marker = marker
            frame = data
        elif marker == _JPEG_APP1 and data.startswith(_EXIF_MAGIC) and not exif:
            exif = data[len(_EXIF_MAGIC) :]
        elif marker == START_OF_SCAN:
            components_in_scan = data[0] if data else 0
    if len(frame) < 6 or len(frame) < 6 + 3 * frame[5]:
        raise SlideOpenError(
            "image: not a readable JPEG: no frame header before its pixels"
        )
    height, width, count = struct.unpack(">HHB", frame[1:6])
    # across and down, of each component
    factors = [divmod(frame[7 + 3 * n], 16) for n in range(count)]
    several_scans = frame_marker in _JPEG_PROGRESSIVE or components_in_scan < count
    pixel_bytes = width * height * _RGB_BYTES
    extra = _coefficient_bytes((width, height), factors) if several_scans else 0
    return ImageHeader(
        kind="JPEG",
        size=(width, height),
        orientation=_exif_orientation(exif) if exif else UPRIGHT,
        peak_bytes=pixel_bytes + extra,
        least_file_bytes=width * height / _MAX_JPEG_PX,
    )


def _jpeg_segments(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields (marker, data) of the segments up to and including the header of the first scan."""
    while True:
        byte = file.read(1)
        while byte and byte != b"\xff":  # like libjpeg, skip bytes that are no marker
            byte = file.read(1)
        while byte == b"\xff":  # any number of fill bytes may stand before a marker
            byte = file.read(1)
        if not byte or byte[0] == END:
            return
        marker = byte[0]
        if marker == 0 or marker in BARE:
            continue
        length = int.from_bytes(file.read(2), "big")
        yield marker, file.read(max(0, length - 2))
        if marker == START_OF_SCAN:
            return


def _coefficient_bytes(size: Size, factors: Sequence[tuple[int, int]]) -> int:
    """Counts the bytes that libjpeg keeps of an image in several scans: 2 for each coefficient.

    Args:
        size: (width, height) of the image, px.
        factors: sampling factors of its components, across and down.
    """
    if not all(across and down for across, down in factors):
        raise SlideOpenError("image: not a readable JPEG: a sampling factor of 0")
    most_across = max(across for across, _ in factors)
    most_down = max(down for _, down in factors)
    num_bytes = 0
    for across, down in factors:
        blocks_x = _blocks(size[0], across, most_across)
        blocks_y = _blocks(size[1], down, most_down)
        num_bytes += blocks_x * blocks_y * _BLOCK_BYTES
    return num_bytes


def _blocks(px: int, factor: int, most: int) -> int:
    """Blocks of a component along a side, padded to whole units of the image's grid."""
    blocks = math.ceil(px * factor / (most * _BLOCK_PX))
    return math.ceil(blocks / factor) * factor


def _exif_orientation(data: bytes) -> int:
    """Returns the orientation number in EXIF data; 1 if it cannot be parsed, as in all viewers."""
    exif = Image.Exif()
    try:
        exif.load(data)
        return known_orientation(exif.get(ORIENTATION_TAG))
    except (SyntaxError, ValueError, TypeError, KeyError, IndexError, struct.error):
        return UPRIGHT
