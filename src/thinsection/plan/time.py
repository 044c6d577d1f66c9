"""Time of a run as formulas over measured rates.

CPU-seconds: start + slides * per_slide + thumbnail px / decode rate
             + tiles * read px / decode rate + tiles / encode rate
On a CPU decoding and encoding share the cores: wall = start + the rest / CPUs.
On a GPU they overlap: wall = start + max(decoding / CPUs, encoding on the card) + per-slide work
that does not fit into the shadow of either.
"""

from dataclasses import dataclass

from thinsection.plan.calibration import Calibration
from thinsection.plan.gpus import ASSUMED_EFFICIENCY, Gpu
from thinsection.plan.memory import EncoderSize, SlideSize


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
