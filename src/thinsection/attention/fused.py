"""Attention without a bias by PyTorch's fused kernels, which also give the log-sum-exp of a row.

A launch computes all heads of all segments of a batch, and writes no score to memory. The kernels
are tried once for each card, dtype and width: a card for which they were not built, or where they
disagree with the formula, keeps our blocks. On a CPU our blocks are as fast in float32 and twice as
fast in bfloat16, so `is_fused` leaves it to them; PyTorch's form for CPUs is here for tests.

Shapes: B batch, H heads, n tokens, D channels of a head.
"""

from functools import cache

import torch
from torch import Tensor

from thinsection.attention.reach import LOG2E

# largest error of a value or a log sum in the trial, whose values are about 1
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def is_fused(q: Tensor) -> bool:
    """Tells whether a fused kernel for q (..., n, D) works on its card."""
    if not (q.is_cuda and q.dtype in _TOLERANCES):
        return False
    return agrees(q.device, q.dtype, q.shape[-1])


@cache
def agrees(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Tries the kernel on a small input, with strides as of a dilated segment, against float64."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(3, 2, 3, 40, dim, generator=generator).to(dtype)
    q, k, v = exact.to(device)[..., 1::2, :]
    try:
        found = fused_attention(q, k, v)
    except RuntimeError:
        return False
    q, k, v = exact[..., 1::2, :].double()
    scores = q @ k.mT * dim**-0.5
    wanted = (scores.softmax(-1) @ v, scores.logsumexp(-1) * LOG2E)
    errors = [
        float((a.cpu().double() - b).abs().max())
        for a, b in zip(found, wanted, strict=True)
    ]
    return max(errors) <= _TOLERANCES[dtype]  # False for NaN


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention (B, H, n, D) at the scale D^-0.5 in the dtype of q; log2-sum-exp2 (B, H, n).

    Args:
        q, k, v: (B, H, n, D) each, of any strides but that of the last axis, which is 1.

    Memory: the two results.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    elif q.dtype == torch.float32:  # the other kernel takes 16 bits only
        efficient = aten._scaled_dot_product_efficient_attention
        out, log_sums = efficient(q, k, v, None, True)[:2]
        log_sums = log_sums[..., : q.shape[-2]]  # its rows are padded
    else:
        out, log_sums = aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    return out, log_sums * LOG2E
