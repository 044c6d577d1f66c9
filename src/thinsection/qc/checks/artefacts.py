"""Finds what went wrong at the microscope and on the glass: blur and folds.

Defocus takes the finest band of detail first, so that the ratio of its amplitude to that of the
next band falls, whatever the strength of the stain. A fold is twice as thick as tissue of the same
stain usually is, and elongated.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.morphology import drop_small, fill_small, keep_elongated
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, Regions, area, length

_NUM_STAIN_BINS = 24
_SQUARE_BLOCKS = 8  # along the edge of a square
_FEW_SQUARES = 400  # all are looked at
_SUSPECT = 1.15  # times the limit of blur: around such squares all are looked at


@dataclass(frozen=True, kw_only=True)
class Focus(QcCheck):
    """Removes blurred tissue; `<name>_median_ratio` says how sharp the slide is as a whole."""

    kind: ClassVar[str] = "focus"
    name: str = "focus"
    image_mpp: float = 0.5  # where detail is measured, µm/px; a slide of less is taken as it is
    block_px: int = 32  # edge of the blocks in which it is averaged, px of that image
    floor: float = 0.006  # gray, [0, 1], added to the coarse band: noise does not decide
    # blurred where the ratio is below this share of the slide's 75th percentile (sharp tissue) ...
    relative: float = 0.55
    min_ratio: float = 0.3  # ... or below this, for a slide that is blurred as a whole
    min_area: str = area("0.004 mm2")  # smaller blurred areas, and holes in them, do not count

    def __call__(self, view: QcView) -> Outcome:
        ns, tissue = view.ns, view.mask_use
        if not bool(tissue.any()):
            return Outcome(warnings=(f"{self.name}: no tissue to judge the focus of",))
        blocks = self._sharpness(ns, view.regions_at(self.image_mpp), tissue)
        smooth = ns.ndimage.median_filter(blocks, size=3, mode="nearest")  # borders, not specks
        ratio = filters.resized_nearest(ns, smooth, view.gray.shape)
        measured = ratio[tissue]
        limit = max(self.min_ratio, self.relative * float(ns.xp.percentile(measured, 75)))
        least = view.area_px(self.min_area)
        blurred = drop_small(ns, fill_small(ns, (ratio < limit) & tissue, least), least)
        outcome = view.left_regions(tissue & ~blurred, f"{self.name}_removed")
        median = {f"{self.name}_median_ratio": float(ns.xp.median(measured))}
        return replace(outcome, scores={**outcome.scores, **median})

    def _sharpness(self, ns: ArrayNamespace, regions: Regions, tissue: Array) -> Array:
        """Amplitude of the finest band over that of the next, per block, float32; 0 without tissue.

        The finest lies between no blur and a Gaussian of 1 px, the next between 1 and 2 px. Of a
        large slide every second square of 8 x 8 blocks in both directions is looked at, then all
        around those that may be blurred; what lies between sharp squares is their mean.

        Memory: O(one square + blocks).
        """
        ((width, height), read), edge = regions, self.block_px
        xp, size = ns.xp, _SQUARE_BLOCKS * edge
        values = xp.zeros((math.ceil(height / edge), math.ceil(width / edge)), dtype=xp.float32)
        known, suspect = xp.zeros_like(values), _SUSPECT * self.relative
        inside = filters.resized_nearest(ns, tissue, values.shape)
        rows, columns = math.ceil(height / size), math.ceil(width / size)
        step = 2 if rows * columns > _FEW_SQUARES else 1
        todo = {(r, c) for r in range(0, rows, step) for c in range(0, columns, step)}
        lowest: dict[tuple[int, int], float] = {}
        while todo:
            for r, c in sorted(todo):
                part = (c * size, r * size, min((c + 1) * size, width), min((r + 1) * size, height))
                lowest[r, c] = math.inf
                at = tuple(slice(n * _SQUARE_BLOCKS, (n + 1) * _SQUARE_BLOCKS) for n in (r, c))
                if bool(inside[at].any()):
                    found = self._ratios(ns, ns.upload(read(*part), reason="square"))
                    values[at], known[at] = found, inside[at]
                    lowest[r, c] = float(xp.median(found[inside[at]]))
            measured = values[known > 0]
            sharp = float(xp.percentile(measured, 75)) if measured.size else 0.0
            low = [s for s, ratio in lowest.items() if ratio < max(self.min_ratio, suspect * sharp)]
            near = {(r + y, c + x) for r, c in low for y in (-1, 0, 1) for x in (-1, 0, 1)}
            todo = {(r, c) for r, c in near - set(lowest) if 0 <= r < rows and 0 <= c < columns}
        total, weight = (filters.gaussian(ns, a, _SQUARE_BLOCKS / 3) for a in (values, known))
        return xp.where(known > 0, values, total / xp.maximum(weight, 1e-6))

    def _ratios(self, ns: ArrayNamespace, rgb: Array) -> Array:
        gray = filters.gray32_from_rgb(ns, rgb)
        once, twice = (filters.gaussian(ns, gray, sigma) for sigma in (1.0, 2.0))
        fine = filters.block_means(ns, abs(gray - once), self.block_px)
        return fine / (filters.block_means(ns, abs(once - twice), self.block_px) + self.floor)


@dataclass(frozen=True, kw_only=True)
class Folds(QcCheck):
    """Removes folds: thick, saturated, elongated regions of the mask."""

    kind: ClassVar[str] = "folds"
    name: str = "folds"
    width: str = length("80 um")  # of a usual fold; detail finer than a sixth of it is smoothed
    # a fold's px have so many times the usual optical density of their balance of stains ...
    min_thickness: float = 1.35
    min_saturation: float = 1.0  # ... and so many times the tissue's median saturation
    min_elongation: float = 2.5  # squared length over area from which on a region is a fold
    min_area: str = area("0.005 mm2")  # smaller regions are no folds

    def __call__(self, view: QcView) -> Outcome:
        ns, tissue = view.ns, view.mask_use
        if not bool(tissue.any()):
            return Outcome(warnings=(f"{self.name}: no tissue to look for folds in",))
        sigma = view.length_px(self.width) / 6
        colour = filters.gaussian(ns, filters.saturation(ns, view.rgb), sigma)
        thick = _relative_thickness(view, sigma) > self.min_thickness
        usual_colour = float(ns.xp.median(colour[tissue]))
        found = tissue & thick & (colour > self.min_saturation * usual_colour)
        elongated = keep_elongated(ns, found, self.min_elongation, view.area_px(self.min_area))
        return view.left_regions(tissue & ~elongated, f"{self.name}_removed")


def _relative_thickness(view: QcView, sigma_px: float) -> Array:
    """Smoothed optical density over that of tissue with the same balance of stains, float64 (H, W).

    Two layers absorb twice as much in every channel, so that the balance stays. Dark epithelium is
    dark for its balance as well, and gets about 1. The mask must not be empty.
    """
    ns, xp, mask = view.ns, view.ns.xp, view.mask_use
    table = -xp.log10(xp.maximum(xp.arange(256) / 255.0, 1 / 255.0))
    density = [filters.gaussian(ns, table[view.rgb[..., c]], sigma_px) for c in range(3)]
    total = density[0] + density[1] + density[2]
    balance = density[0] / xp.maximum(total, 1e-6)  # red light: haematoxylin takes it, eosin not
    edges = xp.quantile(balance[mask], xp.linspace(0, 1, _NUM_STAIN_BINS + 1)[1:-1])
    stain_bin = xp.searchsorted(edges, balance)
    usual = xp.ones(_NUM_STAIN_BINS)
    for n in range(_NUM_STAIN_BINS):
        if (values := total[mask & (stain_bin == n)]).size:
            usual[n] = xp.median(values)
    return total / xp.maximum(usual[stain_bin], 1e-6)
