"""Tissue at the border of a picture, which has no context there.

The artefact network decides a pixel by what lies around it. Where tissue reaches the edge of the
picture, part of this context is missing. Then a hair follicle looks like ink, and a fold that goes
on beyond the edge is not seen. Checks that need context therefore do not judge this tissue.

Glass at the edge of the picture is no such case: outside of it is more glass.
"""

from thinsection.arrays import Array, ArrayNamespace
from thinsection.arrays.morphology import dilated_by_disk

# Reach of the context in µm. Pictures of tissue were cut in two, and the network's probabilities
# compared with those of the whole picture: at the cut 17 to 19 % of the pixels change by more than
# 0.25, at this distance 1 to 3 % of drawn slides and 11 % of slides with large strokes of a pen
# (docs/validation/qc.md.j2).
CONTEXT_UM = 128.0
# The edge of a tissue mask may lie this number of pixels inside the picture.
_RIM_PX = 2


def tissue_at_border(ns: ArrayNamespace, tissue: Array, mpp_th: float) -> Array:
    """Tissue within `CONTEXT_UM` of tissue that the picture's edge cuts, bool (H, W).

    Args:
        ns: device.
        tissue: bool (H, W).
        mpp_th: µm per pixel of `tissue`.

    Memory: a copy of the mask, and 10 bytes per pixel of the strips along the four edges.
    """
    near = ns.xp.zeros_like(tissue)
    reach_px = CONTEXT_UM / mpp_th
    depth = int(reach_px) + 1
    for turns in range(4):
        # each edge in turn is the first row
        side = ns.xp.rot90(tissue, turns)
        strip = side[:depth] & False
        strip[:1] = side[:_RIM_PX].any(axis=0)
        if bool(strip.any()):
            ns.xp.rot90(near, turns)[:depth] |= dilated_by_disk(ns, strip, reach_px)
    return near & tissue
