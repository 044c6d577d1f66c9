"""What the monitor of a process recorded, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# file systems that are reached over a network: opening weights from them is slow at every start
NETWORK_FILESYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "9p")
)


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
    """

    host: str
    pid: int
    started: float
    requested: Requested
    samples: tuple[Sample, ...]
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
