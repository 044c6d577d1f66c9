"""Records the resource use of a process tree in a thread, and reads the records.

A record is a file with a header line (host, limits, facts), one line per `Sample` and second, and
a last line with the stage seconds. If a run is killed, its samples remain.
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
from types import ModuleType

import numpy as np
import numpy.typing as npt
import psutil

from thinsection.machine import affinity_count, cgroup_limits, file_text, stalled_s
from thinsection.types import MIB, Document, PlainValues

USAGE_FOLDER = "usage"
# file systems in a network, from which weights load slowly at every start
NETWORK_FILESYSTEMS = frozenset(
    [
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
    ]
)
# set by our own batch script, since Slurm before 23.02 does not pass it to jobs
TIME_LIMIT_VARIABLE = "THINSECTION_TIME_LIMIT_S"
_Work = npt.NDArray[np.float64]
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


class TreeSampler:
    """Sums CPU, memory and I/O over this process and its descendants."""

    def __init__(self, *, gpu: GpuSampler | None = None) -> None:
        self._root = psutil.Process()
        self._gpu = gpu
        self._tree: list[psutil.Process] = [self._root]
        self._num_looks = 0
        # CPU seconds, bytes read and bytes written, by pid in the last sample, and of the ended
        self._living: dict[int, _Work] = {}
        self._ended: _Work = np.zeros(3)
        self._start_net = _net_bytes()
        self._start, _ = self._look()

    def sample(self, t_s: float) -> Sample:
        """Usage of the tree since the sampler was made."""
        work, rss_bytes = self._look()
        cpu_s, read_bytes, write_bytes = (work - self._start).tolist()
        gpu_util = None
        gpu_bytes = None
        if self._gpu is not None:
            pids = {process.pid for process in self._tree}
            gpu_util, gpu_bytes = self._gpu.sample(pids)
        return Sample(
            t_s=round(t_s, 2),
            cpu_s=round(cpu_s, 2),
            rss_bytes=rss_bytes,
            processes=len(self._tree),
            read_bytes=int(read_bytes),
            write_bytes=int(write_bytes),
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
                cpu_s = times.user + times.system
                living[process.pid] = np.array([cpu_s, *_io_bytes(process)])
        for pid, work in self._living.items():
            if pid not in living:
                self._ended += work
        self._living = living
        return sum(living.values(), start=self._ended.copy()), rss_bytes


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


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """Record of one monitored process tree."""

    host: str
    pid: int
    # seconds since 1970
    started: float
    requested: Requested
    # sorted by time
    samples: tuple[Sample, ...]
    # seconds by stage, counted by the stream
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    # device, decode_threads, reader, torch_cuda_build, gpus_visible, cache_filesystem
    facts: PlainValues = field(default_factory=dict)
    # see `machine.stalled_s`
    stalled_s: Mapping[str, float] = field(default_factory=dict)
    # True if the block ended before any stage did work
    idle: bool = False

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
        """Largest resident memory in bytes."""
        return max(sample.rss_bytes for sample in self.samples)


@contextmanager
def resource_monitor(
    out: Path,
    *,
    facts: PlainValues | None = None,
    stage_seconds: Callable[[], Mapping[str, float]] = dict,
    interval_s: float = 1.0,
) -> Iterator[Path]:
    """Records this process tree while the block runs, in `out/usage/HOST-PID-TIME.jsonl`.

    Write errors are ignored, so that a record never ends a run.

    Args:
        out: folder of the invocation's record.
        facts: settings that explain the record, added to those of the environment.
        stage_seconds: called when the block ends.
        interval_s: seconds between two samples.

    Yields:
        Path of the record.

    Memory:
        Constant; about 100 bytes of file per sample.
    """
    host = socket.gethostname()
    pid = os.getpid()
    started = time.time()
    begin_s = time.perf_counter()
    path = Path(out) / USAGE_FOLDER / f"{host}-{pid}-{int(started * 1000)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()
    with closing(GpuSampler()) as gpu, path.open("wb", buffering=0) as file:
        sampler = TreeSampler(gpu=gpu)

        def write(value: object) -> None:
            line = json.dumps(value, separators=(",", ":"))
            with suppress(OSError):
                file.write(line.encode() + b"\n")

        def write_sample() -> None:
            write(astuple(sampler.sample(time.perf_counter() - begin_s)))

        def watch() -> None:
            write_sample()
            while not ended.wait(interval_s):
                write_sample()

        environment = environment_facts(gpus_visible=len(gpu.handles))
        header = {
            "host": host,
            "pid": pid,
            "started": started,
            "facts": environment | dict(facts or {}),
            "requested": asdict(read_limits()),
        }
        write(header)
        stalled_before = stalled_s()
        thread = threading.Thread(target=watch, name="monitor", daemon=True)
        thread.start()
        try:
            yield path
        finally:
            ended.set()
            thread.join()
            write_sample()
            stalled = {
                cause: seconds - stalled_before[cause]
                for cause, seconds in stalled_s().items()
            }
            write({"stage_seconds": dict(stage_seconds()), "stalled_s": stalled})


def read_usage(out: Path) -> list[ProcessUsage]:
    """Records in an invocation's folder, oldest first; those with a bad header are skipped."""
    usages = []
    for path in (Path(out) / USAGE_FOLDER).glob("*.jsonl"):
        # the file may have been changed by hand
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            usage = _parse_record(path.read_text(encoding="utf-8").splitlines())
            if usage is not None:
                usages.append(usage)
    return sorted(usages, key=lambda usage: usage.started)


def _parse_record(lines: list[str]) -> ProcessUsage | None:
    """Usage from the lines of a record; None without a header."""
    rows = []
    for line in lines:
        with suppress(ValueError):  # the incomplete last line of a killed process
            rows.append(json.loads(line))
    if not rows or not isinstance(rows[0], dict) or "requested" not in rows[0]:
        return None
    values: Document = dict(rows[0])
    values["requested"] = Requested(**values["requested"])
    values["samples"] = tuple(Sample(*row) for row in rows[1:] if isinstance(row, list))
    ends = [row for row in rows[1:] if isinstance(row, dict)]
    if ends:
        end = ends[-1]
        values |= end
        values["idle"] = not any(
            seconds
            for name, seconds in end["stage_seconds"].items()
            if name.endswith("_busy")
        )
    return ProcessUsage(**values)


def environment_facts(*, gpus_visible: int) -> dict[str, object]:
    """gpus_visible, torch_cuda_build (None before torch is loaded), and the cache's file system."""
    torch = sys.modules.get("torch")
    # it gives "~" for a user without a home folder, where Path.home() raises an error
    home = os.path.expanduser("~")  # noqa: PTH111
    cache = Path(os.environ.get("HF_HOME") or f"{home}/.cache/huggingface")
    return {
        "gpus_visible": gpus_visible,
        "torch_cuda_build": None if torch is None else torch.version.cuda is not None,
        "cache": str(cache),
        "cache_filesystem": filesystem_of(cache),
    }


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """Type of the file system of a path, by /proc/mounts; '' if it is not listed."""
    target = path.resolve()
    deepest = -1
    filesystem = ""
    for line in (mounts or file_text(Path("/proc/mounts"))).splitlines():
        cells = line.split()
        if len(cells) < 3:
            continue
        point = Path(cells[1].replace("\\040", " "))
        holds_path = point == target or point in target.parents
        # if several mounts share a point, the last one counts
        if holds_path and len(point.parts) >= deepest:
            deepest = len(point.parts)
            filesystem = cells[2]
    return filesystem
