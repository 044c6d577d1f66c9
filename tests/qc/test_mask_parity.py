"""Masks of the deterministic checks: those of HistoQC, and of the same steps by scikit-image."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import skimage.morphology
from scipy.signal import convolve2d
from skimage import color, filters, transform
from tests.qc.slides import REAL, needs_real_slide

from thinsection.qc import Pipeline, QcResult, load_pipeline, run_qc
from thinsection.slide import open_slide
from thinsection.testing.synthetic import write_he_slide

Mask = npt.NDArray[np.bool_]
AREA_PX = 400

# px that each check of HistoQC's own modules took (or filled) on the real slide; see
# docs/validation/qc.md.j2
HISTOQC_PX = {
    "histoqc-default": {
        **{"bright": 16651, "dark": 126, "flat_areas": 0, "fatlike": 1033},
        **{
            "small_filled": 593,
            "small_removed": 95,
            "blurry": 8560,
            "spur": 0,
            "areathresh": 0,
        },
    },
    "histoqc-light": {
        **{"nonwhite": 16650, "flat_areas": 0, "dark": 126, "small_filled": 921},
        **{"small_removed": 67, "blurry": 0, "spur": 825, "areathresh": 8783},
    },
    "histoqc-v2.1": {
        **{"bright": 11883, "dark": 126, "flat_areas": 521, "fatlike": 0},
        **{
            "small_filled": 133,
            "small_removed": 1,
            "blurry": 13132,
            "spur": 0,
            "areathresh": 0,
        },
    },
    "histoqc-ihc": {"bright": 11883, "small_filled": 7, "small_removed": 217},
}


def masks_only(preset: str) -> Pipeline:
    pipeline = load_pipeline(preset)
    left_out = (
        "by_example",
        "histogram",
        "contrast",
        "brightness",
        "stains",
        "texture",
    )
    return replace(
        pipeline, checks=tuple(c for c in pipeline.checks if c.kind not in left_out)
    )


def qc_of(path: Path, pipeline: Pipeline) -> QcResult:
    with open_slide(path) as slide:
        return run_qc(slide, pipeline)


@needs_real_slide
@pytest.mark.parametrize("preset", HISTOQC_PX)
def test_every_check_takes_as_many_px_as_histoqcs_own(preset: str) -> None:
    masks = qc_of(REAL, masks_only(preset)).masks
    assert {name: int(mask.sum()) for name, mask in masks.items()} == HISTOQC_PX[preset]


@needs_real_slide
def test_masks_of_the_real_slide_are_those_of_scikit_image() -> None:
    assert_same_masks(REAL, max_edge=0.125)


def test_masks_of_a_generated_slide_are_those_of_scikit_image(tmp_path: Path) -> None:
    write_he_slide(tmp_path / "a.svs", (4500, 3500), seed=3)
    assert_same_masks(tmp_path / "a.svs", max_edge=0.06)


def assert_same_masks(path: Path, *, max_edge: float) -> None:
    """With a limit of blur that parts the slide: the preset's .15 calls all of it blurry."""
    changed = {
        "blurry": {"max_edge": max_edge},
        "fragments": {"min_area": f"{AREA_PX} px"},
    }
    pipeline = masks_only("histoqc-default")
    checks = [replace(c, **changed.get(c.kind, {})) for c in pipeline.checks]
    got = qc_of(path, replace(pipeline, checks=tuple(checks)))
    touched, left = by_scikit_image(
        thumbnail(path, 1.25), thumbnail(path, 2.5), max_edge
    )
    assert set(touched) == set(got.masks)
    seen = {name for name, mask in touched.items() if mask.any()}
    assert seen >= {"bright", "small_filled", "small_removed", "blurry", "spur"}
    for name, mask in touched.items():
        assert iou(got.masks[name], mask) == 1.0, name
    assert left.any()
    assert iou(got.mask_use, left) == 1.0


def thumbnail(path: Path, power: float) -> npt.NDArray[np.uint8]:
    import openslide

    with openslide.OpenSlide(str(path)) as slide:
        edge = round(
            max(slide.dimensions)
            * power
            / float(slide.properties["openslide.objective-power"])
        )
        return np.asarray(slide.get_thumbnail((edge, edge)))


def by_scikit_image(
    rgb: npt.NDArray[np.uint8], rgb_fine: npt.NDArray[np.uint8], max_edge: float
) -> tuple[dict[str, Mask], Mask]:
    """What each step takes (or fills), and what is left in the end."""
    gray = color.rgb2gray(rgb)
    touched: dict[str, Mask] = {}
    left = np.ones(gray.shape, dtype=bool)

    def take(name: str, found: Mask) -> None:
        nonlocal left
        touched[name], left = left & found, left & ~found

    take("bright", (gray >= 0.9) | (rgb.std(axis=2) <= 10))
    take("dark", gray < 0.15)
    flat = np.abs(convolve2d(gray, np.full((10, 10), 0.01), mode="same") - gray) < 0.01
    take("flat_areas", ~objects(~objects(flat, 500), 500))
    cells = objects(holes(left, 64) & ~left, 9)
    fat = objects(skimage.morphology.dilation(cells, np.ones((10, 10))), 1001)
    take("fatlike", fat)
    touched["fatlike"] = fat  # with the holes themselves
    touched["small_filled"] = holes(left, 1000) & ~left
    left = left | touched["small_filled"]
    take("small_removed", ~objects(left, 64))
    edges = filters.gaussian(
        np.abs(filters.laplace(color.rgb2gray(rgb_fine))), sigma=100
    )
    take("blurry", transform.resize(edges <= max_edge, gray.shape, order=0))
    opened = skimage.morphology.opening(left, skimage.morphology.disk(5))
    take("spur", ~opened)
    take("areathresh", ~objects(left, AREA_PX))
    return touched, left


def objects(mask: Mask, min_px: int) -> Mask:
    return np.asarray(
        skimage.morphology.remove_small_objects(mask, max_size=min_px - 1)
    )


def holes(mask: Mask, min_px: int) -> Mask:
    return np.asarray(skimage.morphology.remove_small_holes(mask, max_size=min_px - 1))


def iou(one: Mask, other: Mask) -> float:
    union = np.count_nonzero(one | other)
    return np.count_nonzero(one & other) / union if union else 1.0
