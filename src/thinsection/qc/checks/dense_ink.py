"""Dense ink, found by two models that know tissue which looks like it.

The small pixel model for pen looks at the whole slide, at 16 µm/px. It is fast, but it also takes
blue mucin, brown stain and dense tissue for ink. So the areas that it finds are only candidates.
The slower artefact network tells such tissue from ink; it looks only at the candidates and 0.5 mm
around them.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.arrays import ArrayNamespace
from thinsection.arrays.bands import row_bands
from thinsection.arrays.morphology import dilated_by_square, drop_small, mostly
from thinsection.qc.checks.check import COARSEST_MPP
from thinsection.qc.checks.pixel_model import load_model, probabilities
from thinsection.types import MaskArray, RgbArray

# Smaller spots are not ink, in µm².
MIN_INK_UM2 = 6400.0
# Width of the border around candidates in which the artefact network looks too, in µm.
_AROUND_UM = 512.0
# A region of candidates is ink if the artefact network takes at least this share of it for ink.
_LEAST_SHARE = 0.3


def find_dense_ink(
    ns: ArrayNamespace,
    thumbnail: RgbArray,
    px_um: float,
    small: RgbArray,
    get_seen_ink: Callable[[], MaskArray] | None,
) -> MaskArray:
    """Mask of dense ink, bool, of the size of `small`.

    Args:
        ns: device, a CPU.
        thumbnail: uint8 (H, W, 3).
        px_um: µm per px of the thumbnail. If the thumbnail is too coarse for the artefact network,
            all candidates are ink.
        small: the thumbnail, reduced by a whole number to about 16 µm per px.
        get_seen_ink: see `find_pen_ink`.

    Memory: about 10 bytes per pixel of `small`, 40 MB, and that of `ink_within`.
    """
    factor = round(thumbnail.shape[0] / small.shape[0])
    small_um = px_um * factor
    ink = _candidates(ns, small, small_um)
    if not ink.any() or px_um > COARSEST_MPP:
        return ink
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
    ink = mostly(ns, regions, ink, 0.0)
    return np.asarray(without_stain(ns, ink, small))


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
