"""Frames of a DICOM file: finds each of them, and decodes it to pixels.

De-identified copies (`thinsection.deid`) find frames by the same functions.

Source: DICOM PS3.5, A.4 (encapsulated pixel data) and 8.2; PS3.3, C.7.6.17.3 (order of frames).
"""

import io
import math
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from thinsection.errors import SlideReadError, ThinsectionError
from thinsection.files.sources import Descriptor, closed_error
from thinsection.slide.dicom_series import DEFLATED_FILE, IMPLICIT, read_elements
from thinsection.slide.formats.jpeg_streams import (
    Colours,
    read_jpeg_header,
    with_colours,
)
from thinsection.slide.formats.tiff_decoder import check_jpeg2000_size
from thinsection.types import Size, Uncopied

NATIVE = (IMPLICIT, f"{IMPLICIT}.1", DEFLATED_FILE)
_JPEG = tuple(f"{IMPLICIT}.4.{number}" for number in (50, 51, 57, 70))
_JPEG_LS = tuple(f"{IMPLICIT}.4.{number}" for number in (80, 81))
JPEG_2000 = tuple(f"{IMPLICIT}.4.{number}" for number in (90, 91))
HTJ2K = tuple(f"{IMPLICIT}.4.{number}" for number in (201, 202, 203))
_JPEG_XL = tuple(f"{IMPLICIT}.4.{number}" for number in (110, 111, 112))
_RLE = (f"{IMPLICIT}.5",)
_DEFLATED_FRAMES = (f"{IMPLICIT}.8.1",)
SYNTAXES = (
    *NATIVE, *_JPEG, *_JPEG_LS, *JPEG_2000, *HTJ2K, *_JPEG_XL, *_RLE, *_DEFLATED_FRAMES,
)  # fmt: skip
# transfer syntaxes whose decoder does not convert Y, Cb and Cr to RGB
_AS_STORED = (*NATIVE, *_JPEG_LS, *_RLE, *_DEFLATED_FRAMES)
_PIXEL_DATA = 0x7FE00010
PIXEL_TAG = struct.pack("<HH", 0x7FE0, 0x0010)
ITEM = 0xFFFEE000
SEQUENCE_END = 0xFFFEE0DD
UNDEFINED = 0xFFFFFFFF  # length of pixel data that consists of items
_ITEM_BYTES = 8  # bytes of an item's header
# from YBR_FULL (PS3.3 C.7.6.3.1.2, as in JFIF) to RGB; a row each for R, G and B
_RGB_OF_YCBCR = np.array(((1, 0, 1.402), (1, -0.344136, -0.714136), (1, 1.772, 0)))
_CENTER = np.array((0.0, 128.0, 128.0))
Pixels = NDArray[np.uint8]  # (height, width, samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameFormat:
    """How the frames of a file are stored.

    Attributes:
        syntax: UID of the transfer syntax.
        size: (width, height) of a frame, px.
        samples: values of a pixel, 1 or 3.
        photometric: photometric interpretation: RGB, YBR_FULL, MONOCHROME2, ...
        is_planar: True if each colour is a separate plane; only for uncompressed frames.
    """

    syntax: str
    size: Size
    samples: int
    photometric: str
    is_planar: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.size[1], self.size[0], self.samples)

    def decode(self, data: bytes) -> Pixels:
        """Decodes a frame; (height, width, samples), RGB or gray.

        Raises:
            ValueError, RuntimeError: the bytes are not a frame of this format.
        """
        height, width, samples = self.shape
        count = height * width * samples
        if self.syntax in _DEFLATED_FRAMES:
            inflater = zlib.decompressobj(-zlib.MAX_WBITS)
            data = inflater.decompress(data, count + 1)
        elif self.syntax in _RLE:
            data = bytes(imagecodecs.dicomrle_decode(data, "uint8"))
        if self.syntax not in (*NATIVE, *_DEFLATED_FRAMES, *_RLE):
            pixels = self._decompressed(data)
        elif self.is_planar or self.syntax in _RLE:
            planes = np.frombuffer(data, np.uint8, count=count)
            pixels = planes.reshape(samples, height, width).transpose(1, 2, 0)
        else:
            pixels = np.frombuffer(data, np.uint8, count=count).reshape(self.shape)
        if samples == 3 and self.syntax in _AS_STORED:
            if self.photometric == "YBR_FULL":
                shown = (pixels - _CENTER) @ _RGB_OF_YCBCR.T
                rounded: Pixels = np.clip(np.rint(shown), 0, 255).astype(np.uint8)
                return rounded
            if self.photometric != "RGB":
                raise ValueError(f"colours {self.photometric} that are not decoded")
        return pixels

    def _decompressed(self, data: bytes) -> Pixels:
        """Decodes a frame that is compressed as a picture."""
        height, width, samples = self.shape
        out = np.empty(
            (height, width, 3) if samples == 3 else (height, width), np.uint8
        )
        if self.syntax in _JPEG:
            header = read_jpeg_header(data)
            if header.size != self.size:
                raise ValueError(f"a JPEG of {header.size} px, expected {self.size}")
            if samples == 1:
                imagecodecs.jpeg8_decode(data, out=out)
            else:
                colours: Colours = "RGB" if self.photometric == "RGB" else "YCbCr"
                jpeg = with_colours(header, colours, None)
                imagecodecs.jpeg8_decode(
                    jpeg, colorspace=colours, outcolorspace="RGB", out=out
                )
        elif self.syntax in _JPEG_LS:
            imagecodecs.jpegls_decode(data, out=out)
        elif self.syntax in _JPEG_XL:
            imagecodecs.jpegxl_decode(data, numthreads=1, out=out)
        else:
            check_jpeg2000_size(data, out)
            if self.syntax in HTJ2K:
                imagecodecs.htj2k_decode(data, out=out)
            else:
                imagecodecs.jpeg2k_decode(data, numthreads=1, out=out)
        return out.reshape(self.shape)


