"""What quality control leaves for a slide is read back whole."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from tests.qc.slides import ArraySlide

from thinsection.errors import StoreError
from thinsection.qc import QcResult, load_pipeline, run_qc, tile_qc_columns
from thinsection.qc.pipeline import pipeline_from_mapping
from thinsection.report.qc_files import QC_JSON, load_qc, write_qc


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> QcResult:
    """Of a slide that is not square, by a pipeline that fills masks, measures and draws."""
    rng = np.random.default_rng(5)
    rgb = rng.integers(120, 250, (640, 810, 3), dtype=np.uint8)
    rgb[100:300, 200:700] = (180, 90, 150)
    plain = load_pipeline("histoqc-light").as_mapping()
    plain["work_mpp"] = 2.0
    plain["check"] += [{"kind": "histogram"}, {"kind": "equalised"}]
    slide = ArraySlide([rgb], slide_mpp=(0.5, 0.6))
    return run_qc(
        slide, pipeline_from_mapping(plain), cache_dir=tmp_path_factory.mktemp("cache")
    )


def assert_same(stored: QcResult, fresh: QcResult) -> None:
    for f in fields(QcResult):
        got, expected = getattr(stored, f.name), getattr(fresh, f.name)
        if f.name in ("masks", "tables"):
            assert list(got) == list(expected)
            pairs = [(got[name], expected[name]) for name in expected]
        elif isinstance(expected, np.ndarray):
            pairs = [(got, expected)]
        else:
            assert got == expected, f.name
            continue
        for one, other in pairs:
            assert one.dtype == other.dtype, f.name
            np.testing.assert_array_equal(one, other)


def test_a_stored_result_equals_the_fresh_one_in_every_field(
    fresh: QcResult, tmp_path: Path
) -> None:
    assert fresh.masks
    assert fresh.warnings
    assert set(fresh.tables) == {"histogram", "equalised"}
    write_qc(fresh, tmp_path / "qc", key="k")
    stored = load_qc(tmp_path / "qc")
    assert_same(stored, fresh)
    assert stored.row == fresh.row
    np.testing.assert_array_equal(stored.tissue.mask, fresh.tissue.mask)
    assert stored.tissue.mask_mpp == (fresh.mpp_th, fresh.mpp_th)


def test_columns_of_another_grid_come_from_the_stored_masks(
    fresh: QcResult, tmp_path: Path
) -> None:
    write_qc(fresh, tmp_path)
    coords_l0 = np.array([[0, 0], [300, 128], [700, 500]])
    expected = tile_qc_columns(fresh, coords_l0, 144)
    got = tile_qc_columns(load_qc(tmp_path), coords_l0, 144)
    assert expected
    assert {k: v.tolist() for k, v in got.items()} == {
        k: v.tolist() for k, v in expected.items()
    }


def test_a_result_writes_into_its_own_folder_only_and_qc_json_last(
    fresh: QcResult, tmp_path: Path
) -> None:
    folder = tmp_path / "slides" / "a" / "qc_histoqc-light"
    write_qc(fresh, folder, key="of the slide")
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*.*")] != []
    assert all(p.parent == folder for p in tmp_path.rglob("*") if p.is_file())
    last = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert last.name == QC_JSON
    assert json.loads(last.read_text())["key"] == "of the slide"


@pytest.mark.parametrize("damage", ["gone", "cut", "old", "mask"])
def test_what_is_not_whole_is_refused(
    damage: str, fresh: QcResult, tmp_path: Path
) -> None:
    write_qc(fresh, tmp_path)
    path = tmp_path / QC_JSON
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_text(path.read_text()[:100])
    elif damage == "old":
        path.write_text(
            path.read_text().replace("thinsection-qc/2", "thinsection-qc/1")
        )
    else:
        mask = tmp_path / "mask_use.png"
        mask.write_bytes(mask.read_bytes()[:60])
    with pytest.raises(StoreError, match=r"qc .*; run quality control again"):
        load_qc(tmp_path)
