"""The ink that the default tissue mask removes.

The small network for pen looks at all of the slide, at 16 µm/px. It is fast, but it takes blue
mucin, brown stain and dense tissue for ink too. So its finds are candidates, and the artefact
network, which knows such tissue, looks at their surroundings alone.
"""

from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage

from thinsection.arrays import ArrayNamespace, get_namespace
from thinsection.arrays.morphology import (
    dilated_by_disk,
    dilated_by_square,
    drop_small,
    mostly,
    opened_by_disk,
)
from thinsection.qc.checks.artefact_network import (
    COARSEST_MPP,
    INKS,
    artefact_maps,
    density_tables,
)
from thinsection.qc.checks.by_example import ExampleCheck, trained_model
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

_Part = tuple[slice, slice]


def find_default_ink(thumbnail: RgbArray, px_um: float) -> MaskArray:
    """Mask of pen ink of any colour, bool (H, W), on a CPU.

    Args:
        thumbnail: uint8 (H, W, 3).
        px_um: µm per px of it. On one that is too coarse for the artefact network, all candidates
            are ink.

    Memory: about 60 bytes per px of 16 µm; with candidates also that of `artefact_maps` of the
        largest part that has some.
    """
    ns = get_namespace("cpu")
    factor = max(1, round(_INK_UM / px_um))
    small = np.asarray(Image.fromarray(thumbnail).reduce(factor))
    ink = _candidates(ns, small, px_um * factor)
    if px_um <= COARSEST_MPP:
        confirmed = _confirmed(ns, thumbnail, px_um, ink, factor)
        ink = mostly(ns, ink, confirmed, _LEAST_SHARE)
    # the streaks of a dry pen are joined, and its rim is added
    gap = _INK_GAP_UM / (px_um * factor)
    grown = dilated_by_disk(ns, ink, gap / 4)
    ink = ~opened_by_disk(ns, ~grown, gap)
    enlarged = ink.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.asarray(enlarged[: thumbnail.shape[0], : thumbnail.shape[1]])


def _candidates(ns: ArrayNamespace, small: RgbArray, px_um: float) -> MaskArray:
    """What the small network takes for ink, without small spots."""
    check = ExampleCheck()
    # the package's own model needs no cache
    model = trained_model(check, Path())
    ink = probabilities(ns, small, {check: model})[check] > check.threshold
    return np.asarray(drop_small(ns, ink, _MIN_INK_UM2 / px_um**2))


def _confirmed(
    ns: ArrayNamespace,
    thumbnail: RgbArray,
    px_um: float,
    candidates: MaskArray,
    factor: int,
) -> MaskArray:
    """The candidates that the artefact network takes for ink: their px of `factor` squared."""
    confirmed = np.zeros_like(candidates)
    tables = density_tables(ns, thumbnail)
    for part in _parts(ns, candidates, round(_AROUND_UM / (px_um * factor))):
        rows, columns = (slice(s.start * factor, s.stop * factor) for s in part)
        maps = artefact_maps(ns, thumbnail[rows, columns], px_um, tables=tables)
        ink = sum(maps[f"pen_{name}"].astype(np.uint16) for name in INKS)
        share = Image.fromarray((ink > 127).astype(np.uint8) * 255).reduce(factor)
        confirmed[part] |= np.asarray(share) > 127
    return confirmed & candidates


def _parts(ns: ArrayNamespace, mask: MaskArray, around: int) -> list[_Part]:
    """Boxes around the regions of a mask, or the whole where they would be larger together."""
    grown = dilated_by_square(ns, mask, 2 * around + 1)
    boxes = ndimage.find_objects(ndimage.label(grown)[0])
    area = sum((r.stop - r.start) * (c.stop - c.start) for r, c in boxes)
    if area > mask.size:
        return [(slice(0, mask.shape[0]), slice(0, mask.shape[1]))]
    return list(boxes)
