"""The driver on a simulated backend: what is sent, sent again, reported and raised."""

import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from thinsection.errors import ClusterError, ConfigError
from thinsection.jobs import backend
from thinsection.jobs import execute as execute_module
from thinsection.jobs.backend import Attempt, Backend
from thinsection.jobs.execute import execute
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.task import AnyTask, OnEvent, Report, Task

End = Callable[[Attempt], Attempt]


@dataclass(frozen=True, kw_only=True)
class Doubling(Task[int, str]):
    """Doubles numbers; those `in_files` are done."""

    in_files: tuple[int, ...] = ()

    def __call__(self, entries: Sequence[int], *, on_event: OnEvent) -> Report[str]:
        raise AssertionError("the simulated backend calls no task")

    def lost(self, entry: int, reason: str) -> str:
        return f"{entry} lost: {reason}"

    def finished(self, entry: int) -> str | None:
        return f"{entry} was done" if entry in self.in_files else None

    def end_event(self, result: str) -> object | None:
        return None if "was done" in result else f"ended: {result}"


def done(job: Attempt) -> Attempt:
    results = tuple(str(2 * entry) for entry in job.entries)
    report = Report(results=results, stage_seconds={"busy": len(results)})
    return job.ended("reported", report=report)


def died(job: Attempt) -> Attempt:
    return job.ended("died", reason="its worker died")


def failed(job: Attempt) -> Attempt:
    return job.ended("failed", reason="no network", error=ClusterError("lost"))


def refused(job: Attempt) -> Attempt:
    error = ConfigError("tiles.x must be 1, got 2")
    return job.ended("failed", reason="ConfigError", error=error)


@dataclass
class Record:
    """Everything that a simulated execution did."""

    opened: list[Backend] = field(default_factory=list)
    sent: list[tuple[int, ...]] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    reports: list[Report[str]] = field(default_factory=list)
    events: list[object] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    @property
    def results(self) -> list[str]:
        return [result for report in self.reports for result in report.results]


@dataclass
class Simulation:
    """Runs numbers through `execute`, on two workers that end jobs as `ends` says.

    Attributes:
        ends: ends of jobs, by their entries; a job without one is done.
    """

    monkeypatch: pytest.MonkeyPatch
    folder: Path
    ends: dict[tuple[int, ...], list[End]] = field(default_factory=dict)
    carries_events: bool = True
    skips_finished_entries: bool = True

    def run(
        self,
        count: int,
        task: AnyTask | None = None,
        *,
        retries: int = 2,
        look_for_finished: bool = True,
    ) -> Record:
        record = Record()
        simulation = self

        class Simulated(Backend):
            carries_events: ClassVar[bool] = self.carries_events
            skips_finished_entries: ClassVar[bool] = self.skips_finished_entries

            def open(self) -> None:
                self.workers = 2
                self.threads = 3
                record.opened.append(self)
                self.queue: deque[Attempt] = deque()

            def room(self) -> int:
                return self.workers - len(self.queue)

            def send(self, jobs: Sequence[Attempt]) -> None:
                assert 0 < len(jobs) <= self.room()
                record.sent += [job.entries for job in jobs]
                assert all(job.task.threads == 3 for job in jobs)
                self.queue.extend(jobs)

            def poll(self, *, waiting: int) -> Sequence[Attempt]:
                assert self.queue, "a driver that polls an idle backend never ends"
                record.waiting.append(waiting)
                job = self.queue.popleft()
                ends = simulation.ends.get(job.entries)
                end = ends.pop(0) if ends else done
                return [end(job)]

        self.monkeypatch.setattr(execute_module, "load_backend", lambda name: Simulated)
        execute(
            range(count),
            task or Doubling(),
            ExecutorConfig(chunk_slides=2, retries=retries),
            folder=self.folder,
            on_report=record.reports.append,
            on_event=record.events.append,
            on_message=record.messages.append,
            look_for_finished=look_for_finished,
        )
        return record


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Simulation:
    return Simulation(monkeypatch, tmp_path)


def test_every_chunk_is_sent_once_as_workers_have_room(simulation: Simulation) -> None:
    record = simulation.run(7)
    assert record.sent == [(0, 1), (2, 3), (4, 5), (6,)]
    assert record.waiting == [2, 1, 0, 0]
    assert record.results == ["0", "2", "4", "6", "8", "10", "12"]
    assert sum(r.stage_seconds["busy"] for r in record.reports) == 7
    assert (record.events, record.messages) == ([], [])
    assert len(record.opened) == 1


def test_nothing_is_opened_for_nothing(simulation: Simulation) -> None:
    record = simulation.run(0)
    assert (record.opened, record.reports, record.messages) == ([], [], [])


def test_what_is_finished_is_reported_and_not_sent(simulation: Simulation) -> None:
    record = simulation.run(4, Doubling(in_files=(1, 3)))
    assert record.sent == [(0, 2)]
    assert [r.results for r in record.reports] == [
        ("1 was done", "3 was done"),
        ("0", "4"),
    ]
    assert record.messages == ["2 of 4 are already done and are skipped"]


