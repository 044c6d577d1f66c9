"""Job arrays of Slurm: the backend, and what `thinsection slurm` does with arrays of any kind."""

import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from thinsection.errors import ClusterError, StoreError, require
from thinsection.jobs.contract import Backend, Ended, Job, Site, Task, Try
from thinsection.jobs.execute import settle, together
from thinsection.jobs.executor import (
    ARRAY_WORKERS,
    MAX_ARRAY,
    ExecutorConfig,
    Want,
    chunked,
)
from thinsection.jobs.request import JobRequest, job_request
from thinsection.jobs.slurm_array import FOLDER, Array, array_folders, load_array
from thinsection.registry import Registry
from thinsection.types import format_bytes, parse_bytes

CLIMBS: tuple[Want, ...] = ("memory", "gpu")
_MORE = 2  # times the memory of what died, where the settings list no more


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
        entries = tuple(entry for job in jobs for entry in job.entries)
        site = replace(self.site, attempt=replace(self.site.attempt, entries=entries))
        queue = self.config.queue
        self._array = write_array(site, len(jobs[0].entries), submit=queue != "script")
        if queue != "wait":
            raise Submitted(self._array)
        self.sent = dict(enumerate(jobs, start=1))

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        found = self._array.ended(among=self.sent)
        if not found:
            threading.Event().wait(self.poll_s)
        return [
            replace(ended, job=self.sent.pop(index)) for index, ended in found.items()
        ]


def write_array(site: Site, chunk_size: int, *, submit: bool = True) -> Array:
    """Writes the folder of an array and submits it.

    Its task is fitted to the CPUs, and lines say where the numbers come from. Where Slurm refuses
    the memory of a second try, the same as before is asked for. Raises ClusterError: there is no
    Slurm, or it refuses.
    """
    attempt, on_message = site.attempt, site.on_message

    def write(job: JobRequest) -> Array:
        task = attempt.task.on_worker(threads=job.request.cpus, monitored=True)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]  # to the millisecond
        folder = site.folder / FOLDER / f"{stamp}-{secrets.token_hex(2)}"
        fitted = replace(attempt, task=task)
        array = Array(
            folder, fitted, chunk_size, request=job.request, config=site.config
        )
        array.save(job.origins)
        return array

    job = _request(attempt, chunk_size, site.config)
    for line in job.lines():
        on_message(line)
    array = write(job)
    if not submit:
        return array
    try:
        number = array.submit()
    except ClusterError as error:
        shutil.rmtree(array.folder)  # nobody has seen it
        if attempt.before is None or job.request == attempt.before:
            raise
        on_message(f"more memory is refused, so the same is asked for: {error}")
        array = write(JobRequest(request=attempt.before, origins=("as before",)))
        number = array.submit()
    on_message(
        f"slurm job {number}: {len(array.chunks)} array tasks, logs in {array.folder}/logs"
    )
    return array


def _request(attempt: Try, chunk_size: int, config: ExecutorConfig) -> JobRequest:
    """What the task or the settings ask for; on a second try what died had, with more memory."""
    here, before = config.at(attempt.rung), attempt.before
    if before is None:
        chunks = chunked(attempt.entries, chunk_size)
        return attempt.task.request(chunks, here) or job_request(here)
    listed = here.job_memory or here.worker_memory
    if attempt.rung.memory and listed:
        memory, why = (
            parse_bytes(listed),
            "the next of --job-memory, because tasks died",
        )
    elif config.above(attempt.rung, "memory") is None and not attempt.rung.gpu:
        memory, why = _MORE * before.memory_bytes, f"{_MORE} times that of what died"
    else:
        memory, why = before.memory_bytes, "as before"
    request = replace(before, memory_bytes=memory)
    return JobRequest(request=request, origins=(f"{format_bytes(memory)}: {why}",))


def array_status(array: Array) -> tuple[Counter[str], Counter[str]]:
    """(Array tasks by state: DONE, LOST, or Slurm's word; entries by status, or 'missing')."""
    entries: Counter[str] = Counter()
    for index, chunk in enumerate(array.chunks, start=1):
        told = [r for report in array.reports(index) for r in report.results]
        for entry, before in zip_longest(chunk, told):
            result = (
                array.attempt.task.finished(entry) or before
            )  # a later try may have done it
            entries[getattr(result, "status", "done") if result else "missing"] += 1
    return Counter(array.states().values()), entries


@dataclass(kw_only=True)
class Collected:
    """All arrays of one kind in an output folder, merged; the newest word on an entry counts."""

    task: Task[Any, Any]  # of the newest array
    entries: dict[str, Any] = field(
        default_factory=dict
    )  # of every array, once, by name
    results: dict[str, Any] = field(
        default_factory=dict
    )  # of those that ended, by name
    waiting: int = 0  # array tasks that still wait or run
    stage_seconds: Counter[str] = field(default_factory=Counter)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, array: Array, site: Site, *, retry: bool) -> list[Try]:
        """Takes what an older array says of entries that no newer one has; what to try again."""
        newer, name = set(self.entries), self.task.name
        self.entries |= {
            name(e): e for e in site.attempt.entries if name(e) not in newer
        }
        self.waiting += sum(
            s not in ("DONE", "LOST", "WRITTEN") for s in array.states().values()
        )
        again: list[Try] = []
        for ended in array.ended().values():
            final = (
                ended if retry or ended.how != "died" else replace(ended, how="over")
            )
            climbs = CLIMBS if retry else ()
            settled = settle(
                final, site, climbs, skip=lambda entry: name(entry) in newer
            )
            ends = zip(settled.entries, settled.report.results, strict=True)
            self.results |= {name(e): r for e, r in ends if name(e) not in newer}
            self.stage_seconds.update(settled.report.stage_seconds)
            self.facts = {**settled.report.facts, **self.facts}
            again += settled.again
        return together(again)


def collect(
    out: Path,
    kinds: Registry[Any],
    *,
    retry: bool = True,
    on_message: Callable[[str], None] = lambda text: None,
) -> list[Collected]:
    """Merges the reports of all arrays below a folder, for each kind of task.

    Array tasks that ended without a report are recorded entry by entry, but for what died for the
    first time or can climb: that is submitted once more, each entry alone (see `settle`), unless
    `retry` is False. Raises StoreError: no array was ever written there.
    """
    folders = array_folders(out)
    rule, got = (
        "out must hold an array of 'thinsection slurm submit'",
        f"none in {str(out)!r}",
    )
    require(folders, rule, got, error=StoreError)
    merged: dict[str, Collected] = {}
    again: list[Site] = []
    for folder in reversed(folders):
        array = load_array(folder, kinds)
        site = Site(
            array.config, array.attempt, folder.parents[1], on_message=on_message
        )
        task = array.attempt.task
        mine = merged.setdefault(task.kind, Collected(task=task))
        again += [replace(site, attempt=t) for t in mine.add(array, site, retry=retry)]
    for site in again:
        for entries in chunked(site.attempt.entries, MAX_ARRAY):
            write_array(
                replace(site, attempt=replace(site.attempt, entries=entries)), 1
            )
            merged[site.attempt.task.kind].waiting += len(entries)
    return list(merged.values())
