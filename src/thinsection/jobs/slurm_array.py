"""A Slurm array of tasks of any kind: its folder, what its tasks and Slurm's commands say of it.

FOLDER/slurm/<name>/tasks.json       the task, the entries of each array index, what was asked for
                    array.sh         what sbatch takes
                    job_id           the number that Slurm gave it
                    logs/A_a.log     one per array task
                    results/<i>.json reports of index i: of all its entries, or of the first ones,
                                     rewritten as each one ends
                    results/<i>.error  the error by which index i ended itself
"""

import json
import logging
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import ClusterError, StoreError, ThinsectionError, require
from thinsection.files.atomic import write_json, write_text
from thinsection.jobs.contract import Ended, Job, Report, Try, merged
from thinsection.jobs.executor import ExecutorConfig, Rung, Want, chunked
from thinsection.jobs.request import batch_script
from thinsection.registry import Registry
from thinsection.usage.analysis import Request

FOLDER, DOCUMENT_NAME = "slurm", "tasks.json"
# below the folder that a person names: of an output folder, and of the records of its invocations
_PLACES = (f"{FOLDER}/*/{DOCUMENT_NAME}", f"records/*/{FOLDER}/*/{DOCUMENT_NAME}")
_WAIT_S = 60
_TASK = re.compile(r"^\d+_(\d+)$")
_FORMAT = (
    "JobArrayID:|,State:|,exit_code:|"  # exit_code is the status that wait() gives
)
_DEATHS = frozenset(("OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT"))
_ENDED = _DEATHS | {"COMPLETED", "FAILED", "CANCELLED", "DEADLINE", "REVOKED"}

_log = logging.getLogger(__name__)


def sbatch(script: Path) -> int:
    """Submits a script and returns the job's id; ClusterError: no sbatch, or what it refuses."""
    text = _call(["sbatch", "--parsable", str(script)])
    number = text.strip().split(";")[0]  # 'ID' or 'ID;CLUSTER'
    require(
        number.isdigit(),
        "sbatch must answer with a job id",
        repr(text),
        error=ClusterError,
    )
    return int(number)


@dataclass(frozen=True, kw_only=True)
class TaskState:
    """What Slurm says of an array task."""

    state: str = ""  # Slurm's word (RUNNING, FAILED, OUT_OF_MEMORY, ...); '': forgotten
    exit_code: int = 0  # of the batch script
    signal: int = 0  # that ended it; 0 for none

    @property
    def ended(self) -> bool:
        """Whether it neither waits nor runs any more."""
        return self.state in _ENDED

    @property
    def died(self) -> bool:
        """Whether it was ended from outside, against the user's will, so that another try may help.

        An exit code of its own (settings, weights) would be the same again; a shell or container
        says 128 + signal.
        """
        killed = self.state == "FAILED" and (self.signal > 0 or self.exit_code > 128)
        return killed or self.state in _DEATHS

    @property
    def want(self) -> Want | None:
        """Memory, where that is said or likely: the kernel sends SIGKILL."""
        killed = signal.SIGKILL in (self.signal, self.exit_code - 128)
        return "memory" if self.state == "OUT_OF_MEMORY" or killed else None

    def describe(self) -> str:
        """'FAILED, signal 9'."""
        if not self.state:
            return "killed, cancelled or out of time: Slurm does not know any more"
        code = f", exit code {self.exit_code}" if self.exit_code else ""
        return self.state + (f", signal {self.signal}" if self.signal else code)


def task_states(job_id: int, num_tasks: int) -> dict[int, TaskState]:
    """Array index -> state of the tasks that squeue lists; ended ones stay there for some minutes.

    A line without an index speaks of all tasks that have none: cancelled before they began.
    """
    command = ["squeue", "--noheader", "--array", "--states=all", f"--Format={_FORMAT}"]
    try:
        text = _call([*command, f"--jobs={job_id}"])
    except ClusterError as error:
        if "Invalid job id" in str(error):  # it ended long ago and was forgotten
            return {}
        raise
    found: dict[int, TaskState] = {}
    rest: dict[int, TaskState] = {}
    for line in text.splitlines():
        name, state, status = (part.strip() for part in f"{line}||".split("|")[:3])
        wait_status = int(status) if status.isdigit() else 0
        here = TaskState(
            state=state, exit_code=wait_status >> 8, signal=wait_status & 0x7F
        )
        if match := _TASK.match(name):
            found[int(match.group(1))] = here
        elif here.ended:
            rest = dict.fromkeys(range(1, num_tasks + 1), here)
    return rest | found


