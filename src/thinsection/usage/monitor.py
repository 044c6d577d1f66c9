"""What a run may use, by Slurm, cgroups and the machine; and a thread that records what it uses.

The record, a file, has a header line (who, limits, facts), a line per `Sample`, one a second, and a
last line with the stage seconds. A killed run leaves its timeline.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from thinsection.machine import affinity_count, cgroup_limits, file_text, stalled_s
from thinsection.types import MIB

USAGE_FOLDER = "usage"
_REFRESH_SAMPLES = 5  # walking the whole process table costs the most
TIME_LIMIT_VARIABLE = (
    "THINSECTION_TIME_LIMIT_S"  # Slurm before 23.02 does not tell its jobs
)
# file systems that are reached over a network: opening weights from them is slow at every start
NETWORK_FILESYSTEMS = frozenset(
    (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "fuse.sshfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "9p",
    )
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
    *, env: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Requested:
    """The tightest of what Slurm, cgroups and the machine allow; `root` holds /proc and /sys."""
    whole = float(affinity_count()), int(psutil.virtual_memory().total)
    cgroup_cpus, cgroup_memory = cgroup_limits(root)
    cpus, memory = (
        min(whole[0], cgroup_cpus or whole[0]),
        min(whole[1], cgroup_memory or whole[1]),
    )
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
    cpus, memory = min(cpus, allocated or cpus), min(memory, asked or memory)
    told: dict[str, Any] = {
        "gpus": _slurm_gpus(env),
        "walltime_s": _slurm_walltime(env),
    }
    return Requested(cpus=cpus, memory_bytes=memory, source="slurm", job=job, **told)


def _number(text: str | None) -> float | None:
    with suppress(ValueError):
        return float(text or "")
    return None


def _slurm_gpus(env: Mapping[str, str]) -> int:
    named = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS")
    count = None if named else _number(env.get("SLURM_GPUS_ON_NODE"))
    return (
        int(count)
        if count is not None
        else _visible(named or env.get("CUDA_VISIBLE_DEVICES"))
    )


def _visible(text: str | None) -> int:
    """Number of devices in a list such as '0,1'; '' and '-1' and 'NoDevFiles' hide all."""
    if not text or text in ("-1", "NoDevFiles"):
        return 0
    return len([part for part in text.split(",") if part.strip()])


def _slurm_walltime(env: Mapping[str, str]) -> float | None:
    told = _number(env.get(TIME_LIMIT_VARIABLE))  # by our own batch script
    end, start = (
        _number(env.get("SLURM_JOB_END_TIME")),
        _number(env.get("SLURM_JOB_START_TIME")),
    )
    if told is not None or end is None:
        return told
    return end - (time.time() if start is None else start)


def environment_facts(*, gpus_visible: int) -> dict[str, Any]:
    """gpus_visible, torch_cuda_build (None before torch was loaded), and where the cache lies."""
    torch = sys.modules.get("torch")
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    build = torch.version.cuda is not None if torch is not None else None
    found: dict[str, Any] = {"gpus_visible": gpus_visible, "torch_cuda_build": build}
    return found | {"cache": str(cache), "cache_filesystem": filesystem_of(cache)}


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that holds a path, by /proc/mounts; '' where that does not say."""
    target = path.resolve()
    rows = [
        line.split()
        for line in (mounts or file_text(Path("/proc/mounts"))).splitlines()
    ]
    found = [
        (Path(row[1].replace("\\040", " ")), row[2]) for row in rows if len(row) > 2
    ]
    holding = [
        (len(p.parts), kind) for p, kind in found if p == target or p in target.parents
    ]
    # of mounts on the same point the last one shows
    return max(reversed(holding), key=lambda pair: pair[0], default=(0, ""))[1]


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process tree, a line of the record; everything since the monitor started."""

    t_s: float
    cpu_s: float  # of the tree, children that ended included
    rss_bytes: int  # summed over the tree: pages shared by forks count twice
    processes: int
    read_bytes: int  # through read calls
    write_bytes: int
    net_bytes: int  # received and sent by the whole node
    gpu_util: float | None = None  # mean of the visible GPUs, [0, 1]; None without one
    gpu_bytes: int | None = None  # that this tree holds on them


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """The record of one monitored process tree."""

    host: str
    pid: int
    started: float  # seconds since 1970
    requested: Requested
    samples: tuple[Sample, ...]  # in order of time
    stage_seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # as the stream counted them
    # device, decode_workers, reader, torch_cuda_build, gpus_visible, cache_filesystem
    facts: Mapping[str, Any] = field(default_factory=dict)
    stalled_s: Mapping[str, float] = field(
        default_factory=dict
    )  # see `machine.stalled_s`
    idle: bool = False  # the block ended and no stage had done anything

    @property
    def wall_s(self) -> float:
        """Seconds until the last sample."""
        return self.samples[-1].t_s

    @property
    def cpu_s(self) -> float:
        """CPU seconds until the last sample."""
        return self.samples[-1].cpu_s

    @property
    def peak_bytes(self) -> int:
        """Most resident memory."""
        return max(sample.rss_bytes for sample in self.samples)


@contextmanager
def resource_monitor(
    out: Path,
    *,
    facts: Mapping[str, Any] | None = None,
    stage_seconds: Callable[[], Mapping[str, float]] = dict,
    interval_s: float = 1.0,
) -> Iterator[Path]:
    """Records this process tree while the block runs, in `out/usage/HOST-PID-TIME.jsonl`.

    `facts` are settings that explain the record, beside what is found in the environment;
    `stage_seconds` is asked when the block ends. What cannot be written is left out: a record is no
    reason to end a run. Memory: constant; about 100 bytes of file per sample.
    """
    host, pid, started = socket.gethostname(), os.getpid(), time.time()
    path = Path(out) / USAGE_FOLDER / f"{host}-{pid}-{int(started * 1000)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    begin, stop = time.perf_counter(), threading.Event()
    with closing(GpuSampler()) as gpu, path.open("wb", buffering=0) as file:
        sampler = TreeSampler(gpu=gpu)

        def write(value: Any) -> None:
            with suppress(OSError):
                file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")

        def look() -> None:
            write(astuple(sampler.sample(time.perf_counter() - begin)))

        def watch() -> None:
            look()
            while not stop.wait(interval_s):
                look()

        found = environment_facts(gpus_visible=len(gpu.handles)) | dict(facts or {})
        header = {"host": host, "pid": pid, "started": started, "facts": found}
        write(header | {"requested": asdict(read_limits())})
        stalled = stalled_s()
        thread = threading.Thread(target=watch, name="monitor", daemon=True)
        thread.start()
        try:
            yield path
        finally:
            stop.set()
            thread.join()
            look()
            grown = {name: s - stalled[name] for name, s in stalled_s().items()}
            write({"stage_seconds": dict(stage_seconds()), "stalled_s": grown})


def read_usage(out: Path) -> list[ProcessUsage]:
    """The records below an invocation's folder, oldest first; unreadable headers are left out."""
    parsed = []
    for path in (Path(out) / USAGE_FOLDER).glob("*.jsonl"):
        with suppress(ValueError, TypeError, KeyError, AttributeError):  # tampered with
            parsed.append(_parse(path.read_text(encoding="utf-8").splitlines()))
    return sorted((u for u in parsed if u is not None), key=lambda usage: usage.started)


