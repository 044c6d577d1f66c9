"""What quality control leaves for a slide is read back whole."""

import io
import json
import zipfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from tests.qc.slides import ArraySlide

from thinsection.errors import StoreError
from thinsection.qc import QcResult, load_pipeline, run_qc, tile_qc_columns
from thinsection.qc.pipeline import pipeline_from_mapping
from thinsection.report.qc_files import load_qc, write_qc
from thinsection.report.qc_pictures import write_qc_pictures
from thinsection.report.stored import (
    QC_FILE,
    features_of_masks,
    picture_files,
    read_qc,
    read_tissue,
)
from thinsection.results.folder import Results
from thinsection.store.geojson import mask_features, write_masks_geojson
from thinsection.store.ledger import SlideLedger, StageRecord
from thinsection.view.layers import layers_of


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


def assert_same(stored: QcResult, fresh: QcResult, *, apart: set[str]) -> None:
    for f in fields(QcResult):
        if f.name in apart:
            continue
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


def write_as_older_versions_did(result: QcResult, folder: Path) -> None:
    """`qc.json` and a PNG of each mask and table, as format 2 had them."""
    write_qc(result, folder)
    with zipfile.ZipFile(folder / QC_FILE) as file:
        document = json.loads(file.read("qc.json"))
    (folder / QC_FILE).unlink()
    write_qc_pictures(result, folder)
    document["format"] = "thinsection-qc/2"
    document["seconds"] = result.seconds
    document["masks"] = list(document["masks"])
    is_picture = {name: t.dtype == np.uint8 for name, t in result.tables.items()}
    for name in result.tables:
        if is_picture[name]:
            document["tables"][name] = None
    document["tables"] = {name: document["tables"][name] for name in result.tables}
    (folder / "qc.json").write_text(json.dumps(document))


def test_a_stored_result_equals_the_fresh_one_in_every_field(
    fresh: QcResult, tmp_path: Path
) -> None:
    assert fresh.masks
    assert fresh.warnings
    assert set(fresh.tables) == {"histogram", "equalised"}
    write_qc(fresh, tmp_path / "qc", key="k")
    assert {path.name for path in (tmp_path / "qc").iterdir()} == {
        "picture.jpg",
        QC_FILE,
    }
    stored = load_qc(tmp_path / "qc")
    assert stored.is_stored
    assert_same(stored, fresh, apart={"rgb", "tables", "seconds", "is_stored"})
    # a table that is a picture is written on request, and the work image comes from a JPEG
    assert list(stored.tables) == ["histogram"]
    np.testing.assert_array_equal(stored.tables["histogram"], fresh.tables["histogram"])
    assert stored.rgb.shape == fresh.rgb.shape
    assert np.abs(stored.rgb.astype(float).mean() - fresh.rgb.mean()) < 3
    assert stored.row == fresh.row
    np.testing.assert_array_equal(stored.tissue.mask, fresh.tissue.mask)
    assert stored.tissue.mask_mpp == (fresh.mpp_th, fresh.mpp_th)


def test_a_result_of_an_older_version_is_read_with_its_pictures(
    fresh: QcResult, tmp_path: Path
) -> None:
    write_as_older_versions_did(fresh, tmp_path)
    assert_same(load_qc(tmp_path), fresh, apart={"is_stored"})


