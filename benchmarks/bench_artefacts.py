"""How much tissue, pen, blur, folds and bubbles does quality control get right on unseen slides?

Slides of generator A with seeds that nothing was tuned on, of generator B, which has other drawing
rules, and of generator C, which has real tissue, biology that looks like artefacts, and rules of
its own (docs/validation/qc.md.j2 says which seeds are for what); then real pen, folds and blur with
masks by hand, and pen, folds and biology on CMU-1. HistoQC's default preset looks at the same
slides. Truth and finds are pooled over slides; px count at the work resolution.

"tissue" compares the tissue mask of a run without quality control, ours with it, and those of
CLAM, LazySlide, TIAToolbox and TRIDENT: THINSECTION_TEST_PEER_PYTHON names the interpreter of an
environment that has them (CONTRIBUTING.md), THINSECTION_TEST_CLAM a checkout of mahmoodlab/CLAM.
Tools that are missing are listed. Real slides and pictures: THINSECTION_TEST_SLIDES.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.qc.slides import REAL
from tests.support.held_out_slide import held_out_slide
from tests.support.held_out_tissue import PICTURES, tissue_slide
from training.artefact_slide import INKS, STAINS, ArtefactSlide
from training.tuning_slide import tuning_slide

from benchmarks.artefact_counts import (
    KINDS,
    Counts,
    add,
    rates,
    resized,
    rim,
    union,
)
from benchmarks.artefacts_on_tissue import FIRST_SEED, biology_lost, planted
from benchmarks.harness import arguments, finish
from benchmarks.real_tiles import real_tiles
from benchmarks.tissue_tools import compare_tissue
from thinsection.qc import QcResult, run_qc
from thinsection.testing.synthetic import ArraySlide
from thinsection.types import MaskArray

GENERATORS = {
    "A, report seeds": cache(tuning_slide),
    "B, held out": cache(held_out_slide),
    "C, real tissue": cache(tissue_slide),
}
SIZE_PX, MPP, SLIDES_PER_STAIN = (1600, 1200), 3.0, 4
BLUR_SIZE_PX, BLUR_MPP, BLUR_PER_STAIN = (1200, 900), 0.5, 2


def main() -> None:
    """Judges each preset on all slides, then the tissue masks of all tools."""
    args = arguments(__doc__ or "")
    presets = ("auto", "histoqc-default")
    generators = list(GENERATORS)
    results: dict[str, Any] = {}
    if not (REAL.is_file() and PICTURES.is_dir()):
        generators.remove("C, real tissue")
        results["not run"] = "C, real pen and tiles: THINSECTION_TEST_SLIDES has none"
    for preset in presets:
        results[preset] = {
            name: judged(preset, name, smoke=args.smoke) for name in generators
        }
        if PICTURES.is_dir():
            results[preset]["real pen"] = real_pen(preset, PICTURES)
            results[preset]["real tiles"] = real_tiles(preset, PICTURES / "qa")
        if REAL.is_file():
            times, pictures = (1, 1) if args.smoke else (2, 12)
            results[preset]["planted on CMU-1"] = planted(preset, times)
            results[preset]["biology lost"] = biology_lost(preset, pictures)
    whole = {
        name: [s for s in slides(name, smoke=args.smoke) if s.mpp == MPP]
        for name in generators
    }
    results["tissue"] = compare_tissue(whole, presets)
    finish("bench_artefacts", results, args)


def judged(preset: str, generator: str, *, smoke: bool) -> dict[str, Any]:
    """Scores of a preset on slides of a generator, by stain and by artefact."""
    counts: defaultdict[str, Counts] = defaultdict(lambda: np.zeros(3))
    lost: defaultdict[str, list[float]] = defaultdict(list)
    seconds = 0.0
    for slide in slides(generator, smoke=smoke):
        start = time.process_time()
        with slide.open() as opened:
            result = run_qc(opened, preset)
        seconds += time.process_time() - start
        truth = {name: resized(mask, result) for name, mask in slide.masks.items()}
        score(counts, result, truth, slide)
        clean = resized(slide.clean, result)
        lost[slide.stain].append(
            float((clean & ~result.mask_use).sum() / max(1, clean.sum()))
        )
    tables = {name: rates(value, name) for name, value in sorted(counts.items())}
    medians = {
        stain: round(float(np.mean(values)), 4) for stain, values in lost.items()
    }
    return {**tables, "clean tissue lost": medians, "cpu_s": round(seconds, 2)}


def slides(generator: str, *, smoke: bool) -> Iterator[ArtefactSlide]:
    """Whole slides of every stain; then, for blur, small ones at 0.5 µm/px; each is drawn once."""
    generate, times = GENERATORS[generator], 1 if smoke else SLIDES_PER_STAIN
    for (n, stain), turn in product(enumerate(STAINS), range(times)):
        if smoke and stain not in ("he", "ihc"):
            continue
        seed = FIRST_SEED + turn * len(STAINS) + n
        yield generate(
            seed, size=(800, 600) if smoke else SIZE_PX, mpp=MPP, stain=stain
        )
    times = 1 if smoke else BLUR_PER_STAIN
    for (n, stain), turn in product(
        enumerate(STAINS[: 1 if smoke else None]), range(times)
    ):
        size = (1200, 900) if smoke else BLUR_SIZE_PX
        seed = FIRST_SEED + 1000 + turn * len(STAINS) + n
        yield generate(seed, size=size, mpp=BLUR_MPP, stain=stain, artefacts=("blur",))


def score(
    counts: defaultdict[str, Counts],
    result: QcResult,
    truth: dict[str, MaskArray],
    slide: ArtefactSlide,
) -> None:
    """Adds one slide's px to the counts; px of other artefacts say nothing about a class."""
    none = np.zeros_like(result.mask_use)
    artefacts = union(truth.items(), none, leave=("tissue",))
    if slide.mpp == MPP:  # the small ones are nothing but tissue
        add(
            counts,
            f"tissue {slide.stain}",
            result.mask_use,
            truth["tissue"],
            ~artefacts,
        )
    without_rims = ~rim(artefacts, result.mpp_th)
    for name, kinds in KINDS.items():
        if (name == "blur") != (slide.mpp == BLUR_MPP):
            continue  # blur is judged where it can be seen
        checks = [c.name for c in result.pipeline.checks if c.kind in kinds]
        pens = [
            c.name for c in result.pipeline.checks if name == "pen" and "pen" in c.name
        ]
        # a check that cannot judge a slide has no mask
        found = union(((n, result.masks.get(n, none)) for n in {*checks, *pens}), none)
        other = union(
            truth.items(), none, leave=("tissue", name, *(f"pen_{i}" for i in INKS))
        )
        of_kind = truth.get(name, none)
        add(counts, name, found, of_kind, ~other)
        add(counts, f"{name}, rim left out", found, of_kind, ~other & without_rims)


