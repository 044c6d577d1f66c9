"""Backend: an executor that runs jobs and reports how each of them ended.

Another package adds an executor by a subclass of `Backend` and an entry point of the group
`thinsection.executors` for that class. `--executor NAME` then works for every command. The test
suite `thinsection.testing.executor_contract.WorkerContract` checks such a class.
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

# resource that ran out, by the class name of the task's error
_WANT_OF_ERROR: dict[str, Want] = {"MemoryError": "memory", "OutOfMemoryError": "gpu"}


def ignore_event(event: object) -> None:
    """Ignores an event."""


def ignore_message(text: str) -> None:
    """Ignores a message."""


@dataclass(frozen=True, kw_only=True)
class Try:
    """Entries that are tried in the same way."""

    entries: tuple[object, ...]
    task: AnyTask
    number: int = 1
    # memory size and GPU
    rung: Rung = Rung()
    # resources of the batch job that died while it worked on these entries
    before: Request | None = None

    @property
    def alone(self) -> bool:
        """True if each entry is a separate job, because an earlier job with it died."""
        return self.number > 1

    def retry(
        self, entries: Sequence[object], rung: Rung, before: Request | None
    ) -> "Try":
        """Next try of some entries, each alone and with less memory used than in the first try."""
        return Try(
            entries=tuple(entries),
            task=self.task if self.alone else self.task.smaller(),
            number=self.number + 1,
            rung=rung,
            before=before,
        )


@dataclass(frozen=True)
class Site:
    """Settings and listeners that a backend gets for one `Try`.

    Attributes:
        config: settings with all memory sizes and GPUs.
        attempt: the entries and how they are tried.
        folder: folder of the invocation's records; every worker sees it.
        on_event: called with events of tasks, from any thread.
        on_message: called with lines of text for the user.
        cluster: existing cluster of the backend's own type, from Python.
    """

    config: ExecutorConfig
    attempt: Try
    folder: Path
    on_event: OnEvent = ignore_event
    on_message: OnMessage = ignore_message
    cluster: Any = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """Chunk of entries in a backend, with its task adapted to the worker."""

    entries: tuple[object, ...]
    task: AnyTask
    # errors of the cluster so far
    failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of a job.

    Attributes:
        job: the job.
        how: 'reported': all entries have a result. 'died': the process was killed from outside.
            'failed': an error of the worker or the cluster, which a retry may fix. 'over': an
            end that a retry would repeat.
        report: report of the first entries, if there is one.
        reason: why the report is incomplete, as text for the user.
        error: error of this package (settings, weights), which ends the whole execution.
        want: resource that ran out, if that is known or likely.
        granted: resources of the batch job.
    """

    job: Job
    how: How
    report: AnyReport | None = None
    reason: str = ""
    error: BaseException | None = None
    want: Want | None = None
    granted: Request | None = None

    def raise_if_fatal(self) -> None:
        """Raises an error of settings, weights or disk, which every job would meet."""
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
        """End for a task's error of this class name; running out of memory counts as a death."""
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
    """Runs the jobs of one `Try` and is polled for ended ones; open it as a context manager.

    The driver (`execute`) decides which jobs are sent, retried or lost. A backend reports the end
    of every accepted job exactly once. It never retries a job by itself, and the death of a worker
    ends only that worker's job. When the context is left, also after an exception, the backend
    ends all that it started, except jobs that a batch system has queued.
    """

    # `site.on_event` receives the events of tasks, in the order of each task. Otherwise the driver
    # sends only an event for the end of each entry.
    carries_events: ClassVar[bool] = True
    # entries that are already done are not sent
    asks_finished: ClassVar[bool] = True
    # resources of which a retry can get more, if the settings list a larger size
    climbs: tuple[Want, ...] = ("memory",)
    # jobs at the same time, known once the backend is open; decides the size of chunks
    workers: int = 1
    # CPUs of a worker; None does not change tasks
    threads: int | None = None
    # workers record their resource use, because they are not children of this process
    monitored: bool = True

    def __init__(self, site: Site) -> None:
        """Stores its arguments; nothing is started yet."""
        self.site = site
        # settings with one memory size and one GPU
        self.config = site.config.at_rung(site.attempt.rung)
        # on exit, ends all that the backend has started
        self.stack = ExitStack()
        # jobs that have not ended, by the backend's own key
        self.sent: dict[Any, Job] = {}

    def __enter__(self) -> Self:
        """Opens the backend; after an error, ends all that was started."""
        with ExitStack() as stack:
            stack.push(self.stack)
            self.open()
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends all that was started."""
        self.stack.close()

    @abstractmethod
    def open(self) -> None:
        """Starts or connects to the workers; puts the clean-up on `self.stack`.

        Raises:
            ClusterError: the cluster cannot be reached.
        """

    def fit(self, task: AnyTask) -> AnyTask:
        """Task, adapted to its workers."""
        if self.threads is None:
            return task
        return task.on_worker(threads=self.threads, monitored=self.monitored)

    def chunks(self, entries: Sequence[object]) -> Sequence[Sequence[object]]:
        """Entries of each job in a first try."""
        return make_chunks(entries, self.config, workers=self.workers)

    def room(self) -> int:
        """Number of jobs that the backend would accept now."""
        return self.workers - len(self.sent)

    @abstractmethod
    def send(self, jobs: Sequence[Job]) -> None:
        """Accepts jobs, at most as many as `room` returns."""

    @abstractmethod
    def poll(self, *, waiting: int) -> Sequence[Ended]:
        """Jobs that ended, each once; waits some seconds at most for one.

        Args:
            waiting: number of jobs not yet sent; some backends can then release idle workers.

        Raises:
            ClusterError: the whole cluster was lost.
        """


def load_backend(name: str) -> type[Backend]:
    """Backend for a name in `EXECUTORS`."""
    backend: type[Backend] = EXECUTORS.load(name)
    return backend


def connecting(address: object) -> AbstractContextManager[None]:
    """Turns any failure to connect into an error that says that nothing runs at the address."""
    rule = "scheduler must be the address of a running one"
    return rewording(
        rule, address, OSError, RuntimeError, ValueError, error=ClusterError
    )
