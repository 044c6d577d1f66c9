"""Reader of DICOM slides by pydicom and imagecodecs: every plane, path and usual syntax.

For the inventory only heads of files are read: what lies before the elements of single frames.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    DicomFrames,
    FrameFormat,
    check_frame_size,
    unsupported,
)
from thinsection.slide.formats.segments import (
    MAX_SEGMENT_BYTES,
    Decoder,
    SegmentedSlide,
)
from thinsection.slide.formats.stated_levels import (
    Scale,
    StatedLevel,
    judge_stated_levels,
    settle_levels,
    state_level,
)
from thinsection.slide.geometry import positive_number
from thinsection.slide.level_check import slide_stamps
from thinsection.slide.pictures import (
    Picture,
    PictureLevel,
    Role,
    choose_picture,
    picture_notes,
)
from thinsection.types import Level, Mpp, RgbArray, Size

_UM_PER_MM = 1e3
_MAX_FRAMES = 1 << 24
_VOLUME = "VOLUME"
_ASSOCIATED: Mapping[str, Role] = {
    "LABEL": "label",
    "OVERVIEW": "macro",
    "THUMBNAIL": "thumbnail",
}


@dataclass(frozen=True, kw_only=True)
class DicomPart:
    """One file of a slide, a level or a part of one.

    Attributes:
        path: the file.
        uid: its SOPInstanceUID; '' without one.
        flavor: third word of its image type.
        size: (width, height) of the whole image, px.
        frames: its frames.
        is_full: True where frames are stored in the order of the grid, none left out.
        first_frame: number of frames in the parts before it.
        whole: what the parts of one image have in common; the file's own name of a whole one.
        mpp: (x, y) µm/px, or None.
        paths: identifiers of its optical paths.
        num_planes: its focal planes.
        pyramid: PyramidUID; '' without one.
        order: place among the files of the series.
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


@dataclass(kw_only=True)
class DicomLayer:
    """Levels of one focal plane and optical path.

    Attributes:
        role: what it is.
        rule: why it is that.
        name: its name.
        levels: by size, the parts of a level with the places of path and plane in them.
    """

    role: Role
    rule: str
    name: str
    levels: dict[Size, LayerLevel] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LayerLevel:
    """One level of a layer: its parts, and which path and plane of them it is."""

    parts: tuple[DicomPart, ...]
    path: int
    plane: int


@dataclass(frozen=True, kw_only=True)
class DicomInventory:
    """What a slide's files hold.

    Attributes:
        layers: layers that may be shown.
        pictures: the layers, then the other images.
        associated: parts of the label, macro and thumbnail, by that name.
        notes: sentences on files that are left out.
        num_files: files of the slide.
    """

    layers: tuple[DicomLayer, ...]
    pictures: tuple[Picture, ...]
    associated: Mapping[str, tuple[DicomPart, ...]]
    notes: tuple[str, ...]
    num_files: int


def read_inventory(path: str) -> DicomInventory:
    """Reads the heads of all files of the slide that a file belongs to.

    Raises:
        SlideOpenError: no DICOM slide, or its files are of two patients or glasses.
    """
    files = files_of_slide(path)
    if not files:
        read_elements(Path(path), (), before=SHARED_GROUPS)  # says why
        raise SlideOpenError("dicom: not a DICOM slide")
    check_one_slide(files)
    left_out: list[str] = []
    parts: dict[str, DicomPart] = {}
    # of copies, the file that is asked for counts
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
    images = _whole_images(parts.values())
    layers: list[DicomLayer] = []
    volumes = [image for image in images if image[0].flavor == _VOLUME]
    pyramids = list(dict.fromkeys(image[0].pyramid for image in volumes))
    for number, pyramid in enumerate(pyramids, start=1):
        own = [image for image in volumes if image[0].pyramid == pyramid]
        prefix = f"pyramid {number}" if len(pyramids) > 1 else ""
        layers += _layers(own, prefix)
    if not layers:
        reasons = "; ".join(left_out) or "none is of image type VOLUME"
        raise SlideOpenError(f"dicom: no file of the slide can be shown: {reasons}")
    associated: dict[str, tuple[DicomPart, ...]] = {}
    for image in images:
        role = _ASSOCIATED.get(image[0].flavor)
        if role is not None and role not in associated:
            associated[role] = image
        elif image[0].flavor != _VOLUME:
            flavor = image[0].flavor or "none"
            for part in image:
                left_out.append(f"{part.path.name} (image type {flavor})")
    notes = []
    if left_out:
        notes.append(
            f"{len(left_out)} of {len(files)} files of the series are left out: "
            f"{', '.join(left_out)}"
        )
    return DicomInventory(
        layers=tuple(layers),
        pictures=_pictures(layers, associated),
        associated=associated,
        notes=tuple(notes),
        num_files=len(files),
    )


