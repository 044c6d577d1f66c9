"""The specification: one item of a batch, its attention with the bias in full, ALiBi's slopes.

Shapes: H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels of a head.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinsection.errors import require

Pair = tuple[Tensor, Tensor]
# dense arrays alive at the peak: distances, bias, scores, softmax
DENSE_COPIES_PER_HEAD, DENSE_COPIES = 3, 3


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """One item of a batch, its padding taken out: what every implementation computes."""

    q: Tensor  # [H, T, D] of any strides, like k and v
    k: Tensor
    v: Tensor
    cells: Tensor  # [2, N], rows then columns, in the dtype of the arithmetic
    slopes: tuple[float, ...]
    num_prefix_tokens: int
    scale: float = field(kw_only=True)  # factor of q . k

    @property
    def math_dtype(self) -> torch.dtype:
        return math_dtype(self.q)


def math_dtype(x: Tensor) -> torch.dtype:
    """In which softmax and sums are taken: float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def reference(item: AttentionItem, out: Tensor | None = None) -> Tensor:
    """Attention [H, T, D] in float64 for float64 input, else in float32; the input's dtype.

    softmax_j(scale * q_i . k_j - slope_h * |cell_i - cell_j|) v_j over all keys j; the distance is
    Euclidean, and 0 where i or j is a prefix token. Memory: `dense_bytes`: 3 (H + 1) T² elements.
    """
    q, k, v = (x.to(item.math_dtype) for x in (item.q, item.k, item.v))
    tokens, prefix = q.shape[1], item.num_prefix_tokens
    cells = item.cells.double()
    distance = q.new_zeros(tokens, tokens)
    distance[prefix:, prefix:] = (
        (cells[:, :, None] - cells[:, None, :]).square().sum(0).sqrt()
    )
    slopes = torch.tensor(item.slopes, dtype=item.math_dtype, device=q.device)
    scores = item.scale * (q @ k.transpose(-1, -2)) - slopes[:, None, None] * distance
    result = (scores.softmax(-1) @ v).to(item.q.dtype)
    return result if out is None else out.copy_(result)


def dense_bytes(q: Tensor) -> int:
    """Bytes that `reference` needs for all of q [B, H, T, D], beyond inputs and output."""
    batch, heads, tokens, _ = q.shape
    elements = batch * (heads * DENSE_COPIES_PER_HEAD + DENSE_COPIES) * tokens**2
    return elements * math_dtype(q).itemsize


def alibi_slopes(num_heads: int) -> Tensor:
    """Slopes (H,) float64, all > 0: one per head, geometric.

    For a power of two they are p, p², ..., p^H with p = 2^(-2^-(log2 H - 3)); otherwise those of
    the next lower power of two, followed by every second one of the next higher.
    Source: Press, Smith, Lewis, "Train Short, Test Long", 2022; the rule of its released code.
    """
    require(num_heads >= 1, "num_heads must be >= 1", num_heads)
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = _power_of_two(lower) + _power_of_two(2 * lower)[0::2][: num_heads - lower]
    return torch.tensor(slopes, dtype=torch.float64)


def _power_of_two(num_heads: int) -> list[float]:
    first = 2.0 ** -(2.0 ** -(math.log2(num_heads) - 3))
    return [first**power for power in range(1, num_heads + 1)]
