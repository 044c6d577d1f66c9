"""The slide at work resolutions, from one streamed pass over each level that is read.

The px are those of OpenSlide's `get_thumbnail`, which HistoQC works on: the level is reduced by an
integer box and then resized by LANCZOS. The box reduction is done strip by strip, so that a level
never sits in memory.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.qc.checks.check import Strips
from thinsection.slide import Slide
from thinsection.types import MIB, Level, RgbArray, Size

STRIP_BYTES = 24 * MIB  # of one strip as it is read
_ROWS_STEP = 256  # tile rows of most files: a strip of whole tiles decodes no tile twice
_REDUCING_GAP = 2.0  # the image is box-reduced to at least this many times the wanted size


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """How one work image is made.

    Attributes:
        level: that is read.
        size_th: (width, height) of the work image.
        factors: (x, y) of the box reduction before LANCZOS.
    """

    level: Level
    size_th: Size
    factors: tuple[int, int]


def plan_image(levels: Sequence[Level], max_edge: int) -> ImagePlan:
    """The plan of the image whose longer edge is max_edge px (or level 0's, if that is less)."""
    size_l0 = levels[0].size
    downsample = max(size_l0) / max_edge
    fit = [lv for lv in levels if lv.downsample <= downsample]
    level = max(fit, key=lambda lv: lv.downsample) if fit else levels[0]
    size_th = fitted_size(level.size, max_edge)
    x, y = (
        int(size / th / _REDUCING_GAP) or 1 for size, th in zip(level.size, size_th, strict=True)
    )
    return ImagePlan(level=level, size_th=size_th, factors=(x, y))


def fitted_size(size: Size, max_edge: int) -> Size:
    """(width, height) that fits into a square, with the aspect kept as closely as px allow."""
    width, height = size
    if max(size) <= max_edge:
        return size
    aspect = width / height
    if aspect <= 1:
        ideal = max_edge * aspect
        options = (math.floor(ideal), math.ceil(ideal))
        return max(1, min(options, key=lambda n: abs(aspect - n / max_edge))), max_edge
    ideal = max_edge / aspect
    options = (math.floor(ideal), math.ceil(ideal))
    return max_edge, max(1, min(options, key=lambda n: abs(aspect - max_edge / n) if n else 0))


def read_work_images(slide: Slide, max_edges: Sequence[int]) -> list[RgbArray]:
    """One RGB image per wanted longer edge, uint8 (H, W, 3); each level is read at most once.

    Memory: O(work images * 16 + one strip), whatever the size of the level.
    """
    plans = [plan_image(slide.levels, edge) for edge in max_edges]
    images: dict[int, RgbArray] = {}
    for index in sorted({plan.level.index for plan in plans}):
        wanted = [n for n, plan in enumerate(plans) if plan.level.index == index]
        reducers = [_Reducer(plans[n]) for n in wanted]
        for strip in _level_strips(slide, plans[wanted[0]].level, _ROWS_STEP):
            for reducer in reducers:
                reducer.add(strip)
        for n, reducer in zip(wanted, reducers, strict=True):
            images[n] = reducer.finish()
    return [images[n] for n in range(len(plans))]


def read_strips(slide: Slide, slide_mpp: float, mpp: float, rows_multiple: int) -> Strips:
    """The slide at about `mpp`, by a box reduction of the best level, strip by strip.

    Args:
        slide: to read.
        slide_mpp: µm per level-0 px.
        mpp: wanted µm/px; the nearest integer reduction of a level that is not coarser is taken.
        rows_multiple: every strip but the last has a multiple of this many rows.

    Memory: one strip of the level that is read, about 24 MiB.
    """
    fit = [lv for lv in slide.levels if lv.downsample * slide_mpp <= mpp * 1.25]
    level = max(fit, key=lambda lv: lv.downsample) if fit else slide.levels[0]
    factor = max(1, round(mpp / (level.downsample * slide_mpp)))
    width, height = (max(1, edge // factor) for edge in level.size)

    def strips() -> Iterator[npt.NDArray[np.uint8]]:
        for strip in _level_strips(slide, level, factor * rows_multiple):
            rows = strip.shape[0] // factor
            if rows:
                yield _box_reduced(strip[: rows * factor, : width * factor], (factor, factor))

    return Strips(mpp=level.downsample * slide_mpp * factor, size=(width, height), strips=strips())


def _level_strips(slide: Slide, level: Level, rows_step: int) -> Iterator[RgbArray]:
    """The level from top to bottom; rows are a multiple of rows_step, but for the last strip."""
    width, height = level.size
    step = rows_step * math.ceil(_ROWS_STEP / rows_step)
    rows = step * max(1, STRIP_BYTES // (step * width * 3))
    for top in range(0, height, rows):
        origin_l0 = (0, round(top * level.downsample))
        yield slide.read_region(origin_l0, level.index, (width, min(rows, height - top)))


class _Reducer:
    """Box-reduces rows as they come; what does not fill a box waits for the next strip."""

    def __init__(self, plan: ImagePlan) -> None:
        self._plan = plan
        self._waiting: RgbArray | None = None
        width, height = (math.ceil(n / f) for n, f in zip(plan.level.size, plan.factors))
        self._reduced = np.empty((height, width, 3), dtype=np.uint8)
        self._filled = 0

    def add(self, strip: RgbArray) -> None:
        rows = strip if self._waiting is None else np.concatenate([self._waiting, strip])
        whole = rows.shape[0] - rows.shape[0] % self._plan.factors[1]
        self._waiting = rows[whole:].copy() if whole < rows.shape[0] else None
        if whole:
            self._put(rows[:whole])

    def finish(self) -> RgbArray:
        """The work image, once every strip was added."""
        if self._waiting is not None:
            self._put(self._waiting)
        size_th, reduced = self._plan.size_th, self._reduced
        if reduced.shape[1::-1] == size_th:
            return reduced
        width, height = (n / f for n, f in zip(self._plan.level.size, self._plan.factors))
        # whole, as which axis Pillow takes first depends on the sizes and on its release
        image = Image.fromarray(reduced)
        lanczos = Image.Resampling.LANCZOS
        return np.asarray(image.resize(size_th, lanczos, box=(0.0, 0.0, width, height)))

    def _put(self, rows: RgbArray) -> None:
        reduced = _box_reduced(rows, self._plan.factors)
        self._reduced[self._filled : self._filled + len(reduced)] = reduced
        self._filled += len(reduced)


def _box_reduced(pixels: RgbArray, factors: tuple[int, int]) -> RgbArray:
    if factors == (1, 1):
        return pixels
    return np.asarray(Image.fromarray(pixels).reduce(factors))
