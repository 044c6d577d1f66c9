"""Read plans: which level, how many px, what is refused."""

import pytest

from thinsection.errors import InvalidInputError, MissingMppError, UpsamplingError
from thinsection.slide.geometry import best_level, nominal_mpp, nominal_power, plan_read
from thinsection.types import Level

LEVELS = (
    Level(index=0, size=(8000, 4000), downsample=1.0),
    Level(index=1, size=(2000, 1000), downsample=4.0),
    Level(index=2, size=(500, 250), downsample=16.0),
)


def test_the_wanted_resolution_of_level_0_is_read_without_resampling() -> None:
    plan = plan_read(LEVELS, (0.499, 0.499), tile_px=256, tile_mpp=0.5)
    assert (plan.level, plan.size_lv, plan.size_l0) == (0, (256, 256), (256, 256))
    assert not plan.resamples


def test_a_coarser_resolution_comes_from_the_coarsest_level_that_is_fine_enough() -> None:
    plan = plan_read(LEVELS, (0.25, 0.25), tile_px=256, tile_mpp=2.0)
    assert (plan.level, plan.size_lv, plan.size_l0) == (1, (512, 512), (2048, 2048))
    assert plan.resamples


def test_a_level_of_exactly_that_resolution_is_not_resampled() -> None:
    plan = plan_read(LEVELS, (0.25, 0.25), tile_px=224, tile_mpp=1.0)
    assert (plan.level, plan.size_lv, plan.size_l0) == (1, (224, 224), (896, 896))


def test_different_mpp_along_x_and_y_give_a_region_that_is_not_square() -> None:
    plan = plan_read(LEVELS, (0.25, 0.5), tile_px=256, tile_mpp=1.0)
    assert plan.size_l0 == (1024, 512)
    assert plan.level == 0
    assert plan.size_lv == (1024, 512)


def test_overlap_shortens_the_stride_in_level_0_px() -> None:
    plan = plan_read(LEVELS, (0.25, 0.25), tile_px=256, tile_mpp=0.5, overlap=64)
    assert plan.stride_l0 == (384, 384)


def test_native_reads_level_0_even_without_an_mpp() -> None:
    plan = plan_read(LEVELS, None, tile_px=256, tile_mpp=None)
    assert (plan.level, plan.size_l0, plan.tile_mpp) == (0, (256, 256), None)


def test_upsampling_is_refused_with_both_resolutions() -> None:
    with pytest.raises(UpsamplingError, match=r"must be >= 0.5, got 0.25 in 'a.svs'"):
        plan_read(LEVELS, (0.5, 0.5), tile_px=256, tile_mpp=0.25, slide="a.svs")


def test_a_missing_mpp_names_the_slide_and_the_remedies() -> None:
    with pytest.raises(MissingMppError, match=r"'b.tiff'; pass --slide-mpp"):
        plan_read(LEVELS, None, tile_px=256, tile_mpp=0.5, slide="b.tiff")


@pytest.mark.parametrize("overlap", [-1, 256])
def test_overlap_outside_the_tile_is_refused(overlap: int) -> None:
    with pytest.raises(InvalidInputError, match="overlap"):
        plan_read(LEVELS, None, tile_px=256, tile_mpp=None, overlap=overlap)


def test_best_level_tolerates_a_downsample_that_is_off_by_rounding() -> None:
    levels = (LEVELS[0], Level(index=1, size=(1999, 1000), downsample=4.001))
    assert best_level(levels, 4.0).index == 1


def test_nominal_mpp_and_power_are_inverse() -> None:
    assert nominal_mpp(20) == 0.5
    assert nominal_power(0.25) == 40
    with pytest.raises(InvalidInputError, match="must be > 0"):
        nominal_mpp(0)
