"""Removes data other than the picture from compressed streams: comments, EXIF, bytes after the end.

A cleaner takes the bytes of one tile, strip, frame or table. Entropy-coded data is never changed.
A JPEG or JPEG 2000 stream keeps its length up to its end, because other structures of a file may
point into it: a segment that is removed becomes a comment of zeros.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import imagecodecs
import simplejpeg
from tifffile import TiffPage

from thinsection.errors import InvalidInputError
from thinsection.slide.formats.jpeg_streams import (
    BARE,
    END,
    FRAMES,
    PIXELS,
    RESTARTS,
    START_OF_SCAN,
    Segment,
    walk_segments,
)
from thinsection.slide.formats.tiff_pages import (
    APERIO_YCBCR,
    DEFLATE,
    JPEG,
    LZW,
    PICTURE_CODECS,
    RAW,
    SEPARATE,
    ZSTD,
    segment_size,
)

# marker codes of JPEG, without the leading 0xFF
_COM = 0xFE
_APP0 = 0xE0
_APP14 = 0xEE
_DQT = 0xDB
_DHT = 0xC4
_DRI = 0xDD
_DAC = 0xCC
_ARITHMETIC_FRAMES = range(0xC9, 0xD0)
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_MAX_COMPONENTS = 4  # largest number of components of a frame
_MARKER_NAMES = {
    _COM: "comment (COM)",
    _APP0: "density or thumbnail (APP0)",
    0xE1: "EXIF or XMP (APP1)",
    0xE2: "profile (APP2)",
    0xED: "IPTC (APP13)",
}

# Adobe's segment: version 100 or 101, two numbers with flags in their upper bits, colour transform
_ADOBE_NUMBERS = re.compile(
    rb"\0[\x64\x65][\0\x40\x80\xc0]\0[\0\x40\x80\xc0]\0[\0-\2]", re.DOTALL
)
_EXTRANEOUS = re.compile(r"(\d+) extraneous bytes before marker 0x([0-9a-f]{2})")
# most bytes after the last pixel that libjpeg reads without a warning
_READ_AHEAD_BYTES = 8
_AFTER_LAST_PIXEL = "bytes after the last pixel of a JPEG"
_COMPRESSED_REST = "bytes after the last pixel, compressed"
_END_UNREAD = "bytes after the last pixel of JPEGs that libjpeg does not decode"
# kinds of data that cannot be told from pixels, so that they stay
_JPEG_UNREAD = frozenset(
    {
        "up to 4 bytes after the last pixel of a JPEG, and numbers in JPEG tables that pixels use"
    }
)

# marker codes of a JPEG 2000 codestream
_J2K_START = b"\xff\x4f\xff\x51"
_J2K_COM = 0x64
# marker segments that no decoder needs
_J2K_POINTERS = {0x55: "TLM", 0x57: "PLM", 0x58: "PLT", 0x63: "CRG"}
_J2K_UNREAD = frozenset({"bytes after the last packet of JPEG 2000 tile parts"})
_WEBP_UNREAD = frozenset({"bytes after the last pixel of WebP chunks"})
_J2K_SOT = 0x90
_J2K_SOD = 0x93
_J2K_EOC = 0xD9
_J2K_KNOWN = bytes.fromhex("505152535557 58595c5d5e5f606163")
_JP2_START = b"\x00\x00\x00\x0cjP  "
_JP2_HEADER_BOXES = (b"ihdr", b"bpcc", b"pclr", b"cmap", b"cdef")
_JP2_BRANDS = (b"jp2 ", b"jpx ", b"jpxb", b"J2P0", b"J2P1", b"\0\0\0\0")

_JXL_BOXES = b"\x00\x00\x00\x0cJXL "
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

# a table of a JPEG: marker (DQT or DHT) and its first byte without precision: class and number
JpegTable = tuple[int, int]


@dataclass(frozen=True)
class Cleaned:
    """A stream as it is written to the copy."""

    data: bytes
    removed: frozenset[str] = frozenset()  # kinds of data that were removed
    unread: frozenset[str] = frozenset()  # kinds of data that could not be inspected
    lacks: frozenset[JpegTable] = (
        frozenset()
    )  # tables that its pixels need and that it does not have


class StreamError(InvalidInputError):
    """A stream whose parts cannot be told apart, so that its content is not known."""


def clean_page_segment(page: TiffPage, index: int, data: bytes) -> Cleaned:
    """Cleans a tile or strip of a page of tifffile; see `clean_segment`."""
    samples = 1 if page.planarconfig == SEPARATE else int(page.samplesperpixel)
    width, rows = segment_size(page)
    if not page.is_tiled:
        strips_of_plane = -(-page.imagelength // rows)
        above = index % strips_of_plane * rows
        rows = min(rows, page.imagelength - above)
    row_bytes = -(-width * samples * int(page.bitspersample) // 8)
    tables = page.jpegtables or b""
    return clean_segment(data, int(page.compression), rows * row_bytes, tables)


def clean_segment(
    data: bytes, compression: int, num_bytes: int, tables: bytes = b""
) -> Cleaned:
    """Removes data other than the picture from a tile or strip of a TIFF.

    Args:
        data: the bytes as they are stored.
        compression: TIFF's number of the compression.
        num_bytes: bytes of the decoded segment; only used for streams that do not state their size.
        tables: JPEG tables that the segments share.

    Raises StreamError: the stream is damaged, or of a kind that is not known here.
    """
    if not data:
        return Cleaned(data)
    codec = PICTURE_CODECS.get(compression)
    if compression in JPEG:
        return clean_jpeg(data, tables)
    if compression in APERIO_YCBCR or codec == "jpeg2k":
        return clean_jpeg2000(data)
    if codec == "webp":
        return clean_webp(data)
    if codec == "jpegxl":
        return clean_jpegxl(data)
    if compression in RAW:
        return _cut(data, num_bytes)
    if compression in DEFLATE:
        return _clean_deflate(data, num_bytes)
    if compression in ZSTD:
        frame = _cut(data, _zstd_end(data))
        return _clean_packed(
            frame, num_bytes, "a zstd", imagecodecs.zstd_decode, imagecodecs.zstd_encode
        )
    if compression in LZW:
        codes = _cut(data, _lzw_end(data))
        return _clean_packed(
            codes, num_bytes, "an LZW", imagecodecs.lzw_decode, imagecodecs.lzw_encode
        )
    raise StreamError(
        f"compression must be one that thinsection can inspect, got {compression}"
    )


def _cut(data: bytes, end: int, removed: set[str] | None = None) -> Cleaned:
    """Cuts the stream at its end; zeros after it are not reported as removed."""
    kinds = set(removed or ())
    if data[end:].strip(b"\0"):
        kinds.add("bytes after the end of the image data")
    return Cleaned(data[:end], frozenset(kinds))


def clean_jpeg(
    data: bytes, tables: bytes = b"", *, needed: frozenset[JpegTable] | None = None
) -> Cleaned:
    """Zeroes comments and application segments of a JPEG or of JPEG tables, and cuts it at its end.

    Tables that a scan uses, frame and scan headers, and segments that define the colours are kept:
    JFIF without its density and thumbnail, and Adobe's transform. Bytes between the last pixel and
    the end mark become fill bytes, and tables that no scan uses are filled with plain numbers.
    Source: ITU-T T.81, annex B.

    Args:
        data: the stream.
        tables: JPEG tables that the stream shares with others.
        needed: if `data` is tables without a scan, the tables that other streams use; None: all.
    """
    cleaned = _clean_segments(data, tables)
    return _without_unused_tables(cleaned, needed)


def _clean_segments(data: bytes, tables: bytes) -> Cleaned:
    """Cleans the segments of a JPEG one by one, and the end of its last scan."""
    out = bytearray(data)
    removed: set[str] = set()
    place = 2
    scan_start = 0
    scan_end = len(data)
    segments = list(_segments(data))
    useless = _useless_markers(data, segments)
    for segment in segments:
        marker, begin, end = segment
        _blank(out, data, place, begin, removed)
        place = end
        if marker == PIXELS:
            scan_start = begin
            scan_end = end
        elif marker == END:
            unread = _fill_after_last_pixel(out, scan_start, scan_end, tables, removed)
            return replace(_cut(bytes(out), end, removed), unread=unread)
        elif marker not in BARE:
            payload = data[segment.payload]
            kept = None if marker in useless else _jpeg_payload(marker, payload)
            if kept is None:
                out[begin + 1] = _COM
                kept = bytes(len(payload))
            if kept != payload:
                name = _MARKER_NAMES.get(marker, f"segment ff {marker:02x}")
                removed.add(f"JPEG {name}")
            out[segment.payload] = kept
    _blank(out, data, place, len(data), removed)
    unread = _fill_after_last_pixel(out, scan_start, scan_end, tables, removed)
    return Cleaned(bytes(out), frozenset(removed), unread)


def _useless_markers(data: bytes, segments: Sequence[Segment]) -> set[int]:
    """Returns the markers of segments without effect in this stream, which are removed.

    Raises:
        StreamError: several frames; only one of them can be the picture.
    """
    frames = [segment.marker for segment in segments if segment.marker in FRAMES]
    scans = [segment for segment in segments if segment.marker == PIXELS]
    if len(frames) > 1:
        raise StreamError(f"a JPEG must have one frame, got {len(frames)}")
    useless: set[int] = set()
    if not scans:
        # shared tables: decoders use no other segment of theirs
        useless.update(FRAMES, (_DRI, _DAC, START_OF_SCAN))
    if not any(frame in _ARITHMETIC_FRAMES for frame in frames):
        useless.add(_DAC)
    has_pixels = any(scan.end > scan.begin for scan in scans)
    if has_pixels and not any(
        _RESTART.search(data, scan.begin, scan.end) for scan in scans
    ):
        useless.add(_DRI)
    return useless


def _segments(data: bytes) -> Iterator[Segment]:
    """Yields the parts of a JPEG; StreamError if they cannot be told apart."""
    try:
        yield from walk_segments(data)
    except ValueError as error:
        raise StreamError(
            f"a JPEG must consist of segments that end in it, got {error}"
        ) from error


def _without_unused_tables(
    cleaned: Cleaned, needed: frozenset[JpegTable] | None
) -> Cleaned:
    """Fills tables that no scan uses, or that are replaced before a scan uses them."""
    out = bytearray(cleaned.data)
    places: dict[JpegTable, list[slice]] = {}  # places of all definitions of a table
    current: dict[JpegTable, int] = {}  # start of the last definition of a table
    used: set[int] = set()
    lacks: set[JpegTable] = set()
    has_scan = False
    quantizers: dict[int, int] = {}  # component -> number of its quantizer
    for segment in _segments(cleaned.data):
        marker = segment.marker
        start = segment.payload.start
        payload = cleaned.data[segment.payload]
        if marker in (_DQT, _DHT):
            for place, end in _tables_in(marker, payload):
                head = payload[place]
                # the upper bits hold the precision of a quantizer, which is not compared
                table = (marker, head & 15 if marker == _DQT else head)
                places.setdefault(table, []).append(slice(start + place, start + end))
                current[table] = start + place
        elif marker in FRAMES:
            for at in range(6, len(payload), 3):
                quantizers[payload[at]] = payload[at + 2]
        elif marker == START_OF_SCAN:
            has_scan = True
            in_scan = _tables_of_scan(payload, quantizers)
            lacks |= in_scan - current.keys()
            used |= {current[table] for table in in_scan if table in current}
    if not has_scan:
        kept = set(current) if needed is None else needed
        used = {current[table] for table in kept if table in current}
    removed = set(cleaned.removed)
    for (marker, _), definitions in places.items():
        for definition in definitions:
            if definition.start not in used and _fill_table(out, marker, definition):
                removed.add("JPEG tables that no pixel uses")
    return Cleaned(bytes(out), frozenset(removed), cleaned.unread, frozenset(lacks))


def _tables_in(marker: int, payload: bytes) -> Iterator[tuple[int, int]]:
    """Yields start and end of each table of a segment; the last may end after the segment."""
    place = 0
    while place < len(payload):
        if marker == _DQT:
            end = place + (129 if payload[place] >> 4 else 65)
        else:
            end = place + 17 + sum(payload[place + 1 : place + 17])
        yield place, end
        place = end


def _tables_of_scan(payload: bytes, quantizers: dict[int, int]) -> set[JpegTable]:
    """Returns the tables that a scan needs; quantizers are those of its components."""
    tables: set[JpegTable] = set()
    for at in range(1, 1 + 2 * payload[0], 2):
        component, selectors = payload[at], payload[at + 1]
        tables.add((_DHT, selectors >> 4))
        tables.add((_DHT, 0x10 | selectors & 15))
        if component in quantizers:
            tables.add((_DQT, quantizers[component]))
    return tables


def _fill_table(out: bytearray, marker: int, place: slice) -> bool:
    """Replaces the numbers of a table by others of the same count; tells whether any changed."""
    before = bytes(out[place])
    if marker == _DQT:
        one = b"\0\1" if before[0] >> 4 else b"\1"
        numbers = one * 64
    else:
        count = len(before) - 17
        # the same number of codes, of 16 and 15 bits, with the values 0, 1, 2, ...
        counts = bytes(14) + bytes([max(0, count - 255), min(count, 255)])
        numbers = counts + bytes(range(count))
    out[place] = before[:1] + numbers
    return before[1:] != numbers


def _fill_after_last_pixel(
    out: bytearray, scan_start: int, scan_end: int, tables: bytes, removed: set[str]
) -> frozenset[str]:
    """Turns bytes after the last pixel of the last scan into fill bytes; returns what is unread."""
    if not scan_start:
        return frozenset()
    header = tables.removesuffix(b"\xff\xd9") + bytes(
        out[2 if tables else 0 : scan_start]
    )
    needed = pixel_bytes(header, bytes(out[scan_start:scan_end]))
    if needed is None:
        return _JPEG_UNREAD | {_END_UNREAD}
    if scan_start + needed < scan_end:
        removed.add(_AFTER_LAST_PIXEL)
        out[scan_start + needed : scan_end] = b"\xff" * (scan_end - scan_start - needed)
    return _JPEG_UNREAD


def pixel_bytes(header: bytes, entropy: bytes) -> int | None:
    """Counts the bytes of a scan that libjpeg decodes to pixels; None if it cannot decode the scan.

    Fill bytes (0xff) at the end count as pixels, because they carry no data.
    """
    surplus = _surplus_bytes(header, entropy)
    if surplus is None:
        return None
    if surplus <= 0:
        return len(entropy)
    needed = len(entropy) - surplus
    for length in range(needed - 1, max(0, needed - _READ_AHEAD_BYTES), -1):
        if _surplus_bytes(header, entropy[:length]) != 0:
            break
        needed = length
    return needed


def _surplus_bytes(header: bytes, entropy: bytes) -> int | None:
    """Bytes that libjpeg skips before the end mark; -1: there are too few; None: not decodable."""
    stream = header + entropy + b"\xff\xd9"
    try:
        simplejpeg.decode_jpeg(stream, min_height=1, min_width=1, strict=True)
    except ValueError as error:
        found = _EXTRANEOUS.search(str(error))
        if found and found[2] == "d9":
            return int(found[1])
        if found:
            raise StreamError(
                f"a JPEG must contain nothing but pixels, got {found[0]}"
            ) from error
        is_short = "premature end" in str(error).lower()
        return -1 if is_short else None
    return 0


def _blank(
    out: bytearray, data: bytes, start: int, end: int, removed: set[str]
) -> None:
    """Turns bytes between two segments into fill bytes (0xFF), which decoders skip."""
    if data[start:end].strip(b"\xff"):
        removed.add("bytes between JPEG segments")
    out[start:end] = b"\xff" * (end - start)


def _jpeg_payload(marker: int, payload: bytes) -> bytes | None:
    """Returns the kept payload of a segment, of the same length; None if nothing is kept."""
    if marker in FRAMES:
        count = payload[5] if len(payload) >= 6 else 0
        well_formed = 1 <= count <= _MAX_COMPONENTS and len(payload) == 6 + 3 * count
    elif marker == START_OF_SCAN:
        count = payload[0] if payload else 0
        well_formed = 1 <= count <= _MAX_COMPONENTS and len(payload) == 4 + 2 * count
    elif marker in (_DQT, _DHT):
        ends = [end for _, end in _tables_in(marker, payload)]
        well_formed = not ends or ends[-1] == len(payload)
    elif marker == _DRI:
        well_formed = len(payload) == 2
    elif marker == _DAC:  # pairs of a table's class and number with a value
        names = payload[::2]
        well_formed = len(payload) == 2 * len(set(names)) and all(
            name & 0xEC == 0 for name in names
        )
    elif marker == _APP0 and payload[:5] == b"JFIF\0" and len(payload) >= 14:
        # version 1.1, square pixels of no stated size, no thumbnail
        return b"JFIF\0\1\1\0\0\1\0\1".ljust(len(payload), b"\0")
    elif marker == _APP14 and payload[:5] == b"Adobe" and len(payload) >= 12:
        numbers = payload[5:12] if _ADOBE_NUMBERS.fullmatch(payload[5:12]) else b""
        plain = numbers or b"\0\x64\0\0\0\0" + payload[11:12]
        return b"Adobe" + plain + bytes(len(payload) - 12)
    else:
        return None
    if not well_formed:
        raise StreamError(f"JPEG segment ff {marker:02x} must be well formed")
    return payload


def clean_entropy(data: bytes, header: bytes) -> Cleaned:
    """Cleans entropy-coded JPEG data up to a restart marker, or up to the end of its stream.

    Args:
        data: the bytes, with the marker at their end.
        header: a JPEG header for just these pixels.
    """
    found = re.search(rb"\xff[^\x00\xff]", data, re.DOTALL)
    scan_end = found.start() if found else len(data)
    end = found.end() if found else len(data)
    if found and found[0][1] == END:
        cleaned = _cut(data, end)
    elif found and (found[0][1] not in RESTARTS or end != len(data)):
        raise StreamError(
            "a restart interval must contain pixels and one restart marker"
        )
    else:
        cleaned = Cleaned(data)
    needed = pixel_bytes(header, data[:scan_end])
    if needed is None:
        return replace(cleaned, unread=frozenset({_END_UNREAD}))
    if needed == scan_end:
        return cleaned
    filled = data[:needed] + b"\xff" * (scan_end - needed) + cleaned.data[scan_end:]
    return Cleaned(filled, cleaned.removed | {_AFTER_LAST_PIXEL})


def clean_jpeg2000(data: bytes) -> Cleaned:
    """Zeroes comments and foreign boxes of a JPEG 2000 codestream or JP2 file; cuts it at its end.

    Source: ITU-T T.800, annexes A and I.
    """
    if data[:4] == _J2K_START:
        return _clean_codestream(data)
    if data[:8] != _JP2_START:
        raise StreamError(f"JPEG 2000 must begin with ff 4f, got {data[:4].hex(' ')}")
    out = bytearray(data)
    removed: set[str] = set()
    for kind, box, start, end in _boxes(data):
        kept = _jp2_payload(kind, data[start:end], removed)
        if kept is None:
            out[box + 4 : box + 8] = b"free"
            kept = bytes(end - start)
        if kept != data[start:end] and kind != b"jp2c":
            removed.add(f"JPEG 2000 box {kind.decode('latin-1')!r}")
        out[start:end] = kept
    return Cleaned(bytes(out), frozenset(removed), _J2K_UNREAD)


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int, int]]:
    """Yields type, start, start of the payload, and end of each box; StreamError: damaged."""
    place = 0
    while place < len(data):
        if not data[place:].strip(b"\0"):
            return
        if len(data) - place < 8:
            raise StreamError("a box must have a header of 8 bytes, got fewer")
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        start = place + 8
        if length == 1 and len(data) >= start + 8:
            (length,) = struct.unpack(">Q", data[start : start + 8])
            start += 8
        end = len(data) if length == 0 else place + length
        if not start <= end <= len(data):
            raise StreamError(f"a box must end in its stream, got {length} bytes")
        yield kind, place, start, end
        place = end


def _jp2_payload(kind: bytes, payload: bytes, removed: set[str]) -> bytes | None:
    """Returns the kept payload of a JP2 box, of the same length; None if nothing is kept."""
    if kind == b"jp2c":
        cleaned = _clean_codestream(payload)
        removed |= cleaned.removed
        return cleaned.data.ljust(len(payload), b"\0")
    if kind == b"jP  ":
        return b"\r\n\x87\n".ljust(len(payload), b"\0")
    if kind == b"ftyp":
        words = [payload[at : at + 4] for at in range(0, len(payload), 4)]
        return b"".join(w if w in _JP2_BRANDS else bytes(len(w)) for w in words)
    if kind == b"jp2h":
        out = bytearray(payload)
        for inner, box, start, end in _boxes(payload):
            colours = inner == b"colr" and payload[start : start + 1] == b"\x01"
            if colours:
                out[start + 7 : end] = bytes(max(0, end - start - 7))
            elif inner not in _JP2_HEADER_BOXES:
                out[box + 4 : box + 8] = b"free"
                out[start:end] = bytes(end - start)
        return bytes(out)
    return None


def _clean_codestream(data: bytes) -> Cleaned:
    """A codestream with comments zeroed, cut after its end-of-codestream marker."""
    if data[:4] != _J2K_START:
        raise StreamError("a JPEG 2000 codestream must begin with ff 4f ff 51")
    out = bytearray(data)
    removed: set[str] = set()
    place = 2
    tile_part_end = 0  # 0 in the main header
    while place + 2 <= len(data):
        if data[place] != 0xFF:
            raise StreamError(f"JPEG 2000 must have a marker at byte {place}")
        marker = data[place + 1]
        if marker == _J2K_EOC:
            return replace(_cut(bytes(out), place + 2, removed), unread=_J2K_UNREAD)
        if marker == _J2K_SOD:
            place = tile_part_end or data.find(b"\xff\xd9", place)
            if place < 0:
                break
            continue
        if place + 4 > len(data):
            break
        (length,) = struct.unpack(">H", data[place + 2 : place + 4])
        end = place + 2 + length
        if length < 2 or end > len(data):
            raise StreamError("a JPEG 2000 segment must end in its stream")
        if marker == _J2K_SOT:
            (part_bytes,) = struct.unpack(">I", data[place + 6 : place + 10])
            tile_part_end = place + part_bytes if part_bytes else 0
            if part_bytes and tile_part_end < end:
                raise StreamError("a JPEG 2000 tile part must have a length")
        elif marker == _J2K_COM:
            if data[place + 4 : end].strip(b"\0"):
                removed.add("JPEG 2000 comment (COM)")
            out[place + 4 : end] = bytes(end - place - 4)
        elif marker in _J2K_POINTERS:
            removed.add(f"JPEG 2000 pointers ({_J2K_POINTERS[marker]})")
            out[place + 1] = _J2K_COM
            out[place + 4 : end] = bytes(end - place - 4)
        elif marker not in _J2K_KNOWN:
            raise StreamError(f"JPEG 2000 marker ff {marker:02x} is not known")
        place = end
    return Cleaned(bytes(out), frozenset(removed), _J2K_UNREAD)


def clean_webp(data: bytes) -> Cleaned:
    """A WebP with every chunk but the picture's zeroed, cut at its end."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        raise StreamError("a WebP must begin with RIFF and WEBP")
    end_of_file = 8 + struct.unpack("<I", data[4:8])[0]
    out = bytearray(data)
    removed: set[str] = set()
    place = 12
    while place + 8 <= min(end_of_file, len(data)):
        kind, length = struct.unpack("<4sI", data[place : place + 8])
        end = place + 8 + length
        if end > len(data):
            raise StreamError("a WebP chunk must end in its stream")
        if kind not in (b"VP8 ", b"VP8L", b"VP8X", b"ALPH"):
            if data[place + 8 : end].strip(b"\0"):
                removed.add(f"WebP chunk {kind.decode('latin-1')!r}")
            out[place + 8 : end] = bytes(length)
        place = end + length % 2
        out[end:place] = bytes(len(out[end:place]))
    return replace(_cut(bytes(out), end_of_file, removed), unread=_WEBP_UNREAD)


