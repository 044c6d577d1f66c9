"""Finds tissue of any stain: it absorbs, colours or breaks the light of the slide's glass.

Optical density is measured against the glass that the slide itself shows, and limits
follow how uneven that glass is: pale, gray, dark and unevenly lit slides need no setting.
docs/tissue.md shows each step in pictures.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from thinsection.arrays import Array, ArrayNamespace, morphology
from thinsection.arrays.filters import block_means, extremes
from thinsection.qc.checks.check import COARSEST_MPP, Outcome, QcCheck, QcView, area

Px = Callable[[float], float]  # px in a length of so many µm
# dark: frozen or thick; unsure: H&E or IHC, and treated as H&E; '' where nothing is
Stain = Literal["H&E", "IHC", "unsure", "grey", "dark", ""]

# Of the px that are looked at; borders are found to half of it.
_PX_UM = 16.0
# A picture of larger px is looked at as if this were their edge: gaps, rims and specks of less
# than a px could not be told from tissue.
_COARSEST_PX_UM = 24.0
# Of 255: px that are darker in all channels are not tissue; the scanner saw nothing.
_BLACK = 30

# Optical density against the glass. No slide is so even that less than this is evidence.
_COLOUR = 0.025
_DENSITY = 0.035
_TEXTURE = 0.0025
_LINE = 0.006
# Textured px must absorb as much.
_FAINT = 0.008
# Px that absorb more are no glass, even under a dim lamp.
_PALE = 0.35
# Colour that flat px of glass may have.
_GLASS_COLOUR = 0.06
# Texture that glass may have: that of real slides and of noisy scans ends at 0.009, and
# the smooth parts of tissue that fills a field begin at 0.015.
_GLASS_TEXTURE = 0.012
# An estimate of glass that is as dense or as coloured as tissue, and as textured, is tissue.
_TISSUE_DENSITY = 0.06
_TISSUE_COLOUR = 0.025
_TISSUE_TEXTURE = 0.005
# Density of R, G, B of glass where a slide shows none.
_TYPICAL_GLASS = (0.02, 0.022, 0.02)
# Bins of the histogram of flat px, and distance of glass from its peak.
_GLASS_BINS = 140
_GLASS_REACH = 0.04

# Share of brown tissue: more is IHC, less than the second is none.
_IHC_BROWN = 0.08
_NO_BROWN = 0.02
# Over three channels; up to it brown is DAB however pale other tissue is.
_DAB_DENSITY = 1.2
# Balance of green: below it there is too little eosin to tell H&E from haematoxylin alone.
_LEAST_GREEN = 0.42
# Channels that differ by less in their share of density have no colour.
_GREY_BALANCE = 0.06

# The slide's edge: dark, with little colour for its density, flat, at the border.
_SHADE = 0.1
_SHADE_COLOUR = 0.04
_SHADE_TINT = 0.15
_SHADE_REACH_UM = 80.0
# Gaps that are closed in solid tissue, and in the net of fat cells.
_GAP_UM = 32.0
_CELL_UM = 176.0
# Thinner regions are not tissue.
_THIN_UM = 40.0
_NET_HOLE_UM2 = 60_000.0
# A net has many long lines in a window.
_MIN_LINE_PX = 6
_NET_WINDOW_PX = 21
_NET_SHARE = 0.03
# No fibre runs straight for so long.
_STRAIGHT_PX = 75
# Tissue ends where this share of its own density is reached.
_RIM_UM = 40.0
_RIM_SHARE = 0.4


class Tissue(QcCheck, kind="tissue", removes_glass=True):
    """Keeps tissue of any stain, also pale, fatty and dark tissue, and recognises the stain."""

    name: str = "glass"
    # smaller pieces are dropped
    min_piece: str = area("20000 um2")
    # smaller holes are filled
    min_hole: str = area("10000 um2")
    # px darker than this in all channels, 0 to 255, are no tissue
    black_level: int = _BLACK
    # P of tissue by the artefact network above which a px is added; 1: none is
    added_tissue: float = 1.0
    # P of glass by it above which a px goes; 1: none goes
    removed_glass: float = 1.0

    def __call__(self, view: QcView) -> Outcome:
        detected = detect_tissue(
            view.ns,
            view.rgb,
            view.mpp_th,
            min_piece_px=view.area_px(self.min_piece),
            min_hole_px=view.area_px(self.min_hole),
            black_level=self.black_level,
        )
        mask = detected.mask
        # the network compares with the slide's glass, so it cannot judge a field without any
        can_judge = detected.shows_glass and view.mpp_th <= COARSEST_MPP
        if self.asks_network and can_judge:
            mask |= view.artefact_probability("tissue") > self.added_tissue
            mask &= view.artefact_probability("glass") <= self.removed_glass
            mask = morphology.fill_small(view.ns, mask, view.area_px(self.min_hole))
            mask = morphology.drop_small(view.ns, mask, view.area_px(self.min_piece))
        outcome = view.left(view.mask_use & mask, self.name)
        scores = {**outcome.scores, "stain": detected.stain}
        return replace(outcome, scores=scores, stain=detected.stain)

    @property
    def asks_network(self) -> bool:
        """True if a limit is below 1."""
        return min(self.added_tissue, self.removed_glass) < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """What the detector finds on a thumbnail."""

    mask: Array  # bool (H, W)
    stain: Stain
    shows_glass: bool  # False of a field that tissue fills


def detect_tissue(
    ns: ArrayNamespace,
    rgb: Array,
    px_um: float,
    *,
    min_piece_px: float,
    min_hole_px: float,
    black_level: int,
) -> Detected:
    """Detects the tissue of a thumbnail, and its stain.

    Args:
        ns: device.
        rgb: uint8 (H, W, 3).
        px_um: µm per px of it.
        min_piece_px: smaller pieces are dropped.
        min_hole_px: smaller holes are filled.
        black_level: px darker in all channels are not tissue.

    Memory: O(H * W / (16 / px_um)²): about 150 bytes per px of 16 µm.
    """
    factor = max(1, round(_PX_UM / px_um))
    area_factor = float(factor**2)
    looked_at_um = min(px_um * factor, _COARSEST_PX_UM)

    def px(length_um: float) -> float:
        return length_um / looked_at_um

    light = _measure_light(ns, _reduce(ns, rgb, factor), black_level)
    evidence = _find_evidence(ns, light, px)
    mask = _close(ns, evidence.body, px(_GAP_UM + _RIM_UM) / 1.5)
    mask &= ~_beyond_rim(ns, light, evidence.body, mask, px)
    near_solid = morphology.dilated_by_disk(ns, evidence.solid, px(32.0))
    net = _find_net(ns, light, evidence.lines & ~near_solid, px)
    mask = _close(ns, mask | net, px(_GAP_UM))
    mask = morphology.opened_by_disk(ns, mask, px(32.0))
    mask = morphology.fill_small(ns, mask, max(min_hole_px / area_factor, 1.0))
    # in a field that is smaller than the least piece, a piece that fills it is kept
    least_piece = min(min_piece_px / area_factor, mask.size / 2)
    mask = morphology.drop_small(ns, mask, least_piece)
    enlarged = mask.repeat(factor, axis=0).repeat(factor, axis=1)
    return Detected(
        mask=enlarged[: rgb.shape[0], : rgb.shape[1]],
        stain=_measure_stain(ns, light, mask),
        shows_glass=bool(light.glass.any()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Light:
    """Effect of a slide on light, float32 (H, W) each; density is base 10."""

    density: Array  # (H, W, 3), against the glass
    total: Array  # mean over the channels
    near: Array  # the same, over 3 x 3 px
    densest: Array  # of the channels, over 3 x 3 px
    colour: Array  # that less the thinnest, over 3 x 3 px
    line: Array  # density of lines thinner than 5 px, above their surroundings
    texture: Array  # mean of `line` over 5 x 5 px
    seen: Array  # bool: not black, not the white or black that stands for unscanned
    glass: Array  # bool: flat px of the glass's own brightness; none where a slide shows none
    glass_density: float  # of the glass itself, against white


def _measure_light(ns: ArrayNamespace, rgb: Array, black_level: int) -> _Light:
    xp = ns.xp
    box = ns.ndimage.uniform_filter
    levels = xp.maximum(xp.arange(256), 1) / 255.0
    against_white = (-xp.log10(levels)).astype(xp.float32)[rgb]
    total = against_white.mean(axis=2)
    line = total - ns.ndimage.grey_opening(total, size=(5, 5))
    texture = box(line, 5)
    lowest, highest = extremes(ns, rgb.transpose(2, 0, 1))
    seen = (lowest < 255) & (highest >= max(black_level, 1))
    flat_limit = 0.0
    if bool(seen.any()):
        smoothest = float(xp.quantile(texture[seen], 0.05))
        flat_limit = min(max(3 * smoothest, 0.004), _GLASS_TEXTURE)
    thinnest, densest = extremes(ns, against_white.transpose(2, 0, 1))
    is_colourless = densest - thinnest < _GLASS_COLOUR
    flat = seen & (texture < flat_limit) & is_colourless & (total < _PALE)
    glass_density, glass = _find_glass(
        ns, against_white, texture, flat, num_seen=int(seen.sum())
    )
    density = against_white - xp.asarray(glass_density, dtype=xp.float32)
    mean = density.mean(axis=2)
    thinnest, densest = extremes(ns, density.transpose(2, 0, 1))
    return _Light(
        density=density,
        total=mean,
        near=box(mean, 3),
        densest=box(densest, 3),
        colour=box(densest - thinnest, 3),
        line=line,
        texture=texture,
        seen=seen,
        glass=glass,
        glass_density=sum(glass_density) / 3,
    )


def _find_glass(
    ns: ArrayNamespace, density: Array, texture: Array, flat: Array, *, num_seen: int
) -> tuple[tuple[float, ...], Array]:
    """Density of the glass, and its mask: the brightest large peak among flat, pale px.

    A field that tissue fills has no glass: its palest tissue is not taken for it.
    """
    xp = ns.xp
    nowhere = xp.zeros_like(flat)
    total = density.mean(axis=2)
    values = total[flat]
    if values.size < max(50, 0.002 * num_seen):
        return _TYPICAL_GLASS, nowhere
    counts = xp.histogram(values, bins=_GLASS_BINS, range=(0.0, _PALE))[0]
    peak = (_brightest_peak(ns.download(counts)) + 0.5) * _PALE / _GLASS_BINS
    glass = flat & (abs(total - peak) < _GLASS_REACH)
    glass_density = tuple(float(xp.median(density[..., c][glass])) for c in range(3))
    is_dense = sum(glass_density) / 3 > _TISSUE_DENSITY
    is_coloured = max(glass_density) - min(glass_density) > _TISSUE_COLOUR
    is_textured = float(xp.median(texture[glass])) > _TISSUE_TEXTURE
    if (is_dense or is_coloured) and is_textured:
        return _TYPICAL_GLASS, nowhere
    return glass_density, glass


def _brightest_peak(counts: Array) -> int:
    """The first bin that is a peak of at least a quarter of the largest."""
    smooth = [int(counts[max(0, n - 3) : n + 4].sum()) for n in range(len(counts))]
    least = 0.25 * max(smooth)
    peak = next(n for n, count in enumerate(smooth) if count >= least)
    while peak < len(smooth) - 1 and smooth[peak + 1] >= smooth[peak]:
        peak += 1
    return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """Masks of px that show tissue."""

    body: Array  # tissue by itself
    solid: Array  # solid tissue
    lines: Array  # thin dark lines


def _find_evidence(ns: ArrayNamespace, light: _Light, px: Px) -> _Evidence:
    xp = ns.xp

    def quantiles(values: Array, lower: float, upper: float) -> tuple[float, float]:
        """Quantiles of the slide's glass; 0 where it shows none."""
        values = values[light.glass]
        if not values.size:
            return 0.0, 0.0
        return float(xp.quantile(values, lower)), float(xp.quantile(values, upper))

    # of its less coloured half: pale tissue may hide in the other
    lower, middle = quantiles(light.colour, 0.25, 0.5)
    colour = max(_COLOUR, middle + 4.0 * (middle - lower))
    lower, upper = quantiles(light.near, 0.25, 0.75)
    dense = max(_DENSITY, 4.0 * (upper - lower))
    middle, upper = quantiles(light.texture, 0.5, 0.9)
    textured = max(_TEXTURE, middle + 2.5 * (upper - middle))
    lowest, upper = quantiles(light.line, 0.0, 0.75)
    thin = max(_LINE, 3.0 * (upper - lowest))

    # pale tissue may be lighter than the glass in one colour, but it absorbs another
    body = (light.colour > colour) & (
        (light.near > colour / 2) | (light.densest > colour)
    )
    body |= (light.texture > textured) & (light.near > _FAINT)
    body |= light.near > dense
    outside = _find_outside(ns, light, textured, px)
    body &= ~outside
    closed = _close(ns, body, px(_GAP_UM))
    return _Evidence(
        body=morphology.opened_by_disk(ns, closed, px(_THIN_UM)),
        solid=morphology.opened_by_disk(ns, body, px(64.0)),
        lines=(light.line > thin) & ~outside,
    )


