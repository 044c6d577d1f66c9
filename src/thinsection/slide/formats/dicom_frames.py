"""Frames of a DICOM file: where each lies, and how it becomes pixels.

Source: DICOM PS3.5, A.4 (encapsulated pixel data) and 8.2; PS3.3, C.7.6.17.3 (order of frames).
"""

import io
import math
import os
import struct
import threading
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from thinsection.errors import SlideReadError
from thinsection.slide.dicom_series import DEFLATED_FILE, IMPLICIT, read_elements
from thinsection.slide.formats.jpeg_streams import (
    Colours,
    read_jpeg_header,
    with_colours,
)
from thinsection.slide.formats.tiff_decoder import check_jpeg2000_size
from thinsection.types import Size

NATIVE = (IMPLICIT, f"{IMPLICIT}.1", DEFLATED_FILE)
_JPEG = tuple(f"{IMPLICIT}.4.{number}" for number in (50, 51, 57, 70))
_JPEG_LS = tuple(f"{IMPLICIT}.4.{number}" for number in (80, 81))
_JPEG_2000 = tuple(f"{IMPLICIT}.4.{number}" for number in (90, 91))
_HTJ2K = tuple(f"{IMPLICIT}.4.{number}" for number in (201, 202, 203))
_JPEG_XL = tuple(f"{IMPLICIT}.4.{number}" for number in (110, 111, 112))
_RLE = (f"{IMPLICIT}.5",)
_DEFLATED_FRAMES = (f"{IMPLICIT}.8.1",)
SYNTAXES = (
    *NATIVE, *_JPEG, *_JPEG_LS, *_JPEG_2000, *_HTJ2K, *_JPEG_XL, *_RLE, *_DEFLATED_FRAMES,
)  # fmt: skip
# syntaxes whose decoder leaves Y, Cb and Cr as they are
_AS_STORED = (*NATIVE, *_JPEG_LS, *_RLE, *_DEFLATED_FRAMES)
_PIXEL_DATA = 0x7FE00010
_PIXEL_TAG = (0x7FE0, 0x0010)
_ITEM = 0xFFFEE000
_SEQUENCE_END = 0xFFFEE0DD
_UNDEFINED = 0xFFFFFFFF
_ITEM_BYTES = 8  # of the head of an item
# of YBR_FULL, PS3.3 C.7.6.3.1.2, as JFIF has it: rows for R, G and B
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
        photometric: what they are: RGB, YBR_FULL, MONOCHROME2, ...
        is_planar: True where each plane of colour is stored for itself; only of plain numbers.
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
            ValueError, RuntimeError: it is no frame of this format.
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
            if self.syntax in _HTJ2K:
                imagecodecs.htj2k_decode(data, out=out)
            else:
                imagecodecs.jpeg2k_decode(data, numthreads=1, out=out)
        return out.reshape(self.shape)


