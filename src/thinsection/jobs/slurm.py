"""Job arrays of Slurm: the backend, and how an array is written and submitted."""

import secrets
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import ClassVar

from thinsection.errors import ClusterError
from thinsection.jobs.backend import Backend, Ended, Job, Site, Try
from thinsection.jobs.chunks import ARRAY_WORKERS, MAX_ARRAY, chunked
from thinsection.jobs.executor import ExecutorConfig, Want
from thinsection.jobs.request import JobRequest, job_request
from thinsection.jobs.slurm_array import FOLDER, Array
from thinsection.types import format_bytes, parse_bytes

CLIMBS: tuple[Want, ...] = ("memory", "gpu")
# times the memory of what died, where the settings list no more
_MORE = 2


class Submitted(Exception):
    """The work was handed to Slurm, or written for it: `array`; and nobody waits for it here."""

    def __init__(self, array: Array) -> None:
        super().__init__(str(array.folder))
        self.array = array


class SlurmBackend(Backend):
    """See `Backend`: an array for all jobs of a try, at most `MAX_ARRAY`; a job is its index.

    CPUs, memory and time are those of `Task.request`, else of the flags, or defaults; a second try
    asks for what the first one had, with the next memory of the settings or twice as much. An
    interrupted wait leaves the array queued; `thinsection slurm status` and `collect` find it.
    """

    carries_events: ClassVar[bool] = False
    climbs: tuple[Want, ...] = CLIMBS
    poll_s: ClassVar[float] = 5.0

    def open(self) -> None:
        """See `Backend.open`: Slurm is there, or the first `sbatch` says so."""
        self.workers = self.config.workers or ARRAY_WORKERS

    def room(self) -> int:
        """See `Backend.room`: nothing while an array is there."""
        return 0 if self.sent else MAX_ARRAY

    def send(self, jobs: Sequence[Job]) -> None:
        """Writes an array, submits it, and raises `Submitted` where nobody is to wait for it."""
        entries: list[object] = []
        for job in jobs:
            entries += job.entries
        site = _site_of_entries(self.site, entries)
        queue = self.config.queue
        self._array = write_array(site, len(jobs[0].entries), submit=queue != "script")
        if queue != "wait":
            raise Submitted(self._array)
        self.sent = dict(enumerate(jobs, start=1))

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        ended = self._array.ended(among=self.sent)
        if not ended:
            threading.Event().wait(self.poll_s)
        return [replace(end, job=self.sent.pop(index)) for index, end in ended.items()]


def write_array(site: Site, chunk_size: int, *, submit: bool = True) -> Array:
    """Writes the folder of an array and submits it.

    Lines of the script say where the numbers come from. Where Slurm refuses the memory of a second
    try, the same as before is asked for.

    Args:
        site: settings, entries, and the folder that gets the array's.
        chunk_size: entries of each array task.
        submit: False only writes it.

    Raises:
        ClusterError: there is no Slurm, or it refuses.
    """
    job = _job_request(site.attempt, chunk_size, site.config)
    for line in job.lines():
        site.on_message(line)
    array = _save_array(site, chunk_size, job)
    if not submit:
        return array
    try:
        number = array.submit()
    except ClusterError as error:
        shutil.rmtree(array.folder)  # nobody has seen it
        before = site.attempt.before
        if before is None or job.request == before:
            raise
        site.on_message(f"more memory is refused, so the same is asked for: {error}")
        same = JobRequest(request=before, origins=("as before",))
        array = _save_array(site, chunk_size, same)
        number = array.submit()
    site.on_message(
        f"slurm job {number}: {len(array.chunks)} array tasks, logs in {array.folder}/logs"
    )
    return array


def submit_alone(site: Site) -> None:
    """Submits each entry as an array task of its own, in as many arrays as Slurm needs."""
    for entries in chunked(site.attempt.entries, MAX_ARRAY):
        write_array(_site_of_entries(site, entries), 1)


def _site_of_entries(site: Site, entries: Sequence[object]) -> Site:
    return replace(site, attempt=replace(site.attempt, entries=tuple(entries)))


def _save_array(site: Site, chunk_size: int, job: JobRequest) -> Array:
    """Writes an array under a new name, its task fitted to the CPUs of the request."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]  # to the millisecond
    task = site.attempt.task.on_worker(threads=job.request.cpus, monitored=True)
    array = Array(
        site.folder / FOLDER / f"{stamp}-{secrets.token_hex(2)}",
        replace(site.attempt, task=task),
        chunk_size,
        request=job.request,
        config=site.config,
    )
    array.save(job.origins)
    return array


def _job_request(attempt: Try, chunk_size: int, config: ExecutorConfig) -> JobRequest:
    """The request of the task or the settings; on a second try of what died, with more memory."""
    current = config.at_rung(attempt.rung)
    before = attempt.before
    if before is None:
        chunks = chunked(attempt.entries, chunk_size)
        return attempt.task.request(chunks, current) or job_request(current)
    listed = current.job_memory or current.worker_memory
    memory_bytes = before.memory_bytes
    origin = "as before"
    if attempt.rung.memory and listed:
        memory_bytes = parse_bytes(listed)
        origin = "the next of --job-memory, because tasks died"
    elif config.next_rung(attempt.rung, "memory") is None and not attempt.rung.gpu:
        memory_bytes = _MORE * before.memory_bytes
        origin = f"{_MORE} times that of what died"
    request = replace(before, memory_bytes=memory_bytes)
    return JobRequest(
        request=request, origins=(f"{format_bytes(memory_bytes)}: {origin}",)
    )
