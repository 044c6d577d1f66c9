"""Backend: an executor that runs jobs and reports how each of them ended.

A job uses three values: a `Task` (the work), an `Attempt` (the entries that are tried, and how the
try ended) and a `Report` (the results). Each scheduler has one file with a subclass of `Backend`.

Another package adds an executor by such a subclass and an entry point of the group
`thinsection.executors` for it. `--executor NAME` then works for every command. The test suite
`thinsection.testing.executor_contract.WorkerContract` checks such a class.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from thinsection.deprecations import warn_deprecated
from thinsection.errors import ClusterError, ConfigError, named_error_words, rewording
from thinsection.jobs.executor import EXECUTORS, ExecutorConfig, Resource, ResourceStep
from thinsection.jobs.task import AnyReport, AnyTask, OnEvent, Report
from thinsection.types import ignore_message
from thinsection.usage.analysis import Request

Item = TypeVar("Item")
End = Literal["reported", "died", "failed", "fatal"]
OnMessage = Callable[[str], None]

NO_REPORT: AnyReport = Report(results=())
# largest number of entries that one lost job can cost
MAX_CHUNK_ENTRIES = 16
# Slurm's default MaxArraySize is 1001, the first index that Slurm refuses
MAX_ARRAY = 1000
# jobs at the same time in a batch system, if --workers is not set
ARRAY_WORKERS = 8
# several chunks per worker, so that one slow chunk does not leave the others idle at the end
_CHUNKS_PER_WORKER = 4
# resource that ran out, by the class name of the task's error
_RESOURCE_BY_ERROR: dict[str, Resource] = {
    "MemoryError": "memory",
    "OutOfMemoryError": "gpu",
}


class Submitted(Exception):
    """Signals that `array` was submitted to Slurm, or only written, without a wait for results."""

    def __init__(self, array: Any) -> None:
        super().__init__(str(array.folder))
        # a `slurm_array.Array`; Any, because slurm_array imports this file
        self.array = array


def ignore_event(event: object) -> None:
    """Ignores an event."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Entries that are tried in the same way, and the end of this try once it has ended.

    The driver makes one attempt of all entries. The backend cuts it into jobs, one for each message
    to a worker. A job is also an `Attempt`, with fewer entries and a task that is adapted to the
    worker.

    Attributes:
        entries: the entries.
        task: the work.
        number: 1 for the first attempt.
        resource_step: which memory size and GPU of the settings' lists the attempt uses.
        previous_request: resources of the batch job that worked on these entries last and died.
        failures: errors of the cluster so far.
        end: None: not ended. 'reported': all entries have a result. 'died': the process was killed
            from outside, or ran out of memory. 'failed': an error of the worker or the cluster,
            which a retry may fix. 'fatal': an error that a retry would repeat.
        report: results of the first entries; of all if it ended well.
        reason: why the report is incomplete, as text for the user.
        error: error of this package (settings, weights), which ends the whole execution.
        lacking: resource that ran out, if that is known or likely.
    """

    entries: tuple[Any, ...]
    task: AnyTask
    number: int = 1
    resource_step: ResourceStep = ResourceStep()
    previous_request: Request | None = None
    failures: int = 0
    end: End | None = None
    report: AnyReport = NO_REPORT
    reason: str = ""
    error: BaseException | None = None
    lacking: Resource | None = None

    @property
    def alone(self) -> bool:
        """True if each entry is a separate job, because an earlier job with it died."""
        return self.number > 1

    def retry(
        self, entries: Sequence[object], resource_step: ResourceStep
    ) -> "Attempt":
        """Next attempt of some entries: each entry alone, with smaller batches than at first."""
        return Attempt(
            entries=tuple(entries),
            task=self.task if self.alone else self.task.smaller(),
            number=self.number + 1,
            resource_step=resource_step,
            previous_request=self.previous_request,
        )

    def ended(
        self,
        end: End,
        *,
        report: AnyReport = NO_REPORT,
        reason: str = "",
        error: BaseException | None = None,
        lacking: Resource | None = None,
        granted: Request | None = None,
    ) -> "Attempt":
        """This job with its end; `granted` are the resources that a batch job had."""
        return replace(
            self,
            end=end,
            report=report,
            reason=reason,
            error=error,
            lacking=lacking,
            previous_request=granted,
        )

    def ended_by_death(
        self,
        detail: str,
        *,
        report: AnyReport = NO_REPORT,
        lacking: Resource | None = "memory",
    ) -> "Attempt":
        """End by the death of the worker.

        `detail` is appended to 'its worker died', for example ' (signal 9)'.
        """
        reason = f"its worker died{detail}"
        return self.ended("died", report=report, reason=reason, lacking=lacking)

    def ended_by_error(
        self,
        name: str,
        message: str,
        *,
        error: BaseException | None,
        report: AnyReport = NO_REPORT,
    ) -> "Attempt":
        """End by a task's error of this class name; running out of memory counts as a death."""
        lacking = _RESOURCE_BY_ERROR.get(name)
        return self.ended(
            "failed" if lacking is None else "died",
            report=report,
            reason=named_error_words(name, message),
            error=error,
            lacking=lacking,
        )


