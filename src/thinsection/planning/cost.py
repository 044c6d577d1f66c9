"""What a run costs as formulas: peak memory, and time over measured rates.

Host peak = process + weights + batch + buffers + scratch + caches + prepared + results:
    process   interpreter, libraries, allocator: measured once per machine (plan.calibration)
    weights   of the encoder, and once more while they are loaded
    batch     what one encoding batch holds (encode.memory.batch_bytes, a dry pass); on a CPU
    buffers   min(slots * batch_size, tiles of the run) * tile_px² * 3 (stream.plan)
    scratch   decode workers * (region + tile of the level that is read) (stream.plan)
    caches    decoded segments that readers keep, per opened slide
    prepared  (prefetched + 2) * 40 bytes per px of the tissue mask, and what the threads hold that
              prepare and write slides beside the encoder
    results   tiles of the largest slide * embedding bytes * 3 (collected, pooled, written)
On a CPU process, weights and batch are measured together where that is quick: a process of its own
encodes a few batches, because the heap keeps holes that no formula knows. On a GPU, weights and
batch are there, beside the driver's context and two batches in transfer.

CPU-seconds: start + slides * per_slide + thumbnail px / decode rate
             + tiles * read px / decode rate + tiles / encode rate
On a CPU decoding and encoding share the cores: wall = start + the rest / CPUs.
On a GPU they overlap: wall = start + max(decoding / CPUs, encoding on the card) + per-slide work
that does not fit into the shadow of either.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from thinsection.config import nearest
from thinsection.errors import ConfigError
from thinsection.planning.calibration import Calibration
from thinsection.slide.tiff_reader import CACHE_BYTES
from thinsection.stream.plan import CHANNELS, REGION_BYTES, StreamBudget
from thinsection.types import GIB, MIB

MASK_BYTES_PER_PX = 40
# threads' stacks and arenas, pictures and tables of slides that are prepared or written: what is
# not modelled one by one, fitted to benchmarks/bench_plan.py
OTHER_BYTES = 24 * MIB
# over the parts: peaks of equal runs differ, as the heap falls; see benchmarks/bench_plan.py
MARGIN = 1.06
CUDA_CONTEXT_BYTES = 600 * MIB
_RESULT_COPIES = 3
# share of the data sheet's matrix rate that a vision transformer's forward pass reaches; an
# assumption, not a measurement: replace it by a calibration on the card
ASSUMED_EFFICIENCY = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSize:
    """What an encoder takes.

    Attributes:
        weights_bytes: of its weights.
        batch_bytes: of one batch in work, weights not counted.
        dim: of an embedding.
        flops_per_tile: multiply-adds count as two.
        cpu_peak_bytes: measured peak of a process that encodes such batches on this machine's CPU,
            libraries and weights included; None where it was not measured.
    """

    weights_bytes: int
    batch_bytes: int
    dim: int
    flops_per_tile: float
    cpu_peak_bytes: int | None = None


def encoders_together(sizes: Sequence[EncoderSize]) -> EncoderSize:
    """What several encoders of one process take: all weights, one batch in work at a time."""
    peaks = [size.cpu_peak_bytes for size in sizes if size.cpu_peak_bytes is not None]
    others = sum(size.weights_bytes for size in sizes)
    known = len(peaks) == len(sizes)
    return EncoderSize(
        weights_bytes=others,
        batch_bytes=max(size.batch_bytes for size in sizes),
        dim=sum(size.dim for size in sizes),
        flops_per_tile=sum(size.flops_per_tile for size in sizes),
        # each measured peak has its own weights and the libraries in it
        cpu_peak_bytes=max(peak + others - size.weights_bytes for peak, size in zip(peaks, sizes))
        if known
        else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideSize:
    """What headers and thumbnail say of one slide.

    Attributes:
        slide_id: of the cohort.
        num_tiles: tiles with enough tissue.
        read_px: px of the level that are decoded for one tile.
        mask_px: px of the tissue mask.
        thumbnail_px: px that are decoded for the thumbnail.
    """

    slide_id: str
    num_tiles: int
    read_px: int
    mask_px: int
    thumbnail_px: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Predicted peaks and what they are made of.

    Attributes:
        host: name of a part -> bytes of host memory.
        gpu: the same on the GPU; empty without one.
    """

    host: dict[str, int]
    gpu: dict[str, int]

    @property
    def host_bytes(self) -> int:
        """Peak of the process, with the margin."""
        return int(sum(self.host.values()) * MARGIN)

    @property
    def gpu_bytes(self) -> int:
        """Peak on the GPU, with the margin."""
        return int(sum(self.gpu.values()) * MARGIN)


