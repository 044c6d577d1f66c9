"""Samples of a process tree's resource use: CPU, memory, I/O, and the visible GPUs."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType

import psutil

# reading the whole process table is slow, so it is done once in this many samples
_REFRESH_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a process tree; totals count from the start of the monitor."""

    t_s: float
    # CPU seconds of the tree, with ended children
    cpu_s: float
    # sum over the tree; pages shared by forked processes count twice
    rss_bytes: int
    processes: int
    # bytes through read calls
    read_bytes: int
    write_bytes: int
    # bytes received and sent by the whole node
    net_bytes: int
    # mean over the visible GPUs, [0, 1]; None without a GPU
    gpu_util: float | None = None
    # bytes of this tree on the GPUs
    gpu_bytes: int | None = None


class GpuSampler:
    """Utilisation and memory of the visible GPUs through NVML; no GPUs if NVML is missing."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        self.handles: list[object] = []
        self._nvml: ModuleType | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            return
        except pynvml.NVMLError:  # no driver: a node without a GPU
            return
        self._nvml = pynvml
        every = ",".join(str(index) for index in range(pynvml.nvmlDeviceGetCount()))
        for part in env.get("CUDA_VISIBLE_DEVICES", every).split(","):
            name = part.strip()
            if name.isdigit():
                self.handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(name)))
            elif name not in ("", "-1"):
                self.handles.append(pynvml.nvmlDeviceGetHandleByUUID(name.encode()))

    def sample(self, pids: set[int]) -> tuple[float | None, int | None]:
        """(mean utilisation [0, 1], bytes of the processes `pids`); None without a GPU."""
        nvml = self._nvml
        if nvml is None or not self.handles:
            return None, None
        util = 0.0
        held_bytes = 0
        for handle in self.handles:
            with suppress(nvml.NVMLError):  # MIG slices report no utilisation
                util += nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            with suppress(nvml.NVMLError):
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    if process.pid in pids:
                        held_bytes += process.usedGpuMemory or 0
        return util / len(self.handles), held_bytes

    def close(self) -> None:
        """Closes NVML."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


@dataclass(frozen=True, slots=True)
class _Work:
    """CPU seconds, and bytes through read and write calls."""

    cpu_s: float = 0.0
    read_bytes: int = 0
    write_bytes: int = 0

    def __add__(self, other: "_Work") -> "_Work":
        return _Work(
            self.cpu_s + other.cpu_s,
            self.read_bytes + other.read_bytes,
            self.write_bytes + other.write_bytes,
        )


class TreeSampler:
    """Sums CPU, memory and I/O over this process and its descendants."""

    def __init__(self, *, gpu: GpuSampler | None = None) -> None:
        self._root = psutil.Process()
        self._gpu = gpu
        self._tree: list[psutil.Process] = [self._root]
        self._num_looks = 0
        # key: pid; values of the last sample
        self._living: dict[int, _Work] = {}
        self._ended = _Work()
        self._start_net = _net_bytes()
        self._start, _ = self._look()

    def sample(self, t_s: float) -> Sample:
        """Usage of the tree since the sampler was made."""
        work, rss_bytes = self._look()
        gpu_util = None
        gpu_bytes = None
        if self._gpu is not None:
            pids = {process.pid for process in self._tree}
            gpu_util, gpu_bytes = self._gpu.sample(pids)
        return Sample(
            t_s=round(t_s, 2),
            cpu_s=round(work.cpu_s - self._start.cpu_s, 2),
            rss_bytes=rss_bytes,
            processes=len(self._tree),
            read_bytes=work.read_bytes - self._start.read_bytes,
            write_bytes=work.write_bytes - self._start.write_bytes,
            net_bytes=_net_bytes() - self._start_net,
            gpu_util=gpu_util,
            gpu_bytes=gpu_bytes,
        )

    def _look(self) -> tuple[_Work, int]:
        """(Work so far, resident bytes), with the work of ended processes."""
        if self._num_looks % _REFRESH_SAMPLES == 0:
            self._tree = [self._root, *self._root.children(recursive=True)]
        self._num_looks += 1
        living: dict[int, _Work] = {}
        rss_bytes = 0
        for process in self._tree:
            # the process may end meanwhile
            with suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                rss_bytes += process.memory_info().rss
                read_bytes, write_bytes = _io_bytes(process)
                living[process.pid] = _Work(
                    times.user + times.system, read_bytes, write_bytes
                )
        for pid, work in self._living.items():
            if pid not in living:
                self._ended += work
        self._living = living
        return sum(living.values(), start=self._ended), rss_bytes


def _io_bytes(process: psutil.Process) -> tuple[int, int]:
    """Bytes through read and write calls, which include network file systems, unlike block I/O."""
    try:
        counters = process.io_counters()
    except (psutil.AccessDenied, AttributeError, NotImplementedError):
        return 0, 0
    read = getattr(counters, "read_chars", counters.read_bytes)
    write = getattr(counters, "write_chars", counters.write_bytes)
    return read, write


def _net_bytes() -> int:
    """Bytes that the whole node has received and sent; 0 if that is not known."""
    with suppress(OSError, RuntimeError):
        counters = psutil.net_io_counters()
        if counters:
            return int(counters.bytes_recv + counters.bytes_sent)
    return 0
