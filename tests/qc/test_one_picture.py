"""The tissue stage and quality control look at one picture and find the same tissue in it."""

from pathlib import Path

import numpy as np
import pytest
import skimage.data
from tests.qc.slides import REAL, ArraySlide, reduced
from training.tuning_slide import tuning_slide

from thinsection.qc import Pipeline, run_qc, tissue_mask
from thinsection.qc.checks.tissue import Tissue
from thinsection.slide import Slide, open_slide
from thinsection.types import Mpp

TISSUE_ALONE = Pipeline(name="tissue", work_from="mpp", checks=(Tissue(),))


def assert_same_tissue(slide: Slide) -> None:
    """Picture, mask, share and stain are the same, but for ink, which the stage takes out too."""
    stage = tissue_mask(slide)
    checked = run_qc(slide, TISSUE_ALONE)
    np.testing.assert_array_equal(checked.rgb, stage.thumbnail)
    assert checked.tissue.stain == stage.stain
    assert stage.tissue_fraction > 0.0
    assert not (stage.mask & ~checked.tissue.mask).any()
    if stage.pen_fraction == 0.0:
        np.testing.assert_array_equal(checked.tissue.mask, stage.mask)
        assert checked.tissue.tissue_fraction == stage.tissue_fraction
    else:  # "ink" on pictures whose px are taken for far larger ones than they are
        assert slide.slide_mpp is None
        assert slide.objective_power is None
        assert stage.pen_fraction < 0.05


@pytest.mark.parametrize(
    ("mpp", "power"),
    [
        pytest.param((0.5, 0.5), 20.0, id="as its power says"),
        pytest.param((0.4873, 0.4873), 20.0, id="not as its power says"),
        pytest.param((0.5, 0.9), 20.0, id="px not square"),
        pytest.param(None, 20.0, id="power alone"),
        pytest.param(None, None, id="neither"),
    ],
)
def test_a_generated_slide(mpp: Mpp | None, power: float | None) -> None:
    drawn = tuning_slide(103, size=(907, 1203), mpp=2.0, stain="he", artefacts=())
    base = drawn.rgb.repeat(2, axis=0).repeat(2, axis=1)
    levels = [base, reduced(base, 4)]
    assert_same_tissue(ArraySlide(levels, slide_mpp=mpp, objective_power=power))


@pytest.mark.parametrize("mpp", [0.25, 0.5, 1.0])
def test_the_real_field_of_scikit_image(mpp: float) -> None:
    field = skimage.data.immunohistochemistry()
    slide = ArraySlide([field], slide_mpp=(mpp, mpp), objective_power=None)
    assert_same_tissue(slide)
    assert tissue_mask(slide).tissue_fraction == 1.0


@pytest.mark.parametrize(
    ("name", "mpp"),
    [
        ("CMU-1-Small-Region.svs", None),
        ("tcga-cr-7395-01a-01-ts1.svs", (0.5, 0.5)),
        ("tcga-cr-7395-01a-01-ts1.svs", None),
    ],
)
def test_a_real_slide(name: str, mpp: Mpp | None) -> None:
    path = Path(REAL).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not under THINSECTION_TEST_SLIDES")
    with open_slide(path, slide_mpp=mpp) as slide:
        assert_same_tissue(slide)


def test_but_for_ink_the_tissue_is_that_of_the_check() -> None:
    drawn = tuning_slide(10, size=(1200, 900), mpp=2.0, stain="he", artefacts=("pen",))
    stage = tissue_mask(drawn.open())
    checked = run_qc(drawn.open(), TISSUE_ALONE)
    assert stage.pen_fraction > 0.0
    assert not (stage.mask & ~checked.tissue.mask).any()


def test_a_resolution_that_is_given_to_quality_control_counts_for_both() -> None:
    field = skimage.data.immunohistochemistry()
    slide = ArraySlide([field], slide_mpp=(1.0, 1.0), objective_power=None)
    unsure = ArraySlide([field], slide_mpp=None, objective_power=None)
    checked = run_qc(unsure, TISSUE_ALONE, slide_mpp=1.0)
    np.testing.assert_array_equal(checked.rgb, tissue_mask(slide).thumbnail)
