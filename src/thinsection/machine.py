"""What this process may use of its machine: by affinity, and by cgroups (v1 and v2)."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60  # v1 writes a page-rounded 2^63 where nothing is set


def cpu_count(root: Path = Path("/")) -> int:
    """CPUs that this process may use, at least 1: more threads than these only wait.

    The fewer of its affinity and, rounded up, its cgroups' quota; `root` holds /proc and /sys.
    """
    quota = cgroup_limits(root)[0]
    return (
        affinity_count()
        if quota is None
        else max(1, min(affinity_count(), math.ceil(quota)))
    )


def affinity_count() -> int:
    """CPUs that this process may be put on, whatever share of their time it may take."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def cgroup_limits(root: Path = Path("/")) -> tuple[float | None, int | None]:
    """(CPUs, bytes) that the cgroups of this process allow; None where they set no limit.

    A parent's limit holds for its children. Version 2 has one tree, version 1 one per controller.
    """
    cpus: list[float] = []
    memory: list[int] = []
    for tree, folder in _cgroups(root):
        for group in (
            folder,
            *(f for f in folder.parents if f == tree or tree in f.parents),
        ):
            cpus += _cpus(*(file_text(group / "cpu.max").split() or ["", ""])[:2])
            cpus += _cpus(
                *(file_text(group / f"cpu.cfs_{n}_us") for n in ("quota", "period"))
            )
            memory += _bytes(group / "memory.max") + _bytes(
                group / "memory.limit_in_bytes"
            )
    return min(cpus, default=None), min(memory, default=None)


def stalled_s(root: Path = Path("/")) -> dict[str, float]:
    """Seconds so far in which work was ready and had no CPU, by what held it up.

    'throttled': the quota of a cgroup; 'queued': other work of the cgroup or machine, as pressure
    stall information has it; 'stolen': a CPU's mean of what the host took from a virtual machine.
    """
    found, pressure = {"throttled": 0.0}, file_text(root / "proc/pressure/cpu")
    for _, folder in _cgroups(root):
        rows = dict(row.split() for row in file_text(folder / "cpu.stat").splitlines())
        for name, per_second in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
            found["throttled"] = max(
                found["throttled"], int(rows.get(name, 0)) / per_second
            )
        pressure = file_text(folder / "cpu.pressure") or pressure
    total = re.search(r"some .*total=(\d+)", pressure)
    found["queued"] = int(total[1]) / 1e6 if total else 0.0
    clock = [
        *map(int, file_text(root / "proc/stat").partition("\n")[0].split()[1:]),
        *[0] * 8,
    ]
    found["stolen"] = (
        clock[7] / 100 / (os.cpu_count() or 1)
    )  # Linux counts 10 ms, USER_HZ
    return found


def _cgroups(root: Path) -> Iterator[tuple[Path, Path]]:
    """(Tree, folder of this process in it): of version 2 one, of version 1 one per controller."""
    for line in file_text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in {
            names,
            *names.split(","),
        }:  # mounted together, such as 'cpu,cpuacct', or apart
            tree = root / "sys/fs/cgroup" / name
            yield tree, tree / path.lstrip("/")


def file_text(path: Path) -> str:
    """What a file says, stripped; '' where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _bytes(path: Path) -> list[int]:
    text = file_text(path)
    return [int(text)] if text.isdigit() and int(text) < _NO_LIMIT else []


def _cpus(quota: str, period: str) -> list[float]:
    return [int(quota) / int(period)] if quota.isdigit() and period.isdigit() else []


def cpu_model() -> str:
    """The CPU's name, '' where the system does not say."""
    lines = file_text(Path("/proc/cpuinfo")).splitlines()
    return next((line for line in lines if line.startswith("model name")), "")
