"""Exact search: in blocks of pairs, on any device, and by scipy's cKDTree, on a CPU.

The tree works in float64 and proposes candidates; the shared distances decide. A row is done once
no point that was not listed can reach its k-th distance after rounding; otherwise more candidates
are asked for, and a row with very many ties is searched in blocks. So both give the same to the
bit. Nothing Q x P is ever in memory.
"""

from collections.abc import Iterator

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch.nn.functional import pad

from thinsection.errors import BudgetError, DeviceError, require
from thinsection.neighbors.reference import (
    Found,
    NeighborQuery,
    distances_between,
    relative_error,
)
from thinsection.types import format_bytes

_COLUMNS = 4096  # points of a block: a row of float32 distances is 16 KiB
_MAX_PAIRS = {
    "cpu": 1 << 17,
    "cuda": 1 << 26,
}  # a block of 0.5 MiB stays in the cache of a core
_SPARE = 4  # candidates beyond k in the first round: itself, and ties at the boundary
_GROWTH = 4  # factor of each further round
_MAX_CANDIDATES = 512  # beyond it a row has that many ties and is searched in blocks
_MAX_ROWS = 8192
_PAIR_BYTES = (
    160  # of a pair in a radius: indices twice, coordinates, differences, distances
)
_MIN_ROWS = 64
Pair = tuple[Tensor, Tensor]  # distances, and columns or positions, (R, k) each


def bytes_per_pair(points: Tensor) -> int:
    """Of a block: two arrays of distances, the copy of tied rows, their positions, bools."""
    return 3 * max(4, points.element_size()) + 16 + 2


def least_block_bytes(points: Tensor) -> int:
    """The smallest budget that a search can work with: one row of a block."""
    columns = max(min(_COLUMNS, points.shape[0]), 1)
    return columns * bytes_per_pair(points)


def in_blocks(
    query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int
) -> Found:
    """The k nearest of each query's group. Memory: budget_bytes, at most 4 MiB on a CPU."""
    need = least_block_bytes(query.points)
    got = f"{budget_bytes}; it holds not even one row of distances"
    rule = f"budget_bytes must be >= {need} ({format_bytes(need)})"
    require(budget_bytes >= need, rule, got, error=BudgetError)
    columns, num_queries = max(min(_COLUMNS, len(query.points)), 1), len(query.queries)
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
) -> Pair:
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


def smallest_k(distances: Tensor, k: int) -> Pair:
    """Values and columns (R, k) of the smallest entries of (R, C), ascending, lower column first.

    torch.topk leaves open which of equal values it takes. Where C < k the rest is inf; columns of
    inf are arbitrary. Memory: a bool per entry, 16 bytes per one that equals its row's k-th.
    """
    num_columns = distances.shape[1]
    values, columns = torch.topk(
        distances, min(k + 1, num_columns), largest=False, sorted=True
    )
    tied = ((values[:, 1:] == values[:, :-1]) & values[:, 1:].isfinite()).any(dim=1)
    values, columns = values[:, :k], columns[:, :k]
    rows = tied.nonzero()[:, 0]
    if rows.numel():
        columns[rows] = _settled(distances[rows], values[rows], columns[rows])
    missing = (0, k - columns.shape[1])
    return pad(values, missing, value=torch.inf), pad(columns, missing)


def _merge(first: Pair, second: Pair, k: int) -> Pair:
    """The k best of two sorted lists (R, k) each; every index of `second` is above `first`'s."""
    values, indices = (torch.cat(both, dim=1) for both in zip(first, second))
    values, order = torch.sort(values, dim=1, stable=True)
    return values[:, :k], indices.gather(1, order[:, :k])


def _settled(distances: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """Columns (R, k) in order where values tie: the first of those that equal the k-th value."""
    (num_rows, k), last = values.shape, values[:, -1:]
    row, column = ((distances == last) & last.isfinite()).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=num_rows)
    rank = (
        torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    )
    places = (values == last).sum(dim=1)[
        row
    ]  # the last slots of a row hold its k-th value
    taken = rank < places
    columns[row[taken], (k - places + rank)[taken]] = column[taken]
    columns, order = columns.sort(dim=1)
    order = values.gather(1, order).sort(dim=1, stable=True).indices
    return columns.gather(1, order)


def tree_bytes(num_points: int, num_dims: int) -> int:
    """What the tree holds: float64 coordinates with the group's axis, their order, its nodes."""
    return num_points * (8 * (num_dims + 1) + 8 + 32)


def least_tree_bytes(points: Tensor, k: int) -> int:
    """The smallest budget that a search can work with, rows with very many ties included."""
    num_points, num_dims = points.shape
    rows = _MIN_ROWS * _row_bytes(k + _SPARE, num_dims)
    return tree_bytes(num_points, num_dims) + max(rows, least_block_bytes(points))


