"""Reader of DICOM slides by pydicom and imagecodecs: every plane, path and usual syntax."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from thinsection.slide.base import GRAY, WHITE
from thinsection.slide.dicom_series import read_elements
from thinsection.slide.formats.dicom_images import (
    DicomPart,
    LayerLevel,
    read_inventory,
)
from thinsection.slide.formats.segments import Decoder, SegmentedSlide
from thinsection.slide.formats.stated_levels import (
    Scale,
    StatedLevel,
    judge_stated_levels,
    settle_levels,
    state_level,
)
from thinsection.slide.pictures import choose_picture, picture_notes
from thinsection.slide.verdicts import slide_stamps
from thinsection.types import Level, Mpp, RgbArray

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
