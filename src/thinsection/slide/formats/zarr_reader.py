"""OME-Zarr 0.4 and 0.5: a folder of chunks, local or by URL, read chunk by chunk.

Source: https://ngff.openmicroscopy.org/0.5/ (`multiscales`, `omero`,
`bioformats2raw.layout`, `plate`).
"""

import html
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray

from thinsection.errors import ChannelsError, SlideOpenError
from thinsection.files.urls import is_url, whole_url
from thinsection.slide.base import GRAY
from thinsection.slide.formats.channels import ScaledDecoder, Values, scale_channels
from thinsection.slide.formats.segments import MAX_SEGMENT_BYTES, SegmentedSlide
from thinsection.slide.formats.stated_levels import (
    Scale,
    StatedLevel,
    judge_stated_levels,
    settle_levels,
    state_level,
)
from thinsection.slide.geometry import positive_number, um_per_unit
from thinsection.slide.level_check import LevelVerdict, slide_stamps
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
from thinsection.weights.stamps import Stamps

_VERSION = re.compile(r"0\.[45]([.-]|$)")  # drafts of programs too: 0.4-dev-spatialdata
_VERSIONS = "0.4 or 0.5"
_MAX_SERIES = 10_000
_OME_XML = "OME/METADATA.ome.xml"
_MAX_XML_BYTES = 1 << 24
_IMAGE_NAME = re.compile(r"<(?:\w+:)?Image\b(?:[^>]*?\bName=\"([^\"]*)\")?", re.DOTALL)
_NO_CHUNKS = (".z", "zarr.json", ".DS_Store")
_MAX_LISTED = 1 << 14  # chunks of a level


@dataclass(frozen=True, kw_only=True)
class ZarrImage:
    """One multiscale image of an OME-Zarr.

    Attributes:
        picture: what the inventory says of it.
        group: the group that holds its arrays.
        multiscale: its metadata.
        omero: how its channels are painted; {} where nothing is said.
    """

    picture: Picture
    group: zarr.Group
    multiscale: Document
    omero: Document

    @property
    def axes(self) -> str:
        """Names of its axes, a letter each, in the order of its arrays."""
        return _axes(self.multiscale)


@dataclass(frozen=True, kw_only=True)
class ZarrLevels:
    """Levels of an image as its metadata state them, finest first, with the array of each."""

    stated: list[StatedLevel]
    arrays: list[zarr.Array]


def read_images(path: str) -> list[ZarrImage]:
    """Returns the images of a folder or URL; of each only the finest level is looked at.

    Raises:
        SlideOpenError: there is no image, or it is a plate of many.
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
    images: list[ZarrImage] = []
    for name, group in groups:
        images.extend(_images_of_group(group, name, len(images)))
    if not images:
        raise SlideOpenError(
            "zarr: not an OME-Zarr image, because its metadata have no 'multiscales'"
        )
    return images


def _metadata(group: zarr.Group) -> Document:
    """Returns what a group says by OME's rules: below 'ome' from version 0.5 on."""
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
    listed = _listed_series(root)
    names = _image_names(root)
    for number in range(_MAX_SERIES):
        if listed and number >= len(listed):
            return
        path = listed[number] if listed else str(number)
        group = root.get(path)
        if not isinstance(group, zarr.Group):
            if not listed:
                return
            raise SlideOpenError(
                f"zarr: series must be in the folder, got none at {path!r}; copy it again"
            )
        yield names[number] if number < len(names) else "", group


def _listed_series(root: zarr.Group) -> list[str]:
    """Returns the paths that the group OME lists; [] where they are numbers from 0."""
    group = root.get("OME")
    if not isinstance(group, zarr.Group):
        return []
    return [str(path) for path in _metadata(group).get("series") or ()]


def _image_names(root: zarr.Group) -> list[str]:
    """Returns the images' names in bioformats2raw's OME-XML, in the order of the series."""
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    key = f"{root.path}/{_OME_XML}".lstrip("/")
    data = sync(root.store.get(key, default_buffer_prototype()))
    if data is None or len(data) > _MAX_XML_BYTES:
        return []
    text = data.to_bytes().decode("utf-8", errors="replace")
    return [html.unescape(match[1] or "") for match in _IMAGE_NAME.finditer(text)]


