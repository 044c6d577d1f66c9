"""Attention without a bias by PyTorch's fused kernels, which also give the log-sum-exp of a row.

A launch computes all heads of all segments of a batch, and writes no score to memory. On a CPU
our blocks are as fast in float32 and twice as fast in bfloat16, so `is_fused` leaves it to them;
PyTorch's form for CPUs is here for tests.

Shapes: B batch, H heads, n tokens, D channels of a head.
"""

import torch
from torch import Tensor

from thinsection.attention.reach import LOG2E

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_DIM, _DIM_STEP = 256, 8  # channels that the kernels take


def is_fused(q: Tensor) -> bool:
    """Tells whether PyTorch has a fused kernel for q (..., n, D) on its card."""
    dim = q.shape[-1]
    fits = dim <= _MAX_DIM and dim % _DIM_STEP == 0
    return q.is_cuda and q.dtype in _DTYPES and fits


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
