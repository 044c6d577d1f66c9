"""The example package of plug-ins, installed as a user would: each part is used by its name."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.support.other_package import in_python, in_shell

from thinsection.slide import open_slide
from thinsection.testing.synthetic import write_he_slide

pytestmark = [pytest.mark.check, pytest.mark.timeout(600)]  # builds and runs a package

PLUGIN = Path(__file__).parent.parent / "examples" / "plugin"
TILE_PX = 64
GRID = f"{TILE_PX}px_0.5mpp_npy"
NUM_SLIDES = 8
PIPELINE = """
name = "strip"
work_mpp = 8.0
work_from = "mpp"

[[check]]
kind = "left_strip"
width = "{width} um"
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the package is installed, beside this source."""
    pytest.importorskip("hatchling", reason="hatchling builds the package")
    site = tmp_path_factory.mktemp("plugin") / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--target", str(site), str(PLUGIN)],
        env=os.environ | {"PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    paths = [str(site), *filter(None, sys.path)]
    cache = tmp_path_factory.mktemp("cache")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "COLUMNS": "200",
        "XDG_CACHE_HOME": str(cache),
    }


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of NumPy pyramids of two levels, one with a space in its name."""
    folder = tmp_path_factory.mktemp("slides")
    picture = tmp_path_factory.mktemp("pictures") / "a.svs"
    for number in range(NUM_SLIDES):
        write_he_slide(picture, (700, 520), seed=number)
        name = "s 0" if number == 0 else f"s{number}"
        pyramid = folder / f"{name}.npypyramid"
        pyramid.mkdir()
        with open_slide(picture) as slide:
            pixels = slide.read_region((0, 0), 0, slide.size)
        np.save(pyramid / "0.npy", pixels)
        np.save(pyramid / "1.npy", np.ascontiguousarray(pixels[::4, ::4]))
        (pyramid / "slide.json").write_text(json.dumps({"mpp": [0.5, 0.5]}))
    return folder


def run(
    environment: dict[str, str], slides: Path, out: Path, *more: object
) -> subprocess.CompletedProcess[str]:
    """The end of `thinsection run` by the example's reader and encoder."""
    return in_shell(
        environment,
        *("run", slides, "--out", out, "--reader", "npy", "--encoder", "colour_stats"),
        *("--tile-px", TILE_PX, "--no-overview", *more),
    )


