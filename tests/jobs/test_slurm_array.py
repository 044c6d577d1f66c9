"""Arrays on a Slurm of this process: what they read and write, how they end, what is made of it."""

import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from thinsection.cli.slurm import waiting_line
from thinsection.errors import ClusterError, ConfigError, StoreError
from thinsection.jobs import slurm_array
from thinsection.jobs.backend import Attempt, BackendContext, Submitted
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig, ResourceStep
from thinsection.jobs.slurm import (
    SlurmBackend,
    array_status,
    collect,
    write_array,
)
from thinsection.jobs.slurm_array import (
    DOCUMENT_NAME,
    Array,
    TaskState,
    array_folders,
    load_array,
)
from thinsection.jobs.task import Report
from thinsection.registry import Entry, Registry
from thinsection.testing.executor_contract import (
    KnowsFinished,
    Number,
    Squared,
    SquareTask,
    WorkerContract,
)
from thinsection.types import GIB
from thinsection.usage.analysis import Request

COMPLETED = TaskState(state="COMPLETED")
PENDING = TaskState(state="PENDING")
CANCELLED = TaskState(state="CANCELLED", signal=15)
KINDS: Registry[Any] = Registry(
    "kind of task", "none", (Entry(name="square", help="", target=SquareTask),)
)
SLURM = ExecutorConfig(executor="slurm", job_cpus=2, job_memory="2GiB")


class FakeSlurm:
    """Runs every array index in a process of its own as soon as it is submitted.

    Attributes:
        arrays: as they were submitted.
        states: of their tasks; a test may change what has been seen of one.
        refused_bytes: memory that sbatch refuses.
        idle: submits and starts nothing.
    """

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.states: list[dict[int, TaskState]] = []
        self.accounted: dict[int, TaskState] = {}
        self.refused_bytes = 1 << 60
        self.idle = False

    def sbatch(self, script: Path) -> int:
        assert "slurm array-task" in script.read_text()
        array = load_array(script.parent, KINDS)
        if array.request.memory_bytes >= self.refused_bytes:
            raise ClusterError(
                "sbatch failed (1): Memory specification can not be satisfied"
            )
        self.arrays.append(array)
        number = len(self.arrays)
        indices = range(1, len(array.chunks) + 1)
        if self.idle:
            self.states.append(dict.fromkeys(indices, PENDING))
            return number
        context = multiprocessing.get_context("forkserver")
        runs = {
            i: context.Process(target=_run, args=(script.parent, number, i))
            for i in indices
        }
        for run in runs.values():
            run.start()
        for run in runs.values():
            run.join()
        self.states.append({index: _state(run.exitcode) for index, run in runs.items()})
        return number

    def task_states(self, number: int, num_tasks: int) -> dict[int, TaskState]:
        return self.states[number - 1]


def _run(folder: Path, number: int, index: int) -> None:
    (folder / "logs" / f"{number}_{index}.log").touch()
    load_array(folder, KINDS).run_index(index, on_report=lambda report: None)


def _state(code: int | None) -> TaskState:
    assert code is not None
    if code < 0:
        return TaskState(state="FAILED", signal=-code)
    return TaskState(state="FAILED", exit_code=code) if code else COMPLETED


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr(slurm_array, "sbatch", fake.sbatch)
    monkeypatch.setattr(slurm_array, "task_states", fake.task_states)
    monkeypatch.setattr(slurm_array, "accounted_states", lambda number: fake.accounted)
    monkeypatch.setattr(SlurmBackend, "poll_s", 0.01)
    return fake


