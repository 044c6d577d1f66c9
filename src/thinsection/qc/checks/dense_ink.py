"""Dense ink, found by two models that know tissue which looks like it.

The small pixel model for pen looks at the whole slide, at 16 µm/px. It is fast, but it also takes
blue mucin, brown stain and dense tissue for ink. So the areas that it finds are only candidates.
The slower artefact network tells such tissue from ink; it looks only at the candidates and 0.5 mm
around them.

Beside a pen, both models take such tissue for ink, too, and sometimes the ink network does as well.
Where all three agree, nearly all is ink, and it shows the colour that its pen adds to the tissue. A
linear filter answers 1 to this colour and least to the tissue away from ink. What the two models
find is ink where this answer, the share of the pen, is large enough.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.bands import row_bands
from thinsection.arrays.morphology import dilated_by_square, drop_small, mostly
from thinsection.qc.checks.check import COARSEST_MPP
from thinsection.qc.checks.ink_layer import GLASS_DENSITY, boxes_of, colors_of
from thinsection.qc.checks.ink_network import MIN_INK_UM2, SURE
from thinsection.qc.checks.pen_colour import pen_filter
from thinsection.qc.checks.pixel_model import load_model, probabilities
from thinsection.types import MaskArray, RgbArray

# Width of the border around candidates in which the artefact network looks too, in µm.
_AROUND_UM = 512.0
# A region of candidates is ink if the artefact network takes at least this share of it for ink.
_LEAST_SHARE = 0.3
# The fewest pixels of sure ink that show a pen, and their least share of the sure ink of a region.
_LEAST_SURE_PX = 8
_LEAST_SHARE_OF_SURE = 0.2
# Ink has more than this share of the density of its pen. Variance of the densities of tissue that
# the slide does not show away from ink.
_LEAST_PEN_SHARE = 0.42
_UNSEEN_VARIANCE = 0.01
# Regions that show a pen to those that show none.
_MOST_PENS = 4
# Tissue that shows what lies below ink is outside of a square of this edge in pixels around it. The
# fewest pixels of it, and about how many are used; they are sampled at the distance below or more.
_AWAY_PX = 7
_LEAST_TISSUE_PX = 50
_MOST_TISSUE_PX = 10_000
_SAMPLE_STEP = 2
# Width of the square around a pixel in which its ground is looked for, in pixels, and the share of
# it, without ink, that is glass where nothing lies below the ink.
_AROUND_PX = 41
_LEAST_GLASS = 0.8

Densities = npt.NDArray[np.float32]  # of red, green and blue, (..., 3)
Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseInk:
    """Dense ink of a picture of about 16 µm/px."""

    mask: MaskArray
    # ink on which three models agree, bool (H, W); None if the artefact network did not look
    sure: MaskArray | None = None
    pens: list[Densities] = field(default_factory=list)  # filters; the largest regions'


def find_dense_ink(
    ns: ArrayNamespace,
    thumbnail: RgbArray,
    px_um: float,
    small: RgbArray,
    get_seen_ink: Callable[[], MaskArray] | None,
    *,
    probability: npt.NDArray[np.uint8],
    tables: list[Array],
) -> DenseInk:
    """Dense ink, and the pens that it shows.

    Args:
        ns: device, a CPU.
        thumbnail: uint8 (H, W, 3).
        px_um: µm per px of the thumbnail. If the thumbnail is too coarse for the artefact network,
            all candidates are ink.
        small: the thumbnail, reduced by a whole number to about 16 µm per px.
        get_seen_ink: see `find_pen_ink`.
        probability: of ink in `small`, by the ink network.
        tables: `density_tables` of `small`.

    Memory: about 34 bytes per pixel of `small`, 40 MB, 40 bytes per pixel of the largest box around
        a region, and that of `ink_within`.
    """
    factor = round(thumbnail.shape[0] / small.shape[0])
    small_um = px_um * factor
    ink = _candidates(ns, small, small_um)
    if not ink.any() or px_um > COARSEST_MPP:
        return DenseInk(mask=ink)
    # imported here, because most slides have no candidates and do not need the network
    from thinsection.qc.checks.artefact_network import ink_within, without_stain

    reach = round(_AROUND_UM / small_um)
    near = np.asarray(dilated_by_square(ns, ink, 2 * reach + 1))
    if get_seen_ink:
        seen = get_seen_ink()
    else:
        seen = ink_within(ns, thumbnail, px_um, enlarged(near, factor, thumbnail))
    seen = _mostly_true(seen, factor) & near
    seen = drop_small(ns, seen, MIN_INK_UM2 / small_um**2)
    regions = mostly(ns, ink | seen, seen, _LEAST_SHARE)
    # a region without a candidate may be tissue near a candidate, so it is dropped
    found = mostly(ns, regions, ink, 0.0)
    sure = ink & seen & (probability > SURE)
    dense = _known_ink(ns, found, sure, small, tables)
    found = drop_small(ns, dense.mask, MIN_INK_UM2 / small_um**2)
    return replace(dense, mask=np.asarray(without_stain(ns, found, small)))


def _known_ink(
    ns: ArrayNamespace,
    ink: MaskArray,
    sure: MaskArray,
    small: RgbArray,
    tables: list[Array],
) -> DenseInk:
    """Ink that has the colour of a pen, with the largest pens.

    The pens are those of the sure ink of the same region; in a region without any, those of the
    regions with the most. If no region shows a pen, all ink is left.
    """
    ground = Ground.beside(ns, ink, small, tables)
    labels, boxes = boxes_of(ink)
    pens: dict[int, list[Densities]] = {}
    num_sure: dict[int, int] = {}
    for number, box in enumerate(boxes, start=1):
        core = (labels[box] == number) & sure[box]
        own = ground.pens_of(box, core)
        if own:
            pens[number] = own
            num_sure[number] = int(np.count_nonzero(core))
    largest = sorted(num_sure, key=lambda number: -num_sure[number])[:_MOST_PENS]
    known = [pen for number in largest for pen in pens[number]]
    if not known:
        return DenseInk(mask=ink, sure=ink & sure)
    kept = np.zeros_like(ink)
    for number, box in enumerate(boxes, start=1):
        shown = shows_pen(colors_of(small[box], tables), pens.get(number, known))
        kept[box] |= (labels[box] == number) & shown
    return DenseInk(mask=kept, sure=ink & sure, pens=known)


def shows_pen(densities: Densities, pens: list[Densities]) -> MaskArray:
    """Where the share of one of the pens is that of ink, bool (...)."""
    shown = np.zeros(densities.shape[:-1], bool)
    for pen in pens:
        shown |= densities @ pen > _LEAST_PEN_SHARE
    return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What lies below the ink of a picture: glass, or the usual tissue."""

    rgb: RgbArray
    tables: list[Array]  # `density_tables` of the picture
    glass: MaskArray  # bool (H, W), where nearly all that lies around, without ink, is glass
    tissue: Densities  # sample of the tissue away from ink, (N, 3); none if too little is seen

    @classmethod
    def beside(
        cls, ns: ArrayNamespace, ink: MaskArray, rgb: RgbArray, tables: list[Array]
    ) -> Self:
        """The ground of a picture with this ink. Memory: 24 bytes per pixel."""
        away = away_from(ns, ink)
        tissue = tissue_in(away, rgb, tables)
        tissue = tissue[:: max(1, len(tissue) // _MOST_TISSUE_PX)]
        if len(tissue) < _LEAST_TISSUE_PX:
            tissue = tissue[:0]
        glass = away & (colors_of(rgb, tables).mean(axis=2) < GLASS_DENSITY)
        shares = [
            filters.box_mean(ns, mask.astype(np.float32), _AROUND_PX)
            for mask in (glass, away)
        ]
        is_glass = (shares[0] > _LEAST_GLASS * shares[1]) & (shares[1] > 0)
        return cls(rgb=rgb, tables=tables, glass=is_glass, tissue=tissue)

    def pens_of(self, box: Box, core: MaskArray) -> list[Densities]:
        """Filters of the pens of the sure ink of a box; none if there is too little ink.

        `densities @ pen` is the share of the pen, 1 on its ink. Where a stroke crosses from glass
        to tissue, it is measured on glass. Sure ink without the colour of the first pen shows
        another one.
        """
        colors = colors_of(self.rgb[box][core], self.tables)
        glass = self.glass[box][core]
        least_px = max(_LEAST_SURE_PX, _LEAST_SHARE_OF_SURE * len(colors))
        pens: list[Densities] = []
        while len(colors) >= least_px:
            if np.count_nonzero(glass) >= _LEAST_SURE_PX:
                added = np.asarray(np.median(colors[glass], axis=0))
            else:
                added = np.asarray(np.median(colors, axis=0))
                if len(self.tissue):
                    added -= np.median(self.tissue, axis=0)
            if added.max() < GLASS_DENSITY:
                break
            pen, _ = pen_filter(added, self.tissue, variance=_UNSEEN_VARIANCE)
            others = ~shows_pen(colors, [pen])
            if others.all():
                break
            pens.append(pen)
            colors = colors[others]
            glass = glass[others]
        return pens


def away_from(ns: ArrayNamespace, ink: MaskArray) -> MaskArray:
    """What shows no ink, not even the soft edge of a stroke, bool (H, W)."""
    return np.asarray(~dilated_by_square(ns, ink, _AWAY_PX))


def tissue_in(
    area: MaskArray, small: RgbArray, tables: list[Array]
) -> npt.NDArray[np.float32]:
    """Densities of red, green and blue of a sample of the tissue in an area, (N, 3)."""
    step = np.s_[::_SAMPLE_STEP, ::_SAMPLE_STEP]
    colors = colors_of(small[step][area[step]], tables)
    return np.asarray(colors[colors.mean(axis=1) > GLASS_DENSITY])


def _candidates(ns: ArrayNamespace, small: RgbArray, px_um: float) -> MaskArray:
    """Area that the small pixel model takes for ink, without small spots."""
    model = load_model(Path(__file__).parent / "models" / "pen.npz")
    assert model is not None
    ink = probabilities(ns, small, {"pen": model})["pen"] > 0.5
    return np.asarray(drop_small(ns, ink, MIN_INK_UM2 / px_um**2))


def enlarged(mask: MaskArray, factor: int, thumbnail: RgbArray) -> MaskArray:
    """Mask at the size of the thumbnail, from one value per block of `factor` pixels."""
    height, width = thumbnail.shape[:2]
    large = mask.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.asarray(large[:height, :width])


def reduced(thumbnail: RgbArray, factor: int) -> RgbArray:
    """Means of blocks of `factor` pixels by Pillow; the last may be smaller.

    Memory: the result twice, and a band of the thumbnail.
    """
    parts = []
    for band in row_bands(-(-len(thumbnail) // factor)):
        rows = thumbnail[band.inside.start * factor : band.inside.stop * factor]
        parts.append(np.asarray(Image.fromarray(rows).reduce(factor)))
    return np.concatenate(parts)


def _mostly_true(mask: MaskArray, factor: int) -> MaskArray:
    """True for blocks of `factor` pixels that are at least half True; the last may be smaller."""
    parts = []
    for band in row_bands(-(-len(mask) // factor)):
        rows = mask[band.inside.start * factor : band.inside.stop * factor]
        share = Image.fromarray(rows.astype(np.uint8) * 255).reduce(factor)
        parts.append(np.asarray(share) > 127)
    return np.concatenate(parts)
