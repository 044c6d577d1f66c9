"""Linear layers in FP8: float8_e4m3fn codes with one scale per row, multiplied by `_scaled_mm`.

The weights are rounded once, the activations in each pass. Rounded are the linear layers of the
network's stack of equal blocks, which hold nearly all weights of a vision transformer. The patch
embedding, norms, softmax, attention's own products, and all that follows the last block keep the
precision that autocast gives them in bf16.

Shapes: activations [..., K], codes of weights [N, K], results [..., N]; scales [M, 1] and [1, N].
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CODES = torch.float8_e4m3fn
LARGEST_CODE = 448.0  # largest number of this type
_EDGE = 16  # CUDA's kernels need widths that are multiples of it
# a row of zeros has no scale of its own
_SMALLEST_SCALE = 1e-12


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and scales float32 [M, 1] of rows [M, K]: the largest value of a row is 448."""
    exact = rows.float()
    scales = exact.abs().amax(dim=1, keepdim=True) / LARGEST_CODE
    scales = scales.clamp_min(_SMALLEST_SCALE)
    codes = (exact / scales).clamp(-LARGEST_CODE, LARGEST_CODE).to(CODES)
    return codes.contiguous(), scales


class Fp8Linear(nn.Module):
    """Linear layer whose weights and activations are rounded to FP8; the result is bf16.

    Memory: one byte a weight, and one byte an activation while it computes.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._padding = -layer.in_features % _EDGE
        weight = F.pad(layer.weight.detach(), (0, self._padding))
        codes, scales = quantised(weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales.reshape(1, -1))
        bias = layer.bias
        rounded_bias = None if bias is None else bias.detach().bfloat16()
        self.register_buffer("bias", rounded_bias)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy or a pickle, which PyTorch cannot make of this type."""
        buffers = {**self._buffers, "codes": self.codes.view(torch.uint8)}
        return vars(self) | {"_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.codes = self.codes.view(CODES)

    def forward(self, activations: Tensor) -> Tensor:
        rows = activations.reshape(-1, activations.shape[-1])
        if self._padding:
            rows = F.pad(rows, (0, self._padding))
        codes, scales = quantised(rows)
        products: Tensor = torch._scaled_mm(
            codes,
            self.codes.t(),
            scale_a=scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            # sums of 14 bits on Hopper, as others use for inference; the check at load sees them
            use_fast_accum=True,
        )
        return products.reshape(*activations.shape[:-1], -1)


def quantise_blocks(network: nn.Module) -> tuple[int, int]:
    """Rounds the linear layers of the blocks in place.

    Returns the number of layers that were rounded, and of all linear layers.

    Memory: one layer in fp32 beside the network.
    """
    num_layers = sum(isinstance(layer, nn.Linear) for layer in network.modules())
    chosen = list(dict.fromkeys(_linear_layers_of_blocks(network)))
    for parent, name in chosen:
        setattr(parent, name, Fp8Linear(getattr(parent, name)))
    return len(chosen), num_layers


def _linear_layers_of_blocks(network: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each linear layer below a stack of equal blocks, as its parent and its name there."""
    for stack in network.modules():
        if not isinstance(stack, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = {type(block) for block in stack}
        if len(stack) < 2 or len(kinds) > 1 or nn.Linear in kinds:
            continue
        for parent in stack.modules():
            for name, layer in parent.named_children():
                # a subclass may compute otherwise
                if type(layer) is not nn.Linear or _is_read_by(parent, name):
                    continue
                if layer.out_features % _EDGE == 0:
                    yield parent, name


def _is_read_by(parent: nn.Module, name: str) -> bool:
    """True if the parent multiplies by the weight itself, as timm's EVA with separate biases."""
    return name == "qkv" and getattr(parent, "q_bias", None) is not None
