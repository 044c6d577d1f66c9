"""A run planned before it runs: headers and thumbnails in, memory and time out; and batch jobs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from thinsection.encode import load_encoder
from thinsection.encode.engine import PRECISIONS, engine_version, why_torch
from thinsection.errors import BudgetError, CohortError, ConfigError, ThinsectionError
from thinsection.files.sources import is_url
from thinsection.jobs.executor import Rung
from thinsection.jobs.request import DEFAULT, JobRequest, Numbers, job_request
from thinsection.machine import cpu_count
from thinsection.planning import calibration, cost
from thinsection.planning.calibration import (
    calibrate,
    encoder_number,
    is_calibrated,
    is_quick,
)
from thinsection.planning.cost import (
    Gpu,
    MemoryPlan,
    Planner,
    QcSize,
    SlideSize,
    TimePlan,
)
from thinsection.qc import Pipeline, load_pipeline
from thinsection.qc.tissue import tissue_mask
from thinsection.qc.work_image import resolution_of, scale_of, work_size
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.geometry import mean_mpp
from thinsection.stages.config import ENCODING, RunConfig, batch_size_of
from thinsection.stages.request import cohort_of
from thinsection.tiles import tile_grid
from thinsection.types import format_bytes, parse_bytes
from thinsection.usage.analysis import (
    LEAST_TIME_S,
    MEMORY_MARGIN,
    TIME_MARGIN,
    with_margins,
)

MAX_OPENED = 64  # headers that a submission opens at most: seconds, not minutes
_MIN_GPU_CPUS, _MAX_GPU_CPUS = 2, 16

Seen = TypeVar("Seen")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run will take."""

    slides: tuple[SlideSize, ...]  # of each slide that opens
    unreadable: dict[str, str]  # slide id -> why it does not
    memory: MemoryPlan  # of one process that takes all slides
    time: TimePlan
    gpu: Gpu | None  # the card that it is planned for; None for a CPU
    warnings: tuple[str, ...]  # budgets that cannot hold, and what would