def memory_plan(
    slides: tuple[SlideSize, ...],
    *,
    stream: StreamBudget,
    batch_size: int,
    encoder: EncoderSize | None,
    process_bytes: int,
    prefetch_slides: int,
    on_gpu: bool = False,
) -> MemoryPlan:
    """The peaks of one process that takes all these slides.

    Args:
        slides: at least one.
        stream: as the run would divide its budget.
        batch_size: tiles per batch.
        encoder: None for a run that ends with the tile grid.
        process_bytes: of `Calibration`.
        prefetch_slides: opened ahead.
        on_gpu: where the encoder is.
    """
    ahead = min(prefetch_slides + 2, len(slides))
    mask = max(s.mask_px for s in slides)
    parts = {"prepared slides": ahead * mask * MASK_BYTES_PER_PX + OTHER_BYTES}
    if encoder is None:
        return MemoryPlan(host={"process": process_bytes, **parts}, gpu={})
    batches = sum(-(-s.num_tiles // batch_size) for s in slides)
    num_tiles = sum(s.num_tiles for s in slides)
    tile_bytes = stream.batch_bytes // batch_size
    largest = max(s.num_tiles for s in slides)
    parts |= {
        "batch buffers": min(stream.slots * batch_size, num_tiles) * tile_bytes,
        "decode scratch": min(stream.workers, max(batches, 1)) * decode_scratch(slides, largest),
        "reader caches": min(CACHE_BYTES, _decoded(slides)),
        "results": largest * encoder.dim * 4 * _RESULT_COPIES,
    }
    if not on_gpu and encoder.cpu_peak_bytes is not None:
        return MemoryPlan(host={"process and encoder": encoder.cpu_peak_bytes, **parts}, gpu={})
    parts = {"process": process_bytes, **parts}
    if not on_gpu:
        held = {"weights": 2 * encoder.weights_bytes, "batch": encoder.batch_bytes}
        return MemoryPlan(host=parts | held, gpu={})
    parts |= {"weights while loading": encoder.weights_bytes}
    held = {
        "context": CUDA_CONTEXT_BYTES,
        "weights": encoder.weights_bytes,
        "batch": encoder.batch_bytes,
        "transfer": 2 * batch_size * tile_bytes,
    }
    return MemoryPlan(host=parts, gpu=held)


def decode_scratch(slides: tuple[SlideSize, ...], largest: int) -> int:
    """Bytes of one worker's region: not more than the slides hold."""
    tile = max(s.read_px for s in slides) * CHANNELS
    return min(max(REGION_BYTES, tile), largest * tile) + tile


def _decoded(slides: tuple[SlideSize, ...]) -> int:
    return max(s.num_tiles * s.read_px * CHANNELS for s in slides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: as `--gpu` takes it.
        memory_bytes: on the card.
        half_flops: dense half-precision operations per second.
    """

    name: str
    memory_bytes: int
    half_flops: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="t4", memory_bytes=16 * GIB, half_flops=65e12),
        Gpu(name="v100", memory_bytes=16 * GIB, half_flops=125e12),
        Gpu(name="v100-32", memory_bytes=32 * GIB, half_flops=125e12),
        Gpu(name="a40", memory_bytes=48 * GIB, half_flops=149.7e12),
        Gpu(name="l40s", memory_bytes=48 * GIB, half_flops=362e12),
        Gpu(name="a100-40", memory_bytes=40 * GIB, half_flops=312e12),
        Gpu(name="a100-80", memory_bytes=80 * GIB, half_flops=312e12),
        Gpu(name="h100", memory_bytes=80 * GIB, half_flops=989e12),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        ConfigError: not known; names the nearest.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu must be a known one, got {name!r}{nearest(name, GPUS)}")
    return GPUS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePlan:
    """Predicted seconds.

    Attributes:
        start_s: imports and weights, once per process.
        prepare_s: opening, tissue, grid, pictures; CPU-seconds.
        decode_s: CPU-seconds.
        encode_s: CPU-seconds, or seconds of the GPU.
        wall_s: of the run.
    """

    start_s: float
    prepare_s: float
    decode_s: float
    encode_s: float
    wall_s: float

    @property
    def cpu_s(self) -> float:
        """Sum of all parts."""
        return self.start_s + self.prepare_s + self.decode_s + self.encode_s


def time_plan(
    slides: tuple[SlideSize, ...],
    *,
    calibration: Calibration,
    encoder: EncoderSize | None,
    tiles_per_s: float,
    cpus: float,
    gpu: Gpu | None = None,
) -> TimePlan:
    """The time of one process that takes all these slides.

    Args:
        slides: at least one.
        calibration: of this machine.
        encoder: None for a run that ends with the tile grid.
        tiles_per_s: the encoder's rate per CPU-second, as calibrated; not used with a GPU.
        cpus: of the process.
        gpu: the card, or None for a CPU.
    """
    rate = calibration.decode_px_per_s
    thumbnails = sum(s.thumbnail_px for s in slides) / rate
    prepare = len(slides) * calibration.slide_s + thumbnails
    if encoder is None:
        wall = calibration.start_s + prepare
        return TimePlan(
            start_s=calibration.start_s, prepare_s=prepare, decode_s=0, encode_s=0, wall_s=wall
        )
    tiles = sum(s.num_tiles for s in slides)
    decode = sum(s.num_tiles * s.read_px for s in slides) / rate
    if gpu is None:
        encode = tiles / tiles_per_s
        wall = calibration.start_s + (prepare + decode + encode) / cpus
    else:
        encode = tiles * encoder.flops_per_tile / (gpu.half_flops * ASSUMED_EFFICIENCY)
        wall = calibration.start_s + max(encode, (prepare + decode) / cpus)
    return TimePlan(
        start_s=calibration.start_s,
        prepare_s=prepare,
        decode_s=decode,
        encode_s=encode,
        wall_s=wall,
    )
