"""Files with more than three channels, or with more than 8 bits: one to three channels as RGB.

The pixels of a channel are scaled so that two percentiles of the channel become 0 and 255. The
percentiles are measured once for the whole slide, on segments that are spread over the coarsest
level with four million pixels, so that all tiles are scaled alike. `Slide.rendering` records the
values that became 0 and 255.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tifffile import TiffFile, TiffFrame, TiffPage, TiffPageSeries

from thinsection.errors import ChannelsError
from thinsection.slide.formats.segments import Decoder
from thinsection.slide.formats.tiff_pages import RGB, SEPARATE, OmeImage
from thinsection.slide.look import MAX_SHOWN, Channels, Look, channel_names
from thinsection.types import RgbArray

_SAMPLED_PX = 1 << 22  # pixels of each channel from which percentiles are computed
Values = npt.NDArray[np.float32]
_COLOURLESS = (0, 1)  # photometric interpretations: white is zero, black is zero
_QPTIFF_NAME = re.compile(r"<(?:Name|Biomarker)>([^<]+)</")


class ScaledDecoder(Decoder):
    """Segments of one to three channels of a level, scaled. Memory: one segment of one channel.

    Attributes:
        limits: for each channel the values that become 0 and 255.
    """

    limits: Sequence[tuple[float, float]] = ()

    def _decode_one(self, index: int, out: RgbArray) -> None:
        out[:] = 0
        for channel, (low, high) in enumerate(self.limits):
            values = self._stored(channel, index)[: out.shape[0], : out.shape[1]]
            factor = 255.0 / max(high - low, 1e-9)
            shown = np.rint(np.clip((values - low) * factor, 0, 255))
            out[: len(values), : values.shape[1], channel] = shown
        if len(self.limits) == 1:
            out[..., 1:] = out[..., :1]

    def percentiles(
        self, channel: int, percentiles: tuple[float, float]
    ) -> tuple[float, float]:
        """Returns two percentiles of a picked channel, from segments spread over the level."""
        width, height = self.size
        step = math.ceil(width * height / _SAMPLED_PX)
        values = []
        for index in range(0, self.columns * self.rows, step):
            row, column = divmod(index, self.columns)
            rows_inside = height - row * self.segment[1]
            columns_inside = width - column * self.segment[0]
            segment = self._stored(channel, index)[:rows_inside, :columns_inside]
            values.append(segment.ravel())
        low, high = np.percentile(np.concatenate(values), percentiles)
        return float(low), float(high)

    def _stored(self, channel: int, index: int) -> Values:
        """Returns a segment of one of the picked channels, (height, width)."""
        raise NotImplementedError


def scale_channels(
    decoders: Sequence[ScaledDecoder], names: Sequence[str], look: Look
) -> str:
    """Gives all levels the same limits, and returns them for `Slide.rendering`. Memory: 32 MiB."""
    large = [
        number
        for number, decoder in enumerate(decoders)
        if math.prod(decoder.size) >= _SAMPLED_PX
    ]
    sampled = decoders[max(large, default=0)]
    limits = [
        sampled.percentiles(channel, look.percentiles) for channel in range(len(names))
    ]
    for decoder in decoders:
        decoder.limits = limits
    scales = [f"{name} {low:g} to {high:g}" for name, (low, high) in zip(names, limits)]
    low_percentile, high_percentile = look.percentiles
    return (
        f"channels {', '.join(scales)} "
        f"(percentiles {low_percentile:g} and {high_percentile:g}) as RGB"
    )


@dataclass(frozen=True, kw_only=True)
class Plane:
    """One channel on one level of a TIFF.

    Attributes:
        page: the page that holds it.
        sample: which sample of a pixel it is.
        first: its first segment, where the planes of a page lie one after the other.
    """

    page: TiffPage | TiffFrame
    sample: int = 0
    first: int = 0


LevelPlanes = tuple[Plane, ...]  # in the order of the channels


def find_channels(
    file: TiffFile, base: TiffPage, ome: OmeImage | None
) -> tuple[Channels, list[LevelPlanes]] | None:
    """Returns the channels of a slide that is not RGB or gray of 8 bits, and their planes by level.

    None of a slide that is a picture of 8 bits.

    Args:
        file: the file.
        base: page of the slide's level 0, the first of its channels.
        ome: what OME-XML says of the slide.

    Raises:
        ChannelsError: its planes differ by more than the channel.
    """
    is_colourless = int(base.photometric) in _COLOURLESS
    is_single = base.samplesperpixel == 1 and len(file.pages) == 1
    # planes along z and t are separate pictures, not channels
    is_plane = ome is not None and ome.num_channel_planes == base.samplesperpixel == 1
    is_picture = is_single or is_plane or not is_colourless
    if base.bitspersample < 8 or (base.bitspersample == 8 and is_picture):
        return None
    series = file.series[0]
    for each in file.series:
        first = next((page for page in each.pages if page is not None), None)
        if first is not None and first.offset == base.offset:
            series = each
            break
    lengths = dict(zip(series.axes, series.shape, strict=True))
    samples = lengths.get("S", 1)
    depth = math.prod(n for axis, n in lengths.items() if axis not in "YXS")
    if base.bitspersample == 8 and samples == 1 and depth == 1:
        return None  # one plane, and pictures of other sizes
    plane_axes = {axis for axis, n in lengths.items() if n > 1} - set("YXS")
    if len(plane_axes) > 1 or plane_axes & set("ZT"):
        axes = ", ".join(f"{lengths[axis]} along {axis}" for axis in sorted(plane_axes))
        raise ChannelsError(
            f"planes must differ by channel only, got {axes}; split the file"
        )
    planes = [_level_planes(level, depth, samples) for level in series.levels]
    names: Sequence[str]
    count = depth * samples
    if int(base.photometric) == RGB and count == MAX_SHOWN:
        names = ("red", "green", "blue")
    elif ome is not None:
        names = ome.channel_names
    else:
        texts = [str(page.description or "") for page in file.pages[:count]]
        matches = [_QPTIFF_NAME.search(text) for text in texts]
        names = [match[1] if match else "" for match in matches]
    channels = Channels(names=channel_names(names, count), dtype=series.dtype)
    return channels, planes


def _level_planes(level: TiffPageSeries, depth: int, samples: int) -> LevelPlanes:
    """Returns the planes of a level in the order of the channels."""
    pages = [page for page in level.pages if page is not None]
    if len(pages) != depth:
        raise ChannelsError(
            f"each level must have {depth} planes, got {len(pages)}; "
            "convert the file to OME-TIFF"
        )
    planes = []
    for page in pages:
        is_separate = page.keyframe.planarconfig == SEPARATE and samples > 1
        segments_per_plane = len(page.dataoffsets) // samples
        for sample in range(samples):
            if is_separate:
                planes.append(Plane(page=page, first=sample * segments_per_plane))
            else:
                planes.append(Plane(page=page, sample=sample))
    return tuple(planes)
