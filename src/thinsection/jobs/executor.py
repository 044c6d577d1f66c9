"""Settings of executors, and their list.

If the settings list several memory sizes or GPUs, every entry starts with the first. An entry that
runs out of memory is retried with the next one. A `ResourceStep` is a position in these lists.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from thinsection.config import option
from thinsection.errors import ConfigError
from thinsection.extras import Need
from thinsection.machine import visible_gpus
from thinsection.registry import Entry, Registry
from thinsection.types import parse_bytes
from thinsection.usage.monitor import read_limits

# resource that ran out in a worker or an entry
Resource = Literal["memory", "gpu"]

# folder of the workers' logs inside that of an invocation's record
LOGS = "logs"
CPUS_PER_WORKER = 4
# value of `gpus` for every GPU of the machine
ALL_GPUS = "all"
# value of `gpus` for one process, on the device of the encoders
NO_GPUS = "none"
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# value that needs no quotes in a scheduler's directive
_WORD = re.compile(r"[^\s\"'\\#\x00-\x1f\x7f]+")

_BUILT_IN = (
    Entry(
        name="inline",
        help="This process, one entry or stream after the other.",
        target="thinsection.jobs.backend:InlineBackend",
    ),
    Entry(
        name="pool",
        help="Worker processes on this node.",
        target="thinsection.jobs.pool:PoolBackend",
    ),
    Entry(
        name="dask",
        help="Dask workers: local, a scheduler's, or jobs of a batch system.",
        target="thinsection.jobs.dask:DaskBackend",
        needs=("dask", "distributed"),
    ),
    Entry(
        name="ray",
        help="Tasks on a local Ray or a running cluster.",
        target="thinsection.jobs.ray:RayBackend",
        needs=("ray",),
    ),
    Entry(
        name="slurm",
        help="A job array of Slurm.",
        target="thinsection.jobs.slurm:SlurmBackend",
    ),
)
# The classes use these settings, so `backend.load_backend` checks that they are backends.
EXECUTORS: Registry[type] = Registry("executor", "thinsection.executors", _BUILT_IN)
# what to do in place of `gpus` with executors that do not choose GPUs
_OTHER_WAYS = {
    "inline": "name its GPU with device='cuda:1'",
    "ray": "ask Ray for a GPU with gres='gpu:1'",
    "slurm": "ask Slurm for GPUs with gres='gpu:1'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStep:
    """Positions in the settings' lists of memory sizes and GPUs, from 0; a retry moves on."""

    memory: int = 0
    gpu: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Executor, number of workers and their resources."""

    executor: str = option(
        "auto",
        "Where the work runs. auto uses this process, or a pool if --workers or --gpus "
        "asks for more.",
        daily=True,
        choices=lambda: ("auto", *EXECUTORS.names()),
    )
    workers: int = option(
        0,
        "Worker processes, or parallel Slurm jobs. 0: one per GPU if --gpus is set, "
        "else one (auto), one per 4 CPUs (pool), no limit (slurm).",
        daily=True,
    )
    threads: int = option(
        0,
        "CPU threads of the encoder in each worker; 0 divides the CPUs among the "
        "workers.",
    )
    worker_memory: str | None = option(
        None,
        "Memory limit of a worker process, which is ended if it exceeds it. With a list"
        " (16G,32G) a slide that runs out of memory is tried again with the next value."
        " [default: an equal share]",
    )
    chunk_slides: int = option(
        0, "Slides per task; 0 chooses it from the number of slides."
    )
    retries: int = option(
        2, "How often a task is sent again after an error of the cluster."
    )
    scheduler: str | None = option(
        None,
        "Address of a running scheduler: tcp://HOST:8786 for Dask, ray://HOST:10001 for"
        " Ray.",
    )
    gpus: str | None = option(
        None,
        "GPUs of this machine to use, with one worker each: 0,1, all or none. One that is not "
        "there is refused. [default: all, if `thinsection run` encodes on GPUs and there are "
        "several]",
    )
    jobqueue: str | None = option(
        None, "Batch system on which Dask starts its workers as jobs: slurm."
    )
    partition: str | None = option(None, "Slurm partition of the jobs.")
    account: str | None = option(None, "Slurm account of the jobs.")
    gres: str | None = option(
        None,
        "Slurm resources of a job, such as gpu:1. {gpu} stands for the value of --gpu.",
    )
    walltime: str | None = option(
        None,
        "Time limit of a job, as HH:MM:SS or D-HH:MM:SS. [default: the predicted time, "
        "for an array]",
    )
    gpu: str | None = option(
        None,
        "GPU model of a job, for the prediction: t4, v100, a40, a100-40, a100-80, h100 "
        "or h200. With a list (a40,a100-80) a slide that runs out of GPU memory is tried "
        "again on the next model.",
    )
    job_cpus: int = option(
        0, "CPUs of a job; 0 means the predicted number for an array, and 4 for Dask."
    )
    job_memory: str | None = option(
        None,
        "Memory of a job. With a list (16G,32G) a slide that runs out of memory is "
        "tried again with the next value. [default: the predicted memory for an array, "
        "8 GiB for Dask]",
    )
    directive: tuple[str, ...] = option(
        (),
        "Further #SBATCH directive, such as --qos=long; repeat the option for several.",
    )
    queue: Literal["wait", "submit", "script"] = option(
        "wait",
        "What to do with a Slurm array: wait for its end, submit it and return, or only"
        " write its script.",
    )

    def needs(self) -> Iterator[Need]:
        """Packages of the executor."""
        name = chosen_executor(self)
        if name in EXECUTORS:
            yield f"--executor {name}", EXECUTORS.entry(name).needs
        if self.jobqueue is not None:
            yield f"--jobqueue {self.jobqueue}", ("dask_jobqueue",)
        if name == "dask" and self.gpu_ids:
            yield "--gpus with --executor dask", ("dask_cuda",)

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "chunk_slides", "retries", "job_cpus"):
            number = getattr(self, name)
            if number < 0:
                raise ConfigError(f"executor.{name} must be >= 0, got {number}")
        for name in ("worker_memory", "job_memory"):
            for size in _split(getattr(self, name)):
                parse_bytes(size, name=f"executor.{name}")
        for name in ("partition", "account", "gres", "gpu"):
            word = getattr(self, name)
            if word is not None and not _WORD.fullmatch(word):
                raise ConfigError(
                    f"executor.{name} must be one word without quotes, got {word!r}"
                )
        if self.walltime is not None:
            parse_walltime(self.walltime)
        if self.jobqueue not in (None, "slurm"):
            raise ConfigError(f"executor.jobqueue must be slurm, got {self.jobqueue!r}")
        for line in self.directive:
            if not line.startswith("-") or CONTROL.search(line):
                raise ConfigError(
                    f"executor.directive must start with '-', got {line!r}"
                )
        gpus = None if self.gpus == NO_GPUS else self.gpus
        places = (self.scheduler, gpus, self.jobqueue)
        if sum(place is not None for place in places) > 1:
            raise ConfigError(
                "executor must have at most one of scheduler, gpus and jobqueue, got several"
            )
        if gpus is not None and self.executor in _OTHER_WAYS:
            raise ConfigError(
                f"executor.gpus must be left out with executor {self.executor!r}, got {gpus!r}; "
                f"{_OTHER_WAYS[self.executor]}"
            )

    @property
    def in_process(self) -> bool:
        """True if this process itself does the work."""
        return chosen_executor(self) == "inline"

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """GPUs that `gpus` names, by index or UUID."""
        if self.gpus == ALL_GPUS:
            return visible_gpus()
        if self.gpus == NO_GPUS:
            return ()
        return _split(self.gpus)

    @property
    def memory(self) -> str | None:
        """Memory of a worker process on this node."""
        return self.worker_memory or self.job_memory

    def next_step(
        self, resource_step: ResourceStep, lacking: Resource
    ) -> ResourceStep | None:
        """Position with the next GPU or the next memory size; None after the last."""
        if lacking == "gpu":
            gpu = resource_step.gpu + 1
            return (
                replace(resource_step, gpu=gpu) if gpu < len(_split(self.gpu)) else None
            )
        memory = resource_step.memory + 1
        num_sizes = max(len(_split(self.worker_memory)), len(_split(self.job_memory)))
        return replace(resource_step, memory=memory) if memory < num_sizes else None

    def at_step(self, resource_step: ResourceStep) -> "ExecutorConfig":
        """Settings with one memory size and one GPU.

        If several GPUs are listed, a job requests its GPU by name, in `--gres` or at {gpu} in the
        settings.
        """
        card = _pick(self.gpu, resource_step.gpu)
        gres = self.gres
        says_card = "{gpu}" in " ".join((gres or "", *self.directive))
        if len(_split(self.gpu)) > 1 and not says_card:
            num_cards = (gres or "gpu:1").rpartition(":")[2]
            gres = f"gpu:{{gpu}}:{num_cards}"
        if gres is not None:
            gres = gres.replace("{gpu}", card or "")
        return replace(
            self,
            gpu=card,
            gres=gres,
            directive=tuple(
                line.replace("{gpu}", card or "") for line in self.directive
            ),
            worker_memory=_pick(self.worker_memory, resource_step.memory),
            job_memory=_pick(self.job_memory, resource_step.memory),
        )


def check_gpus(config: ExecutorConfig) -> None:
    """Refuses GPUs that this process may not use.

    Call it where the work begins: settings may be read on another machine. A UUID is not compared
    with indices.

    Raises:
        ConfigError: names the GPUs that there are.
    """
    if config.gpus in (None, NO_GPUS):
        return
    visible = visible_gpus()
    if not visible:
        raise ConfigError(
            f"executor.gpus must be left out where no GPU is visible, got {config.gpus!r}; "
            "`thinsection doctor` says what this machine has"
        )
    is_indices = all(name.isdigit() for name in visible)
    for gpu in config.gpu_ids:
        comparable = gpu.isdigit() or not is_indices
        if comparable and gpu not in visible:
            raise ConfigError(
                f"executor.gpus must be among the visible GPUs {', '.join(visible)}, got {gpu!r}"
            )


def chosen_executor(config: ExecutorConfig, *, cluster: object = None) -> str:
    """Name in `EXECUTORS` for these settings.

    Args:
        config: settings.
        cluster: a Dask client or cluster from Python; it takes precedence.
    """
    if cluster is not None:
        return "dask"
    if config.executor != "auto":
        return config.executor
    if (config.scheduler or "").startswith("ray://"):
        return "ray"
    if config.scheduler or config.jobqueue:
        return "dask"
    # one GPU that is named needs a worker that sees no other
    names_gpus = config.gpus not in (None, NO_GPUS, ALL_GPUS)
    is_many = max(config.workers, len(config.gpu_ids)) > 1
    return "pool" if is_many or names_gpus else "inline"


def local_shape(config: ExecutorConfig) -> tuple[int, int]:
    """Number of workers on this node, and threads of each."""
    cpus = max(1, int(read_limits().cpus))
    workers = config.workers or len(config.gpu_ids) or max(1, cpus // CPUS_PER_WORKER)
    threads = config.threads or max(1, cpus // workers)
    return workers, threads


def local_memory(config: ExecutorConfig, workers: int) -> int:
    """Bytes at which a worker on this node is ended: from the settings, or an equal share."""
    if config.memory:
        return parse_bytes(config.memory)
    return read_limits().memory_bytes // workers


def parse_walltime(text: str) -> int:
    """Seconds for Slurm's 'MM', 'MM:SS', 'HH:MM:SS', 'D-HH', 'D-HH:MM' or 'D-HH:MM:SS'.

    Raises:
        ConfigError: the text has another form.
    """
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    are_numbers = all(part.isdigit() for part in parts)
    if not are_numbers or len(parts) > 3 or (dash and not days.isdigit()):
        raise ConfigError(
            f"executor.walltime must be 'HH:MM:SS' or 'D-HH:MM:SS', got {text!r}"
        )
    if not dash and len(parts) < 3:
        parts = ["0", *parts]  # without days, one or two numbers begin with the minutes
    hours, minutes, seconds = (int(part) for part in [*parts, "0", "0"][:3])
    total = int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        raise ConfigError(f"executor.walltime must be > 0, got {text!r}")
    return total


def _split(text: str | None) -> tuple[str, ...]:
    """The parts of a list such as '16G, 32G'."""
    parts = (part.strip() for part in (text or "").split(","))
    return tuple(part for part in parts if part)


def _pick(text: str | None, index: int) -> str | None:
    """Part of a list at an index, or its last part; None for an empty list."""
    values = _split(text)
    return values[min(index, len(values) - 1)] if values else None
