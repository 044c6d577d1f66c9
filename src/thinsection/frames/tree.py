"""Exact search with scipy's cKDTree on a CPU, and search of all pairs within a radius.

The tree works in float64 and proposes candidates; the distances of `reference.py` decide. The
result of a row is final once no unlisted point can be nearer than its k-th neighbour, rounding
included; until then more candidates are requested, and rows with very many ties are searched in
blocks. Therefore both searches agree to the bit. No Q x P array is ever in memory.

Legend: P points, Q queries, D dimensions; R queries in one round.
"""

from collections.abc import Iterator

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch.nn.functional import pad

from thinsection.errors import BudgetError, DeviceError
from thinsection.frames.blocks import in_blocks, least_block_bytes
from thinsection.frames.reference import (
    Nearest,
    NeighborQuery,
    distances_between,
    relative_error,
)
from thinsection.types import format_bytes

_SPARE = 4  # additional candidates in the first round: the point itself, and ties
_GROWTH = 4  # increase of the number of candidates per round
_MAX_CANDIDATES = 512  # rows that need more have many ties, and are searched in blocks
_MAX_ROWS = 8192
_MIN_ROWS = 64
# memory per pair within a radius: indices twice, coordinates, differences, distances
_PAIR_BYTES = 160


def tree_bytes(num_points: int, num_dims: int) -> int:
    """Memory of the tree: float64 coordinates with the axis of groups, their order, its nodes."""
    coordinates = 8 * (num_dims + 1)
    order = 8
    nodes = 32
    return num_points * (coordinates + order + nodes)


def least_tree_bytes(points: Tensor, k: int) -> int:
    """Smallest budget for which a search works, rows with very many ties included."""
    num_points, num_dims = points.shape
    first_round = _MIN_ROWS * _row_bytes(k + _SPARE, num_dims)
    search = max(first_round, least_block_bytes(points))
    return tree_bytes(num_points, num_dims) + search


def _row_bytes(candidates: int, num_dims: int) -> int:
    """Memory for one query in a round."""
    listed = 2 * 8  # the tree's distances and positions
    ordered = 3 * 8  # sorted positions, and the order of the exact distances
    gathered = 2 * 8 * num_dims  # coordinates, and differences
    sums = 3 * 8
    padded = 8
    return candidates * (listed + ordered + gathered + sums + padded)


