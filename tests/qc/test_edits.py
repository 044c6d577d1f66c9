"""What a correction means for masks, and how it is read; masks are made by hand."""

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from tests.qc.slides import ArraySlide

from thinsection import open_slide
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc import QcResult, run_qc, tile_qc_columns
from thinsection.qc.edits import (
    QcEdit,
    check_edits_source,
    edits_file,
    edits_key,
    outline_measurements,
    read_edits,
)
from thinsection.qc.pipeline import load_pipeline, pipeline_from_mapping
from thinsection.report.layers import overlay_layers
from thinsection.report.qc_files import load_qc, write_qc
from thinsection.report.stored import read_qc, read_tissue
from thinsection.slide.cohort import SlideEntry
from thinsection.testing.synthetic import write_he_slide

# a mask px is 4 x 3 level-0 px
SHAPE = (40, 60)
SIZE = (240, 120)


def box(top: int, left: int, bottom: int, right: int) -> Any:
    """Rows and columns of the mask as an area in level-0 px."""
    return shapely.box(left * 4, top * 3, right * 4, bottom * 3)


def pixels(top: int, left: int, bottom: int, right: int) -> np.ndarray:
    mask = np.zeros(SHAPE, bool)
    mask[top:bottom, left:right] = True
    return mask


def edit(action: Any, check: str, *corners: int, **more: Any) -> QcEdit:
    return QcEdit(action=action, check=check, area=box(*corners), **more)


@pytest.fixture(scope="module")
def plain() -> QcResult:
    checks = [
        {"kind": "tissue"},
        {"kind": "intensity", "name": "ink", "upper_gray": 0.1, "invert": True},
        {"kind": "intensity", "name": "blur", "upper_gray": 0.1, "invert": True},
        {"kind": "fill_holes"},
    ]
    mapping = {"name": "x", "work_mpp": 2.0, "work_from": "mpp", "check": checks}
    rgb = np.full((SIZE[1], SIZE[0], 3), 180, np.uint8)
    slide = ArraySlide([rgb], slide_mpp=(0.5, 2 / 3))
    return run_qc(slide, pipeline_from_mapping(mapping))


@pytest.fixture
def result(plain: QcResult) -> QcResult:
    """Glass on the left; ink and blur overlap in rows 10 to 20; ink reaches over the glass."""
    glass = pixels(0, 0, 40, 10)
    ink = pixels(0, 5, 20, 40)
    blur = pixels(10, 10, 30, 60)
    return replace(
        plain,
        mask_use=~(glass | ink | blur),
        masks={
            "glass": glass,
            "ink": ink,
            "blur": blur,
            "small_filled": pixels(0, 0, 1, 1),
        },
        scores={
            "glass": 1 - 2000 / 2400,
            "ink": 1 - 1400 / 2000,
            "blur": 1 - 700 / 1400,
            "pixels_to_use": 1.0,
        },
        frame=replace(plain.frame, size_th=SHAPE[::-1], size_l0=SIZE),
        unjudged={"blur": pixels(30, 10, 40, 20)},
    )


def test_keep_of_a_check_gives_back_what_no_other_check_removes(
    result: QcResult,
) -> None:
    edited = result.with_edits([edit("keep", "ink", 0, 0, 20, 30)])
    back = edited.mask_use & ~result.mask_use
    np.testing.assert_array_equal(back, pixels(0, 10, 10, 30))
    np.testing.assert_array_equal(edited.masks["ink"], pixels(0, 30, 20, 40))
    np.testing.assert_array_equal(edited.masks["blur"], result.masks["blur"])
    # two checks at one place come back by two corrections
    both = result.with_edits(
        [edit("keep", "ink", 0, 0, 20, 30), edit("keep", "blur", 5, 0, 15, 30)]
    )
    back = both.mask_use & ~result.mask_use
    np.testing.assert_array_equal(back, pixels(0, 10, 15, 30))


def test_remove_of_a_check_marks_and_removes(result: QcResult) -> None:
    edited = result.with_edits([edit("remove", "ink", 30, 40, 40, 60)])
    np.testing.assert_array_equal(
        edited.masks["ink"], result.masks["ink"] | pixels(30, 40, 40, 60)
    )
    np.testing.assert_array_equal(
        edited.mask_use, result.mask_use & ~pixels(30, 40, 40, 60)
    )


def test_keep_and_remove_alone_are_about_all_checks(result: QcResult) -> None:
    kept = result.with_edits([edit("keep", "", 0, 0, 40, 60)])
    assert kept.mask_use.all()
    assert not any(kept.masks[name].any() for name in ("glass", "ink", "blur"))
    gone = result.with_edits([edit("remove", "", 0, 0, 40, 60)])
    assert not gone.mask_use.any()
    for name, mask in result.masks.items():
        np.testing.assert_array_equal(gone.masks[name], mask)


