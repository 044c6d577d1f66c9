"""Real folds and blur with masks by hand, for `bench_artefacts`: eight tiles of 270 px of H&E.

Their resolution is not stated; they are taken as 0.5 µm/px, the coarser end of what they look
like. A tile is too small for checks of whole slides, so each is laid beside its mirror images.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.artefact_counts import KINDS, Counts, add, rates, resized, union
from thinsection.qc import run_qc
from thinsection.testing.synthetic import ArraySlide

MPP = 0.5
# Copies side by side; every second one is mirrored.
COPIES = 4
# label of the masks -> class; 0 is glass, 1 is tissue
LABELS = {2: "fold", 3: "blur"}


def real_tiles(preset: str, folder: Path) -> dict[str, dict[str, float]]:
    """Recall and precision of folds and blur over all tiles, and the tissue that is lost."""
    counts: defaultdict[str, Counts] = defaultdict(lambda: np.zeros(3))
    lost = np.zeros(2)
    for path in sorted(folder.glob("*_mask.png")):
        labels = mirrored(np.asarray(Image.open(path).convert("L")))
        picture = Image.open(folder / path.name.replace("_mask", "")).convert("RGB")
        rgb = mirrored(np.asarray(picture))
        slide = ArraySlide([rgb], slide_mpp=(MPP, MPP))
        result = run_qc(slide, preset)
        tissue = resized(labels == 1, result)
        lost += (np.count_nonzero(tissue & ~result.mask_use), np.count_nonzero(tissue))
        none = np.zeros_like(tissue)
        for label, name in LABELS.items():
            checks = [c.name for c in result.pipeline.checks if c.kind in KINDS[name]]
            # a check that cannot judge a picture has no mask
            found = union(((n, result.masks.get(n, none)) for n in checks), none)
            truth = resized(labels == label, result)
            # tissue and this artefact count: of the others nobody says what they hide
            add(counts, name, found, truth, truth | tissue)
    scores = {name: rates(value, name) for name, value in counts.items()}
    return {**scores, "tissue": {"lost": round(float(lost[0] / max(1, lost[1])), 3)}}


def mirrored(tile: np.ndarray) -> np.ndarray:
    """A tile `COPIES` times side by side and one below the other, mirrored where they meet."""
    height, width = tile.shape[:2]
    added = ((0, (COPIES - 1) * height), (0, (COPIES - 1) * width))
    return np.pad(tile, added + ((0, 0),) * (tile.ndim - 2), "symmetric")
