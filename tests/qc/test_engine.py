"""Whole pipelines on slides that are unlike what the checks were made for."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from tests.qc.slides import ArraySlide, drawn_tissue, reduced

import thinsection
from thinsection.qc import (
    Pipeline,
    load_pipeline,
    pipeline_identity,
    preset_names,
    run_qc,
)
from thinsection.qc.checks.check import EMPTY_SCORE, Outcome, QcCheck, QcView
from thinsection.qc.pipeline import check_from_mapping, dump_pipeline


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def plain(value: int, shape: tuple[int, int] = (900, 700)) -> npt.NDArray[np.uint8]:
    return np.full((*shape, 3), value, dtype=np.uint8)


# how its pixels are made, what is stated of it, and the warning
ODD_SLIDES: dict[str, tuple[Callable[[], npt.NDArray[np.uint8]], dict[str, Any], str]]
ODD_SLIDES = {
    "white": (lambda: plain(243), {}, "of one colour"),
    "black": (lambda: plain(0), {}, "of one colour"),
    "fluorescence": (
        lambda: (drawn_tissue() * 0.1).astype(np.uint8),
        {},
        "background is dark",
    ),
    "ihc": (lambda: drawn_tissue(stain=3), {}, "much of the tissue is brown"),
    "no mpp": (
        drawn_tissue,
        {"slide_mpp": None},
        "states no resolution, so 0.5 µm/px is assumed from its 20x",
    ),
    "no power": (drawn_tissue, {"objective_power": None}, "states no objective power"),
    "neither": (
        drawn_tissue,
        {"slide_mpp": None, "objective_power": None},
        "neither resolution nor objective power, so",
    ),
    "not square": (drawn_tissue, {"slide_mpp": (0.5, 0.6)}, "pixels are not square"),
    "tiny": (lambda: plain(200, (9, 7)), {}, "only 9 pixels long"),
    "one px": (lambda: plain(200, (1, 1)), {}, "only 1 pixel long"),
}


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("odd", ODD_SLIDES)
def test_an_odd_slide_is_a_row_with_a_warning_under_every_preset(
    odd: str, preset: str, cache: Path
) -> None:
    draw, facts, warning = ODD_SLIDES[odd]
    slide = ArraySlide([draw()], **facts)
    result = run_qc(slide, load_pipeline(preset), cache_dir=cache)
    row = result.row
    assert 0 <= float(row["pixels_to_use"]) <= result.mask_use.size
    if odd == "no power" and load_pipeline(preset).work_from == "mpp":
        return  # then it is not needed
    assert warning in str(row["warnings"])


def test_every_score_is_finite_and_an_emptied_mask_names_the_check(cache: Path) -> None:
    result = run_qc(
        ArraySlide([plain(243)]), load_pipeline("histoqc-default"), cache_dir=cache
    )
    numbers = [v for v in result.scores.values() if not isinstance(v, str)]
    assert np.isfinite(numbers).all()
    assert result.scores["rms_contrast"] == EMPTY_SCORE
    assert result.scores["pixels_to_use"] == 0
    assert any(w.startswith("bright left no tissue") for w in result.warnings)


def pipeline(*checks: dict[str, Any], **settings: Any) -> Pipeline:
    return Pipeline(name="t", checks=tuple(map(check_from_mapping, checks)), **settings)


def test_a_by_example_check_holds_in_the_end_even_where_a_later_one_fills_it(
    cache: Path, tmp_path: Path
) -> None:
    rgb = drawn_tissue().copy()
    ink = np.zeros(rgb.shape[:2], dtype=bool)
    ink[400:480, 300:420] = True
    rgb[ink] = (30, 40, 140)
    Image.fromarray(rgb[::4, ::4]).save(tmp_path / "ink.png")
    Image.fromarray(ink[::4, ::4]).save(tmp_path / "ink_mask.png")
    pen = {
        "kind": "by_example",
        "name": "pen_markings",
        "example_images": [str(tmp_path / "ink.png")],
        "example_masks": [str(tmp_path / "ink_mask.png")],
        "min_area": "50 px",
    }
    chosen = pipeline(
        pen, {"kind": "fill_holes", "min_area": "100000 px"}, work_mpp=2.0
    )
    result = run_qc(ArraySlide([rgb]), chosen, cache_dir=cache)
    assert result.masks["pen_markings"][105:115, 80:100].all()
    assert not (result.mask_use & result.masks["pen_markings"]).any()


def test_the_work_size_follows_objective_power_or_mpp_as_asked() -> None:
    slide = ArraySlide([drawn_tissue()], slide_mpp=(0.25, 0.25), objective_power=20.0)
    bright = {"kind": "intensity", "upper_gray": 0.9}
    sizes = [
        run_qc(slide, pipeline(bright, work_from=rule)).frame.size_th
        for rule in ("objective_power", "mpp")
    ]
    assert sizes == [(47, 56), (24, 28)]


def test_a_given_mpp_wins_over_what_the_file_says() -> None:
    slide = ArraySlide([drawn_tissue()], slide_mpp=None, objective_power=40.0)
    result = run_qc(slide, pipeline({"kind": "intensity"}), slide_mpp=0.5)
    assert result.frame.size_th == (47, 56)
    assert result.mpp_th == pytest.approx(0.5 * 900 / 56)
    assert not any("mpp" in warning for warning in result.warnings)


def test_the_coarsest_level_that_will_do_is_read_and_only_that(cache: Path) -> None:
    rgb = drawn_tissue()
    slide = ArraySlide([rgb, reduced(rgb, 4), reduced(rgb, 16)])
    run_qc(slide, load_pipeline("histoqc-default"), cache_dir=cache)
    expected = sum(level.size[0] * level.size[1] for level in slide.levels[1:])
    assert slide.num_read_px == expected  # 2.5x from level 1, 1.25x from level 2


def test_what_a_pipeline_is_changes_with_its_settings_and_the_pictures_it_reads(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "template.png"
    picture.write_bytes(b"1")
    default = load_pipeline("histoqc-default")
    templates = pipeline({"kind": "histogram", "templates": [str(picture)]})
    found = [
        pipeline_identity(one)
        for one in (
            default,
            load_pipeline("histoqc-light"),
            replace(default, work_mpp=4.0),
            templates,
        )
    ]
    picture.write_bytes(b"22")
    found.append(pipeline_identity(templates))
    assert all(a != b for a, b in itertools.combinations(found, 2))
    assert pipeline_identity(default) == pipeline_identity(
        load_pipeline("histoqc-default")
    )


def test_a_preset_a_file_and_a_pipeline_are_the_same_argument(
    cache: Path, tmp_path: Path
) -> None:
    slide, light = ArraySlide([drawn_tissue()]), load_pipeline("histoqc-light")
    (tmp_path / "my.toml").write_text(dump_pipeline(light))
    rows = [
        thinsection.run_qc(slide, chosen, cache_dir=cache).row
        for chosen in ("histoqc-light", tmp_path / "my.toml", light)
    ]
    assert rows[0] == rows[1] == rows[2]


def test_a_result_is_shown_in_a_line_and_in_a_notebook_with_its_overlay(
    cache: Path,
) -> None:
    result = run_qc(
        ArraySlide([drawn_tissue()]), pipeline({"kind": "intensity", "upper_gray": 0.8})
    )
    share = f"{result.mask_use.mean():.1%}"
    size = "47 x 56 px, 8.036 µm/px"
    counts = "1 masks, 2 scores, 0 warnings"
    assert repr(result) == f"QcResult(pipeline 't', {size}, {share} to use, {counts})"
    page = replace(result, warnings=("<b>odd</b>",))._repr_html_()
    assert "data:image/jpeg;base64," in page
    assert f"to use: {share} of the image" in page
    assert "&lt;b&gt;odd" in page
    assert len(page) < 60_000


def test_the_brightest_cluster_and_the_local_minimum_write_a_column_each() -> None:
    both = pipeline({"kind": "local_minimum"}, {"kind": "brightest_cluster"})
    result = run_qc(ArraySlide([drawn_tissue()]), both)
    assert {"brightestPixels", "brightest_cluster"} <= set(result.scores)
    assert not any("of an earlier check" in warning for warning in result.warnings)


def test_a_column_that_two_checks_write_is_a_warning() -> None:
    twice = pipeline({"kind": "fragments"}, {"kind": "fragments", "name": "again"})
    result = run_qc(ArraySlide([drawn_tissue()]), twice)
    assert "again writes the column areaThresh of an earlier check" in result.warnings


GREEDY_FRAGMENTS, COUNT = (
    {"kind": "fragments", "min_area": "1 mm2"},
    {"kind": "count_pieces"},
)


def test_a_check_that_would_take_all_tissue_warns_and_the_tissue_is_kept() -> None:
    guarded = pipeline({"kind": "tissue"}, GREEDY_FRAGMENTS, COUNT, work_mpp=4.0)
    result = run_qc(ArraySlide([drawn_tissue()]), guarded)
    assert result.mask_use.mean() > 0.2
    (warning,) = (w for w in result.warnings if w.startswith("areathresh"))
    assert "would remove all remaining tissue and was ignored" in warning
    assert result.scores["tissue_pieces_num_regions"] > 0
    assert result.masks[
        "areathresh"
    ].any()  # what it would have taken is there to look at


class DirtEverywhere(QcCheck, kind="dirt_everywhere"):
    """Finds dirt in every pixel."""

    name: str = "dirt_everywhere"

    def __call__(self, view: QcView) -> Outcome:
        return view.without(view.ns.xp.ones_like(view.mask_use), "dirt_everywhere")


@pytest.mark.parametrize("guard", [True, False])
def test_an_overruled_check_does_not_enforce_its_area_on_the_tiles(guard: bool) -> None:
    found_tissue = pipeline({"kind": "tissue"}, work_mpp=4.0, guard=guard)
    chosen = replace(found_tissue, checks=(*found_tissue.checks, DirtEverywhere()))
    result = run_qc(ArraySlide([drawn_tissue()]), chosen)
    assert any("was ignored" in warning for warning in result.warnings)
    assert result.tissue.mask.mean() > 0.2
    # without the guard the mask of the table is HistoQC's, which nothing overrules
    assert result.mask_use.any() is np.bool_(guard)


def test_strict_gives_each_check_its_way() -> None:
    guarded = pipeline({"kind": "tissue"}, GREEDY_FRAGMENTS, COUNT, work_mpp=4.0)
    result = run_qc(ArraySlide([drawn_tissue()]), guarded, strict=True)
    assert not result.mask_use.any()
    assert not result.tissue.mask.any()
    assert (
        "areathresh removed all remaining tissue: look at its outline in the viewer"
        in result.warnings
    )


def test_histoqcs_presets_measure_as_it_does_while_tiles_keep_the_tissue() -> None:
    theirs = pipeline(
        {"kind": "otsu"}, GREEDY_FRAGMENTS, COUNT, work_mpp=4.0, guard=False
    )
    result = run_qc(ArraySlide([drawn_tissue()]), theirs)
    assert not result.mask_use.any()
    assert result.scores["tissue_pieces_num_regions"] == 0
    assert result.tissue.mask.any()
    assert not load_pipeline("histoqc-default").guard


def test_a_check_has_other_settings_for_the_stain_that_was_measured() -> None:
    checks = ({"kind": "tissue"}, {"kind": "stains"})
    plain, varied = (
        pipeline(*checks, work_mpp=4.0, variants=v)
        for v in ({}, {"IHC": {"stains": {"stain": "hdx_from_rgb"}}})
    )
    for stain, same in ((0, True), (3, False)):
        slide = ArraySlide([drawn_tissue(stain=stain)])
        one, other = (run_qc(slide, chosen).row for chosen in (plain, varied))
        assert one["stain"] == ("H&E" if same else "IHC")
        assert (one["deconv_c1_mean"] == other["deconv_c1_mean"]) is same
