"""2-D ALiBi attention in blocks of queries and keys, in plain PyTorch: O(T) memory, any device.

Distances of a (query block, key block) pair are computed once for all heads. All buffers are reused
and sized to stay in cache; fresh memory would cost more than it holds, in page faults. Key blocks
too far to matter for a head are left out (`reach`). exp2 (log2 e goes into q and the slopes) is
faster than exp in PyTorch.

The running maximum is needed only where scores could overflow. |q||k| bounds them from above (the
bias is <= 0), and a row's own score bounds its sum from below; so up to MAX_BOUND no maximum is
taken.

Shapes: H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels; m queries and n keys
of a block.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinsection.attention.blocks import BlockPlan, blocks_of
from thinsection.attention.reach import LOG2E, Reach
from thinsection.attention.reference import AttentionItem
from thinsection.weights.placement import cpu_has_bf16

# log2 units. A row's sum is then in 2^-60 .. T 2^60, far inside float32; and the clamp to
# LOWEST_SCORE adds at most T 2^-126 to it.
MAX_BOUND = 60.0
LOWEST_SCORE = (
    -126.0
)  # 2^-126 is the smallest normal float32; subnormal numbers are slow


def forward_chunked(
    item: AttentionItem, plan: BlockPlan, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention [H, T, D] in the input's dtype and log2-sum-exp2 [H, T] of the base-2 scores.

    bfloat16 is multiplied as such where the device has such products and scores are bounded, so
    that rounding moves them by at most MAX_BOUND 2^-9. Else, and for float16, blocks are converted
    to float32. `out` may be `item.q`: a query block is read before its output is written.

    Memory: `plan.working_bytes`, H T floats.
    """
    heads, tokens = item.q.shape[:2]
    prefix = item.num_prefix_tokens
    query_blocks = blocks_of(tokens, plan.queries, prefix)
    key_blocks = blocks_of(tokens, plan.keys, prefix)
    reach = Reach(item, query_blocks, key_blocks)
    bounded = reach.score_bound <= MAX_BOUND
    buffers = Buffers(plan, item)
    if out is None:
        out = torch.empty_like(item.q)
    log_sums = item.q.new_empty(heads, tokens, dtype=item.math_dtype)
    for row, queries in enumerate(query_blocks):
        sums = buffers.row_sums(item, queries, bounded=bounded)
        _add_key_blocks(sums, item, queries, row=row, reach=reach, buffers=buffers)
        for head in range(heads):
            out[head, queries] = sums[head].values.div_(sums[head].weights[:, None])
            log_sums[head, queries] = sums[head].weights.log2() + sums[head].top
    return out, log_sums


def _add_key_blocks(
    sums: "list[RowSums]",
    item: AttentionItem,
    queries: slice,
    *,
    row: int,
    reach: Reach,
    buffers: "Buffers",
) -> None:
    """Add to the sums of query block number `row`, head by head, every key block that matters."""
    active_heads = list(range(len(sums)))
    for key_block in reach.key_blocks(row):
        active_heads = [
            head
            for head in active_heads
            if not reach.ends_before(key_block, head, sums[head].least)
        ]
        if not active_heads:
            return
        keys = key_block.columns
        block = buffers.score_block(item, queries, keys)
        for head in active_heads:
            # a bound that is NaN has to be clamped too
            in_range = key_block.lowest_scores[head] >= LOWEST_SCORE
            sums[head].add(
                block,
                item.k[head, keys],
                item.v[head, keys],
                slope=item.slopes[head] * LOG2E,
                clamp=not in_range,
            )


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """One pair of a query and a key block: distances [m, n], and buffers of the same shape."""

    distances: Tensor
    scores: Tensor
    low_precision: Tensor  # empty where nothing is multiplied in bfloat16
    is_flat: bool  # all distances are 0; they are not in `distances`


