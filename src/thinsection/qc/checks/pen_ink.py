"""Pen ink of any colour, on glass and over tissue, translucent or opaque.

Dense ink is found by two older models (`dense_ink.py`). For translucent ink, the ink network looks
at the whole slide at 16 µm/px. A stroke begins where ink is certain: where it is dense, on glass,
or where the network is sure. It is followed from there as far as ink is likely: over its
edge, and from glass into tissue. Biology of the colour of ink lies in tissue alone. Beside a stroke
on tissue, the same tissue goes on without ink: by the law of Beer and Lambert, the stroke adds
density to it and keeps its texture, where mucin or pigment replaces it.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image

from thinsection.arrays import Array, ArrayNamespace, get_namespace
from thinsection.arrays.filters import box_deviation, box_mean
from thinsection.arrays.morphology import (
    dilated_by_disk,
    dilated_by_square,
    drop_small,
    labelled,
    mostly,
    opened_by_disk,
)
from thinsection.qc.checks.artefact_network import density_tables
from thinsection.qc.checks.check import PenInk
from thinsection.qc.checks.dense_ink import MIN_INK_UM2, enlarged, find_dense_ink
from thinsection.qc.checks.ink_network import INPUT_MPP, ink_probability
from thinsection.types import MaskArray, RgbArray

# Least probability of ink in a stroke. Where a region above the first one is no stroke, parts of it
# above the second one may be.
_LIKELY_INK = (0.35, 0.5)
# Probability above which ink is sure.
_SURE_INK = 0.7
# A region is a stroke if at least this share of it is sure,
_LEAST_SURE_SHARE = 0.3
# or if at least this share of it is dense, or on glass with more than this probability.
_LEAST_GLASS_SHARE = 0.05
_GLASS_INK = 0.4
# Glass is paler than this density. Ink is on glass if it lies between glass that is no farther
# away than this, in µm.
_GLASS_DENSITY = 0.08
_GLASS_REACH_UM = 320.0
# A stroke is compared with the tissue on the other side of its edge, in squares of this edge length
# in µm, of which ink and tissue each fill at least this share.
_BESIDE_UM = 208.0
_LEAST_BESIDE = 0.15
# The fewest pixels of an edge that can be compared. Where there are fewer, a stroke has at least
# this area in µm².
_LEAST_EDGE_PX = 8
_LEAST_UNCOMPARED_UM2 = 100_000.0
# At this percentile along its edge, a stroke adds at least the first density to each channel, and
# the second one to its strongest channel.
_LOW_PERCENTILE = 15
_LEAST_ADDED = -0.12
_LEAST_INK_ADDED = 0.02
# Half of the largest width of translucent ink, in µm.
_WIDEST_UM = 480.0
# Least texture of a stroke relative to the tissue beside it; a stroke that adds more than this
# density may hide the texture.
_LEAST_TEXTURE = 0.7
_OPAQUE_ADDED = 0.8
# Gaps in ink up to this width are closed, in µm.
_INK_GAP_UM = 64.0
# Width of the border of a picture, in µm, and the share of a stroke outside of it that is needed:
# what lies in the border has no surroundings to compare with, and is not judged.
_BORDER_UM = 128.0
_LEAST_INNER_SHARE = 0.4


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

    Memory: 2 bytes per pixel of the thumbnail, about 60 bytes per pixel of 16 µm, and that of
        `ink_probability` and `ink_within`.
    """
    # pixels of the thumbnail along a pixel that is searched
    factor = max(1, round(INPUT_MPP / px_um))
    small = np.asarray(Image.fromarray(thumbnail).reduce(factor))
    ns = get_namespace("cpu")
    small_um = px_um * factor
    dense = find_dense_ink(ns, thumbnail, px_um, small, get_seen_ink)
    strokes = _strokes(ns, ink_probability(ns, small), small, dense, small_um)
    inner = np.zeros_like(strokes)
    edge = max(1, round(_BORDER_UM / small_um))
    inner[edge:-edge, edge:-edge] = True
    ink = mostly(ns, strokes, inner, _LEAST_INNER_SHARE)
    masks = []
    for mask in (ink, strokes & ~ink):
        masks.append(enlarged(_joined(ns, mask, small_um), factor, thumbnail))
    return PenInk(ink=masks[0], unjudged=masks[1] & ~masks[0])