def _images_of_group(
    group: zarr.Group, series_name: str, num_before: int
) -> Iterator[ZarrImage]:
    """Yields the multiscale images of a group."""
    metadata = _metadata(group)
    multiscales = metadata.get("multiscales") or []
    for place, multiscale in enumerate(multiscales):
        version = metadata.get("version") or multiscale.get("version")
        if version is not None and not _VERSION.match(str(version)):
            raise SlideOpenError(
                f"zarr: OME-Zarr must be of version {_VERSIONS}, got {version!r}"
            )
        own_name = str(multiscale.get("name") or "")
        if len(multiscales) == 1 and (series_name or own_name in ("", "/")):
            own_name = series_name
        number = num_before + place + 1
        yield ZarrImage(
            picture=_picture(group, multiscale, number, own_name),
            group=group,
            multiscale=multiscale,
            omero=metadata.get("omero") or {},
        )


def _picture(
    group: zarr.Group, multiscale: Document, number: int, name: str
) -> Picture:
    """Returns what the inventory says of an image, by its name and its finest level."""
    axes = _axes(multiscale)
    datasets = multiscale["datasets"]
    role: Role = role_of_name(name) or "slide"
    rule = "no macro, label or thumbnail by its name"
    if role != "slide":
        rule = "by its name"
    size = (0, 0)
    mpp = None
    # the finest level stands first by the format; some programs write it last
    for dataset in (datasets[0], datasets[-1]) if datasets else ():
        array = group.get(str(dataset["path"]))
        if not isinstance(array, zarr.Array) or not {"x", "y"} <= set(axes):
            continue
        if array.ndim != len(axes):
            continue
        own_size = _size(array, axes)
        if math.prod(own_size) > math.prod(size):
            size = own_size
            mpp = _find_mpp(multiscale, dataset)
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


def read_levels(image: ZarrImage) -> ZarrLevels:
    """Returns the levels of an image, finest first, each at the scale that it states.

    A level without a scale, or with one that cannot be, is as fine as its size says.

    Raises:
        ChannelsError: planes differ by more than the channel.
        SlideOpenError: a level is missing or damaged, or they are no pyramid.
    """
    axes = image.axes
    datasets = image.multiscale["datasets"]
    if not datasets:
        raise SlideOpenError("zarr: an image must have levels, got none")
    arrays = [_sound_array(image.group, str(each["path"]), axes) for each in datasets]
    pairs = list(zip(arrays, datasets, strict=True))
    pairs.sort(key=lambda pair: -math.prod(_size(pair[0], axes)))
    sizes = [_size(array, axes) for array, _ in pairs]
    _refuse_no_pyramid([array for array, _ in pairs], sizes, axes)
    finest = _scale(image.multiscale, pairs[0][1])
    levels: list[StatedLevel] = []
    for size, (array, dataset) in zip(sizes, pairs):
        level = state_level(
            str(dataset["path"]),
            size,
            _chunk_size(array, axes, size),
            stated=_ratio(_scale(image.multiscale, dataset), finest),
            finer=levels,
        )
        if levels and _is_shifted(pairs[0][1], dataset, axes, level.scale):
            level = replace(level, is_shifted=True)
        levels.append(level)
    return ZarrLevels(stated=levels, arrays=[array for array, _ in pairs])


def _refuse_no_pyramid(
    arrays: Sequence[zarr.Array], sizes: Sequence[Size], axes: str
) -> None:
    """Refuses levels of one size, or of several numbers of channels."""
    areas = [math.prod(size) for size in sizes]
    channel_counts = {length(array, axes, "c") for array in arrays}
    shrinks = all(larger > smaller for larger, smaller in pairwise(areas))
    if len(channel_counts) != 1 or not shrinks:
        raise SlideOpenError(
            f"zarr: levels must shrink and keep their channels, got {sizes}"
        )


