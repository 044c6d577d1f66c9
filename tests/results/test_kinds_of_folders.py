"""A folder is a folder: every command on results that were made here, imported, merged, moved, ...

The files of other tools are written in their forms; see `test_peer_import` for their own writers.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from tests.support.shell import thinsection

import thinsection as ts
from thinsection.exchange.peer_export import export_peer
from thinsection.exchange.peer_import import import_peer
from thinsection.files.atomic import read_json, write_json, write_table
from thinsection.results.folder import open_results
from thinsection.run.merge import merge_results
from thinsection.store.hdf5 import DATASETS
from thinsection.store.identity import file_sum
from thinsection.testing.synthetic import write_he_slide
from thinsection.view.layers import layers_of

pytestmark = [pytest.mark.check, pytest.mark.timeout(900)]
NAMES = tuple(f"s{number}" for number in range(8))
LITE0 = "efficientnet_lite0_seed0"
SMALL: dict[str, Any] = {"memory": "256MiB", "pretrained": False, "tile_px": 128}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides, labels, and results of a run on the slides."""
    home = tmp_path_factory.mktemp("home")
    (home / "slides").mkdir()
    for number, name in enumerate(NAMES):
        path = home / "slides" / f"{name}.svs"
        write_he_slide(path, (700 + 8 * number, 600), seed=number % 3, downsamples=(1,))
    rows = [
        {"slide_id": name, "grade": ("low", "high")[number % 2]}
        for number, name in enumerate(NAMES)
    ]
    write_table(home / "labels.csv", rows)
    ts.run([home / "slides"], out=home / "own", **SMALL)
    return home


def own(home: Path, out: Path) -> None:
    shutil.copytree(home / "own", out)


def trident(home: Path, out: Path) -> None:
    """Two encoders of one grid, as TRIDENT adds them."""
    job = out.with_name("job")
    export_peer(home / "own", job, "trident")
    (grid,) = (path for path in job.iterdir() if path.is_dir())
    shutil.copytree(grid / f"features_{LITE0}", grid / "features_second")
    import_peer(job, out, "trident", slides=[home / "slides"])


def clam(home: Path, out: Path) -> None:
    export_peer(home / "own", out.with_name("job"), "clam")
    slides = [home / "slides"]
    import_peer(out.with_name("job"), out, "clam", slides=slides, encoder=LITE0)


def stamp(home: Path, out: Path) -> None:
    export_peer(home / "own", out.with_name("job"), "stamp")
    import_peer(out.with_name("job"), out, "stamp", slides=[home / "slides"])


def historic_stamp(home: Path, out: Path) -> None:
    """STAMP before version 2: corners in px of 256/224 µm, and no unit."""
    job = out.with_name("job")
    job.mkdir()
    rng = np.random.default_rng(0)
    for number, name in enumerate(NAMES):
        with h5py.File(job / f"{name}.h5", "w") as file:
            file["coords"] = np.array([[0, 0], [0, 224]])
            file["feats"] = rng.normal(size=(2, 6)).astype("f4") + number % 2
            file.attrs["extractor"] = "xiyuewang-ctranspath-7c998680"
    import_peer(job, out, "stamp", slides=[home / "slides"])


def slide2vec(home: Path, out: Path) -> None:
    export_peer(home / "own", out.with_name("job"), "slide2vec")
    import_peer(out.with_name("job"), out, "slide2vec", slides=[home / "slides"])


def older_import(home: Path, out: Path) -> None:
    """As version 1.6 imported: no group `tiles`, no grids in the record."""
    trident(home, out)
    for path in out.glob("*/tiles/*.h5"):
        with h5py.File(path, "r+") as file:
            del file["tiles"]
            del file.attrs[DATASETS]
        ledger = out / "slides" / path.stem / "slide.json"
        document = read_json(ledger)
        stage = document["stages"][path.parent.relative_to(out).as_posix()]
        name = path.relative_to(out).as_posix()
        stage["files"][name] = path.stat().st_size
        stage["sums"][name] = file_sum(path)
        write_json(ledger, document)
    older(out)


def older_run(home: Path, out: Path) -> None:
    own(home, out)
    older(out)


def older(out: Path) -> None:
    for path in out.glob("records/*/run.json"):
        document = read_json(path)
        document.pop("grids")
        write_json(path, document)


