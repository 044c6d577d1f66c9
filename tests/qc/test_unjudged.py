"""The third answer of a check: tissue that it could not judge."""

import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.qc.slides import ArraySlide

from thinsection.errors import ConfigError, InvalidInputError, StoreError
from thinsection.qc import Pipeline, QcResult, load_pipeline, run_qc, tile_qc_columns
from thinsection.qc.checks.check import EMPTY_SCORE, Outcome, QcCheck, QcView
from thinsection.qc.pipeline import pipeline_from_mapping
from thinsection.report.qc_files import load_qc, write_qc
from thinsection.report.stored import QC_FILE, read_qc

HEIGHT, WIDTH = 40, 64


class Part(QcCheck, kind="part"):
    """Removes columns of pixels, and judges no row above a limit."""

    name: str = "part"
    remove_from: int = WIDTH
    unjudged_rows: int = 0
    fails: bool = False

    def __call__(self, view: QcView) -> Outcome:
        xp = view.ns.xp
        found = xp.zeros(view.mask_use.shape, dtype=bool)
        found[:, self.remove_from :] = True
        unjudged = xp.zeros(found.shape, dtype=bool)
        unjudged[: self.unjudged_rows] = True
        outcome = view.without(found, self.name)
        area = unjudged[:-1] if self.fails else unjudged
        return replace(outcome, unjudged_area=area)


class Judging(QcCheck, kind="judging"):
    """Judges every pixel, and removes none."""

    name: str = "judging"

    def __call__(self, view: QcView) -> Outcome:
        return view.without(~view.mask_use, self.name)


class OnFinePictures(Judging, kind="fine", coarsest_mpp=1.0):
    """Judges no picture that is coarser than 1 µm/px."""

    name: str = "fine"


def checked(*checks: QcCheck, slide_mpp: float = 8.0) -> QcResult:
    slide = ArraySlide(
        [np.full((HEIGHT, WIDTH, 3), 120, np.uint8)], slide_mpp=(slide_mpp, slide_mpp)
    )
    pipeline = Pipeline(name="t", work_mpp=slide_mpp, work_from="mpp", checks=checks)
    return run_qc(slide, pipeline)


def rewrite(path: Path, name: str, content: bytes | None) -> None:
    """Replaces a file of a zip; None leaves it out."""
    with zipfile.ZipFile(path) as file:
        members = {one: file.read(one) for one in file.namelist()}
    del members[name]
    if content is not None:
        members[name] = content
    with zipfile.ZipFile(path, "w") as file:
        for one, data in members.items():
            file.writestr(one, data)


def counts(masks: Mapping[str, object]) -> dict[str, int]:
    return {name: int(np.sum(np.asarray(mask))) for name, mask in masks.items()}


def test_two_checks_that_abstain_have_a_mask_and_a_column_each() -> None:
    result = checked(
        Part(name="a", unjudged_rows=10),
        Part(name="b", remove_from=48, unjudged_rows=4),
        Judging(),
    )
    # a removed pixel is not tissue that waits for a judgement, whichever check removed it
    assert counts(result.unjudged) == {"a": 10 * 48, "b": 4 * 48}
    tissue_px = HEIGHT * 48
    assert result.scores["a_unjudged_percent"] == 480 / tissue_px
    assert result.scores["b_unjudged_percent"] == 192 / tissue_px
    # the areas of both overlap, and a pixel counts once
    assert result.scores["unjudged_percent"] == 480 / tissue_px
    assert "judging_unjudged_percent" not in result.scores
    assert int(result.mask_use.sum()) == tissue_px


def test_the_three_answers_of_a_check_do_not_overlap() -> None:
    result = checked(Part(name="a", remove_from=60, unjudged_rows=7))
    removed, unjudged = result.masks["a"], result.unjudged["a"]
    assert not (removed & unjudged).any()
    kept = result.mask_use & ~unjudged
    assert (removed ^ unjudged ^ kept).all()


def test_a_picture_that_is_too_coarse_is_not_judged_at_all() -> None:
    result = checked(Part(remove_from=50), OnFinePictures())
    np.testing.assert_array_equal(result.unjudged["fine"], result.mask_use)
    assert result.scores["fine_unjudged_percent"] == 1.0
    assert any("fine: not judged at 8 µm/px" in text for text in result.warnings)
    fine = checked(Part(remove_from=50), OnFinePictures(), slide_mpp=0.5)
    assert "fine" not in fine.unjudged


def test_a_pipeline_whose_checks_judge_all_has_no_column_about_it() -> None:
    result = checked(Judging())
    assert result.unjudged == {}
    assert not [name for name in result.scores if "unjudged" in name]
    assert set(tile_qc_columns(result, np.array([[0, 0]]), 16)) == {"judging"}


def test_a_slide_without_tissue_has_the_sign_for_no_value() -> None:
    result = checked(Part(name="a", remove_from=0, unjudged_rows=3))
    assert result.scores["a_unjudged_percent"] == EMPTY_SCORE
    assert result.scores["unjudged_percent"] == EMPTY_SCORE


