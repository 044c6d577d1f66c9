"""Counts of pixels by which finds of artefacts are judged against a known truth."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from PIL import Image
from scipy import ndimage

from thinsection.qc import QcResult
from thinsection.types import MaskArray

KINDS = {  # class of truth -> kinds of the checks that find it
    "pen": ("ink",),
    "fold": ("folds",),
    "bubble": ("bubbles",),
    "dust": ("dirt",),
    "blur": ("focus", "blurry"),
}
Counts = np.ndarray  # hits, px of the truth, px found
# Around an artefact or a piece of tissue, how far its outline is a matter of taste.
EDGE_UM = 32.0


def add(
    counts: defaultdict[str, Counts],
    name: str,
    found: MaskArray,
    truth: MaskArray,
    valid: MaskArray,
) -> None:
    hits = np.count_nonzero(found & truth & valid)
    counts[name] += (
        hits,
        np.count_nonzero(truth & valid),
        np.count_nonzero(found & valid),
    )


def union(
    masks: Iterable[tuple[str, MaskArray]],
    none: MaskArray,
    *,
    leave: tuple[str, ...] = (),
) -> MaskArray:
    found = none.copy()
    for name, mask in masks:
        if name not in leave:
            found |= mask
    return found


def rim(mask: MaskArray, px_um: float) -> MaskArray:
    """Px outside of a mask, up to `EDGE_UM` from it."""
    reach = int(EDGE_UM / px_um)
    y, x = np.ogrid[-reach : reach + 1, -reach : reach + 1]
    disk = np.hypot(x, y) * px_um <= EDGE_UM
    return np.asarray(ndimage.binary_dilation(mask, disk) & ~mask)


def rates(value: Counts, name: str) -> dict[str, float]:
    hits, true, found = value
    if name.startswith("tissue"):
        return {"iou": round(hits / max(1, true + found - hits), 4)}
    return {
        "recall": round(hits / max(1, true), 3),
        "precision": round(hits / max(1, found), 3),
    }


def resized(mask: MaskArray, result: QcResult) -> MaskArray:
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(image.resize(result.frame.size_th, Image.Resampling.BOX)) > 127
