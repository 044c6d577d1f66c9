"""The contract of executors: subclass `WorkerContract` in a test module.

    class TestMyBackend(WorkerContract):
        config = ExecutorConfig(executor="mine", workers=2)

A small task goes through `execute`; on purpose it kills its process, raises, or lacks memory.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from thinsection.errors import ConfigError
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.task import OnEvent, Report, Task

SQUARES = {value: value**2 for value in range(6)}


@dataclass(frozen=True, kw_only=True)
class Number:
    """An entry."""

    value: int


@dataclass(frozen=True, kw_only=True)
class Squared(Number):
    """A result."""

    square: int = -1
    # or 'failed', or 'lost'
    status: str = "done"
    error: str = ""
    # whether the smaller task did it
    small: bool = False
    # of the process that did it
    pid: int = 0


@dataclass(frozen=True, kw_only=True)
class Step(Number):
    """An event."""

    step: int


@dataclass(frozen=True, kw_only=True)
class SquareTask(Task[Number, Squared]):
    """Squares numbers, and misbehaves at some of them.

    Attributes:
        folder: where it keeps count, seen by all workers.
        killed: number -> how often its process gets SIGKILL.
        raised: number -> how often an error is raised for which no entry is to blame.
        hungry: number -> how often GPU memory does not suffice.
        refused: numbers at which the settings turn out to be wrong.
        small: whether this is the smaller task.
    """

    kind: ClassVar[str] = "square"
    entry_type: ClassVar[type] = Number
    result_type: ClassVar[type] = Squared
    event_type: ClassVar[type | None] = Step

    folder: Path
    killed: dict[str, int] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)
    hungry: dict[str, int] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    small: bool = False

    def __call__(
        self, entries: Sequence[Number], *, on_event: OnEvent
    ) -> Report[Squared]:
        results = tuple(self._square(entry.value, on_event) for entry in entries)
        return Report(
            results=results, stage_seconds={"square_busy": float(len(entries))}
        )

    def smaller(self) -> Self:
        return replace(self, small=True)

    def lost(self, entry: Number, reason: str) -> Squared:
        return Squared(value=entry.value, status="lost", error=reason)

    def _square(self, value: int, on_event: OnEvent) -> Squared:
        on_event(Step(value=value, step=1))
        if self._count_down(self.killed, "killed", value):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._count_down(self.raised, "raised", value):
            raise RuntimeError(f"no luck with {value}")
        if value in self.refused:
            raise ConfigError(f"value must not be {value}")
        if self._count_down(self.hungry, "hungry", value):
            error = "OutOfMemoryError: CUDA out of memory"
            return Squared(value=value, status="failed", error=error)
        on_event(Step(value=value, step=2))
        return Squared(value=value, square=value**2, small=self.small, pid=os.getpid())

    def _count_down(self, times: dict[str, int], name: str, value: int) -> bool:
        """True where a fault is to happen now; counts in files, because processes die of it."""
        num_done = len(list(self.folder.glob(f"{name}-{value}-*")))
        if num_done >= times.get(str(value), 0):
            return False
        (self.folder / f"{name}-{value}-{num_done}").touch(exist_ok=False)
        return True


class StreamedSquares(SquareTask):
    """The same, a chunk at a time."""

    streams: ClassVar[bool] = True


class KnowsFinished(SquareTask):
    """Knows that 3 is done."""

    def finished(self, entry: Number) -> Squared | None:
        return Squared(value=3, square=-3) if entry.value == 3 else None


@dataclass(kw_only=True)
class Heard:
    """Everything that an execution reported."""

    reports: list[Report[Squared]] = field(default_factory=list)
    events: list[Step] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    @property
    def results(self) -> dict[int, Squared]:
        """Results by number; asserts that each was reported once."""
        by_number: dict[int, Squared] = {}
        for report in self.reports:
            for result in report.results:
                assert result.value not in by_number
                by_number[result.value] = result
        return by_number

    @property
    def squares(self) -> dict[int, int]:
        """Squares by number."""
        return {value: result.square for value, result in self.results.items()}

    @property
    def statuses(self) -> dict[int, str]:
        """Statuses by number."""
        return {value: result.status for value, result in self.results.items()}


class ExecutorContract:
    """The suite. `config` has at least two workers where there are any."""

    config: ClassVar[ExecutorConfig]
    cluster: object = None
    carries_events: ClassVar[bool] = True

    def run(self, task: SquareTask, count: int = 6, **changes: Any) -> Heard:
        """Sends the numbers 0 to count - 1 through the executor."""
        heard = Heard()
        execute(
            [Number(value=value) for value in range(count)],
            task,
            replace(self.config, **changes),
            folder=task.folder,
            cluster=self.cluster,
            on_report=heard.reports.append,
            on_event=heard.events.append,
            on_message=heard.messages.append,
        )
        return heard

    @pytest.mark.parametrize("kind", [SquareTask, StreamedSquares])
    def test_every_entry_is_reported_once_by_a_whole_task(
        self, tmp_path: Path, kind: type[SquareTask]
    ) -> None:
        heard = self.run(kind(folder=tmp_path), chunk_slides=2)
        assert heard.squares == SQUARES
        assert not any(result.small for result in heard.results.values())
        busy = [report.stage_seconds["square_busy"] for report in heard.reports]
        assert sum(busy) == 6

    def test_the_events_of_an_entry_come_in_their_order(self, tmp_path: Path) -> None:
        heard = self.run(SquareTask(folder=tmp_path))
        expected = [1, 2] if self.carries_events else []
        for value in range(6):
            steps = [event.step for event in heard.events if event.value == value]
            assert steps == expected

    def test_what_is_finished_is_not_done_again_by_another_process(
        self, tmp_path: Path
    ) -> None:
        heard = self.run(KnowsFinished(folder=tmp_path))
        # in this process the task itself would know
        assert heard.results[3].square in (9, -3)
        assert heard.results[2].square == 4

    def test_an_error_of_the_settings_ends_everything(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="value must not be 1"):
            self.run(SquareTask(folder=tmp_path, refused=(1,)), chunk_slides=1)

    def test_want_of_gpu_memory_is_final_without_a_larger_card(
        self, tmp_path: Path
    ) -> None:
        heard = self.run(SquareTask(folder=tmp_path, hungry={"1": 1}), chunk_slides=2)
        assert heard.results[1].status == "failed"


class WorkerContract(ExecutorContract):
    """The suite of executors whose workers are processes of their own."""

    def test_a_worker_that_dies_once_loses_nothing(self, tmp_path: Path) -> None:
        heard = self.run(SquareTask(folder=tmp_path, killed={"2": 1}), chunk_slides=3)
        assert heard.squares == SQUARES
        assert heard.results[2].small
        assert heard.results[2].pid != os.getpid()
        assert any("a worker died with" in text for text in heard.messages)

    def test_an_entry_that_kills_twice_is_lost_alone(self, tmp_path: Path) -> None:
        heard = self.run(SquareTask(folder=tmp_path, killed={"2": 9}), chunk_slides=3)
        assert heard.statuses == {**dict.fromkeys(range(6), "done"), 2: "lost"}
        assert heard.results[2].error.endswith(
            "twice, the second time with this entry alone"
        )
        assert len(list(tmp_path.glob("killed-2-*"))) == 2

    def test_what_dies_for_want_of_memory_climbs_the_whole_list(
        self, tmp_path: Path
    ) -> None:
        task = SquareTask(folder=tmp_path, killed={"2": 9, "4": 2})
        heard = self.run(task, chunk_slides=3, job_memory="2GiB,3GiB,4GiB")
        assert heard.results[4].square == 16
        assert heard.results[2].status == "lost"
        assert heard.results[2].error.endswith(
            "3 times, the last time with this entry alone"
        )
        assert len(list(tmp_path.glob("killed-2-*"))) == 3

    def test_nobodys_error_is_tried_again_and_then_recorded(
        self, tmp_path: Path
    ) -> None:
        task = SquareTask(folder=tmp_path, raised={"1": 1, "3": 9})
        heard = self.run(task, chunk_slides=1, retries=1)
        assert heard.results[1].square == 1
        assert heard.results[3].status == "lost"
        assert "no luck with 3" in heard.results[3].error
