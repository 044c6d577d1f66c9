"""Dask workers: local processes, one per GPU, Slurm jobs, or an existing cluster.

A worker runs one task at a time, and the task itself uses the threads. Dask's own spilling and
pausing are off, because a task has no Dask data. The nanny ends a worker that exceeds its memory.
"""

import logging
import secrets
import shlex
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import (
    ClusterError,
    ConfigError,
    MissingDependencyError,
)
from thinsection.extras import importing
from thinsection.files.atomic import write_text
from thinsection.files.lock import scratch_folder
from thinsection.jobs.backend import Attempt, Backend, connecting
from thinsection.jobs.executor import CPUS_PER_WORKER, LOGS, local_memory, local_shape
from thinsection.jobs.task import AnyReport, AnyTask
from thinsection.types import MIB, Document, parse_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from distributed import Client, Future
    from distributed.deploy.cluster import Cluster

LOG_NAME = "dask-workers.log"
_POLL_S = 2.0
# seconds between checks while no worker lives; the nanny starts a new one in about a second
_RESTART_POLL_S = 0.2
# seconds without any worker after which a cluster counts as lost
_NO_WORKERS_S = 300.0
# seconds to wait for the first worker, since a job may have to start
_WAIT_S = 300.0
# seconds to connect to a scheduler that already runs
_CONNECT_S = 10.0
_SETTINGS = {
    # retries are decided by the driver
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.work-stealing": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": 0.95,
}
_ANY_PORT = "localhost:0"

_log = logging.getLogger(__name__)


