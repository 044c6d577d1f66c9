"""Cells of other tools in a run: counted in every grid, once, and again only where they changed."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
import tifffile
from tests.support.cell_files import CLASSES, SIZE, write_cells

import thinsection as ts
from thinsection.cells.table import CellTable
from thinsection.errors import ChoiceError, ConfigError, StoreError
from thinsection.run.ending import RunSummary
from thinsection.stages.config import RunConfig
from thinsection.store.tiles_h5 import TilesFile, read_tiles
from thinsection.testing.synthetic import write_he_slide

GRIDS = ("128px_0.5mpp", "128px_1mpp")


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three slides of the same pixels, which are not square."""
    folder = tmp_path_factory.mktemp("slides")
    write_he_slide(folder / "a.svs", SIZE, seed=7)
    for name in "bc":
        shutil.copy(folder / "a.svs", folder / f"{name}.svs")
    return folder


def start(slides: Any, out: Path, *cells: Path | str, **settings: Any) -> RunSummary:
    settings = {"until": "tiles", "tile_px": 128, "tile_mpp": ("0.5", "1"), **settings}
    sources = [str(source) for source in cells]
    return ts.run(slides, out=out, config=RunConfig(), cells=sources, **settings)


def counted(out: Path, grid: str, name: str, slide_id: str = "a") -> TilesFile:
    return read_tiles(out / grid / f"cells_{name}" / f"{slide_id}.h5")


