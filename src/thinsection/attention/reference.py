"""The specification: one item of a batch, its attention with the bias in full, ALiBi's slopes.

Shapes: H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels of a head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from thinsection.errors import InvalidInputError

# dense T x T arrays alive at the peak: distances, bias, scores, softmax
DENSE_COPIES_PER_HEAD = 3
DENSE_COPIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionItem:
    """One item of a batch without its padding: the input of every implementation."""

    q: Tensor  # [H, T, D] of any strides, like k and v
    k: Tensor
    v: Tensor
    cells: Tensor  # [2, N], rows then columns, in the dtype of the arithmetic
    slopes: tuple[float, ...]  # one per head
    num_prefix_tokens: int
    scale: float  # factor of q . k

    @property
    def math_dtype(self) -> torch.dtype:
        """Dtype of softmax and sums."""
        return math_dtype(self.q)


def math_dtype(x: Tensor) -> torch.dtype:
    """Dtype of softmax and sums: float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def reference(item: AttentionItem, out: Tensor | None = None) -> Tensor:
    """Attention [H, T, D] in the input's dtype, computed in `math_dtype`.

    softmax_j(scale * q_i . k_j - slope_h * |cell_i - cell_j|) v_j over all keys j; the distance is
    Euclidean, and 0 where i or j is a prefix token.

    Memory: `dense_bytes`: 3 (H + 1) T² elements.
    """
    result = attend_dense(
        item.q,
        item.k,
        item.v,
        item.cells,
        torch.tensor(item.slopes, dtype=item.math_dtype),
        num_prefix_tokens=item.num_prefix_tokens,
        scale=item.scale,
    )
    return result if out is None else out.copy_(result)


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Tensor,
    slopes: Tensor,
    *,
    num_prefix_tokens: int,
    scale: float,
) -> Tensor:
    """Attention [..., H, T, D] by the plain formula, for cells [..., 2, N] and slopes [H].

    Nothing depends on values, so that PyTorch can trace and transform it.

    Memory: 3 (H + 1) T² elements.
    """
    dtype = math_dtype(q)
    steps = (cells[..., :, None] - cells[..., None, :]).double()
    squares = steps.square().sum(-3)
    distance = squares.sqrt().to(dtype)
    bias = F.pad(distance, (num_prefix_tokens, 0, num_prefix_tokens, 0))
    products = q.to(dtype) @ k.to(dtype).transpose(-1, -2)
    slopes = slopes.to(q.device, dtype)[:, None, None]
    scores = scale * products - slopes * bias[..., None, :, :]
    return (scores.softmax(-1) @ v.to(dtype)).to(q.dtype)


def dense_bytes(q: Tensor) -> int:
    """Bytes that `reference` needs for all of q [B, H, T, D], beyond inputs and output."""
    batch, heads, tokens, _ = q.shape
    copies = batch * (heads * DENSE_COPIES_PER_HEAD + DENSE_COPIES)
    bytes_per_value = torch.finfo(math_dtype(q)).bits // 8
    return copies * tokens**2 * bytes_per_value


def alibi_slopes(num_heads: int) -> Tensor:
    """Slopes (H,) float64, all > 0: one per head, geometric.

    For a power of two they are p, p², ..., p^H with p = 2^(-2^-(log2 H - 3)); otherwise those of
    the next lower power of two, followed by every second one of the next higher.

    Source: Press, Smith, Lewis, "Train Short, Test Long", 2022; the rule of its released code.
    """
    if num_heads < 1:
        raise InvalidInputError(f"num_heads must be >= 1, got {num_heads}")
    lower = 1 << (num_heads.bit_length() - 1)
    between = _slopes_of_power_of_two(2 * lower)[0::2]
    slopes = _slopes_of_power_of_two(lower) + between[: num_heads - lower]
    return torch.tensor(slopes, dtype=torch.float64)


def _slopes_of_power_of_two(num_heads: int) -> list[float]:
    first = 2.0 ** -(2.0 ** -(math.log2(num_heads) - 3))
    return [first**power for power in range(1, num_heads + 1)]
