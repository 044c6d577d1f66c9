"""OME-Zarr 0.4 and 0.5: a folder of chunks, local or by URL, read chunk by chunk.

Source: https://ngff.openmicroscopy.org/0.5/ (`multiscales`, `omero`, `bioformats2raw.layout`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray

from thinsection.errors import SlideOpenError
from thinsection.files.urls import is_url
from thinsection.slide.base import GRAY
from thinsection.slide.formats.channels import ScaledDecoder, Values, scale_channels
from thinsection.slide.formats.segments import SegmentedSlide
from thinsection.slide.formats.stated_levels import (
    StatedLevel,
    judge_stated_levels,
    settle_levels,
)
from thinsection.slide.formats.zarr_images import (
    length,
    missing_chunks_note,
    read_images,
    read_levels,
)
from thinsection.slide.level_check import LevelVerdict
from thinsection.slide.look import (
    MAX_SHOWN,
    Channels,
    Look,
    channel_names,
    unpicked_channels_error,
)
from thinsection.slide.pictures import PictureLevel, choose_picture, picture_notes
from thinsection.slide.verdicts import slide_stamps
from thinsection.types import Document, Json, Level, Mpp, RgbArray
from thinsection.weights.stamps import Stamps

_METADATA_FILES = ("zarr.json", ".zattrs")
_RGB_COLOURS = ["FF0000", "00FF00", "0000FF"]


class _ChunkDecoder(ScaledDecoder):
    """Decoder of chunks of a level: RGB, gray or the picked channels.

    Memory: the chunks at one place.

    Attributes:
        picked: numbers of the picked channels; empty of a picture.
    """

    def __init__(
        self, level: Level, array: zarr.Array, axes: str, picked: Sequence[int]
    ) -> None:
        super().__init__(level, array.name)
        self.picked = picked
        self._array = array
        self._axes = axes

    def decode(
        self, indices: Sequence[int], outs: Iterable[RgbArray]
    ) -> Iterator[None]:
        """See `Decoder.decode`."""
        if self.picked:
            yield from super().decode(indices, outs)
            return
        for index, out in zip(indices, outs):
            chunk = self._read(index, slice(None))
            out[: chunk.shape[0], : chunk.shape[1]] = chunk
            yield

    def _stored(self, channel: int, index: int) -> Values:
        number = self.picked[channel]
        chunk = self._read(index, slice(number, number + 1))
        return np.asarray(chunk[..., 0], dtype=np.float32)

    def _read(self, index: int, channels: slice) -> NDArray[np.generic]:
        """Reads a chunk, (h, w, channels); it is smaller at the right and lower border."""
        row, column = divmod(index, self.columns)
        places: dict[str, slice] = {"c": channels}
        for axis, place in (("y", row), ("x", column)):
            edge = self._array.chunks[self._axes.index(axis)]
            places[axis] = slice(place * edge, (place + 1) * edge)
        chunk = np.asarray(self._array[tuple(places.get(a, 0) for a in self._axes)])
        axes = [axis for axis in self._axes if axis in places]
        if "c" not in axes:
            chunk = chunk[..., None]
            axes.append("c")
        return chunk.transpose([axes.index(axis) for axis in "yxc"])


class ZarrSlide(SegmentedSlide):
    """An OME-Zarr image, of a folder or a URL. Thread-safe.

    Memory: `segments.CACHE_BYTES`, and per reading thread the chunks of one place, stored and
    decoded; a chunk over 128 MiB is refused.
    """

    reader = "zarr"

    def __init__(
        self,
        path: str,
        *,
        slide_mpp: Mpp | None = None,
        look: Look | None = None,
        image: str | None = None,
    ) -> None:
        images = read_images(path)
        pictures = [each.picture for each in images]
        picture = choose_picture(pictures, image, slide_path=path)
        shown = images[picture.number - 1]
        found = read_levels(shown)
        self._arrays = found.arrays
        num_channels = length(found.arrays[0], shown.axes, "c")
        channels = _channels(shown.omero, num_channels, found.arrays[0].dtype)
        picks = look.channels if look else ()
        if channels is not None and not picks:
            raise unpicked_channels_error(channels, path)
        if channels is None and picks:
            raise SlideOpenError(
                "zarr: an RGB or gray picture of 8 bits has no channels to choose; omit "
                "--channels"
            )
        self._axes = shown.axes
        self._picked = [] if channels is None else [channels.index(n) for n in picks]
        super().__init__(
            path,
            [each.level for each in found.stated],
            self._make_decoders(found.stated),
            slide_mpp=slide_mpp or picture.mpp,
            properties={"ome.Name": picture.name, "ome.Axes": shown.axes},
        )
        notes = [*picture_notes(pictures, picture, image)]
        notes += self._settle(found.stated, picture.number)
        if channels is not None and look is not None:
            names = [channels.names[number] for number in self._picked]
            self.rendering = scale_channels(self._chunks, names, look)
        elif num_channels == 1:
            notes.append(GRAY)
        self.notes = tuple(notes)
        self.pictures = tuple(
            replace(each, levels=self._picture_levels()) if each is picture else each
            for each in pictures
        )
        self.picture = self.pictures[picture.number - 1]

    def _make_decoders(self, levels: Sequence[StatedLevel]) -> list[_ChunkDecoder]:
        self._chunks = [
            _ChunkDecoder(
                each.level, self._arrays[each.number], self._axes, self._picked
            )
            for each in levels
        ]
        return self._chunks

    def _stamps(self) -> Stamps | None:
        """Returns the stamps of the file that describes the images; None by URL."""
        if is_url(self.slide_path):
            return None
        stamps = [
            slide_stamps(str(Path(self.slide_path, name))) for name in _METADATA_FILES
        ]
        return next(filter(None, stamps), None)

    def _settle(self, stated: Sequence[StatedLevel], picture: int) -> list[str]:
        """Compares the levels' pixels, leaves out what is no level, and returns notes on it.

        By URL only where a level's size contradicts its scale: each place costs requests.
        """
        is_doubtful = any(each.by_size is not None for each in stated)
        verdicts: dict[tuple[int, int], LevelVerdict] = {}
        if len(stated) > 1 and (is_doubtful or not is_url(self.slide_path)):
            verdicts = judge_stated_levels(self, stated, picture, self._stamps())
        settled, notes = settle_levels(stated, verdicts)
        self.levels = tuple(each.level for each in settled)
        self.size = self.levels[0].size
        self._decoders = list(self._make_decoders(settled))
        for each in settled:
            notes.append(missing_chunks_note(each.name, self._arrays[each.number]))
        return [note for note in notes if note]

    def _picture_levels(self) -> tuple[PictureLevel, ...]:
        levels = []
        for level in self.levels:
            mpp = None
            if self.slide_mpp is not None:
                x_mpp, y_mpp = self.slide_mpp
                mpp = (x_mpp * level.downsample, y_mpp * level.downsample)
            levels.append(
                PictureLevel(size=level.size, downsample=level.downsample, mpp=mpp)
            )
        return tuple(levels)


def _channels(
    omero: Document, count: int, dtype: np.dtype[np.generic]
) -> Channels | None:
    """Returns the channels of what is no picture of 8 bits; None of RGB and of gray."""
    descriptions = omero.get("channels") or []
    colours = [each.get("color", "") for each in descriptions]
    has_own_colours = len({str(each) for each in colours}) == len(colours) == MAX_SHOWN
    is_rgb = count == MAX_SHOWN and not (has_own_colours and not _are_rgb(colours))
    if dtype == np.uint8 and (count == 1 or is_rgb):
        return None
    labels = [str(each.get("label", "")) for each in descriptions]
    return Channels(names=channel_names(labels, count), dtype=dtype)


def _are_rgb(colours: Sequence[Json]) -> bool:
    """Tells whether colours are red, green and blue, in any of the forms that programs write.

    These are 'FF0000', '#ff0000' and 'F00', with alpha before or behind, and OME-XML's number of
    RGBA, which may be negative.
    """
    texts = []
    for colour in colours:
        if isinstance(colour, int):
            texts.append(f"{colour & 0xFFFFFFFF:08X}")
            continue
        text = str(colour).strip().removeprefix("#").upper().removeprefix("0X")
        is_short = len(text) in (3, 4)
        texts.append("".join(letter * 2 for letter in text) if is_short else text)
    readings = [texts, [text[:6] for text in texts], [text[-6:] for text in texts]]
    return _RGB_COLOURS in readings