def _read_part(file: DicomFile, order: int) -> DicomPart:
    """Reads the head of one file.

    Raises:
        SlideOpenError: it is damaged, or of a kind that is left out here.
    """
    # the shared groups lie just before the groups of each frame
    elements = read_elements(file.path, before=SHARED_GROUPS + 1)
    dataset = elements.dataset
    tile = (int(dataset.Columns), int(dataset.Rows))
    check_frame_size(tile, MAX_SEGMENT_BYTES, file.path.name)
    form = FrameFormat(
        syntax=elements.syntax,
        size=tile,
        samples=int(dataset.SamplesPerPixel),
        photometric=str(dataset.PhotometricInterpretation),
        is_planar=bool(int(dataset.get("PlanarConfiguration") or 0)),
    )
    fault = unsupported(form, int(dataset.BitsAllocated))
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
    concatenation = str(dataset.get("ConcatenationUID") or "")
    paths = tuple(
        str(each.get("OpticalPathIdentifier", ""))
        for each in dataset.get("OpticalPathSequence") or ()
    )
    return DicomPart(
        path=file.path,
        uid=str(dataset.get("SOPInstanceUID") or ""),
        flavor=file.flavor,
        size=size,
        frames=DicomFrames(file.path, form, num_frames),
        is_full=organization == "TILED_FULL" or num_frames == 1,
        first_frame=int(dataset.get("ConcatenationFrameOffsetNumber") or 0),
        whole=concatenation or file.path.name,
        mpp=_find_mpp(dataset, size),
        paths=paths or ("",),
        num_planes=max(1, int(dataset.get("TotalPixelMatrixFocalPlanes") or 1)),
        pyramid=str(dataset.get("PyramidUID") or ""),
        order=order,
        objective_power=_objective_power(dataset),
    )


def _whole_images(parts: Iterable[DicomPart]) -> list[tuple[DicomPart, ...]]:
    """Returns the parts of each image in the order of their frames; the largest image first."""
    by_whole: dict[str, list[DicomPart]] = {}
    for part in parts:
        by_whole.setdefault(part.whole, []).append(part)
    images = []
    for each in by_whole.values():
        each.sort(key=lambda part: part.first_frame)
        images.append(tuple(each))
    images.sort(key=lambda image: (-math.prod(image[0].size), image[0].order))
    return images


def _layers(images: Sequence[tuple[DicomPart, ...]], prefix: str) -> list[DicomLayer]:
    """Returns the layers of a pyramid.

    The first plane of the first path is the slide. Images of one size that are not told apart by
    their path are focal planes.
    """
    layers: dict[tuple[str, int], DicomLayer] = {}
    first_path = images[0][0].paths[0]
    num_of_size: dict[tuple[Size, str], int] = {}
    for image in images:
        size = image[0].size
        for path_place, path in enumerate(image[0].paths):
            before = num_of_size.get((size, path), 0)
            num_of_size[size, path] = before + image[0].num_planes
            for plane in range(image[0].num_planes):
                key = (path, before + plane)
                if key not in layers:
                    layers[key] = _new_layer(key, first_path, prefix)
                layers[key].levels[size] = LayerLevel(
                    parts=image, path=path_place, plane=plane
                )
    ordered = sorted(layers.items(), key=lambda item: item[1].role != "slide")
    return [layer for _, layer in ordered]


def _new_layer(key: tuple[str, int], first_path: str, prefix: str) -> DicomLayer:
    path, plane = key
    words = [prefix] if prefix else []
    if path != first_path:
        words.append(f"path {path}")
    if plane:
        words.append(f"plane {plane + 1}")
    role: Role = "slide"
    rule = "image type VOLUME"
    if plane:
        role = "plane"
        rule = "a further focal plane"
    elif path != first_path:
        role = "path"
        rule = "a further optical path"
    return DicomLayer(role=role, rule=rule, name=", ".join(words))


def _pictures(
    layers: Sequence[DicomLayer], associated: Mapping[str, tuple[DicomPart, ...]]
) -> tuple[Picture, ...]:
    pictures: list[Picture] = []
    for layer in layers:
        sizes = sorted(layer.levels, key=math.prod, reverse=True)
        levels = []
        for size in sizes:
            part = layer.levels[size].parts[0]
            levels.append(PictureLevel(size=size, mpp=part.mpp))
        pictures.append(
            Picture(
                number=len(pictures) + 1,
                name=layer.name,
                role=layer.role,
                rule=layer.rule,
                size=sizes[0],
                mpp=levels[0].mpp,
                levels=tuple(levels),
            )
        )
    for name, image in associated.items():
        part = image[0]
        pictures.append(
            Picture(
                number=len(pictures) + 1,
                name=name,
                role=_ASSOCIATED[part.flavor],
                rule=f"image type {part.flavor}",
                size=part.size,
                mpp=part.mpp,
                levels=(PictureLevel(size=part.size, mpp=part.mpp),),
            )
        )
    return tuple(pictures)


