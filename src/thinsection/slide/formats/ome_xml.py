"""OME-XML of a TIFF: its images, the pages that hold their planes, and their resolution.

It is searched by patterns, not parsed: what some programs write is no sound XML.
"""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from thinsection.slide.geometry import positive_number, um_per_unit
from thinsection.types import Mpp

_ROOT = re.compile(r"<(?:\w+:)?OME\b([^>]*)>")
_IMAGE = re.compile(r"<(?:\w+:)?Image\b")
_PIXELS = re.compile(r"<(?:\w+:)?Pixels\b([^>]*)>")
_CHANNEL = re.compile(r"<(?:\w+:)?Channel\b([^>]*)>")
_TIFF_DATA = re.compile(
    r"<(?:\w+:)?TiffData\b([^>]*?)(?:/>|>(.*?)</(?:\w+:)?TiffData>)", re.DOTALL
)
_UUID = re.compile(r"<(?:\w+:)?UUID\b([^>]*)>([^<]*)<")
_ATTRIBUTE = re.compile(r'([\w:]+)="([^"]*)"')
_MAX_PLANES = 1 << 20  # that an image lists; more are a damaged file's


@dataclass(frozen=True, kw_only=True)
class OmeImage:
    """One image of OME-XML.

    Attributes:
        number: its place in the XML, from 1.
        name: its name.
        pixels: attributes of its pixels, such as SizeX.
        channel_names: names of its channels, where they have any.
        planes: index of the page in the file's chain, by (z, channel plane, t).
        num_channel_planes: pages for the channels of one z and t; 1 of RGB in one page.
    """

    number: int
    name: str
    pixels: Mapping[str, str]
    channel_names: tuple[str, ...]
    planes: Mapping[tuple[int, int, int], int]
    num_channel_planes: int

    @property
    def mpp(self) -> Mpp | None:
        """PhysicalSizeX and Y in µm, where both have a unit of length, by default µm."""
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
        """Tells whether its planes are pages of the file."""
        indices = self.planes.values()
        return all(0 <= index < num_pages for index in indices)

    def first_channels(self) -> list[tuple[tuple[int, int], int]]:
        """Returns ((z, t), page) of the first channel of each plane; that of z 0, t 0 is first."""
        first = {}
        for (z, channel, t), index in sorted(self.planes.items()):
            if channel == 0:
                first[z, t] = index
        return sorted(first.items())


def parse_ome_images(xml: str, file_name: str) -> list[OmeImage]:
    """Returns the images whose pages lie in this file; none where the XML lists no pages."""
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
    """Returns one image; None where it has no pixels."""
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
    """Returns the page of each plane, by (z, channel plane, t), of those in this file."""
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
        num_planes = min(_count(data.get("PlaneCount"), default), count - first)
        for number in range(num_planes):
            rest = first + number
            where = {}
            for axis in order:
                rest, where[axis] = divmod(rest, lengths[axis])
            planes[where["Z"], where["C"], where["T"]] = ifd + number
    return planes


def _count(text: str | None, default: int) -> int:
    """Returns a whole number of an attribute; the default where there is none."""
    return int(text) if text and text.isdecimal() else default


def _attributes(text: str) -> dict[str, str]:
    return {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(text)}
