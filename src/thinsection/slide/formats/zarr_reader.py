"""OME-Zarr 0.4 and 0.5: a folder of chunks, local or by URL, read chunk by chunk.

Source: https://ngff.openmicroscopy.org/0.5/ (`multiscales`, `omero`,
`bioformats2raw.layout`, `plate`).
"""

import html
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import cast

import numpy as np
import zarr
from numpy.typing import NDArray

from thinsection.errors import ChannelsError, SlideOpenError
from thinsection.files.urls import is_url, whole_url
from thinsection.slide.base import GRAY
from thinsection.slide.formats.channels import ScaledDecoder, Values, scale_channels
from thinsection.slide.formats.segments import MAX_SEGMENT_BYTES
from thinsection.slide.formats.stated_levels import (
    Scale,
    StatedLevel,
    StatedSlide,
    scale_ratio,
    state_level,
)
from thinsection.slide.geometry import positive_number, um_per_unit
from thinsection.slide.level_check import slide_stamps
from thinsection.slide.look import (
    MAX_SHOWN,
    Channels,
    Look,
    channel_names,
    unpicked_channels_error,
)
from thinsection.slide.pictures import (
    Picture,
    PictureLevel,
    Role,
    choose_picture,
    picture_notes,
    role_of_name,
)
from thinsection.types import Document, Json, Level, Mpp, RgbArray, Size

_VERSION = re.compile(r"0\.[45]([.-]|$)")  # also drafts, such as 0.4-dev-spatialdata
_VERSIONS = "0.4 or 0.5"
_MAX_SERIES = 10_000
_OME_XML = "OME/METADATA.ome.xml"
_MAX_XML_BYTES = 1 << 24
_IMAGE_NAME = re.compile(r"<(?:\w+:)?Image\b(?:[^>]*?\bName=\"([^\"]*)\")?", re.DOTALL)
_NO_CHUNKS = (".z", "zarr.json", ".DS_Store")
_MAX_LISTED = 1 << 14  # most chunks of a level whose files are counted
_METADATA_FILES = ("zarr.json", ".zattrs")
_RGB_COLOURS = ["FF0000", "00FF00", "0000FF"]


