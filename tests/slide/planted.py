"""Slides with marked identifiers in every place where a slide can hold one, and their bytes."""

import re
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import simplejpeg
import tifffile
from scipy.ndimage import gaussian_filter

from thinsection.types import RgbArray

TILE = 128


def mark(number: int) -> bytes:
    """A marked identifier, as no other bytes of a slide look."""
    return b"QZX%02dSMITH" % number


def tissue(size: tuple[int, int], seed: int = 0) -> RgbArray:
    """Something purple on white that has shapes at all sizes."""
    width, height = size
    random = np.random.default_rng(seed)
    field = sum(
        gaussian_filter(random.standard_normal((height, width)), sigma) * sigma
        for sigma in (3, 12, 40)
    )
    stained = np.clip((np.asarray(field) - 0.2) * 2, 0, 1)[..., None]
    colours = 245 - stained * np.array([90, 170, 60])
    return np.asarray(colours.astype(np.uint8))


def smaller(pixels: RgbArray, factor: int) -> RgbArray:
    """Means of factor x factor px."""
    height, width = (edge // factor * factor for edge in pixels.shape[:2])
    blocks = pixels[:height, :width].reshape(
        height // factor, factor, width // factor, factor, 3
    )
    return np.asarray(blocks.mean(axis=(1, 3)).astype(np.uint8))


def label(size: tuple[int, int]) -> RgbArray:
    """A paper label with lines of writing."""
    width, height = size
    random = np.random.default_rng(9)
    pixels = np.full((height, width, 3), 250, np.uint8)
    for top in range(8, height - 12, 20):
        letters = random.random((12, (width - 16) // 4)) < 0.5
        pixels[top : top + 12, 8 : 8 + letters.shape[1] * 4][
            np.repeat(letters, 4, axis=1)
        ] = 10
    return pixels


def segment(marker: int, payload: bytes) -> bytes:
    """A JPEG segment."""
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def jpeg(pixels: RgbArray, plants: Sequence[bytes] = ()) -> bytes:
    """A JPEG with four identifiers around its pixels: COM, EXIF, before and after the end mark."""
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=90)
    if not plants:
        return bytes(data)
    comment, exif, before_end, after_end = plants
    head = segment(0xFE, comment) + segment(0xE1, b"Exif\0\0" + exif)
    whole = data[:2] + head + data[2:-2] + before_end * 2 + data[-2:] + after_end
    return bytes(whole)


def tiles(
    pixels: RgbArray, encode: Callable[[RgbArray, int], bytes], tile: int = TILE
) -> list[bytes]:
    """Encoded tiles in TIFF's order, with white beyond the border."""
    height, width = pixels.shape[:2]
    found = []
    for y in range(0, height, tile):
        for x in range(0, width, tile):
            square = np.full((tile, tile, 3), 255, np.uint8)
            part = pixels[y : y + tile, x : x + tile]
            square[: part.shape[0], : part.shape[1]] = part
            found.append(encode(square, len(found)))
    return found


def profile(description: bytes, after: bytes) -> bytes:
    """A matrix profile whose description and trailing bytes say something."""
    colour = b"XYZ \0\0\0\0" + struct.pack(">3i", 28_000, 15_000, 900)
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, 0x0233) + b"\0\0"
    words = description + b"\0"
    text = b"desc\0\0\0\0" + struct.pack(">I", len(words)) + words + bytes(78)
    text += bytes(-len(text) % 4)
    named = {b"desc": text, b"cprt": b"text\0\0\0\0" + words + bytes(3)}
    named |= dict.fromkeys((b"rXYZ", b"gXYZ", b"bXYZ", b"wtpt"), colour)
    named |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    place = 132 + 12 * len(named)
    table, body = struct.pack(">I", len(named)), b""
    for name, data in named.items():
        table += struct.pack(">4sII", name, place + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = bytearray(128)
    head[8:12] = b"\x02\x40\0\0"
    head[12:24] = b"mntrRGB XYZ "
    head[36:40] = b"acsp"
    head[68:80] = struct.pack(">3i", 63190, 65536, 54061)
    whole = bytes(head) + table + body
    return struct.pack(">I", len(whole)) + whole[4:] + after


def in_unused_bytes(path: Path, between: bytes, at_the_end: bytes, ifd: bytes) -> None:
    """Adds an EXIF directory with a MakerNote, bytes between structures and bytes after the last.

    The file has the tag `UNKNOWN_TAG`, which becomes the place of the EXIF directory: tifffile
    writes no tag 34665.
    """
    data = bytearray(path.read_bytes())
    data += between + bytes(-len(between) % 8)
    place = len(data)
    big = data[2] == 43
    if big:
        data += (
            struct.pack("<QHHQQ", 1, 37500, 7, len(ifd), place + 36) + bytes(8) + ifd
        )
    else:
        data += (
            struct.pack("<HHHII", 1, 37500, 7, len(ifd), place + 18) + bytes(4) + ifd
        )
    entry = struct.pack("<HHQ" if big else "<HHI", UNKNOWN_TAG, 4, 1)
    entry_place = data.index(entry)
    data[entry_place : entry_place + 2] = struct.pack("<H", EXIF_TAG)
    value_place = entry_place + len(entry)
    data[value_place : value_place + 4] = struct.pack("<I", place)
    path.write_bytes(bytes(data) + at_the_end)


EXIF_TAG = 34665
UNKNOWN_TAG = 34666


def write_aperio(path: Path, marks: Sequence[bytes]) -> None:
    """A classic TIFF as Aperio writes it, with 20 identifiers."""
    m = list(marks)
    text = [mark_.decode() for mark_ in m]
    pixels = tissue((900, 700))
    sizes = "900x700 [0,0 900x700] (128x128) JPEG/RGB Q=70"
    first_line = f"Aperio {text[0]} v11.2.1 \r\n{sizes} {text[1]}"
    pairs = (
        f"|AppMag = 20|MPP = 0.4990|Left = 25.6 {text[2]}|ICC Profile = {text[3]}"
        f"|StripeWidth = {text[4]}|User = {text[5]}|{text[6]} = 1"
    )

    def planted(square: RgbArray, index: int) -> bytes:
        return jpeg(square, m[7:11] if index % 3 == 1 else ())

    extra = [
        (700, 1, len(m[11]), m[11], True),
        (33723, 7, len(m[12]), m[12], True),
        (65001, 2, len(m[13]) + 1, m[13] + b"\0", True),
    ]
    with tifffile.TiffWriter(path) as file:

        def page(level: RgbArray, words: str, **options: Any) -> None:
            encoded = tiles(level, planted)
            file.write(iter(encoded), shape=level.shape, dtype=np.uint8, tile=(TILE, TILE),
                       compression="jpeg", photometric="ycbcr", subsampling=(2, 2),
                       description=words, metadata=None, **options)  # fmt: skip

        page(
            pixels,
            first_line + pairs,
            iccprofile=profile(m[14], m[15]),
            extratags=extra,
            software=text[16],
            datetime="2009:12:29 10:00:00",
        )
        # as the issue has it: a label in the place of the thumbnail, of the slide's shape
        file.write(label((450, 350)), metadata=None, software=False)
        file.write(
            smaller(pixels, 4),
            description=f"Aperio Image Library v11.2.1 \r\n900x700 -> 225x175 - |{text[17]} = 1",
            metadata=None,
            software=False,
        )
        page(
            smaller(pixels, 4),
            "Aperio Image Library v11.2.1 \r\n900x700",
            subfiletype=1,
        )
        file.write(label((96, 64)), description=f"Aperio Image Library\nlabel {text[18]}",
                   metadata=None, software=False)  # fmt: skip
        file.write(label((200, 60)), description=f"Aperio Image Library\nmacro {text[19]}",
                   metadata=None, software=False)  # fmt: skip


def write_generic(
    path: Path, marks: Sequence[bytes], *, big: bool, compression: int
) -> None:
    """A tiled TIFF whose reduced levels lie in SubIFDs, with 19 identifiers; returns its levels.

    `compression`: 8 (deflate), 5 (LZW) or 50000 (zstd).
    """
    m = list(marks)
    text = [mark_.decode() for mark_ in m]
    pixels = tissue((700, 520), seed=4)
    encoders: dict[int, Callable[[bytes], bytes]] = {
        8: zlib.compress,
        5: lambda data: bytes(imagecodecs.lzw_encode(data)),
        50000: lambda data: bytes(imagecodecs.zstd_encode(data)),
    }

    def encode(square: RgbArray, index: int) -> bytes:
        hidden = m[0] if index == 2 else b""
        after = m[1] if index == 3 else b""
        return encoders[compression](square.tobytes() + hidden) + after

    strings = {
        269: 2, 315: 3, 316: 4, 33432: 5, 285: 6, 32781: 7, 34737: 8, 42112: 9
    }  # fmt: skip
    extra: list[Any] = [
        (tag, 2, len(m[at]) + 1, m[at] + b"\0", True) for tag, at in strings.items()
    ]
    extra += [
        (700, 1, len(m[10]), m[10], True),
        (34377, 7, len(m[11]), m[11], True),
        (258 + 62000, 7, len(m[12]), m[12], True),
        (UNKNOWN_TAG, 4, 1, 0, True),
        (274, 3, 1, 3, True),
    ]
    common: dict[str, Any] = {"tile": (TILE, TILE), "compression": compression,
                              "photometric": "rgb", "dtype": np.uint8}  # fmt: skip
    with tifffile.TiffWriter(path, bigtiff=big) as file:
        file.write(iter(tiles(pixels, encode)), shape=pixels.shape, subifds=2,
                   description=f"free text {text[13]}", metadata=None,
                   software=text[14], extratags=extra, resolution=(20000.0, 20000.0),
                   resolutionunit=3, **common)  # fmt: skip
        below = smaller(pixels, 2)
        file.write(iter(tiles(below, encode)), shape=below.shape, subfiletype=1,
                   description=text[15], metadata=None, software=False, **common)  # fmt: skip
        # a label as a level: of the right shape, tiled, named nothing
        paper = label((350, 260))
        plain = tiles(paper, lambda square, _: encoders[compression](square.tobytes()))
        file.write(iter(plain), shape=paper.shape, subfiletype=1, metadata=None,
                   software=False, **common)  # fmt: skip
    in_unused_bytes(path, m[16], m[17], m[18])
    return [pixels, below]


def everything(path: Path) -> bytes:
    """The bytes of a file and what zlib, LZW and zstd make of its segments: where to look."""
    data = path.read_bytes()
    parts = [data, data.replace(b"\0", b"")]
    for found in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data):
        try:
            parts.append(zlib.decompressobj().decompress(data[found.start() :]))
        except zlib.error:
            continue
    if data[:2] in (b"II", b"MM"):
        with tifffile.TiffFile(path) as file:
            pages = [p for page in file.pages for p in (page, *(page.pages or ()))]
            for page in pages:
                parts += _decompressed(data, page)
    return b"\n".join(parts)


def _decompressed(data: bytes, page: Any) -> list[bytes]:
    decoders = {5: imagecodecs.lzw_decode, 50000: imagecodecs.zstd_decode}
    decode = decoders.get(int(page.compression))
    if decode is None:
        return []
    parts: list[bytes] = []
    for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
        stored = data[offset : offset + count]
        end = stored.find(b"QZX")  # zstd refuses bytes after its end
        parts.append(bytes(decode(stored if end < 0 else stored[:end])))
    return parts
