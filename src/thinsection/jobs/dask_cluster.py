"""Dask workers for a run: local processes, one per GPU, jobs of Slurm, or a running scheduler.

A worker runs one task at a time; the task itself uses the threads. Dask's own memory management
(spilling, pausing) is off, because a task holds no Dask data; what is on is the nanny's limit,
which ends a worker that exceeds its memory.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinsection.errors import ClusterError, MissingDependencyError
from thinsection.jobs.executor import ExecutorConfig
from thinsection.types import MIB
from thinsection.units import parse_bytes
from thinsection.usage.monitor_limits import read_limits

CPUS_PER_WORKER = 4
_WAIT_S = 300.0  # for the first worker: a job may have to start
_CONNECT_S = 10.0  # to a scheduler that must be there already
_TERMINATE_FRACTION = 0.95

_SETTINGS: dict[str, Any] = {
    # one death is enough to try the slides of a chunk one by one
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.work-stealing": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": _TERMINATE_FRACTION,
}


def _no_resize(workers: int) -> None:
    """For clusters of a fixed size."""


@dataclass(frozen=True, kw_only=True)
class DaskSession:
    """A connected client.

    Attributes:
        client: `distributed.Client`.
        workers: tasks that can run at once.
        threads: of each worker's encoder.
        local: workers are children of this process (and in its resource record).
        resize: told how many workers still have work; jobs of a batch system follow it.
    """

    client: Any
    workers: int
    threads: int
    local: bool
    resize: Callable[[int], None] = _no_resize

    def addresses(self) -> set[str]:
        """The workers that live now."""
        return set(self.client.scheduler_info(n_workers=-1)["workers"])


@contextmanager
def open_session(config: ExecutorConfig, *, log_folder: Path) -> Iterator[DaskSession]:
    """Connects to what the settings ask for, and takes down on exit what it started.

    Raises:
        MissingDependencyError: dask, dask-cuda or dask-jobqueue is not installed.
        ClusterError: no worker came up in time.
    """
    try:
        import dask
        import distributed
    except ImportError as error:
        raise MissingDependencyError(
            f"executor 'dask' needs dask and distributed, got {error}; "
            "pip install 'thinsection[cluster]'"
        ) from None
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(_SETTINGS))
        if config.scheduler:
            client = stack.enter_context(_connect(distributed, config.scheduler))
            client.wait_for_workers(1, timeout=_WAIT_S)
            workers = config.workers or len(client.scheduler_info(n_workers=-1)["workers"])
            yield DaskSession(
                client=client,
                workers=workers,
                threads=config.threads,
                local=False,
            )
            return
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="thinsection-dask-"))
        workers, threads = worker_shape(config)
        cluster = stack.enter_context(
            _cluster(config, workers=workers, threads=threads, scratch=scratch, logs=log_folder)
        )
        client = stack.enter_context(distributed.Client(cluster))
        resize = _resizer(cluster, workers) if config.jobqueue else _no_resize
        try:
            client.wait_for_workers(1, timeout=_WAIT_S)
        except TimeoutError as error:
            raise ClusterError(
                f"a dask worker must start within {_WAIT_S:.0f} s, got none; see {log_folder} and "
                "the queue (squeue --me)"
            ) from error
        yield DaskSession(
            client=client,
            workers=workers,
            threads=threads,
            local=config.jobqueue is None,
            resize=resize,
        )


def _resizer(cluster: Any, workers: int) -> Callable[[int], None]:
    """Keeps as many jobs in the queue as have work; lost ones are replaced, idle ones end."""
    asked = 0

    def resize(wanted: int) -> None:
        nonlocal asked
        jobs = max(1, min(workers, wanted))
        if jobs != asked:
            cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs)
            asked = jobs

    resize(workers)
    return resize


def worker_shape(config: ExecutorConfig) -> tuple[int, int]:
    """(workers, threads of each) for workers of this node, or for jobs."""
    if config.jobqueue is not None:
        return config.workers or 1, config.threads or config.job_cpus or CPUS_PER_WORKER
    cpus = max(1, int(read_limits().cpus))
    default = len(config.gpu_ids) or max(1, cpus // CPUS_PER_WORKER)
    workers = config.workers or default
    return workers, config.threads or max(1, cpus // workers)


def worker_memory(config: ExecutorConfig, workers: int) -> int:
    """Bytes at which a local worker is restarted: what was asked for, or an equal share."""
    if config.worker_memory is not None:
        return parse_bytes(config.worker_memory)
    return read_limits().memory_bytes // workers


def _connect(distributed: Any, address: str) -> Any:
    try:
        return distributed.Client(address, timeout=_CONNECT_S)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"scheduler must be the address of a running one, got {address!r}: {error}"
        ) from error


def _cluster(
    config: ExecutorConfig, *, workers: int, threads: int, scratch: str, logs: Path
) -> Any:
    memory = worker_memory(config, workers)
    if config.gpu_ids:
        return _gpu_cluster(config, memory=memory, scratch=scratch)
    if config.jobqueue:
        return _slurm_cluster(config, workers=workers, threads=threads, logs=logs)
    from distributed import LocalCluster

    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        memory_limit=memory,
        local_directory=scratch,
        dashboard_address="localhost:0",
    )


def _gpu_cluster(config: ExecutorConfig, *, memory: int, scratch: str) -> Any:
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise MissingDependencyError(
            f"--gpus needs dask-cuda, got {error}; pip install dask-cuda, or start one run per GPU "
            "on the same --out with CUDA_VISIBLE_DEVICES set: they share the work"
        ) from None
    return LocalCUDACluster(
        CUDA_VISIBLE_DEVICES=list(config.gpu_ids),
        threads_per_worker=1,
        memory_limit=memory,
        device_memory_limit=0,
        local_directory=scratch,
        dashboard_address="localhost:0",
    )


def _slurm_cluster(config: ExecutorConfig, *, workers: int, threads: int, logs: Path) -> Any:
    try:
        from dask_jobqueue import SLURMCluster
    except ImportError as error:
        raise MissingDependencyError(
            f"--jobqueue slurm needs dask-jobqueue, got {error}; pip install 'thinsection[cluster]'"
        ) from None
    logs.mkdir(parents=True, exist_ok=True)
    memory = parse_bytes(config.job_memory or config.worker_memory or "8GiB")
    directives = [*config.directive, *([f"--gres={config.gres}"] if config.gres else [])]
    return SLURMCluster(
        cores=1,
        processes=1,
        memory=f"{memory // MIB}MiB",
        job_cpu=config.job_cpus or threads,
        job_mem=f"{memory // MIB}M",
        queue=config.partition,
        account=config.account,
        walltime=config.walltime,
        job_extra_directives=directives,
        log_directory=str(logs),
        local_directory=tempfile.gettempdir(),
        scheduler_options={"dashboard_address": ":0"},
    )
