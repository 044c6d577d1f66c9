"""The driver that runs entries of any kind on any executor and reports each exactly once.

Entries are grouped into jobs, and a backend runs the jobs. A job ends in one of four ways:

    reported   it has a result for each entry: the results are reported
    failed     an error of the worker or the cluster: the same job is sent again, at most
               `retries` times
    over       an error that a retry cannot fix: its entries are recorded as lost
    died       its process was killed or ran out of memory: each entry is tried again alone, with
               smaller batches

An entry that dies alone is tried again with more memory, if memory ran out and the settings list
a larger size; else it is recorded as lost. Entries that are tried again wait until all other jobs
have ended. They run in a new backend, which may start larger workers, use another GPU or submit
another job array.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinsection.jobs.backend import (
    Attempt,
    Backend,
    BackendContext,
    Ended,
    Job,
    OnMessage,
    ignore_event,
    ignore_message,
    load_backend,
)
from thinsection.jobs.executor import ExecutorConfig, Resource, Rung, chosen_executor
from thinsection.jobs.task import (
    AnyReport,
    AnyTask,
    Entry,
    OnEvent,
    Report,
    Result,
    Task,
)
from thinsection.usage.analysis import Request


@dataclass(frozen=True)
class RetryPolicy:
    """Decides which entries of one attempt are tried again.

    Attributes:
        attempt: the attempt whose jobs end.
        config: settings with all rungs.
        growable_resources: resources of which the next attempt can get more.
    """

    attempt: Attempt
    config: ExecutorConfig
    growable_resources: Collection[Resource]

    def larger_rung(self, lacking: Resource | None) -> Rung | None:
        """Returns the rung with more of the resource that ran out; None if there is none.

        Args:
            lacking: resource that ran out; None if no resource did.
        """
        if lacking is None or lacking not in self.growable_resources:
            return None
        return self.config.next_rung(self.attempt.rung, lacking)

    def retry_failed(
        self, entry: object, lacking: Resource | None, granted: Request | None
    ) -> Attempt | None:
        """Returns the next attempt of an entry with a result; None if its result is final.

        Args:
            entry: the entry.
            lacking: resource that ran out, by the result; None for any other result.
            granted: resources that the batch job had.
        """
        rung = self.larger_rung(lacking)
        if rung is None:
            return None
        return self.attempt.retry([entry], rung, granted)

    def retry_unreported(
        self, entries: Sequence[object], ended: Ended
    ) -> Attempt | None:
        """Returns the next attempt of entries without a result; None if they are lost."""
        if ended.kind != "died":
            return None
        rung = self.larger_rung(ended.lacking)
        if rung is None:
            if self.attempt.alone:
                return None
            rung = self.attempt.rung
        return self.attempt.retry(entries, rung, ended.granted)

    def loss_reason(self, ended: Ended) -> str:
        """Returns the reason why entries of a job are lost, for a person."""
        if not self.attempt.alone:
            return ended.reason
        # attempts are numbered from 1, and all but the first have each entry alone
        num_attempts = self.attempt.number
        if num_attempts == 2:
            return f"{ended.reason}, twice, the second time with this entry alone"
        return (
            f"{ended.reason}, {num_attempts} times, the last time with this entry alone"
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Final results of a job that ended, and the next attempts.

    Attributes:
        entries: entries whose result is final.
        report: report with the results of these entries, in this order.
        num_from_worker: number of results that the worker reported; these come first.
        next_attempts: attempts of the other entries.
    """

    entries: tuple[object, ...]
    report: AnyReport
    num_from_worker: int
    next_attempts: tuple[Attempt, ...]


def close_job(
    ended: Ended,
    policy: RetryPolicy,
    *,
    on_message: OnMessage,
    is_superseded: Callable[[object], bool] = lambda entry: False,
) -> Outcome:
    """Applies the policy to each entry of a job that ended.

    The files may have the result of an entry that the job did not report. Without one the entry is
    tried again, or recorded as lost.

    Args:
        ended: the end of the job.
        policy: policy of the attempt that the job belongs to.
        on_message: called with a line if entries are tried again alone.
        is_superseded: True for an entry that a newer job has; that job decides on it.
    """
    task = policy.attempt.task
    report = ended.report or Report(results=())
    entries: list[object] = []
    results: list[object] = []
    next_attempts: list[Attempt] = []
    # results are in the order of the entries, and stop early if the job did
    for entry, result in zip(ended.job.entries, report.results):
        lacking = None if is_superseded(entry) else task.lacking_resource(result)
        next_attempt = policy.retry_failed(entry, lacking, ended.granted)
        if next_attempt is None:
            entries.append(entry)
            results.append(result)
        else:
            next_attempts.append(next_attempt)
    num_from_worker = len(results)

    missing: list[object] = []
    num_reported = len(report.results)
    for entry in ended.job.entries[num_reported:]:
        result = task.finished(entry)
        if result is not None:
            entries.append(entry)
            results.append(result)
        elif not is_superseded(entry):
            missing.append(entry)

    if missing:
        next_attempt = policy.retry_unreported(missing, ended)
        if next_attempt is None:
            reason = policy.loss_reason(ended)
            entries += missing
            results += [task.lost(entry, reason) for entry in missing]
        else:
            next_attempts.append(next_attempt)
            on_message(_retry_message(len(missing)))
    return Outcome(
        entries=tuple(entries),
        report=replace(report, results=tuple(results)),
        num_from_worker=num_from_worker,
        next_attempts=tuple(next_attempts),
    )


def _retry_message(num_entries: int) -> str:
    if num_entries == 1:
        return "a worker died with 1 entry, which is now retried alone"
    return (
        f"a worker died with {num_entries} entries, each of which is now retried alone"
    )


def merge_attempts(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Joins attempts on the same rung into one.

    It has the entries of all of them; its other fields are those of the last one.
    """
    merged_by_rung: dict[Rung, Attempt] = {}
    for attempt in attempts:
        earlier = merged_by_rung.get(attempt.rung)
        earlier_entries = earlier.entries if earlier else ()
        merged_by_rung[attempt.rung] = replace(
            attempt, entries=earlier_entries + attempt.entries
        )
    return list(merged_by_rung.values())


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
