"""ICC profiles without their words: the colours, and nothing that a person could have written."""

import struct

from thinsection.slide.deid.streams import Cleaned

_HEADER_BYTES = 128
# tags that say colours, by their signature
_COLOUR_TAGS = frozenset(
    b"wtpt bkpt rXYZ gXYZ bXYZ rTRC gTRC bTRC kTRC A2B0 A2B1 A2B2 B2A0 B2A1 B2A2 gamt lumi chad "
    b"chrm D2B0 D2B1 D2B2 D2B3 B2D0 B2D1 B2D2 B2D3".split()
)
_LOOK_UP_TYPES = (b"mft1", b"mft2", b"mAB ", b"mBA ", b"mpet")
_NAME = b"ICC profile"  # in place of the description and the copyright
_DATE = struct.pack(">6H", 2000, 1, 1, 0, 0, 0)  # a profile must have one


def clean_profile(profile: bytes) -> Cleaned | None:
    """Writes the profile anew from its colour tags; None where it is no ICC profile.

    Left out are the description, the copyright and every other text, the maker's names and the
    date in the header, and all bytes beyond the declared length. Source: ICC.1:2022.
    """
    if len(profile) < _HEADER_BYTES + 4 or profile[36:40] != b"acsp":
        return None
    (declared,) = struct.unpack(">I", profile[:4])
    inside = profile[:declared]
    tags = _colour_tags(inside)
    if tags is None:
        return None
    is_v4 = profile[8] >= 4
    words = _v4_text(_NAME) if is_v4 else _v2_description(_NAME)
    tags[b"desc"] = words
    tags[b"cprt"] = words if is_v4 else b"text\0\0\0\0" + _NAME + b"\0"
    data = _assembled(_header(inside), tags)
    removed: set[str] = set()
    if profile[declared:].strip(b"\0"):
        removed.add("bytes after the declared length of the ICC profile")
    if data != inside:
        removed.add("texts, names and date of the ICC profile")
    return Cleaned(data, frozenset(removed))


def _colour_tags(profile: bytes) -> dict[bytes, bytes] | None:
    """Signature to data of the tags that say colours; None where the table is damaged."""
    (count,) = struct.unpack(">I", profile[_HEADER_BYTES : _HEADER_BYTES + 4])
    if count > 1000 or _HEADER_BYTES + 4 + 12 * count > len(profile):
        return None
    tags: dict[bytes, bytes] = {}
    for index in range(count):
        place = _HEADER_BYTES + 4 + 12 * index
        name, offset, size = struct.unpack(">4sII", profile[place : place + 12])
        if offset + size > len(profile) or size < 8:
            return None
        length = _colour_bytes(profile[offset : offset + size])
        if name in _COLOUR_TAGS and length:
            tags[name] = profile[offset : offset + length]
    return tags


def _colour_bytes(data: bytes) -> int:
    """Counts the bytes of a tag's data that are numbers of its type; 0 where it is another type."""
    kind = data[:4]
    if kind == b"XYZ ":
        return 20 if len(data) >= 20 else 0
    if kind == b"curv" and len(data) >= 12:
        length = 12 + 2 * struct.unpack(">I", data[8:12])[0]
        return length if length <= len(data) else 0
    if kind == b"para" and len(data) >= 12:
        (function,) = struct.unpack(">H", data[8:10])
        numbers = (1, 3, 4, 5, 7)
        length = 12 + 4 * numbers[function] if function < len(numbers) else 0
        return length if length <= len(data) else 0
    if kind == b"sf32":
        return 44 if len(data) >= 44 else 0
    if kind == b"chrm":
        return 36 if len(data) >= 36 else 0
    return len(data) if kind in _LOOK_UP_TYPES else 0


def _header(profile: bytes) -> bytearray:
    """Returns the header without size, date, maker, model, creator and identity."""
    header = bytearray(profile[:_HEADER_BYTES])
    header[4:8] = bytes(4)  # preferred CMM
    header[24:36] = _DATE
    header[40:64] = bytes(24)  # platform, flags, manufacturer, model, attributes
    header[80:_HEADER_BYTES] = bytes(_HEADER_BYTES - 80)  # creator, identity, reserved
    return header


def _assembled(header: bytearray, tags: dict[bytes, bytes]) -> bytes:
    """Returns the profile of a header and tags; equal data is stored once."""
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


def _v2_description(text: bytes) -> bytes:
    length = struct.pack(">I", len(text) + 1)
    return b"desc\0\0\0\0" + length + text + b"\0" + bytes(8 + 3 + 67)


def _v4_text(text: bytes) -> bytes:
    wide = text.decode("ascii").encode("utf-16-be")
    return (
        b"mluc\0\0\0\0"
        + struct.pack(">II2s2sII", 1, 12, b"en", b"US", len(wide), 28)
        + wide
    )
