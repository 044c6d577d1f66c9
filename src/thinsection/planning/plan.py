"""A run planned before it runs: headers and thumbnails in, memory and time out."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinsection.encode import load_encoder
from thinsection.errors import BudgetError, ThinsectionError
from thinsection.jobs.executor import Rung
from thinsection.planning.calibration import Calibration, calibrate, encoder_peak, encoder_rate
from thinsection.planning.cost import (
    GPUS,
    EncoderSize,
    Gpu,
    MemoryPlan,
    SlideSize,
    TimePlan,
    encoders_together,
    find_gpu,
    memory_plan,
    time_plan,
)
from thinsection.planning.encoder import encoder_size, is_quick, measure_cpu_peak, measure_rate
from thinsection.qc.tissue import thumbnail_size, tissue_mask
from thinsection.slide import open_slide
from thinsection.slide.cohort import SlideEntry, load_cohort, parse_mpp
from thinsection.stages.config import RunConfig, batch_size_of, budget_of
from thinsection.stream import cpu_count
from thinsection.tiles import tile_grid
from thinsection.units import format_bytes, parse_bytes

ENCODING_STAGES = ("embed", "aggregate")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run will take.

    Attributes:
        slides: of each slide that opens.
        unreadable: slide id -> why it does not.
        memory, time: of one process that takes all slides.
        gpu: the card that it is planned for; None for a CPU.
        warnings: budgets that cannot hold, and what would.
    """

    slides: tuple[SlideSize, ...]
    unreadable: dict[str, str]
    memory: MemoryPlan
    time: TimePlan
    gpu: Gpu | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Planner:
    """What predictions need beside the slides: measured or looked up once.

    Attributes:
        config: of the run.
        gpu: the card, None for a CPU.
        encoder: None for a run that ends with the tile grid.
        machine: calibration of this machine.
        tiles_per_s: the encoder's rate here, per CPU-second.
    """

    config: RunConfig
    gpu: Gpu | None
    encoder: EncoderSize | None
    machine: Calibration
    tiles_per_s: float

    @property
    def batch_size(self) -> int:
        """Tiles per batch."""
        return batch_size_of(self.config, on_gpu=self.gpu is not None)

    def memory(self, slides: Sequence[SlideSize], *, cpus: int) -> MemoryPlan:
        """Peaks of one process with so many CPUs that takes these slides."""
        stream = self.config.stream
        stream = replace(stream, decode_workers=stream.decode_workers or cpus)
        return memory_plan(
            tuple(slides),
            stream=budget_of(replace(self.config, stream=stream), self.batch_size),
            batch_size=self.batch_size,
            encoder=self.encoder,
            process_bytes=self.machine.process_bytes,
            prefetch_slides=stream.prefetch_slides,
            on_gpu=self.gpu is not None,
        )

    def time(self, slides: Sequence[SlideSize], *, cpus: int) -> TimePlan:
        """Seconds of one process with so many CPUs that takes these slides."""
        return time_plan(
            tuple(slides),
            calibration=self.machine,
            encoder=self.encoder,
            tiles_per_s=self.tiles_per_s,
            cpus=cpus,
            gpu=self.gpu,
        )


def planner(config: RunConfig, *, stage: str = "aggregate") -> Planner:
    """Looks at the encoder and at this machine.

    Weights are not downloaded: sizes come from the architecture. The first call on a machine, and
    the first with an encoder, measures for some seconds.

    Raises:
        ConfigError: unknown GPU or setting.
        InvalidInputError: another package's encoder.
    """
    if stage not in ENCODING_STAGES:
        return Planner(config=config, gpu=None, encoder=None, machine=calibrate(), tiles_per_s=0)
    gpu = planned_gpu(config)
    options, tile_px = config.encode, config.tiles.tile_px
    on_gpu = gpu is not None
    batch_size = batch_size_of(config, on_gpu=on_gpu)
    sizes, seconds_per_tile = [], 0.0
    for name in options.encoders:
        encoder = load_encoder(name, device="cpu", precision=options.precision, pretrained=False)
        size = encoder_size(encoder, batch_size=batch_size, tile_px=tile_px, on_gpu=on_gpu)
        key = f"{name}|{encoder.precision}|{tile_px}"
        rate_here = functools.partial(measure_rate, encoder, tile_px=tile_px)
        machine, rate = encoder_rate(key, rate_here)
        seconds_per_tile += 1 / rate
        if gpu is None and is_quick(size, batch_size=batch_size):
            measure = functools.partial(
                measure_cpu_peak,
                name,
                precision=encoder.precision,
                batch_size=batch_size,
                tile_px=tile_px,
            )
            size = replace(size, cpu_peak_bytes=encoder_peak(f"{key}|{batch_size}", measure))
        sizes.append(size)
    return Planner(
        config=config,
        gpu=gpu,
        encoder=encoders_together(sizes),
        machine=machine,
        tiles_per_s=1 / seconds_per_tile,
    )


