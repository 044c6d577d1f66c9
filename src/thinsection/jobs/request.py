"""What one batch job asks for, number by number, and the script of an array that asks for it."""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from thinsection.errors import ConfigError
from thinsection.jobs.executor import (
    CONTROL,
    MAX_ARRAY,
    ExecutorConfig,
    Rung,
    parse_walltime,
)
from thinsection.types import GIB, MIB, format_bytes, parse_bytes
from thinsection.usage.analysis import Request, format_walltime
from thinsection.usage.monitor import TIME_LIMIT_VARIABLE

DEFAULT = Request(cpus=4, memory_bytes=8 * GIB, gpus=0, walltime_s=4 * 3600)
SINFO = (
    "sinfo",
    "--noheader",
    "--format=%P|%D|%t|%c|%m|%l|%G",
)  # a row per kind of node and state
_PLAIN = re.compile(r"[\w@%+=:,./-]+")

Numbers = dict[
    str, tuple[int, str]
]  # field of `Request` -> value, and where it comes from


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The resources of one job."""

    request: Request
    origins: tuple[str, ...]  # a line per number: where it comes from, with its margin
    warning: str = ""  # why there is no prediction, where one was wanted

    def lines(self) -> tuple[str, ...]:
        """For the person who submits: the warning, then the origins."""
        return (*([f"warning: {self.warning}"] if self.warning else []), *self.origins)


def job_request(
    config: ExecutorConfig, predicted: Numbers | None = None, *, warning: str = ""
) -> JobRequest:
    """The flags that were given (of lists the first), else what is predicted, else defaults."""
    config = config.at(Rung())
    gpus = 1 if (config.gres or "").startswith("gpu") else 0
    numbers: Numbers = {
        f.name: (getattr(DEFAULT, f.name), "default") for f in fields(Request)
    }
    numbers |= {"gpus": (gpus, "the settings name one"), **(predicted or {})}
    if config.job_cpus:
        numbers["cpus"] = (config.job_cpus, "--job-cpus")
    if config.job_memory:
        numbers["memory_bytes"] = (parse_bytes(config.job_memory), "--job-memory")
    if config.walltime:
        numbers["walltime_s"] = (parse_walltime(config.walltime), "--walltime")
    request = Request(**{name: value for name, (value, _) in numbers.items()})
    shown = {
        "cpus": f"{request.cpus} CPUs",
        "memory_bytes": format_bytes(request.memory_bytes),
    }
    shown["walltime_s"] = format_walltime(request.walltime_s)
    if request.gpus:
        shown["gpus"] = f"{request.gpus} GPU"
    origins = tuple(f"{text}: {numbers[name][1]}" for name, text in shown.items())
    return JobRequest(request=request, origins=origins, warning=warning)


def batch_script(
    folder: Path,
    config: ExecutorConfig,
    *,
    num_tasks: int,
    request: Request,
    notes: Sequence[str] = (),
    python: str = sys.executable,  # has the package, on the nodes too
) -> str:
    """The script of an array whose settings name one card; notes say where the request comes from.

    Raises ConfigError: Slurm would refuse the array, or a value breaks out of its line.
    """
    if not 1 <= num_tasks <= MAX_ARRAY:
        raise ConfigError(f"num_tasks must be in [1, {MAX_ARRAY}], got {num_tasks}")
    limit = f"%{config.workers}" if config.workers else ""
    log = str(folder).replace("%", "%%") + "/logs/%A_%a.log"
    named = {"partition": config.partition, "account": config.account}
    directives = [
        "--job-name=thinsection",
        f"--array=1-{num_tasks}{limit}",
        f"--output={_quoted(log, 'out')}",
        "--open-mode=append",
        *resource_directives(request, config),
        *(f"--{name}={_quoted(value, name)}" for name, value in named.items() if value),
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
    return request.directives(
        gres=_quoted(config.gres, "gres") if config.gres else None
    )


def _quoted(text: str, name: str) -> str:
    """The text as one value of a directive, as sbatch reads its lines."""
    if CONTROL.search(text):
        raise ConfigError(
            f"{name} must hold no line break or control character, got {text!r}"
        )
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def fitting_nodes(
    listed: str, request: Request, *, suits: Callable[[str], bool] = lambda gpu: True
) -> list[str]:
    """A line for each partition and kind of GPU that a request fits, with what is free there now.

    `listed` is what `SINFO` prints; `suits` says whether the job fits a GPU of that name, '' where
    Slurm knows none.
    """
    counted: dict[str, Counter[str]] = {}
    for row in listed.splitlines():
        partition, nodes, state, cpus, mib, limit, gres = row.split("|")
        small = int(cpus.rstrip("+")) < request.cpus
        small |= int(mib.rstrip("+")) * MIB < request.memory_bytes
        short = limit[:1].isdigit() and parse_walltime(limit) < request.walltime_s
        if small or short or state not in ("idle", "mix", "alloc", "comp"):
            continue
        cards = re.findall(r"gpu:(?:([^:,()]+):)?(\d+)", gres)
        fit = [
            f" gpu:{n}".rstrip(":")
            for n, k in cards
            if int(k) >= request.gpus and suits(n)
        ]
        for kind in fit if request.gpus else [""]:
            counted.setdefault(partition + kind, Counter())[state] += int(nodes)
    told = (
        (kind, sum(of.values()), of["idle"], of["mix"]) for kind, of in counted.items()
    )
    return [
        f"{n}: fits {k} nodes, now {idle} idle, {mix} partly free"
        for n, k, idle, mix in told
    ]
