"""OME-Zarr 0.4 and 0.5: a folder of chunks, local or by URL, read chunk by chunk.

Source: https://ngff.openmicroscopy.org/0.5/ (`multiscales`, `omero`, `bioformats2raw.layout`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import zarr
from numpy.typing import NDArray

from thinsection.errors import ChannelsError, SlideOpenError
from thinsection.files.url_secrets import whole_url
from thinsection.files.urls import is_url
from thinsection.slide.base import GRAY
from thinsection.slide.formats.channels import ScaledDecoder, Values, scale_channels
from thinsection.slide.formats.segments import MAX_SEGMENT_BYTES, SegmentedSlide
from thinsection.slide.geometry import positive_number
from thinsection.slide.look import (
    MAX_SHOWN,
    Channels,
    Look,
    channel_names,
    unpicked_channels_error,
)
from thinsection.slide.units import um_per_unit
from thinsection.types import Document, Level, Mpp, RgbArray, Size

_VERSIONS = ("0.4", "0.5")
_RGB_COLOURS = ["FF0000", "00FF00", "0000FF"]
# by which a level may differ from level 0 in its shape; tiny ones are rounded
_MAX_ASPECT = 1.1


class _ChunkDecoder(ScaledDecoder):
    """Decoder of chunks of a level: RGB, gray or the picked channels.

    Memory: the chunks at one place.

    Attributes:
        picked: numbers of the picked channels; empty of a picture.
    """

    def __init__(self, level: Level, array: zarr.Array, axes: str, name: str) -> None:
        super().__init__(level, name)
        self.picked: list[int] = []
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
        self, path: str, *, slide_mpp: Mpp | None = None, look: Look | None = None
    ) -> None:
        group, metadata = _open_image(path)
        multiscale = metadata["multiscales"][0]
        datasets = multiscale["datasets"]
        axes = "".join(str(axis["name"]) for axis in multiscale["axes"])
        arrays = [_sound_array(group, str(each["path"]), axes) for each in datasets]
        levels = _levels(arrays, axes)
        num_channels = _length(arrays[0], axes, "c")
        channels = _channels(metadata.get("omero") or {}, num_channels, arrays[0].dtype)
        picks = look.channels if look else ()
        if channels is not None and not picks:
            raise unpicked_channels_error(channels, path)
        if channels is None and picks:
            raise SlideOpenError(
                "zarr: an RGB or gray picture of 8 bits has no channels to choose; omit "
                "--channels"
            )
        decoders = [
            _ChunkDecoder(level, array, axes, path)
            for level, array in zip(levels, arrays)
        ]
        own_mpp = _find_mpp(multiscale["axes"], axes, (multiscale, datasets[0]))
        super().__init__(
            path,
            levels,
            decoders,
            slide_mpp=slide_mpp or own_mpp,
            properties={
                "ome.Name": str(multiscale.get("name", "")),
                "ome.Axes": axes,
            },
        )
        if channels is not None and look is not None:
            picked = [channels.index(name) for name in picks]
            for decoder in decoders:
                decoder.picked = picked
            names = [channels.names[number] for number in picked]
            self.rendering = scale_channels(decoders, names, look)
        elif num_channels == 1:
            self.notes = (GRAY,)


def _open_image(path: str) -> tuple[zarr.Group, Document]:
    """Opens the group of the (first) image; returns it with its metadata.

    Raises:
        SlideOpenError: there is no image, or it is a plate of many.
    """
    store = path
    if is_url(path):
        store = zarr.storage.FsspecStore.from_url(whole_url(path), read_only=True)
    try:
        group = zarr.open_group(store, mode="r")
    except FileNotFoundError:
        raise SlideOpenError(
            "zarr: not a zarr folder, because its metadata are missing"
        ) from None
    metadata = group.attrs.get("ome", group.attrs)
    if "plate" in metadata or "well" in metadata:
        raise SlideOpenError(
            "zarr: a plate of many images is not a slide; pass one of its images"
        )
    if "multiscales" not in metadata and "bioformats2raw.layout" in metadata:
        group = group["0"]  # the first of its images: that of the slide
        metadata = group.attrs.get("ome", group.attrs)
    if "multiscales" not in metadata:
        raise SlideOpenError(
            "zarr: not an OME-Zarr image, because its metadata have no 'multiscales'"
        )
    version = metadata.get("version") or metadata["multiscales"][0].get("version")
    if version not in _VERSIONS:
        raise SlideOpenError(
            f"zarr: OME-Zarr must be of version {' or '.join(_VERSIONS)}, got {version!r}"
        )
    return group, metadata


def _length(array: zarr.Array, axes: str, axis: str) -> int:
    """Returns the length along an axis; 1 where there is none of that name."""
    return int(array.shape[axes.index(axis)]) if axis in axes else 1


def _sound_array(group: zarr.Group, name: str, axes: str) -> zarr.Array:
    """Returns a level's array, whose axes and sizes are sound."""
    array = group[name]
    if len(axes) != array.ndim or not {"x", "y"} <= set(axes) <= set("tczyx"):
        raise SlideOpenError(
            f"zarr: axes must be of t, c, z, y and x, got {axes!r} for {array.ndim} of level "
            f"{name!r}"
        )
    if array.dtype.kind not in "uif" or min(array.shape) < 1:
        raise SlideOpenError(
            f"zarr: pixels must be numbers, got {array.dtype} {array.shape} in level {name!r}"
        )
    chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize
    if chunk_bytes > MAX_SEGMENT_BYTES:
        raise SlideOpenError(
            f"zarr: chunks must have <= 128 MiB, got {chunk_bytes >> 20} MiB in level {name!r}; "
            "write it with smaller chunks"
        )
    depths = {axis: _length(array, axes, axis) for axis in "zt"}
    planes = ", ".join(
        f"{depth} along {axis.upper()}" for axis, depth in depths.items() if depth > 1
    )
    if planes:
        raise ChannelsError(
            f"planes must differ by channel only, got {planes}; split the file"
        )
    return array


