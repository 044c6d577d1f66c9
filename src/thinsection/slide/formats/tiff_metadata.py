"""Metadata of a TIFF slide, from Aperio's words, OME-XML and tags: resolution, objective, ..."""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tifffile import TiffFile, TiffPage

from thinsection.slide.formats.tiff_pages import orientation_of
from thinsection.slide.geometry import positive_number
from thinsection.slide.units import um_per_unit
from thinsection.types import Mpp

OME = "ome."  # before what the OME-XML says, in a slide's properties
_IMAGEJ_UNIT = re.compile(r"^unit=(.+)$", re.MULTILINE)
_OME_PIXELS = re.compile(r"<(?:\w+:)?Pixels\b([^>]*)>")
_OME_CHANNEL = re.compile(r"<(?:\w+:)?Channel\b([^>]*)>")
_OME_NAME = re.compile(r'Name="([^"]*)"')
_OME_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class TiffMetadata:
    """Metadata of a slide, as `Slide` has them."""

    slide_mpp: Mpp | None
    objective_power: float | None
    vendor: str | None
    properties: Mapping[str, str]
    orientation: int


def read_metadata(
    file: TiffFile, base: TiffPage, slide_mpp: Mpp | None
) -> TiffMetadata:
    """Returns the metadata of a file whose level 0 is the page `base`.

    `slide_mpp`, if any, takes the place of what the file says.
    """
    description = str(base.description or "")
    aperio = _parse_aperio(description)
    ome = _parse_ome(file.ome_metadata or "")
    properties = {f"aperio.{key}": value for key, value in aperio.items()}
    properties |= ome
    properties["tiff.ImageDescription"] = description
    vendor = "generic-tiff" if base.is_tiled else None
    return TiffMetadata(
        slide_mpp=slide_mpp or _find_mpp(base, aperio, ome),
        objective_power=positive_number(aperio.get("AppMag")),
        vendor="aperio" if aperio else vendor,
        properties=properties,
        orientation=orientation_of(base),
    )


def _find_mpp(
    base: TiffPage, aperio: Mapping[str, str], ome: Mapping[str, str]
) -> Mpp | None:
    """Returns Aperio's resolution, else the OME-XML's, else that of the tags."""
    aperio_mpp = positive_number(aperio.get("MPP"))
    if aperio_mpp is not None:
        return (aperio_mpp, aperio_mpp)
    ome_mpp = _ome_mpp(ome)
    if ome_mpp is not None or aperio:
        return ome_mpp
    return _tag_mpp(base)


def _parse_aperio(description: str) -> dict[str, str]:
    """Returns the pairs `key = value` of Aperio's description, {} of any other one."""
    if not description.startswith("Aperio"):
        return {}
    pairs: dict[str, str] = {}
    for part in description.split("|")[1:]:
        key, equals, value = part.partition("=")
        if equals:
            pairs[key.strip()] = value.strip()
    return pairs


def _parse_ome(xml: str) -> dict[str, str]:
    """Returns what OME-XML says of the first image's px and channels; {} without OME-XML."""
    text = html.unescape(xml)
    pixels = _OME_PIXELS.search(text)
    if pixels is None:
        return {}
    properties = {
        f"{OME}{name}": value for name, value in _OME_ATTRIBUTE.findall(pixels[1])
    }
    first_image = text[pixels.end() :].partition("Pixels>")[0]
    names = []
    for channel in _OME_CHANNEL.findall(first_image):
        name = _OME_NAME.search(channel)
        if name is not None:
            names.append(name[1])
    properties[f"{OME}Channels"] = ", ".join(names)
    return properties


def _ome_mpp(ome: Mapping[str, str]) -> Mpp | None:
    """Returns PhysicalSizeX and Y in µm, where both have a unit of length, by default µm."""
    sides = []
    for axis in "XY":
        value = positive_number(ome.get(f"{OME}PhysicalSize{axis}"))
        unit = ome.get(f"{OME}PhysicalSize{axis}Unit", "um")
        um = um_per_unit(unit)
        if value is None or um is None:
            return None
        sides.append(value * um)
    return (sides[0], sides[1])


def _tag_mpp(page: TiffPage) -> Mpp | None:
    """Returns µm/px from XResolution and YResolution, where their unit is a length.

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
