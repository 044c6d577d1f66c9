"""What a task and a backend are: what is done with entries, and where.

A task is a value that travels to any worker. It, its entries, results and events are dataclasses
that `config` turns into JSON values and back. All that a result is made of lies in files that every
worker sees, guarded by locks and ledgers, so that any number of processes may work.

Another package adds an executor by a subclass of `Backend` and an entry point of the group
`thinsection.executors` that names it; `--executor NAME` then works for every command. The suite
`thinsection.testing.executor_contract.WorkerContract` says whether it does.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from thinsection.errors import ClusterError, rewording
from thinsection.jobs.executor import Entry, ExecutorConfig, Rung, Want, make_chunks
from thinsection.jobs.request import JobRequest
from thinsection.usage.analysis import Request

Result = TypeVar("Result")
OnEvent = Callable[[Any], None]
_WANTS: dict[str, Want] = {"MemoryError": "memory", "OutOfMemoryError": "gpu"}


@dataclass(frozen=True, kw_only=True)
class Report(Generic[Result]):
    """What a task says of its entries; plain values."""

    results: tuple[Result, ...]  # one per entry, in its order
    stage_seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # as `StageClock.seconds()`
    facts: Mapping[str, Any] = field(default_factory=dict)  # which models did it


def merged(reports: Sequence[Report[Result]]) -> Report[Result]:
    """One report of all entries of several."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds.update(report.stage_seconds)
    results = tuple(result for report in reports for result in report.results)
    facts = {k: v for report in reports for k, v in report.facts.items()}
    return Report(results=results, stage_seconds=dict(seconds), facts=facts)


@dataclass(frozen=True, kw_only=True)
class Task(ABC, Generic[Entry, Result]):
    """Work on independent entries; subclassed by frozen dataclasses."""

    kind: ClassVar[str]  # its name, by which a Slurm array finds the class again
    entry_type: ClassVar[type[Any]]
    result_type: ClassVar[type[Any]]
    event_type: ClassVar[type[Any] | None] = (
        None  # of what it says on the way, if anything
    )
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
        """Works on the entries. A bad entry is a failed result; an exception is the worker's.

        `on_event` is told of progress, from any thread. Raises ThinsectionError: settings, weights
        or disk: it would be the same for every chunk.
        """

    @abstractmethod
    def lost(self, entry: Entry, reason: str) -> Result:
        """Records an entry that no worker survives; one that is done all the same stays done."""

    def parts(self, entries: Sequence[Entry]) -> Sequence[Sequence[Entry]]:
        """The entries of each call in one process: all of them, or one after the other."""
        return [entries] if self.streams else [(entry,) for entry in entries]

    def on_worker(self, *, threads: int, monitored: bool) -> Self:
        """The same work in a worker that has so many CPUs.

        `monitored`: the worker records what it uses, because no process above it does.
        """
        return replace(self, threads=threads)

    def smaller(self) -> Self:
        """The same work in less memory, for an entry whose worker died. Same results."""
        return self

    def finished(self, entry: Entry) -> Result | None:
        """The result of an entry that is done already, as far as files alone can tell."""
        return None

    def name(self, entry: Entry) -> str:
        """Names an entry; the same for the same work."""
        return str(getattr(entry, "name", None) or repr(entry))

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
        self, chunks: Sequence[Sequence[Any]], config: ExecutorConfig
    ) -> JobRequest | None:
        """Resources of a batch job for one of these chunks; None takes flags, else defaults."""
        return None


@dataclass(frozen=True, kw_only=True)
class Try:
    """Entries that are tried in the same way."""

    entries: tuple[Any, ...]
    task: Task[Any, Any]
    number: int = 1
    rung: Rung = Rung()  # memory and card
    before: Request | None = None  # what a batch job was granted that died of them

    @property
    def alone(self) -> bool:
        """Whether each entry is a job of its own, because the job that had it died."""
        return self.number > 1

    def again(
        self, entries: Sequence[Any], rung: Rung, before: Request | None
    ) -> "Try":
        """The next try of some entries: each alone, in less memory than the first."""
        task, number = self.task if self.alone else self.task.smaller(), self.number + 1
        return Try(
            entries=tuple(entries), task=task, number=number, rung=rung, before=before
        )


@dataclass(frozen=True)
class Site:
    """What a backend is opened with, for one `Try`."""

    config: ExecutorConfig  # `config.at(attempt.rung)` has one memory and one card
    attempt: Try
    folder: Path  # of the invocation's records; every worker sees it
    on_event: OnEvent = lambda event: None  # takes what tasks emit, from any thread
    on_message: Callable[[str], None] = lambda text: (
        None
    )  # takes lines for the person who waits
    cluster: Any = None  # of the backend's own kind, handed in from Python


