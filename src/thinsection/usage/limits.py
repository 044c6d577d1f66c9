"""Limits of a process: the smallest limit that Slurm, cgroups or the machine sets."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from thinsection.machine import affinity_count, cgroup_limits
from thinsection.types import MIB

# set by our own batch script, since Slurm before 23.02 does not pass it to jobs
TIME_LIMIT_VARIABLE = "THINSECTION_TIME_LIMIT_S"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """Resources that a process may use, and the source of the limits."""

    # a fraction if a quota limits the CPUs
    cpus: float
    # bytes of host memory
    memory_bytes: int
    gpus: int = 0
    walltime_s: float | None = None
    # 'machine', 'slurm' or 'cgroup'
    source: str = "machine"
    # Slurm's job (and array task) id
    job: str | None = None


def read_limits(
    *, env: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Requested:
    """Smallest limits from Slurm, cgroups and the machine; `root` contains /proc and /sys."""
    machine_cpus = float(affinity_count())
    machine_bytes = int(psutil.virtual_memory().total)
    cgroup_cpus, cgroup_bytes = cgroup_limits(root)
    cpus = min(machine_cpus, cgroup_cpus or machine_cpus)
    memory_bytes = min(machine_bytes, cgroup_bytes or machine_bytes)
    if "SLURM_JOB_ID" in env:
        return _slurm_limits(env, cpus, memory_bytes)
    is_cut = cpus != machine_cpus or memory_bytes != machine_bytes
    return Requested(
        cpus=cpus,
        memory_bytes=memory_bytes,
        gpus=_count_devices(env.get("CUDA_VISIBLE_DEVICES")),
        source="cgroup" if is_cut else "machine",
    )


def _slurm_limits(env: Mapping[str, str], cpus: float, memory_bytes: int) -> Requested:
    """Limits of a Slurm job; they do not exceed the CPUs and bytes of its node."""
    job = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in env:
        job = f"{env.get('SLURM_ARRAY_JOB_ID', job)}_{env['SLURM_ARRAY_TASK_ID']}"
    job_cpus = _number(env.get("SLURM_CPUS_PER_TASK") or env.get("SLURM_CPUS_ON_NODE"))
    # memory is in MB (2^20), per node or per CPU; 0 means the whole node
    per_cpu = _number(env.get("SLURM_MEM_PER_CPU")) or 0
    per_node = _number(env.get("SLURM_MEM_PER_NODE"))
    job_bytes = int((per_node or per_cpu * (job_cpus or cpus)) * MIB)
    return Requested(
        cpus=min(cpus, job_cpus or cpus),
        memory_bytes=min(memory_bytes, job_bytes or memory_bytes),
        gpus=_slurm_gpus(env),
        walltime_s=_slurm_walltime(env),
        source="slurm",
        job=job,
    )


def _slurm_gpus(env: Mapping[str, str]) -> int:
    """GPUs of a Slurm job: the listed ones, else their number, else those visible to CUDA."""
    names = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS")
    if names:
        return _count_devices(names)
    count = _number(env.get("SLURM_GPUS_ON_NODE"))
    if count is not None:
        return int(count)
    return _count_devices(env.get("CUDA_VISIBLE_DEVICES"))


def _slurm_walltime(env: Mapping[str, str]) -> float | None:
    """Time limit of a Slurm job in seconds; None if it is not known."""
    limit_s = _number(env.get(TIME_LIMIT_VARIABLE))
    end = _number(env.get("SLURM_JOB_END_TIME"))
    if limit_s is not None or end is None:
        return limit_s
    start = _number(env.get("SLURM_JOB_START_TIME"))
    return end - (time.time() if start is None else start)


def _count_devices(text: str | None) -> int:
    """Number of devices in a list such as '0,1'; '', '-1' and 'NoDevFiles' mean none."""
    if not text or text in ("-1", "NoDevFiles"):
        return 0
    return len([part for part in text.split(",") if part.strip()])


def _number(text: str | None) -> float | None:
    """Number in a text; None if there is none."""
    with suppress(ValueError):
        return float(text or "")
    return None
