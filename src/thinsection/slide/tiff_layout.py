"""What a TIFF file holds: levels, associated images, resolution; parsed by tifffile."""

import re
from dataclasses import dataclass, field
from typing import Any

import tifffile

from thinsection.errors import SlideOpenError
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


@dataclass(frozen=True, kw_only=True)
class TiffLevel:
    """One level and the page that holds it."""

    level: Level
    page: Any
    segment: Size  # (width, height) of a TIFF tile or strip

    @property
    def grid(self) -> tuple[int, int]:
        """Columns and rows of segments."""
        width, height = self.level.size
        return (-(-width // self.segment[0]), -(-height // self.segment[1]))


@dataclass(frozen=True, kw_only=True)
class TiffLayout:
    """The parsed structure of a TIFF slide.

    Attributes:
        file: the tifffile object.
        handle: the binary file that it reads through.
        levels: finest first.
        associated: name -> page.
        slide_mpp, objective_power, vendor, properties: of the slide.
    """

    file: tifffile.TiffFile
    handle: Any
    levels: tuple[TiffLevel, ...]
    associated: dict[str, Any]
    slide_mpp: Mpp | None
    objective_power: float | None
    vendor: str | None
    properties: dict[str, str] = field(default_factory=dict)

    def close(self) -> None:
        """Closes the file; tifffile leaves a handle that it was given."""
        self.file.close()
        self.handle.close()


def read_layout(handle: Any, name: str) -> TiffLayout:
    """The layout of an opened binary file.

    Raises:
        SlideOpenError: not a TIFF, truncated, or of a kind that is left to OpenSlide.
    """
    try:
        file = tifffile.TiffFile(handle, name=name)
        pages = list(file.pages)
    except (tifffile.TiffFileError, ValueError, IndexError, KeyError, TypeError, OSError) as error:
        raise SlideOpenError(f"tiff: not a readable TIFF: {error}") from None
    if not pages:
        raise SlideOpenError("tiff: a TIFF header without pages; the file is truncated")
    for flag, what in _LEFT_TO_OPENSLIDE.items():
        if getattr(file, flag):
            raise SlideOpenError(f"tiff: {what} is left to OpenSlide")
    base = pages[0]
    _check_page(base)
    found, associated = _sort_pages(pages, base)
    levels = []
    for index, page in enumerate(found):
        size = (int(page.imagewidth), int(page.imagelength))
        _check_page(page)
        segment = _segment(page)
        down = (base.imagewidth / size[0] + base.imagelength / size[1]) / 2
        level = Level(index=index, size=size, downsample=float(down), segment=segment)
        levels.append(TiffLevel(level=level, page=page, segment=segment))
    description = str(base.description or "")
    aperio = _aperio(description)
    mpp = _number(aperio.get("MPP"))
    return TiffLayout(
        file=file,
        handle=handle,
        levels=tuple(levels),
        associated=associated,
        slide_mpp=(mpp, mpp) if mpp else _ome_mpp(file) or (None if aperio else _tag_mpp(base)),
        objective_power=_number(aperio.get("AppMag")),
        vendor="aperio" if aperio else "generic-tiff" if base.is_tiled else None,
        properties={f"aperio.{k}": v for k, v in aperio.items()}
        | {"tiff.ImageDescription": description},
    )


def _sort_pages(pages: list[Any], base: Any) -> tuple[list[Any], dict[str, Any]]:
    """Pages that are levels, finest first, and the others by name."""
    candidates = [base, *(base.pages or [] if base.pages is not None else []), *pages[1:]]
    levels: list[Any] = []
    associated: dict[str, Any] = {}
    for page in candidates:
        if page is base or (page.is_tiled and base.is_tiled and _is_reduced(page, base)):
            levels.append(page)
        elif _looks_rgb(page):
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


def _looks_rgb(page: Any) -> bool:
    return bool(page.samplesperpixel in (3, 4) and page.bitspersample == 8)


def _check_page(page: Any) -> None:
    what = None
    if page.bitspersample != 8 or page.samplesperpixel not in (1, 3, 4):
        what = f"{page.samplesperpixel} samples of {page.bitspersample} bits"
    elif int(page.compression) not in _COMPRESSIONS:
        what = f"compression {int(page.compression)}"
    elif page.planarconfig == 2 and page.samplesperpixel > 1:
        what = "separate colour planes"
    elif int(page.photometric) not in (1, 2, 6):
        what = f"photometric interpretation {int(page.photometric)}"
    if what is not None:
        raise SlideOpenError(f"tiff: {what} is not supported")


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
        value = _number(size.group(1)) if size else None
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


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else 0.0
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
