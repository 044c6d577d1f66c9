"""Exact search in blocks of pairs, on any device; nothing Q x P is ever in memory."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinsection.errors import BudgetError, require
from thinsection.neighbors.reference import Found, NeighborQuery, distances_between
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


def search(query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int) -> Found:
    """The k nearest points of each query's own group.

    Memory: budget_bytes beyond the result, at most 4 MiB on a CPU (float32).
    """
    need = least_bytes(query.points)
    got = f"{budget_bytes}; it holds not even one row of distances"
    rule = f"budget_bytes must be >= {need} ({format_bytes(need)})"
    require(budget_bytes >= need, rule, got, error=BudgetError)
    columns, num_queries = max(min(_COLUMNS, query.num_points), 1), query.num_queries
    most = _MAX_PAIRS.get(query.points.device.type, _MAX_PAIRS["cpu"])
    rows = min(budget_bytes // bytes_per_pair(query.points), most) // columns
    distances, positions = found = Found.nothing(query, k)
    first, last = query.ranges()
    starts = range(0, num_queries, rows)
    lows = first[::rows].tolist()
    highs = last[[min(start + rows, num_queries) - 1 for start in starts]].tolist()
    for start, low, high in zip(starts, lows, highs, strict=True):
        block = slice(start, min(start + rows, num_queries))
        best = (distances[block], positions[block])
        for column in range(low, high, columns):
            part = slice(column, min(column + columns, high))
            best = _merge(best, _block(query, block, part, k, eps), k)
        distances[block], positions[block] = best
    positions[distances.isinf()] = -1
    return found


def _block(
    query: NeighborQuery, rows: slice, columns: slice, k: int, eps: float
) -> tuple[Tensor, Tensor]:
    points = query.points[columns].T.contiguous().T
    values = distances_between(query.queries[rows, None], points, eps=eps)
    group, wanted = query.point_group[columns], query.query_group[rows]
    if group[0] != group[-1] or wanted[0] != group[0] or wanted[-1] != group[0]:
        values.masked_fill_(group[None, :] != wanted[:, None], torch.inf)
    own = query.query_self[rows] - columns.start
    inside = ((own >= 0) & (own < len(points))).nonzero()[:, 0]
    values[inside, own[inside]] = torch.inf
    nearest, index = smallest_k(values, k)
    return nearest, index + columns.start


def smallest_k(distances: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and columns (R, k) of the smallest entries of (R, C), ascending, lower column first.

    torch.topk leaves open which of equal values it takes. Columns of infinite values are arbitrary.
    Where C < k the rest is inf.

    Memory: a bool per entry and 16 bytes per entry that equals its row's k-th smallest.
    """
    num_columns = distances.shape[1]
    values, columns = torch.topk(distances, min(k + 1, num_columns), largest=False, sorted=True)
    tied = ((values[:, 1:] == values[:, :-1]) & values[:, 1:].isfinite()).any(dim=1)
    values, columns = values[:, :k], columns[:, :k]
    rows = tied.nonzero()[:, 0]
    if rows.numel():
        columns[rows] = _settled(distances[rows], values[rows], columns[rows])
    missing = (0, k - columns.shape[1])
    return pad(values, missing, value=torch.inf), pad(columns, missing)


def _merge(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], k: int
) -> tuple[Tensor, Tensor]:
    """The k best of two sorted lists (R, k) each; every index of `second` is above `first`'s."""
    values, indices = (torch.cat(both, dim=1) for both in zip(first, second))
    values, order = torch.sort(values, dim=1, stable=True)
    return values[:, :k], indices.gather(1, order[:, :k])


def _settled(distances: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """Columns (R, k) in order where values tie: the first of those that equal the k-th value."""
    num_rows, k = values.shape
    last = values[:, -1:]
    row, column = ((distances == last) & last.isfinite()).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=num_rows)
    rank = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    places = (values == last).sum(dim=1)[row]  # the last slots of a row hold its k-th value
    taken = rank < places
    columns[row[taken], (k - places + rank)[taken]] = column[taken]
    columns, order = columns.sort(dim=1)
    order = values.gather(1, order).sort(dim=1, stable=True).indices
    return columns.gather(1, order)
