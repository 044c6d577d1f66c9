"""Job arrays of Slurm: the backend, and how it writes and submits an array."""

import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from thinsection.errors import ClusterError, StoreError, ThinsectionError
from thinsection.jobs.backend import (
    ARRAY_WORKERS,
    MAX_ARRAY,
    Attempt,
    Backend,
    BackendContext,
    OnMessage,
    Submitted,
    chunked,
)
from thinsection.jobs.execute import close_job, merge_attempts
from thinsection.jobs.executor import ExecutorConfig, Resource
from thinsection.jobs.request import fit_to_nodes, job_request
from thinsection.jobs.slurm_array import (
    FOLDER,
    Array,
    array_folders,
    load_array,
    node_list,
)
from thinsection.jobs.task import AnyTask
from thinsection.registry import Registry
from thinsection.types import Document, format_bytes, ignore_message, parse_bytes
from thinsection.usage.analysis import Request, format_walltime

GROWABLE_RESOURCES: tuple[Resource, ...] = ("memory", "gpu")
# factor on the memory of a dead job, if the settings list no larger size
_MORE = 2
# factor on the predicted time of an entry that is tried alone
_MORE_TIME = 2


class SlurmBackend(Backend):
    """See `Backend`: one array for an attempt, of at most `MAX_ARRAY` jobs; the key is the index.

    CPUs, memory and time come from `Task.request`, else from flags or defaults. A second attempt
    requests the same CPUs, the next memory size in the settings or twice as much, and the time that
    its entries need alone. After an interrupted wait the array stays queued; `thinsection slurm
    status` and `collect` find it.
    """

    carries_events: ClassVar[bool] = False
    growable_resources: tuple[Resource, ...] = GROWABLE_RESOURCES
    poll_s: ClassVar[float] = 5.0

    def open(self) -> None:
        """See `Backend.open`; if Slurm is missing, the first `sbatch` reports it."""
        self.workers = self.config.workers or ARRAY_WORKERS

    def room(self) -> int:
        """See `Backend.room`: 0 while there is an array."""
        return 0 if self.sent else MAX_ARRAY

    def send(self, jobs: Sequence[Attempt]) -> None:
        """Writes an array, submits it, and raises `Submitted` if the settings say not to wait."""
        entries: list[object] = []
        for job in jobs:
            entries += job.entries
        attempt = replace(jobs[0], entries=tuple(entries))
        context = replace(self.context, attempt=attempt)
        queue = self.config.queue
        self._array = write_array(
            context, len(jobs[0].entries), submit=queue != "script"
        )
        if queue != "wait":
            raise Submitted(self._array)
        self.sent = dict(enumerate(jobs, start=1))

    def poll(self, *, waiting: int) -> Sequence[Attempt]:
        ended = self._array.ended_attempts(among=self.sent)
        if not ended:
            threading.Event().wait(self.poll_s)
        for index in ended:
            del self.sent[index]
        return list(ended.values())


def write_array(
    context: BackendContext, chunk_size: int, *, submit: bool = True
) -> Array:
    """Writes the folder of an array and submits it.

    Comments in the script give the sources of the numbers. If Slurm refuses the memory of a second
    attempt, the amount of the first attempt is requested.

    Args:
        context: settings, entries, and the folder in which the array's folder is made.
        chunk_size: entries per array task.
        submit: False only writes the array.

    Raises:
        ClusterError: Slurm is missing, or refuses the array.
    """
    previous = context.attempt.previous_request
    request = _job_request(context.attempt, chunk_size, context.config)
    if previous is None:
        request = fit_to_nodes(request, node_list(), context.config)
    for line in request.lines:
        context.on_message(line)
    array = _save_array(context, chunk_size, request)
    if not submit:
        return array
    try:
        number = array.submit()
    except ClusterError as error:
        shutil.rmtree(array.folder)  # no other process has seen it
        if previous is None or request == previous:
            raise
        context.on_message(
            "Slurm refuses a job with more memory, so the next job requests the same as before: "
            f"{error}"
        )
        request = replace(previous, origins=("as before",))
        array = _save_array(context, chunk_size, request)
        number = array.submit()
    context.on_message(
        f"slurm job {number}: {len(array.chunks)} array tasks, logs in {array.folder}/logs"
    )
    return array


def submit_alone(context: BackendContext) -> None:
    """Submits each entry as a separate array task, in as many arrays as Slurm needs."""
    for entries in chunked(context.attempt.entries, MAX_ARRAY):
        attempt = replace(context.attempt, entries=entries)
        write_array(replace(context, attempt=attempt), 1)


