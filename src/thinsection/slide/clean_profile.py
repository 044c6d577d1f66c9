"""ICC profiles without texts: only colours, and nothing that a person could have written."""

import math
import struct

from thinsection.slide.clean_streams import Cleaned

_HEADER_BYTES = 128
# Signatures of the tags with colours. Multi-process elements (D2B0, ...) are left out: a profile
# that has them also has the same transform as a table.
_COLOUR_TAGS = frozenset(
    b"wtpt bkpt rXYZ gXYZ bXYZ rTRC gTRC bTRC kTRC A2B0 A2B1 A2B2 B2A0 B2A1 B2A2 gamt lumi chad "
    b"chrm".split()
)
_CLASSES = b"scnr mntr prtr link spac abst".split()
_SPACES = (b"RGB ", b"GRAY", b"CMYK", b"Lab ", b"XYZ ", b"YCbr", b"Luv ", b"CMY ")
_D50 = struct.pack(">3i", 0xF6D6, 0x10000, 0xD32D)  # illuminant of every profile
# how many numbers a parametric curve has, by its function type
_PARAMETERS = (1, 3, 4, 5, 7)
_MAX_XYZ = 8 << 16  # largest colour value, as a number with 16 bits behind the point
# text that replaces the description and the copyright, in the formats of versions 2 and 4
_NAME = b"ICC profile"
_V2_TEXT = b"text\0\0\0\0" + _NAME + b"\0"
_V2_DESCRIPTION = (
    b"desc\0\0\0\0" + struct.pack(">I", len(_NAME) + 1) + _NAME + bytes(1 + 8 + 3 + 67)
)
_V4_TEXT = (
    b"mluc\0\0\0\0"
    + struct.pack(">II2s2sII", 1, 12, b"en", b"US", 2 * len(_NAME), 28)
    + _NAME.decode().encode("utf-16-be")
)
_DATE = struct.pack(
    ">6H", 2000, 1, 1, 0, 0, 0
)  # replaces the date, which a profile must have
_UNREAD = frozenset({"the numbers in curves and tables of ICC profiles"})


def clean_profile(profile: bytes) -> Cleaned | None:
    """Makes a new profile from the colour tags of a profile; None if it is no ICC profile.

    The description, the copyright and every other text, the maker's names and the date in the
    header, and all bytes between and after the numbers that a tag declares are left out.
    Source: ICC.1:2022.
    """
    if len(profile) < _HEADER_BYTES + 4 or profile[36:40] != b"acsp":
        return None
    (declared,) = struct.unpack(">I", profile[:4])
    inside = profile[:declared]
    tags = _colour_tags(inside)
    if tags is None:
        return None
    is_v4 = profile[8] >= 4
    tags[b"desc"] = _V4_TEXT if is_v4 else _V2_DESCRIPTION
    tags[b"cprt"] = _V4_TEXT if is_v4 else _V2_TEXT
    data = _assembled(_header(inside), tags)
    removed: set[str] = set()
    if profile[declared:].strip(b"\0"):
        removed.add("bytes after the declared length of the ICC profile")
    if data != inside:
        removed.add("texts, names and date of the ICC profile")
    return Cleaned(data, frozenset(removed), _UNREAD)


def _colour_tags(profile: bytes) -> dict[bytes, bytes] | None:
    """Returns the data of the colour tags by signature; None if the tag table is damaged."""
    (count,) = struct.unpack(">I", profile[_HEADER_BYTES : _HEADER_BYTES + 4])
    if count > 1000 or _HEADER_BYTES + 4 + 12 * count > len(profile):
        return None
    tags: dict[bytes, bytes] = {}
    for index in range(count):
        place = _HEADER_BYTES + 4 + 12 * index
        name, offset, size = struct.unpack(">4sII", profile[place : place + 12])
        if offset + size > len(profile) or size < 8:
            return None
        numbers = _numbers_of_tag(profile[offset : offset + size])
        if name in _COLOUR_TAGS and numbers:
            tags[name] = numbers
    return tags


def _numbers_of_tag(data: bytes) -> bytes:
    """Returns the data of a tag with only the numbers of its type; b'' if it has no numbers."""
    kind = data[:4]
    if kind in (b"mft1", b"mft2"):
        length = _look_up_bytes(data)
        return kind + bytes(4) + data[8:length] if length else b""
    if kind in (b"mAB ", b"mBA "):
        return _look_up_with_curves(data)
    if kind in (b"XYZ ", b"sf32"):
        length = 20 if kind == b"XYZ " else 44
        numbers = data[8:length]
        if len(data) < length:
            return b""
        # four letters, read as one number, are larger than any colour value
        fixed = struct.unpack(f">{len(numbers) // 4}i", numbers)
        if max(map(abs, fixed)) > _MAX_XYZ:
            return b""
        return kind + bytes(4) + numbers
    if kind == b"chrm":
        return kind + bytes(4) + data[8:36] if len(data) >= 36 else b""
    return _curve(data)


