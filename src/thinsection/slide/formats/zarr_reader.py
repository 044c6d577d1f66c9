"""OME-Zarr 0.4 and 0.5: a folder of chunks, local or by URL, read chunk by chunk.

Source: https://ngff.openmicroscopy.org/0.5/ (`multiscales`, `omero`, `bioformats2raw.layout`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import zarr

from thinsection.errors import ChannelsError, SlideOpenError
from thinsection.files.sources import is_url
from thinsection.slide.base import GRAY
from thinsection.slide.formats.channels import ScaledDecoder, Values, scale_channels
from thinsection.slide.formats.segments import MAX_SEGMENT_BYTES, SegmentedSlide
from thinsection.slide.geometry import positive_number
from thinsection.slide.look import MOST, Channels, Look, numbered, refusal
from thinsection.types import Level, Mpp, RgbArray

_VERSIONS = ("0.4", "0.5")
_UM_PER_UNIT = {"meter": 1e6, "decimeter": 1e5, "centimeter": 1e4, "millimeter": 1e3}
_UM_PER_UNIT |= {
    "micrometer": 1.0,
    "nanometer": 1e-3,
    "angstrom": 1e-4,
    "inch": 25_400.0,
}
_RGB_COLOURS = ["FF0000", "00FF00", "0000FF"]
_MAX_ASPECT = (
    1.1  # by which a level may differ from level 0 in its shape; tiny ones are rounded
)


class _ChunkDecoder(ScaledDecoder):
    """Chunks of a level: RGB, grey or the picked channels. Memory: those at one place."""

    def __init__(self, level: Level, array: Any, axes: str, name: str) -> None:
        super().__init__(level, name)
        self._array, self._axes, self.chosen = array, axes, list[int]()

    def decode(self, indices: Iterable[int], outs: Iterable[RgbArray]) -> None:
        """See `Decoder.decode`."""
        if self.chosen:
            super().decode(indices, outs)
            return
        for index, out in zip(indices, outs):
            found = self._read(index, slice(None))
            out[: found.shape[0], : found.shape[1]] = found

    def _stored(self, n: int, index: int) -> Values:
        found = self._read(index, slice(self.chosen[n], self.chosen[n] + 1))
        return np.asarray(found[..., 0], dtype=np.float32)

    def _read(self, index: int, channels: slice) -> np.ndarray:
        """The chunk of a place in the grid, (h, w, channels); less at the right, lower border."""
        (row, column), taken = divmod(index, self.columns), {"c": channels}
        for axis, place in (("y", row), ("x", column)):
            edge = self._array.chunks[self._axes.index(axis)]
            taken[axis] = slice(place * edge, (place + 1) * edge)
        found = np.asarray(
            self._array[tuple(taken.get(axis, 0) for axis in self._axes)]
        )
        kept = [axis for axis in self._axes if axis in taken]
        if "c" not in kept:
            found, kept = found[..., None], [*kept, "c"]
        return found.transpose([kept.index(axis) for axis in "yxc"])


class ZarrSlide(SegmentedSlide):
    """An OME-Zarr image, of a folder or a URL. Thread-safe.

    Memory: `segments.CACHE_BYTES`, and per reading thread the chunks of one place, stored and
    decoded; a chunk over 128 MiB is refused.
    """

    reader = "zarr"

    def __init__(
        self, path: str, *, slide_mpp: Mpp | None = None, look: Look | None = None
    ) -> None:
        group, said = _image(path)
        scales = said["multiscales"][0]
        axes = "".join(str(axis["name"]) for axis in scales["axes"])
        arrays = [_array(group, str(each["path"]), axes) for each in scales["datasets"]]
        levels = _levels(arrays, axes)
        count = _length(arrays[0], axes, "c")
        channels = _channels(said.get("omero") or {}, count, arrays[0].dtype)
        if channels is not None and not (look and look.channels):
            raise refusal(channels, path)
        if channels is None and look and look.channels:
            what = "zarr: an RGB or gray picture of 8 bits has no channels to pick"
            raise SlideOpenError(f"{what}; leave --channels out")
        decoders = [_ChunkDecoder(*pair, axes, path) for pair in zip(levels, arrays)]
        mpp = slide_mpp or _mpp(scales["axes"], axes, (scales, scales["datasets"][0]))
        properties = {"ome.Name": str(scales.get("name", "")), "ome.Axes": axes}
        super().__init__(path, levels, decoders, slide_mpp=mpp, properties=properties)
        if channels and look:
            chosen = [channels.index(name) for name in look.channels]
            for decoder in decoders:
                decoder.chosen = chosen
            names = [channels.names[channel] for channel in chosen]
            self.rendering = scale_channels(decoders, names, look)
        elif count == 1:
            self.notes = (GRAY,)


def _image(path: str) -> tuple[Any, Mapping[str, Any]]:
    """The group of the (first) image, and what it says of itself; SlideOpenError: none, or many."""
    store = (
        zarr.storage.FsspecStore.from_url(path, read_only=True)
        if is_url(path)
        else path
    )
    try:
        group = zarr.open_group(store, mode="r")
    except FileNotFoundError:
        raise SlideOpenError(
            "zarr: not a folder of zarr, its metadata are missing"
        ) from None
    said = group.attrs.get("ome", group.attrs)
    if "plate" in said or "well" in said:
        raise SlideOpenError(
            "zarr: a plate of many images is no slide; name one of its images"
        )
    if "multiscales" not in said and "bioformats2raw.layout" in said:
        group = group["0"]  # the first of its images: that of the slide
        said = group.attrs.get("ome", group.attrs)
    if "multiscales" not in said:
        raise SlideOpenError(
            "zarr: no OME-Zarr image, its metadata have no 'multiscales'"
        )
    version = said.get("version") or said["multiscales"][0].get("version")
    if version not in _VERSIONS:
        known = " or ".join(_VERSIONS)
        raise SlideOpenError(
            f"zarr: OME-Zarr must be of version {known}, got {version!r}"
        )
    return group, said


def _length(array: Any, axes: str, axis: str) -> int:
    """Px along an axis; 1 where there is none."""
    return int(array.shape[axes.index(axis)]) if axis in axes else 1


def _array(group: Any, name: str, axes: str) -> Any:
    """A level's array, whose axes and sizes are sound."""
    array = group[name]
    if len(axes) != array.ndim or not {"x", "y"} <= set(axes) <= set("tczyx"):
        what = f"{axes!r} for {array.ndim} of level {name!r}"
        raise SlideOpenError(f"zarr: axes must be of t, c, z, y and x, got {what}")
    if array.dtype.kind not in "uif" or min(array.shape) < 1:
        got = f"{array.dtype} {array.shape} in level {name!r}"
        raise SlideOpenError(f"zarr: px must be numbers, got {got}")
    if (
        num_bytes := math.prod(array.chunks) * array.dtype.itemsize
    ) > MAX_SEGMENT_BYTES:
        got = f"{num_bytes >> 20} MiB in level {name!r}"
        raise SlideOpenError(
            f"zarr: chunks must have <= 128 MiB, got {got}; chunk it anew"
        )
    if extra := {axis: n for axis in "zt" if (n := _length(array, axes, axis)) > 1}:
        got = ", ".join(f"{n} along {axis.upper()}" for axis, n in extra.items())
        raise ChannelsError(
            f"planes must differ by channel only, got {got}; split the file"
        )
    return array


