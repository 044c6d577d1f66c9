"""Classes of a segmenter as checks: areas, guard by kind, refusals, and pipeline files."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.qc.slides import ArraySlide, drawn_tissue

from thinsection.errors import ConfigError, InvalidInputError
from thinsection.qc import (
    Pipeline,
    QcResult,
    load_pipeline,
    pipeline_identity,
    preset_names,
    run_qc,
)
from thinsection.qc.pipeline import dump_pipeline
from thinsection.report.verdict import load_rules, verdict
from thinsection.types import MaskFrame

TABLE = """
name = "net"
work_mpp = 4.0
work_from = "mpp"
[segmenter]
name = "net.toml"
weights = "net.onnx"
[segmenter.classes]
crease = "folds"
wrinkle = "folds"
blur = "focus"
"""
TISSUE = '[[check]]\nkind = "tissue"\n'
WIDTH, HEIGHT = 760, 900  # of the slide, px of 0.5 µm; the work image has 95 x 112 px


@dataclass(frozen=True)
class Given:
    """What somebody's network found: label 1 is a crease, 2 a wrinkle, 3 blur."""

    labels: npt.NDArray[np.uint8]
    frame: MaskFrame
    classes: tuple[str, ...] = ("crease", "wrinkle", "blur")


def given(labels: npt.NDArray[np.uint8]) -> Given:
    """Labels of the whole slide; their px may be of any size."""
    height, width = labels.shape
    size_l0 = (WIDTH, HEIGHT)
    return Given(labels, MaskFrame(size_th=(width, height), size_l0=size_l0))


def pipeline(folder: Path, more: str = TISSUE) -> Pipeline:
    path = folder / "net.toml"
    path.write_text(TABLE + more)
    return load_pipeline(path)


def checked(folder: Path, found: Given, *, strict: bool = False) -> QcResult:
    return run_qc(
        ArraySlide([drawn_tissue()]),
        pipeline(folder),
        segmentation=found,
        strict=strict,
    )


def test_the_area_of_a_check_is_that_of_its_classes(tmp_path: Path) -> None:
    labels = np.random.default_rng(1).integers(0, 4, (112, 95)).astype(np.uint8)
    labels[:, :70] = 0
    result = checked(tmp_path, given(labels))
    assert result.mask_use.shape == labels.shape
    np.testing.assert_array_equal(result.masks["folds"], np.isin(labels, (1, 2)))
    np.testing.assert_array_equal(result.masks["focus"], labels == 3)
    # the check `tissue` has the name glass
    tissue_px = ~result.masks["glass"]
    np.testing.assert_array_equal(result.mask_use, tissue_px & (labels == 0))
    share = np.isin(labels, (1, 2))[tissue_px].mean()
    assert result.scores["folds_removed_percent"] == pytest.approx(share)


def test_labels_of_another_resolution_are_taken_at_the_centres(tmp_path: Path) -> None:
    labels = np.zeros((900, 760), dtype=np.uint8)
    labels[100:301, 500:703] = 1
    fine = checked(tmp_path, given(labels)).masks["folds"]
    y = ((np.arange(112) + 0.5) * 900 / 112).astype(int)
    x = ((np.arange(95) + 0.5) * 760 / 95).astype(int)
    np.testing.assert_array_equal(fine, labels[np.ix_(y, x)] == 1)
    coarse = checked(tmp_path, given(np.array([[1, 0], [0, 0]], dtype=np.uint8)))
    assert coarse.masks["folds"][:56, :47].all()
    assert coarse.masks["folds"].sum() == pytest.approx(56 * 47.5, abs=56)


@pytest.mark.parametrize(
    ("label", "is_followed"), [(1, False), (3, True)], ids=["folds", "focus"]
)
def test_the_guard_follows_most_of_the_tissue_for_sure_kinds_alone(
    tmp_path: Path, label: int, is_followed: bool
) -> None:
    labels = np.full((112, 95), label, dtype=np.uint8)
    labels[:20] = 0
    result = checked(tmp_path, given(labels))
    name = "focus" if is_followed else "folds"
    assert result.mask_use[20:].any() is np.bool_(not is_followed)
    assert result.mask_use[:20].any()
    warning = "removed 8" if is_followed else "was ignored"
    assert any(text.startswith(name) and warning in text for text in result.warnings)
    assert not checked(tmp_path, given(labels), strict=True).mask_use[20:].any()
    row = {**result.row, "status": "done"}
    # no ready rule rests on folds; what was ignored is told by the warning
    expected = "exclude" if is_followed else "good"
    assert verdict(row, load_rules(None))[0] == expected


