"""LongNet's dilated attention in O(L) memory: segments, strided views, mixing by log-sum-exp.

Nothing is padded in memory: the published zero padding takes part in the softmax (logit 0,
value 0), which adds its count to the denominator.

Shapes: h heads (a part of all H), L tokens, D channels of a head.

Source: Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens", 2023.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from thinsection.attention.chunked import forward_chunked, plan_blocks
from thinsection.attention.products import fast_products
from thinsection.attention.reach import LOG2E
from thinsection.attention.reference import AttentionItem, math_dtype
from thinsection.errors import require

CALL_TOKENS = (
    8192  # of as many equal segments as make them up: a call has costs of its own
)
UNCOVERED = (
    -1e8 * LOG2E
)  # log2 units; the published weight of what a branch does not cover


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Segments of `length` tokens, of which each head sees every `dilation`-th."""

    length: int
    dilation: int


@fast_products()
def dilated_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    branches: tuple[Branch, ...],
    *,
    first_head: int,
    num_heads: int,
    budget_bytes: int,
) -> Tensor:
    """Dilated attention (h, L, D) in float32 (float64 for float64 input), scale D^-0.5.

    q, k and v are (h, L, D) each, of any strides: heads first_head..first_head + h of num_heads;
    head i of H sees offset i // (H / dilation) of a segment. Every dilation divides num_heads.

    Memory: the output, 2 h L floats, one head's branch output (of CALL_TOKENS, or one segment), and
    budget_bytes for blocks.
    """
    q = qkv[0]
    fit = branches and all(
        num_heads % b.dilation == 0 and b.length >= 1 for b in branches
    )
    rule = (
        f"branches must hold dilations that divide {num_heads} heads and lengths >= 1"
    )
    require(fit, rule, branches)
    heads, tokens = q.shape[:2]
    out = torch.zeros_like(
        q, dtype=math_dtype(q), memory_format=torch.contiguous_format
    )
    den = out.new_zeros(heads, tokens)
    top = out.new_full((heads, tokens), -math.inf)
    for branch in branches:
        length = min(branch.length, tokens)
        for h in range(heads):
            offset = (first_head + h) * branch.dilation // num_heads
            for part, size in _equal_segments(tokens, length, branch.dilation):
                seen = [_cut(x[h], part, size, offset, branch.dilation) for x in qkv]
                if seen[0].numel() == 0:
                    continue
                padding = -(-length // branch.dilation) - seen[0].shape[1]
                value, lse = _attended(seen, padding, budget_bytes)
                # the running softmax over branches: these views change in place
                sums = (
                    _cut(x[h], part, size, offset, branch.dilation)
                    for x in (out, den, top)
                )
                mixed, weights, highest = sums
                new_highest = torch.maximum(highest, lse)
                old, new = (highest - new_highest).exp2(), (lse - new_highest).exp2()
                mixed.mul_(old[..., None]).addcmul_(value, new[..., None])
                weights.mul_(old).add_(new)
                highest.copy_(new_highest)
    return out.div_(den[..., None])


def _equal_segments(
    tokens: int, length: int, dilation: int
) -> Iterator[tuple[slice, int]]:
    """Ranges of tokens, and the length of all segments in each: some at a time, the rest alone."""
    whole = tokens // length * length
    at_once = length * max(1, CALL_TOKENS * dilation // length)
    for start in range(0, whole, at_once):
        yield slice(start, min(start + at_once, whole)), length
    if whole < tokens:
        yield slice(whole, tokens), tokens - whole


def _cut(x: Tensor, part: slice, size: int, offset: int, dilation: int) -> Tensor:
    """View (segments, n, ...) of the tokens (L, ...) that a head sees in segments of `size`."""
    segments = x[part].unflatten(0, (-1, size))  # type: ignore[no-untyped-call]
    return cast(Tensor, segments[:, offset::dilation])


def _attended(
    qkv: list[Tensor], padding: int, budget_bytes: int
) -> tuple[Tensor, Tensor]:
    """Attention (s, n, D) within s segments (s, n, D), each with `padding` zeros; log-sum-exp2."""
    q, k, v = qkv
    segments, tokens, dim = q.shape
    # no token is on a grid: no bias
    item = AttentionItem(
        q, k, v, q.new_empty(2, 0), (0.0,) * segments, tokens, scale=dim**-0.5
    )
    out, lse = forward_chunked(item, plan_blocks(q, budget_bytes=budget_bytes))
    value = out.to(lse.dtype)
    if padding:
        with_padding = torch.logaddexp2(lse, lse.new_tensor(math.log2(padding)))
        value = value * (lse - with_padding).exp2()[..., None]
        lse = with_padding
    # as published: a log-sum-exp of exactly 0 marks a position that no key covers
    return value, lse.masked_fill(lse == 0, UNCOVERED)
