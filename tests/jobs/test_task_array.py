"""How array tasks end and what becomes of their entries, on a Slurm of this process."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.pipeline.make import write_features
from thinsection.pipeline.aggregate_folder import TilesSource, find_tiles
from thinsection.pipeline.aggregate_task import AggregateTask

from thinsection.jobs import task_array
from thinsection.jobs.executor import ExecutorConfig, chunked
from thinsection.jobs.slurm_queue import TaskState
from thinsection.jobs.task_array import ArrayExecutor
from thinsection.jobs.task_document import TaskDocument, load_tasks
from thinsection.pipeline.results import SlideResult
from thinsection.stages.config import PoolingConfig

COMPLETED = TaskState(state="COMPLETED")
KILLED = TaskState(state="FAILED", signal=9)
CANCELLED = TaskState(state="CANCELLED", signal=15)


class FakeSlurm:
    """Runs every array index when it is submitted, up to the slide at which a task has to end."""

    def __init__(self, ends: dict[str, list[TaskState]]) -> None:
        self.ends = ends
        self.arrays: list[TaskDocument] = []
        self.states: list[dict[int, TaskState]] = []

    def sbatch(self, script: Path) -> int:
        assert "slurm array-task" in script.read_text()
        tasks = load_tasks(script.parent)
        self.arrays.append(tasks)
        indices = range(1, len(tasks.chunks) + 1)
        self.states.append({index: self.run(tasks, index) for index in indices})
        return len(self.arrays)

    def run(self, tasks: TaskDocument, index: int) -> TaskState:
        chunk = tasks.chunks[index - 1]
        fatal = [e for e in chunk if self.ends.get(e.slide_id)]
        before = chunk[: chunk.index(fatal[0])] if fatal else chunk
        cut = replace(tasks, chunks=(*tasks.chunks[: index - 1], before))
        cut.run_index(index, on_report=lambda report: None)
        return self.ends[fatal[0].slide_id].pop(0) if fatal else COMPLETED

    def task_states(self, number: int, num_tasks: int) -> dict[int, TaskState]:
        assert len(self.states[number - 1]) == num_tasks
        return self.states[number - 1]


@pytest.fixture
def sources(tmp_path: Path) -> list[TilesSource]:
    """Feature files of four slides."""
    for seed, name in enumerate("abcd"):
        write_features(tmp_path / f"{name}.h5", num_tiles=6, seed=seed)
    return find_tiles(tmp_path)


def execute(
    sources: list[TilesSource],
    fake: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    *,
    chunk: int,
) -> tuple[dict[str, SlideResult], list[str]]:
    monkeypatch.setattr(task_array, "sbatch", fake.sbatch)
    monkeypatch.setattr(task_array, "task_states", fake.task_states)
    monkeypatch.setattr(task_array, "accounted_states", lambda number: {1: CANCELLED})
    results: list[SlideResult] = []
    messages: list[str] = []
    out = sources[0].path.parent
    config = ExecutorConfig(executor="slurm", job_cpus=2, job_memory="2GiB")
    ArrayExecutor(config, out=out, on_message=messages.append, poll_s=0.0).execute(
        chunked(sources, chunk),
        AggregateTask(pooling=PoolingConfig(device="cpu")),
        on_report=lambda report: results.extend(report.results),
        on_event=lambda event: None,
    )
    assert sorted(r.slide_id for r in results) == list("abcd")  # each once
    return {r.slide_id: r for r in results}, messages


def test_entries_after_a_death_are_tried_once_more_alone(
    sources: list[TilesSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm({"b": [KILLED]})
    found, messages = execute(sources, fake, monkeypatch, chunk=3)
    assert {r.status for r in found.values()} == {"done"}
    second = fake.arrays[1]
    assert [[e.slide_id for e in chunk] for chunk in second.chunks] == [["b"], ["c"]]
    assert second.task.threads == 2  # its CPUs
    assert any("each alone: 2" in text for text in messages)


def test_an_entry_whose_task_dies_twice_is_recorded_and_its_neighbours_are_done(
    sources: list[TilesSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm({"b": [KILLED, KILLED]})
    found, _ = execute(sources, fake, monkeypatch, chunk=4)
    assert {k: r.status for k, r in found.items()} == {
        **dict.fromkeys("acd", "done"),
        "b": "failed",
    }
    assert found["b"].stage == "worker"
    assert "array task 2_1 ended without a report (FAILED, signal 9)" in found["b"].error
    assert found["b"].error.endswith("2_1.log, the second time, alone")


@pytest.mark.parametrize(
    ("end", "chunk", "lost"),
    [
        (KILLED, 1, "b"),  # it was alone already
        (CANCELLED, 4, "bcd"),  # who cancels a task does not want it again
        (TaskState(state="FAILED", exit_code=2), 4, "bcd"),  # its own error: the same again
    ],
)
def test_other_ends_are_recorded_at_once(
    sources: list[TilesSource],
    monkeypatch: pytest.MonkeyPatch,
    end: TaskState,
    chunk: int,
    lost: str,
) -> None:
    fake = FakeSlurm({"b": [end]})
    found, _ = execute(sources, fake, monkeypatch, chunk=chunk)
    assert len(fake.arrays) == 1
    assert "".join(k for k, r in sorted(found.items()) if r.status == "failed") == lost
    assert end.describe() in found["b"].error


def test_an_array_that_squeue_has_forgotten_is_looked_up_in_the_accounting(
    sources: list[TilesSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(FakeSlurm):
        def task_states(self, number: int, num_tasks: int) -> dict[int, TaskState]:
            return {}

    found, _ = execute(sources, Forgetful({"c": [KILLED]}), monkeypatch, chunk=4)
    assert [found[name].status for name in "abcd"] == ["done", "done", "failed", "failed"]
    assert "(CANCELLED, signal 15)" in found["c"].error


def test_tasks_are_reported_as_they_end(
    sources: list[TilesSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    class Slow(FakeSlurm):
        """Ends one task more at every look."""

        def task_states(self, number: int, num_tasks: int) -> dict[int, TaskState]:
            looks.append(1)
            waiting = TaskState(state="RUNNING")
            return {i: COMPLETED if i <= len(looks) else waiting for i in range(1, num_tasks + 1)}

    found, _ = execute(sources, Slow({}), monkeypatch, chunk=1)
    assert len(looks) == 4
    assert {r.status for r in found.values()} == {"done"}
