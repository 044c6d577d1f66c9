"""Finds what went wrong at the microscope and on the glass: blur, folds, ink, bubbles.

Defocus takes the finest band of detail first, so that the ratio of its amplitude to that of the
next band falls, whatever the strength of the stain. The others ask `artefact_maps` what a px shows.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.morphology import (
    dilated_by_disk,
    drop_small,
    fill_small,
    keep_elongated,
    mostly,
)
from thinsection.qc.checks.artefact_maps import INKS
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, Regions, area, length

_WHITE_PERCENTILE = 97  # of a slide's gray: glass, or the lightest tissue
_GLASS_GRAY = 0.03  # that glass may lie below it
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
    min_ratio: float = 0.27  # ... or below this, for a slide that is blurred as a whole
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
        blurred = (ratio < limit) & tissue & ~_empty(view)
        blurred = drop_small(ns, fill_small(ns, blurred, least), least)
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
                    square = ns.upload(read(*part), reason="square")
                    found = detail_ratios(ns, square, self.block_px, self.floor)
                    values[at], known[at] = found, inside[at]
                    lowest[r, c] = float(xp.median(found[inside[at]]))
            measured = values[known > 0]
            sharp = float(xp.percentile(measured, 75)) if measured.size else 0.0
            low = [s for s, ratio in lowest.items() if ratio < max(self.min_ratio, suspect * sharp)]
            near = {(r + y, c + x) for r, c in low for y in (-1, 0, 1) for x in (-1, 0, 1)}
            todo = {(r, c) for r, c in near - set(lowest) if 0 <= r < rows and 0 <= c < columns}
        total, weight = (filters.gaussian(ns, a, _SQUARE_BLOCKS / 3) for a in (values, known))
        return xp.where(known > 0, values, total / xp.maximum(weight, 1e-6))


def detail_ratios(ns: ArrayNamespace, rgb: Array, block_px: int, floor: float) -> Array:
    """Amplitude of the finest band of detail over that of the next, per block of uint8 (H, W, 3).

    See `Focus` for `floor`: sharp tissue at 0.5 µm/px has about 0.4 to 0.9, blurred tissue < 0.27.
    """
    gray = filters.gray32_from_rgb(ns, rgb)
    once, twice = (filters.gaussian(ns, gray, sigma) for sigma in (1.0, 2.0))
    fine = filters.block_means(ns, abs(gray - once), block_px)
    return fine / (filters.block_means(ns, abs(once - twice), block_px) + floor)


def _empty(view: QcView) -> Array:
    """Where there is glass inside of tissue, as in fat: it has no detail to judge."""
    white = float(view.ns.xp.percentile(view.gray[::4, ::4], _WHITE_PERCENTILE))
    return filters.gaussian(view.ns, view.gray, 1.5) > white - _GLASS_GRAY


@dataclass(frozen=True, kw_only=True)
class Folds(QcCheck):
    """Removes folds: bands darker than the tissue around them, with borders along both sides."""

    kind: ClassVar[str] = "folds"
    name: str = "folds"
    smooth: str = length("16 um")  # sigma over which P of the small net is averaged
    threshold: float = 0.4  # on it, somewhere in a fold ...
    lower_threshold: float = 0.25  # ... and everywhere in it
    min_elongation: float = 1.5  # squared length over area from which on a region is a fold
    min_area: str = area("0.003 mm2")  # smaller regions are no folds

    def __call__(self, view: QcView) -> Outcome:
        least, sigma = view.area_px(self.min_area), view.length_px(self.smooth)
        shown = filters.gaussian(view.ns, view.artefact_maps()["fold"], sigma)
        found = mostly(view.ns, shown > self.lower_threshold, shown > self.threshold, 0.0)
        found = keep_elongated(view.ns, found & view.mask_use, self.min_elongation, least)
        return view.left_regions(view.mask_use & ~found, f"{self.name}_removed")


@dataclass(frozen=True, kw_only=True)
class Ink(QcCheck):
    """Removes ink of a pen, of any colour or of one; it stays out of the mask."""

    kind: ClassVar[str] = "ink"
    name: str = "pen"
    color: Literal["any", "blue", "green", "red", "black", "brown"] = "any"
    threshold: float = 0.5  # on P of ink, whatever its colour
    min_share: float = 0.35  # of ink in a region of ink and fold, from which on it all is ink
    around: str = length("32 um")  # sigma within which px of ink agree on a colour
    min_area: str = area("6400 um2")  # smaller spots of ink, of all colours together, are dropped

    def __call__(self, view: QcView) -> Outcome:
        ns, maps = view.ns, view.artefact_maps()
        inks = {name: maps[f"pen_{name}"] for name in INKS}
        ink = sum(inks.values())
        # ink over tissue may look like a fold here and there: what is mostly ink is ink
        dark = ink + maps["fold"] > self.threshold
        found = mostly(ns, dark, ink > self.threshold, self.min_share)
        found = drop_small(ns, found | (ink > self.threshold), view.area_px(self.min_area))
        if self.color != "any":
            # a stroke has one colour: what most px around say
            around = view.length_px(self.around)
            smooth = {name: filters.gaussian(ns, p, around) for name, p in inks.items()}
            own = smooth.pop(self.color)
            for other in smooth.values():
                found &= own >= other
        return view.left(view.mask_use & ~found, self.name, enforce=True)


@dataclass(frozen=True, kw_only=True)
class Bubbles(QcCheck):
    """Removes air bubbles: their rings, and what closed rings hold."""

    kind: ClassVar[str] = "bubbles"
    name: str = "bubbles"
    threshold: float = 0.5  # on P of a bubble's rim
    gap: str = length("24 um")  # in a ring that still counts as closed
    rim: str = length("64 um")  # across
    max_elongation: float = 2.2  # of what a ring holds: squared length over area, 0.95 of a disc
    min_area: str = area("6400 um2")  # smaller finds are dropped

    def __call__(self, view: QcView) -> Outcome:
        held = _ringed(view, self)
        found = held | (view.artefact_maps()["bubble"] > self.threshold)
        found = drop_small(view.ns, found, view.area_px(self.min_area))
        return view.left(view.mask_use & ~found, self.name, enforce=True)


@dataclass(frozen=True, kw_only=True)
class Dirt(QcCheck):
    """Removes what lies on the glass: dust, a coverslip's edge, or what is outside of the slide."""

    kind: ClassVar[str] = "dirt"
    name: str = "dust"
    shows: Literal["dust", "coverslip", "edge"] = "dust"
    threshold: float = 0.5  # on P
    min_area: str = area("1000 um2")  # smaller finds are dropped
    min_elongation: float = 8.0  # of a coverslip's edge: squared length over area

    def __call__(self, view: QcView) -> Outcome:
        ns, maps, least = view.ns, view.artefact_maps(), view.area_px(self.min_area)
        found = maps[self.shows]
        if self.shows == "coverslip":  # here and there a line looks like a bubble's rim
            lines = (found + maps["bubble"] > self.threshold) & ~_ringed(view, Bubbles())
            lines = keep_elongated(ns, lines, self.min_elongation, least)
            found = mostly(ns, lines, found > self.threshold, 0.0)
        else:
            found = drop_small(ns, found > self.threshold, least)
        return view.left(view.mask_use & ~found, self.name, enforce=True)


def _ringed(view: QcView, check: Bubbles) -> Array:
    """Closed rings of thin dark lines, and what they hold, where that is round."""
    ns, maps, gap = view.ns, view.artefact_maps(), view.length_px(check.gap)
    lines = maps["bubble"] + maps["coverslip"] > check.threshold
    closed = ~dilated_by_disk(ns, ~dilated_by_disk(ns, lines, gap), gap)
    holes = ns.ndimage.binary_fill_holes(closed) & ~closed
    held = holes & ~keep_elongated(ns, holes, check.max_elongation, 0)
    held = drop_small(ns, held, view.area_px(check.min_area))
    near = dilated_by_disk(ns, held, view.length_px(check.rim) + gap)
    return held | (closed & near)
