"""The wheel that users install: its files, and the types that their own mypy sees of it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "thinsection"

pytestmark = pytest.mark.check  # builds a wheel and checks it with mypy

SCRIPT = '''
"""What a user writes; every name below has its own type, none is Any."""

from typing import assert_type

import numpy as np
import numpy.typing as npt
import thinsection as ts
from thinsection.encode import TileEncoder
from thinsection.neighbors import tile_graph
from thinsection.pipeline.folder import Results
from thinsection.pipeline.ending import RunSummary
from thinsection.planning.plan import RunPlan
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
'''

# a type checker sees each of them only where the names are typed
MISTAKES = {
    "ts.open_slide(5)": "arg-type",
    "ts.tile_gird": "attr-defined",
    'ts.open_slide("a.svs").size.heigth': "attr-defined",
    "ts.tissue_mask()": "call-arg",
    'ts.run(["a.svs"], out=1)': "arg-type",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip(
        "hatchling", reason="hatchling builds the wheel and is not installed"
    )
    folder = tmp_path_factory.mktemp("wheel")
    build = (
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    )
    pip(*build)
    (path,) = folder.glob("thinsection-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user") / "site-packages"
    pip("install", "--no-deps", "--target", str(folder), str(wheel))
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


def mypy_strict(text: str, installed: Path) -> list[str]:
    """What mypy says of a script beside the installed package, away from our configuration."""
    script = installed.parent / "script.py"
    script.write_text(text)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--no-error-summary",
    ]
    command += ["--cache-dir", str(script.parent / "cache"), script.name]
    environment = {k: v for k, v in os.environ.items() if k != "MYPYPATH"}
    environment["PYTHONPATH"] = str(installed)
    done = subprocess.run(
        command, cwd=script.parent, env=environment, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(
    wheel: Path,
) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
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
    said = mypy_strict(SCRIPT + "\n".join(MISTAKES) + "\n", installed)
    first = SCRIPT.count("\n") + 1
    wanted = [
        (f"script.py:{n}", f"[{code}]")
        for n, code in enumerate(MISTAKES.values(), first)
    ]
    seen = [(line.split(": ")[0], line.split("  ")[-1]) for line in said]
    assert seen == wanted, "\n".join(said)
