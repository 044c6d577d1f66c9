"""LongNet's dilated attention in O(L) memory: segments, strided views, mixing by log-sum-exp.

Nothing is padded in memory: the published zero padding takes part in the softmax (logit 0,
value 0), which adds its count to the denominator.

Shapes: h heads (a part of all H), L tokens, D channels of a head; s segments of n tokens that a
head sees.

Source: Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens", 2023.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from thinsection.attention.blocks import plan_blocks
from thinsection.attention.chunked import forward_chunked
from thinsection.attention.products import fast_products
from thinsection.attention.reach import LOG2E
from thinsection.attention.reference import AttentionItem, math_dtype
from thinsection.errors import InvalidInputError

# tokens that a head sees in the equal segments of one call; each call has costs of its own
CALL_TOKENS = 8192
# log2 units; the published weight of tokens that a branch does not cover
UNCOVERED = -1e8 * LOG2E


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

    Args:
        qkv: q, k and v (h, L, D) each, of any strides.
        branches: their outputs are mixed by their softmax weights; every dilation divides
            num_heads.
        first_head: number of the first of these h heads; head i of H sees offset
            i // (H / dilation) of a segment.
        num_heads: number H of all heads.
        budget_bytes: memory for blocks.

    Memory: the output, 2 h L floats, one head's branch output (of CALL_TOKENS, or one segment), and
    budget_bytes.
    """
    _check_branches(branches, num_heads)
    q = qkv[0]
    heads, tokens = q.shape[:2]
    mixed = torch.zeros_like(
        q, dtype=math_dtype(q), memory_format=torch.contiguous_format
    )
    weights = mixed.new_zeros(heads, tokens)
    top = mixed.new_full((heads, tokens), -math.inf)
    for branch in branches:
        length = min(branch.length, tokens)
        seen_with_padding = -(-length // branch.dilation)
        for head in range(heads):
            offset = (first_head + head) * branch.dilation // num_heads
            for part, size in _equal_segments(tokens, length, branch.dilation):
                cut = _Cut(part, size, offset, branch.dilation)
                segments = [cut.view(x[head]) for x in qkv]
                if segments[0].numel() == 0:
                    continue
                padding = seen_with_padding - segments[0].shape[1]
                values, log_sums = _attend_segments(segments, padding, budget_bytes)
                _mix_in(
                    values,
                    log_sums,
                    mixed=cut.view(mixed[head]),
                    weights=cut.view(weights[head]),
                    top=cut.view(top[head]),
                )
    return mixed.div_(weights[..., None])


def _check_branches(branches: tuple[Branch, ...], num_heads: int) -> None:
    fit = all(
        num_heads % branch.dilation == 0 and branch.length >= 1 for branch in branches
    )
    if not branches or not fit:
        raise InvalidInputError(
            f"branches must have lengths >= 1 and dilations that divide {num_heads} heads, got "
            f"{branches}"
        )


def _equal_segments(
    tokens: int, length: int, dilation: int
) -> Iterator[tuple[slice, int]]:
    """Ranges of tokens with the size of their segments: several of `length`, then a shorter one."""
    whole = tokens // length * length
    tokens_per_call = length * max(1, CALL_TOKENS * dilation // length)
    for start in range(0, whole, tokens_per_call):
        yield slice(start, min(start + tokens_per_call, whole)), length
    if whole < tokens:
        yield slice(whole, tokens), tokens - whole


@dataclass(frozen=True, slots=True)
class _Cut:
    """The tokens of a range that one head sees: every `dilation`-th of each segment of `size`."""

    part: slice
    size: int
    offset: int
    dilation: int

    def view(self, x: Tensor) -> Tensor:
        """View (s, n, ...) of x (L, ...)."""
        segments = x[self.part].unflatten(0, (-1, self.size))  # type: ignore[no-untyped-call]
        return cast(Tensor, segments[:, self.offset :: self.dilation])


def _attend_segments(
    qkv: list[Tensor], padding: int, budget_bytes: int
) -> tuple[Tensor, Tensor]:
    """Attention (s, n, D) within segments (s, n, D), each with `padding` zeros; log-sum-exp2."""
    q, k, v = qkv
    segments, tokens, dim = q.shape
    item = AttentionItem(
        q=q,
        k=k,
        v=v,
        # no token is on a grid, so none has a bias
        cells=q.new_empty(2, 0),
        slopes=(0.0,) * segments,
        num_prefix_tokens=tokens,
        scale=dim**-0.5,
    )
    out, log_sums = forward_chunked(item, plan_blocks(q, budget_bytes=budget_bytes))
    values = out.to(log_sums.dtype)
    if padding:
        log_padding = log_sums.new_tensor(math.log2(padding))
        with_padding = torch.logaddexp2(log_sums, log_padding)
        values = values * (log_sums - with_padding).exp2()[..., None]
        log_sums = with_padding
    # as published: a log-sum-exp of exactly 0 marks a position that no key covers
    return values, log_sums.masked_fill(log_sums == 0, UNCOVERED)


def _mix_in(
    values: Tensor, log_sums: Tensor, *, mixed: Tensor, weights: Tensor, top: Tensor
) -> None:
    """Add a branch's output to the running softmax over branches, whose views change in place."""
    new_top = torch.maximum(top, log_sums)
    shrink = (top - new_top).exp2()
    weight = (log_sums - new_top).exp2()
    mixed.mul_(shrink[..., None]).addcmul_(values, weight[..., None])
    weights.mul_(shrink).add_(weight)
    top.copy_(new_top)
