"""Plan of a run: predicts memory and time from headers and thumbnails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, Unpack

import numpy as np

from thinsection.config import listing_settings
from thinsection.encode.engine_choice import PRECISIONS, engine_version, why_torch
from thinsection.encode.registry import TIMM_PREFIX
from thinsection.encode.sizes import NetworkSize, declared_size, weights_in_memory
from thinsection.errors import BudgetError, ThinsectionError
from thinsection.files.pages import bars_html, notebook_html
from thinsection.jobs.executor import (
    ExecutorConfig,
    ResourceStep,
    chosen_executor,
    local_shape,
)
from thinsection.machine import cpu_count
from thinsection.qc import Pipeline, load_pipeline
from thinsection.qc.edits import check_edits_exist
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
from thinsection.run.qc_device import planned_qc_device
from thinsection.run.rates import machine_rates
from thinsection.slide import Slide
from thinsection.slide.cohort import SlideEntry
from thinsection.slide.formats.segments import CACHE_BYTES
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
from thinsection.weights.precision import check_precision, precision_on_cpu

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
    memory: MemoryPlan  # all processes of this node, or one job of a cluster
    time: TimePlan
    gpu: Gpu | None  # planned GPU; None for a CPU
    # day in UTC on which the rates of this machine were measured, such as 2026-11-29
    measured_on: str
    load: float  # processes per CPU at that time
    warnings: tuple[str, ...]  # limits that are too low, and sufficient values
    # settings that would make the run faster, and their cost
    advice: tuple[str, ...] = ()
    # device of quality control, and why; '' unless --qc-device is auto
    qc_device: str = ""

    def __repr__(self) -> str:
        tiles = sum(slide.num_tiles for slide in self.slides)
        return (
            f"RunPlan({counted(len(self.slides), 'slide')}, {counted(tiles, 'tile')}, "
            f"{self.time.wall_s:.0f} s, {format_bytes(self.memory.host_bytes)} of memory)"
        )

    @property
    def rates_note(self) -> str:
        """Sentence about the age of the rates behind the seconds."""
        return calibration.rates_note(self.measured_on, self.load)

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
        lines = [repr(self), self.rates_note, *problems, *self.warnings, *self.advice]
        if self.qc_device:
            lines.append(self.qc_device)
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

    On a CPU with bf16 units, the first plan of an encoder that would run in fp32 also reads some
    tiles of a slide, to measure the error in bf16.

    Memory: one thumbnail and one tile table at a time; and the encoder, while it is measured.

    Raises:
        ConfigError: unknown GPU or setting.
        CohortError: no slides.
        BudgetError: no slide opens.
    """
    spec = resolve(config or RunConfig(), dict(settings))
    entries = cohort_of(slides, spec.slides, spec.regions)
    check_edits_exist(spec.qc.qc_edits, entries)
    sizes, unreadable = measure_slides(entries, partial(slide_size, spec=spec))
    if not sizes:
        raise BudgetError(f"at least one slide must open, got {unreadable}")
    listener = on_message or ignore_message
    formulas = planner(spec, on_message=listener)
    cpus = spec.executor.job_cpus or cpu_count()
    workers, threads = local_workers(spec.executor, len(sizes))
    memory = formulas.memory(sizes, cpus=threads or cpus).of_workers(workers)
    return RunPlan(
        slides=sizes,
        unreadable=unreadable,
        memory=memory,
        time=formulas.time(sizes, cpus=cpus),
        gpu=formulas.gpu,
        measured_on=formulas.machine.measured_on,
        load=formulas.machine.load,
        warnings=_warnings(memory, formulas),
        advice=(
            *fast_advice(formulas, sizes, cpus=cpus),
            *_bf16_advice(formulas, entries, sizes, listener),
        ),
        qc_device=planned_qc_device(spec),
    )


def local_workers(
    config: ExecutorConfig, num_slides: int | None = None
) -> tuple[int, int]:
    """Number of workers on this node, and CPUs of each; (1, 0) if this process does the work."""
    if chosen_executor(config) != "pool":
        return 1, 0
    workers, threads = local_shape(config)
    return workers if num_slides is None else min(workers, num_slides), threads


