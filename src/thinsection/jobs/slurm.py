"""Job arrays of Slurm: the backend, and what `thinsection slurm` does with arrays of any kind."""

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from thinsection.errors import ClusterError, StoreError
from thinsection.files.atomic import write_text
from thinsection.jobs.backend import Backend, Ended, Job, Site, Try
from thinsection.jobs.execute import Settled, settle, together
from thinsection.jobs.executor import ARRAY_WORKERS, MAX_ARRAY, ExecutorConfig, chunked
from thinsection.jobs.request import JobRequest, job_request
from thinsection.jobs.slurm_array import Array, Kinds, array_folders, load_array, new_array_folder
from thinsection.jobs.slurm_script import batch_script
from thinsection.jobs.task import Task, Want
from thinsection.units import format_bytes, parse_bytes

CLIMBS: tuple[Want, ...] = ("memory", "gpu")
_POLL_S = 5.0
_MORE = 2  # times the memory of what died, where the settings list no more


class Submitted(Exception):
    """The work was handed to Slurm, or written for it, and nobody waits for it here.

    Attributes:
        array: what was submitted or written.
    """

    def __init__(self, array: Array) -> None:
        super().__init__(str(array.folder))
        self.array = array


class SlurmBackend(Backend):
    """See `Backend`: an array for all jobs of a try, at most `MAX_ARRAY` at once.

    CPUs, memory and time are those of `Task.request`, else of the flags, or defaults; a second try
    asks for what the first one had, with the next memory of the settings or twice as much. An
    interrupted wait leaves the array in the queue; `thinsection slurm status` and `collect` find
    it.
    """

    carries_events: ClassVar[bool] = False
    climbs: tuple[Want, ...] = CLIMBS
    poll_s: ClassVar[float] = _POLL_S

    def __init__(self, site: Site) -> None:
        """See `Backend`."""
        super().__init__(site)
        self.workers = self.config.workers or ARRAY_WORKERS
        self._array: Array | None = None
        self._open: dict[int, Job] = {}

    def open(self) -> None:
        """See `Backend.open`: Slurm is there, or the first `sbatch` says so."""

    def room(self) -> int:
        """See `Backend.room`: nothing while an array is there."""
        return 0 if self._open else MAX_ARRAY

    def send(self, jobs: Sequence[Job]) -> None:
        """Writes an array, submits it, and raises `Submitted` where nobody is to wait for it."""
        wait = self.config.queue == "wait"
        self._array = write_array(
            [job.entries for job in jobs],
            self.site.attempt,
            self.site.config,
            folder=self.site.folder,
            on_message=self.site.on_message,
            submit=self.config.queue != "script",
        )
        if not wait:
            raise Submitted(self._array)
        self._open = dict(enumerate(jobs, start=1))

    def poll(self, *, waiting: int) -> Sequence[Ended]:
        """See `Backend.poll`."""
        if self._array is None:
            return ()
        found = self._array.ended(among=self._open)
        if not found:
            threading.Event().wait(self.poll_s)
        return [replace(ended, job=self._open.pop(index)) for index, ended in found.items()]


def write_array(
    chunks: Sequence[Sequence[Any]],
    attempt: Try,
    config: ExecutorConfig,
    *,
    folder: Path,
    on_message: Callable[[str], None],
    submit: bool = True,
) -> Array:
    """Writes the folder of an array and submits it.

    Where Slurm refuses the memory of a second try, the same as before is asked for.

    Args:
        chunks: entries of each array task.
        attempt: what is tried; its task is fitted to the CPUs here.
        config: with all rungs.
        folder: of the invocation's records; the array's lies in it.
        on_message: lines for the person who waits: where the numbers come from.
        submit: False only writes it.

    Raises:
        ClusterError: there is no Slurm, or it refuses.
    """
    here = config.at(attempt.rung)
    if attempt.before is None:
        request = attempt.task.request(chunks, here) or job_request(here)
    else:
        request = _second_request(attempt, config)
    for line in request.lines():
        on_message(line)
    array = _write(chunks, attempt, config, request, folder=folder)
    if not submit:
        return array
    try:
        number = array.submit()
    except ClusterError as error:
        shutil.rmtree(array.folder)  # nobody has seen it
        if attempt.before is None or request.request == attempt.before:
            raise
        on_message(f"more memory is refused, so the same is asked for: {error}")
        same = JobRequest(request=attempt.before, origins=("as before",))
        array = _write(chunks, attempt, config, same, folder=folder)
        number = array.submit()
    on_message(f"slurm job {number}: {len(chunks)} array tasks, logs in {array.folder}/logs")
    return array


def _write(
    chunks: Sequence[Sequence[Any]],
    attempt: Try,
    config: ExecutorConfig,
    request: JobRequest,
    *,
    folder: Path,
) -> Array:
    array = Array(
        folder=new_array_folder(folder),
        task=attempt.task.on_worker(threads=request.request.cpus, monitored=True),
        chunks=tuple(tuple(chunk) for chunk in chunks),
        request=request.request,
        config=config,
        number=attempt.number,
        alone=attempt.alone,
        rung=attempt.rung,
    )
    text = batch_script(
        array.folder,
        num_tasks=len(chunks),
        request=request.request,
        config=config.at(attempt.rung),
        notes=request.origins,
    )
    (array.folder / "logs").mkdir(parents=True)
    write_text(array.script, text)
    array.save()
    return array


