"""The Slurm executor, and what `thinsection slurm` does: write, submit, look, collect."""

import datetime
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinsection.config import as_mapping
from thinsection.errors import StoreError
from thinsection.jobs.executor import ExecutorConfig
from thinsection.jobs.slurm_job import SlurmJob, load_jobs, write_job
from thinsection.jobs.slurm_queue import TaskState
from thinsection.jobs.slurm_retry import slides_to_retry, submit_alone
from thinsection.jobs.task import Report
from thinsection.pipeline.process import RunEvent
from thinsection.pipeline.results import SlideResult
from thinsection.pipeline.task import RunTask
from thinsection.slide.cohort import SlideEntry

_POLL_S = 5.0
# settings that decide where work happens, not what comes out
_NOT_IN_RESULTS = ("executor", "stream")


class SlurmExecutor:
    """See `Executor`: submits an array job and waits for it.

    Slides whose array task died (killed, out of memory, out of time, node lost) are sent once more,
    each alone, when the array has ended; a slide whose task dies again is recorded as failed in
    stage 'worker'. Tasks that were cancelled or failed by themselves are recorded at once. An
    interrupted wait leaves the job in the queue; `thinsection slurm status` and `collect` find it.

    Args:
        config: of the executor.
        on_message: lines for the person who waits.
        poll_s: seconds between two looks at the queue.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        *,
        on_message: Callable[[str], None],
        poll_s: float = _POLL_S,
    ) -> None:
        self._config, self._say, self._poll_s = config, on_message, poll_s

    def execute(
        self,
        chunks: Sequence[Sequence[SlideEntry]],
        task: RunTask,
        *,
        on_report: Callable[[Report[SlideResult]], None],
        on_event: Callable[[RunEvent], None],
    ) -> None:
        """See `Executor.execute`."""
        request = task.request(chunks, self._config)
        for line in request.lines():
            self._say(line)
        job = write_job(chunks, task, self._config, request=request)
        number = job.submit()
        self._say(f"slurm job {number}: {len(job.chunks)} array tasks, logs in {job.folder}/logs")
        lost = self._follow(job, on_report, on_event)
        again = slides_to_retry(job, lost)
        taken = {entry.slide_id for entry in again}
        for index, end in lost.items():
            _pass_on(job.lost_report(index, end, without=taken), on_report, on_event)
        if not again:
            return
        second = submit_alone(job, again, on_message=self._say)
        for index, end in self._follow(second, on_report, on_event).items():
            _pass_on(second.lost_report(index, end), on_report, on_event)

    def _follow(
        self,
        job: SlurmJob,
        on_report: Callable[[Report[SlideResult]], None],
        on_event: Callable[[RunEvent], None],
    ) -> dict[int, TaskState]:
        """Passes reports on until the array has ended; returns how the others ended, by index."""
        lost: list[int] = []
        open_indices = set(range(1, len(job.chunks) + 1))
        while open_indices:
            states = job.states()
            for index in sorted(open_indices):
                if states[index] == "DONE":
                    _pass_on(job.report(index), on_report, on_event)
                elif states[index] == "LOST":
                    lost.append(index)
                else:
                    continue
                open_indices.discard(index)
            if open_indices:
                threading.Event().wait(self._poll_s)
        return job.ends(lost)


def _pass_on(
    report: Report[SlideResult],
    on_report: Callable[[Report[SlideResult]], None],
    on_event: Callable[[RunEvent], None],
) -> None:
    on_report(report)
    for result in report.results:
        on_event(RunEvent(kind="ended", slide_id=result.slide_id, result=result))


def missing_entries(entries: Sequence[SlideEntry], task: RunTask) -> list[SlideEntry]:
    """The slides that are not done; all of them where an earlier job had other settings.

    Whether a slide is done to the letter is decided by the array task itself, which has the
    models; this keeps finished ones from being queued at all.
    """
    wanted = _result_settings(task)
    if any(_result_settings(job.task) != wanted for job in load_jobs(task.out)):
        return list(entries)
    return [entry for entry in entries if not task.done(entry)]


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """One job as it stands.

    Attributes:
        job: the job.
        tasks: state -> number of array tasks: DONE, LOST, RUNNING, PENDING, ...
        slides: status -> number of slides: done, skipped, failed, missing.
    """

    job: SlurmJob
    tasks: dict[str, int]
    slides: dict[str, int]


def job_status(job: SlurmJob) -> JobStatus:
    """Asks the queue and the output folder."""
    found = [job.task.done(entry) for entry in job.entries]
    return JobStatus(
        job=job,
        tasks=dict(Counter(job.states().values())),
        slides=dict(Counter(result.status if result else "missing" for result in found)),
    )


@dataclass(frozen=True, kw_only=True)
class Collected:
    """All jobs of an output folder, merged.

    Attributes:
        entries: every slide of every job, once.
        results: of them, in that order; still running ones are left out.
        waiting: array tasks that still wait or run.
        stage_seconds, identities, started: for run.json.
        task: of the newest job.
    """

    entries: tuple[SlideEntry, ...]
    results: tuple[SlideResult, ...]
    waiting: int
    stage_seconds: dict[str, float]
    identities: dict[str, Any]
    started: datetime.datetime
    task: RunTask


def collect(
    out: Path, *, retry: bool = True, on_message: Callable[[str], None] = lambda text: None
) -> Collected:
    """Merges the reports of all jobs; the newest word on a slide counts.

    Array tasks that ended without a report are recorded slide by slide, but for those that died for
    the first time: their slides are submitted once more, each alone.

    Args:
        out: the output folder.
        retry: False records the dead ones at once.
        on_message: lines for the person who waits.

    Raises:
        StoreError: no job was ever written there.
    """
    jobs = load_jobs(out)
    if not jobs:
        raise StoreError(
            f"out must hold a job of 'thinsection slurm submit', got none in {str(out)!r}"
        )
    merged = _Merge()
    for job in reversed(jobs):
        merged.add(job, retry=retry)
    for job, slides in merged.again:
        merged.waiting += len(submit_alone(job, slides, on_message=on_message).chunks)
    return Collected(
        entries=tuple(merged.entries.values()),
        results=tuple(merged.results[name] for name in merged.entries if name in merged.results),
        waiting=merged.waiting,
        stage_seconds=dict(merged.stages),
        identities=merged.identities,
        started=datetime.datetime.fromtimestamp(jobs[0].task.started, datetime.UTC),
        task=jobs[-1].task,
    )


@dataclass(kw_only=True)
class _Merge:
    """What `collect` knows so far; jobs are added newest first."""

    entries: dict[str, SlideEntry] = field(default_factory=dict)
    results: dict[str, SlideResult] = field(default_factory=dict)
    stages: Counter[str] = field(default_factory=Counter)
    identities: dict[str, Any] = field(default_factory=dict)
    waiting: int = 0
    again: list[tuple[SlurmJob, list[SlideEntry]]] = field(default_factory=list)

    def add(self, job: SlurmJob, *, retry: bool) -> None:
        """Takes what the array tasks of an older job say of slides that no newer one has."""
        newer = frozenset(self.entries)
        self.entries |= {e.slide_id: e for e in job.entries if e.slide_id not in newer}
        states = job.states()
        lost = [index for index, state in states.items() if state == "LOST"]
        self.waiting += sum(s not in ("DONE", "LOST", "WRITTEN") for s in states.values())
        ends = job.ends(lost)
        again = slides_to_retry(job, ends, without=newer) if retry else []
        if again:
            self.again.append((job, again))
        taken = newer | {entry.slide_id for entry in again}
        reports = [job.report(index) for index, state in states.items() if state == "DONE"]
        reports += [job.lost_report(i, end, without=taken) for i, end in ends.items()]
        for report in reports:
            self.results |= {r.slide_id: r for r in report.results if r.slide_id not in newer}
            self.stages.update(report.stage_seconds)
            self.identities = {**report.facts, **self.identities}


def _result_settings(task: RunTask) -> tuple[str, dict[str, Any]]:
    settings = as_mapping(task.config)
    return task.goal, {k: v for k, v in settings.items() if k not in _NOT_IN_RESULTS}
