"""Exact search by scipy's cKDTree: it proposes candidates, the shared distances decide.

The tree works in float64. A row is done once its farthest candidate lies so far beyond the k-th
distance that no point which was not listed can reach it after rounding; otherwise more candidates
are asked for, and a row with very many ties goes to `blocks`. So the result is the same to the bit.
"""

import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch.nn.functional import pad

from thinsection.errors import BudgetError, DeviceError, require
from thinsection.neighbors import blocks
from thinsection.neighbors.reference import Found, NeighborQuery, distances_between, relative_error
from thinsection.units import format_bytes

_SPARE = 4  # candidates beyond k in the first round: itself, and ties at the boundary
_GROWTH = 4  # factor of each further round
_MAX_CANDIDATES = 512  # beyond it a row has that many ties and is searched in blocks
_MAX_ROWS = 8192
_MIN_ROWS = 64


def tree_bytes(num_points: int, num_dims: int) -> int:
    """What the tree holds: float64 coordinates with the group's axis, their order, its nodes."""
    return num_points * (8 * (num_dims + 1) + 8 + 32)


def least_bytes(points: Tensor, k: int) -> int:
    """The smallest budget that a search can work with, rows with very many ties included."""
    num_points, num_dims = points.shape
    rows = _MIN_ROWS * _row_bytes(k + _SPARE, num_dims)
    return tree_bytes(num_points, num_dims) + max(rows, blocks.least_bytes(points))


def search(query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int) -> Found:
    """The k nearest points of each query's own group.

    Memory: `tree_bytes` plus blocks of rows within the rest of budget_bytes, beyond the result.
    """
    device, rule = query.points.device, "points must be on the cpu for impl 'kdtree'"
    got = f"{device}; use impl 'blocks' or move them"
    require(device.type == "cpu", rule, got, error=DeviceError)
    num_queries, num_dims = query.queries.shape
    distances, positions = found = Found.nothing(query, k)
    if not (query.num_points and num_queries):
        return found
    candidates, need = k + _SPARE, least_bytes(query.points, k)
    what = f"({format_bytes(need)}) for impl 'kdtree' and {query.num_points} points"
    got = f"{budget_bytes}; use impl 'blocks'"
    rule = f"budget_bytes must be >= {need} {what}"
    require(budget_bytes >= need, rule, got, error=BudgetError)
    tree = _Tree(query)
    room = budget_bytes - tree_bytes(query.num_points, num_dims)
    pending = torch.arange(num_queries)
    while pending.numel() and candidates <= max(_MAX_CANDIDATES, 4 * k):
        rows = min(_MAX_ROWS, max(1, room // _row_bytes(candidates, num_dims)))
        unfinished = []
        for block in torch.split(pending, rows):
            near, index, done = tree.nearest(block, k, min(candidates, query.num_points), eps)
            distances[block], positions[block] = near, index
            unfinished.append(block[~done])
        pending = torch.cat(unfinished)
        candidates *= _GROWTH
    if pending.numel():
        rest = blocks.search(query.rows(pending), k, eps=eps, budget_bytes=room)
        distances[pending], positions[pending] = rest.distances, rest.positions
    positions[distances.isinf()] = -1
    return found


def _row_bytes(candidates: int, num_dims: int) -> int:
    """Per row: distances and positions of the tree, sorted ones, gathered coordinates, sums."""
    return candidates * (2 * 8 + 3 * 8 + 2 * 8 * num_dims + 3 * 8 + 8)


class _Tree:
    """A tree over all groups: a further axis keeps them so far apart that none sees another."""

    def __init__(self, query: NeighborQuery) -> None:
        self._query = query
        ends = [x.aminmax(dim=0) for x in (query.points, query.queries)]
        low = torch.minimum(ends[0].min, ends[1].min).double()
        high = torch.maximum(ends[0].max, ends[1].max).double()
        diameter = float((high - low).norm())
        self._reach = 2 * diameter if diameter > 0 else 1.0
        groups = (query.point_group, query.query_group)
        self._lifted = bool(torch.any(torch.cat([ids[[0, -1]] for ids in groups]) != groups[0][0]))
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
        listed, found = self._tree.query(
            self._lift(queries, query.query_group[rows]).numpy(),
            k=list(range(1, candidates + 1)),
            distance_upper_bound=self._reach,
            workers=torch.get_num_threads(),
        )
        index = torch.from_numpy(found).sort(dim=1).values  # ties go to the lower position
        absent = (index == query.num_points) | (index == query.query_self[rows, None])
        gathered = query.points[index.clamp_(max=query.num_points - 1)]
        exact = distances_between(queries[:, None], gathered, eps=eps)
        exact, order = torch.sort(exact.masked_fill_(absent, torch.inf), dim=1, stable=True)
        short = max(0, k - exact.shape[1])
        exact = pad(exact[:, :k], (0, short), value=torch.inf)
        index = pad(index.gather(1, order[:, :k]), (0, short), value=-1)
        farthest = torch.from_numpy(listed[:, -1])
        slack = 1 - 2 * relative_error(query.points.dtype)
        unlisted = (farthest.square() + eps * queries.shape[1]).sqrt() * slack - self._absolute
        done = (candidates >= query.num_points) | farthest.isinf() | (unlisted > exact[:, -1])
        return exact, index, done

    def _lift(self, coordinates: Tensor, group: Tensor) -> Tensor:
        num_rows, num_dims = coordinates.shape
        lifted = torch.empty((num_rows, num_dims + self._lifted), dtype=torch.float64)
        lifted[:, :num_dims] = coordinates
        if self._lifted:
            lifted[:, num_dims] = group
            lifted[:, num_dims] *= 2 * self._reach
        return lifted
