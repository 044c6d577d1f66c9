"""Where the slides of a run are worked on: in this process, on Dask workers, or in Slurm jobs.

An executor takes chunks of slides and a task that turns a chunk into a report. Tasks are plain
picklable values; all that a result is made of lies on the shared file system under the output
folder, guarded by per-slide locks and ledgers, so that any number of executors may work on it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from thinsection.config import option
from thinsection.errors import ConfigError
from thinsection.units import parse_bytes

Entry = TypeVar("Entry")
Result = TypeVar("Result")
Task_contra = TypeVar("Task_contra", contravariant=True)  # a `ChunkTask`

LOGS = "logs"  # folder of the workers' logs in the output folder
MAX_CHUNK_SLIDES = 16
MAX_ARRAY = 1000  # Slurm's default MaxArraySize is 1001, the first index that is refused
# chunks per worker: enough that a slow one at the end does not leave the others idle
_CHUNKS_PER_WORKER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Where and how wide a run is executed."""

    executor: Literal["inline", "dask", "slurm"] = option(
        "inline", "Where slides are worked on: this process, Dask workers, a Slurm job array."
    )
    workers: int = option(
        0, "Worker processes or jobs; 0: inline none, dask one per GPU, else one per 4 CPUs."
    )
    threads: int = option(0, "CPU threads of each worker's encoder; 0: its share of the CPUs.")
    worker_memory: str | None = option(
        None, "Host memory of a worker; one that exceeds it is restarted. None: an equal share."
    )
    chunk_slides: int = option(0, "Slides per task, streamed without a pause; 0: by the number.")
    retries: int = option(2, "Times that a chunk is sent again after an error of the cluster.")
    scheduler: str | None = option(None, "Address of a running Dask scheduler: tcp://HOST:8786.")
    gpus: str | None = option(None, "GPUs for one Dask worker each (dask-cuda): 0,1.")
    jobqueue: str | None = option(None, "Start Dask workers as jobs of this batch system: slurm.")
    partition: str | None = option(None, "Slurm partition.")
    account: str | None = option(None, "Slurm account.")
    gres: str | None = option(None, "Slurm generic resources of a job: gpu:1, gpu:a100:1.")
    walltime: str | None = option(
        None, "Time limit of a job, HH:MM:SS or D-HH:MM:SS; None: as planned for an array."
    )
    gpu: str | None = option(
        None, "Card that a job will get, for the prediction: t4, v100, a40, a100-40, a100-80, h100."
    )
    job_cpus: int = option(0, "CPUs of a job; 0: as planned for an array, 4 for Dask's.")
    job_memory: str | None = option(
        None, "Memory of a job; None: as planned for an array, 8 GiB for Dask's."
    )
    array_limit: int = option(0, "Most array tasks at once (--array=1-N%K); 0: no limit.")
    directive: tuple[str, ...] = option((), "Further #SBATCH directive; repeat: --qos=long.")

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "chunk_slides", "retries", "job_cpus", "array_limit"):
            if getattr(self, name) < 0:
                raise ConfigError(f"executor.{name} must be >= 0, got {getattr(self, name)}")
        for name in ("worker_memory", "job_memory"):
            if getattr(self, name) is not None:
                parse_bytes(getattr(self, name), name=f"executor.{name}")
        if self.jobqueue not in (None, "slurm"):
            raise ConfigError(f"executor.jobqueue must be slurm, got {self.jobqueue!r}")
        for line in self.directive:
            if not line.startswith("-") or "\n" in line:
                raise ConfigError(f"executor.directive must start with '-', got {line!r}")
        if sum(x is not None for x in (self.scheduler, self.gpus, self.jobqueue)) > 1:
            raise ConfigError("executor must have one of scheduler, gpus and jobqueue, got several")

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """The parts of `gpus`: indices or UUIDs."""
        return tuple(part.strip() for part in (self.gpus or "").split(",") if part.strip())


@dataclass(frozen=True, kw_only=True)
class ChunkReport(Generic[Result]):
    """What a task says of its chunk; plain values.

    Attributes:
        results: one per slide of the chunk, in its order.
        stage_seconds: busy and waiting seconds by stage, as `StageClock.seconds()`.
        worker: 'host:pid' of the process that did it.
        seconds: wall-clock time of the task.
        facts: which models did it (`Models.identities`).
    """

    results: tuple[Result, ...]
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    worker: str = ""
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


class ChunkTask(Protocol[Entry, Result]):
    """Work on a chunk of slides; picklable."""

    def __call__(
        self, entries: Sequence[Entry], *, on_event: Callable[[Any], None]
    ) -> ChunkReport[Result]:
        """Works on the slides. A bad slide is a failed result; an exception is the cluster's."""
        ...

    def on_worker(self, *, threads: int, monitored: bool) -> "ChunkTask[Entry, Result]":
        """The same work in a worker that has so many CPUs.

        Args:
            threads: 0 leaves the library's own choice.
            monitored: whether the worker records what it uses, because no process above it does.
        """
        ...

    def smaller(self) -> "ChunkTask[Entry, Result]":
        """The same work in less memory, for a slide whose worker died. Same results."""
        ...

    def lost(self, entry: Entry, reason: str) -> Result:
        """Records a slide that no worker survives, and returns its result."""
        ...


class Executor(Protocol[Task_contra]):
    """Runs tasks of one kind over chunks of slides."""

    def execute(
        self,
        chunks: Sequence[Sequence[Any]],
        task: Task_contra,
        *,
        on_report: Callable[[ChunkReport[Any]], None],
        on_event: Callable[[Any], None],
    ) -> None:
        """Returns when every slide of every chunk was reported exactly once.

        Args:
            chunks: slides that one task streams through one process.
            task: what is done with a chunk.
            on_report: called in the caller's thread as chunks end, in any order.
            on_event: progress of slides on the way; from any thread, may lag.

        Raises:
            ClusterError: the cluster cannot be had, or all of it was lost.
        """
        ...


class InlineExecutor:
    """This process, one chunk after the other."""

    def execute(
        self,
        chunks: Sequence[Sequence[Entry]],
        task: ChunkTask[Entry, Result],
        *,
        on_report: Callable[[ChunkReport[Result]], None],
        on_event: Callable[[Any], None],
    ) -> None:
        """See `Executor.execute`."""
        for chunk in chunks:
            on_report(task(chunk, on_event=on_event))


def chunked(entries: Sequence[Entry], size: int) -> list[tuple[Entry, ...]]:
    """The entries in runs of `size`, the last one shorter."""
    return [tuple(entries[i : i + size]) for i in range(0, len(entries), size)]


def chunk_size(num_slides: int, workers: int) -> int:
    """Slides per task: several tasks for each worker, and no more slides than a loss may cost."""
    return max(1, min(MAX_CHUNK_SLIDES, math.ceil(num_slides / (workers * _CHUNKS_PER_WORKER))))


def make_chunks(
    entries: Sequence[Entry], config: ExecutorConfig, *, workers: int
) -> list[tuple[Entry, ...]]:
    """The entries in the runs that tasks take, at most as many as an array may have tasks."""
    size = config.chunk_slides or chunk_size(len(entries), workers)
    return chunked(entries, max(size, -(-len(entries) // MAX_ARRAY)))
