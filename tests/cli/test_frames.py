"""`thinsection frames` from files to a table, and its errors in one line."""

import json
from pathlib import Path

from tests.frames.structures import write_small
from tests.support.shell import Ended, thinsection


def run(*arguments: str) -> Ended:
    return thinsection("frames", *arguments)


def test_it_writes_the_table_and_the_summary(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.cif")
    done = run(str(path), "--assembly", "1", "--out", str(tmp_path / "f.csv"))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "f.csv").read_text().splitlines()
    assert lines[0].startswith('"structure","token","chain"') and len(lines) == 1 + 30
    summary = json.loads((tmp_path / "f.summary.json").read_text())
    assert summary[0]["tokens"] == 30 and summary[0]["too_few_atoms"] == 2
    assert "f.summary.json" in done.stdout


def test_a_file_that_is_no_structure_leaves_no_table_and_one_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "bad.cif").write_text("what is this")
    done = run(str(tmp_path / "bad.cif"), "--out", str(tmp_path / "f.parquet"))
    assert done.returncode == 2
    assert (
        "error: structure must be mmCIF, got" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert [p.name for p in tmp_path.iterdir()] == ["bad.cif"]