def _second_request(attempt: Try, config: ExecutorConfig) -> JobRequest:
    """What died had, with the next memory of the settings, or twice as much where it lists none."""
    assert attempt.before is not None
    listed = config.at(attempt.rung).job_memory or config.at(attempt.rung).worker_memory
    if attempt.rung.memory and listed:
        memory, why = parse_bytes(listed), "the next of --job-memory, because tasks died"
    elif config.above(attempt.rung, "memory") is None and not attempt.rung.gpu:
        memory = _MORE * attempt.before.memory_bytes
        why = f"{_MORE} times that of what died"
    else:
        memory, why = attempt.before.memory_bytes, "as before"
    request = replace(attempt.before, memory_bytes=memory)
    return JobRequest(request=request, origins=(f"{format_bytes(memory)}: {why}",))


@dataclass(frozen=True, kw_only=True)
class ArrayStatus:
    """One array as it stands.

    Attributes:
        array: the array.
        tasks: state -> number of array tasks: DONE, LOST, RUNNING, PENDING, ...
        entries: status of a result, or 'missing' -> number of entries.
    """

    array: Array
    tasks: dict[str, int]
    entries: dict[str, int]


def array_status(array: Array) -> ArrayStatus:
    """Asks the queue and the files."""
    found: Counter[str] = Counter()
    for index, chunk in enumerate(array.chunks, start=1):
        told = [r for report in array.reports(index) for r in report.results]
        for entry, before in zip_longest(chunk, told):
            result = array.task.finished(entry) or before  # a later try may have done it
            found[getattr(result, "status", "done") if result else "missing"] += 1
    return ArrayStatus(array=array, tasks=Counter(array.states().values()), entries=found)


@dataclass(kw_only=True)
class Collected:
    """All arrays of one kind in an output folder, merged; the newest word on an entry counts.

    Attributes:
        task: of the newest array.
        entries: every entry of every array, once, by name.
        results: of those that ended, by name.
        waiting: array tasks that still wait or run.
        stage_seconds, facts: of all reports.
        started: when the first array was written, in seconds since 1970.
    """

    task: Task[Any, Any]
    entries: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    waiting: int = 0
    stage_seconds: Counter[str] = field(default_factory=Counter)
    facts: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0

    def add(self, array: Array, *, retry: bool) -> list[Settled]:
        """Takes what an older array says of entries that no newer one has."""
        newer = set(self.entries)
        name, attempt = self.task.name, array.attempt
        self.entries |= {name(e): e for e in attempt.entries if name(e) not in newer}
        self.started = array.started
        self.waiting += sum(s not in ("DONE", "LOST", "WRITTEN") for s in array.states().values())
        found = []
        for ended in array.ended().values():
            final = ended if retry or ended.how != "died" else replace(ended, how="over")
            climbs = CLIMBS if retry else ()
            settled = settle(
                final, attempt, array.config, climbs, skip=lambda entry: name(entry) in newer
            )
            self.results |= {name(e): r for e, r in settled.ends if name(e) not in newer}
            self.stage_seconds.update(settled.report.stage_seconds)
            self.facts = {**settled.report.facts, **self.facts}
            found.append(settled)
        return found


def collect(
    out: Path,
    kinds: Kinds,
    *,
    retry: bool = True,
    on_message: Callable[[str], None] = lambda text: None,
) -> list[Collected]:
    """Merges the reports of all arrays below a folder, for each kind of task.

    Array tasks that ended without a report are recorded entry by entry, but for what died for the
    first time or can climb: that is submitted once more, each entry alone (see `settle`).

    Args:
        out: the output folder.
        kinds: of tasks.
        retry: False records the dead ones at once.
        on_message: lines for the person who waits.

    Raises:
        StoreError: no array was ever written there.
    """
    folders = array_folders(out)
    if not folders:
        raise StoreError(
            f"out must hold an array of 'thinsection slurm submit', got none in {str(out)!r}"
        )
    merged: dict[str, Collected] = {}
    again: list[tuple[Array, Try]] = []
    for folder in reversed(folders):
        array = load_array(folder, kinds)
        mine = merged.setdefault(array.task.kind, Collected(task=array.task))
        settled = mine.add(array, retry=retry)
        for text in filter(None, (one.message for one in settled)):
            on_message(text)
        again += [(array, t) for t in together([t for one in settled for t in one.again])]
    for array, attempt in again:
        for entries in chunked(attempt.entries, MAX_ARRAY):
            write_array(
                chunked(entries, 1),
                attempt,
                array.config,
                folder=array.folder.parents[1],
                on_message=on_message,
            )
            merged[array.task.kind].waiting += len(entries)
    return list(merged.values())
