"""Calls Slurm's commands, and parses the states of an array's tasks."""

import logging
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from thinsection.errors import ClusterError
from thinsection.jobs.executor import Resource
from thinsection.jobs.request import SINFO

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
    # signal that ended it; 0 if none
    signal: int = 0
    # Slurm's word for why it waits, such as PartitionConfig; '' if it does not
    waits_for: str = ""

    @property
    def ended(self) -> bool:
        """True if it is neither queued nor running."""
        return self.state in _ENDED

    @property
    def died(self) -> bool:
        """True if it was killed from outside, but not by the user; a retry may help.

        An exit code of the task (settings, weights) would be the same again. A shell or container
        reports a signal as 128 + signal.
        """
        if self.state == "FAILED":
            return self.signal > 0 or self.exit_code > 128
        return self.state in _DEATHS

    @property
    def lacking(self) -> Resource | None:
        """Memory, if Slurm reports that or it is likely, as after SIGKILL by the kernel."""
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
    """State per array index for tasks in squeue; ended tasks stay listed for some minutes.

    A line without an index refers to all tasks without one: cancelled before they began.
    """
    command = ["squeue", "--noheader", "--array", "--states=all", f"--Format={_FORMAT}"]
    try:
        text = _call([*command, f"--jobs={job_id}"])
    except ClusterError as error:
        # it ended long ago and squeue has dropped it
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
            waits_for=_waiting_reason(state, reason),
        )
        match = _TASK.match(name)
        if match:
            listed[int(match.group(1))] = task
        elif task.ended:
            unlisted = dict.fromkeys(range(1, num_tasks + 1), task)
    return unlisted | listed


def accounted_states(job_id: int) -> dict[int, TaskState]:
    """States from Slurm's accounting, which keeps ended tasks; empty without accounting."""
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


def _waiting_reason(state: str, reason: str) -> str:
    """Slurm's reason of a task that waits; '' where it only waits for its turn."""
    return reason if state == _WAITING and reason not in _NO_REASON else ""


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
            "run this on a node that submits to Slurm, or use another --executor"
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
