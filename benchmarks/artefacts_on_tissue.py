"""Artefacts planted on real tissue, and biology that looks like them, for `bench_artefacts`."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from PIL import Image
from tests.support.artefacts import PENS, plant_fold, plant_pen
from tests.support.held_out_biology import (
    BIOLOGY,
    MPP,
    base_picture,
    picture_with,
    solid_tissue,
)

from benchmarks.artefact_counts import KINDS, Counts, rates, resized, union
from thinsection.qc import run_qc
from thinsection.testing.synthetic import ArraySlide
from thinsection.types import MaskArray, RgbArray

FIRST_SEED = 20_000  # docs/validation/qc.md.j2: which seeds are for what
# Pen is drawn at the resolution of the checks.
PEN_MPP = 8.0


def planted(preset: str, times: int) -> dict[str, dict[str, float]]:
    """Pen of each colour and folds of three widths, drawn on the tissue of CMU-1."""
    base = base_picture()
    coarse = np.asarray(Image.fromarray(base).reduce(round(PEN_MPP / MPP)))
    solid = np.asarray(Image.fromarray(base).convert("L")) < 215
    counts: defaultdict[str, Counts] = defaultdict(lambda: np.zeros(3))
    for turn in range(times):
        seed = FIRST_SEED + turn
        for color in PENS:
            rgb, truth = plant_pen(coarse, color, seed=seed)
            slide = ArraySlide([rgb], slide_mpp=(PEN_MPP, PEN_MPP))
            count_finds(counts[f"pen {color}"], "pen", preset, slide, truth)
        for width_um in (60, 120, 240):
            width_px = width_um / MPP
            rgb, truth = plant_fold(
                base,
                width_px=width_px,
                length_px=6 * width_px,
                where=solid,
                seed=seed,
            )
            slide = ArraySlide([rgb], slide_mpp=(MPP, MPP))
            count = counts[f"fold {width_um} um"]
            count_finds(count, "fold", preset, slide, truth)
    return {name: rates(value, name) for name, value in counts.items()}


def count_finds(
    count: Counts, word: str, preset: str, slide: ArraySlide, truth_l0: MaskArray
) -> None:
    """Adds the px of one planted artefact; finds on glass count too."""
    result = run_qc(slide, preset)
    truth = resized(truth_l0, result)
    checks = [c.name for c in result.pipeline.checks if c.kind in KINDS[word]]
    checks += [c.name for c in result.pipeline.checks if word in c.name]
    none = np.zeros_like(truth)
    # a check that was left out, or looked at nothing, has no mask
    named = [name for name in dict.fromkeys(checks) if name in result.masks]
    found = union(((name, result.masks[name]) for name in named), none)
    count += (
        np.count_nonzero(found & truth),
        np.count_nonzero(truth),
        np.count_nonzero(found),
    )


def biology_lost(preset: str, times: int) -> dict[str, float]:
    """Share of biology that looks like an artefact which quality control removes.

    "nothing drawn" is the share of the tissue itself, in one picture.
    """
    base = base_picture()
    tissue = solid_tissue(base / 255.0) > 0
    lost = {"nothing drawn": _removed_share(preset, [(base, tissue)])}
    for name in BIOLOGY:
        seeds = range(FIRST_SEED, FIRST_SEED + times)
        lost[name] = _removed_share(preset, (picture_with(name, n) for n in seeds))
    return lost


def _removed_share(
    preset: str, pictures: Iterable[tuple[RgbArray, MaskArray]]
) -> float:
    """Share of the marked px of all pictures that quality control removes."""
    removed = 0
    total = 0
    for rgb, where_l0 in pictures:
        result = run_qc(ArraySlide([rgb], slide_mpp=(MPP, MPP)), preset)
        where = resized(where_l0, result)
        removed += np.count_nonzero(where & ~result.mask_use)
        total += np.count_nonzero(where)
    return round(removed / total, 3)
