"""Every figure in the README and on the pages of evidence has a source that can be looked up.

A table's figures stand in a JSON of `benchmarks/results/`, which the text names, or in one of an
earlier commit, or in a test; or the text says when and how they were measured by hand.
"""

import json
import re

import pytest

from .figures import RESULTS, Figure, Table, is_recorded, tables_of
from .pages import ROOT, page_paths, text_of

# pages of figures that were copied from a JSON; those of a template are filled from it
EVIDENCE = [
    page
    for page in page_paths()
    if page.startswith("docs/validation/") and page.endswith(".md")
]
# page -> figures that follow from others, and how
DERIVED: dict[str, dict[str, str]] = {}
# a table with fewer numbers states facts, not measurements
_FEWEST = 2
_PEERS = {
    "trident": "TRIDENT",
    "slide2vec": "slide2vec",
    "lazyslide": "LazySlide",
    "mussel": "Mussel",
    "atlaspatch": "AtlasPatch",
    "tiatoolbox": "TIAToolbox",
}


def tables_of_figures(page: str) -> list[Table]:
    """Tables of a page that state measurements."""
    return [table for table in tables_of(page) if len(table.figures()) >= _FEWEST]


@pytest.mark.parametrize("page", EVIDENCE)
def test_every_table_of_figures_has_a_source(page: str) -> None:
    for table in tables_of_figures(page):
        by_hand = table.is_by_hand() or table.is_earlier()
        assert by_hand or table.json_names() or table.tests(), (page, table.line)


@pytest.mark.parametrize("page", EVIDENCE)
def test_figures_are_those_of_the_json_that_the_page_names(page: str) -> None:
    derived = DERIVED.get(page, {})
    for table in tables_of_figures(page):
        names = table.json_names()
        if table.is_by_hand() or table.is_earlier() or not names:
            continue
        missing = [f.text for f in table.figures() if not is_recorded(f, names)]
        assert [text for text in missing if text not in derived] == [], (
            page,
            table.line,
        )


def test_by_hand_is_said_in_one_form() -> None:
    for page in EVIDENCE:
        for line in text_of(page).splitlines():
            assert "Source: by hand" not in line, (page, line)


def test_a_changed_figure_is_noticed() -> None:
    """Most figures that are off by a few units of the last digit are in no JSON."""
    noticed = []
    for page in EVIDENCE:
        for table in tables_of_figures(page):
            names = table.json_names()
            if table.is_by_hand() or table.is_earlier() or not names:
                continue
            for figure in table.figures():
                for change in (-7, -3, 3, 7):
                    value = figure.value + change * figure.step
                    wrong = Figure(figure.text, value, figure.step, figure.scales)
                    noticed.append(not is_recorded(wrong, names))
    assert sum(noticed) >= 0.6 * len(noticed) > 1000


def test_each_figure_of_the_readme_is_that_of_its_json() -> None:
    (table,) = [
        t for t in tables_of("README.md") if "tiles per CPU-second" in t.header[1]
    ]
    keys = re.findall(r"<!-- (\w+): (\S+) -->", text_of("README.md"))
    assert len(keys) == len(table.rows)
    for (name, key), row in zip(keys, table.rows, strict=True):
        record = json.loads((RESULTS / f"{name}.json").read_text())
        assert f"an {record['cpu']}." in text_of("README.md")
        slide, _, job_name = key.partition("/")
        job = record["results"][slide][job_name]
        packages = {
            package: value
            for package, value in job.items()
            if isinstance(value, dict) and "tiles_per_cpu_s" in value
        }
        ours = packages.pop("thinsection")
        packages.pop("openslide_pillow", None)  # a plain loop, no package
        best = max(packages, key=lambda package: packages[package]["tiles_per_cpu_s"])
        least = min(package["peak_rss_mb"] for package in packages.values())
        assert row[1:] == (
            _printed(ours["tiles_per_cpu_s"]),
            f"{_PEERS[best]}, {_printed(packages[best]['tiles_per_cpu_s'])}",
            f"{job['ours_over_the_best_peer']:.1f}",
            f"{_half_up(ours['peak_rss_mb'])} MB",
            f"{_half_up(least)} MB",
        ), row[0]


def _printed(rate: float) -> str:
    """Three digits, or whole numbers."""
    return f"{rate:.1f}" if rate < 100 else f"{_half_up(rate):,}"


def _half_up(value: float) -> int:
    return int(value + 0.5)


def test_the_readme_has_no_other_figures_of_a_measurement() -> None:
    prose = re.sub(
        r"^\|.*$|```.*?```", "", text_of("README.md"), flags=re.MULTILINE | re.DOTALL
    )
    assert re.findall(r"\d+ (?:MB|GiB|%|times|tiles per)", prose) == []


def test_a_json_of_the_benchmarks_says_when_and_of_which_commit() -> None:
    for path in RESULTS.glob("*.json"):
        record = json.loads(path.read_text())
        assert {"commit", "date", "results"} <= record.keys(), path.relative_to(ROOT)
