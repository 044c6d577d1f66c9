"""One page of a TIFF: whether its sizes are sound, what it holds, how it is to be read."""

import math
from collections.abc import Sequence
from typing import Literal

from tifffile import TiffPage

from thinsection.errors import DamagedTiffError, ProvedDamageError
from thinsection.slide.formats.segments import MAX_SEGMENT_BYTES
from thinsection.slide.orientation import ORIENTATION_TAG, known_orientation
from thinsection.types import Level, Size

# TIFF's compression codes of bytes
RAW = (1,)
LZW = (5,)
DEFLATE = (8, 32946)
ZSTD = (34926, 50000)
BYTES = (*RAW, *LZW, *DEFLATE, *ZSTD)
# TIFF's compression codes of pictures, which bring their own size
JPEG = (7,)
APERIO_YCBCR = (33003,)
PICTURE_CODECS = {
    33005: "jpeg2k",
    34712: "jpeg2k",
    34927: "webp",
    50001: "webp",
    50002: "jpegxl",
    52546: "jpegxl",
}
_DECODED = frozenset((*BYTES, *JPEG, *APERIO_YCBCR, *PICTURE_CODECS))

SEPARATE = 2  # planar configuration: red, green and blue apart
# photometric interpretations that are read
_GRAY = 1
RGB = 2
YCBCR = 6
_RGBA_SAMPLES = 4
Alpha = Literal["straight", "premultiplied"]  # how colours are stored beside alpha
_ALPHA_BY_EXTRA_SAMPLE: dict[int, Alpha] = {1: "premultiplied", 2: "straight"}

_BITS_TAG = 258  # bits of a sample: one number for each
# tags that are one plain number: width, height, compression, photometric interpretation,
# orientation, samples, rows of a strip, planes, predictor, width and height of a tile
_NUMBER_TAGS = (256, 257, 259, 262, ORIENTATION_TAG, 277, 278, 284, 317, 322, 323)
_INTEGER_TYPES = (3, 4, 16)


def is_sound(page: TiffPage, file_bytes: int, *, required: bool) -> bool:
    """Tells whether the page's sizes harm no reader.

    Args:
        page: the page.
        file_bytes: size of the file.
        required: True where the slide cannot do without the page.

    Raises:
        ProvedDamageError: blocks of the page are missing, and it is required, or may be a level.
        DamagedTiffError: its sizes may do harm, and it is required, or may be a level.
    """
    fault = _find_fault(page, file_bytes)
    loss = "" if fault else _find_loss(page, file_bytes)
    if loss and (required or page.is_tiled):
        raise ProvedDamageError(f"tiff: page {page.index} {loss}; copy the file again")
    if fault and (required or page.is_tiled):
        raise DamagedTiffError(f"tiff: page {page.index} {fault}")
    return not fault and not loss


def _find_fault(page: TiffPage, file_bytes: int) -> str:
    """Returns what is wrong with a page's sizes, after 'page 3 '; '' where nothing is."""
    for code in (*_NUMBER_TAGS, _BITS_TAG):
        tags = page.tags.getall(code) or ()
        if len(tags) > 1 or any(tag.dtype not in _INTEGER_TYPES for tag in tags):
            return f"has no plain number in tag {code}; the file is damaged"
        if code != _BITS_TAG and any(tag.count != 1 for tag in tags):
            return f"has more or less than one value in tag {code}; the file is damaged"
    width = page.imagewidth
    height = page.imagelength
    samples = page.samplesperpixel
    segment = segment_size(page)
    if not all(0 < n < 2**31 for n in (width, height, samples, *segment)):
        return f"has sizes of {(width, height)} and {segment} px; the file is damaged"
    planes = samples if page.planarconfig == SEPARATE else 1
    segment_bytes = math.prod(segment) * samples // planes
    if segment_bytes > MAX_SEGMENT_BYTES:
        return (
            f"has a strip or tile of {segment_bytes >> 20} MiB, more than "
            f"{MAX_SEGMENT_BYTES >> 20}; convert it to a tiled TIFF"
        )
    listed = min(len(page.dataoffsets), len(page.databytecounts))
    expected = _num_segments(page)
    most = max(len(page.dataoffsets), len(page.databytecounts))
    if listed >= expected and most > expected:
        return f"lists {most} segments and has {expected}; the file is damaged"
    return ""


