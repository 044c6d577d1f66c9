"""Pen ink of any colour, which the default tissue mask removes.

The small pixel model for pen looks at the whole slide, at 16 µm/px. It is fast, but it also takes
blue mucin, brown stain and dense tissue for ink. So the areas that it finds are only candidates.
The slower artefact network tells such tissue from ink; it looks only at the candidates and 0.5 mm
around them.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.arrays import ArrayNamespace, get_namespace
from thinsection.arrays.morphology import (
    dilated_by_disk,
    dilated_by_square,
    drop_small,
    mostly,
    opened_by_disk,
)
from thinsection.qc.checks.check import COARSEST_MPP
from thinsection.qc.checks.pixel_model import load_model, probabilities
from thinsection.types import MaskArray, RgbArray

# Edge of the pixels that are searched for ink, in µm.
_INK_UM = 16.0
# Gaps in ink up to this width are closed, in µm.
_INK_GAP_UM = 64.0
# Smaller spots are not ink, in µm².
_MIN_INK_UM2 = 6400.0
# Width of the border around candidates in which the artefact network looks too, in µm.
_AROUND_UM = 512.0
# A region of candidates is ink if the artefact network takes at least this share of it for ink.
_LEAST_SHARE = 0.3


def find_pen_ink(
    thumbnail: RgbArray,
    px_um: float,
    get_seen_ink: Callable[[], MaskArray] | None = None,
) -> MaskArray:
    """Mask of pen ink of any colour, bool (H, W), on a CPU.

    Args:
        thumbnail: uint8 (H, W, 3).
        px_um: µm per px of the thumbnail. If the thumbnail is too coarse for the artefact network,
            all candidates are ink.
        get_seen_ink: returns `ink_of` the thumbnail's `artefact_maps`, for a caller that computes
            these anyway. None: the network looks near candidates only; the result is the same up to
            rounding.

    Memory: about 60 bytes per pixel of 16 µm, and that of `ink_within`.
    """
    # pixels of the thumbnail along a pixel that is searched
    factor = max(1, round(_INK_UM / px_um))
    small = np.asarray(Image.fromarray(thumbnail).reduce(factor))
    ns = get_namespace("cpu")
    ink = _candidates(ns, small, px_um * factor)
    if not ink.any():
        return np.zeros(thumbnail.shape[:2], dtype=bool)
    if px_um <= COARSEST_MPP:
        # imported here, because most slides have no candidates and do not need the network
        from thinsection.qc.checks.artefact_network import ink_within, without_stain

        reach = round(_AROUND_UM / (px_um * factor))
        near = np.asarray(dilated_by_square(ns, ink, 2 * reach + 1))
        if get_seen_ink:
            seen = get_seen_ink()
        else:
            area = _enlarged(near, factor, thumbnail)
            seen = ink_within(ns, thumbnail, px_um, area)
        seen = _reduced(seen, factor) & near
        seen = drop_small(ns, seen, _MIN_INK_UM2 / (px_um * factor) ** 2)
        regions = mostly(ns, ink | seen, seen, _LEAST_SHARE)
        # a region without a candidate may be tissue near a candidate, so it is dropped
        ink = mostly(ns, regions, ink, 0.0)
        ink = without_stain(ns, ink, small)
    # joins the streaks of a dry pen, and adds a rim
    gap = _INK_GAP_UM / (px_um * factor)
    grown = dilated_by_disk(ns, ink, gap / 4)
    ink = ~opened_by_disk(ns, ~grown, gap)
    return _enlarged(ink, factor, thumbnail)


def _candidates(ns: ArrayNamespace, small: RgbArray, px_um: float) -> MaskArray:
    """Area that the small pixel model takes for ink, without small spots."""
    model = load_model(Path(__file__).parent / "models" / "pen.npz")
    assert model is not None
    ink = probabilities(ns, small, {"pen": model})["pen"] > 0.5
    return np.asarray(drop_small(ns, ink, _MIN_INK_UM2 / px_um**2))


def _enlarged(mask: MaskArray, factor: int, thumbnail: RgbArray) -> MaskArray:
    """Mask at the size of the thumbnail, from one value per block of `factor` pixels."""
    height, width = thumbnail.shape[:2]
    enlarged = mask.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.asarray(enlarged[:height, :width])


def _reduced(mask: MaskArray, factor: int) -> MaskArray:
    """True for blocks of `factor` pixels that are at least half True; the last may be smaller."""
    share = Image.fromarray(mask.astype(np.uint8) * 255).reduce(factor)
    return np.asarray(share) > 127
