"""Tasks on Ray: a local one, or a cluster that runs already."""

import os
import signal
from collections.abc import Sequence
from typing import Any

from thinsection.errors import ClusterError, Stopped
from thinsection.jobs.contract import Backend, Ended, Job, Report, Task, connecting
from thinsection.jobs.executor import CPUS_PER_WORKER, local_shape
from thinsection.types import MIB, parse_bytes

ADDRESS_VARIABLE = "RAY_ADDRESS"
_POLL_S = 2.0
_STORE_BYTES = 100 * MIB  # results are small: everything else lies in files


class RayBackend(Backend):
    """See `Backend`; a job is known by Ray's reference. Ray tries nothing again by itself.

    A Ray that this process is connected to already is used and left as it is. On a cluster a job
    asks for its CPUs, for `--mem`, and for one GPU where the settings name one.
    """

    def open(self) -> None:
        """Connects to the scheduler of the settings or of RAY_ADDRESS, or starts a local Ray."""
        import ray

        address = self.config.scheduler or os.environ.get(ADDRESS_VARIABLE)
        self.workers, self.threads = local_shape(self.config)
        self._options: dict[str, Any] = {"num_cpus": 1, "max_retries": 0}
        self._ray: Any = ray
        local = address is None and not ray.is_initialized()
        if not ray.is_initialized():
            self.stack.callback(ray.shutdown)
            self._start(address)
        if local:
            self.climbs = ()  # it limits nobody
        else:
            self._ask_of_cluster()
        self._events: Any = None
        if self.site.attempt.task.event_type is not None:
            from ray.util.queue import Queue

            self._events = Queue(actor_options={"num_cpus": 0})
            self.stack.callback(self._events.shutdown, force=True)
        self.stack.callback(self._cancel)

    def send(self, jobs: Sequence[Job]) -> None:
        remote = self._ray.remote(run_job).options(**self._options)
        for job in jobs:
            self.sent[remote.remote(job.task, job.entries, self._events)] = job

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        ready, _ = self._ray.wait(list(self.sent), num_returns=1, timeout=_POLL_S)
        if self._events is not None:  # a task's events arrived before its end
            for event in self._events.get_nowait_batch(self._events.qsize()):
                self.site.on_event(event)
        return [self._ended(self.sent.pop(reference), reference) for reference in ready]

    def _ended(self, job: Job, reference: Any) -> Ended:
        from ray import exceptions

        try:
            return Ended(job=job, how="reported", report=self._ray.get(reference))
        except (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError) as error:
            line = str(error).strip().splitlines()[0]
            return Ended(
                job=job, how="died", reason=f"its worker died ({line})", want="memory"
            )
        except exceptions.RayTaskError as error:
            cause = error.cause
        except exceptions.RayError as error:  # a node or its store was lost
            name, message = type(error).__name__, str(error)
            return Ended.by_error(job, name, message, error=ClusterError(message))
        return Ended.by_error(job, type(cause).__name__, str(cause), error=cause)

    def _cancel(self) -> None:
        """Ends what still runs."""
        for reference in self.sent:
            self._ray.cancel(reference, force=True)

    def _start(self, address: str | None) -> None:
        local = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        before = signal.getsignal(signal.SIGTERM)
        try:
            if address is None:
                self._ray.init(
                    address="local", num_cpus=self.workers, log_to_driver=False, **local
                )
                return
            with connecting(address):
                self._ray.init(address=address, log_to_driver=False)
        except SystemExit as end:  # by Ray's own handler, which takes the place of ours
            raise Stopped("SIGTERM", 128 + signal.SIGTERM) from end
        finally:
            if before is not None and signal.getsignal(signal.SIGTERM) is not before:
                signal.signal(signal.SIGTERM, before)

    def _ask_of_cluster(self) -> None:
        """What a job asks for, and how many of them the cluster holds at once."""
        config = self.config
        self.threads = config.threads or config.job_cpus or CPUS_PER_WORKER
        self._options["num_cpus"] = config.job_cpus or self.threads
        if config.memory is not None:
            self._options["memory"] = parse_bytes(config.memory)
        if (config.gres or "").startswith("gpu") or config.gpu is not None:
            self._options["num_gpus"] = 1
        cpus = int(self._ray.cluster_resources().get("CPU", 1))
        self.workers = config.workers or max(1, cpus // int(self._options["num_cpus"]))


def run_job(task: Task[Any, Any], entries: tuple[Any, ...], events: Any) -> Report[Any]:
    """Runs on the worker: the task, with its events put on the driver's queue."""
    return task(
        entries, on_event=events.put if events is not None else lambda event: None
    )
