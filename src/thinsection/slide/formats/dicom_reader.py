"""Reader for DICOM slides with pydicom and imagecodecs: all planes, paths and common syntaxes.

For the inventory, only the elements before those of single frames are read.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.errors import SlideOpenError
from thinsection.slide.base import GRAY, WHITE
from thinsection.slide.dicom_series import (
    SHARED_GROUPS,
    DicomFile,
    check_one_slide,
    files_of_slide,
    read_elements,
)
from thinsection.slide.formats.dicom_frames import (
    JPEG_2000,
    SYNTAXES,
    DicomFrames,
    FrameFormat,
)
from thinsection.slide.formats.segments import (
    MAX_SEGMENT_BYTES,
    Decoder,
)
from thinsection.slide.formats.stated_levels import (
    StatedLevel,
    StatedSlide,
    scale_ratio,
    state_level,
)
from thinsection.slide.geometry import positive_number
from thinsection.slide.level_check import slide_stamps
from thinsection.slide.pictures import (
    ACCOMPANYING,
    Picture,
    PictureLevel,
    Role,
    choose_picture,
    picture_notes,
)
from thinsection.types import Level, Mpp, RgbArray, Size

_MAX_FRAMES = 1 << 24
_VOLUME = "VOLUME"
_ASSOCIATED: Mapping[str, Role] = {
    "LABEL": "label",
    "OVERVIEW": "macro",
    "THUMBNAIL": "thumbnail",
}
_PIXEL_DATA = 0x7FE00008
_PER_FRAME = ("PerFrameFunctionalGroupsSequence",)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One file of a slide: a level, or a part of a level.

    Attributes:
        path: the file.
        uid: its SOPInstanceUID; '' if it has none.
        flavor: third word of its image type.
        size: (width, height) of the whole image, px.
        frames: its frames.
        is_full: True if all frames of the grid are stored, in the order of the grid.
        first_frame: number of frames in earlier parts of the image.
        whole: key that all parts of one image share; the file's own name if it is a whole image.
        mpp: (x, y) µm/px, or None.
        paths: identifiers of its optical paths.
        num_planes: number of its focal planes.
        pyramid: PyramidUID; '' if it has none.
        order: position among the files of the series.
        objective_power: nominal magnification, or None.
    """

    path: Path
    uid: str
    flavor: str
    size: Size
    frames: DicomFrames
    is_full: bool
    first_frame: int
    whole: str
    mpp: Mpp | None
    paths: tuple[str, ...]
    num_planes: int
    pyramid: str
    order: int
    objective_power: float | None