@pytest.mark.parametrize("keep", ["", "ink"])
@pytest.mark.parametrize("remove", ["", "ink", "blur"])
@pytest.mark.parametrize("order", [1, -1])
def test_where_areas_overlap_remove_wins(
    result: QcResult, keep: str, remove: str, order: int
) -> None:
    edits = [edit("keep", keep, 0, 12, 10, 30), edit("remove", remove, 5, 20, 10, 35)]
    edited = result.with_edits(edits[::order])
    assert edited.mask_use[0:5, 12:30].all() and edited.mask_use[5:10, 12:20].all()
    assert not edited.mask_use[5:10, 20:35].any()


def test_a_check_that_the_guard_overruled_holds_nothing_back(
    result: QcResult,
) -> None:
    edits = [edit("keep", "ink", 10, 12, 20, 30)]
    assert not (result.with_edits(edits).mask_use & ~result.mask_use).any()
    overruled = replace(result, overruled=("blur",))
    back = overruled.with_edits(edits).mask_use & ~result.mask_use
    np.testing.assert_array_equal(back, pixels(10, 12, 20, 30))


def test_a_check_that_is_only_shown_holds_nothing_back_and_a_person_removes_by_it(
    result: QcResult,
) -> None:
    shown_checks = [
        {"kind": "tissue"},
        {"kind": "intensity", "name": "ink", "upper_gray": 0.1, "invert": True},
        {"kind": "folds", "name": "blur", "remove": False},
    ]
    mapping = {"name": "x", "work_mpp": 2.0, "work_from": "mpp", "check": shown_checks}
    shown = replace(result, pipeline=pipeline_from_mapping(mapping))
    assert shown.shown == {"blur"}
    back = shown.with_edits([edit("keep", "ink", 10, 12, 20, 30)])
    np.testing.assert_array_equal(
        back.mask_use & ~result.mask_use, pixels(10, 12, 20, 30)
    )
    gone = shown.with_edits([edit("remove", "blur", 32, 20, 40, 60)])
    np.testing.assert_array_equal(
        result.mask_use & ~gone.mask_use, pixels(32, 20, 40, 60)
    )


def test_the_mask_for_tiles_is_corrected_too(result: QcResult) -> None:
    kept = replace(result, mask_kept=result.mask_use | result.masks["blur"])
    edits = [edit("keep", "ink", 0, 12, 5, 30), edit("remove", "", 25, 20, 40, 60)]
    edited = kept.with_edits(edits)
    wanted = (kept.tissue.mask | pixels(0, 12, 5, 30)) & ~pixels(25, 20, 40, 60)
    np.testing.assert_array_equal(edited.tissue.mask, wanted)


def test_a_corrected_area_is_judged(result: QcResult) -> None:
    for name in ("", "blur"):
        edited = result.with_edits([edit("keep", name, 35, 0, 40, 60)])
        np.testing.assert_array_equal(edited.unjudged["blur"], pixels(30, 10, 35, 20))
        share = edited.scores["blur_unjudged_percent"]
        assert share == pytest.approx(50 / edited.tissue.mask.sum())
    other = result.with_edits([edit("keep", "ink", 35, 0, 40, 60)])
    np.testing.assert_array_equal(other.unjudged["blur"], result.unjudged["blur"])
    removed = result.with_edits([edit("remove", "blur", 35, 0, 40, 60)])
    np.testing.assert_array_equal(removed.unjudged["blur"], pixels(30, 10, 35, 20))


def test_tissue_that_comes_back_was_not_judged_by_the_later_checks(
    result: QcResult,
) -> None:
    back = [edit("keep", "ink", 0, 12, 10, 30)]
    edited = result.with_edits(back)
    wanted = pixels(30, 10, 40, 20) | pixels(0, 12, 10, 30)
    np.testing.assert_array_equal(edited.unjudged["blur"], wanted)
    # a correction that names the later check, or all checks, judges it
    for name in ("blur", ""):
        both = result.with_edits([*back, edit("keep", name, 0, 20, 10, 30)])
        wanted = pixels(30, 10, 40, 20) | pixels(0, 12, 10, 20)
        np.testing.assert_array_equal(both.unjudged["blur"], wanted)
    # an earlier check has seen what a later one has removed
    ink_open = replace(result, unjudged={"ink": pixels(35, 10, 40, 20)})
    edited = ink_open.with_edits([edit("keep", "blur", 20, 12, 30, 30)])
    np.testing.assert_array_equal(edited.unjudged["ink"], ink_open.unjudged["ink"])


def test_a_check_without_a_mask_that_could_not_judge_is_corrected(
    result: QcResult,
) -> None:
    masks = {name: mask for name, mask in result.masks.items() if name != "blur"}
    coarse = replace(result, masks=masks)
    edited = coarse.with_edits([edit("remove", "blur", 30, 10, 40, 20)])
    np.testing.assert_array_equal(edited.masks["blur"], pixels(30, 10, 40, 20))
    assert not edited.unjudged["blur"].any()


