"""Result of quality control on one slide: masks, scores, and columns of its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.files.pages import notebook_html
from thinsection.qc.checks.check import EMPTY_SCORE, UNJUDGED, ReportTable, Score
from thinsection.qc.pipeline import Pipeline
from thinsection.qc.tissue import (
    Color,
    Shares,
    TissueMask,
    box_fractions,
    hues,
    overlay,
)
from thinsection.types import CoordsL0, MaskArray, MaskFrame, RgbArray

_GLASS_COLOR: Color = (222, 226, 231)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QcResult:
    """Result of quality control on one slide."""

    mask_use: MaskArray  # bool (H, W), True = tissue that passed every check
    frame: MaskFrame  # place of the masks on the slide
    # by check, pixels that it removed (or filled), bool (H, W)
    masks: Mapping[str, MaskArray]
    # columns of the slide's row, in the order of the checks
    scores: Mapping[str, Score]
    # sentences about the slide
    warnings: tuple[str, ...]
    # the pipeline that ran
    pipeline: Pipeline
    # the work image, uint8 (H, W, 3)
    rgb: RgbArray
    # µm per px of it
    mpp_th: float
    # the file's own metadata, for the row
    facts: Mapping[str, Score]
    # for the report, by check
    tables: Mapping[str, ReportTable] = field(default_factory=dict)
    # per check, and of reading
    seconds: dict[str, float] = field(default_factory=dict)
    # copies between host and device, by reason
    transfers: Mapping[str, int] = field(default_factory=dict)
    # mask without the overruled checks, for tiles; None if it is `mask_use`
    mask_kept: MaskArray | None = None
    # by check, tissue that it could not judge, bool (H, W); a check that judges all has none
    unjudged: Mapping[str, MaskArray] = field(default_factory=dict)
    # True if it was read back: `rgb` comes from a smaller picture, and tables may be missing
    is_stored: bool = False

    @property
    def row(self) -> dict[str, Score]:
        """Facts, scores and warnings by column name; numbers are float, others str."""
        return {**self.facts, **self.scores, "warnings": "|".join(self.warnings)}

    @property
    def tissue(self) -> TissueMask:
        """The mask that tiles are laid on: it passed every check, or the guard kept it."""
        return TissueMask(
            mask=self.mask_use if self.mask_kept is None else self.mask_kept,
            frame=self.frame,
            mask_mpp=(self.mpp_th, self.mpp_th),
            thumbnail=self.rgb,
            stain=str(self.scores.get("stain", "")),
        )

    @property
    def unjudged_tissue(self) -> MaskArray:
        """Tissue that at least one check could not judge, bool (H, W)."""
        return _any_of(self.unjudged, self.tissue.mask)

    @property
    def colors(self) -> dict[str, Color]:
        """A colour per check with a mask: gray for glass, else spread over the hues."""
        glass = {check.name for check in self.pipeline.checks if check.removes_glass}
        others = [name for name in self.masks if name not in glass]
        colors = dict.fromkeys(self.masks, _GLASS_COLOR)
        colors.update(zip(others, hues(len(others))))
        return colors

    def overlay(self) -> RgbArray:
        """The work image, tinted by the checks' masks, with the remaining tissue outlined."""
        colors = self.colors
        tints = [(mask, colors[name]) for name, mask in self.masks.items()]
        return overlay(self.rgb, self.mask_use, tints)

    def __repr__(self) -> str:
        height, width = self.mask_use.shape
        return (
            f"QcResult(pipeline {self.pipeline.name!r}, {width} x {height} px, "
            f"{self.mpp_th:.4g} µm/px, {self.mask_use.mean():.1%} to use, "
            f"{len(self.masks)} masks, {len(self.scores)} scores, "
            f"{len(self.warnings)} warnings)"
        )

    def _repr_html_(self) -> str:
        lines = [f"to use: {self.mask_use.mean():.1%} of the image"]
        for name, mask in self.masks.items():
            if mask.any():
                lines.append(f"{name}: {mask.mean():.1%}")
        lines += self.warnings
        title = f"Quality control: {self.pipeline.name}"
        return notebook_html(self.overlay(), title, lines)


def tile_qc_columns(
    result: QcResult, coords_l0: CoordsL0, tile_px_l0: int
) -> dict[str, Shares]:
    """Per check, the share of each tile's area that it touched, float32 (N,) in [0, 1].

    `unjudged` is the share of the tile that at least one check did not judge.

    Tiles of tile_px_l0 have their top-left corners at coords_l0, (N, 2). Checks that only
    measure, or that fill holes, have no column. Px of the mask that a tile's border cuts
    count by the part inside; area outside the slide counts as untouched.

    Memory: O(H * W + N) for each check.

    Raises:
        InvalidInputError: coords_l0 is not (N, 2), or the tile has no size.
    """
    if coords_l0.shape[1:] != (2,):
        raise InvalidInputError(
            "coords_l0 must be int64 of shape (N, 2), "
            f"got {coords_l0.dtype} {coords_l0.shape}"
        )
    if tile_px_l0 <= 0:
        raise InvalidInputError(f"tile_px_l0 must be > 0, got {tile_px_l0}")
    size_l0 = (tile_px_l0, tile_px_l0)
    filling = {check.name for check in result.pipeline.checks if check.fills}
    shares = {
        name: box_fractions(mask, result.frame, coords_l0, size_l0)
        for name, mask in result.masks.items()
        if name not in filling
    }
    if result.unjudged:
        area = result.unjudged_tissue
        shares[UNJUDGED] = box_fractions(area, result.frame, coords_l0, size_l0)
    return shares


def unjudged_shares(
    unjudged: Mapping[str, MaskArray], tissue: MaskArray
) -> dict[str, Score]:
    """Columns of a slide's row: the share of the tissue that each check could not judge, and any.

    There are none if every check judges all tissue.
    """
    if not unjudged:
        return {}
    counts = {f"{name}_": int(area.sum()) for name, area in unjudged.items()}
    counts[""] = int(_any_of(unjudged, tissue).sum())
    num_px = int(tissue.sum())
    return {
        f"{name}{UNJUDGED}_percent": count / num_px if num_px else EMPTY_SCORE
        for name, count in counts.items()
    }


def _any_of(areas: Mapping[str, MaskArray], tissue: MaskArray) -> MaskArray:
    """Pixels of the tissue that are in at least one area."""
    union = np.zeros_like(tissue)
    for area in areas.values():
        union |= area
    return union & tissue
