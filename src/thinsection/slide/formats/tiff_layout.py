"""What a TIFF file holds: levels, associated images, resolution; parsed by tifffile."""

import html
import math
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tifffile

from thinsection.errors import DamagedTiffError, SlideOpenError, ThinsectionError
from thinsection.slide.formats.segments import MAX_SEGMENT_BYTES
from thinsection.slide.geometry import positive_number
from thinsection.slide.look import Channels, find_channels, refusal
from thinsection.slide.orientation import (
    ORIENTATION_TAG,
    UPRIGHT,
    known_orientation,
)
from thinsection.types import Level, Mpp, Size

# TIFF's compression codes: of bytes; of pictures, which bring their own size, with their codecs
RAW, LZW, DEFLATE, ZSTD = (1,), (5,), (8, 32946), (34926, 50000)
JPEG, APERIO_YCBCR, BYTES = (7,), (33003,), (*RAW, *LZW, *DEFLATE, *ZSTD)
PICTURES = dict.fromkeys((33005, 34712), "jpeg2k")
PICTURES |= dict.fromkeys((34927, 50001), "webp") | dict.fromkeys(
    (50002, 52546), "jpegxl"
)
_KNOWN = frozenset((*BYTES, *JPEG, *APERIO_YCBCR, *PICTURES))
SEPARATE = 2  # planar configuration: red, green and blue apart
_RGBA_SAMPLES = 4
Alpha = Literal[
    "straight", "premultiplied"
]  # how colours are stored beside their alpha
_ALPHA_BY_EXTRA_SAMPLE: dict[int, Alpha] = {1: "premultiplied", 2: "straight"}
_GRAY, RGB, YCBCR = 1, 2, 6  # photometric interpretations that are read
OME = "ome."  # before what the OME-XML says, in a slide's properties
_ASPECT_TOLERANCE = 0.02
_UM_PER_UNIT = {2: 25_400.0, 3: 10_000.0}  # TIFF's ResolutionUnit: inch, cm
# what OpenSlide treats in a way of its own (overlaps, sparse layouts, restart markers)
_LEFT_TO_OPENSLIDE = {
    "ndpi": "Hamamatsu NDPI",
    "bif": "Ventana BIF",
    "scn": "Leica SCN",
}
_LEFT_TO_OPENSLIDE |= {"philips": "Philips TIFF"}
_UM_PER_OME_UNIT = {
    "m": 1e6,
    "dm": 1e5,
    "cm": 1e4,
    "mm": 1e3,
    "nm": 1e-3,
    "pm": 1e-6,
    "Å": 1e-4,
}
_UM_PER_OME_UNIT |= {
    "\u00b5m": 1.0,
    "\u03bcm": 1.0,
    "um": 1.0,
    "in": 25_400.0,
    "\u212b": 1e-4,
}
_ICC = 34675  # tag of the colour profile
# tags that are one plain number: width, height, compression, photometric interpretation,
# orientation, samples, rows of a strip, planes, predictor, tile; bits are one of each sample
_NUMBERS, _BITS, _INTEGERS = (
    (256, 257, 259, 262, ORIENTATION_TAG, 277, 278, 284, 317, 322, 323),
    258,
    (3, 4, 16),
)


@dataclass(frozen=True, kw_only=True)
class TiffLayout:
    """The parsed structure of a TIFF slide; of tifffile's pages use what needs no open file."""

    levels: list[Level]  # finest first
    pages: list[Any]  # of the levels
    associated: dict[
        str, tuple[Level, Any]
    ]  # name -> the only level of that image, and its page
    facts: dict[str, Any]  # further arguments of `Slide`
    icc_profile: bytes | None = None
    checked: bool  # whether a C library may see the file: no page asks for memory beyond reason


def read_layout(path: str, slide_mpp: Mpp | None, handle: Any = None) -> TiffLayout:
    """The layout of a local file, or of an opened binary file object (which stays open).

    Raises ChannelsError (no RGB or gray picture of 8 bits), SlideOpenError (not a TIFF, truncated,
    or left to OpenSlide).
    """
    with _parsed(path, handle) as file:
        base, pages = _sound_pages(file)
        if (channels := find_channels(file)) is not None:
            raise refusal(channels, file.filename)
        below = list(
            base.pages or ()
        )  # as OME-TIFFs of QuPath and bfconvert store their levels
        pages, file_bytes = [base, *below, *pages[1:]], file.filehandle.size
        sound = [
            page for page in pages if _is_sound(page, file_bytes, or_raise=page is base)
        ]
        found, associated = _sort_pages(sound, below)
        _refuse_mixed_orientations(base, found)
        return TiffLayout(
            levels=[_supported(page, index, base) for index, page in enumerate(found)],
            pages=found,
            associated={
                name: (_supported(page, 0, page), page) for name, page in associated
            },
            facts=_facts(file, base, slide_mpp),
            icc_profile=base.tags.valueof(_ICC),
            checked=len(sound) == len(pages),
        )


