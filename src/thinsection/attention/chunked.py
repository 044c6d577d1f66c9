"""2-D ALiBi attention in blocks of queries and keys, in plain PyTorch: O(T) memory, any device.

The backward pass, the Triton kernel's too, recomputes each block: nothing T x T is kept.

Distances of a (query block, key block) pair are computed once for all heads. All buffers are reused
and sized to stay in cache; fresh memory would cost more than it holds, in page faults. Key blocks
too far to matter for a head are left out (`reach`). exp2 (log2 e goes into q and the slopes) is
faster than exp in PyTorch. The running maximum is needed only where scores could overflow: |q||k|
bounds them (the bias is <= 0), a row's own score bounds its sum from below, so below MAX_BOUND no
maximum is taken.

Shapes: H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels; m queries and n keys
of a block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinsection.attention.products import fast_products
from thinsection.attention.reach import LOG2E, Reach, blocks_of
from thinsection.attention.reference import AttentionItem, Pair
from thinsection.errors import BudgetError, InvalidInputError, require
from thinsection.types import format_bytes

# log2 units. A row's sum is then in 2^-60 .. T 2^60, far inside float32; and what the clamp below
# adds is at most T 2^-126 against 2^-60.
MAX_BOUND = 60.0
CLAMP = -126.0  # 2^-126 is the smallest normal float32; subnormal numbers are slow
CPU_BLOCK = (1024, 512)  # queries, keys: two float32 buffers of 2 MiB
CUDA_BLOCK = (2048, 4096)  # two of 32 MiB
SMALLEST_BLOCK = (16, 16)

# output [H, T, D], in `out` where it is given, and log2-sum-exp2 [H, T]
Forward = Callable[[AttentionItem, "BlockPlan", Tensor | None], tuple[Tensor, Tensor]]
Attend = Callable[[AttentionItem, Tensor | None], Tensor]  # attention of one item, out


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Tokens of a query and of a key block, and their buffers beyond inputs and output."""

    queries: int
    keys: int
    working_bytes: int


