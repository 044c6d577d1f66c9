"""Headers of PNG and JPEG: size, orientation, and the memory that decoding takes.

Nothing is decoded here, and only the heads of chunks and segments are read.

Source: PNG (W3C, third edition), chunks IHDR, tRNS, eXIf; ITU-T T.81 (JPEG), annex B; libjpeg's
jdcoefct.c, which keeps the coefficients of a whole image where these come in several scans.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from PIL import Image

from thinsection.errors import SlideOpenError
from thinsection.slide.formats.jpeg_streams import BARE, END, FRAMES, START_OF_SCAN
from thinsection.slide.orientation import ORIENTATION_TAG, UPRIGHT, known_orientation
from thinsection.types import Size

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
JPEG_MAGIC = b"\xff\xd8\xff"
# What a byte of a file can hold: deflated bytes; pixels of a JPEG, of which encoders get 256 of
# blank grey into a byte
_MAX_DEFLATED = 1040
_MAX_JPEG_PX = 2048
_RGB_BYTES = 3  # of a decoded pixel
_MAX_EXIF_BYTES = (
    1 << 20
)  # larger ones hold a preview; the tag is not looked for in them

_PNG_SAMPLES = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # of a decoded pixel, by colour type
_PNG_GRAY = (0, 4)  # colour types: without and with alpha
_PNG_PALETTE = 3
_PNG_IHDR_BYTES = 13

_JPEG_APP1 = 0xE1
_EXIF_MAGIC = b"Exif\0\0"
_JPEG_PROGRESSIVE = frozenset((0xC2, 0xC6, 0xCA, 0xCE))
_BLOCK_PX = 8  # edge of a block of coefficients
_BLOCK_BYTES = 128  # 64 coefficients of 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """Header of a file with one picture."""

    kind: str  # 'PNG' or 'JPEG'
    size: Size  # as it is stored
    orientation: int  # number of the EXIF tag
    peak_bytes: (
        int  # memory that decoding takes beside the file's bytes, the result included
    )
    least_file_bytes: float  # a smaller file cannot hold so many pixels
    gray: bool = False
    deep: bool = False  # 16 bits a channel


@dataclass(frozen=True, slots=True)
class _Component:
    """One of a JPEG's channels."""

    across: int  # its sampling factors
    down: int


def read_header(file: BinaryIO, file_bytes: int) -> ImageHeader:
    """Returns the header of an opened PNG or JPEG.

    Args:
        file: at its start, and seekable.
        file_bytes: its size.

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
    for name, length in _png_chunks(file, file_bytes):
        if not head:
            if name != b"IHDR" or length != _PNG_IHDR_BYTES:
                raise SlideOpenError(
                    "image: a PNG without its header; the file is truncated"
                )
            head = file.read(length)
        elif name == b"tRNS":
            has_transparent_colour = True
        elif name == b"eXIf" and length <= _MAX_EXIF_BYTES:
            orientation = _exif_orientation(file.read(length))
    if len(head) < _PNG_IHDR_BYTES:
        raise SlideOpenError("image: a PNG without its header; the file is truncated")
    width, height, bits, colour_type = struct.unpack(">IIBB", head[:10])
    stored_samples = 1 if colour_type == _PNG_PALETTE else _png_samples(colour_type)
    stored_px_bytes = stored_samples * bits / 8
    decoded_samples = _png_samples(colour_type) + has_transparent_colour
    decoded_px_bytes = decoded_samples * (2 if bits == 16 else 1)
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


def _png_samples(colour_type: int) -> int:
    """Returns the samples of a decoded pixel; those of RGBA where PNG does not know the type."""
    return _PNG_SAMPLES.get(colour_type, 4)


def _png_chunks(file: BinaryIO, file_bytes: int) -> Iterator[tuple[bytes, int]]:
    """(name, length) of each chunk, with the file at the chunk's data."""
    at = len(PNG_MAGIC)
    while at + 8 <= file_bytes:
        file.seek(at)
        head = file.read(8)
        if len(head) < 8:
            return
        length, name = struct.unpack(">I4s", head)
        yield name, length
        at += 12 + length  # length and name before the data, a check sum behind


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
    factors = [frame[7 + 3 * n] for n in range(count)]
    components = [_Component(across=f >> 4, down=f & 15) for f in factors]
    several_scans = frame_marker in _JPEG_PROGRESSIVE or components_in_scan < count
    pixel_bytes = width * height * _RGB_BYTES
    extra = _coefficient_bytes((width, height), components) if several_scans else 0
    return ImageHeader(
        kind="JPEG",
        size=(width, height),
        orientation=_exif_orientation(exif) if exif else UPRIGHT,
        peak_bytes=pixel_bytes + extra,
        least_file_bytes=width * height / _MAX_JPEG_PX,
    )


def _jpeg_segments(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(marker, data) of the segments up to the first scan's header, which is the last."""
    while True:
        byte = file.read(1)
        while byte and byte != b"\xff":  # as libjpeg, which skips what is no marker
            byte = file.read(1)
        while byte == b"\xff":  # any number of which may stand before a marker
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


def _coefficient_bytes(size: Size, components: Sequence[_Component]) -> int:
    """Counts what libjpeg keeps of an image in several scans: 2 bytes a coefficient."""
    if not all(c.across and c.down for c in components):
        raise SlideOpenError("image: not a readable JPEG: a sampling factor of 0")
    most_across = max(component.across for component in components)
    most_down = max(component.down for component in components)
    num_bytes = 0
    for component in components:
        blocks_x = _blocks(size[0], component.across, most_across)
        blocks_y = _blocks(size[1], component.down, most_down)
        num_bytes += blocks_x * blocks_y * _BLOCK_BYTES
    return num_bytes


def _blocks(px: int, factor: int, most: int) -> int:
    """Blocks of a component along a side, padded to whole units of the image's grid."""
    blocks = math.ceil(px * factor / (most * _BLOCK_PX))
    return math.ceil(blocks / factor) * factor


def _exif_orientation(data: bytes) -> int:
    """Returns the number of EXIF's tag; 1 where it cannot be parsed, as every viewer takes it."""
    exif = Image.Exif()
    try:
        exif.load(data)
        return known_orientation(exif.get(ORIENTATION_TAG))
    except (SyntaxError, ValueError, TypeError, KeyError, IndexError, struct.error):
        return UPRIGHT
