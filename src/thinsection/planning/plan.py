"""Plan of a run: predicts memory and time from headers and thumbnails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from thinsection.encode import load_encoder
from thinsection.encode.engine import PRECISIONS, engine_version, why_torch
from thinsection.errors import BudgetError, ThinsectionError
from thinsection.files.pages import bars_html, notebook_html
from thinsection.jobs.backend import ignore_message
from thinsection.jobs.executor import Rung
from thinsection.machine import cpu_count
from thinsection.planning import calibration, cost
from thinsection.planning.calibration import EncoderSize
from thinsection.planning.cost import (
    Gpu,
    GridSize,
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
from thinsection.stages.config import RunConfig
from thinsection.stages.request import cohort_of
from thinsection.stages.spec import RunSpec, resolve
from thinsection.tiles import tile_grid
from thinsection.types import counted, format_bytes, parse_bytes

Looked = TypeVar("Looked")
Listener = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, repr=False)
class RunPlan:
    """Predicted memory and time of a run."""

    slides: tuple[SlideSize, ...]  # slides that open
    unreadable: dict[str, str]  # slide id -> error message
    memory: MemoryPlan  # one process with all slides
    time: TimePlan
    gpu: Gpu | None  # planned GPU; None for a CPU
    warnings: tuple[str, ...]  # limits that are too low, and sufficient values
    advice: tuple[
        str, ...
    ] = ()  # settings that would make the run faster, and their cost

    def __repr__(self) -> str:
        tiles = sum(slide.num_tiles for slide in self.slides)
        return (
            f"RunPlan({counted(len(self.slides), 'slide')}, {counted(tiles, 'tile')}, "
            f"{self.time.wall_s:.0f} s, {format_bytes(self.memory.host_bytes)} of memory)"
        )

    def _repr_html_(self) -> str:
        """Returns bars of the seconds and of the memory, and the warnings."""
        time = self.time
        device = "GPU" if self.gpu else "CPU"
        seconds = [
            ("start", time.start_s, f"{time.start_s:.0f} CPU-s"),
            ("tissue", time.prepare_s, f"{time.prepare_s:.0f} CPU-s"),
            ("decode", time.decode_s, f"{time.decode_s:.0f} CPU-s"),
            ("encode", time.encode_s, f"{time.encode_s:.0f} {device}-s"),
        ]
        parts = [*self.memory.host.items()]
        parts += [(f"{name} (GPU)", size) for name, size in self.memory.gpu.items()]
        sizes = [(name, float(size), format_bytes(size)) for name, size in parts]
        problems = [
            f"{name} does not open: {why}" for name, why in self.unreadable.items()
        ]
        lines = [repr(self), *problems, *self.warnings, *self.advice]
        return (
            notebook_html(None, "Plan", lines)
            + bars_html("Time", seconds)
            + bars_html("Memory", sizes)
        )


def plan(
    slides: Sequence[str | Path] | str | Path,
    *,
    config: RunConfig | None = None,
    on_message: Listener | None = None,
) -> RunPlan:
    """Predicts peak memory and time from headers, thumbnails and this machine's calibration.

    Args:
        slides: files, folders or cohort CSVs.
        config: settings of the planned run.
        on_message: called before each measurement, once per machine and encoder.

    Memory: one thumbnail and one tile table at a time, and the encoder.

    Raises:
        ConfigError: unknown GPU or setting.
        CohortError: no slides.
        BudgetError: no slide opens.
    """
    spec = resolve(config or RunConfig())
    entries = cohort_of(slides, spec.slides, spec.regions)
    sizes, unreadable = look_into(entries, partial(slide_size, spec=spec))
    if not sizes:
        raise BudgetError(f"at least one slide must open, got {unreadable}")
    formulas = planner(spec, on_message=on_message or ignore_message)
    cpus = spec.executor.job_cpus or cpu_count()
    memory = formulas.memory(sizes, cpus=cpus)
    return RunPlan(
        slides=sizes,
        unreadable=unreadable,
        memory=memory,
        time=formulas.time(sizes, cpus=cpus),
        gpu=formulas.gpu,
        warnings=_warnings(memory, formulas),
        advice=fast_advice(formulas, sizes, cpus=cpus),
    )


def planner(spec: RunSpec, *, on_message: Listener = ignore_message) -> Planner:
    """Formulas for a run's cost, with the sizes of its encoders and the rates of this machine.

    Weights are not downloaded, as sizes come from the architecture. The first call on a machine,
    and the first call with an encoder, take some seconds to measure.

    Raises ConfigError (unknown GPU or setting), InvalidInputError (encoder of another package).
    """
    if not spec.encoding.encoders:
        machine = calibration.calibrate()
        return Planner(spec=spec, gpu=None, encoder=None, machine=machine)
    gpu = planned_gpu(spec)
    if not calibration.is_calibrated():
        on_message(
            "measuring this machine: process start and decoding (about 10 s, once)"
        )
    machine = calibration.calibrate()
    sizes = []
    seconds_per_tile = 0.0
    for name in spec.encoding.encoders:
        size, tiles_per_s = _measured_encoder(name, spec, gpu, on_message)
        sizes.append(size)
        seconds_per_tile += 1 / tiles_per_s
    return Planner(
        spec=spec,
        gpu=gpu,
        encoder=cost.encoders_together(sizes),
        machine=machine,
        tiles_per_s=1 / seconds_per_tile,
    )


def _measured_encoder(
    name: str, spec: RunSpec, gpu: Gpu | None, on_message: Listener
) -> tuple[EncoderSize, float]:
    """Size of an encoder, and its tiles per CPU-second on the engine of the run.

    Sizes come from a dry pass with torch. A graph is converted only for a measurement, whose result
    is stored.
    """
    encoding = spec.encoding
    tile_px = spec.tiles.tile_px
    on_cpu = gpu is None
    batch_size = spec.batch_size(on_gpu=not on_cpu)
    encoder = load_encoder(
        name, device="cpu", precision=encoding.precision, pretrained=False
    )
    refusal = why_torch(
        encoding.engine, encoder.device, is_random=not encoding.pretrained
    )
    engine: calibration.Engine = "torch"
    if on_cpu and not refusal and encoder.precision in PRECISIONS:
        engine = "openvino"
    size = calibration.encoder_size(
        encoder,
        batch_size=batch_size,
        tile_px=tile_px,
        on_gpu=not on_cpu,
        engine=engine,
    )
    key = f"{name}|{encoder.precision}|{tile_px}|{engine_version(engine)}"
    if not calibration.is_calibrated(key):
        on_message(
            f"measuring {name}: tiles per CPU-second, then memory (once per machine)"
        )
    measure_rate = partial(
        calibration.measure_rate, encoder, tile_px=tile_px, engine=engine
    )
    tiles_per_s = calibration.encoder_number("encoders", key, measure_rate)
    if on_cpu and calibration.is_quick(size, batch_size=batch_size):
        measure_peak = partial(
            calibration.measure_cpu_peak,
            name,
            precision=encoder.precision,
            batch_size=batch_size,
            tile_px=tile_px,
            engine=engine,
        )
        peak = calibration.encoder_number("peaks", f"{key}|{batch_size}", measure_peak)
        size = replace(size, cpu_peak_bytes=int(peak))
    return size, tiles_per_s


def planned_gpu(spec: RunSpec) -> Gpu | None:
    """GPU in the settings: the named one, or the slowest known one for plain 'cuda'.

    Raises ConfigError: unknown GPU.
    """
    settings = spec.executor.at_rung(Rung())
    if settings.gpu is not None:
        return cost.find_gpu(settings.gpu)
    kind, _, model = (settings.gres or "").partition(":")
    if kind != "gpu" and not spec.encoding.device.startswith("cuda"):
        return None
    card = cost.GPUS.get(model.partition(":")[0])
    return card or min(cost.GPUS.values(), key=lambda gpu: gpu.half_flops)


def look_into(
    entries: Sequence[SlideEntry], look: Callable[[SlideEntry], Looked]
) -> tuple[tuple[Looked, ...], dict[str, str]]:
    """Results of `look` for the slides that open, and errors of the others, by slide id."""
    answers = []
    unreadable = {}
    for entry in entries:
        try:
            answers.append(look(entry))
        except (ThinsectionError, OSError) as error:
            unreadable[entry.slide_id] = str(error)
    return tuple(answers), unreadable


def slide_size(entry: SlideEntry, spec: RunSpec) -> SlideSize:
    """Opens a slide, detects its tissue on the thumbnail and counts its tiles; decodes no tile."""
    mask_mpp = spec.tissue.mask_mpp
    with entry.open(spec.slides.reader) as slide:
        tissue = tissue_mask(slide, spec.tissue)
        grids = []
        for config in spec.tiles.grids:
            table = tile_grid(slide, config, tissue=tissue)
            read_px = math.prod(table.plan.size_lv)
            fast = replace(config, resample="fast").plan(slide).level
            grids.append(
                GridSize(
                    num_tiles=len(table),
                    read_px=read_px,
                    fast=fast != table.plan.level,
                )
            )
        mpp_xy = resolution_of(slide, mask_mpp, slide.slide_mpp)
        mask_size = work_size(slide.size, mpp_xy, mask_mpp)
        thumbnail_size = slide.levels[0].size
        for level in slide.levels:
            if level.size[0] >= mask_size[0]:
                thumbnail_size = level.size
        qc = None
        if spec.qc.qc != "off":
            qc = qc_size(slide, load_pipeline(spec.qc.qc), entry)
        return SlideSize(
            slide_id=entry.slide_id,
            grids=tuple(grids),
            mask_px=math.prod(mask_size),
            thumbnail_px=math.prod(thumbnail_size),
            qc=qc,
        )


def qc_size(slide: Slide, pipeline: Pipeline, entry: SlideEntry) -> QcSize:
    """Size of a slide for quality control, from its header."""
    scale = scale_of(slide, pipeline, mean_mpp(entry.slide_mpp))
    return QcSize(
        num_px_l0=math.prod(slide.size),
        slide_mpp=scale.slide_mpp,
        work_mpp=min(pipeline.image_mpps),
        maps=pipeline.asks_nets,
    )


def fast_advice(
    formulas: Planner, slides: Sequence[SlideSize], *, cpus: int
) -> tuple[str, ...]:
    """A sentence that proposes `--resample fast`, if decoding decides how long the run takes."""
    exact = formulas.time(slides, cpus=cpus)
    fast = formulas.time(slides, cpus=cpus, fast=True)
    if fast.wall_s > (1 - cost.FAST_LEAST_GAIN) * exact.wall_s:
        return ()
    return (
        f"decoding takes {exact.decode_s:.0f} CPU-s; with --resample fast it takes "
        f"{fast.decode_s:.0f}, and the run {fast.wall_s:.0f} s in place of {exact.wall_s:.0f} s. "
        f"On real tissue its tiles differ from exact ones by {cost.FAST_GREY_LEVELS} of 255 on "
        f"average ({cost.FAST_DB} dB). Use one of the two for all slides of a study",
    )


def _warnings(memory: MemoryPlan, formulas: Planner) -> tuple[str, ...]:
    """Sentences about limits that are too low for the run."""
    executor = formulas.spec.executor
    job_memory = executor.at_rung(Rung()).job_memory
    gpu = formulas.gpu
    size = formulas.encoder
    warnings = []
    if job_memory is not None and parse_bytes(job_memory) < memory.host_bytes:
        warnings.append(
            f"--job-memory must be >= {format_bytes(memory.host_bytes)} for this run, got "
            f"{job_memory}; raise it, or lower --memory or --batch-size"
        )
    if gpu is not None and executor.gpu is None:
        warnings.append(f"the plan assumes a {gpu.name}; name another card with --gpu")
    if gpu is not None and size is not None and memory.gpu_bytes > gpu.memory_bytes:
        room = gpu.memory_bytes - (memory.gpu_bytes - size.batch_bytes)
        fitting = max(0, formulas.batch_size * room // max(size.batch_bytes, 1))
        remedy = f"--batch-size {fitting}" if fitting else "a larger GPU"
        warnings.append(
            f"a {gpu.name} has {format_bytes(gpu.memory_bytes)}, but the run needs "
            f"{format_bytes(memory.gpu_bytes)} on it: use {remedy}"
        )
    return tuple(warnings)