def planner(spec: RunConfig, *, on_message: Listener = ignore_message) -> Planner:
    """Formulas for a run's cost, with the sizes of its encoders and the rates of this machine.

    Weights are not downloaded, as sizes come from the architecture. The first call on a machine,
    and the first call with an encoder, take some seconds to measure.

    Raises ConfigError (unknown GPU or setting), InvalidInputError (encoder of another package).
    """
    machine = machine_rates(on_message)
    if not spec.encoding.encoders:
        return Planner(spec=spec, gpu=None, encoder=None, machine=machine)
    gpu = planned_gpu(spec)
    sizes = []
    seconds_per_tile = 0.0
    for name in spec.encoding.encoders:
        planned = _planned_encoder(name, spec, machine, spec.encoding.precision)
        sizes.append(_encoder_size(planned, spec, gpu, on_message))
        if gpu is None:
            seconds_per_tile += 1 / _tiles_per_s(planned, on_message)
    return Planner(
        spec=spec,
        gpu=gpu,
        encoder=cost.encoders_together(sizes),
        machine=machine,
        tiles_per_s=1 / seconds_per_tile if seconds_per_tile else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class _PlannedEncoder:
    """Encoder in the precision and on the engine of the run."""

    name: str
    size: NetworkSize
    precision: str  # fp32, fp16, bf16 or fp8
    engine: calibration.Engine
    tile_px: int

    @property
    def arithmetic(self) -> str:
        """Precision and engine, the key of the rate of vision transformers."""
        return f"{self.precision}|{engine_version(self.engine)}"

    @property
    def key(self) -> str:
        """Key of its measurements."""
        return calibration.encoder_key(
            self.name,
            precision=self.precision,
            tile_px=self.tile_px,
            engine=engine_version(self.engine),
        )


def _planned_encoder(
    name: str, spec: RunConfig, machine: calibration.Calibration, precision: str
) -> _PlannedEncoder:
    """Encoder of the planned run in this precision on a CPU."""
    encoding = spec.encoding
    tile_px = spec.tiles.tile_px
    size = _network_size(name, tile_px)
    check_precision(precision)
    chosen = precision_on_cpu(
        precision, half_precision=size.half_precision, has_bf16=machine.has_bf16
    )
    is_random = not encoding.pretrained
    refusal = why_torch(encoding.engine, "cpu", is_random=is_random)
    engine: calibration.Engine = "torch"
    if planned_gpu(spec) is None and not refusal and chosen in PRECISIONS:
        engine = "openvino"
    return _PlannedEncoder(
        name=name, size=size, precision=chosen, engine=engine, tile_px=tile_px
    )


def _network_size(name: str, tile_px: int) -> NetworkSize:
    """Numbers of an encoder: declared, or counted without data.

    Those of a timm model are stored, as its name says all; a folder or a repository may change.
    """
    declared = declared_size(name, tile_px=tile_px)
    if declared is not None:
        return declared

    def count() -> NetworkSize:
        from thinsection.run.measuring import network_size

        return network_size(name, tile_px=tile_px)

    if not name.startswith(TIMM_PREFIX):
        return count()
    key = f"{name}|{tile_px}|{engine_version('timm')}"
    fields = calibration.measurement("networks", key, lambda: asdict(count()))
    return NetworkSize(**fields)


def _encoder_size(
    planned: _PlannedEncoder, spec: RunConfig, gpu: Gpu | None, on_message: Listener
) -> EncoderSize:
    """Memory and operations of an encoder; its peak on a CPU is measured if that is quick."""
    batch_size = spec.batch_size(on_gpu=gpu is not None)
    network = planned.size
    size = EncoderSize(
        weights_bytes=weights_in_memory(
            network.weights_bytes,
            copied_bytes=network.weights_bytes,
            precision=planned.precision,
            engine=planned.engine,
        ),
        # FP8 rounds the weights that were loaded
        loading_bytes=network.weights_bytes if planned.precision == "fp8" else 0,
        batch_bytes=network.batch_bytes(
            batch_size=batch_size, tile_px=planned.tile_px, on_gpu=gpu is not None
        ),
        dim=network.dim,
        flops_per_tile=network.flops_per_tile,
    )
    if gpu is not None or not calibration.is_quick(size, batch_size=batch_size):
        return size
    key = f"{planned.key}|{batch_size}"
    if not calibration.is_stored("peaks", key):
        on_message(f"measuring the memory of {planned.name} (once per machine)")

    def measure() -> int:
        from thinsection.run.measuring import measure_cpu_peak

        return measure_cpu_peak(
            planned.name,
            precision=planned.precision,
            batch_size=batch_size,
            tile_px=planned.tile_px,
            engine=planned.engine,
        )

    peak_bytes = calibration.measurement("peaks", key, measure)
    return replace(size, cpu_peak_bytes=peak_bytes)


def _tiles_per_s(planned: _PlannedEncoder, on_message: Listener) -> float:
    """Tiles per CPU-second.

    Vision transformers share one rate of operations, since nearly all of them are products of
    large matrices. Other networks are measured one by one.
    """
    size = planned.size

    def measure_transformer() -> float:
        from thinsection.run import measuring

        return measuring.measure_transformer(
            precision=planned.precision, engine=planned.engine
        )

    def measure_encoder() -> float:
        from thinsection.run import measuring

        return measuring.measure_encoder(
            planned.name,
            precision=planned.precision,
            tile_px=planned.tile_px,
            engine=planned.engine,
        )

    if size.is_transformer:
        key = planned.arithmetic
        if not calibration.is_stored("operations", key):
            on_message(
                f"measuring vision transformers in {planned.precision} (once per machine)"
            )
        rate = calibration.measurement("operations", key, measure_transformer)
        return rate / size.flops_per_tile
    if not calibration.is_stored("encoders", planned.key):
        on_message(
            f"measuring {planned.name} in {planned.precision} (once per machine)"
        )
    return calibration.measurement("encoders", planned.key, measure_encoder)


def _bf16_advice(
    formulas: Planner,
    entries: Sequence[SlideEntry],
    sizes: Sequence[SlideSize],
    on_message: Listener,
) -> tuple[str, ...]:
    """Sentences about encoders that are faster in bf16 on this CPU, with their error.

    `auto` already uses bf16 if the embeddings keep a cosine of 0.9999. For the other encoders, the
    gain is measured once per machine, and the error once on tiles of a slide. The user decides.
    """
    spec = formulas.spec
    machine = formulas.machine
    encoding = spec.encoding
    is_auto = encoding.precision == "auto" and encoding.pretrained
    if formulas.gpu is not None or not is_auto or not machine.has_bf16:
        return ()
    with_tiles = [size.slide_id for size in sizes if size.grids[0].num_tiles]
    samples = [entry for entry in entries if entry.slide_id in with_tiles[:1]]
    advice = []
    for name in encoding.encoders if samples else ():
        in_fp32 = _planned_encoder(name, spec, machine, "auto")
        if in_fp32.precision == "fp32":
            in_bf16 = _planned_encoder(name, spec, machine, "bf16")
            rate_in_fp32 = _tiles_per_s(in_fp32, on_message)
            gain = _tiles_per_s(in_bf16, on_message) / rate_in_fp32
            if gain >= BF16_GAIN:
                error = _bf16_error(in_bf16, spec, samples[0], on_message)
                advice.append(
                    f"{name}: --precision bf16 encodes {gain:.1f} times as many tiles per "
                    f"CPU-second here; {error}"
                )
    return tuple(advice)


def _bf16_error(
    planned: _PlannedEncoder, spec: RunConfig, entry: SlideEntry, on_message: Listener
) -> str:
    """Sentence about the error of embeddings in bf16, on tiles of the first slide planned here."""
    weights = spec.encoding.weights
    key = f"{planned.key}|{weights or 'published'}"
    machine = calibration.stored_calibration()
    if machine is not None and key in machine.bf16_errors:
        return machine.bf16_errors[key]
    from thinsection.run.measuring import bf16_error

    on_message(f"measuring the error of {planned.name} in bf16 (once per machine)")
    tiles = _spread_tiles(entry, spec)
    distance = bf16_error(planned.name, weights=weights, tiles=tiles)
    if distance is None:
        return "the error is not measured, as the weights are not on this machine"
    sentence = (
        f"the cosine distance of its embeddings to those in fp32 is {distance:.1g} at most, on "
        f"{counted(len(tiles), 'tile')} of {entry.slide_id!r}"
    )
    return calibration.measurement("bf16_errors", key, lambda: sentence)


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
            cache_bytes=getattr(slide, "cache_bytes", CACHE_BYTES),
            qc=qc,
            cells_s=spec.cells.import_s(entry),
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
