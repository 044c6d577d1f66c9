"""What needs no torch does not import it, nor SciPy: it would be most of a small command's time."""

from pathlib import Path

import pytest

import thinsection as ts
from thinsection.testing import run_and_measure
from thinsection.testing.memory import Measured
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import MIB

HERE = "tests.run.without_torch"
READING_BYTES = 100 * MIB  # beyond the interpreter with NumPy


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("slides") / "a.tiff"
    write_he_slide(path, (2000, 1500))
    return str(path)


@pytest.fixture(scope="module")
def results(slide: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("out") / "results"
    ts.run([slide], out=out, encoders=["efficientnet_lite0"], engine="torch")
    return str(out)


def measured(function: str, **arguments: object) -> Measured:
    return run_and_measure(HERE, function, **arguments)


def test_native_tiles_are_read_without_torch_in_little_memory(slide: str) -> None:
    reading = measured("tiles_read", slide=slide)
    assert reading.result == [[], 5 * 7]
    alone = measured("nothing")
    assert alone.result == []
    assert reading.peak_bytes - alone.peak_bytes < READING_BYTES


def test_tissue_is_found_without_torch(slide: str) -> None:
    packages, num_px = measured("tissue_found", slide=slide).result
    assert packages == [] and num_px > 0


def test_a_run_to_the_tile_grid_needs_no_torch(slide: str, tmp_path: Path) -> None:
    run = measured("tiles_run", slide=slide, out=str(tmp_path / "out"))
    assert run.result == [[], 1]


def test_results_are_listed_without_torch(results: str) -> None:
    assert measured("listed", folder=results).result == [[], 0]


def test_embeddings_are_exported_without_torch(results: str, tmp_path: Path) -> None:
    out = tmp_path / "trident"
    assert measured("exported", folder=results, out=str(out)).result == [[], 0]
    assert list(out.rglob("*.h5"))
