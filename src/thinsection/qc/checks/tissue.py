"""Finds tissue of any stain: it is darker, more coloured or more textured than the slide's glass.

Optical density is measured relative to the glass that the slide itself shows. Thresholds depend
on how uneven that glass is, so pale, gray, dark and unevenly lit slides need no setting.
docs/tissue.md shows each step in pictures.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from thinsection.arrays import Array, ArrayNamespace, morphology
from thinsection.arrays.bands import row_bands
from thinsection.arrays.filters import (
    block_means,
    box_mirrored,
    channel_mean,
    extremes,
    opened_by_square,
)
from thinsection.qc.checks.check import COARSEST_MPP, Outcome, QcCheck, QcView, area
from thinsection.qc.checks.printed_dots import find_printed_dots

Px = Callable[[float], float]  # converts µm to px
# dark: frozen or thick; unsure: H&E or IHC, treated as H&E; '' if there is no tissue
Stain = Literal["H&E", "IHC", "unsure", "grey", "dark", ""]

# Edge of the pixels that the detector looks at, µm; borders are accurate to half of it.
_PX_UM = 16.0
# Largest pixel edge by which lengths in µm are converted to px: with coarser pixels they would be
# less than a pixel.
_COARSEST_PX_UM = 24.0
# From 0 to 255: pixels that are darker in all channels show nothing and are not tissue.
_BLACK = 30

# Lower limits of the thresholds, as optical density relative to glass. They apply where the glass
# itself varies very little.
_COLOUR = 0.025
_DENSITY = 0.035
_TEXTURE = 0.0025
_LINE = 0.006
# Lines that are dark enough to be a net of their own. The grid of a camera's fields is a net, too,
# where it is strong: it shows on glass, where a tenth of the px have more than a part of this.
_STRONG_LINE = 0.0096
_STRONG_TIMES = 4.5
# Textured pixels are tissue only if their density exceeds this value.
_FAINT = 0.008
# Pixels with a larger density are not glass, even under a dim lamp.
_PALE = 0.35
# Largest difference between the channels of flat glass pixels.
_GLASS_COLOUR = 0.06
# Largest texture of glass: glass of real slides and of noisy scans ends at 0.009, and smooth parts
# of tissue that fills a field begin at 0.015.
_GLASS_TEXTURE = 0.012
# Glass that is found to be as dense or as coloured as tissue, and as textured, is tissue.
_TISSUE_DENSITY = 0.06
_TISSUE_COLOUR = 0.025
_TISSUE_TEXTURE = 0.005
# Density of R, G, B of glass in slides that show none.
_TYPICAL_GLASS = (0.02, 0.022, 0.02)
# Bins of the histogram of flat pixels, and largest distance of glass from its peak.
_GLASS_BINS = 140
_GLASS_REACH = 0.04

# Fraction of brown tissue: above the first it is IHC, up to the second it is not.
_IHC_BROWN = 0.08
_NO_BROWN = 0.02
# Sum over three channels; brown up to this density is DAB, however pale the other tissue is.
_DAB_DENSITY = 1.2
# Green's fraction of the density: below this there is too little eosin to tell H&E from
# haematoxylin alone.
_LEAST_GREEN = 0.42
# If the channels' fractions of the density differ by less, there is no colour.
_GREY_BALANCE = 0.06

# Grey matter on the glass of a slide with coloured tissue: streaks, dust, shadows of a coverslip.
# Its tint (colour as a fraction of the density, each averaged over `_TINT_PX` px) is less than
# `_GREY_TINT` times that of the least tinted tenth of the tissue, and less than `_MOST_GREY`. The
# tissue's tint is measured where its density is above `_TISSUE_NEAR`: on at least so many px, and
# so large a part of what may be tissue; on a faint slide, dense px are artefacts.
_TINT_PX = 7
_GREY_TINT = 0.45
_MOST_GREY = 0.3
_TISSUE_NEAR = 0.06
_LEAST_TINTED_PX = 50
_LEAST_TINTED_SHARE = 0.2
# Grey px with this fraction of the tissue's density are kept, such as carbon and dense folds,
# unless they are a band at the picture's border, which is the edge of a coverslip.
_DENSE_SHARE = 0.8
_BAND_ELONGATION = 4.0
# A piece is grey if at most a tenth of it has more colour than this, and nine tenths of the
# slide's tissue have more than twice as much.
_GREY_COLOUR = 0.008
_COLOURED_SHARE = 0.1

# A film on the glass is as smooth as the glass, and has less than this fraction of the tissue's
# density: a wash of stain, or the halo of a piece.
_FILM_SHARE = 0.25

# A smaller piece is dirt if less than a tenth of it has this fraction of the tissue's density. Pale
# tissue of any size has more than the second value.
_PALE_PIECE_UM2 = 1_000_000.0
_PALE_SHARE = 0.35
_MOST_PALE = 0.05
_DENSE_PART = 0.1

# The frame of a slide or coverslip is a dark band along a long side of the picture: less deep than
# a share of the picture, dark for the most part, on half of the side. In most of its columns, glass
# lies behind it, and its edge is at most so many px from a straight line. Where more than a share
# of what lies behind is dark, tissue crosses it.
_FRAME_SIDE_UM = 8000.0
_FRAME_DEPTH = 0.25
_FRAME_DARK = 0.6
_FRAME_SIDE = 0.5
_FRAME_STRAIGHT_PX = 4
_FRAME_STRAIGHT = 0.7
_FRAME_CROSSED = 0.3

# Cells that lie apart, as in a smear: at least so much of the mask is as clear as glass, or nearly,
# so much of it is dark specks or lines, and the largest of these has less than a share of them. In
# fat and in lung, which are as clear, they are one net. Cells that touch are one piece too, but it
# falls apart under an erosion, and it leaves one glass around it: at least so much of what is not
# dark hangs together. The meshes of a net do not.
_CLEAR = 0.03
_CLEAR_SHARE = 0.5
_LEAST_DARK_SHARE = 0.05
_LARGEST_SPECK_SHARE = 0.12
_TOUCHING_PX = 2
_ONE_GLASS_SHARE = 0.65
_SCATTERED = (
    "the share of tissue was not judged, because cells lie apart as in a smear; the mask is the "
    "area that they span"
)

# Cores that are too thin for the opening: coloured pieces that it removes whole, as large as the
# least piece. If they have more than a share of all that is found, the mask has but a part of the
# tissue.
_BESIDE_UM = 16.0
_THIN_SHARE = 0.25
_THIN = (
    "the share of tissue was not judged, because much of the tissue is thinner than 80 µm; the "
    "mask has a part of it"
)

# The slide's edge: dark, flat, at the border, and with little colour for its density. Least
# density; largest colour of pale pixels, and largest colour as a fraction of the density of dark
# pixels (the larger limit applies); width of the margin that is removed with the edge.
_SHADE = 0.1
_SHADE_COLOUR = 0.04
_SHADE_TINT = 0.15
_SHADE_REACH_UM = 80.0
# Pure white was not scanned, and its margin is removed too, if at least this fraction of the px
# beside it is glass. On real slides it is 0.81 to 1.0, and 0.50 to 0.61 where white is glass.
_GLASS_BESIDE_WHITE = 0.7
# Radius of the disk that closes gaps in solid tissue, and in the net of fat cells: gaps of up to
# twice this width.
_GAP_UM = 32.0
_CELL_UM = 176.0
# Radius of the disk that closes gaps between solid pieces.
_WIDE_GAP_UM = 48.0
# Radius of the disk of the opening: regions thinner than twice this are not tissue.
_THIN_UM = 40.0
# Smaller holes in a net of fat cells are filled.
_NET_HOLE_UM2 = 60_000.0
# A net: lines of at least `_MIN_LINE_PX` px. Their strong pixels cover more than `_NET_SHARE` of a
# window of `_NET_WINDOW_PX` px.
_MIN_LINE_PX = 6
_NET_WINDOW_PX = 21
_NET_SHARE = 0.03
# Longer straight lines are not fibres.
_STRAIGHT_PX = 75
# At the rim, tissue ends where the density falls below this fraction of that of the tissue beside
# it.
_RIM_UM = 40.0
_RIM_SHARE = 0.4


class Tissue(QcCheck, kind="tissue", removes_glass=True):
    """Keeps tissue of any stain, also pale, fatty and dark tissue, and recognises the stain."""

    # named by what the check removes
    name: str = "glass"
    # smaller pieces are dropped
    min_piece: str = area("20000 um2")
    # smaller holes are filled
    min_hole: str = area("10000 um2")
    # px darker than this value, 0 to 255, in all channels are not tissue
    black_level: int = _BLACK
    # pixels with a higher tissue probability of the artefact network are added; 1: none
    added_tissue: float = 1.0
    # pixels with a higher glass probability of the artefact network are removed; 1: none
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
        # the network needs the slide's glass as reference, so it cannot judge a field without glass
        can_judge = detected.shows_glass and view.mpp_th <= COARSEST_MPP
        if self.asks_network and can_judge:
            mask |= view.artefact_exceeds("tissue", self.added_tissue)
            mask &= ~view.artefact_exceeds("glass", self.removed_glass)
            mask = morphology.fill_small(view.ns, mask, view.area_px(self.min_hole))
            mask = morphology.drop_small(view.ns, mask, view.area_px(self.min_piece))
        outcome = view.left(view.mask_use & mask, self.name)
        scores = {**outcome.scores, "stain": detected.stain}
        outcome = replace(outcome, scores=scores, stain=detected.stain)
        warning = detected.warning_of(mask)
        if not warning:
            return outcome
        return replace(
            outcome,
            unjudged_area=view.mask_use & mask,
            warnings=(*outcome.warnings, f"{self.name}: {warning}"),
        )

    @property
    def asks_network(self) -> bool:
        """True if a limit is below 1."""
        return min(self.added_tissue, self.removed_glass) < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """Result of the detector for a thumbnail."""

    mask: Array  # bool (H, W)
    stain: Stain
    shows_glass: bool  # False if tissue fills the field
    # True if the mask is the area that single cells span, as in a smear
    is_scattered: bool
    # bool: coloured pieces that are too thin for the mask; a px is `factor` px of the mask wide
    thin: Array
    factor: int

    def warning_of(self, mask: Array) -> str:
        """Says why the share of tissue was not judged; '' if it was.

        `mask` is the mask, or what a network left of it and added to it.
        """
        if self.is_scattered:
            return _SCATTERED
        sampled = mask[:: self.factor, :: self.factor]
        thin_px = int((self.thin & ~sampled).sum())
        is_thin = thin_px > _THIN_SHARE * (thin_px + int(sampled.sum()))
        return _THIN if is_thin else ""


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
        px_um: µm per pixel of `rgb`.
        min_piece_px: smaller pieces are dropped.
        min_hole_px: smaller holes are filled.
        black_level: px darker in all channels are not tissue.

    Memory: O(H * W / (16 / px_um)²): about 45 bytes per px of 16 µm.
    """
    factor = max(1, round(_PX_UM / px_um))
    area_factor = float(factor**2)
    looked_at_um = min(px_um * factor, _COARSEST_PX_UM)

    def px(length_um: float) -> float:
        return length_um / looked_at_um

    light, absorption = _measure_light(ns, _reduce(ns, rgb, factor), black_level)
    shows_glass = bool(light.glass.any())
    evidence = _find_evidence(ns, light, px, px_um * factor)
    del light  # frees memory; what follows needs the masks and the density
    # closes wider gaps than those in `_find_evidence`; of coarse px, gaps of two px
    mask = _close(ns, evidence.body, max(1.0, _WIDE_GAP_UM / (px_um * factor)))
    mask &= ~_beyond_rim(ns, absorption, evidence.body, mask, px)
    near_solid = morphology.dilated_by_disk(ns, evidence.solid, px(32.0))
    net = _find_net(ns, evidence.lines & ~near_solid, evidence.strong_lines, px)
    closed = _close(ns, mask | net, px(_GAP_UM))
    mask = morphology.opened_by_disk(ns, closed, px(32.0))
    # a piece that fills a field is kept, even if the field is smaller than the least piece
    least_piece = min(min_piece_px / area_factor, mask.size / 2)
    thin = closed & ~morphology.dilated_by_disk(ns, mask, px(_BESIDE_UM))
    del closed  # frees memory
    thin = morphology.drop_small(ns, thin, least_piece)
    thin = morphology.mostly(ns, thin, evidence.coloured, 0.5)
    mask = morphology.fill_small(ns, mask, max(min_hole_px / area_factor, 1.0))
    mask = morphology.drop_small(ns, mask, least_piece)
    mask = morphology.mostly(ns, mask, evidence.coloured, _COLOURED_SHARE)
    large = morphology.drop_small(ns, mask, _PALE_PIECE_UM2 / (px_um * factor) ** 2)
    mask = large | morphology.mostly(ns, mask & ~large, evidence.dense, _DENSE_PART)
    enlarged = mask.repeat(factor, axis=0).repeat(factor, axis=1)
    return Detected(
        mask=enlarged[: rgb.shape[0], : rgb.shape[1]],
        stain=_measure_stain(ns, absorption, mask),
        shows_glass=shows_glass,
        is_scattered=_is_scattered(ns, evidence, mask),
        thin=thin,
        factor=factor,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Absorption:
    """Light absorption of each px in three channels; density is base 10."""

    rgb: Array  # uint8 (H, W, 3)
    # density of each value of a channel, relative to white, float32 (256,)
    against_white: Array
    glass: Array  # density of the glass, relative to white, float32 (3,)

    def density(self, rows: slice) -> Array:
        """Density relative to glass, float32 (rows, W, 3)."""
        density = self.against_white.take(self.rgb[rows])
        # NumPy is slow where three values are subtracted from each pixel at once
        for channel in range(3):
            density[..., channel] -= self.glass[channel]
        return density


@dataclass(frozen=True, slots=True, kw_only=True)
class _Light:
    """Measures of light absorption relative to glass, float32 (H, W) each."""

    near: Array  # smooth density: mean of the three channels, averaged over 3 x 3 px
    densest: Array  # density of the densest channel, averaged over 3 x 3 px
    colour: Array  # densest minus thinnest channel, averaged over 3 x 3 px
    line: Array  # density above the surroundings, in lines thinner than 5 px
    texture: Array  # mean of `line` over 5 x 5 px
    seen: Array  # bool: not black, and not the white or black of unscanned areas
    # bool: flat px as bright as the glass; all False if a slide shows none
    glass: Array


def _measure_light(
    ns: ArrayNamespace, rgb: Array, black_level: int
) -> tuple[_Light, _Absorption]:
    xp = ns.xp
    levels = xp.maximum(xp.arange(256), 1) / 255.0
    absorption = _Absorption(
        rgb=rgb,
        against_white=(-xp.log10(levels)).astype(xp.float32),
        glass=xp.zeros(3, dtype=xp.float32),
    )
    shape = rgb.shape[:2]
    total = xp.empty(shape, dtype=xp.float32)
    seen = xp.empty(shape, dtype=bool)
    for band in row_bands(shape[0]):
        total[band.inside] = channel_mean(ns, absorption.density(band.inside))
        lowest, highest = extremes(ns, rgb[band.inside].transpose(2, 0, 1))
        seen[band.inside] = (lowest < 255) & (highest >= max(black_level, 1))
    line = xp.empty_like(total)
    # an opening by 5 x 5 px reaches 4 px
    for band in row_bands(shape[0], 4):
        opened = opened_by_square(ns, total[band.around], 5)
        line[band.inside] = total[band.inside] - opened[band.own]
    texture = box_mirrored(ns, line, 5)
    flat_limit = 0.0
    if bool(seen.any()):
        smoothest = float(xp.quantile(texture[seen], 0.05, overwrite_input=True))
        flat_limit = min(max(3 * smoothest, 0.004), _GLASS_TEXTURE)
    flat = seen & (texture < flat_limit) & (total < _PALE)
    for band in row_bands(shape[0]):
        channels = absorption.density(band.inside).transpose(2, 0, 1)
        thinnest, densest = extremes(ns, channels)
        flat[band.inside] &= densest - thinnest < _GLASS_COLOUR
    glass_density, glass = _find_glass(
        ns, absorption, total, texture, flat, num_seen=int(seen.sum())
    )
    del flat
    absorption = replace(absorption, glass=xp.asarray(glass_density, dtype=xp.float32))
    del total  # frees memory
    near = xp.empty_like(line)
    densest = xp.empty_like(near)
    colour = xp.empty_like(near)
    for band in row_bands(shape[0]):
        density = absorption.density(band.inside)
        near[band.inside] = channel_mean(ns, density)
        low, high = extremes(ns, density.transpose(2, 0, 1))
        densest[band.inside] = high
        colour[band.inside] = high - low
    # one after the other, so that only one is in memory twice
    near = box_mirrored(ns, near, 3)
    densest = box_mirrored(ns, densest, 3)
    colour = box_mirrored(ns, colour, 3)
    light = _Light(
        near=near,
        densest=densest,
        colour=colour,
        line=line,
        texture=texture,
        seen=seen,
        glass=glass,
    )
    return light, absorption


def _find_glass(
    ns: ArrayNamespace,
    absorption: _Absorption,
    total: Array,
    texture: Array,
    flat: Array,
    *,
    num_seen: int,
) -> tuple[tuple[float, ...], Array]:
    """Density of the glass, and its mask: the brightest large peak of flat, pale pixels.

    If tissue fills a field, there is no glass: the palest tissue is not taken for it.
    """
    xp = ns.xp
    nowhere = xp.zeros_like(flat)
    values = total[flat]
    if values.size < max(50, 0.002 * num_seen):
        return _TYPICAL_GLASS, nowhere
    counts = xp.histogram(values, bins=_GLASS_BINS, range=(0.0, _PALE))[0]
    del values
    peak = (_brightest_peak(ns.download(counts)) + 0.5) * _PALE / _GLASS_BINS
    glass = flat & (abs(total - peak) < _GLASS_REACH)
    glass_density = []
    for channel in range(3):
        density = absorption.against_white[absorption.rgb[..., channel][glass]]
        glass_density.append(float(xp.median(density, overwrite_input=True)))
    is_dense = sum(glass_density) / 3 > _TISSUE_DENSITY
    is_coloured = max(glass_density) - min(glass_density) > _TISSUE_COLOUR
    is_textured = (
        float(xp.median(texture[glass], overwrite_input=True)) > _TISSUE_TEXTURE
    )
    if (is_dense or is_coloured) and is_textured:
        return _TYPICAL_GLASS, nowhere
    return tuple(glass_density), glass


def _brightest_peak(counts: Array) -> int:
    """The first peak in the histogram with at least a quarter of the largest count."""
    smooth = [int(counts[max(0, n - 3) : n + 4].sum()) for n in range(len(counts))]
    least = 0.25 * max(smooth)
    peak = next(n for n, count in enumerate(smooth) if count >= least)
    while peak < len(smooth) - 1 and smooth[peak + 1] >= smooth[peak]:
        peak += 1
    return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """Masks of px that show tissue."""

    body: Array  # dense, coloured or textured areas
    solid: Array  # solid tissue
    lines: Array  # thin dark lines
    strong_lines: Array  # thin lines that are dark enough to be a net of their own
    coloured: Array  # enough colour for a piece; all of a slide whose tissue has none
    dense: Array  # enough density for a small piece; all of a faint slide
    clear: Array  # as clear as glass, or nearly


def _find_evidence(
    ns: ArrayNamespace, light: _Light, px: Px, px_um: float
) -> _Evidence:
    xp = ns.xp

    def quantiles(values: Array, lower: float, upper: float) -> tuple[float, float]:
        """Quantiles of values on the slide's glass; 0 if it shows no glass."""
        values = values[light.glass]
        if not values.size:
            return 0.0, 0.0
        return float(xp.quantile(values, lower)), float(xp.quantile(values, upper))

    # from the less coloured half of the glass, since pale tissue may hide in the other half
    lower, middle = quantiles(light.colour, 0.25, 0.5)
    colour = max(_COLOUR, middle + 4.0 * (middle - lower))
    lower, upper = quantiles(light.near, 0.25, 0.75)
    dense = max(_DENSITY, 4.0 * (upper - lower))
    middle, upper = quantiles(light.texture, 0.5, 0.9)
    textured = max(_TEXTURE, middle + 2.5 * (upper - middle))
    lowest, upper = quantiles(light.line, 0.0, 0.75)
    thin = max(_LINE, 3.0 * (upper - lowest))
    _, upper = quantiles(light.line, 0.0, 0.9)
    strong = max(_STRONG_LINE, _STRONG_TIMES * (upper - lowest))

    # pale tissue may absorb less than glass in one channel, but it absorbs more in another
    body = (light.colour > colour) & (
        (light.near > colour / 2) | (light.densest > colour)
    )
    body |= (light.texture > textured) & (light.near > _FAINT)
    body |= light.near > dense
    outside = _find_outside(ns, light, textured, px)
    outside |= _find_frame(ns, body | ~light.seen, px, px_um)
    outside |= find_printed_dots(ns, light.near, body, px_um)
    body &= ~outside
    dirt, coloured, dense_parts = _find_dirt(ns, light, body, textured)
    outside |= dirt
    body &= ~dirt
    del dirt
    closed = _close(ns, body, px(_GAP_UM))
    return _Evidence(
        body=morphology.opened_by_disk(ns, closed, px(_THIN_UM)),
        solid=morphology.opened_by_disk(ns, body, px(64.0)),
        lines=(light.line > thin) & ~outside,
        strong_lines=light.line > strong,
        coloured=coloured,
        dense=dense_parts,
        clear=light.near < _CLEAR,
    )


def _find_dirt(
    ns: ArrayNamespace, light: _Light, body: Array, textured: float
) -> tuple[Array, Array, Array]:
    """Masks of dirt, and of pixels with enough colour and density for a piece of tissue.

    Dirt is grey matter, or a film. On a slide without coloured tissue nothing is dirt, and all
    pixels have enough colour. On a faint slide nothing is dirt, and all have enough density.
    """
    xp = ns.xp
    nowhere = xp.zeros_like(body)
    strong = body & (light.near > _TISSUE_NEAR)
    least_px = max(_LEAST_TINTED_PX, _LEAST_TINTED_SHARE * int(body.sum()))
    if int(strong.sum()) < least_px:
        return nowhere, ~nowhere, ~nowhere
    usual = float(xp.median(light.near[strong]))
    # the largest of three channels is above the smallest on clean glass too, by its noise
    noise = float(xp.median(light.colour[light.glass])) if light.glass.any() else 0.0
    near = box_mirrored(ns, light.near, _TINT_PX)
    tint = box_mirrored(ns, light.colour, _TINT_PX)
    tint -= noise
    tint /= xp.maximum(near, _FAINT / 2)
    least_tint = min(_GREY_TINT * float(xp.quantile(tint[strong], 0.1)), _MOST_GREY)
    grey = tint < least_tint
    del tint
    band = morphology.at_border(ns, grey & (light.near > _SHADE))
    band = morphology.keep_elongated(ns, band, _BAND_ELONGATION, _LEAST_TINTED_PX)
    grey &= near < _DENSE_SHARE * usual
    is_coloured = float(xp.quantile(light.colour[strong], 0.1)) > 2 * _GREY_COLOUR
    coloured = light.colour > _GREY_COLOUR if is_coloured else ~nowhere
    dense = light.near > min(_PALE_SHARE * usual, _MOST_PALE)
    dirt = grey | band
    if is_coloured and bool(light.glass.any()):
        is_smooth = light.texture < textured
        dirt |= body & is_smooth & (light.near < _FILM_SHARE * usual)
    return dirt, coloured, dense


def _find_frame(ns: ArrayNamespace, dark: Array, px: Px, px_um: float) -> Array:
    """The mask of dark bands along the picture's sides, with a margin: frames of the slide.

    `px_um` is the true edge of a px, which `px` limits.
    """
    xp = ns.xp
    frame = xp.zeros_like(dark)
    margin_px = round(px(_SHADE_REACH_UM))
    # each view has one side on top
    views: tuple[Callable[[Array], Array], ...] = (
        lambda mask: mask,
        lambda mask: mask[::-1],
        lambda mask: mask.T,
        lambda mask: mask.T[::-1],
    )
    for view in views:
        side = view(dark)
        if side.shape[1] * px_um < _FRAME_SIDE_UM:
            continue
        depth = _depth_of_frame(ns, side)
        rows = xp.arange(len(side), dtype=xp.float32)[:, None]
        view(frame)[...] |= rows < xp.where(depth > 0, depth + margin_px, 0)
    return frame


def _depth_of_frame(ns: ArrayNamespace, dark: Array) -> Array:
    """Rows of a dark band on top of the picture, (W,); 0 in columns without one."""
    xp = ns.xp
    height, width = dark.shape
    nowhere = xp.zeros(width, dtype=xp.float32)
    deepest = int(_FRAME_DEPTH * height)
    if deepest <= _FRAME_STRAIGHT_PX:
        return nowhere
    rows = xp.arange(1, deepest + 1, dtype=xp.float32)[:, None]
    share = xp.cumsum(dark[:deepest], axis=0, dtype=xp.float32) / rows
    is_in_band = dark[:deepest] & (share >= _FRAME_DARK)
    depth = xp.max(xp.where(is_in_band, rows, 0), axis=0)
    ends = (depth > 0) & (depth < deepest)
    if int(ends.sum()) < _FRAME_SIDE * width:
        return nowhere
    columns = xp.arange(width)
    behind = xp.clip(depth.astype(xp.int64) + 2, 0, height - 1)
    shows_glass = ends & ~dark[behind, columns]
    edge = xp.full(width, float(xp.median(depth[ends])))
    for _ in range(3):
        near = ends & (abs(depth - edge) <= 2 * _FRAME_STRAIGHT_PX)
        if int(near.sum()) < 2:
            return nowhere
        slope, offset = xp.polyfit(columns[near], depth[near], 1)
        edge = slope * columns + offset
    straight = ends & (abs(depth - edge) <= _FRAME_STRAIGHT_PX)
    least = _FRAME_STRAIGHT * float(ends.sum())
    if min(float(shows_glass.sum()), float(straight.sum())) < least:
        return nowhere
    # tissue that crosses the frame is kept
    crosses = ~ends & (dark[deepest : 2 * deepest].mean(axis=0) > _FRAME_CROSSED)
    return xp.where(crosses, 0, edge).astype(xp.float32)


def _find_outside(ns: ArrayNamespace, light: _Light, textured: float, px: Px) -> Array:
    """The mask of pixels that were not scanned, and of the slide's edge."""
    xp = ns.xp
    tint = xp.maximum(_SHADE_COLOUR, _SHADE_TINT * light.near)
    shade = (light.near > _SHADE) & (light.colour < tint)
    shade &= light.texture < xp.maximum(textured, 0.06 * light.near)
    edge = morphology.at_border(ns, shade | ~light.seen)
    white = edge & ~light.seen & (light.near < _PALE)
    if not _is_unscanned(ns, light, white):
        edge &= ~white
    outside = ~light.seen
    if bool(edge.any()):
        outside |= morphology.dilated_by_disk(ns, edge, px(_SHADE_REACH_UM))
    return outside


def _is_unscanned(ns: ArrayNamespace, light: _Light, white: Array) -> bool:
    """True if glass lies beside pure white; tissue lies beside glass that is clipped to white."""
    beside = morphology.dilated_by_square(ns, white, 3) & ~white
    glass_px = int((beside & light.glass).sum())
    return glass_px >= _GLASS_BESIDE_WHITE * int(beside.sum())


def _is_scattered(ns: ArrayNamespace, evidence: _Evidence, mask: Array) -> bool:
    """True if the mask holds dark specks that lie apart on glass, or touch, and no tissue."""
    area_px = int(mask.sum())
    if int((evidence.clear & mask).sum()) < _CLEAR_SHARE * area_px or not area_px:
        return False
    dark = evidence.strong_lines & mask
    dark_px = int(dark.sum())
    if dark_px < _LEAST_DARK_SHARE * area_px or not dark_px:
        return False
    if _largest(ns, dark) < _LARGEST_SPECK_SHARE * dark_px:
        return True
    between = mask & ~dark
    if _largest(ns, between) < _ONE_GLASS_SHARE * int(between.sum()):
        return False
    cores = ~morphology.dilated_by_square(ns, ~dark, _TOUCHING_PX)
    return _largest(ns, cores) < _LARGEST_SPECK_SHARE * int(cores.sum())


def _largest(ns: ArrayNamespace, mask: Array) -> int:
    """Pixels of the largest 8-connected region; 0 without one."""
    areas = morphology.region_areas(ns, mask)
    return int(areas.max()) if len(areas) else 0


def _find_net(ns: ArrayNamespace, lines: Array, strong_lines: Array, px: Px) -> Array:
    """Fat and loose tissue: the area that a net of thin lines spans."""
    thick = morphology.dilated_by_square(ns, lines, 3)
    # remove edges of coverslips, which would connect the lines that they cross
    for axis in (0, 1):
        run = ~morphology.dilated_along(ns, ~thick, _STRAIGHT_PX, axis)
        lines = lines & ~morphology.dilated_along(ns, run, _STRAIGHT_PX, axis)
    # elongation 0: only lines of fewer pixels are dropped
    net = morphology.keep_elongated(ns, lines, 0.0, _MIN_LINE_PX)
    strong = (net & strong_lines).astype(ns.xp.float32)
    net &= box_mirrored(ns, strong, _NET_WINDOW_PX) > _NET_SHARE
    net = morphology.opened_by_disk(ns, _close(ns, net, px(_CELL_UM)), px(64.0))
    filled = morphology.fill_small(ns, net, max(1.0, px(1.0) ** 2 * _NET_HOLE_UM2))
    # holes at the border are not filled: in a small picture, all background could be one hole
    net |= filled & ~morphology.at_border(ns, ~net)
    return morphology.dilated_by_disk(ns, net, px(32.0))


def _beyond_rim(
    ns: ArrayNamespace, absorption: _Absorption, body: Array, mask: Array, px: Px
) -> Array:
    """Pixels at the mask's border that are much paler than the tissue beside them."""
    xp = ns.xp
    own_density = xp.empty(body.shape, dtype=xp.float32)
    for band in row_bands(len(body)):
        density = absorption.density(band.inside)
        _, densest = extremes(ns, density.transpose(2, 0, 1))
        # half of the densest channel counts where a stain absorbs in one channel only
        mean = channel_mean(ns, density)
        own_density[band.inside] = xp.maximum(mean, densest * 0.5)
    inside = body.astype(xp.float32)
    tissue_density = box_mirrored(ns, own_density * inside, 9)
    inside = box_mirrored(ns, inside, 9)
    tissue_density /= xp.maximum(inside, 0.02, out=inside)
    tissue_density *= _RIM_SHARE
    least_density = xp.maximum(tissue_density, _LINE, out=tissue_density)
    border = morphology.dilated_by_disk(ns, ~mask, px(_RIM_UM))
    return border & (own_density < least_density)


def _measure_stain(ns: ArrayNamespace, absorption: _Absorption, mask: Array) -> Stain:
    """The stain, from the fractions of the density in red, green and blue.

    Eosin absorbs green and DAB absorbs blue, so without brown tissue the stain is not IHC. The
    fraction in green alone does not tell them apart, as it is as low in purple H&E as in IHC.
    """
    xp = ns.xp
    totals = [total for _, total in _stained_bands(absorption, mask)]
    if sum(total.size for total in totals) < 50:
        return ""
    middle = float(xp.median(xp.concatenate(totals), overwrite_input=True))
    del totals
    # leave out ink and folds, which are denser than most tissue, but keep DAB on a pale
    # counterstain
    densest = max(2 * middle, _DAB_DENSITY)
    num_usual = 0
    num_brown = 0
    # of pale px: largest difference between the channels' fractions of the density, and green's
    spreads = []
    greens = []
    for density, total in _stained_bands(absorption, mask):
        usual = density[total <= densest]
        num_usual += len(usual)
        num_brown += int(is_brown(usual).sum())
        pale = total <= middle
        balance = density[pale] / total[pale][:, None]
        spreads.append(balance.max(axis=1) - balance.min(axis=1))
        greens.append(balance[:, 1].copy())
    brown = num_brown / num_usual
    if brown > _IHC_BROWN:
        return "IHC"
    if float(xp.median(xp.concatenate(spreads))) < _GREY_BALANCE:
        return "grey"
    if brown > _NO_BROWN or float(xp.median(xp.concatenate(greens))) < _LEAST_GREEN:
        return "unsure"
    is_dark = float(absorption.glass.mean()) > 0.1 or middle > 1.1
    return "dark" if is_dark else "H&E"


def _stained_bands(
    absorption: _Absorption, mask: Array
) -> Iterator[tuple[Array, Array]]:
    """Density (N, 3) of the mask's px that absorb light, and its sum (N,), band by band."""
    for band in row_bands(len(mask)):
        density = absorption.density(band.inside)[mask[band.inside]].clip(0.0)
        total = density.sum(axis=1)
        absorbs = total > 0.1
        yield density[absorbs], total[absorbs]


def _close(ns: ArrayNamespace, mask: Array, radius_px: float) -> Array:
    """Closes gaps with a disk, as if the picture were mirrored at its border."""
    height, width = mask.shape
    reach = min(int(radius_px), height, width)
    mirrored = ns.xp.pad(mask, reach, mode="symmetric")
    closed = ~morphology.opened_by_disk(ns, ~mirrored, radius_px)
    return closed[reach : reach + height, reach : reach + width]


def _reduce(ns: ArrayNamespace, rgb: Array, factor: int) -> Array:
    """Means of blocks of factor x factor px, uint8; the last blocks may be smaller."""
    if factor == 1:
        return rgb
    height, width = (-(-length // factor) for length in rgb.shape[:2])
    reduced = ns.xp.empty((height, width, 3), dtype=ns.xp.uint8)
    for band in row_bands(height):
        rows = rgb[band.inside.start * factor : band.inside.stop * factor]
        for channel in range(3):
            plane = rows[..., channel].astype(ns.xp.float32)
            means = block_means(ns, plane, factor) + 0.5
            reduced[band.inside, :, channel] = means.astype(ns.xp.uint8)
    return reduced


def is_brown(densities: Array) -> Array:
    """True if blue is the densest channel, and far denser than red, as in DAB, bool (N,)."""
    red, green, blue = densities.T
    return (blue > green) & (blue > 1.3 * red)
