"""What every executor must do: subclass `WorkerContract` in a test module.

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
from thinsection.jobs.task import Report, Task

SQUARES = {value: value**2 for value in range(6)}


@dataclass(frozen=True, kw_only=True)
class Number:
    """An entry."""

    value: int


@dataclass(frozen=True, kw_only=True)
class Squared(Number):
    """A result."""

    square: int = -1
    status: str = "done"  # or 'failed', or 'lost'
    error: str = ""
    small: bool = False  # whether the smaller task did it
    pid: int = 0  # of the process that did it


@dataclass(frozen=True, kw_only=True)
class Step(Number):
    """An event."""

    step: int


@dataclass(frozen=True, kw_only=True)
class SquareTask(Task[Number, Squared]):
    """Squares numbers, and misbehaves at some of them."""

    kind: ClassVar[str] = "square"
    entry_type: ClassVar[type[Any]] = Number
    result_type: ClassVar[type[Any]] = Squared
    event_type: ClassVar[type[Any] | None] = Step

    folder: Path  # where it keeps count, seen by all workers
    killed: dict[str, int] = field(
        default_factory=dict
    )  # number -> how often it gets SIGKILL
    raised: dict[str, int] = field(
        default_factory=dict
    )  # how often no entry is to blame
    hungry: dict[str, int] = field(
        default_factory=dict
    )  # how often GPU memory does not suffice
    refused: tuple[int, ...] = ()  # numbers at which the settings are found to be wrong
    small: bool = False

    def __call__(self, entries: Sequence[Number], *, on_event: Any) -> Report[Squared]:
        results = tuple(self._square(entry.value, on_event) for entry in entries)
        return Report(
            results=results, stage_seconds={"square_busy": float(len(entries))}
        )

    def smaller(self) -> Self:
        return replace(self, small=True)

    def lost(self, entry: Number, reason: str) -> Squared:
        return Squared(value=entry.value, status="lost", error=reason)

    def _square(self, value: int, on_event: Any) -> Squared:
        on_event(Step(value=value, step=1))
        if self._once_more(self.killed, "killed", value):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._once_more(self.raised, "raised", value):
            raise RuntimeError(f"no luck with {value}")
        if value in self.refused:
            raise ConfigError(f"value must not be {value}")
        if self._once_more(self.hungry, "hungry", value):
            error = "OutOfMemoryError: CUDA out of memory"
            return Squared(value=value, status="failed", error=error)
        on_event(Step(value=value, step=2))
        return Squared(value=value, square=value**2, small=self.small, pid=os.getpid())

    def _once_more(self, times: dict[str, int], what: str, value: int) -> bool:
        """Whether this is to happen now; counts in files, because processes die of it."""
        done = len(list(self.folder.glob(f"{what}-{value}-*")))
        more = done < times.get(str(value), 0)
        if more:
            (self.folder / f"{what}-{value}-{done}").touch(exist_ok=False)
        return more


class StreamedSquares(SquareTask):
    """The same, a chunk at a time."""

    streams: ClassVar[bool] = True


class KnowsFinished(SquareTask):
    """Knows that 3 is done."""

    def finished(self, entry: Number) -> Squared | None:
        return Squared(value=3, square=-3) if entry.value == 3 else None


@dataclass(kw_only=True)
class Told:
    """What an execution said."""

    reports: list[Report[Squared]] = field(default_factory=list)
    events: list[Step] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    @property
    def results(self) -> dict[int, Squared]:
        """By number; asserts that each was reported once."""
        found = [result for report in self.reports for result in report.results]
        assert len(found) == len({result.value for result in found})
        return {result.value: result for result in found}


class ExecutorContract:
    """The suite. `config` has at least two workers where there are any."""

    config: ClassVar[ExecutorConfig]
    cluster: Any = None
    carries_events: ClassVar[bool] = True

    def run(self, task: SquareTask, count: int = 6, **changes: Any) -> Told:
        """Sends the numbers 0 to count - 1 through the executor."""
        told, entries = Told(), [Number(value=value) for value in range(count)]
        told_to: dict[str, Any] = {"on_report": told.reports.append}
        told_to |= {"on_event": told.events.append, "on_message": told.messages.append}
        where: dict[str, Any] = {"folder": task.folder, "cluster": self.cluster}
        execute(entries, task, replace(self.config, **changes), **where, **told_to)
        return told

    @pytest.mark.parametrize("kind", [SquareTask, StreamedSquares])
    def test_every_entry_is_reported_once_by_a_whole_task(
        self, tmp_path: Path, kind: Any
    ) -> None:
        told = self.run(kind(folder=tmp_path), chunk_slides=2)
        assert {v: r.square for v, r in told.results.items()} == SQUARES
        assert not any(result.small for result in told.results.values())
        assert sum(r.stage_seconds["square_busy"] for r in told.reports) == 6

    def test_the_events_of_an_entry_come_in_their_order(self, tmp_path: Path) -> None:
        told = self.run(SquareTask(folder=tmp_path))
        steps = [
            [e.step for e in told.events if e.value == value] for value in range(6)
        ]
        assert steps == [[1, 2] if self.carries_events else []] * 6

    def test_what_is_finished_is_not_done_again_by_another_process(
        self, tmp_path: Path
    ) -> None:
        told = self.run(KnowsFinished(folder=tmp_path))
        assert told.results[3].square in (
            9,
            -3,
        )  # in this process the task itself would know
        assert told.results[2].square == 4

    def test_an_error_of_the_settings_ends_everything(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="value must not be 1"):
            self.run(SquareTask(folder=tmp_path, refused=(1,)), chunk_slides=1)

    def test_want_of_gpu_memory_is_final_without_a_larger_card(
        self, tmp_path: Path
    ) -> None:
        told = self.run(SquareTask(folder=tmp_path, hungry={"1": 1}), chunk_slides=2)
        assert told.results[1].status == "failed"


class WorkerContract(ExecutorContract):
    """The suite of executors whose workers are processes of their own."""

    def test_a_worker_that_dies_once_loses_nothing(self, tmp_path: Path) -> None:
        told = self.run(SquareTask(folder=tmp_path, killed={"2": 1}), chunk_slides=3)
        assert {v: r.square for v, r in told.results.items()} == SQUARES
        assert told.results[2].small
        assert told.results[2].pid != os.getpid()
        assert any("a worker died with" in text for text in told.messages)

    def test_an_entry_that_kills_twice_is_lost_alone(self, tmp_path: Path) -> None:
        told = self.run(SquareTask(folder=tmp_path, killed={"2": 9}), chunk_slides=3)
        status = {v: r.status for v, r in told.results.items()}
        assert status == dict.fromkeys(range(6), "done") | {2: "lost"}
        assert told.results[2].error.endswith("twice, the second time alone")
        assert len(list(tmp_path.glob("killed-2-*"))) == 2

    def test_what_dies_for_want_of_memory_climbs_the_whole_list(
        self, tmp_path: Path
    ) -> None:
        task = SquareTask(folder=tmp_path, killed={"2": 9, "4": 2})
        told = self.run(task, chunk_slides=3, job_memory="2GiB,3GiB,4GiB")
        assert told.results[4].square == 16
        assert told.results[2].status == "lost"
        assert told.results[2].error.endswith("3 times, at last alone")
        assert len(list(tmp_path.glob("killed-2-*"))) == 3

    def test_nobodys_error_is_tried_again_and_then_recorded(
        self, tmp_path: Path
    ) -> None:
        task = SquareTask(folder=tmp_path, raised={"1": 1, "3": 9})
        told = self.run(task, chunk_slides=1, retries=1)
        assert told.results[1].square == 1
        assert told.results[3].status == "lost"
        assert "RuntimeError: no luck with 3" in told.results[3].error
