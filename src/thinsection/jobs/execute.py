"""The driver that runs entries of any kind on any executor and reports each exactly once.

An attempt is a set of entries that a backend tries in the same way. The backend splits it into
jobs, each for one worker to take. A job is a value of type `Attempt` too, with fewer entries. It
ends in one of four ways:

    reported   it has a result for each entry: the results are reported
    failed     an error of the worker or the cluster: the same job is sent again, at most
               `retries` times
    fatal      an error that a retry would repeat: its entries without a result are lost
    died       its process was killed or ran out of memory: each entry without a result is tried
               again alone, with smaller batches

A death costs only the entry that caused it, and no entry is tried without end:

- If memory ran out, the next attempt gets more memory, or a GPU with more memory, if the settings
  list a larger size. An entry that dies alone is tried again with each larger size, and lost when
  there is none.
- An entry whose own result says that memory ran out is tried again with the next larger size. If
  there is none, that result is final.

A lost entry is recorded as failed. Entries that are tried again wait until all other jobs have
ended. They run in a new backend, which may start larger workers, use another GPU or submit another
job array. A resource step is one choice of sizes: a memory size and a GPU.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from thinsection.errors import ClusterError, ThinsectionError
from thinsection.jobs.backend import (
    Attempt,
    Backend,
    BackendContext,
    OnMessage,
    ignore_event,
    load_backend,
)
from thinsection.jobs.executor import (
    ExecutorConfig,
    Resource,
    ResourceStep,
    check_gpus,
    chosen_executor,
)
from thinsection.jobs.task import AnyReport, Entry, OnEvent, Report, Result, Task
from thinsection.types import ignore_message


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

    def report_results(report: AnyReport, num_sent: int = 0) -> None:
        """Passes a report on, and sends the end events of its results.

        The worker has already sent the events of the first `num_sent` results.
        """
        # the report of a job that died before its first result is empty
        if report.results or report.stage_seconds:
            on_report(report)
        for result in report.results[num_sent:]:
            event = task.end_event(result)
            if event is not None:
                on_event(event)

    check_gpus(config)
    backend_type = load_backend(chosen_executor(config, cluster=cluster))
    unfinished: list[Entry] = []
    finished: list[Result] = []
    for entry in entries:
        # look in the files whether the entry is done, unless the task does so itself
        result = None
        if look_for_finished and backend_type.skips_finished_entries:
            result = task.finished(entry)
        if result is None:
            unfinished.append(entry)
        else:
            finished.append(result)
    if finished:
        report_results(Report(results=tuple(finished)))
        on_message(skipped_line(len(finished), len(entries)))

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
            attempts.extend(_run_attempt(backend, report_results))


def skipped_line(num_finished: int, num_entries: int) -> str:
    """Line about the entries that are finished before an attempt begins."""
    return f"{num_finished} of {num_entries} are already done and are skipped"


def _run_attempt(
    backend: Backend, report_results: Callable[[AnyReport, int], None]
) -> list[Attempt]:
    """Runs all jobs of a backend's attempt, reports their results, and returns next attempts."""
    context = backend.context
    jobs = deque(backend.jobs())
    num_running = 0
    next_attempts: list[Attempt] = []
    while jobs or num_running:
        num_to_send = min(backend.room(), len(jobs))
        if num_to_send > 0:
            backend.send([jobs.popleft() for _ in range(num_to_send)])
            num_running += num_to_send
        # some backends release idle workers when no job is waiting to be sent
        for job in backend.poll(waiting=len(jobs)):
            num_running -= 1
            is_of_cluster = isinstance(job.error, ClusterError)
            # an error of settings, weights or disk, which every job would meet
            if isinstance(job.error, ThinsectionError) and not is_of_cluster:
                raise job.error
            if job.end == "failed" and job.failures < context.config.retries:
                context.on_message(f"a task failed ({job.reason}) and is sent again")
                jobs.append(replace(job, failures=job.failures + 1))
                continue
            closed, num_reported, retries = close_job(
                job,
                context.config,
                backend.growable_resources,
                on_message=context.on_message,
            )
            # the worker sent the events of the results that it reported
            num_sent = num_reported if backend.carries_events else 0
            report_results(closed.report, num_sent)
            next_attempts += retries
    return merge_attempts(next_attempts)


def close_job(
    job: Attempt,
    config: ExecutorConfig,
    growable_resources: Collection[Resource],
    *,
    on_message: OnMessage,
    is_superseded: Callable[[object], bool] = lambda entry: False,
) -> tuple[Attempt, int, list[Attempt]]:
    """Decides for each entry of a job that ended: its result is final, or it is tried again.

    The files may have the result of an entry that the job did not report. If they have none, the
    entry is tried again, or recorded as lost.

    Args:
        job: the job, with its end.
        config: settings with the memory sizes and GPUs of all retries.
        growable_resources: resources of which the next attempt can get more.
        on_message: called with a line if entries are tried again alone.
        is_superseded: True for an entry that a newer job has. It is neither retried nor lost here;
            the caller drops its result.

    Returns:
        The job with the entries whose result is final, and their report; how many of these results
        the worker reported, which come first; attempts for the other entries.
    """

    def larger_step(lacking: Resource | None) -> ResourceStep | None:
        """Step with more of the resource that ran out; None if no such step, or nothing ran out."""
        if lacking is None or lacking not in growable_resources:
            return None
        return config.next_step(job.resource_step, lacking)

    task = job.task
    report = job.report
    entries: list[object] = []
    results: list[object] = []
    next_attempts: list[Attempt] = []
    # results are in the order of the entries, and stop early if the job did
    for entry, result in zip(job.entries, report.results):
        resource_step = None
        if not is_superseded(entry):
            resource_step = larger_step(task.lacking_resource(result))
        if resource_step is None:
            entries.append(entry)
            results.append(result)
        else:
            next_attempts.append(job.retry([entry], resource_step))
    num_reported = len(results)

    missing: list[object] = []
    for entry in job.entries[len(report.results) :]:
        result = task.finished(entry)
        if result is not None:
            entries.append(entry)
            results.append(result)
        elif not is_superseded(entry):
            missing.append(entry)

    resource_step = None
    if job.end == "died":
        resource_step = larger_step(job.lacking)
        if resource_step is None and not job.alone:
            resource_step = job.resource_step
    if missing and resource_step is not None:
        next_attempts.append(job.retry(missing, resource_step))
        if len(missing) == 1:
            on_message("a worker died with 1 entry, which is now retried alone")
        else:
            on_message(
                f"a worker died with {len(missing)} entries, each of which is now retried alone"
            )
    elif missing:
        reason = job.reason
        # attempts are numbered from 1, and all but the first have each entry alone
        if job.number == 2:
            reason += ", twice, the second time with this entry alone"
        elif job.alone:
            reason += f", {job.number} times, the last time with this entry alone"
        entries += missing
        results += [task.lost(entry, reason) for entry in missing]
    closed = replace(
        job,
        entries=tuple(entries),
        report=replace(report, results=tuple(results)),
    )
    return closed, num_reported, next_attempts


def merge_attempts(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Merges attempts with the same resource step.

    A merged attempt has the entries of all of them; its other fields are those of the last attempt.
    """
    merged_by_step: dict[ResourceStep, Attempt] = {}
    for attempt in attempts:
        earlier = merged_by_step.get(attempt.resource_step)
        earlier_entries = earlier.entries if earlier else ()
        merged_by_step[attempt.resource_step] = replace(
            attempt, entries=earlier_entries + attempt.entries
        )
    return list(merged_by_step.values())