def _parse(lines: list[str]) -> ProcessUsage | None:
    values = []
    for line in lines:
        with suppress(ValueError):  # the torn last line of a killed process
            values.append(json.loads(line))
    if not values or not isinstance(values[0], dict) or "requested" not in values[0]:
        return None
    header, *rows = values
    samples = tuple(Sample(*row) for row in rows if isinstance(row, list))
    ends = [row for row in rows if isinstance(row, dict)][-1:]
    busy = [
        v
        for end in ends
        for k, v in end["stage_seconds"].items()
        if k.endswith("_busy")
    ]
    told = {k: v for row in (header, *ends) for k, v in row.items()}
    told["requested"] = Requested(**header["requested"])
    return ProcessUsage(**told, samples=samples, idle=bool(ends) and not any(busy))


class GpuSampler:
    """Utilisation and memory of the visible GPUs through NVML; finds none where NVML is not."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        self.handles: list[Any] = []
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            return
        except pynvml.NVMLError:  # no driver: a node without a GPU
            return
        self._nvml = pynvml
        every = ",".join(map(str, range(pynvml.nvmlDeviceGetCount())))
        for part in env.get("CUDA_VISIBLE_DEVICES", every).split(","):
            name = part.strip()
            if name.isdigit():
                self.handles.append(pynvml.nvmlDeviceGetHandleByIndex(int(name)))
            elif name not in ("", "-1"):
                self.handles.append(pynvml.nvmlDeviceGetHandleByUUID(name.encode()))

    def sample(self, pids: set[int]) -> tuple[float | None, int | None]:
        """(mean utilisation [0, 1], bytes held by `pids`); None without a GPU."""
        if not self.handles:
            return None, None
        util, held = 0.0, 0
        for handle in self.handles:
            with suppress(self._nvml.NVMLError):  # MIG slices give no utilisation
                util += self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            with suppress(self._nvml.NVMLError):
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    held += (process.usedGpuMemory or 0) if process.pid in pids else 0
        return util / len(self.handles), held

    def close(self) -> None:
        """Lets NVML go."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


