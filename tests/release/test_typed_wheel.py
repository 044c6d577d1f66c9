"""The wheel that users install: its files and its types."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .artefacts import Artefacts

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "thinsection"

pytestmark = pytest.mark.check  # builds a wheel and checks it with mypy

SCRIPT = '''
"""What a user writes; every name below has its own type, none is Any."""

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import thinsection as ts
from thinsection.encode import TileEncoder
from thinsection.tiles.graph import tile_graph
from thinsection.results.folder import Results
from thinsection.run.ending import RunSummary
from thinsection.run.plan import RunPlan
from thinsection.pool import SlideEncoder
from thinsection.qc import QcResult, TissueMask
from thinsection.slide import Slide
from thinsection.tiles import TileTable

with ts.open_slide("a.svs") as slide:
    assert_type(slide, Slide)
    tissue = assert_type(ts.tissue_mask(slide), TissueMask)
    assert_type(tissue.mask, npt.NDArray[np.bool_])
    tiles = assert_type(ts.tile_grid(slide, tissue=tissue), TileTable)
    assert_type(tiles.coords_l0, npt.NDArray[np.int64])
    encoder = assert_type(ts.load_encoder("efficientnet_lite0"), TileEncoder)
    embeddings, tiles = ts.embed_tiles(slide, tiles, encoder)
    assert_type(embeddings, npt.NDArray[np.float32])
pooled = ts.aggregate(embeddings, tiles.coords_l0, tile_px_l0=tiles.plan.size_l0[0])
assert_type(pooled, npt.NDArray[np.float32])
assert_type(tile_graph(tiles.coords_l0, k=8).edge_index, npt.NDArray[np.int64])
results = assert_type(ts.open_results("results"), Results)
assert_type(results.slides, tuple[str, ...])
assert_type(ts.load_slide_encoder("mean"), SlideEncoder)
assert_type(ts.run_qc(ts.open_slide("a.svs"), "histoqc-light"), QcResult)
assert_type(ts.plan(["slides/"]), RunPlan)
assert_type(ts.run(["slides/"], out="results", config=ts.RunConfig()), RunSummary)
# settings by name: one of each form, and paths where a text is expected
ts.run("slides", out=Path("results"), until="tiles", tile_mpp=[0.5, 2.0], qc=Path("a.toml"))
ts.run("slides", out="results", encoders=["uni"], slide_encoders=("mean",), executor="pool")
ts.plan(Path("slides"), tile_px=224, encoders=["uni", "phikon"])
ts.train(Path("results"), out="head", labels="labels.csv", target=["grade"], head="abmil")
ts.predict(Path("model.safetensors"), "slides", out=Path("results"), device="cpu")
ts.heatmap("px_focus", Path("results"), scale="cohort")
ts.tile_grid(slide, tile_px=224, tile_mpp="native")
# embeddings that were read are there
stored = results.tile_embeddings("a")
assert_type(stored.embeddings, npt.NDArray[np.floating[Any]])
assert_type(stored.features, npt.NDArray[np.floating[Any]])
'''

# a type checker sees each of them only where the names are typed
MISTAKES = {
    "ts.open_slide(5)": "arg-type",
    "ts.tile_gird": "attr-defined",
    'ts.open_slide("a.svs").size.heigth': "attr-defined",
    "ts.tissue_mask()": "call-arg",
    'ts.run(["a.svs"], out=1)': "arg-type",
    'ts.run(["a.svs"], out="results", untill="tiles")': "call-arg",
    'ts.run(["a.svs"], out="results", until="tile")': "arg-type",
    'ts.run(["a.svs"], out="results", encoders="uni")': "arg-type",
    'ts.plan(["a.svs"], tile_pxx=224)': "call-arg",
    'ts.train("results", out="head", heads="abmil")': "call-arg",
    'ts.train("results", out="head", folds="5")': "arg-type",
    'ts.predict("model.safetensors", "results", devise="cpu")': "call-arg",
    'ts.heatmap("px_focus", "results", scales="slide")': "call-arg",
    'ts.zeroshot("results", "prompts.toml", top=5)': "call-arg",
    'ts.tile_grid(ts.open_slide("a.svs"), tile_pixels=224)': "call-arg",
    'ts.view("results", ports=80)': "call-arg",
}
# libraries without types that the scripts of docs/how-to import
UNTYPED = (
    "anndata",
    "geopandas",
    "pandas",
    "pyarrow",
    "scipy",
    "shapely",
    "sklearn",
    "spatialdata",
    "umap",
)
# torch does not declare the types of `backward`
STRICT = """
[mypy]
strict = true
untyped_calls_exclude = torch
"""
WITHOUT_TYPES = """
[mypy-{package}.*]
ignore_missing_imports = true
follow_imports = skip
"""


@pytest.fixture(scope="module")
def installed(artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user") / "site-packages"
    pip("install", "--no-deps", "--target", str(folder), str(artefacts.wheel))
    return folder


def pip(*arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        *arguments,
        "-q",
        "--disable-pip-version-check",
    ]
    offline = {
        **os.environ,
        "PIP_NO_INDEX": "1",
    }  # everything that it needs is installed
    done = subprocess.run(command, env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def mypy_strict(paths: list[str], installed: Path, config: str) -> list[str]:
    """What mypy says of files beside the installed package, away from our configuration."""
    folder = installed.parent
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        f"--config-file={config}",
        "--no-error-summary",
    ]
    command += ["--cache-dir", str(folder / "cache"), *paths]
    environment = {k: v for k, v in os.environ.items() if k != "MYPYPATH"}
    environment["PYTHONPATH"] = str(installed)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if ": note: " not in line]


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(
    artefacts: Artefacts,
) -> None:
    names = set(zipfile.ZipFile(artefacts.wheel).namelist())
    held = {name for name in names if ".dist-info/" not in name}
    here = {
        f"thinsection/{path.relative_to(SOURCES).as_posix()}"
        for path in SOURCES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == here
    assert "thinsection/py.typed" in held
    assert any("/templates/" in name for name in held)
    assert any(name.startswith("thinsection/qc/presets/") for name in held)
    assert not any(
        part in ("tests", "test", "benchmarks") for n in names for part in n.split("/")
    )
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.timeout(900)  # mypy reads torch, too
def test_mypy_strict_passes_on_a_users_script_and_sees_its_mistakes(
    installed: Path,
) -> None:
    """assert_type fails where a name is Any; no import is ignored."""
    script = installed.parent / "script.py"
    script.write_text(SCRIPT + "\n".join(MISTAKES) + "\n")
    # the settings of the next test, so that mypy reads torch once for both
    (installed.parent / "strict.ini").write_text(STRICT)
    said = mypy_strict([script.name], installed, "strict.ini")
    first = SCRIPT.count("\n") + 1
    wanted = [
        (f"script.py:{n}", f"[{code}]")
        for n, code in enumerate(MISTAKES.values(), first)
    ]
    seen = [(line.split(": ")[0], line.split("  ")[-1]) for line in said]
    assert seen == wanted, "\n".join(said)


@pytest.mark.timeout(900)
def test_mypy_strict_passes_on_what_users_copy(installed: Path) -> None:
    """The scripts of docs/how-to and the example of a plug-in, as they stand."""
    folder = installed.parent
    scripts = sorted((ROOT / "docs" / "how-to").glob("*.py"))
    assert len(scripts) > 9
    for script in scripts:
        shutil.copy(script, folder)
    plugin = ROOT / "examples" / "plugin"
    shutil.copytree(plugin / "example_plugin", folder / "example_plugin")
    shutil.copy(plugin / "tests" / "test_reader.py", folder)
    parts = [STRICT, *(WITHOUT_TYPES.format(package=name) for name in UNTYPED)]
    (folder / "mypy.ini").write_text("".join(parts))
    names = [script.name for script in scripts]
    said = mypy_strict(
        [*names, "example_plugin", "test_reader.py"], installed, "mypy.ini"
    )
    assert not said, "\n".join(said)