def clean_jpegxl(data: bytes) -> Cleaned:
    """A JPEG XL with foreign boxes zeroed; the end of a bare codestream cannot be seen."""
    if data[:8] != _JXL_BOXES:
        return Cleaned(data, unread=frozenset({"JPEG XL codestreams"}))
    out = bytearray(data)
    removed: set[str] = set()
    for kind, box, start, end in _boxes(data):
        if kind in (b"jxlc", b"jxlp", b"JXL ", b"ftyp"):
            continue
        if kind != b"free":
            removed.add(f"JPEG XL box {kind.decode('latin-1')!r}")
        out[box + 4 : box + 8] = b"free"
        out[start:end] = bytes(end - start)
    return Cleaned(bytes(out), frozenset(removed), frozenset({"JPEG XL codestreams"}))


def _clean_deflate(data: bytes, num_bytes: int) -> Cleaned:
    """A zlib stream of exactly so many bytes."""
    decoder = zlib.decompressobj()
    try:
        decoded = decoder.decompress(data, num_bytes + 1)
    except zlib.error as error:
        raise StreamError(
            f"a deflate segment must be decodable, got {error}"
        ) from error
    if len(decoded) <= num_bytes and not decoder.eof:
        decoder.decompress(decoder.unconsumed_tail, 1)
    if len(decoded) > num_bytes:
        kinds = frozenset({_COMPRESSED_REST})
        return Cleaned(zlib.compress(decoded[:num_bytes]), kinds)
    return _cut(data, len(data) - len(decoder.unused_data))


