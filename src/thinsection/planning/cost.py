"""What a run costs as formulas: peak memory, and time over measured rates.

Host peak = process + weights + batch + buffers + scratch + caches + prepared + results:
    process   interpreter, libraries, allocator: measured once per machine (`calibration`)
    weights   of the encoder, and once more while they are loaded
    batch     what one encoding batch holds (encode.memory.batch_bytes, a dry pass); on a CPU
    buffers   min(slots * batch_size, tiles of the run) * tile_px² * 3 (stream.tile_stream)
    scratch   decode workers * (region + tile of the level that is read) (stream.tile_stream)
    caches    decoded segments that readers keep, per opened slide
    prepared  (prefetched + 2) * 40 bytes per px of the tissue mask, and what the threads hold that
              prepare and write slides beside the encoder; 27 bytes per px at 4 µm/px of the slide
              that quality control is at
    results   tiles of the largest slide * embedding bytes * 3 (collected, pooled, written)
On a CPU process, weights and batch are measured together where that is quick: the heap of a process
that encodes keeps holes that no formula knows. On a GPU, weights and batch are there, beside the
driver's context and two batches in transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from thinsection.config import nearest
from thinsection.errors import ConfigError
from thinsection.planning.calibration import Calibration, EncoderSize
from thinsection.slide.segments import CACHE_BYTES
from thinsection.stages.config import RunConfig, batch_size_of, budget_of
from thinsection.stream.tile_stream import CHANNELS
from thinsection.types import GIB, MIB

MASK_BYTES_PER_PX = 40
# threads' stacks and arenas, pictures and tables of slides that are prepared or written: what is
# not modelled one by one, fitted to benchmarks/bench_plan.py
OTHER_BYTES = 72 * MIB
# over the parts: peaks of equal runs differ, as the heap falls; see benchmarks/bench_plan.py
MARGIN = 1.06
CUDA_CONTEXT_BYTES = 600 * MIB
CUDA_HOST_BYTES = (
    2 * GIB
)  # of the driver and kernels in a process; a bound, not measured here
_RESULT_COPIES = 3
# share of the data sheet's matrix rate that a vision transformer's forward pass reaches; an
# assumption, not a measurement: replace it by a calibration on the card
ASSUMED_EFFICIENCY = 0.35
# quality control: process, which may have to train pixel models, + work images and what a check
# holds beside them, by the px of the slide at 4 µm/px (finer where the pipeline's image is); bounds
# that were fitted to benchmarks/bench_qc.py, which compares
COARSEST_MPP = 4.0
TRAINING_S = 15.0  # of a process that does not see the cache of pixel models
_PROCESS_BYTES, _BYTES_PER_PX = 384 * MIB, 27
_START_S, _S_PER_PX, _MAPS_S_PER_PX, _S_PER_L0_PX = 1.0, 3e-7, 3e-6, 1 / 60e6
# CPU-seconds of a slide with levels, as in a run: imports, checks, blur at level 0; nets beside
_RUN_S, _RUN_S_PER_PX, _RUN_S_PER_L0_PX = 0.3, 1e-7, 2.5e-9


def encoders_together(sizes: Sequence[EncoderSize]) -> EncoderSize:
    """What several encoders of one process take: all weights, one batch in work at a time."""
    weights = sum(size.weights_bytes for size in sizes)
    # each measured peak has its own weights and the libraries in it
    measured = [(size.cpu_peak_bytes, weights - size.weights_bytes) for size in sizes]
    peaks = [peak + others for peak, others in measured if peak is not None]
    return EncoderSize(
        weights_bytes=weights,
        batch_bytes=max(size.batch_bytes for size in sizes),
        dim=sum(size.dim for size in sizes),
        flops_per_tile=sum(size.flops_per_tile for size in sizes),
        cpu_peak_bytes=max(peaks) if len(peaks) == len(sizes) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QcSize:
    """What decides the cost of a slide's quality control."""

    num_px_l0: int
    slide_mpp: float
    work_mpp: float = COARSEST_MPP  # of the finest image that checks see as a whole
    maps: bool = False  # whether nets look for artefacts

    @property
    def peak_bytes(self) -> int:
        """Highest peak of a process of its own."""
        return _PROCESS_BYTES + self.held_bytes

    @property
    def held_bytes(self) -> int:
        """What images and checks hold at most."""
        return int(_BYTES_PER_PX * self._work_px)

    @property
    def most_s(self) -> float:
        """Most CPU-seconds of a slide, also of one without levels."""
        per_px = _MAPS_S_PER_PX if self.maps else _S_PER_PX
        return _START_S + per_px * self._work_px + _S_PER_L0_PX * self.num_px_l0

    def run_s(self, maps_s_per_px: float) -> float:
        """CPU-seconds in a run, where the nets take that for a px of tissue."""
        per_px = (
            _RUN_S_PER_PX + self.maps * maps_s_per_px / 2
        )  # half of a slide is tissue
        return _RUN_S + per_px * self._work_px + _RUN_S_PER_L0_PX * self.num_px_l0

    @property
    def _work_px(self) -> float:
        return self.num_px_l0 * (self.slide_mpp / min(self.work_mpp, COARSEST_MPP)) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideSize:
    """What headers and thumbnail say of one slide."""

    slide_id: str
    num_tiles: int  # tiles with enough tissue
    read_px: int  # px of the level that are decoded for one tile
    mask_px: int  # of the tissue mask
    thumbnail_px: int  # px that are decoded for the thumbnail
    qc: QcSize | None = None  # None for a run without


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Predicted peaks and what they are made of."""

    host: dict[str, int]  # name of a part -> bytes of host memory
    gpu: dict[str, int] = field(
        default_factory=dict
    )  # the same on the GPU; empty without one

    @property
    def host_bytes(self) -> int:
        """Peak of the process, with the margin."""
        return int(sum(self.host.values()) * MARGIN)

    @property
    def gpu_bytes(self) -> int:
        """Peak on the GPU, with the margin."""
        return int(sum(self.gpu.values()) * MARGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePlan:
    """Predicted seconds."""

    start_s: float  # imports and weights, once per process
    prepare_s: float  # opening, tissue, grid, pictures; CPU-seconds
    decode_s: float = 0.0  # CPU-seconds
    encode_s: float = 0.0  # CPU-seconds, or seconds of the GPU
    wall_s: float  # of the run

    @property
    def cpu_s(self) -> float:
        """Sum of all parts."""
        return self.start_s + self.prepare_s + self.decode_s + self.encode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: str  # as `--gpu` takes it
    memory_bytes: int  # on the card
    half_flops: float  # dense half-precision operations per second


_CARDS = (  # name, GiB, teraflops
    *(
        ("t4", 16, 65.0),
        ("v100", 16, 125.0),
        ("v100-32", 32, 125.0),
        ("a40", 48, 149.7),
    ),
    *(
        ("l40s", 48, 362.0),
        ("a100-40", 40, 312.0),
        ("a100-80", 80, 312.0),
        ("h100", 80, 989.0),
    ),
)
GPUS = {
    n: Gpu(name=n, memory_bytes=gib * GIB, half_flops=tera * 1e12)
    for n, gib, tera in _CARDS
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name. Raises ConfigError: not known; names the nearest."""
    if name not in GPUS:
        raise ConfigError(f"gpu must be a known one, got {name!r}{nearest(name, GPUS)}")
    return GPUS[name]


