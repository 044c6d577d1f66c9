"""The slide at work resolutions: its size there, and one streamed pass over each level.

There are two work images. HistoQC's pipelines take a size that follows from the objective
power (`histoqc_image.py`). All others, and the tissue mask of a run without quality
control, look at one picture in µm: `read_resized` at `work_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from thinsection.arrays import filters, get_namespace
from thinsection.arrays.bands import row_bands
from thinsection.qc.checks.check import Regions
from thinsection.slide import Slide, read_resized
from thinsection.slide.geometry import mean_mpp, nominal_mpp
from thinsection.types import Mpp, RgbArray, Size, counted

if TYPE_CHECKING:
    from thinsection.qc.pipeline import Pipeline

# µm/px of a file without mpp and objective power, in HistoQC's pipelines.
_ASSUMED_MPP = 0.5
# Px of the work image of such a file in all other pipelines.
_ASSUMED_LONG_SIDE_TH = 2048
# Relative difference of the mpp of x and y from which on px are not square.
_SQUARE_TOLERANCE = 0.01
# Px of the work image's long side that checks need.
_MIN_WORK_PX = 32
# Of 255: glass of a brightfield slide is above 200.
_DARK_MEDIAN = 40
# A slide with a smaller range, of 255, has one colour.
_ONE_COLOUR_RANGE = 6
# Of the coloured px.
_BROWN_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Size of a px of the slide."""

    slide_mpp: float  # µm per level-0 px, as near to the truth as the file allows
    # µm per level-0 px of the work size; nominal where the pipeline asks for it
    work_mpp: float
    mpp_xy: Mpp  # (x, y) µm per level-0 px
    # HistoQC's way: the long side alone gives the size of a px
    by_long_side: bool = False
    # assumptions that were made
    warnings: tuple[str, ...] = ()


def scale_of(slide: Slide, pipeline: Pipeline, slide_mpp: float | None = None) -> Scale:
    """The scale of a slide under a pipeline; `slide_mpp` replaces the file's own."""
    if pipeline.work_from == "objective_power":
        return _nominal_scale(slide, pipeline, slide_mpp)
    stored = slide.slide_mpp
    if slide_mpp is not None and mean_mpp(stored) != slide_mpp:
        stored = (slide_mpp, slide_mpp)
    mpp_xy = resolution_of(slide, pipeline.work_mpp, stored)
    mean = sum(mpp_xy) / 2
    warnings = []
    x, y = mpp_xy
    if abs(x - y) > _SQUARE_TOLERANCE * mean:
        warnings.append(
            f"pixels are not square ({x:g} x {y:g} µm), but those of the work image are"
        )
    power = slide.objective_power
    if stored is None and power is None:
        warnings.append(
            f"the file states neither resolution nor objective power, so {mean:g} µm/px is "
            "assumed; add a slide_mpp column to the cohort"
        )
    elif stored is None:
        warnings.append(
            f"the file states no resolution, so {mean:g} µm/px is assumed from its {power:g}x"
        )
    warnings += _warn_if_small(slide, mean, pipeline)
    return Scale(slide_mpp=mean, work_mpp=mean, mpp_xy=mpp_xy, warnings=tuple(warnings))


def _nominal_scale(slide: Slide, pipeline: Pipeline, slide_mpp: float | None) -> Scale:
    """The scale as HistoQC takes it: the work size follows from the objective power."""
    warnings: list[str] = []
    mpp = mean_mpp(slide.slide_mpp) if slide_mpp is None else slide_mpp
    if slide_mpp is None and slide.slide_mpp is not None:
        x, y = slide.slide_mpp
        if abs(x - y) > _SQUARE_TOLERANCE * (x + y) / 2:
            warnings.append(
                f"pixels are not square ({x:g} x {y:g} µm): areas use the mean"
            )
    power = slide.objective_power
    nominal = mpp or _ASSUMED_MPP
    if power is not None:
        nominal = nominal_mpp(power)
    if mpp is None and power is None:
        warnings.append(
            f"the file states neither resolution nor objective power, so {_ASSUMED_MPP} µm/px "
            "(20x) is assumed; add a slide_mpp column to the cohort"
        )
    elif mpp is None:
        warnings.append(
            f"the file states no resolution, so {nominal:g} µm/px is assumed from its {power:g}x"
        )
    elif power is None:
        warnings.append(
            "the file states no objective power: the size of the work image follows from "
            f"{mpp:g} µm/px"
        )
    true_mpp = nominal if mpp is None else mpp
    work_mpp = nominal if slide_mpp is None else true_mpp
    warnings += _warn_if_small(slide, work_mpp, pipeline)
    return Scale(
        slide_mpp=true_mpp,
        work_mpp=work_mpp,
        mpp_xy=(true_mpp, true_mpp),
        by_long_side=True,
        warnings=tuple(warnings),
    )


