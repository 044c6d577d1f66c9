"""Files of more than three channels, or of more than 8 bits: one to three of them, scaled to RGB.

A channel's px are scaled so that two percentiles of its own px become 0 and 255. These are of the
coarsest level that has four million px, of segments spread over it: of the whole slide, and the
same for every tile. The limits that were found are part of what the slide says of itself.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from thinsection.files.sources import ByteSource
from thinsection.slide.formats.segments import Decoder
from thinsection.slide.formats.tiff_layout import channel_layout
from thinsection.slide.formats.tiff_reader import TiffSlide
from thinsection.slide.look import Look, Plane
from thinsection.types import Level, Mpp, RgbArray

_SAMPLED_PX = 1 << 22  # per channel, of which percentiles are taken
Values = npt.NDArray[np.float32]


class ScaledDecoder(Decoder):
    """Segments of one to three channels of a level, scaled. Memory: one segment of one channel."""

    limits: Sequence[
        tuple[float, float]
    ] = ()  # of each channel: what becomes 0 and what 255

    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """See `Decoder.decode`."""
        scales = [(low, 255.0 / max(high - low, 1e-9)) for low, high in self.limits]
        for index, out in zip(indices, outs):
            out[:] = 0
            for n, (low, factor) in enumerate(scales):
                values = self._stored(n, index)[: out.shape[0], : out.shape[1]]
                shown = np.rint(np.clip((values - low) * factor, 0, 255))
                out[: len(values), : values.shape[1], n] = shown
            if len(scales) == 1:
                out[..., 1:] = out[..., :1]

    def percentiles(
        self, n: int, percentiles: tuple[float, float]
    ) -> tuple[float, float]:
        """Two percentiles of a channel, of segments spread over the level."""
        (width, height), values = self.size, []
        for index in range(
            0, self.columns * self.rows, math.ceil(width * height / _SAMPLED_PX)
        ):
            row, column = divmod(index, self.columns)
            inside = height - row * self.segment[1], width - column * self.segment[0]
            values.append(self._stored(n, index)[: inside[0], : inside[1]].ravel())
        low, high = np.percentile(np.concatenate(values), percentiles)
        return float(low), float(high)

    @abstractmethod
    def _stored(self, n: int, index: int) -> Values:
        """A segment of the n-th channel that was picked, (height, width)."""


def scale_channels(
    decoders: Sequence[ScaledDecoder], names: Sequence[str], look: Look
) -> str:
    """Gives all levels the same limits, and says so for `Slide.rendering`. Memory: 32 MiB."""
    large = [
        n
        for n, decoder in enumerate(decoders)
        if math.prod(decoder.size) >= _SAMPLED_PX
    ]
    sampled, (low, high) = decoders[max(large, default=0)], look.percentiles
    limits = [sampled.percentiles(n, look.percentiles) for n in range(len(names))]
    for decoder in decoders:
        decoder.limits = limits
    shown = (f"{name} {a:g} to {b:g}" for name, (a, b) in zip(names, limits))
    return f"channels {', '.join(shown)} (percentiles {low:g} and {high:g}) as RGB"


class ChannelSlide(TiffSlide):
    """One to three channels of a TIFF as RGB; one is gray, of two blue stays 0. Thread-safe.

    Memory: as of `TiffSlide`; while it is opened, 32 MiB for the percentiles.
    """

    reader = "channels"

    def __init__(self, path: str, look: Look, *, slide_mpp: Mpp | None = None) -> None:
        layout, found = channel_layout(path, slide_mpp)
        super().__init__(path, layout=layout)
        chosen = [found.index(name) for name in look.channels]
        planes = [[level[channel] for channel in chosen] for level in found.planes]
        decoders = [
            _PlaneDecoder(*pair, self._source) for pair in zip(self.levels, planes)
        ]
        names = [found.names[channel] for channel in chosen]
        self.rendering = scale_channels(decoders, names, look)
        self._decoders = [*decoders]


class _PlaneDecoder(ScaledDecoder):
    """Segments of planes of a TIFF."""

    def __init__(
        self, level: Level, planes: Sequence[Plane], source: ByteSource
    ) -> None:
        super().__init__(level, source.name)
        self._source, self._planes = source, planes

    def _stored(self, n: int, index: int) -> Values:
        plane = self._planes[n]
        page, place = plane.page, plane.first + index
        offset, count = page.dataoffsets[place], page.databytecounts[place]
        if not count:
            return np.zeros(self.segment[::-1], dtype=np.float32)
        data, key = bytes(self._source.read_at(offset, count)), page.keyframe
        try:
            found = key.decode(data, index, jpegtables=key.jpegtables)
            return np.asarray(found[0][0][..., plane.sample], dtype=np.float32)
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            raise self._error(index, str(error)) from None
