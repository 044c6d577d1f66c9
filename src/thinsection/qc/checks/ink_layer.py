"""Ink over tissue with gaps, such as lung and fat: the gaps show the layer of ink alone.

By the law of Beer and Lambert, a stroke adds the same density to each pixel below it. So it moves
the least density of a neighbourhood as far as all others. Where tissue has gaps, the least density
beside a stroke is that of glass, and below a stroke it is that of the ink: even and of one hue. The
fine structure of the tissue stands above it, inside as outside. Biology fills gaps, or has none.

The least density is that of the picture without structures narrower than 80 µm (a grey closing of
its light). There a stroke over lung is a stroke on glass, and the ink network sees it as one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.arrays import Array, ArrayNamespace
from thinsection.arrays.filters import (
    box_deviation,
    box_mean,
    channel_mean,
    opened_by_square,
    otsu_threshold,
)
from thinsection.arrays.labels import find_regions
from thinsection.arrays.morphology import (
    depth,
    dilated_by_square,
    drop_small,
    fill_small,
    opened_by_disk,
)
from thinsection.qc.checks.ink_network import MIN_INK_UM2, ink_probability
from thinsection.types import MaskArray, RgbArray

# Structures narrower than this many pixels of 16 µm are left out.
_GAP_PX = 5
# Least probability of ink in a layer, and least mean of it, in 255ths.
_LIKELY = 60
_LEAST_MEAN = 150
# A layer is even if its deviation over a square of this edge in pixels is at most the first share
# of its density, plus the second density.
_EVEN_PX = 5
_EVEN_SHARE = 0.2
_EVEN_DENSITY = 0.005
# Least density of the strongest channel.
_LEAST_DENSITY = 0.08
# Tissue beside a layer lies in the outer square around a pixel, not in the inner one. Edges in px.
_BESIDE_PX = 25
_MIXED_PX = 9
_LEAST_BESIDE_PX = 30
_AROUND_PX = 16
# Glass is paler than this mean density.
GLASS_DENSITY = 0.08
# At least this share of what lies beside is glass without the fine structure.
_LEAST_GLASS = 0.5
# Least density that a layer adds to its strongest channel, and to its weakest one.
_LEAST_ADDED = 0.1
_LEAST_ADDED_WEAKEST = -0.06
# Largest median difference from the usual density of the layer, as a share of what it adds.
_UNEVEN = 0.12
# A layer may have the hue of the tissue if the cosine of the angle to the fine structure beside it
# is larger than the first one, and has it above the second one; then it is more even, too.
_OTHER_HUE = 0.9
_TISSUE_HUE = 0.95
_UNEVEN_OF_TISSUE = 0.06
# There is fine structure where it has this mean density over a square; it is in at least this share
# of the layer, and of what lies beside it.
_FINE_DENSITY = 0.02
_FINE_PX = 5
_LEAST_FINE_SHARE = 0.6
# Least mean density of the fine structure beside a layer, and how many times as dense it is below.
_LEAST_FINE = 0.045
_FINE_RATIO = (0.5, 1.7)
# A region is cut at most so often. It is not cut if the median deviation of its density is at most
# this share of it. Parts have no bridges narrower than twice this radius, and at least so many
# pixels. Their hue is not that of the tissue. It may be nearer to it in a part of at least so many
# pixels, up to this cosine of the angle, if the picture has no pen that is sure: beside one, the
# network takes keratin and mucin for ink, too.
_MOST_CUTS = 3
_ONE_SHADE = 0.05
_LEAST_RADIUS_PX = 1.5
_LEAST_SHADE_PX = 25
_LARGE_PART_PX = 1000
_HUE_OF_LARGE_PART = 0.945
# A stroke is longer than wide: least area in squares of its largest width.
LEAST_LENGTH = 2.0
# Holes of at most this share of a region do not make it a stroke, as the inside of a ring does.
HOLE_SHARE = 0.1
# A layer goes on for so many pixels at its edge where it adds these shares of its density.
_RIM_PX = 5
_RIM_SHARES = (0.6, 1.7)

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of the picture."""

    # densities of red, green and blue without the fine structure, float32 (H, W, 3)
    colors: _Floats
    # densities of the fine structure, float32 (H, W, 3)
    fine: _Floats
    # probability of ink in 255ths, uint8 (H, W)
    probability: npt.NDArray[np.uint8]
    # largest cosine of the angle between the hues of a large cut layer and of the tissue
    cut_hue: float