@dataclass(frozen=True, kw_only=True)
class _ZarrImage:
    """One multiscale image of an OME-Zarr.

    Attributes:
        group: Zarr group that holds its arrays.
        multiscale: its metadata.
        omero: rendering metadata of its channels; {} if there is none.
        axes: names of its axes, one letter each, in the order of the array's dimensions.
    """

    group: zarr.Group
    multiscale: Document
    omero: Document
    axes: str

    def length(self, array: zarr.Array, axis: str) -> int:
        """Returns the length along an axis; 1 if the array has no such axis."""
        return int(array.shape[self.axes.index(axis)]) if axis in self.axes else 1

    def size(self, array: zarr.Array) -> Size:
        """Returns (width, height), px."""
        return (self.length(array, "x"), self.length(array, "y"))

    def scale(self, dataset: Document) -> Scale | None:
        """Returns units per pixel of a level; None if the metadata has no valid number.

        The scales of the image and of the level apply one after the other.
        """
        steps = self._steps(self.multiscale, "scale") + self._steps(dataset, "scale")
        product = (math.prod(x for x, _ in steps), math.prod(y for _, y in steps))
        if not steps or not all(0 < value < math.inf for value in product):
            return None
        return product

    def mpp(self, dataset: Document) -> Mpp | None:
        """Returns µm per pixel of a level; None if a unit or a scale is missing."""
        sides = []
        for value, axis in zip(self.scale(dataset) or (), "xy"):
            unit = self.multiscale["axes"][self.axes.index(axis)].get("unit")
            um = um_per_unit(unit if isinstance(unit, str) else None)
            side = positive_number(str(value * um)) if um else None
            if side is not None:
                sides.append(side)
        return (sides[0], sides[1]) if len(sides) == 2 else None

    def is_shifted(self, finest: Document, dataset: Document, scale: Scale) -> bool:
        """Tells whether a level begins more than one of its pixels away from level 0.

        Programs that give the position of a pixel's centre shift a level by less than that.
        """
        px = (self._steps(finest, "scale") or [(1.0, 1.0)])[0]
        origin = (self._steps(finest, "translation") or [(0.0, 0.0)])[0]
        own_origin = (self._steps(dataset, "translation") or [origin])[0]
        return any(
            abs(own - first) > one_px * down
            for own, first, one_px, down in zip(own_origin, origin, px, scale)
        )

    def _steps(self, part: Document, kind: str) -> list[Scale]:
        """Returns the scales or translations along x and y in a part of the metadata."""
        steps = []
        for step in part.get("coordinateTransformations") or ():
            if step["type"] == kind:
                x, y = (float(step[kind][self.axes.index(axis)]) for axis in "xy")
                steps.append((x, y))
        return steps

    def picture(self, number: int, name: str) -> Picture:
        """Returns the inventory's entry of the image, with its name and its finest level."""
        datasets = self.multiscale["datasets"]
        role: Role = role_of_name(name) or "slide"
        rule = "no macro, label or thumbnail by its name"
        if role != "slide":
            rule = "by its name"
        size = (0, 0)
        mpp = None
        # the format puts the finest level first, but some programs write it last
        for dataset in (datasets[0], datasets[-1]) if datasets else ():
            array = self.group.get(str(dataset["path"]))
            if not isinstance(array, zarr.Array) or not {"x", "y"} <= set(self.axes):
                continue
            if array.ndim == len(self.axes):
                own_size = self.size(array)
                if math.prod(own_size) > math.prod(size):
                    size = own_size
                    mpp = self.mpp(dataset)
        if not math.prod(size):
            role = "other"
            rule = "it has no pixels"
        return Picture(
            number=number,
            name=name,
            role=role,
            rule=rule,
            size=size,
            mpp=mpp,
            levels=(PictureLevel(size=size, downsample=1.0, mpp=mpp),),
        )

    def levels(self) -> tuple[list[StatedLevel], list[zarr.Array]]:
        """Returns the levels, finest first, with the scales that they state, and their arrays.

        If a level states no scale, or an impossible one, its scale comes from its size in pixels.

        Raises:
            ChannelsError: planes differ in more than the channel.
            SlideOpenError: a level is missing or damaged, or the levels are not a pyramid.
        """
        datasets = self.multiscale["datasets"]
        if not datasets:
            raise SlideOpenError("zarr: an image must have levels, got none")
        pairs = [(self._sound_array(str(each["path"])), each) for each in datasets]
        pairs.sort(key=lambda pair: -math.prod(self.size(pair[0])))
        arrays = [array for array, _ in pairs]
        sizes = [self.size(array) for array in arrays]
        areas = [math.prod(size) for size in sizes]
        shrinks = all(larger > smaller for larger, smaller in pairwise(areas))
        if len({self.length(array, "c") for array in arrays}) != 1 or not shrinks:
            raise SlideOpenError(
                f"zarr: levels must shrink and keep their channels, got {sizes}"
            )
        finest = pairs[0][1]
        levels: list[StatedLevel] = []
        for array, dataset in pairs:
            size = self.size(array)
            # a chunk may be declared larger than its level
            width, height = (
                min(array.chunks[self.axes.index(axis)], px)
                for axis, px in zip("xy", size)
            )
            level = state_level(
                str(dataset["path"]),
                size,
                (int(width), int(height)),
                stated=scale_ratio(self.scale(dataset), self.scale(finest)),
                finer=levels,
            )
            if levels and self.is_shifted(finest, dataset, level.scale):
                level = replace(level, is_shifted=True)
            levels.append(level)
        return levels, arrays

    def _sound_array(self, name: str) -> zarr.Array:
        """Returns the array of a level, after checks of its axes and sizes."""
        array = self.group[name]
        axes = self.axes
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
                f"zarr: chunks must have <= 128 MiB, got {chunk_bytes >> 20} MiB in level "
                f"{name!r}; write it with smaller chunks"
            )
        depths = {axis: self.length(array, axis) for axis in "zt"}
        planes = ", ".join(
            f"{depth} along {axis.upper()}"
            for axis, depth in depths.items()
            if depth > 1
        )
        if planes:
            raise ChannelsError(
                f"planes must differ by channel only, got {planes}; split the file"
            )
        return array


