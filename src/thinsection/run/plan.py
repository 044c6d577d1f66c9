"""Plan of a run: predicts memory and time from headers and thumbnails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar, Unpack

import numpy as np
from torch.nn.functional import cosine_similarity

from thinsection.config import listing_settings
from thinsection.encode import TileEncoder, load_encoder
from thinsection.encode.answers import declares_half
from thinsection.encode.check import find_local_weights
from thinsection.encode.engine import PRECISIONS, engine_version, why_torch
from thinsection.encode.registry import ENCODERS, is_brought
from thinsection.encode.specs import find_spec
from thinsection.errors import BudgetError, ThinsectionError
from thinsection.files.pages import bars_html, notebook_html
from thinsection.jobs.executor import ResourceStep
from thinsection.machine import cpu_count
from thinsection.qc import Pipeline, load_pipeline
from thinsection.qc.tissue import tissue_mask
from thinsection.qc.work_image import resolution_of, scale_of, work_size
from thinsection.run import calibration, cost
from thinsection.run.calibration import EncoderSize
from thinsection.run.cost import (
    Gpu,
    GridSize,
    MemoryPlan,
    Planner,
    QcSize,
    SlideSize,
    TimePlan,
)
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.formats.tiff_decoder import MAX_READ_BYTES
from thinsection.slide.geometry import mean_mpp
from thinsection.stages.config import RunConfig
from thinsection.stages.spec import Slides, cohort_of, resolve
from thinsection.tiles import iter_tiles, tile_grid
from thinsection.tiles.budget import CHANNELS, resample_scratch_bytes
from thinsection.types import (
    TileArray,
    counted,
    format_bytes,
    ignore_message,
    parse_bytes,
)
from thinsection.weights.placement import cpu_has_bf16, place

if TYPE_CHECKING:
    from thinsection.settings_types import RunSettings

# bf16 is proposed if it encodes at least this many times as many tiles per CPU-second
BF16_GAIN = 1.25
SAMPLE_TILES = 16  # tiles on which the error of bf16 is measured

Size = TypeVar("Size")
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
    # settings that would make the run faster, and their cost
    advice: tuple[str, ...] = ()

    def __repr__(self) -> str:
        tiles = sum(slide.num_tiles for slide in self.slides)
        return (
            f"RunPlan({counted(len(self.slides), 'slide')}, {counted(tiles, 'tile')}, "
            f"{self.time.wall_s:.0f} s, {format_bytes(self.memory.host_bytes)} of memory)"
        )

    def _repr_html_(self) -> str:
        """Returns bars of the seconds and of the memory, warnings and advice."""
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


@listing_settings(RunConfig)
def plan(
    slides: Slides,
    *,
    config: RunConfig | None = None,
    on_message: Listener | None = None,
    **settings: Unpack[RunSettings],
) -> RunPlan:
    """Predicts peak memory and time from headers, thumbnails and this machine's calibration.

    Args:
        slides: files, folders or cohort CSVs; or the entries of `load_cohort`.
        config: all settings of the planned run.
        on_message: called before each measurement, once per machine and encoder.
        settings: single settings by name, which replace those of `config`, as for `run`.

    On a CPU with bf16 units, some tiles of one slide are read as well. They serve to measure the
    error in bf16 of encoders that would run in fp32.

    Memory: one thumbnail and one tile table at a time, and the encoder.

    Raises:
        ConfigError: unknown GPU or setting.
        CohortError: no slides.
        BudgetError: no slide opens.
    """
    spec = resolve(config or RunConfig(), dict(settings))
    entries = cohort_of(slides, spec.slides, spec.regions)
    sizes, unreadable = measure_slides(entries, partial(slide_size, spec=spec))
    if not sizes:
        raise BudgetError(f"at least one slide must open, got {unreadable}")
    listener = on_message or ignore_message
    formulas = planner(spec, on_message=listener)
    cpus = spec.executor.job_cpus or cpu_count()
    memory = formulas.memory(sizes, cpus=cpus)
    return RunPlan(
        slides=sizes,
        unreadable=unreadable,
        memory=memory,
        time=formulas.time(sizes, cpus=cpus),
        gpu=formulas.gpu,
        warnings=_warnings(memory, formulas),
        advice=(
            *fast_advice(formulas, sizes, cpus=cpus),
            *_bf16_advice(spec, entries, sizes, listener),
        ),
    )


def planner(spec: RunConfig, *, on_message: Listener = ignore_message) -> Planner:
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


@dataclass(frozen=True, kw_only=True)
class _PlannedEncoder:
    """Encoder in the precision and on the engine of the run; it is built at its first use."""

    name: str
    precision: str  # fp32, fp16 or bf16
    engine: calibration.Engine
    tile_px: int

    @property
    def key(self) -> str:
        """Key of its measurements."""
        engine = engine_version(self.engine)
        return f"{self.name}|{self.precision}|{self.tile_px}|{engine}"

    @cached_property
    def encoder(self) -> TileEncoder:
        """The encoder on a CPU with random weights."""
        return load_encoder(
            self.name, device="cpu", precision=self.precision, pretrained=False
        )

    def tiles_per_s(self) -> float:
        """Tiles per CPU-second: stored, or measured now."""
        return calibration.encoder_measurement(
            "encoders",
            self.key,
            lambda: calibration.measure_rate(
                self.encoder, tile_px=self.tile_px, engine=self.engine
            ),
        )


def _planned_encoder(
    name: str, spec: RunConfig, gpu: Gpu | None, precision: str
) -> _PlannedEncoder:
    """Encoder of the planned run in this precision."""
    encoding = spec.encoding
    if is_brought(name):
        half_precision = declares_half(ENCODERS.load(name))
    else:
        half_precision = find_spec(name).half_precision
    placement = place("cpu", precision, half_precision=half_precision)
    is_random = not encoding.pretrained
    refusal = why_torch(encoding.engine, placement.device, is_random=is_random)
    engine: calibration.Engine = "torch"
    if gpu is None and not refusal and placement.precision in PRECISIONS:
        engine = "openvino"
    return _PlannedEncoder(
        name=name,
        precision=placement.precision,
        engine=engine,
        tile_px=spec.tiles.tile_px,
    )


def _measured_encoder(
    name: str, spec: RunConfig, gpu: Gpu | None, on_message: Listener
) -> tuple[EncoderSize, float]:
    """Size of an encoder, and its tiles per CPU-second on the engine of the run.

    Sizes come from a dry pass with torch. A graph is converted only for a measurement, whose result
    is stored.
    """
    on_cpu = gpu is None
    batch_size = spec.batch_size(on_gpu=not on_cpu)
    planned = _planned_encoder(name, spec, gpu, spec.encoding.precision)
    size = calibration.encoder_size(
        planned.encoder,
        batch_size=batch_size,
        tile_px=planned.tile_px,
        on_gpu=not on_cpu,
        engine=planned.engine,
    )
    key = planned.key
    if not calibration.is_calibrated(key):
        on_message(
            f"measuring {name}: tiles per CPU-second, then memory (once per machine)"
        )
    tiles_per_s = planned.tiles_per_s()
    if on_cpu and calibration.is_quick(size, batch_size=batch_size):
        measure_peak = partial(
            calibration.measure_cpu_peak,
            name,
            precision=planned.precision,
            batch_size=batch_size,
            tile_px=planned.tile_px,
            engine=planned.engine,
        )
        peak = calibration.encoder_measurement(
            "peaks", f"{key}|{batch_size}", measure_peak
        )
        size = replace(size, cpu_peak_bytes=int(peak))
    return size, tiles_per_s


def _bf16_advice(
    spec: RunConfig,
    entries: Sequence[SlideEntry],
    sizes: Sequence[SlideSize],
    on_message: Listener,
) -> tuple[str, ...]:
    """Sentences about encoders that are faster in bf16 on this CPU, with their error.

    `auto` already uses bf16 if the embeddings keep a cosine of 0.9999. For the other encoders, the
    gain is measured once per machine, and the error is measured on tiles of a slide. The user
    decides.
    """
    encoding = spec.encoding
    is_auto = encoding.precision == "auto" and encoding.pretrained
    if planned_gpu(spec) is not None or not is_auto or not cpu_has_bf16():
        return ()
    with_tiles = [size.slide_id for size in sizes if size.grids[0].num_tiles]
    samples = [entry for entry in entries if entry.slide_id in with_tiles[:1]]
    advice = []
    for name in encoding.encoders if samples else ():
        in_fp32 = _planned_encoder(name, spec, None, "auto")
        if in_fp32.precision == "fp32":
            in_bf16 = _planned_encoder(name, spec, None, "bf16")
            if not calibration.is_calibrated(in_bf16.key):
                on_message(f"measuring {name} in bf16 (once per machine)")
            gain = in_bf16.tiles_per_s() / in_fp32.tiles_per_s()
            if gain >= BF16_GAIN:
                on_message(f"measuring the error of {name} in bf16")
                error = _bf16_error(in_bf16, spec, samples[0])
                advice.append(
                    f"{name}: --precision bf16 encodes {gain:.1f} times as many tiles per "
                    f"CPU-second here; {error}"
                )
    return tuple(advice)


def _bf16_error(planned: _PlannedEncoder, spec: RunConfig, entry: SlideEntry) -> str:
    """Largest 1 - cosine of embeddings in bf16 to those in fp32, on tiles of a slide, in words.

    Random weights cannot be used: with them, the error of the default encoder is 100 times smaller.
    """
    weights = spec.encoding.weights
    if weights is None and find_local_weights(find_spec(planned.name)) is None:
        return "the error is not measured, as the weights are not on this machine"
    load = partial(
        load_encoder, planned.name, device="cpu", weights=weights, engine="torch"
    )
    tiles = _spread_tiles(entry, spec)
    exact = load(precision="fp32").encode(tiles).double()
    rounded = load(precision="bf16").encode(tiles).double()
    distance = float(1 - cosine_similarity(exact, rounded).min())
    return (
        f"the cosine distance of its embeddings to those in fp32 is {distance:.1g} at most, on "
        f"{counted(len(tiles), 'tile')} of {entry.slide_id!r}"
    )


def _spread_tiles(entry: SlideEntry, spec: RunConfig) -> TileArray:
    """Tiles of a slide, spread evenly over its first grid, uint8 (n, tile_px, tile_px, 3)."""
    with entry.open(spec.slides.reader) as slide:
        tissue = tissue_mask(slide, spec.tissue)
        table = tile_grid(slide, spec.tiles.grids[0], tissue=tissue)
        count = min(len(table), SAMPLE_TILES)
        rows = np.linspace(0, len(table) - 1, count).round().astype(np.int64)
        batches = iter_tiles(slide, table.select(rows), batch_size=count)
        return np.concatenate([batch.tiles.copy() for batch in batches])


def planned_gpu(spec: RunConfig) -> Gpu | None:
    """GPU in the settings: the named one, or the slowest known one for plain 'cuda'.

    Raises ConfigError: unknown GPU.
    """
    settings = spec.executor.at_step(ResourceStep())
    if settings.gpu is not None:
        return cost.find_gpu(settings.gpu)
    kind, _, model = (settings.gres or "").partition(":")
    if kind != "gpu" and not spec.encoding.device.startswith("cuda"):
        return None
    gpu = cost.GPUS.get(model.partition(":")[0])
    return gpu or min(cost.GPUS.values(), key=lambda gpu: gpu.half_flops)


def measure_slides(
    entries: Sequence[SlideEntry], measure: Callable[[SlideEntry], Size]
) -> tuple[tuple[Size, ...], dict[str, str]]:
    """Results of `measure` for the slides that open, and errors of the others, by slide id."""
    sizes = []
    unreadable = {}
    for entry in entries:
        try:
            sizes.append(measure(entry))
        except (ThinsectionError, OSError) as error:
            unreadable[entry.slide_id] = str(error)
    return tuple(sizes), unreadable


def slide_size(entry: SlideEntry, spec: RunConfig) -> SlideSize:
    """Opens a slide, detects its tissue on the thumbnail and counts its tiles; decodes no tile."""
    mask_mpp = spec.tissue.mask_mpp
    with entry.open(spec.slides.reader) as slide:
        tissue = tissue_mask(slide, spec.tissue)
        segments = [level.segment for level in slide.levels if level.segment]
        segment_px = max(map(math.prod, segments), default=0)
        grids = []
        for config in spec.tiles.grids:
            table = tile_grid(slide, config, tissue=tissue)
            read_px = math.prod(table.plan.size_lv)
            fast = replace(config, resample="fast").plan(slide).level
            grids.append(
                GridSize(
                    num_tiles=len(table),
                    read_px=read_px,
                    scratch_bytes=(
                        resample_scratch_bytes(table.plan)
                        + CHANNELS * segment_px
                        + MAX_READ_BYTES
                    ),
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
            qc = qc_size(
                slide, load_pipeline(spec.qc.qc, remove=spec.qc.qc_remove), entry
            )
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
        maps=pipeline.asks_network,
        segments=pipeline.segmenter is not None,
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
    job_memory = executor.at_step(ResourceStep()).job_memory
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
