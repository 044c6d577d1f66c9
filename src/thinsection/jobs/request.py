"""Resources of a batch job, number by number, and the script of its array."""

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinsection.errors import ConfigError
from thinsection.files.urls import VARIABLE
from thinsection.jobs.backend import MAX_ARRAY
from thinsection.jobs.executor import (
    CONTROL,
    ExecutorConfig,
    ResourceStep,
    parse_walltime,
)
from thinsection.types import GIB, MIB, counted, format_bytes, parse_bytes
from thinsection.usage.analysis import Request, format_walltime
from thinsection.usage.monitor import TIME_LIMIT_VARIABLE

DEFAULT = Request(cpus=4, memory_bytes=8 * GIB, gpus=0, walltime_s=4 * 3600)
# prints a row per kind of node and state
SINFO = ("sinfo", "--noheader", "--format=%P|%D|%t|%c|%m|%l|%G")
_WORKING_STATES = ("idle", "mix", "alloc", "comp")
_PLAIN = re.compile(r"[\w@%+=:,./-]+")
_CARDS = re.compile(r"gpu:(?:([^:,()]+):)?(\d+)")

# field of `Request` -> value and source
Numbers = dict[str, tuple[int, str]]


def job_request(
    config: ExecutorConfig, predicted: Numbers | None = None, *, warning: str = ""
) -> Request:
    """Resources of a job: from flags (the first of a list), else predictions, else defaults."""
    config = config.at_step(ResourceStep())
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
    cpus, cpus_origin = numbers["cpus"]
    memory_bytes, memory_origin = numbers["memory_bytes"]
    walltime_s, walltime_origin = numbers["walltime_s"]
    gpus, gpus_origin = numbers["gpus"]
    origins = [
        f"{cpus} CPUs: {cpus_origin}",
        f"{format_bytes(memory_bytes)}: {memory_origin}",
        f"{format_walltime(walltime_s)}: {walltime_origin}",
    ]
    if gpus:
        origins.append(f"{gpus} GPU: {gpus_origin}")
    return Request(
        cpus=cpus,
        memory_bytes=memory_bytes,
        gpus=gpus,
        walltime_s=walltime_s,
        origins=tuple(origins),
        warning=warning,
    )


def batch_script(
    folder: Path,
    config: ExecutorConfig,
    *,
    num_tasks: int,
    request: Request,
    python: str = sys.executable,
) -> str:
    """Script of an array.

    Args:
        folder: folder of the array.
        config: settings with one memory size and one GPU.
        num_tasks: array tasks.
        request: resources of each array task; the script repeats their sources.
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
    lines += [f"# {' '.join(note.split())}" for note in request.origins]
    lines += [
        "set -euo pipefail",
        f"export OMP_NUM_THREADS={request.cpus}",
        f"export {TIME_LIMIT_VARIABLE}={request.walltime_s}",
    ]
    # file with the whole URLs of slides, where this command has one
    if VARIABLE in os.environ:
        lines.append(f"export {VARIABLE}={shlex.quote(os.environ[VARIABLE])}")
    lines += [
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


@dataclass(frozen=True, kw_only=True)
class _Nodes:
    """Nodes of one kind and state in a partition, a row of `SINFO`."""

    partition: str
    is_default: bool
    state: str
    number: int
    cpus: int
    memory_bytes: int
    limit_s: int | None  # None: no limit
    gres: str

    @classmethod
    def of_row(cls, row: str) -> "_Nodes":
        """Reads a row."""
        partition, number, state, cpus, mib, limit, gres = row.split("|")
        return cls(
            partition=partition.rstrip("*"),
            is_default=partition.endswith("*"),
            state=state,
            number=int(number),
            cpus=int(cpus.rstrip("+")),
            memory_bytes=int(mib.rstrip("+")) * MIB,
            limit_s=parse_walltime(limit) if limit[:1].isdigit() else None,
            gres=gres,
        )


def shortages(
    request: Request, listed: str, partition: str | None
) -> dict[str, tuple[int, str]]:
    """Numbers of a request that no node has: field -> what the nodes have, and a sentence.

    Args:
        request: resources of the job.
        listed: output of `SINFO`; nothing is known if it is ''.
        partition: names of partitions with commas; None is Slurm's default partition.
    """
    names = (partition or "").split(",")
    nodes = []
    for one in map(_Nodes.of_row, listed.splitlines()):
        if one.partition in names if partition else one.is_default:
            nodes.append(one)
    if request.gpus:
        nodes = [one for one in nodes if "gpu" in one.gres] or nodes
    nodes = [one for one in nodes if one.state in _WORKING_STATES] or nodes
    if not nodes:
        return {}
    largest = max(
        nodes,
        key=lambda one: (
            min(one.memory_bytes, request.memory_bytes),
            min(one.cpus, request.cpus),
        ),
    )
    place = f"the largest node of partition {largest.partition} has"
    lacking = {}
    if request.cpus > largest.cpus:
        lacking["cpus"] = (largest.cpus, f"{place} {counted(largest.cpus, 'CPU')}")
    if request.memory_bytes > largest.memory_bytes:
        memory = format_bytes(largest.memory_bytes)
        lacking["memory_bytes"] = (largest.memory_bytes, f"{place} {memory}")
    if largest.limit_s is not None and request.walltime_s > largest.limit_s:
        limit = format_walltime(largest.limit_s)
        words = f"the limit of partition {largest.partition} is {limit}"
        lacking["walltime_s"] = (largest.limit_s, words)
    return lacking


def fit_to_nodes(request: Request, listed: str, config: ExecutorConfig) -> Request:
    """The request with no more CPUs, memory and time than some node has; the lines say so.

    Numbers of the user stay, with a warning.

    Args:
        request: the request, with a line for each of CPUs, memory and time.
        listed: output of `SINFO`.
        config: settings with the partition and the user's numbers.
    """
    chosen = {
        "cpus": config.job_cpus,
        "memory_bytes": config.job_memory,
        "walltime_s": config.walltime,
    }
    numbers = request.numbers
    origins = list(request.origins)
    lacking = shortages(request, listed, config.partition)
    for number, name in enumerate(chosen):
        if name not in lacking:
            continue
        most, words = lacking[name]
        if chosen[name]:
            origins.append(f"warning: {origins[number]} is too much: {words}")
            continue
        numbers[name] = most
        origins[number] = f"{words}; without this limit {origins[number]}"
    return Request(**numbers, origins=tuple(origins), warning=request.warning)


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
    for nodes in map(_Nodes.of_row, listed.splitlines()):
        if nodes.state not in _WORKING_STATES or nodes.cpus < request.cpus:
            continue
        if nodes.memory_bytes < request.memory_bytes:
            continue
        if nodes.limit_s is not None and nodes.limit_s < request.walltime_s:
            continue
        partition = nodes.partition + "*" * nodes.is_default
        kinds = [partition]
        if request.gpus:
            kinds = [
                f"{partition} gpu:{card}".rstrip(":")
                for card, count in _CARDS.findall(nodes.gres)
                if int(count) >= request.gpus and suits(card)
            ]
        for kind in kinds:
            states = nodes_by_state.setdefault(kind, Counter())
            states[nodes.state] += nodes.number
    return [
        f"{kind}: {states.total()} nodes are large enough, {states['idle']} are idle now, "
        f"{states['mix']} are partly free"
        for kind, states in nodes_by_state.items()
    ]
