"""Read plans: which level, how many px, what is refused."""

import pytest

from thinsection.errors import InvalidInputError, MissingMppError, UpsamplingError
from thinsection.slide.geometry import (
    believed_mpp,
    best_level,
    nominal_mpp,
    nominal_power,
    plan_read,
    positive_number,
)
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


def test_a_coarser_resolution_comes_from_the_coarsest_level_that_is_fine_enough() -> (
    None
):
    plan = plan_read(LEVELS, (0.25, 0.25), tile_px=256, tile_mpp=2.0)
    assert (plan.level, plan.size_lv, plan.size_l0) == (1, (512, 512), (2048, 2048))
    assert plan.resamples


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.4990", 0.499),
        ("0,4990", 0.499),  # as scanners of some countries write it
        (" 20 ", 20.0),
        ("1,000.5", None),
        ("0,4,9", None),
        (",", None),
        ("nan", None),
        ("-1", None),
        ("", None),
        (None, None),
    ],
)
def test_a_number_of_a_files_metadata(text: str | None, number: float | None) -> None:
    assert positive_number(text) == number


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


SINGLE = LEVELS[:1]
WITH_HALF = (LEVELS[0], Level(index=1, size=(4000, 2000), downsample=2.0))


@pytest.mark.parametrize(
    ("levels", "slide_mpp", "edges", "tile_mpp"),  # edges: on the level, in level-0 px
    [
        (SINGLE, 0.5, (256, 256), 0.5),
        (SINGLE, 0.504, (256, 256), 0.504),
        (SINGLE, 0.525, (256, 256), 0.525),
        (WITH_HALF, 0.2527, (256, 512), 0.5054),
        (SINGLE, 0.2527, (507, 507), 0.5),
        (SINGLE, 0.46, (278, 278), 0.5),
    ],
)
def test_a_level_within_the_tolerance_is_read_as_it_is_and_its_true_mpp_recorded(
    levels: tuple[Level, ...], slide_mpp: float, edges: tuple[int, int], tile_mpp: float
) -> None:
    mpp = (slide_mpp, slide_mpp)
    plan = plan_read(levels, mpp, tile_px=256, tile_mpp=0.5, mpp_tolerance=0.05)
    assert (plan.size_lv[0], plan.size_l0[0]) == edges
    assert plan.resamples == (edges[0] != 256)
    assert plan.tile_mpp == pytest.approx(tile_mpp, rel=1e-12)


def test_of_two_levels_within_the_tolerance_the_nearer_is_read() -> None:
    levels = (LEVELS[0], Level(index=1, size=(7700, 3850), downsample=1.04))
    plan = plan_read(
        levels, (0.49, 0.49), tile_px=256, tile_mpp=0.5, mpp_tolerance=0.05
    )
    assert plan.level == 1
    assert plan.tile_mpp == pytest.approx(0.49 * 1.04)


def test_without_a_tolerance_a_near_level_is_resampled() -> None:
    plan = plan_read(WITH_HALF, (0.2427, 0.2427), tile_px=256, tile_mpp=0.5)
    assert (plan.level, plan.tile_mpp) == (1, 0.5)
    assert plan.resamples


def test_a_slide_that_is_too_coarse_is_refused_with_remedies() -> None:
    remedy = r"ask for --tile-mpp 0.53 or native, or for a higher --mpp-tolerance"
    with pytest.raises(
        UpsamplingError, match=rf"must be >= 0.53, got 0.5 in 'a.svs'.*{remedy}"
    ):
        plan_read(
            SINGLE,
            (0.5, 0.53),
            tile_px=256,
            tile_mpp=0.5,
            mpp_tolerance=0.05,
            slide="a.svs",
        )


@pytest.mark.parametrize(("dpi", "mpp"), [(72, 352.8), (96, 264.6), (300, 84.67)])
def test_a_resolution_that_programs_write_by_default_is_taken_as_missing(
    dpi: int, mpp: float
) -> None:
    found, said = believed_mpp((mpp, mpp))
    assert found is None
    assert (
        said
        == f"the file says {mpp:g} µm/px ({dpi} dpi), which no slide has: taken as missing"
    )


def test_a_coarse_slide_is_believed() -> None:
    assert believed_mpp((20.0, 20.0)) == ((20.0, 20.0), "")
    assert believed_mpp(None) == (None, "")
