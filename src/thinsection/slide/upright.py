"""Slides that are stored mirrored or turned, as TIFF's tag 274 and EXIF say, shown upright.

A reader reads pixels as they are stored and says the orientation that it found; `open_slide` makes
an `UprightSlide` of its slide. No reader turns the pixels of levels itself.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from thinsection.slide.base import Slide
from thinsection.slide.geometry import ReadPlan, origins_lv
from thinsection.slide.orientation import (
    UPRIGHT,
    WORDS,
    stored_view,
    turn_mpp,
    turn_origins,
    turn_size,
)
from thinsection.types import CoordsL0, Level, RgbArray, TileArray


class UprightSlide(Slide):
    """A slide shown upright: levels, regions, thumbnail and resolution are of that frame.

    A region is read at its place in the file, straight into a turned view of the result: exact, and
    without memory of its own. Levels at a fraction (`reduced`, `coarse`) and stored JPEGs are not
    offered. Of a striped file that is turned by 90°, each row of tiles decodes every strip.

    Attributes:
        stored: the slide as its file stores it; its `orientation` says how it is turned.
    """

    def __init__(self, stored: Slide) -> None:
        orientation = stored.orientation
        levels = [_turn_level(level, orientation) for level in stored.levels]
        super().__init__(
            stored.slide_path,
            levels,
            slide_mpp=turn_mpp(stored.slide_mpp, orientation),
            objective_power=stored.objective_power,
            vendor=stored.vendor,
            properties=stored.properties,
        )
        self._stored = stored
        self.reader = stored.reader
        self.held_bytes = stored.held_bytes
        self.checked = stored.checked
        self.associated_names = stored.associated_names
        self.source = stored.source
        self.pictures = stored.pictures
        self.picture = stored.picture
        self.choice = stored.choice
        self.mpp_source = stored.mpp_source
        self.rendering = stored.rendering
        note = f"the file's orientation is {orientation}: shown {WORDS[orientation]}"
        self.notes = (*stored.notes, note)

    @property
    def stored(self) -> Slide:
        """See `Slide.stored`."""
        return self._stored

    def _fill(self, origin_lv: tuple[int, int], level: int, out: RgbArray) -> None:
        self._fill_all([origin_lv], level, out[None])

    def _fill_all(
        self, origins_lv: Sequence[tuple[int, int]], level: int, out: TileArray
    ) -> None:
        size = (out.shape[2], out.shape[1])
        orientation = self._stored.orientation
        origins = turn_origins(
            np.array(origins_lv, dtype=np.int64),
            size,
            self.levels[level].size,
            orientation,
        )
        regions = stored_view(out, orientation)
        places = [(x, y) for x, y in origins.tolist()]
        self._stored._fill_all(places, level, regions)
        for region in regions:
            self._stored.recolor(region)

    def expect(self, coords_l0: CoordsL0, plan: ReadPlan) -> None:
        """See `Slide.expect`. Memory: 16 bytes for each tile."""
        upright_lv = origins_lv(coords_l0, plan.downsample)
        orientation = self._stored.orientation
        level_size = self._open_level(plan.level).size
        corners = turn_origins(upright_lv, plan.size_lv, level_size, orientation)
        stored_l0 = np.rint(corners * plan.downsample).astype(np.int64)
        size_lv = turn_size(plan.size_lv, orientation)
        self._stored.expect(stored_l0, replace(plan, size_lv=size_lv))

    def _associated(self, name: str) -> RgbArray:
        return self._stored.associated_image(name)

    def icc_profile(self) -> bytes | None:
        """See `Slide.icc_profile`."""
        return self._stored.icc_profile()

    def close(self) -> None:
        """Lets go of the file; see `Slide.close`."""
        super().close()
        self._stored.close()


def _turn_level(level: Level, orientation: int) -> Level:
    """Returns the level in the other frame."""
    size = turn_size(level.size, orientation)
    segment = turn_size(level.segment, orientation) if level.segment else None
    return replace(level, size=size, segment=segment)


def upright(slide: Slide) -> Slide:
    """Returns the slide as it is to be seen: itself, or turned."""
    return slide if slide.orientation == UPRIGHT else UprightSlide(slide)
