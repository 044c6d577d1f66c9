"""The ink that the default tissue mask removes.

The small network for pen looks at all of the slide, at 16 µm/px. It is fast, but it takes blue
mucin, brown stain and dense tissue for ink too. So its finds are candidates, and the artefact
network, which knows such tissue, looks only at them and 0.5 mm around.
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
from thinsection.qc.checks.by_example import ExampleCheck, trained_model
from thinsection.qc.checks.check import COARSEST_MPP
from thinsection.qc.checks.pixel_model import probabilities
from thinsection.types import MaskArray, RgbArray

# Of the px that are searched for ink.
_INK_UM = 16.0
# Gaps in ink that are closed.
_INK_GAP_UM = 64.0
# Smaller spots are not ink.
_MIN_INK_UM2 = 6400.0
# Around candidates, what the artefact network looks at too.
_AROUND_UM = 512.0
# Of a region of candidates that the artefact network takes for ink, from which on it is ink.
_LEAST_SHARE = 0.3


def find_default_ink(
    thumbnail: RgbArray,
    px_um: float,
    get_seen_ink: Callable[[], MaskArray] | None = None,
) -> MaskArray:
    """Mask of pen ink of any colour, bool (H, W), on a CPU.

    Args:
        thumbnail: uint8 (H, W, 3).
        px_um: µm per px of it. On one that is too coarse for the artefact network, all candidates
            are ink.
        get_seen_ink: gives `ink_of` the thumbnail's `artefact_maps`, if these are computed anyway;
            None: it is computed near candidates, with the same result up to rounding.

    Memory: about 60 bytes per px of 16 µm, and that of `ink_within`.
    """
    # px of the thumbnail along a px that is searched
    factor = max(1, round(_INK_UM / px_um))
    small = np.asarray(Image.fromarray(thumbnail).reduce(factor))
    ns = get_namespace("cpu")
    ink = _candidates(ns, small, px_um * factor)
    if not ink.any():
        return np.zeros(thumbnail.shape[:2], dtype=bool)
    if px_um <= COARSEST_MPP:
        # most slides have no candidates, and do without the network
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
        # without a candidate it may be tissue near one
        ink = mostly(ns, regions, ink, 0.0)
        ink = without_stain(ns, ink, small)
    # the streaks of a dry pen are joined, and its rim is added
    gap = _INK_GAP_UM / (px_um * factor)
    grown = dilated_by_disk(ns, ink, gap / 4)
    ink = ~opened_by_disk(ns, ~grown, gap)
    return _enlarged(ink, factor, thumbnail)


def _candidates(ns: ArrayNamespace, small: RgbArray, px_um: float) -> MaskArray:
    """What the small network takes for ink, without small spots."""
    check = ExampleCheck()
    # the package's own model needs no cache
    model = trained_model(check, Path())
    ink = probabilities(ns, small, {check: model})[check] > check.threshold
    return np.asarray(drop_small(ns, ink, _MIN_INK_UM2 / px_um**2))


def _enlarged(mask: MaskArray, factor: int, thumbnail: RgbArray) -> MaskArray:
    """A mask of blocks of `factor` px, at the px of the thumbnail."""
    height, width = thumbnail.shape[:2]
    enlarged = mask.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.asarray(enlarged[:height, :width])


def _reduced(mask: MaskArray, factor: int) -> MaskArray:
    """Where at least half of a block of `factor` px is True; blocks at the end may be smaller."""
    share = Image.fromarray(mask.astype(np.uint8) * 255).reduce(factor)
    return np.asarray(share) > 127