def own_shares(checked: QcResult, *, keep: Any = (), remove: Any = ()) -> list[float]:
    """Judge: shares of glass, ink and blur, pixel by pixel in the order of the checks."""
    left = np.ones(SHAPE, bool)
    shares = []
    for name in ("glass", "ink", "blur"):
        taken = checked.masks.get(name, np.zeros(SHAPE, bool)).copy()
        for check, *corners in keep:
            if check in ("", name):
                taken &= ~pixels(*corners)
        for check, *corners in remove:
            if check == name:
                taken |= pixels(*corners)
        shares.append((left & taken).sum() / left.sum() if left.any() else -100)
        left &= ~taken
    return shares


@pytest.mark.parametrize(
    ("keep", "remove"),
    [
        ((), ()),
        ([("ink", 0, 10, 20, 25)], ()),
        ([("ink", 0, 0, 20, 60), ("blur", 5, 0, 25, 50)], ()),
        # over tissue that an earlier check has taken, and over the glass
        ((), [("blur", 0, 0, 40, 60)]),
        ((), [("ink", 5, 0, 35, 60), ("blur", 0, 0, 40, 60)]),
        ([("", 0, 0, 40, 60)], [("ink", 0, 0, 40, 60)]),
        ([("glass", 0, 0, 40, 8)], [("ink", 30, 0, 40, 60)]),
        ((), [("glass", 0, 0, 40, 60)]),
    ],
)
def test_a_share_is_what_the_corrected_area_takes_of_what_earlier_checks_leave(
    result: QcResult, keep: Any, remove: Any
) -> None:
    edits = [edit("keep", *area) for area in keep]
    edits += [edit("remove", *area) for area in remove]
    edited = result.with_edits(edits)
    shares = [edited.row[name] for name in ("glass", "ink", "blur")]
    assert shares == pytest.approx(own_shares(result, keep=keep, remove=remove))
    assert all(share == -100 or 0 <= float(share) <= 1 for share in shares)


def test_a_check_that_found_nothing_or_did_not_run_has_a_share_after_a_correction(
    result: QcResult,
) -> None:
    nothing = {**result.masks, "ink": np.zeros(SHAPE, bool)}
    scores = {**result.scores, "ink": 0.0}
    found_nothing = replace(result, masks=nothing, scores=scores)
    edited = found_nothing.with_edits([edit("remove", "ink", 0, 10, 40, 35)])
    assert edited.row["ink"] == pytest.approx(0.5)
    # too coarse a picture: neither a mask nor a column
    del nothing["ink"], scores["ink"]
    coarse = replace(
        result, masks=nothing, scores=scores, unjudged={"ink": pixels(0, 10, 40, 60)}
    )
    assert "ink" not in coarse.with_edits([edit("keep", "blur", 0, 0, 40, 60)]).row
    edited = coarse.with_edits([edit("remove", "ink", 0, 10, 40, 35)])
    assert edited.row["ink"] == pytest.approx(0.5)


def test_shares_of_shown_and_overruled_checks_follow_too(result: QcResult) -> None:
    table = {"name": "x", "work_mpp": 2.0, "work_from": "mpp"}
    table |= {"check": [{"kind": "tissue"}, {"kind": "folds", "name": "ink"}]}
    shown = replace(
        result,
        pipeline=pipeline_from_mapping(table),
        masks={name: result.masks[name] for name in ("glass", "ink")},
        mask_use=~result.masks["glass"],
        scores={"glass": 1 - 2000 / 2400, "ink_removed_percent": 1 - 1400 / 2000},
    )
    edited = shown.with_edits([edit("remove", "ink", 20, 0, 40, 25)])
    assert edited.row["ink_removed_percent"] == pytest.approx(900 / 2000)
    # the guard lets ink remove columns 10 to 19 alone
    sure = pixels(0, 10, 20, 20)
    overruled = replace(
        result,
        overruled=("ink",),
        mask_use=~(result.masks["glass"] | result.masks["blur"] | sure),
        scores={**result.scores, "blur": 1 - 900 / 1900},
    )
    edited = overruled.with_edits([edit("keep", "blur", 20, 0, 30, 30)])
    assert edited.row["ink"] == result.scores["ink"]
    taken = result.masks["blur"] & ~pixels(20, 0, 30, 30) & ~result.masks["glass"]
    # rows 10 to 19 of the sure area are blurred as well, so nothing tells who removed them
    assert edited.row["blur"] == pytest.approx(taken.sum() / (2000 - 100))


# 600 px of ink, and 480 px by hand, of 2,000 px of tissue and 2,400 px in all
FORMS = {"relative2image": 920 / 2400, "absolute": 920.0}


