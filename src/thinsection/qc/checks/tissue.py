"""Finds tissue of any stain: what absorbs, colours or breaks the light of the slide's own glass.

Optical density is measured against the glass that the slide itself shows, and limits follow how
uneven that glass is: pale, gray, dark and unevenly lit slides need no setting. docs/tissue.md shows
each step in pictures.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from thinsection.arrays import Array, ArrayNamespace, morphology
from thinsection.arrays.filters import block_means, extremes
from thinsection.qc.checks.check import Outcome, QcCheck, QcView, area

Px = Callable[[float], float]  # px in a length of so many µm
# dark: frozen or thick; unsure: H&E or IHC, and treated as H&E; '' where nothing is
Stain = Literal["H&E", "IHC", "unsure", "grey", "dark", ""]
_PX_UM = 16.0  # of the px that are looked at; borders are found to half of it
_BLACK = (
    30  # of 255: darker in all channels is no tissue but what the scanner did not see
)
# optical density, against the glass: no slide is so even that less than this says anything ...
_COLOUR, _DENSITY, _TEXTURE, _LINE = 0.025, 0.035, 0.0025, 0.006
_FAINT = 0.008  # ... what is textured must absorb as much
_PALE = 0.35  # what absorbs more is no glass, even under a dim lamp
# texture that glass may have: that of real slides and of noisy scans ends at 0.009, and the
# smooth parts of tissue that fills a field begin at 0.015
_GLASS_TEXTURE = 0.012
# an estimate of glass that is as dense or as coloured as tissue, and as textured, is tissue
_TISSUE_DENSITY = 0.06
_TISSUE_COLOUR = 0.025
_TISSUE_TEXTURE = 0.005
# share of brown tissue: more is IHC, less than the second is none
_IHC_BROWN = 0.08
_NO_BROWN = 0.02
_DAB_DENSITY = (
    1.2  # over three channels; up to it brown is DAB however pale the rest is
)
# balance of green: below it there is too little eosin to tell H&E from haematoxylin alone
_LEAST_GREEN = 0.42
_GREY_BALANCE = (
    0.06  # channels that differ by less in their share of density have no colour
)
# the slide's edge: dark, with little colour for its density, flat, at the border
_SHADE, _SHADE_COLOUR, _SHADE_TINT = 0.1, 0.04, 0.15
_TYPICAL_GLASS = (0.02, 0.022, 0.02)  # where a slide shows none
# µm: gaps closed in solid tissue and in the net of fat cells, what is too thin for tissue
_GAP_UM, _CELL_UM, _THIN_UM, _SHADE_REACH_UM = 32.0, 176.0, 40.0, 80.0
_NET_HOLE_UM2 = 60_000.0
_MIN_LINE_PX, _NET_WINDOW_PX, _NET_SHARE = (
    6,
    21,
    0.03,
)  # a net has many long lines in a window
_STRAIGHT_PX = 75  # no fibre runs straight for so long
_RIM_UM, _RIM_SHARE = (
    40.0,
    0.4,
)  # tissue ends where this share of its own density is reached


class Tissue(QcCheck, kind="tissue", removes_glass=True):
    """Keeps tissue of any stain, pale, fatty and dark too, and says which stain it is."""

    name: str = "glass"
    min_piece: str = area("20000 um2")  # smaller pieces are dropped
    min_hole: str = area("10000 um2")  # smaller holes are filled
    black_level: int = (
        _BLACK  # px darker than this in all channels, 0 to 255, are no tissue
    )

    def __call__(self, view: QcView) -> Outcome:
        areas = view.area_px(self.min_piece), view.area_px(self.min_hole)
        mask, stain = detect_tissue(
            view.ns, view.rgb, view.mpp_th, areas, self.black_level
        )
        outcome = view.left(view.mask_use & mask, self.name)
        return replace(outcome, scores={**outcome.scores, "stain": stain}, stain=stain)


def detect_tissue(
    ns: ArrayNamespace,
    rgb: Array,
    px_um: float,
    areas_px: tuple[float, float],
    black_level: int,
) -> tuple[Array, Stain]:
    """The tissue of a thumbnail, bool (H, W), and its stain.

    Pieces and holes smaller than areas_px go, as do px darker than black_level in all channels.

    Memory: O(H * W / (16 / px_um)²): about 150 bytes per px of 16 µm.
    """
    factor = max(1, round(_PX_UM / px_um))
    light = _measured(ns, _reduced(ns, rgb, factor), black_level)
    um, area = px_um * factor, float(factor**2)

    def px(length_um: float) -> float:
        return length_um / um

    body, solid, lines = _evidence(ns, light, px)
    mask = _closed(ns, body, px(_GAP_UM + _RIM_UM) / 1.5)
    mask &= ~_beyond_rim(ns, light, body, mask, px)
    net = _net(ns, light, lines & ~morphology.dilated_by_disk(ns, solid, px(32.0)), px)
    mask = morphology.opened_by_disk(ns, _closed(ns, mask | net, px(_GAP_UM)), px(32.0))
    mask = morphology.fill_small(ns, mask, max(areas_px[1] / area, 1.0))
    # in a field that is smaller than the least piece, a piece that fills it is kept
    least_piece = min(areas_px[0] / area, mask.size / 2)
    mask = morphology.drop_small(ns, mask, least_piece)
    whole = mask.repeat(factor, axis=0).repeat(factor, axis=1)
    return whole[: rgb.shape[0], : rgb.shape[1]], _stain(ns, light, mask)


@dataclass(frozen=True, slots=True)
class _Light:
    """What a slide does to light, float32 (H, W) each; density is base 10, against the glass."""

    density: Array  # (H, W, 3)
    total: Array  # mean over the channels
    near: Array  # the same, over 3 x 3 px
    colour: Array  # densest channel less the thinnest, over 3 x 3 px
    line: Array  # density above what is there without anything thinner than 5 px
    texture: Array  # mean of `line` over 5 x 5 px
    seen: Array  # bool: not black, not the white or black that stands for unscanned
    glass: Array  # bool: flat px of the glass's own brightness; none where a slide shows none
    glass_density: float  # of the glass itself, against white


def _measured(ns: ArrayNamespace, rgb: Array, black_level: int) -> _Light:
    xp, box = ns.xp, ns.ndimage.uniform_filter
    levels = xp.maximum(xp.arange(256), 1) / 255.0
    density = (-xp.log10(levels)).astype(xp.float32)[rgb]
    total = density.mean(axis=2)
    line = total - ns.ndimage.grey_opening(total, size=(5, 5))
    texture = box(line, 5)
    lowest, highest = extremes(ns, rgb.transpose(2, 0, 1))
    seen = (lowest < 255) & (highest >= max(black_level, 1))
    thin, thick = extremes(ns, density.transpose(2, 0, 1))
    flat_limit = 0.0
    if bool(seen.any()):
        smoothest = float(xp.quantile(texture[seen], 0.05))
        flat_limit = min(max(3 * smoothest, 0.004), _GLASS_TEXTURE)
    flat = seen & (texture < flat_limit) & (thick - thin < 0.06) & (total < _PALE)
    glass, where = _glass(ns, density, texture, flat, int(seen.sum()))
    against = density - xp.asarray(glass, dtype=xp.float32)
    mean, (thin, thick) = against.mean(axis=2), extremes(ns, against.transpose(2, 0, 1))
    near, colour = box(mean, 3), box(thick - thin, 3)
    return _Light(
        against, mean, near, colour, line, texture, seen, where, sum(glass) / 3
    )


def _glass(
    ns: ArrayNamespace, density: Array, texture: Array, flat: Array, num_seen: int
) -> tuple[tuple[float, ...], Array]:
    """Density of the glass, and where it is: the brightest large peak among flat, pale px.

    A field that tissue fills has no glass: its palest tissue is not taken for it.
    """
    xp = ns.xp
    nowhere = xp.zeros_like(flat)
    total = density.mean(axis=2)
    values = total[flat]
    if values.size < max(50, 0.002 * num_seen):
        return _TYPICAL_GLASS, nowhere
    counts = ns.download(xp.histogram(values, bins=140, range=(0.0, _PALE))[0])
    smooth = [int(counts[max(0, n - 3) : n + 4].sum()) for n in range(140)]
    peak = next(n for n, count in enumerate(smooth) if count >= 0.25 * max(smooth))
    while peak < 139 and smooth[peak + 1] >= smooth[peak]:
        peak += 1
    where = flat & (abs(total - (peak + 0.5) * _PALE / 140) < 0.04)
    glass = tuple(float(xp.median(density[..., c][where])) for c in range(3))
    if _is_tissue(glass, float(xp.median(texture[where]))):
        return _TYPICAL_GLASS, nowhere
    return glass, where


def _is_tissue(glass: tuple[float, ...], texture: float) -> bool:
    """Whether an estimate of the glass has the density or colour, and the texture, of tissue."""
    dense = sum(glass) / 3 > _TISSUE_DENSITY
    coloured = max(glass) - min(glass) > _TISSUE_COLOUR
    return (dense or coloured) and texture > _TISSUE_TEXTURE


def _evidence(ns: ArrayNamespace, light: _Light, px: Px) -> tuple[Array, Array, Array]:
    """Px that are tissue by themselves, those of solid tissue, and thin dark lines."""

    def limit(
        least: float, values: Array, low: float, high: float, times: float
    ) -> float:
        if not (found := values[light.glass]).size:
            return least
        lower, upper = (float(ns.xp.quantile(found, q)) for q in (low, high))
        return max(least, (lower if low == 0.5 else 0.0) + times * (upper - lower))

    colour = limit(_COLOUR, light.colour, 0.5, 0.75, 4.0)
    dense = limit(_DENSITY, light.near, 0.25, 0.75, 4.0)
    textured = limit(_TEXTURE, light.texture, 0.5, 0.9, 2.5)
    thin = limit(_LINE, light.line, 0.0, 0.75, 3.0)
    body = (light.colour > colour) & (light.near > colour / 2)
    body |= ((light.texture > textured) & (light.near > _FAINT)) | (light.near > dense)
    faint = ns.xp.maximum(_SHADE_COLOUR, _SHADE_TINT * light.near)
    shade = (light.near > _SHADE) & (light.colour < faint)
    shade &= light.texture < ns.xp.maximum(textured, 0.06 * light.near)
    edge = _at_border(ns, shade | ~light.seen)
    gone = ~light.seen
    if bool(edge.any()):
        gone |= morphology.dilated_by_disk(ns, edge, px(_SHADE_REACH_UM))
    body &= ~gone
    closed = morphology.opened_by_disk(ns, _closed(ns, body, px(_GAP_UM)), px(_THIN_UM))
    return (
        closed,
        morphology.opened_by_disk(ns, body, px(64.0)),
        (light.line > thin) & ~gone,
    )


def _net(ns: ArrayNamespace, light: _Light, lines: Array, px: Px) -> Array:
    """Fat and loose tissue: the area that a net of thin lines spans."""
    thick = ns.ndimage.maximum_filter(lines, size=3)
    for axis in (0, 1):  # the edge of a coverslip would tie what it crosses
        run = ns.ndimage.minimum_filter1d(thick, _STRAIGHT_PX, axis=axis)
        lines = lines & ~ns.ndimage.maximum_filter1d(run, _STRAIGHT_PX, axis=axis)
    net = morphology.keep_elongated(ns, lines, 0.0, _MIN_LINE_PX)
    strong = (net & (light.line > 1.6 * _LINE)).astype(ns.xp.float32)
    net &= ns.ndimage.uniform_filter(strong, _NET_WINDOW_PX) > _NET_SHARE
    net = morphology.opened_by_disk(ns, _closed(ns, net, px(_CELL_UM)), px(64.0))
    filled = morphology.fill_small(ns, net, max(1.0, px(1.0) ** 2 * _NET_HOLE_UM2))
    net |= filled & ~_at_border(ns, ~net)  # a small picture may be all "hole"
    return morphology.dilated_by_disk(ns, net, px(32.0))


def _beyond_rim(
    ns: ArrayNamespace, light: _Light, body: Array, mask: Array, px: Px
) -> Array:
    """Px at the mask's border that have less than a share of the density of the tissue by them."""
    xp, box = ns.xp, ns.ndimage.uniform_filter
    own = xp.maximum(
        light.total, extremes(ns, light.density.transpose(2, 0, 1))[1] * 0.5
    )
    inside = body.astype(xp.float32)
    usual = box(own * inside, 9) / xp.maximum(box(inside, 9), 0.02)
    border = morphology.dilated_by_disk(ns, ~mask, px(_RIM_UM))
    return border & (own < xp.maximum(_RIM_SHARE * usual, _LINE))