def find_layers(
    ns: ArrayNamespace,
    rgb: RgbArray,
    coarse: RgbArray,
    tables: list[Array],
    px_um: float,
    *,
    shows_pen: bool,
) -> MaskArray:
    """Ink over tissue with gaps, bool (H, W).

    Args:
        ns: device, a CPU.
        rgb: uint8 (H, W, 3), of about 16 µm per pixel.
        coarse: it without its fine structure.
        tables: its `density_tables`.
        px_um: µm per px.
        shows_pen: the picture has dense ink that is sure.

    Memory: 16 bytes per pixel, that of `ink_probability`, and 60 bytes per pixel of the largest box
        around a region of likely ink.
    """
    probability = ink_probability(ns, coarse)
    layers = np.zeros(rgb.shape[:2], bool)
    least_px = MIN_INK_UM2 / px_um**2
    likely = drop_small(ns, probability > _LIKELY, least_px)
    for around, region in _regions(likely):
        colors = colors_of(coarse[around], tables)
        part = _Part(
            colors=colors,
            fine=colors_of(rgb[around], tables) - colors,
            probability=probability[around],
            cut_hue=_OTHER_HUE if shows_pen else _HUE_OF_LARGE_PART,
        )
        even = drop_small(ns, region & _even(ns, colors), least_px)
        for within, piece in _regions(even):
            own = _cut(part, within)
            layers[around][within] |= _layers_in(ns, piece, even[within], own)
    return layers


def without_fine_structure(ns: ArrayNamespace, rgb: RgbArray) -> RgbArray:
    """The picture without what is darker and narrower than 80 µm, uint8 (H, W, 3)."""
    coarse = np.empty_like(rgb)
    for channel in range(3):
        light = rgb[..., channel].astype(np.float32)
        coarse[..., channel] = -opened_by_square(ns, -light, _GAP_PX)
    return coarse


def _layers_in(
    ns: ArrayNamespace,
    region: MaskArray,
    others: MaskArray,
    part: _Part,
    num_cuts: int = _MOST_CUTS,
) -> MaskArray:
    """A region if it is a layer, or else what is a layer of its pale and of its dark half.

    A stroke may go on from tissue with gaps to dense tissue, which is no layer.
    """
    found = _layer(ns, region, others, part, is_cut=num_cuts < _MOST_CUTS)
    mean = channel_mean(ns, part.colors)
    values = mean[region]
    usual = float(np.median(values))
    spread = float(np.median(np.abs(values - usual)))
    if found.any() or not num_cuts or spread < _ONE_SHADE * usual:
        return found
    if _num_possible(region, part) < _LEAST_SHADE_PX:
        return found
    level = otsu_threshold(ns, values)
    for is_half in (mean <= level, mean > level):
        half = opened_by_disk(ns, region & is_half, _LEAST_RADIUS_PX)
        half = drop_small(ns, half, _LEAST_SHADE_PX)
        for within, shade in _regions(half):
            own = _cut(part, within)
            found[within] |= _layers_in(ns, shade, others[within], own, num_cuts - 1)
    return found


def colors_of(rgb: RgbArray, tables: list[Array]) -> _Floats:
    """Densities of red, green and blue, float32 (..., 3)."""
    planes = [table.take(rgb[..., channel]) for channel, table in enumerate(tables)]
    return np.stack(planes, axis=-1)


def _regions(mask: MaskArray) -> Iterator[tuple[tuple[slice, ...], MaskArray]]:
    """The surroundings of each region of a mask, and the region in them."""
    labels, boxes = boxes_of(mask)
    for number, box in enumerate(boxes, start=1):
        around = tuple(
            slice(max(0, s.start - _AROUND_PX), s.stop + _AROUND_PX) for s in box
        )
        yield around, labels[around] == number


def boxes_of(
    mask: MaskArray,
) -> tuple[Array, list[tuple[slice, slice]]]:
    """Labels of the regions of a mask, and the box around each."""
    regions = find_regions(mask, corners=True)
    return regions.labels(), regions.boxes()


