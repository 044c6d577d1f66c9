"""Finds tissue folds: twice as thick as tissue of the same stain usually is, and elongated."""

from dataclasses import dataclass
from typing import ClassVar

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.colour import saturation
from thinsection.arrays.morphology import keep_elongated
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length

_NUM_STAIN_BINS = 24


@dataclass(frozen=True, kw_only=True)
class Folds(QcCheck):
    """Removes folds: thick, saturated, elongated regions of the mask.

    Attributes:
        width: of a usual fold; detail finer than a sixth of it is smoothed away.
        min_thickness: a px may be part of a fold from this multiple of the optical density that
            tissue with the same balance of stains usually has on this slide ...
        min_saturation: ... and from this multiple of the tissue's median saturation.
        min_elongation: squared length over area from which on a region is a fold.
        min_area: smaller regions are no folds.
    """

    kind: ClassVar[str] = "folds"
    name: str = "folds"
    width: str = length("80 um")
    min_thickness: float = 1.35
    min_saturation: float = 1.0
    min_elongation: float = 2.5
    min_area: str = area("0.005 mm2")

    def __call__(self, view: QcView) -> Outcome:
        ns, tissue = view.ns, view.mask_use
        if not bool(tissue.any()):
            return Outcome(warnings=(f"{self.name}: no tissue to look for folds in",))
        sigma = view.length_px(self.width) / 6
        colour = filters.gaussian(ns, saturation(ns, view.rgb), sigma)
        thick = relative_thickness(ns, view.rgb, tissue, sigma) > self.min_thickness
        usual_colour = float(ns.xp.median(colour[tissue]))
        found = tissue & thick & (colour > self.min_saturation * usual_colour)
        elongated = keep_elongated(ns, found, self.min_elongation, view.area_px(self.min_area))
        return view.left_regions(tissue & ~elongated, f"{self.name}_removed")


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