def real_pen(preset: str, folder: Path) -> dict[str, dict[str, float]]:
    """HistoQC's own examples of pen, at 8 µm/px, against its hand-drawn masks.

    'kept' is the share of the ink that is left in the mask at the end.
    """
    scores = {}
    for color in ("black", "green", "red"):
        picture = np.asarray(
            Image.open(folder / f"histoqc-pen_{color}.png").convert("RGB")
        )
        truth = (
            np.asarray(
                Image.open(folder / f"histoqc-pen_{color}_mask.png").convert("L")
            )
            > 127
        )
        result = run_qc(ArraySlide([picture], slide_mpp=(8.0, 8.0)), preset)
        checks = result.pipeline.checks
        names = [c.name for c in checks if c.kind == "ink" or "pen" in c.name]
        # HistoQC's preset has no check of pen where HistoQC's examples are missing
        none = np.zeros_like(truth)
        found = union(((n, result.masks.get(n, none)) for n in names), none)
        counts: defaultdict[str, Counts] = defaultdict(lambda: np.zeros(3))
        add(counts, color, found, truth, np.ones_like(truth))
        kept = np.count_nonzero(truth & result.mask_use) / np.count_nonzero(truth)
        scores[color] = {**rates(counts[color], color), "kept": round(kept, 3)}
    return scores


if __name__ == "__main__":
    main()
