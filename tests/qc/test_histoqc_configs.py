"""HistoQC's own config files, of present main, of 2.1 and of the fork: read, or refused by key."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import REAL_SLIDES
from tests.qc.slides import ArraySlide

from thinsection.errors import ConfigError
from thinsection.qc import Pipeline, load_pipeline, run_qc
from thinsection.qc.histoqc_config import pipeline_from_ini

# glass, and noisy tissue of 900 px and of 100 px, which is not flat
PIXELS = np.full((60, 80, 3), 240, np.uint8)
_noise = np.random.default_rng(0).integers(60, 200, (30, 30, 1), dtype=np.uint8)
PIXELS[20:50, 10:40], PIXELS[5:15, 60:70] = _noise, _noise[:10, :10]
CONFIGS = REAL_SLIDES.parent / "histoqc"
PRESETS = {  # HistoQC's file -> our preset
    "config": "histoqc-default",
    "config_clinical": "histoqc-clinical",
    "config_first": "histoqc-first",
    "config_ihc": "histoqc-ihc",
    "config_light": "histoqc-light",
    "config_v2.1": "histoqc-v2.1",
}
# written for this test in HistoQC's syntax; it has what its main got in 2025, and the fork's key
EXCERPT = """
[pipeline]
steps= BasicModule.getBasicStats
    LightDarkModule.getIntensityThresholdPercent:tissue
    BubbleRegionByRegion.detectSmoothness
    SaveModule.saveMask:first
    SaveModule.saveMask2Geojson:geo_first
    BrightContrastModule.getBrightnessByChannelinColorSpace:RGB:background
    BasicModule.finalProcessingArea
    HistogramModule.compareToTemplates
    SaveModule.saveMacro
    BasicModule.countTissuePieces
    BasicModule.finalComputations
[BaseImage.BaseImage]
handles = openslide,wsidicom
mask_statistics = relative2mask
[LightDarkModule.getIntensityThresholdPercent:tissue]
name: nonwhite
upper_threshold: .9
[BasicModule.finalProcessingArea]
area_threshold: 300
mask_statistics = absolute
[SaveModule.saveMask:first]
suffix: first
[SaveModule.saveMask2Geojson:geo_first]
suffix: geo_first
mask_name: img_mask_flat
[SaveModule.saveMacro]
dim: 500
[HistogramModule.compareToTemplates]
templates= ./templates/nowhere1.png
[BasicModule.finalComputations]
mask_statistics = relative2image
"""


def config(stem: str) -> Path:
    path = CONFIGS / f"{stem}.ini"
    if not path.is_file():
        pytest.skip(f"no HistoQC config at {path}; set THINSECTION_TEST_SLIDES")
    return path


def converted(tmp_path: Path, old: str = "", new: str = "") -> Pipeline:
    path = tmp_path / "config.ini"
    path.write_text(EXCERPT.replace(old, new) if old else EXCERPT)
    return pipeline_from_ini(path)


@pytest.mark.parametrize("stem", PRESETS)
def test_a_preset_is_the_converted_config(
    stem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as where HistoQC, whose pictures would be taken, is not installed
    monkeypatch.setattr("thinsection.qc.histoqc_pictures.find_spec", lambda name: None)
    pipeline = pipeline_from_ini(config(stem))
    assert replace(pipeline, name=PRESETS[stem]) == load_pipeline(PRESETS[stem])


@pytest.mark.parametrize("stem", PRESETS)
def test_the_forks_config_is_read_as_it_is(stem: str, tmp_path: Path) -> None:
    path = tmp_path / f"{stem}.ini"
    base = "[BaseImage.BaseImage]\n"
    path.write_text(
        config(stem).read_text("utf-8").replace(base, f"{base}handles = openslide\n")
    )
    assert pipeline_from_ini(path) == pipeline_from_ini(config(stem))


def test_flat_areas_without_a_section_have_histoqcs_own_least_area() -> None:
    checks: tuple[Any, ...] = load_pipeline("histoqc-light").checks
    (flat,) = (check for check in checks if check.kind == "flat")
    assert flat.min_area == "100 px"


def test_what_main_and_the_fork_added_is_carried_over(tmp_path: Path) -> None:
    pipeline = converted(tmp_path)
    assert pipeline.pixels_to_use == "relative2image"
    checks: dict[str, Any] = {check.name: check for check in pipeline.checks}
    assert list(checks) == [
        *("nonwhite", "flat_areas", "first", "geo_first", "brightness_RGB_background"),
        *("areathresh", "templates", "macro", "tissue_pieces"),
    ]
    assert (checks["areathresh"].statistics, checks["nonwhite"].statistics) == (
        "absolute",
        None,
    )
    assert (checks["geo_first"].of, checks["geo_first"].geojson) == ("flat_areas", True)
    assert checks["templates"].absent == ("templates/nowhere1.png",)


def test_shares_are_written_as_each_step_says_it(tmp_path: Path) -> None:
    pipeline = replace(converted(tmp_path), work_mpp=0.5)
    result = run_qc(ArraySlide([PIXELS]), pipeline)
    areathresh, left = result.masks["areathresh"], result.mask_use
    assert result.scores["areaThresh"] == left.sum() == 900
    assert result.scores["pixels_to_use"] == pytest.approx(left.mean())
    taken = result.masks["nonwhite"].mean()
    assert result.scores["nonwhite"] == pytest.approx(taken)
    assert areathresh.sum() == 100
    assert result.scores["nowhere1_MSE_hist"] == "NA"
    assert (result.tables["first"] > 0).sum() == 1000
    assert (result.tables["geo_first"] > 0).sum() == result.masks["flat_areas"].sum()
    assert "the slide has no macro picture" in result.warnings


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "handles = openslide",
            "base_mag = 20x\nhandles = openslide",
            "base_mag must be removed",
        ),
        (
            "img_mask_flat",
            "img_mask_pens",
            "mask_name must have a value that HistoQC accepts.*one of img_mask_use",
        ),
        ("= absolute", "= relative", "fragments.statistics must be .*got 'relative'"),
        (
            "BasicModule.countTissuePieces",
            "TileExtractionModule.extract",
            "must be removed: it c",
        ),
        (
            "BasicModule.countTissuePieces",
            "ClassificationModule.pixelWise:a",
            "table of colours",
        ),
        (
            "BasicModule.countTissuePieces",
            "AnnotationModule.saveAnnotationMask",
            "masks by annotations",
        ),
    ],
)
def test_what_cannot_be_carried_over_is_refused_with_its_meaning(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        converted(tmp_path, old, new)