def _strokes(
    ns: ArrayNamespace, probability: Array, rgb: Array, dense: Array, px_um: float
) -> Array:
    """Dense ink, and regions of likely ink that are certain in part, bool (H, W)."""
    strokes = dense.copy()
    if not bool((probability > 255 * _LIKELY_INK[0]).any()):
        return strokes
    tables = density_tables(ns, rgb)
    densities = [table[rgb[..., c]] for c, table in enumerate(tables)]
    mean = sum(densities) / 3
    planes = [*densities, box_deviation(ns, mean, 3)]
    for least in _LIKELY_INK:
        likely = probability > 255 * least
        likely = drop_small(ns, likely, MIN_INK_UM2 / px_um**2)
        glass = (mean < _GLASS_DENSITY) & ~likely
        between_glass = ~opened_by_disk(ns, ~glass, _GLASS_REACH_UM / px_um)
        on_glass = between_glass & (probability > 255 * _GLASS_INK)
        sure = mostly(ns, likely, probability > 255 * _SURE_INK, _LEAST_SURE_SHARE)
        certain = sure | mostly(ns, likely, on_glass | dense, _LEAST_GLASS_SHARE)
        strokes |= _adding_density(ns, certain, planes, px_um)
    return strokes


def _adding_density(
    ns: ArrayNamespace,
    strokes: Array,
    planes: list[Array],
    px_um: float,
) -> Array:
    """Strokes that add density to the tissue beside them and keep its texture, bool (H, W).

    Args:
        ns: device.
        strokes: bool (H, W).
        planes: densities of red, green and blue, and the texture, (H, W) each.
        px_um: µm per pixel.
    """
    xp = ns.xp
    edge_px = 2 * round(_BESIDE_UM / px_um / 2) + 1
    tissue = sum(planes[:3]) / 3 > _GLASS_DENSITY
    inner = ~dilated_by_square(ns, ~strokes, 5)
    outer = ~dilated_by_square(ns, strokes, 5)
    edge = strokes & dilated_by_square(ns, ~strokes, 3)
    sides = []
    for area in (inner & tissue, outer & tissue):
        share = box_mean(ns, area.astype(xp.float32), edge_px)
        edge &= share > _LEAST_BESIDE
        sides.append((area, share))
    labels, count = labelled(ns, strokes, connectivity=8)
    labels_at_edge = labels[edge]
    values = []
    for area, share in sides:
        means = [box_mean(ns, xp.where(area, p, 0), edge_px)[edge] for p in planes]
        values.append(xp.stack(means, axis=1) / share[edge][:, None])
    depth = ns.ndimage.distance_transform_edt(strokes)
    depth_um = px_um * ns.ndimage.maximum(depth, labels, xp.arange(count + 1))
    areas = xp.bincount(labels.ravel(), minlength=count + 1)
    keep = areas * px_um**2 >= _LEAST_UNCOMPARED_UM2
    keep[0] = False
    for label in range(1, count + 1):
        inside, beside = (side[labels_at_edge == label] for side in values)
        if len(inside) < _LEAST_EDGE_PX:
            continue
        added = inside[:, :3] - beside[:, :3]
        low = xp.percentile(added, _LOW_PERCENTILE, axis=0)
        usual = xp.median(added, axis=0)
        adds = low.min() > _LEAST_ADDED and low.max() > _LEAST_INK_ADDED
        ratio = float(xp.median(inside[:, 3] / (beside[:, 3] + 0.005)))
        is_layer = ratio > _LEAST_TEXTURE and depth_um[label] < _WIDEST_UM
        keep[label] = adds and (is_layer or usual.max() > _OPAQUE_ADDED)
    return keep[labels]


def _joined(ns: ArrayNamespace, ink: Array, px_um: float) -> Array:
    """Ink with the gaps between the streaks of a dry pen, and with a rim."""
    if not bool(ink.any()):
        return ink
    gap = _INK_GAP_UM / px_um
    grown = dilated_by_disk(ns, ink, gap / 4)
    return ~opened_by_disk(ns, ~grown, gap)
