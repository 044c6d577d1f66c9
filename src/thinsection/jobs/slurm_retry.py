"""Array tasks that died: each of their unfinished slides once more, alone, with more memory."""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from thinsection.errors import ClusterError
from thinsection.files.lock import LOCK_NAME
from thinsection.jobs.executor import MAX_ARRAY, chunked
from thinsection.jobs.request import JobRequest
from thinsection.jobs.slurm_job import SlurmJob, write_job
from thinsection.jobs.slurm_queue import TaskState
from thinsection.slide.cohort import SlideEntry

_MORE = 2  # times the memory of the task that died


def slides_to_retry(
    job: SlurmJob, ends: Mapping[int, TaskState], *, without: Collection[str] = ()
) -> list[SlideEntry]:
    """Unfinished slides of array tasks that died for the first time.

    Not those of a task that the user cancelled, nor of one that ended by its own error, which the
    next one would have too, nor a slide that ran out of time alone.

    Args:
        job: the array.
        ends: index that ended without a report -> what Slurm says of it.
        without: slides that another job has taken.
    """
    if job.alone:
        return []
    found: list[SlideEntry] = []
    for index, end in ends.items():
        chunk = job.chunks[index - 1]
        open_ones = [e for e in chunk if e.slide_id not in without and not job.task.done(e)]
        if open_ones and _worth_it(end, job, chunk):
            found += open_ones
    return found


def submit_alone(
    job: SlurmJob, entries: Sequence[SlideEntry], *, on_message: Callable[[str], None]
) -> SlurmJob:
    """Submits an array of one slide per task, in a smaller stream and with twice the memory.

    Where Slurm refuses so much memory, the same as before is asked for.

    Raises:
        ClusterError: it refuses that too.
    """
    chunks = chunked(entries, -(-len(entries) // MAX_ARRAY))
    try:
        again = _submit(job, chunks, memory_factor=_MORE)
    except ClusterError as error:
        on_message(f"{_MORE} times the memory is refused, so the same is asked for: {error}")
        again = _submit(job, chunks, memory_factor=1)
    on_message(
        f"slurm job {again.job_id}: slides whose array task died, each once more alone: "
        f"{len(entries)}"
    )
    return again


def _submit(
    job: SlurmJob, chunks: Sequence[Sequence[SlideEntry]], *, memory_factor: int
) -> SlurmJob:
    memory = memory_factor * job.request.memory_bytes
    request = JobRequest(
        request=replace(job.request, memory_bytes=memory),
        origins=(f"memory: {memory_factor} times that of job {job.job_id}, whose tasks died",),
    )
    task = job.task.smaller()
    again = write_job(chunks, task, task.config.executor, request=request, alone=True)
    try:
        again.submit()
    except ClusterError:
        shutil.rmtree(again.folder)  # nobody has seen it
        raise
    return again


def _worth_it(end: TaskState, job: SlurmJob, chunk: Sequence[SlideEntry]) -> bool:
    if not end.state:  # forgotten: a slide that was begun and not finished has left its lock
        return any((job.task.out / entry.slide_id / LOCK_NAME).exists() for entry in chunk)
    return end.died and (end.state != "TIMEOUT" or len(chunk) > 1)