def _num_possible(region: MaskArray, part: _Part) -> int:
    """Pixels of a region that are likely ink of another hue than the fine structure."""
    tissue = part.fine.mean(axis=(0, 1))
    colors = part.colors[region]
    lengths = np.linalg.norm(colors, axis=1) * np.linalg.norm(tissue)
    is_likely = part.probability[region] > _LEAST_MEAN
    return int(np.count_nonzero(is_likely & (colors @ tissue < part.cut_hue * lengths)))


def _cut(part: _Part, within: tuple[slice, ...]) -> _Part:
    return _Part(
        colors=part.colors[within],
        fine=part.fine[within],
        probability=part.probability[within],
        cut_hue=part.cut_hue,
    )


def _even(ns: ArrayNamespace, colors: _Floats) -> MaskArray:
    """What is as even as a layer, and not glass, bool (H, W)."""
    mean = channel_mean(ns, colors)
    most = _EVEN_SHARE * mean + _EVEN_DENSITY
    is_even = box_deviation(ns, mean, _EVEN_PX) < most
    return np.asarray(is_even & (colors.max(axis=2) > _LEAST_DENSITY))


def _layer(
    ns: ArrayNamespace,
    region: MaskArray,
    others: MaskArray,
    part: _Part,
    *,
    is_cut: bool,
) -> MaskArray:
    """A region with its rim if it is a layer of ink, otherwise nothing, bool (H, W).

    A cut region must have another hue than the fine structure beside it, which is the tissue.
    """
    nothing = np.zeros_like(region)
    beside = dilated_by_square(ns, region, _BESIDE_PX)
    beside &= ~dilated_by_square(ns, others, _MIXED_PX)
    if np.count_nonzero(beside) < _LEAST_BESIDE_PX:
        return nothing
    outer = part.colors[beside]
    inner = part.colors[region]
    if (outer.mean(axis=1) < GLASS_DENSITY).mean() <= _LEAST_GLASS:
        return nothing
    ground = np.median(outer, axis=0)
    usual = np.median(inner, axis=0)
    added = usual - ground
    if added.max() < _LEAST_ADDED or added.min() < _LEAST_ADDED_WEAKEST:
        return nothing
    if not _keeps_fine_structure(ns, region, beside, channel_mean(ns, part.fine)):
        return nothing
    mean = float(part.probability[region].mean())
    uneven = float(np.median(np.abs(inner - usual).mean(axis=1)))
    uneven /= float(np.abs(added).mean())
    if mean < _LEAST_MEAN or uneven > _UNEVEN:
        return nothing
    tissue = part.fine[beside].mean(axis=0)
    cosine = added @ tissue / (np.linalg.norm(added) * np.linalg.norm(tissue))
    if cosine > _OTHER_HUE:
        # a gap in a region does not make it a stroke
        whole = fill_small(ns, region, HOLE_SHARE * np.count_nonzero(region))
        is_large = np.count_nonzero(region) >= _LARGE_PART_PX
        has_other_hue = is_large and cosine < part.cut_hue
        if length_of(ns, whole) <= LEAST_LENGTH or (is_cut and not has_other_hue):
            return nothing
    if cosine > _TISSUE_HUE and uneven > _UNEVEN_OF_TISSUE:
        return nothing
    share = (part.colors - ground) @ added / (added @ added)
    rim = dilated_by_square(ns, region, _RIM_PX)
    rim &= (share > _RIM_SHARES[0]) & (share < _RIM_SHARES[1])
    return np.asarray(region | rim)


def _keeps_fine_structure(
    ns: ArrayNamespace, region: MaskArray, beside: MaskArray, fine: _Floats
) -> bool:
    """Whether the fine structure of the tissue is the same in a region as beside it."""
    has_fine = box_mean(ns, fine, _FINE_PX) > _FINE_DENSITY
    if min(has_fine[region].mean(), has_fine[beside].mean()) < _LEAST_FINE_SHARE:
        return False
    usual = float(fine[beside].mean())
    ratio = float(fine[region].mean()) / max(usual, _LEAST_FINE)
    return usual > _LEAST_FINE and _FINE_RATIO[0] < ratio < _FINE_RATIO[1]


def length_of(ns: ArrayNamespace, region: MaskArray) -> float:
    """Area in squares of the largest width: 0.8 for a disk, the length of a stroke in widths."""
    return np.count_nonzero(region) / (2 * depth(region)) ** 2
