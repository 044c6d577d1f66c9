"""How well are tissue and planted folds found on pictures of real slides that others publish?

The pictures of real_grounds.toml, at their own resolution and at 16, 32 and 64 µm/px where that is
at least half as coarse again. Each role has the IoU of the mask of a run without quality control,
before ink is removed, with the truth of each picture; px that do not count are left out. "other
tools" has the same of CLAM, LazySlide, TIAToolbox and TRIDENT (`tissue_tools.py`), and "behind the
best tool" lists the cases on which one of them is better. "folds" are bands of doubled tissue on
fields that are full of tissue: recall and precision of the check by the width of the band, and the
share of the same fields that it marks where none is planted.

THINSECTION_TEST_GROUNDS names the folder that `python -m benchmarks.real_grounds` filled.
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.support.artefacts import plant_fold

from benchmarks.artefact_counts import KINDS, rates, resized, union
from benchmarks.harness import arguments, finish
from benchmarks.real_grounds import Ground, Role, grounds_folder, read_table
from benchmarks.tissue_tools import (
    PEERS,
    read_mask,
    resized_to,
    run_peer,
    write_slide,
)
from thinsection.qc import QcResult, run_qc
from thinsection.qc.tissue import TissueConfig, segment_tissue
from thinsection.testing.synthetic import ArraySlide
from thinsection.types import MaskArray, RgbArray

COARSER_MPP = (16.0, 32.0, 64.0)
# Another tool is better if its IoU is higher by more than this.
NEAR = 0.005
FOLD_WIDTHS_UM = (60, 120, 240)
FIRST_SEED = 20_000
# role -> picture -> µm/px -> IoU
Ious = dict[str, dict[str, dict[str, float]]]


def main() -> None:
    """Judges the tissue of each picture, and folds on each field."""
    args = arguments(__doc__ or "")
    folder = grounds_folder()
    results: dict[str, Any] = {"not run": "THINSECTION_TEST_GROUNDS names no folder"}
    if folder is not None:
        table = read_table()
        if args.smoke:
            table = table[:2]
        results = tissue(table, folder)
        fields = [ground for ground in table if ground.role == "ground"]
        results["folds"] = folds(fields, folder)
    finish("bench_real_grounds", results, args)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A picture at one resolution, and its truth at it."""

    role: Role
    name: str
    mpp: float
    rgb: RgbArray
    tissue: MaskArray
    counted: MaskArray

    @property
    def file_name(self) -> str:
        """Name of the file that other tools read."""
        return f"{self.name}_{self.mpp:g}.tif"


def cases(table: list[Ground], folder: Path) -> Iterator[Case]:
    """Each picture at its own resolution, and at coarser ones."""
    for ground in table:
        if ground.role == "ground":
            continue
        rgb = ground.read(folder)
        truth = ground.truth(folder)
        coarser = (mpp for mpp in COARSER_MPP if mpp >= 1.5 * ground.mpp)
        for mpp in (ground.mpp, *coarser):
            size = tuple(max(8, round(n * ground.mpp / mpp)) for n in rgb.shape[1::-1])
            yield Case(
                role=ground.role,
                name=ground.name,
                mpp=mpp,
                rgb=shrunk(rgb, size),
                tissue=shrunk(truth.tissue, size),
                counted=shrunk(truth.counted, size),
            )


def tissue(table: list[Ground], folder: Path) -> dict[str, Any]:
    """IoU of our mask by role, and of the masks of other tools on the same cases."""
    ours: Ious = {}
    others: dict[str, Ious] = {peer: {} for peer in PEERS}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for case in cases(table, folder):
            mask = segment_tissue(case.rgb, TissueConfig(), px_um=case.mpp)[0]
            note(ours, case, mask)
            write_slide(work / case.file_name, case.rgb, case.mpp)
        reasons = {peer: run_peer(peer, work) for peer in PEERS}
        for case in cases(table, folder):
            for peer, ious in others.items():
                if not reasons[peer]:
                    mask = read_mask(work / case.file_name, peer)
                    note(ious, case, resized_to(mask, case.tissue))
    rows: dict[str, Any] = {role: summary(ious) for role, ious in ours.items()}
    rows["other tools"] = {
        peer: {"not run": reasons[peer]}
        if reasons[peer]
        else {role: summary(of_role) for role, of_role in ious.items()}
        for peer, ious in others.items()
    }
    rows["behind the best tool"] = behind(ours, others)
    return rows


def note(ious: Ious, case: Case, mask: MaskArray) -> None:
    """Adds the IoU of a mask with the truth of its case."""
    hits = np.count_nonzero(mask & case.tissue & case.counted)
    either = np.count_nonzero((mask | case.tissue) & case.counted)
    by_mpp = ious.setdefault(case.role, {}).setdefault(case.name, {})
    by_mpp[f"{case.mpp:g}"] = round(hits / max(1, either), 4)


def summary(ious: dict[str, dict[str, float]]) -> dict[str, Any]:
    """IoU of each picture by resolution, and their mean and least."""
    values = [iou for by_mpp in ious.values() for iou in by_mpp.values()]
    return {
        "pictures": ious,
        "cases": len(values),
        "mean": round(statistics.mean(values), 4),
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
    }


def behind(ours: Ious, others: dict[str, Ious]) -> list[dict[str, Any]]:
    """The cases on which another tool has an IoU that is higher by more than `NEAR`."""
    rows = []
    for role, pictures in ours.items():
        for name, by_mpp in pictures.items():
            for mpp, iou in by_mpp.items():
                peers = {
                    peer: ious[role][name][mpp] for peer, ious in others.items() if ious
                }
                best = max(peers, key=peers.__getitem__, default="")
                if best and peers[best] > iou + NEAR:
                    row = {"role": role, "picture": name, "mpp": mpp, "iou": iou}
                    rows.append({**row, "best tool": best, "its iou": peers[best]})
    return rows


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