def plan_blocks(q: Tensor, *, budget_bytes: int) -> BlockPlan:
    """Blocks for q [..., H, T, D] that fit the budget, the preferred size where it does."""
    heads, tokens, dim = q.shape[-3:]
    preferred = CPU_BLOCK if q.device.type == "cpu" else CUDA_BLOCK
    queries, keys = (min(size, tokens) for size in preferred)
    while (needed := _working_bytes(heads, dim, queries, keys)) > budget_bytes:
        if queries <= SMALLEST_BLOCK[0] and keys <= SMALLEST_BLOCK[1]:
            message = f"attention 'chunked' needs {format_bytes(needed)} for its smallest blocks"
            raise BudgetError(f"{message}, the budget is {format_bytes(budget_bytes)}")
        if keys > queries:
            keys = max(SMALLEST_BLOCK[1], keys // 2)
        else:
            queries = max(SMALLEST_BLOCK[0], queries // 2)
    return BlockPlan(queries=queries, keys=keys, working_bytes=needed)


def _working_bytes(heads: int, dim: int, queries: int, keys: int) -> int:
    """Three blocks (distances, scores, one more in low precision or backward), float64 at worst."""
    return 8 * (3 * queries * keys + heads * queries * (3 * dim + 4) + 4 * keys * dim)


def forward_chunked(
    item: AttentionItem, plan: BlockPlan, out: Tensor | None = None
) -> Pair:
    """Attention [H, T, D] in the input's dtype and log2-sum-exp2 [H, T] of the base-2 scores.

    bfloat16 is multiplied as such where scores are bounded, so that rounding moves them by at most
    MAX_BOUND 2^-9; else, and for float16, blocks are converted to float32. `out` may be `item.q`:
    a query block is read before its output is written. Memory: `plan.working_bytes`, H T floats.
    """
    heads, tokens = item.q.shape[:2]
    dtype, prefix = item.math_dtype, item.num_prefix_tokens
    row_blocks = blocks_of(tokens, plan.queries, prefix)
    reach = Reach(item, row_blocks, blocks_of(tokens, plan.keys, prefix))
    bounded = reach.score_bound <= MAX_BOUND
    out = torch.empty_like(item.q) if out is None else out
    lse = item.q.new_empty(heads, tokens, dtype=dtype)
    buffers = Buffers(plan, item)
    for r, rows in enumerate(row_blocks):
        sums = buffers.row_sums(item, rows, bounded=bounded)
        active = list(range(heads))
        for key_block in reach.key_blocks(r):
            active = [h for h in active if not reach.ended(h, key_block, sums[h].least)]
            if not active:
                break
            block = buffers.distances(item, rows, key_block.columns)
            for h in active:
                k, v = item.k[h, key_block.columns], item.v[h, key_block.columns]
                block.deep = not key_block.lowest[h] >= CLAMP  # a NaN is deep
                sums[h].add(block, -item.slopes[h] * LOG2E, k, v)
        for h in range(heads):
            out[h, rows] = sums[h].acc.div_(sums[h].den[:, None])
            lse[h, rows] = sums[h].den.log2() + sums[h].top
    return out, lse


@dataclass(slots=True)
class ScoreBlock:
    """One pair of a query and a key block: distances [m, n], and buffers of the same shape."""

    distances: Tensor
    scores: Tensor
    low: Tensor
    flat: bool  # all distances are 0; they are not in `distances`
    deep: bool = True  # scores may be below CLAMP


class RowSums:
    """What one head of one query block, scaled q [m, D], gathers over key blocks.

    `acc` sums weighted values, `den` weights; `top` is their scale's log2: 0 where scores are
    bounded, else the largest score so far.
    """

    def __init__(self, q: Tensor, acc: Tensor, *, bounded: bool) -> None:
        self.q, self.acc, self.bounded = q, acc, bounded
        self.den = acc.new_zeros(len(acc))
        self.top = acc.new_full((len(acc),), 0.0 if bounded else -math.inf)

    def least(self) -> float:
        """log2 of the smallest row's sum of exp2(score)."""
        return float((self.den.log2() + self.top).min())

    def add(self, block: ScoreBlock, factor: float, k: Tensor, v: Tensor) -> None:
        """Adds keys and values [n, D] whose scores are q . k + factor * distance."""
        low, scores = self.q.dtype == torch.bfloat16, block.scores
        if low:
            scores.copy_(torch.mm(self.q, k.T, out=block.low))
        else:
            torch.mm(self.q, k.to(self.q.dtype).T, out=scores)
        if not block.flat:
            scores.add_(block.distances, alpha=factor)
        if not self.bounded:
            top = torch.maximum(self.top, scores.amax(1))
            shrink = (self.top - top).exp2_()
            scores.sub_(top[:, None])
            self.den, self.top = self.den * shrink, top
            self.acc.mul_(shrink[:, None])
        elif block.deep:
            scores.clamp_min_(CLAMP)
        weights = scores.exp2_()
        self.den += weights.sum(1)
        if low:
            self.acc += torch.mm(block.low.copy_(weights), v)
        else:
            self.acc.addmm_(weights, v.to(self.q.dtype))


class Buffers:
    """What all blocks of a call reuse: distances, scores, scaled queries and sums of values."""

    def __init__(self, plan: BlockPlan, item: AttentionItem) -> None:
        heads, tokens, dim = item.q.shape
        size, low = plan.queries * plan.keys, item.q.dtype == torch.bfloat16
        both = [item.q.new_empty(size, dtype=item.math_dtype) for _ in range(2)]
        self._flat = (*both, item.q.new_empty(size if low else 0))
        shape = (2, heads, min(plan.queries, tokens), dim)
        self._q_and_acc = item.q.new_empty(shape, dtype=item.math_dtype)

    def row_sums(
        self, item: AttentionItem, rows: slice, *, bounded: bool
    ) -> list[RowSums]:
        """A fresh one per head; valid until the next query block."""
        q, acc = self._q_and_acc[:, :, : rows.stop - rows.start]
        q.copy_(item.q[:, rows]).mul_(item.scale * LOG2E)
        q = q.to(item.q.dtype) if bounded and item.q.dtype == torch.bfloat16 else q
        return [
            RowSums(one, a, bounded=bounded)
            for one, a in zip(q, acc.zero_(), strict=True)
        ]

    def distances(self, item: AttentionItem, rows: slice, columns: slice) -> ScoreBlock:
        """The block of two ranges of `blocks_of` and its distances; flat where one is prefix."""
        m, n, prefix = (
            rows.stop - rows.start,
            columns.stop - columns.start,
            item.num_prefix_tokens,
        )
        parts = [x[: m * n].view(m, n) if x.numel() else x for x in self._flat]
        flat = rows.start < prefix or columns.start < prefix
        block = ScoreBlock(parts[0], parts[1], parts[2], flat)
        if flat:
            return block
        a = item.cells[:, rows.start - prefix : rows.stop - prefix, None]
        b = item.cells[:, None, columns.start - prefix : columns.stop - prefix]
        torch.sub(a[0], b[0], out=block.distances)
        torch.sub(a[1], b[1], out=block.scores)
        block.distances.mul_(block.distances).addcmul_(
            block.scores, block.scores
        ).sqrt_()
        return block


def differentiable(forward: Forward, plan: BlockPlan) -> Attend:
    """Attention [H, T, D] by `forward`, with gradients to q, k and v; not with `out` as well."""

    def attend(item: AttentionItem, out: Tensor | None) -> Tensor:
        wanted = any(x.requires_grad for x in (item.q, item.k, item.v))
        if not (wanted and torch.is_grad_enabled()):
            with fast_products():
                return forward(item, plan, out)[0]
        require(out is None, "out must be None where a gradient is wanted", "a tensor")
        result: Tensor = _Attend.apply(item.q, item.k, item.v, (item, plan, forward))  # type: ignore[no-untyped-call]
        return result

    return attend


def gradients(
    item: AttentionItem, out: Tensor, lse: Tensor, d_out: Tensor, plan: BlockPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, [H, T, D] each, in the input's dtype; `out` and `lse` as above.

    No block is left out: what a far key adds to another's gradient is all of its own gradient.

    Memory: `plan.working_bytes` and three accumulators [H, T, D] in the dtype of the arithmetic.
    Source: Dao et al., "FlashAttention", 2022, algorithm 4 (the bias takes no gradient).
    """
    tokens, dtype = item.q.shape[1], item.math_dtype
    d_q, d_k, d_v = (torch.zeros_like(item.q, dtype=dtype) for _ in range(3))
    buffers = Buffers(plan, item)
    prefix = item.num_prefix_tokens
    for rows in blocks_of(tokens, plan.queries, prefix):
        q = item.q[:, rows].to(dtype) * item.scale
        d_rows = d_out[:, rows].to(dtype)
        mean = (d_rows * out[:, rows].to(dtype)).sum(-1, keepdim=True)  # [H, m, 1]
        for columns in blocks_of(tokens, plan.keys, prefix):
            block = buffers.distances(item, rows, columns)
            for h, slope in enumerate(item.slopes):
                k, v = item.k[h, columns].to(dtype), item.v[h, columns].to(dtype)
                weights = torch.mm(q[h], k.T, out=block.scores)
                if not block.flat:
                    weights.add_(block.distances, alpha=-slope)
                weights.mul_(LOG2E).sub_(lse[h, rows, None]).exp2_()
                d_v[h, columns].addmm_(weights.T, d_rows[h])
                d_scores = (d_rows[h] @ v.T).sub_(mean[h]).mul_(weights)
                d_q[h, rows].addmm_(d_scores, k, alpha=item.scale)
                d_k[h, columns].addmm_(d_scores.T, q[h])
    return d_q.to(item.q.dtype), d_k.to(item.q.dtype), d_v.to(item.q.dtype)


class _Attend(torch.autograd.Function):
    """Keeps q, k, v, the output and one number per row; recomputes the rest."""

    @staticmethod
    @fast_products()
    def forward(ctx: Any, *inputs: Any) -> Any:
        q, k, v, (item, plan, forward) = inputs
        out, lse = forward(item, plan, None)
        ctx.save_for_backward(q, k, v, out, lse)
        none = q.new_empty(0)
        ctx.how = (replace(item, q=none, k=none, v=none), plan)
        return out

    @staticmethod
    @fast_products()
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # so it is under create_graph alone
            raise InvalidInputError(
                "attention in blocks must be differentiated once, got create_graph=True; "
                "take impl='reference' for a gradient of the gradient"
            )
        q, k, v, out, lse = ctx.saved_tensors
        item, plan = ctx.how
        return *gradients(replace(item, q=q, k=k, v=v), out, lse, d_out, plan), None
