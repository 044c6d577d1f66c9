"""Whole pipelines on slides that are unlike what the checks were made for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.qc.slides import ArraySlide, reduced

from thinsection.qc import Pipeline, load_pipeline, preset_names, qc_key, run_qc
from thinsection.qc.checks.check import EMPTY_SCORE
from thinsection.qc.checks.examples import tissue_picture
from thinsection.qc.pipeline import check_from_mapping

RNG = np.random.default_rng(9)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def tissue(edge_px: int = 900, stain: int = 0) -> npt.NDArray[np.uint8]:
    from thinsection.qc.checks.examples import _STAINS

    light = tissue_picture(np.random.default_rng(3), edge_px, _STAINS[stain])
    return np.asarray((light * 255).astype(np.uint8)[:, : edge_px - 140])


def plain(value: int, shape: tuple[int, int] = (900, 700)) -> npt.NDArray[np.uint8]:
    return np.full((*shape, 3), value, dtype=np.uint8)


ODD_SLIDES = {
    "white": ([plain(243)], {}, "of one colour"),
    "black": ([plain(0)], {}, "of one colour"),
    "fluorescence": ([(tissue() * 0.1).astype(np.uint8)], {}, "background is dark"),
    "ihc": ([tissue(stain=3)], {}, "much of the tissue is brown"),
    "no mpp": ([tissue()], {"slide_mpp": None}, "has no mpp: 0.5 µm/px is taken from its 20x"),
    "no power": ([tissue()], {"objective_power": None}, "has no objective power"),
    "neither": (
        [tissue()],
        {"slide_mpp": None, "objective_power": None},
        "neither mpp nor objective power: 0.5",
    ),
    "not square": ([tissue()], {"slide_mpp": (0.5, 0.6)}, "px are not square"),
    "tiny": ([plain(200, (9, 7))], {}, "only 9 px long"),
    "one px": ([plain(200, (1, 1))], {}, "only 1 px long"),
}


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("odd", ODD_SLIDES)
def test_an_odd_slide_is_a_row_with_a_warning_under_every_preset(
    odd: str, preset: str, cache: Path
) -> None:
    levels, facts, warning = ODD_SLIDES[odd]
    slide = ArraySlide(levels, **facts)  # type: ignore[arg-type]
    result = run_qc(slide, load_pipeline(preset), cache_dir=cache)
    row = result.row
    assert 0 <= float(row["pixels_to_use"]) <= result.mask_use.size
    if odd == "no power" and load_pipeline(preset).work_from == "mpp":
        return  # then it is not needed
    assert warning in str(row["warnings"])


def test_every_score_is_finite_and_an_emptied_mask_names_the_check(cache: Path) -> None:
    result = run_qc(ArraySlide([plain(243)]), load_pipeline("default"), cache_dir=cache)
    numbers = [v for v in result.scores.values() if not isinstance(v, str)]
    assert np.isfinite(numbers).all()
    assert result.scores["rms_contrast"] == EMPTY_SCORE
    assert result.scores["pixels_to_use"] == 0
    assert any(w.startswith("bright left no tissue") for w in result.warnings)


def pipeline(*checks: dict[str, Any], **settings: Any) -> Pipeline:
    return Pipeline(name="t", checks=tuple(map(check_from_mapping, checks)), **settings)


def test_a_by_example_check_holds_in_the_end_even_where_a_later_one_fills_it(
    cache: Path,
) -> None:
    rgb = tissue()
    rgb[400:480, 300:420] = (30, 40, 140)
    pen = {"kind": "by_example", "name": "pen_markings", "model": "pen", "min_area": "50 px"}
    chosen = pipeline(pen, {"kind": "fill_holes", "min_area": "100000 px"}, work_mpp=2.0)
    result = run_qc(ArraySlide([rgb]), chosen, cache_dir=cache)
    assert result.masks["pen_markings"][105:115, 80:100].all()
    assert not (result.mask_use & result.masks["pen_markings"]).any()


def test_the_work_size_follows_objective_power_or_mpp_as_asked() -> None:
    slide = ArraySlide([tissue()], slide_mpp=(0.25, 0.25), objective_power=20.0)
    bright = {"kind": "intensity", "upper_gray": 0.9}
    sizes = [
        run_qc(slide, pipeline(bright, work_from=rule)).frame.size_th
        for rule in ("objective_power", "mpp")
    ]
    assert sizes == [(47, 56), (24, 28)]


def test_a_given_mpp_wins_over_what_the_file_says() -> None:
    slide = ArraySlide([tissue()], slide_mpp=None, objective_power=40.0)
    result = run_qc(slide, pipeline({"kind": "intensity"}), slide_mpp=0.5)
    assert result.frame.size_th == (47, 56)
    assert result.mpp_th == pytest.approx(0.5 * 900 / 56)
    assert not any("mpp" in warning for warning in result.warnings)


def test_the_coarsest_level_that_will_do_is_read_and_only_that(cache: Path) -> None:
    rgb = tissue()
    slide = ArraySlide([rgb, reduced(rgb, 4), reduced(rgb, 16)])
    run_qc(slide, load_pipeline("default"), cache_dir=cache)
    expected = sum(level.size[0] * level.size[1] for level in slide.levels[1:])
    assert slide.num_read_px == expected  # 2.5x from level 1, 1.25x from level 2


def test_the_key_changes_with_pipeline_file_and_mpp(tmp_path: Path) -> None:
    path = tmp_path / "a.svs"
    path.write_bytes(b"1")
    default = load_pipeline("default")
    keys = {
        qc_key(default, str(path)),
        qc_key(load_pipeline("light"), str(path)),
        qc_key(default, str(path), slide_mpp=0.25),
        qc_key(replace(default, work_mpp=4.0), str(path)),
    }
    path.write_bytes(b"22")
    keys.add(qc_key(default, str(path)))
    assert len(keys) == 5
    assert qc_key(default, str(path)) == qc_key(load_pipeline("default"), str(path))
