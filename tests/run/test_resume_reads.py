"""A run that finds everything done reads each ledger once, and writes the same tables."""

from collections import Counter
from pathlib import Path

import pytest

from thinsection.run.run import run
from thinsection.store import ledger
from thinsection.store.ledger import load_ledger, load_ledgers
from thinsection.testing.synthetic import write_he_slide

TABLES = ("summary.csv", "failed.csv")


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    for number in range(3):
        write_he_slide(folder / f"s{number}.svs", (700, 600), seed=number)
    return folder


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Reads of ledgers, by slide id."""
    reads = Counter[str]()
    read = ledger._read_document

    def note(path: Path) -> object:
        reads[path.parent.name] += 1
        return read(path)

    monkeypatch.setattr(ledger, "_read_document", note)
    return reads


def test_ledgers_of_a_finished_run_are_read_once(
    slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    first.mkdir()
    (first / "s0.svs").symlink_to(slides / "s0.svs")
    out = tmp_path / "out"
    run([first / "s0.svs"], out=out, until="tiles")
    run([slides / "s1.svs"], out=out, until="tiles")
    tables = [(out / name).read_bytes() for name in TABLES]
    reads = count_reads(monkeypatch)
    summary = run([slides / "s1.svs"], out=out, until="tiles")
    assert summary.counts["skipped"] == 1
    # the other slide belongs to the folder's tables
    assert reads == {"s0": 1, "s1": 1}
    assert [(out / name).read_bytes() for name in TABLES] == tables


def test_slides_that_were_done_in_between_are_in_the_tables(
    slides: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run([slides / "s0.svs"], out=out, until="tiles")
    summary = run([slides], out=out, until="tiles")
    assert summary.counts["skipped"] == 1
    assert summary.counts["done"] == 2
    rows = (out / "summary.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == ["s0", "s1", "s2"]


def test_ledgers_that_were_read_before_stand_for_those_of_the_folder(
    slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run([slides], out=tmp_path, until="tiles")
    fresh = load_ledgers(tmp_path)
    reads = count_reads(monkeypatch)
    read = {"s1": load_ledger(tmp_path, "s1")}
    assert load_ledgers(tmp_path, read) == fresh
    assert reads == {"s0": 1, "s1": 1, "s2": 1}