def _read_images(path: str) -> tuple[list[_ZarrImage], list[Picture]]:
    """Returns the images of a folder or URL; only the finest level of each image is read.

    Raises:
        SlideOpenError: there is no image, or the folder is a plate of many images.
    """
    store = path
    if is_url(path):
        store = zarr.storage.FsspecStore.from_url(whole_url(path), read_only=True)
    try:
        root = zarr.open_group(store, mode="r")
    except FileNotFoundError:
        raise SlideOpenError(
            "zarr: not a zarr folder, because its metadata are missing"
        ) from None
    metadata = _metadata(root)
    _refuse_plate(metadata)
    groups = [("", root)]
    if "multiscales" not in metadata:
        groups = list(_series(root, metadata))
    images: list[_ZarrImage] = []
    pictures: list[Picture] = []
    for series_name, group in groups:
        own = _metadata(group)
        multiscales = own.get("multiscales") or []
        for multiscale in multiscales:
            version = own.get("version") or multiscale.get("version")
            if version is not None and not _VERSION.match(str(version)):
                raise SlideOpenError(
                    f"zarr: OME-Zarr must be of version {_VERSIONS}, got {version!r}"
                )
            name = str(multiscale.get("name") or "")
            if len(multiscales) == 1 and (series_name or name in ("", "/")):
                name = series_name
            if "axes" not in multiscale:
                raise SlideOpenError(
                    f"zarr: an image must name its axes, as OME-Zarr {_VERSIONS} does; write it "
                    "again"
                )
            image = _ZarrImage(
                group=group,
                multiscale=multiscale,
                omero=own.get("omero") or {},
                axes="".join(str(axis["name"]) for axis in multiscale["axes"]),
            )
            images.append(image)
            pictures.append(image.picture(len(images), name))
    if not images:
        raise SlideOpenError(
            "zarr: not an OME-Zarr image, because its metadata have no 'multiscales'"
        )
    return images, pictures


def _metadata(group: zarr.Group) -> Document:
    """Returns OME's metadata of a group, which version 0.5 stores below the key 'ome'."""
    metadata: Document = group.attrs.get("ome", group.attrs)
    return metadata


def _refuse_plate(metadata: Document) -> None:
    """Refuses a plate or well of a high-content screen."""
    if "plate" in metadata:
        plate = metadata["plate"]
        wells = plate.get("wells") or [{}]
        name = plate.get("name", "")
        first = f"{wells[0].get('path', 'A/1')}/0"
        raise SlideOpenError(
            f"zarr: a plate {name!r} of {len(wells)} wells is not a slide; pass one of its images, "
            f"such as {first!r} in this folder"
        )
    if "well" in metadata:
        fields = metadata["well"].get("images") or [{}]
        raise SlideOpenError(
            f"zarr: a well with {len(fields)} images is not a slide; pass one of its images, such "
            f"as {str(fields[0].get('path', '0'))!r} in this folder"
        )


def _series(root: zarr.Group, metadata: Document) -> Iterator[tuple[str, zarr.Group]]:
    """Yields name and group of each series of bioformats2raw's layout."""
    if "bioformats2raw.layout" not in metadata:
        return
    listed: list[str] = []
    ome = root.get("OME")
    if isinstance(ome, zarr.Group):
        listed = [str(path) for path in _metadata(ome).get("series") or ()]
    # without a list, series are named 0, 1, 2, ...
    paths = listed[:_MAX_SERIES] or [str(number) for number in range(_MAX_SERIES)]
    for path, name in zip(paths, chain(_image_names(root), repeat(""))):
        group = root.get(path)
        if isinstance(group, zarr.Group):
            yield name, group
        elif listed:
            raise SlideOpenError(
                f"zarr: series must be in the folder, got none at {path!r}; copy it again"
            )
        else:
            return


def _image_names(root: zarr.Group) -> list[str]:
    """Returns the names of the images in the layout's OME-XML, in the order of the series."""
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    key = f"{root.path}/{_OME_XML}".lstrip("/")
    data = sync(root.store.get(key, default_buffer_prototype()))
    if data is None or len(data) > _MAX_XML_BYTES:
        return []
    text = data.to_bytes().decode("utf-8", errors="replace")
    return [html.unescape(match[1] or "") for match in _IMAGE_NAME.finditer(text)]


