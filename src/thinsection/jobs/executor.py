"""The settings of executors, the list of them, and how entries are cut into their chunks.

Where the settings list several sizes of memory or several cards, the first is for everybody and
each further one for the entries that died for want of it: a ladder, on which `Rung` is a place.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from thinsection.config import option
from thinsection.errors import ConfigError, require
from thinsection.registry import Entry as Named
from thinsection.registry import Registry
from thinsection.types import parse_bytes
from thinsection.usage.monitor import read_limits

if TYPE_CHECKING:
    from thinsection.jobs.contract import Backend

Entry = TypeVar("Entry")
Want = Literal["memory", "gpu"]  # what a worker or an entry may die for want of

LOGS = "logs"  # folder of the workers' logs below that of an invocation's records
MAX_CHUNK_ENTRIES = 16
MAX_ARRAY = (
    1000  # Slurm's default MaxArraySize is 1001, the first index that is refused
)
CPUS_PER_WORKER = 4
ARRAY_WORKERS = 8  # of a batch system, where --workers does not say it
_CHUNKS_PER_WORKER = (
    4  # enough that a slow one at the end does not leave the others idle
)
_WORD = re.compile(
    r"[^\s\"'\\#\x00-\x1f\x7f]+"
)  # what a scheduler's directive takes unquoted
CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_INLINE = "This process, one entry or stream after the other."
_DASK = "Dask workers: local, a scheduler's, or jobs of a batch system."
_OURS: tuple[tuple[str, str, str, tuple[str, ...], str | None], ...] = (
    ("inline", "contract:InlineBackend", _INLINE, (), None),
    ("pool", "pool:PoolBackend", "Worker processes on this node.", (), None),
    ("dask", "dask:DaskBackend", _DASK, ("dask", "distributed"), "cluster"),
    (
        "ray",
        "ray:RayBackend",
        "Tasks on a local Ray or a running cluster.",
        ("ray",),
        "ray",
    ),
    ("slurm", "slurm:SlurmBackend", "A job array of Slurm.", (), None),
)
_BUILT_IN = [
    Named(name=n, help=h, target=f"thinsection.jobs.{t}", needs=needs, extra=extra)
    for n, t, h, needs, extra in _OURS
]
EXECUTORS: "Registry[type[Backend]]" = Registry(
    "executor", "thinsection.executors", _BUILT_IN
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Which of the listed sizes of memory and of the listed cards entries are tried with."""

    memory: int = 0
    gpu: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Where and how wide entries are worked on."""

    executor: str = option(
        "auto",
        "Where the work is done; auto: this process for up to one worker, else a pool.",
        choices=lambda: ("auto", *EXECUTORS.names()),
    )
    workers: int = option(
        0,
        "Worker processes, or jobs at once; 0: one per GPU, else one per 4 CPUs; Slurm: all.",
    )
    threads: int = option(
        0, "CPU threads of each worker's encoder; 0: its share of the CPUs."
    )
    worker_memory: str | None = option(
        None,
        "Host memory of a worker process, which is ended where it exceeds it; None: an equal "
        "share. Of a list (16G,32G) what dies for want of memory gets the next.",
    )
    chunk_slides: int = option(
        0, "Slides per task, streamed without a pause; 0: by the number."
    )
    retries: int = option(
        2, "Times that a chunk is sent again after an error of the cluster."
    )
    scheduler: str | None = option(
        None,
        "Address of a running Dask scheduler (tcp://HOST:8786) or Ray (ray://HOST:10001).",
    )
    gpus: str | None = option(None, "GPUs of this node, for one worker each: 0,1.")
    jobqueue: str | None = option(
        None, "Start Dask workers as jobs of this batch system: slurm."
    )
    partition: str | None = option(None, "Slurm partition.")
    account: str | None = option(None, "Slurm account.")
    gres: str | None = option(
        None,
        "Slurm generic resources of a job: gpu:1; {gpu} stands for the card of --gpu.",
    )
    walltime: str | None = option(
        None,
        "Time limit of a job, HH:MM:SS or D-HH:MM:SS; None: as planned for an array.",
    )
    gpu: str | None = option(
        None,
        "Card that a job will get: t4, v100, a40, a100-40, a100-80, h100. Of a list "
        "(a40,a100-80) what dies for want of GPU memory gets the next.",
    )
    job_cpus: int = option(
        0, "CPUs of a job; 0: as planned for an array, 4 for Dask's."
    )
    job_memory: str | None = option(
        None,
        "Memory of a job, or of a worker; None: as planned for an array, 8 GiB for Dask's. Of a "
        "list (16G,32G) what dies for want of memory gets the next.",
        flag=("--job-memory", "--mem"),
    )
    directive: tuple[str, ...] = option(
        (), "Further #SBATCH directive; repeat: --qos=long."
    )
    queue: Literal["wait", "submit", "script"] = option(
        "wait",
        "What is done with a Slurm array: wait for it, only submit it, or only write it.",
    )

    def __post_init__(self) -> None:
        check = partial(require, error=ConfigError)
        for name in ("workers", "threads", "chunk_slides", "retries", "job_cpus"):
            check(
                getattr(self, name) >= 0,
                f"executor.{name} must be >= 0",
                getattr(self, name),
            )
        for name in ("worker_memory", "job_memory"):
            for size in _listed(getattr(self, name)):
                parse_bytes(size, name=f"executor.{name}")
        for name in ("partition", "account", "gres", "gpu"):
            fits = (value := getattr(self, name)) is None or _WORD.fullmatch(value)
            check(fits, f"executor.{name} must be one word without quotes", repr(value))
        if self.walltime is not None:
            parse_walltime(self.walltime)
        known = self.jobqueue in (None, "slurm")
        check(known, "executor.jobqueue must be slurm", repr(self.jobqueue))
        for line in self.directive:
            plain = line.startswith("-") and not CONTROL.search(line)
            check(plain, "executor.directive must start with '-'", repr(line))
        places = sum(x is not None for x in (self.scheduler, self.gpus, self.jobqueue))
        check(
            places < 2,
            "executor must have one of scheduler, gpus and jobqueue",
            "several",
        )

    @property
    def in_process(self) -> bool:
        """Whether this very process does the work."""
        return chosen_executor(self) == "inline"

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """The parts of `gpus`: indices or UUIDs."""
        return _listed(self.gpus)

    @property
    def memory(self) -> str | None:
        """Of a worker process on this node."""
        return self.worker_memory or self.job_memory

    def above(self, rung: Rung, want: Want) -> Rung | None:
        """The next rung for what died for want of something; None where the list ends."""
        lists = {"memory": (self.worker_memory, self.job_memory), "gpu": (self.gpu,)}[
            want
        ]
        above: int = getattr(rung, want) + 1
        longest = max(len(_listed(text)) for text in lists)
        return replace(rung, **{want: above}) if above < longest else None

    def at(self, rung: Rung) -> "ExecutorConfig":
        """The settings with one size of memory and one card.

        Where several cards are listed a job asks for its card by name, in `--gres` or where the
        settings say {gpu}.
        """
        gpu = _pick(self.gpu, rung.gpu)
        gres, directive = self.gres, self.directive
        if len(_listed(self.gpu)) > 1 and "{gpu}" not in " ".join(
            (gres or "", *directive)
        ):
            gres = f"gpu:{{gpu}}:{(gres or 'gpu:1').rpartition(':')[2]}"
        sizes = {
            n: _pick(getattr(self, n), rung.memory)
            for n in ("worker_memory", "job_memory")
        }
        directive = tuple(line.replace("{gpu}", gpu or "") for line in directive)
        gres = gres and gres.replace("{gpu}", gpu or "")
        return replace(self, gpu=gpu, gres=gres, directive=directive, **sizes)  # type: ignore[arg-type]


def chosen_executor(config: ExecutorConfig, *, cluster: Any = None) -> str:
    """The name in `EXECUTORS` that the settings, or a Dask object that is handed in, come to."""
    if cluster is not None:
        return "dask"
    if config.executor != "auto":
        return config.executor
    if (config.scheduler or "").startswith("ray://"):
        return "ray"
    if config.scheduler or config.jobqueue:
        return "dask"
    return "pool" if max(config.workers, len(config.gpu_ids)) > 1 else "inline"


def local_shape(config: ExecutorConfig) -> tuple[int, int]:
    """(workers, threads of each) on this node."""
    cpus = max(1, int(read_limits().cpus))
    workers = config.workers or len(config.gpu_ids) or max(1, cpus // CPUS_PER_WORKER)
    return workers, config.threads or max(1, cpus // workers)


def local_memory(config: ExecutorConfig, workers: int) -> int:
    """Bytes at which a worker on this node is ended: what was asked for, or an equal share."""
    return (
        parse_bytes(config.memory)
        if config.memory
        else read_limits().memory_bytes // workers
    )


def chunked(entries: Sequence[Entry], size: int) -> list[tuple[Entry, ...]]:
    """The entries in runs of `size`, the last one shorter."""
    return [tuple(entries[i : i + size]) for i in range(0, len(entries), size)]


def chunk_size(num_entries: int, workers: int) -> int:
    """Entries per chunk: several chunks for each worker, and no more than a loss may cost."""
    most = math.ceil(num_entries / (workers * _CHUNKS_PER_WORKER))
    return max(1, min(MAX_CHUNK_ENTRIES, most))


def make_chunks(
    entries: Sequence[Entry], config: ExecutorConfig, *, workers: int = 0
) -> list[tuple[Entry, ...]]:
    """The entries in the runs that tasks take, at most as many as an array may have tasks.

    Without a number of workers they are those of a batch array.
    """
    workers = workers or config.workers or ARRAY_WORKERS
    size = config.chunk_slides or chunk_size(len(entries), workers)
    return chunked(entries, max(size, -(-len(entries) // MAX_ARRAY)))


def parse_walltime(text: str) -> int:
    """Seconds of Slurm's 'MM', 'MM:SS', 'HH:MM:SS', 'D-HH', 'D-HH:MM' or 'D-HH:MM:SS'.

    Raises ConfigError: the text is none of these.
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if (
        not all(p.isdigit() for p in parts)
        or len(parts) > 3
        or (dash and not days.isdigit())
    ):
        raise ConfigError(
            f"executor.walltime must be 'HH:MM:SS' or 'D-HH:MM:SS', got {text!r}"
        )
    no_hours = not dash and len(parts) < 3
    hours, minutes, seconds, *_ = map(int, [*["0"] * no_hours, *parts, "0", "0"])
    total = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        raise ConfigError(f"executor.walltime must be > 0, got {text!r}")
    return total


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _pick(text: str | None, index: int) -> str | None:
    values = _listed(text)
    return values[min(index, len(values) - 1)] if values else None
