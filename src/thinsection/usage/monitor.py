"""The monitor of a run: a thread that writes what the process tree uses to a file, once a second.

The file has a header line (who, limits, facts), a line per sample (values in the order of
`SAMPLE_FIELDS`) and a last line with the stage seconds and the process's peak. It is appended to,
so that a killed run leaves its timeline; a torn last line is ignored by `read_usage`.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TextIO

import psutil

from thinsection.usage.limits import Requested, environment_facts, read_limits

USAGE_FOLDER = "usage"
_INTERVAL_S = 1.0
# walking the whole process table costs the most; a child that lives shorter is seen by its parent's
# children_user time
_REFRESH_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a process tree.

    Attributes:
        t_s: seconds since the monitor started.
        cpu_s: CPU seconds that the tree used since then, children that ended included.
        rss_bytes: resident memory, summed over the tree (pages shared by forks count twice).
        processes: number of processes.
        read_bytes, write_bytes: through read and write calls since the start.
        net_bytes: received and sent by the whole node since the start.
        gpu_util: mean utilisation of the visible GPUs, [0, 1], or None without one.
        gpu_bytes: memory that this tree holds on them, or None.
    """

    t_s: float
    cpu_s: float
    rss_bytes: int
    processes: int
    read_bytes: int
    write_bytes: int
    net_bytes: int
    gpu_util: float | None = None
    gpu_bytes: int | None = None


SAMPLE_FIELDS = tuple(Sample.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """The record of one monitored process tree.

    Attributes:
        host, pid, started: which process; `started` in seconds since 1970.
        requested: its limits.
        samples: in order of time.
        stage_seconds: busy and waiting seconds by stage, as the stream counted them.
        facts: settings and findings that explain them: device, decode_workers, reader,
            torch_cuda_build, gpus_visible, cache_filesystem.
        idle: the block ended and no stage had done anything; False for a killed process.
    """

    host: str
    pid: int
    started: float
    requested: Requested
    samples: tuple[Sample, ...]
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    idle: bool = False


class ResourceMonitor:
    """Records a process tree while the block runs: `with ResourceMonitor(out): ...`.

    Args:
        out: output folder of the run; the record is `out/usage/HOST-PID-TIME.jsonl`.
        facts: settings that explain the record, beside what is found in the environment.
        stage_seconds: asked when the block ends.
        interval_s: seconds between two looks.

    Memory: constant; about 100 bytes of file per sample.
    """

    def __init__(
        self,
        out: Path,
        *,
        facts: Mapping[str, Any] | None = None,
        stage_seconds: Callable[[], Mapping[str, float]] = dict,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._host, self._pid, self._started = socket.gethostname(), os.getpid(), time.time()
        name = f"{self._host}-{self._pid}-{int(self._started * 1000)}.jsonl"
        self.path = Path(out) / USAGE_FOLDER / name
        self._facts, self._stage_seconds = dict(facts or {}), stage_seconds
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._begin = time.perf_counter()
        self._gpu = GpuSampler()
        self._sampler = TreeSampler(gpu=self._gpu)
        self._file: TextIO = self.path.open("w", encoding="utf-8", buffering=1)
        facts = environment_facts(gpus_visible=self._gpu.count) | self._facts
        header = {"host": self._host, "pid": self._pid, "started": self._started}
        self._write(header | {"requested": asdict(read_limits()), "facts": facts})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            self._look()
            self._write({"stage_seconds": dict(self._stage_seconds())})
        finally:
            self._gpu.close()
            self._file.close()

    def _run(self) -> None:
        self._look()
        while not self._stop.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        sample = self._sampler.sample(time.perf_counter() - self._begin)
        self._write([getattr(sample, name) for name in SAMPLE_FIELDS])

    def _write(self, value: Any) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")


def read_usage(out: Path) -> list[ProcessUsage]:
    """The records below an invocation's folder, see `read_usages`."""
    return read_usages((Path(out) / USAGE_FOLDER).glob("*.jsonl"))


def read_usages(paths: Iterable[Path]) -> list[ProcessUsage]:
    """The records of these files, oldest first; unreadable headers are left out."""
    parsed = [_parse(path.read_text(encoding="utf-8").splitlines()) for path in paths]
    return sorted((u for u in parsed if u is not None), key=lambda usage: usage.started)


def _parse(lines: list[str]) -> ProcessUsage | None:
    values = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the torn last line of a killed process
            values.append(json.loads(line))
    if not values or not isinstance(values[0], dict) or "requested" not in values[0]:
        return None
    header, rows = values[0], values[1:]
    samples = [Sample(**dict(zip(SAMPLE_FIELDS, row))) for row in rows if isinstance(row, list)]
    ends = [row["stage_seconds"] for row in rows if isinstance(row, dict)]
    return ProcessUsage(
        host=header["host"],
        pid=header["pid"],
        started=header["started"],
        requested=Requested(**header["requested"]),
        samples=tuple(samples),
        stage_seconds=ends[-1] if ends else {},
        facts=header.get("facts", {}),
        idle=bool(ends) and not any(v for k, v in ends[-1].items() if k.endswith("_busy")),
    )


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
