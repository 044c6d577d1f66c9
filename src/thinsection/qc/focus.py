"""Finds blurred tissue: how much of the finest detail is left, block by block.

Tissue has contrast at every scale. Defocus takes the finest band first, so that the ratio of its
amplitude to that of the next band falls, whatever the strength of the stain. HistoQC's measure is
the plain edge strength over a wide area: it falls wherever tissue is pale or ends.
"""

import math
from dataclasses import dataclass

import numpy as np

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.colour import gray32_from_rgb
from thinsection.arrays.morphology import drop_small, fill_small
from thinsection.qc.light import remove_regions
from thinsection.qc.sizes import area_px
from thinsection.qc.view import Outcome, QcView, Strips
from thinsection.types import MaskArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """Removes blurred tissue.

    Attributes:
        name: of the check, prefix of its columns.
        image_mpp: resolution at which detail is measured, µm/px; a slide of less is taken as it is.
        block_px: edge of the blocks in which it is averaged, px of that image.
        floor: amplitude (gray, [0, 1]) added to the coarse band, so that smooth, sharp tissue and
            noise do not decide.
        relative: blurred where the ratio is below this share of the slide's own sharp tissue (the
            75th percentile) ...
        min_ratio: ... or below this, for a slide that is blurred as a whole.
        min_area: smaller blurred areas, and sharp holes in them, do not count.
    """

    name: str = "focus"
    image_mpp: float = 0.5
    block_px: int = 32
    floor: float = 0.006
    relative: float = 0.55
    min_ratio: float = 0.3
    min_area: str = "0.004 mm2"


def focus(view: QcView, params: Focus) -> Outcome:
    """Removes blurred tissue; `<name>_median_ratio` says how sharp the slide is as a whole."""
    ns = view.ns
    if not bool(view.mask_use.any()):
        return Outcome(warnings=(f"{params.name}: no tissue to judge the focus of",))
    strips = view.strips_at(params.image_mpp, params.block_px)
    blocks = sharpness(ns, strips, ns.download(view.mask_use), params)
    smooth = ns.ndimage.median_filter(blocks, size=3, mode="nearest")  # keeps borders, not specks
    ratio = filters.resized_nearest(ns, smooth, (view.gray.shape[0], view.gray.shape[1]))
    measured = ratio[view.mask_use]
    limit = max(params.min_ratio, params.relative * float(ns.xp.percentile(measured, 75)))
    least = area_px(params.min_area, view.mpp_th, key="min_area")
    blurred = drop_small(ns, fill_small(ns, (ratio < limit) & view.mask_use, least), least)
    outcome = remove_regions(view, blurred, params.name)
    median = float(ns.xp.median(measured))
    return Outcome(
        mask_use=outcome.mask_use,
        touched=outcome.touched,
        scores={**outcome.scores, f"{params.name}_median_ratio": median},
    )


def sharpness(ns: ArrayNamespace, strips: Strips, tissue: MaskArray, params: Focus) -> Array:
    """Amplitude of the finest band over that of the next one, per block, float32 (rows, columns).

    The finest band lies between no blur and a Gaussian of 1 px, the next between 1 and 2 px. Only
    the columns of a strip with tissue are looked at; blocks elsewhere are 0.

    Memory: O(one strip + blocks).
    """
    width, height = strips.size
    num_columns = math.ceil(width / params.block_px)
    rows: list[Array] = []
    top = 0
    for rgb in strips.strips:
        bottom = top + rgb.shape[0]
        first, last = (round(edge * tissue.shape[0] / height) for edge in (top, bottom))
        part = tissue[min(first, tissue.shape[0] - 1) : max(last, first + 1)]
        num_rows = math.ceil(rgb.shape[0] / params.block_px)
        values = ns.xp.zeros((num_rows, num_columns), dtype=ns.xp.float32)
        columns = np.flatnonzero(part.any(axis=0)) * width / tissue.shape[1]
        if len(columns):
            left = int(columns[0]) // params.block_px
            right = min(
                num_columns, int(columns[-1] + width / tissue.shape[1]) // params.block_px + 1
            )
            span = slice(left * params.block_px, right * params.block_px)
            gray = gray32_from_rgb(ns, ns.upload(rgb[:, span], reason="strip"))
            values[:, left:right] = _band_ratio(ns, gray, params)
        rows.append(values)
        top = bottom
    return ns.xp.concatenate(rows)


def _band_ratio(ns: ArrayNamespace, gray: Array, params: Focus) -> Array:
    once, twice = (filters.gaussian(ns, gray, sigma) for sigma in (1.0, 2.0))
    fine = block_means(ns, abs(gray - once), params.block_px)
    coarse = block_means(ns, abs(once - twice), params.block_px)
    return fine / (coarse + params.floor)


def block_means(ns: ArrayNamespace, values: Array, block_px: int) -> Array:
    """Means of square blocks, (ceil(H / block), ceil(W / block)); the last ones may be partial."""
    height, width = values.shape
    rows, columns = math.ceil(height / block_px), math.ceil(width / block_px)
    padded = ns.xp.zeros((rows * block_px, columns * block_px), dtype=values.dtype)
    padded[:height, :width] = values
    sums = padded.reshape(rows, block_px, columns, block_px).sum(axis=(1, 3))
    heights, widths = (
        np.minimum(block_px, edge - np.arange(0, edge, block_px)) for edge in (height, width)
    )
    return sums / ns.xp.asarray(np.outer(heights, widths), dtype=values.dtype)
