"""One page of a TIFF: checks of its sizes, what can be decoded, and its metadata.

OME-XML is searched by patterns instead of parsed, because some programs write invalid XML.
"""

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tifffile import TiffPage

from thinsection.errors import DamagedTiffError, ProvedDamageError
from thinsection.slide.formats.segments import MAX_SEGMENT_BYTES
from thinsection.slide.geometry import positive_number, um_per_unit
from thinsection.slide.orientation import ORIENTATION_TAG, known_orientation
from thinsection.types import Level, Mpp, Size

# TIFF compression codes for plain bytes
RAW = (1,)
LZW = (5,)
DEFLATE = (8, 32946)
ZSTD = (34926, 50000)
BYTES = (*RAW, *LZW, *DEFLATE, *ZSTD)
# TIFF compression codes for pictures, which state their own size
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
# JPEG 2000, which takes far longer to decode than all others
SLOW_CODECS = (*APERIO_YCBCR, 33005, 34712)
_DECODED = frozenset((*BYTES, *JPEG, *APERIO_YCBCR, *PICTURE_CODECS))

SEPARATE = 2  # planar configuration: red, green and blue are stored apart
# photometric interpretations that are supported
_GRAY = 1
RGB = 2
YCBCR = 6
_RGBA_SAMPLES = 4
Alpha = Literal["straight", "premultiplied"]  # how colours are stored beside alpha
_ALPHA_BY_EXTRA_SAMPLE: dict[int, Alpha] = {1: "premultiplied", 2: "straight"}

_BITS_TAG = 258  # bits per sample; one number for each sample
# tags that hold one plain number: width, height, compression, photometric interpretation,
# orientation, samples, rows of a strip, planes, predictor, width and height of a tile
_NUMBER_TAGS = (256, 257, 259, 262, ORIENTATION_TAG, 277, 278, 284, 317, 322, 323)
_INTEGER_TYPES = (3, 4, 16)
_ROOT = re.compile(r"<(?:\w+:)?OME\b([^>]*)>")
_IMAGE = re.compile(r"<(?:\w+:)?Image\b")
_PIXELS = re.compile(r"<(?:\w+:)?Pixels\b([^>]*)>")
_CHANNEL = re.compile(r"<(?:\w+:)?Channel\b([^>]*)>")
_TIFF_DATA = re.compile(
    r"<(?:\w+:)?TiffData\b([^>]*?)(?:/>|>(.*?)</(?:\w+:)?TiffData>)", re.DOTALL
)
_UUID = re.compile(r"<(?:\w+:)?UUID\b([^>]*)>([^<]*)<")
_ATTRIBUTE = re.compile(r'([\w:]+)="([^"]*)"')
_MAX_PLANES = 1 << 20  # largest number of planes of an image; more mean a damaged file
OME = "ome."  # prefix of OME-XML values among a slide's properties
_IMAGEJ_UNIT = re.compile(r"^unit=(.+)$", re.MULTILINE)


def is_sound(page: TiffPage, file_bytes: int, *, required: bool) -> bool:
    """Tells whether the page's sizes are safe to read.

    Args:
        page: the page.
        file_bytes: size of the file.
        required: True if the slide cannot be shown without the page.

    Raises:
        ProvedDamageError: parts of the page are missing, and it is required or may be a level.
        DamagedTiffError: its sizes are unsafe, and it is required or may be a level.
    """
    fault = _find_fault(page)
    loss = "" if fault else _find_loss(page, file_bytes)
    if loss and (required or page.is_tiled):
        raise ProvedDamageError(f"tiff: page {page.index} {loss}; copy the file again")
    if fault and (required or page.is_tiled):
        raise DamagedTiffError(f"tiff: page {page.index} {fault}")
    return not fault and not loss


def _find_fault(page: TiffPage) -> str:
    """Returns the fault of a page's sizes as the end of 'page 3 ...'; '' if there is none."""
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
    counts = (len(page.dataoffsets), len(page.databytecounts))
    listed = min(counts)
    most = max(counts)
    expected = _num_segments(page)
    if listed >= expected and most > expected:
        return f"lists {most} segments and has {expected}; the file is damaged"
    return ""


