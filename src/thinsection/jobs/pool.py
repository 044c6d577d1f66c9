"""Worker processes on this node, each with its own pipe; a death costs only that worker's job."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

import psutil
import threadpoolctl

from thinsection import errors
from thinsection.jobs.backend import Attempt, Backend
from thinsection.jobs.executor import local_memory, local_shape
from thinsection.jobs.task import AnyReport, merge_reports
from thinsection.machine import search_cycles_rarely
from thinsection.types import format_bytes

_POLL_S = 0.5
# seconds for a worker to finish its slide; Docker gives the whole process ten
_GRACE_S = 5.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(kw_only=True, eq=False)
class _Worker:
    """Worker process, the reports on its job so far, and why this process ended it."""

    process: ForkServerProcess
    pipe: Connection
    reports: list[AnyReport] = field(default_factory=list)
    ended_for: str = ""


class PoolBackend(Backend):
    """See `Backend`; the key of a job is its worker.

    Processes come from a fork server, so that they inherit neither threads nor locks. As with any
    process pool in Python, a script must guard its start by `if __name__ == "__main__"`.
    """

    monitored: bool = False

    def open(self) -> None:
        """See `Backend.open`; processes start with their first job."""
        self.workers, self.threads = local_shape(self.config)
        self._memory_bytes = local_memory(self.config, self.workers)
        self._context = multiprocessing.get_context("forkserver")
        # the fork server imports the task's packages once for all workers
        self._context.set_forkserver_preload(
            [type(self.context.attempt.task).__module__]
        )
        self._pool: list[_Worker] = []
        self._memory_checked_s = time.monotonic()
        self.stack.callback(self._end_workers)

    def send(self, jobs: Sequence[Attempt]) -> None:
        for job in jobs:
            idle = [worker for worker in self._pool if worker not in self.sent]
            worker = idle[0] if idle else self._start_worker()
            worker.reports = []
            self.sent[worker] = job
            worker.pipe.send((job.task, job.entries))

    def poll(self, *, waiting: int) -> Sequence[Attempt]:
        self._end_bloated_workers()
        worker_of_pipe = {worker.pipe: worker for worker in self.sent}
        ended = []
        for pipe in wait(list(worker_of_pipe), timeout=_POLL_S):
            end = self._read_message(worker_of_pipe[pipe])
            if end is not None:
                ended.append(end)
        return ended

    def _end_workers(self) -> None:
        """Ends all processes; busy ones are asked to stop first, then killed."""
        for worker in self._pool:
            worker.pipe.close()
            if worker in self.sent:
                worker.process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for worker in self._pool:
            if self.sent:
                worker.process.join(max(0.0, deadline - time.monotonic()))
            else:
                worker.process.join()
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()

    def _start_worker(self) -> _Worker:
        """Starts a process with the lowest free number, which also decides its GPU."""
        taken = {worker.process.name for worker in self._pool}
        number = next(number for number in count() if str(number) not in taken)
        gpus = self.config.gpu_ids
        gpu = gpus[number % len(gpus)] if gpus else None
        own_pipe, worker_pipe = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(worker_pipe, self.threads, gpu), name=str(number)
        )
        process.start()
        worker_pipe.close()
        worker = _Worker(process=process, pipe=own_pipe)
        self._pool.append(worker)
        return worker

    def _read_message(self, worker: _Worker) -> Attempt | None:
        """Reads one message from a busy worker; returns the job's end if the message is that."""
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, OSError):
            return self._bury(worker)
        if kind == "event":
            self.context.on_event(content)
            return None
        if kind == "report":
            worker.reports.append(content)
            return None
        job = self.sent.pop(worker)
        report = merge_reports(worker.reports)
        if kind == "end":
            return job.ended("reported", report=report)
        name, message = content
        error_type = getattr(errors, name, None)
        # an error of this package is passed on as the worker raised it
        error = error_type(message) if error_type is not None else None
        return job.ended_by_error(name, message, error=error, report=report)

    def _bury(self, worker: _Worker) -> Attempt:
        """End of the job of a dead worker."""
        worker.pipe.close()
        worker.process.join()
        self._pool.remove(worker)
        code = worker.process.exitcode or 0
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return self.sent.pop(worker).ended_by_death(
            f" ({worker.ended_for or cause})",
            report=merge_reports(worker.reports),
            lacking="memory" if code == -signal.SIGKILL else None,
        )

    def _end_bloated_workers(self) -> None:
        """Ends workers that exceed their memory, before the machine does."""
        if time.monotonic() - self._memory_checked_s < _POLL_S:
            return
        self._memory_checked_s = time.monotonic()
        for worker in self.sent:
            try:
                held_bytes = psutil.Process(worker.process.pid).memory_info().rss
            except psutil.Error:  # the worker ended by itself
                continue
            if held_bytes > self._memory_bytes:
                allowed = format_bytes(self._memory_bytes)
                worker.ended_for = f"it used more memory than its {allowed}"
                worker.process.kill()


def _serve(pipe: Connection, threads: int, gpu: str | None) -> None:
    """Runs the worker: receives jobs; sends events, reports per stream or entry, and each end."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    search_cycles_rarely()
    # the driver ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # without the driver the worker stops; results so far are in the files
    with suppress(errors.Stopped, EOFError, BrokenPipeError), errors.stopping():
        _serve_jobs(pipe, threads)


def _serve_jobs(pipe: Connection, threads: int) -> None:
    lock = threading.Lock()  # events come from any thread

    def send(kind: str, content: object = None) -> None:
        with lock:
            pipe.send((kind, content))

    while True:
        task, entries = pipe.recv()  # also imports the packages of the task
        threadpoolctl.threadpool_limits(threads)
        try:
            for part in task.parts(entries):
                send("report", task(part, on_event=lambda event: send("event", event)))
        except Exception as error:  # noqa: BLE001 - the worker's boundary: raised by the driver
            send("error", (type(error).__name__, str(error)))
        else:
            send("end")
