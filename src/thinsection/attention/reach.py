"""Reach of keys: pairs of blocks that drown in rounding need not be computed.

A base-2 score is at most (|q||k| scale - slope * distance) log2 e. Key blocks are taken nearest
first, so the sums of a query block's rows are known from below; where all keys that are left weigh
less together than half the last bit of the smallest sum, the head has no more to do for it. Steep
heads end early; flat ones (TITAN's last has a slope of 1/256 per cell) need every key.

Shapes: H heads, P prefix tokens, T tokens; R query blocks and C key blocks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinsection.attention.reference import AttentionItem

LOG2E = math.log2(math.e)


class KeyBlock(NamedTuple):
    """One key block as a query block sees it; bounds are log2, one per head."""

    columns: slice
    lowest_scores: Sequence[float]  # no score in the block is lower
    remaining_sums: Sequence[float]  # no row's weights, from this block on, sum to more


class Reach:
    """Bounds of scores and distances between the blocks of one item.

    `score_bound` is above |scale q . k| log2 e over all heads and pairs; NaN stays NaN.

    Memory: 16 R C + 16 H C bytes, and one block in the dtype of the arithmetic while it is built.
    """

    def __init__(
        self, item: AttentionItem, rows: list[slice], columns: list[slice]
    ) -> None:
        dtype = item.math_dtype
        widths = torch.tensor([part.stop - part.start for part in columns])
        slopes = torch.tensor(item.slopes, dtype=torch.float64)
        self._columns = columns
        self._widths = widths.double()
        self._decay = slopes[:, None] * LOG2E
        self._q_norms = _largest_norms(item.q, rows, dtype) * (abs(item.scale) * LOG2E)
        self._k_norms = _largest_norms(item.k, columns, dtype)
        self._nearest, self._farthest = _distance_bounds(item, rows, columns)
        # a value that is not finite must reach every row: 0 * inf is NaN
        values_finite = _largest_norms(item.v, columns, dtype).isfinite()
        self._never_ends = ~values_finite.all(1)
        self._log2_half_bit = math.log2(torch.finfo(dtype).eps / 2)
        largest_scores = self._q_norms.amax(1) * self._k_norms.amax(1)
        self.score_bound = float(largest_scores.max())
        highest_sums = largest_scores + math.log2(item.q.shape[1])
        self._highest_sums: list[float] = highest_sums.tolist()

    def key_blocks(self, row: int) -> Iterator[KeyBlock]:
        """All key blocks of query block `row`, nearest first."""
        order = self._nearest[row].argsort(stable=True)
        scores = self._q_norms[:, row, None] * self._k_norms[:, order]
        lowest = -scores - self._decay * self._farthest[row, order]
        highest = scores - self._decay * self._nearest[row, order]
        sums = highest + self._widths[order].log2()
        from_last = (sums.flip(1) * math.log(2)).logcumsumexp(1)
        remaining = from_last.flip(1) * LOG2E
        remaining[self._never_ends] = math.inf
        bounds = zip(
            order.tolist(), lowest.T.tolist(), remaining.T.tolist(), strict=True
        )
        for column, lowest_scores, remaining_sums in bounds:
            yield KeyBlock(self._columns[column], lowest_scores, remaining_sums)

    def ends_before(
        self, key_block: KeyBlock, head: int, least_sum: Callable[[], float]
    ) -> bool:
        """True where this key block and those after it are below the rounding of every row's sum.

        `least_sum` gives the log2 of the smallest row's sum so far; it waits for a GPU, so it is
        asked only where the answer depends on it.
        """
        needed_sum = key_block.remaining_sums[head] - self._log2_half_bit
        return needed_sum <= self._highest_sums[head] and needed_sum <= least_sum()


def _largest_norms(x: Tensor, blocks: Sequence[slice], dtype: torch.dtype) -> Tensor:
    """Largest norm [H, blocks] of the vectors [H, T, D] in each block, float64 in host memory."""
    # block by block: all of x would be a copy; the norm of PyTorch takes ten times as long
    squares = [x[:, block].to(dtype).square().sum(-1).amax(1) for block in blocks]
    norms = [square.sqrt() for square in squares]
    return torch.stack(norms, 1).double().cpu()


def _distance_bounds(
    item: AttentionItem, rows: Sequence[slice], columns: Sequence[slice]
) -> tuple[Tensor, Tensor]:
    """Least and largest distances [R, C] between the boxes around the blocks' cells, float64."""
    row_low, row_high = _boxes(item, rows)
    column_low, column_high = _boxes(item, columns)
    before = row_low[:, None] - column_high
    after = column_low - row_high[:, None]
    gap = torch.maximum(before, after).clamp_min(0)
    span = torch.maximum(row_high[:, None] - column_low, column_high - row_low[:, None])
    prefix = item.num_prefix_tokens
    rows_on_grid = torch.tensor([block.start >= prefix for block in rows])
    columns_on_grid = torch.tensor([block.start >= prefix for block in columns])
    on_grid = rows_on_grid[:, None] & columns_on_grid
    return gap.norm(dim=-1) * on_grid, span.norm(dim=-1) * on_grid


def _boxes(item: AttentionItem, blocks: Sequence[slice]) -> tuple[Tensor, Tensor]:
    """Smallest and largest cell [blocks, 2] of each block, in host memory; 0 for prefix tokens."""
    prefix = item.num_prefix_tokens
    no_cell = item.cells.new_zeros(2, 1)
    smallest = []
    largest = []
    for block in blocks:
        cells = no_cell
        if block.start >= prefix:
            cells = item.cells[:, block.start - prefix : block.stop - prefix]
        low, high = cells.aminmax(dim=1)
        smallest.append(low)
        largest.append(high)
    return torch.stack(smallest).double().cpu(), torch.stack(largest).double().cpu()
