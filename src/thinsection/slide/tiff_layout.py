"""What a TIFF file holds: levels, associated images, resolution; parsed by tifffile."""

import re
import struct
from dataclasses import dataclass, field
from typing import Any

import tifffile

from thinsection.errors import SlideOpenError
from thinsection.slide.geometry import positive_number
from thinsection.types import Level, Mpp, Size

_ASPECT_TOLERANCE = 0.02
_UM_PER_UNIT = {2: 25_400.0, 3: 10_000.0}  # TIFF's ResolutionUnit: inch, cm
# what OpenSlide treats in a way of its own (overlaps, sparse layouts, restart markers)
_LEFT_TO_OPENSLIDE = {
    "is_ndpi": "Hamamatsu NDPI",
    "is_bif": "Ventana BIF",
    "is_scn": "Leica SCN",
    "is_philips": "Philips TIFF",
}
_COMPRESSIONS = {1, 5, 7, 8, 32946, 33005, 34712}  # none, LZW, JPEG, deflate, JPEG 2000 as RGB


# what tifffile raises for files that are damaged or no TIFF
_BROKEN = (
    *(tifffile.TiffFileError, struct.error, ValueError, IndexError, KeyError, TypeError, OSError),
)


@dataclass(frozen=True, kw_only=True)
class TiffLevel:
    """One level and the page that holds it.

    Attributes:
        level: as the slide shows it.
        page: tifffile's; only what needs no open file is used of it.
        segment: (width, height) of a TIFF tile or strip.
        offsets, counts: of the segments' bytes in the file, row by row.
    """

    level: Level
    page: Any
    segment: Size
    offsets: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, int]:
        """Columns and rows of segments."""
        width, height = self.level.size
        return (-(-width // self.segment[0]), -(-height // self.segment[1]))


@dataclass(frozen=True, kw_only=True)
class TiffLayout:
    """The parsed structure of a TIFF slide.

    Attributes:
        levels: finest first.
        associated: name -> the only level of that image.
        slide_mpp, objective_power, vendor, properties: of the slide.
    """

    levels: tuple[TiffLevel, ...]
    associated: dict[str, TiffLevel]
    slide_mpp: Mpp | None
    objective_power: float | None
    vendor: str | None
    properties: dict[str, str] = field(default_factory=dict)


def read_layout(handle: Any, name: str) -> TiffLayout:
    """The layout of an opened binary file.

    Raises:
        SlideOpenError: not a TIFF, truncated, or of a kind that is left to OpenSlide.
    """
    try:
        file = tifffile.TiffFile(handle, name=name)
        pages = list(file.pages)
        whole = bool(pages) and _next_page_offset(file, pages[-1]) == 0
    except _BROKEN as error:
        raise SlideOpenError(f"tiff: not a readable TIFF: {error}") from None
    if not pages:
        raise SlideOpenError("tiff: a TIFF header without pages; the file is truncated")
    if not whole:  # tifffile only logs it and gives the pages so far: levels would be missing
        raise SlideOpenError("tiff: the chain of pages leads beyond the end; the file is truncated")
    for flag, what in _LEFT_TO_OPENSLIDE.items():
        if getattr(file, flag):
            raise SlideOpenError(f"tiff: {what} is left to OpenSlide")
    base = pages[0]
    _check_page(base)
    found, associated = _sort_pages(pages, base)
    levels = tuple(_level(page, index, base) for index, page in enumerate(found))
    description = str(base.description or "")
    aperio = _aperio(description)
    mpp = positive_number(aperio.get("MPP"))
    return TiffLayout(
        levels=levels,
        associated={name: _level(page, 0, page) for name, page in associated.items()},
        slide_mpp=(mpp, mpp) if mpp else _ome_mpp(file) or (None if aperio else _tag_mpp(base)),
        objective_power=positive_number(aperio.get("AppMag")),
        vendor="aperio" if aperio else "generic-tiff" if base.is_tiled else None,
        properties={f"aperio.{k}": v for k, v in aperio.items()}
        | {"tiff.ImageDescription": description},
    )


def _next_page_offset(file: tifffile.TiffFile, page: Any) -> int:
    """Where the page after this one begins in the file; 0 after the last."""
    form, handle = file.tiff, file.filehandle
    handle.seek(page.offset)
    (count,) = struct.unpack(form.tagnoformat, handle.read(form.tagnosize))
    handle.seek(page.offset + form.tagnosize + count * form.tagsize)
    (offset,) = struct.unpack(form.offsetformat, handle.read(form.offsetsize))
    return int(offset)


def _level(page: Any, index: int, base: Any) -> TiffLevel:
    """Raises SlideOpenError where the page is of a kind that is not decoded here."""
    _check_page(page)
    size = (int(page.imagewidth), int(page.imagelength))
    segment = _segment(page)
    down = (base.imagewidth / size[0] + base.imagelength / size[1]) / 2
    expected = -(-size[0] // segment[0]) * -(-size[1] // segment[1])
    if not len(page.dataoffsets) == len(page.databytecounts) == expected:
        found = min(len(page.dataoffsets), len(page.databytecounts))
        raise SlideOpenError(
            f"tiff: page {page.index} lists {found} of {expected} segments; the file is truncated"
        )
    return TiffLevel(
        level=Level(index=index, size=size, downsample=float(down), segment=segment),
        page=page,
        segment=segment,
        offsets=tuple(page.dataoffsets),
        counts=tuple(page.databytecounts),
    )


def _sort_pages(pages: list[Any], base: Any) -> tuple[list[Any], dict[str, Any]]:
    """Pages that are levels, finest first, and the others by name."""
    candidates = [base, *(base.pages or [] if base.pages is not None else []), *pages[1:]]
    levels: list[Any] = []
    associated: dict[str, Any] = {}
    for page in candidates:
        if page is base or (page.is_tiled and base.is_tiled and _is_reduced(page, base)):
            levels.append(page)
        elif _is_decodable(page):
            associated.setdefault(_associated_name(page, len(associated)), page)
    levels.sort(key=lambda page: -int(page.imagewidth))
    return levels, associated


def _is_reduced(page: Any, base: Any) -> bool:
    ratio_x = base.imagewidth / page.imagewidth
    ratio_y = base.imagelength / page.imagelength
    same_kind = page.samplesperpixel == base.samplesperpixel and page.dtype == base.dtype
    return bool(
        same_kind
        and ratio_x > 1
        and abs(ratio_x / ratio_y - 1) < _ASPECT_TOLERANCE + 2 / page.imagelength
    )


def _associated_name(page: Any, index: int) -> str:
    first_lines = str(page.description or "").splitlines()[:2]
    for line in first_lines:
        word = line.split(" ", 1)[0].lower()
        if word in ("label", "macro", "thumbnail"):
            return word
    return "thumbnail" if index == 0 else f"image{index}"


def _is_decodable(page: Any) -> bool:
    return _unsupported(page) is None


def _check_page(page: Any) -> None:
    what = _unsupported(page)
    if what is not None:
        raise SlideOpenError(f"tiff: {what} is not supported")


def _unsupported(page: Any) -> str | None:
    """What of a page is not decoded here; None where nothing is."""
    if page.bitspersample != 8 or page.samplesperpixel not in (1, 3, 4):
        return f"{page.samplesperpixel} samples of {page.bitspersample} bits"
    if int(page.compression) not in _COMPRESSIONS:
        return f"compression {int(page.compression)}"
    if page.planarconfig == 2 and page.samplesperpixel > 1:
        return "separate colour planes"
    if int(page.photometric) not in (1, 2, 6):
        return f"photometric interpretation {int(page.photometric)}"
    return None


def _segment(page: Any) -> Size:
    if page.is_tiled:
        return (int(page.tilewidth), int(page.tilelength))
    rows = min(int(page.rowsperstrip or page.imagelength), int(page.imagelength))
    return (int(page.imagewidth), rows)


def _aperio(description: str) -> dict[str, str]:
    """`key = value` pairs of an Aperio description; empty for other files."""
    if not description.startswith("Aperio"):
        return {}
    pairs = (part.split("=", 1) for part in description.split("|")[1:])
    return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}


def _ome_mpp(file: tifffile.TiffFile) -> Mpp | None:
    """PhysicalSizeX and Y of the first image of an OME-TIFF, where they are in µm."""
    text = file.ome_metadata
    if not text:
        return None
    found = []
    for axis in "XY":
        size = re.search(rf'PhysicalSize{axis}="([0-9.eE+-]+)"', text)
        unit = re.search(rf'PhysicalSize{axis}Unit="([^"]+)"', text)
        value = positive_number(size.group(1)) if size else None
        if value is None or (unit is not None and unit.group(1) not in ("µm", "um", "\u03bcm")):
            return None
        found.append(value)
    return (found[0], found[1])


def _tag_mpp(page: Any) -> Mpp | None:
    """From XResolution and YResolution, where their unit is a length."""
    unit = page.tags.get("ResolutionUnit")
    um = _UM_PER_UNIT.get(int(unit.value)) if unit is not None else None
    values = []
    for name in ("XResolution", "YResolution"):
        tag = page.tags.get(name)
        if tag is None or um is None or not tag.value[0] or not tag.value[1]:
            return None
        values.append(um * tag.value[1] / tag.value[0])
    return (values[0], values[1])
