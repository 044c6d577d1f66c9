"""The Slurm executor, and what `thinsection slurm` does: write, submit, look, collect."""

import datetime
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinsection.config import as_mapping
from thinsection.errors import StoreError
from thinsection.run.cohort import SlideEntry
from thinsection.run.executor import ChunkReport, ExecutorConfig
from thinsection.run.executor_task import RunTask
from thinsection.run.results import SlideResult, read_result
from thinsection.run.slides import RunEvent
from thinsection.run.slurm_job import SlurmJob, load_jobs, write_job
from thinsection.run.slurm_request import job_request

_POLL_S = 5.0
# settings that decide where work happens, not what comes out
_NOT_IN_RESULTS = ("executor", "stream")


class SlurmExecutor:
    """See `Executor`: submits an array job and waits for it.

    An array task that ends without a report (killed, cancelled, out of time) is recorded, slide by
    slide, and not sent again: the same command takes up what is missing. An interrupted wait leaves
    the job in the queue; `thinsection slurm status` and `collect` find it.

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
        on_report: Callable[[ChunkReport[SlideResult]], None],
        on_event: Callable[[RunEvent], None],
    ) -> None:
        """See `Executor.execute`."""
        request = job_request(chunks, task.config, stage=task.stage)
        for line in request.lines():
            self._say(line)
        job = write_job(chunks, task, self._config, request=request)
        number = job.submit()
        self._say(f"slurm job {number}: {len(job.chunks)} array tasks, logs in {job.folder}/logs")
        open_indices = set(range(1, len(job.chunks) + 1))
        while open_indices:
            states = job.states()
            for index in sorted(open_indices):
                if states[index] not in ("DONE", "LOST"):
                    continue
                done = states[index] == "DONE"
                report = job.report(index) if done else job.lost_report(index)
                open_indices.discard(index)
                on_report(report)
                for result in report.results:
                    on_event(RunEvent(kind="ended", slide_id=result.slide_id, result=result))
            if open_indices:
                threading.Event().wait(self._poll_s)


def missing_entries(entries: Sequence[SlideEntry], task: RunTask) -> list[SlideEntry]:
    """The slides that are not done; all of them where an earlier job had other settings.

    Whether a slide is done to the letter is decided by the array task itself, which has the
    models; this keeps finished ones from being queued at all.
    """
    wanted = _result_settings(task)
    if any(_result_settings(job.task) != wanted for job in load_jobs(task.out)):
        return list(entries)
    return [entry for entry in entries if not _is_done(entry, task)]


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
    found = [read_result(job.task.out, entry, job.task.stage) for entry in job.entries]
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


def collect(out: Path) -> Collected:
    """Merges the reports of all jobs; the newest word on a slide counts.

    Array tasks that ended without a report are recorded slide by slide.

    Raises:
        StoreError: no job was ever written there.
    """
    jobs = load_jobs(out)
    if not jobs:
        raise StoreError(
            f"out must hold a job of 'thinsection slurm submit', got none in {str(out)!r}"
        )
    entries: dict[str, SlideEntry] = {}
    results: dict[str, SlideResult] = {}
    stages: Counter[str] = Counter()
    identities: dict[str, Any] = {}
    waiting = 0
    for job in reversed(jobs):
        newer = frozenset(entries)
        for index, state in job.states().items():
            chunk = job.chunks[index - 1]
            entries |= {e.slide_id: e for e in chunk if e.slide_id not in newer}
            if state not in ("DONE", "LOST"):
                waiting += state != "WRITTEN"
                continue
            done = state == "DONE"
            report = job.report(index) if done else job.lost_report(index, without=newer)
            results |= {r.slide_id: r for r in report.results if r.slide_id not in newer}
            stages.update(report.stage_seconds)
            identities = {**report.facts, **identities}
    return Collected(
        entries=tuple(entries.values()),
        results=tuple(results[name] for name in entries if name in results),
        waiting=waiting,
        stage_seconds=dict(stages),
        identities=identities,
        started=datetime.datetime.fromtimestamp(jobs[0].task.started, datetime.UTC),
        task=jobs[-1].task,
    )


def _is_done(entry: SlideEntry, task: RunTask) -> bool:
    found = read_result(task.out, entry, task.stage)
    return found is not None and found.status == "done"


def _result_settings(task: RunTask) -> tuple[str, dict[str, Any]]:
    settings = as_mapping(task.config)
    return task.stage, {k: v for k, v in settings.items() if k not in _NOT_IN_RESULTS}