@dataclass(frozen=True, kw_only=True)
class Planner:
    """The formulas, with what they need beside the slides."""

    config: RunConfig
    gpu: Gpu | None  # None for a CPU
    encoder: EncoderSize | None  # None for a run that ends with the tile grid
    machine: Calibration
    tiles_per_s: float  # the encoder's rate here, per CPU-second; not used with a GPU

    @property
    def batch_size(self) -> int:
        """Tiles per batch."""
        return batch_size_of(self.config, on_gpu=self.gpu is not None)

    def memory(self, slides: Sequence[SlideSize], *, cpus: int) -> MemoryPlan:
        """Peaks of one process with so many CPUs that takes these slides, at least one."""
        ahead = min(self.config.stream.prefetch_slides + 2, len(slides))
        mask_bytes = max(s.mask_px for s in slides) * MASK_BYTES_PER_PX
        parts = {"prepared slides": ahead * mask_bytes + OTHER_BYTES}
        if checked := [s.qc.held_bytes for s in slides if s.qc]:  # one slide at a time
            parts["quality control"] = max(checked)
        encoder, batch_size = self.encoder, self.batch_size
        if encoder is None:
            return MemoryPlan(host={"process": self.machine.process_bytes, **parts})
        workers = self.config.stream.decode_workers or cpus
        config = replace(
            self.config, stream=replace(self.config.stream, decode_workers=workers)
        )
        stream = budget_of(config, batch_size)
        batches = sum(-(-s.num_tiles // batch_size) for s in slides)
        num_tiles, largest = (
            sum(s.num_tiles for s in slides),
            max(s.num_tiles for s in slides),
        )
        tile_bytes = stream.batch_bytes // batch_size
        scratch = (
            max(s.read_px for s in slides) * CHANNELS
        )  # of a worker: one tile as it is read
        decoded = max(s.num_tiles * s.read_px * CHANNELS for s in slides)
        parts |= {
            "batch buffers": min(stream.slots * batch_size, num_tiles) * tile_bytes,
            "decode scratch": min(stream.workers, max(batches, 1)) * scratch,
            "reader caches": min(CACHE_BYTES, decoded),
            "results": largest * encoder.dim * 4 * _RESULT_COPIES,
        }
        held = {"weights": encoder.weights_bytes, "batch": encoder.batch_bytes}
        if self.gpu is None and encoder.cpu_peak_bytes is not None:
            return MemoryPlan(
                host={"process and encoder": encoder.cpu_peak_bytes, **parts}
            )
        parts = {"process": self.machine.process_bytes, **parts}
        if self.gpu is None:
            return MemoryPlan(
                host=parts | held | {"weights": 2 * encoder.weights_bytes}
            )
        moved = {
            "context": CUDA_CONTEXT_BYTES,
            **held,
            "transfer": 2 * batch_size * tile_bytes,
        }
        cuda = {"CUDA": CUDA_HOST_BYTES, "weights while loading": held["weights"]}
        return MemoryPlan(host={**parts, **cuda}, gpu=moved)

    def time(self, slides: Sequence[SlideSize], *, cpus: float) -> TimePlan:
        """Seconds of one process with so many CPUs that takes these slides.

        On a CPU decoding and encoding share the cores. On a GPU they overlap: the slower of
        decoding and of encoding on the card sets the pace.
        """
        start, rate = self.machine.start_s, self.machine.decode_px_per_s
        thumbnails = sum(s.thumbnail_px for s in slides) / rate
        checks = sum(s.qc.run_s(self.machine.maps_s_per_px) for s in slides if s.qc)
        prepare = len(slides) * self.machine.slide_s + thumbnails + checks
        parts = {"start_s": start, "prepare_s": prepare}
        if self.encoder is None:
            return TimePlan(**parts, wall_s=start + prepare)
        tiles = sum(s.num_tiles for s in slides)
        decode = sum(s.num_tiles * s.read_px for s in slides) / rate
        if self.gpu is None:
            encode = tiles / self.tiles_per_s
            wall = start + (prepare + decode + encode) / cpus
        else:
            flops_per_s = self.gpu.half_flops * ASSUMED_EFFICIENCY
            encode = tiles * self.encoder.flops_per_tile / flops_per_s
            wall = start + max(encode, (prepare + decode) / cpus)
        return TimePlan(**parts, decode_s=decode, encode_s=encode, wall_s=wall)
