"""Resources of a batch job, number by number, and the script of its array."""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinsection.errors import ConfigError
from thinsection.jobs.chunks import MAX_ARRAY
from thinsection.jobs.executor import CONTROL, ExecutorConfig, Rung, parse_walltime
from thinsection.types import GIB, MIB, format_bytes, parse_bytes
from thinsection.usage.analysis import Request, format_walltime
from thinsection.usage.limits import TIME_LIMIT_VARIABLE

DEFAULT = Request(cpus=4, memory_bytes=8 * GIB, gpus=0, walltime_s=4 * 3600)
# prints a row per kind of node and state
SINFO = ("sinfo", "--noheader", "--format=%P|%D|%t|%c|%m|%l|%G")
_WORKING_STATES = ("idle", "mix", "alloc", "comp")
_PLAIN = re.compile(r"[\w@%+=:,./-]+")
_CARDS = re.compile(r"gpu:(?:([^:,()]+):)?(\d+)")

# field of `Request` -> value and source
Numbers = dict[str, tuple[int, str]]


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Resources of one job."""

    request: Request
    # a line per number with its source and margin
    origins: tuple[str, ...]
    # why a wanted prediction is missing
    warning: str = ""

    def lines(self) -> tuple[str, ...]:
        """Lines for the user: the warning, then the sources."""
        if not self.warning:
            return self.origins
        return (f"warning: {self.warning}", *self.origins)


def job_request(
    config: ExecutorConfig, predicted: Numbers | None = None, *, warning: str = ""
) -> JobRequest:
    """Resources of a job: from flags (the first of a list), else predictions, else defaults."""
    config = config.at_rung(Rung())
    names_gpu = (config.gres or "").startswith("gpu")
    numbers: Numbers = {
        "cpus": (DEFAULT.cpus, "default"),
        "memory_bytes": (DEFAULT.memory_bytes, "default"),
        "gpus": (1 if names_gpu else 0, "named in the settings"),
        "walltime_s": (DEFAULT.walltime_s, "default"),
    }
    numbers.update(predicted or {})
    if config.job_cpus:
        numbers["cpus"] = (config.job_cpus, "--job-cpus")
    if config.job_memory:
        numbers["memory_bytes"] = (parse_bytes(config.job_memory), "--job-memory")
    if config.walltime:
        numbers["walltime_s"] = (parse_walltime(config.walltime), "--walltime")

    request = Request(
        cpus=numbers["cpus"][0],
        memory_bytes=numbers["memory_bytes"][0],
        gpus=numbers["gpus"][0],
        walltime_s=numbers["walltime_s"][0],
    )
    origins = [
        f"{request.cpus} CPUs: {numbers['cpus'][1]}",
        f"{format_bytes(request.memory_bytes)}: {numbers['memory_bytes'][1]}",
        f"{format_walltime(request.walltime_s)}: {numbers['walltime_s'][1]}",
    ]
    if request.gpus:
        origins.append(f"{request.gpus} GPU: {numbers['gpus'][1]}")
    return JobRequest(request=request, origins=tuple(origins), warning=warning)


def batch_script(
    folder: Path,
    config: ExecutorConfig,
    *,
    num_tasks: int,
    request: Request,
    notes: Sequence[str] = (),
    python: str = sys.executable,
) -> str:
    """Script of an array.

    Args:
        folder: folder of the array.
        config: settings with one memory size and one GPU.
        num_tasks: array tasks.
        request: resources of each array task.
        notes: lines with the sources of the request.
        python: Python interpreter with the package; it must have the same path on the nodes.

    Raises:
        ConfigError: Slurm would refuse the array, or a value would end its line of the script.
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
    ]
    if config.partition:
        directives.append(f"--partition={_quoted(config.partition, 'partition')}")
    if config.account:
        directives.append(f"--account={_quoted(config.account, 'account')}")
    # directives of the user come last and take precedence
    directives += config.directive

    command = [python, "-m", "thinsection", "slurm", "array-task", str(folder)]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {directive}" for directive in directives]
    lines += [f"# {' '.join(note.split())}" for note in notes]
    lines += [
        "set -euo pipefail",
        f"export OMP_NUM_THREADS={request.cpus}",
        f"export {TIME_LIMIT_VARIABLE}={request.walltime_s}",
        f'exec {shlex.join(command)} --index "$SLURM_ARRAY_TASK_ID"',
    ]
    return "\n".join(lines) + "\n"


def resource_directives(request: Request, config: ExecutorConfig) -> list[str]:
    """Directives for CPUs, memory, time and GPU; `--gres` in the settings takes precedence."""
    gres = _quoted(config.gres, "gres") if config.gres else None
    return request.directives(gres=gres)


def _quoted(text: str, name: str) -> str:
    """Quotes the text as one value of a directive, in the way that sbatch reads its lines."""
    if CONTROL.search(text):
        raise ConfigError(
            f"{name} must contain no line break or control character, got {text!r}"
        )
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def fitting_nodes(
    listed: str, request: Request, *, suits: Callable[[str], bool] = lambda gpu: True
) -> list[str]:
    """One line per partition and kind of GPU that fits a request, with its free nodes.

    Args:
        listed: output of `SINFO`.
        request: resources of the job.
        suits: tells whether the job fits a GPU of this name; '' if Slurm does not name it.
    """
    nodes_by_state: dict[str, Counter[str]] = {}
    for row in listed.splitlines():
        partition, num_nodes, state, cpus, mib, limit, gres = row.split("|")
        if state not in _WORKING_STATES or int(cpus.rstrip("+")) < request.cpus:
            continue
        if int(mib.rstrip("+")) * MIB < request.memory_bytes:
            continue
        has_limit = limit[:1].isdigit()
        if has_limit and parse_walltime(limit) < request.walltime_s:
            continue
        kinds = [partition]
        if request.gpus:
            kinds = [
                f"{partition} gpu:{card}".rstrip(":")
                for card, count in _CARDS.findall(gres)
                if int(count) >= request.gpus and suits(card)
            ]
        for kind in kinds:
            states = nodes_by_state.setdefault(kind, Counter())
            states[state] += int(num_nodes)
    return [
        f"{kind}: {states.total()} nodes are large enough, {states['idle']} are idle now, "
        f"{states['mix']} are partly free"
        for kind, states in nodes_by_state.items()
    ]