def test_a_class_check_may_have_a_place_and_settings(tmp_path: Path) -> None:
    more = (
        '[[check]]\nkind = "class"\nname = "folds"\nsure = true\nmin_area = "400 um2"\n'
    )
    checks = pipeline(tmp_path, TISSUE + '[[check]]\nkind = "spurs"\n' + more).checks
    assert [check.name for check in checks] == [
        "glass",
        "focus",
        "spur",
        "folds",
    ]
    labels = np.zeros((112, 95), dtype=np.uint8)
    labels[20:24, 30:36] = 1  # 384 µm²
    labels[60:65, 30:36] = 1  # 480 µm²
    result = run_qc(
        ArraySlide([drawn_tissue()]),
        pipeline(tmp_path, TISSUE + more),
        segmentation=given(labels),
    )
    assert result.masks["folds"].sum() == 30


def test_the_file_survives_being_written_and_its_paths_do_not_decide(
    tmp_path: Path,
) -> None:
    own = pipeline(tmp_path)
    assert own.segmenter is not None
    assert own.segmenter.name == str(tmp_path / "net.toml")
    assert own.segmenter.weights == str(tmp_path / "net.onnx")
    written = tmp_path / "written.toml"
    written.write_text(dump_pipeline(own))
    assert replace(load_pipeline(written), segmenter=own.segmenter) == own
    (tmp_path / "other").mkdir()
    elsewhere = pipeline(tmp_path / "other")
    assert pipeline_identity(elsewhere) == pipeline_identity(own)
    table = TABLE.replace('blur = "focus"', 'blur = "blurry"') + TISSUE
    written.write_text(table)
    assert pipeline_identity(load_pipeline(written)) != pipeline_identity(own)


@pytest.mark.parametrize("name", preset_names())
def test_presets_take_no_classes(name: str) -> None:
    preset = load_pipeline(name)
    assert "segmenter" not in preset.as_mapping()
    with pytest.raises(ConfigError, match="segmentation must be left out"):
        run_qc(
            ArraySlide([drawn_tissue()]),
            preset,
            segmentation=given(np.zeros((2, 2), np.uint8)),
        )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            TISSUE,
            TISSUE + '[[check]]\nkind = "folds"\n',
            r"got 'folds' of kind 'folds'; remove that \[\[check\]\]",
        ),
        (
            TISSUE,
            TISSUE + '[[check]]\nkind = "class"\nname = "fold"\n',
            r"must be named in \[segmenter.classes\], got 'fold'; did you mean 'folds'",
        ),
        ("weights =", "wieghts =", r"'segmenter.wieghts'; did you mean"),
        ('name = "net.toml"', "", r"segmenter.name must be set"),
        ('crease = "folds"', "crease = 3", r"segmenter.classes.crease must be str"),
        ('crease = "folds"', 'crease = "a/b"', r"class.name must be a file name"),
        ("[segmenter.classes]", "[segmenter.labels]", "'segmenter.labels'"),
    ],
)
def test_a_mistake_in_the_table_is_named(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = TABLE + TISSUE
    assert old in text
    path = tmp_path / "net.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_pipeline(path)


def test_a_table_without_classes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.toml"
    path.write_text(TABLE.partition("crease")[0] + TISSUE)
    with pytest.raises(ConfigError, match="classes must name a class, got none"):
        load_pipeline(path)


def test_missing_foreign_and_unknown_classes_are_refused(tmp_path: Path) -> None:
    slide = ArraySlide([drawn_tissue()])
    own = pipeline(tmp_path)
    with pytest.raises(ConfigError, match=r"must be given .*net.toml', got None"):
        run_qc(slide, own)
    found = given(np.zeros((112, 95), dtype=np.uint8))
    with pytest.raises(ConfigError, match="got 'wrinkle'; known: blur, crease, pen"):
        run_qc(
            slide, own, segmentation=replace(found, classes=("crease", "pen", "blur"))
        )
    frame = MaskFrame(size_th=(95, 112), size_l0=(1520, 900))
    with pytest.raises(
        InvalidInputError, match=r"slide of \(760, 900\) px, got one of"
    ):
        run_qc(slide, own, segmentation=replace(found, frame=frame))