def channel_layout(path: str, slide_mpp: Mpp | None) -> tuple[TiffLayout, Channels]:
    """Levels of a file with channels, and where these lie; SlideOpenError: also if none to pick."""
    with _parsed(path) as file:
        base, _ = _sound_pages(file)
        if (found := find_channels(file)) is None:
            what = f"tiff: an RGB or gray picture of 8 bits has no channels to pick, in {path!r}"
            raise SlideOpenError(f"{what}; leave --channels out")
        keys = [planes[0].page.keyframe for planes in found.planes]
        for key, planes in zip(keys, found.planes):
            _is_sound(key, size := file.filehandle.size, or_raise=True)
            stored = [plane.page.databytecounts for plane in planes]
            if any(len(c) != len(key.databytecounts) or max(c) > size for c in stored):
                raise SlideOpenError(
                    "tiff: planes must have all segments; the file is damaged"
                )
        levels = [_level(key, index, base) for index, key in enumerate(keys)]
        facts = _facts(file, base, slide_mpp)
        return TiffLayout(
            levels=levels, pages=[], associated={}, facts=facts, checked=False
        ), found


@contextmanager
def _parsed(path: str, handle: Any = None) -> Iterator[tifffile.TiffFile]:
    """The file by tifffile, closed after the block; SlideOpenError for whatever it raises."""
    if (name := Path(path.split("?", 1)[0])).suffix.lower() == ".vsi":
        beside = "is" if name.with_name(f"_{name.stem}_").is_dir() else "is not"
        what = "this Olympus VSI is a shell that holds a preview only"
        lie = f"its px lie as .ets files in '_{name.stem}_', which {beside} beside it"
        remedy = (
            "no reader here reads those: convert it to OME-TIFF (QuPath or bfconvert)"
        )
        raise SlideOpenError(f"tiff: {what}; {lie}; {remedy}")
    try:
        with tifffile.TiffFile(
            path if handle is None else handle, name=Path(path).name
        ) as file:
            yield file
    except (ThinsectionError, MemoryError):  # they say all
        raise
    except Exception as error:  # whatever a parser makes of damage
        raise DamagedTiffError(
            f"tiff: not a readable TIFF: {error or repr(error)}"
        ) from error


def _sound_pages(file: tifffile.TiffFile) -> tuple[Any, list[Any]]:
    """The first page, whose sizes are sound, and all pages of the chain."""
    if not (pages := list(file.pages)):
        raise SlideOpenError("tiff: a TIFF header without pages; the file is truncated")
    if (
        _next_page_offset(file, pages[-1]) != 0
    ):  # tifffile only logs it: levels would be missing
        raise SlideOpenError(
            "tiff: the chain of pages leads beyond the end; the file is truncated"
        )
    for flag, what in _LEFT_TO_OPENSLIDE.items():
        if getattr(file, f"is_{flag}"):
            raise SlideOpenError(f"tiff: {what} is left to OpenSlide")
    _is_sound(base := pages[0], file.filehandle.size, or_raise=True)
    return base, pages


def _next_page_offset(file: tifffile.TiffFile, page: Any) -> int:
    """Where the page after this one begins in the file; 0 after the last."""
    form, handle = file.tiff, file.filehandle
    handle.seek(page.offset)
    (count,) = struct.unpack(form.tagnoformat, handle.read(form.tagnosize))
    handle.seek(page.offset + form.tagnosize + count * form.tagsize)
    (offset,) = struct.unpack(form.offsetformat, handle.read(form.offsetsize))
    return int(offset)


def _is_sound(page: Any, file_bytes: int, *, or_raise: bool) -> bool:
    """Whether the page's sizes harm no reader; SlideOpenError where it is, or may be, a level."""
    what = _unsound(page, file_bytes)
    if what and (or_raise or page.is_tiled):
        raise DamagedTiffError(f"tiff: page {page.index} {what}")
    return not what