def test_another_reader_finds_the_masks_and_equal_results_give_equal_bytes(
    fresh: QcResult, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        write_qc(fresh, tmp_path / name)
    one, two = ((tmp_path / name / QC_FILE).read_bytes() for name in ("one", "two"))
    assert one == two
    with zipfile.ZipFile(tmp_path / "one" / QC_FILE) as file:
        members = set(file.namelist())
        pixels = json.loads(file.read("qc.json"))["masks"]
        for name, mask in {**fresh.masks, "mask_use": fresh.mask_use}.items():
            assert pixels[name] == mask.sum()
            # an empty mask has no picture
            assert (f"{name}.tif" in members) == mask.any()
            if mask.any():
                read = tifffile.imread(io.BytesIO(file.read(f"{name}.tif")))
                np.testing.assert_array_equal(read.astype(bool), mask)


def test_outlines_are_those_of_the_masks_and_empty_ones_are_left_out(
    fresh: QcResult, tmp_path: Path
) -> None:
    folder = tmp_path / "slides" / "a" / "qc_light"
    write_qc(fresh, folder)
    files = {f"slides/a/qc_light/{QC_FILE}": 1}
    record = StageRecord(key="k", files=files, needs=(), facts={}, sums={})
    ledger = SlideLedger(out=tmp_path, slide_id="a", stages={"slides/qc_light": record})
    got = features_of_masks(ledger, "slides/qc_light")
    masks = [("Usable tissue", fresh.mask_use, (0, 160, 80))]
    masks += [(name, mask, fresh.colors[name]) for name, mask in fresh.masks.items()]
    # QuPath's brush does not change them
    assert all(feature["properties"].pop("isLocked") for feature in got)
    assert json.dumps(got) == json.dumps(mask_features(masks, fresh.frame))
    assert len(got) < len(masks)


def test_a_folder_of_an_older_version_is_viewed(
    fresh: QcResult, tmp_path: Path
) -> None:
    folder = tmp_path / "slides" / "a" / "qc_light"
    write_as_older_versions_did(fresh, folder)
    masks = [(name, mask, fresh.colors[name]) for name, mask in fresh.masks.items()]
    write_masks_geojson(folder / "qc.geojson", masks, fresh.frame)
    files = {f"slides/a/qc_light/{path.name}": 1 for path in folder.iterdir()}
    record = StageRecord(key="k", files=files, needs=(), facts={}, sums={})
    ledger = SlideLedger(out=tmp_path, slide_id="a", stages={"slides/qc_light": record})
    results = Results(folder=tmp_path, ledgers={"a": ledger})
    layers = {layer.name: layer for layer in layers_of(results, "a", 3, 1 << 20)}
    assert layers.keys() == {name for name, mask in fresh.masks.items() if mask.any()}
    assert all(json.loads(layer.read()) for layer in layers.values())
    picture, mask_file = picture_files(tmp_path / "slides" / "a")
    assert (picture.name, mask_file.name) == ("picture.jpg", "mask_kept.png")
    np.testing.assert_array_equal(read_tissue(mask_file), fresh.tissue.mask)
    # the same of a folder of today
    write_qc(fresh, tmp_path / "slides" / "b" / "qc_light")
    _, mask_file = picture_files(tmp_path / "slides" / "b")
    assert mask_file.name == QC_FILE
    np.testing.assert_array_equal(read_tissue(mask_file), fresh.tissue.mask)


def test_pictures_show_masks_tables_and_the_work_image(
    fresh: QcResult, tmp_path: Path
) -> None:
    names = write_qc_pictures(fresh, tmp_path)
    assert set(names) == {path.name for path in tmp_path.iterdir()}
    stems = {*fresh.masks, *fresh.tables, "mask_use", "thumbnail"}
    assert stems <= {Path(name).stem for name in names}
    with Image.open(tmp_path / "mask_use.png") as picture:
        np.testing.assert_array_equal(np.array(picture), fresh.mask_use)
    with Image.open(tmp_path / "thumbnail.png") as picture:
        np.testing.assert_array_equal(np.array(picture), fresh.rgb)


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


def test_a_result_writes_into_its_own_folder_only_and_qc_zip_last(
    fresh: QcResult, tmp_path: Path
) -> None:
    folder = tmp_path / "slides" / "a" / "qc_histoqc-light"
    write_qc(fresh, folder, key="of the slide")
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*.*")] != []
    assert all(p.parent == folder for p in tmp_path.rglob("*") if p.is_file())
    last = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert last.name == QC_FILE
    assert read_qc(folder).document["key"] == "of the slide"


def rewrite(path: Path, name: str, member: bytes | None) -> None:
    """The same zip with another member; None leaves it out."""
    with zipfile.ZipFile(path) as file:
        content: dict[str, bytes | None] = {n: file.read(n) for n in file.namelist()}
    assert name in content
    content[name] = member
    with zipfile.ZipFile(path, "w") as file:
        for kept, data in content.items():
            if data is not None:
                file.writestr(kept, data)


def large_mask() -> bytes:
    buffer = io.BytesIO()
    blank = Image.new("1", (9000, 9000))
    blank.save(buffer, format="TIFF", compression="group4")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "damage", ["gone", "cut", "old", "mask", "mask gone", "larger", "picture", "json"]
)
def test_what_is_not_whole_is_refused(
    damage: str, fresh: QcResult, tmp_path: Path
) -> None:
    write_qc(fresh, tmp_path)
    path = tmp_path / QC_FILE
    mask = next(f"{name}.tif" for name, mask in fresh.masks.items() if mask.any())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "old":
        document = read_qc(tmp_path).document | {"format": "thinsection-qc/1"}
        rewrite(path, "qc.json", json.dumps(document).encode())
    elif damage == "mask":
        rewrite(path, mask, b"no picture")
    elif damage == "mask gone":
        rewrite(path, mask, None)
    elif damage == "larger":
        rewrite(path, mask, large_mask())
    elif damage == "json":
        rewrite(path, "qc.json", b"[" * 100_000)
    else:
        (tmp_path / "picture.jpg").unlink()
    with pytest.raises(StoreError, match=r"qc .*; run quality control again"):
        load_qc(tmp_path)
