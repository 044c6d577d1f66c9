"""The artefact network in torch: what is trained, and the twin of `qc/checks/artefact_network.py`.

Legend: B examples, H and W pixels of 8 µm, both multiples of 32; C classes.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from thinsection.qc.checks.artefact_network import CLASSES, NUM_PLANES

# Channels on grids of 16, 32, 64, 128 and 256 µm, and of what the classes are made of.
CHANNELS = (16, 32, 48, 64, 64)
LAST = 24


class ArtefactNetwork(nn.Module):
    """A U-shaped network: planes (B, 4, H, W) to logits (B, C, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        ins = (4 * NUM_PLANES, *CHANNELS[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(*_block(low, high), *_block(high, high))
            for low, high in zip(ins, CHANNELS, strict=True)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(high, low, 1) for low, high in pairwise(CHANNELS)
        )
        outs = (LAST, *CHANNELS[1:-1])
        self.join = nn.ModuleList(
            nn.Sequential(*_block(low, out))
            for low, out in zip(CHANNELS, outs, strict=False)
        )
        self.out = nn.Conv2d(LAST, 4 * len(CLASSES), 1)

    def forward(self, planes: Tensor) -> Tensor:
        x = nn.functional.pixel_unshuffle(planes, 2)
        finer: list[Tensor] = []
        for level, down in enumerate(self.down):
            if level:
                finer.append(x)
                x = nn.functional.max_pool2d(x, 2)
            x = down(x)
        for level in reversed(range(len(self.up))):
            wide = nn.functional.interpolate(self.up[level](x), scale_factor=2)
            x = self.join[level](finer.pop() + wide)
        return nn.functional.pixel_shuffle(self.out(x), 2)


def _block(low: int, high: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(low, high, 3, padding=1, bias=False),
        nn.BatchNorm2d(high),
        nn.ReLU(inplace=True),
    )


def layer_arrays(network: ArtefactNetwork) -> dict[str, npt.NDArray[np.float16]]:
    """Weights of the layers by name, normalisation included: (9 * in, out) and (out,)."""
    arrays: dict[str, npt.NDArray[np.float16]] = {}
    for level, down in enumerate(network.down):
        parts: Any = down
        _add(arrays, f"down{level}a", parts[0], parts[1])
        _add(arrays, f"down{level}b", parts[3], parts[4])
    for level, (up, join) in enumerate(zip(network.up, network.join, strict=True)):
        parts = join
        _add(arrays, f"up{level}", up, None)
        _add(arrays, f"join{level}", parts[0], parts[1])
    _add(arrays, "out", network.out, None)
    return arrays


def _add(arrays: dict[str, Any], name: str, conv: Any, norm: Any) -> None:
    weight = conv.weight.detach().double()
    bias = torch.zeros(len(weight)) if conv.bias is None else conv.bias.detach()
    bias = bias.double()
    if norm is not None:
        gain = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
        weight = weight * gain[:, None, None, None]
        bias = norm.bias.detach() - norm.running_mean * gain
    # (out, in, y, x) to (y, x, in, out)
    flat = weight.permute(2, 3, 1, 0).reshape(-1, len(weight))
    # safetensors writes the buffer as it lies in memory
    arrays[f"{name}.weight"] = np.ascontiguousarray(flat.numpy(), dtype=np.float16)
    arrays[f"{name}.bias"] = bias.numpy().astype(np.float16)
