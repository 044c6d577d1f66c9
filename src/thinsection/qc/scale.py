"""Which work size a slide gets, what had to be assumed for it, and what looks unlike its kind."""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from thinsection.qc.pipeline import Pipeline
from thinsection.slide import Slide
from thinsection.slide.geometry import nominal_mpp
from thinsection.types import RgbArray, Size

ASSUMED_MPP = 0.5  # µm/px of a file that says neither mpp nor objective power
_DARK_MEDIAN = 40  # of 255: glass of a brightfield slide is above 200
_ONE_COLOUR_RANGE = 6  # of 255
_BROWN_SHARE = 0.25  # of the coloured px


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a px of the slide is.

    Attributes:
        slide_mpp: µm per level-0 px, as near to the truth as the file allows.
        work_mpp: µm per level-0 px by which the work size is computed; nominal for a pipeline
            that works from the objective power.
        warnings: what was assumed.
    """

    slide_mpp: float
    work_mpp: float
    warnings: tuple[str, ...] = ()

    def max_edge(self, size_l0: Size, wanted_mpp: float) -> int:
        """Longer edge of the work image at a resolution, px: rounded half to even, at least 1."""
        return max(1, int(np.rint(max(size_l0) * self.work_mpp / wanted_mpp)))


def scale_of(slide: Slide, pipeline: Pipeline, slide_mpp: float | None = None) -> Scale:
    """The scale of a slide under a pipeline.

    Args:
        slide: to look at.
        pipeline: says which of mpp and objective power counts.
        slide_mpp: µm per level-0 px, in place of what the file says.
    """
    warnings: list[str] = []
    known = slide_mpp
    if known is None and slide.slide_mpp is not None:
        x, y = slide.slide_mpp
        known = (x + y) / 2
        if abs(x - y) > 0.01 * known:
            warnings.append(f"px are not square ({x:g} x {y:g} µm): areas use the mean")
    power = slide.objective_power
    if known is None and power is None:
        warnings.append(
            f"the file says neither mpp nor objective power: {ASSUMED_MPP} µm/px (20x) is assumed; "
            "add a slide_mpp column to the cohort"
        )
    nominal = nominal_mpp(power) if power is not None else known or ASSUMED_MPP
    real = known if known is not None else nominal
    if known is None and power is not None:
        warnings.append(f"the file has no mpp: {nominal:g} µm/px is taken from its {power:g}x")
    if pipeline.work_from == "objective_power" and power is None and known is not None:
        warnings.append(
            f"the file has no objective power: the work size is taken from {known:g} µm/px"
        )
    work = nominal if pipeline.work_from == "objective_power" and slide_mpp is None else real
    if max(slide.size) * work < pipeline.work_mpp * 32:
        edge = max(slide.size)
        warnings.append(f"the slide is only {edge} px long: too small for these checks")
    return Scale(slide_mpp=real, work_mpp=work, warnings=tuple(warnings))


def suspicions(rgb: RgbArray) -> list[str]:
    """Sentences about the work image, uint8 (H, W, 3); none for a usual H&E slide."""
    channels = [np.ascontiguousarray(rgb[..., c]) for c in range(3)]
    if max(int(c.max()) - int(c.min()) for c in channels) <= _ONE_COLOUR_RANGE:
        return ["the slide is of one colour: empty glass, or a failed scan"]
    if float(np.median(rgb)) < _DARK_MEDIAN:
        return ["the background is dark: fluorescence? These checks are made for brightfield"]
    highest, lowest = reduce(np.maximum, channels), reduce(np.minimum, channels)
    coloured = highest - lowest > 30
    red, green, blue = (c.astype(np.int16) for c in channels)
    brown = coloured & (red > green + 15) & (green > blue + 10)
    num_coloured = np.count_nonzero(coloured)
    if num_coloured > 100 and np.count_nonzero(brown) > _BROWN_SHARE * num_coloured:
        return ["much of the tissue is brown: IHC? The preset 'ihc' is made for it"]
    if num_coloured < 0.0005 * coloured.size:
        return ["almost nothing is stained: empty glass, or an unstained slide"]
    return []
