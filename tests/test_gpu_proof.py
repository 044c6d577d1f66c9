"""The driver of benchmarks/gpu_proof.py: a step's failure costs that step only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.check  # a benchmark in a process of its own


def test_each_step_survives_the_failure_of_another_and_the_exit_code_tells(
    tmp_path: Path,
) -> None:
    out = tmp_path / "proof.json"
    command = [
        sys.executable,
        "-m",
        "tests.support.failing_proof",
        "--smoke",
        "--out",
        str(out),
    ]
    root = Path(__file__).parents[1]
    child = subprocess.run(command, capture_output=True, text=True, cwd=root)
    found = json.loads(out.read_text())["results"]
    assert [*found] == ["a", "b", "c", "d", "e", "f"]
    assert found["a"]["pid"] == found["b"]["pid"] != found["f"]["pid"]
    assert "0.5 is not 1" in found["c"]["error"]
    assert "exit code 7" in found["d"]["error"]
    assert "longer than 1 s" in found["e"]["error"]
    assert child.returncode == 1 and child.stderr.endswith("steps failed: c, d, e\n")
    assert "| c | failed AssertionError: 0.5 is not 1 |" in child.stdout
