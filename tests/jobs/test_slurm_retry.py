"""Array tasks that die: what Slurm says of their end, and the second try, on a real Slurm."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from tests.support.slurm_node import why_not

from thinsection.cli.slurm import TASKS
from thinsection.config import replace_flat
from thinsection.jobs import slurm_array
from thinsection.jobs.backend import Submitted
from thinsection.jobs.execute import execute
from thinsection.jobs.slurm import SlurmBackend, collect
from thinsection.jobs.slurm_array import (
    Array,
    accounted_states,
    array_folders,
    load_array,
    task_states,
)
from thinsection.jobs.task import Report
from thinsection.run.run import make_task, run
from thinsection.slide.cohort import load_cohort
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import resolve
from thinsection.store.outcome import SlideResult
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import MIB

REASON = why_not()
needs_slurm = pytest.mark.skipif(REASON is not None, reason=f"no Slurm here: {REASON}")
CONFIG = replace_flat(
    RunConfig(),
    {
        **{"executor": "slurm", "chunk_slides": 2, "batch_size": 2, "threads": 1},
        **{"job_cpus": 1, "job_memory": "1500MiB", "walltime": "00:10:00"},
    },
)


def answers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(slurm_array, "_call", lambda command: text)


def test_squeue_says_how_each_task_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(
        monkeypatch,
        "7_1|RUNNING|0|\n7_2|FAILED|9|\n7_3|FAILED|512|\n7_4|FAILED|35072|\n",
    )
    found = task_states(7, 4)
    assert [s.has_ended for s in found.values()] == [False, True, True, True]
    assert [s.died for s in found.values()] == [
        False,
        True,
        False,
        True,
    ]  # 137 is 128 + SIGKILL
    assert found[2].describe() == "FAILED, signal 9"
    assert found[3].describe() == "FAILED, exit code 2"


def test_squeue_says_why_a_task_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(
        monkeypatch,
        "7_1|PENDING|0|PartitionConfig|\n7_2|PENDING|0|Priority|\n7_3|RUNNING|0|None|\n",
    )
    found = task_states(7, 3)
    assert [found[i].waits_for for i in (1, 2, 3)] == ["PartitionConfig", "", ""]


def test_an_array_that_was_cancelled_while_it_waited_has_one_line_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(monkeypatch, "7_2|COMPLETED|0|\n7|CANCELLED|0|\n")
    found = task_states(7, 3)
    assert [found[i].state for i in (1, 2, 3)] == [
        "CANCELLED",
        "COMPLETED",
        "CANCELLED",
    ]
    assert not any(state.died for state in found.values())


def test_the_accounting_is_read_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers(
        monkeypatch,
        "7_1|OUT_OF_MEMORY|0:125\n7_2|CANCELLED by 1000|0:15\n7_3|TIMEOUT|0:0\n",
    )
    found = accounted_states(7)
    assert [found[i].state for i in (1, 2, 3)] == [
        "OUT_OF_MEMORY",
        "CANCELLED",
        "TIMEOUT",
    ]
    assert [found[i].died for i in (1, 2, 3)] == [True, False, True]


class Killer(threading.Thread):
    """Sends SIGKILL to whatever process begins a slide, so many times."""

    def __init__(self, folder: Path, *, times: int) -> None:
        super().__init__(daemon=True)
        self.lock, self.times = folder / ".lock", times
        self.killed: list[int] = []
        self.stop = threading.Event()

    def run(self) -> None:
        while len(self.killed) < self.times and not self.stop.wait(0.002):
            try:
                pid = int(json.loads(self.lock.read_text())["pid"])
            except (OSError, ValueError):
                continue
            if pid not in self.killed:
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)


def execute_slides(out: Path, slides: Path) -> tuple[dict[str, SlideResult], list[str]]:
    """Runs the slides up to the tile grid through the executor."""
    out.mkdir()
    reports: list[Report[SlideResult]] = []
    messages: list[str] = []
    execute(
        load_cohort([slides]),
        make_task(out, resolve(CONFIG, {"until": "tiles"})),
        CONFIG.executor,
        folder=out,
        on_report=reports.append,
        on_message=messages.append,
    )
    results = [result for report in reports for result in report.results]
    assert len(results) == len({r.slide_id for r in results}) == 2
    return {r.slide_id: r for r in results}, messages


@needs_slurm
@pytest.mark.parametrize("times", [1, 2])
def test_a_slide_whose_task_is_killed_is_tried_once_more_alone(
    tmp_path: Path,
    on_slurm: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    times: int,
) -> None:
    monkeypatch.setattr(SlurmBackend, "poll_s", 0.2)
    slides, out = tmp_path / "slides", tmp_path / "out"
    slides.mkdir()
    write_he_slide(slides / "a.tiff", (600, 500))
    write_he_slide(slides / "big.tiff", (6000, 5000))
    killer = Killer(out / "slides" / "big", times=times)
    killer.start()
    try:
        found, messages = execute_slides(out, slides)
    finally:
        killer.stop.set()
        killer.join()
    assert len(killer.killed) == times
    assert found["a"].status == "done"
    first, second = arrays(out)
    assert [len(chunk) for chunk in first.chunks] == [2]
    assert second.attempt.alone
    assert second.request.memory_bytes == 2 * first.request.memory_bytes == 3000 * MIB
    assert second.attempt.task.spec.stream.decode_threads == 1  # type: ignore[attr-defined]
    assert all(len(chunk) == 1 for chunk in second.chunks)
    assert any("a worker died with" in text for text in messages)
    if times == 1:
        assert found["big"].status == "done"
    else:
        assert (found["big"].status, found["big"].stage) == ("failed", "worker")
        assert "(FAILED, signal 9); see" in found["big"].error
        assert found["big"].error.endswith(
            "twice, the second time with this entry alone"
        )


@needs_slurm
@pytest.mark.parametrize("memory", ["340MiB", "340MiB,1200MiB"])
def test_a_task_that_exceeds_its_memory_is_collected_sent_again_with_more_and_done(
    tmp_path: Path, on_slurm: dict[str, str], memory: str
) -> None:
    write_he_slide(tmp_path / "a.tiff", (5000, 4000))
    out = tmp_path / "an out"  # a space in it
    config = replace_flat(
        CONFIG,
        {
            "job_memory": memory,
            "tile_mpp": "0.5",
            "queue": "submit",
            "executor": "slurm",
        },
    )
    with pytest.raises(Submitted) as submitted:
        run([tmp_path / "a.tiff"], out=out, config=config)
    await_end(out)
    ended = submitted.value.array.ended_attempts()[1]
    assert (ended.end, ended.lacking) == ("died", "memory")
    messages: list[str] = []
    (found,) = collect(out, TASKS, on_message=messages.append)
    assert (found.waiting, found.results) == (1, {})
    assert "a worker died with 1 entry, which is now retried alone" in messages
    first, second = arrays(out)
    assert (len(first.chunks), len(second.chunks)) == (1, 1)
    assert second.request.memory_bytes == (1200 if "," in memory else 680) * MIB
    assert f"--mem={second.request.memory_bytes // MIB}M" in second.script.read_text()
    await_end(out)
    (found,) = collect(out, TASKS, on_message=messages.append)
    assert [r.status for r in found.results.values()] == ["done"]
    assert len(arrays(out)) == 2
    assert list(
        (second.folder / "logs").iterdir()
    )  # where the script said, with its space


def arrays(out: Path) -> list[Array]:
    return [load_array(folder, TASKS) for folder in array_folders(out)]


def await_end(out: Path) -> None:
    """Until Slurm has nothing to do any more."""
    for _ in range(1000):
        listed = subprocess.run(
            ["squeue", "--noheader"], capture_output=True, text=True
        )
        if not listed.stdout.strip():
            return
        threading.Event().wait(0.2)
    raise AssertionError(listed.stdout)
