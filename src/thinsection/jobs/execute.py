"""The driver that runs entries of any kind on any executor and reports each exactly once.

Entries are grouped into jobs, and a backend runs the jobs. A job ends in one of four ways:

    reported   it has a result for each entry: the results are reported
    failed     an error of the worker or the cluster: the same job is sent again, at most
               `retries` times
    over       an error that a retry cannot fix: its entries are recorded as lost
    died       its process was killed or ran out of memory: each entry is tried again alone, with
               smaller batches (see `retry.py`)

An entry that dies alone is tried again with more memory, if memory ran out and the settings list
a larger size; else it is recorded as lost. Entries that are tried again wait until all other jobs
have ended. They run in a new backend, which may start larger workers, use another GPU or submit
another job array.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinsection.jobs.backend import (
    Attempt,
    Backend,
    BackendContext,
    Job,
    OnMessage,
    ignore_event,
    ignore_message,
    load_backend,
)
from thinsection.jobs.executor import ExecutorConfig, chosen_executor
from thinsection.jobs.retry import Outcome, RetryPolicy, close_job, merge_attempts
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
    """Passes reports on to the caller, and sends the events that no worker sent."""

    task: AnyTask
    on_report: Callable[[AnyReport], None]
    on_event: OnEvent

    def report(
        self, report: AnyReport, results_without_event: Sequence[object]
    ) -> None:
        """Passes a report on, and sends an end event for each of the given results."""
        # the report of a job that died before its first result is empty
        if report.results or report.stage_seconds:
            self.on_report(report)
        for result in results_without_event:
            event = self.task.end_event(result)
            if event is not None:
                self.on_event(event)

    def report_outcome(self, outcome: Outcome, *, carries_events: bool) -> None:
        """Reports the outcome of a job.

        Args:
            outcome: final results of the job.
            carries_events: True if the worker sent the events of the results that it reported.
        """
        results = outcome.report.results
        if carries_events:
            # the results that the worker reported come first
            results = results[outcome.num_from_worker :]
        self.report(outcome.report, results_without_event=results)


def execute(
    entries: Sequence[Entry],
    task: Task[Entry, Result],
    config: ExecutorConfig,
    *,
    folder: Path,
    on_report: Callable[[Report[Result]], None],
    on_event: OnEvent = ignore_event,
    on_message: OnMessage = ignore_message,
    cluster: object = None,
    look_for_finished: bool = True,
) -> None:
    """Runs the task on all entries; returns when each was reported exactly once, in any order.

    Entries that are finished already are not sent to another process.

    Args:
        entries: entries to work on.
        task: the work.
        config: the executor, and the number and size of its workers.
        folder: absolute path of the folder of this invocation, which every worker sees. Logs and
            the files of job arrays are written there.
        on_report: called in this thread whenever a job has ended.
        on_event: called with progress events, from any thread; some executors send fewer of them.
        on_message: called with lines for the person who waits.
        cluster: a Dask client or cluster to use instead of the one in the settings.
        look_for_finished: False if the caller has left out finished entries.

    Raises:
        ThinsectionError: settings, weights or the cluster cannot be used; never for a bad entry.
        Submitted: the settings say not to wait for the batch system.
    """
    backend_type = load_backend(chosen_executor(config, cluster=cluster))
    reporter = Reporter(task, on_report, on_event)
    unfinished: Sequence[Entry] = entries
    if look_for_finished and backend_type.skips_finished_entries:
        unfinished = _report_finished(entries, task, reporter, on_message)
    attempts: deque[Attempt] = deque()
    if unfinished:
        attempts.append(Attempt(entries=tuple(unfinished), task=task))
    while attempts:
        context = BackendContext(
            config=config,
            attempt=attempts.popleft(),
            folder=folder,
            on_event=on_event,
            on_message=on_message,
            cluster=cluster,
        )
        with backend_type(context) as backend:
            next_attempts = run_attempt(backend, reporter)
        attempts.extend(merge_attempts(next_attempts))


def _report_finished(
    entries: Sequence[Entry],
    task: Task[Entry, Result],
    reporter: Reporter,
    on_message: OnMessage,
) -> list[Entry]:
    """Reports the entries that are finished already, and returns the others."""
    results: list[Result] = []
    unfinished: list[Entry] = []
    for entry in entries:
        result = task.finished(entry)
        if result is None:
            unfinished.append(entry)
        else:
            results.append(result)
    if results:
        report = Report(results=tuple(results))
        reporter.report(report, results_without_event=results)
        on_message(skipped_line(len(results), len(entries)))
    return unfinished


def skipped_line(num_finished: int, num_entries: int) -> str:
    """Line about the entries that are finished before an attempt begins."""
    return f"{num_finished} of {num_entries} are already done and are skipped"


def run_attempt(backend: Backend, reporter: Reporter) -> list[Attempt]:
    """Runs all jobs of a backend's attempt, reports their results, and returns next attempts."""
    context = backend.context
    policy = RetryPolicy(context.attempt, context.config, backend.growable_resources)
    jobs = deque(_make_jobs(backend))
    num_running = 0
    next_attempts: list[Attempt] = []
    while jobs or num_running:
        num_to_send = min(backend.room(), len(jobs))
        if num_to_send > 0:
            backend.send([jobs.popleft() for _ in range(num_to_send)])
            num_running += num_to_send
        # some backends release idle workers when no job is waiting to be sent
        for ended in backend.poll(waiting=len(jobs)):
            num_running -= 1
            ended.raise_if_fatal()
            job = ended.job
            if ended.kind == "failed" and job.failures < context.config.retries:
                context.on_message(f"a task failed ({ended.reason}) and is sent again")
                jobs.append(replace(job, failures=job.failures + 1))
                continue
            outcome = close_job(ended, policy, on_message=context.on_message)
            reporter.report_outcome(outcome, carries_events=backend.carries_events)
            next_attempts += outcome.next_attempts
    return next_attempts


def _make_jobs(backend: Backend) -> list[Job]:
    """Makes the jobs of a backend's attempt; in a later attempt each entry has its own job."""
    attempt = backend.context.attempt
    task = backend.adapt_task(attempt.task)
    if attempt.alone:
        return [Job(entries=(entry,), task=task) for entry in attempt.entries]
    chunks = backend.chunks(attempt.entries)
    return [Job(entries=tuple(chunk), task=task) for chunk in chunks]
