"""Tasks on Ray: a local one, or an existing cluster."""

import os
import signal
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from thinsection.errors import ClusterError, Stopped
from thinsection.jobs.backend import Attempt, Backend, connecting, ignore_event
from thinsection.jobs.executor import CPUS_PER_WORKER, local_shape
from thinsection.jobs.task import AnyReport, AnyTask
from thinsection.types import MIB, parse_bytes

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.queue import Queue

ADDRESS_VARIABLE = "RAY_ADDRESS"
_POLL_S = 2.0
# results are small, since everything else is in files
_STORE_BYTES = 100 * MIB


class RayBackend(Backend):
    """See `Backend`; the key of a job is Ray's reference. Ray does not retry by itself.

    A Ray to which this process is already connected is used and not shut down. On a cluster a job
    requests its CPUs, `--mem`, and one GPU if the settings list any.
    """

    def open(self) -> None:
        """Connects to the scheduler in the settings or RAY_ADDRESS, or starts a local Ray."""
        import ray

        self._ray: ModuleType = ray
        self._events: Queue | None = None
        # resources that a job requests
        self._options: dict[str, float] = {"num_cpus": 1, "max_retries": 0}
        self.workers, self.threads = local_shape(self.config)
        address = self.config.scheduler or os.environ.get(ADDRESS_VARIABLE)
        is_connected = ray.is_initialized()
        if not is_connected:
            self.stack.callback(ray.shutdown)
            self._start(address)
        if address is None and not is_connected:
            self.growable_resources = ()  # a local Ray does not limit memory
        else:
            self._ask_of_cluster()
        if self.context.attempt.task.event_type is not None:
            from ray.util import queue

            self._events = queue.Queue(actor_options={"num_cpus": 0})
            self.stack.callback(self._events.shutdown, force=True)
        self.stack.callback(self._cancel_jobs)

    def send(self, jobs: Sequence[Attempt]) -> None:
        remote = self._ray.remote(run_job).options(**self._options)
        for job in jobs:
            self.sent[remote.remote(job.task, job.entries, self._events)] = job

    def poll(self, *, waiting: int) -> Sequence[Attempt]:
        ready, _ = self._ray.wait(list(self.sent), num_returns=1, timeout=_POLL_S)
        if self._events is not None:  # a task's events arrive before its end
            for event in self._events.get_nowait_batch(self._events.qsize()):
                self.context.on_event(event)
        return [self._end(self.sent.pop(reference), reference) for reference in ready]

    def _end(self, job: Attempt, reference: "ObjectRef") -> Attempt:
        """End of the job of a finished reference."""
        from ray import exceptions

        try:
            return job.ended("reported", report=self._ray.get(reference))
        except (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError) as error:
            first_line = str(error).strip().splitlines()[0]
            return job.ended_by_death(f" ({first_line})")
        except exceptions.RayTaskError as error:
            cause = error.cause
        except exceptions.RayError as error:  # a node or its store was lost
            message = str(error)
            lost = ClusterError(message)
            return job.ended_by_error(type(error).__name__, message, error=lost)
        return job.ended_by_error(type(cause).__name__, str(cause), error=cause)

    def _cancel_jobs(self) -> None:
        """Ends the running jobs."""
        for reference in self.sent:
            self._ray.cancel(reference, force=True)

    def _start(self, address: str | None) -> None:
        """Connects to the address, or starts a local Ray; keeps this process's signal handler."""
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if address is None:
                self._ray.init(
                    address="local",
                    num_cpus=self.workers,
                    log_to_driver=False,
                    include_dashboard=False,
                    object_store_memory=_STORE_BYTES,
                )
                return
            with connecting(address):
                self._ray.init(address=address, log_to_driver=False)
        # raised by Ray's signal handler, which temporarily replaces ours
        except SystemExit as end:
            raise Stopped("SIGTERM", 128 + signal.SIGTERM) from end
        finally:
            if handler is not None and signal.getsignal(signal.SIGTERM) is not handler:
                signal.signal(signal.SIGTERM, handler)

    def _ask_of_cluster(self) -> None:
        """Sets the resources of a job, and the number of jobs that fit into the cluster."""
        config = self.config
        self.threads = config.threads or config.job_cpus or CPUS_PER_WORKER
        cpus_per_job = config.job_cpus or self.threads
        self._options["num_cpus"] = cpus_per_job
        if config.memory is not None:
            self._options["memory"] = parse_bytes(config.memory)
        if (config.gres or "").startswith("gpu") or config.gpu is not None:
            self._options["num_gpus"] = 1
        cpus = int(self._ray.cluster_resources().get("CPU", 1))
        self.workers = config.workers or max(1, cpus // cpus_per_job)


def run_job(
    task: AnyTask, entries: tuple[object, ...], events: "Queue | None"
) -> AnyReport:
    """Runs the task on the worker, with its events sent to the driver's queue."""
    on_event = ignore_event if events is None else events.put
    return task(entries, on_event=on_event)
