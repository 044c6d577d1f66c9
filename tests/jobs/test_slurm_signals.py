"""Array tasks that are asked to end, or killed, at some moment: nothing is lost, the same bytes.

`make faults` repeats them twenty times.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from tests.run.kill_at_rename import digest
from tests.support.slurm_node import why_not

from thinsection.files.atomic import TMP_MARK
from thinsection.files.lock import LOCK_NAME
from thinsection.testing.synthetic import write_he_slide

REASON = why_not()
pytestmark = [
    pytest.mark.check,
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm here: {REASON}"),
]
REPEATS = int(os.environ.get("THINSECTION_FAULT_REPEATS", "1"))
COMMON = ("--memory", "256MiB", "--batch-size", "2", "--threads", "1")
SLURM = ("--executor", "slurm", "--job-cpus", "1", "--job-memory", "1500MiB")
TIMEOUT_S = 400


def start(
    slides: Path, out: Path, environment: dict[str, str], *flags: str
) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "thinsection",
        "run",
        str(slides),
        "--out",
        str(out),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *COMMON, *flags], env=environment, **pipes)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Three slides, and the digest of what an undisturbed run leaves."""
    folder = tmp_path_factory.mktemp("slides")
    for index in range(3):
        write_he_slide(folder / f"s{index}.tiff", (900, 800), seed=index)
    # tables and pages name slides relative to results that lie beside them
    out = tmp_path_factory.mktemp("reference") / "out"
    run = start(folder, out, dict(os.environ))
    said, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, said
    return folder, digest(out)


def array_task(out: Path) -> psutil.Process:
    """A task of the folder's array that runs, as soon as there is one."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "array-task" in line and any(word.startswith(str(out)) for word in line):
                return process
        threading.Event().wait(0.05)
    raise AssertionError("no array task has begun")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("repeat", range(REPEATS))
def test_an_array_task_that_is_ended_at_some_moment_is_tried_again_to_the_same_bytes(
    tmp_path: Path,
    cohort: tuple[Path, str],
    slurm: dict[str, str],
    number: signal.Signals,
    repeat: int,
) -> None:
    slides, reference = cohort
    out = tmp_path / "out of space"  # a path that is quoted
    run = start(
        slides, out, slurm, *SLURM, "--walltime", "00:20:00", "--chunk-slides", "2"
    )
    task = array_task(out)
    threading.Event().wait(1.0 + 10 * (repeat + 0.5) / REPEATS)
    ended = task.is_running()
    if ended:
        task.send_signal(number)
    said, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, said
    assert "now retried alone" in said or not ended or "3 done" in said
    assert digest(out) == reference
    left = [
        p.name
        for p in out.rglob("*")
        if TMP_MARK in p.name or p.name.startswith(LOCK_NAME)
    ]
    assert left == []
