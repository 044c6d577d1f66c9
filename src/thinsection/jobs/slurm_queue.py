"""Slurm's own commands: submit, look at the queue."""

import logging
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from thinsection.errors import ClusterError
from thinsection.jobs.task import Want

_TIMEOUT_S = 60
_TASK = re.compile(r"^\d+_(\d+)$")
_FORMAT = "JobArrayID:|,State:|,exit_code:|"  # exit_code is the status that wait() gives
_DEATHS = frozenset(("OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT"))
_ENDED = frozenset(
    (
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"),
        *("BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED"),
    )
)

_log = logging.getLogger(__name__)


def sbatch(script: Path) -> int:
    """Submits a script and returns the job's id.

    Raises:
        ClusterError: there is no sbatch, or it refuses; with its own words.
    """
    text = _call(["sbatch", "--parsable", str(script)])
    number = text.strip().split(";")[0]  # 'ID' or 'ID;CLUSTER'
    if not number.isdigit():
        raise ClusterError(f"sbatch must answer with a job id, got {text!r}")
    return int(number)


@dataclass(frozen=True, kw_only=True)
class TaskState:
    """What Slurm says of an array task.

    Attributes:
        state: Slurm's word (RUNNING, FAILED, OUT_OF_MEMORY, ...); '' where it has forgotten.
        exit_code: of the batch script.
        signal: that ended it; 0 for none.
    """

    state: str = ""
    exit_code: int = 0
    signal: int = 0

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
        if self.state == "FAILED":
            return self.signal > 0 or self.exit_code > 128
        return self.state in _DEATHS

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
    rest: TaskState | None = None
    for line in text.splitlines():
        name, state, status = (part.strip() for part in f"{line}||".split("|")[:3])
        wait_status = int(status) if status.isdigit() else 0
        here = TaskState(state=state, exit_code=wait_status >> 8, signal=wait_status & 0x7F)
        if match := _TASK.match(name):
            found[int(match.group(1))] = here
        elif here.ended:
            rest = here
    everyone = {} if rest is None else dict.fromkeys(range(1, num_tasks + 1), rest)
    return everyone | found


def accounted_states(job_id: int) -> dict[int, TaskState]:
    """The same from Slurm's accounting, which does not forget; empty where it is not kept."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}"]
    try:
        text = _call([*command, "--format=JobID,State,ExitCode"])
    except ClusterError as error:
        _log.info("no accounting: %s", error)
        return {}
    found = {}
    for line in text.splitlines():
        name, state, codes = f"{line}||".split("|")[:3]
        match = _TASK.match(name)
        if match:
            exit_code, _, signal = codes.partition(":")
            found[int(match.group(1))] = TaskState(
                state=state.partition(" ")[0],  # 'CANCELLED by 1000'
                exit_code=int(exit_code or 0),
                signal=int(signal or 0),
            )
    return found


def _call(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        raise ClusterError(
            f"{command[0]} must be on the PATH, got none; run this on a node that submits to "
            "Slurm, or use another --executor"
        )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{command[0]} must answer within {_TIMEOUT_S} s, got nothing") from None
    if done.returncode != 0:
        raise ClusterError(f"{command[0]} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout
