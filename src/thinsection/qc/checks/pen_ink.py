"""Pen ink of any colour, on glass and over tissue, translucent or opaque.

Dense ink is found by two older models (`dense_ink.py`); where the ink network agrees, it shows the
colours of pens. For translucent ink, the ink network looks at the whole picture at 16 µm/px. Each
region that it takes for ink is then compared with what lies beside it: by the law of Beer and
Lambert, a stroke of a pen adds density to the tissue below and keeps its texture, and it adds the
same colour along its whole length. Mucin, pigment and necrosis replace the tissue. Stain is added
to tissue as ink is, but not in strokes. Beside a known pen, what adds another colour is no stroke,
unless the network is sure of it. A stroke with a colour that tissue has elsewhere on the slide is
not judged.

In tissue with gaps, the gaps show the ink alone (`ink_layer.py`).

A stroke on glass, or a dense one, shows the colour of its pen (`pen_colour.py`). Strokes of the
same pen that are too dry or too pale for the models are then found by this colour alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, get_namespace
from thinsection.arrays.filters import box_deviation, box_mean
from thinsection.arrays.morphology import (
    dilated_by_disk,
    dilated_by_square,
    drop_small,
    fill_small,
    mostly,
    opened_by_disk,
)
from thinsection.qc.checks.artefact_network import (
    density_tables,
    is_stained,
    without_stain,
)
from thinsection.qc.checks.border import CONTEXT_UM
from thinsection.qc.checks.check import PenInk
from thinsection.qc.checks.dense_ink import (
    DenseInk,
    Ground,
    away_from,
    enlarged,
    find_dense_ink,
    reduced,
    shows_pen,
    tissue_in,
)
from thinsection.qc.checks.ink_layer import (
    GLASS_DENSITY,
    HOLE_SHARE,
    LEAST_LENGTH,
    boxes_of,
    colors_of,
    find_layers,
    length_of,
    without_fine_structure,
)
from thinsection.qc.checks.ink_network import (
    INPUT_MPP,
    MIN_INK_UM2,
    SURE,
    ink_probability,
    stain_of,
    usual_stain,
)
from thinsection.qc.checks.pen_colour import PenColour, pen_colour
from thinsection.qc.checks.tissue import is_brown
from thinsection.types import MaskArray, RgbArray

# Least probability of ink in a stroke, in 255ths. Where a region above the first one is no stroke,
# parts of it above the next one may be. The network takes much of dense tissue of one hue for ink,
# too, and only the highest ones leave strokes alone there.
_LEVELS = (90, 140, 180, 205, 225, 240)
# The network is sure of ink in at least this share of the area of a stroke.
_LEAST_SURE_SHARE = 0.3
# Ink and tissue are compared in squares of this edge length in µm on the edge of a region; each
# fills at least the first share of the square. Of what lies beside the region, at least the second
# share is tissue, as the ink may lie on glass elsewhere. Pixels next to the edge are mixed, and
# left out.
_BESIDE_UM = 208.0
_LEAST_BESIDE = 0.15
_LEAST_TISSUE = 0.7
_MIXED_PX = 5
# Less is left out of a thin region, of which at least this share remains.
_LEAST_MIDDLE = 0.1
# The fewest pixels of an edge that can be compared, and their least share of the edge.
_LEAST_EDGE_PX = 8
_LEAST_EDGE_SHARE = 0.08
# The median density that a stroke adds is at least the first one in each channel, or the second one
# if it is opaque; and at this percentile along its edge, it adds at least the third one to its
# strongest channel.
_LEAST_ADDED = -0.06
_LEAST_ADDED_OPAQUE = -0.3
_LOW_PERCENTILE = 15
_LEAST_INK_ADDED = 0.1
# What has the hue of the tissue beside it is more of the same stain if it adds less than this share
# of the tissue's density, or the second one where the network is not sure; or if at the opposite
# percentile along its edge, it adds more than so many times its median. The hue is the same if the
# cosine of the angle is larger than the last one.
_MORE_STAIN = 0.5
_MUCH_MORE_STAIN = 1.5
_MOST_UNEVEN = 2.0
_SAME_HUE = 0.97
# The least length of the mean direction of what a stroke adds, where one hue along all of the edge
# has length 1.
_LEAST_HUE = 0.8
# Least texture of a stroke relative to the tissue beside it.
_LEAST_TEXTURE = 0.4
# A layer of this density in its strongest channel may hide the texture, and have any shape.
_DENSE = 0.8
# What the older models find adds this density to its strongest channel, if it can be compared.
_LEAST_DENSE_ADDED = 0.35
# Ink that adds this density to its strongest channel needs no sure pixels.
_OPAQUE = 1.2
# Least density in its strongest channel of a stroke that cannot be compared with tissue.
_LEAST_ALONE = 0.3
# Ink on glass lies in what is at most twice as wide as this, in µm. There, and where it is dense, a
# stroke is followed down to this probability, in 255ths, if it keeps its hue: a cosine of the angle
# above the first one. Its hue must not be nearer to the slide's stain than the second one.
_NARROW_UM = 320.0
_HUE_ON_GLASS = 0.965
_STAIN_HUE = 0.97
_FOLLOWED = 8
# The part of a stroke in a square of this edge length adds at least this share of what the stroke
# adds at its edge.
_TRIMMED_PX = 7
_LEAST_SHARE_ADDED = 0.5
# A stroke of another colour than those of all pens with sure ink needs this median probability, in
# 255ths.
_SURE_OF_OTHER_PEN = 180
# Width of the rim of ink, and largest width of the gaps between rims that are closed, in µm.
_RIM_UM = 16.0
_INK_GAP_UM = 64.0
# A stroke looks like tissue if more than a share of the tissue where the network sees no ink has
# its hue, with a larger cosine of the angle, and at least a share of its density. Fewer pixels of
# such tissue, which are sampled at `_SAMPLE_STEP`, say nothing: half a square millimetre.
_TISSUE_SHARE = 0.03
_HUE_OF_TISSUE = 0.985
_DENSITY_OF_TISSUE = 0.9
_LEAST_TISSUE_PX = 500
# Brown is a stain if more than this share of the tissue where the network suspects no ink, up to a
# probability in 255ths, is brown and has a density in its strongest channel.
_BROWN_SHARE = 0.03
_SUSPECTED = 40
_BROWN_DENSITY = 0.3
# A region lies on glass if at least this share of what lies beside it is glass.
_ON_GLASS = 0.5
# A stroke is judged if more than this share of it lies outside of the border of the picture.
_LEAST_INNER_SHARE = 0.4

# The largest strokes show the colours of the pens; tissue is sampled at this distance in pixels.
_MOST_STROKES = 4
_SAMPLE_STEP = 2
# A further stroke of a known pen exceeds one of these multiples of the deviation of the pen's
# amount in tissue, over a square of this edge in pixels; and what it adds has the pen's hue: least
# cosine of the angle.
_LEVELS_OF_PEN = (5.0, 8.0, 13.0)
_AMOUNT_PX = 3
_HUE_OF_PEN = 0.95

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Densities:
    """A part of the picture at about 16 µm/px."""

    # red, green and blue, float32 (H, W, 3)
    colors: _Floats
    px_um: float

    @property
    def mean(self) -> _Floats:
        return np.asarray(self.colors.mean(axis=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """The picture at about 16 µm/px, with its `density_tables`."""

    rgb: RgbArray
    tables: list[Array]
    px_um: float

    def colors(self, around: tuple[slice, ...] = (slice(None), slice(None))) -> _Floats:
        """Densities of red, green and blue of a part, float32 (H, W, 3)."""
        return colors_of(self.rgb[around], self.tables)


def find_pen_ink(
    thumbnail: RgbArray,
    px_um: float,
    get_seen_ink: Callable[[], MaskArray] | None = None,
) -> PenInk:
    """Pen ink of any colour, on a CPU.

    Args:
        thumbnail: uint8 (H, W, 3).
        px_um: µm per px of the thumbnail.
        get_seen_ink: returns `ink_of` the thumbnail's `artefact_maps`, for a caller that computes
            these anyway. None: the artefact network looks near candidates only; the result is the
            same up to rounding.

    Memory: 2 bytes per pixel of the thumbnail, that of `ink_probability` and `ink_within`, and 100
        bytes per pixel of 16 µm in the largest box around a region; where ink is found, 60 bytes
        per pixel of 16 µm.
    """
    # pixels of the thumbnail along a pixel that is searched
    factor = max(1, round(INPUT_MPP / px_um))
    small = reduced(thumbnail, factor)
    ns = get_namespace("cpu")
    probability = ink_probability(ns, small)
    small_um = px_um * factor
    tables = density_tables(ns, small)
    picture = _Picture(rgb=small, tables=tables, px_um=small_um)
    known = find_dense_ink(
        ns,
        thumbnail,
        px_um,
        small,
        get_seen_ink,
        probability=probability,
        tables=tables,
    )
    strokes = _strokes(probability, picture)
    strokes = _followed(strokes, known.mask, probability, picture)
    strokes = _of_sure_pens(strokes, known, probability, picture)
    dense = _adding_density(known.mask, picture)
    strokes |= dense
    gaps = replace(picture, rgb=without_fine_structure(ns, small))
    layers = find_layers(
        ns, small, gaps.rgb, tables, small_um, shows_pen=bool(known.pens)
    )
    strokes |= layers
    stain = _brown_stain(strokes, probability, picture)
    strokes &= ~stain
    pens = list(_known_pens(strokes, layers & strokes, picture, gaps))
    stain |= _like_tissue(strokes, known, pens, probability, picture)
    strokes &= ~stain
    strokes |= _of_known_pens(strokes, pens, picture)
    judged = strokes & ~_unjudged(strokes, dense, picture)
    masks = []
    for mask in (judged, (strokes | stain) & ~judged):
        masks.append(enlarged(_joined(mask, small_um), factor, thumbnail))
    return PenInk(ink=masks[0], unjudged=masks[1] & ~masks[0])


def _strokes(probability: npt.NDArray[np.uint8], picture: _Picture) -> MaskArray:
    """Regions of likely ink that are strokes, bool (H, W)."""
    ns = get_namespace("cpu")
    strokes = np.zeros(picture.rgb.shape[:2], bool)
    alone = np.zeros_like(strokes)
    for least in _LEVELS:
        likely = (probability > least) & ~strokes & ~alone
        likely = drop_small(ns, likely, MIN_INK_UM2 / picture.px_um**2)
        for around, region, others, part in _regions(likely, picture):
            sure_share = (probability[around][region] > SURE).mean()
            is_sure = bool(sure_share > _LEAST_SURE_SHARE)
            inside, beside = _both_sides(region, others, part)
            if not len(inside):
                if is_sure:
                    alone[around] |= _stroke_on_glass(region, others, part)
            elif _adds_ink(inside, beside, region, is_sure=is_sure):
                strokes[around] |= _trimmed(region, inside, beside, part)
    # tissue that lies alone on glass may be as dense as ink
    return np.asarray(strokes | without_stain(ns, alone, picture.rgb))


def _adding_density(dense: MaskArray, picture: _Picture) -> MaskArray:
    """Dense ink without regions that are as pale as the tissue beside them, bool (H, W)."""
    kept = dense.copy()
    for around, region, others, part in _regions(dense, picture):
        inside, beside = _both_sides(region, others, part)
        if len(inside):
            added = np.median(inside[:, :3] - beside[:, :3], axis=0)
            if added.max() < _LEAST_DENSE_ADDED:
                kept[around] &= ~region
    return kept


def _regions(
    mask: MaskArray, picture: _Picture
) -> Iterator[tuple[tuple[slice, ...], MaskArray, MaskArray, _Densities]]:
    """Each region with its surroundings: where these are, the region, all regions, the picture."""
    labels, boxes = boxes_of(mask)
    reach = _beside_px(picture.px_um)
    for number, box in enumerate(boxes, start=1):
        around = tuple(slice(max(0, s.start - reach), s.stop + reach) for s in box)
        part = _Densities(colors=picture.colors(around), px_um=picture.px_um)
        yield around, labels[around] == number, labels[around] > 0, part


def _followed(
    strokes: MaskArray,
    dense: MaskArray,
    probability: npt.NDArray[np.uint8],
    picture: _Picture,
) -> MaskArray:
    """Strokes, and what they go on to in their own hue on glass or as dense ink, bool (H, W).

    Much dense ink hides the stain of the slide, so the tissue away from it shows it as well.
    """
    if not strokes.any():
        return strokes
    ns = get_namespace("cpu")
    colors = picture.colors()
    shows_hue = _shows_hue(colors, picture.px_um)
    tissue = tissue_in(away_from(ns, dense), picture.rgb, picture.tables)
    stains = [usual_stain(ns, picture.rgb, picture.tables), stain_of(ns, tissue)]
    likely = strokes | (shows_hue & (probability > _FOLLOWED))
    labels, boxes = boxes_of(likely)
    followed = strokes.copy()
    for number, box in enumerate(boxes, start=1):
        region = labels[box] == number
        known = colors[box][region & strokes[box] & shows_hue[box]]
        if len(known) < _LEAST_EDGE_PX:
            continue
        hue = np.median(known, axis=0)
        hue /= np.linalg.norm(hue)
        same = colors[box] @ hue > _HUE_ON_GLASS * np.linalg.norm(colors[box], axis=2)
        if all(hue @ stain < _STAIN_HUE for stain in stains):
            followed[box] |= region & shows_hue[box] & same
    return np.asarray(mostly(ns, followed, strokes, 0.0))


def _of_sure_pens(
    strokes: MaskArray,
    known: DenseInk,
    probability: npt.NDArray[np.uint8],
    picture: _Picture,
) -> MaskArray:
    """Strokes without what has another colour than the sure ink of the slide, bool (H, W).

    Beside a pen the ink network takes stains and pigment for ink. A region with sure ink keeps what
    has its colour; another one is kept if it usually has the colour of a known pen, or if the
    network is sure of most of it.
    """
    if known.sure is None or not known.pens:
        return strokes
    ns = get_namespace("cpu")
    ground = Ground.beside(ns, strokes | known.mask, picture.rgb, picture.tables)
    kept = np.zeros_like(strokes)
    for box, region in _pieces(strokes):
        colors = picture.colors(box)
        own = ground.pens_of(box, region & known.sure[box])
        if own:
            kept[box] |= region & shows_pen(colors, own)
            continue
        usual = np.median(colors[region], axis=0)
        is_sure = np.median(probability[box][region]) > _SURE_OF_OTHER_PEN
        if is_sure or shows_pen(usual, known.pens).item():
            kept[box] |= region
    return kept


def _shows_hue(colors: _Floats, px_um: float) -> MaskArray:
    """What is narrow and lies on glass, or is dense, bool (H, W): ink has its own hue there."""
    ns = get_namespace("cpu")
    dense = colors.mean(axis=2) > GLASS_DENSITY
    narrow = dense & ~opened_by_disk(ns, dense, _NARROW_UM / px_um)
    return np.asarray(narrow | (colors.max(axis=2) > _DENSE))


def _of_known_pens(
    strokes: MaskArray, pens: list[PenColour], picture: _Picture
) -> MaskArray:
    """Further strokes of the pens that made the strokes, bool (H, W).

    They may be too dry or too pale for the network. They have the pen's hue where they lie on
    glass, and shift the tissue below them by it.
    """
    further = np.zeros_like(strokes)
    for pen in pens:
        further |= _strokes_of(pen, strokes | further, picture)
    return further


def _known_pens(
    strokes: MaskArray, layers: MaskArray, picture: _Picture, gaps: _Picture
) -> Iterator[PenColour]:
    """Pens that can be told from the stains, each once; those of large strokes first.

    What is no longer than wide shows no pen: it may be a clot of blood. Layers are strokes over
    tissue with gaps, and `gaps` is the picture without the structures of the tissue.
    """
    if not strokes.any():
        return
    ns = get_namespace("cpu")
    colors = picture.colors()
    px_um = picture.px_um
    certain = strokes & (layers | _shows_hue(colors, px_um))
    certain &= _inner(strokes.shape, px_um)
    around = dilated_by_disk(ns, strokes, _NARROW_UM / px_um)
    step = np.s_[::_SAMPLE_STEP, ::_SAMPLE_STEP]
    sample = colors[step][~around[step]]
    tissue = sample[sample.mean(axis=1) > GLASS_DENSITY]
    if layers.any():
        colors[layers] = gaps.colors()[layers]
    shown = []
    for box, region in _pieces(strokes):
        whole = fill_small(ns, region, HOLE_SHARE * np.count_nonzero(region))
        if length_of(ns, whole) > LEAST_LENGTH:
            shown.append(colors[box][region & certain[box]])
    shown.sort(key=len, reverse=True)
    hues: list[_Floats] = []
    for densities in shown[:_MOST_STROKES]:
        pen = pen_colour(densities, tissue)
        if pen is not None and all(pen.hue @ hue < _HUE_ON_GLASS for hue in hues):
            hues.append(pen.hue)
            yield pen


def _pieces(mask: MaskArray) -> Iterator[tuple[tuple[slice, slice], MaskArray]]:
    """The box of each region of a mask, and the region in it."""
    labels, boxes = boxes_of(mask)
    for number, box in enumerate(boxes, start=1):
        yield box, labels[box] == number


def _strokes_of(pen: PenColour, strokes: MaskArray, picture: _Picture) -> MaskArray:
    """Further strokes of one pen, bool (H, W)."""
    ns = get_namespace("cpu")
    further = np.zeros_like(strokes)
    amount = box_mean(ns, picture.colors() @ pen.normal, _AMOUNT_PX)
    for least in _LEVELS_OF_PEN:
        least_amount = max(_LEAST_INK_ADDED, least * pen.noise)
        likely = (amount > least_amount) & ~strokes & ~further
        likely = drop_small(ns, likely, MIN_INK_UM2 / picture.px_um**2)
        for around, region, others, part in _regions(likely, picture):
            inside, beside = _both_sides(region, others | strokes[around], part)
            is_pen = length_of(ns, region) > LEAST_LENGTH
            if len(inside):
                added = np.median(inside[:, :3] - beside[:, :3], axis=0)
                is_pen &= _adds_ink(inside, beside, region, is_sure=True)
            else:
                added = np.median(part.colors[region], axis=0)
            cosine = added @ pen.hue / max(1e-6, float(np.linalg.norm(added)))
            if is_pen and cosine > _HUE_OF_PEN:
                further[around] |= region
    return further


def _stroke_on_glass(
    region: MaskArray, likely: MaskArray, part: _Densities
) -> MaskArray:
    """A region that mostly glass lies beside, if it is dense or a stroke; otherwise nothing.

    What is no stroke and has the hue of the usual stains is a piece of tissue.
    """
    if _glass_share(region, likely, part.mean) < _ON_GLASS:
        return np.zeros_like(region)
    ns = get_namespace("cpu")
    colors = part.colors[region]
    strongest = float(np.median(colors.max(axis=1)))
    is_stroke = length_of(ns, region) > LEAST_LENGTH and strongest > _LEAST_ALONE
    usual = np.median(colors, axis=0, keepdims=True)
    is_dense = strongest > _DENSE and not is_stained(usual, GLASS_DENSITY).item()
    return region & (is_stroke or is_dense)


def _glass_share(region: MaskArray, strokes: MaskArray, density: _Floats) -> float:
    """Share of glass of what lies beside a region and is no stroke; 1 if nothing does."""
    ns = get_namespace("cpu")
    beside = dilated_by_square(ns, region, _MIXED_PX + 2)
    beside &= ~dilated_by_square(ns, strokes, 3)
    if not beside.any():
        return 1.0
    return float((density[beside] < GLASS_DENSITY).mean())


def _adds_ink(
    inside: _Floats, beside: _Floats, region: MaskArray, *, is_sure: bool
) -> bool:
    """Whether a region adds to the tissue beside it what a stroke of a pen adds.

    Args:
        inside: densities and texture along the edge of the region, (N, 4).
        beside: those of the tissue beside it, (N, 4).
        region: bool (H, W).
        is_sure: the network is sure of ink; otherwise only opaque ink is accepted.
    """
    added = inside[:, :3] - beside[:, :3]
    usual = np.median(added, axis=0)
    low = np.percentile(added, _LOW_PERCENTILE, axis=0)
    is_opaque = usual.max() > _OPAQUE
    least_added = _LEAST_ADDED_OPAQUE if is_opaque else _LEAST_ADDED
    if usual.min() < least_added or low.max() < _LEAST_INK_ADDED:
        return False
    lengths = np.linalg.norm(added, axis=1, keepdims=True)
    hue = np.linalg.norm((added / lengths.clip(1e-6, None)).mean(axis=0))
    if hue < _LEAST_HUE:
        return False
    tissue = np.median(beside[:, :3], axis=0)
    share = np.linalg.norm(usual) / np.linalg.norm(tissue)
    cosine = usual @ tissue / (np.linalg.norm(usual) * np.linalg.norm(tissue))
    least_share = _MORE_STAIN if is_sure else _MUCH_MORE_STAIN
    amounts = added @ usual / (usual @ usual)
    is_uneven = np.percentile(amounts, 100 - _LOW_PERCENTILE) > _MOST_UNEVEN
    if cosine > _SAME_HUE and (share < least_share or is_uneven):
        return False
    if not is_sure and not is_opaque:
        return False
    if usual.max() > _DENSE:
        return True
    ns = get_namespace("cpu")
    texture = float(np.median(inside[:, 3] / (beside[:, 3] + 0.005)))
    return texture > _LEAST_TEXTURE and length_of(ns, region) > LEAST_LENGTH


def _trimmed(
    region: MaskArray, inside: _Floats, beside: _Floats, part: _Densities
) -> MaskArray:
    """A stroke without what is as pale as the tissue beside it, bool (H, W)."""
    tissue = np.median(beside[:, :3], axis=0)
    usual = np.median(inside[:, :3], axis=0) - tissue
    added = (part.colors - tissue) @ usual / (usual @ usual)
    ns = get_namespace("cpu")
    total = box_mean(ns, np.where(region, added, 0).astype(np.float32), _TRIMMED_PX)
    share = box_mean(ns, region.astype(np.float32), _TRIMMED_PX)
    return np.asarray(region & (total > _LEAST_SHARE_ADDED * share))


def _both_sides(
    region: MaskArray, likely: MaskArray, part: _Densities
) -> tuple[_Floats, _Floats]:
    """Ink over tissue, and the tissue beside it, for each pixel of the edge, float32 (N, 4) each.

    Columns are the densities of red, green and blue, and the texture. Without rows if too little
    of the edge can be compared.
    """
    ns = get_namespace("cpu")
    mean = part.mean
    tissue = mean > GLASS_DENSITY
    planes = [*np.moveaxis(part.colors, 2, 0), box_deviation(ns, mean, 3)]
    edge_px = _beside_px(part.px_um)
    inner = region & tissue
    for mixed_px in (_MIXED_PX, _MIXED_PX - 2):
        middle = ~dilated_by_square(ns, ~region, mixed_px) & tissue
        if np.count_nonzero(middle) > _LEAST_MIDDLE * np.count_nonzero(region):
            inner = middle
            break
    outside = ~dilated_by_square(ns, likely, _MIXED_PX)
    outer = outside & tissue
    edge = _edge(region)
    shares = []
    for area in (inner, outer):
        share = box_mean(ns, area.astype(np.float32), edge_px)
        edge &= share > _LEAST_BESIDE
        shares.append(share)
    edge &= shares[1] > _LEAST_TISSUE * box_mean(
        ns, outside.astype(np.float32), edge_px
    )
    least_px = max(_LEAST_EDGE_PX, _LEAST_EDGE_SHARE * np.count_nonzero(_edge(region)))
    if np.count_nonzero(edge) < least_px:
        return np.empty((0, 4), np.float32), np.empty((0, 4), np.float32)
    sides = []
    for area, share in zip((inner, outer), shares, strict=True):
        means = [box_mean(ns, np.where(area, p, 0), edge_px)[edge] for p in planes]
        sides.append(np.stack(means, axis=1) / share[edge][:, None])
    return sides[0], sides[1]


def _beside_px(px_um: float) -> int:
    """Edge of the squares in pixels, odd; coarse pixels are treated as those of the network."""
    return 2 * round(_BESIDE_UM / min(px_um, INPUT_MPP) / 2) + 1


def _edge(region: MaskArray) -> MaskArray:
    return np.asarray(region & dilated_by_square(get_namespace("cpu"), ~region, 3))


def _unjudged(strokes: MaskArray, dense_ink: MaskArray, picture: _Picture) -> MaskArray:
    """Strokes most of which lie at the border of the picture, bool (H, W).

    There is no context: hair follicles that the border cuts look like ink, and so does the edge
    of the slide. Dense ink on glass needs no context.
    """
    ns = get_namespace("cpu")
    if not strokes.any():
        return strokes
    inner = _inner(strokes.shape, picture.px_um)
    at_border = strokes & ~mostly(ns, strokes, inner, _LEAST_INNER_SHARE)
    unjudged = np.zeros_like(strokes)
    for around, region, _, part in _regions(at_border, picture):
        on_glass = _glass_share(region, strokes[around], part.mean) >= _ON_GLASS
        if not on_glass or dense_ink[around][region].mean() < _LEAST_SURE_SHARE:
            unjudged[around] |= region
    return unjudged


def _brown_stain(
    strokes: MaskArray, probability: npt.NDArray[np.uint8], picture: _Picture
) -> MaskArray:
    """Brown strokes on a slide whose tissue is brown elsewhere, as by DAB, bool (H, W)."""
    stain = np.zeros_like(strokes)
    if not strokes.any():
        return stain
    tissue = _tissue_without_ink(strokes, probability, _SUSPECTED, picture)
    if len(tissue) < _LEAST_TISSUE_PX:
        return stain
    brown = is_brown(tissue) & (tissue.max(axis=1) > _BROWN_DENSITY)
    if brown.mean() > _BROWN_SHARE:
        for box, region in _pieces(strokes):
            usual = np.median(picture.colors(box)[region], axis=0)
            stain[box] |= region & is_brown(usual[None])
    return stain


def _like_tissue(
    strokes: MaskArray,
    known: DenseInk,
    pens: list[PenColour],
    probability: npt.NDArray[np.uint8],
    picture: _Picture,
) -> MaskArray:
    """Strokes that look like tissue elsewhere, and show no known pen, bool (H, W).

    There the network sees no ink, so this colour is a stain: of muscle beside stroma, or of
    epidermis beside dermis. A pen over tissue may look so, too. Strokes with sure ink are left out,
    and those that add little: they look like the tissue below them.
    """
    like = np.zeros_like(strokes)
    if not strokes.any():
        return like
    tissue = _tissue_without_ink(strokes, probability, _FOLLOWED, picture)
    if len(tissue) < _LEAST_TISSUE_PX:
        return like
    lengths = np.linalg.norm(tissue, axis=1)
    for around, region, others, part in _regions(strokes, picture):
        if known.sure is not None and (region & known.sure[around]).any():
            continue
        usual = np.median(part.colors[region], axis=0)
        if any(usual @ pen.normal > _LEVELS_OF_PEN[0] * pen.noise for pen in pens):
            continue
        density = np.linalg.norm(usual)
        has_color = tissue @ usual > _HUE_OF_TISSUE * density * lengths
        has_color &= lengths > _DENSITY_OF_TISSUE * density
        if has_color.mean() > _TISSUE_SHARE and _adds_much(region, others, part):
            like[around] |= region
    return like


def _adds_much(region: MaskArray, strokes: MaskArray, part: _Densities) -> bool:
    """Whether a region adds much of the density of the tissue beside it, or lies alone."""
    inside, beside = _both_sides(region, strokes, part)
    if not len(inside):
        return True
    added = np.median(inside[:, :3] - beside[:, :3], axis=0)
    below = np.median(beside[:, :3], axis=0)
    return bool(np.linalg.norm(added) > _MORE_STAIN * np.linalg.norm(below))


def _tissue_without_ink(
    strokes: MaskArray,
    probability: npt.NDArray[np.uint8],
    most: int,
    picture: _Picture,
) -> _Floats:
    """Densities of a sample of the tissue with at most a probability of ink, (N, 3)."""
    away = away_from(get_namespace("cpu"), strokes | (probability > most))
    return tissue_in(away, picture.rgb, picture.tables)


def _inner(shape: tuple[int, ...], px_um: float) -> MaskArray:
    """What lies away from the border of the picture, bool (H, W)."""
    border_px = max(1, round(CONTEXT_UM / px_um))
    inner = np.zeros(shape, bool)
    inner[border_px:-border_px, border_px:-border_px] = True
    return inner


def _joined(ink: MaskArray, px_um: float) -> MaskArray:
    """Ink with the gaps between the streaks of a dry pen, and with a rim."""
    if not ink.any():
        return ink
    ns = get_namespace("cpu")
    grown = dilated_by_disk(ns, ink, _RIM_UM / px_um)
    return np.asarray(~opened_by_disk(ns, ~grown, _INK_GAP_UM / 2 / px_um))