def _find_mpp(dataset: Any, size: Size) -> Mpp | None:
    """Returns µm/px from PixelSpacing (mm along y and x), else from the volume's size."""
    for group in dataset.get("SharedFunctionalGroupsSequence") or ():
        for measures in group.get("PixelMeasuresSequence") or ():
            spacing = measures.get("PixelSpacing")
            if spacing and len(spacing) == 2:
                y_mm, x_mm = (positive_number(str(value)) for value in spacing)
                if x_mm and y_mm:
                    return (x_mm * _UM_PER_MM, y_mm * _UM_PER_MM)
    x_mm = positive_number(str(dataset.get("ImagedVolumeWidth") or ""))
    y_mm = positive_number(str(dataset.get("ImagedVolumeHeight") or ""))
    if x_mm and y_mm:
        return (x_mm * _UM_PER_MM / size[0], y_mm * _UM_PER_MM / size[1])
    return None


def _objective_power(dataset: Any) -> float | None:
    for path in dataset.get("OpticalPathSequence") or ():
        power = positive_number(str(path.get("ObjectiveLensPower") or ""))
        if power:
            return power
    return None


_PIXEL_DATA = 0x7FE00008
_PER_FRAME = ("PerFrameFunctionalGroupsSequence",)
_Place = tuple[DicomPart, int]  # a part and the number of a frame in it


class _FrameDecoder(Decoder):
    """Decoder of the frames of a level, one plane of one path. Memory: one frame."""

    def __init__(self, level: Level, source: LayerLevel, name: str) -> None:
        super().__init__(level, name)
        self._source = source
        self._lock = threading.Lock()
        self._places: Mapping[int, _Place] | None = None
        # by what the head says: whether frames may be missing is known once they are listed
        self.sparse = not all(part.is_full for part in source.parts)

    def is_empty(self, index: int) -> bool:
        """See `Decoder.is_empty`."""
        return self.sparse and index not in self._listed_places()

    def decode(
        self, indices: Sequence[int], outs: Iterable[RgbArray]
    ) -> Iterator[None]:
        """See `Decoder.decode`."""
        for index, out in zip(indices, outs):
            place = self._place(index)
            if place is None:
                raise self._error(index, "no such frame")
            part, frame = place
            pixels = part.frames.read(frame)
            out[:] = pixels  # gray is repeated
            yield

    def _place(self, index: int) -> _Place | None:
        """Returns where a frame of the grid is stored."""
        if self.sparse:
            return self._listed_places().get(index)
        parts = self._source.parts
        num_planes = parts[0].num_planes
        layer = self._source.path * num_planes + self._source.plane
        frame = layer * self.columns * self.rows + index
        for part in parts:
            own = frame - part.first_frame
            if 0 <= own < part.frames.num_frames:
                return part, own
        return None

    def _listed_places(self) -> Mapping[int, _Place]:
        """Returns the frames that the files list, by their place in the grid."""
        with self._lock:
            if self._places is None:
                self._places = self._read_places()
            return self._places

    def _read_places(self) -> dict[int, _Place]:
        rows = []  # (part, frame, x, y, z, path)
        for part in self._source.parts:
            dataset = read_elements(part.path, _PER_FRAME, before=_PIXEL_DATA).dataset
            groups = dataset.get("PerFrameFunctionalGroupsSequence") or ()
            for frame, group in enumerate(groups):
                position = group.PlanePositionSlideSequence[0]
                paths = group.get("OpticalPathIdentificationSequence")
                path = paths[0].OpticalPathIdentifier if paths else part.paths[0]
                rows.append(
                    (
                        part,
                        frame,
                        int(position.ColumnPositionInTotalImagePixelMatrix) - 1,
                        int(position.RowPositionInTotalImagePixelMatrix) - 1,
                        float(position.get("ZOffsetInSlideCoordinateSystem") or 0),
                        str(path),
                    )
                )
        if not rows:
            raise self._error(0, "no places of the frames")
        wanted_path = self._source.parts[0].paths[self._source.path]
        planes = sorted({row[4] for row in rows})
        # a scanner may state a height of its own for each frame of one plane
        has_planes = self._source.parts[0].num_planes > 1
        places: dict[int, _Place] = {}
        for part, frame, x, y, z, path in rows:
            if path != wanted_path:
                continue
            if has_planes and planes.index(z) != self._source.plane:
                continue
            column, x_rest = divmod(x, self.segment[0])
            row, y_rest = divmod(y, self.segment[1])
            if x_rest or y_rest or not 0 <= column < self.columns:
                raise self._error(0, f"a frame at {x}, {y}, beside the grid")
            places.setdefault(self.index(column, row), (part, frame))
        return places


