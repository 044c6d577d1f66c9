"""Collects all arrays of an output folder: their status, and their reports merged into one."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from thinsection.errors import StoreError
from thinsection.jobs.backend import (
    Attempt,
    BackendContext,
    Ended,
    OnMessage,
    ignore_message,
)
from thinsection.jobs.retry import RetryPolicy, close_job, merge_attempts
from thinsection.jobs.slurm import GROWABLE_RESOURCES, submit_alone
from thinsection.jobs.slurm_array import Array, array_folders, load_array
from thinsection.jobs.task import AnyTask
from thinsection.registry import Registry
from thinsection.types import Document


def array_status(array: Array) -> tuple[Counter[str], Counter[str]]:
    """(Array tasks by state: DONE, LOST, or Slurm's state; entries by status, or 'missing')."""
    task = array.attempt.task
    entries: Counter[str] = Counter()
    for index, chunk in enumerate(array.chunks, start=1):
        reported: list[object] = []
        for report in array.reports(index):
            reported += report.results
        for entry, reported_result in zip_longest(chunk, reported):
            # a later array may have finished the entry
            result = task.finished(entry) or reported_result
            status = getattr(result, "status", "done") if result else "missing"
            entries[status] += 1
    return Counter(array.states().values()), entries


@dataclass(kw_only=True)
class Collected:
    """All arrays of one kind in an output folder, merged; the newest result of an entry is used.

    Attributes:
        task: task of the newest array.
        entries: entries of all arrays, each once, by name.
        results: results of finished entries, by name.
        waiting: array tasks that are queued or running.
        stage_seconds: seconds by stage, summed over array tasks.
        facts: facts about the models that were used.
    """

    task: AnyTask
    entries: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    waiting: int = 0
    stage_seconds: Counter[str] = field(default_factory=Counter)
    facts: Document = field(default_factory=dict)

    def add(
        self, array: Array, context: BackendContext, *, retry: bool
    ) -> list[Attempt]:
        """Adds the results of an older array, for entries that no newer array has.

        Returns:
            The next attempts; none if `retry` is False.
        """
        name = self.task.name
        newer = set(self.entries)

        def is_in_newer_array(entry: object) -> bool:
            return name(entry) in newer

        for entry in context.attempt.entries:
            self.entries.setdefault(name(entry), entry)
        for state in array.states().values():
            self.waiting += state not in ("DONE", "LOST", "WRITTEN")

        policy = RetryPolicy(
            context.attempt, context.config, GROWABLE_RESOURCES if retry else ()
        )
        attempts: list[Attempt] = []
        for ended in array.ended().values():
            outcome = close_job(
                ended if retry else _without_retry(ended),
                policy,
                on_message=context.on_message,
                is_superseded=is_in_newer_array,
            )
            for entry, result in zip(
                outcome.entries, outcome.report.results, strict=True
            ):
                if not is_in_newer_array(entry):
                    self.results[name(entry)] = result
            self.stage_seconds.update(outcome.report.stage_seconds)
            self.facts = {**outcome.report.facts, **self.facts}
            attempts += outcome.next_attempts
        return merge_attempts(attempts)


def _without_retry(ended: Ended) -> Ended:
    """Same end, but without a retry."""
    return replace(ended, kind="over") if ended.kind == "died" else ended


def collect(
    out: Path,
    kinds: Registry[type[AnyTask]],
    *,
    retry: bool = True,
    on_message: OnMessage = ignore_message,
) -> list[Collected]:
    """Merges the reports of all arrays below a folder, for each kind of task.

    An array task that ended without a report is recorded entry by entry. The exception are tasks
    that died for the first time or can get more memory: their entries are submitted once more,
    each alone (see `retry.py`).

    Args:
        out: an output folder.
        kinds: the kinds of task.
        retry: False submits nothing, and records dead tasks as lost.
        on_message: called with lines of text for the user.

    Raises:
        StoreError: the folder has no array.
    """
    folders = array_folders(out)
    if not folders:
        raise StoreError(
            f"out must contain an array of 'thinsection slurm submit', got none in {str(out)!r}"
        )
    collected_by_kind: dict[str, Collected] = {}
    contexts: list[BackendContext] = []
    for folder in reversed(folders):
        array = load_array(folder, kinds)
        task = array.attempt.task
        context = BackendContext(
            array.config, array.attempt, folder.parents[1], on_message=on_message
        )
        collected = collected_by_kind.setdefault(task.kind, Collected(task=task))
        for attempt in collected.add(array, context, retry=retry):
            contexts.append(replace(context, attempt=attempt))
    for context in contexts:
        submit_alone(context)
        num_entries = len(context.attempt.entries)
        collected_by_kind[context.attempt.task.kind].waiting += num_entries
    return list(collected_by_kind.values())