class TestSlurm(WorkerContract):
    config: ClassVar[ExecutorConfig] = SLURM
    carries_events: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def use(self, slurm: FakeSlurm) -> None:
        self.slurm = slurm

    def test_nobodys_error_is_tried_again_and_then_recorded(
        self, tmp_path: Path
    ) -> None:
        """A batch job that ends by its own error would do so again: it is not tried again."""
        heard = self.run(SquareTask(folder=tmp_path, raised={"1": 1}), chunk_slides=3)
        assert [heard.results[v].status for v in range(6)] == [
            "done",
            "lost",
            "lost",
            *["done"] * 3,
        ]
        assert (
            "(FAILED, exit code 1): unexpected error: no luck with 1; see"
            in heard.results[1].error
        )
        assert len(self.slurm.arrays) == 1

    def test_an_error_of_the_settings_ends_everything(self, tmp_path: Path) -> None:
        """Of other jobs nobody knows: its own entries are recorded with the error."""
        heard = self.run(SquareTask(folder=tmp_path, refused=(1,)), chunk_slides=1)
        assert ": value must not be 1" in heard.results[1].error

    def test_a_second_array_has_one_entry_a_task_and_the_cpus_and_time_of_the_first(
        self, tmp_path: Path
    ) -> None:
        self.run(SquareTask(folder=tmp_path, killed={"2": 1}), chunk_slides=3)
        first, second = self.slurm.arrays
        assert [len(chunk) for chunk in first.chunks] == [3, 3]
        assert second.chunks == [(Number(value=2),)]  # 0 and 1 had reported
        assert (second.attempt.alone, second.attempt.number) == (True, 2)
        assert second.request.memory_bytes == 2 * first.request.memory_bytes == 4 * GIB
        assert second.request.walltime_s == first.request.walltime_s
        assert second.attempt.task.threads == first.attempt.task.threads == 2  # type: ignore[attr-defined]

    def test_the_same_memory_is_asked_for_where_more_is_refused(
        self, tmp_path: Path
    ) -> None:
        self.slurm.refused_bytes = 4 * GIB
        heard = self.run(SquareTask(folder=tmp_path, killed={"2": 1}), chunk_slides=3)
        assert heard.results[2].status == "done"
        assert any("refuses a job with more memory" in text for text in heard.messages)
        assert self.slurm.arrays[1].request.memory_bytes == 2 * GIB
        assert len(array_folders(tmp_path)) == 2

    def test_the_next_memory_of_the_list_is_asked_for(self, tmp_path: Path) -> None:
        self.run(
            SquareTask(folder=tmp_path, killed={"2": 9}), job_memory="1GiB,3GiB,5GiB"
        )
        asked = [array.request.memory_bytes // GIB for array in self.slurm.arrays]
        assert asked == [1, 3, 5]
        assert [a.attempt.resource_step.memory for a in self.slurm.arrays] == [0, 1, 2]
        assert "--mem=5120M" in self.slurm.arrays[2].script.read_text()

    def test_what_fails_for_want_of_gpu_memory_gets_the_next_card(
        self, tmp_path: Path
    ) -> None:
        task = SquareTask(folder=tmp_path, hungry={"1": 1, "4": 9})
        heard = self.run(task, chunk_slides=3, gpu="a40,a100-40,a100-80", gres="gpu:1")
        assert heard.statuses == {**dict.fromkeys(range(6), "done"), 4: "failed"}
        scripts = [array.script.read_text() for array in self.slurm.arrays]
        cards = [
            next(x for x in s.splitlines() if "--gres" in x).split("=")[1]
            for s in scripts
        ]
        assert cards == ["gpu:a40:1", "gpu:a100-40:1", "gpu:a100-80:1"]
        tried: list[tuple[Any, ...]] = [a.attempt.entries for a in self.slurm.arrays]
        entries = [sorted(number.value for number in numbers) for numbers in tried]
        assert entries == [[0, 1, 2, 3, 4, 5], [1, 4], [4]]
        assert {a.request.memory_bytes for a in self.slurm.arrays} == {2 * GIB}


def written(folder: Path, config: ExecutorConfig = SLURM, **faults: Any) -> Array:
    """An array of two tasks, with three entries and one."""
    entries = tuple(Number(value=value) for value in range(4))
    attempt = Attempt(entries=entries, task=SquareTask(folder=folder, **faults))
    return write_array(BackendContext(config, attempt, folder), 3, submit=False)


def test_an_array_comes_back_as_it_was_written(tmp_path: Path) -> None:
    config = ExecutorConfig(job_memory="1GiB,2GiB", gpu="t4", directive=("--qos=long",))
    array = written(tmp_path, config, killed={"2": 1}, refused=(7,))
    assert load_array(array.folder, KINDS) == array
    assert array.states() == {1: "WRITTEN", 2: "WRITTEN"}
    assert array.ended_attempts() == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "os.system"}, r"kind of task must be a known name, got 'os\.system'"),
        (
            {"attempt": {"task": {"folder": "x", "hungri": {}}}},
            "unknown config key 'hungri'; did you mean",
        ),
        ({"attempt": {"rung": {"height": 1}}}, "of this version.*'height'"),
    ],
)
def test_what_is_not_known_here_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = written(tmp_path).folder / DOCUMENT_NAME
    document = json.loads(path.read_text())
    changed = {
        k: {**document[k], **v} if isinstance(v, dict) else v for k, v in change.items()
    }
    path.write_text(json.dumps({**document, **changed}))
    with pytest.raises(StoreError, match=message):
        load_array(path.parent, KINDS)