@pytest.mark.parametrize("statistics", FORMS)
def test_the_other_forms_of_histoqc_count_what_is_left(
    result: QcResult, statistics: Any
) -> None:
    other = replace(result.pipeline, statistics=statistics)
    in_form = replace(result, pipeline=other)
    edited = in_form.with_edits([edit("remove", "ink", 20, 10, 40, 34)])
    assert edited.row["ink"] == pytest.approx(FORMS[statistics])


@pytest.mark.parametrize("preset", ["auto", "histoqc-light", "histoqc-default"])
def test_shares_that_no_correction_touches_are_those_of_the_checks_to_the_last_bit(
    preset: str, tmp_path: Path
) -> None:
    write_he_slide(tmp_path / "a.svs", (2400, 1700), seed=3)
    with open_slide(tmp_path / "a.svs") as slide:
        checked = run_qc(slide, preset)
    assert sum(mask.any() for mask in checked.masks.values()) >= 2
    # the last px of the picture is glass
    corner = shapely.box(2399, 1699, 2400, 1700)
    edited = checked.with_edits([QcEdit(action="remove", check="", area=corner)])
    unchanged = checked.row.keys() - {"pixels_to_use", "warnings"}
    assert {name: edited.row[name] for name in unchanged} == {
        name: checked.row[name] for name in unchanged
    }
    for check in checked.pipeline.checks:
        if check.name in checked.masks and not check.fills:
            assert check.share_column in checked.scores, check.name
    # and everything given back to each check leaves it no share
    whole = shapely.box(0, 0, 2400, 1700)
    edited = checked.with_edits([QcEdit(action="keep", check="", area=whole)])
    for check in checked.pipeline.checks:
        if check.name in checked.masks and not check.fills:
            assert edited.row[check.share_column] == 0, check.name


def test_columns_follow_the_correction(result: QcResult) -> None:
    edited = result.with_edits([edit("keep", "ink", 0, 10, 20, 25)])
    # half of the 30 columns of ink on tissue
    assert edited.row["ink"] == pytest.approx(300 / 2000)
    assert edited.row["glass"] == result.row["glass"]
    assert edited.row["pixels_to_use"] == edited.mask_use.sum()
    assert edited.row["edited_areas"] == 1
    assert "edited_areas" not in result.row
    corners = np.array([[0, 0], [40, 0], [40, 30]], dtype=np.int64)
    shares = tile_qc_columns(edited, corners, 24)["ink"]
    for corner, share in zip(corners, shares):
        tile = shapely.box(*corner, *(corner + 24))
        ink = box(0, 5, 20, 40).difference(box(0, 10, 20, 25))
        assert share == pytest.approx(tile.intersection(ink).area / tile.area, abs=1e-6)


def test_a_correction_without_effect_is_named(result: QcResult) -> None:
    edits = [
        edit("keep", "ink", 0, 12, 5, 30),
        edit("keep", "ink", 35, 0, 40, 60, file="a.geojson"),
        edit("keep", "blur", 0, 0, 5, 60),
    ]
    edited = result.with_edits(edits)
    assert len(edited.warnings) == len(result.warnings) + 2
    assert edited.warnings[-2:] == (
        "an area of class 'keep ink' in a.geojson changes nothing",
        "an area of class 'keep blur' in the corrections changes nothing",
    )


def test_a_check_that_holds_the_tissue_back_is_named(result: QcResult) -> None:
    both_removed = edit("keep", "ink", 12, 12, 18, 30, file="a.geojson")
    edited = result.with_edits([both_removed])
    assert edited.warnings[-1] == (
        "an area of class 'keep ink' in a.geojson gives no tissue back, because blur removes it "
        "too; the class 'keep' overrules all checks"
    )
    num_before = len(result.warnings)
    # with a part that comes back, or the other check corrected too, there is nothing to say
    assert (
        len(result.with_edits([edit("keep", "ink", 8, 12, 18, 30)]).warnings)
        == num_before
    )
    others = [both_removed, edit("keep", "blur", 10, 10, 20, 40)]
    assert len(result.with_edits(others).warnings) == num_before


def test_areas_to_keep_and_to_remove_that_overlap_are_named(result: QcResult) -> None:
    # rows 12 to 18 are removed by ink and by blur
    lost = edit("keep", "ink", 2, 12, 8, 30)
    held = edit("keep", "blur", 12, 12, 18, 30, file="a.geojson")
    apart = edit("remove", "blur", 35, 0, 40, 10)
    over = edit("remove", "ink", 0, 10, 25, 35)
    num_before = len(result.warnings)
    assert len(result.with_edits([lost, apart]).warnings) == num_before
    assert result.with_edits([lost, over]).warnings[num_before:] == (
        "areas of the classes 'keep ink', 'remove ink' overlap; there 'remove' wins",
    )
    everything = edit("remove", "", 0, 0, 40, 60)
    warnings = result.with_edits([lost, held, everything]).warnings
    assert warnings[num_before:] == (
        "areas of the classes 'keep blur', 'keep ink', 'remove' overlap; there 'remove' wins",
        "all tissue was removed by hand",
    )


