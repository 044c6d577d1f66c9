"""The batch script of an array job, as text."""

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from thinsection.errors import ConfigError
from thinsection.jobs.executor import MAX_ARRAY, ExecutorConfig
from thinsection.types import MIB
from thinsection.usage.analysis import Request, format_walltime

TIME_LIMIT_VARIABLE = "THINSECTION_TIME_LIMIT_S"  # Slurm before 23.02 does not tell its jobs


@dataclass(frozen=True, kw_only=True)
class ArrayScript:
    """What the script is made of.

    Attributes:
        folder: of the job; holds job.json and logs/.
        num_tasks: array tasks, indices 1 to num_tasks.
        request: resources of one task.
        config: partition, account, gres, array limit, further directives.
        notes: comments: where the request comes from.
        command: of `thinsection`; takes the folder and --index.
        python: interpreter that has the package, on the nodes too.
    """

    folder: Path
    num_tasks: int
    request: Request
    config: ExecutorConfig
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ("slurm", "task")
    python: str = sys.executable

    def text(self) -> str:
        """The script."""
        if not 1 <= self.num_tasks <= MAX_ARRAY:
            raise ConfigError(f"num_tasks must be in [1, {MAX_ARRAY}], got {self.num_tasks}")
        command = [self.python, "-m", "thinsection", *self.command, str(self.folder)]
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {directive}" for directive in self.directives()),
            *(f"# {' '.join(note.split())}" for note in self.notes),
            "set -euo pipefail",
            f"export OMP_NUM_THREADS={self.request.cpus}",
            f"export {TIME_LIMIT_VARIABLE}={self.request.walltime_s}",
            f'exec {shlex.join(command)} --index "$SLURM_ARRAY_TASK_ID"',
        ]
        return "\n".join(lines) + "\n"

    def directives(self) -> list[str]:
        """The `#SBATCH` directives; the user's own come last and win."""
        limit = f"%{self.config.array_limit}" if self.config.array_limit else ""
        found = [
            "--job-name=thinsection",
            f"--array=1-{self.num_tasks}{limit}",
            f"--output={self.folder}/logs/%A_%a.log",
            "--open-mode=append",
            *resource_directives(self.request, self.config),
        ]
        found += [f"--partition={self.config.partition}"] if self.config.partition else []
        found += [f"--account={self.config.account}"] if self.config.account else []
        return [*found, *self.config.directive]


def resource_directives(request: Request, config: ExecutorConfig) -> list[str]:
    """CPUs, memory, time and GPU as directives; `--gres` of the settings wins."""
    gres = config.gres or (f"gpu:{request.gpus}" if request.gpus else None)
    return [
        f"--cpus-per-task={request.cpus}",
        f"--mem={math.ceil(request.memory_bytes / MIB)}M",
        f"--time={format_walltime(request.walltime_s)}",
        *([f"--gres={gres}"] if gres else []),
    ]