class DaskBackend(Backend):
    """See `Backend`; the key of a job is its future. A worker runs one task at a time.

    A cluster from Python, or with a given scheduler address, keeps its own settings. It may retry a
    job on other workers if one dies, so any loss of a worker there counts as a death.
    """

    def open(self) -> None:
        """Connects to the cluster in the settings, or starts one, and waits for a worker."""
        import dask
        import distributed  # loads Dask's defaults, which must come before our settings

        self._distributed: ModuleType = distributed
        self._worker_of: dict[
            Future[AnyReport], str
        ] = {}  # to the address of its worker
        self._worker_seen_s = time.monotonic()
        self._num_asked = 0  # number of jobs in the last scaling of the cluster
        self._topic = f"thinsection-{secrets.token_hex(4)}"
        self._logs = self.context.folder / LOGS
        self.stack.enter_context(dask.config.set(_SETTINGS))
        self._foreign = (
            self.context.cluster is not None or self.config.scheduler is not None
        )
        self._client = self._connect() if self._foreign else self._start()
        self.stack.callback(self._save_logs)
        if self._client.dashboard_link:
            self.context.on_message(f"dask dashboard: {self._client.dashboard_link}")
        self._client.subscribe_topic(self._topic, self._receive_event)
        self.stack.callback(self._client.unsubscribe_topic, self._topic)

    def room(self) -> int:
        """See `Backend.room`: one job for each idle worker; no job waits behind another."""
        return min(super().room(), len(self._idle_addresses()))

    def send(self, jobs: Sequence[Attempt]) -> None:
        """Sends one job to each idle worker, by address.

        Without addresses the scheduler may queue two jobs on one worker. If the worker dies, the
        entries that only waited there would also be blamed.
        """
        for job, address in zip(jobs, self._idle_addresses()):
            future = self._client.submit(
                run_job,
                job.task,
                job.entries,
                self._topic,
                workers=[address],
                pure=False,
                retries=0,
            )
            self.sent[future] = job
            self._worker_of[future] = address

    def poll(self, *, waiting: int) -> Sequence[Attempt]:
        self._resize(waiting + len(self.sent))
        before = self._addresses()
        futures = self._wait()
        if futures or before:
            self._worker_seen_s = time.monotonic()
        elif time.monotonic() - self._worker_seen_s > _NO_WORKERS_S:
            raise ClusterError(
                f"the cluster must have a worker, got none for {_NO_WORKERS_S:.0f} s; completed "
                "slides are kept: run the same command again"
            )
        ended = []
        for future in futures or self._cancel_stranded(before):
            del self._worker_of[future]
            ended.append(self._end(self.sent.pop(future), future))
            future.release()
        return ended

    def _wait(self) -> "list[Future[AnyReport]]":
        """Futures that ended; waits a while for the first."""
        if not self.sent:
            threading.Event().wait(_RESTART_POLL_S)
            return []
        with suppress(TimeoutError):
            futures = self._distributed.wait(
                list(self.sent), timeout=_POLL_S, return_when="FIRST_COMPLETED"
            )
            return list(futures.done)
        return []

    def _end(self, job: Attempt, future: "Future[AnyReport]") -> Attempt:
        """End of the job of a future that is done."""
        if future.status == "finished":
            return job.ended("reported", report=future.result())
        error = future.exception() if future.status == "error" else None
        was_killed = isinstance(error, self._distributed.scheduler.KilledWorker)
        if was_killed or (error is None and self._foreign):
            return job.ended_by_death(f"; see {self._logs / LOG_NAME}")
        if error is None:
            error = ClusterError("task was lost")
        return job.ended_by_error(type(error).__name__, str(error), error=error)

    def _cancel_stranded(self, before: set[str]) -> "list[Future[AnyReport]]":
        """Cancels jobs whose worker left without dying at work (scaled down, time limit).

        Args:
            before: addresses of the workers at the beginning of the poll.
        """
        gone = set(self._worker_of.values()) - before - self._addresses()
        stranded = [
            future
            for future, address in self._worker_of.items()
            if address in gone and future.status == "pending"
        ]
        if stranded:
            self._client.cancel(stranded)
        return stranded

    def _addresses(self) -> set[str]:
        """Addresses of the current workers."""
        return set(self._client.scheduler_info(n_workers=-1)["workers"])

    def _idle_addresses(self) -> list[str]:
        return sorted(self._addresses() - set(self._worker_of.values()))

    def _receive_event(self, message: tuple[float, Document]) -> None:
        """Receives an event that `run_job` sent: (time, document)."""
        event_type = self.context.attempt.task.event_type
        if event_type is not None:
            self.context.on_event(from_mapping(event_type, message[1]["event"]))

    def _connect(self) -> "Client":
        """Client of an existing cluster, which is not shut down afterwards."""
        cluster = self.context.cluster
        self.monitored = not isinstance(cluster, self._distributed.LocalCluster)
        self.threads = self.config.threads
        self.growable_resources = ()
        if isinstance(cluster, self._distributed.Client):
            client: Client = cluster
        else:
            where = self.config.scheduler if cluster is None else cluster
            with connecting(where):
                client = self._distributed.Client(where, timeout=_CONNECT_S)
                self.stack.enter_context(client)
        client.wait_for_workers(1, timeout=_WAIT_S)
        num_workers = len(client.scheduler_info(n_workers=-1)["workers"])
        self.workers = self.config.workers or num_workers
        return client

    def _start(self) -> "Client":
        """Client of a cluster that this process starts."""
        config = self.config
        self.monitored = config.jobqueue is not None
        self.workers, self.threads = local_shape(config)
        if config.jobqueue is not None:
            self.workers = config.workers or 1
            self.threads = config.threads or config.job_cpus or CPUS_PER_WORKER
            self.growable_resources = ("memory", "gpu")
            cluster = self._slurm_cluster(self.threads)
        else:
            cluster = self._local_cluster()
        self._cluster = self.stack.enter_context(cluster)
        self._client = self.stack.enter_context(self._distributed.Client(cluster))
        self._resize(self.workers)
        try:
            self._client.wait_for_workers(1, timeout=_WAIT_S)
        except TimeoutError as error:
            raise ClusterError(
                f"a dask worker must start within {_WAIT_S:.0f} s, got none; "
                f"see {self._logs} and the queue (squeue --me)"
            ) from error
        return self._client

    def _resize(self, wanted: int) -> None:
        """Scales the queue to the jobs with work: lost ones are replaced, idle ones end."""
        if self.config.jobqueue is None or self._foreign:
            return
        jobs = max(1, min(self.workers, wanted))
        if jobs != self._num_asked:
            self._cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs)
            self._num_asked = jobs

    def _local_cluster(self) -> "Cluster":
        """Workers on this node, one per GPU if the settings list GPUs."""
        scratch = str(self.stack.enter_context(scratch_folder("dask")))
        make_cluster = partial(self._distributed.LocalCluster, n_workers=self.workers)
        if self.config.gpu_ids:
            try:
                from dask_cuda import LocalCUDACluster
            except ImportError as error:
                raise MissingDependencyError(
                    f"gpus needs dask-cuda with executor 'dask', got {error}; "
                    'pip install dask-cuda, or use executor="pool", or start one run per GPU on '
                    'the same out="..." with CUDA_VISIBLE_DEVICES set: they share the work'
                ) from None
            make_cluster = partial(
                LocalCUDACluster,
                CUDA_VISIBLE_DEVICES=list(self.config.gpu_ids),
                device_memory_limit=0,
            )
        cluster: Cluster = make_cluster(
            threads_per_worker=1,
            local_directory=scratch,
            dashboard_address=_ANY_PORT,
            memory_limit=local_memory(self.config, self.workers),
        )
        return cluster

    def _slurm_cluster(self, threads: int) -> "Cluster":
        """Workers as jobs of Slurm, through dask-jobqueue."""
        with importing("--jobqueue slurm", "dask_jobqueue"):
            from dask_jobqueue.slurm import SLURMCluster
        config = self.config
        if shlex.quote(str(self._logs)) != str(self._logs):
            raise ConfigError(
                f"out must be a path without spaces for jobqueue, got {str(self._logs)!r}; "
                'dask-jobqueue does not quote paths: choose another out="...", or executor="slurm"'
            )
        self._logs.mkdir(parents=True, exist_ok=True)
        memory = parse_bytes(config.job_memory or config.worker_memory or "8GiB") // MIB
        directives = list(config.directive)
        if config.gres:
            directives.append(f"--gres={config.gres}")
        return SLURMCluster(
            cores=1,
            processes=1,
            memory=f"{memory}MiB",
            job_cpu=config.job_cpus or threads,
            job_mem=f"{memory}M",
            queue=config.partition,
            account=config.account,
            walltime=config.walltime,
            job_extra_directives=directives,
            log_directory=str(self._logs),
            local_directory=tempfile.gettempdir(),
            scheduler_options={"dashboard_address": _ANY_PORT},
        )

    def _save_logs(self) -> None:
        """Writes the logs of the workers and their nannies to the record's folder."""
        lines = []
        for nanny in (True, False):
            try:
                logs = self._client.get_worker_logs(nanny=nanny)
            except (OSError, ValueError, TimeoutError) as error:  # the workers are gone
                _log.warning("cannot fetch the logs of the workers: %s", error)
                continue
            for worker, records in logs.items():
                for level, text in reversed(records):
                    lines.append(f"{worker} {level} {text}")
        write_text(self._logs / LOG_NAME, "\n".join(lines) + "\n")


def run_job(task: AnyTask, entries: tuple[object, ...], topic: str) -> AnyReport:
    """Runs the task on the worker, with its events sent to the client."""
    from distributed import get_worker

    worker = get_worker()

    def send(event: "DataclassInstance") -> None:
        worker.log_event(topic, {"event": as_mapping(event)})

    return task(entries, on_event=send)
