"""LongNet's dilated attention in O(L) memory: segments, strided views, mixing by log-sum-exp.

Nothing is padded in memory: the published zero padding takes part in the softmax (logit 0,
value 0), which adds its count to the denominator.

On a card all heads and many segments of a branch are computed in one launch of PyTorch's fused
attention; on a CPU heads follow one another.

Shapes: h heads (a part of all H), L tokens, D channels of a head; o offsets of a segment, at each
of which g heads see the same tokens; s segments, of which a head sees n tokens each.

Source: Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens", 2023.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinsection.attention.blocks import plan_blocks
from thinsection.attention.chunked import forward_chunked
from thinsection.attention.fused import fused_attention, is_fused
from thinsection.attention.gradient import gradients
from thinsection.attention.products import fast_products
from thinsection.attention.reach import LOG2E
from thinsection.attention.reference import AttentionItem, math_dtype
from thinsection.errors import InvalidInputError

# tokens that a head sees in the equal segments of one call; each call has costs of its own
CALL_TOKENS = 8192
# tokens that all heads together see in one launch on a card: with 48 channels a head, 350 MB
_LAUNCH_TOKENS = 1 << 19
# log2 units; the published weight of tokens that a branch does not cover
UNCOVERED = -1e8 * LOG2E


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Segments of `length` tokens, of which each head sees every `dilation`-th."""

    length: int
    dilation: int


