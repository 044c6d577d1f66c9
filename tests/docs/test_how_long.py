"""The table of hours is what the measured speeds give, computed here in another way."""

import json
import re
from importlib import import_module

import pytest

from .figures import RESULTS
from .pages import ROOT

TILES = 10_000  # of each slide of the page


def results_of(name: str) -> dict[str, object]:
    """Results of a benchmark."""
    found: dict[str, object] = json.loads((RESULTS / f"{name}.json").read_text())[
        "results"
    ]
    return found


def seconds_in(cell: str) -> float:
    """Seconds of a span of time as the page prints it."""
    number, unit = cell.split()
    return float(number) * {"s": 1, "min": 60, "h": 3600, "days": 86400}[unit]


@pytest.fixture(scope="module")
def page() -> str:
    """The page as the site has it."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    hooks = import_module("docs.hooks")

    return str(hooks.pages()["how_long.md"])


def rows_of(page: str) -> dict[str, list[str]]:
    """Encoder -> its cells."""
    part = page.split("## One slide")[1].split("How the table", maxsplit=1)[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if "|" in line]
    return {cells[0]: cells[1:] for cells in lines[2:]}


def test_every_span_follows_from_the_measured_speeds(page: str) -> None:
    rates = results_of("bench_rates")
    job = json.loads((RESULTS / "bench_job.json").read_text())["results"]
    read = job["real"]["mean_0.5"]["thinsection"]["tiles_per_cpu_s"]
    stream = json.loads((RESULTS / "gpu_proof.json").read_text())["results"]
    rows = rows_of(page)
    assert set(rows) == {name for name, row in rates.items() if isinstance(row, dict)}
    assert len(rows) > 20
    measured_on_gpu = 0
    for name, cells in rows.items():
        row = rates[name]
        assert isinstance(row, dict)
        cpu_s = TILES / row["tiles_per_cpu_s"] + TILES / read
        for slides, cell in zip((1, 100, 1000), cells):
            assert seconds_in(cell) == pytest.approx(slides * cpu_s / 8, rel=0.27)
        gpu = row["gpu_tiles_per_s"]
        for slides, cell in zip((100, 1000), cells[3:]):
            if gpu is None:
                assert cell == "–"
                continue
            rate = min(gpu, stream["rate stream"]["tiles_per_s"])
            assert seconds_in(cell) == pytest.approx(slides * TILES / rate, rel=0.27)
            measured_on_gpu += 1
    assert measured_on_gpu >= 6


def test_more_slides_take_longer_and_each_number_is_computed(page: str) -> None:
    for cells in rows_of(page).values():
        spans = [seconds_in(cell) for cell in cells[:3]]
        assert spans == sorted(spans)
    template = (ROOT / "docs" / "how_long.md.j2").read_text()
    table = template.split("## The other steps")[1].split("## How to make")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line[:2] == "| "]
    for cell in cells[1:]:
        outside = re.sub(r"\{\{.*?\}\}", "", cell)
        assert not re.search(r"\d", outside), cell
