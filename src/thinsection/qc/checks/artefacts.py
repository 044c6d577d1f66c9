"""Finds what went wrong at the microscope and on the glass: blur, folds, ink, bubbles.

Defocus takes the finest band of detail first, so that the ratio of its amplitude to that of the
next band falls, whatever the strength of the stain. The others ask `artefact_maps` what a px shows.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Literal

from thinsection.arrays import Array, ArrayNamespace, filters, morphology
from thinsection.qc.checks.artefact_maps import INKS
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area, length

_WHITE_PERCENTILE = 97  # of a slide's gray: glass, or the lightest tissue
_GLASS_GRAY, _GREY_GLASS_GRAY = (
    0.03,
    0.09,
)  # that glass may lie below it; if it has no colour:
_GLASS_COLOUR = 0.03  # less than this between channels, [0, 1]
_SQUARE_BLOCKS = 8  # along the edge of a square
_FEW_SQUARES = 400  # all are looked at
_SUSPECT = 1.15  # times the limit of blur: around such squares all are looked at


class Focus(QcCheck, kind="focus"):
    """Removes blurred tissue; `<name>_median_ratio` says how sharp the slide is as a whole."""

    name: str = "focus"
    image_mpp: float = (
        0.5  # where detail is measured, µm/px; a slide of less is taken as it is
    )
    block_px: int = 32  # edge of the blocks in which it is averaged, px of that image
    floor: float = (
        0.006  # gray, [0, 1], added to the coarse band: noise does not decide
    )
    # blurred where the ratio is below this share of the slide's 75th percentile (sharp tissue) ...
    relative: float = 0.55
    min_ratio: float = 0.27  # ... or below this, for a slide that is blurred as a whole
    min_area: str = area(
        "0.004 mm2"
    )  # smaller blurred areas, and holes in them, do not count

    def __call__(self, view: QcView) -> Outcome:
        ns, tissue, glass = view.ns, view.mask_use, _empty(view)
        # a block that glass is part of has a border in it, which is detail of its own
        judged = tissue & ~morphology.dilated_by_disk(
            ns, glass, view.length_px("12 um")
        )
        if not bool(judged.any()):
            return Outcome(warnings=(f"{self.name}: no tissue to judge the focus of",))
        blocks = self._sharpness(view, judged, glass)
        smooth = ns.ndimage.median_filter(
            blocks, size=3, mode="nearest"
        )  # borders, not specks
        ratio = filters.resized_nearest(ns, smooth, view.gray.shape)
        measured, least = ratio[tissue & ~glass], view.area_px(self.min_area)
        limit = max(
            self.min_ratio, self.relative * float(ns.xp.percentile(measured, 75))
        )
        blurred = (ratio < limit) & tissue & ~glass
        blurred = morphology.drop_small(
            ns, morphology.fill_small(ns, blurred, least), least
        )
        # a block that is sharp in part looks sharp
        blurred = (
            morphology.dilated_by_disk(ns, blurred, view.length_px("8 um"))
            & tissue
            & ~glass
        )
        outcome = view.left_regions(tissue & ~blurred, f"{self.name}_removed")
        median = {f"{self.name}_median_ratio": float(ns.xp.median(measured))}
        return replace(outcome, scores={**outcome.scores, **median})

    def _sharpness(self, view: QcView, judged: Array, glass: Array) -> Array:
        """Amplitude of the finest band over that of the next, per block, float32.

        The finest lies between no blur and a Gaussian of 1 px, the next between 1 and 2 px; of both
        goes what glass has of them: noise. Of a large slide every second square of 8 x 8 blocks in
        both directions is looked at, then all around those that may be blurred; the rest is a mean.

        Memory: O(one square + blocks).
        """
        (width, height), read = view.regions_at(self.image_mpp)
        ns, xp, edge, size = (
            view.ns,
            view.ns.xp,
            self.block_px,
            _SQUARE_BLOCKS * self.block_px,
        )
        shape = (math.ceil(height / edge), math.ceil(width / edge))
        bands, known = (
            xp.zeros((2, *shape), dtype=xp.float32),
            xp.zeros(shape, dtype=bool),
        )
        planes = (judged, glass, view.gray)
        inside, plain, gray = (filters.resized_nearest(ns, p, shape) for p in planes)
        rows, columns = math.ceil(height / size), math.ceil(width / size)
        step = 2 if rows * columns > _FEW_SQUARES else 1
        squares = set(product(range(rows), range(columns)))
        todo = {(r, c) for r, c in squares if r % step == c % step == 0}
        while todo:
            for r, c in sorted(todo):
                part = (
                    c * size,
                    r * size,
                    min((c + 1) * size, width),
                    min((r + 1) * size, height),
                )
                at = tuple(
                    slice(n * _SQUARE_BLOCKS, (n + 1) * _SQUARE_BLOCKS) for n in (r, c)
                )
                if bool(inside[at].any()):
                    square = ns.upload(read(*part), reason="square")
                    bands[(slice(None), *at)] = detail_bands(ns, square, edge)
                    known[at] = True
            squares -= todo
            tissue = known & inside
            for noise in (known & plain, plain & False):
                ratio = self._ratio(ns, bands, noise, gray)
                sharp = (
                    float(xp.percentile(ratio[tissue], 75))
                    if bool(tissue.any())
                    else 0.0
                )
                if (
                    sharp > 1.5 * self.min_ratio
                ):  # else this tissue has less noise than the glass
                    break
            low = tissue & (
                ratio < max(self.min_ratio, _SUSPECT * self.relative * sharp)
            )
            shares = [
                filters.block_means(ns, m * 1.0, _SQUARE_BLOCKS) for m in (low, tissue)
            ]
            suspects = ns.download(xp.argwhere(shares[0] > shares[1] / 2)).tolist()
            around = product((-1, 0, 1), repeat=2)
            todo = squares & {
                (r + y, c + x) for (r, c), (y, x) in product(suspects, around)
            }
        weights = (tissue * ratio, tissue * xp.float32(1))
        sums = [filters.gaussian(ns, a, _SQUARE_BLOCKS / 3) for a in weights]
        return xp.where(tissue, ratio, sums[0] / xp.maximum(sums[1], 1e-6))

    def _ratio(
        self, ns: ArrayNamespace, bands: Array, glass: Array, gray: Array
    ) -> Array:
        """The finest band over the next, without the noise of light that blocks of glass have."""
        xp, noise = ns.xp, [0.0, 0.0]
        if bool(glass.any()):  # of as much light: its square is as the light
            noise = [float(xp.median((b**2 / (gray + 0.01))[glass])) for b in bands]
        fine, coarse = (
            xp.sqrt((b**2 - n * gray).clip(0)) for b, n in zip(bands, noise)
        )
        return fine / (coarse + self.floor)


def detail_bands(ns: ArrayNamespace, rgb: Array, block_px: int) -> Array:
    """Amplitudes of the finest band of detail and of the next, float32 (2, blocks, blocks)."""
    gray = filters.gray32_from_rgb(ns, rgb)
    once, twice = (filters.gaussian(ns, gray, sigma) for sigma in (1.0, 2.0))
    bands = (abs(gray - once), abs(once - twice))
    return ns.xp.stack([filters.block_means(ns, band, block_px) for band in bands])


def _empty(view: QcView) -> Array:
    """Where there is glass inside of tissue, as in fat: it has no detail to judge."""
    white = float(view.ns.xp.percentile(view.gray[::4, ::4], _WHITE_PERCENTILE))
    near = white - filters.gaussian(view.ns, view.gray, 0.7)
    lowest, highest = filters.extremes(view.ns, view.rgb.transpose(2, 0, 1))
    colour = (highest - lowest) / view.ns.xp.float32(255)
    grey = (
        filters.gaussian(view.ns, colour, 0.7) < _GLASS_COLOUR
    )  # there the lamp may vary
    return near < view.ns.xp.where(grey, _GREY_GLASS_GRAY, _GLASS_GRAY)


class Folds(QcCheck, kind="folds"):
    """Removes folds: bands darker than the tissue around them, with borders along both sides."""

    name: str = "folds"
    smooth: str = length("16 um")  # sigma over which P of the small net is averaged
    threshold: float = 0.6  # on it, somewhere in a fold ...
    lower_threshold: float = 0.25  # ... and everywhere in it
    min_elongation: float = (
        1.5  # squared length over area from which on a region is a fold
    )
    min_area: str = area("0.003 mm2")  # smaller regions are no folds

    def __call__(self, view: QcView) -> Outcome:
        least, sigma = view.area_px(self.min_area), view.length_px(self.smooth)
        p = filters.gaussian(view.ns, view.shown("fold"), sigma)
        found = morphology.mostly(
            view.ns, p > self.lower_threshold, p > self.threshold, 0.0
        )
        folds, tissue = morphology.keep_elongated, view.mask_use
        found = folds(view.ns, found & tissue, self.min_elongation, least)
        return view.left_regions(view.mask_use & ~found, f"{self.name}_removed")


class Ink(QcCheck, kind="ink"):
    """Removes ink of a pen, of any colour or of one; it stays out of the mask."""

    name: str = "pen"
    color: Literal["any", "blue", "green", "red", "black", "brown"] = "any"
    threshold: float = 0.5  # on P of ink, whatever its colour
    around: str = length("32 um")  # within which px of ink agree on a colour
    min_area: str = area(
        "6400 um2"
    )  # smaller spots of ink, of all colours together, are dropped

    def __call__(self, view: QcView) -> Outcome:
        ns, inks = view.ns, [view.shown(f"pen_{name}") for name in INKS]
        found = sum(inks) > self.threshold
        found = morphology.drop_small(ns, found, view.area_px(self.min_area))
        if self.color != "any":
            # a stroke has one colour: what most px around say
            edge = max(1, round(view.length_px(self.around)))
            grids = [filters.block_means(ns, plane, edge) for plane in inks]
            votes = ns.xp.stack([filters.gaussian(ns, grid, 1.0) for grid in grids])
            own = votes.argmax(axis=0) == INKS.index(self.color)
            found &= own.repeat(edge, 0).repeat(edge, 1)[: len(found), : found.shape[1]]
        return view.found(found, self.name)


class Bubbles(QcCheck, kind="bubbles"):
    """Removes air bubbles: their rings, and what closed rings hold."""

    name: str = "bubbles"
    threshold: float = 0.6  # on P of a bubble's rim, somewhere ...
    lower_threshold: float = 0.4  # ... and on P of a thin dark line, all around
    gap: str = length("64 um")  # in a ring that still counts as closed
    max_elongation: float = (
        1.6  # of what a ring holds: squared length over area, 0.95 of a disc
    )
    max_area: str = area("2.5 mm2")  # of what a ring holds
    min_share: float = 0.03  # of ring and inside that is surely rim
    min_area: str = area("6400 um2")  # smaller finds are dropped

    def __call__(self, view: QcView) -> Outcome:
        ns, rim, gap = view.ns, view.shown("bubble"), view.length_px(self.gap)
        lines = rim + view.shown("coverslip") > self.lower_threshold
        holes = morphology.dilated_by_disk(
            ns, ~morphology.dilated_by_disk(ns, lines, gap), gap
        )
        held = holes & ~morphology.keep_elongated(ns, holes, self.max_elongation, 0)
        held &= ~morphology.drop_small(ns, held, view.area_px(self.max_area))
        found = morphology.mostly(
            ns, lines | held, rim > self.threshold, self.min_share
        )
        return view.found(
            morphology.drop_small(ns, found, view.area_px(self.min_area)), self.name
        )


class Dirt(QcCheck, kind="dirt"):
    """Removes what lies on the glass: dust, a coverslip's edge, or what is outside of the slide."""

    name: str = "dust"
    shows: Literal["dust", "coverslip", "edge"] = "dust"
    threshold: float = 0.5  # on P
    min_area: str = area("1000 um2")  # smaller finds are dropped
    min_elongation: float = 8.0  # of a coverslip's edge: squared length over area

    def __call__(self, view: QcView) -> Outcome:
        found = view.shown(self.shows) > self.threshold
        long, least = (
            self.min_elongation * (self.shows == "coverslip"),
            view.area_px(self.min_area),
        )
        return view.found(
            morphology.keep_elongated(view.ns, found, long, least), self.name
        )
