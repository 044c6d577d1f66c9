"""Every figure in the README and on the pages of evidence has a source that can be looked up.

A table's figures stand in a JSON of `benchmarks/results/`, which the text names, or in one of an
earlier commit, or in a test; or the text says when and how they were measured by hand.
"""

import importlib.util
import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from .figures import RESULTS, Figure, Table, is_recorded, tables_of
from .pages import ROOT, page_paths, text_of

# pages of figures that were copied from a JSON; those of a template are filled from it
PAPER = "paper/paper.md"
EVIDENCE = [
    page
    for page in page_paths()
    if page.startswith("docs/validation/") and page.endswith(".md")
] + [PAPER]
# page -> figures that follow from others, and how
DERIVED: dict[str, dict[str, str]] = {}
# a table with fewer numbers states facts, not measurements
_FEWEST = 2
LOOPS = ("openslide_pillow", "cucim_loop", "fastslide_loop", "microtome_loop")
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


@pytest.mark.parametrize("page", ["README.md", PAPER])
def test_each_figure_of_a_whole_job_is_that_of_its_json(page: str) -> None:
    (table,) = [t for t in tables_of(page) if "tiles per CPU-second" in t.header[1]]
    keys = re.findall(r"<!-- (\w+): (\S+) -->", text_of(page))
    assert len(keys) == len(table.rows)
    for (name, key), row in zip(keys, table.rows, strict=True):
        record = json.loads((RESULTS / f"{name}.json").read_text())
        assert f"an {record['cpu']}." in text_of(page)
        assert f"({record['date']},\ncommit {record['commit']})" in text_of(page)
        slide, _, job_name = key.partition("/")
        job = record["results"][slide][job_name]
        packages = {
            package: value
            for package, value in job.items()
            if isinstance(value, dict) and "tiles_per_cpu_s" in value
        }
        ours = packages.pop("thinsection")
        for loop in [way for way in packages if way in LOOPS]:  # no packages
            packages.pop(loop)
        best = max(packages, key=lambda package: packages[package]["tiles_per_cpu_s"])
        least = min(package["peak_rss_mb"] for package in packages.values())
        assert row[1:] == (
            _printed(ours["tiles_per_cpu_s"]),
            f"{_PEERS[best]}, {_printed(packages[best]['tiles_per_cpu_s'])}",
            f"{job['ours_over_the_best_peer']:.1f}",
            f"{_half_up(ours['peak_rss_mb'])} MB",
            f"{_half_up(least)} MB",
        ), row[0]


def test_each_figure_beside_a_loop_is_that_of_its_json() -> None:
    (table,) = [t for t in tables_of("README.md") if "loop" in t.header]
    keys = re.findall(r"<!-- loop of (\w+): (\S+)/(\S+) -->", text_of("README.md"))
    assert len(keys) == len(table.rows) == 7
    for (name, slide, job_name), row in zip(keys, table.rows, strict=True):
        record = json.loads((RESULTS / f"{name}.json").read_text())
        job = record["results"][slide][job_name]
        loops = {way: job[way] for way in LOOPS[1:] if way in job}
        best = max(loops.values(), key=lambda found: found["tiles_per_cpu_s"])
        ours = job["thinsection"]
        assert row[1:] == (
            _printed(ours["tiles_per_cpu_s"]),
            _printed(best["tiles_per_cpu_s"]),
            f"{ours['tiles_per_cpu_s'] / best['tiles_per_cpu_s']:.2f}",
            f"{_half_up(ours['peak_rss_mb'])} MB",
            f"{_half_up(best['peak_rss_mb'])} MB",
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


def commits_of_this_branch() -> list[str]:
    """Full names of the commits that lead to this one; skips where git does not know them all."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout of git")
    if _git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("a checkout without its history")
    return _git("log", "--format=%H").split()


def _git(*arguments: str) -> str:
    child = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return child.stdout.strip()


def is_of(commit: str, commits: list[str]) -> bool:
    """Tells if a short name is that of one of these commits, without a mark such as -dirty."""
    return len(commit) >= 7 and any(full.startswith(commit) for full in commits)


def test_a_json_of_the_benchmarks_says_when_and_of_which_commit() -> None:
    commits = commits_of_this_branch()
    for path in RESULTS.glob("*.json"):
        record = json.loads(path.read_text())
        assert record["benchmark"] == path.stem
        assert {"date", "results"} <= record.keys(), path.name
        assert is_of(record["commit"], commits), (path.name, record["commit"])


def test_a_dirty_or_unknown_commit_is_noticed() -> None:
    commits = commits_of_this_branch()
    short = commits[0][:8]
    assert is_of(short, commits)
    assert not is_of(f"{short}-dirty", commits)
    assert not is_of("0000000", commits)
    assert not is_of("", commits)


@pytest.fixture(scope="module")
def hooks() -> Any:
    """docs/hooks.py, as mkdocs loads it."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_prints_date_and_commit_beside_a_benchmark(hooks: Any) -> None:
    record = json.loads((RESULTS / "bench_job.json").read_text())
    words = f"({record['date']}, commit {record['commit']})"
    assert hooks.with_commits("Source: `bench_job`.") == f"Source: `bench_job` {words}."
    assert hooks.with_commits("`bench_job.json`") == f"`bench_job.json` {words}"
    earlier = "`bench_job.json` of commit `498ad42`"
    assert hooks.with_commits(earlier) == earlier
    assert hooks.with_commits("`bench_knead`") == "`bench_knead`"


def test_the_site_lists_the_benchmarks_of_each_room(hooks: Any) -> None:
    by_room = hooks.benchmarks_by_room()
    assert {"bench_reading", "bench_job", "bench_measures"} <= set(by_room["tiles"])
    assert {"bench_frames", "bench_neighbors"} <= set(by_room["frames"])
    assert "bench_scale" in by_room["any"]
    listed = {name for names in by_room.values() for name in names}
    assert listed == {path.stem for path in RESULTS.glob("*.json")}
    assert "| `tiles` | " in hooks.pages()["maintaining.md"]
