"""The one driver: entries of any kind through any executor, each reported exactly once.

    chunks -> jobs -> Backend -> ended -+-> reported
                ^                       +-> failed: the same job again, `retries` times
                |                       +-> over: recorded as lost
                |                       +-> died: its entries
                +-- alone, in less memory, on the next rung of the settings
                                        +-> died again, no rung left: recorded as lost

What is tried again waits until the others have ended, in a backend that is opened anew: so a next
rung can be a larger worker, another card or a second array alike.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinsection.errors import ClusterError, ThinsectionError
from thinsection.jobs.backend import Backend, Ended, Job, Site, Try
from thinsection.jobs.executor import (
    EXECUTORS,
    ExecutorConfig,
    Rung,
    chosen_executor,
    chunked,
)
from thinsection.jobs.task import Entry, Report, Result, Task, Want


def execute(
    entries: Sequence[Entry],
    task: Task[Entry, Result],
    config: ExecutorConfig,
    *,
    folder: Path,
    on_report: Callable[[Report[Result]], None],
    on_event: Callable[[Any], None] = lambda event: None,
    on_message: Callable[[str], None] = lambda text: None,
    cluster: Any = None,
) -> None:
    """Returns when every entry was reported exactly once, in any order.

    Args:
        entries: those that are finished already are not sent to another process.
        task: what is done with them.
        config: which executor, and its settings.
        folder: of this invocation's records, absolute, seen by every worker; gets the workers'
            logs and the folders of arrays.
        on_report: called in this thread as chunks end.
        on_event: progress on the way, as far as the executor can carry it; from any thread.
        on_message: lines for the person who waits.
        cluster: a Dask client or cluster object to work on, instead of what the settings name.

    Raises:
        ThinsectionError: settings, weights or the cluster; a bad entry does not raise.
        Submitted: the settings say not to wait for the batch system.
    """
    backend_type = EXECUTORS.load(chosen_executor(config, cluster=cluster))
    told = _Told(task=task, on_report=on_report, on_event=on_event)
    found = [task.finished(e) if backend_type.asks_finished else None for e in entries]
    if any(done is not None for done in found):
        told.results([done for done in found if done is not None])
    missing = tuple(entry for entry, done in zip(entries, found) if done is None)
    if len(missing) < len(entries):
        on_message(f"{len(entries) - len(missing)} of {len(entries)} are done and left out")
    tries = deque([Try(entries=missing, task=task)] if missing else [])
    while tries:
        site = Site(
            config=config,
            attempt=tries.popleft(),
            folder=folder,
            on_event=on_event,
            on_message=on_message,
            cluster=cluster,
        )
        with backend_type(site) as backend:
            again = _work(site, backend, told)
        tries.extend(together(again))


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What is made of the end of a job.

    Attributes:
        report: what its worker said and is final.
        recorded: results that were found or recorded here, of entries that it left.
        ends: each of these entries with its result.
        again: what is tried again.
        message: for the person who waits; '' for none.
    """

    report: Report[Any]
    recorded: tuple[Any, ...] = ()
    ends: tuple[tuple[Any, Any], ...] = ()
    again: tuple[Try, ...] = ()
    message: str = ""


def settle(
    ended: Ended,
    attempt: Try,
    config: ExecutorConfig,
    climbs: Collection[Want],
    *,
    skip: Callable[[Any], bool] = lambda entry: False,
) -> Settled:
    """What becomes of each entry of a job that ended: the policy of deaths, written here only.

    An entry of which there is no report is asked for in the files first. Where its worker died it
    is tried alone, in less memory and on the next rung; who dies alone climbs on, and is lost where
    the rungs end. An entry that failed for want of memory climbs too, where there is a rung.

    Args:
        ended: the job.
        attempt: that the job was part of.
        config: with all rungs.
        climbs: what a next try can have more of.
        skip: entries that are not this job's business any more.
    """
    report = ended.report or Report(results=())
    told, recorded, left = [], [], []
    tries: list[Try] = []
    for entry, result in zip(ended.job.entries, report.results):
        want = None if skip(entry) else attempt.task.starved(result)
        above = _above(attempt, config, climbs, want)
        if above is None:
            told.append((entry, result))
        else:
            tries.append(_again(attempt, (entry,), above, ended))
    for entry in ended.job.entries[len(report.results) :]:
        done = attempt.task.finished(entry)
        if done is not None:
            recorded.append((entry, done))
        elif not skip(entry):
            left.append(entry)
    above = _above(attempt, config, climbs, ended.want)
    message = ""
    if left and ended.how == "died" and (above is not None or not attempt.alone):
        tries.append(_again(attempt, tuple(left), above or attempt.rung, ended))
        message = f"a worker died with {len(left)} entries: each is tried alone"
    else:
        reason = ended.reason + _how_often(attempt)
        recorded += [(entry, attempt.task.lost(entry, reason)) for entry in left]
    return Settled(
        report=replace(report, results=tuple(result for _, result in told)),
        recorded=tuple(result for _, result in recorded),
        ends=(*told, *recorded),
        again=tuple(tries),
        message=message,
    )


