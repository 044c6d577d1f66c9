"""The work image of HistoQC's pipelines: px of OpenSlide's `get_thumbnail`.

A level is box-reduced strip by strip, so that it never sits in memory, and then resized
by LANCZOS.
"""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from thinsection.slide import Slide
from thinsection.types import MIB, Level, RgbArray, Size

# Of one strip as it is read.
STRIP_BYTES = 24 * MIB
# Tile rows of most files: a strip of whole tiles decodes no tile twice.
_ROWS_STEP = 256
# The image is box-reduced to at least this many times the wanted size.
_REDUCING_GAP = 2.0


def fitted_size(size: Size, max_edge: int) -> Size:
    """(width, height) that fits into a square, with the aspect kept as px allow."""
    if max(size) <= max_edge:
        return size
    aspect = size[0] / size[1]
    is_tall = aspect <= 1
    shorter = max_edge * aspect if is_tall else max_edge / aspect
    best = (1, 1)
    least_error = math.inf
    for edge in (math.floor(shorter), math.ceil(shorter)):
        width, height = (edge, max_edge) if is_tall else (max_edge, edge)
        error = abs(aspect - width / height) if edge else 0.0
        if error < least_error:
            least_error = error
            best = (max(1, width), max(1, height))
    return best


def read_work_images(slide: Slide, max_edges: Sequence[int]) -> list[RgbArray]:
    """One RGB image per wanted longer edge, uint8 (H, W, 3); each level is read once.

    Memory: O(work images * 16 + one strip), whatever the size of the level.
    """
    edges_by_level: dict[Level, list[int]] = {}
    for edge in dict.fromkeys(max_edges):
        level = coarsest_level(slide.levels, max(slide.size) / edge)
        edges_by_level.setdefault(level, []).append(edge)
    images: dict[int, RgbArray] = {}
    for level, edges in edges_by_level.items():
        reducers = {edge: _Reducer(level, edge) for edge in edges}
        width, height = level.size
        num_rows = _ROWS_STEP * max(1, STRIP_BYTES // (_ROWS_STEP * width * 3))
        for top in range(0, height, num_rows):
            origin_l0 = (0, round(top * level.downsample))
            size_lv = (width, min(num_rows, height - top))
            strip = slide.read_region(origin_l0, level.index, size_lv)
            for reducer in reducers.values():
                reducer.add(strip)
        for edge, reducer in reducers.items():
            images[edge] = reducer.finish()
    return [images[edge] for edge in max_edges]


def coarsest_level(levels: Sequence[Level], downsample: float) -> Level:
    """The coarsest level that is not coarser than wanted, else level 0."""
    fitting = [level for level in levels if level.downsample <= downsample]
    return max(fitting, key=lambda level: level.downsample, default=levels[0])


class _Reducer:
    """Makes the image whose longer edge is max_edge px (or the level's, if that is less).

    Rows of the level are box-reduced as they come; rows that do not fill a box wait.
    """

    def __init__(self, level: Level, max_edge: int) -> None:
        width, height = level.size
        self._size = level.size
        self._size_th = fitted_size(level.size, max_edge)
        self._factors = (
            int(width / self._size_th[0] / _REDUCING_GAP) or 1,
            int(height / self._size_th[1] / _REDUCING_GAP) or 1,
        )
        shape = (
            math.ceil(height / self._factors[1]),
            math.ceil(width / self._factors[0]),
            3,
        )
        self._reduced = np.empty(shape, dtype=np.uint8)
        self._waiting = np.empty((0, width, 3), dtype=np.uint8)
        # rows of the level that have not come, and rows of `_reduced` that are made
        self._num_missing = height
        self._num_filled = 0

    def add(self, strip: RgbArray) -> None:
        """Takes the next rows of the level."""
        self._num_missing -= len(strip)
        rows = np.concatenate([self._waiting, strip]) if len(self._waiting) else strip
        num_whole = len(rows)
        if self._num_missing:
            num_whole -= len(rows) % self._factors[1]
        self._waiting = rows[num_whole:].copy()
        if num_whole:
            reduced = rows[:num_whole]
            if self._factors != (1, 1):
                reduced = np.asarray(Image.fromarray(reduced).reduce(self._factors))
            end = self._num_filled + len(reduced)
            self._reduced[self._num_filled : end] = reduced
            self._num_filled = end

    def finish(self) -> RgbArray:
        """The image, once every strip was added."""
        if self._reduced.shape[1::-1] == self._size_th:
            return self._reduced
        width = self._size[0] / self._factors[0]
        height = self._size[1] / self._factors[1]
        # both axes in one call: the order in which Pillow takes them depends on the sizes
        # and on its release
        resized = Image.fromarray(self._reduced).resize(
            self._size_th, Image.Resampling.LANCZOS, box=(0.0, 0.0, width, height)
        )
        return np.asarray(resized)
