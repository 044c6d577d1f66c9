"""What a run used of what it held: figures, the bottleneck in one sentence, the next request.

`efficiency.html` shows it: one file without scripts or outside resources.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from thinsection.files.pages import render_page
from thinsection.types import GIB, MIB, format_bytes
from thinsection.usage.monitor import NETWORK_FILESYSTEMS, ProcessUsage, Sample

MEMORY_MARGIN, TIME_MARGIN, CPU_MARGIN = 1.2, 1.5, 1.15  # said beside the numbers
LEAST_TIME_S = 300
_MEMORY_STEP = 256 * MIB
_WAITS = 0.15  # a stage that waits less than this share of the time is well fed
# of its CPUs: where a run got less and work waited for one, others are in its way
_STARVED = 0.7
_HELD_UP = {  # by what `machine.stalled_s` names
    "throttled": "was held back by its cgroup's quota: ask for more CPUs (--job-cpus)",
    "queued": "stood behind other work of the machine: ask for CPUs of its own (--job-cpus), or "
    "run when they are free",
    "stolen": "was held back by the host of this virtual machine: use another one",
}
_NEAR = 0.9  # share of a limit from which on a process was close to being killed
GPU_IDLE_UTIL = 0.01

_ROOM = "thinsection.usage"  # of the templates
_WIDTH, _ROW_HEIGHT, _LABEL_WIDTH = 900, 70, 120
_FRAME = {"width": _WIDTH, "left": _LABEL_WIDTH, "row_height": _ROW_HEIGHT}
_ROW_STEP = _ROW_HEIGHT + 18
_MAX_POINTS = 600
_COLOURS = ("#1f6f8b", "#c0532b", "#5a7d2a", "#7a4b94", "#8a6d1a", "#2b5fc0")
_STAGES = ("prepare", "decode", "transfer", "encode", "write")


@dataclass(frozen=True)
class Share:
    """Requested against used of one resource, as a person reads them."""

    name: str  # 'CPU', 'memory', 'time', 'GPU'
    requested: str
    used: str
    fraction: float | None  # None where nothing was requested or known


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a job asks for, or the next one of its kind should."""

    cpus: int
    memory_bytes: int
    gpus: int
    walltime_s: int

    def directives(self, *, gres: str | None = None) -> list[str]:
        """The request as sbatch takes it; `gres` stands in place of the number of GPUs."""
        gres = gres or (f"gpu:{self.gpus}" if self.gpus else None)
        memory, time = (
            math.ceil(self.memory_bytes / MIB),
            format_walltime(self.walltime_s),
        )
        asked = [f"--cpus-per-task={self.cpus}", f"--mem={memory}M", f"--time={time}"]
        return [*asked, f"--gres={gres}"] if gres else asked

    def sbatch_lines(self) -> tuple[str, ...]:
        """The request as `#SBATCH` lines."""
        return tuple(f"#SBATCH {line}" for line in self.directives())


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The analysis of one run."""

    shares: tuple[Share, ...]
    bottleneck: str  # one sentence with the flag to change
    warnings: tuple[str, ...]
    next_request: Request | None  # None where nothing was worked on
    wall_s: float  # of the longest process
    stage_seconds: Mapping[str, float]  # summed over processes


def analyse(usages: Sequence[ProcessUsage]) -> Efficiency:
    """Judges the records of a run; with several jobs, each resource by the sum, peaks by the worst.

    Of workers that record themselves only those count that did work: neither who merely waited for
    them nor a process that found everything done says what the work takes. Raises ValueError: no
    record holds a sample.
    """
    sampled = [usage for usage in usages if usage.samples]
    if not sampled:
        raise ValueError("usages must hold at least one sample, got none")
    worked = [usage for usage in sampled if not usage.idle]
    records = (
        [usage for usage in worked if "device" in usage.facts] or worked or sampled
    )
    stages: Counter[str] = Counter()
    for usage in records:
        stages.update(usage.stage_seconds)
    advice, cpus = (
        "nothing was left to do, so there is no advice",
        records[-1].requested.cpus,
    )
    if worked:
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
    """The request that would have held every one of these processes, with the stated margins."""
    cpus = max(u.cpu_s / max(u.wall_s, 1e-9) for u in usages)
    memory, seconds = with_margins(
        max(u.peak_bytes for u in usages), max(u.wall_s for u in usages)
    )
    memory, asked = max(GIB // 2, memory), max(1, round(cpus * CPU_MARGIN))
    gpus = max((u.requested.gpus for u in usages if not _gpu_idle(u)), default=0)
    return Request(cpus=asked, memory_bytes=memory, gpus=gpus, walltime_s=seconds)


def with_margins(memory_bytes: float, seconds: float) -> tuple[int, int]:
    """What is asked for: memory in steps of 256 MiB, whole minutes of at least five."""
    asked = math.ceil(memory_bytes * MEMORY_MARGIN / _MEMORY_STEP) * _MEMORY_STEP
    return asked, max(LEAST_TIME_S, math.ceil(seconds * TIME_MARGIN / 60) * 60)


def starvation(usages: Sequence[ProcessUsage]) -> str:
    """One sentence on what kept the CPUs from work that was ready; '' where nothing did.

    No setting of the run helps then, and how its stages waited for each other says little.
    """
    worst = max(
        usages, key=lambda u: max(u.stalled_s.values(), default=0) / max(u.wall_s, 1e-9)
    )
    got = worst.cpu_s / max(worst.wall_s * worst.requested.cpus, 1e-9)
    cause = max(worst.stalled_s, key=lambda name: worst.stalled_s[name], default="")
    lost = min(1.0, worst.stalled_s.get(cause, 0.0) / max(worst.wall_s, 1e-9))
    if got >= _STARVED or lost < _WAITS:
        return ""
    why = f"{lost:.0%} of the time work {_HELD_UP[cause]}"
    return f"the run got {got:.0%} of its {worst.requested.cpus:g} CPUs: {why}"


def held_up(stages: Mapping[str, float]) -> str:
    """What has set the pace of the tiles so far, in two words; '' where nobody knows yet."""
    wait, busy = stages.get("encode_wait", 0.0), stages.get("encode_busy", 0.0)
    if busy <= 0:
        return ""
    return f"bottleneck: {'decode' if wait / (wait + busy) >= _WAITS else 'encode'}"


def bottleneck(
    stages: Mapping[str, float], facts: Mapping[str, Any], *, cpus: float
) -> str:
    """One sentence: which stage held the others up, and the flag that changes it."""
    wait = stages.get("encode_wait", 0.0)
    busy = stages.get("encode_busy", 0.0) + stages.get("transfer_busy", 0.0)
    if wait + busy <= 0:
        return "no tile was embedded, so no stage held another up"
    share = wait / (wait + busy)
    on_gpu = str(facts.get("device", "cpu")).startswith("cuda")
    who = "the GPU" if on_gpu else "the encoder"
    if share < _WAITS:
        if stages.get("write_wait", 0.0) > _WAITS * busy:
            return f"{who} waited for results to be written: put --out on a faster file system"
        kept = f"{who} was kept busy {1 - share:.0%} of the time"
        if on_gpu:
            return f"{kept}, so the GPU sets the pace: more GPUs (--workers, --gpus) scale the run"
        return f"{kept} on the CPU: use a GPU (--device cuda --gres gpu:1), or more --workers"
    waited = f"{who} waited {share:.0%} of the time for"
    workers = int(facts.get("decode_workers") or 1)
    if stages.get("prepare_busy", 0.0) > stages.get("decode_busy", 0.0):
        remedy = "raise --prefetch-slides, or run tissue and tiles once before (thinsection tile)"
        return f"{waited} slides to be opened and searched for tissue: {remedy}"
    wanted = max(workers + 1, math.ceil(workers * (wait + busy) / max(busy, 1e-9)))
    if workers >= cpus:
        remedy = f"ask for {wanted} CPUs (--job-cpus {wanted})"
        return f"{waited} decoding on all {workers} CPUs of the job: {remedy}"
    target = min(wanted, max(int(cpus), workers + 1))
    return f"{waited} decoding: raise --decode-workers from {workers} to {target}"


def _shares(usages: Sequence[ProcessUsage]) -> tuple[Share, ...]:
    offered = sum(u.wall_s * u.requested.cpus for u in usages)
    used = sum(u.cpu_s for u in usages)
    worst = max(usages, key=lambda u: u.peak_bytes / u.requested.memory_bytes)
    longest = max(usages, key=lambda u: u.wall_s)
    memory, peak = worst.requested.memory_bytes, worst.peak_bytes
    limit, took = longest.requested.walltime_s, longest.wall_s
    cpus = f"{usages[-1].requested.cpus:g} CPUs, {offered:.0f} CPU-s"
    at_most = format_walltime(limit) if limit else "no limit"
    rows = [
        Share("CPU", cpus, f"{used:.0f} CPU-s", used / offered if offered else None),
        Share("memory", format_bytes(memory), format_bytes(peak), peak / memory),
        Share("time", at_most, format_walltime(took), took / limit if limit else None),
    ]
    if with_gpu := [u for u in usages if u.requested.gpus]:
        util = fmean(s.gpu_util or 0.0 for u in with_gpu for s in u.samples)
        held = max(s.gpu_bytes or 0 for u in with_gpu for s in u.samples)
        gpus = max(u.requested.gpus for u in with_gpu)
        asked = f"{gpus} GPU{'s' * (gpus > 1)}, {sum(u.wall_s for u in usages):.0f} s"
        rows.append(
            Share("GPU", asked, f"{util:.0%} busy, peak {format_bytes(held)}", util)
        )
    return tuple(rows)


def _warnings(usages: Sequence[ProcessUsage]) -> Iterator[str]:
    facts = _facts(usages)
    if any(u.requested.gpus and _gpu_idle(u) for u in usages):
        remedy = "pass --device cuda, or drop --gres and let somebody else have it"
        yield f"a GPU was allocated and never used: {remedy}"
    has_gpu = any(u.requested.gpus or u.facts.get("gpus_visible") for u in usages)
    if has_gpu and facts.get("torch_cuda_build") is False:
        yield "torch is a CPU build on a node with a GPU: install the CUDA build of torch there"
    if (kind := facts.get("cache_filesystem")) in NETWORK_FILESYSTEMS:
        remedy = "set HF_HOME to a local disk, or load weights from one (--weights)"
        yield f"the model cache {facts.get('cache')!r} is on a slow file system ({kind}): {remedy}"
    for u in usages:
        name = f"job {u.requested.job}" if u.requested.job else f"process {u.pid}"
        memory, limit = u.peak_bytes / u.requested.memory_bytes, u.requested.walltime_s
        if memory > _NEAR:
            end = (
                f"{name} used {memory:.0%} of its memory and was close to being killed"
            )
            yield f"{end}: raise --job-memory or lower --memory"
        if limit and u.wall_s > _NEAR * limit:
            yield f"{name} used {u.wall_s / limit:.0%} of its time: raise --walltime"


def _facts(usages: Sequence[ProcessUsage]) -> dict[str, Any]:
    return {k: v for usage in usages for k, v in usage.facts.items() if v is not None}


def _gpu_idle(usage: ProcessUsage) -> bool:
    """No look ever saw this process's memory on a GPU, nor the GPU at work."""
    return all(
        not s.gpu_bytes and (s.gpu_util or 0.0) < GPU_IDLE_UTIL for s in usage.samples
    )


