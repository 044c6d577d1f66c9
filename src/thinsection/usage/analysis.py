"""Analysis of a run: resources used and requested, the bottleneck, and the next request."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from thinsection.types import GIB, MIB, PlainValues, counted, format_bytes
from thinsection.usage.monitor import NETWORK_FILESYSTEMS, ProcessUsage

# margins, which are stated beside the numbers
MEMORY_MARGIN = 1.2
TIME_MARGIN = 1.5
CPU_MARGIN = 1.15
LEAST_TIME_S = 300
_MEMORY_STEP = 256 * MIB
# a stage that waits less than this share of the time does not lack input
_FED_SHARE = 0.15
# share of its CPUs; if a run got less while work was ready, other processes slowed it
_STARVED_SHARE = 0.7
# share of a limit above which a process was close to being killed
_NEAR_LIMIT = 0.9
_GPU_IDLE_UTIL = 0.01
# shorter times are replaced by this in divisions
_TINY_S = 1e-9

# messages by cause, as in `machine.stalled_s`
_STALLS = {
    "throttled": "the CPU quota of its cgroup was used up: ask for more CPUs (--job-cpus)",
    "queued": "other processes used the machine: ask for CPUs of its own (--job-cpus), or "
    "run when they are free",
    "stolen": "the host of this virtual machine used its CPUs: use another machine",
}


@dataclass(frozen=True)
class Share:
    """Requested and used amount of one resource, as text for the user."""

    # 'CPU', 'memory', 'time' or 'GPU'
    name: str
    requested: str
    used: str
    # None if nothing was requested or known
    fraction: float | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """Resources that a job requests, or that the next job of its kind should request."""

    cpus: int
    memory_bytes: int
    gpus: int
    walltime_s: int
    # a line per number with its source and margin
    origins: tuple[str, ...] = field(default=(), compare=False)
    # why a wanted prediction is missing
    warning: str = field(default="", compare=False)

    @property
    def numbers(self) -> dict[str, int]:
        """The four numbers by name, as a file stores them."""
        return {
            "cpus": self.cpus,
            "memory_bytes": self.memory_bytes,
            "gpus": self.gpus,
            "walltime_s": self.walltime_s,
        }

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines for the user: the warning, then the sources."""
        if not self.warning:
            return self.origins
        return (f"warning: {self.warning}", *self.origins)

    def directives(self, *, gres: str | None = None) -> list[str]:
        """Directives for sbatch; `gres` replaces the number of GPUs."""
        if not gres and self.gpus:
            gres = f"gpu:{self.gpus}"
        directives = [
            f"--cpus-per-task={self.cpus}",
            f"--mem={math.ceil(self.memory_bytes / MIB)}M",
            f"--time={format_walltime(self.walltime_s)}",
        ]
        if gres:
            directives.append(f"--gres={gres}")
        return directives

    def sbatch_lines(self) -> tuple[str, ...]:
        """The request as `#SBATCH` lines."""
        return tuple(f"#SBATCH {line}" for line in self.directives())


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Analysis of one run."""

    shares: tuple[Share, ...]
    # one sentence with the flag to change
    bottleneck: str
    warnings: tuple[str, ...]
    # None if no work was done
    next_request: Request | None
    # wall-clock time of the longest process
    wall_s: float
    # sums over processes
    stage_seconds: Mapping[str, float]


def analyse(usages: Sequence[ProcessUsage]) -> Efficiency:
    """Analyses the records of a run; for several jobs, sums of resources and the largest peak.

    Only processes that did work count. A process that waited for workers, or found everything done,
    does not show what the work needs.

    Raises:
        ValueError: no record has a sample.
    """
    sampled = [usage for usage in usages if usage.samples]
    if not sampled:
        raise ValueError("usages must contain at least one sample, got none")
    worked = [usage for usage in sampled if not usage.idle]
    on_device = [usage for usage in worked if "device" in usage.facts]
    records = on_device or worked or sampled
    stages: Counter[str] = Counter()
    for usage in records:
        stages.update(usage.stage_seconds)
    advice = "the run had nothing to do, so there is no advice"
    if worked:
        cpus = records[-1].requested.cpus
        advice = starvation(records) or bottleneck(stages, _facts(records), cpus=cpus)
    return Efficiency(
        shares=_shares(records),
        bottleneck=advice,
        warnings=tuple(_warnings(records)),
        next_request=recommend(records) if worked else None,
        wall_s=max(usage.wall_s for usage in records),
        stage_seconds=dict(sorted(stages.items())),
    )


def recommend(usages: Sequence[ProcessUsage]) -> Request:
    """Request that would have been enough for each of these processes, with the stated margins."""
    busy_cpus = max(usage.cpu_s / max(usage.wall_s, _TINY_S) for usage in usages)
    memory_bytes, walltime_s = with_margins(
        max(usage.peak_bytes for usage in usages),
        max(usage.wall_s for usage in usages),
    )
    used_gpus = [usage.requested.gpus for usage in usages if not _gpu_idle(usage)]
    return Request(
        cpus=max(1, round(busy_cpus * CPU_MARGIN)),
        memory_bytes=max(GIB // 2, memory_bytes),
        gpus=max(used_gpus, default=0),
        walltime_s=walltime_s,
    )


def with_margins(memory_bytes: float, seconds: float) -> tuple[int, int]:
    """Bytes and seconds to request, in steps of 256 MiB and whole minutes (at least five)."""
    steps = math.ceil(memory_bytes * MEMORY_MARGIN / _MEMORY_STEP)
    minutes = math.ceil(seconds * TIME_MARGIN / 60)
    return steps * _MEMORY_STEP, max(LEAST_TIME_S, minutes * 60)


def starvation(usages: Sequence[ProcessUsage]) -> str:
    """Sentence on the cause that kept CPUs from work that was ready; '' if there was none.

    In that case no setting of the run helps, and waiting times of stages mean little.
    """

    def stalled_share(usage: ProcessUsage) -> float:
        longest = max(usage.stalled_s.values(), default=0)
        return longest / max(usage.wall_s, _TINY_S)

    worst = max(usages, key=stalled_share)
    offered_s = worst.wall_s * worst.requested.cpus
    got = worst.cpu_s / max(offered_s, _TINY_S)
    stalled = min(1.0, stalled_share(worst))
    if got >= _STARVED_SHARE or stalled < _FED_SHARE:
        return ""
    cause = max(worst.stalled_s, key=lambda name: worst.stalled_s[name])
    why = f"for {stalled:.0%} of the time {_STALLS[cause]}"
    return f"the run got {got:.0%} of its {_cpu_words(worst.requested.cpus)}: {why}"


def slowest_step(stages: Mapping[str, float]) -> str:
    """Slowest stage for the tiles so far, in two words; '' if not known yet."""
    wait = stages.get("encode_wait", 0.0)
    busy = stages.get("encode_busy", 0.0)
    if busy <= 0:
        return ""
    slowest = "decode" if wait / (wait + busy) >= _FED_SHARE else "encode"
    return f"bottleneck: {slowest}"


def bottleneck(stages: Mapping[str, float], facts: PlainValues, *, cpus: float) -> str:
    """Sentence that names the slowest stage and the flag to change."""
    wait = stages.get("encode_wait", 0.0)
    busy = stages.get("encode_busy", 0.0) + stages.get("transfer_busy", 0.0)
    if wait + busy <= 0:
        return "the run embedded no tile, so no stage slowed another"
    share = wait / (wait + busy)
    on_gpu = str(facts.get("device", "cpu")).startswith("cuda")
    who = "the GPU" if on_gpu else "the encoder"
    if share < _FED_SHARE:
        if stages.get("write_wait", 0.0) > _FED_SHARE * busy:
            return f"{who} waited until results were written: put --out on a faster file system"
        was_busy = f"{who} was busy {1 - share:.0%} of the time"
        if on_gpu:
            return f"{was_busy}, so the GPU limits the speed: use more GPUs (--workers, --gpus)"
        return f"{was_busy} on the CPU: use a GPU (--device cuda --gres gpu:1), or more --workers"

    waited = f"{who} waited {share:.0%} of the time for"
    if stages.get("prepare_busy", 0.0) > stages.get("decode_busy", 0.0):
        remedy = "raise --prefetch-slides, or run once with --until tiles before"
        return f"{waited} slides to be opened and searched for tissue: {remedy}"
    decode_threads = facts.get("decode_threads")
    workers = decode_threads if isinstance(decode_threads, int) else 1
    workers = max(1, workers)
    keep_up = math.ceil(workers * (wait + busy) / max(busy, _TINY_S))
    num_threads = max(workers + 1, keep_up)
    if workers >= cpus:
        remedy = f"ask for {num_threads} CPUs (--job-cpus {num_threads})"
        return f"{waited} decoding on all {workers} CPUs of the job: {remedy}"
    target = min(num_threads, max(int(cpus), workers + 1))
    return f"{waited} decoding: raise --decode-threads from {workers} to {target}"


def _shares(usages: Sequence[ProcessUsage]) -> tuple[Share, ...]:
    offered_s = sum(usage.wall_s * usage.requested.cpus for usage in usages)
    used_s = sum(usage.cpu_s for usage in usages)
    fullest = max(
        usages, key=lambda usage: usage.peak_bytes / usage.requested.memory_bytes
    )
    longest = max(usages, key=lambda usage: usage.wall_s)
    memory_bytes = fullest.requested.memory_bytes
    limit_s = longest.requested.walltime_s
    shares = [
        Share(
            "CPU",
            f"{_cpu_words(usages[-1].requested.cpus)}, {offered_s:.0f} CPU-s",
            f"{used_s:.0f} CPU-s",
            used_s / offered_s if offered_s else None,
        ),
        Share(
            "memory",
            format_bytes(memory_bytes),
            format_bytes(fullest.peak_bytes),
            fullest.peak_bytes / memory_bytes,
        ),
        Share(
            "time",
            format_walltime(limit_s) if limit_s else "no limit",
            format_walltime(longest.wall_s),
            longest.wall_s / limit_s if limit_s else None,
        ),
    ]
    with_gpu = [usage for usage in usages if usage.requested.gpus]
    if with_gpu:
        shares.append(_gpu_share(with_gpu))
    return tuple(shares)


def _cpu_words(cpus: float) -> str:
    return "1 CPU" if cpus == 1 else f"{cpus:g} CPUs"


def _gpu_share(usages: Sequence[ProcessUsage]) -> Share:
    utils: list[float] = []
    peak_bytes = 0
    for usage in usages:
        for sample in usage.samples:
            utils.append(sample.gpu_util or 0.0)
            peak_bytes = max(peak_bytes, sample.gpu_bytes or 0)
    util = fmean(utils)
    gpus = max(usage.requested.gpus for usage in usages)
    seconds = sum(usage.wall_s for usage in usages)
    return Share(
        "GPU",
        f"{counted(gpus, 'GPU')}, {seconds:.0f} s",
        f"{util:.0%} busy, peak {format_bytes(peak_bytes)}",
        util,
    )


def _warnings(usages: Sequence[ProcessUsage]) -> Iterator[str]:
    facts = _facts(usages)
    if any(usage.requested.gpus and _gpu_idle(usage) for usage in usages):
        remedy = "pass --device cuda, or remove --gres"
        yield f"the job got a GPU and never used it: {remedy}"
    has_gpu = any(
        usage.requested.gpus or usage.facts.get("gpus_visible") for usage in usages
    )
    if has_gpu and facts.get("torch_cuda_build") is False:
        yield "torch is a CPU build on a node with a GPU: install the CUDA build of torch there"
    filesystem = facts.get("cache_filesystem")
    if filesystem in NETWORK_FILESYSTEMS:
        place = f"the model cache {facts.get('cache')!r} is on a slow file system"
        remedy = "set HF_HOME to a local disk, or load weights from one (--weights)"
        yield f"{place} ({filesystem}): {remedy}"
    for usage in usages:
        requested = usage.requested
        name = f"job {requested.job}" if requested.job else f"process {usage.pid}"
        memory_share = usage.peak_bytes / requested.memory_bytes
        if memory_share > _NEAR_LIMIT:
            yield (
                f"{name} used {memory_share:.0%} of its memory, which is close to the limit: "
                "raise --job-memory or lower --memory"
            )
        limit_s = requested.walltime_s
        if limit_s and usage.wall_s > _NEAR_LIMIT * limit_s:
            yield f"{name} used {usage.wall_s / limit_s:.0%} of its time limit: raise --walltime"


def _facts(usages: Sequence[ProcessUsage]) -> PlainValues:
    """Known facts of all records; later records take precedence."""
    facts: dict[str, object] = {}
    for usage in usages:
        facts |= {name: fact for name, fact in usage.facts.items() if fact is not None}
    return facts


def _gpu_idle(usage: ProcessUsage) -> bool:
    """True if no sample shows memory of this process on a GPU, nor a busy GPU."""
    return all(
        not sample.gpu_bytes and (sample.gpu_util or 0.0) < _GPU_IDLE_UTIL
        for sample in usage.samples
    )


def format_walltime(seconds: float) -> str:
    """Formats a time for Slurm, such as '01:02:03' or '2-03:04:05'."""
    days, within_day = divmod(math.ceil(seconds), 86400)
    hours, within_hour = divmod(within_day, 3600)
    clock = f"{hours:02d}:{within_hour // 60:02d}:{within_hour % 60:02d}"
    return f"{days}-{clock}" if days else clock
