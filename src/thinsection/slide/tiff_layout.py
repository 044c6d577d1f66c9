"""What a TIFF file holds: levels, associated images, resolution; parsed by tifffile."""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tifffile

from thinsection.errors import SlideOpenError
from thinsection.slide.geometry import positive_number
from thinsection.slide.tiff_codecs import BYTES, KNOWN
from thinsection.types import Level, Mpp

_ASPECT_TOLERANCE = 0.02
_RESOLUTION_TAGS = ("ResolutionUnit", "XResolution", "YResolution")
_UM_PER_UNIT = {2: 25_400.0, 3: 10_000.0}  # TIFF's ResolutionUnit: inch, cm
# what OpenSlide treats in a way of its own (overlaps, sparse layouts, restart markers)
_LEFT_TO_OPENSLIDE = {"ndpi": "Hamamatsu NDPI", "bif": "Ventana BIF", "scn": "Leica SCN"}
_LEFT_TO_OPENSLIDE |= {"philips": "Philips TIFF"}
_YCBCR = 6  # photometric interpretation
# what tifffile raises for files that are damaged or no TIFF
_BROKEN = (tifffile.TiffFileError, struct.error, LookupError, ValueError, TypeError, OSError)


@dataclass(frozen=True, kw_only=True)
class TiffLayout:
    """The parsed structure of a TIFF slide; of tifffile's pages use what needs no open file."""

    levels: list[Level]  # finest first
    pages: list[Any]  # of the levels
    associated: dict[str, tuple[Level, Any]]  # name -> the only level of that image, and its page
    facts: dict[str, Any]  # further arguments of `Slide`


def read_layout(path: str, slide_mpp: Mpp | None, handle: Any = None) -> TiffLayout:
    """The layout of a local file, or of an opened binary file object (which stays open).

    Raises:
        SlideOpenError: not a TIFF, truncated, or of a kind that is left to OpenSlide.
    """
    if (name := Path(path.split("?", 1)[0])).suffix.lower() == ".vsi":
        folder = f"'_{name.stem}_', which {'is' if _beside(name) else 'is not'} beside it"
        what = "this Olympus VSI is a shell that holds a preview only"
        remedy = "no reader here reads those: convert it to OME-TIFF (QuPath or bfconvert)"
        raise SlideOpenError(f"tiff: {what}; its px lie as .ets files in {folder}; {remedy}")
    try:
        with tifffile.TiffFile(path if handle is None else handle, name=Path(path).name) as file:
            return _layout(file, slide_mpp)
    except SlideOpenError:  # is an OSError; its text already says all
        raise
    except _BROKEN as error:
        raise SlideOpenError(f"tiff: not a readable TIFF: {error}") from None


def _beside(shell: Path) -> bool:
    return shell.with_name(f"_{shell.stem}_").is_dir()


def _layout(file: tifffile.TiffFile, slide_mpp: Mpp | None) -> TiffLayout:
    if not (pages := list(file.pages)):
        raise SlideOpenError("tiff: a TIFF header without pages; the file is truncated")
    if _next_page_offset(file, pages[-1]) != 0:  # tifffile only logs it: levels would be missing
        raise SlideOpenError("tiff: the chain of pages leads beyond the end; the file is truncated")
    for flag, what in _LEFT_TO_OPENSLIDE.items():
        if getattr(file, f"is_{flag}"):
            raise SlideOpenError(f"tiff: {what} is left to OpenSlide")
    base, description = pages[0], str(pages[0].description or "")
    found, associated = _sort_pages(pages)
    aperio = _aperio(description)
    mpp = positive_number(aperio.get("MPP"))
    own_mpp = (mpp, mpp) if mpp else _ome_mpp(file) or (None if aperio else _tag_mpp(base))
    properties = {f"aperio.{k}": v for k, v in aperio.items()}
    return TiffLayout(
        levels=[_level(page, index, base) for index, page in enumerate(found)],
        pages=found,
        associated={name: (_level(page, 0, page), page) for name, page in associated.items()},
        facts={
            "slide_mpp": slide_mpp or own_mpp,
            "objective_power": positive_number(aperio.get("AppMag")),
            "vendor": "aperio" if aperio else "generic-tiff" if base.is_tiled else None,
            "properties": properties | {"tiff.ImageDescription": description},
        },
    )


