"""The policy for entries whose job died, failed or ran out of memory.

A death costs only the entry that caused it, and no entry is tried without end:

- An entry whose job died is tried again in a job of its own, with smaller batches. If memory ran
  out, that job also gets more memory, or a GPU with more memory, if the settings list one.
- An entry that dies alone is tried again with each larger size that the settings list. It is lost
  when there is no larger size.
- An entry whose own result says that memory ran out is tried again with the next larger size. If
  there is none, that result is final.
- If a job ends with an error that a retry cannot fix, its entries without a result are lost.

A lost entry is recorded as failed. A rung is one choice of sizes: a memory size and a GPU.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from thinsection.jobs.backend import Attempt, Ended, OnMessage
from thinsection.jobs.executor import ExecutorConfig, Resource, Rung
from thinsection.jobs.task import AnyReport, Report
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
