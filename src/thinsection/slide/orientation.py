"""Upright view of slides that are stored mirrored or turned, by TIFF's tag 274 or EXIF.

A reader returns pixels as they are stored, and states the orientation of the file. `open_slide`
wraps the reader's slide in an `UprightSlide`. No reader turns the pixels of levels itself.

Source: TIFF 6.0, tag Orientation (274); Exif 2.32 has the same numbers.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from thinsection.slide.base import Slide
from thinsection.slide.geometry import ReadPlan, origins_lv
from thinsection.types import CoordsL0, CoordsLv, Mpp, RgbArray, Size, TileArray

ORIENTATION_TAG = 274
UPRIGHT = 1
# Numbers of the tag for each operation that makes the stored picture upright. First, rows and
# columns are swapped; then the result is mirrored.
_SWAPPED = (5, 6, 7, 8)
_MIRRORED_X = (2, 3, 6, 7)
_MIRRORED_Y = (3, 4, 7, 8)
# number of the inverse operation; the other operations are their own inverse
_TURNED_BACK = {6: 8, 8: 6}
WORDS = {
    2: "mirrored left to right",
    3: "turned by 180°",
    4: "mirrored top to bottom",
    5: "mirrored along the diagonal from top left",
    6: "turned by 90° clockwise",
    7: "mirrored along the diagonal from top right",
    8: "turned by 90° anticlockwise",
}


def known_orientation(value: object) -> int:
    """Returns the number of a file's orientation tag; 1 (upright) if it is missing or undefined."""
    if isinstance(value, int) and value in WORDS:
        return value
    return UPRIGHT


def turn_size(size: Size, orientation: int) -> Size:
    """Upright (width, height) from the stored size, or the stored size from the upright size."""
    return (size[1], size[0]) if orientation in _SWAPPED else size


def turn_mpp(mpp: Mpp | None, orientation: int) -> Mpp | None:
    """Upright (x, y) µm/px from the stored µm/px, or the stored µm/px from the upright µm/px."""
    if mpp is None or orientation not in _SWAPPED:
        return mpp
    return (mpp[1], mpp[0])


def turn_pixels(stored: np.ndarray, orientation: int) -> np.ndarray:
    """Returns the upright view of stored pixels, (..., H, W, 3); no pixel is copied."""
    upright = stored
    if orientation in _SWAPPED:
        upright = upright.swapaxes(-3, -2)
    if orientation in _MIRRORED_X:
        upright = upright[..., ::-1, :]
    if orientation in _MIRRORED_Y:
        upright = upright[..., ::-1, :, :]
    return upright


def turn_origins(
    origins: CoordsLv, size: Size, level_size: Size, orientation: int
) -> CoordsLv:
    """Corners of regions in the stored frame, int64 (N, 2), from those in the upright one.

    Args:
        origins: upright (x, y) of the regions' top-left corners.
        size: upright (width, height) of a region.
        level_size: upright (width, height) of what they are regions of.
        orientation: number of the tag.
    """
    stored = origins.copy()
    if orientation in _MIRRORED_X:
        stored[:, 0] = level_size[0] - size[0] - origins[:, 0]
    if orientation in _MIRRORED_Y:
        stored[:, 1] = level_size[1] - size[1] - origins[:, 1]
    return stored[:, ::-1] if orientation in _SWAPPED else stored


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
        levels = []
        for level in stored.levels:
            segment = None
            if level.segment is not None:
                segment = turn_size(level.segment, orientation)
            size = turn_size(level.size, orientation)
            levels.append(replace(level, size=size, segment=segment))
        super().__init__(
            stored.slide_path,
            levels,
            slide_mpp=turn_mpp(stored.slide_mpp, orientation),
            objective_power=stored.objective_power,
            vendor=stored.vendor,
            properties=stored.properties,
        )
        self._stored = stored
        self.slide_name = stored.slide_name
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
        # what is written to this view is turned back
        regions = turn_pixels(out, _TURNED_BACK.get(orientation, orientation))
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

    def drop_decoded(self) -> None:
        """See `Slide.drop_decoded`."""
        self._stored.drop_decoded()

    @contextmanager
    def keeping_decoded(self, levels: Collection[int], folder: Path) -> Iterator[None]:
        """See `Slide.keeping_decoded`."""
        with self._stored.keeping_decoded(levels, folder):
            yield

    def close(self) -> None:
        """Lets go of the file; see `Slide.close`."""
        super().close()
        self._stored.close()
