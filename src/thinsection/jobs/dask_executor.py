"""Chunks of work on Dask workers, with what a cluster does to them: deaths, retries, losses."""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import ClusterError, ThinsectionError
from thinsection.files.atomic import write_text
from thinsection.jobs.dask_cluster import DaskSession, open_session, worker_shape
from thinsection.jobs.executor import LOGS, ExecutorConfig, make_chunks
from thinsection.jobs.task import Entry, Report, Task

LOG_NAME = "dask-workers.log"
_POLL_S = 2.0
_RESTART_POLL_S = 0.2  # while no worker lives: the nanny starts a new one in about a second
_NO_WORKERS_S = 300.0  # a cluster without a worker for so long is lost

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A chunk on its way to the worker of that address.

    `alone`: one slide whose worker died before, in less memory.
    """

    entries: tuple[Any, ...]
    task: Task[Any, Any]
    attempt: int = 0
    alone: bool = False
    worker: str = ""


class DaskExecutor:
    """See `Executor`. One task runs on a worker at a time.

    A chunk whose worker dies is taken apart: each of its slides is tried alone, in less memory
    (slides that were done are not done again). A slide whose worker dies then too is recorded as
    failed in stage 'worker'. Any other error of the cluster sends the chunk again, `retries` times.

    Args:
        config: of the executor.
        log_folder: where the workers' logs are written.
        on_message: lines for the person who waits: the dashboard's address, deaths.
    """

    def __init__(
        self, config: ExecutorConfig, *, log_folder: Path, on_message: Callable[[str], None]
    ) -> None:
        self._config, self._log_folder, self._say = config, log_folder, on_message

    def execute(
        self,
        chunks: Sequence[Sequence[Any]],
        task: Task[Any, Any],
        *,
        on_report: Callable[[Report[Any]], None],
        on_event: Callable[[Any], None],
    ) -> None:
        """See `Executor.execute`."""
        with open_session(self._config, log_folder=self._log_folder) as session:
            if session.client.dashboard_link:
                self._say(f"dask dashboard: {session.client.dashboard_link}")
            topic = f"thinsection-{secrets.token_hex(4)}"
            session.client.subscribe_topic(
                topic, lambda e: on_event(from_mapping(cast(type, task.event_type), e[1]["event"]))
            )
            task = task.on_worker(threads=session.threads, monitored=not session.local)
            jobs = deque(_Job(entries=tuple(chunk), task=task) for chunk in chunks)
            try:
                self._work(session, jobs, topic, on_report)
            finally:
                session.client.unsubscribe_topic(topic)
                self._save_logs(session)

    def _work(
        self,
        session: DaskSession,
        jobs: deque[_Job],
        topic: str,
        on_report: Callable[[Report[Any]], None],
    ) -> None:
        running: dict[Any, _Job] = {}
        seen = time.monotonic()  # when there was a worker
        while jobs or running:
            session.resize(len(jobs) + len(running))
            live = session.addresses()
            self._send(session, jobs, running, live=live, topic=topic)
            ended = _wait(list(running))
            if ended or live:
                seen = time.monotonic()
            elif time.monotonic() - seen > _NO_WORKERS_S:
                raise ClusterError(
                    f"the cluster must have a worker, got none for {_NO_WORKERS_S:.0f} s; what is "
                    "done stays: run the same command again"
                )
            if not ended and running:
                ended = self._stranded(session, running, before=live)
            for future in ended:
                job = running.pop(future)
                jobs.extend(self._settle(future, job, on_report))
                future.release()

    @staticmethod
    def _send(
        session: DaskSession,
        jobs: deque[_Job],
        running: dict[Any, _Job],
        *,
        live: set[str],
        topic: str,
    ) -> None:
        """Gives each idle worker one job, by address.

        Left to itself the scheduler may queue two on one worker, and the slides that only waited
        there would be blamed for its death.
        """
        idle = sorted(live - {job.worker for job in running.values()})
        while jobs and idle and len(running) < session.workers:
            job = replace(jobs.popleft(), worker=idle.pop())
            future = session.client.submit(
                *(run_chunk, job.task, job.entries, topic),
                **{"workers": [job.worker], "pure": False, "retries": 0},
            )
            running[future] = job

    @staticmethod
    def _stranded(
        session: DaskSession, running: Mapping[Any, _Job], *, before: set[str]
    ) -> list[Any]:
        """Tasks whose worker left without dying at work (scaled down, out of time), cancelled."""
        gone = {job.worker for job in running.values()} - before - session.addresses()
        found = [f for f, job in running.items() if job.worker in gone and f.status == "pending"]
        if found:
            session.client.cancel(found)
        return found

    def _settle(
        self, future: Any, job: _Job, on_report: Callable[[Report[Any]], None]
    ) -> list[_Job]:
        """Reports what ended; returns what must be tried again."""
        from distributed.scheduler import KilledWorker

        if future.status == "finished":
            on_report(future.result())
            return []
        error = future.exception() if future.status == "error" else ClusterError("task was lost")
        if isinstance(error, ThinsectionError) and not isinstance(error, ClusterError):
            raise error  # settings, weights, disk: it would be the same for every chunk
        if isinstance(error, KilledWorker):
            reason = "its worker died; see " + str(self._log_folder / LOG_NAME)
            if job.alone:
                on_report(self._lost(job, f"{reason}, twice, the second time alone"))
                return []
            self._say(f"a worker died with {len(job.entries)} slides: each is tried alone")
            task = job.task.smaller()
            return [_Job(entries=(entry,), task=task, alone=True) for entry in job.entries]
        if job.attempt < self._config.retries:
            self._say(f"a task failed ({type(error).__name__}: {error}): sent again")
            return [replace(job, attempt=job.attempt + 1)]
        reason = f"the cluster failed {job.attempt + 1} times: {type(error).__name__}: {error}"
        on_report(self._lost(job, reason))
        return []

    @staticmethod
    def _lost(job: _Job, reason: str) -> Report[Any]:
        return Report(results=tuple(job.task.lost(entry, reason) for entry in job.entries))

    def _save_logs(self, session: DaskSession) -> None:
        """Brings the workers' and their nannies' logs home."""
        lines = []
        for nanny in (True, False):
            try:
                logs = session.client.get_worker_logs(nanny=nanny)
            except (OSError, ValueError, TimeoutError) as error:  # workers that are gone
                _log.warning("worker logs could not be fetched: %s", error)
                continue
            for worker, records in logs.items():
                lines += [f"{worker} {level} {text}" for level, text in reversed(records)]
        write_text(self._log_folder / LOG_NAME, "\n".join(lines) + "\n")


def dask_work(
    entries: Sequence[Entry],
    config: ExecutorConfig,
    *,
    out: Path,
    on_message: Callable[[str], None],
) -> tuple[DaskExecutor, list[tuple[Entry, ...]]]:
    """The executor with its logs in an output folder, and the entries as its tasks take them."""
    executor = DaskExecutor(config, log_folder=out / LOGS, on_message=on_message)
    return executor, make_chunks(entries, config, workers=worker_shape(config)[0])


def run_chunk(task: Task[Any, Any], entries: tuple[Any, ...], topic: str) -> Report[Any]:
    """Runs on the worker: the task, with its events sent to the client."""
    from distributed import get_worker

    worker = get_worker()
    return task(
        entries, on_event=lambda event: worker.log_event(topic, {"event": as_mapping(event)})
    )


def _wait(futures: Sequence[Any]) -> list[Any]:
    """The futures that ended, after waiting for one for a while."""
    from distributed import wait

    if not futures:
        threading.Event().wait(_RESTART_POLL_S)
        return []
    try:
        return list(wait(futures, timeout=_POLL_S, return_when="FIRST_COMPLETED").done)
    except TimeoutError:
        return []
