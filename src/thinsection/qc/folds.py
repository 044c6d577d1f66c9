"""Finds tissue folds: twice as thick as tissue of the same stain usually is, and elongated."""

from dataclasses import dataclass

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.colour import saturation
from thinsection.arrays.morphology import labelled
from thinsection.qc.light import remove_regions
from thinsection.qc.sizes import area_px, length_px
from thinsection.qc.view import Outcome, QcView

_NUM_STAIN_BINS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Folds:
    """Removes folds.

    Attributes:
        name: of the check, prefix of its columns.
        width: of a usual fold; detail finer than a sixth of it is smoothed away.
        min_thickness: a px may be part of a fold from this multiple of the optical density that
            tissue with the same balance of stains usually has on this slide ...
        min_saturation: ... and from this multiple of the tissue's median saturation.
        min_elongation: squared length over area from which on a region is a fold.
        min_area: smaller regions are no folds.
    """

    name: str = "folds"
    width: str = "80 um"
    min_thickness: float = 1.35
    min_saturation: float = 1.0
    min_elongation: float = 2.5
    min_area: str = "0.005 mm2"


def folds(view: QcView, params: Folds) -> Outcome:
    """Removes thick, saturated, elongated regions of the mask."""
    ns = view.ns
    if not bool(view.mask_use.any()):
        return Outcome(warnings=(f"{params.name}: no tissue to look for folds in",))
    sigma = length_px(params.width, view.mpp_th, key="width") / 6
    colour = filters.gaussian(ns, saturation(ns, view.rgb), sigma)
    usual_colour = float(ns.xp.median(colour[view.mask_use]))
    found = (
        view.mask_use
        & (relative_thickness(ns, view.rgb, view.mask_use, sigma) > params.min_thickness)
        & (colour > params.min_saturation * usual_colour)
    )
    least = area_px(params.min_area, view.mpp_th, key="min_area")
    elongated = keep_elongated(ns, found, params.min_elongation, least)
    return remove_regions(view, elongated, params.name)


def relative_thickness(ns: ArrayNamespace, rgb: Array, mask: Array, sigma_px: float) -> Array:
    """Optical density over that of tissue with the same balance of stains, float64 (H, W).

    Two layers absorb twice as much in every channel, so that the balance between channels stays.
    Dark epithelium is dark for its balance as well, and gets about 1.

    Args:
        ns: where arrays live.
        rgb: uint8 (H, W, 3).
        mask: tissue, from which the usual densities are taken; not empty.
        sigma_px: of the smoothing.
    """
    xp = ns.xp
    table = -xp.log10(xp.maximum(xp.arange(256) / 255.0, 1 / 255.0))
    density = [filters.gaussian(ns, table[rgb[..., c]], sigma_px) for c in range(3)]
    total = density[0] + density[1] + density[2]
    balance = density[0] / xp.maximum(total, 1e-6)  # red light: haematoxylin takes it, eosin not
    edges = xp.quantile(balance[mask], xp.linspace(0, 1, _NUM_STAIN_BINS + 1)[1:-1])
    stain_bin = xp.searchsorted(edges, balance)
    usual = xp.ones(_NUM_STAIN_BINS)
    for n in range(_NUM_STAIN_BINS):
        values = total[mask & (stain_bin == n)]
        if values.size:
            usual[n] = xp.median(values)
    return total / xp.maximum(usual[stain_bin], 1e-6)


def keep_elongated(
    ns: ArrayNamespace, mask: Array, min_elongation: float, min_area_px: float
) -> Array:
    """The 8-connected regions whose length is min_elongation times their mean width or more.

    A region's length is estimated from its own spread along its main axis, its mean width from
    its area over that length, so that a bent fold still counts as long.
    """
    xp = ns.xp
    labels, count = labelled(ns, mask, connectivity=8)
    if count == 0:
        return mask.copy()
    rows, columns = xp.nonzero(labels)
    region = labels[rows, columns]

    def sums(weights: Array | None = None) -> Array:
        return xp.bincount(region, weights=weights, minlength=count + 1).astype(xp.float64)

    area = xp.maximum(sums(), 1)
    y, x = rows.astype(xp.float64), columns.astype(xp.float64)
    mean_y, mean_x = sums(y) / area, sums(x) / area
    yy = sums(y * y) / area - mean_y**2 + 1 / 12
    xx = sums(x * x) / area - mean_x**2 + 1 / 12
    xy = sums(x * y) / area - mean_x * mean_y
    spread = xp.sqrt(((yy - xx) / 2) ** 2 + xy**2)
    length = xp.sqrt(12 * ((yy + xx) / 2 + spread))
    keep = (length * length / area >= min_elongation) & (area >= min_area_px)
    keep[0] = False
    return keep[labels]
