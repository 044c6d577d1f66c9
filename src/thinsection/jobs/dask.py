"""Dask workers: local processes, one per GPU, jobs of Slurm, or a cluster that runs already.

A worker runs one task at a time; the task itself uses the threads. Dask's own spilling and pausing
are off, because a task holds no Dask data; the nanny ends a worker that exceeds its memory.
"""

import logging
import secrets
import shlex
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import (
    ClusterError,
    ConfigError,
    MissingDependencyError,
    importing,
)
from thinsection.files.atomic import write_text
from thinsection.files.lock import scratch_folder
from thinsection.jobs.contract import Backend, Ended, Job, Report, Task, connecting
from thinsection.jobs.executor import CPUS_PER_WORKER, LOGS, local_memory, local_shape
from thinsection.types import MIB, parse_bytes

LOG_NAME = "dask-workers.log"
_POLL_S = 2.0
_RESTART_POLL_S = (
    0.2  # while no worker lives: the nanny starts a new one in about a second
)
_NO_WORKERS_S = 300.0  # a cluster without a worker for so long is lost
_WAIT_S = 300.0  # for the first worker: a job may have to start
_CONNECT_S = 10.0  # to a scheduler that must be there already
_SETTINGS: dict[str, Any] = {
    "distributed.scheduler.allowed-failures": 0,  # what is tried again is not Dask's to say
    "distributed.scheduler.work-stealing": False,
    **{f"distributed.worker.memory.{at}": False for at in ("target", "spill", "pause")},
    "distributed.worker.memory.terminate": 0.95,
}
_ANY_PORT = {"dashboard_address": "localhost:0"}

_log = logging.getLogger(__name__)


