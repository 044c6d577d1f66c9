"""Exact search in blocks of pairs, on any device; nothing Q x P is ever in memory.

Legend: P points, Q queries; R rows (queries) and C columns (points) of a block.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinsection.errors import BudgetError
from thinsection.frames.reference import Nearest, NeighborQuery, distances_between
from thinsection.types import format_bytes

_MAX_COLUMNS = 4096  # points of a block: a row of float32 distances is 16 KiB
_MAX_PAIRS_CPU = 1 << 17  # a block of 0.5 MiB stays in the cache of a core
_MAX_PAIRS_CUDA = 1 << 26


def bytes_per_pair(points: Tensor) -> int:
    """Memory of one pair of a block."""
    distances = 3 * max(4, points.element_size())  # two arrays, and a copy of tied rows
    positions = 16  # of tied entries, row and column
    flags = 2
    return distances + positions + flags


def least_block_bytes(points: Tensor) -> int:
    """Smallest budget that a search can work with: one row of a block."""
    return _num_columns(points) * bytes_per_pair(points)


def _num_columns(points: Tensor) -> int:
    return max(min(_MAX_COLUMNS, len(points)), 1)


def in_blocks(
    query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int
) -> Nearest:
    """The k nearest of each query's group. Memory: budget_bytes, at most 4 MiB on a CPU."""
    needed = least_block_bytes(query.points)
    if budget_bytes < needed:
        raise BudgetError(
            f"budget_bytes must be >= {needed} ({format_bytes(needed)}), got {budget_bytes}; "
            "one row of distances needs that much"
        )
    on_cuda = query.points.device.type == "cuda"
    max_pairs = _MAX_PAIRS_CUDA if on_cuda else _MAX_PAIRS_CPU
    num_pairs = min(budget_bytes // bytes_per_pair(query.points), max_pairs)
    num_columns = _num_columns(query.points)
    num_rows = num_pairs // num_columns
    result = Nearest.none_yet(query, k)
    for rows, group_points in _row_blocks(query, num_rows):
        best = Nearest(result.distances[rows], result.positions[rows])
        for start in range(group_points.start, group_points.stop, num_columns):
            columns = slice(start, min(start + num_columns, group_points.stop))
            found = _nearest_in_block(query, rows, columns, k, eps)
            # a stable sort: positions of this block are above those so far
            distances = torch.cat((best.distances, found.distances), dim=1)
            positions = torch.cat((best.positions, found.positions), dim=1)
            distances, order = torch.sort(distances, dim=1, stable=True)
            best = Nearest(distances[:, :k], positions.gather(1, order[:, :k]))
        result.distances[rows] = best.distances
        result.positions[rows] = best.positions
    result.positions[result.distances.isinf()] = -1
    return result


def _row_blocks(query: NeighborQuery, num_rows: int) -> list[tuple[slice, slice]]:
    """Blocks of queries, each with the range of points that lie in any of their groups."""
    num_queries = len(query.queries)
    first_point, last_point = query.ranges()
    starts = range(0, num_queries, num_rows)
    stops = [min(start + num_rows, num_queries) for start in starts]
    # one transfer for all blocks: each would wait for a GPU
    lows = first_point[::num_rows].tolist()
    highs = last_point[[stop - 1 for stop in stops]].tolist()
    return [
        (slice(start, stop), slice(low, high))
        for start, stop, low, high in zip(starts, stops, lows, highs, strict=True)
    ]


def _nearest_in_block(
    query: NeighborQuery, rows: slice, columns: slice, k: int, eps: float
) -> Nearest:
    """The k nearest of these points for each of these queries."""
    points = query.points[columns].T.contiguous().T
    distances = distances_between(query.queries[rows, None], points, eps=eps)
    point_group = query.point_group[columns]
    query_group = query.query_group[rows]
    # ids ascend
    ends = (point_group[-1], query_group[0], query_group[-1])
    if any(bool(end != point_group[0]) for end in ends):
        other_group = point_group[None, :] != query_group[:, None]
        distances.masked_fill_(other_group, torch.inf)
    own_column = query.query_self[rows] - columns.start
    has_itself = ((own_column >= 0) & (own_column < len(points))).nonzero()[:, 0]
    distances[has_itself, own_column[has_itself]] = torch.inf
    nearest = smallest_k(distances, k)
    return Nearest(nearest.distances, nearest.positions + columns.start)


def smallest_k(distances: Tensor, k: int) -> Nearest:
    """Values and columns (R, k) of the smallest entries of (R, C), ascending, lower column first.

    torch.topk leaves open which of equal values it takes. Where C < k the rest is inf; columns of
    inf are arbitrary.

    Memory: a bool per entry, 16 bytes per one that equals its row's k-th.
    """
    num_listed = min(k + 1, distances.shape[1])
    values, columns = torch.topk(distances, num_listed, largest=False, sorted=True)
    equals_previous = (values[:, 1:] == values[:, :-1]) & values[:, 1:].isfinite()
    values = values[:, :k]
    columns = columns[:, :k]
    tied_rows = equals_previous.any(dim=1).nonzero()[:, 0]
    if tied_rows.numel():
        columns[tied_rows] = _lowest_columns(
            distances[tied_rows], values[tied_rows], columns[tied_rows]
        )
    missing = (0, k - columns.shape[1])
    return Nearest(pad(values, missing, value=torch.inf), pad(columns, missing))


def _lowest_columns(distances: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """Columns (R, k) in order where values tie: the first of those that equal the k-th value."""
    num_rows, k = values.shape
    kth_value = values[:, -1:]
    equals_kth = (distances == kth_value) & kth_value.isfinite()
    row, column = equals_kth.nonzero(as_tuple=True)
    count_of_row = torch.bincount(row, minlength=num_rows)
    first_of_row = count_of_row.cumsum(0) - count_of_row
    rank = torch.arange(row.numel(), device=row.device) - first_of_row[row]
    # the last slots of a row hold its k-th value
    num_slots = (values == kth_value).sum(dim=1)[row]
    is_taken = rank < num_slots
    columns[row[is_taken], (k - num_slots + rank)[is_taken]] = column[is_taken]
    columns, order = columns.sort(dim=1)
    order = values.gather(1, order).sort(dim=1, stable=True).indices
    return columns.gather(1, order)
