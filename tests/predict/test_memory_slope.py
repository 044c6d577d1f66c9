"""The memory of predictions grows with a fraction of the embeddings: rows are read in blocks."""

from pathlib import Path

import pytest
from benchmarks.bench_memory import DIM, write_trident

import thinsection as ts
from thinsection.exchange.peer_import import import_peer
from thinsection.predict.predicting import predict
from thinsection.testing import run_and_measure

pytestmark = pytest.mark.check  # a process for each size

TILES = (15_000, 60_000)
EMBEDDING_BYTES = 4 * DIM
NUM_CASES = 12


def predicted(model: str, results: str, out: str) -> int:
    """Predicts the slides of a folder; returns the number of slides with a prediction."""
    rows = predict(model, results, out=out).rows
    return sum(bool(row.answers) for row in rows)


def imported(folder: Path, slides: dict[str, int]) -> Path:
    """Results with slides of so many tiles, through a folder in TRIDENT's form."""
    rows = ["slide_id,slide_path,mpp"]
    for number, (name, num_tiles) in enumerate(slides.items()):
        write_trident(folder / "job" / "20x", name, num_tiles, number)
        rows.append(f"{name},{name}.svs,0.25")
    (folder / "job" / "slides.csv").write_text("\n".join(rows) + "\n")
    import_peer(folder / "job", folder / "results", "trident")
    return folder / "results"


@pytest.mark.timeout(600)
def test_predict_reads_embeddings_in_blocks(tmp_path: Path) -> None:
    cases = {f"t{number}": 100 for number in range(NUM_CASES)}
    results = imported(tmp_path / "training", cases)
    lines = [f"t{number},{'ab'[number % 2]}" for number in range(NUM_CASES)]
    labels = tmp_path / "labels.csv"
    labels.write_text("\n".join(["slide_id,target", *lines]) + "\n")
    ts.train(
        results, labels=labels, target=("target",), out=tmp_path / "model", epochs=2
    )
    peaks = []
    for num_tiles in TILES:
        slides = {"large": num_tiles, "small": num_tiles // 10}
        measured = run_and_measure(
            "tests.predict.test_memory_slope",
            "predicted",
            model=str(tmp_path / "model" / "model.safetensors"),
            results=str(imported(tmp_path / str(num_tiles), slides)),
            out=str(tmp_path / f"out{num_tiles}"),
        )
        assert measured.result == len(slides)
        peaks.append(measured.peak_bytes)
    growth = (peaks[1] - peaks[0]) / (TILES[1] - TILES[0])
    assert growth < 0.3 * EMBEDDING_BYTES, f"{growth:.0f} bytes per tile"