class TreeSampler:
    """Adds up CPU, memory and I/O over this process and its descendants."""

    def __init__(self, *, gpu: GpuSampler | None = None) -> None:
        self._root = psutil.Process()
        self._gpu = gpu
        self._tree: list[psutil.Process] = [self._root]
        self._looks = 0
        self._last: dict[
            int, list[float]
        ] = {}  # pid -> CPU seconds, bytes read and written
        self._gone = [0.0, 0, 0]
        self._start_net = _net_bytes()
        self._start = self._totals()[0]

    def sample(self, t_s: float) -> Sample:
        """The state of the tree, counted from when the sampler was made."""
        totals, rss = self._totals()
        cpu_s, read, written = (now - then for now, then in zip(totals, self._start))
        gpu = (
            self._gpu.sample({p.pid for p in self._tree}) if self._gpu else (None, None)
        )
        moved = int(read), int(written), _net_bytes() - self._start_net
        return Sample(
            round(t_s, 2), round(cpu_s, 2), rss, len(self._tree), *moved, *gpu
        )

    def _totals(self) -> tuple[list[float], int]:
        """CPU seconds and I/O so far, and resident bytes; what ended processes used is kept."""
        if self._looks % _REFRESH_SAMPLES == 0:
            self._tree = [self._root, *self._root.children(recursive=True)]
        self._looks += 1
        seen: dict[int, list[float]] = {}
        rss = 0
        for process in self._tree:
            with (
                suppress(psutil.Error),
                process.oneshot(),
            ):  # it may end between two looks
                times = process.cpu_times()
                rss += process.memory_info().rss
                seen[process.pid] = [times.user + times.system, *_io(process)]
        gone = [used for pid, used in self._last.items() if pid not in seen]
        self._gone, self._last = _sums(self._gone, *gone), seen
        return _sums(self._gone, *seen.values()), rss


def _sums(*rows: list[float]) -> list[float]:
    return [sum(column) for column in zip(*rows)]


def _io(process: psutil.Process) -> tuple[int, int]:
    """Bytes through read and write calls: unlike block I/O they include network file systems."""
    try:
        counters = process.io_counters()
    except (psutil.AccessDenied, AttributeError, NotImplementedError):
        return 0, 0
    read = getattr(counters, "read_chars", counters.read_bytes)
    return read, getattr(counters, "write_chars", counters.write_bytes)


def _net_bytes() -> int:
    with suppress(OSError, RuntimeError):
        if counters := psutil.net_io_counters():
            return int(counters.bytes_recv + counters.bytes_sent)
    return 0
