"""The specification: 2-D ALiBi attention with its bias in full. O(N²) memory.

Shapes: B batch, H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels of a head.
"""

import torch

from thinsection.attention.problem import Problem

# dense arrays alive at the peak: distances, bias, scores, softmax
DENSE_COPIES_PER_HEAD, DENSE_COPIES = 3, 3


def dense_bytes(q: torch.Tensor) -> int:
    """Bytes that `reference` needs for q [B, H, T, D], beyond inputs and output."""
    element = 8 if q.dtype == torch.float64 else 4
    batch, heads, tokens, _ = q.shape
    return batch * (heads * DENSE_COPIES_PER_HEAD + DENSE_COPIES) * tokens**2 * element


def reference(problem: Problem) -> torch.Tensor:
    """Attention (B, H, T, D) in float64 for float64 input, else in float32; the input's dtype.

    softmax_j(scale * q_i . k_j - slope_h * |cell_i - cell_j|) v_j over the valid keys j; the
    distance is Euclidean, and 0 where i or j is a prefix token. Invalid queries give zeros.

    Memory: `dense_bytes`: 3 (H + 1) B T² elements.
    """
    dtype = torch.float64 if problem.q.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(dtype) for x in (problem.q, problem.k, problem.v))
    prefix = problem.num_prefix_tokens
    difference = problem.cells[:, :, None] - problem.cells[:, None, :]  # (B, N, N, 2) int64
    distance = q.new_zeros(q.shape[0], q.shape[2], q.shape[2])
    distance[:, prefix:, prefix:] = difference.square().sum(-1).to(torch.float64).sqrt().to(dtype)
    bias = -problem.slopes.to(dtype)[None, :, None, None] * distance[:, None]
    scores = problem.scale * (q @ k.transpose(-1, -2)) + bias
    if problem.key_mask is None:
        return (scores.softmax(-1) @ v).to(problem.q.dtype)
    scores = scores.masked_fill(~problem.key_mask[:, None, None, :], float("-inf"))
    # a row without a valid key would be 0/0; it belongs to an invalid query, which gives zeros
    weights = scores.softmax(-1).masked_fill(~problem.key_mask[:, None, :, None], 0.0)
    return (weights @ v.masked_fill(~problem.key_mask[:, None, :, None], 0.0)).to(problem.q.dtype)
