"""A backend: where jobs run, and how each of them ended.

Another package adds an executor by a subclass of `Backend` and an entry point of the group
`thinsection.executors` that names it; `--executor NAME` then works for every command. The suite
`thinsection.testing.executor_contract.WorkerContract` says whether it does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from thinsection.errors import ClusterError, ThinsectionError, rewording
from thinsection.jobs.chunks import make_chunks
from thinsection.jobs.executor import EXECUTORS, ExecutorConfig, Rung, Want
from thinsection.jobs.task import AnyReport, AnyTask, OnEvent
from thinsection.usage.analysis import Request

How = Literal["reported", "died", "failed", "over"]
OnMessage = Callable[[str], None]

# by the class name of an error that a task raised
_WANT_OF_ERROR: dict[str, Want] = {"MemoryError": "memory", "OutOfMemoryError": "gpu"}


def ignore_event(event: object) -> None:
    """Takes an event that nobody listens to."""


def ignore_message(text: str) -> None:
    """Takes a message that nobody listens to."""


@dataclass(frozen=True, kw_only=True)
class Try:
    """Entries that are tried in the same way."""

    entries: tuple[object, ...]
    task: AnyTask
    number: int = 1
    # memory and card
    rung: Rung = Rung()
    # resources of the batch job that died of these entries
    before: Request | None = None

    @property
    def alone(self) -> bool:
        """True where each entry is a job of its own, because the job that had it died."""
        return self.number > 1

    def retry(
        self, entries: Sequence[object], rung: Rung, before: Request | None
    ) -> "Try":
        """The next try of some entries: each alone, in less memory than the first."""
        return Try(
            entries=tuple(entries),
            task=self.task if self.alone else self.task.smaller(),
            number=self.number + 1,
            rung=rung,
            before=before,
        )


@dataclass(frozen=True)
class Site:
    """Place and listeners of a backend, for one `Try`.

    Attributes:
        config: settings with all rungs.
        attempt: the entries and how they are tried.
        folder: folder of the invocation's records; every worker sees it.
        on_event: called with what tasks emit, from any thread.
        on_message: called with lines for the person who waits.
        cluster: cluster of the backend's own kind, handed in from Python.
    """

    config: ExecutorConfig
    attempt: Try
    folder: Path
    on_event: OnEvent = ignore_event
    on_message: OnMessage = ignore_message
    cluster: Any = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A chunk on its way, its task fitted to the worker."""

    entries: tuple[object, ...]
    task: AnyTask
    # errors of the cluster so far
    failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of a job.

    Attributes:
        job: the job.
        how: 'reported': with a report of all entries. 'died': its process was ended from outside.
            'failed': by an error of the worker or the cluster, another time may help. 'over': it
            would end like this every time.
        report: report of its first entries, as far as there is one.
        reason: an end without a whole report, in words for a person.
        error: one of this package's errors (settings, weights) ends the whole execution.
        want: resource whose lack ended it, as far as that is known or likely.
        granted: resources of a batch job.
    """

    job: Job
    how: How
    report: AnyReport | None = None
    reason: str = ""
    error: BaseException | None = None
    want: Want | None = None
    granted: Request | None = None

    def raise_if_fatal(self) -> None:
        """Raises an error of settings, weights or disk, which would be the same for every job."""
        if isinstance(self.error, ClusterError):
            return
        if isinstance(self.error, ThinsectionError):
            raise self.error

    @classmethod
    def by_error(
        cls,
        job: Job,
        name: str,
        message: str,
        *,
        error: BaseException | None,
        report: AnyReport | None = None,
    ) -> "Ended":
        """End by an error of this class name that the task raised: want of memory is a death."""
        want = _WANT_OF_ERROR.get(name)
        return cls(
            job=job,
            how="failed" if want is None else "died",
            report=report,
            reason=f"{name}: {message}",
            error=error,
            want=want,
        )


class Backend(ABC):
    """Takes jobs of one `Try` and is polled for those that ended; open as a context manager.

    The driver (`execute`) decides what is sent, what is tried again and what is lost. A backend
    says of every job that it took exactly once how it ended; it never tries one again by itself,
    and a death ends no other job than the one that the worker had. Leaving the context ends what
    it started, also after an exception (but not what a batch system has queued).
    """

    # `site.on_event` gets what tasks emit, in the order of each task; otherwise the driver sends
    # the end of each entry and nothing else
    carries_events: ClassVar[bool] = True
    # entries known to be done are not sent
    asks_finished: ClassVar[bool] = True
    # resources of which the next rung of the settings gives more
    climbs: tuple[Want, ...] = ("memory",)
    # jobs at once, known once it is open; decides the size of chunks
    workers: int = 1
    # CPUs of a worker; None leaves tasks as they are
    threads: int | None = None
    # workers record what they use, because they are no children of this process
    monitored: bool = True

    def __init__(self, site: Site) -> None:
        """Keeps what it is opened with; starts nothing yet."""
        self.site = site
        # with one memory size and one card
        self.config = site.config.at_rung(site.attempt.rung)
        # ends all that it has started
        self.stack = ExitStack()
        # jobs that have not ended, by what the backend knows them by
        self.sent: dict[Any, Job] = {}

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
        """Starts or connects to what it needs, its end on `self.stack`.

        Raises:
            ClusterError: it is not there.
        """

    def fit(self, task: AnyTask) -> AnyTask:
        """The task as its workers take it."""
        if self.threads is None:
            return task
        return task.on_worker(threads=self.threads, monitored=self.monitored)

    def chunks(self, entries: Sequence[object]) -> Sequence[Sequence[object]]:
        """The entries of each job of a first try."""
        return make_chunks(entries, self.config, workers=self.workers)

    def room(self) -> int:
        """Number of jobs that it would take now."""
        return self.workers - len(self.sent)

    @abstractmethod
    def send(self, jobs: Sequence[Job]) -> None:
        """Takes jobs, at most `room` many."""

    @abstractmethod
    def poll(self, *, waiting: int) -> Sequence[Ended]:
        """The jobs that ended, each once; waits for one, some seconds at most.

        Args:
            waiting: jobs that have yet to be sent; a backend that can lets idle workers go.

        Raises:
            ClusterError: all of the cluster was lost.
        """


def load_backend(name: str) -> type[Backend]:
    """The backend of a name in `EXECUTORS`."""
    backend: type[Backend] = EXECUTORS.load(name)
    return backend


def connecting(address: object) -> AbstractContextManager[None]:
    """Says of any failure to connect that nothing runs at the address."""
    rule = "scheduler must be the address of a running one"
    return rewording(
        rule, address, OSError, RuntimeError, ValueError, error=ClusterError
    )
