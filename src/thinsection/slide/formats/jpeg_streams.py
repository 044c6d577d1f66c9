"""JPEG streams in a container: reads their headers, and gives them the container's colours.

A TIFF states in tag 262 whether its JPEGs hold RGB or YCbCr. A JPEG decoder looks at other signs
instead: the markers of JFIF and Adobe, and the names of the components. If these contradict the
container, the container is right, as in libtiff. Therefore the stream's own markers are replaced by
one that states the container's colours.

Source: ITU-T T.81 (JPEG), annex B; libjpeg's jdapimin.c `default_decompress_parms`; libtiff's
tif_jpeg.c `JPEGPreDecode`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from thinsection.types import Size

Buffer = bytes | memoryview
Colours = Literal["RGB", "YCbCr"]

END = 0xD9
START_OF_SCAN = 0xDA
_START = b"\xff\xd8"
_APP0 = 0xE0
_APP14 = 0xEE
_APPLICATION = range(0xE0, 0xF0)
# start of frame: 0xC0 to 0xCF, except DHT (C4), JPG (C8, reserved) and DAC (CC)
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
RESTARTS = range(0xD0, 0xD8)
# markers without a length: TEM, restarts, SOI
BARE = frozenset((0x01, *RESTARTS, 0xD8))
# stands for the pixels of a scan, which have no marker of their own
PIXELS = 0
_NEXT_SEGMENT = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
# within pixels 0xFF is followed by 0x00, a restart marker or another 0xFF
_NEXT_AFTER_PIXELS = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_RGB_NAMES = b"RGB"
_ADOBE_BYTES = 12  # bytes of APP14 up to its transform flag
# largest number of bytes between the segments of a header; libjpeg skips any number, at any cost
_MAX_STRAY_BYTES = 1 << 12
_RGB_COMPONENTS = 3
# Adobe's APP14; a decoder follows it before other signs if there is no JFIF marker (APP0)
_MARKERS: dict[Colours, bytes] = {
    "RGB": bytes.fromhex("ffee000e41646f626500640000000000"),
    "YCbCr": bytes.fromhex("ffee000e41646f626500640000000001"),
}


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """Header of a stream: everything before its first scan.

    Attributes:
        size: (width, height), px; (0, 0) for tables without a picture.
        components: names of the components, one byte each; empty for tables.
        marked: colours according to the JFIF or Adobe marker; None without a marker.
        kept: bytes after the start marker, without application data; for tables without the end
            marker.
        scan: place of the marker of the first scan; 0 for tables.
    """

    size: Size
    components: bytes
    marked: Colours | None
    kept: tuple[Buffer, ...]
    scan: int


def read_jpeg_header(data: Buffer) -> JpegHeader:
    """Reads the header of a stream, or of tables that streams share.

    Raises:
        ValueError: not a JPEG stream, or it ends within its header.
    """
    size = (0, 0)
    names = b""
    has_jfif = False
    adobe: Colours | None = None
    kept: list[Buffer] = []
    kept_from = 2
    is_whole = False
    scan = 0
    for marker, begin, end in walk_segments(data, max_stray_bytes=_MAX_STRAY_BYTES):
        is_whole = marker in (START_OF_SCAN, END)
        if marker == START_OF_SCAN:
            scan = begin
            break
        if marker == END or marker in _APPLICATION:
            kept.append(data[kept_from:begin])
            kept_from = len(data) if marker == END else end
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
    if not is_whole:
        raise ValueError("a JPEG that ends within its header")
    kept.append(data[kept_from:])
    marked = "YCbCr" if has_jfif else adobe
    return JpegHeader(size, names, marked, tuple(kept), scan)


class Segment(NamedTuple):
    """Part of a stream: a marker with its payload, or the pixels after the header of a scan."""

    marker: int
    begin: int  # first byte of the marker
    end: int

    @property
    def payload(self) -> slice:
        """Bytes after the marker and its length."""
        return slice(min(self.begin + 4, self.end), self.end)


def walk_segments(
    data: Buffer, *, max_stray_bytes: int | None = None
) -> Iterator[Segment]:
    """Yields the parts of a stream, one after another, up to its end marker or its last byte.

    Bytes between two parts belong to neither: fill bytes, or stray data. Markers without a length
    are parts of two bytes. The pixels of a scan are the part `PIXELS` after `START_OF_SCAN`.

    Args:
        data: the stream, or tables that streams share.
        max_stray_bytes: the stream ends after more stray bytes than this; None: any number.

    Raises:
        ValueError: not a JPEG stream, or a part is longer than the rest of the stream.
    """
    if data[:2] != _START:
        raise ValueError("no JPEG")
    place = 2
    length = len(data)
    stray_bytes = 0
    while place + 2 <= length:
        begin = place
        if data[begin] != 0xFF or data[begin + 1] in (0xFF, 0x00):
            limit = length
            if max_stray_bytes is not None:
                limit = min(length, place + max_stray_bytes - stray_bytes + 2)
            found = _NEXT_SEGMENT.search(data, begin, limit)
            if found is None:
                return
            begin = found.start()
            stray_bytes += begin - place
        marker = data[begin + 1]
        if marker == END or marker in BARE:
            place = begin + 2
            yield Segment(marker, begin, place)
            if marker == END:
                return
            continue
        place = begin + 2 + int.from_bytes(data[begin + 2 : begin + 4], "big")
        if place < begin + 4 or place > length:
            raise ValueError("a JPEG that ends within one of its segments")
        yield Segment(marker, begin, place)
        if marker == START_OF_SCAN:
            found = _NEXT_AFTER_PIXELS.search(data, place)
            end = found.start() if found else length
            yield Segment(PIXELS, place, end)
            place = end


def with_colours(
    header: JpegHeader, colours: Colours, tables: JpegHeader | None
) -> bytes:
    """Returns a complete stream that any decoder reads with these colours.

    Args:
        header: header of the stream.
        colours: colours that the container states; ignored for a stream with one component.
        tables: tables that the streams of the container share.

    Memory: the stream, once.
    """
    has_three = len(header.components) == _RGB_COMPONENTS
    marker = _MARKERS[colours] if has_three else b""
    shared = () if tables is None else tables.kept
    return b"".join((_START, marker, *shared, *header.kept))


def find_contradiction(
    header: JpegHeader, colours: Colours, tables: JpegHeader | None
) -> str:
    """Returns a note if a stream's own signs contradict the container's colours; else ''."""
    own = header.marked or (tables.marked if tables else None)
    if own is None and header.components == _RGB_NAMES:
        own = "RGB"
    if len(header.components) != _RGB_COMPONENTS or own in (None, colours):
        return ""
    return (
        f"the file says that its JPEG blocks hold {colours}, the blocks say {own}; colours are as "
        "the file says, which is how libtiff reads them"
    )
