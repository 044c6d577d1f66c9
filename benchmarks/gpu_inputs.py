"""What the checks and the rates of gpu_proof work on: tiles, encoders, precisions."""

import numpy as np
import torch

from thinsection.encode import TileEncoder, load_encoder
from thinsection.pool import GigaPathSlideEncoder, LoadOptions
from thinsection.pool.gigapath import LongNetConfig
from thinsection.types import GIB

NAMES = ("efficientnet_lite0", "lunit_vits16")
TILES_PX = 224


def tiles_of(count: int, *, edge: int = TILES_PX, seed: int = 0) -> np.ndarray:
    """Seeded uint8 noise on ramps (count, edge, edge, 3)."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(60, 200, edge)[:, None, None] + rng.uniform(
        -40, 40, (count, 1, 1, 3)
    )
    noise = rng.normal(0, 12, (count, edge, edge, 3))
    return (ramp + noise).clip(0, 255).astype(np.uint8)


def encoder_on(device: str, name: str, precision: str = "fp32") -> TileEncoder:
    """Seeded random weights, but the default encoder's own."""
    return load_encoder(
        name, device=device, precision=precision, pretrained=name == NAMES[0]
    )


def precisions(device: str) -> tuple[str, ...]:
    """What is worth a check on the device."""
    if device == "cpu":
        return ("fp32",)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return ("fp32", "fp16", "bf16") if bf16 else ("fp32", "fp16")


def gigapath_of(device: str, precision: str, layers: int) -> GigaPathSlideEncoder:
    """So many layers of the published sizes, seeded random weights."""
    config = LongNetConfig(num_layers=layers)
    options = LoadOptions(device=device, precision=precision, budget_bytes=4 * GIB)  # type: ignore[arg-type]
    weights = GigaPathSlideEncoder.random_weights(config, seed=0)
    return GigaPathSlideEncoder.from_state_dict(weights, config=config, options=options)