def planned_gpu(config: RunConfig) -> Gpu | None:
    """The card that a run is planned for: the named one, or the slowest where only 'cuda' is said.

    Raises:
        ConfigError: no such card.
    """
    settings = config.executor.at(Rung())
    if settings.gpu is not None:
        return find_gpu(settings.gpu)
    kind, _, rest = (settings.gres or "").partition(":")
    if kind != "gpu" and not config.encode.device.startswith("cuda"):
        return None
    named = rest.partition(":")[0]
    return GPUS.get(named) or min(GPUS.values(), key=lambda gpu: gpu.half_flops)


def plan(slides: Sequence[str | Path], *, config: RunConfig | None = None) -> RunPlan:
    """Predicts peak memory and time from headers, thumbnails and this machine's calibration.

    Args:
        slides: files, folders or cohort CSVs.
        config: of the run that is planned.

    Memory: one thumbnail and one tile table at a time, and the encoder.

    Raises:
        ConfigError: unknown GPU or setting.
        CohortError: no slides, or none that opens.
    """
    config = config or RunConfig()
    given = config.slides.slide_mpp
    mpp = parse_mpp(given, where="slides.slide_mpp") if given else None
    found, unreadable = slide_sizes(load_cohort(slides, slide_mpp=mpp), config)
    if not found:
        raise BudgetError(f"slides must hold one that opens, got none: {unreadable}")
    cpus = config.executor.job_cpus or cpu_count()
    by = planner(config)
    memory = by.memory(found, cpus=cpus)
    return RunPlan(
        slides=found,
        unreadable=unreadable,
        memory=memory,
        time=by.time(found, cpus=cpus),
        gpu=by.gpu,
        warnings=_warnings(memory, by),
    )


def slide_sizes(
    entries: Sequence[SlideEntry], config: RunConfig
) -> tuple[tuple[SlideSize, ...], dict[str, str]]:
    """The sizes of the slides that open, and why the others do not, by slide id."""
    sizes, unreadable = [], {}
    for entry in entries:
        try:
            sizes.append(slide_size(entry, config))
        except (ThinsectionError, OSError) as error:
            unreadable[entry.slide_id] = str(error)
    return tuple(sizes), unreadable


def slide_size(entry: SlideEntry, config: RunConfig) -> SlideSize:
    """Opens a slide, finds its tissue on the thumbnail and counts its tiles; decodes no tile."""
    with open_slide(
        entry.slide_path, reader=config.slides.reader, slide_mpp=entry.slide_mpp
    ) as slide:
        tissue = tissue_mask(slide, config.tissue)
        table = tile_grid(slide, config.tiles, tissue=(tissue.mask, tissue.frame))
        wanted = thumbnail_size(slide.size, slide.slide_mpp, config.tissue.mask_mpp)
        finest = [lv for lv in slide.levels if lv.size[0] >= wanted[0]] or [slide.levels[0]]
        return SlideSize(
            slide_id=entry.slide_id,
            num_tiles=len(table),
            read_px=math.prod(table.plan.size_lv),
            mask_px=math.prod(wanted),
            thumbnail_px=math.prod(finest[-1].size),
        )


def _warnings(memory: MemoryPlan, by: Planner) -> tuple[str, ...]:
    found = []
    asked, gpu, size = by.config.executor.at(Rung()).job_memory, by.gpu, by.encoder
    if asked is not None and parse_bytes(asked) < memory.host_bytes:
        found.append(
            f"--job-memory {asked} cannot hold the run: it needs "
            f"{format_bytes(memory.host_bytes)}; raise it, or lower --memory or --batch-size"
        )
    if gpu is not None and by.config.executor.gpu is None:
        found.append(f"planned for a {gpu.name}; name another card with --gpu")
    if gpu is not None and size is not None and memory.gpu_bytes > gpu.memory_bytes:
        fits = by.batch_size * (gpu.memory_bytes - (memory.gpu_bytes - size.batch_bytes))
        fits = max(0, fits // max(size.batch_bytes, 1))
        remedy = f"--batch-size {fits}" if fits else "a larger GPU"
        found.append(
            f"a {gpu.name} has {format_bytes(gpu.memory_bytes)}, the run needs "
            f"{format_bytes(memory.gpu_bytes)} on it: use {remedy}"
        )
    return tuple(found)