@pytest.fixture(scope="module")
def results(
    environment: dict[str, str],
    slides: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A results folder by the example's reader and encoder."""
    out = tmp_path_factory.mktemp("results") / "results"
    done = run(environment, slides, out)
    assert done.returncode == 0, done.stderr + done.stdout
    return out


def test_the_reader_and_the_encoder_run_by_name(slides: Path, results: Path) -> None:
    """The embeddings are means and deviations that NumPy computes from the .npy files."""
    files = sorted(results.glob(f"{GRID}/features_colour_stats/*.h5"))
    assert len(files) == NUM_SLIDES
    for file in files:
        pixels = np.load(slides / f"{file.stem}.npypyramid" / "0.npy") / 255
        with h5py.File(file) as stored:
            coords = stored["coords"][:]
            embeddings = stored["features"][:]
        assert len(coords) > 5
        for (x, y), embedding in zip(coords, embeddings, strict=True):
            tile = pixels[y : y + TILE_PX, x : x + TILE_PX].reshape(-1, 3)
            expected = [*tile.mean(axis=0), *tile.std(axis=0, ddof=1)]
            np.testing.assert_allclose(embedding, expected, atol=1e-5)
    assert "npy" in (results / "summary.csv").read_text()


def test_a_second_run_has_nothing_to_do(
    environment: dict[str, str], slides: Path, results: Path
) -> None:
    done = run(environment, slides, results)
    assert done.returncode == 0, done.stderr
    assert f"{NUM_SLIDES} skipped" in done.stdout + done.stderr


def test_the_check_removes_its_strip(
    environment: dict[str, str], slides: Path, tmp_path: Path
) -> None:
    """No tile lies in the strip, and outside it all tiles of a strip of no width stay."""
    tiles = {}
    for width in (0, 160):
        pipeline = tmp_path / f"strip of {width}.toml"
        pipeline.write_text(PIPELINE.format(width=width))
        out = tmp_path / f"out{width}"
        one = slides / "s 0.npypyramid"
        done = run(environment, one, out, "--qc", pipeline, "--until", "tiles")
        # 3: the verdict on so small a slide
        assert done.returncode in (0, 3), done.stderr + done.stdout
        (path,) = out.glob("*/tiles/*.h5")
        with h5py.File(path) as stored:
            tiles[width] = {tuple(row) for row in stored["coords"][:].tolist()}
    strip_px = 160 / 0.5
    assert tiles[160] == {(x, y) for x, y in tiles[0] if x + TILE_PX / 2 >= strip_px}
    assert 0 < len(tiles[160]) < len(tiles[0])


def test_the_head_trains_and_predicts_by_name(
    environment: dict[str, str], results: Path, tmp_path: Path
) -> None:
    labels = tmp_path / "labels.csv"
    names = sorted(path.stem for path in results.glob(f"{GRID}/tiles/*.h5"))
    with labels.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["slide_id", "grade"])
        rows.writerows((name, ("low", "high")[i % 2]) for i, name in enumerate(names))
    out = tmp_path / "experiment"
    done = in_shell(
        environment,
        *("train", results, "--labels", labels, "--target", "grade", "--out", out),
        *("--head", "top_mean", "--folds", 2, "--inner-folds", 2, "--epochs", 3),
        *("--allow-leakage", "--device", "cpu"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads((out / "experiment.json").read_text())
    assert document["head"] == "top_mean"
    assert document["cases"] == NUM_SLIDES
    model = out / "model.safetensors"
    done = in_shell(environment, "predict", model, results, "--device", "cpu")
    assert done.returncode == 0, done.stderr + done.stdout
    (table,) = results.glob("predictions_*.csv")
    with table.open(newline="") as file:
        predicted = {row["slide_id"] for row in csv.DictReader(file)}
    assert predicted >= set(names)


def test_the_probe_scores_by_name(
    environment: dict[str, str], results: Path, tmp_path: Path
) -> None:
    regions = tmp_path / "regions.geojson"
    features = []
    for slide_id in ("s 0", "s1"):
        for label, (left, right) in {"a": (0, 350), "b": (350, 700)}.items():
            ring = [[left, 0], [right, 0], [right, 520], [left, 520], [left, 0]]
            features.append(
                {
                    "type": "Feature",
                    "geometry": {"type": "Polygon", "coordinates": [ring]},
                    "properties": {"slide_id": slide_id, "label": label},
                }
            )
    collection = {"type": "FeatureCollection", "features": features}
    regions.write_text(json.dumps(collection))
    out = tmp_path / "probe"
    done = in_shell(
        environment,
        *("probe", "nearest_mean", results, "--labels", regions),
        *("--allow-leakage", "--out", out),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    score = json.loads((out / "nearest_mean.json").read_text())["score"]
    assert 0 < score <= 1
    assert f"macro F1 {score:.4f}" in done.stdout


def test_commands_list_the_parts(environment: dict[str, str]) -> None:
    models = in_shell(environment, "models").stdout
    assert "colour_stats\tbrought by another package: Mean and standard " in models
    checked = in_shell(environment, "models", "check", "colour_stats")
    assert checked.returncode == 0, checked.stderr
    doctor = in_shell(environment, "doctor").stdout
    for name in ("npy", "colour_stats", "left_strip", "top_mean", "nearest_mean"):
        assert name in doctor
    assert "Classify tiles by the nearest class mean." in (
        in_shell(environment, "probe", "--help").stdout
    )
    assert "top_mean" in in_shell(environment, "train", "--help").stdout
    wrong = in_shell(environment, "train", ".", "--head", "top_meen", "--out", "x")
    assert "did you mean 'top_mean'?" in wrong.stderr


def test_the_reader_passes_the_contract(environment: dict[str, str]) -> None:
    done = in_python(
        environment,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", PLUGIN),
        *("-c", os.devnull, PLUGIN / "tests"),
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
