"""How far keys reach: which pairs of blocks drown in rounding and need not be computed.

A base-2 score is at most (|q||k| scale - slope * distance) log2 e. Key blocks are taken nearest
first, so the sums of a query block's rows are known from below; where all keys that are left weigh
less together than half the last bit of the smallest sum, the head has no more to do for it. Steep
heads end early; flat ones (TITAN's last has a slope of 1/256 per cell) need every key.

Shapes: H heads, P prefix tokens, T tokens; R query blocks and C key blocks.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinsection.attention.reference import AttentionItem, Pair

LOG2E = math.log2(math.e)


def blocks_of(tokens: int, step: int, num_prefix: int = 0) -> list[slice]:
    """Ranges of at most `step` tokens; prefix tokens, which have no cell, stay by themselves."""
    starts = [*range(0, num_prefix, step), *range(num_prefix, tokens, step), tokens]
    return [slice(a, b) for a, b in itertools.pairwise(starts)]


class KeyBlock(NamedTuple):
    """One key block as a query block sees it; bounds are log2, one per head."""

    columns: slice
    lowest: Sequence[float]  # below its scores
    rest: Sequence[float]  # above the sum of all weights in it and the blocks after it


class Reach:
    """Bounds of scores and distances between the blocks of one item.

    `score_bound` is above |scale q . k| log2 e over all heads and pairs; NaN stays NaN.
    Memory: 16 R C + 16 H C bytes, and one block in the dtype of the arithmetic while it is built.
    """

    def __init__(
        self, item: AttentionItem, rows: list[slice], columns: list[slice]
    ) -> None:
        self._columns = columns
        self._sizes = torch.tensor(
            [part.stop - part.start for part in columns]
        ).double()
        self._decay = torch.tensor(item.slopes, dtype=torch.float64)[:, None] * LOG2E
        self._q = _largest_norms(item.q, rows, item.math_dtype) * (
            abs(item.scale) * LOG2E
        )
        self._k = _largest_norms(item.k, columns, item.math_dtype)
        self._nearest, self._farthest = _distance_bounds(item, rows, columns)
        # a value that is not finite must reach every row: 0 * inf is NaN
        finite = _largest_norms(item.v, columns, item.math_dtype).isfinite()
        self._never_ends = ~finite.all(1)
        self._negligible = math.log2(torch.finfo(item.math_dtype).eps / 2)
        scores = self._q.amax(1) * self._k.amax(1)
        self.score_bound = float(scores.max())
        self._highest_sum: list[float] = (scores + math.log2(item.q.shape[1])).tolist()

    def key_blocks(self, row: int) -> Iterator[KeyBlock]:
        """All key blocks of query block `row`, nearest first."""
        order = self._nearest[row].argsort(stable=True)
        score = self._q[:, row, None] * self._k[:, order]
        highest = (
            score - self._decay * self._nearest[row, order] + self._sizes[order].log2()
        )
        rest = (highest.flip(1) * math.log(2)).logcumsumexp(1).flip(1) * LOG2E
        rest[self._never_ends] = math.inf
        lowest = -score - self._decay * self._farthest[row, order]
        for c, low, high in zip(
            order.tolist(), lowest.T.tolist(), rest.T.tolist(), strict=True
        ):
            yield KeyBlock(self._columns[c], low, high)

    def ended(
        self, head: int, key_block: KeyBlock, least_sum: Callable[[], float]
    ) -> bool:
        """Whether this key block and those after it are below the rounding of every row's sum."""
        excess = key_block.rest[head] - self._negligible
        return excess <= self._highest_sum[head] and excess <= least_sum()


def _largest_norms(x: Tensor, blocks: Sequence[slice], dtype: torch.dtype) -> Tensor:
    """Largest norm [H, blocks] of the vectors [H, T, D] in each block, float64 in host memory."""
    # block by block: all of x would be a copy; the norm of PyTorch takes ten times as long
    largest = [x[:, part].to(dtype).square().sum(-1).amax(1).sqrt() for part in blocks]
    return torch.stack(largest, 1).double().cpu()


def _distance_bounds(
    item: AttentionItem, rows: Sequence[slice], columns: Sequence[slice]
) -> Pair:
    """Least and largest distances [R, C] between the boxes around the blocks' cells, float64."""
    (low_r, high_r), (low_c, high_c) = _boxes(item, rows), _boxes(item, columns)
    gap = torch.maximum(low_r[:, None] - high_c, low_c - high_r[:, None]).clamp_min(0)
    span = torch.maximum(high_r[:, None] - low_c, high_c - low_r[:, None])
    prefix = item.num_prefix_tokens
    on_grid = [
        torch.tensor([part.start >= prefix for part in parts])
        for parts in (rows, columns)
    ]
    pairs = on_grid[0][:, None] & on_grid[1]
    return gap.norm(dim=-1) * pairs, span.norm(dim=-1) * pairs


def _boxes(item: AttentionItem, blocks: Sequence[slice]) -> tuple[Tensor, Tensor]:
    """Smallest and largest cell [blocks, 2] of each block, in host memory; 0 for prefix tokens."""
    prefix, zero = item.num_prefix_tokens, item.cells.new_zeros(2, 1)
    places = (slice(max(0, b.start - prefix), max(0, b.stop - prefix)) for b in blocks)
    cells = [
        item.cells[:, place] if place.stop > place.start else zero for place in places
    ]
    low, high = (
        torch.stack(ends) for ends in zip(*(each.aminmax(dim=1) for each in cells))
    )
    return low.double().cpu(), high.double().cpu()
