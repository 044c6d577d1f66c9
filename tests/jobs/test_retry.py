"""The policy of deaths, on values alone: who is tried again, with what, and who is lost."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest

from thinsection.jobs.backend import NO_REPORT, Attempt, End
from thinsection.jobs.execute import close_job, merge_attempts
from thinsection.jobs.executor import ExecutorConfig, Resource, ResourceStep
from thinsection.jobs.task import AnyReport, OnEvent, Report, Task
from thinsection.types import GIB
from thinsection.usage.analysis import Request

GRANTED = Request(cpus=2, memory_bytes=GIB, gpus=0, walltime_s=60)
TWO_SIZES = ExecutorConfig(job_memory="1G,2G", gpu="a40,h100")
FIRST = ResourceStep()
DIED = "its worker died"


@dataclass(frozen=True)
class Row:
    """A result."""

    entry: str
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan(Task[str, Row]):
    """Never runs; files tell of the entries `in_files`."""

    in_files: tuple[str, ...] = ()
    num_smaller: int = 0
    recorded: list[str] = field(default_factory=list)

    def __call__(self, entries: Sequence[str], *, on_event: OnEvent) -> Report[Row]:
        raise AssertionError("the policy runs nothing")

    def lost(self, entry: str, reason: str) -> Row:
        self.recorded.append(entry)
        return Row(entry, f"lost: {reason}")

    def finished(self, entry: str) -> Row | None:
        return Row(entry, "from files") if entry in self.in_files else None

    def smaller(self) -> Self:
        return replace(self, num_smaller=self.num_smaller + 1)


def ended(
    kind: End,
    *,
    entries: str = "abc",
    reported: Sequence[Row] = (),
    lacking: Resource | None = None,
) -> Attempt:
    job = Attempt(entries=tuple(entries), task=Plan())
    return job.ended(
        kind,
        report=Report(results=tuple(reported), stage_seconds={"busy": 1.5}),
        reason=DIED,
        lacking=lacking,
        granted=GRANTED,
    )


@dataclass(frozen=True)
class Outcome:
    """What became of the entries of a job."""

    entries: tuple[object, ...]
    report: AnyReport
    num_from_worker: int
    next_attempts: list[Attempt]


def close(
    end: Attempt,
    *,
    number: int = 1,
    resource_step: ResourceStep = FIRST,
    config: ExecutorConfig = TWO_SIZES,
    growable_resources: tuple[Resource, ...] = ("memory", "gpu"),
    superseded: str = "",
    **task: Any,
) -> tuple[Outcome, list[str]]:
    """The outcome of a job and the messages about it."""
    messages: list[str] = []
    closed, num_from_worker, next_attempts = close_job(
        replace(end, task=Plan(**task), number=number, resource_step=resource_step),
        config,
        growable_resources,
        on_message=messages.append,
        is_superseded=lambda entry: str(entry) in superseded,
    )
    outcome = Outcome(closed.entries, closed.report, num_from_worker, next_attempts)
    return outcome, messages


def test_a_whole_report_is_final() -> None:
    rows = [Row("a"), Row("b", "ValueError: bad slide"), Row("c")]
    outcome, messages = close(ended("reported", reported=rows))
    assert outcome.entries == ("a", "b", "c")
    assert outcome.report.results == tuple(rows)
    assert outcome.report.stage_seconds == {"busy": 1.5}
    assert outcome.num_from_worker == 3
    assert outcome.next_attempts == []
    assert messages == []


def test_what_a_dead_job_left_is_tried_alone_in_less_memory_of_the_same_size() -> None:
    outcome, messages = close(ended("died", reported=[Row("a")]))
    assert outcome.report.results == (Row("a"),)
    assert outcome.num_from_worker == 1
    (retry,) = outcome.next_attempts
    assert retry.entries == ("b", "c")
    assert (retry.alone, retry.number, retry.resource_step) == (True, 2, ResourceStep())
    assert isinstance(retry.task, Plan)
    assert retry.task.num_smaller == 1
    assert retry.previous_request == GRANTED
    assert messages == [
        "a worker died with 2 entries, each of which is now retried alone"
    ]


def test_one_entry_is_told_of_in_the_singular() -> None:
    _, messages = close(ended("died", entries="a"))
    assert messages == ["a worker died with 1 entry, which is now retried alone"]


@pytest.mark.parametrize(
    ("lacking", "resource_step"),
    [
        ("memory", ResourceStep(memory=1)),
        ("gpu", ResourceStep(gpu=1)),
        (None, ResourceStep()),
    ],
)
def test_a_death_for_want_of_something_gets_more_of_it(
    lacking: Resource | None, resource_step: ResourceStep
) -> None:
    outcome, _ = close(ended("died", lacking=lacking))
    assert [retry.resource_step for retry in outcome.next_attempts] == [resource_step]


def test_a_backend_that_cannot_give_more_tries_with_the_same() -> None:
    outcome, _ = close(ended("died", lacking="memory"), growable_resources=("gpu",))
    assert [retry.resource_step for retry in outcome.next_attempts] == [ResourceStep()]


def test_an_entry_that_dies_alone_climbs_to_the_last_size_and_is_lost_there() -> None:
    death = ended("died", entries="a", lacking="memory")
    outcome, _ = close(death, number=2)
    (retry,) = outcome.next_attempts
    assert (retry.number, retry.resource_step) == (3, ResourceStep(memory=1))
    assert isinstance(retry.task, Plan)
    assert retry.task.num_smaller == 0  # it is small already
    outcome, messages = close(death, number=3, resource_step=retry.resource_step)
    assert outcome.next_attempts == []
    assert outcome.report.results == (
        Row("a", f"lost: {DIED}, 3 times, the last time with this entry alone"),
    )
    assert outcome.num_from_worker == 0
    assert messages == []


def test_an_entry_that_dies_alone_for_no_want_is_lost_at_the_second_time() -> None:
    outcome, _ = close(ended("died", entries="a"), number=2)
    assert outcome.next_attempts == []
    assert outcome.report.results == (
        Row("a", f"lost: {DIED}, twice, the second time with this entry alone"),
    )


@pytest.mark.parametrize("kind", ["failed", "fatal"])
def test_what_another_time_would_not_mend_is_lost_at_once(kind: End) -> None:
    outcome, messages = close(ended(kind, reported=[Row("a")], lacking="memory"))
    assert outcome.entries == ("a", "b", "c")
    assert outcome.report.results[1:] == (
        Row("b", f"lost: {DIED}"),
        Row("c", f"lost: {DIED}"),
    )
    assert outcome.next_attempts == []
    assert messages == []


@pytest.mark.parametrize(
    ("error", "resource_step"),
    [
        ("out of memory: no room", ResourceStep(memory=1)),
        ("OutOfMemoryError: CUDA out of memory", ResourceStep(gpu=1)),
        ("RuntimeError: CUDA out of memory", ResourceStep(gpu=1)),
    ],
)
def test_an_entry_that_failed_for_want_of_memory_climbs_and_the_others_stay(
    error: str, resource_step: ResourceStep
) -> None:
    rows = [Row("a"), Row("b", error), Row("c")]
    outcome, messages = close(ended("reported", reported=rows))
    assert outcome.entries == ("a", "c")
    assert outcome.report.results == (Row("a"), Row("c"))
    assert outcome.num_from_worker == 2
    (retry,) = outcome.next_attempts
    assert (retry.entries, retry.resource_step, retry.previous_request) == (
        ("b",),
        resource_step,
        GRANTED,
    )
    assert messages == []


def test_an_entry_that_failed_for_want_of_memory_on_the_last_size_is_final() -> None:
    row = Row("a", "out of memory: no room")
    outcome, _ = close(
        ended("reported", entries="a", reported=[row]),
        resource_step=ResourceStep(memory=1),
    )
    assert outcome.report.results == (row,)
    assert outcome.next_attempts == []


def test_what_files_tell_of_is_done_without_a_report() -> None:
    outcome, messages = close(ended("died"), in_files=("b",))
    assert outcome.entries == ("b",)
    assert outcome.report.results == (Row("b", "from files"),)
    assert outcome.num_from_worker == 0  # so its event is still to be sent
    assert [retry.entries for retry in outcome.next_attempts] == [("a", "c")]
    assert messages == [
        "a worker died with 2 entries, each of which is now retried alone"
    ]


def test_a_death_after_the_last_entry_costs_nothing() -> None:
    outcome, messages = close(ended("died"), in_files=("a", "b", "c"))
    assert outcome.entries == ("a", "b", "c")
    assert (outcome.next_attempts, messages) == ([], [])


def test_an_entry_of_a_newer_job_is_neither_retried_nor_lost() -> None:
    task = Plan()
    outcome, _ = close(ended("died"), superseded="b", recorded=task.recorded)
    assert [retry.entries for retry in outcome.next_attempts] == [("a", "c")]
    outcome, _ = close(ended("fatal"), superseded="b", recorded=task.recorded)
    assert outcome.entries == ("a", "c")
    assert task.recorded == ["a", "c"]
    starved = Row("b", "out of memory: no room")
    outcome, _ = close(
        ended("reported", entries="b", reported=[starved]), superseded="b"
    )
    assert outcome.report.results == (starved,)


def test_a_job_without_any_report_has_an_empty_one() -> None:
    outcome, _ = close(replace(ended("fatal", entries="a"), report=NO_REPORT))
    assert outcome.report.results == (Row("a", f"lost: {DIED}"),)
    assert outcome.report.stage_seconds == {}


def test_tries_on_the_same_resource_step_become_one() -> None:
    first = Attempt(entries=("a",), task=Plan(), number=2)
    larger = Attempt(
        entries=("b",), task=Plan(), number=2, resource_step=ResourceStep(memory=1)
    )
    last = Attempt(entries=("c", "d"), task=Plan(), number=3, previous_request=GRANTED)
    assert merge_attempts([first, larger, last]) == [
        replace(last, entries=("a", "c", "d")),
        larger,
    ]
    assert merge_attempts([]) == []
