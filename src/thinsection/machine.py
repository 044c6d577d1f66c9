"""CPUs and memory that this process may use: by affinity, and by cgroups (v1 and v2); its heap."""

import atexit
import ctypes
import functools
import gc
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# v1 writes a page-rounded 2^63 where nothing is set
_NO_LIMIT = 1 << 60
# constants in glibc's malloc.h
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
# bytes by which glibc's heap grows
_TOP_PAD_BYTES = 64 << 20
# new objects after which Python searches for cycles
_OBJECTS_PER_SEARCH = 20_000


def cpu_count(root: Path = Path("/")) -> int:
    """CPUs that this process may use, at least 1: more threads than these only wait.

    The fewer of its affinity and, rounded up, its cgroups' quota; `root` holds /proc and /sys.
    """
    cpus = affinity_count()
    quota, _ = cgroup_limits(root)
    if quota is None:
        return cpus
    return max(1, min(cpus, math.ceil(quota)))


def visible_gpus(root: Path = Path("/")) -> tuple[str, ...]:
    """Indices or UUIDs of the NVIDIA GPUs that this process may use, without loading a library.

    `root` holds /dev.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        devices = [
            path.name.removeprefix("nvidia") for path in root.glob("dev/nvidia*")
        ]
        return tuple(
            str(number) for number in sorted(map(int, filter(str.isdigit, devices)))
        )
    gpus: list[str] = []
    for name in chosen.split(","):
        if not name.strip() or name.strip() == "-1":  # CUDA ignores all that follow
            break
        gpus.append(name.strip())
    return tuple(gpus)


def gpu_models(root: Path = Path("/")) -> tuple[str, ...]:
    """Models of the NVIDIA GPUs of this machine, sorted, without loading a library.

    `root` holds /proc.
    """
    models = []
    for path in root.glob("proc/driver/nvidia/gpus/*/information"):
        for line in file_text(path).splitlines():
            name, _, value = line.partition(":")
            if name == "Model":
                models.append(value.strip())
    return tuple(sorted(models))


def affinity_count() -> int:
    """CPUs that this process may be put on, whatever share of their time it may take."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_limits(root: Path = Path("/")) -> tuple[float | None, int | None]:
    """(CPUs, bytes) that the cgroups of this process allow; None where they set no limit.

    A parent's limit holds for its children. Version 2 has one tree, version 1 one per controller.
    """
    cpus: list[float] = []
    memory_bytes: list[int] = []
    for tree, folder in _cgroups(root):
        groups = [folder]
        groups += [f for f in folder.parents if f == tree or tree in f.parents]
        for group in groups:
            quota, _, period = file_text(group / "cpu.max").partition(" ")
            cpus += _quotient(quota, period)
            quota = file_text(group / "cpu.cfs_quota_us")
            cpus += _quotient(quota, file_text(group / "cpu.cfs_period_us"))
            memory_bytes += _bytes_limit(group / "memory.max")
            memory_bytes += _bytes_limit(group / "memory.limit_in_bytes")
    return min(cpus, default=None), min(memory_bytes, default=None)


def stalled_s(root: Path = Path("/")) -> dict[str, float]:
    """Seconds so far in which work was ready and had no CPU, by what held it up.

    'throttled': the quota of a cgroup; 'queued': other work of the cgroup or machine, as pressure
    stall information has it; 'stolen': a CPU's mean of what the host took from a virtual machine.
    """
    throttled = 0.0
    pressure = file_text(root / "proc/pressure/cpu")
    for _, folder in _cgroups(root):
        rows = dict(row.split() for row in file_text(folder / "cpu.stat").splitlines())
        microseconds = int(rows.get("throttled_usec", 0))  # version 2
        nanoseconds = int(rows.get("throttled_time", 0))  # version 1
        throttled = max(throttled, microseconds / 1e6, nanoseconds / 1e9)
        pressure = file_text(folder / "cpu.pressure") or pressure
    total = re.search(r"some .*total=(\d+)", pressure)
    first_line = file_text(root / "proc/stat").partition("\n")[0]
    ticks = first_line.split()[1:]
    stolen_ticks = int(ticks[7]) if len(ticks) > 7 else 0
    return {
        "throttled": throttled,
        "queued": int(total[1]) / 1e6 if total else 0.0,
        # Linux counts 10 ms, USER_HZ
        "stolen": stolen_ticks / 100 / (os.cpu_count() or 1),
    }


def cpu_model() -> str:
    """The CPU's name, '' where the system does not say."""
    lines = file_text(Path("/proc/cpuinfo")).splitlines()
    return next((line for line in lines if line.startswith("model name")), "")


def file_text(path: Path) -> str:
    """The text of a file, stripped; '' where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cgroups(root: Path) -> Iterator[tuple[Path, Path]]:
    """(Tree, folder of this process in it): of version 2 one, of version 1 one per controller."""
    for line in file_text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        # mounted together, such as 'cpu,cpuacct', or apart
        for name in {names, *names.split(",")}:
            tree = root / "sys/fs/cgroup" / name
            yield tree, tree / path.lstrip("/")


def _quotient(quota: str, period: str) -> list[float]:
    """CPUs of a quota; nothing where none is set."""
    if not quota.isdigit() or not period.isdigit():
        return []
    return [int(quota) / int(period)]


def _bytes_limit(path: Path) -> list[int]:
    """Bytes that a file allows; nothing where it sets no limit."""
    text = file_text(path)
    if not text.isdigit() or int(text) >= _NO_LIMIT:
        return []
    return [int(text)]


def search_cycles_rarely() -> None:
    """Let Python search for cycles of objects after 20,000 new ones, and not at the process's end.

    By default it searches after 700 new objects, and several times at the end of the process, where
    nothing is gained. PyTorch has 300,000 objects, so a search takes 0.1 s. Of 2.5 CPU-seconds for
    a run of one tiny slide, 0.6 were such searches. It is a decision for a whole process: the
    command and the workers of a pool call it.
    """
    gc.set_threshold(_OBJECTS_PER_SEARCH, *gc.get_threshold()[1:])
    # objects that are frozen are not searched; the first one that is registered is called last
    atexit.register(gc.freeze)


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory for the rest of this process; False without glibc.

    By default each tensor above 32 MiB is mapped anew and its pages are cleared at first use, which
    takes up to half of an encoder's CPU time (benchmarks/bench_heap.py). With this, the heap stays
    at its peak and gets fragmented, so it is a decision for a whole process. A run calls it,
    `load_encoder` does not.
    """
    libc = _glibc()
    if libc is None:
        return False
    results = [
        libc.mallopt(_MMAP_MAX, 0),
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1),
        libc.mallopt(_TOP_PAD, _TOP_PAD_BYTES),
    ]
    return all(result == 1 for result in results)


def give_back_freed_memory() -> None:
    """Make malloc return freed memory to the system; nothing without glibc.

    By default it keeps what lies between arrays that are still in use.
    """
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