def _find_outside(ns: ArrayNamespace, light: _Light, textured: float, px: Px) -> Array:
    """The mask of px that were not scanned, and of the slide's edge."""
    xp = ns.xp
    tint = xp.maximum(_SHADE_COLOUR, _SHADE_TINT * light.near)
    shade = (light.near > _SHADE) & (light.colour < tint)
    shade &= light.texture < xp.maximum(textured, 0.06 * light.near)
    edge = _at_border(ns, shade | ~light.seen)
    outside = ~light.seen
    if bool(edge.any()):
        outside |= morphology.dilated_by_disk(ns, edge, px(_SHADE_REACH_UM))
    return outside


def _find_net(ns: ArrayNamespace, light: _Light, lines: Array, px: Px) -> Array:
    """Fat and loose tissue: the area that a net of thin lines spans."""
    ndimage = ns.ndimage
    thick = ndimage.maximum_filter(lines, size=3)
    # the edge of a coverslip would tie the lines that it crosses
    for axis in (0, 1):
        run = ndimage.minimum_filter1d(thick, _STRAIGHT_PX, axis=axis)
        lines = lines & ~ndimage.maximum_filter1d(run, _STRAIGHT_PX, axis=axis)
    net = morphology.keep_elongated(ns, lines, 0.0, _MIN_LINE_PX)
    strong = (net & (light.line > 1.6 * _LINE)).astype(ns.xp.float32)
    net &= ndimage.uniform_filter(strong, _NET_WINDOW_PX) > _NET_SHARE
    net = morphology.opened_by_disk(ns, _close(ns, net, px(_CELL_UM)), px(64.0))
    filled = morphology.fill_small(ns, net, max(1.0, px(1.0) ** 2 * _NET_HOLE_UM2))
    # a hole at the border is none: a small picture may be all "hole"
    net |= filled & ~_at_border(ns, ~net)
    return morphology.dilated_by_disk(ns, net, px(32.0))


