"""What this process may use by Slurm, cgroups and the machine; what makes it slow."""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from thinsection.machine import affinity_count, cgroup_limits, file_text
from thinsection.types import MIB

TIME_LIMIT_VARIABLE = "THINSECTION_TIME_LIMIT_S"  # Slurm before 23.02 does not tell its jobs
# file systems that are reached over a network: opening weights from them is slow at every start
NETWORK_FILESYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "9p")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """What a process may use, and who says so."""

    cpus: float  # a fraction where a quota cuts one
    memory_bytes: int  # of the host
    gpus: int = 0
    walltime_s: float | None = None
    source: str = "machine"  # or 'slurm', 'cgroup'
    job: str | None = None  # Slurm's job (and array task) id


def read_limits(
    *, env: Mapping[str, str] | None = None, root: Path = Path("/"), now: float | None = None
) -> Requested:
    """The tightest of what Slurm, cgroups and the machine allow; `root` holds /proc and /sys."""
    env = os.environ if env is None else env
    whole = float(affinity_count()), int(psutil.virtual_memory().total)
    cgroup_cpus, cgroup_memory = cgroup_limits(root)
    cpus, memory = min(whole[0], cgroup_cpus or whole[0]), min(whole[1], cgroup_memory or whole[1])
    source = "machine" if (cpus, memory) == whole else "cgroup"
    job = env.get("SLURM_JOB_ID")
    if job is None:
        gpus = _visible(env.get("CUDA_VISIBLE_DEVICES"))
        return Requested(cpus=cpus, memory_bytes=memory, gpus=gpus, source=source)
    if "SLURM_ARRAY_TASK_ID" in env:
        job = f"{env.get('SLURM_ARRAY_JOB_ID', job)}_{env['SLURM_ARRAY_TASK_ID']}"
    allocated = _number(env.get("SLURM_CPUS_PER_TASK") or env.get("SLURM_CPUS_ON_NODE"))
    # in MB (2^20), of the node or of a CPU; 0 stands for the whole node
    per_cpu = (_number(env.get("SLURM_MEM_PER_CPU")) or 0) * (allocated or cpus)
    asked = int((_number(env.get("SLURM_MEM_PER_NODE")) or per_cpu) * MIB)
    return Requested(
        cpus=min(cpus, allocated or cpus),
        memory_bytes=min(memory, asked or memory),
        gpus=_slurm_gpus(env),
        walltime_s=_slurm_walltime(env, time.time() if now is None else now),
        source="slurm",
        job=job,
    )


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _slurm_gpus(env: Mapping[str, str]) -> int:
    named = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS")
    count = None if named else _number(env.get("SLURM_GPUS_ON_NODE"))
    return int(count) if count is not None else _visible(named or env.get("CUDA_VISIBLE_DEVICES"))


def _visible(text: str | None) -> int:
    """Number of devices in a list such as '0,1'; '' and '-1' and 'NoDevFiles' hide all."""
    if not text or text in ("-1", "NoDevFiles"):
        return 0
    return len([part for part in text.split(",") if part.strip()])


def _slurm_walltime(env: Mapping[str, str], now: float) -> float | None:
    told = _number(env.get(TIME_LIMIT_VARIABLE))  # by our own batch script
    end, start = _number(env.get("SLURM_JOB_END_TIME")), _number(env.get("SLURM_JOB_START_TIME"))
    if told is not None or end is None:
        return told
    return end - (start if start is not None else now)


def environment_facts(*, gpus_visible: int) -> dict[str, Any]:
    """gpus_visible, torch_cuda_build (None before torch was loaded), and where the cache lies."""
    torch = sys.modules.get("torch")
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return {
        "gpus_visible": gpus_visible,
        "torch_cuda_build": torch.version.cuda is not None if torch is not None else None,
        "cache": str(cache),
        "cache_filesystem": filesystem_of(cache),
    }


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that holds a path, by /proc/mounts; '' where that does not say."""
    target = path.resolve()
    rows = [line.split() for line in (mounts or file_text(Path("/proc/mounts"))).splitlines()]
    found = [(Path(row[1].replace("\\040", " ")), row[2]) for row in rows if len(row) > 2]
    holding = [(len(p.parts), kind) for p, kind in found if p == target or p in target.parents]
    # of mounts on the same point the last one shows
    return max(reversed(holding), key=lambda pair: pair[0], default=(0, ""))[1]