def rates(samples: Sequence[Sample], *names: str) -> list[float]:
    """Growth per second of the sum of some totals from sample to sample; 0 for the first."""
    found = [0.0]
    for before, after in pairwise(samples):
        span = after.t_s - before.t_s
        grown = sum(getattr(after, name) - getattr(before, name) for name in names)
        found.append(max(0.0, grown / span) if span > 0 else found[-1])
    return found


def format_walltime(seconds: float) -> str:
    """'01:02:03' or '2-03:04:05', as Slurm reads it."""
    days, rest = divmod(math.ceil(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def efficiency_page(analysis: Efficiency, usages: Sequence[ProcessUsage]) -> str:
    """The page as HTML text."""
    seconds = analysis.stage_seconds
    stages = [
        (name, seconds.get(f"{name}_busy", 0.0), seconds.get(f"{name}_wait", 0.0))
        for name in _STAGES
        if f"{name}_busy" in seconds or f"{name}_wait" in seconds
    ]
    request, wall = analysis.next_request, format_walltime(analysis.wall_s)
    sbatch = "\n".join(request.sbatch_lines()) if request else ""
    shown = {
        "wall": wall,
        "sbatch": sbatch,
        "timeline": timeline_svg(usages),
        "stages": stages,
    }
    return render_page(
        _ROOM, "efficiency.html", analysis=analysis, processes=usages, **shown
    )


def timeline_svg(usages: Sequence[ProcessUsage]) -> str:
    """CPU, memory, GPU and disk over time as one SVG picture, a line per process.

    Memory: at most 600 points per line, however long the run was.
    """
    records = [u for u in usages if u.samples]
    begin = min((u.started for u in records), default=0.0)
    length = max((u.started - begin + u.wall_s for u in records), default=1.0) or 1.0
    kinds: list[tuple[str, list[list[float]], Callable[[float], str]]] = [
        ("CPUs", [rates(u.samples, "cpu_s") for u in records], "{:.1f}".format),
        (
            "memory",
            [[float(s.rss_bytes) for s in u.samples] for u in records],
            format_bytes,
        ),
        (
            "disk /s",
            [rates(u.samples, "read_bytes", "write_bytes") for u in records],
            format_bytes,
        ),
    ]
    if any(s.gpu_util is not None for u in records for s in u.samples):
        busy = [[s.gpu_util or 0.0 for s in u.samples] for u in records]
        kinds.insert(1, ("GPU", busy, "{:.0%}".format))
    rows = []
    for index, (label, lines, show) in enumerate(kinds):
        top = index * _ROW_STEP + 6
        highest = max((v for line in lines for v in line), default=0.0) or 1.0
        drawn = []
        for number, (usage, line) in enumerate(zip(records, lines)):
            times = [(usage.started - begin + s.t_s) / length for s in usage.samples]
            points = _points(times, [value / highest for value in line], top=top)
            drawn.append((_COLOURS[number % len(_COLOURS)], points))
        rows.append({"label": label, "peak": show(highest), "top": top, "lines": drawn})
    shown = {
        "height": len(rows) * _ROW_STEP + 24,
        "length": format_walltime(length),
        **_FRAME,
    }
    return render_page(_ROOM, "timeline.svg", rows=rows, **shown).strip()


def _points(times: Sequence[float], values: Sequence[float], *, top: int) -> str:
    """The line in px, of shares in [0, 1]; of many samples the highest of each column stays."""
    columns: dict[int, float] = {}
    for t, value in zip(times, values):
        column = round(t * _MAX_POINTS)
        columns[column] = max(value, columns.get(column, 0.0))
    step = (_WIDTH - _LABEL_WIDTH - 4) / _MAX_POINTS
    places = (
        (_LABEL_WIDTH + x * step, top + _ROW_HEIGHT * (1 - columns[x])) for x in columns
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(places))
