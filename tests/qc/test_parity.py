"""The preset reproduces HistoQC's own values on the real slide."""

from dataclasses import replace

import pytest
from tests.qc.slides import needs_real_slide, real_slide

from thinsection.qc import QcResult, load_pipeline, run_qc

# HistoQC (December 2025), default config without its two forests, blur and area
REFERENCE = {
    "bright": 0.65221308,
    "dark": 0.014190787,
    "flat_areas": 0.0,
    "fatlike_tissue_removed_num_regions": 1,
    "fatlike_tissue_removed_mean_area": 1033,
    "fatlike_tissue_removed_max_area": 1033,
    "fatlike_tissue_removed_percent": 0.078944362,
    "small_tissue_filled_num_regions": 102,
    "small_tissue_filled_mean_area": 5.8137255,
    "small_tissue_filled_max_area": 284,
    "small_tissue_filled_percent": -0.073554949,
    "small_tissue_removed_num_regions": 25,
    "small_tissue_removed_mean_area": 3.8,
    "small_tissue_removed_max_area": 30,
    "small_tissue_removed_percent": 0.010976314,
    "spur_pixels": 0.083528037,
    "tenenGrad_contrast": 0.001503765,
    "michelson_contrast": 0.84146503,
    "rms_contrast": 0.16593162,
    "grayscale_brightness": 0.51613457,
    "chan1_brightness": 169.78394,
    "chan1_brightness_std": 42.356249,
    "chan2_brightness": 118.12862,
    "chan2_brightness_std": 44.350587,
    "chan3_brightness": 152.9267,
    "chan3_brightness_std": 35.35392,
    "deconv_c0_mean": 0.032596798,
    "deconv_c1_mean": 0.018243256,
    "deconv_c2_mean": 0.035151507,
    "pixels_to_use": 7845,
}
LEFT_OUT = ("by_example", "blurry", "fragments")


@pytest.fixture(scope="module")
def result() -> QcResult:
    default = load_pipeline("histoqc-default")
    checks = tuple(c for c in default.checks if c.kind not in LEFT_OUT)
    return run_qc(real_slide(), replace(default, checks=checks))


@needs_real_slide
def test_the_work_size_is_that_of_the_reference(result: QcResult) -> None:
    assert result.frame.size_th == (138, 185)


@needs_real_slide
@pytest.mark.parametrize("column", REFERENCE)
def test_a_score_equals_the_reference_to_6_digits(
    result: QcResult, column: str
) -> None:
    assert result.scores[column] == pytest.approx(
        REFERENCE[column], rel=5e-7, abs=1e-12
    )
