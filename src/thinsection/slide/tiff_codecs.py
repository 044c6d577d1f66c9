"""One segment of a TIFF becomes px straight in place: a function for each compression.

What stands here is the usual segment, whole and of three samples; tifffile decodes the others.
"""

import struct
from collections.abc import Callable
from typing import Any

import imagecodecs
import numpy as np
import simplejpeg
from PIL import Image

from thinsection.types import RgbArray, Size

# TIFF's compression codes: of bytes; of pictures, which bring their own size
RAW, LZW, DEFLATE, ZSTD = (1,), (5,), (8, 32946), (34926, 50000)
JPEG, JPEG2000, APERIO_YCBCR = (7,), (33005, 34712), (33003,)
WEBP, JPEG_XL = (34927, 50001), (50002, 52546)
BYTES = (*RAW, *LZW, *DEFLATE, *ZSTD)
KNOWN = frozenset((*BYTES, *JPEG, *JPEG2000, *APERIO_YCBCR, *WEBP, *JPEG_XL))

# Decodes bytes into `out`, C-contiguous (height, width, 3), and gives the px: all of `out`, or of a
# JPEG its first rows. What is no such segment raises one of `REFUSALS`.
Fill = Callable[[Any, RgbArray], np.ndarray]
REFUSALS = (ValueError, RuntimeError, TypeError)
NOT_BY_TIFFFILE = (*JPEG, *APERIO_YCBCR)  # whose refusal stands: tifffile would give other px

SEPARATE = 2  # planar configuration: red, green and blue apart
_RGB = 2  # photometric interpretation
# Adobe's APP14 with transform 0: "these are R, G, B"; without it a decoder takes them for YCbCr
_APP14_RGB = bytes.fromhex("ffee000e41646f626500640000000000")
# Rows of factors of Y, Cb, Cr and 1: for every Y, Cb and Cr they give what OpenSlide's tables give,
# which round halves away from zero (there is one: 1.772 * 125).
_BLUE = 1.772 + 1e-6
_RGB_OF_YCBCR = (
    *(1, 0, 1.402, -1.402 * 128),
    *(1, -0.34414, -0.71414, (0.34414 + 0.71414) * 128),
    *(1, _BLUE, 0, -_BLUE * 128),
)
_J2K = b"\xff\x4f\xff\x51"  # a JPEG 2000 codestream: SOC, SIZ
_J2K_CHROMA_STEP = 46  # where its SIZ says how many px wide one px of Cb is


def fill_of(page: Any, segment: Size) -> Fill | None:
    """The function that decodes a page's segments of (width, height); None: tifffile does."""
    code = int(page.compression)
    if page.samplesperpixel in (1, 3) and code in JPEG:
        return _jpeg(page, segment[0])
    if (
        page.planarconfig == SEPARATE
        or page.samplesperpixel != 3
        or page.fillorder != 1
        or page.predictor not in (1, 2)
    ):
        return None
    if code in LZW:
        return _lzw(segment, page.predictor)
    if code in BYTES:
        return _bytes(code, differences=page.predictor == 2)
    return _PICTURES[code]


def jpeg_head(page: Any) -> bytes:
    """What makes a JPEG of its own of a segment of the page, in the place of its first 2 bytes."""
    app14 = _APP14_RGB if int(page.photometric) == _RGB else b""
    return b"\xff\xd8" + app14 + (page.jpegtables or b"")[2:-2]  # without its own SOI and EOI


def _jpeg(page: Any, width: int) -> Fill:
    head, grey = jpeg_head(page), page.samplesperpixel == 1

    def fill(data: Any, out: RgbArray) -> np.ndarray:
        whole, colours = b"".join((head, data[2:])), "GRAY" if grey else "RGB"
        # a smaller `out` takes the coarser px of a smaller DCT: a half, a quarter or an eighth
        least = out.shape[1] if out.shape[1] < width else 0
        into = None if grey else out
        pixels = simplejpeg.decode_jpeg(whole, colours, min_width=least, buffer=into)
        if pixels.shape[1] != out.shape[1] or len(pixels) > len(out):
            size, expected = pixels.shape[1::-1], out.shape[1::-1]
            raise ValueError(f"a JPEG of {size} px, expected {expected}")
        return out if into is out and len(pixels) == len(out) else np.asarray(pixels)

    return fill


def _bytes(code: int, *, differences: bool) -> Fill:
    """Of a compression of bytes, perhaps of each px's difference from the one to its left."""
    decode: Callable[..., Any] = imagecodecs.zstd_decode
    if code in DEFLATE:
        decode = imagecodecs.deflate_decode

    def fill(data: Any, out: RgbArray) -> np.ndarray:
        flat = out.reshape(-1)
        found = np.frombuffer(data, np.uint8) if code in RAW else decode(data, out=flat)
        if len(found) != len(flat):
            raise ValueError(f"{len(found)} bytes, expected {len(flat)}")
        if code in RAW:
            flat[:] = found
        if differences:
            imagecodecs.delta_decode(out, axis=-2, out=out)
        return out

    return fill


def _lzw(segment: Size, predictor: int) -> Fill:
    """By libtiff, as a TIFF of one strip in memory: about 1.5 times as fast as imagecodecs' own."""
    head = struct.Struct("<2sHIH" + "HHII" * 10 + "I3H")
    bits_at = head.size - 6  # of the three samples
    (width, height), number, numbers = segment, (4, 1), (3, 3)

    def fill(data: Any, out: RgbArray) -> np.ndarray:
        size = (256, *number, width, 257, *number, height, 258, *numbers, bits_at)
        kind = (259, *number, *LZW, 262, *number, _RGB, 273, *number, head.size, 277, *number, 3)
        strip = (278, *number, height, 279, *number, len(data), 317, *number, predictor)
        stored = head.pack(b"II", 42, 8, 10, *size, *kind, *strip, 0, 8, 8, 8) + data
        return np.asarray(imagecodecs.tiff_decode(stored, out=out))

    return fill


def _jpeg2000(data: Any, out: RgbArray) -> np.ndarray:
    return np.asarray(imagecodecs.jpeg2k_decode(data, numthreads=1, out=out))


def _aperio_ycbcr(data: Any, out: RgbArray) -> np.ndarray:
    """Y, Cb and Cr of one size become RGB as OpenSlide rounds them, others as OpenJPEG does."""
    _jpeg2000(data, out)
    if data[:4] == _J2K and data[_J2K_CHROMA_STEP] == 1:
        out[:] = np.asarray(Image.fromarray(out).convert("RGB", _RGB_OF_YCBCR))
    return out


def _webp(data: Any, out: RgbArray) -> np.ndarray:
    return np.asarray(imagecodecs.webp_decode(data, out=out))


def _jpeg_xl(data: Any, out: RgbArray) -> np.ndarray:
    return np.asarray(imagecodecs.jpegxl_decode(data, numthreads=1, out=out))


_KINDS = ((JPEG2000, _jpeg2000), (APERIO_YCBCR, _aperio_ycbcr), (WEBP, _webp), (JPEG_XL, _jpeg_xl))
_PICTURES: dict[int, Fill] = {code: fill for codes, fill in _KINDS for code in codes}