class RowSums:
    """Sums of one head of one query block over the key blocks added so far.

    `values` [m, D] sums weighted values, `weights` [m] the weights, both in units of 2^top; `top`
    [m] is 0 where scores are bounded, else the largest score so far.
    """

    def __init__(self, scaled_q: Tensor, values: Tensor, *, bounded: bool) -> None:
        """Begin with `values` all 0, which are summed in place."""
        self.scaled_q = scaled_q  # [m, D]
        self.bounded = bounded
        self.values = values
        self.weights = values.new_zeros(len(values))
        self.top = values.new_full((len(values),), 0.0 if bounded else -math.inf)

    def least(self) -> float:
        """log2 of the smallest row's sum of exp2(score)."""
        return float((self.weights.log2() + self.top).min())

    def add(
        self, block: ScoreBlock, k: Tensor, v: Tensor, *, slope: float, clamp: bool
    ) -> None:
        """Add keys and values [n, D] whose base-2 scores are q . k - slope * distance.

        `clamp` says that bounded scores may be below LOWEST_SCORE.
        """
        dtype = self.scaled_q.dtype
        scores = block.scores
        if dtype == torch.bfloat16:
            scores.copy_(torch.mm(self.scaled_q, k.T, out=block.low_precision))
        else:
            torch.mm(self.scaled_q, k.to(dtype).T, out=scores)
        if not block.is_flat:
            scores.add_(block.distances, alpha=-slope)
        if not self.bounded:
            self._raise_top(scores)
        elif clamp:
            scores.clamp_min_(LOWEST_SCORE)
        weights = scores.exp2_()
        self.weights += weights.sum(1)
        if dtype == torch.bfloat16:
            self.values += torch.mm(block.low_precision.copy_(weights), v)
        else:
            self.values.addmm_(weights, v.to(dtype))

    def _raise_top(self, scores: Tensor) -> None:
        """Raise `top` to the largest score, and express sums and `scores` [m, n] in its units."""
        top = torch.maximum(self.top, scores.amax(1))
        shrink = (self.top - top).exp2_()
        scores.sub_(top[:, None])
        self.weights = self.weights * shrink
        self.values.mul_(shrink[:, None])
        self.top = top


class Buffers:
    """Memory that all blocks of a call reuse: distances, scores, scaled queries, sums of values."""

    def __init__(self, plan: BlockPlan, item: AttentionItem) -> None:
        heads, tokens, dim = item.q.shape
        dtype = item.math_dtype
        block_size = plan.queries * plan.keys
        # a CPU that does not multiply bfloat16 itself takes 20 times as long
        has_bf16 = item.q.device.type != "cpu" or cpu_has_bf16()
        self._multiplies_bf16 = item.q.dtype == torch.bfloat16 and has_bf16
        low_precision_size = block_size if self._multiplies_bf16 else 0
        rows_shape = (2, heads, min(plan.queries, tokens), dim)
        self._distances = item.q.new_empty(block_size, dtype=dtype)
        self._scores = item.q.new_empty(block_size, dtype=dtype)
        self._low_precision = item.q.new_empty(low_precision_size)
        self._scaled_q, self._values = item.q.new_empty(rows_shape, dtype=dtype)

    def row_sums(
        self, item: AttentionItem, queries: slice, *, bounded: bool
    ) -> list[RowSums]:
        """Empty sums of each head; valid until the next query block."""
        num_queries = queries.stop - queries.start
        scaled_q = self._scaled_q[:, :num_queries]
        scaled_q.copy_(item.q[:, queries]).mul_(item.scale * LOG2E)
        if bounded and self._multiplies_bf16:
            scaled_q = scaled_q.to(torch.bfloat16)
        values = self._values[:, :num_queries].zero_()
        return [
            RowSums(scaled_q[head], values[head], bounded=bounded)
            for head in range(len(values))
        ]

    def score_block(
        self, item: AttentionItem, queries: slice, keys: slice
    ) -> ScoreBlock:
        """The block of two ranges of `blocks_of` with its distances; flat where one is prefix."""
        m = queries.stop - queries.start
        n = keys.stop - keys.start
        prefix = item.num_prefix_tokens
        low_precision = self._low_precision
        if low_precision.numel():
            low_precision = low_precision[: m * n].view(m, n)
        block = ScoreBlock(
            distances=self._distances[: m * n].view(m, n),
            scores=self._scores[: m * n].view(m, n),
            low_precision=low_precision,
            is_flat=queries.start < prefix or keys.start < prefix,
        )
        if not block.is_flat:
            query_cells = item.cells[:, queries.start - prefix : queries.stop - prefix]
            key_cells = item.cells[:, keys.start - prefix : keys.stop - prefix]
            _write_distances(block, query_cells, key_cells)
        return block


def _write_distances(block: ScoreBlock, query_cells: Tensor, key_cells: Tensor) -> None:
    """Write Euclidean distances of cells [2, m] and [2, n]; uses `block.scores` meanwhile."""
    row_steps = block.distances
    column_steps = block.scores
    torch.sub(query_cells[0, :, None], key_cells[0, None, :], out=row_steps)
    torch.sub(query_cells[1, :, None], key_cells[1, None, :], out=column_steps)
    row_steps.mul_(row_steps).addcmul_(column_steps, column_steps).sqrt_()