def by_tree(
    query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int
) -> Found:
    """The k nearest of each query's group. Memory: `tree_bytes`, and rows within budget_bytes."""
    device, remedy = query.points.device, "use impl 'blocks' or move them"
    rule = "points must be on the cpu for impl 'kdtree'"
    require(device.type == "cpu", rule, f"{device}; {remedy}", error=DeviceError)
    num_queries, num_dims = query.queries.shape
    distances, positions = found = Found.nothing(query, k)
    if not (len(query.points) and num_queries):
        return found
    candidates, need = k + _SPARE, least_tree_bytes(query.points, k)
    what = f"({format_bytes(need)}) for impl 'kdtree' and {len(query.points)} points"
    rule, got = (
        f"budget_bytes must be >= {need} {what}",
        f"{budget_bytes}; use impl 'blocks'",
    )
    require(budget_bytes >= need, rule, got, error=BudgetError)
    tree = _Tree(query)
    room = budget_bytes - tree_bytes(len(query.points), num_dims)
    pending = torch.arange(num_queries)
    while pending.numel() and candidates <= max(_MAX_CANDIDATES, 4 * k):
        rows = min(_MAX_ROWS, max(1, room // _row_bytes(candidates, num_dims)))
        unfinished = []
        for block in torch.split(pending, rows):
            near, index, done = tree.nearest(
                block, k, min(candidates, len(query.points)), eps
            )
            distances[block], positions[block] = near, index
            unfinished.append(block[~done])
        pending = torch.cat(unfinished)
        candidates *= _GROWTH
    if pending.numel():
        rest = in_blocks(query.rows(pending), k, eps=eps, budget_bytes=room)
        distances[pending], positions[pending] = rest.distances, rest.positions
    positions[distances.isinf()] = -1
    return found


def pairs_within(
    points: Tensor, queries: Tensor, radius: float, *, budget_bytes: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of pairs, positions of query and point, among them all nearer than the radius.

    Some lie a rounding of their dtype beyond it: whoever forms the distance decides. Memory:
    `tree_bytes` of points and queries, and budget_bytes for a block's pairs, one query's at least.
    """
    at, places = (each.detach().cpu().double().numpy() for each in (points, queries))
    reach = radius * (1 + 2 * relative_error(points.dtype))
    tree, how = cKDTree(at), {"return_length": True, "workers": torch.get_num_threads()}
    counts = tree.query_ball_point(places, reach, **how)
    ends, stop = np.cumsum(counts), 0
    while stop < len(places):
        start, before = stop, ends[stop - 1] if stop else 0
        stop = int(
            np.searchsorted(ends, before + budget_bytes // _PAIR_BYTES, side="right")
        )
        stop = max(stop, start + 1)
        block = cKDTree(places[start:stop])
        near = block.sparse_distance_matrix(tree, reach, output_type="ndarray")
        query, point = (torch.from_numpy(near[end]).to(points.device) for end in "ij")
        yield query + start, point


def _row_bytes(candidates: int, num_dims: int) -> int:
    """Per row: distances and positions of the tree, sorted ones, gathered coordinates, sums."""
    return candidates * (2 * 8 + 3 * 8 + 2 * 8 * num_dims + 3 * 8 + 8)


class _Tree:
    """A tree over all groups: a further axis keeps them so far apart that none sees another."""

    def __init__(self, query: NeighborQuery) -> None:
        self._query = query
        ends = [torch.stack(x.aminmax(dim=0)) for x in (query.points, query.queries)]
        low, high = torch.cat(ends).double().aminmax(dim=0)
        diameter = float((high - low).norm())
        self._reach = 2 * diameter if diameter > 0 else 1.0
        groups = (query.point_group, query.query_group)
        self._lifted = bool(
            torch.any(torch.cat([ids[[0, -1]] for ids in groups]) != groups[0][0])
        )
        lifted = self._lift(query.points, query.point_group)
        self._tree = cKDTree(lifted.numpy(), balanced_tree=False, copy_data=False)
        # squares below the smallest normal number vanish in the shared distances, not in the tree's
        self._absolute = 4 * float(torch.finfo(query.points.dtype).tiny) ** 0.5

    def nearest(
        self, rows: Tensor, k: int, candidates: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Distances and positions (R, k) of these queries and whether each row is proven."""
        query = self._query
        queries = query.queries[rows]
        places = self._lift(queries, query.query_group[rows]).numpy()
        how = {"distance_upper_bound": self._reach, "workers": torch.get_num_threads()}
        listed, found = self._tree.query(
            places, k=list(range(1, candidates + 1)), **how
        )
        index = (
            torch.from_numpy(found).sort(dim=1).values
        )  # ties go to the lower position
        absent = (index == len(query.points)) | (index == query.query_self[rows, None])
        gathered = query.points[index.clamp_(max=len(query.points) - 1)]
        exact = distances_between(queries[:, None], gathered, eps=eps)
        exact, order = torch.sort(
            exact.masked_fill_(absent, torch.inf), dim=1, stable=True
        )
        short = max(0, k - exact.shape[1])
        exact = pad(exact[:, :k], (0, short), value=torch.inf)
        index = pad(index.gather(1, order[:, :k]), (0, short), value=-1)
        farthest = torch.from_numpy(listed[:, -1])
        slack = 1 - 2 * relative_error(query.points.dtype)
        unlisted = (
            farthest.square() + eps * queries.shape[1]
        ).sqrt() * slack - self._absolute
        done = (
            (candidates >= len(query.points))
            | farthest.isinf()
            | (unlisted > exact[:, -1])
        )
        return exact, index, done

    def _lift(self, coordinates: Tensor, group: Tensor) -> Tensor:
        num_rows, num_dims = coordinates.shape
        lifted = torch.empty((num_rows, num_dims + self._lifted), dtype=torch.float64)
        lifted[:, :num_dims] = coordinates
        if self._lifted:
            lifted[:, num_dims] = group
            lifted[:, num_dims] *= 2 * self._reach
        return lifted
