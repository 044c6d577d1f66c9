"""What quality control says of one slide."""

import colorsys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from thinsection.files.pages import notebook_html
from thinsection.qc.checks.check import Score
from thinsection.qc.pictures import Color, overlay
from thinsection.qc.pipeline import Pipeline
from thinsection.qc.tissue import TissueMask
from thinsection.types import MaskArray, MaskFrame, RgbArray

GLASS_COLOR: Color = (222, 226, 231)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QcResult:
    """What quality control says of one slide.

    Attributes:
        mask_use: bool (H, W), True = tissue that passed every check.
        frame: where the masks lie on the slide.
        masks: per check with a mask, what it removed (or filled), bool (H, W).
        scores: columns of the slide's row, in the order of the checks.
        warnings: sentences about the slide.
        pipeline: the pipeline that ran.
        rgb: the work image, uint8 (H, W, 3).
        mpp_th: µm per px of it.
        facts: what the file says of itself, for the row.
        tables: small arrays for the report, by check.
        seconds: wall-clock time per check, and of reading.
        crossings: transfers between host and device, by reason.
    """

    mask_use: MaskArray
    frame: MaskFrame
    masks: Mapping[str, MaskArray]
    scores: Mapping[str, Score]
    warnings: tuple[str, ...]
    pipeline: Pipeline
    rgb: RgbArray
    mpp_th: float
    facts: Mapping[str, Score]
    tables: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    crossings: Mapping[str, int] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Score]:
        """Facts, scores and warnings by column name; numbers are float, the rest str."""
        return {**self.facts, **self.scores, "warnings": "|".join(self.warnings)}

    @property
    def tissue(self) -> TissueMask:
        """What passed every check, in the place of the default tissue mask."""
        return TissueMask(
            mask=self.mask_use,
            frame=self.frame,
            mask_mpp=(self.mpp_th, self.mpp_th),
            thumbnail=self.rgb,
            threshold=None,
        )

    @property
    def colors(self) -> dict[str, Color]:
        """A colour per check with a mask: gray for glass, else spread over the hues."""
        glass = {check.name for check in self.pipeline.checks if check.removes_glass}
        names = [name for name in self.masks if name not in glass]
        hues = [(0.02 + n * 0.618) % 1.0 for n in range(len(names))]
        rgb = [colorsys.hsv_to_rgb(hue, 0.85, 0.9) for hue in hues]
        colors = {
            name: (round(r * 255), round(g * 255), round(b * 255))
            for name, (r, g, b) in zip(names, rgb, strict=True)
        }
        return {name: colors.get(name, GLASS_COLOR) for name in self.masks}

    def overlay(self) -> RgbArray:
        """The work image with what each check took tinted, and what is left outlined."""
        colors = self.colors
        return overlay(self.rgb, self.mask_use, [(m, colors[n]) for n, m in self.masks.items()])

    def __repr__(self) -> str:
        height, width = self.mask_use.shape
        size = f"{width} x {height} px, {self.mpp_th:.4g} µm/px"
        parts = f"{len(self.masks)} masks, {len(self.scores)} scores, {len(self.warnings)} warnings"
        used = f"{self.mask_use.mean():.1%} to use"
        return f"QcResult(pipeline {self.pipeline.name!r}, {size}, {used}, {parts})"

    def _repr_html_(self) -> str:
        took = [
            f"{name}: {mask.mean():.1%}" for name, mask in self.masks.items() if bool(mask.any())
        ]
        lines = [f"to use: {self.mask_use.mean():.1%} of the image", *took, *self.warnings]
        return notebook_html(self.overlay(), f"Quality control: {self.pipeline.name}", lines)
