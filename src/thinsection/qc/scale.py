"""Which work size a slide gets, and what had to be assumed for it."""

from dataclasses import dataclass

import numpy as np

from thinsection.qc.pipeline import Pipeline
from thinsection.slide import Slide
from thinsection.slide.geometry import nominal_mpp
from thinsection.types import Size

ASSUMED_MPP = 0.5  # µm/px of a file that says neither mpp nor objective power


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
