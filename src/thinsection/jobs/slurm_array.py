"""A Slurm array of any kind of task, as a folder.

Words: a `Task` is the work. Slurm calls each job of an array an array task; it works on the entries
of one array index.

FOLDER/slurm/<name>/tasks.json       the task, the entries of each array index, the request
                    array.sh         script for sbatch
                    job_id           Slurm's number of the array
                    logs/A_a.log     log of array index a
                    results/<i>.json reports of index i, for all its entries or the first ones;
                                     rewritten after each entry
                    results/<i>.error  error that ended index i
"""

import json
import logging
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from thinsection.config import as_mapping, from_mapping
from thinsection.errors import ClusterError, StoreError, ThinsectionError, error_words
from thinsection.files.atomic import write_json, write_text
from thinsection.jobs.backend import Attempt, chunked
from thinsection.jobs.executor import ExecutorConfig, Resource, ResourceStep
from thinsection.jobs.request import SINFO, batch_script
from thinsection.jobs.task import AnyReport, AnyTask, Report, merge_reports
from thinsection.registry import Registry
from thinsection.usage.analysis import Request

FOLDER = "slurm"
DOCUMENT_NAME = "tasks.json"
# patterns of arrays in an output folder, and in the records of its invocations
_PLACES = (f"{FOLDER}/*/{DOCUMENT_NAME}", f"records/*/{FOLDER}/*/{DOCUMENT_NAME}")
_TIMEOUT_S = 60
_TASK = re.compile(r"^\d+_(\d+)$")
# exit_code is the status that wait() returns
_FORMAT = "JobArrayID:|,State:|,exit_code:|,Reason:|"
_WAITING = "PENDING"
# Slurm's words for "no reason"
_NO_REASON = ("", "None", "(null)", "Priority")
_DEATHS = frozenset(("OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT"))
_ENDED = _DEATHS | {"COMPLETED", "FAILED", "CANCELLED", "DEADLINE", "REVOKED"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TaskState:
    """State of an array task according to Slurm."""

    # Slurm's name (RUNNING, FAILED, OUT_OF_MEMORY, ...); '' if Slurm has dropped the task
    state: str = ""
    # exit code of the batch script
    exit_code: int = 0
    # signal that ended the task; 0 if none
    signal: int = 0
    # Slurm's word for why the task waits, such as PartitionConfig; '' if it does not wait
    waits_for: str = ""

    @property
    def has_ended(self) -> bool:
        """True if the task is neither queued nor running."""
        return self.state in _ENDED

    @property
    def died(self) -> bool:
        """True if the task was killed from outside, but not by the user; a retry may help.

        A task that ended with an exit code of its own (settings, weights) would end so again. A
        shell or container reports a signal as 128 + signal.
        """
        if self.state == "FAILED":
            return self.signal > 0 or self.exit_code > 128
        return self.state in _DEATHS

    @property
    def lacking(self) -> Resource | None:
        """'memory' if Slurm reports so, or if it is likely, as after SIGKILL; else None."""
        was_killed = signal.SIGKILL in (self.signal, self.exit_code - 128)
        return "memory" if self.state == "OUT_OF_MEMORY" or was_killed else None

    def describe(self) -> str:
        """Describes the state, such as 'FAILED, signal 9'."""
        if not self.state:
            return (
                "killed, cancelled or out of time: Slurm has no record of it any more"
            )
        if self.signal:
            return f"{self.state}, signal {self.signal}"
        if self.exit_code:
            return f"{self.state}, exit code {self.exit_code}"
        return self.state


def sbatch(script: Path) -> int:
    """Submits a script and returns the job's id.

    Raises:
        ClusterError: sbatch is missing, or refuses the script.
    """
    text = _call(["sbatch", "--parsable", str(script)])
    number = text.strip().split(";")[0]  # the output is 'ID' or 'ID;CLUSTER'
    if not number.isdigit():
        raise ClusterError(f"sbatch must print a job id, got {text!r}")
    return int(number)


def task_states(job_id: int, num_tasks: int) -> dict[int, TaskState]:
    """State per array index, from squeue; ended indices stay listed for some minutes.

    A line without an index stands for all indices that have no line of their own; they were
    cancelled before they began.
    """
    command = ["squeue", "--noheader", "--array", "--states=all", f"--Format={_FORMAT}"]
    try:
        text = _call([*command, f"--jobs={job_id}"])
    except ClusterError as error:
        # the array ended long ago and squeue has dropped it
        if "Invalid job id" in str(error):
            return {}
        raise
    listed: dict[int, TaskState] = {}
    unlisted: dict[int, TaskState] = {}
    for line in text.splitlines():
        name, state, status, reason = _cells(line)
        wait_status = int(status) if status.isdigit() else 0
        task = TaskState(
            state=state,
            exit_code=wait_status >> 8,
            signal=wait_status & 0x7F,
            waits_for="" if state != _WAITING or reason in _NO_REASON else reason,
        )
        match = _TASK.match(name)
        if match:
            listed[int(match.group(1))] = task
        elif task.has_ended:
            unlisted = dict.fromkeys(range(1, num_tasks + 1), task)
    return unlisted | listed


def accounted_states(job_id: int) -> dict[int, TaskState]:
    """State per array index, from Slurm's accounting, which keeps ended jobs.

    Empty if the cluster has no accounting.
    """
    command = ["sacct", "--noheader", "--parsable2", "--allocations"]
    try:
        text = _call([*command, f"--jobs={job_id}", "--format=JobID,State,ExitCode"])
    except ClusterError as error:
        _log.info("no accounting: %s", error)
        return {}
    states = {}
    for line in text.splitlines():
        name, state, codes, _ = _cells(line)
        match = _TASK.match(name)
        if match:
            exit_code, _, signal_number = codes.partition(":")
            states[int(match.group(1))] = TaskState(
                state=state.partition(" ")[0],  # such as 'CANCELLED by 1000'
                exit_code=int(exit_code or 0),
                signal=int(signal_number or 0),
            )
    return states


def node_list() -> str:
    """Output of `SINFO`; '' where Slurm does not answer."""
    try:
        return _call(list(SINFO))
    except ClusterError as error:
        _log.info("no list of nodes: %s", error)
        return ""


def _cells(line: str) -> tuple[str, str, str, str]:
    """First four cells of a line; missing cells are ''."""
    name, state, status, reason, *_ = f"{line}||||".split("|")
    return name.strip(), state.strip(), status.strip(), reason.strip()


def _call(command: list[str]) -> str:
    """Runs one of Slurm's commands and returns its output."""
    name = command[0]
    if shutil.which(name) is None:
        raise ClusterError(
            f"{name} must be on the PATH, got none; "
            'run this on a node that submits to Slurm, or use another executor="..."'
        )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"{name} must answer within {_TIMEOUT_S} s, got no answer"
        ) from None
    if done.returncode != 0:
        raise ClusterError(f"{name} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Array:
    """Array that was written, and perhaps submitted.

    Attributes:
        folder: folder of the array's files.
        attempt: the entries, and the work (`Task`), adapted to the CPUs of one array index.
        chunk_size: number of entries of each array index; the last index may have fewer.
        request: resources of each array index.
        config: executor settings, with the memory sizes and GPUs of all retries;
            `attempt.resource_step` picks one.
    """

    folder: Path
    attempt: Attempt
    chunk_size: int
    request: Request
    config: ExecutorConfig

    @cached_property
    def chunks(self) -> list[tuple[object, ...]]:
        """Entries of each array index; indices count from 1."""
        return chunked(self.attempt.entries, self.chunk_size)

    @property
    def script(self) -> Path:
        """Path of the script for sbatch."""
        return self.folder / "array.sh"

    @property
    def job_id(self) -> int | None:
        """Slurm's number of the array; None if it was not submitted."""
        path = self.folder / "job_id"
        return int(path.read_text()) if path.exists() else None

    def save(self) -> None:
        """Writes tasks.json, the script, and the folder for logs.

        Memory:
            About 200 bytes per entry.
        """
        text = batch_script(
            self.folder,
            self.config.at_step(self.attempt.resource_step),
            num_tasks=len(self.chunks),
            request=self.request,
        )
        (self.folder / "logs").mkdir(parents=True)
        write_text(self.script, text)
        attempt = self.attempt
        # "rung" is the resource step, "before" the previous request: earlier files have these keys
        attempt_document = {
            "entries": [as_mapping(entry) for entry in self.attempt.entries],
            "task": as_mapping(attempt.task),
            "number": attempt.number,
            "rung": as_mapping(attempt.resource_step),
            "before": attempt.previous_request and attempt.previous_request.numbers,
        }
        document = {
            "attempt": attempt_document,
            "chunk_size": self.chunk_size,
            "request": self.request.numbers,
            "config": as_mapping(self.config),
            "kind": attempt.task.kind,
        }
        write_json(self.folder / DOCUMENT_NAME, document)

    def submit(self) -> int:
        """Submits the script by sbatch and stores the job's number."""
        if self.job_id is not None:
            raise ClusterError(
                f"array must not be submitted yet, got job {self.job_id}"
            )
        number = sbatch(self.script)
        write_text(self.folder / "job_id", f"{number}\n")
        return number

    def run_index(self, index: int, *, on_report: Callable[[AnyReport], None]) -> None:
        """Works on the entries of one array index in this process, and stores the outcome."""
        if not 1 <= index <= len(self.chunks):
            raise ClusterError(f"index must be in [1, {len(self.chunks)}], got {index}")
        reports = []
        try:
            for part in self.attempt.task.parts(self.chunks[index - 1]):
                report = self.attempt.task(part, on_event=lambda event: None)
                reports.append(as_mapping(report))
                write_json(self._result_path(index, "json"), reports)
                on_report(report)
        except Exception as error:  # stored for `slurm.py: collect`
            text = f"{error_words(error)}\n"
            write_text(self._result_path(index, "error"), text)
            raise

    def reports(self, index: int) -> list[AnyReport]:
        """Reports of an array index so far, for its first entries."""
        path = self._result_path(index, "json")
        if not path.exists():
            return []
        result_type = self.attempt.task.result_type
        reports: list[AnyReport] = []
        try:
            for document in json.loads(path.read_text(encoding="utf-8")):
                results = document.pop("results")
                rows: list[object] = [
                    from_mapping(result_type, result) for result in results
                ]
                reports.append(Report(results=tuple(rows), **document))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(
                f"report of an array task must be complete, got {str(path)!r}: {error!r}; "
                "remove it"
            ) from error
        return reports

    def states(self) -> dict[int, str]:
        """State per array index: 'DONE' (all entries reported), Slurm's state, or 'LOST'.

        An index is lost if it has ended, or is no longer listed, without reports of all entries.
        All indices are 'WRITTEN' if the array was not submitted.
        """
        return {index: state for index, (state, _) in self._look_up(None).items()}

    def waiting_reasons(self) -> Counter[str]:
        """Number of waiting array indices by Slurm's reason for the wait."""
        states = self._look_up(None).values()
        reasons = [task.waits_for for state, task in states if state == _WAITING]
        return Counter(filter(None, reasons))

    def ended_attempts(
        self, *, among: Collection[int] | None = None
    ) -> dict[int, Attempt]:
        """The attempt of each array index that has ended, with how it ended.

        Args:
            among: indices to look at; None means all.
        """
        states = self._look_up(among)
        # the accounting still has jobs that squeue no longer lists
        accounted: dict[int, TaskState] = {}
        if any(state == "LOST" and not task.state for state, task in states.values()):
            accounted = accounted_states(self.job_id or 0)
        ended = {}
        for index, (state, task) in states.items():
            attempt = replace(self.attempt, entries=self.chunks[index - 1])
            if state == "DONE":
                report = merge_reports(self.reports(index))
                ended[index] = attempt.ended("reported", report=report)
            elif state == "LOST":
                last = task if task.state else accounted.get(index, task)
                ended[index] = self._unreported(attempt, index, last)
        return ended

    def _look_up(
        self, among: Collection[int] | None
    ) -> dict[int, tuple[str, TaskState]]:
        """State as in `states`, and state by squeue, of some indices; None means all."""
        indices = range(1, len(self.chunks) + 1) if among is None else among
        job_id = self.job_id
        if job_id is None:
            return dict.fromkeys(indices, ("WRITTEN", TaskState()))
        # squeue is asked first: a job writes its results before it leaves the queue, so that no
        # result is missed
        listed = task_states(job_id, len(self.chunks))
        states = {}
        for index in indices:
            num_reported = sum(len(report.results) for report in self.reports(index))
            task = listed.get(index, TaskState())
            state = task.state
            if num_reported == len(self.chunks[index - 1]):
                state = "DONE"
            elif task.has_ended or not task.state:
                state = "LOST"
            states[index] = (state, task)
        return states

    def _unreported(self, attempt: Attempt, index: int, state: TaskState) -> Attempt:
        """The attempt of an array index that ended without reports of all entries, with its end.

        It is not retried if the user cancelled it, if it ended by an error of its own, or if it is
        a single entry that ran out of time. If Slurm no longer lists it, it is retried if it had
        begun.
        """
        log = self.folder / "logs" / f"{self.job_id}_{index}.log"
        error_path = self._result_path(index, "error")
        died = state.died
        lacking = state.lacking
        if not state.state and log.exists() and not error_path.exists():
            # it had begun and left no error, so it was killed, most likely for memory
            died = True
            lacking = "memory"
        if state.state == "TIMEOUT" and len(attempt.entries) == 1:
            died = False
        reason = f"array task {self.job_id}_{index} ended without a report ({state.describe()})"
        if error_path.exists():
            reason += f": {error_path.read_text(encoding='utf-8').strip()}"
        return attempt.ended(
            "died" if died else "fatal",
            report=merge_reports(self.reports(index)),
            reason=f"{reason}; see {log}",
            lacking=lacking,
            granted=self.request,
        )

    def _result_path(self, index: int, suffix: str) -> Path:
        return self.folder / "results" / f"{index}.{suffix}"


def load_array(folder: Path, kinds: Registry[type[AnyTask]]) -> Array:
    """Loads the array in a folder, for one of the given kinds of task.

    Raises:
        StoreError: there is no array, or one of another version.
    """
    try:
        document = json.loads((folder / DOCUMENT_NAME).read_text(encoding="utf-8"))
        task_type = kinds.load(document["kind"])
        saved = document["attempt"]
        attempt = Attempt(
            entries=tuple(
                from_mapping(task_type.entry_type, entry) for entry in saved["entries"]
            ),
            task=from_mapping(task_type, saved["task"]),
            number=saved["number"],
            resource_step=ResourceStep(**saved["rung"]),
            previous_request=Request(**saved["before"]) if saved["before"] else None,
        )
        return Array(
            folder,
            attempt,
            document["chunk_size"],
            request=Request(**document["request"]),
            config=from_mapping(ExecutorConfig, document["config"]),
        )
    except (OSError, ValueError, KeyError, TypeError, ThinsectionError) as error:
        raise StoreError(
            f"array folder must contain {DOCUMENT_NAME} of this version, got {error!r} in "
            f"{str(folder)!r}"
        ) from None


def array_folders(out: Path) -> list[Path]:
    """Folders of all arrays of an output folder and of its records, oldest first."""
    folders: list[Path] = []
    for place in _PLACES:
        folders += [document.parent for document in out.glob(place)]
    return sorted(folders, key=lambda folder: folder.name)