def _num_segments(page: TiffPage) -> int:
    """Returns the number of segments that a page must list."""
    width, height = segment_size(page)
    planes = page.samplesperpixel if page.planarconfig == SEPARATE else 1
    return int(-(-page.imagewidth // width) * -(-page.imagelength // height) * planes)


def _find_loss(page: TiffPage, file_bytes: int) -> str:
    """Returns which data of a page is missing, as the end of 'page 3 ...'; '' if nothing is.

    The page's sizes must be sound. Empty segments are no loss: the scanner left them out.
    """
    expected = _num_segments(page)
    listed = min(len(page.dataoffsets), len(page.databytecounts))
    if listed < expected:
        return f"lists {listed} of {expected} segments; the file is truncated"
    pairs = zip(page.dataoffsets, page.databytecounts)
    beyond = sum(1 for offset, count in pairs if count and offset + count > file_bytes)
    if beyond:
        return (
            f"has {beyond} of {expected} segments beyond the end of the file; the file is "
            "truncated"
        )
    return ""


def empty_segments_note(pages: Sequence[TiffPage]) -> str:
    """Returns a note on empty segments, with their number on each level; '' if there are none.

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
    """Returns the feature of a page that this reader cannot decode; '' if there is none."""
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
    """Returns the orientation tag of a page; 1 means that its pixels are upright."""
    return known_orientation(page.tags.valueof(ORIENTATION_TAG))


def alpha_of(page: TiffPage) -> Alpha | None:
    """Returns how the page's fourth sample makes pixels transparent; None if it does not.

    In a file with four samples and no tag ExtraSamples, the fourth is alpha (as in Pillow). If the
    tag says 'unspecified', the fourth sample is not alpha and is ignored.
    """
    if page.samplesperpixel != _RGBA_SAMPLES:
        return None
    if not page.extrasamples:
        return "straight"
    return _ALPHA_BY_EXTRA_SAMPLE.get(int(page.extrasamples[0]))


def has_unexplained_sample(page: TiffPage) -> bool:
    """Tells whether pixels have a fourth sample that is not declared as alpha."""
    if page.samplesperpixel != _RGBA_SAMPLES:
        return False
    return not page.extrasamples or alpha_of(page) is None


@dataclass(frozen=True, kw_only=True)
class OmeImage:
    """One image of OME-XML.

    Attributes:
        number: position in the XML, from 1.
        name: name of the image.
        pixels: attributes of the element Pixels, such as SizeX.
        channel_names: names of the channels, if there are any.
        planes: number of the page in the file for each (z, channel plane, t).
        num_channel_planes: number of pages for the channels of one z and t; 1 for RGB in one page.
    """

    number: int
    name: str
    pixels: Mapping[str, str]
    channel_names: tuple[str, ...]
    planes: Mapping[tuple[int, int, int], int]
    num_channel_planes: int

    @property
    def mpp(self) -> Mpp | None:
        """PhysicalSizeX and Y in µm (the default unit); None if they are no two lengths."""
        sides = []
        for axis in "XY":
            value = positive_number(self.pixels.get(f"PhysicalSize{axis}"))
            unit = self.pixels.get(f"PhysicalSize{axis}Unit", "um")
            um = um_per_unit(unit)
            if value is None or um is None:
                return None
            sides.append(value * um)
        return (sides[0], sides[1])

    def fits(self, num_pages: int) -> bool:
        """Tells whether all planes are pages of the file."""
        indices = self.planes.values()
        return all(0 <= index < num_pages for index in indices)

    def first_channels(self) -> list[tuple[tuple[int, int], int]]:
        """Returns ((z, t), page) for the first channel of each plane, beginning with z 0, t 0."""
        first = {}
        for (z, channel, t), index in sorted(self.planes.items()):
            if channel == 0:
                first[z, t] = index
        return sorted(first.items())


def parse_ome_images(xml: str, file_name: str) -> list[OmeImage]:
    """Returns the images whose pages are in this file; none if the XML lists no pages."""
    root = _ROOT.search(xml)
    own_uuid = _attributes(root[1]).get("UUID", "") if root else ""
    starts = [match.start() for match in _IMAGE.finditer(xml)]
    texts = [xml[start:end] for start, end in zip(starts, [*starts[1:], len(xml)])]
    images = []
    for number, text in enumerate(texts, start=1):
        image = _parse_image(number, text, own_uuid, Path(file_name).name)
        if image is not None and image.planes:
            images.append(image)
    return images


def _parse_image(
    number: int, text: str, own_uuid: str, file_name: str
) -> OmeImage | None:
    """Returns one image; None if it has no pixels."""
    pixels = _PIXELS.search(text)
    if pixels is None:
        return None
    attributes = _attributes(pixels[1])
    body = text[pixels.end() :].partition("Pixels>")[0]
    channels = [_attributes(channel) for channel in _CHANNEL.findall(body)]
    samples = [_count(each.get("SamplesPerPixel"), 1) for each in channels]
    sizes = {axis: _count(attributes.get(f"Size{axis}"), 1) for axis in "ZCT"}
    num_channel_planes = len(channels) or sizes["C"]
    if samples and sum(samples) != sizes["C"]:
        num_channel_planes = max(1, sizes["C"] // max(samples))
    lengths = {"Z": sizes["Z"], "C": num_channel_planes, "T": sizes["T"]}
    order = attributes.get("DimensionOrder", "XYCZT")[2:]
    if sorted(order) != ["C", "T", "Z"]:
        order = "CZT"
    planes = _planes(body, order, lengths, own_uuid, file_name)
    return OmeImage(
        number=number,
        name=_attributes(text[: text.find(">")]).get("Name", ""),
        pixels=attributes,
        channel_names=tuple(each.get("Name", "") for each in channels),
        planes=planes,
        num_channel_planes=num_channel_planes,
    )


def _planes(
    body: str,
    order: str,
    lengths: Mapping[str, int],
    own_uuid: str,
    file_name: str,
) -> dict[tuple[int, int, int], int]:
    """Returns the page of each (z, channel plane, t) that is in this file."""
    count = lengths["Z"] * lengths["C"] * lengths["T"]
    if not 0 < count <= _MAX_PLANES:
        return {}
    planes: dict[tuple[int, int, int], int] = {}
    for text, inner in _TIFF_DATA.findall(body):
        data = _attributes(text)
        uuid = _UUID.search(inner or "")
        if uuid is not None:
            other_name = _attributes(uuid[1]).get("FileName", file_name)
            if uuid[2].strip() != own_uuid and other_name != file_name:
                continue
        place = {axis: _count(data.get(f"First{axis}"), 0) for axis in "ZCT"}
        step = 1
        first = 0
        for axis in order:
            first += min(place[axis], lengths[axis]) * step
            step *= lengths[axis]
        ifd = _count(data.get("IFD"), 0)
        default = 1 if "IFD" in data else count - first
        last = min(count, first + _count(data.get("PlaneCount"), default))
        for number in range(first, last):
            rest = number
            where = {}
            for axis in order:
                rest, where[axis] = divmod(rest, lengths[axis])
            planes[where["Z"], where["C"], where["T"]] = ifd + number - first
    return planes


def _count(text: str | None, default: int) -> int:
    """Returns an attribute as a whole number; the default if the attribute is missing."""
    return int(text) if text and text.isdecimal() else default


def _attributes(text: str) -> dict[str, str]:
    return {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(text)}


@dataclass(frozen=True, kw_only=True)
class TiffMetadata:
    """Metadata of a slide; the fields are those of `Slide`."""

    slide_mpp: Mpp | None
    mpp_source: str
    objective_power: float | None
    vendor: str | None
    properties: Mapping[str, str]
    orientation: int


def read_metadata(
    base: TiffPage, ome: OmeImage | None, slide_mpp: Mpp | None
) -> TiffMetadata:
    """Returns the metadata of a slide whose level 0 is the page `base`.

    Args:
        base: page of level 0.
        ome: OME-XML metadata of the picture.
        slide_mpp: resolution that replaces the file's own.
    """
    aperio = aperio_words(base)
    properties = {f"aperio.{key}": value for key, value in aperio.items()}
    if ome is not None:
        properties |= {f"{OME}{name}": value for name, value in ome.pixels.items()}
        properties[f"{OME}Channels"] = ", ".join(filter(None, ome.channel_names))
    properties["tiff.ImageDescription"] = str(base.description or "")
    vendor = "generic-tiff" if base.is_tiled else None
    # Aperio's resolution comes first, then the OME-XML's, then that of the TIFF tags
    own_mpp = aperio_mpp(aperio)
    mpp_source = "Aperio's MPP"
    if own_mpp is None:
        own_mpp = ome.mpp if ome is not None else None
        mpp_source = "OME-XML"
        if own_mpp is None and not aperio:
            own_mpp = tag_mpp(base)
            mpp_source = "resolution tags"
    return TiffMetadata(
        slide_mpp=slide_mpp or own_mpp,
        mpp_source=mpp_source,
        objective_power=positive_number(aperio.get("AppMag")),
        vendor="aperio" if aperio else vendor,
        properties=properties,
        orientation=orientation_of(base),
    )


def aperio_words(page: TiffPage) -> dict[str, str]:
    """Returns the pairs `key = value` of an Aperio description; {} for any other description."""
    description = str(page.description or "")
    if not description.startswith("Aperio"):
        return {}
    pairs: dict[str, str] = {}
    for part in description.split("|")[1:]:
        key, equals, value = part.partition("=")
        if equals:
            pairs[key.strip()] = value.strip()
    return pairs


def aperio_mpp(words: Mapping[str, str]) -> Mpp | None:
    """Returns the resolution in an Aperio description; None if there is none."""
    mpp = positive_number(words.get("MPP"))
    return None if mpp is None else (mpp, mpp)


def tag_mpp(page: TiffPage) -> Mpp | None:
    """Returns µm per pixel from XResolution and YResolution if their unit is a length, else None.

    ImageJ writes the name of the unit in the description.
    """
    tag_of_unit = page.tags.get("ResolutionUnit")
    unit = None if tag_of_unit is None else int(tag_of_unit.value)
    um = um_per_unit(unit)
    description = str(page.description or "")
    if um is None and description.startswith("ImageJ="):
        named = _IMAGEJ_UNIT.search(description)
        um = um_per_unit(named[1]) if named else None
    if um is None:
        return None
    sides = []
    for name in ("XResolution", "YResolution"):
        tag = page.tags.get(name)
        if tag is None or not all(tag.value[:2]):
            return None
        pixels, units = tag.value[:2]
        sides.append(um * units / pixels)
    return (sides[0], sides[1])