def _unsound(page: Any, file_bytes: int) -> str:
    """What is wrong with a page's sizes, after 'page 3 '; '' where nothing is."""
    for code in (*_NUMBERS, _BITS):
        tags = page.tags.getall(code) or ()
        if len(tags) > 1 or any(t.dtype not in _INTEGERS for t in tags):
            return f"has no plain number in tag {code}; the file is damaged"
        if any(t.count != 1 for t in tags if code != _BITS):
            return f"has not one value in tag {code}; the file is damaged"
    width, height, samples = page.imagewidth, page.imagelength, page.samplesperpixel
    segment = _segment(page)
    if not all(0 < n < 2**31 for n in (width, height, samples, *segment)):
        return f"has sizes of {(width, height)} and {segment} px; the file is damaged"
    planes = samples if page.planarconfig == SEPARATE else 1
    if (num_bytes := math.prod(segment) * samples // planes) > MAX_SEGMENT_BYTES:
        what = f"{num_bytes >> 20} MiB, more than {MAX_SEGMENT_BYTES >> 20}"
        return f"has a strip or tile of {what}; convert it to a tiled TIFF"
    count, found = (
        -(-width // segment[0]) * -(-height // segment[1]) * planes,
        page.dataoffsets,
    )
    if not len(found) == len(page.databytecounts) == count:
        return f"lists {len(found)} of {count} segments; the file is truncated"
    large = max(page.databytecounts) > file_bytes
    return "has a segment larger than the file; the file is damaged" if large else ""


def orientation_of(page: Any) -> int:
    """How the page's px must be turned to be upright; 1 where they are."""
    return known_orientation(page.tags.valueof(ORIENTATION_TAG))


def alpha_of(page: Any) -> Alpha | None:
    """How the page's fourth sample makes px transparent; None: there is none, or it is no alpha.

    Where the file has four samples and no tag ExtraSamples, the fourth is alpha (as Pillow has it);
    where the tag says 'unspecified' it is none, and is not shown.
    """
    if page.samplesperpixel != _RGBA_SAMPLES:
        return None
    kinds = tuple(page.extrasamples)
    if not kinds:
        return "straight"
    return _ALPHA_BY_EXTRA_SAMPLE.get(int(kinds[0]))


def library_objection(path: str, *, alpha_too: bool = False) -> str:
    """Why a C library would show other px than a TIFF describes; '' where it would not.

    OpenSlide leaves px as they are stored, or mirrors them within each tile, and takes any fourth
    sample for alpha. cuCIM, with `alpha_too`, ignores alpha and orientation.
    """
    try:
        with _parsed(path) as file:
            for page in file.pages:
                orientation = orientation_of(page)
                if orientation != UPRIGHT:
                    return f"page {page.index} has orientation {orientation}"
                if page.samplesperpixel != _RGBA_SAMPLES:
                    continue
                if alpha_too or _declared_alpha(page) is None:
                    return f"page {page.index} has a fourth sample"
    except SlideOpenError:  # no TIFF, or a damaged one: the library says so itself
        return ""
    return ""


def _declared_alpha(page: Any) -> Alpha | None:
    """What the tag ExtraSamples says of the fourth sample."""
    return alpha_of(page) if page.extrasamples else None


def _refuse_mixed_orientations(base: Any, levels: list[Any]) -> None:
    """Levels that say that they are turned otherwise than the first page is.

    A level without the tag is turned as the first page: programs that set it set it there alone.
    """
    first = orientation_of(base)
    for page in levels:
        if ORIENTATION_TAG not in page.tags or orientation_of(page) == first:
            continue
        raise SlideOpenError(
            f"tiff: levels must have one orientation (tag {ORIENTATION_TAG}), got {first} and "
            f"{orientation_of(page)}; write the same number into every page"
        )


def _segment(page: Any) -> Size:
    """(width, height) of a page's tiles or strips."""
    if page.is_tiled:
        return (page.tilewidth, page.tilelength)
    return (
        page.imagewidth,
        min(page.rowsperstrip or page.imagelength, page.imagelength),
    )


def _level(page: Any, index: int, base: Any) -> Level:
    """The level that a page holds."""
    size = width, height = (int(page.imagewidth), int(page.imagelength))
    down = (base.imagewidth / width + base.imagelength / height) / 2
    return Level(index=index, size=size, downsample=float(down), segment=_segment(page))


def _supported(page: Any, index: int, base: Any) -> Level:
    """The same; SlideOpenError where it is of a kind that is left out here."""
    if what := _unsupported(page):
        raise SlideOpenError(f"tiff: {what} is not supported")
    return _level(page, index, base)


def _unsupported(page: Any) -> str | None:
    """What of a page is not decoded here; None where nothing is."""
    samples, code, colours = (
        page.samplesperpixel,
        int(page.compression),
        int(page.photometric),
    )
    if page.bitspersample != 8 or samples not in (1, 3, 4):
        return f"{samples} samples of {page.bitspersample} bits"
    if code not in _KNOWN:
        return f"compression {code}"
    if page.planarconfig == SEPARATE and samples != 3:
        return f"{samples} separate planes"
    if colours == YCBCR and code in BYTES:
        return "YCbCr that is not compressed as a picture"
    return (
        None
        if colours in (_GRAY, RGB, YCBCR)
        else f"photometric interpretation {colours}"
    )


def _sort_pages(
    pages: list[Any], below: list[Any]
) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Pages that are levels, finest first (those `below` the first, if any); others with names."""
    base, *others = pages
    levels, associated = [base], dict[str, Any]()
    for page in others:
        may_be = page in below if below else page.is_tiled and base.is_tiled
        if may_be and _is_reduced(page, base):
            levels.append(page)
        elif not _unsupported(page):
            words = [
                line.split(" ", 1)[0].lower()
                for line in str(page.description).splitlines()
            ]
            known = [
                word for word in words[:2] if word in ("label", "macro", "thumbnail")
            ]
            numbered = f"image{len(associated)}" if associated else "thumbnail"
            associated.setdefault(known[0] if known else numbered, page)
    return sorted(levels, key=lambda page: -int(page.imagewidth)), list(
        associated.items()
    )


def _is_reduced(page: Any, base: Any) -> bool:
    ratio_x, ratio_y = (
        base.imagewidth / page.imagewidth,
        base.imagelength / page.imagelength,
    )
    same_kind = (
        page.samplesperpixel == base.samplesperpixel and page.dtype == base.dtype
    )
    tolerance = _ASPECT_TOLERANCE + 2 / page.imagelength
    return bool(same_kind and ratio_x > 1 and abs(ratio_x / ratio_y - 1) < tolerance)


def _facts(file: tifffile.TiffFile, base: Any, slide_mpp: Mpp | None) -> dict[str, Any]:
    """What the file says of itself, as further arguments of `Slide`."""
    description, ome, aperio = str(base.description or ""), _ome(file), dict[str, str]()
    if description.startswith("Aperio"):  # and pairs `key = value`
        pairs = (part.split("=", 1) for part in description.split("|")[1:])
        aperio = {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}
    mpp = positive_number(aperio.get("MPP"))
    own_mpp = (
        (mpp, mpp) if mpp else _ome_mpp(ome) or (None if aperio else _tag_mpp(base))
    )
    properties = {f"aperio.{k}": v for k, v in aperio.items()} | ome
    return {
        "orientation": orientation_of(base),
        "slide_mpp": slide_mpp or own_mpp,
        "objective_power": positive_number(aperio.get("AppMag")),
        "vendor": "aperio" if aperio else "generic-tiff" if base.is_tiled else None,
        "properties": properties | {"tiff.ImageDescription": description},
    }


def _ome(file: tifffile.TiffFile) -> dict[str, str]:
    """What the first image of an OME-TIFF says of its px, and its channels; else nothing."""
    text = html.unescape(file.ome_metadata or "")
    if (pixels := re.search(r"<(?:\w+:)?Pixels\b([^>]*)>", text)) is None:
        return {}
    found = dict(re.findall(r'(\w+)="([^"]*)"', pixels.group(1)))
    image = text[pixels.end() :].partition("Pixels>")[0]
    channels = re.findall(r"<(?:\w+:)?Channel\b([^>]*)>", image)
    names = [
        name.group(1) for c in channels if (name := re.search(r'Name="([^"]*)"', c))
    ]
    return {f"{OME}{k}": v for k, v in found.items()} | {
        f"{OME}Channels": ", ".join(names)
    }


def _ome_mpp(ome: Mapping[str, str]) -> Mpp | None:
    """PhysicalSizeX and Y in µm, where both have a unit of length; without one they are in µm."""
    sides = []
    for axis in "XY":
        value = positive_number(ome.get(f"{OME}PhysicalSize{axis}"))
        um = _UM_PER_OME_UNIT.get(ome.get(f"{OME}PhysicalSize{axis}Unit", "um"))
        if value is None or um is None:
            return None
        sides.append(value * um)
    return (sides[0], sides[1])


def _tag_mpp(page: Any) -> Mpp | None:
    """From XResolution and YResolution, where their unit is a length."""
    names = ("ResolutionUnit", "XResolution", "YResolution")
    unit, *sides = (page.tags.get(name) for name in names)
    um = _UM_PER_UNIT.get(int(unit.value)) if unit is not None else None
    if um is None or not all(
        side is not None and all(side.value[:2]) for side in sides
    ):
        return None
    x, y = (um * side.value[1] / side.value[0] for side in sides)
    return (x, y)
