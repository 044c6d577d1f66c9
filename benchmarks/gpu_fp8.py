"""FP8 for gpu_proof: its layers against the CPU's, and its rate and cosine for ViT-L.

A step takes the device ('cpu' for --smoke) and whether sizes are tiny; it returns figures. On a CPU
`torch._scaled_mm` multiplies the codes exactly. A card without FP8 is said, and is no failure.
"""

import copy
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_encoders import (
    BATCH,
    SMALLEST,
    TILES_PX,
    VITS,
    compiled_row,
    lowest_cosine,
    rates,
)
from benchmarks.gpu_inputs import encoder_on, tiles_of
from thinsection.encode import NetworkTileEncoder
from thinsection.encode.fp8 import Fp8Linear
from thinsection.encode.sizes import declared_size
from thinsection.errors import InvalidInputError
from thinsection.weights.placement import place

# rows, and widths of layers: ViT-S, a row of SwiGLU that is no multiple of 16, and ViT-L
_LAYERS = ((197, 384, 1536), (33, 3416, 1280), (1024, 1024, 4096))
MAX_LAYER_ERROR = (
    2e-2  # of the largest result: bf16's step, and sums of fewer bits on a card
)
_TITLE = "vit_l"


def check_fp8(device: str, smoke: bool) -> dict[str, Any]:
    """Largest difference of FP8 layers to the CPU's, and the cosine of a network to fp32."""
    reason = _why_no_fp8(device)
    if reason:
        return {"left_out": reason}
    errors = {}
    for rows, width, length in _LAYERS[:2] if smoke else _LAYERS:
        generator = torch.Generator().manual_seed(width)
        layer = nn.Linear(width, length)
        nn.init.normal_(layer.weight, std=width**-0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        activations = torch.randn((rows, width), generator=generator)
        rounded = Fp8Linear(layer)
        expected = rounded(activations).float()
        found = rounded.to(device)(activations.to(device)).float().cpu()
        error = float((found - expected).abs().max() / expected.abs().max())
        assert error <= MAX_LAYER_ERROR, (width, length, error)
        errors[f"{width}x{length}"] = error
    encoder = encoder_on(device, SMALLEST)
    assert isinstance(encoder, NetworkTileEncoder)
    check = encoder.to_fp8()
    assert check.passes("fp8"), check
    return {"layers": errors, "cosine_fp32": 1 - check.angle}


def fp8_rate(device: str, smoke: bool) -> dict[str, Any]:
    """Tiles/s of a network in FP8 by PyTorch's launches and compiled, with its cosines to fp32."""
    reason = _why_no_fp8(device)
    if reason:
        return {"left_out": reason}
    name = SMALLEST if smoke else VITS[_TITLE]
    batch = 2 if smoke else BATCH
    exact = encoder_on(device, name)
    assert isinstance(exact, NetworkTileEncoder)
    size = declared_size(name, tile_px=TILES_PX)
    few = tiles_of(2 if smoke else 16, edge=TILES_PX)
    in_fp32 = exact.encode(few).cpu()
    rounded = copy.deepcopy(exact)
    check = rounded.to_fp8()
    row: dict[str, Any] = {
        "encoder": name,
        "flops_per_tile": None if size is None else size.flops_per_tile,
        "batch": batch,
        "cosine_check": 1 - check.angle,
        "cosine_fp32": lowest_cosine(rounded.encode(few).cpu(), in_fp32),
        **rates(rounded, device, batch, smoke=smoke),
    }
    row["compiled"] = compiled_row(rounded, exact, device, batch, smoke=smoke)
    if "not_compiled" not in row["compiled"]:
        row["compiled"]["cosine_fp32"] = lowest_cosine(
            rounded.encode(few).cpu(), in_fp32
        )
    return {"fp8": row}


def _why_no_fp8(device: str) -> str:
    """Reason why the device cannot compute in FP8; '' if it can."""
    try:
        place(device, "fp8", has_fp8=True)
    except InvalidInputError as error:
        return str(error)
    return ""


CHECKS = {"check fp8": check_fp8}
RATES = {f"rate fp8 {_TITLE}": fp8_rate}
