"""The files for QuPath: outlines, tiles with every column, read by shapely; the script's text."""

import json
from pathlib import Path

import numpy as np
import pytest
import shapely
from PIL import Image

from thinsection.arrays.polygons import overlap
from thinsection.exchange.qupath import SCRIPT, _groovy, export_qupath
from thinsection.results.folder import open_results
from thinsection.run.run import run
from thinsection.slide.annotations import read_regions
from thinsection.store.tiles_h5 import TilesWriter
from thinsection.testing.synthetic import write_he_slide

SIZE = (1700, 1300)
GRID = "128px_0.5mpp"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("qupath")
    write_he_slide(root / "a $x'.svs", SIZE, seed=7)
    run(
        [root / "a $x'.svs"],
        out=root / "out",
        until="tiles",
        tile_px=128,
        measures=True,
    )
    table = open_results(root / "out").tiles("a $x'")
    heat = np.linspace(0, 1, len(table.coords_l0), dtype=np.float32)
    heat[0] = np.nan
    path = root / "out" / GRID / "heatmap_m" / "a $x'.h5"
    path.parent.mkdir()
    with TilesWriter(path, dim=0, attributes={}) as writer:
        writer.append(table.coords_l0, None)
        writer.add_column("score_Tumor", heat)
        writer.add_column("score_Other", 1 - heat)
    return root / "out"


def exported(results: Path, out: Path) -> list[dict]:
    assert export_qupath(results, out) == 1
    return json.loads((out / "a $x'.geojson").read_text())["features"]


def test_the_tissue_is_an_annotation_of_the_mask(results: Path, tmp_path: Path) -> None:
    (tissue,) = [
        f
        for f in exported(results, tmp_path)
        if f["properties"]["objectType"] == "annotation"
    ]
    with Image.open(results / "slides" / "a $x'" / "tissue.png") as picture:
        mask = np.asarray(picture) > 0
    x, y = np.meshgrid(
        *((np.arange(n) + 0.5) * size / n for n, size in zip(mask.shape[::-1], SIZE))
    )
    area = shapely.from_geojson(json.dumps(tissue["geometry"]))
    inside = shapely.contains_xy(area, x.ravel(), y.ravel()).reshape(mask.shape)
    assert overlap(inside, mask) >= 0.995
    assert area.is_valid


def test_every_tile_is_a_detection_with_all_its_columns(
    results: Path, tmp_path: Path
) -> None:
    tiles = [
        f
        for f in exported(results, tmp_path)
        if f["properties"]["objectType"] == "detection"
    ]
    table = open_results(results).tiles("a $x'")
    assert len(tiles) == len(table.coords_l0) > 0
    boxes = [shapely.from_geojson(json.dumps(f["geometry"])).bounds for f in tiles]
    assert [b[:2] for b in boxes] == list(map(tuple, table.coords_l0.tolist()))
    assert {(b[2] - b[0], b[3] - b[1]) for b in boxes} == {(128, 128)}
    first, *others = (f["properties"]["measurements"] for f in tiles)
    assert "px_focus" in table.columns and "heatmap_m:score_Tumor" in table.columns
    assert set(table.columns) - set(first) == {
        "heatmap_m:score_Tumor",
        "heatmap_m:score_Other",
    }
    for name, column in table.columns.items():
        assert [m[name] for m in others] == pytest.approx(column[1:].tolist(), rel=1e-6)
    named = [f["properties"]["classification"]["name"] for f in tiles[1:]]
    assert named == [
        "Other" if i < len(tiles) / 2 - 0.5 else "Tumor" for i in range(1, len(tiles))
    ]


def test_an_exported_file_is_read_back_as_the_tissue_alone(
    results: Path, tmp_path: Path
) -> None:
    exported(results, tmp_path)
    found = read_regions(tmp_path / "a $x'.geojson", SIZE)
    assert list(found.classes) == ["Tissue"]
    assert "detections ignored" in found.notes[0]


def test_the_script_names_files_as_they_are(results: Path, tmp_path: Path) -> None:
    exported(results, tmp_path)
    script = (tmp_path / SCRIPT).read_text()
    assert r"'a $x\'.svs': 'a $x\'.geojson'" in script
    assert _groovy("a\\b\n'$c") == r"'a\\b\n\'$c'"