def _beyond_rim(
    ns: ArrayNamespace, light: _Light, body: Array, mask: Array, px: Px
) -> Array:
    """Px at the mask's border that are much paler than the tissue beside them."""
    xp = ns.xp
    box = ns.ndimage.uniform_filter
    _, densest = extremes(ns, light.density.transpose(2, 0, 1))
    own = xp.maximum(light.total, densest * 0.5)
    inside = body.astype(xp.float32)
    usual = box(own * inside, 9) / xp.maximum(box(inside, 9), 0.02)
    border = morphology.dilated_by_disk(ns, ~mask, px(_RIM_UM))
    return border & (own < xp.maximum(_RIM_SHARE * usual, _LINE))


def _measure_stain(ns: ArrayNamespace, light: _Light, mask: Array) -> Stain:
    """The stain by the balance of density over red, green and blue.

    Eosin takes green and DAB takes blue: without brown tissue there is no IHC. The
    balance of green alone does not tell them apart, as purple H&E has as little of it as
    IHC has.
    """
    xp = ns.xp
    density = light.density[mask].clip(0.0)
    total = density.sum(axis=1)
    density = density[total > 0.1]
    total = total[total > 0.1]
    if total.size < 50:
        return ""
    middle = float(xp.median(total))
    # ink and folds are denser than most tissue, and DAB is denser than a pale counterstain
    usual = density[total <= max(2 * middle, _DAB_DENSITY)]
    red, green, blue = usual.T
    brown = float(((blue > green) & (blue > 1.3 * red)).mean())
    if brown > _IHC_BROWN:
        return "IHC"
    pale = total <= middle
    balance = density[pale] / total[pale][:, None]
    if float(xp.median(balance.max(axis=1) - balance.min(axis=1))) < _GREY_BALANCE:
        return "grey"
    if brown > _NO_BROWN or float(xp.median(balance[:, 1])) < _LEAST_GREEN:
        return "unsure"
    is_dark = light.glass_density > 0.1 or middle > 1.1
    return "dark" if is_dark else "H&E"


def _close(ns: ArrayNamespace, mask: Array, radius_px: float) -> Array:
    """Closes by a disk, as if the picture went on mirrored beyond its border."""
    height, width = mask.shape
    reach = min(int(radius_px), height, width)
    mirrored = ns.xp.pad(mask, reach, mode="symmetric")
    closed = ~morphology.opened_by_disk(ns, ~mirrored, radius_px)
    return closed[reach : reach + height, reach : reach + width]


def _at_border(ns: ArrayNamespace, mask: Array) -> Array:
    """The regions of a mask that touch the picture's border."""
    labels, _ = morphology.labelled(ns, mask)
    sides = ns.xp.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]])
    return mask & ns.xp.isin(labels, sides)


def _reduce(ns: ArrayNamespace, rgb: Array, factor: int) -> Array:
    """Means of factor x factor px, uint8; the last ones may have fewer."""
    if factor == 1:
        return rgb
    means = [
        block_means(ns, rgb[..., c].astype(ns.xp.float32), factor) for c in range(3)
    ]
    return (ns.xp.stack(means, axis=2) + 0.5).astype(ns.xp.uint8)
