"""The slide at work resolutions: how large it is to be, and one streamed pass over each level.

There are two work images. That of HistoQC's pipelines, whose size follows from the objective power,
has the px of OpenSlide's `get_thumbnail`: box-reduced strip by strip, so that a level never sits in
memory, and then resized by LANCZOS. All else, the tissue mask of a run without quality control
included, looks at one picture in µm: `read_resized` at `work_size`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from thinsection.arrays import filters, get_namespace
from thinsection.qc.checks.check import Regions
from thinsection.qc.pipeline import Pipeline
from thinsection.slide import Slide, read_resized
from thinsection.slide.geometry import mean_mpp, nominal_mpp
from thinsection.types import MIB, Level, Mpp, RgbArray, Size

STRIP_BYTES = 24 * MIB  # of one strip as it is read
_ROWS_STEP = (
    256  # tile rows of most files: a strip of whole tiles decodes no tile twice
)
_REDUCING_GAP = (
    2.0  # the image is box-reduced to at least this many times the wanted size
)
# µm/px of a file that says neither mpp nor objective power, in HistoQC's pipelines
_ASSUMED_MPP = 0.5
_ASSUMED_LONG_SIDE_TH = 2048  # px of the work image of such a file in all else
_DARK_MEDIAN, _ONE_COLOUR_RANGE = (
    40,
    6,
)  # of 255: glass of a brightfield slide is above 200
_BROWN_SHARE = 0.25  # of the coloured px


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a px of the slide is."""

    slide_mpp: float  # µm per level-0 px, as near to the truth as the file allows
    # µm per level-0 px of the work size; nominal where the pipeline says so
    work_mpp: float
    mpp_xy: Mpp  # (x, y) µm per level-0 px
    by_long_side: bool = False  # HistoQC's: the long side alone says how large a px is
    warnings: tuple[str, ...] = ()  # what was assumed


def scale_of(slide: Slide, pipeline: Pipeline, slide_mpp: float | None = None) -> Scale:
    """The scale of a slide under a pipeline; a given mpp stands for what the file says."""
    if pipeline.work_from == "objective_power":
        return _nominal_scale(slide, pipeline, slide_mpp)
    known = slide.slide_mpp
    if slide_mpp is not None and mean_mpp(known) != slide_mpp:
        known = (slide_mpp, slide_mpp)
    mpp_xy = resolution_of(slide, pipeline.work_mpp, known)
    mean = sum(mpp_xy) / 2
    warnings = []
    x, y = mpp_xy
    if abs(x - y) > 0.01 * mean:
        warnings.append(
            f"px are not square ({x:g} x {y:g} µm): those of the work image are"
        )
    power = slide.objective_power
    if known is None and power is None:
        warnings.append(
            f"the file says neither mpp nor objective power: {mean:g} µm/px is assumed; "
            "add a slide_mpp column to the cohort"
        )
    elif known is None:
        warnings.append(
            f"the file has no mpp: {mean:g} µm/px is taken from its {power:g}x"
        )
    warnings += _too_small(slide, mean, pipeline)
    return Scale(slide_mpp=mean, work_mpp=mean, mpp_xy=mpp_xy, warnings=tuple(warnings))


def _nominal_scale(slide: Slide, pipeline: Pipeline, slide_mpp: float | None) -> Scale:
    """The scale as HistoQC takes it: the work size follows from the objective power."""
    warnings: list[str] = []
    known = mean_mpp(slide.slide_mpp) if slide_mpp is None else slide_mpp
    x, y = (slide.slide_mpp if slide_mpp is None else None) or (0.0, 0.0)
    if abs(x - y) > 0.01 * (known or 0.0):
        warnings.append(f"px are not square ({x:g} x {y:g} µm): areas use the mean")
    power = slide.objective_power
    nominal = nominal_mpp(power) if power is not None else known or _ASSUMED_MPP
    real = nominal if known is None else known
    if known is None and power is None:
        assumed = f"{_ASSUMED_MPP} µm/px (20x) is assumed; add a slide_mpp column to the cohort"
        warnings.append(f"the file says neither mpp nor objective power: {assumed}")
    elif known is None:
        warnings.append(
            f"the file has no mpp: {nominal:g} µm/px is taken from its {power:g}x"
        )
    elif power is None:
        taken = f"the work size is taken from {known:g} µm/px"
        warnings.append(f"the file has no objective power: {taken}")
    work = nominal if slide_mpp is None else real
    warnings += _too_small(slide, work, pipeline)
    return Scale(
        slide_mpp=real,
        work_mpp=work,
        mpp_xy=(real, real),
        by_long_side=True,
        warnings=tuple(warnings),
    )