def accounted_states(job_id: int) -> dict[int, TaskState]:
    """The same from Slurm's accounting, which does not forget; empty where it is not kept."""
    command = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={job_id}",
    ]
    try:
        text = _call([*command, "--format=JobID,State,ExitCode"])
    except ClusterError as error:
        _log.info("no accounting: %s", error)
        return {}
    found = {}
    for line in text.splitlines():
        name, state, codes = f"{line}||".split("|")[:3]
        if match := _TASK.match(name):
            code, number = (int(part or 0) for part in f"{codes}:".split(":")[:2])
            word = state.partition(" ")[0]  # 'CANCELLED by 1000'
            found[int(match.group(1))] = TaskState(
                state=word, exit_code=code, signal=number
            )
    return found


def _call(command: list[str]) -> str:
    name = command[0]
    if shutil.which(name) is None:
        remedy = "run this on a node that submits to Slurm, or use another --executor"
        raise ClusterError(f"{name} must be on the PATH, got none; {remedy}")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"{name} must answer within {_WAIT_S} s, got nothing"
        ) from None
    if done.returncode != 0:
        raise ClusterError(f"{name} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Array:
    """A written (and perhaps submitted) array."""

    folder: Path
    attempt: Try  # the task is fitted to the CPUs of an array task
    chunk_size: int  # entries of each array task but the last
    request: Request  # resources of each array task
    config: ExecutorConfig  # with all rungs

    @cached_property
    def chunks(self) -> list[tuple[Any, ...]]:
        """The entries of array index 1, 2, ..."""
        return chunked(self.attempt.entries, self.chunk_size)

    @property
    def script(self) -> Path:
        """What sbatch takes."""
        return self.folder / "array.sh"

    @property
    def job_id(self) -> int | None:
        """Slurm's number; None where it was not submitted."""
        path = self.folder / "job_id"
        return int(path.read_text()) if path.exists() else None

    def save(self, notes: Sequence[str]) -> None:
        """Writes tasks.json, the script, the folder of logs. Memory: some 200 bytes an entry."""
        config = self.config.at(self.attempt.rung)
        count = len(self.chunks)
        text = batch_script(
            self.folder, config, num_tasks=count, request=self.request, notes=notes
        )
        (self.folder / "logs").mkdir(parents=True)
        write_text(self.script, text)
        document = as_mapping(self) | {"kind": self.attempt.task.kind}
        del document["folder"]  # it may be moved
        write_json(self.folder / DOCUMENT_NAME, document)

    def submit(self) -> int:
        """Hands the script to sbatch and keeps the number."""
        if self.job_id is not None:
            raise ClusterError(
                f"array must not be submitted yet, got job {self.job_id}"
            )
        number = sbatch(self.script)
        write_text(self.folder / "job_id", f"{number}\n")
        return number

    def run_index(
        self, index: int, *, on_report: Callable[[Report[Any]], None]
    ) -> None:
        """Works on the entries of one array index, in this process, and keeps what came of them."""
        if not 1 <= index <= len(self.chunks):
            raise ClusterError(f"index must be in [1, {len(self.chunks)}], got {index}")
        reports = []
        try:
            for part in self.attempt.task.parts(self.chunks[index - 1]):
                report = self.attempt.task(part, on_event=lambda event: None)
                reports.append(as_mapping(report))
                write_json(self._result(index, "json"), reports)
                on_report(report)
        except Exception as error:  # kept for who collects, who does not read logs
            write_text(
                self._result(index, "error"), f"{type(error).__name__}: {error}\n"
            )
            raise

    def reports(self, index: int) -> list[Report[Any]]:
        """What array index `index` has said so far, of its first entries."""
        path, kind = self._result(index, "json"), self.attempt.task.result_type
        damaged = (ValueError, TypeError, KeyError, AttributeError)
        try:
            documents = (
                json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
            )
            results = [
                tuple(from_mapping(kind, r) for r in d.pop("results"))
                for d in documents
            ]
            return [
                Report(results=r, **d) for r, d in zip(results, documents, strict=True)
            ]
        except damaged as error:
            rule = "report of an array task must be whole"
            raise StoreError(
                f"{rule}, got {str(path)!r}: {error!r}; remove it"
            ) from error

    def states(self, *, among: Collection[int] | None = None) -> dict[int, str]:
        """Array index -> 'DONE' (it reported), Slurm's state while it is there, or 'LOST'."""
        return self._look(among)[0]

    def ended(self, *, among: Collection[int] | None = None) -> dict[int, Ended]:
        """The array tasks that ended, and how; the accounting knows what squeue has forgotten."""
        states, known = self._look(among)
        lost = {index for index, state in states.items() if state == "LOST"}
        if lost - known.keys():
            known = accounted_states(self.job_id or 0) | known
        ended = (index for index, state in states.items() if state in ("DONE", "LOST"))
        how = {index: known.get(index, TaskState()) for index in lost}
        return {index: self._end(index, how.get(index)) for index in ended}

    def _look(
        self, among: Collection[int] | None
    ) -> tuple[dict[int, str], dict[int, TaskState]]:
        """The states of these indices (None: of all), and what squeue said of them."""
        indices = range(1, len(self.chunks) + 1) if among is None else among
        number = self.job_id
        if number is None:
            return dict.fromkeys(indices, "WRITTEN"), {}
        listed = task_states(
            number, len(self.chunks)
        )  # asked first: a task reports, then leaves
        states = {}
        for index in indices:
            reported = sum(len(report.results) for report in self.reports(index))
            state = listed.get(index)
            here = state.state if state and not state.ended else "LOST"
            states[index] = "DONE" if reported == len(self.chunks[index - 1]) else here
        return states, listed

    def _end(self, index: int, state: TaskState | None) -> Ended:
        """How an array task ended; a state is given where it has not reported everything.

        Not worth another try: what the user cancelled, what ended by its own error, and an entry
        that ran out of time alone. What Slurm has forgotten is, where it had begun.
        """
        job = Job(entries=self.chunks[index - 1], task=self.attempt.task)
        report = merged(self.reports(index))
        if state is None:
            return Ended(job=job, how="reported", report=report)
        log = self.folder / "logs" / f"{self.job_id}_{index}.log"
        own = self._result(index, "error")
        died, want = state.died, state.want
        if not state.state and log.exists() and not own.exists():
            died, want = True, "memory"
        if state.state == "TIMEOUT" and len(job.entries) == 1:
            died = False
        reason = f"array task {self.job_id}_{index} ended without a report ({state.describe()})"
        if own.exists():
            reason += f": {own.read_text(encoding='utf-8').strip()}"
        end = partial(Ended, job=job, report=report, want=want, granted=self.request)
        return end(how="died" if died else "over", reason=f"{reason}; see {log}")

    def _result(self, index: int, suffix: str) -> Path:
        return self.folder / "results" / f"{index}.{suffix}"


def load_array(folder: Path, kinds: Registry[Any]) -> Array:
    """The array of a folder, of one of `kinds`; StoreError: none, or not of this version."""
    try:
        document = json.loads((folder / DOCUMENT_NAME).read_text(encoding="utf-8"))
        kind, tried = kinds.load(document["kind"]), document["attempt"]
        entries = tuple(
            from_mapping(kind.entry_type, entry) for entry in tried["entries"]
        )
        task, rung = from_mapping(kind, tried["task"]), Rung(**tried["rung"])
        before = Request(**tried["before"]) if tried["before"] else None
        attempt = Try(
            entries=entries, task=task, number=tried["number"], rung=rung, before=before
        )
        request = Request(**document["request"])
        config = from_mapping(ExecutorConfig, document["config"])
        return Array(
            folder, attempt, document["chunk_size"], request=request, config=config
        )
    except (OSError, ValueError, KeyError, TypeError, ThinsectionError) as error:
        rule = f"array folder must hold {DOCUMENT_NAME} of this version"
        raise StoreError(f"{rule}, got {error!r} in {str(folder)!r}") from None


def array_folders(out: Path) -> list[Path]:
    """The folders of all arrays of an output folder and of its records, oldest first."""
    found = [path.parent for place in _PLACES for path in out.glob(place)]
    return sorted(found, key=lambda folder: folder.name)