def _levels(arrays: Sequence[Any], axes: str) -> list[Level]:
    """Finest first, each smaller than the one before and of the same shape."""
    sizes = [(_length(array, axes, "x"), _length(array, axes, "y")) for array in arrays]
    same = len({_length(array, axes, "c") for array in arrays}) == 1
    if not same or any(a <= b for a, b in pairwise(math.prod(size) for size in sizes)):
        raise SlideOpenError(
            f"zarr: levels must shrink and keep their channels, got {sizes}"
        )
    levels: list[Level] = []
    for size, array in zip(sizes, arrays):
        x, y = (whole / part for whole, part in zip(sizes[0], size))
        if max(x, y) / min(x, y) > _MAX_ASPECT + 1 / min(size):
            raise SlideOpenError(f"zarr: levels must be of one shape, got {sizes}")
        width, height = (
            min(int(array.chunks[axes.index(a)]), n) for a, n in zip("xy", size)
        )
        index, downsample = len(levels), (x + y) / 2
        levels.append(
            Level(
                index=index, size=size, downsample=downsample, segment=(width, height)
            )
        )
    return levels


def _channels(
    omero: Mapping[str, Any], count: int, dtype: np.dtype[Any]
) -> Channels | None:
    """The channels of what is no picture of 8 bits; None of RGB and of grey."""
    told = omero.get("channels") or []
    colours = [str(channel.get("color", "")).upper() for channel in told]
    painted = len(set(colours)) == len(colours) == MOST and colours != _RGB_COLOURS
    if dtype == np.uint8 and (count == 1 or (count == MOST and not painted)):
        return None
    labels = [str(channel.get("label") or "") for channel in told]
    return Channels(names=numbered(labels, count), dtype=dtype)


def _mpp(
    described: Sequence[Mapping[str, Any]],
    axes: str,
    transforms: Iterable[Mapping[str, Any]],
) -> Mpp | None:
    """µm per px of level 0; None where a unit or a scale is missing."""
    steps = [
        step
        for part in transforms
        for step in part.get("coordinateTransformations") or ()
    ]
    sides = []
    for axis in "xy":
        place = axes.index(axis)
        found = _UM_PER_UNIT.get(str(described[place].get("unit")), 0.0)
        scales = [step["scale"][place] for step in steps if step["type"] == "scale"]
        side = positive_number(str(math.prod(scales) * found)) if scales else None
        if side is None:
            return None
        sides.append(side)
    return (sides[0], sides[1])
