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
from thinsection.jobs.contract import (
    Backend,
    Ended,
    Job,
    OnEvent,
    Report,
    Result,
    Site,
    Task,
    Try,
)
from thinsection.jobs.executor import (
    EXECUTORS,
    Entry,
    ExecutorConfig,
    Rung,
    Want,
    chosen_executor,
)

Tell = Callable[
    [Report[Any], Sequence[Any]], None
]  # a report, and its results without an event


def execute(
    entries: Sequence[Entry],
    task: Task[Entry, Result],
    config: ExecutorConfig,
    *,
    folder: Path,
    on_report: Callable[[Report[Result]], None],
    on_event: OnEvent = lambda event: None,
    on_message: Callable[[str], None] = lambda text: None,
    cluster: Any = None,
) -> None:
    """Returns when every entry was reported exactly once, in any order.

    Entries that are finished already are not sent to another process. `folder` is that of this
    invocation's records, absolute, seen by every worker; it gets logs and arrays. `on_report` is
    called in this thread as chunks end, `on_event` from any thread as far as the executor carries
    progress; `cluster` is a Dask client or cluster that stands in place of what the settings name.
    Raises ThinsectionError (settings, weights or the cluster; not a bad entry) and Submitted (the
    settings say not to wait for the batch system).
    """

    def tell(report: Report[Any], silent: Sequence[Any]) -> None:
        if report.results or report.stage_seconds:
            on_report(report)
        for event in map(task.ended, silent):
            if event is not None:
                on_event(event)

    backend_type = EXECUTORS.load(chosen_executor(config, cluster=cluster))
    found = [task.finished(e) if backend_type.asks_finished else None for e in entries]
    done = tuple(result for result in found if result is not None)
    tell(Report(results=done), done)
    missing = tuple(entry for entry, result in zip(entries, found) if result is None)
    if done:
        on_message(f"{len(done)} of {len(entries)} are done and left out")
    tries = deque([Try(entries=missing, task=task)] if missing else [])
    while tries:
        site = Site(config, tries.popleft(), folder, on_event, on_message, cluster)
        with backend_type(site) as backend:
            again = _work(backend, tell)
        tries.extend(together(again))


def _work(backend: Backend, tell: Tell) -> list[Try]:
    """Sends all jobs of a try, reports what ended, returns what must be tried again."""
    site, attempt = backend.site, backend.site.attempt
    task = backend.fit(attempt.task)
    chunks = (
        [(e,) for e in attempt.entries]
        if attempt.alone
        else backend.chunks(attempt.entries)
    )
    jobs = deque(Job(entries=tuple(chunk), task=task) for chunk in chunks)
    running = 0
    again: list[Try] = []
    while jobs or running:
        room = min(backend.room(), len(jobs))
        if room:
            backend.send([jobs.popleft() for _ in range(room)])
            running += room
        for ended in backend.poll(waiting=len(jobs)):
            running -= 1
            error = ended.error
            if isinstance(error, ThinsectionError) and not isinstance(
                error, ClusterError
            ):
                raise error  # it would be the same for every chunk
            if ended.how == "failed" and ended.job.failures < site.config.retries:
                site.on_message(f"a task failed ({ended.reason}): sent again")
                jobs.append(replace(ended.job, failures=ended.job.failures + 1))
                continue
            settled = settle(ended, site, backend.climbs)
            results = settled.report.results
            tell(
                settled.report,
                results[settled.num_told if backend.carries_events else 0 :],
            )
            again += settled.again
    return again


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What is made of the end of a job."""

    entries: tuple[Any, ...]  # of which there is a last word
    report: Report[
        Any
    ]  # theirs: what the worker told, then what was found or recorded here
    num_told: int  # results that the worker has told
    again: tuple[Try, ...]


def settle(
    ended: Ended,
    site: Site,
    climbs: Collection[Want],  # what a next try can have more of
    *,
    skip: Callable[[Any], bool] = lambda entry: (
        False
    ),  # not this job's business any more
) -> Settled:
    """What becomes of each entry of a job that ended: the policy of deaths, written here only.

    An entry of which there is no report is asked for in the files first. Where its worker died it
    is tried alone, in less memory and on the next rung; who dies alone climbs on, and is lost where
    the rungs end. An entry that failed for want of memory climbs too, where there is a rung.
    """
    attempt, task = site.attempt, site.attempt.task

    def above(want: Want | None) -> Rung | None:
        return (
            site.config.above(attempt.rung, want) if want and want in climbs else None
        )

    report = ended.report or Report(results=())
    again: list[Try] = []
    ends: list[tuple[Any, Any]] = []
    for entry, result in zip(ended.job.entries, report.results):
        if (rung := None if skip(entry) else above(task.starved(result))) is None:
            ends.append((entry, result))
        else:
            again.append(attempt.again([entry], rung, ended.granted))
    num_told = len(ends)
    rest = [
        (entry, task.finished(entry))
        for entry in ended.job.entries[len(report.results) :]
    ]
    ends += [(entry, done) for entry, done in rest if done is not None]
    left = [entry for entry, done in rest if done is None and not skip(entry)]
    rung = above(ended.want)
    if left and ended.how == "died" and (rung or not attempt.alone):
        again.append(attempt.again(left, rung or attempt.rung, ended.granted))
        who = f"{len(left)} entries: each" if len(left) > 1 else "1 entry: it"
        site.on_message(f"a worker died with {who} is tried alone")
    else:
        many = f"{attempt.number} times, at last"
        times = "twice, the second time" if attempt.number == 2 else many
        reason = ended.reason + (f", {times} alone" if attempt.alone else "")
        ends += [(entry, task.lost(entry, reason)) for entry in left]
    entries, results = zip(*ends, strict=True) if ends else ((), ())
    report = replace(report, results=results)
    return Settled(
        entries=entries, report=report, num_told=num_told, again=tuple(again)
    )


def together(tries: Sequence[Try]) -> list[Try]:
    """The tries with the entries of equal rungs together."""
    found: dict[Rung, Try] = {}
    for one in tries:
        known = found.get(one.rung)
        found[one.rung] = (
            replace(one, entries=(*known.entries, *one.entries)) if known else one
        )
    return list(found.values())
