"""Rules for slides, and columns for tiles."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.qc.slides import ArraySlide

from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc import (
    load_pipeline,
    qc_fail,
    run_qc,
    tile_qc_columns,
)
from thinsection.qc.checks.check import Score
from thinsection.qc.result import usable_mm2
from thinsection.qc.rules import parse_rule, unjudging_check
from thinsection.qc.tissue import box_fractions
from thinsection.types import MaskFrame

ROW = {
    "pixels_to_use": 900.0,
    "bright": 0.5,
    "small_removed_percent": -0.1,
    "type": "aperio",
}


@pytest.mark.parametrize(
    ("rule", "fails"),
    [
        ("pixels_to_use<1000", True),
        (" pixels_to_use >= 901 ", False),
        ("bright==0.5", True),
        ("small_removed_percent>-1e-1", False),
        ("bright!=0.5", False),
    ],
)
def test_a_rule_compares_a_column_with_a_number(rule: str, fails: bool) -> None:
    assert qc_fail(ROW, rule) is fails


@pytest.mark.parametrize(
    "text",
    ["", "pixels_to_use", "a<b", "__import__('os')<1", "a<1 or 1", "a<1;b<2", "1<a"],
)
def test_what_is_no_comparison_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"qc rule must have the form 'pixels_to_use<1000'"
    ):
        parse_rule(text)


def test_a_rule_on_an_unknown_or_a_text_column_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"got 'pixels_to_us'; did you mean 'pixels_to_use'\?"
    ):
        qc_fail(ROW, "pixels_to_us<1")
    with pytest.raises(ConfigError, match=r"column of numbers, got 'type' = 'aperio'"):
        qc_fail(ROW, "type<1")


@given(st.integers(0, 2**32 - 1), st.integers(1, 97))
def test_a_tiles_share_is_the_mean_of_the_enlarged_mask(
    seed: int, tile_px_l0: int
) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((7, 11)) > 0.5
    frame = MaskFrame(size_th=(11, 7), size_l0=(110, 84))
    large = np.repeat(np.repeat(mask, 12, axis=0), 10, axis=1)
    coords = rng.integers((0, 0), (110, 84), (20, 2))
    got = box_fractions(mask, frame, coords, (tile_px_l0, tile_px_l0))
    for (x, y), share in zip(coords, got, strict=True):
        inside = large[y : y + tile_px_l0, x : x + tile_px_l0].sum()
        assert share == pytest.approx(inside / tile_px_l0**2, abs=1e-5)


def test_each_check_with_a_mask_has_a_column_but_not_the_filling_one() -> None:
    rng = np.random.default_rng(0)
    rgb = rng.integers(0, 256, (640, 800, 3), dtype=np.uint8)
    light = load_pipeline("histoqc-light")
    result = run_qc(ArraySlide([rgb]), replace(light, work_mpp=2.0))
    columns = tile_qc_columns(result, np.array([[0, 0], [400, 300]]), 256)
    assert "small_filled" in result.masks
    assert "small_filled" not in columns
    assert set(columns) == set(result.masks) - {"small_filled"}
    assert all(values.shape == (2,) for values in columns.values())
    with pytest.raises(
        InvalidInputError, match=r"coords_l0 must be int64 of shape \(N, 2\)"
    ):
        tile_qc_columns(result, np.zeros(4, np.int64), 256)


def test_a_rule_knows_the_columns_that_only_other_slides_have() -> None:
    checks = load_pipeline("auto").checks
    judged: dict[str, Score] = {
        "bubbles": 0.0,
        "bubbles_unjudged_percent": 0.0,
        "folds_removed_num_regions": 3.0,
        "folds_removed_percent": 0.2,
        "folds_unjudged_percent": 0.0,
    }
    coarse: dict[str, Score] = {
        "bubbles_unjudged_percent": 1.0,
        "folds_unjudged_percent": 1.0,
        # a person marked a fold that the check could not judge
        "folds_removed_percent": 0.5,
        "edited_areas": 1.0,
    }
    cases = {
        "bubbles<0.1": (True, False),
        "folds_removed_num_regions>2": (True, False),
        "folds_removed_percent>0.1": (True, True),
        "edited_areas<1": (True, False),
        "unjudged_percent==0": (True, True),
        "glass_unjudged_percent<0.5": (True, True),
    }
    for rule, fails in cases.items():
        got = tuple(qc_fail(row, rule, checks=checks) for row in (judged, coarse))
        assert got == fails, rule
    assert unjudging_check(coarse, "bubbles", checks) == "bubbles"
    assert unjudging_check(coarse, "folds_removed_num_regions", checks) == "folds"
    assert unjudging_check(judged, "bubbles", checks) == ""
    for row in (judged, coarse):
        for name in ("bubble", "pen_unjudged_percent", "contrast_percent"):
            with pytest.raises(ConfigError, match=f"must name a column, got '{name}'"):
                qc_fail(row, f"{name}>0", checks=checks)
    with pytest.raises(ConfigError, match="got 'folds_removed_nm_regions'; did you"):
        qc_fail(judged, "folds_removed_nm_regions>0", checks=checks)


def test_the_area_of_the_usable_tissue_is_of_pixels_or_of_a_share() -> None:
    facts = {"mpp_x": 0.5, "mpp_y": 0.25}
    sizes = ((2000, 1000), (100, 50))
    # 1 mm x 0.25 mm, of which 5,000 pixels of the work image
    counts = {1250.0: 0.0625, 2.0: 0.0001, 1.0: 0.00005, 0.0: 0.0}
    shares = {1.0: 0.25, 0.5: 0.125, 0.0002: 0.00005, 0.0: 0.0}
    for usable, area in counts.items():
        row = usable_mm2(facts, {"pixels_to_use": usable}, "absolute", *sizes)
        assert row == {"usable_mm2": area}, usable
    for usable, area in shares.items():
        row = usable_mm2(facts, {"pixels_to_use": usable}, "relative2image", *sizes)
        assert row == {"usable_mm2": area}, usable


def test_the_area_of_the_usable_tissue_needs_a_resolution() -> None:
    sizes = ((2000, 1000), (100, 50))
    scores = {"pixels_to_use": 9.0}
    for mpp in ("NA", None, 0.0, -0.5, math.nan, math.inf):
        for facts in ({"mpp_x": 0.5, "mpp_y": mpp}, {"mpp_x": mpp, "mpp_y": 0.5}):
            assert usable_mm2(facts, scores, "absolute", *sizes) == {}, mpp
    facts = {"mpp_x": 0.5, "mpp_y": 0.25}
    assert usable_mm2({"mpp_x": 0.5}, scores, "absolute", *sizes) == {}
    assert usable_mm2(facts, {}, "absolute", *sizes) == {}