def missing_chunks_note(name: str, array: zarr.Array) -> str:
    """Returns a note on chunks that are missing in a local folder; '' if none is missing.

    Arrays with very many chunks are not checked: 16,384 files take about 30 ms.
    """
    store = array.store
    stored_shape = array.shards or array.chunks
    expected = math.prod(-(-n // step) for n, step in zip(array.shape, stored_shape))
    if not isinstance(store, zarr.storage.LocalStore) or expected > _MAX_LISTED:
        return ""
    num_stored = 0
    for _, _, files in os.walk(Path(store.root, array.path)):
        num_stored += sum(not name.startswith(_NO_CHUNKS) for name in files)
    if num_stored >= expected:
        return ""
    return (
        f"level {name!r} lacks {expected - num_stored} of {expected} chunks; they show the "
        f"fill value {array.fill_value}"
    )


class _ChunkDecoder(ScaledDecoder):
    """Decoder for the chunks of a level: RGB, gray or the picked channels.

    Memory: all chunks at one position.

    Attributes:
        picked: numbers of the picked channels; empty for RGB or gray.
    """

    def __init__(
        self, level: Level, array: zarr.Array, axes: str, picked: Sequence[int]
    ) -> None:
        super().__init__(level, array.name)
        self.picked = picked
        self._array = array
        self._axes = axes

    def _decode_one(self, index: int, out: RgbArray) -> None:
        if self.picked:
            super()._decode_one(index, out)
            return
        chunk = self._read(index, slice(None))
        out[: chunk.shape[0], : chunk.shape[1]] = chunk

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


class ZarrSlide(StatedSlide):
    """An OME-Zarr image in a folder or at a URL. Thread-safe.

    Memory: `segments.cache_bytes`, and for each reading thread the chunks at one position, stored
    and decoded. Slides with a chunk over 128 MiB are refused.
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
        images, pictures = _read_images(path)
        picture = choose_picture(pictures, image, slide_path=path)
        shown = images[picture.number - 1]
        stated, self._arrays = shown.levels()
        num_channels = shown.length(self._arrays[0], "c")
        channels = _channels(shown.omero, num_channels, self._arrays[0].dtype)
        picks = look.channels if look else ()
        if channels is not None and not picks:
            raise unpicked_channels_error(channels, path)
        if channels is None and picks:
            raise SlideOpenError(
                "zarr: an RGB or gray picture of 8 bits has no channels to choose; leave out "
                "channels=..."
            )
        self._axes = shown.axes
        self._picked = [] if channels is None else [channels.index(n) for n in picks]
        super().__init__(
            path,
            [each.level for each in stated],
            slide_mpp=slide_mpp or picture.mpp,
            properties={"ome.Name": picture.name, "ome.Axes": shown.axes},
        )
        stamps = None
        if not is_url(path):  # stamps of the metadata file
            each_stamps = [slide_stamps(f"{path}/{name}") for name in _METADATA_FILES]
            stamps = next(filter(None, each_stamps), None)
        # comparing levels at a URL costs requests, so it is done only if a scale is in doubt
        is_doubtful = any(each.by_size is not None for each in stated)
        compares = len(stated) > 1 and (is_doubtful or not is_url(path))
        settled, notes = self._read_stated(
            stated, picture.number, stamps, compares=compares
        )
        for each in settled:
            notes.append(missing_chunks_note(each.name, self._arrays[each.number]))
        notes = [*picture_notes(pictures, picture, image), *filter(None, notes)]
        if channels is not None and look is not None:
            names = [channels.names[number] for number in self._picked]
            self.rendering = scale_channels(
                cast("list[ScaledDecoder]", self._decoders), names, look
            )
        elif num_channels == 1:
            notes.append(GRAY)
        self.notes = tuple(notes)
        levels = []
        for level in self.levels:
            mpp = None
            if self.slide_mpp is not None:
                x_mpp, y_mpp = self.slide_mpp
                mpp = (x_mpp * level.downsample, y_mpp * level.downsample)
            levels.append(
                PictureLevel(size=level.size, downsample=level.downsample, mpp=mpp)
            )
        self.picture = replace(picture, levels=tuple(levels))
        pictures[picture.number - 1] = self.picture
        self.pictures = tuple(pictures)

    def _decoder(self, stated: StatedLevel) -> _ChunkDecoder:
        array = self._arrays[stated.number]
        return _ChunkDecoder(stated.level, array, self._axes, self._picked)


def _channels(
    omero: Document, count: int, dtype: np.dtype[np.generic]
) -> Channels | None:
    """Returns the channels of an image; None if it is an RGB or gray picture with 8 bits."""
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

    The forms are 'FF0000', '#ff0000' and 'F00', also with alpha at either end, and OME-XML's RGBA
    number, which may be negative.
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