def _too_small(slide: Slide, mpp: float, pipeline: Pipeline) -> list[str]:
    """The warning of a slide of which the work image would have hardly any px."""
    edge = max(slide.size)
    if edge * mpp >= pipeline.work_mpp * 32:
        return []
    return [f"the slide is only {edge} px long: too small for these checks"]


def resolution_of(slide: Slide, work_mpp: float, slide_mpp: Mpp | None) -> Mpp:
    """(x, y) µm per level-0 px: as given, else by the objective power, else assumed.

    Nothing is known of a slide without both. Its work image has 2,048 px along its long side, or as
    many as the slide has, and these are taken for px of `work_mpp`.
    """
    if slide_mpp is not None:
        return slide_mpp
    if slide.objective_power is not None:
        mpp = nominal_mpp(slide.objective_power)
    else:
        mpp = work_mpp * min(1.0, _ASSUMED_LONG_SIDE_TH / max(slide.size))
    return mpp, mpp


def work_size(size_l0: Size, mpp_xy: Mpp, work_mpp: float) -> Size:
    """(width, height) of the slide in square px of `work_mpp`, at most those of the slide."""
    width, height = (
        max(1, round(edge * min(1.0, mpp / work_mpp)))
        for edge, mpp in zip(size_l0, mpp_xy, strict=True)
    )
    return width, height


def read_images(
    slide: Slide, pipeline: Pipeline, scale: Scale
) -> dict[float, RgbArray]:
    """The images that the checks of a pipeline look at, by nominal mpp, the work image first."""
    mpps = pipeline.image_mpps
    if pipeline.work_from == "mpp":
        sizes = {mpp: work_size(slide.size, scale.mpp_xy, mpp) for mpp in mpps}
        return {mpp: read_resized(slide, size) for mpp, size in sizes.items()}
    long_side = max(slide.size) * scale.work_mpp  # µm; edges are rounded half to even
    edges = [max(1, int(np.rint(long_side / mpp))) for mpp in mpps]
    return dict(zip(mpps, read_work_images(slide, edges), strict=True))


def suspicions(rgb: RgbArray) -> list[str]:
    """Sentences about the work image, uint8 (H, W, 3); none for a usual H&E slide."""
    if np.ptp(rgb, axis=(0, 1)).max() <= _ONE_COLOUR_RANGE:
        return ["the slide is of one colour: empty glass, or a failed scan"]
    if float(np.median(rgb)) < _DARK_MEDIAN:
        return [
            "the background is dark: fluorescence? These checks are made for brightfield"
        ]
    red, green, blue = channels = [rgb[..., c].astype(np.int16) for c in range(3)]
    lowest, highest = filters.extremes(get_namespace(), channels)
    coloured = highest - lowest > 30
    brown = coloured & (red > green + 15) & (green > blue + 10)
    num_coloured = np.count_nonzero(coloured)
    if num_coloured > 100 and np.count_nonzero(brown) > _BROWN_SHARE * num_coloured:
        return [
            "much of the tissue is brown: IHC? 'auto' and 'histoqc-ihc' are made for it"
        ]
    if num_coloured < 0.0005 * coloured.size:
        return ["almost nothing is stained: empty glass, or an unstained slide"]
    return []


def fitted_size(size: Size, max_edge: int) -> Size:
    """(width, height) that fits into a square, with the aspect kept as closely as px allow."""
    if max(size) <= max_edge:
        return size
    aspect = size[0] / size[1]
    ideal = max_edge * aspect if aspect <= 1 else max_edge / aspect
    edges = (math.floor(ideal), math.ceil(ideal))
    sizes = [(edge, max_edge) if aspect <= 1 else (max_edge, edge) for edge in edges]
    width, height = min(
        sizes, key=lambda wh: abs(aspect - wh[0] / wh[1]) if min(wh) else 0
    )
    return max(1, width), max(1, height)


