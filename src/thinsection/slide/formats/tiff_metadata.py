"""Metadata of a TIFF slide, from Aperio's words, OME-XML and tags: resolution, objective, ..."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tifffile import TiffPage

from thinsection.slide.formats.ome_xml import OmeImage
from thinsection.slide.formats.tiff_pages import orientation_of
from thinsection.slide.geometry import positive_number, um_per_unit
from thinsection.types import Mpp

OME = "ome."  # before what the OME-XML says, in a slide's properties
_IMAGEJ_UNIT = re.compile(r"^unit=(.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class TiffMetadata:
    """Metadata of a slide, as `Slide` has them."""

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
        ome: what OME-XML says of the picture.
        slide_mpp: takes the place of what the file says.
    """
    aperio = aperio_words(base)
    properties = {f"aperio.{key}": value for key, value in aperio.items()}
    if ome is not None:
        properties |= {f"{OME}{name}": value for name, value in ome.pixels.items()}
        properties[f"{OME}Channels"] = ", ".join(filter(None, ome.channel_names))
    properties["tiff.ImageDescription"] = str(base.description or "")
    vendor = "generic-tiff" if base.is_tiled else None
    own_mpp, mpp_source = _find_mpp(base, aperio, ome)
    return TiffMetadata(
        slide_mpp=slide_mpp or own_mpp,
        mpp_source=mpp_source,
        objective_power=positive_number(aperio.get("AppMag")),
        vendor="aperio" if aperio else vendor,
        properties=properties,
        orientation=orientation_of(base),
    )


def _find_mpp(
    base: TiffPage, aperio: Mapping[str, str], ome: OmeImage | None
) -> tuple[Mpp | None, str]:
    """Returns Aperio's resolution, else the OME-XML's, else that of the tags, and its source."""
    own_mpp = aperio_mpp(aperio)
    if own_mpp is not None:
        return own_mpp, "Aperio's MPP"
    ome_mpp = ome.mpp if ome is not None else None
    if ome_mpp is not None or aperio:
        return ome_mpp, "OME-XML"
    return tag_mpp(base), "resolution tags"


def aperio_words(page: TiffPage) -> dict[str, str]:
    """Returns the pairs `key = value` of Aperio's description, {} of any other one."""
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
    """Returns the resolution in Aperio's words; None where they have none."""
    mpp = positive_number(words.get("MPP"))
    return None if mpp is None else (mpp, mpp)


def tag_mpp(page: TiffPage) -> Mpp | None:
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