def summary(out: Path) -> list[dict[str, str]]:
    with (out / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def points(path: Path) -> np.ndarray:
    """Centroids by shapely."""
    features = json.loads(path.read_text())["features"]
    shapes = [shapely.geometry.shape(feature["geometry"]) for feature in features]
    return np.array([(shape.centroid.x, shape.centroid.y) for shape in shapes])


def test_two_tables_are_counted_in_two_grids(slides: Path, tmp_path: Path) -> None:
    few = write_cells(tmp_path / "few" / "a.geojson", number=300, seed=1)
    many = write_cells(
        tmp_path / "many" / "a.svs.geojson", number=900, seed=2, names=("Stroma",)
    )
    out = tmp_path / "out"
    slide = slides / "a.svs"
    assert start(slide, out, tmp_path / "few", tmp_path / "many").exit_code == 0
    for name, path in (("few", few), ("many", many)):
        centers = points(path)
        assert ts.open_results(out).cells("a", name).num_cells == len(centers)
        for grid, edge in zip(GRIDS, (128, 256)):
            stored = counted(out, grid, name)
            corners = stored.coords_l0[:, None]
            inside = (corners <= centers) & (centers < corners + edge)
            expected = inside.all(axis=2).sum(axis=1)
            assert stored.columns["count"].tolist() == expected.tolist()
            assert expected.sum() > 20
            (row,) = [row for row in summary(out) if row["grid"] == grid]
            assert int(row[f"cells_{name}:count"]) == len(centers)
            in_no_tile = int(row[f"cells_{name}:in_no_tile"])
            assert in_no_tile == len(centers) - expected.sum()
            tissue_mm2 = float(row["tissue_fraction"]) * SIZE[0] * SIZE[1] * 0.25 / 1e6
            assert float(row[f"cells_{name}:tissue_mm2"]) == pytest.approx(
                tissue_mm2, rel=0.02
            )
            assert float(row[f"cells_{name}:per_mm2"]) == pytest.approx(
                len(centers) / float(row[f"cells_{name}:tissue_mm2"])
            )
    columns = ts.open_results(out).tiles("a", GRIDS[1]).columns
    assert {"cells_few:share_Tumour", "cells_many:count_Stroma"} <= columns.keys()
    with pytest.raises(
        ChoiceError, match="one of the slide's cells few, many, got None"
    ):
        ts.open_results(out).cells("a")


def test_a_bad_file_loses_its_slide_and_is_read_again_when_it_is_mended(
    slides: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "nuclei"
    for seed, name in enumerate("abc"):
        write_cells(folder / f"{name}.geojson", number=100, seed=seed)
    text = (folder / "b.geojson").read_text()
    (folder / "b.geojson").write_text(text[: len(text) // 2])
    out = tmp_path / "out"
    first = start(slides, out, folder)
    assert first.exit_code == 3
    assert first.counts["done"] == 2
    (failed,) = [result for result in first.results if result.status == "failed"]
    assert failed.stage == "cells"
    assert "cells must be readable, got" in failed.error
    assert not list((out / "cells").rglob("b.parquet"))
    # its tiles are there: only the cells are missing
    assert (out / GRIDS[0] / "tiles" / "b.h5").is_file()
    (folder / "b.geojson").write_text(text)
    second = start(slides, out, folder)
    assert second.exit_code == 0
    assert second.counts == {**first.counts, "done": 1, "skipped": 2, "failed": 0}


def test_bad_cells_are_counted_by_reason_and_those_of_another_slide_lose_theirs(
    slides: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "nuclei"
    for seed, name in enumerate("ab"):
        write_cells(folder / f"{name}.geojson", number=200, seed=seed)
    document = json.loads((folder / "a.geojson").read_text())
    features = document["features"]
    ring = features[0]["geometry"]["coordinates"][0]
    moved = (np.array(ring) + 30).tolist()
    features[1]["geometry"]["coordinates"][0][2][0] = float("nan")
    features[2]["geometry"]["coordinates"] = [ring[:2]]
    features[3]["geometry"]["coordinates"][0][1] = ["12", "13"]
    features[4]["geometry"]["coordinates"].append((np.array(ring) / 2).tolist())
    features[5]["geometry"] = {"type": "MultiPolygon", "coordinates": [[ring], [moved]]}
    features[6]["id"] = features[7]["id"]
    del features[8]["properties"]["classification"]
    features[9]["geometry"] = {"type": "MultiPolygon", "coordinates": []}
    (folder / "a.geojson").write_text(json.dumps(document))
    # cells of a slide ten times as wide
    document = json.loads((folder / "b.geojson").read_text())
    for cell in document["features"]:
        cell["geometry"]["coordinates"] = [
            (10 * np.array(cell["geometry"]["coordinates"][0])).tolist()
        ]
    (folder / "b.geojson").write_text(json.dumps(document))
    cohort = tmp_path / "cohort.csv"
    cohort.write_text(f"slide\n{slides / 'a.svs'}\n{slides / 'b.svs'}\n")
    out = tmp_path / "out"
    run = start(cohort, out, folder, tile_mpp="1")
    assert run.exit_code == 3
    (failed,) = [result for result in run.results if result.status == "failed"]
    assert failed.slide_id == "b"
    assert "cells must lie on the slide of 1700 x 1300 px" in failed.error
    (warnings,) = [row["warnings"] for row in summary(out) if row["slide_id"] == "a"]
    for reason in (
        "196 of 200 cells",
        "2 with coordinates that are no numbers",
        "1 of fewer than three points",
        "1 without an outline",
        "1 with holes",
        "1 of several pieces",
        "1 with the id of another cell",
    ):
        assert reason in warnings
    table = ts.open_results(out).cells("a", "nuclei")
    assert table.num_cells == 196
    assert table.to_table(["class"])["class"].null_count == 1


def test_other_cells_are_counted_again_without_overwrite(
    slides: Path, tmp_path: Path
) -> None:
    slide = slides / "a.svs"
    path = write_cells(tmp_path / "nuclei" / "a.geojson", number=100, seed=1)
    out = tmp_path / "out"
    start(slide, out, path.parent)
    tiles = (out / GRIDS[0] / "tiles" / "a.h5").stat().st_mtime_ns
    assert start(slide, out, path.parent).counts["skipped"] == 1
    write_cells(path, number=150, seed=3)
    assert start(slide, out, path.parent).counts["done"] == 1
    table = CellTable(out / "cells" / "nuclei" / "a.parquet")
    assert table.num_cells == 150
    (row, _) = summary(out)
    in_tiles = counted(out, row["grid"], "nuclei").columns["count"].sum()
    assert in_tiles + int(row["cells_nuclei:in_no_tile"]) == 150
    assert (out / GRIDS[0] / "tiles" / "a.h5").stat().st_mtime_ns == tiles


def test_three_slides_of_a_patient_are_one_sum(slides: Path, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    lines = ["slide_path,patient_id,nuclei"]
    areas: list[float] = []
    for seed, name in enumerate("abc"):
        names = ("Tumour",) if name == "a" else CLASSES
        path = folder / f"of_{name}.geojson"
        write_cells(path, number=60 + 40 * seed, seed=seed, names=names)
        features = json.loads(path.read_text())["features"]
        areas += [shapely.geometry.shape(f["geometry"]).area / 4 for f in features]
        lines.append(f"{slides / name}.svs,{'p2' if name == 'c' else 'p1'},{path}")
    cohort = tmp_path / "cohort.csv"
    cohort.write_text("\n".join(lines).replace(",p2,", ",p1,"))
    out = tmp_path / "out"
    assert start(cohort, out, "nuclei", tile_mpp="1").exit_code == 0
    rows = summary(out)
    assert [row["slide_id"] for row in rows] == ["a", "b", "c"]
    # a slide without a class has 0 of its cells
    assert rows[0]["cells_nuclei:count_Immune-cells"] == "0"
    assert float(rows[0]["cells_nuclei:share_Immune-cells"]) == 0
    numbers = [int(row["cells_nuclei:count"]) for row in rows]
    tissue = sum(float(row["cells_nuclei:tissue_mm2"]) for row in rows)
    immune = sum(int(row["cells_nuclei:count_Immune-cells"]) for row in rows)
    for row in rows:
        of_patient = {
            name.removeprefix("patient:cells_nuclei:"): float(value)
            for name, value in row.items()
            if name.startswith("patient:")
        }
        assert of_patient["count"] == sum(numbers) == 300
        assert of_patient["per_mm2"] == pytest.approx(300 / tissue)
        assert of_patient["share_Immune-cells"] == pytest.approx(immune / 300)
        assert of_patient["per_mm2_Immune-cells"] == pytest.approx(immune / tissue)
        assert of_patient["area_um2_mean"] == pytest.approx(np.mean(areas), rel=1e-5)
        assert of_patient["area_um2_std"] == pytest.approx(np.std(areas), rel=1e-5)
    table = ts.open_results(out).rows()
    assert table[1]["patient:cells_nuclei:count"] == 300


def test_slides_of_other_patients_are_not_summed(slides: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nuclei"
    lines = ["slide_path,patient_id"]
    for seed, name in enumerate("abc"):
        write_cells(folder / f"{name}.geojson", number=50 + seed, seed=seed)
        lines.append(f"{slides / name}.svs,{'' if name == 'c' else f'p-{name}'}")
    cohort = tmp_path / "cohort.csv"
    cohort.write_text("\n".join(lines))
    start(cohort, tmp_path / "out", folder, tile_mpp="1", qc="auto")
    sums = [row["patient:cells_nuclei:count"] for row in summary(tmp_path / "out")]
    assert sums == ["50", "51", ""]
    # the page of quality control has them too, and no verdict depends on them
    with (tmp_path / "out" / "qc_auto.csv").open() as file:
        checked = list(csv.DictReader(file))
    assert [float(row["cells_nuclei:count"]) for row in checked] == [50, 51, 52]
    for row, whole in zip(checked, summary(tmp_path / "out")):
        density = float(whole["cells_nuclei:per_mm2"])
        assert float(row["cells_nuclei:per_mm2"]) == pytest.approx(density, rel=1e-5)
        assert "cells" not in row["why"]
    page = (tmp_path / "out" / "qc_auto.html").read_text()
    assert "cells of nuclei per mm² of tissue" in page.casefold()


def test_a_label_image_of_a_coarser_level_is_counted_like_outlines(
    slides: Path, tmp_path: Path
) -> None:
    """Squares in an image of 1 µm per pixel, on a slide of 0.5 µm."""
    folder = tmp_path / "nuclei"
    folder.mkdir()
    labels = np.zeros((SIZE[1] // 2, SIZE[0] // 2), dtype=np.uint16)
    corners = np.mgrid[250:600:23, 200:450:19].reshape(2, -1).T
    for number, (x, y) in enumerate(corners, start=1):
        labels[y : y + 9, x : x + 7] = number
    tifffile.imwrite(folder / "a.tif", labels, tile=(128, 128))
    cohort = tmp_path / "cohort.csv"
    cohort.write_text(f"slide\n{slides / 'a.svs'}\n")
    out = tmp_path / "out"
    assert start(cohort, out, folder, cells_frame="1").exit_code == 0
    table = ts.open_results(out).cells("a", "nuclei")
    assert table.num_cells == len(corners)
    areas = table.to_table(["area_um2"])["area_um2"].to_numpy()
    np.testing.assert_allclose(areas, 9 * 7)
    centers = 2 * (corners + np.array((3.5, 4.5)))
    for grid, edge in zip(GRIDS, (128, 256)):
        stored = counted(out, grid, "nuclei")
        inside = (stored.coords_l0[:, None] <= centers) & (
            centers < stored.coords_l0[:, None] + edge
        )
        expected = inside.all(axis=2).sum(axis=1)
        assert stored.columns["count"].tolist() == expected.tolist()
        assert expected.sum() > 100


def test_a_source_that_is_not_there_or_not_clear_is_refused(
    slides: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match="cells must be a file, a folder, or a column"
    ):
        start(slides, tmp_path / "out", tmp_path / "nowhere")
    write_cells(tmp_path / "x" / "nuclei" / "a.geojson", number=9, seed=1)
    (tmp_path / "y" / "nuclei").mkdir(parents=True)
    with pytest.raises(ConfigError, match="must have different names"):
        start(slides, tmp_path / "out", tmp_path / "x/nuclei", tmp_path / "y/nuclei")
    write_cells(tmp_path / "x" / "nuclei" / "a.json", number=9, seed=1)
    of_slides = start(slides, tmp_path / "out", tmp_path / "x/nuclei", tile_mpp="1")
    errors = {result.slide_id: result.error for result in of_slides.results}
    assert "got a.geojson, a.json for 'a'" in errors["a"]
    assert "cells must exist for every slide" in errors["b"]
    start(slides / "a.svs", tmp_path / "other", tile_mpp="1")
    with pytest.raises(StoreError, match="cells of 'a' must exist, got none"):
        ts.open_results(tmp_path / "other").cells("a")
