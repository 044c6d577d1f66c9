"""Pipelines: presets, TOML, and HistoQC's own config files."""

from pathlib import Path
from typing import Any

import pytest

from thinsection.errors import ConfigError
from thinsection.qc import load_pipeline, preset_names
from thinsection.qc.histoqc_config import pipeline_from_ini
from thinsection.qc.histoqc_pictures import notes_on_absent
from thinsection.qc.pipeline import dump_pipeline

PEN = "pen/1k_version/pen_green.png"
PEN_MASK = "pen/1k_version/pen_green_mask.png"

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
    pipeline = pipeline_from_ini(ini(tmp_path))
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
    assert (pen.name, pen.min_area, pen.samples_per_example) == ("pens", "120 px", 0)
    # HistoQC's own examples are not there
    assert pen.absent == pen.files == (PEN, PEN_MASK)
    assert (bright.upper_gray, bright.lower_std, bright.invert) == (0.88, 9.0, False)
    assert flat.min_area == "100 px"  # HistoQC's default where its section says nothing
    assert (blurry.image_mpp, blurry.sigma, blurry.max_edge) == (2.0, 30.0, 0.1)
    assert spurs.radius == "25 px"
    assert (gray.space, yuv.space) == ("gray", "YUV")
    first, second = notes_on_absent(pipeline.checks)
    assert first.startswith("pens: HistoQC's example pictures are missing, so these")
    assert second.startswith("templates: 1 of HistoQC's template pictures are missing")


def write_pictures(folder: Path) -> None:
    for name in (PEN, PEN_MASK, "templates/nowhere1.png"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


@pytest.mark.parametrize("place", ["config", "data", "given", "current", "installed"])
def test_histoqcs_pictures_are_taken_from_each_place(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").mkdir()
    folder = tmp_path / place
    write_pictures(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder if place == "current" else tmp_path / "elsewhere")
    if place == "installed":
        name = "thinsection.qc.histoqc_config.installed_folders"
        monkeypatch.setattr(name, lambda: [folder])
    pipeline = pipeline_from_ini(
        ini(tmp_path / "config"), folder if place == "given" else None
    )
    checks: dict[str, Any] = {check.name: check for check in pipeline.checks}
    pen = checks["pens"]
    assert pen.features == ("frangi", "laplace", "rgb")
    assert (pen.example_images, pen.example_masks, pen.absent) == (
        (str(folder / PEN),),
        (str(folder / PEN_MASK),),
        (),
    )
    assert checks["templates"].templates == (str(folder / "templates/nowhere1.png"),)
    assert checks["templates"].absent == ()
    assert notes_on_absent(pipeline.checks) == []


def test_a_check_that_lacks_one_of_its_pictures_is_left_out(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    (tmp_path / PEN_MASK).unlink()
    checks: tuple[Any, ...] = pipeline_from_ini(ini(tmp_path)).checks
    assert checks[0].absent == (PEN_MASK,)
    assert checks[0].files == (PEN, PEN_MASK)


def test_the_samples_of_histoqcs_config_are_carried_over(tmp_path: Path) -> None:
    for text, expected in (("1000", 1000.0), (".5", 0.5), ("-1", 0.0)):
        key = f"area_threshold: 120\nnsamples_per_example: {text}"
        path = ini(tmp_path, INI.replace("area_threshold: 120", key))
        pen: Any = pipeline_from_ini(path).checks[0]
        assert pen.samples_per_example == expected


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
            r"got 'mine.png' for 'pens'",
        ),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(
    old: str, new: str, message: str | None, tmp_path: Path
) -> None:
    path = ini(tmp_path, INI.replace(old, new))
    if message is None:
        assert pipeline_from_ini(path).checks
        return
    with pytest.raises(ConfigError, match=message):
        pipeline_from_ini(path)