def test_a_folder_without_arrays_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"must contain tasks\.json of this version"):
        load_array(tmp_path, KINDS)
    with pytest.raises(
        StoreError, match="must contain an array of 'thinsection slurm submit'"
    ):
        collect(tmp_path, KINDS)


def test_an_index_reports_entry_by_entry_and_another_one_is_refused(
    tmp_path: Path,
) -> None:
    array = written(tmp_path, refused=(2,))
    seen: list[int] = []
    reports: list[Report[Squared]] = []

    def take(report: Report[Squared]) -> None:
        reports.append(report)
        seen.append(len(array.reports(1)))

    assert array.reports(1) == []
    with pytest.raises(ConfigError, match="value must not be 2"):
        array.run_index(1, on_report=take)
    assert seen == [1, 2]  # what a death in the middle leaves
    assert array.reports(1) == reports
    with pytest.raises(ClusterError, match=r"index must be in \[1, 2\], got 3"):
        array.run_index(3, on_report=take)


def test_who_does_not_wait_gets_the_array_and_collects_later(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    reports: list[Report[Squared]] = []
    entries = [Number(value=value) for value in range(4)]
    config = ExecutorConfig(
        executor="slurm", job_memory="1GiB", queue="submit", chunk_slides=2
    )
    task = SquareTask(folder=tmp_path, killed={"1": 1})
    with pytest.raises(Submitted) as submitted:
        execute(entries, task, config, folder=tmp_path, on_report=reports.append)
    assert submitted.value.array.job_id == 1
    assert not reports
    tasks, results = array_status(load_array(slurm.arrays[0].folder, KINDS))
    assert (tasks, results) == ({"DONE": 1, "LOST": 1}, {"done": 3, "missing": 1})
    (found,) = collect(tmp_path, KINDS)  # what died is submitted once more
    assert {r.value for r in found.results.values()} == {0, 2, 3}
    assert found.waiting == 1
    (found,) = collect(tmp_path, KINDS)
    assert {r.value: r.square for r in found.results.values()} == {
        v: v**2 for v in range(4)
    }
    assert found.waiting == 0
    assert found.stage_seconds["square_busy"] == 4
    assert len(slurm.arrays) == 2


def test_a_written_array_is_not_submitted(tmp_path: Path, slurm: FakeSlurm) -> None:
    config = ExecutorConfig(executor="slurm", queue="script")
    with pytest.raises(Submitted) as submitted:
        execute(
            [Number(value=1)],
            SquareTask(folder=tmp_path),
            config,
            folder=tmp_path,
            on_report=lambda report: None,
        )
    assert submitted.value.array.script.is_file()
    assert submitted.value.array.job_id is None
    assert not slurm.arrays


def test_where_all_is_done_nothing_is_submitted(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    reports: list[Report[Squared]] = []
    messages: list[str] = []
    execute(
        [Number(value=3)],
        KnowsFinished(folder=tmp_path),
        ExecutorConfig(executor="slurm", queue="submit"),
        folder=tmp_path,
        on_report=reports.append,
        on_message=messages.append,
    )
    assert [r.square for report in reports for r in report.results] == [-3]
    assert messages == ["1 of 1 are already done and are skipped"]
    assert not slurm.arrays


@pytest.mark.parametrize(
    ("end", "began", "again"),
    [
        (TaskState(state="OUT_OF_MEMORY", signal=125), True, True),
        (TaskState(state="FAILED", signal=9), True, True),
        (
            TaskState(state="FAILED", exit_code=137),
            True,
            True,
        ),  # a shell's word for SIGKILL
        (TaskState(state="NODE_FAIL"), True, True),
        (TaskState(state="TIMEOUT"), True, True),
        (
            TaskState(state="FAILED", exit_code=2),
            True,
            False,
        ),  # the settings: the same again
        (CANCELLED, True, False),  # who cancels a task does not want it again
        (TaskState(), True, True),  # forgotten, but it had begun
        (TaskState(), False, False),  # forgotten, and nothing was begun
    ],
)
def test_only_what_died_is_submitted_again(
    tmp_path: Path, slurm: FakeSlurm, end: TaskState, began: bool, again: bool
) -> None:
    slurm.idle = True
    array = written(tmp_path)
    array.submit()
    slurm.states[0] = {1: end, 2: PENDING} if end.state else {2: PENDING}
    if began:
        (array.folder / "logs" / "1_1.log").touch()
    (found,) = collect(tmp_path, KINDS)
    assert found.waiting == (1 + 3 if again else 1)
    assert [r.status for r in found.results.values()] == ([] if again else ["lost"] * 3)
    if not again:
        assert end.describe() in found.results[repr(Number(value=0))].error
    (recorded,) = collect(tmp_path, KINDS, retry=False)
    assert len(recorded.results) == (0 if again else 3)  # the newer array has them


def test_an_entry_that_ran_out_of_time_alone_is_not_tried_again(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    slurm.idle = True
    array = written(tmp_path)
    array.submit()
    slurm.states[0] = {1: PENDING, 2: TaskState(state="TIMEOUT")}
    assert array.ended_attempts()[2].end == "fatal"


def test_an_array_that_squeue_has_forgotten_is_looked_up_in_the_accounting(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    slurm.idle = True
    array = written(tmp_path)
    array.submit()
    slurm.states[0] = {}
    slurm.accounted = {1: CANCELLED, 2: TaskState(state="OUT_OF_MEMORY")}
    ended = array.ended_attempts()
    assert (ended[1].end, ended[2].end, ended[2].lacking) == (
        "fatal",
        "died",
        "memory",
    )
    assert "(CANCELLED, signal 15)" in ended[1].reason


def test_tasks_are_reported_as_they_end(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real = slurm.task_states

    def slow(number: int, num_tasks: int) -> dict[int, TaskState]:
        """Ends one task more at every look."""
        looks.append(1)
        return {
            i: s if i <= len(looks) else PENDING
            for i, s in real(number, num_tasks).items()
        }

    array = written(tmp_path)
    array.submit()
    monkeypatch.setattr(slurm_array, "task_states", slow)
    (array.folder / "results" / "2.json").unlink()
    assert set(array.ended_attempts()) == {1}
    assert set(array.ended_attempts()) == {1, 2}


@dataclass(frozen=True, kw_only=True)
class PlannedTask(SquareTask):
    """Plans ten minutes for each entry of a job; a warning says that it has no plan."""

    warning: str = ""

    def request(
        self, chunks: Sequence[Sequence[Number]], config: ExecutorConfig
    ) -> Request:
        most = max(len(chunk) for chunk in chunks)
        return Request(
            cpus=2,
            memory_bytes=GIB,
            gpus=0,
            walltime_s=600 * most,
            origins=("plan",),
            warning=self.warning,
        )


@pytest.mark.parametrize(
    ("warning", "before_s", "alone_s", "origin"),
    [
        ("", 4 * 3600, 1200, "00:20:00: 2 times what these entries need alone"),
        ("", 900, 900, "00:15:00: as before"),  # never more than a whole chunk had
        ("no plan", 4 * 3600, 4 * 3600, "04:00:00: as before"),
    ],
)
def test_an_entry_that_is_tried_alone_asks_for_its_own_time(
    tmp_path: Path, warning: str, before_s: int, alone_s: int, origin: str
) -> None:
    task = PlannedTask(folder=tmp_path, warning=warning)
    before = Request(cpus=2, memory_bytes=2 * GIB, gpus=0, walltime_s=before_s)
    entries = tuple(Number(value=value) for value in range(3))
    attempt = Attempt(entries=entries, task=task, number=2, previous_request=before)
    config = ExecutorConfig(executor="slurm")
    array = write_array(BackendContext(config, attempt, tmp_path), 1, submit=False)
    assert array.request == replace(before, memory_bytes=4 * GIB, walltime_s=alone_s)
    assert f"# {origin}" in array.script.read_text()


def test_the_resource_steps_of_the_settings(tmp_path: Path) -> None:
    config = ExecutorConfig(job_memory="16G, 32G", gpu="a40,a100-80", gres="gpu:2")
    assert config.next_step(ResourceStep(), "memory") == ResourceStep(memory=1)
    assert config.next_step(ResourceStep(memory=1), "memory") is None
    assert config.next_step(ResourceStep(memory=1), "gpu") == ResourceStep(
        memory=1, gpu=1
    )
    assert config.at_step(ResourceStep(gpu=1)).gres == "gpu:a100-80:2"
    assert config.at_step(ResourceStep()).job_memory == "16G"
    constrained = ExecutorConfig(
        gpu="a40,h100", gres="gpu:1", directive=("--constraint={gpu}",)
    )
    assert constrained.at_step(ResourceStep(gpu=1)).directive == ("--constraint=h100",)
    assert constrained.at_step(ResourceStep(gpu=1)).gres == "gpu:1"
    assert (
        ExecutorConfig(gpu="a40", gres="gpu:1").at_step(ResourceStep()).gres == "gpu:1"
    )


def test_the_status_says_why_tasks_wait_and_what_nodes_have(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.idle = True
    monkeypatch.setattr(
        "thinsection.jobs.slurm.node_list", lambda: "large*|1|idle|8|64000|infinite|-\n"
    )
    attempt = Attempt(
        entries=tuple(Number(value=v) for v in range(3)),
        task=SquareTask(folder=tmp_path),
    )
    config = ExecutorConfig(executor="slurm", queue="submit")
    array = write_array(BackendContext(config, attempt, tmp_path), 1)
    assert array.waiting_reasons() == {}
    waiting = replace(PENDING, waits_for="PartitionConfig")
    slurm.states[0] |= {1: waiting, 2: waiting}
    assert array.waiting_reasons() == {"PartitionConfig": 2}
    # the nodes have changed since
    nodes = "small*|1|idle|2|64000|infinite|-\n"
    monkeypatch.setattr("thinsection.jobs.slurm_array.node_list", lambda: nodes)
    line = waiting_line(array, "PartitionConfig", 2)
    assert "job 1: 2 array tasks wait, and Slurm's reason is PartitionConfig" in line
    assert "each asks for 4 CPUs, 8.0 GiB and" in line
    assert "the largest node of partition small has 2 CPUs" in line
    assert "--job-cpus" in line and "scancel 1" in line
