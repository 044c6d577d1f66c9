"""Levels at the scale that a container states: which are accepted, and where their padding begins.

If no scale is stated, it is computed from the size of the level. The stated scale comes first,
because programs pad levels to whole tiles: a padded level looks less reduced than it is, and the
same tissue would lie elsewhere on each level.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinsection.errors import SlideOpenError
from thinsection.slide.formats.segments import Decoder, SegmentedSlide
from thinsection.slide.level_check import (
    BY_SIZE,
    OTHER,
    LevelCandidate,
    Verdicts,
    cache_levels,
    cached_levels,
    judge_levels,
)
from thinsection.types import Level, Size
from thinsection.weights.origin import Stamps

# largest ratio of a level's scales along x and y; tiny levels get more, because sizes are rounded
_MAX_ASPECT = 1.1
# largest ratio of the scale that is stated for a level and the scale of its size
_MAX_PADDING = 4.0
Scale = tuple[float, float]  # along x and y


def scale_ratio(scale: Scale | None, finest: Scale | None) -> Scale | None:
    """Returns level-0 px per px of a level; None if one of the scales is not stated."""
    if scale is None or finest is None:
        return None
    return (scale[0] / finest[0], scale[1] / finest[1])


@dataclass(frozen=True, kw_only=True)
class StatedLevel:
    """A part of a container, and the scale at which it is taken for a level.

    Attributes:
        number: position among the levels of its image, finest first.
        name: the container's name of the level.
        level: the level, with its padding.
        scale: level-0 px per px, along x and y.
        by_size: the scale by the level's size, if that differs from the stated scale by more than
            one pixel; None if it does not, or if no scale is stated.
        note: sentence on why `scale` is not the stated scale; '' if it is.
        is_shifted: True if the level begins elsewhere than level 0.
    """

    number: int
    name: str
    level: Level
    scale: Scale
    by_size: Scale | None = None
    note: str = ""
    is_shifted: bool = False


def state_level(
    name: str,
    size: Size,
    segment: Size,
    *,
    stated: Scale | None,
    finer: Sequence[StatedLevel],
) -> StatedLevel:
    """Returns a level at the scale that its container states, or else at the scale of its size.

    Args:
        name: the container's name of the level.
        size: (width, height), px.
        segment: (width, height) of its stored tiles or chunks, px.
        stated: level-0 px per px; None if the container does not state it.
        finer: the finer levels, finest first.

    Raises:
        SlideOpenError: the level has another shape than level 0.
    """
    finest = finer[0].level.size if finer else size
    by_size = (finest[0] / size[0], finest[1] / size[1])
    note = ""
    contradicted = None
    scale = by_size
    if stated is not None and finer:
        is_same = all(
            abs(n / a - n / b) <= 1 for n, a, b in zip(finest, stated, by_size)
        )
        if is_same:
            scale = stated
        # a scale hardly coarser than level 0, or far from what the size says, is a writer's fault
        elif all(
            a > 1 and 1 / _MAX_PADDING < a / b < _MAX_PADDING
            for a, b in zip(stated, by_size)
        ):
            scale = stated
            contradicted = by_size
        else:
            note = _size_note(name, size, stated, by_size)
    if max(scale) / min(scale) > _MAX_ASPECT + 1 / min(size):
        raise SlideOpenError(
            f"levels must have one aspect ratio, got {finest} and {size} px"
        )
    level = Level(index=len(finer), size=size, downsample=_mean(scale), segment=segment)
    return StatedLevel(
        number=len(finer),
        name=name,
        level=level,
        scale=scale,
        by_size=contradicted,
        note=note,
    )


class StatedSlide(SegmentedSlide):
    """A slide whose container states the scale of each level, as DICOM and OME-Zarr do.

    Thread-safe. Memory: as `SegmentedSlide`.
    """

    @abstractmethod
    def _decoder(self, stated: StatedLevel) -> Decoder:
        """Returns the decoder of a level."""

    def _read_stated(
        self,
        stated: Sequence[StatedLevel],
        picture: int,
        stamps: Stamps | None,
        *,
        compares: bool = True,
    ) -> tuple[list[StatedLevel], list[str]]:
        """Sets the slide's levels: the stated levels whose pixels agree with level 0.

        Returns these levels, and notes on the others.

        Args:
            stated: stated levels, finest first.
            picture: number of the picture to which the levels belong.
            stamps: stamps of the file that describes the levels, for the cache of verdicts.
            compares: False to accept all levels without reading pixels.
        """
        self._read_by([each.level for each in stated], map(self._decoder, stated))
        verdicts: Verdicts = {}
        if compares:
            candidates = []
            for each in stated[1:]:
                by_size = None if each.by_size is None else _mean(each.by_size)
                key = (picture, each.number)
                candidates.append(
                    LevelCandidate(
                        key=key, level=each.level, downsample_by_size=by_size
                    )
                )
            verdicts = cached_levels(stamps)
            if any(candidate.key not in verdicts for candidate in candidates):
                verdicts |= judge_levels(self, candidates)
                cache_levels(stamps, verdicts)
        settled, notes = _settle_levels(stated, picture, verdicts)
        self._read_by([each.level for each in settled], map(self._decoder, settled))
        return settled, notes


def _settle_levels(
    levels: Sequence[StatedLevel], picture: int, verdicts: Verdicts
) -> tuple[list[StatedLevel], list[str]]:
    """Returns the accepted levels without their padding, and notes on the others.

    If a level has more pixels than the slide has at its scale, the pixels beyond are padding. If a
    level has fewer pixels, all levels are cut where its content ends.
    """
    notes = []
    accepted = []
    for stated in levels:
        each = stated
        size = each.level.size
        verdict = verdicts.get((picture, each.number))
        if verdict == OTHER:
            notes.append(
                f"level {each.name!r} of {size[0]} x {size[1]} px does not show what level 0 "
                "shows, so it is left out"
            )
            continue
        if each.is_shifted:
            notes.append(
                f"level {each.name!r} of {size[0]} x {size[1]} px begins elsewhere than level 0 by "
                "its translation, so it is left out"
            )
            continue
        if verdict == BY_SIZE and each.by_size is not None:
            note = _size_note(each.name, size, each.scale, each.by_size)
            each = replace(each, scale=each.by_size, by_size=None, note=note)
        if each.note:
            notes.append(each.note)
        accepted.append(each)
    content = _content(accepted)
    settled: list[StatedLevel] = []
    for each in accepted:
        size = each.level.size
        shown = size
        if each.by_size is not None or content != levels[0].level.size:
            shown = (
                min(size[0], math.ceil(content[0] / each.scale[0])),
                min(size[1], math.ceil(content[1] / each.scale[1])),
            )
        if shown != size:
            notes.append(
                f"level {each.name!r} has {size[0]} x {size[1]} px, of which {shown[0]} x "
                f"{shown[1]} are the slide by the scales of the levels; the others are padding"
            )
        level = Level(
            index=len(settled),
            size=shown,
            downsample=_mean(each.scale),
            segment=each.level.segment,
        )
        settled.append(replace(each, level=level))
    return settled, notes


def _content(levels: Sequence[StatedLevel]) -> Scale:
    """Returns (width, height) of the area that all levels show, level-0 px.

    A level that is smaller by at most one of its pixels was rounded down, and counts as whole.
    """
    content = []
    for axis in (0, 1):
        whole = levels[0].level.size[axis]
        end = float(whole)
        for each in levels:
            own_end = each.level.size[axis] * each.scale[axis]
            if each.by_size is not None and own_end + each.scale[axis] < whole:
                end = min(end, own_end)
        content.append(end)
    return (content[0], content[1])


def _size_note(name: str, size: Size, stated: Scale, by_size: Scale) -> str:
    return (
        f"level {name!r} of {size[0]} x {size[1]} px states that it is {_text(stated)} times "
        f"smaller than level 0; by its size it counts as {_text(by_size)} times smaller"
    )


def _mean(scale: Scale) -> float:
    return (scale[0] + scale[1]) / 2


def _text(scale: Scale) -> str:
    return " x ".join(dict.fromkeys(f"{value:.4g}" for value in scale))