def _curve(data: bytes) -> bytes:
    """Returns the curve at the start of the data, with zeros in reserved bytes; b'' for none."""
    if len(data) < 12:
        return b""
    kind = data[:4]
    if kind == b"curv":
        length = 12 + 2 * struct.unpack(">I", data[8:12])[0]
        curve = kind + bytes(4) + data[8:length]
    elif kind == b"para" and data[8] == 0 and data[9] < len(_PARAMETERS):
        length = 12 + 4 * _PARAMETERS[data[9]]
        curve = kind + bytes(4) + data[8:10] + bytes(2) + data[12:length]
    else:
        return b""
    return curve if len(curve) == length else b""


def _look_up_bytes(data: bytes) -> int:
    """Counts the bytes of a look-up table of 8 or 16 bits; 0 if it is damaged."""
    if len(data) < 52:
        return 0
    num_in, num_out, grid = data[8:11]
    cells = grid**num_in * num_out
    if data[:4] == b"mft1":
        length = 48 + 256 * num_in + cells + 256 * num_out
    else:
        in_entries, out_entries = struct.unpack(">2H", data[48:52])
        length = 52 + 2 * (in_entries * num_in + cells + out_entries * num_out)
    return length if length <= len(data) else 0


def _look_up_with_curves(data: bytes) -> bytes:
    """Returns a look-up table of version 4 with zeros between its parts; b'' if it is damaged."""
    if len(data) < 32:
        return b""
    num_in, num_out = data[8], data[9]
    # channels of the curves B, M and A
    channels = (num_out, num_out, num_in)
    if data[:4] == b"mBA ":
        channels = (num_in, num_in, num_out)
    b_at, matrix_at, m_at, table_at, a_at = struct.unpack(">5I", data[12:32])
    parts = [(0, data[:4]), (8, data[8:10]), (12, data[12:32])]
    for curves_at, count in zip((b_at, m_at, a_at), channels):
        place = curves_at
        for _ in range(count if curves_at else 0):
            curve = _curve(data[place:])
            if not curve:
                return b""
            parts.append((place, curve))
            place += len(curve) + -len(curve) % 4
    if matrix_at:
        parts.append((matrix_at, data[matrix_at : matrix_at + 48]))
    if table_at:
        grid = data[table_at : table_at + num_in]
        width = data[table_at + 16] if table_at + 16 < len(data) else 0
        if 0 in grid or width not in (1, 2):
            return b""
        num_bytes = math.prod(grid) * num_out * width
        start = table_at + 20
        parts.append((table_at, grid))
        parts.append((table_at + 16, bytes([width])))
        parts.append((start, data[start : start + num_bytes]))
        if start + num_bytes > len(data):
            return b""
    out = bytearray(max(place + len(part) for place, part in parts))
    for place, part in parts:
        out[place : place + len(part)] = part
    return bytes(out)


def _header(profile: bytes) -> bytearray:
    """Returns a header of the version, class and colour spaces, and nothing else."""
    header = bytearray(_HEADER_BYTES)
    header[8:10] = profile[8:10]
    if profile[12:16] in _CLASSES:
        header[12:16] = profile[12:16]
    for place in (16, 20):
        space = profile[place : place + 4]
        if space in _SPACES:
            header[place : place + 4] = space
    header[24:36] = _DATE
    header[36:40] = b"acsp"
    header[67] = profile[67] & 3  # rendering intent
    header[68:80] = _D50
    return header


def _assembled(header: bytearray, tags: dict[bytes, bytes]) -> bytes:
    """Returns the profile with a header and tags; equal data is stored once."""
    place = _HEADER_BYTES + 4 + 12 * len(tags)
    place += -place % 4
    table = struct.pack(">I", len(tags))
    body = b""
    places: dict[bytes, int] = {}
    for name, data in tags.items():
        if data not in places:
            places[data] = place + len(body)
            body += data + bytes(-len(data) % 4)
        table += struct.pack(">4sII", name, places[data], len(data))
    start = bytes(header) + table
    whole = start.ljust(place, b"\0") + body
    return struct.pack(">I", len(whole)) + whole[4:]
