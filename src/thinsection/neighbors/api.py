"""Nearest neighbours: check the arguments, choose an implementation once, search, put in place."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.config import nearest
from thinsection.errors import InvalidInputError, require
from thinsection.neighbors import reference, search
from thinsection.neighbors.reference import (
    NO_SELF,
    Found,
    NeighborQuery,
    order_by_group,
)
from thinsection.types import MIB, format_bytes

DEFAULT_BUDGET_BYTES = 256 * MIB
Impl = Literal["auto", "blocks", "kdtree", "reference"]

# measured on one core (benchmarks/bench_neighbors.py); only their ratio decides
_SECONDS_PER_PAIR = 4e-9
_SECONDS_PER_TREE_POINT = 4e-7
_SECONDS_PER_QUERY_AND_NEIGHBOR = 3e-7

_SEARCHES = {
    "blocks": search.in_blocks,
    "kdtree": search.by_tree,
    "reference": reference.search,
}
_ROWS = 1 << 14  # rows put in place at a time, to keep the temporaries small

Array = Tensor | npt.NDArray[Any]
Groups = Array | tuple[Array, Array] | None


class Neighbors(NamedTuple):
    """Neighbours (..., Q, k) of each query, nearest first."""

    distances: Any
    indices: (
        Any  # int64, points of the same batch element; -1, at inf, where there is none
    )


@dataclass(frozen=True, slots=True)
class FlatQuery:
    """The search over all batch elements and groups at once, and how its result is put in place."""

    query: NeighborQuery
    point_order: Tensor  # (P,), flat index of each point of the query, over batches of num_points
    query_order: Tensor  # (Q,), row of the result of each of its queries
    num_points: int
    query_shape: tuple[int, ...]
    is_numpy: bool

    def put(self, found: Found) -> Neighbors:
        """The result in the order of the arguments; absent queries have no neighbour."""
        shape = (math.prod(self.query_shape), found.positions.shape[1])
        distances = found.distances.new_full(shape, torch.inf)
        indices = found.positions.new_full(shape, -1)
        for start in range(0, len(self.query_order), _ROWS):
            block = slice(start, start + _ROWS)
            rows, position = self.query_order[block], found.positions[block]
            distances[rows] = found.distances[block]
            if self.point_order.numel():
                index = self.point_order[position.clamp(min=0)] % self.num_points
                indices[rows] = index.masked_fill_(position < 0, -1)
        both = [x.reshape(*self.query_shape, shape[1]) for x in (distances, indices)]
        return Neighbors(*(x.numpy() if self.is_numpy else x for x in both))


@dataclass(frozen=True, slots=True)
class SearchChoice:
    """An implementation by name and why it was taken."""

    impl: str
    reason: str

    def search(
        self, query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int
    ) -> Found:
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
    """The k nearest points of each query: exact, the same whatever the implementation and block.

    Distances are formed from differences, in the points' dtype (integers in float64, half types in
    float32); ties go to the lower index. No gradient flows. The result is like `points`.

    Args:
        points: (..., N, 2 or 3), NumPy or torch, on any device; masked ones may be NaN.
        queries: (..., Q, 2 or 3), the same kind; None takes every point, itself left out.
        k: neighbours wanted, 1 <= k <= N.
        mask: (..., N) bool or 0/1, True = present. An absent point is no neighbour and, as a query
            of its own, has none.
        group: (..., N) integer ids, only the same id is a neighbour; with `queries` a pair of ids,
            (of the points, of the queries).
        budget_bytes: bound on the memory beyond arguments, their sorted copy and the result.
        impl: 'blocks' (any device), 'kdtree' (scipy, CPU), 'reference' (all pairs) or 'auto', which
            decides once from the sizes; `explain` says what it takes.

    Memory: N * (D * itemsize + 24) for the sorted copy, N * k * 16 for the result and as much for
        its unsorted form, plus budget_bytes at most.
    Raises InvalidInputError: shapes, dtypes, k or non-finite coordinates of present points;
    BudgetError: the implementation asked for does not fit into the budget.
    """
    flat = flat_query(points, queries, k, mask, group)
    choice = choose(flat.query, k, impl=impl, budget_bytes=budget_bytes)
    return flat.put(choice.search(flat.query, k, budget_bytes=budget_bytes))


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
    """What `nearest_neighbors` of the same arguments takes, and why; it does not search."""
    query = flat_query(points, queries, k, mask, group).query
    return choose(query, k, impl=impl, budget_bytes=budget_bytes)


def choose(
    query: NeighborQuery, k: int, *, impl: str, budget_bytes: int
) -> SearchChoice:
    """The implementation for this query; never replaced later, whatever happens."""
    known = get_args(Impl)
    rule = f"impl must be one of {', '.join(known)}"
    require(impl in known, rule, f"{impl!r}{nearest(impl, known)}")
    if impl != "auto":
        return SearchChoice(impl, "asked for")
    if (device := query.points.device).type != "cpu":
        return SearchChoice("blocks", f"points are on {device}, the tree is for a cpu")
    first, last = query.ranges()
    pairs, points, queries = (
        int((last - first).sum()),
        len(query.points),
        len(query.queries),
    )
    by_pairs = pairs * _SECONDS_PER_PAIR
    by_tree = (
        points * _SECONDS_PER_TREE_POINT
        + queries * (k + 4) * _SECONDS_PER_QUERY_AND_NEIGHBOR
    )
    estimate = f"{pairs} pairs, estimated {by_pairs:.2g} s in blocks and {by_tree:.2g} s by a tree"
    if by_pairs <= by_tree:
        return SearchChoice("blocks", estimate)
    if (tree := search.least_tree_bytes(query.points, k)) > budget_bytes:
        needs = (
            f"needs {format_bytes(tree)} of a budget of {format_bytes(budget_bytes)}"
        )
        return SearchChoice("blocks", f"{estimate}; the tree {needs}")
    return SearchChoice("kdtree", estimate)


def flat_query(
    points: Array, queries: Array | None, k: int, mask: Array | None, group: Groups
) -> FlatQuery:
    """The arguments of `nearest_neighbors`, checked, as one query."""
    places = _coordinates(points, "points")
    shape, device = tuple(places.shape[:-1]), places.device
    num_points, num_dims = places.shape[-2:]
    counted = isinstance(k, int) and not isinstance(k, bool) and 1 <= k <= num_points
    require(counted, f"k must be an int from 1 to the {num_points} points", repr(k))
    asked = None if queries is None else _coordinates(queries, "queries")
    if asked is not None:
        ours, theirs = (
            (x.dtype, x.device, x.shape[:-2], x.shape[-1]) for x in (asked, places)
        )
        rule = "queries must have the batch shape, dimensions, dtype and device of the points"
        require(ours == theirs, f"{rule} {_describe(places)}", _describe(asked))
        _check_finite(asked, None, "queries")
    paired = group is None or isinstance(group, tuple) == (queries is not None)
    rule = "group must be a pair (of the points, of the queries) exactly when queries are given"
    require(paired, rule, type(group).__name__)
    query_shape = shape if asked is None else tuple(asked.shape[:-1])
    present = None if mask is None else _per_point(mask, shape, "mask", device).bool()
    both = group if isinstance(group, tuple) else () if group is None else (group,)
    ids = [
        _per_point(x, s, "group", device) for x, s in zip(both, (shape, query_shape))
    ]
    for each in ids:
        require(not each.is_floating_point(), "group must be integer ids", each.dtype)
    _check_finite(places, present, "points")

    point_group, query_group = _dense_groups(shape, query_shape, ids, device)
    order = order_by_group(point_group)
    if present is not None:
        order = order[present.reshape(-1)[order]]
    flat_points, point_group = places.reshape(-1, num_dims)[order], point_group[order]
    if asked is None:
        query_order, flat_queries, query_group = order, flat_points, point_group
        query_self = torch.arange(order.numel(), device=device)
    else:
        query_order = order_by_group(query_group)
        flat_queries = asked.reshape(-1, num_dims)[query_order]
        query_group = query_group[query_order]
        query_self = torch.full_like(query_order, NO_SELF)
    query = NeighborQuery(
        flat_points, point_group, flat_queries, query_group, query_self
    )
    is_numpy = isinstance(points, np.ndarray)
    return FlatQuery(query, order, query_order, num_points, query_shape, is_numpy)


def _coordinates(values: Array, name: str) -> Tensor:
    tensor = _tensor(values, name)
    shaped = tensor.ndim >= 2 and tensor.shape[-1] in (2, 3)
    require(
        shaped, f"{name} must be of shape (..., N, 2) or (..., N, 3)", _describe(tensor)
    )
    real = tensor.dtype != torch.bool and not tensor.is_complex()
    require(real, f"{name} must be real numbers", tensor.dtype)
    if not tensor.is_floating_point():
        return tensor.double()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _dense_groups(
    shape: tuple[int, ...],
    query_shape: tuple[int, ...],
    ids: list[Tensor],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """One id per pair (batch element, group), for points (B*N,) and queries (B*Q,)."""
    batch = torch.arange(math.prod(shape[:-1]), device=device)
    of_points, of_queries = (
        batch.repeat_interleave(s[-1]) for s in (shape, query_shape)
    )
    if not ids:
        return of_points, of_queries
    _, dense = torch.unique(
        torch.cat([x.reshape(-1).long() for x in ids]), return_inverse=True
    )
    count = int(dense.max()) + 1 if dense.numel() else 1
    of_points = of_points * count + dense[: of_points.numel()]
    if len(ids) == 1:
        return of_points, of_points
    return of_points, of_queries * count + dense[of_points.numel() :]


def _tensor(values: Array, name: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    kind = type(values).__name__
    require(
        isinstance(values, np.ndarray),
        f"{name} must be a NumPy array or a torch tensor",
        kind,
    )
    require(values.dtype.kind in "fiub", f"{name} must be numbers", values.dtype)
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def _per_point(
    values: Array, shape: tuple[int, ...], name: str, device: torch.device
) -> Tensor:
    tensor = _tensor(values, name)
    require(
        tuple(tensor.shape) == shape,
        f"{name} must be of shape {shape}",
        tuple(tensor.shape),
    )
    return tensor.to(device)


def _check_finite(coordinates: Tensor, mask: Tensor | None, name: str) -> None:
    limit = (
        torch.finfo(coordinates.dtype).max ** 0.5 / 1e3
    )  # squares and their sum stay finite
    wrong = ~(coordinates.abs() <= limit).all(dim=-1)
    if mask is not None:
        wrong &= mask
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        got = f"{coordinates[first].tolist()} at {first}; mask it out"
        rule = f"{name} must be finite and below {limit:.0e} where present"
        raise InvalidInputError(f"{rule}, got {got}")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
