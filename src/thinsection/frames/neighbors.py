"""Nearest neighbours: checks the arguments, chooses one search, and orders its result.

Legend: B batch elements with N points and Q queries each, D dimensions (2 or 3).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.config import nearest
from thinsection.errors import InvalidInputError
from thinsection.frames import reference
from thinsection.frames.blocks import in_blocks
from thinsection.frames.reference import (
    NO_SELF,
    Nearest,
    NeighborQuery,
    order_by_group,
)
from thinsection.frames.tree import by_tree, least_tree_bytes
from thinsection.types import MIB, format_bytes

DEFAULT_BUDGET_BYTES = 256 * MIB
Impl = Literal["auto", "blocks", "kdtree", "reference"]
Array = Tensor | npt.NDArray[Any]
Groups = Array | tuple[Array, Array] | None

_ROWS = 1 << 14  # rows reordered in one step, to keep temporary arrays small

# measured on one core (benchmarks/bench_neighbors.py); only the ratio of both numbers matters
_SECONDS_PER_PAIR = 4e-9
_SECONDS_PER_TREE_POINT = 4e-7
_SECONDS_PER_QUERY_AND_NEIGHBOR = 3e-7

_SEARCHES = {
    "blocks": in_blocks,
    "kdtree": by_tree,
    "reference": reference.search,
}


class Neighbors(NamedTuple):
    """Neighbours (..., Q, k) of each query, nearest first; NumPy or torch, like the points."""

    distances: Any
    indices: (
        Any  # int64, points of the same batch element; -1, at inf, where there is none
    )


@dataclass(frozen=True, slots=True)
class SearchChoice:
    """Name of an implementation, and why it was chosen."""

    impl: str
    reason: str

    def search(
        self, query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int
    ) -> Nearest:
        """The k nearest points of each query, with this implementation."""
        return _SEARCHES[self.impl](query, k, eps=eps, budget_bytes=budget_bytes)


def nearest_neighbors(
    points: Array,
    queries: Array | None = None,
    *,
    k: int,
    mask: Array | None = None,
    group: Groups = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    impl: Impl = "auto",
) -> Neighbors:
    """The k nearest points of each query: exact, the same for all implementations and block sizes.

    Distances are computed from differences, in the points' dtype (integers in float64, half types
    in float32). Ties go to the lower index. There are no gradients. The result has the type of
    `points`.

    Args:
        points: (..., N, 2 or 3), NumPy or torch, on any device; masked ones may be NaN.
        queries: (..., Q, 2 or 3), same type; None: each point is a query, and not its own
            neighbour.
        k: number of neighbours, k >= 1. A query with fewer neighbours has inf and -1 in their
            place.
        mask: (..., N) bool or 0/1, True = present. An absent point is no neighbour, and has none if
            it is a query.
        group: (..., N) integer ids; only points with the query's id are neighbours. With `queries`,
            a pair of ids (of the points, of the queries).
        budget_bytes: limit for the memory beyond arguments, their sorted copy and the result.
        impl: 'blocks' (any device), 'kdtree' (scipy, CPU), 'reference' (all pairs) or 'auto', which
            decides from the sizes alone; `explain` returns its choice.

    Memory: N * (D * itemsize + 24) for the sorted copy, N * k * 16 for the result and as much for
        its unsorted form, plus budget_bytes at most.
    Raises InvalidInputError: shapes, dtypes, k or non-finite coordinates of present points;
    BudgetError: the budget is too small for the requested implementation.
    """
    flat = flat_query(points, queries, k, mask, group)
    choice = choose(flat.query, k, impl=impl, budget_bytes=budget_bytes)
    return flat.in_place(choice.search(flat.query, k, budget_bytes=budget_bytes))


def explain(
    points: Array,
    queries: Array | None = None,
    *,
    k: int,
    mask: Array | None = None,
    group: Groups = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    impl: Impl = "auto",
) -> SearchChoice:
    """The implementation that `nearest_neighbors` would choose, and why, without a search."""
    query = flat_query(points, queries, k, mask, group).query
    return choose(query, k, impl=impl, budget_bytes=budget_bytes)


def choose(
    query: NeighborQuery, k: int, *, impl: str, budget_bytes: int
) -> SearchChoice:
    """Chooses the implementation for a query; it is not replaced later by another one."""
    if impl not in get_args(Impl):
        names = get_args(Impl)
        raise InvalidInputError(
            f"impl must be one of {', '.join(names)}, got {impl!r}{nearest(impl, names)}"
        )
    if impl != "auto":
        return SearchChoice(impl, "asked for")
    device = query.points.device
    if device.type != "cpu":
        return SearchChoice(
            "blocks", f"points are on {device}, and the tree needs a CPU"
        )
    first, last = query.ranges()
    num_pairs = int((last - first).sum())
    blocks_s = num_pairs * _SECONDS_PER_PAIR
    build_s = len(query.points) * _SECONDS_PER_TREE_POINT
    queries_s = len(query.queries) * (k + 4) * _SECONDS_PER_QUERY_AND_NEIGHBOR
    tree_s = build_s + queries_s
    estimate = (
        f"{num_pairs} pairs: an estimated {blocks_s:.2g} s in blocks and {tree_s:.2g} s with a "
        "tree"
    )
    if blocks_s <= tree_s:
        return SearchChoice("blocks", estimate)
    needed = least_tree_bytes(query.points, k)
    if needed > budget_bytes:
        return SearchChoice(
            "blocks",
            f"{estimate}; the tree needs {format_bytes(needed)}, the budget is "
            f"{format_bytes(budget_bytes)}",
        )
    return SearchChoice("kdtree", estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatQuery:
    """One search over all batch elements and groups, and how to order its result."""

    query: NeighborQuery
    point_order: (
        Tensor  # flat index of each point of the query, over batches of num_points
    )
    query_order: Tensor  # result row of each query in `query`
    num_points: int
    query_shape: tuple[int, ...]
    is_numpy: bool

    def in_place(self, nearest: Nearest) -> Neighbors:
        """The result in the order of the arguments; absent queries have no neighbours."""
        k = nearest.positions.shape[1]
        shape = (math.prod(self.query_shape), k)
        distances = nearest.distances.new_full(shape, torch.inf)
        indices = nearest.positions.new_full(shape, -1)
        for start in range(0, len(self.query_order), _ROWS):
            block = slice(start, start + _ROWS)
            rows = self.query_order[block]
            positions = nearest.positions[block]
            distances[rows] = nearest.distances[block]
            if self.point_order.numel():
                index = self.point_order[positions.clamp(min=0)] % self.num_points
                indices[rows] = index.masked_fill_(positions < 0, -1)
        distances = distances.reshape(*self.query_shape, k)
        indices = indices.reshape(*self.query_shape, k)
        if self.is_numpy:
            return Neighbors(distances.numpy(), indices.numpy())
        return Neighbors(distances, indices)


def flat_query(
    points: Array, queries: Array | None, k: int, mask: Array | None, group: Groups
) -> FlatQuery:
    """Checks the arguments of `nearest_neighbors`, and makes one query of them."""
    point_places = _coordinates(points, "points")
    shape = tuple(point_places.shape[:-1])
    num_points, num_dims = point_places.shape[-2:]
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InvalidInputError(f"k must be an int >= 1, got {k!r}")
    query_places = None
    query_shape = shape
    if queries is not None:
        query_places = _coordinates(queries, "queries")
        _check_like_points(query_places, point_places)
        query_shape = tuple(query_places.shape[:-1])
    if group is not None and isinstance(group, tuple) != (queries is not None):
        raise InvalidInputError(
            "group must be a pair (for the points, for the queries) exactly when queries are "
            f"passed, got {type(group).__name__}"
        )
    device = point_places.device
    is_present = None
    if mask is not None:
        is_present = _per_point(mask, shape, "mask", device).bool()
    ids = _group_ids(group, (shape, query_shape), device)
    _check_finite(point_places, is_present, "points")

    point_group, query_group = _dense_groups(shape, query_shape, ids, device)
    order = order_by_group(point_group)
    if is_present is not None:
        order = order[is_present.reshape(-1)[order]]
    flat_points = point_places.reshape(-1, num_dims)[order]
    point_group = point_group[order]
    query = NeighborQuery(
        points=flat_points,
        point_group=point_group,
        queries=flat_points,
        query_group=point_group,
        query_self=torch.arange(order.numel(), device=device),
    )
    query_order = order
    if query_places is not None:
        query_order = order_by_group(query_group)
        query = replace(
            query,
            queries=query_places.reshape(-1, num_dims)[query_order],
            query_group=query_group[query_order],
            query_self=torch.full_like(query_order, NO_SELF),
        )
    return FlatQuery(
        query=query,
        point_order=order,
        query_order=query_order,
        num_points=num_points,
        query_shape=query_shape,
        is_numpy=isinstance(points, np.ndarray),
    )


def _coordinates(values: Array, name: str) -> Tensor:
    """Coordinates as float32 or float64."""
    tensor = _tensor(values, name)
    if tensor.ndim < 2 or tensor.shape[-1] not in (2, 3):
        raise InvalidInputError(
            f"{name} must be of shape (..., N, 2) or (..., N, 3), got {_form(tensor)}"
        )
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise InvalidInputError(f"{name} must be of real numbers, got {tensor.dtype}")
    if not tensor.is_floating_point():
        return tensor.double()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _tensor(values: Array, name: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    if not isinstance(values, np.ndarray):
        raise InvalidInputError(
            f"{name} must be a NumPy array or a torch tensor, got {type(values).__name__}"
        )
    if values.dtype.kind not in "fiub":
        raise InvalidInputError(f"{name} must be of numbers, got {values.dtype}")
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def _check_like_points(queries: Tensor, points: Tensor) -> None:
    is_like = (
        queries.dtype == points.dtype
        and queries.device == points.device
        and queries.shape[:-2] == points.shape[:-2]
        and queries.shape[-1] == points.shape[-1]
    )
    if not is_like:
        raise InvalidInputError(
            "queries must have the batch shape, dimensions, dtype and device of the points "
            f"{_form(points)}, got {_form(queries)}"
        )
    _check_finite(queries, None, "queries")


def _group_ids(
    group: Groups, shapes: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device
) -> list[Tensor]:
    """Ids of the points and, if there are separate queries, of the queries; [] without groups."""
    if group is None:
        return []
    arrays = group if isinstance(group, tuple) else (group,)
    ids = [
        _per_point(array, shape, "group", device)
        for array, shape in zip(arrays, shapes, strict=False)
    ]
    for tensor in ids:
        if tensor.is_floating_point():
            raise InvalidInputError(f"group must be of integer ids, got {tensor.dtype}")
    return ids


def _per_point(
    values: Array, shape: tuple[int, ...], name: str, device: torch.device
) -> Tensor:
    tensor = _tensor(values, name)
    if tuple(tensor.shape) != shape:
        raise InvalidInputError(
            f"{name} must be of shape {shape}, got {tuple(tensor.shape)}"
        )
    return tensor.to(device)


def _dense_groups(
    shape: tuple[int, ...],
    query_shape: tuple[int, ...],
    ids: list[Tensor],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """One id for each pair (batch element, group), for points (B*N,) and queries (B*Q,)."""
    batch = torch.arange(math.prod(shape[:-1]), device=device)
    point_batch = batch.repeat_interleave(shape[-1])
    query_batch = batch.repeat_interleave(query_shape[-1])
    if not ids:
        return point_batch, query_batch
    all_ids = torch.cat([tensor.reshape(-1).long() for tensor in ids])
    dense_ids = torch.unique(all_ids, return_inverse=True)[1]
    num_ids = int(dense_ids.max()) + 1 if dense_ids.numel() else 1
    num_points = point_batch.numel()
    point_group = point_batch * num_ids + dense_ids[:num_points]
    if len(ids) == 1:
        return point_group, point_group
    return point_group, query_batch * num_ids + dense_ids[num_points:]


def _check_finite(coordinates: Tensor, mask: Tensor | None, name: str) -> None:
    # within this limit, squares and their sum stay finite
    limit = torch.finfo(coordinates.dtype).max ** 0.5 / 1e3
    is_wrong = ~(coordinates.abs() <= limit).all(dim=-1)
    if mask is not None:
        is_wrong &= mask
    if bool(is_wrong.any()):
        first = tuple(is_wrong.nonzero()[0].tolist())
        raise InvalidInputError(
            f"coordinates in {name} must be finite and below {limit:.0e} unless masked, got "
            f"{coordinates[first].tolist()} at {first}; mask the point out"
        )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
