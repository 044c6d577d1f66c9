"""How much of planted pen, coverslip, blur and folds do the checks find, and how much is right?

Planted on the real slide's tissue (folder THINSECTION_TEST_SLIDES); `--smoke` takes generated
tissue and one case of each. HistoQC's blur check runs on the same pictures as `focus`.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tests.support import artefacts

from benchmarks.harness import arguments, finish
from thinsection.qc import Pipeline, QcResult, load_pipeline, run_qc
from thinsection.qc.checks.check import QcCheck
from thinsection.qc.pipeline import check_from_mapping
from thinsection.slide import Slide, open_slide
from thinsection.testing.synthetic import ArraySlide

Picture = npt.NDArray[np.uint8]
SLIDE = "CMU-1-Small-Region.svs"
TISSUE = (
    {"kind": "intensity", "upper_gray": 0.9, "lower_std": 10.0},
    {"kind": "fill_holes"},
    {"kind": "drop_specks", "min_area": "500 px"},
)


def main() -> None:
    """Mean recall and precision over seeds for each artefact."""
    args = arguments(__doc__ or "")
    base, seeds = (smoke_picture(), range(1)) if args.smoke else (real_picture(), range(6))
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(base, Path(folder))
        results: dict[str, Any] = {"seeds": len(seeds)}
        for color in artefacts.PENS:
            results[f"pen {color}"] = lab.at_work(artefacts.plant_pen, seeds, "pen", color)
        results["coverslip"] = lab.at_work(artefacts.plant_coverslip, seeds, "coverslip")
        for sigma in (4.0,) if args.smoke else (1.0, 1.5, 2.0, 3.0, 4.0, 8.0):
            results[f"focus, sigma {sigma:g} px"] = lab.on_slide("focus", sigma, seeds)
        if not args.smoke:
            results["histoqc's blurry, sigma 4 px"] = lab.on_slide("blurry", 4.0, seeds)
        for width in (200.0,) if args.smoke else (130.0, 200.0, 320.0):
            results[f"folds, {width / 2:g} um wide"] = lab.on_slide("folds", width, seeds)
        results["removed where nothing was planted"] = lab.clean()
    finish("bench_qc_artefacts", results, args)


class Lab:
    """Plants artefacts on one picture at 0.5 µm/px and counts what checks find."""

    def __init__(self, base: Picture, cache_dir: Path) -> None:
        self.base, self.cache_dir = base, cache_dir
        small = np.asarray(Image.fromarray(base).reduce(16))
        row = np.concatenate([small, small[:, ::-1]], axis=1)
        self.work = np.concatenate([row, row[::-1]])
        self.checks = {
            "pen": preset_check("histoqc-default", "pen_markings"),
            "coverslip": preset_check("histoqc-default", "coverslip_edge"),
            "blurry": preset_check("histoqc-default", "blurry"),
            "focus": preset_check("auto", "focus"),
            "folds": preset_check("auto", "folds"),
        }
        self.tissue = self.run(slide_of(base), *tissue_checks()).mask_use

    def run(self, slide: Slide, *checks: QcCheck) -> QcResult:
        return run_qc(slide, Pipeline(name="lab", checks=checks), cache_dir=self.cache_dir)

    def at_work(self, plant: Any, seeds: range, name: str, *args: str) -> dict[str, float]:
        """Artefacts planted at the work resolution, 8 µm/px."""
        check = self.checks[name]
        scores = []
        for seed in seeds:
            picture, truth = plant(self.work, *args, seed=seed)
            found = self.run(slide_of(picture, 8.0), check).masks[check.name]
            scores.append(artefacts.recall_precision(found, truth))
        return mean(scores)

    def on_slide(self, name: str, size: float, seeds: range) -> dict[str, float]:
        """Artefacts planted at level 0; truth and finds count inside the tissue."""
        scores = []
        for picture, truth in self.planted(name, size, seeds):
            result = self.run(slide_of(picture), *tissue_checks(), self.checks[name])
            found = result.masks[name] & self.tissue
            scores.append(artefacts.recall_precision(found, truth & self.tissue))
        return mean(scores)

    def planted(
        self, name: str, size: float, seeds: range
    ) -> Iterator[tuple[Picture, npt.NDArray[np.bool_]]]:
        height, width = self.base.shape[:2]
        where = np.asarray(Image.fromarray(self.tissue).resize((width, height), 0))
        for seed in seeds:
            if name == "folds":
                picture, truth = artefacts.plant_fold(
                    self.base, width_px=size, length_px=6 * size, where=where, seed=seed
                )
            else:
                picture, truth = artefacts.plant_blur(
                    self.base, size, area_px=120_000, seed=seed, where=where
                )
            small = Image.fromarray(truth.astype(np.uint8) * 255).resize(
                self.tissue.shape[::-1], Image.Resampling.BOX
            )
            yield picture, np.asarray(small) > 127

    def clean(self) -> dict[str, float]:
        """Share of the image (pen, coverslip) or of the tissue (focus, folds) that is removed."""
        pens = self.run(slide_of(self.work, 8.0), self.checks["pen"], self.checks["coverslip"])
        shares = {name: float(mask.mean()) for name, mask in pens.masks.items()}
        for name in ("focus", "folds"):
            result = self.run(slide_of(self.base), *tissue_checks(), self.checks[name])
            shares[name] = float(result.masks[name].sum() / self.tissue.sum())
        return {name: round(share, 4) for name, share in shares.items()}


def preset_check(preset: str, name: str) -> QcCheck:
    return next(c for c in load_pipeline(preset).checks if c.name == name)


def tissue_checks() -> tuple[QcCheck, ...]:
    return tuple(map(check_from_mapping, TISSUE))


def slide_of(picture: Picture, mpp: float = 0.5) -> ArraySlide:
    return ArraySlide([picture], slide_mpp=(mpp, mpp))


def mean(scores: list[tuple[float, float]]) -> dict[str, float]:
    recall, precision = np.mean(scores, axis=0)
    return {"recall": round(float(recall), 3), "precision": round(float(precision), 3)}


def real_picture() -> Picture:
    """The real slide's level 0."""
    root = Path(os.environ.get("THINSECTION_TEST_SLIDES", "../shared/slides"))
    with open_slide(root / SLIDE) as slide:
        return slide.read_region((0, 0), 0, slide.size)


def smoke_picture() -> Picture:
    """Generated tissue, for a machine without the slide."""
    from thinsection.testing.synthetic import write_he_slide

    with tempfile.TemporaryDirectory() as folder:
        write_he_slide(Path(folder) / "a.svs", (1600, 1300), seed=4)
        with open_slide(Path(folder) / "a.svs") as slide:
            return slide.read_region((0, 0), 0, slide.size)


if __name__ == "__main__":
    main()