def _num_segments(page: TiffPage) -> int:
    """Returns how many segments a page must list."""
    segment = segment_size(page)
    planes = page.samplesperpixel if page.planarconfig == SEPARATE else 1
    columns = -(-page.imagewidth // segment[0])
    rows = -(-page.imagelength // segment[1])
    return int(columns * rows * planes)


def _find_loss(page: TiffPage, file_bytes: int) -> str:
    """Returns what a page of sound sizes has lost, after 'page 3 '; '' where nothing is missing.

    Segments without bytes are no loss: nothing was scanned there.
    """
    expected = _num_segments(page)
    listed = min(len(page.dataoffsets), len(page.databytecounts))
    if listed < expected:
        return f"lists {listed} of {expected} segments; the file is truncated"
    pairs = zip(page.dataoffsets, page.databytecounts)
    beyond = sum(1 for offset, count in pairs if count and offset + count > file_bytes)
    if beyond:
        place = "beyond the end of the file"
        return f"has {beyond} of {expected} segments {place}; the file is truncated"
    return ""


def empty_segments_note(pages: Sequence[TiffPage]) -> str:
    """Returns a note on segments without bytes on some levels; '' where there are none.

    Args:
        pages: the pages of the levels, finest first.
    """
    parts = []
    for level, page in enumerate(pages):
        num_empty = page.databytecounts.count(0)
        if num_empty:
            total = len(page.databytecounts)
            parts.append(f"{num_empty} of {total} on level {level}")
    if not parts:
        return ""
    return f"blocks without bytes, which are shown white: {', '.join(parts)}"


def find_unsupported(page: TiffPage) -> str:
    """Returns what of a page is not decoded here; '' where everything is."""
    samples = page.samplesperpixel
    compression = int(page.compression)
    photometric = int(page.photometric)
    if page.bitspersample != 8 or samples not in (1, 3, 4):
        return f"{samples} samples of {page.bitspersample} bits"
    if compression not in _DECODED:
        return f"compression {compression}"
    if page.planarconfig == SEPARATE and samples != 3:
        return f"{samples} separate planes"
    if photometric == YCBCR and compression in BYTES:
        return "YCbCr that is not compressed as a picture"
    if photometric == YCBCR and page.planarconfig == SEPARATE:
        return "YCbCr in separate planes"
    if photometric not in (_GRAY, RGB, YCBCR):
        return f"photometric interpretation {photometric}"
    return ""


def segment_size(page: TiffPage) -> Size:
    """Returns (width, height) of a page's tiles or strips."""
    if page.is_tiled:
        return (page.tilewidth, page.tilelength)
    rows = page.rowsperstrip or page.imagelength
    return (page.imagewidth, min(rows, page.imagelength))


def level_of_page(page: TiffPage, index: int, base: TiffPage) -> Level:
    """Returns the level that a page holds, below the level that `base` holds."""
    width = int(page.imagewidth)
    height = int(page.imagelength)
    downsample = (base.imagewidth / width + base.imagelength / height) / 2
    return Level(
        index=index,
        size=(width, height),
        downsample=float(downsample),
        segment=segment_size(page),
    )


def orientation_of(page: TiffPage) -> int:
    """Returns how the page's px must be turned to be upright; 1 where they are."""
    return known_orientation(page.tags.valueof(ORIENTATION_TAG))


def alpha_of(page: TiffPage) -> Alpha | None:
    """Returns how the page's fourth sample makes px transparent; None where it does not.

    Where the file has four samples and no tag ExtraSamples, the fourth is alpha (as Pillow has it);
    where the tag says 'unspecified' it is none, and is not shown.
    """
    if page.samplesperpixel == _RGBA_SAMPLES and not page.extrasamples:
        return "straight"
    return _declared_alpha(page)


def _declared_alpha(page: TiffPage) -> Alpha | None:
    """Returns what the tag ExtraSamples says of the fourth sample."""
    if page.samplesperpixel != _RGBA_SAMPLES or not page.extrasamples:
        return None
    return _ALPHA_BY_EXTRA_SAMPLE.get(int(page.extrasamples[0]))


def has_unexplained_sample(page: TiffPage) -> bool:
    """Tells whether px have a fourth sample that is not declared as alpha."""
    if page.samplesperpixel != _RGBA_SAMPLES:
        return False
    return _declared_alpha(page) is None