def _warn_if_small(slide: Slide, mpp: float, pipeline: Pipeline) -> list[str]:
    """The warning of a slide whose work image would have hardly any px."""
    edge = max(slide.size)
    if edge * mpp >= pipeline.work_mpp * _MIN_WORK_PX:
        return []
    return [
        f"the slide is only {counted(edge, 'pixel')} long, too small for these checks"
    ]


def resolution_of(slide: Slide, work_mpp: float, slide_mpp: Mpp | None) -> Mpp:
    """(x, y) µm per level-0 px: as given, else by the objective power, else assumed.

    Without both the work image has 2,048 px along its long side, or as many as the slide
    has, and these are taken for px of `work_mpp`.
    """
    if slide_mpp is not None:
        return slide_mpp
    if slide.objective_power is not None:
        mpp = nominal_mpp(slide.objective_power)
    else:
        mpp = work_mpp * min(1.0, _ASSUMED_LONG_SIDE_TH / max(slide.size))
    return mpp, mpp


def work_size(size_l0: Size, mpp_xy: Mpp, work_mpp: float) -> Size:
    """(width, height) of the slide in square px of `work_mpp`, at most the slide's."""
    width = max(1, round(size_l0[0] * min(1.0, mpp_xy[0] / work_mpp)))
    height = max(1, round(size_l0[1] * min(1.0, mpp_xy[1] / work_mpp)))
    return width, height


def read_images(
    slide: Slide, pipeline: Pipeline, scale: Scale
) -> dict[float, RgbArray]:
    """Reads the images of a pipeline's checks, by nominal mpp, the work image first."""
    mpps = pipeline.image_mpps
    if pipeline.work_from == "mpp":
        return {
            mpp: read_resized(slide, work_size(slide.size, scale.mpp_xy, mpp))
            for mpp in mpps
        }
    from thinsection.qc.histoqc_image import read_work_images

    long_side_um = max(slide.size) * scale.work_mpp
    # edges are rounded half to even
    edges = [max(1, int(np.rint(long_side_um / mpp))) for mpp in mpps]
    return dict(zip(mpps, read_work_images(slide, edges), strict=True))


def image_warnings(rgb: RgbArray) -> list[str]:
    """Sentences about the work image, uint8 (H, W, 3); none for a usual H&E slide."""
    if max(np.ptp(rgb[..., c]) for c in range(3)) <= _ONE_COLOUR_RANGE:
        return ["the slide is of one colour: empty glass, or a failed scan"]
    num_dark = sum(
        np.count_nonzero(rgb[band.inside] < _DARK_MEDIAN)
        for band in row_bands(len(rgb))
    )
    # the median is at least this value if at most half of the values are below
    if 2 * num_dark > rgb.size:
        return [
            "the background is dark, as in fluorescence; these checks are made for brightfield"
        ]
    num_coloured = 0
    num_brown = 0
    for band in row_bands(len(rgb)):
        # planes that lie in one piece are several times as fast as every third value
        planes = np.ascontiguousarray(rgb[band.inside].transpose(2, 0, 1))
        red, green, blue = planes.astype(np.int16)
        lowest, highest = filters.extremes(get_namespace(), [red, green, blue])
        coloured = highest - lowest > 30
        num_coloured += int(np.count_nonzero(coloured))
        brown = coloured & (red > green + 15) & (green > blue + 10)
        num_brown += int(np.count_nonzero(brown))
    if num_coloured > 100 and num_brown > _BROWN_SHARE * num_coloured:
        return [
            "much of the tissue is brown, as in IHC; use 'auto' or 'histoqc-ihc', which are "
            "made for it"
        ]
    if num_coloured < 0.0005 * rgb.size / 3:
        return ["almost nothing is stained: empty glass, or an unstained slide"]
    return []


def regions_at(slide: Slide, slide_mpp: float, mpp: float) -> Regions:
    """The slide at about `mpp`, by the nearest integer box reduction of the best level.

    Memory: of a region that is read, its px of that level.
    """
    from thinsection.qc.histoqc_image import coarsest_level

    level = coarsest_level(slide.levels, mpp * 1.25 / slide_mpp)
    factor = max(1, round(mpp / (level.downsample * slide_mpp)))
    width = max(1, level.size[0] // factor)
    height = max(1, level.size[1] // factor)

    def read(left: int, top: int, right: int, bottom: int) -> RgbArray:
        origin_l0 = (
            round(left * factor * level.downsample),
            round(top * factor * level.downsample),
        )
        size_lv = (
            (min(right, width) - left) * factor,
            (min(bottom, height) - top) * factor,
        )
        pixels = slide.read_region(origin_l0, level.index, size_lv)
        if factor == 1:
            return pixels
        return np.asarray(Image.fromarray(pixels).reduce(factor))

    return (width, height), read
