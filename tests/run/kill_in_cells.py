# ruff: noqa: T201
"""Runs an import of cells in forks of one warm process, and kills each at one moment of it.

    python kill_in_cells.py SLIDES OUT CELLS [CELLS ...]

A moment is a batch of cells that is read, a block of a table that is written, or a rename. Prints a
line of JSON for each kill: what it left, what the resumed run read, and which of its files differ
from those of the undisturbed run. The first line has the moments of that one.
"""

import json
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tests.run.kill_at_rename import content_of

import thinsection.cells.collect
import thinsection.cells.sources
import thinsection.cells.spill
from thinsection.cells.spill import BlockKeys, BlockSpill
from thinsection.config import replace_flat
from thinsection.run.run import run
from thinsection.stages.config import RunConfig
from thinsection.store.ledger import load_ledger

SETTINGS = {
    "tile_px": 128,
    "overview": False,
    "memory": "256MiB",
    "until": "tiles",
}
# so small that a file of some hundred cells is read in several parts, and written in several
BATCH_CELLS = 150
BLOCK_PX = 600


def divide_small_files() -> None:
    """Makes batches and blocks small; the tables hold the same cells."""
    vars(thinsection.cells.collect)["MAX_CELLS"] = BATCH_CELLS
    thinsection.cells.spill.BLOCK_PX = BLOCK_PX
    thinsection.cells.spill._MIN_ROWS = 1


class Moments:
    """Notes the moments of a run in a file, and ends the process at one of them."""

    def __init__(self, out: Path, log: Path, kill_at: str) -> None:
        self._out = out
        self._descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._kill_at = kill_at
        self._counts = Counter[str]()
        self._table = ""

    def note(self, words: str) -> None:
        """Notes a moment; those with the same words are numbered."""
        self._counts[words] += 1
        text = f"{words} {self._counts[words]}"
        self.write(f"moment {text}")
        if text == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, line: str) -> None:
        """Writes a line, which a kill does not lose."""
        os.write(self._descriptor, f"{line}\n".encode())

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Notes the renames in the results folder, and the files opened elsewhere."""
        if event == "os.rename":
            path = Path(os.fsdecode(args[1]))
            if path.is_relative_to(self._out):
                self.note(f"renamed {path.relative_to(self._out)}")
        elif event == "open" and isinstance(args[0], str):
            self.write(f"open {args[0]}")

    def listen(self) -> None:
        """Notes the batches and blocks of each table from now on."""
        importer = vars(thinsection.cells.sources)
        write_cells = importer["write_cells"]
        add = BlockSpill.add
        write_table = pq.ParquetWriter.write_table

        def write_noted_cells(path: Path, *args: Any, **kwargs: Any) -> Any:
            self._table = str(path.relative_to(self._out))
            return write_cells(path, *args, **kwargs)

        def add_noted(spill: BlockSpill, rows: Any, keys: BlockKeys) -> None:
            self.note(f"batch of {self._table}")
            add(spill, rows, keys)

        def write_noted_table(*args: Any, **kwargs: Any) -> None:
            self.note(f"block of {self._table}")
            write_table(*args, **kwargs)

        importer["write_cells"] = write_noted_cells
        BlockSpill.add = add_noted  # type: ignore[method-assign]
        pq.ParquetWriter.write_table = write_noted_table
        sys.addaudithook(self.hook)


def execute(
    slides: str, out: Path, cells: list[str], kill_at: str = ""
) -> tuple[int, list[str], list[str]]:
    """Runs in a fork that is killed at a moment, if one is given.

    Returns its exit status, its moments, and the files of `slides` and `cells` that it opened.
    """
    log = out.with_suffix(".log")
    log.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        Moments(out, log, kill_at).listen()
        divide_small_files()
        config = replace_flat(RunConfig(), {**SETTINGS, "cells": cells})
        os._exit(run([slides], out=out, config=config).exit_code)
    status = os.waitpid(child, 0)[1]
    moments = []
    opened = set()
    for line in log.read_text().splitlines():
        word, _, text = line.partition(" ")
        if word == "moment":
            moments.append(text)
        elif text.startswith((slides, *cells)):
            opened.add(str(Path(text).relative_to(Path(slides).parent)))
    return status, moments, sorted(opened)


def left_in(out: Path, reference: Path) -> dict[str, Any]:
    """What a killed run left: tables that differ from the undisturbed ones, and the stages done."""
    tables = [path for path in out.rglob("*.parquet") if not path.name.startswith(".")]
    wrong = [
        str(path)
        for path in tables
        if path.read_bytes() != (reference / path.relative_to(out)).read_bytes()
    ]
    done = {}
    for folder in sorted((reference / "slides").iterdir()):
        ledger = load_ledger(out, folder.name)
        assert not ledger.damage
        done[folder.name] = sorted(ledger.stages)
    return {"wrong_tables": wrong, "done": done}


def contents(folder: Path) -> dict[str, bytes]:
    """Content of every result by the name of its file."""
    return {
        str(path.relative_to(folder)): content_of(path)
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] != "records"
    }


def differing(out: Path, reference: Path) -> list[str]:
    """Names of files that are not the same in both folders, or only in one."""
    files = contents(out)
    expected = contents(reference)
    names = sorted(files.keys() | expected.keys())
    return [name for name in names if files.get(name) != expected.get(name)]


def chosen(moments: list[str]) -> list[str]:
    """Moments of the first and the last table, and of the last counts.

    Of a table: its second batch, its second block, its rename, and that of the ledger after it.
    """
    renames = [words for words in moments if words.startswith("renamed")]
    tables = [words for words in renames if words.endswith(".parquet 1")]
    counts = [words for words in renames if "/cells_" in words]
    chosen = []
    for rename in (tables[0], tables[-1]):
        table = rename.removeprefix("renamed ").removesuffix(" 1")
        chosen += [f"batch of {table} 2", f"block of {table} 2"]
    for rename in (tables[0], tables[-1], counts[-1]):
        chosen += [rename, renames[renames.index(rename) + 1]]
    return chosen


def main(slides: str, out: Path, cells: list[str]) -> None:
    out.mkdir(exist_ok=True)
    reference = out / "reference"
    status, moments, opened = execute(slides, reference, cells)
    assert status == 0
    print(json.dumps({"moments": moments, "opened": opened}), flush=True)
    for number, moment in enumerate(chosen(moments)):
        target = out / f"kill{number}"
        status, killed_moments, _ = execute(slides, target, cells, moment)
        assert os.WTERMSIG(status) == signal.SIGKILL
        line = left_in(target, reference) | {"killed_at": killed_moments[-1]}
        status, _, opened = execute(slides, target, cells)
        assert status == 0
        differs = differing(target, reference)
        print(json.dumps(line | {"opened": opened, "differs": differs}), flush=True)
        shutil.rmtree(target)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