def _axes(multiscale: Document) -> str:
    if "axes" not in multiscale:
        raise SlideOpenError(
            f"zarr: an image must name its axes, as OME-Zarr {_VERSIONS} does; write it again"
        )
    return "".join(str(axis["name"]) for axis in multiscale["axes"])


def length(array: zarr.Array, axes: str, axis: str) -> int:
    """Returns the length along an axis; 1 where there is none of that name."""
    return int(array.shape[axes.index(axis)]) if axis in axes else 1


def _size(array: zarr.Array, axes: str) -> Size:
    """Returns (width, height), px."""
    return (length(array, axes, "x"), length(array, axes, "y"))


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
    depths = {axis: length(array, axes, axis) for axis in "zt"}
    planes = ", ".join(
        f"{depth} along {axis.upper()}" for axis, depth in depths.items() if depth > 1
    )
    if planes:
        raise ChannelsError(
            f"planes must differ by channel only, got {planes}; split the file"
        )
    return array


def _chunk_size(array: zarr.Array, axes: str, size: Size) -> Size:
    """Returns (width, height) of a chunk, which may be declared larger than its level."""
    width = int(array.chunks[axes.index("x")])
    height = int(array.chunks[axes.index("y")])
    return (min(width, size[0]), min(height, size[1]))


def _scale(multiscale: Document, dataset: Document) -> Scale | None:
    """Returns units per px of a level; None where none is stated, or it is no number.

    The scales of the image and of the level apply one after the other.
    """
    axes = _axes(multiscale)
    product = [1.0, 1.0]
    has_scale = False
    for part in (multiscale, dataset):
        for step in part.get("coordinateTransformations") or ():
            if step["type"] != "scale":
                continue
            has_scale = True
            for place, axis in enumerate("xy"):
                product[place] *= float(step["scale"][axes.index(axis)])
    if not has_scale or not all(0 < value < math.inf for value in product):
        return None
    return (product[0], product[1])


def _is_shifted(finest: Document, dataset: Document, axes: str, scale: Scale) -> bool:
    """Tells whether a level begins more than one of its pixels away from level 0.

    Programs that place a pixel by its centre shift a level by less than that.
    """
    px = _step(finest, "scale", axes) or (1.0, 1.0)
    origin = _step(finest, "translation", axes) or (0.0, 0.0)
    own_origin = _step(dataset, "translation", axes) or origin
    return any(
        abs(own - first) > one_px * down
        for own, first, one_px, down in zip(own_origin, origin, px, scale)
    )


def _step(dataset: Document, kind: str, axes: str) -> Scale | None:
    """Returns a level's own scale or translation along x and y; None without one."""
    for step in dataset.get("coordinateTransformations") or ():
        if step["type"] == kind:
            values = step[kind]
            return (float(values[axes.index("x")]), float(values[axes.index("y")]))
    return None


def _ratio(scale: Scale | None, finest: Scale | None) -> Scale | None:
    """Returns level-0 px per px of a level; None where one of the scales is not stated."""
    if scale is None or finest is None:
        return None
    return (scale[0] / finest[0], scale[1] / finest[1])


def _find_mpp(multiscale: Document, dataset: Document) -> Mpp | None:
    """Returns µm per px of a level; None where a unit or a scale is missing."""
    scale = _scale(multiscale, dataset)
    if scale is None:
        return None
    axes = _axes(multiscale)
    sides = []
    for place, axis in enumerate("xy"):
        unit = multiscale["axes"][axes.index(axis)].get("unit")
        um = um_per_unit(unit if isinstance(unit, str) else None)
        side = positive_number(str(scale[place] * um)) if um else None
        if side is None:
            return None
        sides.append(side)
    return (sides[0], sides[1])


def missing_chunks_note(name: str, array: zarr.Array) -> str:
    """Returns a note on chunks that a local folder does not have; '' where it has all.

    An array of very many chunks is not looked at: 16,384 files take about 30 ms.
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