class DaskBackend(Backend):
    """See `Backend`; a job is known by its future. One task runs on a worker at a time.

    A cluster that was handed in, or whose scheduler's address is given, keeps its own settings: it
    may try a job whose worker died on others, so there any loss of a worker counts as a death.
    """

    def open(self) -> None:
        """Connects to what the settings ask for, or starts it, and waits for a worker."""
        import dask
        import distributed  # brings its defaults, which must outlive our settings

        self._distributed: Any = distributed
        self._worker_of: dict[Any, str] = {}  # future -> address
        self._seen = time.monotonic()  # when there was a worker
        self._asked = 0
        self._topic = f"thinsection-{secrets.token_hex(4)}"
        self._logs = self.site.folder / LOGS
        self.stack.enter_context(dask.config.set(_SETTINGS))
        self._foreign = (
            self.site.cluster is not None or self.config.scheduler is not None
        )
        self._client = self._connect() if self._foreign else self._start()
        self.stack.callback(self._save_logs)
        if self._client.dashboard_link:
            self.site.on_message(f"dask dashboard: {self._client.dashboard_link}")
        self._client.subscribe_topic(self._topic, self._on_event)
        self.stack.callback(self._client.unsubscribe_topic, self._topic)

    def room(self) -> int:
        """See `Backend.room`: one job for each idle worker, and none that waits behind another."""
        return min(super().room(), len(self._idle()))

    def send(self, jobs: Sequence[Job]) -> None:
        """Gives each idle worker one job, by address.

        Left to itself the scheduler may queue two on one worker, and the entries that only waited
        there would be blamed for its death.
        """
        for job, address in zip(jobs, self._idle()):
            work = (run_job, job.task, job.entries, self._topic)
            future = self._client.submit(
                *work, workers=[address], pure=False, retries=0
            )
            self.sent[future], self._worker_of[future] = job, address

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        self._resize(waiting + len(self.sent))
        before = self._addresses()
        ended = self._wait()
        if ended or before:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > _NO_WORKERS_S:
            rule = f"the cluster must have a worker, got none for {_NO_WORKERS_S:.0f} s"
            raise ClusterError(
                f"{rule}; what is done stays: run the same command again"
            )
        found = []
        for future in ended or self._stranded(before):
            del self._worker_of[future]
            found.append(self._ended(self.sent.pop(future), future))
            future.release()
        return found

    def _wait(self) -> list[Any]:
        """The futures that ended, after waiting for one for a while."""
        if not self.sent:
            threading.Event().wait(_RESTART_POLL_S)
            return []
        with suppress(TimeoutError):
            how = {"timeout": _POLL_S, "return_when": "FIRST_COMPLETED"}
            return list(self._distributed.wait(list(self.sent), **how).done)
        return []

    def _ended(self, job: Job, future: Any) -> Ended:
        if future.status == "finished":
            return Ended(job=job, how="reported", report=future.result())
        error = future.exception() if future.status == "error" else None
        killed = isinstance(error, self._distributed.scheduler.KilledWorker)
        if killed or (error is None and self._foreign):
            reason = f"its worker died; see {self._logs / LOG_NAME}"
            return Ended(job=job, how="died", reason=reason, want="memory")
        error = error or ClusterError("task was lost")
        return Ended.by_error(job, type(error).__name__, str(error), error=error)

    def _stranded(self, before: set[str]) -> list[Any]:
        """Jobs whose worker left without dying at work (scaled down, out of time), cancelled."""
        gone = set(self._worker_of.values()) - before - self._addresses()
        found = [
            f for f, a in self._worker_of.items() if a in gone and f.status == "pending"
        ]
        if found:
            self._client.cancel(found)
        return found

    def _addresses(self) -> set[str]:
        """The workers that live now."""
        return set(self._client.scheduler_info(n_workers=-1)["workers"])

    def _idle(self) -> list[str]:
        return sorted(self._addresses() - set(self._worker_of.values()))

    def _on_event(self, event: Any) -> None:
        kind = cast(type[Any], self.site.attempt.task.event_type)
        self.site.on_event(from_mapping(kind, event[1]["event"]))

    def _connect(self) -> Any:
        """A client of a cluster that runs already, and is not taken down."""
        client, make = self.site.cluster, self._distributed.Client
        self.monitored = not isinstance(client, self._distributed.LocalCluster)
        self.threads, self.climbs = self.config.threads, ()
        if not isinstance(client, make):
            where = self.config.scheduler if client is None else client
            with connecting(where):
                client = self.stack.enter_context(make(where, timeout=_CONNECT_S))
        client.wait_for_workers(1, timeout=_WAIT_S)
        self.workers = self.config.workers or len(
            client.scheduler_info(n_workers=-1)["workers"]
        )
        return client

    def _start(self) -> Any:
        """A client of a cluster of our own."""
        config = self.config
        self.monitored = config.jobqueue is not None
        self.workers, self.threads = local_shape(config)
        scratch = str(self.stack.enter_context(scratch_folder("dask")))
        local: dict[str, Any] = {
            "threads_per_worker": 1,
            "local_directory": scratch,
            **_ANY_PORT,
        }
        local["memory_limit"] = local_memory(config, self.workers)
        if config.jobqueue is not None:
            self.workers = config.workers or 1
            self.threads = config.threads or config.job_cpus or CPUS_PER_WORKER
            self.climbs = ("memory", "gpu")
            cluster = self._slurm_cluster()
        elif config.gpu_ids:
            cluster = self._gpu_cluster(local)
        else:
            cluster = self._distributed.LocalCluster(n_workers=self.workers, **local)
        self._cluster = self.stack.enter_context(cluster)
        self._client = self.stack.enter_context(self._distributed.Client(cluster))
        self._resize(self.workers)
        try:
            self._client.wait_for_workers(1, timeout=_WAIT_S)
        except TimeoutError as error:
            rule = f"a dask worker must start within {_WAIT_S:.0f} s, got none"
            where = f"{self._logs} and the queue (squeue --me)"
            raise ClusterError(f"{rule}; see {where}") from error
        return self._client

    def _resize(self, wanted: int) -> None:
        """Keeps as many jobs in the queue as have work; lost ones are replaced, idle ones end."""
        jobs = max(1, min(self.workers, wanted))
        if (
            self.config.jobqueue is not None
            and not self._foreign
            and jobs != self._asked
        ):
            self._cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs)
            self._asked = jobs

    def _gpu_cluster(self, local: Mapping[str, Any]) -> Any:
        try:
            from dask_cuda import LocalCUDACluster
        except ImportError as error:
            need = f"--gpus needs dask-cuda with executor 'dask', got {error}"
            remedy = "pip install dask-cuda, or use --executor pool, or start one run per GPU on "
            remedy += (
                "the same --out with CUDA_VISIBLE_DEVICES set: they share the work"
            )
            raise MissingDependencyError(f"{need}; {remedy}") from None
        gpus = list(self.config.gpu_ids)
        return LocalCUDACluster(
            CUDA_VISIBLE_DEVICES=gpus, device_memory_limit=0, **local
        )

    def _slurm_cluster(self) -> Any:
        with importing("--jobqueue slurm needs dask-jobqueue", "cluster"):
            from dask_jobqueue import SLURMCluster
        config = self.config
        if shlex.quote(str(self._logs)) != str(self._logs):
            got = f"{str(self._logs)!r}; dask-jobqueue does not quote it: use --executor slurm"
            raise ConfigError(
                f"out must be a path without spaces for --jobqueue, got {got}"
            )
        self._logs.mkdir(parents=True, exist_ok=True)
        memory = parse_bytes(config.job_memory or config.worker_memory or "8GiB") // MIB
        gres = [f"--gres={config.gres}"] if config.gres else []
        return SLURMCluster(
            cores=1,
            processes=1,
            memory=f"{memory}MiB",
            job_cpu=config.job_cpus or self.threads,
            job_mem=f"{memory}M",
            queue=config.partition,
            account=config.account,
            walltime=config.walltime,
            job_extra_directives=[*config.directive, *gres],
            log_directory=str(self._logs),
            local_directory=tempfile.gettempdir(),
            scheduler_options=_ANY_PORT,
        )

    def _save_logs(self) -> None:
        """Brings the workers' and their nannies' logs home."""
        lines = []
        for nanny in (True, False):
            try:
                logs: Mapping[str, Any] = self._client.get_worker_logs(nanny=nanny)
            except (
                OSError,
                ValueError,
                TimeoutError,
            ) as error:  # workers that are gone
                _log.warning("worker logs could not be fetched: %s", error)
                continue
            for worker, records in logs.items():
                lines += [
                    f"{worker} {level} {text}" for level, text in reversed(records)
                ]
        write_text(self._logs / LOG_NAME, "\n".join(lines) + "\n")


def run_job(task: Task[Any, Any], entries: tuple[Any, ...], topic: str) -> Report[Any]:
    """Runs on the worker: the task, with its events sent to the client."""
    from distributed import get_worker

    worker = get_worker()

    def send(event: Any) -> None:
        worker.log_event(topic, {"event": as_mapping(event)})

    return task(entries, on_event=send)