def plan(
    slides: Sequence[str | Path],
    *,
    config: RunConfig | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> RunPlan:
    """Predicts peak memory and time from headers, thumbnails and this machine's calibration.

    Args:
        slides: files, folders or cohort CSVs.
        config: of the run that is planned.
        on_message: told what is about to be measured, once a machine and encoder.

    Memory: one thumbnail and one tile table at a time, and the encoder.

    Raises:
        ConfigError: unknown GPU or setting.
        CohortError: no slides.
        BudgetError: none that opens.
    """
    config = config or RunConfig()
    look = partial(slide_size, config=config)
    found, unreadable = look_into(cohort_of(slides, config), look)
    if not found:
        raise BudgetError(f"slides must hold one that opens, got none: {unreadable}")
    by, cpus = (
        planner(config, on_message=on_message),
        config.executor.job_cpus or cpu_count(),
    )
    memory, time = by.memory(found, cpus=cpus), by.time(found, cpus=cpus)
    told: dict[str, Any] = {"unreadable": unreadable, "warnings": _warnings(memory, by)}
    return RunPlan(slides=found, memory=memory, time=time, gpu=by.gpu, **told)


def planner(
    config: RunConfig,
    *,
    stage: str = "aggregate",
    on_message: Callable[[str], None] = lambda text: None,
) -> Planner:
    """Looks at the encoder and at this machine.

    Weights are not downloaded: sizes come from the architecture. The first call on a machine, and
    the first with an encoder, measures for some seconds. Raises ConfigError (unknown GPU or
    setting), InvalidInputError (another package's encoder).
    """
    if stage not in ENCODING:
        return Planner(
            config=config, gpu=None, encoder=None, machine=calibrate(), tiles_per_s=0
        )
    gpu = planned_gpu(config)
    if not is_calibrated():
        on_message(
            "measuring this machine: start of a process, decoding (about 10 s, once)"
        )
    machine = calibrate()
    sizes, rates = zip(
        *(_measured(n, config, gpu, on_message) for n in config.encode.encoders)
    )
    size, rate = cost.encoders_together(sizes), 1 / sum(1 / rate for rate in rates)
    return Planner(
        config=config, gpu=gpu, encoder=size, machine=machine, tiles_per_s=rate
    )


def _measured(
    name: str, config: RunConfig, gpu: Gpu | None, on_message: Callable[[str], None]
) -> tuple[calibration.EncoderSize, float]:
    """What an encoder takes, and its tiles per CPU-second by the engine that will run.

    Sizes come from a dry pass by torch; nothing is converted but for a measurement, which is kept.
    """
    settings, tile_px, on_cpu = config.encode, config.tiles.tile_px, gpu is None
    batch_size = batch_size_of(config, on_gpu=not on_cpu)
    sizes = {"batch_size": batch_size, "tile_px": tile_px}
    encoder = load_encoder(
        name, device="cpu", precision=settings.precision, pretrained=False
    )
    refused = why_torch(
        settings.engine, encoder.device, is_random=not settings.pretrained
    )
    can = not refused and encoder.precision in PRECISIONS
    engine: calibration.Engine = "openvino" if can and on_cpu else "torch"
    size = calibration.encoder_size(encoder, on_gpu=not on_cpu, engine=engine, **sizes)
    key = f"{name}|{encoder.precision}|{tile_px}|{engine_version(engine)}"
    if not is_calibrated(key):
        on_message(
            f"measuring {name}: tiles per CPU-second, then memory (once a machine)"
        )
    rate = partial(calibration.measure_rate, encoder, tile_px=tile_px, engine=engine)
    tiles_per_s = encoder_number("encoders", key, rate)
    if on_cpu and is_quick(size, batch_size=batch_size):
        how: dict[str, Any] = {
            "precision": encoder.precision,
            "engine": engine,
            **sizes,
        }
        process = partial(calibration.measure_cpu_peak, name, **how)
        found = encoder_number("peaks", f"{key}|{batch_size}", process)
        size = replace(size, cpu_peak_bytes=int(found))
    return size, tiles_per_s


def planned_gpu(config: RunConfig) -> Gpu | None:
    """The named card (ConfigError: no such one), or the slowest where only 'cuda' is said."""
    settings = config.executor.at(Rung())
    if settings.gpu is not None:
        return cost.find_gpu(settings.gpu)
    kind, _, rest = (settings.gres or "").partition(":")
    if kind != "gpu" and not config.encode.device.startswith("cuda"):
        return None
    named = rest.partition(":")[0]
    return cost.GPUS.get(named) or min(
        cost.GPUS.values(), key=lambda gpu: gpu.half_flops
    )


def look_into(
    entries: Sequence[SlideEntry], look: Callable[[SlideEntry], Seen]
) -> tuple[tuple[Seen, ...], dict[str, str]]:
    """What is seen in the slides that open, and why the others do not, by slide id."""
    seen, unreadable = [], {}
    for entry in entries:
        try:
            seen.append(look(entry))
        except (ThinsectionError, OSError) as error:
            unreadable[entry.slide_id] = str(error)
    return tuple(seen), unreadable


def slide_size(entry: SlideEntry, config: RunConfig) -> SlideSize:
    """Opens a slide, finds its tissue on the thumbnail and counts its tiles; decodes no tile."""
    reader = config.slides.reader
    with entry.open(reader) as slide:
        table = tile_grid(slide, config.tiles, tissue=tissue_mask(slide, config.tissue))
        mask_mpp = config.tissue.mask_mpp
        mpp_xy = resolution_of(slide, mask_mpp, slide.slide_mpp)
        wanted = work_size(slide.size, mpp_xy, mask_mpp)
        finest = [lv for lv in slide.levels if lv.size[0] >= wanted[0]] or [
            slide.levels[0]
        ]
        sizes = {
            "read_px": table.plan.size_lv,
            "mask_px": wanted,
            "thumbnail_px": finest[-1].size,
        }
        known: dict[str, Any] = {name: math.prod(size) for name, size in sizes.items()}
        if config.qc.qc != "off":
            known["qc"] = _qc_size(slide, load_pipeline(config.qc.qc), entry)
        return SlideSize(slide_id=entry.slide_id, num_tiles=len(table), **known)


def _warnings(memory: MemoryPlan, by: Planner) -> tuple[str, ...]:
    found = []
    asked, gpu, size = by.config.executor.at(Rung()).job_memory, by.gpu, by.encoder
    host, on_gpu = format_bytes(memory.host_bytes), format_bytes(memory.gpu_bytes)
    if asked is not None and parse_bytes(asked) < memory.host_bytes:
        remedy = "raise it, or lower --memory or --batch-size"
        found.append(
            f"--job-memory {asked} cannot hold the run: it needs {host}; {remedy}"
        )
    if gpu is not None and by.config.executor.gpu is None:
        found.append(f"planned for a {gpu.name}; name another card with --gpu")
    if gpu is not None and size is not None and memory.gpu_bytes > gpu.memory_bytes:
        fits = by.batch_size * (
            gpu.memory_bytes - (memory.gpu_bytes - size.batch_bytes)
        )
        fits = max(0, fits // max(size.batch_bytes, 1))
        remedy = f"the run needs {on_gpu} on it: use "
        remedy += f"--batch-size {fits}" if fits else "a larger GPU"
        found.append(f"a {gpu.name} has {format_bytes(gpu.memory_bytes)}, {remedy}")
    return tuple(found)


def run_request(
    chunks: Sequence[Sequence[SlideEntry]],
    config: RunConfig,
    *,
    stage: str = "aggregate",
) -> JobRequest:
    """What each job of a run over one of these chunks should ask for.

    All get the same, so it is planned for the hungriest imaginable: as many slides as the largest
    chunk has, as if they were the largest of up to `MAX_OPENED` whose headers and thumbnails are
    opened, evenly over the cohort by file size. A flag always wins; where all are given nothing is
    opened. Without a prediction the defaults are taken and `warning` says why. Raises ConfigError
    (unknown GPU or setting), BudgetError (`--memory` is below the least).
    """
    numbers: Numbers = {}
    if stage != "qc":
        wanted = stage in ENCODING and planned_gpu(config) is not None
        numbers["gpus"] = (1 if wanted else 0, "the settings name one")
    warning, given = "", config.executor
    if not (given.job_cpus and given.job_memory and given.walltime):
        count = max(len(chunk) for chunk in chunks)
        try:
            sample = sample_entries([entry for chunk in chunks for entry in chunk])
            of_run = partial(_run_numbers, stage=stage)
            numbers |= (_qc_numbers if stage == "qc" else of_run)(sample, count, config)
        except (ConfigError, BudgetError):
            raise
        except ThinsectionError as error:
            warning = f"no prediction, so defaults are asked for: {error}"
    return job_request(config.executor, numbers, warning=warning)


def sample_entries(entries: Sequence[SlideEntry]) -> list[SlideEntry]:
    """At most `MAX_OPENED` local slides, evenly over their file sizes, the largest among them.

    Raises CohortError: none is a local file.
    """
    local = [
        e for e in entries if not is_url(e.slide_path) and Path(e.slide_path).exists()
    ]
    if not local:
        rest = "those by URL are not opened before the job runs"
        raise CohortError(f"no slide is a local file; {rest}")
    if len(local) <= MAX_OPENED:
        return local
    ranked = sorted(
        local, key=lambda e: Path(e.slide_path).stat().st_size, reverse=True
    )
    return [
        ranked[i * (len(ranked) - 1) // (MAX_OPENED - 1)] for i in range(MAX_OPENED)
    ]


def _opened(
    sample: Sequence[SlideEntry], look: Callable[[SlideEntry], Seen]
) -> tuple[Seen, ...]:
    sizes, unreadable = look_into(sample, look)
    if not sizes:
        raise CohortError(f"no slide opens, got {next(iter(unreadable.values()))}")
    return sizes


def _numbers(
    cpus: tuple[int, str], memory: tuple[int, str], time: tuple[float, str]
) -> Numbers:
    """Each with its margin, which is said beside where it comes from."""
    asked, wall = with_margins(memory[0], time[0])
    least = f"+{TIME_MARGIN - 1:.0%}, at least {LEAST_TIME_S} s"
    held = (asked, f"{memory[1]}, +{MEMORY_MARGIN - 1:.0%}")
    return {
        "cpus": cpus,
        "memory_bytes": held,
        "walltime_s": (wall, f"{time[1]}, {least}"),
    }


def _like(count: int, opened: Sequence[Any]) -> str:
    slides = f"{count} slides" if count > 1 else "1 slide"
    return f"for {slides} as large as the largest of {len(opened)} opened"


def _run_numbers(
    sample: list[SlideEntry], count: int, config: RunConfig, stage: str
) -> Numbers:
    sizes = _opened(sample, partial(slide_size, config=config))
    by = planner(config, stage=stage)
    ranked = sorted(sizes, key=lambda size: size.num_tiles, reverse=True)
    largest = (ranked * math.ceil(count / len(ranked)))[:count]
    given = config.executor.job_cpus
    cpus = (given, "") if given else _cpus(by, largest)
    memory = by.memory(largest, cpus=cpus[0]).host_bytes
    seconds = by.time(largest, cpus=cpus[0]).wall_s
    on = f"on the {by.gpu.name}" if by.gpu else "at this machine's rates"
    time = f"predicted {seconds:.0f} s {on} {_like(count, sizes)}"
    return _numbers(
        cpus, (memory, f"predicted peak {format_bytes(memory)}"), (seconds, time)
    )


def _cpus(by: Planner, slides: Sequence[SlideSize]) -> tuple[int, str]:
    """As many as keep a GPU fed; on a CPU any number will do, so the default."""
    time = by.time(slides, cpus=1)
    if by.gpu is None or not time.encode_s:
        return DEFAULT.cpus, "default"
    host_s = time.prepare_s + time.decode_s
    cpus = min(max(_MIN_GPU_CPUS, math.ceil(host_s / time.encode_s) + 1), _MAX_GPU_CPUS)
    pace = f"decoding takes {host_s:.0f} CPU-s, the {by.gpu.name} encodes in {time.encode_s:.0f} s"
    return cpus, f"{pace}; one more, {_MIN_GPU_CPUS} to {_MAX_GPU_CPUS}"


def _qc_numbers(sample: Sequence[SlideEntry], count: int, config: RunConfig) -> Numbers:
    """One CPU, and bounds of memory and time."""
    pipeline = load_pipeline(config.qc.qc)
    sizes = _opened(
        sample, partial(_qc_of, reader=config.slides.reader, pipeline=pipeline)
    )
    memory = max(size.peak_bytes for size in sizes)
    seconds = cost.TRAINING_S + count * max(size.most_s for size in sizes)
    peak = f"at most {format_bytes(memory)} for the largest of {len(sizes)} opened"
    time = f"at most {math.ceil(seconds)} s {_like(count, sizes)}"
    return _numbers((1, "the checks use one"), (memory, peak), (seconds, time))


def _qc_of(entry: SlideEntry, *, reader: str, pipeline: Pipeline) -> QcSize:
    """From a slide's header."""
    with entry.open(reader) as slide:
        return _qc_size(slide, pipeline, entry)


def _qc_size(slide: Slide, pipeline: Pipeline, entry: SlideEntry) -> QcSize:
    slide_mpp = scale_of(slide, pipeline, mean_mpp(entry.slide_mpp)).slide_mpp
    how: dict[str, Any] = {
        "work_mpp": min(pipeline.image_mpps),
        "maps": pipeline.asks_nets,
    }
    return QcSize(num_px_l0=math.prod(slide.size), slide_mpp=slide_mpp, **how)