class DicomSlide(SegmentedSlide):
    """A DICOM slide of many files. Thread-safe.

    Memory: `segments.CACHE_BYTES`, per reading thread a stored and a decoded frame, and 16 bytes
    for each frame of a level that was read; of frames in sparse order about 500.
    """

    reader = "dicom"

    def __init__(
        self, path: str, *, slide_mpp: Mpp | None = None, image: str | None = None
    ) -> None:
        inventory = read_inventory(path)
        picture = choose_picture(inventory.pictures, image, slide_path=path)
        if picture.number <= len(inventory.layers):
            sources = inventory.layers[picture.number - 1].levels
        else:
            parts = inventory.associated[picture.name]
            sources = {parts[0].size: LayerLevel(parts=parts, path=0, plane=0)}
        self._associated_parts = inventory.associated
        self._all_parts = [
            part for source in sources.values() for part in source.parts
        ] + [part for parts in inventory.associated.values() for part in parts]
        stated: list[StatedLevel] = []
        self._sources: list[LayerLevel] = []
        finest_mpp = picture.mpp
        for size in sorted(sources, key=lambda size: -size[0] * size[1]):
            part = sources[size].parts[0]
            stated.append(
                state_level(
                    part.path.name,
                    size,
                    part.frames.form.size,
                    stated=_ratio(part.mpp, finest_mpp),
                    finer=stated,
                )
            )
            self._sources.append(sources[size])
        first = self._sources[0].parts[0]
        super().__init__(
            path,
            [each.level for each in stated],
            self._make_decoders(path, stated),
            slide_mpp=slide_mpp or picture.mpp,
            objective_power=first.objective_power,
            vendor="dicom",
            properties={
                "dicom.TransferSyntaxUID": first.frames.form.syntax,
                "dicom.PhotometricInterpretation": first.frames.form.photometric,
            },
        )
        for part in self._all_parts:
            self.on_close.callback(part.frames.close)
        self.associated_names = tuple(sorted(inventory.associated))
        self.pictures = inventory.pictures
        self.picture = picture
        notes = [*picture_notes(inventory.pictures, picture, image), *inventory.notes]
        notes += self._settle(stated)
        if first.frames.form.samples == 1:
            notes.append(GRAY)
        self.notes = tuple(notes)

    def _make_decoders(
        self, path: str, levels: Sequence[StatedLevel]
    ) -> list[_FrameDecoder]:
        return [
            _FrameDecoder(each.level, self._sources[each.number], path)
            for each in levels
        ]

    def _settle(self, stated: Sequence[StatedLevel]) -> list[str]:
        """Compares the levels' pixels, leaves out what is no level, and returns notes on it."""
        assert self.picture is not None
        stamps = slide_stamps(str(self._sources[0].parts[0].path))
        verdicts = judge_stated_levels(self, stated, self.picture.number, stamps)
        settled, notes = settle_levels(stated, verdicts)
        self.levels = tuple(each.level for each in settled)
        self.size = self.levels[0].size
        self._decoders = list(self._make_decoders(self.slide_path, settled))
        levels = tuple(
            replace(self.picture.levels[each.number], downsample=each.level.downsample)
            for each in settled
        )
        shown = replace(self.picture, levels=levels)
        self.pictures = tuple(
            shown if each is self.picture else each for each in self.pictures
        )
        self.picture = shown
        return notes

    def _associated(self, name: str) -> RgbArray:
        parts = self._associated_parts[name]
        form = parts[0].frames.form
        width, height = parts[0].size
        level = Level(index=0, size=(width, height), downsample=1.0, segment=form.size)
        source = LayerLevel(parts=parts, path=0, plane=0)
        decoder = _FrameDecoder(level, source, self.slide_path)
        image = np.full((height, width, 3), WHITE, dtype=np.uint8)
        self._assemble(decoder, [(0, 0)], image[None])
        return image


def _ratio(mpp: Mpp | None, finest: Mpp | None) -> Scale | None:
    """Returns level-0 px per px; None where one of the resolutions is not stated."""
    if mpp is None or finest is None:
        return None
    return (mpp[0] / finest[0], mpp[1] / finest[1])
