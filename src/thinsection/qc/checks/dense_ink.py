"""Dense ink, found by two models that know tissue which looks like it.

The small pixel model for pen looks at the whole slide, at 16 µm/px. It is fast, but it also takes
blue mucin, brown stain and dense tissue for ink. So the areas that it finds are only candidates.
The slower artefact network tells such tissue from ink; it looks only at the candidates and 0.5 mm
around them.

Beside a pen, both models take such tissue for ink, too. But they seldom agree on it, and the ink
network does not. Where all three agree, ink is sure and shows the colour that its pen adds to the
tissue. The rest of what the two models find is ink if it adds this colour.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from thinsection.arrays import Array, ArrayNamespace, filters
from thinsection.arrays.bands import row_bands
from thinsection.arrays.morphology import dilated_by_square, drop_small, mostly
from thinsection.qc.checks.check import COARSEST_MPP
from thinsection.qc.checks.ink_layer import GLASS_DENSITY, boxes_of, colors_of
from thinsection.qc.checks.ink_network import MIN_INK_UM2
from thinsection.qc.checks.pixel_model import load_model, probabilities
from thinsection.types import MaskArray, RgbArray

# Width of the border around candidates in which the artefact network looks too, in µm.
_AROUND_UM = 512.0
# A region of candidates is ink if the artefact network takes at least this share of it for ink.
_LEAST_SHARE = 0.3
# Ink that both models find is sure above this probability of the ink network, in 255ths. A region
# with fewer sure pixels shows no colour of a pen.
_SURE = 140
_LEAST_SURE_PX = 8
# Ink has the hue of a pen if the cosine of the angle is larger than the first one where the pen was
# seen on tissue, and than the second one where it was seen on glass. It has more than a share of
# the pen's density.
_HUE_ON_TISSUE = 0.9
HUE_ON_GLASS = 0.965
_LEAST_PEN_SHARE = 0.5
# Regions that show a pen to those that show none.
_MOST_PENS = 4
# Tissue that shows what lies below ink is outside of a square of this edge in pixels around it. The
# fewest pixels of it; they are sampled at the distance below.
_AWAY_PX = 7
_LEAST_TISSUE_PX = 50
_SAMPLE_STEP = 2
# Width of the square around a pixel in which its ground is looked for, in pixels, and the share of
# it, without ink, that is glass where nothing lies below the ink.
_AROUND_PX = 41
_LEAST_GLASS = 0.8

Added = npt.NDArray[np.float32]
Box = tuple[slice, ...]


class Pen(NamedTuple):
    """Usual colour of the sure ink of a region."""

    added: Added  # density that it adds to what lies below, (3,)
    whole: Added  # density of the ink and what lies below, (3,)
    is_on_glass: bool  # True if nothing lies below: then its hue is known better

    def is_added(self, added: Added, least_share: float) -> MaskArray:
        """What is added in the hue of the pen, with more than a share of its density, bool."""
        least_hue = HUE_ON_GLASS if self.is_on_glass else _HUE_ON_TISSUE
        return _is_like(added, self.added, least_share, least_hue)

    def is_whole(self, colors: Added, least_share: float) -> MaskArray:
        """What has the hue of the ink as it was seen, bool."""
        return _is_like(colors, self.whole, least_share, HUE_ON_GLASS)


def _is_like(
    densities: Added, usual: Added, least_share: float, least_hue: float
) -> MaskArray:
    """Densities with the hue of another one, and more than a share of it, bool.

    The hue is the same if the cosine of the angle is larger than `least_hue`.
    """
    amount = densities @ usual
    length = float(np.linalg.norm(usual))
    has_hue = amount > least_hue * length * np.linalg.norm(densities, axis=-1)
    return np.asarray(has_hue & (amount > least_share * length**2))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseInk:
    """Dense ink of a picture of about 16 µm/px."""

    mask: MaskArray
    # ink on which three models agree, bool (H, W); None if the artefact network did not look
    sure: MaskArray | None = None
    pens: list[Pen] = field(default_factory=list)  # those of the largest regions


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
    sure = ink & seen & (probability > _SURE)
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
    """Ink that is sure, or adds the colour of a pen, with the largest pens.

    The pen is that of the sure ink of the same region; in a region without any, each pen of the
    regions with the most. If no region shows a pen, all ink is left.
    """
    ground = Ground.beside(ns, ink, small, tables)
    labels, boxes = boxes_of(ns, ink)
    pens: dict[int, Pen] = {}
    num_sure: dict[int, int] = {}
    for number, box in enumerate(boxes, start=1):
        core = (labels[box] == number) & sure[box]
        pen = ground.pen_of(box, core)
        if pen is not None:
            pens[number] = pen
            num_sure[number] = int(np.count_nonzero(core))
    largest = sorted(num_sure, key=lambda number: -num_sure[number])[:_MOST_PENS]
    known = [pens[number] for number in largest]
    if not known:
        return DenseInk(mask=ink, sure=ink & sure)
    kept = ink & sure
    for number, box in enumerate(boxes, start=1):
        colors = colors_of(small[box], tables)
        for pen in [pens[number]] if number in pens else known:
            shows = pen.is_added(colors - ground.below, _LEAST_PEN_SHARE)
            if pen.is_on_glass:
                shows |= pen.is_whole(colors, _LEAST_PEN_SHARE)
            kept[box] |= (labels[box] == number) & shows
    return DenseInk(mask=kept, sure=ink & sure, pens=known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What lies below the ink of a picture: glass, or the usual tissue."""

    rgb: RgbArray
    tables: list[Array]  # `density_tables` of the picture
    glass: MaskArray  # bool (H, W), where nearly all that lies around, without ink, is glass
    below: Added  # density of the usual tissue, (3,); 0 if too little of it is seen

    @classmethod
    def beside(
        cls, ns: ArrayNamespace, ink: MaskArray, rgb: RgbArray, tables: list[Array]
    ) -> Self:
        """The ground of a picture with this ink. Memory: 24 bytes per pixel."""
        away = away_from(ns, ink)
        tissue = tissue_in(away, rgb, tables)
        below = np.zeros(3, np.float32)
        if len(tissue) >= _LEAST_TISSUE_PX:
            below = np.median(tissue, axis=0)
        glass = away & (colors_of(rgb, tables).mean(axis=2) < GLASS_DENSITY)
        shares = [
            filters.box_mean(ns, mask.astype(np.float32), _AROUND_PX)
            for mask in (glass, away)
        ]
        is_glass = (shares[0] > _LEAST_GLASS * shares[1]) & (shares[1] > 0)
        return cls(rgb=rgb, tables=tables, glass=is_glass, below=below)

    def pen_of(self, box: Box, core: MaskArray) -> Pen | None:
        """Pen of the sure ink of a box; None if there is too little ink.

        Where a stroke crosses from glass to tissue, it is measured on glass.
        """
        on_glass = core & self.glass[box]
        for part, is_on_glass in ((on_glass, True), (core, False)):
            if np.count_nonzero(part) >= _LEAST_SURE_PX:
                colors = colors_of(self.rgb[box], self.tables)[part]
                whole = np.asarray(np.median(colors, axis=0))
                below = 0 if is_on_glass else self.below
                return Pen(whole - below, whole, is_on_glass)
        return None


def away_from(ns: ArrayNamespace, ink: MaskArray) -> MaskArray:
    """What shows no ink, not even the soft edge of a stroke, bool (H, W)."""
    return np.asarray(~dilated_by_square(ns, ink, _AWAY_PX))


def tissue_in(
    area: MaskArray, small: RgbArray, tables: list[Array]
) -> npt.NDArray[np.float32]:
    """Densities of red, green and blue of a sample of the tissue in an area, (N, 3)."""
    step = np.s_[::_SAMPLE_STEP, ::_SAMPLE_STEP]
    colors = colors_of(small[step], tables)[area[step]]
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
