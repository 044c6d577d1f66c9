"""Blocks of tokens: ranges of a sequence, and block sizes that keep within a memory budget.

Shapes: H heads, T tokens, D channels of a head; m queries and n keys of a block.
"""

import itertools
from dataclasses import dataclass

from torch import Tensor

from thinsection.errors import BudgetError
from thinsection.types import format_bytes

# (queries, keys) of a block where the budget allows them
CPU_BLOCK = (1024, 512)  # a float32 buffer of 2 MiB, which stays in the cache
CUDA_BLOCK = (2048, 4096)  # a float32 buffer of 32 MiB
SMALLEST_BLOCK = (16, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Size of the blocks of one call, and of the buffers that it needs for them."""

    queries: int  # tokens of a query block
    keys: int  # tokens of a key block
    working_bytes: int  # beyond inputs and output


def blocks_of(tokens: int, step: int, num_prefix: int = 0) -> list[slice]:
    """Ranges of at most `step` tokens that cover all; none mixes prefix and grid tokens."""
    prefix_starts = range(0, num_prefix, step)
    grid_starts = range(num_prefix, tokens, step)
    edges = [*prefix_starts, *grid_starts, tokens]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def plan_blocks(q: Tensor, *, budget_bytes: int) -> BlockPlan:
    """Block sizes for q [..., H, T, D]: the preferred ones, halved until their buffers fit.

    Raises BudgetError: not even the buffers of the smallest blocks fit.
    """
    heads, tokens, dim = q.shape[-3:]
    preferred = CPU_BLOCK if q.device.type == "cpu" else CUDA_BLOCK
    queries = min(preferred[0], tokens)
    keys = min(preferred[1], tokens)
    needed = working_bytes(heads, dim, queries, keys)
    while needed > budget_bytes:
        if queries <= SMALLEST_BLOCK[0] and keys <= SMALLEST_BLOCK[1]:
            raise BudgetError(
                f"attention 'chunked' needs {format_bytes(needed)} for its smallest blocks, "
                f"the budget is {format_bytes(budget_bytes)}"
            )
        if keys > queries:
            keys = max(SMALLEST_BLOCK[1], keys // 2)
        else:
            queries = max(SMALLEST_BLOCK[0], queries // 2)
        needed = working_bytes(heads, dim, queries, keys)
    return BlockPlan(queries=queries, keys=keys, working_bytes=needed)


def working_bytes(heads: int, dim: int, queries: int, keys: int) -> int:
    """Upper bound on the buffers of blocks, forward and backward, were all of them float64."""
    # distances and scores; weights in low precision, or gradients of scores
    scores = 3 * queries * keys
    # scaled queries, sums of values and a converted copy; row sums and their intermediates
    rows = heads * queries * (3 * dim + 4)
    # converted keys and values of one head, and their transposes
    columns = 4 * keys * dim
    return 8 * (scores + rows + columns)