def _above(
    attempt: Try, config: ExecutorConfig, climbs: Collection[Want], want: Want | None
) -> Rung | None:
    return config.above(attempt.rung, want) if want is not None and want in climbs else None


def together(tries: Sequence[Try]) -> list[Try]:
    """The tries with the entries of equal rungs together."""
    found: dict[Rung, Try] = {}
    for one in tries:
        known = found.get(one.rung)
        found[one.rung] = replace(one, entries=(*known.entries, *one.entries)) if known else one
    return list(found.values())


def _again(attempt: Try, entries: tuple[Any, ...], rung: Rung, ended: Ended) -> Try:
    return Try(
        entries=entries,
        task=attempt.task if attempt.alone else attempt.task.smaller(),
        number=attempt.number + 1,
        alone=True,
        rung=rung,
        before=ended.granted,
    )


def _how_often(attempt: Try) -> str:
    if attempt.number == 1:
        return ""
    times = "twice, the second time" if attempt.number == 2 else f"{attempt.number} times, at last"
    return f", {times} alone"


@dataclass(frozen=True, kw_only=True)
class _Told:
    """Passes reports on, with an event for each entry whose worker could send none."""

    task: Task[Any, Any]
    on_report: Callable[[Report[Any]], None]
    on_event: Callable[[Any], None]

    def report(self, report: Report[Any]) -> None:
        """Passes on what a worker said, with its events told already."""
        if report.results or report.stage_seconds:
            self.on_report(report)

    def results(self, results: Sequence[Any]) -> None:
        """Reports results of which no event has told."""
        self.report(Report(results=tuple(results)))
        self.events(results)

    def events(self, results: Sequence[Any]) -> None:
        """Tells of the end of some entries."""
        for event in map(self.task.ended, results):
            if event is not None:
                self.on_event(event)


def _work(site: Site, backend: Backend, told: _Told) -> list[Try]:
    """Sends all jobs of a try, reports what ended, returns what must be tried again."""
    attempt = site.attempt
    task = backend.fit(attempt.task)
    chunks = chunked(attempt.entries, 1) if attempt.alone else backend.chunks(attempt.entries)
    jobs = deque(Job(entries=chunk, task=task) for chunk in chunks)
    running = 0
    again: list[Try] = []
    while jobs or running:
        room = min(backend.room(), len(jobs))
        if room:
            backend.send([jobs.popleft() for _ in range(room)])
            running += room
        for ended in backend.poll(waiting=len(jobs)):
            running -= 1
            if _may_fail_again(ended, site.config):
                site.on_message(f"a task failed ({ended.reason}): sent again")
                jobs.append(replace(ended.job, failures=ended.job.failures + 1))
                continue
            settled = settle(ended, attempt, site.config, backend.climbs)
            told.report(settled.report)
            if not backend.carries_events:
                told.events(settled.report.results)
            told.results(settled.recorded)
            if settled.message:
                site.on_message(settled.message)
            again += settled.again
    return again


def _may_fail_again(ended: Ended, config: ExecutorConfig) -> bool:
    """Whether another time may help and is allowed.

    Raises:
        ThinsectionError: of settings, weights or disk: it would be the same for every chunk.
    """
    error = ended.error
    if isinstance(error, ThinsectionError) and not isinstance(error, ClusterError):
        raise error
    return ended.how == "failed" and ended.job.failures < config.retries