class DicomFrames(Uncopied):
    """Frames of one file, which is parsed when the first frame is read. Thread-safe.

    Memory: 16 bytes per frame; for a deflated file the whole inflated file, at most 1 GiB.
    """

    copy_remedy = "open the slide again"

    def __init__(self, path: Path, form: FrameFormat, num_frames: int) -> None:
        self.path = path
        self.form = form
        self.num_frames = num_frames
        self._lock = threading.Lock()
        self._places: list[tuple[int, int]] | None = None
        self._descriptor: Descriptor | None = None
        self._is_closed = False
        self._inflated = b""

    def read(self, frame: int) -> Pixels:
        """Reads and decodes a frame.

        Raises:
            SlideReadError: the frame cannot be decoded, or is not in the file.
        """
        with self._lock:
            if self._is_closed:
                raise closed_error(str(self.path))
            if self._places is None:
                self._descriptor = Descriptor(os.open(self.path, os.O_RDONLY))
                with os.fdopen(os.dup(self._descriptor), "rb") as file:
                    self._places = self._find_places(file)
            places = self._places
            # this reference keeps the file open if another thread calls `close`
            descriptor = self._descriptor
        if frame >= len(places):
            raise self._error(frame, f"{len(places)} frames in the file")
        start, count = places[frame]
        if self._inflated:
            data = self._inflated[start : start + count]
        else:
            assert descriptor is not None  # it was opened with the places
            data = os.pread(descriptor, count, start)
        if len(data) != count:
            raise self._error(frame, f"{len(data)} of {count} bytes")
        try:
            if self.form.syntax not in NATIVE:
                data = _joined_fragments(data)
            return self.form.decode(data)
        except (ValueError, RuntimeError, TypeError, zlib.error) as error:
            raise self._error(frame, str(error)) from None

    def close(self) -> None:
        """Closes the file when no thread reads from it."""
        with self._lock:
            self._is_closed = True
            self._descriptor = None

    def _find_places(self, file: BinaryIO) -> list[tuple[int, int]]:
        """Returns (offset, bytes) of each frame, including the headers of its items."""
        parsed = read_elements(self.path, ("ExtendedOffsetTable",), before=_PIXEL_DATA)
        syntax = self.form.syntax
        if parsed.inflated:
            self._inflated = parsed.inflated
            file = io.BytesIO(parsed.inflated)
        name = self.path.name
        header = read_pixel_header(file, parsed.end, syntax, name)
        if syntax in NATIVE:
            count = math.prod(self.form.shape)
            return [(header.end + n * count, count) for n in range(self.num_frames)]
        if header.length != UNDEFINED:
            raise SlideReadError(
                f"compressed frames must be items, got plain bytes in {name!r}; the "
                "file is damaged"
            )
        table = parsed.dataset.get("ExtendedOffsetTable") or b""
        return _item_places(file, header.end, bytes(table), self.num_frames, name)

    def _error(self, frame: int, reason: str) -> SlideReadError:
        return SlideReadError(
            f"frame must be decodable, got {reason} at frame {frame + 1} of {self.num_frames} in "
            f"{self.path.name!r}; the file is damaged or truncated"
        )


