"""Read plans: which level, how many px, what is refused; and the converters between frames."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinsection.errors import InvalidInputError, MissingMppError, UpsamplingError
from thinsection.slide.geometry import (
    ROUNDING,
    ReadPlan,
    best_level,
    corner_l0,
    l0_from_lv,
    lv_from_l0,
    mean_mpp,
    nominal_mpp,
    nominal_power,
    origins_lv,
    plan_read,
    plausible_mpp,
    positive_number,
)
from thinsection.types import Level, Mpp

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
    with pytest.raises(MissingMppError, match=r"'b.tiff'; pass slide_mpp="):
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
    remedy = r"pass tile_mpp=0.53 or native, or a higher mpp_tolerance="
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
    found, said = plausible_mpp((mpp, mpp))
    assert found is None
    assert (
        said
        == f"the file states {mpp:g} µm/px ({dpi} dpi), which is not possible for a slide, so its "
        "resolution counts as missing"
    )


def test_a_coarse_slide_is_believed() -> None:
    assert plausible_mpp((20.0, 20.0)) == ((20.0, 20.0), "")
    assert plausible_mpp(None) == (None, "")


# converters between frames


@pytest.mark.parametrize(
    ("value_lv", "downsample", "value_l0"),
    [
        (0, 4.0, 0),
        (100, 4.0, 400),
        (-3, 4.0, -12),
        (101, 4.0024, 404),  # 404.24
        (7, 1.5, 10),  # 10.5 rounds to the even number
        (5, 2.3, 12),  # 11.5 likewise
        (0.25, 16.0, 4),
    ],
)
def test_level_0_px_of_a_position_on_a_level(
    value_lv: float, downsample: float, value_l0: int
) -> None:
    assert l0_from_lv(value_lv, downsample) == value_l0


@pytest.mark.parametrize(
    ("value_l0", "downsample", "value_lv"),
    [
        (0, 4.0, 0),
        (400, 4.0, 100),
        (401, 4.0, 100),
        (402, 4.0, 100),  # 100.5 rounds to the even number
        (406, 4.0, 102),  # 101.5 likewise
        (403, 4.0, 101),
        (-402, 4.0, -100),
        (10_000, 16.0064, 625),  # 624.75
    ],
)
def test_px_on_a_level_of_a_level_0_position(
    value_l0: float, downsample: float, value_lv: int
) -> None:
    assert lv_from_l0(value_l0, downsample) == value_lv


def test_a_corner_keeps_x_and_y_apart() -> None:
    level = Level(index=1, size=(2000, 1000), downsample=4.5)
    assert corner_l0(level, 10, 333) == (45, 1498)  # 1498.5 rounds to the even number
    assert corner_l0(level, 0.5, -2) == (2, -9)


@given(
    value_lv=st.integers(-(1 << 23), 1 << 23),
    downsample=st.floats(1.0, 1024.0, allow_nan=False),
)
def test_a_level_position_survives_the_way_to_level_0_and_back(
    value_lv: int, downsample: float
) -> None:
    assert lv_from_l0(l0_from_lv(value_lv, downsample), downsample) == value_lv


@given(
    value_l0=st.integers(0, 1 << 23), downsample=st.floats(1.0, 1024.0, allow_nan=False)
)
def test_a_level_0_position_comes_back_within_half_a_px_of_the_level(
    value_l0: int, downsample: float
) -> None:
    there_and_back = l0_from_lv(lv_from_l0(value_l0, downsample), downsample)
    assert abs(there_and_back - value_l0) <= downsample / 2 + 0.5


def test_corners_of_tiles_are_converted_as_single_positions_are() -> None:
    coords_l0 = np.array([[0, 402], [406, 403], [-402, 9]], dtype=np.int64)
    corners = origins_lv(coords_l0, 4.0)
    assert corners.dtype == np.int64
    assert corners.tolist() == [[0, 100], [102, 101], [-100, 2]]


@given(
    corners=st.lists(st.tuples(*[st.integers(-(1 << 20), 1 << 23)] * 2), min_size=1),
    downsample=st.floats(1.0, 256.0, allow_nan=False),
)
def test_arrays_and_numbers_follow_one_rule(
    corners: list[tuple[int, int]], downsample: float
) -> None:
    on_level = origins_lv(np.array(corners, dtype=np.int64), downsample)
    expected = [
        [lv_from_l0(x, downsample), lv_from_l0(y, downsample)] for x, y in corners
    ]
    assert on_level.tolist() == expected


# resolutions


def test_one_resolution_of_px_that_are_not_square_is_the_mean() -> None:
    assert mean_mpp((0.25, 0.5)) == 0.375
    assert mean_mpp(None) is None


@pytest.mark.parametrize("power", [0.0, -20.0, math.inf, math.nan])
def test_an_objective_power_that_is_none_is_refused(power: float) -> None:
    with pytest.raises(InvalidInputError, match="objective_power must be > 0"):
        nominal_mpp(power)


def test_an_objective_power_below_1_means_more_than_10_um() -> None:
    assert nominal_mpp(0.5) == 20.0
    assert nominal_power(20.0) == 0.5


@pytest.mark.parametrize(("text", "number"), [("0.5", 0.5), ("0", None), ("inf", None)])
def test_numbers_at_the_ends_of_what_is_positive(
    text: str, number: float | None
) -> None:
    assert positive_number(text) == number


def test_the_coarser_of_two_axes_decides_whether_a_resolution_is_believed() -> None:
    assert plausible_mpp((0.5, 20.1))[0] is None
    assert plausible_mpp((352.8, 0.5)) == (
        None,
        "the file states 352.8 µm/px (72 dpi), which is not possible for a slide, so its "
        "resolution counts as missing",
    )


# the level


@pytest.mark.parametrize(
    ("downsample", "index"),
    [
        (1.0, 0),
        (3.97, 0),  # level 1 would be 0.8 % coarser than wanted
        (3.981, 1),  # and here 0.48 %
        (4.0, 1),
        (15.9, 1),
        (16.0, 2),
        (1000.0, 2),
    ],
)
def test_best_level_at_the_borders_between_levels(
    downsample: float, index: int
) -> None:
    assert best_level(LEVELS, downsample).index == index


def test_a_level_that_is_coarser_by_just_the_rounding_still_counts() -> None:
    coarse = Level(index=1, size=(3000, 3000), downsample=2.0)
    wanted = 2.0 / (1 + ROUNDING)
    assert best_level((LEVELS[0], coarse), wanted * 1.000001).index == 1
    assert best_level((LEVELS[0], coarse), wanted * 0.999999).index == 0
    exact = Level(index=1, size=(3000, 3000), downsample=2.01)
    assert best_level((LEVELS[0], exact), 2.0).index == (
        1 if 2.0 * (1 + ROUNDING) >= 2.01 else 0
    )


def test_no_level_is_finer_than_level_0() -> None:
    assert best_level(LEVELS, 0.996).index == 0
    with pytest.raises(UpsamplingError, match=r"downsample must be >= 1, got 0\.5"):
        best_level(LEVELS, 0.5)


# whole plans, every field


def plan(
    levels: tuple[Level, ...] = LEVELS,
    mpp: Mpp | None = (0.25, 0.25),
    *,
    tile_px: int = 200,
    tile_mpp: float | None = 0.5,
    overlap: int = 0,
    mpp_tolerance: float = 0.0,
) -> ReadPlan:
    return plan_read(
        levels,
        mpp,
        tile_px=tile_px,
        tile_mpp=tile_mpp,
        overlap=overlap,
        mpp_tolerance=mpp_tolerance,
    )


def test_a_plan_of_px_that_are_not_square() -> None:
    made = plan(mpp=(0.3, 0.2), tile_mpp=1.6, tile_px=150, overlap=50)
    # ratios: 1.6 / 0.3 = 5.33 and 1.6 / 0.2 = 8 level-0 px for a px of a tile
    assert made == ReadPlan(
        tile_px=150,
        tile_mpp=1.6,
        level=1,
        downsample=4.0,
        size_lv=(200, 300),
        size_l0=(800, 1200),
        stride_l0=(533, 800),
    )
    assert made.resamples


def test_the_axis_of_finer_px_decides_the_level() -> None:
    made = plan(mpp=(0.25, 0.05), tile_mpp=0.98)
    assert made.level == 0  # along x only 3.92 level-0 px make a px of a tile
    assert made.size_lv == (784, 3920)


def test_a_native_plan_keeps_the_slides_own_resolution() -> None:
    made = plan(mpp=(0.25, 0.35), tile_mpp=None, tile_px=100, overlap=30)
    assert made == ReadPlan(
        tile_px=100,
        tile_mpp=pytest.approx(0.3),
        level=0,
        downsample=1.0,
        size_lv=(100, 100),
        size_l0=(100, 100),
        stride_l0=(70, 70),
    )


def test_px_that_are_a_little_longer_along_y_are_resampled_along_y_alone() -> None:
    made = plan(SINGLE, (0.5, 0.49), tile_px=300)
    assert made.size_lv == (300, 306)  # 0.5 / 0.49 = 1.0204
    assert made.resamples
    flipped = plan(SINGLE, (0.49, 0.5), tile_px=300)
    assert flipped.size_lv == (306, 300)
    assert flipped.resamples


def test_a_ratio_that_is_whole_but_for_rounding_is_whole() -> None:
    # 1.0 / 0.3321 = 3.0111 is .37 % more than 3; 1.0 / 0.3311 = 3.0202 is .67 % more
    assert plan(SINGLE, (0.3321, 0.3321), tile_mpp=1.0).size_l0 == (600, 600)
    assert plan(SINGLE, (0.3311, 0.3311), tile_mpp=1.0).size_l0 == (604, 604)
    assert plan(SINGLE, (0.3345, 0.3345), tile_mpp=1.0).size_l0 == (600, 600)
    assert plan(SINGLE, (0.3355, 0.3355), tile_mpp=1.0).size_l0 == (596, 596)


def test_the_downsample_of_a_level_is_whole_but_for_rounding() -> None:
    levels = (LEVELS[0], Level(index=1, size=(1999, 1000), downsample=4.001))
    made = plan(levels, tile_mpp=1.0)
    assert (made.size_lv, made.size_l0) == ((200, 200), (800, 800))
    assert (made.downsample, made.tile_mpp) == (4.001, 1.0)
    longer = (LEVELS[0], Level(index=1, size=(1992, 996), downsample=4.016))
    assert plan(longer, tile_mpp=1.0, tile_px=600).size_lv == (600, 600)  # not 598
    odd = (LEVELS[0], Level(index=1, size=(3200, 1600), downsample=2.5))
    assert plan(odd, tile_mpp=0.625).size_l0 == (500, 500)


def test_the_tolerance_reaches_exactly_as_far_as_it_says() -> None:
    assert plan(SINGLE, (0.525, 0.525), mpp_tolerance=0.05).size_l0 == (200, 200)
    assert plan(SINGLE, (0.475, 0.475), mpp_tolerance=0.05).size_l0 == (200, 200)
    assert plan(SINGLE, (0.4745, 0.4745), mpp_tolerance=0.05).size_l0 == (211, 211)
    with pytest.raises(UpsamplingError):
        plan(SINGLE, (0.5255, 0.5255), mpp_tolerance=0.05)


def test_rounding_is_tolerated_whatever_the_tolerance_says() -> None:
    made = plan(SINGLE, (0.5025, 0.5025), mpp_tolerance=0.0)
    assert made.size_lv == (200, 200)
    assert made.tile_mpp == 0.5025
    with pytest.raises(UpsamplingError, match=r"must be >= 0\.503, got 0\.5"):
        plan(SINGLE, (0.503, 0.503), mpp_tolerance=0.0)


def test_both_axes_must_be_within_the_tolerance() -> None:
    for mpp in ((0.5, 0.47), (0.47, 0.5)):
        made = plan(SINGLE, mpp, mpp_tolerance=0.05)
        assert made.size_lv != (200, 200)
    assert plan(SINGLE, (0.49, 0.51), mpp_tolerance=0.05).size_lv == (200, 200)


def test_a_slide_that_is_too_coarse_along_one_axis_is_refused() -> None:
    for mpp in ((0.4, 0.55), (0.55, 0.4)):
        with pytest.raises(UpsamplingError, match=r"must be >= 0\.55, got 0\.5"):
            plan(SINGLE, mpp)


def test_one_axis_may_be_coarser_by_less_than_the_tolerance() -> None:
    made = plan(SINGLE, (0.25, 0.52), mpp_tolerance=0.05)
    assert made.size_l0 == (400, 200)
    assert made.tile_mpp == pytest.approx(0.51)


def test_a_stride_is_rounded_to_the_nearest_px() -> None:
    made = plan(mpp=(0.3, 0.27), tile_mpp=1.6, tile_px=101)
    assert made.stride_l0 == (539, 599)  # 538.67 and 598.52


def test_a_stride_is_at_least_1_px() -> None:
    made = plan(SINGLE, (0.5, 0.5), tile_px=1, overlap=0)
    assert made.stride_l0 == (1, 1)
    made = plan(tile_px=3, tile_mpp=None, overlap=2)
    assert (made.size_lv, made.stride_l0) == ((3, 3), (1, 1))


@pytest.mark.parametrize("tile_px", [0, -1])
def test_a_tile_without_px_is_refused(tile_px: int) -> None:
    with pytest.raises(
        InvalidInputError, match=rf"tile_px must be >= 1, got {tile_px}"
    ):
        plan(tile_px=tile_px)


@pytest.mark.parametrize("tile_mpp", [0.0, -0.5, math.inf, math.nan])
def test_a_resolution_that_is_none_is_refused(tile_mpp: float) -> None:
    with pytest.raises(InvalidInputError, match="tile_mpp must be > 0"):
        plan(tile_mpp=tile_mpp)


def test_a_missing_mpp_says_what_is_known_of_it() -> None:
    with pytest.raises(MissingMppError, match=r"in 'slide' \(352 µm/px\); pass"):
        plan_read(LEVELS, None, tile_px=9, tile_mpp=1.0, hint="352 µm/px")
    with pytest.raises(MissingMppError, match=r"in 'slide'; pass"):
        plan_read(LEVELS, None, tile_px=9, tile_mpp=1.0)


@given(
    x_mpp=st.floats(0.1, 1.0),
    aspect=st.floats(0.5, 2.0),
    tile_mpp=st.floats(2.0, 40.0),
    tile_px=st.integers(16, 600),
)
def test_a_plan_reads_what_a_tile_covers(
    x_mpp: float, aspect: float, tile_mpp: float, tile_px: int
) -> None:
    """The region on the level, the one in level-0 px and the tile are one piece of tissue."""
    mpp = (x_mpp, x_mpp * aspect)
    made = plan(mpp=mpp, tile_px=tile_px, tile_mpp=tile_mpp)
    for size_lv, size_l0, axis_mpp in zip(made.size_lv, made.size_l0, mpp):
        assert abs(size_l0 * axis_mpp - tile_px * tile_mpp) <= (
            0.5 * axis_mpp + 2 * ROUNDING * tile_px * tile_mpp
        )
        assert abs(size_lv * made.downsample - size_l0) <= (
            0.5 * made.downsample + 0.5 + ROUNDING * size_l0
        )
        assert size_lv >= tile_px * (1 - 2 * ROUNDING)  # never made larger
