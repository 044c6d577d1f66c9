"""Decoding of one TIFF segment straight into place: a function for each usual compression.

Unusual segments (other sample counts, predictors, bit orders) are left to tifffile.
"""

import struct
from collections.abc import Callable
from functools import partial
from itertools import chain

import imagecodecs
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image
from tifffile import TiffPage

from thinsection.slide.formats import tiff_pages
from thinsection.types import RgbArray, Size

Pixels = NDArray[np.uint8]  # (height, width, samples)
# Decodes bytes into `out`, C-contiguous (height, width, 3), and returns the px: all of `out`, or of
# a JPEG its first rows. Bytes that are no such segment raise one of `REFUSALS`.
Codec = Callable[[memoryview, RgbArray], Pixels]
REFUSALS = (ValueError, RuntimeError, TypeError)

_RGB_SAMPLES = 3
_NO_PREDICTOR = 1
_HORIZONTAL_PREDICTOR = (
    2  # each px is stored as its difference from the one to its left
)
_USUAL_FILL_ORDER = 1
_ONE_THREAD = ("jpeg2k", "jpegxl")  # codecs that would start threads of their own
# Adobe's APP14 with transform 0: "these are R, G, B"; without it a decoder takes them for YCbCr
_APP14_RGB = bytes.fromhex("ffee000e41646f626500640000000000")
_JPEG_START = b"\xff\xd8"

# Factors of Y, Cb, Cr and 1, a row for R, G and B: for every Y, Cb and Cr they give what
# OpenSlide's tables give, which round halves away from zero (there is one: 1.772 * 125).
_BLUE = 1.772 + 1e-6
_GREEN_OFFSET = (0.34414 + 0.71414) * 128
_RGB_OF_YCBCR = (
    1, 0, 1.402, -1.402 * 128,
    1, -0.34414, -0.71414, _GREEN_OFFSET,
    1, _BLUE, 0, -_BLUE * 128,
)  # fmt: skip
_J2K_START = b"\xff\x4f\xff\x51"  # a JPEG 2000 codestream: SOC, SIZ
_J2K_CHROMA_STEP = 46  # where its SIZ says how many px wide one px of Cb is

# Header of a TIFF of one strip: byte order, version, place and length of the directory, ten tags,
# no further directory, bits of the three samples.
_TIFF_HEADER = struct.Struct("<2sHIH" + "HHII" * 10 + "I3H")
_SHORT = 3  # types of tags
_LONG = 4


def codec_of(page: TiffPage, segment: Size) -> Codec | None:
    """Returns what decodes a page's segments of (width, height); None where tifffile does."""
    compression = int(page.compression)
    samples = page.samplesperpixel
    if compression in tiff_pages.JPEG and samples in (1, _RGB_SAMPLES):
        colours = "GRAY" if samples == 1 else "RGB"
        return partial(_decode_jpeg, jpeg_head(page), colours, segment[0])
    is_usual = (
        samples == _RGB_SAMPLES
        and page.planarconfig != tiff_pages.SEPARATE
        and page.fillorder == _USUAL_FILL_ORDER
        and page.predictor in (_NO_PREDICTOR, _HORIZONTAL_PREDICTOR)
    )
    if not is_usual:
        return None
    if compression in tiff_pages.LZW:
        return partial(_decode_lzw, segment, page.predictor)
    if compression in tiff_pages.BYTES:
        has_differences = page.predictor == _HORIZONTAL_PREDICTOR
        return partial(_decode_bytes, compression, has_differences)
    if compression in tiff_pages.APERIO_YCBCR:
        return _decode_aperio_ycbcr
    return partial(_unpack, tiff_pages.PICTURE_CODECS[compression])


def jpeg_head(page: TiffPage) -> bytes:
    """Returns the bytes that make a segment of the page a JPEG, in place of its first two."""
    app14 = _APP14_RGB if int(page.photometric) == tiff_pages.RGB else b""
    tables = (page.jpegtables or b"")[2:-2]  # without their own start and end
    return _JPEG_START + app14 + tables


def _decode_jpeg(
    head: bytes, colours: str, width: int, data: memoryview, out: RgbArray
) -> Pixels:
    # a smaller `out` takes the coarser px of a smaller DCT: a half, a quarter or an eighth
    min_width = out.shape[1] if out.shape[1] < width else 0
    # a JPEG that is larger than this memory is refused before it is decoded
    buffer = out
    if colours != "RGB":
        buffer = np.empty((*out.shape[:2], 1), dtype=np.uint8)
    jpeg = b"".join((head, data[2:]))
    pixels = simplejpeg.decode_jpeg(jpeg, colours, min_width=min_width, buffer=buffer)
    if pixels.shape[1] != out.shape[1] or len(pixels) > len(out):
        raise ValueError(
            f"a JPEG of {pixels.shape[1::-1]} px, expected {out.shape[1::-1]}"
        )
    if buffer is out and len(pixels) == len(out):
        return out
    return np.asarray(pixels)


def _decode_bytes(
    compression: int, has_differences: bool, data: memoryview, out: RgbArray
) -> Pixels:
    """Decodes a compression of bytes, perhaps of differences along the rows."""
    flat = out.reshape(-1)
    is_raw = compression in tiff_pages.RAW
    if is_raw:
        unpacked = np.frombuffer(data, np.uint8)
    else:
        codec = "deflate" if compression in tiff_pages.DEFLATE else "zstd"
        unpacked = _unpack(codec, data, flat)
    if len(unpacked) != len(flat):
        raise ValueError(f"{len(unpacked)} bytes, expected {len(flat)}")
    if is_raw:
        flat[:] = unpacked
    if has_differences:
        imagecodecs.delta_decode(out, axis=-2, out=out)
    return out


def _decode_lzw(
    segment: Size, predictor: int, data: memoryview, out: RgbArray
) -> Pixels:
    """Decodes by libtiff, as a TIFF of one strip: about 1.5 times as fast as imagecodecs' own."""
    width, height = segment
    header_bytes = _TIFF_HEADER.size
    tags = (
        (256, _LONG, 1, width),
        (257, _LONG, 1, height),
        (258, _SHORT, _RGB_SAMPLES, header_bytes - 6),  # bits stand at the header's end
        (259, _LONG, 1, tiff_pages.LZW[0]),
        (262, _LONG, 1, tiff_pages.RGB),
        (273, _LONG, 1, header_bytes),  # where the strip begins
        (277, _LONG, 1, _RGB_SAMPLES),
        (278, _LONG, 1, height),  # rows of the strip
        (279, _LONG, 1, len(data)),
        (317, _LONG, 1, predictor),
    )
    header = _TIFF_HEADER.pack(
        b"II", 42, 8, len(tags), *chain.from_iterable(tags), 0, 8, 8, 8
    )
    return np.asarray(imagecodecs.tiff_decode(header + data, out=out))


def _decode_aperio_ycbcr(data: memoryview, out: RgbArray) -> Pixels:
    """Decodes Y, Cb and Cr of one size to RGB as OpenSlide rounds them, others as OpenJPEG does."""
    _unpack("jpeg2k", data, out)
    if data[:4] == _J2K_START and data[_J2K_CHROMA_STEP] == 1:
        out[:] = np.asarray(Image.fromarray(out).convert("RGB", _RGB_OF_YCBCR))
    return out


def _unpack(codec: str, data: memoryview, out: Pixels) -> Pixels:
    """Decodes by imagecodecs, in this thread alone."""
    decode = getattr(imagecodecs, f"{codec}_decode")
    if codec in _ONE_THREAD:
        return np.asarray(decode(data, out=out, numthreads=1))
    return np.asarray(decode(data, out=out))