def _item_places(
    file: BinaryIO, begin: int, extended: bytes, num_frames: int, name: str
) -> list[tuple[int, int]]:
    """Returns (offset, bytes) of each frame, including the headers of its items."""
    items: list[tuple[int, int]] = []  # (offset, bytes), including the header
    for start, count in walk_items(file, begin, name):
        items.append((start - _ITEM_BYTES, _ITEM_BYTES + count))
    first = begin
    table = b""
    if items:
        place, count = items.pop(0)
        first = place + count
        file.seek(place + _ITEM_BYTES)
        table = file.read(count - _ITEM_BYTES)
    offsets: list[int] = []
    if extended:
        offsets = np.frombuffer(extended, "<u8").astype(int).tolist()
    elif table:
        offsets = np.frombuffer(table, "<u4").astype(int).tolist()
        if any(b <= a for a, b in pairwise(offsets)):
            offsets = []  # not usable: beyond 4 GiB, 32-bit offsets start from 0 again
    if len(offsets) != num_frames:
        if len(items) == num_frames:
            return items
        if num_frames == 1 and items:
            return [(items[0][0], sum(length for _, length in items))]
        raise SlideReadError(
            f"file must have {num_frames} frames, got {len(items)} items in {name!r}; the file "
            "is damaged or truncated"
        )
    end = items[-1][0] + items[-1][1] if items else first
    starts = [first + offset for offset in offsets]
    if any(not first <= start < end for start in starts):
        raise SlideReadError(
            f"offsets of frames must lie in the pixel data in {name!r}; the file is damaged"
        )
    return [(a, b - a) for a, b in zip(starts, [*starts[1:], end])]


@dataclass(frozen=True, slots=True)
class PixelHeader:
    """Header of the pixel data element.

    Attributes:
        vr: value representation, two letters; b"" if it is implicit.
        length: bytes of the pixel data; `UNDEFINED` if they are items.
        end: offset in the file at which the pixel data begin.
    """

    vr: bytes
    length: int
    end: int


def read_pixel_header(
    file: BinaryIO, place: int, syntax: str, name: str
) -> PixelHeader:
    """Reads the header of the pixel data element at the offset `place`.

    Raises:
        SlideReadError: there is no pixel data element.
    """
    num_bytes = 8 if syntax == IMPLICIT else 12
    file.seek(place)
    head = file.read(num_bytes)
    if len(head) < num_bytes or not head.startswith(PIXEL_TAG):
        raise SlideReadError(
            f"file must have pixels, got none in {name!r}; the file is truncated"
        )
    vr = b"" if syntax == IMPLICIT else head[4:6]
    (length,) = struct.unpack("<I", head[-4:])
    return PixelHeader(vr, length, place + num_bytes)


def walk_items(
    file: BinaryIO,
    begin: int,
    name: str,
    *,
    error: type[ThinsectionError] = SlideReadError,
) -> Iterator[tuple[int, int]]:
    """Yields (offset, bytes) of the items of compressed pixel data, without their headers.

    The first item is the offset table, which may be empty; the others are fragments of frames.

    Raises:
        ThinsectionError (the class `error`): there is something else, or the end marker is missing.
    """
    place = begin
    while True:
        file.seek(place)
        tag, count = _item_head(file.read(_ITEM_BYTES), name, error)
        if tag == SEQUENCE_END:
            return
        yield place + _ITEM_BYTES, count
        place += _ITEM_BYTES + count


def _item_head(
    head: bytes, name: str, error: type[ThinsectionError] = SlideReadError
) -> tuple[int, int]:
    """Returns the tag and length of an item, or of the marker after the last item."""
    if len(head) == _ITEM_BYTES:
        group, element, count = struct.unpack("<HHI", head)
        tag = group << 16 | element
        if tag in (ITEM, SEQUENCE_END) and count != UNDEFINED:
            return tag, count
    raise error(
        f"pixel data must be items up to their end in {name!r}; the file is damaged or truncated"
    )


def _joined_fragments(data: bytes) -> bytes:
    """Returns the bytes of a frame without the headers of its items."""
    parts = []
    place = 0
    while place + _ITEM_BYTES <= len(data):
        tag, count = _item_head(data[place : place + _ITEM_BYTES], "a frame")
        if tag == SEQUENCE_END:
            break
        parts.append(data[place + _ITEM_BYTES : place + _ITEM_BYTES + count])
        place += _ITEM_BYTES + count
    return parts[0] if len(parts) == 1 else b"".join(parts)