def _save_array(context: BackendContext, chunk_size: int, request: Request) -> Array:
    """Writes an array under a new name, with its task adapted to the requested CPUs."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]  # milliseconds
    task = context.attempt.task.on_worker(threads=request.cpus, monitored=True)
    array = Array(
        context.folder / FOLDER / f"{stamp}-{secrets.token_hex(2)}",
        replace(context.attempt, task=task),
        chunk_size,
        request=request,
        config=context.config,
    )
    array.save()
    return array


def _job_request(attempt: Attempt, chunk_size: int, config: ExecutorConfig) -> Request:
    """Request of the task or the settings; more memory for a second attempt after a death."""
    step = attempt.resource_step
    current = config.at_step(step)
    chunks = chunked(attempt.entries, chunk_size)
    previous = attempt.previous_request
    if previous is None:
        return attempt.task.request(chunks, current) or job_request(current)
    listed = current.job_memory or current.worker_memory
    memory_bytes = previous.memory_bytes
    origin = "as before"
    if step.memory and listed:
        memory_bytes = parse_bytes(listed)
        origin = "next value of --job-memory, because tasks died"
    elif config.next_step(step, "memory") is None and not step.gpu:
        memory_bytes = _MORE * previous.memory_bytes
        origin = f"{_MORE} times the memory of the tasks that died"
    walltime_s, reason = _time_alone(attempt, chunks, current, previous)
    origins = (
        f"{format_bytes(memory_bytes)}: {origin}",
        f"{format_walltime(walltime_s)}: {reason}",
    )
    return replace(
        previous,
        memory_bytes=memory_bytes,
        walltime_s=walltime_s,
        origins=origins,
        warning="",
    )


def _time_alone(
    attempt: Attempt,
    chunks: Sequence[Sequence[object]],
    config: ExecutorConfig,
    previous: Request,
) -> tuple[int, str]:
    """Seconds for entries that are tried alone, and their source.

    The previous job had several entries, so its time is the upper limit. The prediction is doubled,
    because the job may have died because its predicted time was too short.
    """
    try:
        planned = attempt.task.request(chunks, config)
    except ThinsectionError:  # the previous job ran without a prediction, too
        planned = None
    if planned is None or planned.warning:
        return previous.walltime_s, "as before"
    seconds = _MORE_TIME * planned.walltime_s
    if seconds >= previous.walltime_s:
        return previous.walltime_s, "as before"
    return seconds, f"{_MORE_TIME} times what these entries need alone"


def array_status(array: Array) -> tuple[Counter[str], Counter[str]]:
    """(Array tasks by state: DONE, LOST, or Slurm's state; entries by status, or 'missing')."""
    task = array.attempt.task
    entries: Counter[str] = Counter()
    for index, chunk in enumerate(array.chunks, start=1):
        reported: list[object] = []
        for report in array.reports(index):
            reported += report.results
        for entry, reported_result in zip_longest(chunk, reported):
            # a later array may have finished the entry
            result = task.finished(entry) or reported_result
            status = getattr(result, "status", "done") if result else "missing"
            entries[status] += 1
    return Counter(array.states().values()), entries


@dataclass(kw_only=True)
class Collected:
    """All arrays of one kind in an output folder, merged; the newest result of an entry is used.

    Attributes:
        task: task of the newest array.
        entries: entries of all arrays, each once, by name.
        results: results of finished entries, by name.
        waiting: array tasks that are queued or running.
        stage_seconds: seconds by stage, summed over array tasks.
        facts: facts about the models that were used.
    """

    task: AnyTask
    entries: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    waiting: int = 0
    stage_seconds: Counter[str] = field(default_factory=Counter)
    facts: Document = field(default_factory=dict)

    def add(self, array: Array, *, retry: bool, on_message: OnMessage) -> list[Attempt]:
        """Adds the results of an older array, for entries that no newer array has.

        Returns:
            The next attempts; none if `retry` is False.
        """
        name = self.task.name
        newer = set(self.entries)

        def is_in_newer_array(entry: object) -> bool:
            return name(entry) in newer

        for entry in array.attempt.entries:
            self.entries.setdefault(name(entry), entry)
        for state in array.states().values():
            self.waiting += state not in ("DONE", "LOST", "WRITTEN")

        attempts: list[Attempt] = []
        for job in array.ended_attempts().values():
            is_final = job.end == "died" and not retry
            closed, _, next_attempts = close_job(
                replace(job, end="fatal") if is_final else job,
                array.config,
                GROWABLE_RESOURCES if retry else (),
                on_message=on_message,
                is_superseded=is_in_newer_array,
            )
            report = closed.report
            for entry, result in zip(closed.entries, report.results, strict=True):
                if not is_in_newer_array(entry):
                    self.results[name(entry)] = result
            self.stage_seconds.update(report.stage_seconds)
            self.facts = {**report.facts, **self.facts}
            attempts += next_attempts
        return merge_attempts(attempts)


def collect(
    out: Path,
    kinds: Registry[type[AnyTask]],
    *,
    retry: bool = True,
    on_message: OnMessage = ignore_message,
) -> list[Collected]:
    """Merges the reports of all arrays below a folder, for each kind of task.

    An array task that ended without a report is recorded entry by entry. The exception are tasks
    that died for the first time or can get more memory: their entries are submitted once more,
    each alone (see `execute.py`).

    Args:
        out: an output folder.
        kinds: the kinds of task.
        retry: False submits nothing, and records dead tasks as lost.
        on_message: called with lines of text for the user.

    Raises:
        StoreError: the folder has no array.
    """
    folders = array_folders(out)
    if not folders:
        raise StoreError(
            f"out must contain an array of 'thinsection slurm submit', got none in {str(out)!r}"
        )
    collected_by_kind: dict[str, Collected] = {}
    contexts: list[BackendContext] = []
    for folder in reversed(folders):
        array = load_array(folder, kinds)
        task = array.attempt.task
        collected = collected_by_kind.setdefault(task.kind, Collected(task=task))
        for attempt in collected.add(array, retry=retry, on_message=on_message):
            context = BackendContext(
                array.config, attempt, folder.parents[1], on_message=on_message
            )
            contexts.append(context)
    for context in contexts:
        submit_alone(context)
        num_entries = len(context.attempt.entries)
        collected_by_kind[context.attempt.task.kind].waiting += num_entries
    return list(collected_by_kind.values())