def Ended(*, job: Attempt, kind: End | Literal["over"], **details: Any) -> Attempt:
    """Deprecated: `job.ended(kind, report=...)`, where 'over' is now 'fatal'."""
    warn_deprecated("thinsection.jobs.backend.Ended")
    return job.ended("fatal" if kind == "over" else kind, **details)


@dataclass(frozen=True)
class BackendContext:
    """Settings and listeners that a backend gets for one `Attempt`.

    Attributes:
        config: settings with all memory sizes and GPUs.
        attempt: the entries and how they are tried.
        folder: folder of the invocation's records; every worker sees it.
        on_event: called with events of tasks, from any thread.
        on_message: called with lines of text for the user.
        cluster: existing cluster of the backend's own type, from Python.
    """

    config: ExecutorConfig
    attempt: Attempt
    folder: Path
    on_event: OnEvent = ignore_event
    on_message: OnMessage = ignore_message
    cluster: object = None


class Backend(ABC):
    """Runs the jobs of one `Attempt` and is polled for ended ones; open it as a context manager.

    The driver (`execute`) decides which jobs are sent, retried or lost. A backend reports the end
    of every accepted job exactly once. It never retries a job by itself, and the death of a worker
    ends only that worker's job. When the context is left, also after an exception, the backend
    ends all that it started, except jobs that a batch system has queued.
    """

    # True if `context.on_event` receives the events of tasks, in the order of each task. Otherwise
    # the driver sends only an event for the end of each entry.
    carries_events: ClassVar[bool] = True
    # entries that are already done are not sent
    skips_finished_entries: ClassVar[bool] = True
    # resources of which a retry can get more, if the settings list a larger size
    growable_resources: tuple[Resource, ...] = ("memory",)
    # jobs at the same time, known once the backend is open; decides the size of chunks
    workers: int = 1
    # CPUs of a worker; None does not change tasks
    threads: int | None = None
    # workers record their resource use, because they are not children of this process
    monitored: bool = True

    def __init__(self, context: BackendContext) -> None:
        """Stores its arguments; nothing is started yet."""
        self.context = context
        # settings with one memory size and one GPU
        self.config = context.config.at_step(context.attempt.resource_step)
        # clean-up that ends all that the backend has started
        self.stack = ExitStack()
        # jobs that have not ended, by the backend's own key
        self.sent: dict[Any, Attempt] = {}

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

    def chunks(self, entries: Sequence[object]) -> Sequence[Sequence[object]]:
        """Entries of each job in a first attempt; those with most work are sent first."""
        work = [self.context.attempt.task.work(entry) for entry in entries]
        if self.workers > 1 and not self.config.chunk_slides and len(set(work)) > 1:
            return weighted_chunks(entries, work, self.workers)
        return make_chunks(entries, self.config, workers=self.workers)

    def jobs(self) -> list[Attempt]:
        """Jobs of the attempt, with its task adapted to the workers.

        In a later attempt each entry has its own job.
        """
        attempt = self.context.attempt
        task = attempt.task
        if self.threads is not None:
            task = task.on_worker(threads=self.threads, monitored=self.monitored)
        chunks: Sequence[Sequence[object]] = chunked(attempt.entries, 1)
        if not attempt.alone:
            chunks = self.chunks(attempt.entries)
        return [replace(attempt, entries=tuple(chunk), task=task) for chunk in chunks]

    def room(self) -> int:
        """Number of jobs that the backend would accept now."""
        return self.workers - len(self.sent)

    @abstractmethod
    def send(self, jobs: Sequence[Attempt]) -> None:
        """Accepts jobs, at most as many as `room` returns."""

    @abstractmethod
    def poll(self, *, waiting: int) -> Sequence[Attempt]:
        """Jobs that ended, each once and with its end; waits some seconds at most for one.

        Args:
            waiting: number of jobs not yet sent; if it is 0, some backends release idle workers.

        Raises:
            ClusterError: the whole cluster was lost.
        """


