"""Writes figures of README and paper, date and commit from the JSON: `python -m benchmarks.readme`.

A row ends with a comment such as `<!-- bench_job: real/mean_0.5 -->`, which names the JSON and the
job; `<!-- loop of bench_job: real/mean_0.5 -->` is a row beside the fastest loop. The name of the
row stays.
"""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "paper" / "paper.md")
_ROW = re.compile(r"^\| ([^|]+) \|.*(<!-- (\w+): (\w+)/(\S+) -->) \|$", re.MULTILINE)
_LOOP_ROW = re.compile(
    r"^\| ([^|]+) \|.*(<!-- loop of (\w+): (\w+)/(\S+) -->) \|$", re.MULTILINE
)
_MADE = re.compile(r"(`benchmarks/results/(\w+)\.json`\s+)\(\S+\s+commit\s+\S+\)")
_NAMES = {
    "trident": "TRIDENT",
    "slide2vec": "slide2vec",
    "lazyslide": "LazySlide",
    "mussel": "Mussel",
    "atlaspatch": "AtlasPatch",
    "tiatoolbox": "TIAToolbox",
}


def row(match: re.Match[str]) -> str:
    """One row with the figures of its JSON."""
    title, comment, name, slide, job = match.groups()
    results = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    figures: dict[str, Any] = results[slide][job]
    ours, best = figures["thinsection"], figures[figures["best_peer"]]
    least = figures[figures["least_peer"]]
    cells = (
        title,
        printed(ours["tiles_per_cpu_s"]),
        f"{_NAMES[figures['best_peer']]}, {printed(best['tiles_per_cpu_s'])}",
        f"{figures['ours_over_the_best_peer']:.1f}",
        f"{int(ours['peak_rss_mb'] + 0.5)} MB",
        f"{int(least['peak_rss_mb'] + 0.5)} MB {comment}",
    )
    return f"| {' | '.join(cells)} |"


def loop_row(match: re.Match[str]) -> str:
    """One row of the table of loops with the figures of its JSON."""
    title, comment, name, slide, job = match.groups()
    results = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    figures: dict[str, Any] = results[slide][job]
    ours, loop = figures["thinsection"], figures[figures["best_loop"]]
    cells = (
        title,
        printed(ours["tiles_per_cpu_s"]),
        printed(loop["tiles_per_cpu_s"]),
        f"{figures['ours_over_the_best_loop']:.2f}",
        f"{int(ours['peak_rss_mb'] + 0.5)} MB",
        f"{int(loop['peak_rss_mb'] + 0.5)} MB {comment}",
    )
    return f"| {' | '.join(cells)} |"


def made(match: re.Match[str]) -> str:
    """Name of a JSON, with its date and commit."""
    source, name = match.groups()
    record = json.loads((RESULTS / f"{name}.json").read_text())
    return f"{source}({record['date']},\ncommit {record['commit']})"


def printed(rate: float) -> str:
    """A rate with one decimal below 100, without one above."""
    return f"{rate:.1f}" if rate < 100 else f"{int(rate + 0.5):,}"


def main() -> None:
    """Rewrites the rows and the source above them."""
    for page in PAGES:
        text = _LOOP_ROW.sub(loop_row, _ROW.sub(row, page.read_text()))
        page.write_text(_MADE.sub(made, text))


if __name__ == "__main__":
    main()
