"""Finds tissue folds: twice as thick, so darker and more saturated, and elongated."""

from dataclasses import dataclass

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.colour import optical_density, saturation
from thinsection.arrays.morphology import labelled
from thinsection.qc.light import remove_regions
from thinsection.qc.sizes import area_px, length_px
from thinsection.qc.view import Outcome, QcView


@dataclass(frozen=True, slots=True, kw_only=True)
class Folds:
    """Removes folds.

    Attributes:
        name: of the check, prefix of its columns.
        width: of a usual fold; detail finer than a third of it is smoothed away.
        min_thickness: optical density, as a multiple of the tissue's median, from which on a px
            may be part of a fold.
        min_saturation: saturation, as a multiple of the tissue's median, likewise.
        min_elongation: ratio of the axes of a region from which on it is a fold.
        min_area: smaller regions are no folds.
    """

    name: str = "folds"
    width: str = "80 um"
    min_thickness: float = 1.5
    min_saturation: float = 1.1
    min_elongation: float = 2.5
    min_area: str = "0.01 mm2"


def folds(view: QcView, params: Folds) -> Outcome:
    """Removes dark, saturated, elongated regions of the mask."""
    ns = view.ns
    if not bool(view.mask_use.any()):
        return Outcome(warnings=(f"{params.name}: no tissue to look for folds in",))
    sigma = length_px(params.width, view.mpp_th, key="width") / 6
    thickness = filters.gaussian(ns, optical_density(ns, view.rgb), sigma)
    colour = filters.gaussian(ns, saturation(ns, view.rgb), sigma)
    usual_thickness = float(ns.xp.median(thickness[view.mask_use]))
    usual_colour = float(ns.xp.median(colour[view.mask_use]))
    found = (
        view.mask_use
        & (thickness > params.min_thickness * usual_thickness)
        & (colour > params.min_saturation * usual_colour)
    )
    least = area_px(params.min_area, view.mpp_th, key="min_area")
    elongated = keep_elongated(ns, found, params.min_elongation, least)
    return remove_regions(view, elongated, params.name)


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
