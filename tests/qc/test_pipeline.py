"""Pipelines: presets, TOML, and HistoQC's own config files."""

from pathlib import Path
from typing import Any

import pytest

from thinsection.errors import ConfigError
from thinsection.qc import load_pipeline, preset_names
from thinsection.qc.histoqc_config import pipeline_from_ini
from thinsection.qc.pipeline import dump_pipeline

# the steps and values of a HistoQC config, in its own syntax
INI = """
[pipeline]
steps= BasicModule.getBasicStats
    ClassificationModule.byExampleWithFeatures:pen_markings
    LightDarkModule.getIntensityThresholdPercent:tissue
#    LightDarkModule.saveEqualisedImage
    BubbleRegionByRegion.detectSmoothness
    BlurDetectionModule.identifyBlurryRegions
    BasicModule.finalProcessingSpur
    HistogramModule.compareToTemplates
    BrightContrastModule.getBrightnessGray
    BrightContrastModule.getBrightnessByChannelinColorSpace:YUV
    SaveModule.saveFinalMask
[BaseImage.BaseImage]
image_work_size = 2.5x
mask_statistics = absolute
confirm_base_mag: False
[ClassificationModule.byExampleWithFeatures:pen_markings]
name: pens
examples: ./pen/1k_version/pen_green.png:./pen/1k_version/pen_green_mask.png
area_threshold: 120
features:  frangi
           laplace
           rgb
frangi_beta2: 15.0
lbp_radius: 3
[LightDarkModule.getIntensityThresholdPercent:tissue]
name: bright
upper_threshold: .88
lower_var: 9
[BlurDetectionModule.identifyBlurryRegions]
image_work_size = 5x
blur_radius: 30
[BrightContrastModule.getBrightnessByChannelinColorSpace:YUV]
limit_to_mask: True
to_color_space: YUV
[HistogramModule.compareToTemplates]
templates= ./templates/nowhere1.png
[SaveModule.saveFinalMask]
overlay: True
"""


def ini(tmp_path: Path, text: str = INI) -> Path:
    path = tmp_path / "config.ini"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_survives_being_written_and_read(name: str, tmp_path: Path) -> None:
    preset = load_pipeline(name)
    path = tmp_path / "p.toml"
    path.write_text(dump_pipeline(preset))
    assert load_pipeline(path) == preset
    assert preset.name == name


def test_the_presets_are_histoqcs_and_our_own() -> None:
    histoqcs = ("default", "light", "ihc", "clinical", "first", "v2.1")
    assert set(preset_names()) == {"auto", *(f"histoqc-{name}" for name in histoqcs)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'name="x"\nwork_mp=8.0',
            r"unknown qc key 'work_mp'; did you mean 'work_mpp'\?",
        ),
        ('name="x"', r"must have a name and at least one \[\[check\]\]"),
        (
            'name="x"\n[[check]]\nkind="flatt"',
            r"qc check must be a known name, got 'flatt'; did you mean 'flat'\?",
        ),
        (
            'name="x"\n[[check]]\nkind="flat"\nkernal="9 px"',
            r"unknown config key 'flat.kernal'; did you mean 'flat.kernel'\?",
        ),
        (
            'name="x"\n[[check]]\nkind="flat"\nkernel="9"',
            r"flat.kernel must be a length such as",
        ),
        (
            'name="x"\n[[check]]\nkind="flat"\nmin_area="9 um"',
            r"flat.min_area must be an area",
        ),
        (
            'name="x"\n[[check]]\nkind="flat"\n[[check]]\nkind="flat"',
            r"must be unique, got 'flat_",
        ),
        (
            'name="x"\n[[check]]\nkind="flat"\nname="a/b"',
            r"flat.name must be a file name",
        ),
        (
            'name="x"\n[[check]]\nkind="flat"\nname="overlay"',
            r"must not be mask_use, mask_kept, .*overlay, thum",
        ),
        ('name="x"\nwork_mpp=0.0\n[[check]]\nkind="flat"', r"work_mpp must be > 0"),
    ],
)
def test_a_mistake_in_a_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_pipeline(path)


def test_an_unknown_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"got 'histoqc-ligth'; did you mean 'histoqc-light'\?"
    ):
        load_pipeline("histoqc-ligth")


@pytest.mark.parametrize("old", ["default", "light", "ihc", "clinical", "v2.1"])
def test_an_old_name_of_a_preset_is_refused_with_the_new_one(old: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"got '{old}'; HistoQC's preset is now called 'histoqc-{old}'",
    ):
        load_pipeline(old)


def test_histoqcs_config_is_carried_over_value_by_value(tmp_path: Path) -> None:
    pipeline, notes = pipeline_from_ini(ini(tmp_path))
    assert (pipeline.work_mpp, pipeline.statistics) == (4.0, "absolute")
    kinds = [check.kind for check in pipeline.checks]
    assert kinds == [
        *(
            "by_example",
            "intensity",
            "flat",
            "blurry",
            "spurs",
            "histogram",
            "brightness",
        ),
        "brightness",
    ]
    checks: tuple[Any, ...] = pipeline.checks
    pen, bright, flat, blurry, spurs, _, gray, yuv = checks
    assert (pen.name, pen.model, pen.min_area) == ("pens", "pen", "120 px")
    assert (bright.upper_gray, bright.lower_std, bright.invert) == (0.88, 9.0, False)
    assert flat.min_area == "100 px"  # HistoQC's default where its section says nothing
    assert (blurry.image_mpp, blurry.sigma, blurry.max_edge) == (2.0, 30.0, 0.1)
    assert spurs.radius == "25 px"
    assert (gray.space, yuv.space) == ("gray", "YUV")
    assert "the built-in model 'pen'" in notes[0]
    assert "1 of 1 template pictures are missing" in notes[1]


def test_own_examples_beside_the_config_are_taken(tmp_path: Path) -> None:
    for name in ("pen_green.png", "pen_green_mask.png"):
        path = tmp_path / "pen" / "1k_version" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    pipeline, notes = pipeline_from_ini(ini(tmp_path))
    pen: Any = pipeline.checks[0]
    assert pen.model == "own"
    assert pen.features == ("frangi", "laplace", "rgb")
    assert pen.example_masks[0].endswith("pen_green_mask.png")
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "blur_radius",
            "blur_radios",
            r"unknown key 'blur_radios' in \[Blur.*'blur_radius'",
        ),
        (
            "frangi_beta2: 15.0",
            "frangi_beta2: 9",
            r"frangi_beta2 must be 15 to be converted",
        ),
        (
            "BasicModule.finalProcessingSpur",
            "BasicModule.nope",
            r"unknown step 'BasicModule.nope'",
        ),
        ("confirm_base_mag", "enable_bounding_box", None),
        (
            "confirm_base_mag: False",
            "enable_bounding_box: True",
            "enable_bounding_box must be false",
        ),
        (
            "upper_threshold: .88",
            "upper_threshold: high",
            r"upper_threshold must have a value that HistoQC",
        ),
        (
            "           rgb",
            "           gabor",
            r"features must be from rgb, .*got 'gabor'",
        ),
        (
            "./pen/1k_version/pen_green.png:",
            "./mine.png:",
            r"got './mine.png' for 'pens'",
        ),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(
    old: str, new: str, message: str | None, tmp_path: Path
) -> None:
    path = ini(tmp_path, INI.replace(old, new))
    if message is None:
        assert pipeline_from_ini(path)[0].checks
        return
    with pytest.raises(ConfigError, match=message):
        pipeline_from_ini(path)
