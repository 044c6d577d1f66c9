"""What this process may use: Slurm's allocation, cgroup limits (v1 and v2), or the machine.

And what of its surroundings explains a slow run.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from thinsection.stream import cpu_count
from thinsection.types import MIB

TIME_LIMIT_VARIABLE = "THINSECTION_TIME_LIMIT_S"  # Slurm before 23.02 does not tell its jobs
_NO_LIMIT = 1 << 60  # v1 writes a page-rounded 2^63 where nothing is set
# file systems that are reached over a network: opening weights from them is slow at every start
NETWORK_FILESYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "9p")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """What a process may use, and who says so.

    Attributes:
        cpus: CPUs, a fraction where a quota cuts one.
        memory_bytes: limit of host memory.
        gpus: GPUs allocated to it.
        walltime_s: time limit, or None.
        source: 'slurm', 'cgroup' or 'machine'.
        job: Slurm's job (and array task) id, or None.
    """

    cpus: float
    memory_bytes: int
    gpus: int = 0
    walltime_s: float | None = None
    source: str = "machine"
    job: str | None = None


def read_limits(
    *, env: Mapping[str, str] | None = None, root: Path = Path("/"), now: float | None = None
) -> Requested:
    """The tightest of what Slurm, the cgroups and the machine allow.

    Args:
        env: environment variables; None: this process's.
        root: where /proc and /sys are looked for.
        now: seconds since 1970; None: the clock.
    """
    env = os.environ if env is None else env
    cpus = float(cpu_count())
    memory = int(psutil.virtual_memory().total)
    source = "machine"
    cgroup_cpus, cgroup_memory = cgroup_limits(root)
    if cgroup_cpus is not None and cgroup_cpus < cpus:
        cpus, source = cgroup_cpus, "cgroup"
    if cgroup_memory is not None and cgroup_memory < memory:
        memory, source = cgroup_memory, "cgroup"
    job = env.get("SLURM_JOB_ID")
    if job is None:
        gpus = _visible(env.get("CUDA_VISIBLE_DEVICES"))
        return Requested(cpus=cpus, memory_bytes=memory, gpus=gpus, source=source)
    if "SLURM_ARRAY_TASK_ID" in env:
        job = f"{env.get('SLURM_ARRAY_JOB_ID', job)}_{env['SLURM_ARRAY_TASK_ID']}"
    allocated = _number(env.get("SLURM_CPUS_PER_TASK") or env.get("SLURM_CPUS_ON_NODE"))
    asked = _slurm_memory(env, allocated or cpus)
    return Requested(
        cpus=min(cpus, allocated) if allocated else cpus,
        memory_bytes=min(memory, asked) if asked else memory,
        gpus=_slurm_gpus(env),
        walltime_s=_slurm_walltime(env, time.time() if now is None else now),
        source="slurm",
        job=job,
    )


def cgroup_limits(root: Path = Path("/")) -> tuple[float | None, int | None]:
    """(CPUs, bytes) that the cgroups of this process allow; None where they set no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None, None
    base = root / "sys/fs/cgroup"
    cpus: list[float] = []
    memory: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if not controllers:  # v2: one tree; a parent's limit holds for its children
            for folder in _upwards(base, path):
                cpus += _cpus(*(_text(folder / "cpu.max").split() or ["", ""])[:2])
                memory += _bytes(folder / "memory.max")
        if "memory" in names:
            for folder in _upwards(base / "memory", path):
                memory += _bytes(folder / "memory.limit_in_bytes")
        if "cpu" in names:
            tree = base / controllers if (base / controllers).exists() else base / "cpu"
            for folder in _upwards(tree, path):
                cpus += _cpus(*(_text(folder / f"cpu.cfs_{n}_us") for n in ("quota", "period")))
    return min(cpus, default=None), min(memory, default=None)


def _upwards(base: Path, path: str) -> Iterator[Path]:
    folder = base / path.lstrip("/")
    while True:
        yield folder
        if folder == base or base not in folder.parents:
            return
        folder = folder.parent


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _bytes(path: Path) -> list[int]:
    text = _text(path)
    return [int(text)] if text.isdigit() and int(text) < _NO_LIMIT else []


def _cpus(quota: str, period: str) -> list[float]:
    return [int(quota) / int(period)] if quota.isdigit() and period.isdigit() else []


def _number(text: str | None) -> float | None:
    with contextlib.suppress(ValueError, TypeError):
        return float(text)  # type: ignore[arg-type]
    return None


def _slurm_memory(env: Mapping[str, str], cpus: float) -> int | None:
    """Slurm gives MB (2^20); 0 stands for the whole node."""
    per_node = _number(env.get("SLURM_MEM_PER_NODE"))
    if per_node:
        return int(per_node * MIB)
    per_cpu = _number(env.get("SLURM_MEM_PER_CPU"))
    return int(per_cpu * cpus * MIB) if per_cpu else None


def _slurm_gpus(env: Mapping[str, str]) -> int:
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if env.get(name):
            return _visible(env[name])
    count = _number(env.get("SLURM_GPUS_ON_NODE"))
    return int(count) if count is not None else _visible(env.get("CUDA_VISIBLE_DEVICES"))


def _visible(text: str | None) -> int:
    """Number of devices in a list such as '0,1'; '' and '-1' and 'NoDevFiles' hide all."""
    if not text or text in ("-1", "NoDevFiles"):
        return 0
    return len([part for part in text.split(",") if part.strip()])


def _slurm_walltime(env: Mapping[str, str], now: float) -> float | None:
    told = _number(env.get(TIME_LIMIT_VARIABLE))  # by our own batch script
    if told is not None:
        return told
    end, start = _number(env.get("SLURM_JOB_END_TIME")), _number(env.get("SLURM_JOB_START_TIME"))
    if end is None:
        return None
    return end - (start if start is not None else now)


def environment_facts(*, gpus_visible: int) -> dict[str, Any]:
    """gpus_visible, torch_cuda_build (None before torch was loaded), and where the cache lies."""
    torch = sys.modules.get("torch")
    cache = model_cache()
    return {
        "gpus_visible": gpus_visible,
        "torch_cuda_build": torch.version.cuda is not None if torch is not None else None,
        "cache": str(cache),
        "cache_filesystem": filesystem_of(cache),
    }


def model_cache() -> Path:
    """The folder from which hub weights are read."""
    home = os.environ.get("HF_HOME")
    return Path(home) if home else Path.home() / ".cache" / "huggingface"


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that holds a path; '' where the system does not say.

    Args:
        path: need not exist.
        mounts: text of /proc/mounts; None reads it.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text()
        except OSError:
            return ""
    best, kind = -1, ""
    target = path.resolve()
    for line in mounts.splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        point = Path(parts[1].replace("\\040", " "))
        if (point == target or point in target.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), parts[2]
    return kind
