# ruff: noqa: T201
"""`make dist`: builds what a release uploads, checks it, and installs it where nothing else is.

Each artefact is installed with each extra, or with none, in an environment of its own for each
Python that this machine has. There it does the work of `work.py`. The table goes to OUT/table.json.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .artefacts import (
    ROOT,
    Artefacts,
    build,
    checksums_of,
    copy_tree,
    problems,
    wheel_of_sdist,
)
from .environments import install, pythons_here
from .work import CHOICES, Outcome, steps_of, take, write_folder

PYTHONS = ("3.11", "3.12", "3.13")
NONE = "none"


@dataclass(frozen=True)
class Cell:
    """An artefact with an extra in an environment of a Python, and what it did there."""

    python: str
    artefact: str
    extra: str
    packages: int
    seconds: float
    outcomes: tuple[Outcome, ...]

    @property
    def problems(self) -> list[str]:
        """Steps that did not end as they must."""
        return [f"{o.name}: {o.problem}" for o in self.outcomes if o.problem]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if the artefacts are fit and every environment did its work."""
    parser = argparse.ArgumentParser(prog="python -m tests.release")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--python", action="append", choices=PYTHONS)
    parser.add_argument("--artefact", action="append", choices=["wheel", "sdist"])
    extras = [extra or NONE for extra in CHOICES]
    parser.add_argument("--extra", action="append", choices=extras)
    chosen = parser.parse_args(arguments)
    wanted = chosen.python or list(PYTHONS)
    with tempfile.TemporaryDirectory(prefix="thinsection-dist-") as name:
        scratch = Path(name)
        artefacts = build_fresh(chosen.out, scratch)
        found = problems(artefacts, tags=tags_of_commit())
        built = wheel_of_sdist(artefacts.sdist, scratch / "from_sdist")
        if checksums_of(built) != checksums_of(artefacts.wheel):
            found.append("wheel of the sdist must hold the files of the wheel")
        for problem in found:
            print(problem, flush=True)
        pythons = pythons_here(wanted)
        for version in wanted:
            if version not in pythons:
                print(
                    f"Python {version}: not on this machine, so not tried", flush=True
                )
        write_folder(scratch / "inputs")
        cells = []
        for cell in fill(artefacts, pythons, chosen.artefact, chosen.extra, scratch):
            cells.append(cell)
            print(line_of(cell), flush=True)
            write_table(chosen.out / "table.json", artefacts, cells, found)
    print(table_of(cells))
    return 1 if found or any(cell.problems for cell in cells) else 0


def build_fresh(out: Path, scratch: Path) -> Artefacts:
    """Builds both from a copy of the tree, as a clone has it: the hook fetches OpenSeadragon."""
    tree = scratch / "tree"
    copy_tree(tree)
    for old in (*out.glob("thinsection-*.whl"), *out.glob("thinsection-*.tar.gz")):
        old.unlink()
    return build(tree, out.resolve(), network=True)


def fill(
    artefacts: Artefacts,
    pythons: dict[str, Path],
    kinds: list[str] | None,
    extras: list[str] | None,
    scratch: Path,
) -> Iterator[Cell]:
    """Each cell of the table in turn; its environment is removed before the next one is made."""
    for version, python in pythons.items():
        for kind in kinds or ("wheel", "sdist"):
            artefact = artefacts.wheel if kind == "wheel" else artefacts.sdist
            for extra in CHOICES:
                if extras is not None and (extra or NONE) not in extras:
                    continue
                home = scratch / "cell"
                shutil.copytree(scratch / "inputs", home / "work")
                try:
                    environment = install(python, artefact, extra, home / "environment")
                except RuntimeError as error:
                    outcomes = [Outcome("install", 0.0, str(error))]
                    packages = 0
                else:
                    packages = environment.packages()
                    outcomes = [
                        take(step, environment, home / "work")
                        for step in steps_of(extra)
                    ]
                seconds = round(sum(outcome.seconds for outcome in outcomes), 1)
                cell = Cell(
                    version, kind, extra or NONE, packages, seconds, tuple(outcomes)
                )
                shutil.rmtree(home)
                yield cell


def tags_of_commit() -> list[str]:
    """Names of the tags of this commit."""
    command = ["git", "tag", "--points-at", "HEAD"]
    ended = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return ended.stdout.split()


def line_of(cell: Cell) -> str:
    """A cell in words."""
    head = f"Python {cell.python}, {cell.artefact}, {cell.extra}: "
    if not cell.problems:
        return f"{head}{len(cell.outcomes)} steps, {cell.packages} packages, {cell.seconds:.0f} s"
    return "\n  ".join(
        [
            f"{head}{len(cell.problems)} of {len(cell.outcomes)} steps failed",
            *cell.problems,
        ]
    )


def table_of(cells: Sequence[Cell]) -> str:
    """A row for each Python and artefact, a column for each extra: steps that ended well."""
    extras = list(dict.fromkeys(cell.extra for cell in cells))
    rows = dict.fromkeys((cell.python, cell.artefact) for cell in cells)
    lines = [
        f"| Python | artefact | {' | '.join(extras)} |",
        "|---" * (2 + len(extras)) + "|",
    ]
    for python, artefact in rows:
        words = []
        for extra in extras:
            wanted = (python, artefact, extra)
            for cell in cells:
                if (cell.python, cell.artefact, cell.extra) == wanted:
                    passed = len(cell.outcomes) - len(cell.problems)
                    words.append(f"{passed}/{len(cell.outcomes)}")
        lines.append(f"| {python} | {artefact} | {' | '.join(words)} |")
    return "\n".join(lines)


def write_table(
    path: Path, artefacts: Artefacts, cells: Sequence[Cell], found: Sequence[str]
) -> None:
    """Writes the cells, and what the artefacts are, as JSON."""
    document = {
        "wheel": artefacts.wheel.name,
        "sdist": artefacts.sdist.name,
        "bytes": [artefacts.wheel.stat().st_size, artefacts.sdist.stat().st_size],
        "system": platform.platform(),
        "problems": list(found),
        "cells": [asdict(cell) for cell in cells],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
