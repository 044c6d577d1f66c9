"""The memory of commands that copy embeddings grows with a fraction of their bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.bench_memory import DIM, write_trident

from thinsection.exchange.anndata import export_anndata
from thinsection.exchange.peer_export import export_peer
from thinsection.exchange.peer_import import import_peer
from thinsection.exchange.qupath import export_qupath
from thinsection.run.pooling import aggregate_folder
from thinsection.testing import run_and_measure

pytestmark = pytest.mark.check  # a process for each size and command

TILES = (15_000, 90_000)  # more than the largest block of rows
EMBEDDING_BYTES = 4 * DIM


def of_import(folder: str) -> int:
    """Imports the tool's folder anew."""
    return import_peer(Path(folder) / "job", Path(folder) / "again", "trident")


def of_aggregate(folder: str) -> int:
    """Pools the imported slides."""
    return len(aggregate_folder(Path(folder) / "results"))


def of_anndata(folder: str) -> int:
    """Exports the imported slides."""
    return export_anndata(Path(folder) / "results", Path(folder) / "all.h5ad")


def of_stamp(folder: str) -> int:
    """Exports the imported slides."""
    return export_peer(Path(folder) / "results", Path(folder) / "stamp", "stamp")


def of_clam(folder: str) -> int:
    """Exports the imported slides."""
    return export_peer(Path(folder) / "results", Path(folder) / "clam", "clam")


def of_qupath(folder: str) -> int:
    """Exports the imported slides."""
    return export_qupath(Path(folder) / "results", Path(folder) / "qupath")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A folder for each number of tiles, with two slides, as TRIDENT writes it and imported."""
    made = {}
    for num_tiles in TILES:
        folder = tmp_path_factory.mktemp(f"{num_tiles}")
        job = folder / "job"
        write_trident(job / "20x", "large", num_tiles, 1)
        write_trident(job / "20x", "small", num_tiles // 10, 2)
        (job / "slides.csv").write_text(
            "slide_id,slide_path,mpp\nlarge,large.svs,0.25\nsmall,small.svs,0.25\n"
        )
        import_peer(job, folder / "results", "trident")
        made[num_tiles] = folder
    return made


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("command", "most"),
    [
        (of_import, 0.5),
        (of_aggregate, 0.5),
        (of_anndata, 0.5),
        (of_stamp, 0.5),
        (of_qupath, 0.7),
        # a tensor is written whole
        (of_clam, 1.4),
    ],
)
def test_the_peak_grows_by_less_than_so_many_times_the_embeddings(
    folders: dict[int, Path], command: Callable[[str], int], most: float
) -> None:
    peaks = []
    for num_tiles in TILES:
        measured = run_and_measure(
            __name__, command.__name__, folder=str(folders[num_tiles])
        )
        assert measured.result
        peaks.append(measured.peak_bytes)
    growth = (peaks[1] - peaks[0]) / (TILES[1] - TILES[0])
    assert growth < most * EMBEDDING_BYTES, f"{growth:.0f} bytes per tile"
