"""The policy of what happens to entries whose job died, failed or ran out of memory.

A death costs nobody but the entry that caused it, and an entry is never tried without end:

- An entry whose job died is tried alone, in less memory, with the next memory size or card of the
  settings where the death was for want of it.
- An entry that dies alone climbs on while the settings list more, and is lost after the last.
- An entry whose own result says that memory was short climbs too, where there is more.
- A job that ended by an error which another time would not mend is recorded as lost.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from thinsection.jobs.backend import Ended, OnMessage, Try
from thinsection.jobs.executor import ExecutorConfig, Rung, Want
from thinsection.jobs.task import AnyReport, Report
from thinsection.usage.analysis import Request


@dataclass(frozen=True)
class RetryPolicy:
    """Decides, for one try, which entries are tried once more.

    Attributes:
        attempt: the try whose jobs end.
        config: settings with all rungs.
        climbs: resources of which a next try can have more.
    """

    attempt: Try
    config: ExecutorConfig
    climbs: Collection[Want]

    def larger_rung(self, want: Want | None) -> Rung | None:
        """The next rung for a want; None where there is none, or nothing was wanting."""
        if want is None or want not in self.climbs:
            return None
        return self.config.next_rung(self.attempt.rung, want)

    def retry_starved(
        self, entry: object, want: Want | None, granted: Request | None
    ) -> Try | None:
        """The next try of an entry that failed for want of memory; None: its result is final."""
        rung = self.larger_rung(want)
        if rung is None:
            return None
        return self.attempt.retry([entry], rung, granted)

    def retry_unreported(self, entries: Sequence[object], ended: Ended) -> Try | None:
        """The next try of entries that a job left without a report; None: they are lost."""
        if ended.how != "died" or not entries:
            return None
        rung = self.larger_rung(ended.want)
        if rung is None and self.attempt.alone:
            return None
        return self.attempt.retry(entries, rung or self.attempt.rung, ended.granted)

    def loss_reason(self, ended: Ended) -> str:
        """The reason why entries of a job are lost, for a person."""
        if not self.attempt.alone:
            return ended.reason
        if self.attempt.number == 2:
            return f"{ended.reason}, twice, the second time alone"
        return f"{ended.reason}, {self.attempt.number} times, at last alone"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Final results of a job that ended, and the tries that follow.

    Attributes:
        entries: entries whose result is final.
        report: the report with the results of these entries, in this order.
        num_from_worker: how many of the results, from the first, the worker itself reported.
        retries: next tries of the other entries.
    """

    entries: tuple[object, ...]
    report: AnyReport
    num_from_worker: int
    retries: tuple[Try, ...]


def close_job(
    ended: Ended,
    policy: RetryPolicy,
    *,
    on_message: OnMessage,
    is_superseded: Callable[[object], bool] = lambda entry: False,
) -> Outcome:
    """Applies the policy to each entry of a job that ended.

    An entry without a report is looked for in the files first, and recorded there where it is lost.

    Args:
        ended: how the job ended.
        policy: the policy of its try.
        on_message: called with a line where entries are tried alone.
        is_superseded: whether a newer job has the entry; then it is neither retried nor lost here.
    """
    task = policy.attempt.task
    report = ended.report or Report(results=())
    entries: list[object] = []
    results: list[object] = []
    retries: list[Try] = []
    for entry, result in zip(ended.job.entries, report.results):
        want = None if is_superseded(entry) else task.starved(result)
        retry = policy.retry_starved(entry, want, ended.granted)
        if retry is None:
            entries.append(entry)
            results.append(result)
        else:
            retries.append(retry)
    num_from_worker = len(results)

    missing: list[object] = []
    for entry in ended.job.entries[len(report.results) :]:
        result = task.finished(entry)
        if result is not None:
            entries.append(entry)
            results.append(result)
        elif not is_superseded(entry):
            missing.append(entry)

    retry = policy.retry_unreported(missing, ended)
    if retry is not None:
        retries.append(retry)
        who = "1 entry: it" if len(missing) == 1 else f"{len(missing)} entries: each"
        on_message(f"a worker died with {who} is tried alone")
    else:
        reason = policy.loss_reason(ended)
        entries += missing
        results += [task.lost(entry, reason) for entry in missing]
    return Outcome(
        entries=tuple(entries),
        report=replace(report, results=tuple(results)),
        num_from_worker=num_from_worker,
        retries=tuple(retries),
    )


def merge_tries(tries: Sequence[Try]) -> list[Try]:
    """Joins the entries of tries on the same rung; the last of them says how they are tried."""
    by_rung: dict[Rung, Try] = {}
    for attempt in tries:
        earlier = by_rung.get(attempt.rung)
        entries = earlier.entries if earlier else ()
        by_rung[attempt.rung] = replace(attempt, entries=entries + attempt.entries)
    return list(by_rung.values())
