"""Where jobs run: the contract of an executor.

Another package adds one by a subclass of `Backend` and an entry point of the group
`thinsection.executors` that names it; `--executor NAME` then works for every command. The suite
`thinsection.testing.executor_contract.WorkerContract` says whether it does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from thinsection.jobs.executor import ExecutorConfig, Rung, make_chunks
from thinsection.jobs.task import Report, Task, Want
from thinsection.usage.analysis import Request


@dataclass(frozen=True, kw_only=True)
class Try:
    """Entries that are tried in the same way.

    Attributes:
        entries: all of them.
        task: what is done with them.
        number: 1 for the first try.
        alone: each entry is a job of its own, because the job that had it died.
        rung: memory and card.
        before: what a batch job was granted that died of them; None elsewhere.
    """

    entries: tuple[Any, ...]
    task: Task[Any, Any]
    number: int = 1
    alone: bool = False
    rung: Rung = Rung()
    before: Request | None = None


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a backend is opened with, for one `Try`.

    Attributes:
        config: of the executor; `config.at(attempt.rung)` has one memory and one card.
        attempt: what is tried.
        folder: of the invocation's records; every worker sees it.
        on_event: takes the events that tasks emit, from any thread.
        on_message: takes lines for the person who waits.
        cluster: an object of the backend's own kind that was handed in from Python, or None.
    """

    config: ExecutorConfig
    attempt: Try
    folder: Path
    on_event: Callable[[Any], None]
    on_message: Callable[[str], None]
    cluster: Any = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A chunk on its way.

    Attributes:
        entries: of the chunk.
        task: fitted to the worker.
        failures: how often the cluster failed it.
    """

    entries: tuple[Any, ...]
    task: Task[Any, Any]
    failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended.

    Attributes:
        job: which.
        how: 'reported', with a report of all entries; 'died': its process was ended from outside;
            'failed': an error of the worker or the cluster, another time may help; 'over': it
            would end like this every time.
        report: of its first entries, as far as there is one.
        reason: of an end without a whole report, for a person.
        error: that ended it; one of ours (settings, weights) ends the whole execution.
        want: what it died for want of, as far as that is known or likely.
        granted: resources of a batch job.
    """

    job: Job
    how: Literal["reported", "died", "failed", "over"]
    report: Report[Any] | None = None
    reason: str = ""
    error: BaseException | None = None
    want: Want | None = None
    granted: Request | None = None


class Backend(ABC):
    """Takes jobs of one `Try` and is polled for those that ended; open as a context manager.

    The driver (`execute`) decides what is sent, what is tried again and what is lost. A backend
    says of every job that it took exactly once how it ended; it never tries one again by itself,
    and a death ends no other job than the one that the worker had. Leaving the context ends what
    it started, also after an exception (but not what a batch system has queued).

    Attributes:
        help, needs, extra: of its entry in `EXECUTORS`, where another package adds it.
        carries_events: `site.on_event` is told what tasks emit, in the order of each task;
            otherwise only the end of each entry is told, by the driver.
        asks_finished: entries that `Task.finished` knows to be done are not sent.
        climbs: what a next try, with the next rung of the settings, gives more of.
        workers: jobs that it can work on at once, once it is open; decides the size of chunks.
        site, config, stack: what it was opened with; its settings with one memory and one card;
            what ends all that it has started.
    """

    help: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str | None] = None
    carries_events: ClassVar[bool] = True
    asks_finished: ClassVar[bool] = True
    climbs: tuple[Want, ...] = ("memory",)
    workers: int = 1

    def __init__(self, site: Site) -> None:
        """Keeps what it is opened with; starts nothing yet."""
        self.site = site
        self.config = site.config.at(site.attempt.rung)
        self.stack = ExitStack()

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
        """Starts or connects to what it needs, and puts what ends it on `self.stack`.

        Raises:
            ClusterError: it cannot be had.
        """

    def fit(self, task: Task[Any, Any]) -> Task[Any, Any]:
        """The task as its workers take it (`Task.on_worker`)."""
        return task

    def chunks(self, entries: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The entries of each job of a first try."""
        return make_chunks(entries, self.config, workers=self.workers)

    @abstractmethod
    def room(self) -> int:
        """How many jobs it would take now."""

    @abstractmethod
    def send(self, jobs: Sequence[Job]) -> None:
        """Takes jobs, at most `room` many."""

    @abstractmethod
    def poll(self, *, waiting: int) -> Sequence[Ended]:
        """The jobs that ended, each told once; waits a while for one, some seconds at most.

        Args:
            waiting: jobs that have yet to be sent; who can, lets idle workers go.

        Raises:
            ClusterError: all of the cluster was lost.
        """


def ended_by(job: Job, name: str, message: str, *, error: BaseException | None = None) -> Ended:
    """The end of a job whose task raised an error: want of memory is a death.

    Args:
        job: which.
        name: of the error's class.
        message: of the error.
        error: itself, where it is known.
    """
    wants: dict[str, Want] = {"MemoryError": "memory", "OutOfMemoryError": "gpu"}
    return Ended(
        job=job,
        how="died" if name in wants else "failed",
        reason=f"{name}: {message}",
        error=error,
        want=wants.get(name),
    )
