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

from thinsection.machine import file_text, stalled_s
from thinsection.types import Document, PlainValues
from thinsection.usage.limits import Requested, read_limits
from thinsection.usage.samplers import GpuSampler, Sample, TreeSampler

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
