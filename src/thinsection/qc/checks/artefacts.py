"""Finds folds, ink, bubbles and dirt in the probabilities of the artefact network.

Each check has its own thresholds for these probabilities. `Unsure` measures the tissue in which
no class has a probability above a half.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

from thinsection.arrays import Array, ArrayNamespace, filters, morphology
from thinsection.arrays.bands import row_bands
from thinsection.arrays.rings import disks_of_rings
from thinsection.errors import ConfigError
from thinsection.qc.checks.artefact_network import INKS, ink_sum, without_stain
from thinsection.qc.checks.border import tissue_at_border
from thinsection.qc.checks.check import (
    COARSEST_MPP,
    Outcome,
    QcCheck,
    QcView,
    area,
    length,
)

# Colours from 0 to 255: ink whose channels differ by less is black; reddish ink with less red is
# brown.
_BLACK_COLOUR = 30
_BROWN_RED = 150


class Folds(QcCheck, kind="folds", asks_network=True, coarsest_mpp=COARSEST_MPP):
    """Shows folds (experimental): narrow bands, and wide areas that are surely folds."""

    name: str = "folds"
    # true removes them from the tissue; false only shows and measures them
    remove: bool = False
    # sigma of the Gaussian over which the probability of a fold is averaged
    smooth: str = length("8 um")
    # a narrow fold exceeds this probability somewhere, a sure fold everywhere
    threshold: float = 0.6
    # a sure fold may have any shape, but this fraction of it must exceed this probability
    sure_threshold: float = 0.8
    min_sure_share: float = 0.4
    # a narrow fold exceeds this probability everywhere
    lower_threshold: float = 0.3
    # limits for a narrow fold: least squared length over area, and largest mean width
    min_elongation: float = 4.0
    max_width: str = length("110 um")
    # smaller regions are not folds
    min_area: str = area("0.003 mm2")

    def __call__(self, view: QcView) -> Outcome:
        ns = view.ns
        thresholds = (self.lower_threshold, self.threshold, self.sure_threshold)
        possible_px, likely_px, sure_px = self._exceeding(view, thresholds)
        sure_regions = morphology.mostly(
            ns, likely_px & view.mask_use, sure_px, self.min_sure_share
        )
        regions = morphology.mostly(ns, possible_px, likely_px, 0.0) & view.mask_use
        min_area_px = view.area_px(self.min_area)
        folds = morphology.keep_elongated(ns, sure_regions, 0.0, min_area_px)
        folds |= morphology.keep_elongated(
            ns,
            regions,
            self.min_elongation,
            min_area_px,
            view.length_px(self.max_width),
        )
        border = tissue_at_border(ns, view.mask_use, view.mpp_th)
        left = view.mask_use & (border | ~folds)
        outcome = view.left_regions(left, f"{self.name}_removed")
        return replace(outcome, unjudged_area=border)

    @property
    def share_column(self) -> str:
        return f"{self.name}_removed_percent"

    @property
    def removes(self) -> bool:
        return self.remove

    def removing(self) -> Self:
        return replace(self, remove=True)

    def _exceeding(self, view: QcView, thresholds: Sequence[float]) -> list[Array]:
        """Pixels around which the mean probability of a fold exceeds each threshold."""
        ns = view.ns
        sigma_px = view.length_px(self.smooth)
        folds = view.artefact_maps()["fold"]
        masks = [ns.xp.empty(folds.shape, dtype=bool) for _ in thresholds]
        reach = len(filters.gaussian_kernel(sigma_px)) // 2
        for band in row_bands(len(folds), reach):
            probability = folds[band.around] / ns.xp.float32(255)
            smooth = filters.gaussian(ns, probability, sigma_px)[band.own]
            for mask, threshold in zip(masks, thresholds, strict=True):
                mask[band.inside] = smooth > threshold
        return masks


class Ink(QcCheck, kind="ink", asks_network=True):
    """Removes pen ink of any colour, translucent or opaque; no later check adds it back."""

    name: str = "ink"
    # threshold for the probability of ink of any colour by the artefact network
    threshold: float = 0.5
    # smaller spots that this network finds are dropped
    min_area: str = area("6400 um2")

    def __call__(self, view: QcView) -> Outcome:
        ns = view.ns
        found = view.pen_ink()
        # ink on glass needs no removal
        pen_ink = found.ink & view.mask_use
        ink = pen_ink
        unjudged = found.unjudged & view.mask_use
        del found  # frees memory
        if view.mpp_th <= COARSEST_MPP:
            seen = ink_sum(view.artefact_maps()) > 255 * self.threshold
            seen = without_stain(ns, seen, view.rgb)
            seen = morphology.drop_small(ns, seen, view.area_px(self.min_area))
            border = tissue_at_border(ns, view.mask_use, view.mpp_th)
            ink = pen_ink | (seen & ~border)
            unjudged |= seen & border & ~ink
        outcome = view.without(ink, self.name)
        color = ink_color(ns, view.rgb[ink])
        return replace(
            outcome,
            scores={**outcome.scores, f"{self.name}_color": color},
            # a run without quality control removes the same ink
            sure_area=pen_ink,
            unjudged_area=unjudged,
        )


def ink_color(ns: ArrayNamespace, rgb: Array) -> str:
    """The most frequent of blue, green, red, black and brown in colours (N, 3); 'NA' for none."""
    if not len(rgb):
        return "NA"
    counts = ns.xp.bincount(_nearest_ink(ns, rgb), minlength=len(INKS))
    return INKS[int(counts.argmax())]


def _nearest_ink(ns: ArrayNamespace, rgb: Array) -> Array:
    """Index in `INKS` of the ink that is most similar to each colour of (N, 3), uint8 (N,)."""
    xp = ns.xp
    red, green, blue = (rgb[..., channel].astype(xp.int16) for channel in range(3))
    lowest, highest = filters.extremes(ns, [red, green, blue])
    nearest = xp.full(red.shape, INKS.index("red"), dtype=xp.uint8)
    nearest[(green > blue) & (2 * green > red + blue) & (red < _BROWN_RED)] = (
        INKS.index("brown")
    )
    nearest[(blue >= red) & (blue >= green)] = INKS.index("blue")
    nearest[(green > red) & (green > blue)] = INKS.index("green")
    nearest[highest - lowest < _BLACK_COLOUR] = INKS.index("black")
    return nearest


class Bubbles(QcCheck, kind="bubbles", asks_network=True, coarsest_mpp=COARSEST_MPP):
    """Removes air bubbles: round rings and the area inside them."""

    name: str = "bubbles"
    # least probability of a bubble's rim
    threshold: float = 0.6
    # least fraction of the rim that is visible
    min_seen: float = 0.35
    # smaller and larger bubbles are ignored
    min_area: str = area("0.01 mm2")
    max_area: str = area("2.5 mm2")

    def __call__(self, view: QcView) -> Outcome:
        ns = view.ns
        min_area_px = view.area_px(self.min_area)
        max_area_px = view.area_px(self.max_area)
        if min_area_px > max_area_px:
            raise ConfigError(
                f"{self.kind}.min_area must be at most max_area, got {self.min_area!r} "
                f"and {self.max_area!r}"
            )
        rim = view.artefact_exceeds("bubble", self.threshold)
        bubbles = disks_of_rings(
            ns.download(rim, reason="rings"),
            min_seen=self.min_seen,
            min_radius_px=math.sqrt(min_area_px / math.pi),
            max_radius_px=math.sqrt(max_area_px / math.pi),
        )
        border = tissue_at_border(ns, view.mask_use, view.mpp_th)
        found = ns.upload(bubbles, reason="rings") & ~border
        return replace(view.without(found, self.name), unjudged_area=border)


class Dirt(QcCheck, kind="dirt", asks_network=True, coarsest_mpp=COARSEST_MPP):
    """Removes the edge of a coverslip, or the area outside the slide; only shows dust."""

    name: str = "dust"
    shows: Literal["dust", "coverslip", "edge"] = "dust"
    # true removes dust from the tissue, too; false only shows and measures it (experimental)
    remove: bool = False
    # threshold for the probability
    threshold: float = 0.4
    # smaller regions are dropped
    min_area: str = area("1000 um2")
    # least squared length over area of a coverslip's edge
    min_elongation: float = 8.0

    def __call__(self, view: QcView) -> Outcome:
        dirt = view.artefact_exceeds(self.shows, self.threshold)
        elongation = self.min_elongation if self.shows == "coverslip" else 0.0
        least_px = view.area_px(self.min_area)
        dirt = morphology.keep_elongated(view.ns, dirt, elongation, least_px)
        if self.shows != "dust":
            # a coverslip's edge and a slide's edge go on to the border of the picture
            return view.without(dirt, self.name)
        border = tissue_at_border(view.ns, view.mask_use, view.mpp_th)
        return replace(view.without(dirt & ~border, self.name), unjudged_area=border)

    @property
    def removes(self) -> bool:
        return self.remove or self.shows != "dust"

    def removing(self) -> Self:
        return replace(self, remove=True)


class Unsure(
    QcCheck,
    kind="unsure",
    asks_network=True,
    coarsest_mpp=COARSEST_MPP,
    marks=False,
):
    """Measures the fraction of the tissue in which the artefact network is unsure of the class."""

    name: str = "unsure"
    # tissue is unsure if its most probable class has less than this probability
    threshold: float = 0.5

    def __call__(self, view: QcView) -> Outcome:
        xp = view.ns.xp
        likeliest = xp.zeros(view.mask_use.shape, dtype=xp.uint8)
        for probability in view.artefact_maps().values():
            xp.maximum(likeliest, probability, out=likeliest)
        sure = likeliest > 255 * self.threshold
        share = view.share(view.mask_use & sure)
        return Outcome(scores={f"{self.name}_percent": share})
