"""Task: the work to do on entries, as a value that can be sent to any worker.

A task, its entries, results and events are dataclasses that `config` converts to JSON values and
back. All results are in files that every worker can reach, protected by locks and ledgers, so that
any number of processes may work.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from thinsection.errors import OUT_OF_MEMORY
from thinsection.jobs.executor import ExecutorConfig, Resource
from thinsection.types import PlainValues
from thinsection.usage.analysis import Request

Entry = TypeVar("Entry")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
# accepts events of any kind of task
OnEvent = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class Report(Generic[Result_co]):
    """Results of a task, with times and facts, as plain values."""

    # one per entry, in the same order
    results: tuple[Result_co, ...]
    # seconds by stage, see `StepTimer.seconds`
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    # facts about the models that were used
    facts: PlainValues = field(default_factory=dict)


def merge_reports(reports: Sequence[Report[Result]]) -> Report[Result]:
    """Merges several reports into one."""
    results: list[Result] = []
    seconds: Counter[str] = Counter()
    facts: dict[str, object] = {}
    for report in reports:
        results.extend(report.results)
        seconds.update(report.stage_seconds)
        facts.update(report.facts)
    return Report(results=tuple(results), stage_seconds=dict(seconds), facts=facts)


@dataclass(frozen=True, kw_only=True)
class Task(ABC, Generic[Entry, Result]):
    """Work on independent entries; subclasses are frozen dataclasses."""

    # name of the class in the files of a Slurm array
    kind: ClassVar[str]
    entry_type: ClassVar[type]
    result_type: ClassVar[type]
    # class of the events that the task sends while it works; None if it sends none
    event_type: ClassVar[type | None] = None
    # True runs a whole chunk in one process without a pause between its entries, so that a single
    # process gets all entries at once. Other tasks are called entry by entry.
    streams: ClassVar[bool] = False

    # CPU threads of torch; 0 keeps the library's own choice. The last bit of an embedding may
    # depend on it; the same number gives the same bytes everywhere.
    threads: int = 0

    @abstractmethod
    def __call__(
        self, entries: Sequence[Entry], *, on_event: OnEvent
    ) -> Report[Result]:
        """Works on the entries.

        A bad entry gives a failed result; an exception means that the worker failed.

        Args:
            entries: entries to work on.
            on_event: called with progress events, from any thread.

        Raises:
            ThinsectionError: settings, weights or disk; every chunk would fail in the same way.
        """

    @abstractmethod
    def lost(self, entry: Entry, reason: str) -> Result:
        """Records an entry whose workers all died as failed, unless files show that it is done."""

    def parts(self, entries: Sequence[Entry]) -> Sequence[Sequence[Entry]]:
        """Entries of each call in one process: all together, or one at a time."""
        return [entries] if self.streams else [(entry,) for entry in entries]

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """The same task, adapted to a worker.

        Args:
            threads: CPUs of the worker.
            monitored: True if the worker records its resource use, because no parent process does.
        """
        return replace(self, threads=threads)

    def smaller(self) -> Self:
        """A task with the same results that needs less memory, for an entry whose worker died."""
        return self

    def finished(self, entry: Entry) -> Result | None:
        """Result of an entry if its files show that it is already done; else None."""
        return None

    def work(self, entry: Entry) -> float:
        """Relative amount of work on an entry; entries with most work are sent first."""
        return 1.0

    def name(self, entry: Entry) -> str:
        """Name of an entry; the same work has the same name."""
        return str(getattr(entry, "name", None) or repr(entry))

    def lacking_resource(self, result: Result) -> Resource | None:
        """Resource that ran out according to an entry's `error`; None for any other end."""
        error = str(getattr(result, "error", ""))
        if "OutOfMemoryError" in error or "CUDA out of memory" in error:
            return "gpu"
        return "memory" if error.startswith(OUT_OF_MEMORY) else None

    def end_event(self, result: Result) -> object | None:
        """Event for a result whose worker could not send one; None for no event."""
        return None

    def request(
        self, chunks: Sequence[Sequence[Entry]], config: ExecutorConfig
    ) -> Request | None:
        """Resources of a batch job for one of these chunks; None for the settings or defaults."""
        return None


# a task and a report with types that only the task itself knows
AnyTask = Task[Any, Any]
AnyReport = Report[Any]