def test_a_correction_is_said_to_change_nothing_exactly_where_it_changes_no_mask(
    result: QcResult,
) -> None:
    rng = np.random.default_rng(0)
    classes = [("keep", ""), ("remove", "")]
    for check in ("glass", "ink", "blur"):
        classes += [("keep", check), ("remove", check)]
    num_silent = 0
    for number in range(160):
        action, check = classes[number % len(classes)]
        low = rng.uniform(-20, SIZE, 2)
        high = low + rng.uniform(4, 60, 2)
        area = shapely.box(*low, *high)
        one = QcEdit(action=action, check=check, area=area)  # type: ignore[arg-type]
        edited = result.with_edits([one])
        is_same = np.array_equal(edited.mask_use, result.mask_use)
        for before, after in (
            (result.masks, edited.masks),
            (result.unjudged, edited.unjudged),
        ):
            is_same &= all(np.array_equal(before[name], after[name]) for name in before)
        says_so = any("changes nothing" in text for text in edited.warnings)
        assert says_so is is_same, (action, check, area.bounds)
        num_silent += not is_same
    assert 40 < num_silent < 150


def test_alike_corrections_without_effect_share_a_sentence(result: QcResult) -> None:
    no_ink = [edit("keep", "ink", 0, 12 + n, 5, 13 + n) for n in range(3)]
    far = [edit("keep", "ink", 35, n, 40, n + 2, file="b.geojson") for n in (0, 9)]
    held = [edit("keep", "ink", 12, 12 + n, 18, 14 + n) for n in (0, 5)]
    edited = result.with_edits([*far, *no_ink, *held])
    assert edited.warnings[len(result.warnings) :] == (
        "2 areas of class 'keep ink' in b.geojson change nothing",
        "2 areas of class 'keep ink' in the corrections give no tissue back, because blur removes "
        "it too; the class 'keep' overrules all checks",
    )


def test_a_check_that_was_left_out_is_named_as_such(result: QcResult) -> None:
    masks = {name: mask for name, mask in result.masks.items() if name != "blur"}
    without = replace(result, masks=masks, unjudged={})
    for one in (edit("keep", "blur", 0, 0, 5, 5), edit("remove", "blur", 0, 0, 5, 5)):
        with pytest.raises(InvalidInputError, match="'blur' was left out; draw 'keep'"):
            without.with_edits([edit("keep", "ink", 0, 12, 5, 30), one])
    with pytest.raises(InvalidInputError, match="must name a check that marks areas"):
        without.with_edits([edit("keep", "blurr", 0, 0, 5, 5)])


def test_other_corrections_replace_the_earlier_ones(result: QcResult) -> None:
    first = result.with_edits([edit("remove", "", 0, 0, 40, 60)])
    second = first.with_edits([edit("keep", "ink", 0, 12, 5, 30)])
    alone = result.with_edits([edit("keep", "ink", 0, 12, 5, 30)])
    np.testing.assert_array_equal(second.mask_use, alone.mask_use)
    assert first.with_edits([]) is result
    with pytest.raises(InvalidInputError, match="got 'small_filled'"):
        result.with_edits([edit("keep", "small_filled", 0, 0, 5, 5)])


def test_it_is_stored_beside_the_answers_of_the_checks(
    result: QcResult, tmp_path: Path
) -> None:
    kept = replace(result, mask_kept=result.mask_use | result.masks["blur"])
    edits = [
        edit("keep", "ink", 0, 12, 5, 30, author="Ä", time="t", file="f", sha256="5"),
        edit("remove", "", 30, 20, 40, 60),
    ]
    edited = kept.with_edits(edits)
    write_qc(edited, tmp_path)
    back = load_qc(tmp_path)
    assert back.edits == edited.edits
    assert back.row == edited.row and back.warnings == edited.warnings
    np.testing.assert_array_equal(back.mask_use, edited.mask_use)
    np.testing.assert_array_equal(back.tissue.mask, edited.tissue.mask)
    np.testing.assert_array_equal(read_tissue(tmp_path / "qc.zip"), edited.tissue.mask)
    assert back.checked is not None
    np.testing.assert_array_equal(back.checked.mask_use, result.mask_use)
    stored = read_qc(tmp_path)
    np.testing.assert_array_equal(stored.mask("ink"), result.masks["ink"])
    np.testing.assert_array_equal(stored.mask(stored.tissue_name), edited.mask_use)
    labels = [layer.label for layer in overlay_layers(back)]
    assert labels[-2:] == ["kept by hand, 1 area", "removed by hand, 1 area"]
    first = (tmp_path / "qc.zip").read_bytes()
    write_qc(edited, tmp_path)
    assert (tmp_path / "qc.zip").read_bytes() == first


