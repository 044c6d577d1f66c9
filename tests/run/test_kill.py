"""A run killed at any commit point, or at any moment, resumes to the same bytes."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinsection.testing.synthetic import write_he_slide

pytestmark = pytest.mark.check  # some seventy killed runs

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


@pytest.fixture(scope="module")
def small_slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kill") / "s.svs"
    write_he_slide(path, (900, 800), seed=3, downsamples=(1,), white=255)
    return path


@pytest.mark.timeout(900)  # some seventy runs
def test_killed_at_every_rename_a_resumed_run_leaves_the_same_bytes(
    tmp_path: Path, small_slide: Path
) -> None:
    command = [
        sys.executable,
        str(HERE / "kill_at_rename.py"),
        str(small_slide),
        str(tmp_path),
    ]
    child = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert child.returncode == 0, child.stderr
    lines = dict(line.split() for line in child.stdout.splitlines())
    reference = lines.pop("reference")
    assert (
        len(lines) >= 19
    )  # every file of every stage, and the ledger after each stage
    assert set(lines.values()) == {reference}


@pytest.mark.parametrize("after_s", [2.5, 4.0])
def test_killed_at_some_moment_nothing_half_written_counts(
    tmp_path: Path, small_slide: Path, after_s: float
) -> None:
    command = [
        sys.executable,
        "-m",
        "thinsection",
        "run",
        str(small_slide),
        "--out",
        str(tmp_path),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(command, env=ENVIRONMENT, **quiet)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=after_s)
    child.kill()
    child.wait()
    again = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert list(tmp_path.glob("256px_0.5mpp/slide_features_*/s.h5"))
    assert not list((tmp_path / "slides" / "s").glob(".*tmp*.json"))