class InlineBackend(Backend):
    """Works in this process when it is polled; errors of a task reach the caller.

    The key of a job is its number.
    """

    # the task itself checks which entries are done, so the driver need not
    skips_finished_entries: ClassVar[bool] = False
    growable_resources: tuple[Resource, ...] = ()

    def open(self) -> None:
        """See `Backend.open`; there is nothing to open."""

    def chunks(self, entries: Sequence[object]) -> Sequence[Sequence[object]]:
        """See `Backend.chunks`: one continuous stream, or one chunk per entry."""
        return self.context.attempt.task.parts(entries)

    def send(self, jobs: Sequence[Attempt]) -> None:
        self.sent = dict(enumerate(jobs))

    def poll(self, *, waiting: int) -> Sequence[Attempt]:
        jobs = list(self.sent.values())
        self.sent = {}
        ended = []
        for job in jobs:
            report = job.task(job.entries, on_event=self.context.on_event)
            ended.append(job.ended("reported", report=report))
        return ended


def load_backend(name: str) -> type[Backend]:
    """Backend for a name in `EXECUTORS`."""
    backend = EXECUTORS.load(name)
    if not issubclass(backend, Backend):
        raise ConfigError(f"executor {name!r} must be a Backend, got {backend!r}")
    return backend


def connecting(address: object) -> AbstractContextManager[None]:
    """Turns any failure to connect into an error that says that nothing runs at the address."""
    rule = "scheduler must be the address of a running one"
    return rewording(
        rule, address, OSError, RuntimeError, ValueError, error=ClusterError
    )


def chunked(entries: Sequence[Item], size: int) -> list[tuple[Item, ...]]:
    """Cuts the entries into chunks of `size`; the last one may be shorter."""
    return [tuple(entries[i : i + size]) for i in range(0, len(entries), size)]


def chunk_size(num_entries: int, workers: int) -> int:
    """Entries per chunk: several chunks for each worker, at most `MAX_CHUNK_ENTRIES`."""
    even = math.ceil(num_entries / (workers * _CHUNKS_PER_WORKER))
    return max(1, min(MAX_CHUNK_ENTRIES, even))


def weighted_chunks(
    entries: Sequence[Item], work: Sequence[float], workers: int
) -> list[tuple[Item, ...]]:
    """Cuts the entries into chunks, those with most work first, and the last ones small.

    So no worker begins a large entry while the others have nothing left to do. A chunk has a
    share of the work that is left, and at most `MAX_CHUNK_ENTRIES` entries.

    Source: guided self-scheduling, Polychronopoulos and Kuck 1987.
    """
    order = sorted(range(len(entries)), key=lambda index: -work[index])
    chunks: list[tuple[Item, ...]] = []
    work_left = float(sum(work))
    chunk: list[Item] = []
    chunk_work = 0.0
    for index in order:
        chunk.append(entries[index])
        chunk_work += work[index]
        share = work_left / (workers * _CHUNKS_PER_WORKER)
        if chunk_work >= share or len(chunk) == MAX_CHUNK_ENTRIES:
            chunks.append(tuple(chunk))
            work_left -= chunk_work
            chunk = []
            chunk_work = 0.0
    if chunk:
        chunks.append(tuple(chunk))
    return chunks


def make_chunks(
    entries: Sequence[Item], config: ExecutorConfig, *, workers: int = 0
) -> list[tuple[Item, ...]]:
    """Cuts the entries into chunks, at most as many as a Slurm array may have tasks.

    Args:
        entries: entries to work on.
        config: settings; `chunk_slides` sets the size if it is given.
        workers: workers that will run chunks; 0 means those of a batch array.
    """
    workers = workers or config.workers or ARRAY_WORKERS
    size = config.chunk_slides or chunk_size(len(entries), workers)
    least = math.ceil(len(entries) / MAX_ARRAY)
    return chunked(entries, max(size, least))
