"""Slurm's own commands: submit, look at the queue."""

import re
import shutil
import subprocess
from pathlib import Path

from thinsection.errors import ClusterError

_TIMEOUT_S = 60
_TASK = re.compile(r"^\d+_(\d+)$")
# squeue still lists these for a while after the end
_ENDED = frozenset(
    (
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"),
        *("BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED"),
    )
)


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


def task_states(job_id: int) -> dict[int, str]:
    """Array index -> state of the tasks that squeue still lists ('RUNNING', 'PENDING', ...)."""
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T"]
    try:
        text = _call([*command, f"--jobs={job_id}"])
    except ClusterError as error:
        if "Invalid job id" in str(error):  # it ended long ago and was forgotten
            return {}
        raise
    states = {}
    for line in text.splitlines():
        name, _, state = line.strip().partition(" ")
        match = _TASK.match(name)
        if match:
            states[int(match.group(1))] = state.strip()
    return states


def active(states: dict[int, str]) -> dict[int, str]:
    """Those that wait, run or end just now."""
    return {index: state for index, state in states.items() if state not in _ENDED}


def _call(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        raise ClusterError(
            f"{command[0]} must be on the PATH, got none; run this on a node that submits to "
            "Slurm, or use --executor inline or dask"
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
