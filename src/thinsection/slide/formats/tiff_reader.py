"""Direct reader of TIFF: the file's own tiles or strips, decoded straight into place."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import BinaryIO

import numpy as np

from thinsection.errors import SlideOpenError
from thinsection.files.sources import ByteSource, FileSource
from thinsection.slide.formats.channels import (
    Plane,
    ScaledDecoder,
    Values,
    scale_channels,
)
from thinsection.slide.formats.segments import SegmentedSlide
from thinsection.slide.formats.tiff_decoder import (
    SegmentDecoder,
    decoder_of,
)
from thinsection.slide.formats.tiff_layout import (
    TiffLayout,
    channel_layout,
    read_layout,
    unchecked_levels,
)
from thinsection.slide.formats.tiff_pages import (
    JPEG,
    SEPARATE,
    orientation_of,
)
from thinsection.slide.level_check import (
    NUM_PLACES,
    STREAMED_PLACES,
    cache_levels,
    cached_levels,
    judge_levels,
    slide_stamps,
)
from thinsection.slide.look import Look
from thinsection.slide.orientation import turn_pixels
from thinsection.types import Level, Mpp, RgbArray

_DCT_FACTORS = (2, 4, 8)  # at which libjpeg-turbo is quicker than for a whole segment


class TiffSlide(SegmentedSlide):
    """A tiled or striped TIFF, read segment by segment. Thread-safe.

    Bytes are read from `source` and metadata from `handle`; by default both are the local file. A
    `layout` replaces the metadata. When a file is opened for the first time, pages that it calls
    levels are compared with level 0. The result is kept for files with the same stamps.

    Memory: `cache_bytes` of decoded segments; per reading thread one decoded segment and
    `MAX_READ_BYTES` of compressed ones, or one that is larger.
    """

    reader = "tiff"
    _offers_coarse = False  # whether levels that are no `reduced` ones were asked for

    def __init__(
        self,
        path: str,
        *,
        slide_mpp: Mpp | None = None,
        source: ByteSource | None = None,
        handle: BinaryIO | None = None,
        layout: TiffLayout | None = None,
        image: str | None = None,
    ) -> None:
        self._source = source or FileSource(path)
        if layout is None:
            layout = checked_layout(path, slide_mpp, self._source, handle, image)
        self.layout = layout
        decoders = [
            decoder_of(level, page, self._source)
            for level, page in zip(layout.levels, layout.pages)
        ]
        super().__init__(
            path,
            layout.levels,
            slide_mpp=layout.metadata.slide_mpp,
            objective_power=layout.metadata.objective_power,
            vendor=layout.metadata.vendor,
            properties=layout.metadata.properties,
            orientation=layout.metadata.orientation,
        )
        self._read_by(layout.levels, decoders)
        self.notes = layout.notes
        self.mpp_source = layout.metadata.mpp_source
        self.pictures = layout.pictures
        self.picture = layout.picture
        self.checked = layout.checked
        self.associated_names = tuple(sorted(layout.associated))

    def icc_profile(self) -> bytes | None:
        """See `Slide.icc_profile`."""
        return self.layout.icc_profile

    def _associated(self, name: str) -> RgbArray:
        level, page = self.layout.associated[name]
        decoder = decoder_of(level, page, self._source)
        width, height = decoder.size
        image = np.empty((height, width, 3), dtype=np.uint8)
        self._assemble(decoder, [(0, 0)], image[None])
        turned = turn_pixels(image, orientation_of(page))
        return np.ascontiguousarray(turned)

    def coarse(self, level: int, factor: int) -> Level | None:
        """See `Slide.coarse`: where segments can be divided by the factor."""
        self._offers_coarse = not self.rendering
        return self._fractions.get((level, factor)) if self._offers_coarse else None

    @property
    def reduced(self) -> tuple[Level, ...]:
        """JPEG segments at the fractions of their DCT."""
        return tuple(
            fraction
            for (level, _), fraction in self._fractions.items()
            if self._is_jpeg(level)
        )

    @property
    def _derived_levels(self) -> tuple[Level, ...]:
        if self._offers_coarse:
            return tuple(self._fractions.values())
        return self.reduced

    def _is_jpeg(self, level: int) -> bool:
        return int(self.layout.pages[level].compression) in JPEG

    @cached_property
    def _fractions(self) -> dict[tuple[int, int], Level]:
        """Levels at a fraction, by level and factor; made when the first one is asked for.

        JPEGs come first, so that the indices of `reduced` do not depend on the others; and of
        these the least to read.
        """
        coarsest_first = range(len(self.layout.pages))[::-1]
        decoders = self._decoders[: len(self.levels)]
        fractions: dict[tuple[int, int], Level] = {}
        for index in sorted(coarsest_first, key=self._is_jpeg, reverse=True):
            level = self.levels[index]
            segment = self._decoders[index].segment
            is_planar = self.layout.pages[index].planarconfig == SEPARATE
            for factor in _DCT_FACTORS:
                is_divisible = not any(px % factor for px in segment)
                if is_planar or min(level.size) < factor or not is_divisible:
                    continue
                page = self.layout.pages[index]
                decoder = SegmentDecoder(level, page, self._source, factor)
                fractions[index, factor] = Level(
                    index=len(decoders),
                    size=decoder.size,
                    downsample=level.downsample * factor,
                    segment=decoder.segment,
                )
                decoders.append(decoder)
        self._decoders = decoders
        return fractions

    def close(self) -> None:
        """Closes the file; reads that other threads have begun are completed."""
        super().close()
        self._source.close()


def checked_layout(
    path: str,
    slide_mpp: Mpp | None,
    source: ByteSource,
    handle: BinaryIO | None = None,
    image: str | None = None,
) -> TiffLayout:
    """Returns the layout of a file with the levels whose pixels agree with level 0.

    Args:
        path: the file.
        slide_mpp: (x, y) µm per level-0 px, in place of the resolution that the file states.
        source: bytes of the file.
        handle: the opened file if it is not local; None for a local file.
        image: name or number of the picture that is the slide.
    """
    stamps = slide_stamps(path) if handle is None else None
    num_places = NUM_PLACES if handle is None else STREAMED_PLACES
    verdicts = cached_levels(stamps)
    num_cached = len(verdicts)
    read = partial(read_layout, path, slide_mpp, handle)
    # the file is read without `image` first, because that gives the pictures their numbers
    for number in dict.fromkeys((None, image)):
        try:
            layout = read(image=number, verdicts=verdicts)
        except SlideOpenError:
            if number == image:
                raise
            continue
        # a page that is no level of one picture may be a level of another picture
        while candidates := unchecked_levels(
            [*layout.pages, *layout.possible], verdicts
        ):
            trial_layout = layout.with_candidates(candidates)
            trial = TiffSlide(path, source=source, layout=trial_layout)
            verdicts |= judge_levels(trial, candidates, num_places=num_places)
            layout = read(image=number, verdicts=verdicts)
    if len(verdicts) > num_cached:
        cache_levels(stamps, verdicts)
    return layout


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
        layout, channels, planes_by_level = channel_layout(path, slide_mpp, image)
        super().__init__(path, layout=layout)
        picked = [channels.index(name) for name in look.channels]
        decoders = []
        for level, planes in zip(self.levels, planes_by_level):
            picked_planes = [planes[channel] for channel in picked]
            decoders.append(_PlaneDecoder(level, picked_planes, self._source))
        names = [channels.names[channel] for channel in picked]
        self.rendering = scale_channels(decoders, names, look)
        self._read_by(self.levels, decoders)


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