# reading


def write(path: Path, *features: tuple[Any, Any], **more: Any) -> Path:
    path.write_text(
        json.dumps(
            [
                {
                    "type": "Feature",
                    "geometry": json.loads(shapely.to_geojson(area)),
                    "properties": {"classification": kind, **more},
                }
                for kind, area in features
            ]
        )
    )
    return path


@pytest.mark.parametrize(
    "kind",
    [
        {"name": "keep pen_blue"},
        {"name": "KEEP  Pen Blue"},
        {"name": "Keep: pen_blue"},
        {"names": ["keep", "pen blue"]},
        "keep pen_blue",
    ],
)
def test_a_class_is_read_in_each_form_that_people_write(
    tmp_path: Path, kind: Any
) -> None:
    path = write(tmp_path / "a.geojson", (kind, box(0, 0, 5, 5)))
    (read,) = read_edits(path, ["pen_blue", "folds"])
    assert (read.action, read.check) == ("keep", "pen_blue")


def test_two_checks_that_differ_in_capitals_need_the_exact_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.geojson", ({"name": "remove Ink"}, box(0, 0, 5, 5)))
    (read,) = read_edits(path, ["ink", "Ink"])
    assert read.check == "Ink"
    with pytest.raises(InvalidInputError, match="'Ink' as feature 0"):
        read_edits(path, ["INK", "ink"])


def test_areas_with_holes_and_of_several_pieces_are_one_correction(
    tmp_path: Path,
) -> None:
    ring = box(0, 0, 20, 20).difference(box(5, 5, 10, 10))
    pieces = shapely.MultiPolygon([ring, box(30, 30, 35, 35)])
    path = write(tmp_path / "a.geojson", ({"name": "keep"}, pieces))
    (read,) = read_edits(path, [])
    assert read.area.symmetric_difference(pieces).area == 0


def test_detections_are_no_corrections_and_lines_are_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.geojson",
        ({"name": "Tumor"}, box(0, 0, 5, 5)),
        objectType="detection",
    )
    assert read_edits(path, ["ink"]) == ()
    write(path, ({"name": "keep"}, shapely.box(99, 99, 150, 150)))
    assert len(read_edits(path, ["ink"], (100, 200))) == 1
    with pytest.raises(InvalidInputError, match="must lie on the slide of 98 x 200 px"):
        read_edits(path, ["ink"], (98, 200))
    line = shapely.LineString([(0, 0), (9, 9)])
    with pytest.raises(InvalidInputError, match="got a line as feature 0 'keep'"):
        read_edits(write(path, ({"name": "keep"}, line)), ["ink"])


def test_an_object_without_a_geometry_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.geojson"
    feature = {"type": "Feature", "geometry": None, "properties": {}}
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    with pytest.raises(
        InvalidInputError, match="got an object without geometry as feature 0 of"
    ):
        read_edits(path, ["ink"])


@pytest.mark.parametrize("preset", ["auto", "histoqc-default"])
def test_the_checks_that_may_be_corrected_are_those_that_mark_areas(
    preset: str, tmp_path: Path
) -> None:
    pipeline = load_pipeline(preset)
    write_he_slide(tmp_path / "a.svs", (1200, 900), seed=3)
    with open_slide(tmp_path / "a.svs") as slide:
        checked = run_qc(slide, pipeline)
    absent = {check.name for check in pipeline.checks if getattr(check, "absent", ())}
    assert set(pipeline.editable_checks) - absent == set(checked.editable_checks)
    with pytest.raises(InvalidInputError) as error:
        read_edits(
            write(tmp_path / "a.geojson", ("Tumor", box(0, 0, 9, 9))),
            pipeline.editable_checks,
        )
    assert "dark" in str(error.value) or "focus" in str(error.value)
    for name in ("histogram", "unsure", "tissue_pieces", "stains", "small_filled"):
        assert name not in str(error.value)


def test_the_key_is_of_classes_and_areas_alone(tmp_path: Path) -> None:
    one = edit("keep", "ink", 0, 0, 5, 5, author="A")
    two = edit("remove", "", 0, 0, 5, 5)
    assert edits_key([]) == ""
    assert edits_key([one, two]) == edits_key([two, replace(one, author="B")])
    assert len({edits_key([one]), edits_key([two]), edits_key([one, two])}) == 3
    assert edits_key([one]) != edits_key([replace(one, area=box(0, 0, 5, 6))])