def _levels(arrays: Sequence[zarr.Array], axes: str) -> list[Level]:
    """Returns the levels, finest first, each smaller than the one before and of the same shape."""
    sizes = [(_length(array, axes, "x"), _length(array, axes, "y")) for array in arrays]
    areas = [math.prod(size) for size in sizes]
    channel_counts = {_length(array, axes, "c") for array in arrays}
    shrinks = all(larger > smaller for larger, smaller in pairwise(areas))
    if len(channel_counts) != 1 or not shrinks:
        raise SlideOpenError(
            f"zarr: levels must shrink and keep their channels, got {sizes}"
        )
    levels: list[Level] = []
    for index, (size, array) in enumerate(zip(sizes, arrays)):
        x_ratio = sizes[0][0] / size[0]
        y_ratio = sizes[0][1] / size[1]
        aspect = max(x_ratio, y_ratio) / min(x_ratio, y_ratio)
        if aspect > _MAX_ASPECT + 1 / min(size):
            raise SlideOpenError(f"zarr: levels must have one shape, got {sizes}")
        levels.append(
            Level(
                index=index,
                size=size,
                downsample=(x_ratio + y_ratio) / 2,
                segment=_chunk_size(array, axes, size),
            )
        )
    return levels


def _chunk_size(array: zarr.Array, axes: str, size: Size) -> Size:
    """Returns (width, height) of a chunk, which may be declared larger than its level."""
    width = int(array.chunks[axes.index("x")])
    height = int(array.chunks[axes.index("y")])
    return (min(width, size[0]), min(height, size[1]))


def _channels(
    omero: Document, count: int, dtype: np.dtype[np.generic]
) -> Channels | None:
    """Returns the channels of what is no picture of 8 bits; None of RGB and of gray."""
    descriptions = omero.get("channels") or []
    colours = [str(each.get("color", "")).upper() for each in descriptions]
    has_own_colours = len(set(colours)) == len(colours) == MAX_SHOWN
    is_rgb = count == MAX_SHOWN and not (has_own_colours and colours != _RGB_COLOURS)
    if dtype == np.uint8 and (count == 1 or is_rgb):
        return None
    labels = [str(each.get("label") or "") for each in descriptions]
    return Channels(names=channel_names(labels, count), dtype=dtype)


def _find_mpp(
    descriptions: Sequence[Document], axes: str, transformed: Iterable[Document]
) -> Mpp | None:
    """Returns µm per px of level 0; None where a unit or a scale is missing.

    Args:
        descriptions: descriptions of the axes, with their units.
        axes: names of the axes.
        transformed: the image and its level 0, whose transforms apply one after the other.
    """
    scales: list[Sequence[float]] = []
    for part in transformed:
        for step in part.get("coordinateTransformations") or ():
            if step["type"] == "scale":
                scales.append(step["scale"])
    sides = []
    for axis in "xy":
        place = axes.index(axis)
        um = um_per_unit(str(descriptions[place].get("unit"))) or 0.0
        units_per_px = math.prod(scale[place] for scale in scales)
        side = positive_number(str(units_per_px * um)) if scales else None
        if side is None:
            return None
        sides.append(side)
    return (sides[0], sides[1])