@dataclass(frozen=True, kw_only=True)
class Job:
    """A chunk on its way, its task fitted to the worker; `failures`: of the cluster with it."""

    entries: tuple[Any, ...]
    task: Task[Any, Any]
    failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended.

    'reported': with a report of all entries. 'died': its process was ended from outside. 'failed':
    by an error of the worker or the cluster, another time may help. 'over': it would end like this
    every time.
    """

    job: Job
    how: Literal["reported", "died", "failed", "over"]
    report: Report[Any] | None = None  # of its first entries, as far as there is one
    reason: str = ""  # of an end without a whole report, for a person
    error: BaseException | None = (
        None  # one of ours (settings, weights) ends the whole execution
    )
    want: Want | None = (
        None  # what it died for want of, as far as that is known or likely
    )
    granted: Request | None = None  # resources of a batch job

    @classmethod
    def by_error(cls, job: Job, name: str, message: str, **known: Any) -> "Ended":
        """By an error of this class name that the task raised: want of memory is a death."""
        want = _WANTS.get(name)
        how: Literal["died", "failed"] = "died" if want else "failed"
        return cls(job=job, how=how, reason=f"{name}: {message}", want=want, **known)


class Backend(ABC):
    """Takes jobs of one `Try` and is polled for those that ended; open as a context manager.

    The driver (`execute`) decides what is sent, what is tried again and what is lost. A backend
    says of every job that it took exactly once how it ended; it never tries one again by itself,
    and a death ends no other job than the one that the worker had. Leaving the context ends what
    it started, also after an exception (but not what a batch system has queued).
    """

    # `site.on_event` is told what tasks emit, in the order of each task; otherwise only the end of
    # each entry is told, by the driver
    carries_events: ClassVar[bool] = True
    asks_finished: ClassVar[bool] = True  # entries known to be done are not sent
    climbs: tuple[Want, ...] = (
        "memory",
    )  # what the next rung of the settings gives more of
    workers: int = 1  # jobs at once, known once it is open; decides the size of chunks
    threads: int | None = None  # CPUs of a worker; None leaves tasks as they are
    monitored: bool = (
        True  # workers record what they use: they are no children of this process
    )

    def __init__(self, site: Site) -> None:
        """Keeps what it is opened with; starts nothing yet."""
        self.site = site
        self.config = site.config.at(site.attempt.rung)  # with one memory and one card
        self.stack = ExitStack()  # ends all that it has started
        self.sent: dict[
            Any, Job
        ] = {}  # what has not ended, by what the backend knows it by

    def __enter__(self) -> Self:
        """Opens it; what was started before an error is ended."""
        with ExitStack() as stack:
            stack.push(self.stack)
            self.open()
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends what was started."""
        self.stack.close()

    @abstractmethod
    def open(self) -> None:
        """Starts or connects to what it needs, its end on `self.stack`; ClusterError: not there."""

    def fit(self, task: Task[Any, Any]) -> Task[Any, Any]:
        """The task as its workers take it."""
        if self.threads is None:
            return task
        return task.on_worker(threads=self.threads, monitored=self.monitored)

    def chunks(self, entries: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """The entries of each job of a first try."""
        return make_chunks(entries, self.config, workers=self.workers)

    def room(self) -> int:
        """How many jobs it would take now."""
        return self.workers - len(self.sent)

    @abstractmethod
    def send(self, jobs: Sequence[Job]) -> None:
        """Takes jobs, at most `room` many."""

    @abstractmethod
    def poll(self, *, waiting: int) -> Sequence[Ended]:
        """The jobs that ended, each told once; waits a while for one, some seconds at most.

        `waiting` jobs have yet to be sent; who can, lets idle workers go. Raises ClusterError: all
        of the cluster was lost.
        """


def connecting(address: Any) -> AbstractContextManager[None]:
    """Says of any failure to connect that nothing runs at the address."""
    rule = "scheduler must be the address of a running one"
    return rewording(
        rule, address, OSError, RuntimeError, ValueError, error=ClusterError
    )


class InlineBackend(Backend):
    """This process: works when it is polled; an error of a task is the caller's."""

    asks_finished: ClassVar[bool] = (
        False  # tasks find out by themselves, better than by files
    )
    climbs: tuple[Want, ...] = ()

    def open(self) -> None:
        """See `Backend.open`: it is open."""

    def chunks(self, entries: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """See `Backend.chunks`: one stream without a pause, or entry by entry."""
        return self.site.attempt.task.parts(entries)

    def send(self, jobs: Sequence[Job]) -> None:
        self.sent = dict(enumerate(jobs))

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        jobs, self.sent = self.sent.values(), {}
        reports = [
            (job, job.task(job.entries, on_event=self.site.on_event)) for job in jobs
        ]
        return [
            Ended(job=job, how="reported", report=report) for job, report in reports
        ]
