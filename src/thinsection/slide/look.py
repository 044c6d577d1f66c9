"""How px become RGB: which channels a file has, and which are shown. Nothing here is slow."""

import html
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.errors import ChannelsError, ConfigError, require

MOST = 3  # channels that a picture shows
_SEPARATE = 2  # planar configuration: samples apart
_RGB, _BARE = 2, (0, 1)  # photometric interpretations that say no colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How px become RGB; the default leaves them as they are."""

    channels: tuple[
        str, ...
    ] = ()  # names or numbers from 0, shown as red, green and blue
    percentiles: tuple[float, float] = (
        0.5,
        99.5,
    )  # of a channel's px that become 0 and 255
    icc: bool = False  # whether the file's colour profile is applied

    def __post_init__(self) -> None:
        count, (low, high), error = len(self.channels), self.percentiles, ConfigError
        require(
            count <= MOST, f"slides.channels must be 1 to {MOST}", count, error=error
        )
        rule, got = "slides.icc must be off with channels", "both; leave one out"
        require(not (count and self.icc), rule, got, error=error)
        rule, got = (
            "slides.channel_range must rise within [0, 100]",
            f"{low:g},{high:g}",
        )
        require(0 <= low < high <= 100, rule, got, error=error)


@dataclass(frozen=True, kw_only=True)
class Plane:
    """One channel on one level of a TIFF: its page, which sample of it, where segments begin."""

    page: Any  # tifffile's
    sample: int = 0
    first: int = (
        0  # of its segments, where the planes of a page lie one after the other
    )


@dataclass(frozen=True, kw_only=True)
class Channels:
    """What a file has of channels where it is no picture of 8 bits."""

    names: tuple[str, ...]
    dtype: np.dtype[Any]
    planes: tuple[tuple[Plane, ...], ...] = ()  # of a TIFF, by level and channel

    def __str__(self) -> str:
        bits = f"{'float ' * (self.dtype.kind == 'f')}{self.dtype.itemsize * 8} bits"
        many = f"{len(self.names)} channel{'s' * (len(self.names) > 1)}"
        return f"{many} of {bits} ({', '.join(self.names)})"

    def index(self, wanted: str) -> int:
        """A channel by name, letters' case aside, or by number; ConfigError for none."""
        names = [name.lower() for name in self.names]
        if wanted.lower() in names:
            return names.index(wanted.lower())
        if wanted.isdigit() and int(wanted) < len(names):
            return int(wanted)
        raise ConfigError(
            f"slides.channels must be of the file's, got {wanted!r}; it has {self}"
        )


def find_channels(file: Any) -> Channels | None:
    """Of a TIFF that is no picture of 8 bits, else None; ChannelsError: not planes of channels."""
    base = file.pages[0]
    colours, bits = base.samplesperpixel, base.bitspersample
    picture = int(base.photometric) not in _BARE or (
        colours == 1 and len(file.pages) == 1
    )
    if bits < 8 or (bits == 8 and picture):
        return None
    series = file.series[0]
    axes = dict(zip(series.axes, series.shape, strict=True))
    samples, depth = (
        axes.get("S", 1),
        math.prod(n for axis, n in axes.items() if axis not in "YXS"),
    )
    if bits == 8 and samples == depth == 1:
        return None  # one plane, and pictures of other sizes
    kinds = {axis for axis, n in axes.items() if n > 1} - set("YXS")
    if len(kinds) > 1 or kinds & set("ZT"):
        what = ", ".join(f"{axes[axis]} along {axis}" for axis in sorted(kinds))
        raise ChannelsError(
            f"planes must differ by channel only, got {what}; split the file"
        )
    planes = tuple(_planes(level, depth, samples) for level in series.levels)
    return Channels(
        names=_names(file, depth * samples), dtype=series.dtype, planes=planes
    )


def _planes(level: Any, depth: int, samples: int) -> tuple[Plane, ...]:
    pages = [page for page in level.pages if page is not None]
    if len(pages) != depth:
        rule = f"each level must have {depth} planes, got {len(pages)}"
        raise ChannelsError(f"{rule}; convert the file to OME-TIFF")
    found = []
    for page in pages:
        apart = page.keyframe.planarconfig == _SEPARATE and samples > 1
        per_plane = len(page.dataoffsets) // samples if apart else 0
        for s in range(samples):
            found.append(
                Plane(page=page, sample=0 if apart else s, first=s * per_plane)
            )
    return tuple(found)


def _names(file: Any, count: int) -> tuple[str, ...]:
    """As an OME-TIFF or a QPTIFF has them, else numbers."""
    if int(file.pages[0].photometric) == _RGB and count == MOST:
        return ("red", "green", "blue")
    if file.ome_metadata:
        first, name = (
            html.unescape(file.ome_metadata).split("</Pixels>")[0],
            r'\bName="([^"]*)"',
        )
        texts = re.findall(r"<(?:\w+:)?Channel\b[^>]*>", first)
    else:
        name = r"<(?:Name|Biomarker)>([^<]+)</"
        texts = [str(page.description or "") for page in file.pages[:count]]
    found = [re.search(name, text) for text in texts]
    return numbered([match.group(1) if match else "" for match in found], count)


def numbered(names: list[str], count: int) -> tuple[str, ...]:
    """So many names of channels; those without are numbered."""
    return tuple(
        n or f"channel {i}" for i, n in enumerate([*names, *[""] * count][:count])
    )


def refusal(channels: Channels, path: str) -> ChannelsError:
    """The error for a file whose channels nobody picked."""
    pick = ",".join(
        name if "," not in name else str(n) for n, name in enumerate(channels.names)
    )
    example = ",".join(pick.split(",")[:MOST])
    what = f"slide must be RGB or gray of 8 bits, got {channels} in {Path(path).name!r}"
    return ChannelsError(f"{what}; pick one to three: --channels {example!r}")
