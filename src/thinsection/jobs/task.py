"""A task: what is done with entries, as a value that travels to any worker.

A task, its entries, its results and its events are dataclasses that `config.as_mapping` and
`config.from_mapping` turn into JSON values and back. All that a result is made of lies in files
that every worker sees, guarded by locks and ledgers, so that any number of processes may work.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

if TYPE_CHECKING:
    from thinsection.jobs.executor import ExecutorConfig
    from thinsection.jobs.request import JobRequest

Entry = TypeVar("Entry")
Result = TypeVar("Result")
Want = Literal["memory", "gpu"]  # what a worker or an entry may die for want of


@dataclass(frozen=True, kw_only=True)
class Report(Generic[Result]):
    """What a task says of its entries; plain values.

    Attributes:
        results: one per entry, in its order.
        stage_seconds: busy and waiting seconds by stage, as `StageClock.seconds()`.
        worker: 'host:pid' of the process that did it.
        seconds: wall-clock time of the task.
        facts: which models did it.
    """

    results: tuple[Result, ...]
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    worker: str = ""
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


def merged(reports: Sequence[Report[Result]]) -> Report[Result]:
    """One report of all entries of several."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds.update(report.stage_seconds)
    return Report(
        results=tuple(result for report in reports for result in report.results),
        stage_seconds=dict(seconds),
        worker=reports[-1].worker if reports else "",
        seconds=sum(report.seconds for report in reports),
        facts={k: v for report in reports for k, v in report.facts.items()},
    )


class Task(ABC, Generic[Entry, Result]):
    """Work on independent entries; subclassed by frozen dataclasses.

    Attributes:
        kind: its name, by which a Slurm array finds the class again.
        entry_type, result_type: of its entries and results.
        event_type: of what it says on the way; None where it says nothing.
        streams: a chunk goes through one process without a pause between its entries, so that a
            single process gets them all at once; other tasks are called entry by entry.
    """

    kind: ClassVar[str]
    entry_type: ClassVar[type[Any]]
    result_type: ClassVar[type[Any]]
    event_type: ClassVar[type[Any] | None] = None
    streams: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self, entries: Sequence[Entry], *, on_event: Callable[[Any], None]
    ) -> Report[Result]:
        """Works on the entries. A bad entry is a failed result; an exception is the worker's.

        Args:
            entries: of one chunk.
            on_event: told of progress, from any thread.

        Raises:
            ThinsectionError: settings, weights or disk: it would be the same for every chunk.
        """

    @abstractmethod
    def lost(self, entry: Entry, reason: str) -> Result:
        """Records an entry that no worker survives; one that is done all the same stays done."""

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """The same work in a worker that has so many CPUs.

        Args:
            threads: 0 leaves the library's own choice.
            monitored: whether the worker records what it uses, because no process above it does.
        """
        return self

    def smaller(self) -> Self:
        """The same work in less memory, for an entry whose worker died. Same results."""
        return self

    def finished(self, entry: Entry) -> Result | None:
        """The result of an entry that is done already, as far as files alone can tell."""
        return None

    def name(self, entry: Entry) -> str:
        """Names an entry; the same for the same work."""
        return repr(entry)

    def starved(self, result: Result) -> Want | None:
        """What an entry failed for want of, as its `error` tells; None for any other end."""
        error = str(getattr(result, "error", ""))
        if "OutOfMemoryError" in error or "CUDA out of memory" in error:
            return "gpu"
        return "memory" if error.startswith("MemoryError") else None

    def ended(self, result: Result) -> Any:
        """The event that tells of a result whose worker could send none; None for no event."""
        return None

    def request(
        self, chunks: Sequence[Sequence[Entry]], config: "ExecutorConfig"
    ) -> "JobRequest | None":
        """Resources of a batch job for one of these chunks; None takes flags, else defaults."""
        return None
