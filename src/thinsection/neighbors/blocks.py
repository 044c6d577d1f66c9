"""Exact search in blocks of pairs, on any device; nothing Q x P is ever in memory."""

import torch
from torch import Tensor

from thinsection.errors import BudgetError
from thinsection.neighbors.distances import pair_distances
from thinsection.neighbors.problem import Found, Problem
from thinsection.neighbors.selection import merge, smallest_k
from thinsection.units import format_bytes

_COLUMNS = 4096  # points of a block: a row of float32 distances is 16 KiB
_MAX_PAIRS = {"cpu": 1 << 17, "cuda": 1 << 26}  # a block of 0.5 MiB stays in the cache of a core


def bytes_per_pair(points: Tensor) -> int:
    """Of a block: two arrays of distances, the copy of tied rows, their positions, bools."""
    return 3 * max(4, points.element_size()) + 16 + 2


def least_bytes(points: Tensor) -> int:
    """The smallest budget that a search can work with: one row of a block."""
    columns = max(min(_COLUMNS, points.shape[0]), 1)
    return columns * bytes_per_pair(points)


def search(problem: Problem, k: int, *, eps: float = 0.0, budget_bytes: int) -> Found:
    """The k nearest points of each query's own group.

    Memory: budget_bytes beyond the result, at most 4 MiB on a CPU (float32).

    Raises:
        BudgetError: the budget does not hold one row of a block.
    """
    need = least_bytes(problem.points)
    if budget_bytes < need:
        raise BudgetError(
            f"budget_bytes must be >= {need} ({format_bytes(need)}), got {budget_bytes}; "
            "it holds not even one row of distances"
        )
    columns = max(min(_COLUMNS, problem.num_points), 1)
    pairs = min(
        budget_bytes // bytes_per_pair(problem.points),
        _MAX_PAIRS.get(problem.points.device.type, _MAX_PAIRS["cpu"]),
    )
    rows = pairs // columns
    num_queries, device = problem.num_queries, problem.points.device
    dtype = torch.promote_types(problem.points.dtype, torch.float32)
    distances = torch.full((num_queries, k), torch.inf, dtype=dtype, device=device)
    positions = torch.full((num_queries, k), -1, dtype=torch.int64, device=device)
    first, last = problem.ranges()
    starts = range(0, num_queries, rows)
    lows = first[::rows].tolist()
    highs = last[[min(start + rows, num_queries) - 1 for start in starts]].tolist()
    for start, low, high in zip(starts, lows, highs, strict=True):
        block = slice(start, min(start + rows, num_queries))
        best = (distances[block], positions[block])
        for column in range(low, high, columns):
            best = merge(
                best, _block(problem, block, (column, min(column + columns, high)), k, eps), k
            )
        distances[block], positions[block] = best
    positions[distances.isinf()] = -1
    return Found(distances=distances, positions=positions)


def _block(
    problem: Problem, rows: slice, columns: tuple[int, int], k: int, eps: float
) -> tuple[Tensor, Tensor]:
    points = problem.points[columns[0] : columns[1]].T.contiguous().T
    values = pair_distances(problem.queries[rows], points, eps=eps)
    group = problem.point_group[columns[0] : columns[1]]
    wanted = problem.query_group[rows]
    if group[0] != group[-1] or wanted[0] != group[0] or wanted[-1] != group[0]:
        values.masked_fill_(group[None, :] != wanted[:, None], torch.inf)
    own = problem.query_self[rows] - columns[0]
    inside = ((own >= 0) & (own < columns[1] - columns[0])).nonzero()[:, 0]
    values[inside, own[inside]] = torch.inf
    nearest, index = smallest_k(values, k)
    return nearest, index + columns[0]
