"""LongNet's dilated attention in O(L) memory: segments, strided views, mixing by log-sum-exp.

Nothing is padded in memory: the published zero padding takes part in the softmax (logit 0,
value 0), which adds its count to the denominator.

Shapes: h heads (a part of all H), L tokens, D channels of a head.

Source: Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens", 2023.
"""

import math
from dataclasses import dataclass

import torch

from thinsection.attention.chunked import forward_chunked, plan_blocks
from thinsection.attention.reach import LOG2E
from thinsection.attention.reference import AttentionItem
from thinsection.errors import require

UNCOVERED = -1e8 * LOG2E  # log2 units; the published weight of what a branch does not cover


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Segments of `length` tokens, of which each head sees every `dilation`-th."""

    length: int
    dilation: int


def dilated_attention(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    branches: tuple[Branch, ...],
    *,
    first_head: int,
    num_heads: int,
    budget_bytes: int,
) -> torch.Tensor:
    """Dilated attention (h, L, D) in float32 (float64 for float64 input), scale D^-0.5.

    Args:
        qkv: q, k, v, (h, L, D) each, any strides.
        branches: every dilation divides the number of heads.
        first_head, num_heads: these are heads first_head..first_head + h of num_heads; head i of H
            sees offset i // (H / dilation) of a segment.

    Memory: the output, 2 h L floats, one head's branch output, and budget_bytes for blocks.

    Raises:
        InvalidInputError: a dilation does not divide the heads, or no branch is given.
    """
    q = qkv[0]
    fit = branches and all(num_heads % b.dilation == 0 and b.length >= 1 for b in branches)
    rule = f"branches must hold dilations that divide {num_heads} heads and lengths >= 1"
    require(fit, rule, branches)
    heads, tokens, dim = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(heads, tokens, dim, dtype=dtype)
    den = q.new_zeros(heads, tokens, dtype=dtype)
    top = q.new_full((heads, tokens), -math.inf, dtype=dtype)
    for branch in branches:
        length = min(branch.length, tokens)
        for h in range(heads):
            offset = (first_head + h) * branch.dilation // num_heads
            for start in range(0, tokens, length):
                rows = slice(start + offset, min(start + length, tokens), branch.dilation)
                real = len(range(rows.start, rows.stop, rows.step))
                if real == 0:
                    continue
                one = [x[None, h, rows] for x in qkv]
                padding = -(-length // branch.dilation) - real
                value, lse = _segment(one, padding, budget_bytes)
                _mix(out[h, rows], den[h, rows], top[h, rows], value, lse)
    return out.div_(den[..., None])


def _segment(
    qkv: list[torch.Tensor], padding: int, budget_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention (n, D) within a segment (1, n, D) and `padding` zeros; its log2-sum-exp (n,)."""
    q, k, v = qkv
    tokens, dim = q.shape[1:]
    # no token is on a grid: no bias
    item = AttentionItem(q, k, v, q.new_empty(2, 0), (0.0,), tokens, scale=dim**-0.5)
    out, lse = forward_chunked(item, plan_blocks(q, budget_bytes=budget_bytes))
    value, lse = out[0].to(lse.dtype), lse[0]
    if padding:
        with_padding = torch.logaddexp2(lse, lse.new_tensor(math.log2(padding)))
        value = value * (lse - with_padding).exp2()[:, None]
        lse = with_padding
    # as published: a log-sum-exp of exactly 0 marks a position that no key covers
    return value, lse.masked_fill(lse == 0, UNCOVERED)


def _mix(
    out: torch.Tensor, den: torch.Tensor, top: torch.Tensor, value: torch.Tensor, lse: torch.Tensor
) -> None:
    """Adds one branch to the running softmax over branches; out, den and top change in place."""
    new_top = torch.maximum(top, lse)
    old, new = (top - new_top).exp2(), (lse - new_top).exp2()
    out.mul_(old[:, None]).addcmul_(value, new[:, None])
    den.mul_(old).add_(new)
    top.copy_(new_top)
