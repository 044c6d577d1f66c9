"""The batch script of an array job, as text."""

import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from thinsection.errors import ConfigError
from thinsection.jobs.executor import MAX_ARRAY, ExecutorConfig
from thinsection.types import MIB
from thinsection.usage.analysis import Request, format_walltime
from thinsection.usage.limits import TIME_LIMIT_VARIABLE

_PLAIN = re.compile(r"[\w@%+=:,./-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def batch_script(
    folder: Path,
    *,
    num_tasks: int,
    request: Request,
    config: ExecutorConfig,
    notes: Sequence[str] = (),
    python: str = sys.executable,
) -> str:
    """The script that works on the tasks of an array's folder.

    Args:
        folder: of the array; holds tasks.json and logs/.
        num_tasks: indices 1 to num_tasks.
        request: resources of one task.
        config: with one card: partition, account, gres, workers, further directives.
        notes: comments: where the request comes from.
        python: interpreter that has the package, on the nodes too.

    Raises:
        ConfigError: Slurm would refuse the array, or a value breaks out of its line.
    """
    if not 1 <= num_tasks <= MAX_ARRAY:
        raise ConfigError(f"num_tasks must be in [1, {MAX_ARRAY}], got {num_tasks}")
    limit = f"%{config.workers}" if config.workers else ""
    log = str(folder).replace("%", "%%") + "/logs/%A_%a.log"
    directives = [
        "--job-name=thinsection",
        f"--array=1-{num_tasks}{limit}",
        f"--output={_quoted(log, 'out')}",
        "--open-mode=append",
        *resource_directives(request, config),
        *([f"--partition={_quoted(config.partition, 'partition')}"] if config.partition else []),
        *([f"--account={_quoted(config.account, 'account')}"] if config.account else []),
        *config.directive,  # the user's own come last and win
    ]
    command = [python, "-m", "thinsection", "slurm", "array-task", str(folder)]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {directive}" for directive in directives),
        *(f"# {' '.join(note.split())}" for note in notes),
        "set -euo pipefail",
        f"export OMP_NUM_THREADS={request.cpus}",
        f"export {TIME_LIMIT_VARIABLE}={request.walltime_s}",
        f'exec {shlex.join(command)} --index "$SLURM_ARRAY_TASK_ID"',
    ]
    return "\n".join(lines) + "\n"


def resource_directives(request: Request, config: ExecutorConfig) -> list[str]:
    """CPUs, memory, time and GPU as directives; `--gres` of the settings wins."""
    gres = config.gres or (f"gpu:{request.gpus}" if request.gpus else None)
    return [
        f"--cpus-per-task={request.cpus}",
        f"--mem={math.ceil(request.memory_bytes / MIB)}M",
        f"--time={format_walltime(request.walltime_s)}",
        *([f"--gres={_quoted(gres, 'gres')}"] if gres else []),
    ]


def _quoted(text: str, name: str) -> str:
    """The text as one value of a directive, as sbatch reads its lines."""
    if _CONTROL.search(text):
        raise ConfigError(f"{name} must hold no line break or control character, got {text!r}")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
