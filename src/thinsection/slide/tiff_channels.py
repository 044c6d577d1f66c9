"""What a TIFF has of channels where it is no picture of 8 bits: OME-TIFF, QPTIFF, plain ones."""

import html
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from thinsection.errors import ChannelsError, ConfigError
from thinsection.slide.look import MOST

_SEPARATE = 2  # planar configuration: samples apart
_RGB, _BARE = 2, (0, 1)  # photometric interpretations that say no colour


@dataclass(frozen=True, kw_only=True)
class Plane:
    """One channel on one level: its page, which sample of it, and where its segments begin."""

    page: Any  # tifffile's
    sample: int = 0
    first: int = 0  # of its segments, where the planes of a page lie one after the other


@dataclass(frozen=True, kw_only=True)
class Channels:
    """What a TIFF has of channels; `planes[level][channel]`."""

    names: tuple[str, ...]
    dtype: np.dtype[Any]
    planes: tuple[tuple[Plane, ...], ...]

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
        raise ConfigError(f"slides.channels must be of the file's, got {wanted!r}; it has {self}")


def find_channels(file: tifffile.TiffFile) -> Channels | None:
    """The channels of a file that is no picture of 8 bits; None of one that is.

    Raises ChannelsError: planes that differ in more than their channel.
    """
    base = file.pages[0]
    colours, bits = base.samplesperpixel, base.bitspersample
    picture = int(base.photometric) not in _BARE or (colours == 1 and len(file.pages) == 1)
    if bits < 8 or (bits == 8 and picture):
        return None
    series = file.series[0]
    axes = dict(zip(series.axes, series.shape, strict=True))
    samples, depth = axes.get("S", 1), math.prod(n for axis, n in axes.items() if axis not in "YXS")
    if bits == 8 and samples == depth == 1:
        return None  # one plane, and pictures of other sizes
    kinds = {axis for axis, n in axes.items() if n > 1} - set("YXS")
    if len(kinds) > 1 or kinds & set("ZT"):
        what = ", ".join(f"{axes[axis]} along {axis}" for axis in sorted(kinds))
        raise ChannelsError(f"planes must differ by channel only, got {what}; split the file")
    return Channels(
        names=_names(file, depth * samples),
        dtype=series.dtype,
        planes=tuple(_planes(level, depth, samples) for level in series.levels),
    )


def _planes(level: Any, depth: int, samples: int) -> tuple[Plane, ...]:
    pages = [page for page in level.pages if page is not None]
    if len(pages) != depth:
        rule = f"each level must have {depth} planes, got {len(pages)}"
        raise ChannelsError(f"{rule}; convert the file to OME-TIFF")
    found = []
    for page in pages:
        key = page.keyframe
        apart = key.planarconfig == _SEPARATE and samples > 1
        per_plane = len(page.dataoffsets) // samples if apart else 0
        for s in range(samples):
            found.append(Plane(page=page, sample=0 if apart else s, first=s * per_plane))
    return tuple(found)


def _names(file: tifffile.TiffFile, count: int) -> tuple[str, ...]:
    """As an OME-TIFF or a QPTIFF has them, else numbers."""
    if int(file.pages[0].photometric) == _RGB and count == MOST:
        names = ["red", "green", "blue"]
    elif file.ome_metadata:
        first = html.unescape(file.ome_metadata).split("</Pixels>")[0]
        tags = re.findall(r"<(?:\w+:)?Channel\b[^>]*>", first)
        found = [re.search(r'\bName="([^"]*)"', tag) for tag in tags]
        names = [match.group(1) if match else "" for match in found]
    else:
        texts = (str(page.description or "") for page in file.pages[:count])
        named = [re.search(r"<(?:Name|Biomarker)>([^<]+)</", text) for text in texts]
        names = [match.group(1) if match else "" for match in named]
    names += [""] * (count - len(names))
    return tuple(name or f"channel {n}" for n, name in enumerate(names[:count]))


def refusal(channels: Channels, path: str) -> ChannelsError:
    """The error for a file whose channels nobody picked."""
    pick = ",".join(name if "," not in name else str(n) for n, name in enumerate(channels.names))
    example = ",".join(pick.split(",")[:MOST])
    what = f"slide must be RGB or gray of 8 bits, got {channels} in {Path(path).name!r}"
    return ChannelsError(f"{what}; pick one to three: --channels {example!r}")
