"""How well are tissue and planted folds found on pictures of real slides that others publish?

The pictures of real_grounds.toml, at their own resolution and at 16, 32 and 64 µm/px where that is
at least half as coarse again. "tissue" is the IoU of the mask of a run without quality control,
before ink is removed, with the truth of each picture; px that do not count are left out. "folds"
are bands of doubled tissue on fields that are full of tissue: recall and precision of the check by
the width of the band, and the share of the same fields that it marks where none is planted.

THINSECTION_TEST_GROUNDS names the folder that `python -m benchmarks.real_grounds` filled.
"""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.support.artefacts import plant_fold

from benchmarks.artefact_counts import KINDS, rates, resized, union
from benchmarks.harness import arguments, finish
from benchmarks.real_grounds import Ground, grounds_folder, read_table
from thinsection.qc import QcResult, run_qc
from thinsection.qc.tissue import TissueConfig, segment_tissue
from thinsection.testing.synthetic import ArraySlide
from thinsection.types import MaskArray, RgbArray

COARSER_MPP = (16.0, 32.0, 64.0)
FOLD_WIDTHS_UM = (60, 120, 240)
FIRST_SEED = 20_000


def main() -> None:
    """Judges the tissue of each picture, and folds on each field."""
    args = arguments(__doc__ or "")
    folder = grounds_folder()
    results: dict[str, Any] = {"not run": "THINSECTION_TEST_GROUNDS names no folder"}
    if folder is not None:
        table = read_table()
        if args.smoke:
            table = table[:2]
        results = {
            role: tissue([g for g in table if g.role == role], folder)
            for role in ("chosen", "judge")
        }
        fields = [ground for ground in table if ground.role == "ground"]
        results["folds"] = folds(fields, folder)
    finish("bench_real_grounds", results, args)


def tissue(grounds: list[Ground], folder: Path) -> dict[str, Any]:
    """IoU of each picture by resolution, and their mean and least."""
    ious = {ground.name: tissue_of(ground, folder) for ground in grounds}
    values = [iou for by_mpp in ious.values() for iou in by_mpp.values()]
    if not values:
        return {}
    return {
        "pictures": ious,
        "cases": len(values),
        "mean": round(statistics.mean(values), 4),
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
    }


def tissue_of(ground: Ground, folder: Path) -> dict[str, float]:
    """IoU of one picture by its µm/px."""
    rgb = ground.read(folder)
    truth = ground.truth(folder)
    ious = {}
    for mpp in (ground.mpp, *(m for m in COARSER_MPP if m >= 1.5 * ground.mpp)):
        size = tuple(max(8, round(n * ground.mpp / mpp)) for n in rgb.shape[1::-1])
        mask = segment_tissue(shrunk(rgb, size), TissueConfig(), px_um=mpp)[0]
        wanted = shrunk(truth.tissue, size)
        counted = shrunk(truth.counted, size)
        hits = np.count_nonzero(mask & wanted & counted)
        either = np.count_nonzero((mask | wanted) & counted)
        ious[f"{mpp:g}"] = round(hits / max(1, either), 4)
    return ious


def shrunk(values: RgbArray | MaskArray, size: tuple[int, ...]) -> Any:
    """A picture or a mask at a smaller size, by the mean of its px."""
    if values.dtype != bool:
        return np.asarray(Image.fromarray(values).resize(size, Image.Resampling.BOX))
    grey = Image.fromarray(values.astype(np.uint8) * 255)
    return np.asarray(grey.resize(size, Image.Resampling.BOX)) > 127


def folds(fields: list[Ground], folder: Path) -> dict[str, Any]:
    """Recall and precision by the width of a planted fold.

    Px that the check marks on the bare field do not count.
    """
    counts = {width: np.zeros(3) for width in FOLD_WIDTHS_UM}
    marked = []
    for number, ground in enumerate(fields):
        rgb = ground.read(folder)
        bare = fold_mask(rgb, ground.mpp)[0]
        marked.append(float(bare.mean()))
        stained = rgb.mean(axis=2) < 215
        for width_um in FOLD_WIDTHS_UM:
            width_px = width_um / ground.mpp
            planted, place = plant_fold(
                rgb,
                width_px=width_px,
                length_px=6 * width_px,
                where=stained,
                seed=FIRST_SEED + number,
            )
            mask, result = fold_mask(planted, ground.mpp)
            truth = resized(place, result)
            counts[width_um] += (
                np.count_nonzero(mask & truth),
                np.count_nonzero(truth),
                np.count_nonzero(mask & ~(bare & ~truth)),
            )
    rows: dict[str, Any] = {
        f"{width} um": rates(count, "fold") for width, count in counts.items()
    }
    rows["marked without a fold"] = round(statistics.mean(marked), 4) if marked else 0
    return rows


def fold_mask(rgb: RgbArray, mpp: float) -> tuple[MaskArray, QcResult]:
    """What `auto` marks as a fold, and its result."""
    result = run_qc(ArraySlide([rgb], slide_mpp=(mpp, mpp)), "auto")
    names = [c.name for c in result.pipeline.checks if c.kind in KINDS["fold"]]
    none = np.zeros_like(result.mask_use)
    return union(((n, result.masks.get(n, none)) for n in names), none), result


if __name__ == "__main__":
    main()
