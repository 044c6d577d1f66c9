"""JPEG streams inside a container: their header, and the stream with the container's colours.

A TIFF says by tag 262 whether its JPEGs hold RGB or YCbCr. A JPEG decoder goes by other signs:
JFIF's and Adobe's markers, and the names of the components. Where these contradict the container,
the container is right, as it is for libtiff. So a stream's own markers are left out, and one that
says what the container says is put in.

Source: ITU-T T.81 (JPEG), annex B; libjpeg's jdapimin.c `default_decompress_parms`; libtiff's
tif_jpeg.c `JPEGPreDecode`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from thinsection.types import Size

Buffer = bytes | memoryview
Colours = Literal["RGB", "YCbCr"]

END = 0xD9
START_OF_SCAN = 0xDA
_START = b"\xff\xd8"
_APP0 = 0xE0
_APP14 = 0xEE
_APPLICATION = range(0xE0, 0xF0)
# start of frame: 0xC0 to 0xCF but for tables (C4), a reserved one (C8) and conditioning (CC)
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# markers without a length: TEM, RST0 to RST7, SOI
BARE = frozenset((0x01, *range(0xD0, 0xD9)))
_RGB_NAMES = b"RGB"
_ADOBE_BYTES = 12  # of APP14 that end with the transform
# bytes of no segment that a header may hold; libjpeg skips any number, at any cost
_MAX_STRAY_BYTES = 1 << 12
_RGB_COMPONENTS = 3
# Adobe's APP14, which a decoder without JFIF's APP0 believes before anything else
_MARKERS: dict[Colours, bytes] = {
    "RGB": bytes.fromhex("ffee000e41646f626500640000000000"),
    "YCbCr": bytes.fromhex("ffee000e41646f626500640000000001"),
}


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """What a stream says before its first scan.

    Attributes:
        size: (width, height), px; (0, 0) of tables without a picture.
        components: names of the components, a byte each; none of tables.
        marked: colours by JFIF's or Adobe's marker; None without one.
        kept: bytes from after the start of the stream on, without what applications wrote; of
            tables without their end.
    """

    size: Size
    components: bytes
    marked: Colours | None
    kept: tuple[Buffer, ...]


def read_jpeg_header(data: Buffer) -> JpegHeader:
    """Reads the header of a stream, or of tables that streams share.

    Raises:
        ValueError: it is no JPEG stream, or it ends within its header.
    """
    size = (0, 0)
    names = b""
    has_jfif = False
    adobe: Colours | None = None
    kept: list[Buffer] = []
    kept_from = 2
    for marker, begin, end in _segments(data):
        if marker == END or marker in _APPLICATION:
            kept.append(data[kept_from:begin])
            kept_from = end
            payload = bytes(data[begin + 4 : min(end, begin + 4 + _ADOBE_BYTES)])
            if marker == _APP0 and payload.startswith(b"JFIF"):
                has_jfif = True
            is_adobe = marker == _APP14 and payload.startswith(b"Adobe")
            if is_adobe and len(payload) == _ADOBE_BYTES:
                adobe = "YCbCr" if payload[-1] else "RGB"
        elif marker in FRAMES:
            frame = bytes(data[begin + 4 : end])
            if len(frame) < 6 + 3 * frame[5]:
                raise ValueError("a JPEG whose frame header is cut")
            size = (
                int.from_bytes(frame[3:5], "big"),
                int.from_bytes(frame[1:3], "big"),
            )
            names = frame[6 : 6 + 3 * frame[5] : 3]
    kept.append(data[kept_from:])
    marked = "YCbCr" if has_jfif else adobe
    return JpegHeader(size, names, marked, tuple(kept))


def _segments(data: Buffer) -> Iterator[tuple[int, int, int]]:
    """Yields marker, first byte and end of each segment, up to the first scan or the end."""
    if data[:2] != _START:
        raise ValueError("no JPEG")
    begin = 2
    length = len(data)
    stray_bytes = 0
    while begin + 2 <= length and stray_bytes <= _MAX_STRAY_BYTES:
        if data[begin] != 0xFF or data[begin + 1] in (0xFF, 0x00):
            begin += 1  # padding, or bytes that belong to no segment
            stray_bytes += 1
            continue
        marker = data[begin + 1]
        if marker == START_OF_SCAN:
            return
        if marker == END:
            yield marker, begin, length
            return
        if marker in BARE:
            begin += 2
            continue
        end = begin + 2 + int.from_bytes(data[begin + 2 : begin + 4], "big")
        if end < begin + 4 or end > length:
            break
        yield marker, begin, end
        begin = end
    raise ValueError("a JPEG that ends within its header")


def with_colours(
    header: JpegHeader, colours: Colours, tables: JpegHeader | None
) -> bytes:
    """Returns a whole stream that any decoder takes for one of these colours.

    Args:
        header: header of the stream.
        colours: colours by its container; of no use to a stream of one component.
        tables: what the streams of the container share.

    Memory: the stream, once.
    """
    has_three = len(header.components) == _RGB_COMPONENTS
    marker = _MARKERS[colours] if has_three else b""
    shared = () if tables is None else tables.kept
    return b"".join((_START, marker, *shared, *header.kept))


def find_contradiction(
    header: JpegHeader, colours: Colours, tables: JpegHeader | None
) -> str:
    """Returns a note where a stream's own signs are not the container's colours; '' otherwise."""
    own = header.marked or (tables.marked if tables else None)
    if own is None and header.components == _RGB_NAMES:
        own = "RGB"
    if len(header.components) != _RGB_COMPONENTS or own in (None, colours):
        return ""
    return (
        f"the file says that its JPEG blocks hold {colours}, the blocks say {own}; colours are as "
        "the file says, which is how libtiff reads them"
    )