@dataclass(frozen=True, kw_only=True)
class _LevelParts:
    """One level of a picture: its parts, and the optical path and focal plane to read from them."""

    parts: tuple[_Part, ...]
    path: int = 0
    plane: int = 0


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One picture of a slide, with its levels, finest first."""

    picture: Picture
    levels: list[_LevelParts]


def _read_layers(path: str) -> tuple[list[_Layer], list[str]]:
    """Reads the headers of all files of the slide that a file belongs to.

    Returns the slide's pictures, and notes on files that are left out.

    Raises:
        SlideOpenError: not a DICOM slide, or its files are of two patients or glasses.
    """
    files = files_of_slide(path)
    if not files:
        read_elements(Path(path), (), before=SHARED_GROUPS)  # raises the reason
        raise SlideOpenError("dicom: not a DICOM slide")
    check_one_slide(files)
    left_out: list[str] = []
    parts: dict[str, _Part] = {}
    # if files have the same UID, the requested file is used
    by_preference = sorted(
        enumerate(files), key=lambda item: item[1].path.name != Path(path).name
    )
    for order, file in by_preference:
        try:
            part = _read_part(file, order)
        except SlideOpenError as error:
            left_out.append(f"{file.path.name} ({str(error).removeprefix('dicom: ')})")
            continue
        first = parts.setdefault(part.uid or file.path.name, part)
        if first is not part:
            left_out.append(
                f"{file.path.name} (has the SOPInstanceUID of {first.path.name})"
            )
    by_whole: dict[str, list[_Part]] = {}
    for part in parts.values():
        by_whole.setdefault(part.whole, []).append(part)
    # the parts of each image in the order of their frames; the largest image first
    images = [
        tuple(sorted(each, key=lambda part: part.first_frame))
        for each in by_whole.values()
    ]
    images.sort(key=lambda image: (-math.prod(image[0].size), image[0].order))
    volumes = [image for image in images if image[0].flavor == _VOLUME]
    layers: list[_Layer] = []
    pyramids = list(dict.fromkeys(image[0].pyramid for image in volumes))
    for number, pyramid in enumerate(pyramids, start=1):
        own = [image for image in volumes if image[0].pyramid == pyramid]
        layers += _volume_layers(own, f"pyramid {number}" if len(pyramids) > 1 else "")
    if not layers:
        reasons = "; ".join(left_out) or "none is of image type VOLUME"
        raise SlideOpenError(f"dicom: no file of the slide can be shown: {reasons}")
    roles = set()
    for image in images:
        flavor = image[0].flavor
        role = _ASSOCIATED.get(flavor)
        if role is not None and role not in roles:
            roles.add(role)
            rule = f"image type {flavor}"
            layers.append(_layer(role, role, rule, [_LevelParts(parts=image)]))
        elif flavor != _VOLUME:
            for part in image:
                left_out.append(f"{part.path.name} (image type {flavor or 'none'})")
    notes = []
    if left_out:
        notes.append(
            f"{len(left_out)} of {len(files)} files of the series are left out: "
            f"{', '.join(left_out)}"
        )
    numbered = [
        replace(layer, picture=replace(layer.picture, number=number))
        for number, layer in enumerate(layers, start=1)
    ]
    return numbered, notes


def _read_part(file: DicomFile, order: int) -> _Part:
    """Reads the header of one file.

    Raises:
        SlideOpenError: the file is damaged, or of a kind that this reader leaves out.
    """
    # the shared groups stand just before the groups of each frame
    elements = read_elements(file.path, before=SHARED_GROUPS + 1)
    dataset = elements.dataset
    tile = (int(dataset.Columns), int(dataset.Rows))
    if min(tile) < 1 or math.prod(tile) * 3 > MAX_SEGMENT_BYTES:
        raise SlideOpenError(
            f"dicom: a frame must have >= 1 px a side and <= {MAX_SEGMENT_BYTES >> 20} MiB, got "
            f"{tile} px in {file.path.name!r}"
        )
    form = FrameFormat(
        syntax=elements.syntax,
        size=tile,
        samples=int(dataset.SamplesPerPixel),
        photometric=str(dataset.PhotometricInterpretation),
        is_planar=bool(int(dataset.get("PlanarConfiguration") or 0)),
    )
    bits = int(dataset.BitsAllocated)
    is_gray = form.samples == 1 and form.photometric == "MONOCHROME2"
    is_colour = form.samples == 3 and form.photometric.startswith(("RGB", "YBR_"))
    fault = ""
    if form.syntax not in SYNTAXES:
        fault = f"transfer syntax {form.syntax}"
    elif bits != 8:
        fault = f"{bits} bits"
    elif not (is_gray or is_colour):
        fault = f"{form.samples} samples of {form.photometric}"
    if fault:
        raise SlideOpenError(f"dicom: {fault} is not supported")
    size = (
        int(dataset.get("TotalPixelMatrixColumns") or tile[0]),
        int(dataset.get("TotalPixelMatrixRows") or tile[1]),
    )
    num_frames = int(dataset.get("NumberOfFrames") or 1)
    if not 0 < num_frames <= _MAX_FRAMES or min(size) < 1:
        raise SlideOpenError(
            f"dicom: {num_frames} frames of {size} px; the file is damaged"
        )
    organization = str(dataset.get("DimensionOrganizationType") or "")
    optical_paths = dataset.get("OpticalPathSequence") or ()
    powers = (
        positive_number(str(each.get("ObjectiveLensPower") or ""))
        for each in optical_paths
    )
    return _Part(
        path=file.path,
        uid=str(dataset.get("SOPInstanceUID") or ""),
        flavor=file.flavor,
        size=size,
        frames=DicomFrames(file.path, form, num_frames),
        is_full=organization == "TILED_FULL" or num_frames == 1,
        first_frame=int(dataset.get("ConcatenationFrameOffsetNumber") or 0),
        whole=str(dataset.get("ConcatenationUID") or "") or file.path.name,
        mpp=_find_mpp(dataset, size),
        paths=tuple(
            str(each.get("OpticalPathIdentifier", "")) for each in optical_paths
        )
        or ("",),
        num_planes=max(1, int(dataset.get("TotalPixelMatrixFocalPlanes") or 1)),
        pyramid=str(dataset.get("PyramidUID") or ""),
        order=order,
        objective_power=next(filter(None, powers), None),
    )


def _find_mpp(dataset: Any, size: Size) -> Mpp | None:
    """Returns µm/px from PixelSpacing (mm along y and x), else from the size of the volume."""
    for group in dataset.get("SharedFunctionalGroupsSequence") or ():
        for measures in group.get("PixelMeasuresSequence") or ():
            spacing = measures.get("PixelSpacing")
            if spacing and len(spacing) == 2:
                y_mm, x_mm = (positive_number(str(value)) for value in spacing)
                if x_mm and y_mm:
                    return (x_mm * 1e3, y_mm * 1e3)
    x_mm = positive_number(str(dataset.get("ImagedVolumeWidth") or ""))
    y_mm = positive_number(str(dataset.get("ImagedVolumeHeight") or ""))
    if x_mm and y_mm:
        return (x_mm * 1e3 / size[0], y_mm * 1e3 / size[1])
    return None


def _volume_layers(images: Sequence[tuple[_Part, ...]], prefix: str) -> list[_Layer]:
    """Returns the pictures of a pyramid, from its images, largest first.

    The first focal plane of the first optical path is the slide. Images with the same size and path
    are different focal planes.
    """
    levels: dict[tuple[str, int], dict[Size, _LevelParts]] = {}
    num_of_size: Counter[tuple[Size, str]] = Counter()
    for image in images:
        size = image[0].size
        for path_place, path in enumerate(image[0].paths):
            before = num_of_size[size, path]
            num_of_size[size, path] += image[0].num_planes
            for plane in range(image[0].num_planes):
                level = _LevelParts(parts=image, path=path_place, plane=plane)
                levels.setdefault((path, before + plane), {})[size] = level
    first_path = images[0][0].paths[0]
    layers = []
    for (path, plane), by_size in levels.items():
        words = [prefix] if prefix else []
        role: Role = "slide"
        rule = "image type VOLUME"
        if path != first_path:
            words.append(f"path {path}")
            role = "path"
            rule = "a further optical path"
        if plane:
            words.append(f"plane {plane + 1}")
            role = "plane"
            rule = "a further focal plane"
        finest_first = [
            by_size[size] for size in sorted(by_size, key=math.prod, reverse=True)
        ]
        layers.append(_layer(role, ", ".join(words), rule, finest_first))
    return sorted(layers, key=lambda layer: layer.picture.role != "slide")


def _layer(role: Role, name: str, rule: str, levels: list[_LevelParts]) -> _Layer:
    firsts = [level.parts[0] for level in levels]
    picture = Picture(
        number=0,
        name=name,
        role=role,
        rule=rule,
        size=firsts[0].size,
        mpp=firsts[0].mpp,
        levels=tuple(PictureLevel(size=each.size, mpp=each.mpp) for each in firsts),
    )
    return _Layer(picture=picture, levels=levels)


# a part and the number of a frame in it
_Place = tuple[_Part, int]


class _FrameDecoder(Decoder):
    """Decoder for the frames of a level, for one plane of one path. Memory: one frame."""

    def __init__(self, level: Level, source: _LevelParts, name: str) -> None:
        super().__init__(level, name, stored=source.parts[0].size)
        self._source = source
        self._lock = threading.Lock()
        self._places: Mapping[int, _Place] | None = None
        form = source.parts[0].frames.form
        self.slow = form.syntax in JPEG_2000
        # according to the headers; the list of frames, read later, shows which are missing
        self.sparse = not all(part.is_full for part in source.parts)

    def is_empty(self, index: int) -> bool:
        """See `Decoder.is_empty`."""
        return self.sparse and index not in self._listed_places()

    def _decode_one(self, index: int, out: RgbArray) -> None:
        place: _Place | None = None
        if self.sparse:
            place = self._listed_places().get(index)
        else:
            first = self._source.parts[0]
            layer = self._source.path * first.num_planes + self._source.plane
            number = layer * self.columns * self.rows + index
            for part in self._source.parts:
                own = number - part.first_frame
                if place is None and 0 <= own < part.frames.num_frames:
                    place = (part, own)
        if place is None:
            raise self._error(index, "no such frame")
        part, frame = place
        out[:] = part.frames.read(frame)  # gray is copied to all three channels

    def _listed_places(self) -> Mapping[int, _Place]:
        """Returns the frames that the files list, by their position in the grid."""
        with self._lock:
            if self._places is None:
                self._places = self._read_places()
            return self._places

    def _read_places(self) -> dict[int, _Place]:
        wanted_path = self._source.parts[0].paths[self._source.path]
        # a scanner may state a different height for each frame of one plane
        has_planes = self._source.parts[0].num_planes > 1
        heights = set()
        rows = []  # (z, x, y, place) of each frame of the path
        for part in self._source.parts:
            dataset = read_elements(part.path, _PER_FRAME, before=_PIXEL_DATA).dataset
            groups = dataset.get("PerFrameFunctionalGroupsSequence") or ()
            for frame, group in enumerate(groups):
                position = group.PlanePositionSlideSequence[0]
                x = int(position.ColumnPositionInTotalImagePixelMatrix) - 1
                y = int(position.RowPositionInTotalImagePixelMatrix) - 1
                z = float(position.get("ZOffsetInSlideCoordinateSystem") or 0)
                paths = group.get("OpticalPathIdentificationSequence")
                path = paths[0].OpticalPathIdentifier if paths else part.paths[0]
                heights.add(z)
                if str(path) == wanted_path:
                    rows.append((z, x, y, (part, frame)))
        if not heights:
            raise self._error(0, "no places of the frames")
        planes = sorted(heights)
        places: dict[int, _Place] = {}
        for z, x, y, place in rows:
            if has_planes and planes.index(z) != self._source.plane:
                continue
            column, x_rest = divmod(x, self.segment[0])
            row, y_rest = divmod(y, self.segment[1])
            if x_rest or y_rest or not 0 <= column < self.columns:
                raise self._error(0, f"a frame at {x}, {y}, outside of the tile grid")
            places.setdefault(self.index(column, row), place)
        return places


class DicomSlide(StatedSlide):
    """A DICOM slide of many files. Thread-safe.

    Memory: `segments.cache_bytes`, a stored and a decoded frame for each reading thread, and 16
        bytes for each frame of a level that was read, or about 500 if frames are in sparse order.
    """

    reader = "dicom"

    def __init__(
        self, path: str, *, slide_mpp: Mpp | None = None, image: str | None = None
    ) -> None:
        layers, notes = _read_layers(path)
        pictures = [layer.picture for layer in layers]
        picture = choose_picture(pictures, image, slide_path=path)
        self._sources = layers[picture.number - 1].levels
        stated: list[StatedLevel] = []
        for source in self._sources:
            part = source.parts[0]
            stated.append(
                state_level(
                    part.path.name,
                    part.size,
                    part.frames.form.size,
                    stated=scale_ratio(part.mpp, picture.mpp),
                    finer=stated,
                )
            )
        first = self._sources[0].parts[0]
        form = first.frames.form
        super().__init__(
            path,
            [each.level for each in stated],
            slide_mpp=slide_mpp or picture.mpp,
            objective_power=first.objective_power,
            vendor="dicom",
            properties={
                "dicom.TransferSyntaxUID": form.syntax,
                "dicom.PhotometricInterpretation": form.photometric,
            },
        )
        self._associated_parts = {
            layer.picture.name: layer.levels[0]
            for layer in layers
            if layer.picture.role in ACCOMPANYING
        }
        self.associated_names = tuple(sorted(self._associated_parts))
        for source in (*self._sources, *self._associated_parts.values()):
            for part in source.parts:
                self.on_close.callback(part.frames.close)
        stamps = slide_stamps(str(first.path))
        settled, level_notes = self._read_stated(stated, picture.number, stamps)
        levels = tuple(
            replace(picture.levels[each.number], downsample=each.level.downsample)
            for each in settled
        )
        self.picture = replace(picture, levels=levels)
        pictures[picture.number - 1] = self.picture
        self.pictures = tuple(pictures)
        gray = [GRAY] if form.samples == 1 else []
        shown = picture_notes(pictures, picture, image)
        self.notes = (*shown, *notes, *level_notes, *gray)

    def _decoder(self, stated: StatedLevel) -> _FrameDecoder:
        source = self._sources[stated.number]
        return _FrameDecoder(stated.level, source, self.slide_path)

    def _associated(self, name: str) -> RgbArray:
        source = self._associated_parts[name]
        width, height = source.parts[0].size
        segment = source.parts[0].frames.form.size
        level = Level(index=0, size=(width, height), downsample=1.0, segment=segment)
        decoder = _FrameDecoder(level, source, self.slide_path)
        image = np.full((height, width, 3), WHITE, dtype=np.uint8)
        self._assemble(decoder, [(0, 0)], image[None])
        return image
