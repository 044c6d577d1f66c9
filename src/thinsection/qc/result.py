"""What quality control says of one slide and its tiles, and which slides a run leaves out."""

import colorsys
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.config import nearest
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.files.pages import notebook_html
from thinsection.qc.checks.check import Score
from thinsection.qc.pipeline import Pipeline
from thinsection.qc.tissue import Color, box_fractions, overlay
from thinsection.types import CoordsL0, MaskArray, MaskFrame, RgbArray

_GLASS_COLOR: Color = (222, 226, 231)
_OPERATORS = {
    **{"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt},
    **{"==": operator.eq, "!=": operator.ne},
}
_RULE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|==|!=|<|>)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QcResult:
    """What quality control says of one slide."""

    mask_use: MaskArray  # bool (H, W), True = tissue that passed every check
    frame: MaskFrame  # where the masks lie on the slide
    masks: Mapping[str, MaskArray]  # by check, what it removed (or filled), bool (H, W)
    scores: Mapping[str, Score]  # columns of the slide's row, in the order of the checks
    warnings: tuple[str, ...]  # sentences about the slide
    pipeline: Pipeline  # the pipeline that ran
    rgb: RgbArray  # the work image, uint8 (H, W, 3)
    mpp_th: float  # µm per px of it
    facts: Mapping[str, Score]  # what the file says of itself, for the row
    tables: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)  # for the report, by check
    seconds: Mapping[str, float] = field(default_factory=dict)  # per check, and of reading
    crossings: Mapping[str, int] = field(default_factory=dict)  # of host and device, by reason

    @property
    def row(self) -> dict[str, Score]:
        """Facts, scores and warnings by column name; numbers are float, the rest str."""
        return {**self.facts, **self.scores, "warnings": "|".join(self.warnings)}

    @property
    def colors(self) -> dict[str, Color]:
        """A colour per check with a mask: gray for glass, else spread over the hues."""
        glass = {check.name for check in self.pipeline.checks if check.removes_glass}
        colors = dict.fromkeys(self.masks, _GLASS_COLOR)
        for n, name in enumerate(name for name in self.masks if name not in glass):
            red, green, blue = colorsys.hsv_to_rgb((0.02 + n * 0.618) % 1.0, 0.85, 0.9)
            colors[name] = (round(red * 255), round(green * 255), round(blue * 255))
        return colors

    def overlay(self) -> RgbArray:
        """The work image with what each check took tinted, and what is left outlined."""
        colors = self.colors
        return overlay(self.rgb, self.mask_use, [(m, colors[n]) for n, m in self.masks.items()])

    def __repr__(self) -> str:
        (height, width), used = self.mask_use.shape, f"{self.mask_use.mean():.1%} to use"
        size = f"{width} x {height} px, {self.mpp_th:.4g} µm/px"
        parts = f"{len(self.masks)} masks, {len(self.scores)} scores, {len(self.warnings)} warnings"
        return f"QcResult(pipeline {self.pipeline.name!r}, {size}, {used}, {parts})"

    def _repr_html_(self) -> str:
        took = [f"{name}: {mask.mean():.1%}" for name, mask in self.masks.items() if mask.any()]
        lines = [f"to use: {self.mask_use.mean():.1%} of the image", *took, *self.warnings]
        return notebook_html(self.overlay(), f"Quality control: {self.pipeline.name}", lines)


def tile_qc_columns(
    result: QcResult, coords_l0: CoordsL0, tile_px_l0: int
) -> dict[str, npt.NDArray[np.float32]]:
    """Per check, the share of each tile's area that it touched, float32 (N,) in [0, 1].

    Tiles of an edge in level-0 px have their top-left corners at coords_l0, (N, 2). Checks that
    only measure, or that fill holes, have no column. The share is exact: px of the mask that a
    tile's border cuts count by the part inside. Area outside the slide counts as untouched.

    Memory: O(H * W + N) for each check.

    Raises:
        InvalidInputError: coords_l0 is not (N, 2), or the tile has no size.
    """
    if coords_l0.ndim != 2 or coords_l0.shape[1] != 2:
        got = f"{coords_l0.dtype} {coords_l0.shape}"
        raise InvalidInputError(f"coords_l0 must be int64 of shape (N, 2), got {got}")
    if tile_px_l0 <= 0:
        raise InvalidInputError(f"tile_px_l0 must be > 0, got {tile_px_l0}")
    filling = {check.name for check in result.pipeline.checks if check.fills}
    size_l0 = (tile_px_l0, tile_px_l0)
    taken = {name: mask for name, mask in result.masks.items() if name not in filling}
    return {n: box_fractions(mask, result.frame, coords_l0, size_l0) for n, mask in taken.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class QcRule:
    """A slide fails where a column of its row compares so with a number: `pixels_to_use<1000`."""

    column: str
    symbol: str  # <, <=, >, >=, == or !=
    limit: float

    def __str__(self) -> str:
        return f"{self.column}{self.symbol}{self.limit:g}"


def parse_rule(text: str) -> QcRule:
    """The rule of a text such as 'pixels_to_use<1000'.

    Raises:
        ConfigError: the text is no such comparison.
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise ConfigError(f"qc rule must read like 'pixels_to_use<1000', got {text!r}")
    return QcRule(column=match[1], symbol=match[2], limit=float(match[3]))


def qc_fail(row: Mapping[str, Score], rule: QcRule | str) -> bool:
    """Whether the rule holds for the row of a `QcResult`, i.e. the slide fails.

    Raises:
        ConfigError: no such column, or it holds no number.
    """
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    name = rule.column
    if name not in row:
        raise ConfigError(f"qc rule must name a column, got {name!r}{nearest(name, row)}")
    value = row[name]
    if isinstance(value, str):
        raise ConfigError(f"qc rule must name a column of numbers, got {name!r} = {value!r}")
    return bool(_OPERATORS[rule.symbol](value, rule.limit))
