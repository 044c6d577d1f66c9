"""The settings of executors: where entries are worked on, how wide, and in which chunks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thinsection.config import option
from thinsection.errors import ConfigError
from thinsection.jobs.task import Entry
from thinsection.units import parse_bytes

LOGS = "logs"  # folder of the workers' logs in the output folder
MAX_CHUNK_SLIDES = 16
MAX_ARRAY = 1000  # Slurm's default MaxArraySize is 1001, the first index that is refused
# chunks per worker: enough that a slow one at the end does not leave the others idle
_CHUNKS_PER_WORKER = 4
_ARRAY_TASKS = 8  # for a small cohort, where --workers does not say it


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
    def in_process(self) -> bool:
        """Whether this very process does the work."""
        return self.executor == "inline"

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """The parts of `gpus`: indices or UUIDs."""
        return tuple(part.strip() for part in (self.gpus or "").split(",") if part.strip())


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


def array_chunks(entries: Sequence[Entry], config: ExecutorConfig) -> list[tuple[Entry, ...]]:
    """The entries of each task of a batch array."""
    return make_chunks(entries, config, workers=config.workers or _ARRAY_TASKS)


def parse_walltime(text: str) -> int:
    """Seconds of Slurm's 'MM', 'MM:SS', 'HH:MM:SS', 'D-HH', 'D-HH:MM' or 'D-HH:MM:SS'.

    Raises:
        ConfigError: the text is none of these.
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(p.isdigit() for p in parts) or len(parts) > 3 or (dash and not days.isdigit()):
        raise ConfigError(f"executor.walltime must be 'HH:MM:SS' or 'D-HH:MM:SS', got {text!r}")
    numbers = [int(p) for p in parts]
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours = 0
        minutes, seconds = [*numbers, 0][:2]
    total = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        raise ConfigError(f"executor.walltime must be > 0, got {text!r}")
    return total
