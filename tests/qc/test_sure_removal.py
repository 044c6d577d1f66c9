"""The checks that are followed even on most of the tissue, and those that do not judge."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from scipy import ndimage
from tests.qc.slides import ArraySlide, needs_real_slide, real_slide
from training.artefact_slide import STAINS
from training.tuning_slide import tuning_slide

from thinsection.qc import Pipeline, QcResult, load_pipeline, run_qc
from thinsection.qc.checks.check import Outcome, QcCheck, QcView
from thinsection.qc.checks.tissue import Tissue
from thinsection.qc.tissue import tissue_mask
from thinsection.report.verdict import load_rules, verdict
from thinsection.types import MaskArray

Rgb = npt.NDArray[np.uint8]


class HalfSure(QcCheck, kind="half_sure"):
    """Finds an artefact in every pixel, and is sure of the upper half."""

    name: str = "half_sure"

    def __call__(self, view: QcView) -> Outcome:
        everywhere = view.ns.xp.ones_like(view.mask_use)
        sure = everywhere.copy()
        sure[len(sure) // 2 :] = False
        return replace(view.without(everywhere, self.name), sure_area=sure)


@pytest.fixture(scope="module")
def base() -> Rgb:
    slide = real_slide()
    return slide.read_region((0, 0), 0, slide.size)


def at_work_size(mask: MaskArray, result: QcResult) -> MaskArray:
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(image.resize(result.frame.size_th, Image.Resampling.BOX)) > 127


@pytest.mark.parametrize("guard", [True, False])
def test_an_overruled_check_removes_what_it_is_sure_of(guard: bool) -> None:
    slide = tuning_slide(3, size=(800, 600), mpp=3.0, stain="he", artefacts=())
    auto = load_pipeline("auto")
    tissue = replace(auto, checks=auto.checks[:1], guard=guard)
    with slide.open() as opened:
        before = run_qc(opened, tissue).mask_use
        checks = (*tissue.checks, HalfSure())
        result = run_qc(opened, replace(tissue, checks=checks))
        strict = run_qc(opened, replace(tissue, checks=checks), strict=True)
    middle = len(before) // 2
    assert before[:middle].any()
    for_tiles = result.tissue.mask
    assert not for_tiles[:middle].any()
    np.testing.assert_array_equal(for_tiles[middle:], before[middle:])
    (warning,) = (w for w in result.warnings if w.startswith("half_sure"))
    assert "where it is sure" in warning
    assert not strict.mask_use.any()


@needs_real_slide
def test_a_slide_that_is_mostly_out_of_focus_loses_that_part_and_is_excluded(
    base: Rgb,
) -> None:
    """68 % of a real slide is blurred by a known Gaussian of 2.5 µm."""
    edge = int(0.68 * len(base))
    blurred = np.zeros(base.shape[:2], dtype=bool)
    blurred[:edge] = True
    rgb = base.copy()
    rgb[:edge] = ndimage.gaussian_filter(base.astype(np.float32), (5, 5, 0))[:edge]
    result = run_qc(real_slide(edit=rgb), "auto")
    truth = at_work_size(blurred, result)
    tissue = tissue_mask(real_slide(edit=base)).mask
    assert (result.mask_use & truth).sum() < 0.05 * (tissue & truth).sum()
    assert (result.mask_use & ~truth & tissue).sum() > 0.9 * (tissue & ~truth).sum()
    row = {"status": "done", **result.scores, "pixels_to_use": 10_000.0}
    assert verdict(row, load_rules(None)) == ("exclude", "out of focus")


@needs_real_slide
def test_squamous_epithelium_is_no_fold() -> None:
    """The slide has no fold, but dense epithelium and keratin in bands."""
    result = run_qc(real_slide(), "auto")
    assert result.scores["folds_removed_percent"] < 0.01


@needs_real_slide
def test_tissue_without_structures_is_not_judged_as_out_of_focus(base: Rgb) -> None:
    """A smooth area with a camera's noise, as of mucin, in sharp tissue."""
    rng = np.random.default_rng(7)
    rgb = base.copy()
    height, width = rgb.shape[:2]
    smooth = np.zeros((height, width), dtype=bool)
    smooth[height // 3 : height // 2, width // 4 : 3 * width // 4] = True
    colour = rgb[smooth].mean(axis=0)
    y, x = np.mgrid[:height, :width]
    shade = 6 * (np.sin(x / 90) + np.cos(y / 110))
    noise = rng.normal(0, 2, rgb.shape)
    mucin = (colour + shade[..., None] + noise).clip(0, 255).astype(np.uint8)
    rgb[smooth] = mucin[smooth]
    result = run_qc(real_slide(edit=rgb), "auto")
    inside = at_work_size(ndimage.binary_erosion(smooth, iterations=64), result)
    assert inside.sum() > 500
    assert (result.masks["focus"] & inside).sum() <= 0.03 * inside.sum()


@needs_real_slide
def test_focus_is_not_judged_on_an_image_on_which_blur_is_not_visible(
    base: Rgb,
) -> None:
    coarse = np.asarray(Image.fromarray(base).reduce(4))
    result = run_qc(ArraySlide([coarse], slide_mpp=(2.0, 2.0)), "auto")
    assert "focus_removed_percent" not in result.scores
    assert any(w.startswith("focus: not judged at 2 µm/px") for w in result.warnings)


def test_the_networks_do_not_judge_a_picture_of_24_um_a_pixel() -> None:
    slide = tuning_slide(5, size=(800, 600), mpp=3.0, stain="he")
    with slide.open() as opened:
        rgb = opened.read_region((0, 0), 0, opened.size)
    coarse = np.asarray(Image.fromarray(rgb).reduce(8))
    result = run_qc(ArraySlide([coarse], slide_mpp=(24.0, 24.0)), "auto")
    not_judged = ("bubbles", "folds", "coverslip_edge", "dust", "slide_edge", "unsure")
    assert not set(not_judged) & set(result.masks)
    assert (
        f"{', '.join(not_judged)}: not judged at 24 µm/px, because the picture is too "
        "coarse"
    ) in result.warnings


@pytest.mark.parametrize("stain", STAINS)
def test_ink_that_the_default_mask_removes_is_removed_by_auto_too(stain: str) -> None:
    slide = tuning_slide(31, size=(1600, 1200), mpp=3.0, stain=stain)
    with slide.open() as opened:
        default = tissue_mask(opened)
        result = run_qc(opened, "auto")
        detector = Pipeline(name="detector", work_from="mpp", checks=(Tissue(),))
        before = run_qc(opened, detector)
    by_default = before.mask_use & ~default.mask
    ink = ndimage.binary_opening(by_default, iterations=2)
    assert not (result.mask_use & ink).any()