def _next_page_offset(file: tifffile.TiffFile, page: Any) -> int:
    """Where the page after this one begins in the file; 0 after the last."""
    form, handle = file.tiff, file.filehandle
    handle.seek(page.offset)
    (count,) = struct.unpack(form.tagnoformat, handle.read(form.tagnosize))
    handle.seek(page.offset + form.tagnosize + count * form.tagsize)
    (offset,) = struct.unpack(form.offsetformat, handle.read(form.offsetsize))
    return int(offset)


def _level(page: Any, index: int, base: Any) -> Level:
    """The level that a page holds; SlideOpenError where it is of a kind that is left out here."""
    if what := _unsupported(page):
        raise SlideOpenError(f"tiff: {what} is not supported")
    size = width, height = (int(page.imagewidth), int(page.imagelength))
    segment = (width, min(int(page.rowsperstrip or height), height))
    if page.is_tiled:
        segment = (int(page.tilewidth), int(page.tilelength))
    count, found = -(-width // segment[0]) * -(-height // segment[1]), len(page.dataoffsets)
    if not found == len(page.databytecounts) == count:
        what = f"page {page.index} lists {found} of {count} segments"
        raise SlideOpenError(f"tiff: {what}; the file is truncated")
    down = (base.imagewidth / width + base.imagelength / height) / 2
    return Level(index=index, size=size, downsample=float(down), segment=segment)


def _sort_pages(pages: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Pages that are levels, finest first, and the others by name."""
    base, *others = pages
    levels, associated = [base], dict[str, Any]()
    for page in [*(base.pages or ()), *others]:
        if page.is_tiled and base.is_tiled and _is_reduced(page, base):
            levels.append(page)
        elif not _unsupported(page):
            associated.setdefault(_associated_name(page, len(associated)), page)
    return sorted(levels, key=lambda page: -int(page.imagewidth)), associated


def _is_reduced(page: Any, base: Any) -> bool:
    ratio_x, ratio_y = base.imagewidth / page.imagewidth, base.imagelength / page.imagelength
    same_kind = page.samplesperpixel == base.samplesperpixel and page.dtype == base.dtype
    tolerance = _ASPECT_TOLERANCE + 2 / page.imagelength
    return bool(same_kind and ratio_x > 1 and abs(ratio_x / ratio_y - 1) < tolerance)


def _associated_name(page: Any, index: int) -> str:
    lines = str(page.description or "").splitlines()[:2]
    words = [line.split(" ", 1)[0].lower() for line in lines]
    known = [word for word in words if word in ("label", "macro", "thumbnail")]
    return known[0] if known else f"image{index}" if index else "thumbnail"


def _unsupported(page: Any) -> str | None:
    """What of a page is not decoded here; None where nothing is."""
    if page.bitspersample != 8 or page.samplesperpixel not in (1, 3, 4):
        return f"{page.samplesperpixel} samples of {page.bitspersample} bits"
    if int(page.compression) not in KNOWN:
        return f"compression {int(page.compression)}"
    if page.planarconfig == 2 and page.samplesperpixel > 1:
        return "separate colour planes"
    if int(page.photometric) == _YCBCR and int(page.compression) in BYTES:
        return "YCbCr that is not compressed as a picture"
    if int(page.photometric) not in (1, 2, _YCBCR):
        return f"photometric interpretation {int(page.photometric)}"
    return None


def _aperio(description: str) -> dict[str, str]:
    """`key = value` pairs of an Aperio description; empty for other files."""
    if not description.startswith("Aperio"):
        return {}
    pairs = (part.split("=", 1) for part in description.split("|")[1:])
    return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}


def _ome_mpp(file: tifffile.TiffFile) -> Mpp | None:
    """PhysicalSizeX and Y of the first image of an OME-TIFF, where they are in µm."""
    text, found = file.ome_metadata or "", []
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
    unit, *sides = (page.tags.get(name) for name in _RESOLUTION_TAGS)
    um = _UM_PER_UNIT.get(int(unit.value)) if unit is not None else None
    if um is None or not all(side is not None and all(side.value[:2]) for side in sides):
        return None
    x, y = (um * side.value[1] / side.value[0] for side in sides)
    return (x, y)
