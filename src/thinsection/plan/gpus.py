"""GPUs that a plan may name: memory and matrix rate as their vendor's data sheets state them."""

from dataclasses import dataclass

from thinsection.config import nearest
from thinsection.errors import ConfigError
from thinsection.types import GIB

# share of the data sheet's matrix rate that a vision transformer's forward pass reaches; an
# assumption, not a measurement: replace it by a calibration on the card
ASSUMED_EFFICIENCY = 0.35


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
