"""One cheap look at a process tree and at the GPUs it sees."""

import contextlib
import os
from types import ModuleType
from typing import Any

import psutil

from thinsection.usage.model import Sample

# walking the whole process table costs the most; a child that lives shorter is seen by its parent's
# children_user time
_REFRESH_SAMPLES = 5


class GpuSampler:
    """Utilisation and memory of the visible GPUs through NVML; finds none where NVML is not."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self._handles: list[Any] = []
        self._nvml: ModuleType | None = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:  # no driver: a node without a GPU
            return
        self._nvml = pynvml
        visible = (env or dict(os.environ)).get("CUDA_VISIBLE_DEVICES")
        self._handles = [_handle(pynvml, name) for name in _names(pynvml, visible)]

    @property
    def count(self) -> int:
        """GPUs that are watched."""
        return len(self._handles)

    def sample(self, pids: set[int]) -> tuple[float | None, int | None]:
        """(mean utilisation [0, 1], bytes held by `pids`); None without a GPU."""
        if not self._handles or self._nvml is None:
            return None, None
        util, held = 0.0, 0
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):  # MIG slices give no utilisation
                util += self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            with contextlib.suppress(self._nvml.NVMLError):
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    held += (process.usedGpuMemory or 0) if process.pid in pids else 0
        return util / len(self._handles), held

    def close(self) -> None:
        """Lets NVML go."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


def _names(nvml: ModuleType, visible: str | None) -> list[str]:
    if visible is None:
        return [str(i) for i in range(nvml.nvmlDeviceGetCount())]
    return [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]


def _handle(nvml: ModuleType, name: str) -> Any:
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name.encode())


class TreeSampler:
    """Adds up CPU, memory and I/O over a process and its descendants."""

    def __init__(self, pid: int | None = None, *, gpu: GpuSampler | None = None) -> None:
        self._root = psutil.Process(pid)
        self._gpu = gpu
        self._tree: list[psutil.Process] = [self._root]
        self._looks = 0
        self._last: dict[int, tuple[float, int, int]] = {}
        self._gone = (0.0, 0, 0)
        self._start = (0.0, 0, 0)
        self._start_net = _net_bytes()
        self._start = self._totals()[0]

    def sample(self, t_s: float) -> Sample:
        """The state of the tree, counted from when the sampler was made."""
        (cpu_s, read, written), rss = self._totals()
        pids = {process.pid for process in self._tree}
        util, held = self._gpu.sample(pids) if self._gpu else (None, None)
        return Sample(
            t_s=round(t_s, 2),
            cpu_s=round(cpu_s - self._start[0], 2),
            rss_bytes=rss,
            processes=len(self._tree),
            read_bytes=read - self._start[1],
            write_bytes=written - self._start[2],
            net_bytes=_net_bytes() - self._start_net,
            gpu_util=util,
            gpu_bytes=held,
        )

    def _totals(self) -> tuple[tuple[float, int, int], int]:
        if self._looks % _REFRESH_SAMPLES == 0:
            self._tree = [self._root, *self._root.children(recursive=True)]
        self._looks += 1
        seen: dict[int, tuple[float, int, int]] = {}
        rss = 0
        for process in self._tree:
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    rss += process.memory_info().rss
                    seen[process.pid] = (times.user + times.system, *_io(process))
            except psutil.Error:
                continue  # it ended between two looks
        self._gone = _add(
            self._gone, *(v for pid, v in self._last.items() if pid not in seen)
        )  # what ended processes used stays counted
        self._last = seen
        return _add(self._gone, *seen.values()), rss


def _add(*rows: tuple[float, int, int]) -> tuple[float, int, int]:
    return (sum(r[0] for r in rows), sum(r[1] for r in rows), sum(r[2] for r in rows))


def _io(process: psutil.Process) -> tuple[int, int]:
    """Bytes through read and write calls: unlike block I/O they include network file systems."""
    try:
        counters = process.io_counters()
    except (psutil.AccessDenied, AttributeError, NotImplementedError):
        return 0, 0
    return getattr(counters, "read_chars", counters.read_bytes), getattr(
        counters, "write_chars", counters.write_bytes
    )


def _net_bytes() -> int:
    try:
        counters = psutil.net_io_counters()
    except (OSError, RuntimeError):
        return 0
    return int(counters.bytes_recv + counters.bytes_sent) if counters else 0