def test_where_all_is_finished_no_backend_is_opened(simulation: Simulation) -> None:
    record = simulation.run(2, Doubling(in_files=(0, 1)))
    assert record.opened == []
    assert record.results == ["0 was done", "1 was done"]


def test_a_caller_that_has_left_out_finished_entries_asks_no_second_time(
    simulation: Simulation,
) -> None:
    record = simulation.run(2, Doubling(in_files=(0, 1)), look_for_finished=False)
    assert record.sent == [(0, 1)]
    assert record.messages == []


def test_a_backend_that_does_not_ask_sends_everything(simulation: Simulation) -> None:
    simulation.skips_finished_entries = False
    record = simulation.run(2, Doubling(in_files=(0, 1)))
    assert record.sent == [(0, 1)]
    assert record.messages == []


def test_the_entries_of_a_dead_job_are_tried_alone_after_the_others(
    simulation: Simulation,
) -> None:
    simulation.ends = {(0, 1): [died], (1,): [died]}
    record = simulation.run(4)
    assert record.sent == [(0, 1), (2, 3), (0,), (1,)]
    assert len(record.opened) == 2
    assert record.opened[1].context.attempt.number == 2
    assert record.results == [
        "4",
        "6",
        "0",
        "1 lost: its worker died, twice, the second time with this entry alone",
    ]
    assert record.messages == [
        "a worker died with 2 entries, each of which is now retried alone"
    ]
    # only the lost entry had no worker that could send its event
    assert record.events == [f"ended: {record.results[-1]}"]


def test_an_empty_report_is_not_handed_on(simulation: Simulation) -> None:
    simulation.ends = {(0, 1): [died]}
    record = simulation.run(2)
    assert [r.results for r in record.reports] == [("0",), ("2",)]


def test_seconds_without_results_are_handed_on(simulation: Simulation) -> None:
    def died_late(job: Attempt) -> Attempt:
        report: Report[str] = Report(results=(), stage_seconds={"busy": 1.0})
        return job.ended("died", report=report)

    simulation.ends = {(0, 1): [died_late]}
    record = simulation.run(2)
    assert sum(r.stage_seconds["busy"] for r in record.reports) == 3


def test_a_failed_job_is_sent_again_and_its_entries_are_lost_after_the_retries(
    simulation: Simulation,
) -> None:
    simulation.ends = {(0, 1): [failed], (2, 3): [failed, failed, failed]}
    record = simulation.run(4, retries=2)
    assert record.sent == [(0, 1), (2, 3), (0, 1), (2, 3), (2, 3)]
    assert record.messages == ["a task failed (no network) and is sent again"] * 3
    assert record.results == [
        "0",
        "2",
        "2 lost: no network",
        "3 lost: no network",
    ]


def test_without_retries_a_failed_job_is_lost_at_once(simulation: Simulation) -> None:
    simulation.ends = {(0, 1): [failed]}
    record = simulation.run(2, retries=0)
    assert record.sent == [(0, 1)]
    assert record.results == ["0 lost: no network", "1 lost: no network"]


def test_an_error_of_the_settings_is_raised_at_once(simulation: Simulation) -> None:
    simulation.ends = {(0, 1): [refused]}
    with pytest.raises(ConfigError, match=r"tiles\.x must be 1, got 2"):
        simulation.run(4)


def test_events_of_results_are_sent_where_the_backend_carries_none(
    simulation: Simulation,
) -> None:
    simulation.carries_events = False
    record = simulation.run(3, Doubling(in_files=(1,)))
    assert record.events == ["ended: 0", "ended: 4"]  # "was done" has no event


def test_the_former_form_of_an_end_still_works_and_names_the_new_one() -> None:
    job = Attempt(entries=(1, 2), task=Doubling())
    report = Report(results=("2", "4"))
    with pytest.warns(DeprecationWarning, match=r"use job\.ended"):
        ended = backend.Ended(job=job, kind="reported", report=report)
    assert ended == job.ended("reported", report=report)
    with pytest.warns(DeprecationWarning, match=r"use job\.ended"):
        assert backend.Ended(job=job, kind="over", report=report).end == "fatal"


@dataclass(frozen=True)
class SeenThreshold(Task[int, int]):
    """New objects after which the process of each entry searches for cycles."""

    def __call__(self, entries: Sequence[int], *, on_event: OnEvent) -> Report[int]:
        return Report(results=tuple(gc.get_threshold()[0] for _ in entries))

    def lost(self, entry: int, reason: str) -> int:
        raise AssertionError(f"{entry} was lost: {reason}")


def test_workers_of_a_pool_search_for_cycles_as_rarely_as_the_command(
    tmp_path: Path,
) -> None:
    reports: list[Report[int]] = []
    config = ExecutorConfig(executor="pool", workers=2, chunk_slides=1, threads=1)
    execute(
        range(2), SeenThreshold(), config, folder=tmp_path, on_report=reports.append
    )
    assert [n for report in reports for n in report.results] == [20_000, 20_000]