@fast_products()
def dilated_heads(
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
    budget_bytes. On a card five times _LAUNCH_TOKENS rows (or those of one segment of all heads) in
    place of the last two: copies of q, k and v, the launch's output, and the output in float32.
    """
    _check_branches(branches, num_heads)
    sums = _mixed_sums(
        qkv,
        branches,
        first_head=first_head,
        num_heads=num_heads,
        budget_bytes=budget_bytes,
    )
    return sums.output()


@dataclass(frozen=True, slots=True)
class _Sums:
    """Running softmax over branches of h heads and L tokens."""

    mixed: Tensor  # (h, L, D), sums of values in units of 2^top
    weights: Tensor  # (h, L), sums of weights in units of 2^top
    top: Tensor  # (h, L), largest log2-sum-exp2 so far

    def output(self) -> Tensor:
        """Attention (h, L, D), in the memory of `mixed`; 0 where no branch covers a token."""
        # the branch with the largest sum has the weight 1, so that only 0 is below 1
        return self.mixed.div_(self.weights.clamp_min(1)[..., None])

    def log_sums(self) -> Tensor:
        """log2-sum-exp2 (h, L) over the keys of all branches."""
        return self.top + self.weights.log2()


def _mixed_sums(
    qkv: tuple[Tensor, Tensor, Tensor],
    branches: tuple[Branch, ...],
    *,
    first_head: int,
    num_heads: int,
    budget_bytes: int,
) -> _Sums:
    """The sums over all branches; arguments as of `dilated_heads`."""
    q = qkv[0]
    heads, tokens = q.shape[:2]
    mixed = torch.zeros_like(
        q, dtype=math_dtype(q), memory_format=torch.contiguous_format
    )
    weights = mixed.new_zeros(heads, tokens)
    top = mixed.new_full((heads, tokens), -math.inf)
    fused = is_fused(q)
    for branch in branches:
        seen_with_padding = -(-min(branch.length, tokens) // branch.dilation)
        share = _HeadShare(first_head, heads, num_heads)
        for cut in _cuts(branch, tokens, share, fused=fused):
            segments = [cut.view(x) for x in qkv]
            attended = (
                _attend_fused(segments)
                if fused
                else _attend_in_blocks(segments, budget_bytes)
            )
            values, log_sums = _with_padding(*attended, seen_with_padding - cut.seen)
            _mix_in(
                values,
                log_sums,
                mixed=cut.view(mixed),
                weights=cut.view(weights),
                top=cut.view(top),
            )
    return _Sums(mixed, weights, top)


@fast_products()
def dilated_with_log_sums(
    qkv: tuple[Tensor, Tensor, Tensor],
    branches: tuple[Branch, ...],
    *,
    budget_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Dilated attention (H, L, D) of all heads, and the log sums (H, L) for its gradient.

    Memory: as `dilated_heads`, and H L floats.
    """
    num_heads = qkv[0].shape[0]
    _check_branches(branches, num_heads)
    sums = _mixed_sums(
        qkv, branches, first_head=0, num_heads=num_heads, budget_bytes=budget_bytes
    )
    log_sums = sums.log_sums()
    return sums.output(), log_sums


@fast_products()
def dilated_gradients(
    qkv: tuple[Tensor, Tensor, Tensor],
    branches: tuple[Branch, ...],
    *,
    out: Tensor,
    log_sums: Tensor,
    d_out: Tensor,
    budget_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v (H, L, D) each, in the dtype of the arithmetic.

    Mixing branches by their log sums is one softmax over the keys of all branches. So each branch
    adds its part of the gradient of that softmax, and padding has no part.

    Args:
        qkv: q, k and v (H, L, D) each.
        branches: as for `dilated_heads`.
        out, log_sums: what `dilated_with_log_sums` gave.
        d_out: gradient of the output (H, L, D).
        budget_bytes: memory for blocks.

    Memory: 3 H L D floats, three times a head's segments of CALL_TOKENS, and budget_bytes.

    Source: Dao et al., "FlashAttention", 2022, algorithm 4.
    """
    q = qkv[0]
    heads, tokens = q.shape[:2]
    totals = [
        torch.zeros_like(q, dtype=math_dtype(q), memory_format=torch.contiguous_format)
        for _ in qkv
    ]
    for branch in branches:
        for cut in _cuts(branch, tokens, _HeadShare(0, heads, heads), fused=False):
            segments = [cut.view(x)[0, 0] for x in qkv]
            parts = gradients(
                _segments_item(segments),
                cut.view(out)[0, 0],
                cut.view(log_sums)[0, 0],
                cut.view(d_out)[0, 0],
                plan_blocks(segments[0], budget_bytes=budget_bytes),
            )
            for total, part in zip(totals, parts, strict=True):
                cut.view(total)[0, 0].add_(part)
    return totals[0], totals[1], totals[2]


@dataclass(frozen=True, slots=True)
class _HeadShare:
    """The h heads from `first` on, of `total` heads."""

    first: int
    count: int
    total: int

    def offset_of(self, head: int, dilation: int) -> int:
        """First token of a segment that this of the h heads sees."""
        return (self.first + head) * dilation // self.total


def _cuts(
    branch: Branch, tokens: int, share: _HeadShare, *, fused: bool
) -> "Iterator[_Cut]":
    """Tokens and heads of each call: of equal segments, and of one head if it is not fused."""
    length = min(branch.length, tokens)
    tokens_per_head = _LAUNCH_TOKENS // share.count if fused else CALL_TOKENS
    tokens_per_call = length * max(1, tokens_per_head * branch.dilation // length)
    for part, size in _equal_segments(tokens, length, tokens_per_call):
        cuts = [
            _Cut(
                part=part,
                size=size,
                dilation=branch.dilation,
                heads=slice(head, head + 1),
                offset=share.offset_of(head, branch.dilation),
            )
            for head in range(share.count)
        ]
        # a head whose offset is beyond a short segment sees nothing of it
        cuts = [cut for cut in cuts if cut.seen]
        yield from _merged(cuts) if fused else cuts


def _merged(cuts: "list[_Cut]") -> "list[_Cut]":
    """The same heads in fewer calls, each with as many heads and tokens at each of its offsets."""
    by_offset: list[_Cut] = []
    for cut in cuts:
        last = by_offset[-1] if by_offset else None
        if last is not None and last.offset == cut.offset:
            heads = slice(last.heads.start, cut.heads.stop)
            by_offset[-1] = replace(last, heads=heads)
        else:
            by_offset.append(cut)
    merged: list[_Cut] = []
    for cut in by_offset:
        last = merged[-1] if merged else None
        if last is not None and last.continues_in(cut):
            heads = slice(last.heads.start, cut.heads.stop)
            merged[-1] = replace(last, heads=heads, num_offsets=last.num_offsets + 1)
        else:
            merged.append(cut)
    return merged


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
    tokens: int, length: int, tokens_per_call: int
) -> Iterator[tuple[slice, int]]:
    """Ranges of tokens with the size of their segments: several of `length`, then a shorter one."""
    whole = tokens // length * length
    for start in range(0, whole, tokens_per_call):
        yield slice(start, min(start + tokens_per_call, whole)), length
    if whole < tokens:
        yield slice(whole, tokens), tokens - whole


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Tokens of a range that heads see: every `dilation`-th of each segment of `size`.

    Heads are equally divided over `num_offsets` offsets, from `offset` on.
    """

    part: slice
    size: int
    dilation: int
    heads: slice
    offset: int
    num_offsets: int = 1

    @property
    def seen(self) -> int:
        """Number n of tokens of a segment that a head sees."""
        return max(0, -(-(self.size - self.offset) // self.dilation))

    @property
    def heads_per_offset(self) -> int:
        """Number g of heads at each offset."""
        return int(self.heads.stop - self.heads.start) // self.num_offsets

    def continues_in(self, other: "_Cut") -> bool:
        """True if the heads of both fit one call."""
        return (
            other.offset == self.offset + self.num_offsets
            and other.heads.start == self.heads.stop
            and other.heads_per_offset == self.heads_per_offset
            and other.seen == self.seen
        )

    def view(self, x: Tensor) -> Tensor:
        """View (o, g, s, n, ...) of x (h, L, ...)."""
        tokens = x[self.heads, self.part]
        head_stride, token_stride, *strides = tokens.stride()
        num_segments = tokens.shape[1] // self.size
        return tokens.as_strided(
            (
                *(self.num_offsets, self.heads_per_offset),
                *(num_segments, self.seen, *tokens.shape[2:]),
            ),
            (
                # heads of the next offset come after those of this one
                self.heads_per_offset * head_stride + token_stride,
                head_stride,
                self.size * token_stride,
                self.dilation * token_stride,
                *strides,
            ),
            tokens.storage_offset() + self.offset * token_stride,
        )


def _attend_fused(qkv: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention (o, g, s, n, D) within segments (o, g, s, n, D) in one launch; log2-sum-exp2.

    Memory: a copy of q, k and v if there are several offsets; of one, their views.
    """
    offsets, heads = qkv[0].shape[:2]
    # the kernel takes one axis of heads, for which several offsets have no common stride
    q, k, v = (x.movedim(2, 0).flatten(1, 2) for x in qkv)
    out, log_sums = fused_attention(q, k, v)
    by_offset = (x.unflatten(1, (offsets, heads)) for x in (out, log_sums))  # type: ignore[no-untyped-call]
    values, sums = (x.movedim(0, 2) for x in by_offset)
    return values, sums


def _attend_in_blocks(qkv: list[Tensor], budget_bytes: int) -> tuple[Tensor, Tensor]:
    """The same of one head (1, 1, s, n, D), in blocks."""
    segments = [x[0, 0] for x in qkv]
    plan = plan_blocks(segments[0], budget_bytes=budget_bytes)
    out, log_sums = forward_chunked(_segments_item(segments), plan)
    return out[None, None], log_sums[None, None]


def _with_padding(out: Tensor, log_sums: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """The same where `padding` more keys have the logit 0 and the value 0."""
    values = out.to(log_sums.dtype)
    if padding:
        log_padding = log_sums.new_tensor(math.log2(padding))
        with_padding = torch.logaddexp2(log_sums, log_padding)
        values = values * (log_sums - with_padding).exp2()[..., None]
        log_sums = with_padding
    # as published: a log-sum-exp of exactly 0 marks a position that no key covers
    return values, log_sums.masked_fill(log_sums == 0, UNCOVERED)


def _segments_item(qkv: list[Tensor]) -> AttentionItem:
    """Segments (s, n, D) as the heads of one item whose tokens have no place on a grid."""
    q, k, v = qkv
    segments, tokens, dim = q.shape
    return AttentionItem(
        q=q,
        k=k,
        v=v,
        # no token is on a grid, so none has a bias
        cells=q.new_empty(2, 0),
        slopes=(0.0,) * segments,
        num_prefix_tokens=tokens,
        scale=dim**-0.5,
    )


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
