"""What a run used of what it held: figures, the bottleneck in one sentence, the next request."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from thinsection.types import GIB, MIB
from thinsection.units import format_bytes
from thinsection.usage.limits import NETWORK_FILESYSTEMS
from thinsection.usage.monitor import ProcessUsage, Sample

MEMORY_MARGIN, TIME_MARGIN, CPU_MARGIN = 1.2, 1.5, 1.15
_MEMORY_STEP = 256 * MIB
_LEAST_TIME_S = 300.0
_WAITS = 0.15  # a stage that waits less than this share of the time is well fed
GPU_IDLE_UTIL = 0.01


@dataclass(frozen=True, kw_only=True)
class Share:
    """Requested against used of one resource.

    Attributes:
        name: 'CPU', 'memory', 'time', 'GPU', 'GPU memory'.
        requested, used: as a person reads them.
        fraction: used / requested, None where nothing was requested or known.
    """

    name: str
    requested: str
    used: str
    fraction: float | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the next job of this kind should ask for.

    Attributes:
        cpus, memory_bytes, gpus, walltime_s: of one job.
    """

    cpus: int
    memory_bytes: int
    gpus: int
    walltime_s: int

    def sbatch_lines(self) -> tuple[str, ...]:
        """The request as `#SBATCH` lines."""
        lines = [f"--cpus-per-task={self.cpus}", f"--mem={math.ceil(self.memory_bytes / MIB)}M"]
        lines += [f"--gres=gpu:{self.gpus}"] if self.gpus else []
        lines.append(f"--time={format_walltime(self.walltime_s)}")
        return tuple(f"#SBATCH {line}" for line in lines)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The analysis of one run.

    Attributes:
        shares: requested against used.
        bottleneck: one sentence with the flag to change.
        warnings: what should alarm.
        next_request: for the next job; None where nothing was worked on.
        wall_s: of the longest process.
        stage_seconds: summed over processes.
    """

    shares: tuple[Share, ...]
    bottleneck: str
    warnings: tuple[str, ...]
    next_request: Request | None
    wall_s: float
    stage_seconds: Mapping[str, float]


def analyse(usages: Sequence[ProcessUsage]) -> Efficiency:
    """Judges the records of a run; with several jobs, each resource by the sum, peaks by the worst.

    Of workers that record themselves only those count that did work: neither who merely waited for
    them nor a process that found everything done says what the work takes.

    Raises:
        ValueError: no record holds a sample.
    """
    sampled = [usage for usage in usages if usage.samples]
    if not sampled:
        raise ValueError("usages must hold at least one sample, got none")
    worked = [usage for usage in sampled if not usage.idle]
    records = [usage for usage in worked if "device" in usage.facts] or worked or sampled
    stages: defaultdict[str, float] = defaultdict(float)
    for usage in records:
        for name, seconds in usage.stage_seconds.items():
            stages[name] += seconds
    return Efficiency(
        shares=_shares(records),
        bottleneck=bottleneck(stages, _facts(records), cpus=records[-1].requested.cpus)
        if worked
        else "nothing was left to do, so there is no advice",
        warnings=_warnings(records),
        next_request=recommend(records) if worked else None,
        wall_s=max(_wall(u) for u in records),
        stage_seconds=dict(sorted(stages.items())),
    )


def recommend(usages: Sequence[ProcessUsage]) -> Request:
    """The request that would have held every one of these processes, with the stated margins."""
    cpus = max(_cpu(u) / max(_wall(u), 1e-9) for u in usages)
    memory = max(_peak(u) for u in usages) * MEMORY_MARGIN
    seconds = max(_LEAST_TIME_S, max(_wall(u) for u in usages) * TIME_MARGIN)
    gpus = max((u.requested.gpus for u in usages if not _gpu_idle(u)), default=0)
    return Request(
        cpus=max(1, round(cpus * CPU_MARGIN)),
        memory_bytes=max(GIB // 2, math.ceil(memory / _MEMORY_STEP) * _MEMORY_STEP),
        gpus=gpus,
        walltime_s=math.ceil(seconds / 60) * 60,
    )


def bottleneck(stages: Mapping[str, float], facts: Mapping[str, Any], *, cpus: float) -> str:
    """One sentence: which stage held the others up, and the flag that changes it."""
    wait, busy = stages.get("encode_wait", 0.0), _encoding(stages)
    if wait + busy <= 0:
        return "no tile was embedded, so no stage held another up"
    share = wait / (wait + busy)
    on_gpu = str(facts.get("device", "cpu")).startswith("cuda")
    who = "the GPU" if on_gpu else "the encoder"
    if share < _WAITS:
        return _encoder_bound(who, 1 - share, stages, facts, on_gpu=on_gpu)
    waited = f"{who} waited {share:.0%} of the time for"
    workers = int(facts.get("decode_workers") or 1)
    decode, prepare = stages.get("decode_busy", 0.0), stages.get("prepare_busy", 0.0)
    if prepare > decode:
        return (
            f"{waited} slides to be opened and searched for tissue: raise --prefetch-slides, or "
            "run tissue and tiles once before (thinsection tile)"
        )
    wanted = max(workers + 1, math.ceil(workers * (wait + busy) / max(busy, 1e-9)))
    reader = "" if facts.get("reader") == "cucim" else ", or use --reader cucim"
    if workers >= cpus:
        return (
            f"{waited} decoding on all {workers} CPUs of the job: ask for {wanted} CPUs "
            f"(--job-cpus {wanted}){reader}"
        )
    target = min(wanted, max(int(cpus), workers + 1))
    return f"{waited} decoding: raise --decode-workers from {workers} to {target}{reader}"


def _encoder_bound(
    who: str,
    share: float,
    stages: Mapping[str, float],
    facts: Mapping[str, Any],
    *,
    on_gpu: bool,
) -> str:
    writing = stages.get("write_wait", 0.0)
    if writing > _WAITS * _encoding(stages):
        return f"{who} waited for results to be written: put --out on a faster file system"
    kept = f"{who} was kept busy {share:.0%} of the time"
    if on_gpu:
        return f"{kept}, so the GPU sets the pace: more GPUs (--workers, --gpus) scale the run"
    if facts.get("precision") in (None, "fp32"):
        return f"{kept} on the CPU: use --precision bf16, or a GPU (--device cuda --gres gpu:1)"
    return f"{kept} on the CPU: use a GPU (--device cuda --gres gpu:1), or more --workers"


def _encoding(stages: Mapping[str, float]) -> float:
    return stages.get("encode_busy", 0.0) + stages.get("transfer_busy", 0.0)


def _shares(usages: Sequence[ProcessUsage]) -> tuple[Share, ...]:
    wall = sum(_wall(u) for u in usages)
    offered = sum(_wall(u) * u.requested.cpus for u in usages)
    used = sum(_cpu(u) for u in usages)
    worst = max(usages, key=lambda u: _peak(u) / u.requested.memory_bytes)
    longest = max(usages, key=_wall)
    cpus, memory = usages[-1].requested.cpus, worst.requested.memory_bytes
    limit, took = longest.requested.walltime_s, _wall(longest)
    rows: list[tuple[str, str, str, float | None]] = [
        (
            *("CPU", f"{cpus:g} CPUs, {offered:.0f} CPU-s", f"{used:.0f} CPU-s"),
            used / offered if offered else None,
        ),
        ("memory", format_bytes(memory), format_bytes(_peak(worst)), _peak(worst) / memory),
        (
            *("time", format_walltime(limit) if limit else "no limit", format_walltime(took)),
            took / limit if limit else None,
        ),
    ]
    with_gpu = [u for u in usages if u.requested.gpus]
    if with_gpu:
        util = fmean(s.gpu_util or 0.0 for u in with_gpu for s in u.samples)
        held = max((s.gpu_bytes or 0 for u in with_gpu for s in u.samples), default=0)
        gpus = max(u.requested.gpus for u in with_gpu)
        asked = f"{gpus} GPU{'s' * (gpus > 1)}, {wall:.0f} s"
        rows.append(("GPU", asked, f"{util:.0%} busy, peak {format_bytes(held)}", util))
    return tuple(Share(name=n, requested=r, used=u, fraction=f) for n, r, u, f in rows)


def _warnings(usages: Sequence[ProcessUsage]) -> tuple[str, ...]:
    found: list[str] = []
    facts = _facts(usages)
    if any(u.requested.gpus and _gpu_idle(u) for u in usages):
        found.append(
            "a GPU was allocated and never used: pass --device cuda, or drop --gres and let "
            "somebody else have it"
        )
    has_gpu = any(u.requested.gpus or u.facts.get("gpus_visible") for u in usages)
    if has_gpu and facts.get("torch_cuda_build") is False:
        found.append(
            "torch is a CPU build on a node with a GPU: install the CUDA build of torch there"
        )
    kind = facts.get("cache_filesystem")
    if kind in NETWORK_FILESYSTEMS:
        found.append(
            f"the model cache {facts.get('cache')!r} is on a slow file system ({kind}): set "
            "HF_HOME to a local disk, or load weights from one (--weights)"
        )
    for u in usages:
        if _peak(u) > 0.9 * u.requested.memory_bytes:
            found.append(
                f"{_name(u)} used {_peak(u) / u.requested.memory_bytes:.0%} of its memory and was "
                "close to being killed: raise --job-memory or lower --memory"
            )
        limit = u.requested.walltime_s
        if limit and _wall(u) > 0.9 * limit:
            found.append(f"{_name(u)} used {_wall(u) / limit:.0%} of its time: raise --walltime")
    return tuple(found)


def _facts(usages: Sequence[ProcessUsage]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for usage in usages:
        merged |= {k: v for k, v in usage.facts.items() if v is not None}
    return merged


def _gpu_idle(usage: ProcessUsage) -> bool:
    """No look ever saw this process's memory on a GPU, nor the GPU at work."""
    return all(not s.gpu_bytes and (s.gpu_util or 0.0) < GPU_IDLE_UTIL for s in usage.samples)


def _name(usage: ProcessUsage) -> str:
    return f"job {usage.requested.job}" if usage.requested.job else f"process {usage.pid}"


def _wall(usage: ProcessUsage) -> float:
    return usage.samples[-1].t_s


def _cpu(usage: ProcessUsage) -> float:
    return usage.samples[-1].cpu_s


def _peak(usage: ProcessUsage) -> int:
    return max(sample.rss_bytes for sample in usage.samples)


def cpu_rates(samples: Sequence[Sample]) -> list[float]:
    """CPUs in use between one sample and the next; 0 for the first."""
    rates = [0.0]
    for before, after in pairwise(samples):
        span = after.t_s - before.t_s
        rates.append(max(0.0, (after.cpu_s - before.cpu_s) / span) if span > 0 else rates[-1])
    return rates


def format_walltime(seconds: float) -> str:
    """'1:02:03' or '2-03:04:05', as Slurm reads it."""
    whole = math.ceil(seconds)
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
