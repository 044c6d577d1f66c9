"""Files of more than three channels, or of more than 8 bits: one to three of them, scaled to RGB.

A channel's px are scaled so that two percentiles of its own px become 0 and 255. These are of the
coarsest level that has four million px, of segments spread over it: of the whole slide, and the
same for every tile. The limits that were found are part of what the slide says of itself.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from thinsection.files.sources import ByteSource
from thinsection.slide.formats.segments import Decoder
from thinsection.slide.formats.tiff_channels import Plane
from thinsection.slide.formats.tiff_layout import channel_layout
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.slide.look import Look
from thinsection.types import Level, Mpp, RgbArray

_SAMPLED_PX = 1 << 22  # per channel, of which percentiles are taken
Values = npt.NDArray[np.float32]


class ScaledDecoder(Decoder):
    """Segments of one to three channels of a level, scaled. Memory: one segment of one channel.

    Attributes:
        limits: for each channel the values that become 0 and 255.
    """

    limits: Sequence[tuple[float, float]] = ()

    def decode(
        self, indices: Sequence[int], outs: Iterable[RgbArray]
    ) -> Iterator[None]:
        """See `Decoder.decode`."""
        for index, out in zip(indices, outs):
            out[:] = 0
            for channel, (low, high) in enumerate(self.limits):
                values = self._stored(channel, index)[: out.shape[0], : out.shape[1]]
                factor = 255.0 / max(high - low, 1e-9)
                shown = np.rint(np.clip((values - low) * factor, 0, 255))
                out[: len(values), : values.shape[1], channel] = shown
            if len(self.limits) == 1:
                out[..., 1:] = out[..., :1]
            yield

    def percentiles(
        self, channel: int, percentiles: tuple[float, float]
    ) -> tuple[float, float]:
        """Returns two percentiles of a picked channel, of segments spread over the level."""
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

    @abstractmethod
    def _stored(self, channel: int, index: int) -> Values:
        """Returns a segment of one of the picked channels, (height, width)."""


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


class ChannelSlide(TiffSlide):
    """One to three channels of a TIFF as RGB; one is gray, of two blue stays 0. Thread-safe.

    Memory: that of `TiffSlide`; while it is opened, 32 MiB for the percentiles.
    """

    reader = "channels"

    def __init__(
        self,
        path: str,
        look: Look,
        *,
        slide_mpp: Mpp | None = None,
        image: str | None = None,
    ) -> None:
        layout, found = channel_layout(path, slide_mpp, image)
        super().__init__(path, layout=layout)
        picked = [found.channels.index(name) for name in look.channels]
        decoders = []
        for level, planes in zip(self.levels, found.planes):
            picked_planes = [planes[channel] for channel in picked]
            decoders.append(_PlaneDecoder(level, picked_planes, self._source))
        names = [found.channels.names[channel] for channel in picked]
        self.rendering = scale_channels(decoders, names, look)
        self._decoders = list[Decoder](decoders)


class _PlaneDecoder(ScaledDecoder):
    """Segments of planes of a TIFF."""

    def __init__(
        self, level: Level, planes: Sequence[Plane], source: ByteSource
    ) -> None:
        super().__init__(level, source.name)
        self._planes = planes
        self._source = source

    def _stored(self, channel: int, index: int) -> Values:
        plane = self._planes[channel]
        place = plane.first + index
        num_bytes = plane.page.databytecounts[place]
        if not num_bytes:
            return np.zeros(self.segment[::-1], dtype=np.float32)
        data = bytes(self._source.read_at(plane.page.dataoffsets[place], num_bytes))
        keyframe = plane.page.keyframe
        try:
            decoded = keyframe.decode(data, index, jpegtables=keyframe.jpegtables)
            return np.asarray(decoded[0][0][..., plane.sample], dtype=np.float32)
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            raise self._error(index, str(error)) from None