def _stain(ns: ArrayNamespace, light: _Light, mask: Array) -> Stain:
    """The stain by the balance of density over red, green and blue.

    Eosin takes green and DAB takes blue: without brown tissue there is no IHC. The balance of green
    alone does not tell them apart, as purple H&E has as little of it as IHC has.
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
    dark = light.glass_density > 0.1 or middle > 1.1
    return "dark" if dark else "H&E"


def _closed(ns: ArrayNamespace, mask: Array, radius_px: float) -> Array:
    """Closed by a disk, as if the picture went on mirrored beyond its border."""
    reach = min(int(radius_px), *mask.shape)
    wide = ~morphology.opened_by_disk(
        ns, ~ns.xp.pad(mask, reach, mode="symmetric"), radius_px
    )
    return wide[reach : reach + mask.shape[0], reach : reach + mask.shape[1]]


def _at_border(ns: ArrayNamespace, mask: Array) -> Array:
    """The regions of a mask that touch the picture's border."""
    labels, _ = morphology.labelled(ns, mask)
    sides = ns.xp.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]])
    return mask & ns.xp.isin(labels, sides)


def _reduced(ns: ArrayNamespace, rgb: Array, factor: int) -> Array:
    """Means of factor x factor px, uint8; the last ones may have fewer."""
    if factor == 1:
        return rgb
    means = [
        block_means(ns, rgb[..., c].astype(ns.xp.float32), factor) for c in range(3)
    ]
    return (ns.xp.stack(means, axis=2) + 0.5).astype(ns.xp.uint8)