def merged(home: Path, out: Path) -> None:
    halves = []
    for number, names in enumerate((NAMES[:4], NAMES[4:])):
        half = out.with_name(f"half{number}")
        slides = [home / "slides" / f"{name}.svs" for name in names]
        ts.run(slides, out=half, **SMALL)
        halves.append(half)
    merge_results(halves, out=out)


def moved(home: Path, out: Path) -> None:
    own(home, out.with_name("before"))
    out.with_name("before").rename(out)


KINDS = (
    own,
    trident,
    clam,
    stamp,
    historic_stamp,
    slide2vec,
    older_import,
    older_run,
    merged,
    moved,
)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def folder(
    request: pytest.FixtureRequest, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("kind") / "results"
    make: Callable[[Path, Path], None] = request.param
    make(home, out)
    return out


def num_tiles_of(folder: Path) -> dict[str, int]:
    results = open_results(folder)
    return {name: len(results.tiles(name).coords_l0) for name in results.slides}


def check(*arguments: object) -> str:
    ended = thinsection(*arguments)
    assert ended.returncode == 0, f"{arguments}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def features_of(folder: Path) -> tuple[str, ...]:
    """Option that names embeddings where the folder has several of one invocation."""
    addresses = open_results(folder).features
    return ("--features", addresses[0]) if len(addresses) > 1 else ()


def test_slides_and_tiles_are_counted_once(folder: Path) -> None:
    counts = num_tiles_of(folder)
    assert set(counts) == set(NAMES) and min(counts.values()) > 1
    rows = open_results(folder).rows()
    assert {row["slide_id"]: row["num_tiles"] for row in rows} == counts
    pooled = check("aggregate", folder, "--slide-encoder", "max")
    assert pooled.splitlines()[-1] == "8 of 8 slides have an embedding of max"
    assert json.loads(check("ls", folder, "--json"))["num_slides"] == 8


def test_commands_that_read_work(folder: Path, tmp_path: Path) -> None:
    counts = num_tiles_of(folder)
    which = features_of(folder)
    anndata = pytest.importorskip("anndata", reason="anndata is not installed")
    check("verify", folder)
    check("export", "anndata", folder, "--out", tmp_path / "x.h5ad", *which)
    assert len(anndata.read_h5ad(tmp_path / "x.h5ad")) == sum(counts.values())
    check("export", "qupath", folder, "--out", tmp_path / "qupath")
    for name, count in counts.items():
        features = read_json(tmp_path / "qupath" / f"{name}.geojson")["features"]
        tiles = [f for f in features if f["properties"]["objectType"] == "detection"]
        assert len(tiles) == count
    for tool in ("trident", "clam", "stamp", "slide2vec"):
        out = tmp_path / tool
        check("export", tool, folder, "--out", out, *which)
        assert sum(path.is_file() for path in out.rglob("*")) >= len(NAMES)
    check("export", "jpeg", folder, "--out", tmp_path / "jpeg")
    pictures = list((tmp_path / "jpeg").rglob("*.jpg"))
    assert len(pictures) == sum(counts.values())
    check("merge", folder, "--out", tmp_path / "merged")
    assert num_tiles_of(tmp_path / "merged") == counts


def test_python_and_the_viewer_show_the_tiles(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    results = open_results(folder)
    for name in NAMES[:2]:
        layers = list(layers_of(results, name, 2, 2**26))
        grids = [layer for layer in layers if layer.name == "tiles"]
        assert len(grids) == 1
        count = len(results.tiles(name).coords_l0)
        assert int.from_bytes(grids[0].read()[:4], "little") == count
    ts.plot.tiles(results, NAMES[0])
    dataset = ts.TileDataset(folder, slides=NAMES[:1])
    assert sum(1 for _ in dataset) == len(results.tiles(NAMES[0]).coords_l0)


def test_a_model_is_trained_predicts_and_draws(
    folder: Path, home: Path, tmp_path: Path
) -> None:
    which = features_of(folder)
    out = folder / "experiments" / "grade"
    labels = ("--labels", home / "labels.csv", "--target", "grade")
    few = ("--epochs", "1", "--folds", "2", "--inner-folds", "2")
    check("train", folder, *labels, "--out", out, *few, *which)
    model = out / "model.safetensors"
    said = check("predict", model, folder, *which)
    assert "8 of 8 predicted" in said
    drawn = check("heatmap", model, folder, *which)
    assert all(f"/{name}." in drawn for name in NAMES)
