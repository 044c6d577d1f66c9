"""Smooth tissue has no fine detail, as blurred tissue: it is not judged in place of removed."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from tests.qc.slides import REAL, ArraySlide, needs_real_slide, real_slide
from tests.support.held_out_tissue import tissue_slide
from tests.support.smooth_tissue import KINDS, muscle_picture, with_smooth_tissue

from thinsection.qc import Pipeline, QcResult, load_pipeline, run_qc
from thinsection.slide import open_slide
from thinsection.types import MaskArray, RgbArray

JPEG_2000 = REAL.with_name("tcga-cr-7395-01a-01-ts1.svs")


@pytest.fixture(scope="module")
def base() -> RgbArray:
    slide = real_slide()
    return slide.read_region((0, 0), 0, slide.size)


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    auto = load_pipeline("auto")
    checks = tuple(c for c in auto.checks if c.kind in ("tissue", "focus"))
    return replace(auto, checks=checks)


def array_slide(rgb: RgbArray) -> ArraySlide:
    """A slide of 0.5 µm/px with the levels 1 and 4."""
    height, width = rgb.shape[:2]
    coarse = Image.fromarray(rgb).resize(
        (width // 4, height // 4), Image.Resampling.BOX
    )
    return ArraySlide([rgb, np.asarray(coarse)])


# centre and radii of an ellipse: y, x, y, x, as shares of the picture
_Ellipse = tuple[float, float, float, float]
_STROMA: _Ellipse = (0.3, 0.6, 0.15, 0.19)


def ellipse(
    shape: tuple[int, ...], at: _Ellipse = (0.45, 0.5, 0.22, 0.27)
) -> MaskArray:
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    y = (rows / shape[0] - at[0]) / at[2]
    x = (columns / shape[1] - at[1]) / at[3]
    return np.asarray(y**2 + x**2 < 1)


def shares(result: QcResult, where: MaskArray) -> tuple[float, float]:
    """Shares of the tissue in an area that focus removed, and that it did not judge."""
    size = result.frame.size_th
    picture = Image.fromarray(where.astype(np.uint8) * 255)
    inside = np.asarray(picture.resize(size, Image.Resampling.BOX)) > 250
    removed = result.masks["focus"]
    inside &= result.mask_use | removed
    assert inside.sum() > 500
    return float(removed[inside].mean()), float(result.unjudged["focus"][inside].mean())


@needs_real_slide
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_smooth_tissue_in_sharp_tissue_is_not_removed(
    kind: str, base: RgbArray, pipeline: Pipeline
) -> None:
    where = ellipse(base.shape[:2])
    seed = 20 + KINDS.index(kind)
    rgb = with_smooth_tissue(base, where, kind, seed)
    result = run_qc(real_slide(edit=rgb), pipeline)
    removed, unjudged = shares(result, where)
    assert removed <= 0.02
    assert unjudged >= 0.85
    column = float(result.scores["focus_unjudged_percent"])
    assert column == pytest.approx(
        result.unjudged["focus"].sum() / result.mask_use.sum()
    )
    # the real tissue around it is judged
    away = ~ndimage.binary_dilation(where, iterations=120)
    removed, unjudged = shares(result, away)
    assert removed <= 0.02
    assert unjudged <= 0.02


@needs_real_slide
@pytest.mark.parametrize("sigma_um", [1.0, 2.0, 4.0])
def test_real_blur_at_the_same_place_is_removed(
    sigma_um: float, base: RgbArray, pipeline: Pipeline
) -> None:
    where = ellipse(base.shape[:2])
    sigma_px = sigma_um / 0.5
    soft = ndimage.gaussian_filter(base.astype(np.float32), (sigma_px, sigma_px, 0))
    rgb = np.where(where[..., None], soft, base).round().astype(np.uint8)
    result = run_qc(real_slide(edit=rgb), pipeline)
    removed, unjudged = shares(result, where)
    assert removed >= 0.85
    assert unjudged <= 0.05


@needs_real_slide
def test_muscle_of_the_colour_of_sharp_stroma_is_not_judged(
    base: RgbArray, pipeline: Pipeline
) -> None:
    """It shows no nuclei, but stroma under any blur does."""
    where = ellipse(base.shape[:2], _STROMA)
    rgb = with_smooth_tissue(base, where, "muscle", 31)
    removed, unjudged = shares(run_qc(real_slide(edit=rgb), pipeline), where)
    assert removed <= 0.02
    assert unjudged >= 0.9
    for sigma_um in (1.0, 8.0):
        sigma_px = sigma_um / 0.5
        soft = ndimage.gaussian_filter(base.astype(np.float32), (sigma_px, sigma_px, 0))
        rgb = np.where(where[..., None], soft, base).round().astype(np.uint8)
        removed, unjudged = shares(run_qc(real_slide(edit=rgb), pipeline), where)
        assert removed >= 0.85
        assert unjudged <= 0.05


@pytest.mark.skipif(
    not JPEG_2000.exists(), reason=f"no {JPEG_2000.name} under THINSECTION_TEST_SLIDES"
)
@pytest.mark.parametrize("at", [(0.3, 0.6, 0.15, 0.19), (0.45, 0.2, 0.16, 0.13)])
def test_muscle_is_told_from_blur_by_its_neighbourhood(
    at: _Ellipse, pipeline: Pipeline
) -> None:
    """In red, muscle has the structures of this section under a blur of 4 µm.

    Of the two places, the second chose nothing.
    """
    with open_slide(JPEG_2000, reader="tiff") as slide:
        section = slide.read_region((0, 0), 1, slide.levels[1].size)
    where = ellipse(section.shape[:2], at)
    rgb = with_smooth_tissue(section, where, "muscle", 77)
    removed, unjudged = shares(run_qc(array_slide(rgb), pipeline), where)
    assert removed <= 0.02
    assert unjudged >= 0.85
    soft = ndimage.gaussian_filter(section.astype(np.float32), (8, 8, 0))
    rgb = np.where(where[..., None], soft, section).round().astype(np.uint8)
    removed, unjudged = shares(run_qc(array_slide(rgb), pipeline), where)
    assert removed >= 0.85
    assert unjudged <= 0.05


@pytest.mark.parametrize("seed", [1, 3])
def test_light_gaps_between_fibres_are_no_glass(seed: int, pipeline: Pipeline) -> None:
    """Their edges are detail, not the noise of glass, and are not subtracted."""
    sharp = muscle_picture(seed)
    everywhere = np.ones(sharp.shape[:2], bool)
    removed, _ = shares(run_qc(array_slide(sharp), pipeline), everywhere)
    assert removed <= 0.01
    right = everywhere.copy()
    right[:, : sharp.shape[1] // 2] = False
    for sigma_um in (1.0, 2.0):
        sigma_px = sigma_um / 0.5
        soft = ndimage.gaussian_filter(
            sharp.astype(np.float32), (sigma_px, sigma_px, 0)
        )
        rgb = np.where(right[..., None], soft, sharp).round().astype(np.uint8)
        result = run_qc(array_slide(rgb), pipeline)
        assert shares(result, right)[0] >= 0.85
        # without the 64 px at the edge of the blur
        left = np.roll(~right, -64, axis=1) & ~right
        assert shares(result, left)[0] <= 0.02


@needs_real_slide
@pytest.mark.parametrize("seed", [5, 6])
def test_noise_is_measured_where_no_glass_is(
    seed: int, base: RgbArray, pipeline: Pipeline
) -> None:
    """Noise of a camera, without which blurred tissue has almost no detail, is subtracted."""
    tissue = base[2230:2950, 745:1320]
    blurred = np.zeros(tissue.shape[:2], bool)
    blurred[: len(tissue) // 2] = True
    soft = ndimage.gaussian_filter(tissue.astype(np.float32), (6, 6, 0))
    light = np.where(blurred[..., None], soft, tissue)
    noise = np.random.default_rng(seed).normal(0, 4, light.shape)
    rgb = (light + noise).clip(0, 255).round().astype(np.uint8)
    result = run_qc(array_slide(rgb), pipeline)
    assert shares(result, blurred)[0] >= 0.85
    sharp = np.roll(~blurred, 64, axis=0) & ~blurred
    assert shares(result, sharp)[0] <= 0.05


@needs_real_slide
@pytest.mark.parametrize(
    ("stain", "seed", "size"),
    [("faint", 24000, (900, 700)), ("dark", 21009, (1200, 900))],
)
def test_weak_blocks_show_the_noise_of_a_faint_and_of_a_dark_slide(
    stain: str, seed: int, size: tuple[int, int], pipeline: Pipeline
) -> None:
    """JPEG leaves noise that is not white, and one grainy block is not the noise of a slide."""
    drawn = tissue_slide(seed, size=size, mpp=0.5, stain=stain, artefacts=("blur",))
    with drawn.open() as slide:
        result = run_qc(slide, pipeline)
    # without the rim of the blur
    blurred = ndimage.binary_erosion(drawn.masks["blur"], None, 32, border_value=1)
    assert shares(result, blurred)[0] >= 0.85
    sharp = ndimage.binary_erosion(drawn.clean, None, 32, border_value=1)
    assert shares(result, sharp)[0] <= 0.02


@needs_real_slide
def test_a_slide_that_is_blurred_nearly_as_a_whole_is_not_excused(
    base: RgbArray, pipeline: Pipeline
) -> None:
    """Its few sharp blocks tell nothing about the colours of the rest."""
    edge = int(0.95 * len(base))
    rgb = base.copy()
    rgb[:edge] = ndimage.gaussian_filter(base.astype(np.float32), (4, 4, 0))[:edge]
    result = run_qc(real_slide(edit=rgb), pipeline)
    blurred = np.zeros(base.shape[:2], bool)
    blurred[:edge] = True
    removed, unjudged = shares(result, blurred)
    assert removed >= 0.85
    assert unjudged <= 0.05
