"""The one driver: entries of any kind through any executor, each reported exactly once.

    chunks -> jobs -> Backend -> ended -+-> reported
                ^                       +-> failed: the same job again, `retries` times
                |                       +-> over: recorded as lost
                |                       +-> died: its entries
                +-- alone, in less memory, on the next rung of the settings
                                        +-> died again, no rung left: recorded as lost

Entries that are tried again (`retry.py`) wait until the others have ended, in a backend that is
opened anew: so a next rung can be a larger worker, another card or a second array alike.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinsection.jobs.backend import (
    Backend,
    Job,
    OnMessage,
    Site,
    Try,
    ignore_event,
    ignore_message,
    load_backend,
)
from thinsection.jobs.executor import ExecutorConfig, chosen_executor
from thinsection.jobs.retry import Outcome, RetryPolicy, close_job, merge_tries
from thinsection.jobs.task import (
    AnyReport,
    AnyTask,
    Entry,
    OnEvent,
    Report,
    Result,
    Task,
)


@dataclass(frozen=True)
class Reporter:
    """Hands on reports, and an event for each result whose worker sent none."""

    task: AnyTask
    on_report: Callable[[AnyReport], None]
    on_event: OnEvent

    def report(self, report: AnyReport, silent_results: Sequence[object]) -> None:
        """Hands on a report, and the events of the results whose worker sent none."""
        if report.results or report.stage_seconds:
            self.on_report(report)
        for result in silent_results:
            event = self.task.ended(result)
            if event is not None:
                self.on_event(event)

    def report_outcome(self, outcome: Outcome, *, carries_events: bool) -> None:
        """Hands on the outcome of a job.

        Args:
            outcome: final results of the job.
            carries_events: the worker has sent the events of what it reported.
        """
        num_sent = outcome.num_from_worker if carries_events else 0
        self.report(outcome.report, outcome.report.results[num_sent:])


def execute(
    entries: Sequence[Entry],
    task: Task[Entry, Result],
    config: ExecutorConfig,
    *,
    folder: Path,
    on_report: Callable[[Report[Result]], None],
    on_event: OnEvent = ignore_event,
    on_message: OnMessage = ignore_message,
    cluster: Any = None,
) -> None:
    """Returns when every entry was reported exactly once, in any order.

    Entries that are finished already are not sent to another process.

    Args:
        entries: what to work on.
        task: the work.
        config: where and how wide.
        folder: folder of this invocation's records, absolute, seen by every worker; it gets logs
            and arrays.
        on_report: called in this thread as chunks end.
        on_event: called from any thread, as far as the executor carries progress.
        on_message: called with lines for the person who waits.
        cluster: a Dask client or cluster that stands in place of what the settings name.

    Raises:
        ThinsectionError: settings, weights or the cluster; not a bad entry.
        Submitted: the settings say not to wait for the batch system.
    """
    backend_type = load_backend(chosen_executor(config, cluster=cluster))
    reporter = Reporter(task, on_report, on_event)
    missing: Sequence[Entry] = entries
    if backend_type.asks_finished:
        missing = _report_finished(entries, task, reporter, on_message)
    tries = deque([Try(entries=tuple(missing), task=task)] if missing else [])
    while tries:
        site = Site(config, tries.popleft(), folder, on_event, on_message, cluster)
        with backend_type(site) as backend:
            retries = work_on(backend, reporter)
        tries.extend(merge_tries(retries))


def _report_finished(
    entries: Sequence[Entry],
    task: Task[Entry, Result],
    reporter: Reporter,
    on_message: OnMessage,
) -> list[Entry]:
    """Reports the entries that are done already, and returns the others."""
    results: list[Result] = []
    missing: list[Entry] = []
    for entry in entries:
        result = task.finished(entry)
        if result is None:
            missing.append(entry)
        else:
            results.append(result)
    if results:
        reporter.report(Report(results=tuple(results)), results)
        on_message(f"{len(results)} of {len(entries)} are done and left out")
    return missing


def work_on(backend: Backend, reporter: Reporter) -> list[Try]:
    """Sends all jobs of a backend's try, reports what ended, and returns the next tries."""
    site = backend.site
    policy = RetryPolicy(site.attempt, site.config, backend.climbs)
    jobs = deque(_first_jobs(backend))
    num_running = 0
    retries: list[Try] = []
    while jobs or num_running:
        room = min(backend.room(), len(jobs))
        if room > 0:
            backend.send([jobs.popleft() for _ in range(room)])
            num_running += room
        for ended in backend.poll(waiting=len(jobs)):
            num_running -= 1
            ended.raise_if_fatal()
            if ended.how == "failed" and ended.job.failures < site.config.retries:
                site.on_message(f"a task failed ({ended.reason}): sent again")
                jobs.append(replace(ended.job, failures=ended.job.failures + 1))
                continue
            outcome = close_job(ended, policy, on_message=site.on_message)
            reporter.report_outcome(outcome, carries_events=backend.carries_events)
            retries += outcome.retries
    return retries


def _first_jobs(backend: Backend) -> list[Job]:
    """The jobs of a backend's try; after a death each entry is alone."""
    attempt = backend.site.attempt
    task = backend.fit(attempt.task)
    if attempt.alone:
        return [Job(entries=(entry,), task=task) for entry in attempt.entries]
    chunks = backend.chunks(attempt.entries)
    return [Job(entries=tuple(chunk), task=task) for chunk in chunks]
