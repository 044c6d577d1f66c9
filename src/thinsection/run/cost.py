"""Cost of a run by formulas: peak memory, and time from measured rates.

Host peak = process + weights + batch + buffers + scratch + caches + prepared + results:
    process   interpreter, libraries, allocator: measured once per machine (`calibration`)
    weights   weights of the encoder, and once more while they are loaded
    batch     memory of one encoding batch (encode.memory.batch_bytes, a dry pass); on a CPU
    buffers   min(slots * batch_size, tiles of the run) * tile_px² * 3 (stream.budget)
    scratch   decode threads * (tiles of the level that are resampled in one call, a segment, and
              the bytes of one read of the file)
    caches    decoded segments that readers keep, per opened slide
    prepared  (prefetched + 2) * 12 bytes per pixel of the tissue mask (6 after quality control),
              and the threads' memory to prepare and write slides beside the encoder; 16 or 34
              bytes per pixel of the largest image of the slide in quality control
    results   tiles of the largest grid * embedding bytes * 3 (collected, pooled, written)
Several workers on this node have this peak each, with their share of the CPUs, beside the process
that starts them. On a CPU, process, weights and batch are measured together if that is quick, since
the heap of an encoding process keeps holes that no formula predicts. On a GPU, weights and batch
are in its memory, with the driver's context and two batches in transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from thinsection.config import nearest
from thinsection.errors import ConfigError
from thinsection.run.calibration import Calibration, EncoderSize
from thinsection.slide.formats.segments import CACHE_BYTES
from thinsection.stages.config import RunConfig
from thinsection.tiles.budget import CHANNELS, MIN_TASK_TILES
from thinsection.types import GIB, MIB

MASK_BYTES_PER_PX = 12
# the same after quality control, whose own part has what it needs: the picture, the mask of tissue,
# and the compressed masks of the checks
CHECKED_BYTES_PER_PX = 6
# process without an encoder or a segmenter, which imports no torch
PLAIN_PROCESS_BYTES = 96 * MIB
# weights that are read and compiled per CPU-second; 5e8 to 1e9 were measured with 207 MB
WEIGHTS_BYTES_PER_S = 7e8
# threads' stacks and arenas, pictures and tables of slides in preparation or output: all memory
# that is not modelled one by one, fitted to benchmarks/bench_plan.py
OTHER_BYTES = 64 * MIB
# margin over the parts, since equal runs have different peaks by heap layout; see
# benchmarks/bench_plan.py
MARGIN = 1.06
CUDA_CONTEXT_BYTES = 600 * MIB
# memory of driver and kernels per process; an upper bound, not measured here
CUDA_HOST_BYTES = 2 * GIB
_RESULT_COPIES = 3
# `--resample fast` is proposed if it saves at least this share of the run's time
FAST_LEAST_GAIN = 0.1
# mean difference of its tiles from exact ones on real tissue, and the same as a peak
# signal-to-noise ratio; see benchmarks/bench_reading.py
FAST_GREY_LEVELS = 1.4
FAST_DB = 39
# share of the data sheet's matrix rate that a vision transformer's forward pass reaches: an
# assumption for all cards. An H200 reached .34 with ViT-L, .27 with ViT-B and .17 with ViT-S.
ASSUMED_EFFICIENCY = 0.35
# Bounds for quality control, fitted to and compared by benchmarks/bench_qc.py: the process, which
# may have to train pixel models, and bytes of work images and checks per pixel of the pipeline's
# largest image: with our own checks, which work in bands, and with HistoQC's. Times are per pixel
# of the slide at 4 µm/px, or finer if that image is finer.
COARSEST_MPP = 4.0
TRAINING_S = 15.0  # seconds for a process without access to the cache of pixel models
_PROCESS_BYTES = 384 * MIB
_BYTES_PER_PX = 16
_WHOLE_BYTES_PER_PX = 34
_START_S = 1.5
_S_PER_PX = 3e-7
# seven times what the artefact network took on a busy EPYC: a node may be slower, and JPEG 2000
# takes longer to decode
_MAPS_S_PER_PX = 1.5e-6
_S_PER_L0_PX = 1 / 60e6
# CPU-seconds of a slide with levels in a run: imports, checks, blur at level 0; without networks
_RUN_S = 0.3
_RUN_S_PER_PX = 1e-7
_RUN_S_PER_L0_PX = 2.5e-9
# the same with our own checks, of which `focus` reads squares with tissue at about 0.5 µm/px: all
# squares of a slide of at most so many pixels there, and a quarter of those of a larger slide. The
# times are per pixel there, and per decoded pixel of level 0, of slides of which half is tissue.
_OWN_RUN_S_PER_PX = 2e-7
_FOCUS_MPP = 0.5
_COARSEST_FOCUS_MPP = 1.05
_FEW_FOCUS_PX = 400 * 256**2
_FOCUS_S_PER_PX = 1.3e-8
_FOCUS_S_PER_L0_PX = 2e-9


# Bound for cells, from 592,349 nuclei, whose import took 212 MiB.
_CELL_IMPORT_BYTES = 224 * MIB


def encoders_together(sizes: Sequence[EncoderSize]) -> EncoderSize:
    """Size of several encoders in one process: all weights, and one batch at a time."""
    weights = sum(size.weights_bytes for size in sizes)
    peaks = []
    for size in sizes:
        if size.cpu_peak_bytes is not None:
            # a measured peak contains the encoder's own weights and the libraries
            peaks.append(size.cpu_peak_bytes + weights - size.weights_bytes)
    return EncoderSize(
        weights_bytes=weights,
        loading_bytes=max(
            weights - size.weights_bytes + size.loading_bytes for size in sizes
        ),
        batch_bytes=max(size.batch_bytes for size in sizes),
        dim=sum(size.dim for size in sizes),
        flops_per_tile=sum(size.flops_per_tile for size in sizes),
        cpu_peak_bytes=max(peaks) if len(peaks) == len(sizes) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QcSize:
    """Numbers that decide the cost of a slide's quality control."""

    num_px_l0: int
    slide_mpp: float
    # resolution of the finest image that checks see as a whole
    work_mpp: float = COARSEST_MPP
    maps: bool = False  # True if the artefact network is asked
    segments: bool = False  # True if a segmenter runs first

    @property
    def peak_bytes(self) -> int:
        """Largest peak of a process that only does quality control."""
        return _PROCESS_BYTES + self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Largest number of bytes in images and checks."""
        image_px = self.num_px_l0 * (self.slide_mpp / self.work_mpp) ** 2
        return int((_BYTES_PER_PX if self.maps else _WHOLE_BYTES_PER_PX) * image_px)

    @property
    def most_s(self) -> float:
        """Largest CPU-seconds of a slide, also of one without levels."""
        per_px = _MAPS_S_PER_PX if self.maps else _S_PER_PX
        return _START_S + per_px * self._work_px + _S_PER_L0_PX * self.num_px_l0

    def run_s(self, maps_s_per_px: float) -> float:
        """CPU-seconds in a run; the argument is the artefact network's time per pixel."""
        if not self.maps:
            seconds = _RUN_S_PER_PX * self._work_px + _RUN_S_PER_L0_PX * self.num_px_l0
            return _RUN_S + seconds
        seconds = _RUN_S + (_OWN_RUN_S_PER_PX + maps_s_per_px) * self._work_px
        if self.slide_mpp > _COARSEST_FOCUS_MPP:
            return seconds
        focus_px = self.num_px_l0 * min(1.0, self.slide_mpp / _FOCUS_MPP) ** 2
        share_read = 1.0 if focus_px <= _FEW_FOCUS_PX else 0.25
        focus_s = _FOCUS_S_PER_PX * focus_px + _FOCUS_S_PER_L0_PX * self.num_px_l0
        return seconds + share_read * focus_s

    @property
    def _work_px(self) -> float:
        """Pixels of the slide at 4 µm/px, or finer if the pipeline's image is finer."""
        return self.num_px_l0 * (self.slide_mpp / min(self.work_mpp, COARSEST_MPP)) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSize:
    """Numbers of one tile grid of a slide."""

    num_tiles: int  # tiles with enough tissue
    read_px: int  # pixels of the level that are decoded for one tile
    # most bytes that a decoding thread holds: tiles of the level that it resamples in one call
    # (`tiles.budget.resample_scratch_bytes`), a decoded segment, and the stored bytes of one read
    scratch_bytes: int
    # True if `--resample fast` would decode them at half their size or less
    fast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideSize:
    """Numbers of one slide, from its header and thumbnail."""

    slide_id: str
    grids: tuple[GridSize, ...]  # one for each resolution
    mask_px: int  # pixels of the tissue mask
    thumbnail_px: int  # pixels that are decoded for the thumbnail
    # most bytes of decoded segments that the reader keeps
    cache_bytes: int = CACHE_BYTES
    qc: QcSize | None = None  # None for a run without quality control
    cells_s: float = 0.0  # CPU-seconds to import cells

    @property
    def num_tiles(self) -> int:
        """Tiles of all grids."""
        return sum(grid.num_tiles for grid in self.grids)

    @property
    def decoded_px(self) -> int:
        """Pixels that are decoded for the tiles of all grids."""
        return sum(grid.num_tiles * grid.read_px for grid in self.grids)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Predicted peaks and their parts."""

    host: dict[str, int]  # name of a part -> bytes of host memory
    # parts of GPU memory; empty without a GPU
    gpu: dict[str, int] = field(default_factory=dict)

    def of_workers(
        self, workers: int, *, first_bytes: int = PLAIN_PROCESS_BYTES
    ) -> "MemoryPlan":
        """Peak of so many equal processes on this node, and of the one that starts them."""
        if workers == 1:
            return self
        others = {
            "other workers": (workers - 1) * sum(self.host.values()),
            "first process": first_bytes,
        }
        return replace(self, host={**self.host, **others})

    @property
    def host_bytes(self) -> int:
        """Peak of all processes, with the margin."""
        return int(sum(self.host.values()) * MARGIN)

    @property
    def gpu_bytes(self) -> int:
        """Peak on the GPU, with the margin."""
        return int(sum(self.gpu.values()) * MARGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePlan:
    """Predicted seconds."""

    start_s: float  # seconds for imports and weights, once per process
    prepare_s: float  # CPU-seconds for opening, tissue, grid, pictures and cells
    decode_s: float = 0.0  # CPU-seconds
    encode_s: float = 0.0  # CPU-seconds, or seconds of the GPU
    wall_s: float  # wall-clock seconds of the run

    @property
    def cpu_s(self) -> float:
        """Sum of all parts."""
        return self.start_s + self.prepare_s + self.decode_s + self.encode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: str  # name for `--gpu`
    memory_bytes: int  # memory of the card
    half_flops: float  # dense half-precision operations per second


# name, memory in GiB and dense half-precision teraflops, from the data sheets
_CARDS = (
    ("t4", 16, 65.0),
    ("v100", 16, 125.0),
    ("v100-32", 32, 125.0),
    ("a40", 48, 149.7),
    ("l40s", 48, 362.0),
    ("a100-40", 40, 312.0),
    ("a100-80", 80, 312.0),
    ("h100", 80, 989.0),
    ("h200", 139, 989.0),
)
GPUS = {
    name: Gpu(name=name, memory_bytes=gib * GIB, half_flops=teraflops * 1e12)
    for name, gib, teraflops in _CARDS
}


def find_gpu(name: str) -> Gpu:
    """GPU of this name. Raises ConfigError: unknown name; the message lists the nearest."""
    if name not in GPUS:
        raise ConfigError(f"gpu must be a known one, got {name!r}{nearest(name, GPUS)}")
    return GPUS[name]


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Formulas for the cost of slides, with all their other inputs."""

    spec: RunConfig
    gpu: Gpu | None  # None for a CPU
    encoder: EncoderSize | None  # None for a run that ends with the tile grid
    machine: Calibration
    # rate of the encoders on this machine, per CPU-second; not used with a GPU
    tiles_per_s: float = 0.0

    @property
    def batch_size(self) -> int:
        """Tiles per batch."""
        return self.spec.batch_size(on_gpu=self.gpu is not None)

    def memory(self, slides: Sequence[SlideSize], *, cpus: int) -> MemoryPlan:
        """Peaks of one process with this number of CPUs and at least one of these slides."""
        machine_bytes = self.machine.process_bytes
        encoder = self.encoder
        segments = self.spec.segment.segmenters or any(
            slide.qc and slide.qc.segments for slide in slides
        )
        if encoder is None and not segments:
            machine_bytes = min(machine_bytes, PLAIN_PROCESS_BYTES)
        parts = self._slide_parts(slides)
        if encoder is None:
            return MemoryPlan(host={"process": machine_bytes} | parts)
        parts |= self._tile_parts(slides, encoder, cpus)
        if self.gpu is None and encoder.cpu_peak_bytes is not None:
            return MemoryPlan(
                host={"process and encoder": encoder.cpu_peak_bytes} | parts
            )
        parts = {"process": machine_bytes} | parts
        loading_bytes = max(encoder.weights_bytes, encoder.loading_bytes)
        if self.gpu is None:
            parts["weights"] = 2 * loading_bytes
            parts["batch"] = encoder.batch_bytes
            return MemoryPlan(host=parts)
        parts["CUDA"] = CUDA_HOST_BYTES
        parts["weights while loading"] = loading_bytes
        # no batch is there yet while the weights are loaded
        loaded_bytes = loading_bytes - encoder.batch_bytes
        on_card = {
            "context": CUDA_CONTEXT_BYTES,
            "weights": max(encoder.weights_bytes, loaded_bytes),
            "batch": encoder.batch_bytes,
            "transfer": 2 * self.batch_size * self._tile_bytes,
        }
        return MemoryPlan(host=parts, gpu=on_card)

    @property
    def _tile_bytes(self) -> int:
        """Bytes of a decoded tile."""
        return CHANNELS * self.spec.tiles.tile_px**2

    def _slide_parts(self, slides: Sequence[SlideSize]) -> dict[str, int]:
        """Memory of slides in preparation or in quality control."""
        prepared = min(self.spec.stream.prefetch_slides + 2, len(slides))
        mask_bytes = max(
            slide.mask_px * (CHECKED_BYTES_PER_PX if slide.qc else MASK_BYTES_PER_PX)
            for slide in slides
        )
        parts = {"prepared slides": prepared * mask_bytes + OTHER_BYTES}
        checks = [slide.qc.held_bytes for slide in slides if slide.qc]
        if checks:  # quality control has one slide in memory at a time
            parts["quality control"] = max(checks)
        if any(slide.cells_s for slide in slides):  # one file at a time
            parts["cells"] = _CELL_IMPORT_BYTES
        return parts

    def _tile_parts(
        self, slides: Sequence[SlideSize], encoder: EncoderSize, cpus: int
    ) -> dict[str, int]:
        """Memory of decoded tiles and of their embeddings."""
        workers = self.spec.stream.decode_threads or cpus
        stream = replace(self.spec.stream, decode_threads=workers)
        budget = replace(self.spec, stream=stream).stream_budget(self.batch_size)
        grids = [grid for slide in slides for grid in slide.grids]
        num_tiles = sum(grid.num_tiles for grid in grids)
        most_tiles = max(grid.num_tiles for grid in grids)
        num_tasks = max(1, -(-num_tiles // MIN_TASK_TILES))
        buffered = min(budget.slots * self.batch_size, num_tiles)
        scratch_bytes = max(grid.scratch_bytes for grid in grids)
        decoded = max(slide.decoded_px * CHANNELS for slide in slides)
        return {
            "batch buffers": buffered * self._tile_bytes,
            "decoding buffers": min(budget.workers, num_tasks) * scratch_bytes,
            "reader caches": min(max(s.cache_bytes for s in slides), decoded),
            "results": most_tiles * encoder.dim * 4 * _RESULT_COPIES,
        }

    def time(
        self, slides: Sequence[SlideSize], *, cpus: float, fast: bool = False
    ) -> TimePlan:
        """Seconds of one process with this number of CPUs for these slides.

        `fast` plans for `--resample fast`, at the rate of decoding at half size. On a CPU decoding
        and encoding share the cores. On a GPU they overlap, so that the slower of the two decides.
        """
        start_s = self.machine.start_s
        if self.encoder is not None:
            start_s += self.machine.libraries_s
            start_s += self.encoder.weights_bytes / WEIGHTS_BYTES_PER_S
        px_per_s = self.machine.decode_px_per_s
        prepare_s = len(slides) * self.machine.slide_s
        prepare_s += sum(slide.thumbnail_px for slide in slides) / px_per_s
        prepare_s += sum(slide.cells_s for slide in slides)
        for slide in slides:
            if slide.qc is not None:
                prepare_s += slide.qc.run_s(self.machine.maps_s_per_px)
        if self.encoder is None:
            return TimePlan(
                start_s=start_s, prepare_s=prepare_s, wall_s=start_s + prepare_s
            )
        num_tiles = sum(slide.num_tiles for slide in slides)
        grids = [grid for slide in slides for grid in slide.grids]
        decode_s = 0.0
        for grid in grids:
            rate = px_per_s
            if fast and grid.fast:
                rate = max(px_per_s, self.machine.half_size_px_per_s)
            decode_s += grid.num_tiles * grid.read_px / rate
        if self.gpu is None:
            encode_s = num_tiles / self.tiles_per_s
            work_s = (prepare_s + decode_s + encode_s) / cpus
        else:
            flops_per_s = self.gpu.half_flops * ASSUMED_EFFICIENCY
            encode_s = num_tiles * self.encoder.flops_per_tile / flops_per_s
            work_s = max(encode_s, (prepare_s + decode_s) / cpus)
        return TimePlan(
            start_s=start_s,
            prepare_s=prepare_s,
            decode_s=decode_s,
            encode_s=encode_s,
            wall_s=start_s + work_s,
        )
