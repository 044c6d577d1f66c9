"""Worker processes on this node, each with a pipe of its own: a death costs only its own job."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import threadpoolctl

from thinsection import errors
from thinsection.jobs.contract import Backend, Ended, Job, Report, merged
from thinsection.jobs.executor import Want, local_memory, local_shape
from thinsection.types import format_bytes

_POLL_S = 0.5
_GRACE_S = (
    5.0  # for a worker to let go of its slide; Docker gives the whole process ten
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(kw_only=True, eq=False)
class _Worker:
    """A process, what it has said of its job, and why this side has ended it."""

    process: Any
    pipe: Connection
    reports: list[Report[Any]] = field(default_factory=list)
    ended_for: str = ""


class PoolBackend(Backend):
    """See `Backend`; a job is known by its worker.

    Processes come from a fork server, so that they inherit neither threads nor locks; as with any
    pool of Python, a script that uses it guards its own start by `if __name__ == "__main__"`.
    """

    monitored: bool = False

    def open(self) -> None:
        """See `Backend.open`: processes start with their first job."""
        self.workers, self.threads = local_shape(self.config)
        self._memory = local_memory(self.config, self.workers)
        self._context = multiprocessing.get_context("forkserver")
        # the server imports what the task needs once, not every worker
        self._context.set_forkserver_preload([type(self.site.attempt.task).__module__])
        self._pool: list[_Worker] = []
        self._looked = time.monotonic()
        self.stack.callback(self._end)

    def send(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            idle = (
                next((w for w in self._pool if w not in self.sent), None)
                or self._start()
            )
            idle.reports = []
            self.sent[idle] = job
            idle.pipe.send((job.task, job.entries))

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        self._look_at_memory()
        busy = {worker.pipe: worker for worker in self.sent}
        found = [self._read(busy[pipe]) for pipe in wait(list(busy), timeout=_POLL_S)]
        return [ended for ended in found if ended is not None]

    def _end(self) -> None:
        """Ends all processes; those at work are asked to let go, then killed."""
        for worker in self._pool:
            worker.pipe.close()
            if worker in self.sent:
                worker.process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for worker in self._pool:
            worker.process.join(
                max(0.0, deadline - time.monotonic()) if self.sent else None
            )
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        taken = {worker.process.name for worker in self._pool}
        name = next(n for n in map(str, range(len(taken) + 1)) if n not in taken)
        gpus = self.config.gpu_ids
        gpu = gpus[int(name) % len(gpus)] if gpus else None
        process = self._context.Process(
            target=_serve, args=(theirs, self.threads, gpu), name=name
        )
        process.start()
        theirs.close()
        self._pool.append(_Worker(process=process, pipe=ours))
        return self._pool[-1]

    def _read(self, worker: _Worker) -> Ended | None:
        """Takes one message of a worker that has a job."""
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, OSError):
            return self._bury(worker)
        if take := {"event": self.site.on_event, "report": worker.reports.append}.get(
            kind
        ):
            take(content)
            return None
        job, report = self.sent.pop(worker), merged(worker.reports)
        if kind == "end":
            return Ended(job=job, how="reported", report=report)
        name, message = content
        ours = getattr(errors, name, None)  # as the worker raised it
        error = ours and ours(message)
        return Ended.by_error(job, name, message, error=error, report=report)

    def _bury(self, worker: _Worker) -> Ended:
        worker.pipe.close()
        worker.process.join()
        self._pool.remove(worker)
        code = worker.process.exitcode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        report, reason = (
            merged(worker.reports),
            f"its worker died ({worker.ended_for or how})",
        )
        want: Want | None = "memory" if code == -signal.SIGKILL else None
        return Ended(
            job=self.sent.pop(worker),
            how="died",
            report=report,
            reason=reason,
            want=want,
        )

    def _look_at_memory(self) -> None:
        """Ends workers that hold more than they may, before the machine does."""
        if time.monotonic() - self._looked < _POLL_S:
            return
        self._looked = time.monotonic()
        for worker in self.sent:
            try:
                held = psutil.Process(worker.process.pid).memory_info().rss
            except psutil.Error:  # it ended by itself
                continue
            if held > self._memory:
                worker.ended_for = f"it held more than its {format_bytes(self._memory)}"
                worker.process.kill()


def _serve(pipe: Connection, threads: int, gpu: str | None) -> None:
    """The worker: jobs in; events, a report per stream or entry, and the end of each job out."""
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its workers
    # without the driver there is nobody to work for; what is done lies in the files
    with suppress(errors.Stopped, EOFError, BrokenPipeError), errors.stopping():
        _serve_jobs(pipe, threads)


def _serve_jobs(pipe: Connection, threads: int) -> None:
    lock = threading.Lock()  # events come from any thread

    def send(kind: str, content: Any = None) -> None:
        with lock:
            pipe.send((kind, content))

    while True:
        task, entries = pipe.recv()  # imports what the task needs
        threadpoolctl.threadpool_limits(threads)
        try:
            for part in task.parts(entries):
                send("report", task(part, on_event=lambda event: send("event", event)))
        except Exception as error:  # noqa: BLE001 - the worker's boundary: raised by the driver
            send("error", (type(error).__name__, str(error)))
        else:
            send("end")
