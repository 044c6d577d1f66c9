"""Two areas of one glass are two slides of a run, with ids, results and claims of their own."""

import csv
from pathlib import Path

import numpy as np
import pytest
import tifffile

from thinsection.results.folder import open_results
from thinsection.run.run import run
from thinsection.slide.cohort import load_cohort
from thinsection.slide.cohort_table import SlidesConfig
from thinsection.stages.config import RunConfig
from thinsection.testing.synthetic import he_texture

AREAS = {"area 1": (700, 500), "area 2": (600, 800)}


@pytest.fixture(scope="module")
def glass(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glass") / "glass.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as writer:
        for seed, (name, (width, height)) in enumerate(AREAS.items()):
            pixels = he_texture(np.random.default_rng(seed))[:height, :width]
            metadata = {"axes": "YXS", "Name": name, "PhysicalSizeX": 0.5}
            metadata["PhysicalSizeY"] = 0.5
            writer.write(pixels, tile=(256, 256), photometric="rgb", metadata=metadata)
    return path


def write_cohort(path: Path, glass: Path, images: tuple[str, ...]) -> Path:
    rows = [f"{glass},{image}" for image in images]
    path.write_text("\n".join(["slide_path,image", *rows]))
    return path


def test_two_areas_of_one_glass_are_two_slides_that_a_second_run_knows(
    glass: Path, tmp_path: Path
) -> None:
    cohort = write_cohort(tmp_path / "c.csv", glass, ("area 1", "2"))
    out = tmp_path / "out"
    statuses = []
    for _ in range(2):
        results = run([cohort], out=out, until="tiles").results
        statuses.append({result.slide_id: result.status for result in results})
    assert statuses[0] == {"glass.ome-area 1": "done", "glass.ome-2": "done"}
    assert set(statuses[1].values()) == {"skipped"}
    with (out / "summary.csv").open() as file:
        rows = {row["slide_id"]: row for row in csv.DictReader(file)}
    sizes = {name: (row["width"], row["height"]) for name, row in rows.items()}
    assert sizes == {
        "glass.ome-area 1": ("700", "500"),
        "glass.ome-2": ("600", "800"),
    }
    row = rows["glass.ome-2"]
    assert row["image"] == "2"
    assert (
        "image 2 of 2 is shown ('area 2', 600 x 800 px, asked for)" in row["warnings"]
    )
    folder = open_results(out)
    tiles = folder.tiles("glass.ome-2")
    assert tiles.coords_l0[:, 1].max() >= 500


def test_another_image_of_a_file_is_another_slide_and_the_first_stays(
    glass: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for image in (None, "1", "2"):
        config = RunConfig(slides=SlidesConfig(image=image))
        (result,) = run([glass], out=out, config=config, until="tissue").results
        assert result.status == "done", result.error
    names = sorted(path.name for path in (out / "slides").iterdir() if path.is_dir())
    assert names == ["glass.ome", "glass.ome-1", "glass.ome-2"]


def test_an_image_that_is_not_there_fails_that_slide_alone(
    glass: Path, tmp_path: Path
) -> None:
    cohort = write_cohort(tmp_path / "c.csv", glass, ("1", "area 3"))
    results = run([cohort], out=tmp_path / "out", until="tissue").results
    statuses = {result.slide_id: result.status for result in results}
    assert statuses == {"glass.ome-1": "done", "glass.ome-area 3": "failed"}
    (failed,) = [result for result in results if result.status == "failed"]
    assert "choose a number or name of: 1 'area 1'" in str(failed.error)


def test_a_table_wins_over_the_option_and_the_file_s_name_is_no_image(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.tif"
    path.touch()
    table = tmp_path / "c.csv"
    table.write_text("slide_path,image\na.tif,3\nb.tif,\nc.tif,c.tif\n")
    entries = load_cohort([table], SlidesConfig(image="2"))
    assert [(entry.slide_id, entry.image) for entry in entries] == [
        ("a-3", "3"),
        ("b-2", "2"),
        ("c-2", "2"),
    ]