def read_work_images(slide: Slide, max_edges: Sequence[int]) -> list[RgbArray]:
    """One RGB image per wanted longer edge, uint8 (H, W, 3); each level is read at most once.

    Memory: O(work images * 16 + one strip), whatever the size of the level.
    """
    levels = {
        edge: coarsest_level(slide.levels, max(slide.size) / edge) for edge in max_edges
    }
    images: dict[int, RgbArray] = {}
    for level in dict.fromkeys(levels.values()):
        reducers = {
            edge: _Reducer(level, edge) for edge in levels if levels[edge] == level
        }
        width, height = level.size
        rows = _ROWS_STEP * max(1, STRIP_BYTES // (_ROWS_STEP * width * 3))
        for top in range(0, height, rows):
            origin_l0, size = (
                (0, round(top * level.downsample)),
                (width, min(rows, height - top)),
            )
            strip = slide.read_region(origin_l0, level.index, size)
            for reducer in reducers.values():
                reducer.add(strip)
        images |= {edge: reducer.finish() for edge, reducer in reducers.items()}
    return [images[edge] for edge in max_edges]


def regions_at(slide: Slide, slide_mpp: float, mpp: float) -> Regions:
    """The slide at about `mpp`, by the nearest integer box reduction of the best level.

    Memory: of a region that is read, its px of that level.
    """
    level = coarsest_level(slide.levels, mpp * 1.25 / slide_mpp)
    factor = max(1, round(mpp / (level.downsample * slide_mpp)))
    width, height = (max(1, edge // factor) for edge in level.size)

    def read(left: int, top: int, right: int, bottom: int) -> RgbArray:
        x, y = (round(edge * factor * level.downsample) for edge in (left, top))
        size = (
            (min(right, width) - left) * factor,
            (min(bottom, height) - top) * factor,
        )
        return _box_reduced(
            slide.read_region((x, y), level.index, size), (factor, factor)
        )

    return (width, height), read


def coarsest_level(levels: Sequence[Level], downsample: float) -> Level:
    """The coarsest level that is not coarser than wanted, else level 0."""
    fit = [level for level in levels if level.downsample <= downsample]
    return max(fit, key=lambda level: level.downsample, default=levels[0])


class _Reducer:
    """Makes the image whose longer edge is max_edge px (or the level's, if that is less).

    Rows of the level are box-reduced as they come; what does not fill a box waits for the next.
    """

    def __init__(self, level: Level, max_edge: int) -> None:
        self._size, self._size_th = level.size, fitted_size(level.size, max_edge)
        x, y = (
            int(n / m / _REDUCING_GAP) or 1 for n, m in zip(level.size, self._size_th)
        )
        (width, height), self._factors = level.size, (x, y)
        self._reduced = np.empty(
            (math.ceil(height / y), math.ceil(width / x), 3), dtype=np.uint8
        )
        self._waiting = np.empty((0, width, 3), dtype=np.uint8)
        self._missing, self._filled = height, 0  # rows of the level, rows of `_reduced`

    def add(self, strip: RgbArray) -> None:
        self._missing -= len(strip)
        rows = np.concatenate([self._waiting, strip]) if len(self._waiting) else strip
        whole = len(rows) - (len(rows) % self._factors[1] if self._missing else 0)
        self._waiting = rows[whole:].copy()
        if whole:
            reduced = _box_reduced(rows[:whole], self._factors)
            self._reduced[self._filled : self._filled + len(reduced)] = reduced
            self._filled += len(reduced)

    def finish(self) -> RgbArray:
        """The image, once every strip was added."""
        if self._reduced.shape[1::-1] == self._size_th:
            return self._reduced
        width, height = (n / f for n, f in zip(self._size, self._factors, strict=True))
        # whole, as which axis Pillow takes first depends on the sizes and on its release
        image, lanczos = Image.fromarray(self._reduced), Image.Resampling.LANCZOS
        return np.asarray(
            image.resize(self._size_th, lanczos, box=(0.0, 0.0, width, height))
        )


def _box_reduced(pixels: RgbArray, factors: tuple[int, int]) -> RgbArray:
    return (
        pixels
        if factors == (1, 1)
        else np.asarray(Image.fromarray(pixels).reduce(factors))
    )
