"""A run planned before it runs: headers and thumbnails in, memory, time and a job request out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinsection.encode import load_encoder
from thinsection.errors import BudgetError, ThinsectionError
from thinsection.plan.calibration import encoder_rate
from thinsection.plan.encoder import encoder_size, measure_rate
from thinsection.plan.gpus import Gpu, find_gpu
from thinsection.plan.memory import EncoderSize, MemoryPlan, SlideSize, memory_plan
from thinsection.plan.time import TimePlan, time_plan
from thinsection.qc.tissue import thumbnail_size, tissue_mask
from thinsection.report.efficiency_analysis import Request
from thinsection.run.cohort import SlideEntry, load_cohort, parse_mpp
from thinsection.run.config import RunConfig
from thinsection.run.slides import CPU_BATCH, GPU_BATCH, budget_of
from thinsection.slide import open_slide
from thinsection.stream import cpu_count
from thinsection.tiles import tile_grid
from thinsection.types import MIB
from thinsection.units import format_bytes, parse_bytes

MEMORY_MARGIN, TIME_MARGIN = 1.2, 1.5  # of the printed request, stated beside it
_LEAST_TIME_S = 300


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run will take.

    Attributes:
        slides: of each slide that opens.
        unreadable: slide id -> why it does not.
        memory, time: of one process that takes all slides.
        gpu: the card that was named.
        batch_size: tiles per batch.
        warnings: budgets that cannot hold, and what would.
    """

    slides: tuple[SlideSize, ...]
    unreadable: dict[str, str]
    memory: MemoryPlan
    time: TimePlan
    gpu: Gpu | None
    batch_size: int
    warnings: tuple[str, ...]

    def request(self, *, cpus: int, tasks: int = 1) -> Request:
        """What a job (one of `tasks` that share the slides) should ask for, margins included."""
        seconds = self.time.start_s + (self.time.wall_s - self.time.start_s) / tasks
        memory = math.ceil(self.memory.host_bytes * MEMORY_MARGIN / (256 * MIB)) * 256 * MIB
        wall = max(_LEAST_TIME_S, math.ceil(seconds * TIME_MARGIN / 60) * 60)
        gpus = 1 if self.gpu is not None else 0
        return Request(cpus=cpus, memory_bytes=memory, gpus=gpus, walltime_s=wall)


def plan_run(
    slides: Sequence[str | Path], *, config: RunConfig | None = None, gpu: str | None = None
) -> RunPlan:
    """Predicts peak memory and time from headers, thumbnails and this machine's calibration.

    Weights are not downloaded: sizes come from the architecture. The first call on a machine, and
    the first with an encoder, measures for some seconds.

    Args:
        slides: files, folders or cohort CSVs.
        config: of the run that is planned.
        gpu: name of the card; None plans for this machine's CPU.

    Memory: one thumbnail and one tile table at a time, and the encoder.

    Raises:
        ConfigError: unknown GPU or setting.
        CohortError: no slides, or none that opens.
    """
    config = config or RunConfig()
    card = find_gpu(gpu) if gpu else None
    given = config.slides.slide_mpp
    mpp = parse_mpp(given, where="slides.slide_mpp") if given else None
    sizes, unreadable = [], {}
    for entry in load_cohort(slides, slide_mpp=mpp):
        try:
            sizes.append(slide_size(entry, config))
        except (ThinsectionError, OSError) as error:
            unreadable[entry.slide_id] = str(error)
    if not sizes:
        raise BudgetError(f"slides must hold one that opens, got none: {unreadable}")
    found = tuple(sizes)
    batch_size = config.encode.batch_size or (GPU_BATCH if card else CPU_BATCH)
    options, tile_px = config.encode, config.tiles.tile_px
    encoder = load_encoder(
        options.encoder, device="cpu", precision=options.precision, pretrained=False
    )
    size = encoder_size(encoder, batch_size=batch_size, tile_px=tile_px)
    key = f"{options.encoder}|{encoder.precision}|{tile_px}"
    machine, rate = encoder_rate(key, lambda: measure_rate(encoder, tile_px=tile_px))
    memory = memory_plan(
        found,
        stream=budget_of(config, batch_size),
        batch_size=batch_size,
        encoder=size,
        process_bytes=machine.process_bytes,
        prefetch_slides=config.stream.prefetch_slides,
        on_gpu=card is not None,
    )
    time = time_plan(
        found,
        calibration=machine,
        encoder=size,
        tiles_per_s=rate,
        cpus=config.executor.job_cpus or cpu_count(),
        gpu=card,
    )
    return RunPlan(
        slides=found,
        unreadable=unreadable,
        memory=memory,
        time=time,
        gpu=card,
        batch_size=batch_size,
        warnings=_warnings(memory, card, size, batch_size, config),
    )


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


def _warnings(
    memory: MemoryPlan, gpu: Gpu | None, size: EncoderSize, batch_size: int, config: RunConfig
) -> tuple[str, ...]:
    found = []
    asked = config.executor.job_memory
    if asked is not None and parse_bytes(asked) < memory.host_bytes:
        found.append(
            f"--job-memory {asked} cannot hold the run: it needs "
            f"{format_bytes(memory.host_bytes)}; raise it, or lower --memory or --batch-size"
        )
    if gpu is not None and memory.gpu_bytes > gpu.memory_bytes:
        fits = batch_size * (gpu.memory_bytes - (memory.gpu_bytes - size.batch_bytes))
        fits = max(0, fits // max(size.batch_bytes, 1))
        remedy = f"--batch-size {fits}" if fits else "a larger GPU"
        found.append(
            f"a {gpu.name} has {format_bytes(gpu.memory_bytes)}, the run needs "
            f"{format_bytes(memory.gpu_bytes)} on it: use {remedy}"
        )
    return tuple(found)