def by_tree(
    query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int
) -> Nearest:
    """The k nearest points in each query's group. Memory: `tree_bytes`, and rows in the budget."""
    device = query.points.device
    if device.type != "cpu":
        raise DeviceError(
            f"points must be on the cpu for impl 'kdtree', got {device}; "
            "use impl 'blocks' or move them"
        )
    result = Nearest.none_yet(query, k)
    num_points = len(query.points)
    num_queries, num_dims = query.queries.shape
    if num_points == 0 or num_queries == 0:
        return result
    needed = least_tree_bytes(query.points, k)
    if budget_bytes < needed:
        raise BudgetError(
            f"budget_bytes must be >= {needed} ({format_bytes(needed)}) for impl 'kdtree' and "
            f"{num_points} points, got {budget_bytes}; use impl 'blocks'"
        )
    tree = _Tree(query)
    row_budget = budget_bytes - tree_bytes(num_points, num_dims)
    pending = torch.arange(num_queries)
    candidates = k + _SPARE
    while pending.numel() and candidates <= max(_MAX_CANDIDATES, 4 * k):
        rows = max(1, row_budget // _row_bytes(candidates, num_dims))
        unproven = []
        for block in torch.split(pending, min(_MAX_ROWS, rows)):
            nearest, is_proven = tree.nearest(
                block, k, min(candidates, num_points), eps
            )
            result.distances[block] = nearest.distances
            result.positions[block] = nearest.positions
            unproven.append(block[~is_proven])
        pending = torch.cat(unproven)
        candidates *= _GROWTH
    if pending.numel():
        nearest = in_blocks(query.rows(pending), k, eps=eps, budget_bytes=row_budget)
        result.distances[pending] = nearest.distances
        result.positions[pending] = nearest.positions
    result.positions[result.distances.isinf()] = -1
    return result


class _Tree:
    """A tree over all groups: an additional axis keeps groups too far apart to see each other."""

    def __init__(self, query: NeighborQuery) -> None:
        self._query = query
        corners = [torch.stack(x.aminmax(dim=0)) for x in (query.points, query.queries)]
        low, high = torch.cat(corners).double().aminmax(dim=0)
        diameter = float((high - low).norm())
        self._reach = 2 * diameter if diameter > 0 else 1.0
        groups = (query.point_group, query.query_group)
        first_and_last = torch.cat([ids[[0, -1]] for ids in groups])
        self._has_group_axis = bool(torch.any(first_and_last != first_and_last[0]))
        coordinates = self._with_group_axis(query.points, query.point_group)
        self._tree = cKDTree(coordinates.numpy(), balanced_tree=False, copy_data=False)
        # tiny squares become 0 in the distances of `reference.py`, but not in the tree's
        self._vanishing = 4 * float(torch.finfo(query.points.dtype).tiny) ** 0.5

    def nearest(
        self, rows: Tensor, k: int, candidates: int, eps: float
    ) -> tuple[Nearest, Tensor]:
        """The k nearest (R, k) among so many candidates, and (R,) whether each row is proven."""
        query = self._query
        num_points = len(query.points)
        queries = query.queries[rows]
        listed_distances, listed = self._tree.query(
            self._with_group_axis(queries, query.query_group[rows]).numpy(),
            k=list(range(1, candidates + 1)),
            distance_upper_bound=self._reach,
            workers=torch.get_num_threads(),
        )
        # sorted by position, so that ties go to the lower position
        index = torch.from_numpy(listed).sort(dim=1).values
        is_absent = (index == num_points) | (index == query.query_self[rows, None])
        candidate_points = query.points[index.clamp_(max=num_points - 1)]
        distances = distances_between(queries[:, None], candidate_points, eps=eps)
        distances.masked_fill_(is_absent, torch.inf)
        distances, order = torch.sort(distances, dim=1, stable=True)
        missing = (0, max(0, k - distances.shape[1]))
        distances = pad(distances[:, :k], missing, value=torch.inf)
        positions = pad(index.gather(1, order[:, :k]), missing, value=-1)
        farthest_listed = torch.from_numpy(listed_distances[:, -1])
        # smallest distance, after rounding, that an unlisted point can have
        with_eps = (farthest_listed.square() + eps * queries.shape[1]).sqrt()
        slack = 1 - 2 * relative_error(query.points.dtype)
        nearest_unlisted = with_eps * slack - self._vanishing
        is_proven = (
            (candidates >= num_points)
            | farthest_listed.isinf()
            | (nearest_unlisted > distances[:, -1])
        )
        return Nearest(distances, positions), is_proven

    def _with_group_axis(self, coordinates: Tensor, group: Tensor) -> Tensor:
        """Coordinates in float64, with the axis of groups if there is more than one group."""
        num_rows, num_dims = coordinates.shape
        num_axes = num_dims + self._has_group_axis
        places = torch.empty((num_rows, num_axes), dtype=torch.float64)
        places[:, :num_dims] = coordinates
        if self._has_group_axis:
            places[:, num_dims] = group
            places[:, num_dims] *= 2 * self._reach
        return places


def pairs_within(
    points: Tensor, queries: Tensor, radius: float, *, budget_bytes: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pairs in blocks, as positions of query and point: all pairs closer than the radius.

    Pairs that are beyond the radius by a rounding error may be included; check their distances.

    Memory: `tree_bytes` for points and queries, and budget_bytes for the pairs of a block, at least
    those of one query.
    """
    point_places = points.detach().cpu().double().numpy()
    query_places = queries.detach().cpu().double().numpy()
    reach = radius * (1 + 2 * relative_error(points.dtype))
    tree = cKDTree(point_places)
    counts = tree.query_ball_point(
        query_places, reach, return_length=True, workers=torch.get_num_threads()
    )
    pairs_up_to = np.cumsum(counts)
    stop = 0
    while stop < len(query_places):
        start = stop
        pairs_before = pairs_up_to[start - 1] if start else 0
        most_pairs = pairs_before + budget_bytes // _PAIR_BYTES
        stop = int(np.searchsorted(pairs_up_to, most_pairs, side="right"))
        stop = max(stop, start + 1)
        block = cKDTree(query_places[start:stop])
        near = block.sparse_distance_matrix(tree, reach, output_type="ndarray")
        query = torch.from_numpy(near["i"]).to(points.device)
        point = torch.from_numpy(near["j"]).to(points.device)
        yield query + start, point