def _clean_packed(
    stream: Cleaned,
    num_bytes: int,
    name: str,
    decode: Callable[[bytes], bytes | bytearray],
    encode: Callable[[bytes], bytes | bytearray],
) -> Cleaned:
    """A stream that is cut at its end, of exactly so many decoded bytes."""
    try:
        decoded = bytes(decode(stream.data))
    except RuntimeError as error:
        raise StreamError(f"{name} segment must be decodable, got {error}") from error
    if len(decoded) <= num_bytes:
        return stream
    kinds = stream.removed | {_COMPRESSED_REST}
    return Cleaned(bytes(encode(decoded[:num_bytes])), kinds)


def _zstd_end(data: bytes) -> int:
    """Returns the end of the first frame of a zstd stream. Source: RFC 8878."""
    if data[:4] != _ZSTD_MAGIC or len(data) < 6:
        raise StreamError("a zstd segment must begin with 28 b5 2f fd")
    descriptor = data[4]
    single = descriptor >> 5 & 1
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
    size_bytes = (single, 2, 4, 8)[descriptor >> 6]
    place = 5 + (1 - single) + dictionary_bytes + size_bytes
    while place + 3 <= len(data):
        header = int.from_bytes(data[place : place + 3], "little")
        kind = header >> 1 & 3
        place += 3 + (1 if kind == 1 else header >> 3)
        if header & 1:
            return place + 4 * (descriptor >> 2 & 1)
    raise StreamError("a zstd segment must have a last block")


def _lzw_end(data: bytes) -> int:
    """Finds the end of a TIFF LZW stream: after code 257, or its last byte.

    Source: TIFF 6.0, 13.
    """
    clear = 256
    end = 257
    bits = 0
    num_bits = 0
    width = 9
    next_code = 258
    first = True
    for place, byte in enumerate(data):
        bits = (bits << 8 | byte) & 0xFFFFFF
        num_bits += 8
        if num_bits < width:
            continue
        num_bits -= width
        code = bits >> num_bits & (1 << width) - 1
        if code == end:
            return place + 1
        if code == clear:
            width = 9
            next_code = 258
            first = True
            continue
        next_code += 0 if first else 1
        first = False
        if next_code + 1 >= 1 << width and width < 12:
            width += 1
    return len(data)
