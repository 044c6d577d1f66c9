"""Finds blurred tissue: how much fine detail is left of the coarse detail, block by block.

Tissue at about 1 µm/px has contrast at every scale. Defocus takes the finest band first, so that
the ratio of energy in a fine band to energy in a coarse one falls, whatever the stain's strength.
HistoQC's measure is the plain edge strength over a wide area: it falls wherever tissue is pale or
ends.
"""

from dataclasses import dataclass

import numpy as np

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.colour import gray_from_rgb
from thinsection.arrays.morphology import drop_small, fill_small
from thinsection.qc.light import remove_regions
from thinsection.qc.sizes import area_px
from thinsection.qc.view import Outcome, QcView, Strips


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """Removes blurred tissue.

    Attributes:
        name: of the check, prefix of its columns.
        image_mpp: resolution at which detail is measured, µm/px.
        block_px: edge of the blocks in which it is averaged, px of that image.
        min_ratio: blurred where fine energy / coarse energy is below this.
        relative: ... or below this share of the slide's own sharp tissue (its 75th percentile).
        min_contrast: blocks whose coarse band has a lower standard deviation (gray, [0, 1]) have
            nothing to be sharp or blurred.
        min_area: smaller blurred areas, and sharp holes in them, do not count.
    """

    name: str = "focus"
    image_mpp: float = 1.0
    block_px: int = 32
    min_ratio: float = 0.05
    relative: float = 0.4
    min_contrast: float = 0.01
    min_area: str = "0.01 mm2"


def focus(view: QcView, params: Focus) -> Outcome:
    """Removes blurred tissue; `<name>_median_ratio` says how sharp the slide is as a whole."""
    ns = view.ns
    fine, coarse = band_energies(ns, view.strips_at(params.image_mpp, params.block_px), params)
    shape = (view.gray.shape[0], view.gray.shape[1])
    fine, coarse = _local_sum(ns, fine), _local_sum(ns, coarse)
    ratio = filters.resized_nearest(ns, fine / ns.xp.maximum(coarse, 1e-12), shape)
    textured = filters.resized_nearest(ns, coarse >= params.min_contrast**2, shape)
    measured = ratio[view.mask_use & textured]
    if measured.size == 0:
        return Outcome(warnings=(f"{params.name}: no textured tissue to judge the focus of",))
    limit = max(params.min_ratio, params.relative * float(ns.xp.percentile(measured, 75)))
    least = area_px(params.min_area, view.mpp_th, key="min_area")
    blurred = (ratio < limit) & textured & view.mask_use
    blurred = drop_small(ns, fill_small(ns, blurred, least), least)
    outcome = remove_regions(view, blurred, params.name)
    median = float(ns.xp.median(measured))
    return Outcome(
        mask_use=outcome.mask_use,
        touched=outcome.touched,
        scores={**outcome.scores, f"{params.name}_median_ratio": median},
    )


def band_energies(ns: ArrayNamespace, strips: Strips, params: Focus) -> tuple[Array, Array]:
    """Mean energy of the fine and of the coarse band in each block, each (rows, columns).

    The fine band lies between no blur and a Gaussian of 1 px, the coarse one between 2 and 4 px.

    Memory: O(one strip + blocks).
    """
    fine: list[Array] = []
    coarse: list[Array] = []
    for rgb in strips.strips:
        gray = gray_from_rgb(ns, ns.upload(rgb)).astype(ns.xp.float32)
        blurred = {sigma: filters.gaussian(ns, gray, sigma) for sigma in (1.0, 2.0, 4.0)}
        fine.append(block_means(ns, (gray - blurred[1.0]) ** 2, params.block_px))
        coarse.append(block_means(ns, (blurred[2.0] - blurred[4.0]) ** 2, params.block_px))
    return ns.xp.concatenate(fine), ns.xp.concatenate(coarse)


def block_means(ns: ArrayNamespace, values: Array, block_px: int) -> Array:
    """Means of square blocks, (ceil(H / block), ceil(W / block)); the last ones may be partial."""
    rows, columns = (ns.xp.arange(0, edge, block_px) for edge in values.shape)
    sums = ns.xp.add.reduceat(ns.xp.add.reduceat(values, rows, axis=0), columns, axis=1)
    heights, widths = (
        np.minimum(block_px, edge - np.arange(0, edge, block_px)) for edge in values.shape
    )
    return sums / ns.xp.asarray(np.outer(heights, widths).astype(np.float32))


def _local_sum(ns: ArrayNamespace, blocks: Array) -> Array:
    """Mean over 3 x 3 blocks, so that one block without nuclei does not decide."""
    return ns.ndimage.uniform_filter(blocks, size=3, mode="nearest")
