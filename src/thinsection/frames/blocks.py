"""Exact search in blocks of pairs, on any device; no Q x P array is ever in memory.

Legend: P points, Q queries; R rows (queries) and C columns (points) in a block.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinsection.errors import BudgetError
from thinsection.frames.reference import Nearest, NeighborQuery, distances_between
from thinsection.types import format_bytes

_MAX_COLUMNS = 4096  # points in a block: a row of float32 distances takes 16 KiB
_MAX_PAIRS_CPU = 1 << 17  # a block of 0.5 MiB fits into the cache of a core
_MAX_PAIRS_CUDA = 1 << 26


def bytes_per_pair(points: Tensor) -> int:
    """Memory for one pair of a block."""
    # two arrays, and a copy of rows with ties
    distances = 3 * max(4, points.element_size())
    positions = 16  # row and column of tied entries
    flags = 2
    return distances + positions + flags


def least_block_bytes(points: Tensor) -> int:
    """Smallest budget for which a search works: one row of a block."""
    return _num_columns(points) * bytes_per_pair(points)


def _num_columns(points: Tensor) -> int:
    return max(min(_MAX_COLUMNS, len(points)), 1)


def in_blocks(
    query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int
) -> Nearest:
    """The k nearest points in each query's group. Memory: budget_bytes, at most 4 MiB on a CPU."""
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
            # a stable sort keeps ties in order: positions in this block are above earlier ones
            distances = torch.cat((best.distances, found.distances), dim=1)
            positions = torch.cat((best.positions, found.positions), dim=1)
            distances, order = torch.sort(distances, dim=1, stable=True)
            best = Nearest(distances[:, :k], positions.gather(1, order[:, :k]))
        result.distances[rows] = best.distances
        result.positions[rows] = best.positions
    result.positions[result.distances.isinf()] = -1
    return result


def _row_blocks(query: NeighborQuery, num_rows: int) -> list[tuple[slice, slice]]:
    """Blocks of queries, each with the range of all points in the groups of these queries."""
    num_queries = len(query.queries)
    first_point, last_point = query.ranges()
    starts = range(0, num_queries, num_rows)
    stops = [min(start + num_rows, num_queries) for start in starts]
    # one transfer for all blocks, because each transfer waits for the GPU
    lows = first_point[::num_rows].tolist()
    highs = last_point[[stop - 1 for stop in stops]].tolist()
    return [
        (slice(start, stop), slice(low, high))
        for start, stop, low, high in zip(starts, stops, lows, highs, strict=True)
    ]


def _nearest_in_block(
    query: NeighborQuery, rows: slice, columns: slice, k: int, eps: float
) -> Nearest:
    """The k nearest of these points for each query of the block."""
    points = query.points[columns].T.contiguous().T
    distances = distances_between(query.queries[rows, None], points, eps=eps)
    point_group = query.point_group[columns]
    query_group = query.query_group[rows]
    # ids are in ascending order, so the first and last ones show whether there is one group only
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
    """Values and columns (R, k) of the smallest entries of each row; ties go to the lower column.

    Values ascend. torch.topk alone does not define which of equal values it takes. If C < k, the
    remaining values are inf; the columns of inf are arbitrary.

    Memory: a bool per entry, and 16 bytes per entry that equals the k-th value of its row.
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
    """Columns (R, k) with ties in order: of entries equal to the k-th value, the first ones."""
    num_rows, k = values.shape
    kth_value = values[:, -1:]
    equals_kth = (distances == kth_value) & kth_value.isfinite()
    row, column = equals_kth.nonzero(as_tuple=True)
    count_of_row = torch.bincount(row, minlength=num_rows)
    first_of_row = count_of_row.cumsum(0) - count_of_row
    rank = torch.arange(row.numel(), device=row.device) - first_of_row[row]
    # the last slots of a row are for entries that equal its k-th value
    num_slots = (values == kth_value).sum(dim=1)[row]
    is_taken = rank < num_slots
    columns[row[is_taken], (k - num_slots + rank)[is_taken]] = column[is_taken]
    columns, order = columns.sort(dim=1)
    order = values.gather(1, order).sort(dim=1, stable=True).indices
    return columns.gather(1, order)
