"""Finds blurred tissue: how much of the finest detail is left, block by block.

Tissue has contrast at every scale. Defocus takes the finest band first, so that the ratio of its
amplitude to that of the next band falls, whatever the strength of the stain. HistoQC's measure is
the plain edge strength over a wide area: it falls wherever tissue is pale or ends.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.colour import gray32_from_rgb
from thinsection.arrays.morphology import drop_small, fill_small
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, Strips, area
from thinsection.types import MaskArray


@dataclass(frozen=True, kw_only=True)
class Focus(QcCheck):
    """Removes blurred tissue; `<name>_median_ratio` says how sharp the slide is as a whole.

    Attributes:
        image_mpp: resolution at which detail is measured, µm/px; a slide of less is taken as it is.
        block_px: edge of the blocks in which it is averaged, px of that image.
        floor: amplitude (gray, [0, 1]) added to the coarse band, so that smooth, sharp tissue and
            noise do not decide.
        relative: blurred where the ratio is below this share of the slide's own sharp tissue (the
            75th percentile) ...
        min_ratio: ... or below this, for a slide that is blurred as a whole.
        min_area: smaller blurred areas, and sharp holes in them, do not count.
    """

    kind: ClassVar[str] = "focus"
    name: str = "focus"
    image_mpp: float = 0.5
    block_px: int = 32
    floor: float = 0.006
    relative: float = 0.55
    min_ratio: float = 0.3
    min_area: str = area("0.004 mm2")

    def __call__(self, view: QcView) -> Outcome:
        ns, tissue = view.ns, view.mask_use
        if not bool(tissue.any()):
            return Outcome(warnings=(f"{self.name}: no tissue to judge the focus of",))
        strips = view.strips_at(self.image_mpp, self.block_px)
        blocks = sharpness(ns, strips, ns.download(tissue), self)
        smooth = ns.ndimage.median_filter(blocks, size=3, mode="nearest")  # borders, not specks
        ratio = filters.resized_nearest(ns, smooth, (view.gray.shape[0], view.gray.shape[1]))
        measured = ratio[tissue]
        limit = max(self.min_ratio, self.relative * float(ns.xp.percentile(measured, 75)))
        least = view.area_px(self.min_area)
        blurred = drop_small(ns, fill_small(ns, (ratio < limit) & tissue, least), least)
        outcome = view.left_regions(tissue & ~blurred, f"{self.name}_removed")
        median = {f"{self.name}_median_ratio": float(ns.xp.median(measured))}
        return replace(outcome, scores={**outcome.scores, **median})


def sharpness(ns: ArrayNamespace, strips: Strips, tissue: MaskArray, settings: Focus) -> Array:
    """Amplitude of the finest band over that of the next one, per block, float32 (rows, columns).

    The finest band lies between no blur and a Gaussian of 1 px, the next between 1 and 2 px. Only
    the columns of a strip with tissue are looked at; blocks elsewhere are 0.

    Memory: O(one strip + blocks).
    """
    width, height = strips.size
    num_columns = math.ceil(width / settings.block_px)
    rows: list[Array] = []
    top = 0
    for rgb in strips.strips:
        bottom = top + rgb.shape[0]
        first, last = (round(edge * tissue.shape[0] / height) for edge in (top, bottom))
        part = tissue[min(first, tissue.shape[0] - 1) : max(last, first + 1)]
        num_rows = math.ceil(rgb.shape[0] / settings.block_px)
        values = ns.xp.zeros((num_rows, num_columns), dtype=ns.xp.float32)
        columns = np.flatnonzero(part.any(axis=0)) * width / tissue.shape[1]
        if len(columns):
            left = int(columns[0]) // settings.block_px
            right = min(
                num_columns, int(columns[-1] + width / tissue.shape[1]) // settings.block_px + 1
            )
            span = slice(left * settings.block_px, right * settings.block_px)
            gray = gray32_from_rgb(ns, ns.upload(rgb[:, span], reason="strip"))
            values[:, left:right] = _band_ratio(ns, gray, settings)
        rows.append(values)
        top = bottom
    return ns.xp.concatenate(rows)


def _band_ratio(ns: ArrayNamespace, gray: Array, settings: Focus) -> Array:
    once, twice = (filters.gaussian(ns, gray, sigma) for sigma in (1.0, 2.0))
    fine = filters.block_means(ns, abs(gray - once), settings.block_px)
    coarse = filters.block_means(ns, abs(once - twice), settings.block_px)
    return fine / (coarse + settings.floor)
