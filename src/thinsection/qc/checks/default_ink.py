"""The ink that the default tissue mask removes: by the small network for pen, at 16 µm/px."""

from pathlib import Path

import numpy as np
from PIL import Image

from thinsection.arrays import get_namespace
from thinsection.arrays.morphology import dilated_by_disk, drop_small, opened_by_disk
from thinsection.qc.checks.by_example import ExampleCheck, trained_model
from thinsection.qc.checks.pixel_model import probabilities
from thinsection.types import MaskArray, RgbArray

# Of the px that are searched for ink.
_INK_UM = 16.0
# Gaps in ink that are closed.
_INK_GAP_UM = 64.0
# Smaller spots are not ink.
_MIN_INK_UM2 = 6400.0


def find_default_ink(thumbnail: RgbArray, px_um: float) -> MaskArray:
    """Mask of pen ink of any colour, bool (H, W), on a CPU.

    Args:
        thumbnail: uint8 (H, W, 3).
        px_um: µm per px of it.

    Memory: about 60 bytes per px of 16 µm.
    """
    ns = get_namespace("cpu")
    check = ExampleCheck()
    # the package's own model needs no cache
    model = trained_model(check, Path())
    factor = max(1, round(_INK_UM / px_um))
    small = np.asarray(Image.fromarray(thumbnail).reduce(factor))
    ink = probabilities(ns, small, {check: model})[check] > check.threshold
    ink = drop_small(ns, ink, _MIN_INK_UM2 / (px_um * factor) ** 2)
    # the streaks of a dry pen are joined, and its rim is added
    gap = _INK_GAP_UM / (px_um * factor)
    grown = dilated_by_disk(ns, ink, gap / 4)
    ink = ~opened_by_disk(ns, ~grown, gap)
    enlarged = ink.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.asarray(enlarged[: thumbnail.shape[0], : thumbnail.shape[1]])