def test_who_and_when_are_those_of_the_file_or_of_the_annotation(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.geojson", ({"name": "keep"}, box(0, 0, 5, 5)))
    os.utime(path, (86400, 86400))
    (read,) = read_edits(path, [])
    assert (read.author, read.time) == (path.owner(), "1970-01-02T00:00:00+00:00")
    write(path, ({"name": "keep"}, box(0, 0, 5, 5)), metadata={"author": "Dr. A"})
    (read,) = read_edits(path, [])
    assert read.author == "Dr. A"
    # a stored correction that was changed since is another person's
    measured = outline_measurements(box(0, 0, 5, 5))
    more = {"metadata": {"author": "Dr. A", "time": "t"}, "measurements": measured}
    write(
        path,
        ({"name": "keep"}, box(0, 0, 5, 5)),
        ({"name": "keep"}, box(0, 0, 9, 9)),
        **more,
    )
    same, changed = read_edits(path, [])
    assert (same.author, same.time) == ("Dr. A", "t")
    assert changed.author == path.owner() and changed.time != "t"


def test_measurements_of_older_qupath_mark_an_outline_too(tmp_path: Path) -> None:
    measured = outline_measurements(box(0, 0, 5, 5))
    old = [{"name": name, "value": value} for name, value in measured.items()]
    path = write(
        tmp_path / "a.geojson", ({"name": "ink"}, box(0, 0, 5, 5)), measurements=old
    )
    assert read_edits(path, ["ink"]) == ()
    write(path, ({"name": "ink"}, box(0, 0, 5, 6)), measurements=old)
    with pytest.raises(InvalidInputError, match="must stay as it was"):
        read_edits(path, ["ink"])


SQUARE = shapely.box(2000, 3000, 3000, 4000)


@pytest.mark.parametrize(
    ("area", "is_same"),
    [
        (SQUARE, True),
        (shapely.affinity.translate(SQUARE, 0.4, -0.4), True),
        (shapely.affinity.translate(SQUARE, 0.6, 0), False),
        (shapely.affinity.translate(SQUARE, 0, -0.6), False),
        # a border of 4,000 px may move by 0.02 px: 80 px²
        (SQUARE.difference(shapely.box(2990, 3990, 3000, 3998)), True),
        (SQUARE.difference(shapely.box(2990, 3990, 3000, 3999)), False),
        (SQUARE.union(shapely.box(3000, 3990, 3010, 3999)), False),
    ],
)
def test_an_outline_is_unchanged_up_to_what_rounding_moves(
    tmp_path: Path, area: Any, is_same: bool
) -> None:
    measurements = outline_measurements(SQUARE)
    path = write(
        tmp_path / "a.geojson", ({"name": "ink"}, area), measurements=measurements
    )
    if is_same:
        assert read_edits(path, ["ink"]) == ()
    else:
        with pytest.raises(InvalidInputError, match="must stay as it was"):
            read_edits(path, ["ink"])
    # a part of the measurements is not enough
    del measurements["outline top px"]
    write(path, ({"name": "ink"}, SQUARE), measurements=measurements)
    with pytest.raises(InvalidInputError, match="must stay as it was"):
        read_edits(path, ["ink"])


# files of slides


def entry(name: str, **more: str) -> SlideEntry:
    return SlideEntry(slide_id=name, slide_path=f"/slides/{name}.svs", more=more)


def test_a_slide_has_its_file_by_its_name_or_none(tmp_path: Path) -> None:
    for name in ("a.geojson", "b.svs.geojson", "c.json", "d.GeoJSON"):
        (tmp_path / name).write_text("[]")
    folder = str(tmp_path)
    files = {name: edits_file(folder, entry(name)) for name in "abcde"}
    names = {name: path and path.name for name, path in files.items()}
    assert names == {
        "a": "a.geojson", "b": "b.svs.geojson", "c": "c.json", "d": "d.GeoJSON", "e": None,
    }  # fmt: skip
    (tmp_path / "a.svs.json").write_text("[]")
    with pytest.raises(
        InvalidInputError, match=r"got 'a.geojson', 'a.svs.json' for 'a'"
    ):
        edits_file(folder, entry("a"))
    (tmp_path / "f.png").write_text("")
    with pytest.raises(
        InvalidInputError, match=r"must be GeoJSON \(.geojson or .json\)"
    ):
        edits_file(folder, entry("f"))
    (tmp_path / "Slide_7.geojson").write_text("[]")
    with pytest.raises(InvalidInputError, match=r"did you mean 'Slide_7'"):
        edits_file(folder, entry("slide-7"))


def test_a_column_gives_the_path_of_each_slide(tmp_path: Path) -> None:
    path = tmp_path / "x.geojson"
    path.write_text("[]")
    assert edits_file("mine", entry("a", mine=str(path))) == path
    assert edits_file("mine", entry("a")) is None
    for word in ("NA", "nan", "n/a", "-"):
        assert edits_file("mine", entry("a", mine=word)) is None
    with pytest.raises(
        InvalidInputError,
        match=r"got no file '.*y.geojson' for 'a'; .*, or leave the cell empty",
    ):
        edits_file("mine", entry("a", mine=str(tmp_path / "y.geojson")))


def test_a_file_belongs_to_one_slide(tmp_path: Path) -> None:
    """Two scans with one name in two folders, two pictures of one file, two rows of a table."""
    (tmp_path / "a.svs.geojson").write_text("[]")
    (tmp_path / "b.geojson").write_text("[]")
    scans = [
        SlideEntry(slide_id=slide_id, slide_path=slide_path)
        for slide_id, slide_path in (
            ("a-1", "/x/a.svs"),
            ("a-2", "/y/a.svs"),
            ("b", "/b"),
        )
    ]
    messages: list[str] = []
    with pytest.raises(
        ConfigError,
        match=r"file of its own .* got '.*a.svs.geojson' for 'a-1' and 'a-2'",
    ):
        check_edits_source(str(tmp_path), scans, messages.append)
    assert check_edits_source(str(tmp_path), scans[1:], messages.append) == []
    one, two = (str(tmp_path / name) for name in ("a.svs.geojson", "b.geojson"))
    cohort = [entry("a", mine=one), entry("b", mine=two), entry("c")]
    assert check_edits_source("mine", cohort, messages.append) == ["c"]
    assert not messages
    with pytest.raises(ConfigError, match=r"for 'a' and 'd'.* into the column"):
        check_edits_source("mine", [*cohort, entry("d", mine=one)], messages.append)


def test_a_folder_is_not_the_column_of_its_name_and_a_compressed_file_is_refused(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("a.geojson", "b.json"):
        (folder / name).write_text("[]")
    messages: list[str] = []
    slides = [entry("a", mine="x.geojson"), entry("b", mine=""), entry("c")]
    assert check_edits_source(str(folder), slides, messages.append) == ["c"]
    (text,) = messages
    assert f"the folder {str(folder)!r} is read, and not the column 'mine'" in text
    packed = ("c.geojson.gz", "c.svs.geojson.zip", "c.JSON.gz", "c.zip", "c.svs.ZIP")
    for name in packed:
        path = folder / name
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("export/c.GeoJSON", "[]")
        with pytest.raises(ConfigError, match=f"must be GeoJSON .*{name}'; unpack it"):
            check_edits_source(str(folder), slides, messages.append)
        check_edits_source(str(folder), slides[:2], messages.append)
        path.unlink()


def test_a_packed_file_is_refused_only_where_it_may_be_a_slides_corrections(
    tmp_path: Path,
) -> None:
    messages: list[str] = []
    slides = [entry("a"), entry("b"), entry("c")]
    (tmp_path / "a.geojson").write_text("[]")
    # these two belong to a slide that has a file, and to no slide
    for name in ("a.zip", "notes.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("a.geojson", "[]")
    for name in ("a.geojson.gz", "a.json.zip", "b.svs.gz", "b.gz", "c.zip"):
        (tmp_path / name).write_bytes(b"no archive")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("raw/Data0001.dat", "pixels")
        archive.writestr("raw/settings.json", "{}")
    (tmp_path / "c.svs.zip").mkdir()
    without_file = check_edits_source(str(tmp_path), slides, messages.append)
    assert without_file == ["b", "c"]
    assert not messages


@pytest.mark.parametrize("content", [b"", b"\xff\xfe[\x00]\x00"])
def test_a_file_that_is_no_text_of_json_has_a_remedy(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a.geojson"
    path.write_bytes(content)
    with pytest.raises(
        InvalidInputError, match=r"a\.geojson.*without corrections the file is {"
    ):
        read_edits(path, ["ink"])


def test_files_that_fit_no_slide_are_named_before_the_run(tmp_path: Path) -> None:
    messages: list[str] = []

    def check(*names: str) -> list[str]:
        messages.clear()
        check_edits_source(
            str(tmp_path), [entry(name) for name in names], messages.append
        )
        return messages

    for number in range(4):
        (tmp_path / f"x{number}.geojson").write_text("[]")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(
        ConfigError, match=r"got none for a, b, c in .*SLIDE_ID.geojson"
    ):
        check("a", "b", "c", "d")
    assert check("x0", "x1", "x2", "x3") == []
    (text,) = check("x0")
    assert "qc_edits: x1.geojson, x2.geojson, x3.geojson in " in text
    (tmp_path / "y.json").write_text("[]")
    (text,) = check("x0")
    assert "x3.geojson and 1 more in" in text
    check_edits_source("none", [entry("a")], messages.append)
    # the slide with two files will fail, and is not counted as one without
    (tmp_path / "x0.svs.geojson").write_text("[]")
    check("x0")
    with pytest.raises(ConfigError, match="must be a file, a folder, or a column"):
        check_edits_source("column", [entry("a")], messages.append)
    check_edits_source("column", [entry("a", column="y.json")], messages.append)
