"""A task: what is done with entries, as a value that travels to any worker.

A task, its entries, results and events are dataclasses that `config` turns into JSON values and
back. All that a result is made of lies in files that every worker sees, guarded by locks and
ledgers, so that any number of processes may work.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from thinsection.jobs.executor import ExecutorConfig, Want
from thinsection.jobs.request import JobRequest
from thinsection.types import PlainValues

Entry = TypeVar("Entry")
Result = TypeVar("Result")
# takes the events of any kind of task
OnEvent = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class Report(Generic[Result]):
    """Results of a task, with times and facts; plain values."""

    # one per entry, in its order
    results: tuple[Result, ...]
    # seconds by stage, see `StageClock.seconds`
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    # models that did the work
    facts: PlainValues = field(default_factory=dict)


def merge_reports(reports: Sequence[Report[Result]]) -> Report[Result]:
    """One report of the entries of several."""
    results: list[Result] = []
    seconds: Counter[str] = Counter()
    facts: dict[str, Any] = {}
    for report in reports:
        results.extend(report.results)
        seconds.update(report.stage_seconds)
        facts.update(report.facts)
    return Report(results=tuple(results), stage_seconds=dict(seconds), facts=facts)


@dataclass(frozen=True, kw_only=True)
class Task(ABC, Generic[Entry, Result]):
    """Work on independent entries; subclassed by frozen dataclasses."""

    # name by which a Slurm array finds the class again
    kind: ClassVar[str]
    entry_type: ClassVar[type]
    result_type: ClassVar[type]
    # class of the events that it sends while it works; None: it sends none
    event_type: ClassVar[type | None] = None
    # a chunk goes through one process without a pause between its entries, so that a single
    # process gets them all at once; other tasks are called entry by entry
    streams: ClassVar[bool] = False

    # CPU threads of torch; 0 leaves the library's own choice. The last bit of an embedding may
    # depend on it: the same number gives the same bytes everywhere
    threads: int = 0

    @abstractmethod
    def __call__(
        self, entries: Sequence[Entry], *, on_event: OnEvent
    ) -> Report[Result]:
        """Works on the entries.

        A bad entry is a failed result; an exception is the worker's.

        Args:
            entries: what to work on.
            on_event: called with events of progress, from any thread.

        Raises:
            ThinsectionError: settings, weights or disk: it would be the same for every chunk.
        """

    @abstractmethod
    def lost(self, entry: Entry, reason: str) -> Result:
        """Records an entry that no worker survives; one that is done all the same stays done."""

    def parts(self, entries: Sequence[Entry]) -> Sequence[Sequence[Entry]]:
        """The entries of each call in one process: all of them, or one after the other."""
        return [entries] if self.streams else [(entry,) for entry in entries]

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """The same work in a worker.

        Args:
            threads: CPUs of the worker.
            monitored: the worker records what it uses, because no process above it does.
        """
        return replace(self, threads=threads)

    def smaller(self) -> Self:
        """The same work and results in less memory, for an entry whose worker died."""
        return self

    def finished(self, entry: Entry) -> Result | None:
        """The result of an entry that is done already, as far as files alone can tell."""
        return None

    def name(self, entry: Entry) -> str:
        """Names an entry; the same for the same work."""
        return str(getattr(entry, "name", None) or repr(entry))

    def starved(self, result: Result) -> Want | None:
        """The resource whose lack an entry's `error` tells; None for any other end."""
        error = str(getattr(result, "error", ""))
        if "OutOfMemoryError" in error or "CUDA out of memory" in error:
            return "gpu"
        return "memory" if error.startswith("MemoryError") else None

    def ended(self, result: Result) -> object | None:
        """The event that tells of a result whose worker could send none; None for no event."""
        return None

    def request(
        self, chunks: Sequence[Sequence[Entry]], config: ExecutorConfig
    ) -> JobRequest | None:
        """Resources of a batch job for one of these chunks; None takes flags, else defaults."""
        return None


# a task and a report of a kind that only the task itself knows
AnyTask = Task[Any, Any]
AnyReport = Report[Any]