class DicomFrames:
    """Frames of one file, which is parsed when the first frame is asked for. Thread-safe.

    Memory: 16 bytes a frame; of a deflated file the whole inflated file, at most 1 GiB.
    """

    def __init__(self, path: Path, form: FrameFormat, num_frames: int) -> None:
        self.path = path
        self.form = form
        self.num_frames = num_frames
        self._lock = threading.Lock()
        self._places: list[tuple[int, int]] | None = None
        self._descriptor = -1
        self._inflated = b""

    def read(self, frame: int) -> Pixels:
        """Reads and decodes a frame.

        Raises:
            SlideReadError: it cannot be decoded, or is not in the file.
        """
        with self._lock:
            if self._places is None:
                self._descriptor = os.open(self.path, os.O_RDONLY)
                with os.fdopen(os.dup(self._descriptor), "rb") as file:
                    self._places = self._find_places(file)
            places = self._places
        if frame >= len(places):
            raise self._error(frame, f"{len(places)} frames in the file")
        start, count = places[frame]
        if self._inflated:
            data = self._inflated[start : start + count]
        else:
            data = os.pread(self._descriptor, count, start)
        if len(data) != count:
            raise self._error(frame, f"{len(data)} of {count} bytes")
        try:
            if self.form.syntax not in NATIVE:
                data = _joined_fragments(data)
            return self.form.decode(data)
        except (ValueError, RuntimeError, TypeError, zlib.error) as error:
            raise self._error(frame, str(error)) from None

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
            self._places = []

    def _find_places(self, file: BinaryIO) -> list[tuple[int, int]]:
        """Returns (offset, bytes) of each frame, heads of items included."""
        parsed = read_elements(self.path, ("ExtendedOffsetTable",), before=_PIXEL_DATA)
        syntax = self.form.syntax
        if parsed.inflated:
            self._inflated = parsed.inflated
            file = io.BytesIO(parsed.inflated)
        head_bytes = 8 if syntax == IMPLICIT else 12
        file.seek(parsed.end)
        head = file.read(head_bytes)
        if len(head) < head_bytes or struct.unpack("<HH", head[:4]) != _PIXEL_TAG:
            raise SlideReadError(
                f"file must have pixels, got none in {self.path.name!r}; the file is truncated"
            )
        (length,) = struct.unpack("<I", head[-4:])
        begin = parsed.end + head_bytes
        if syntax in NATIVE:
            count = math.prod(self.form.shape)
            return [(begin + n * count, count) for n in range(self.num_frames)]
        if length != _UNDEFINED:
            raise SlideReadError(
                f"compressed frames must be items, got plain bytes in {self.path.name!r}; the "
                "file is damaged"
            )
        table = parsed.dataset.get("ExtendedOffsetTable") or b""
        return _item_places(file, begin, bytes(table), self.num_frames, self.path.name)

    def _error(self, frame: int, reason: str) -> SlideReadError:
        return SlideReadError(
            f"frame must be decodable, got {reason} at frame {frame + 1} of {self.num_frames} in "
            f"{self.path.name!r}; the file is damaged or truncated"
        )


def _item_places(
    file: BinaryIO, begin: int, extended: bytes, num_frames: int, name: str
) -> list[tuple[int, int]]:
    """Returns (offset, bytes) of each frame with the heads of its items."""
    file.seek(begin)
    _, count = _item_head(file.read(_ITEM_BYTES), name)
    table = file.read(count)
    first = begin + _ITEM_BYTES + count
    offsets: list[int] = []
    if extended:
        offsets = np.frombuffer(extended, "<u8").astype(int).tolist()
    elif table:
        offsets = np.frombuffer(table, "<u4").astype(int).tolist()
        if any(b <= a for a, b in pairwise(offsets)):
            offsets = []  # beyond 4 GiB its numbers begin anew
    items: list[tuple[int, int]] = []  # (offset, bytes), their heads included
    place = first
    while True:
        file.seek(place)
        tag, count = _item_head(file.read(_ITEM_BYTES), name)
        if tag == _SEQUENCE_END:
            break
        items.append((place, _ITEM_BYTES + count))
        place += _ITEM_BYTES + count
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


def _item_head(head: bytes, name: str) -> tuple[int, int]:
    if len(head) == _ITEM_BYTES:
        group, element, count = struct.unpack("<HHI", head)
        tag = group << 16 | element
        if tag in (_ITEM, _SEQUENCE_END) and count != _UNDEFINED:
            return tag, count
    raise SlideReadError(
        f"pixel data must be items up to their end in {name!r}; the file is damaged or truncated"
    )


def _joined_fragments(data: bytes) -> bytes:
    """Returns the bytes of a frame without the heads of its items."""
    parts = []
    place = 0
    while place + _ITEM_BYTES <= len(data):
        tag, count = _item_head(data[place : place + _ITEM_BYTES], "a frame")
        if tag == _SEQUENCE_END:
            break
        parts.append(data[place + _ITEM_BYTES : place + _ITEM_BYTES + count])
        place += _ITEM_BYTES + count
    return parts[0] if len(parts) == 1 else b"".join(parts)