def test_a_tile_has_the_share_that_at_least_one_check_did_not_judge() -> None:
    result = checked(
        Part(name="a", unjudged_rows=8), Part(name="b", unjudged_rows=12, remove_from=8)
    )
    coords_l0 = np.array([[0, 0], [0, 8], [48, 0], [0, 24]])
    columns = tile_qc_columns(result, coords_l0, 16)
    # columns 8 and further are removed, and count as judged
    np.testing.assert_allclose(columns["unjudged"], [12 / 32, 4 / 32, 0, 0])
    np.testing.assert_allclose(columns["b"], [0.5, 0.5, 1, 0.5])
    other = tile_qc_columns(result, np.array([[0, 0]]), 24)
    np.testing.assert_allclose(other["unjudged"], [12 * 8 / 24**2])


def test_the_tissue_that_tiles_are_laid_on_counts_if_a_check_was_overruled() -> None:
    settings = {"work_mpp": 8.0, "work_from": "mpp"}
    rgb = np.full((HEIGHT, WIDTH, 3), 235, np.uint8)
    rgb[5:35, 5:60] = (180, 90, 150)
    glass = pipeline_from_mapping(
        {
            "name": "g",
            **settings,
            "check": [{"kind": "intensity", "upper_gray": 0.8, "name": "glass"}],
        }
    ).checks[0]
    assert glass.removes_glass
    checks = (glass, Part(name="a", remove_from=10, unjudged_rows=20))
    slide = ArraySlide([rgb], slide_mpp=(8.0, 8.0))
    strict = run_qc(slide, Pipeline(name="t", work_from="mpp", checks=checks))
    loose = run_qc(
        slide, Pipeline(name="t", work_from="mpp", checks=checks, guard=False)
    )
    assert loose.mask_kept is not None
    for result in (strict, loose):
        found = result.masks["a"]
        expected = result.tissue.mask & ~found
        expected[20:] = False
        np.testing.assert_array_equal(result.unjudged["a"], expected)


def test_what_was_not_judged_is_stored_and_read_back(tmp_path: Path) -> None:
    fresh = checked(
        Part(name="a", unjudged_rows=10, remove_from=50),
        Part(name="b"),
        OnFinePictures(),
    )
    # the pipeline of a stored result is of checks that pipeline files can name
    fresh = replace(fresh, pipeline=load_pipeline("auto"))
    write_qc(fresh, tmp_path)
    stored = load_qc(tmp_path)
    assert list(stored.unjudged) == ["a", "b", "fine"]
    for name, area in fresh.unjudged.items():
        np.testing.assert_array_equal(stored.unjudged[name], area)
    assert stored.masks.keys() == fresh.masks.keys()
    assert stored.row == fresh.row
    np.testing.assert_array_equal(stored.unjudged_tissue, fresh.unjudged_tissue)
    with zipfile.ZipFile(tmp_path / QC_FILE) as file:
        names = set(file.namelist())
    assert {"a_unjudged.tif", "fine_unjudged.tif"} <= names
    assert "b_unjudged.tif" not in names  # it is empty
    coords_l0 = np.array([[3, 1], [20, 7]])
    for tile_px in (9, 16):
        one = tile_qc_columns(fresh, coords_l0, tile_px)["unjudged"]
        other = tile_qc_columns(stored, coords_l0, tile_px)["unjudged"]
        np.testing.assert_array_equal(one, other)


def test_a_folder_from_before_there_was_a_third_answer_is_read_as_before(
    tmp_path: Path,
) -> None:
    fresh = replace(checked(Judging()), pipeline=load_pipeline("auto"))
    write_qc(fresh, tmp_path / "new")
    document = dict(read_qc(tmp_path / "new").document)
    write_qc(fresh, tmp_path / "old")
    del document["unjudged"]
    rewrite(tmp_path / "old" / QC_FILE, "qc.json", json.dumps(document).encode())
    assert "unjudged" not in read_qc(tmp_path / "old").document
    old, new = load_qc(tmp_path / "old"), load_qc(tmp_path / "new")
    assert old.unjudged == new.unjudged == {}
    assert old.row == new.row
    np.testing.assert_array_equal(old.mask_use, new.mask_use)


def test_a_mask_that_is_gone_from_the_file_is_refused(tmp_path: Path) -> None:
    fresh = checked(Part(name="a", unjudged_rows=10))
    write_qc(replace(fresh, pipeline=load_pipeline("auto")), tmp_path)
    rewrite(tmp_path / QC_FILE, "a_unjudged.tif", None)
    with pytest.raises(StoreError, match="run quality control again"):
        load_qc(tmp_path)


def test_an_area_of_another_shape_and_a_check_with_its_name_are_refused() -> None:
    rule = r"unjudged_area of Part must be bool of shape \(40, 64\)"
    with pytest.raises(InvalidInputError, match=rule):
        checked(Part(unjudged_rows=1, fails=True))
    for name in ("unjudged", "fine_unjudged"):
        table = {"kind": "intensity", "name": name}
        with pytest.raises(ConfigError, match=f"check names must not .*{name}"):
            pipeline_from_mapping({"name": "p", "check": [table]})


def test_histoqc_presets_judge_everything() -> None:
    rgb = np.random.default_rng(2).integers(60, 250, (400, 300, 3), dtype=np.uint8)
    result = run_qc(ArraySlide([rgb]), load_pipeline("histoqc-light"))
    assert result.unjudged == {}
    assert math.isfinite(float(result.scores["pixels_to_use"]))
