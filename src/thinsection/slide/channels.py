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
from thinsection.slide.base import Slide
from thinsection.slide.look import Look
from thinsection.slide.segments import Decoder
from thinsection.slide.tiff_channels import Plane
from thinsection.slide.tiff_layout import channel_layout
from thinsection.slide.tiff_reader import TiffSlide
from thinsection.types import Level, Mpp, RgbArray

_SAMPLED_PX = 1 << 22  # per channel, of which percentiles are taken
Values = npt.NDArray[np.float32]
Limits = Sequence[tuple[float, float]]


class ScaledDecoder(Decoder):
    """Segments of one level: of one to three channels, scaled between their limits.

    A subclass fills `_stored`. Memory: one segment of one channel.
    """

    limits: Limits = ()  # of each channel: what becomes 0 and what 255

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

    def percentiles(self, n: int, percentiles: tuple[float, float]) -> tuple[float, float]:
        """Two percentiles of a channel, of segments spread over the level."""
        (width, height), (seg_width, seg_height) = self.size, self.segment
        count = self.columns * self.rows
        step = math.ceil(width * height / _SAMPLED_PX)
        values = []
        for index in range(0, count, step):
            row, column = divmod(index, self.columns)
            inside = slice(height - row * seg_height), slice(width - column * seg_width)
            values.append(self._stored(n, index)[inside].ravel())
        low, high = np.percentile(np.concatenate(values), percentiles)
        return float(low), float(high)

    @abstractmethod
    def _stored(self, n: int, index: int) -> Values:
        """A segment of the n-th channel that was picked, (height, width)."""


def scale_channels(
    levels: Sequence[Level], decoders: Sequence[ScaledDecoder], names: Sequence[str], look: Look
) -> str:
    """Gives the decoders of all levels the same limits; what was done, for `Slide.rendering`.

    Args:
        levels, decoders: of the slide, finest first.
        names: of the channels that were picked.
        look: with the percentiles.

    Memory: 32 MiB.
    """
    large = [lv.index for lv in levels if math.prod(lv.size) >= _SAMPLED_PX]
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
        decoders = [_PlaneDecoder(*pair, self._source) for pair in zip(self.levels, planes)]
        names = [found.names[channel] for channel in chosen]
        self.rendering = scale_channels(self.levels, decoders, names, look)
        self._decoders, self.notes = [*decoders], ()

    def coarse(self, level: int, factor: int) -> Slide | None:
        """None: channels are reduced once they are scaled."""
        return None


class _PlaneDecoder(ScaledDecoder):
    """Segments of planes of a TIFF."""

    def __init__(self, level: Level, planes: Sequence[Plane], source: ByteSource) -> None:
        assert level.segment is not None
        super().__init__(level.size, level.segment, source.name)
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
