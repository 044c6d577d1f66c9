"""Tasks on Ray: a local one, or a cluster that runs already."""

import os
from collections.abc import Sequence
from typing import Any

from thinsection.errors import ClusterError
from thinsection.jobs.backend import Backend, Ended, Job, ended_by
from thinsection.jobs.executor import CPUS_PER_WORKER, local_shape
from thinsection.jobs.task import Report, Task, Want
from thinsection.types import MIB
from thinsection.units import parse_bytes

ADDRESS_VARIABLE = "RAY_ADDRESS"
_POLL_S = 2.0
_STORE_BYTES = 100 * MIB  # results are small: everything else lies in files


class RayBackend(Backend):
    """See `Backend`. Ray is told to try nothing again by itself.

    A Ray that this process is connected to already is used and left as it is. On a cluster a job
    asks for its CPUs, for `--mem`, and for one GPU where the settings name one.
    """

    climbs: tuple[Want, ...] = ("memory",)

    def open(self) -> None:
        """Connects to the scheduler of the settings or of RAY_ADDRESS, or starts a local Ray.

        Raises:
            ClusterError: there is none at the address.
        """
        import ray

        address = self.config.scheduler or os.environ.get(ADDRESS_VARIABLE)
        self._own, self._local = not ray.is_initialized(), address is None
        workers, self._threads = local_shape(self.config)
        if self._own and address is not None:
            try:
                ray.init(address=address, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise ClusterError(
                    f"scheduler must be the address of a running Ray, got {address!r}: {error}"
                ) from error
        elif self._own:
            ray.init(
                address="local",
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                log_to_driver=False,
            )
        else:
            self._local = False
        if self._own:
            self.stack.callback(ray.shutdown)
        self._options: dict[str, Any] = {"num_cpus": 1, "max_retries": 0}
        if not self._local:
            self._ask_of_cluster(ray)
        else:
            self.workers, self.climbs = workers, ()  # a local Ray limits nobody
        self._sent: dict[Any, Job] = {}
        self._events: Any = None
        if self.site.attempt.task.event_type is not None:
            from ray.util.queue import Queue

            self._events = Queue(actor_options={"num_cpus": 0})
            self.stack.callback(self._events.shutdown, force=True)
        self.stack.callback(self._cancel)

    def fit(self, task: Task[Any, Any]) -> Task[Any, Any]:
        """See `Backend.fit`; Ray's workers are no children of this process."""
        return task.on_worker(threads=self._threads, monitored=True)

    def room(self) -> int:
        """See `Backend.room`."""
        return self.workers - len(self._sent)

    def send(self, jobs: Sequence[Job]) -> None:
        """See `Backend.send`."""
        import ray

        remote = ray.remote(run_job).options(**self._options)
        for job in jobs:
            self._sent[remote.remote(job.task, job.entries, self._events)] = job

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        """See `Backend.poll`."""
        import ray

        ready, _ = ray.wait(list(self._sent), num_returns=1, timeout=_POLL_S)
        if self._events is not None:  # a task's events arrived before its end
            for event in self._events.get_nowait_batch(self._events.qsize()):
                self.site.on_event(event)
        return [self._ended(self._sent.pop(reference), reference) for reference in ready]

    def _ended(self, job: Job, reference: Any) -> Ended:
        import ray
        from ray import exceptions

        try:
            return Ended(job=job, how="reported", report=ray.get(reference))
        except (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError) as error:
            line = str(error).strip().splitlines()[0]
            return Ended(job=job, how="died", reason=f"its worker died ({line})", want="memory")
        except exceptions.RayTaskError as error:
            cause = error.cause
            return ended_by(job, type(cause).__name__, str(cause), error=cause)
        except exceptions.RayError as error:  # a node or its store was lost
            return ended_by(job, type(error).__name__, str(error), error=ClusterError(str(error)))

    def _cancel(self) -> None:
        """Ends what still runs."""
        import ray

        for reference in self._sent:
            ray.cancel(reference, force=True)

    def _ask_of_cluster(self, ray: Any) -> None:
        """What a job asks for, and how many of them the cluster holds at once."""
        config = self.config
        self._threads = config.threads or config.job_cpus or CPUS_PER_WORKER
        self._options["num_cpus"] = config.job_cpus or self._threads
        if config.memory is not None:
            self._options["memory"] = parse_bytes(config.memory)
        if (config.gres or "").startswith("gpu") or config.gpu is not None:
            self._options["num_gpus"] = 1
        cpus = int(ray.cluster_resources().get("CPU", 1))
        self.workers = config.workers or max(1, cpus // int(self._options["num_cpus"]))


def run_job(task: Task[Any, Any], entries: tuple[Any, ...], events: Any) -> Report[Any]:
    """Runs on the worker: the task, with its events put on the driver's queue."""

    def send(event: Any) -> None:
        if events is not None:
            events.put(event)

    return task(entries, on_event=send)
