"""Nearest neighbours: check the arguments, choose an implementation once, search, put in place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from thinsection.config import nearest
from thinsection.errors import require
from thinsection.neighbors import blocks, kdtree, reference
from thinsection.neighbors.flatten import Array, Neighbors, flat_query
from thinsection.neighbors.reference import Found, NeighborQuery
from thinsection.types import MIB
from thinsection.units import format_bytes

DEFAULT_BUDGET_BYTES = 256 * MIB
Impl = Literal["auto", "blocks", "kdtree", "reference"]

# measured on one core (benchmarks/bench_neighbors.py); only their ratio decides
_SECONDS_PER_PAIR = 4e-9
_SECONDS_PER_TREE_POINT = 4e-7
_SECONDS_PER_QUERY_AND_NEIGHBOR = 3e-7

_SEARCHES: dict[str, Callable[..., Found]] = {
    "blocks": blocks.search,
    "kdtree": kdtree.search,
    "reference": reference.search,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchChoice:
    """An implementation by name and why it was taken."""

    impl: str
    reason: str

    def search(self, query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int) -> Found:
        """Runs it."""
        return _SEARCHES[self.impl](query, k, eps=eps, budget_bytes=budget_bytes)


def nearest_neighbors(
    points: Array,
    queries: Array | None = None,
    *,
    k: int,
    mask: Array | None = None,
    group: Array | tuple[Array, Array] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    impl: Impl = "auto",
) -> Neighbors:
    """The k nearest points of each query: exact, the same whatever the implementation and block.

    Distances are formed from differences, in the points' dtype (integers in float64, half types in
    float32); equal distances are ordered by the lower index. No gradient flows.

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

    Returns:
        Distances and indices, of the kind and on the device of `points`.

    Memory: N * (D * itemsize + 24) for the sorted copy, N * k * 16 for the result and as much for
        its unsorted form, plus budget_bytes at most.

    Raises:
        InvalidInputError: shapes, dtypes, k or non-finite coordinates of present points.
        BudgetError: the implementation asked for does not fit into the budget.
    """
    flat = flat_query(points, queries, k=k, mask=mask, group=group)
    choice = choose(flat.query, k, impl=impl, budget_bytes=budget_bytes)
    return flat.put(choice.search(flat.query, k, budget_bytes=budget_bytes))


def explain(
    points: Array,
    queries: Array | None = None,
    *,
    k: int,
    mask: Array | None = None,
    group: Array | tuple[Array, Array] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    impl: Impl = "auto",
) -> SearchChoice:
    """What `nearest_neighbors` of the same arguments takes, and why; it does not search."""
    query = flat_query(points, queries, k=k, mask=mask, group=group).query
    return choose(query, k, impl=impl, budget_bytes=budget_bytes)


def choose(query: NeighborQuery, k: int, *, impl: str, budget_bytes: int) -> SearchChoice:
    """The implementation for this query; never replaced later, whatever happens.

    Raises:
        InvalidInputError: no implementation has that name.
    """
    known = get_args(Impl)
    rule = f"impl must be one of {', '.join(known)}"
    require(impl in known, rule, f"{impl!r}{nearest(impl, known)}")
    if impl != "auto":
        return SearchChoice(impl=impl, reason="asked for")
    if (device := query.points.device).type != "cpu":
        return SearchChoice(impl="blocks", reason=f"points are on {device}, the tree is for a cpu")
    pairs, points, queries = query.num_pairs(), query.num_points, query.num_queries
    by_pairs = pairs * _SECONDS_PER_PAIR
    by_tree = points * _SECONDS_PER_TREE_POINT + queries * (k + 4) * _SECONDS_PER_QUERY_AND_NEIGHBOR
    estimate = f"{pairs} pairs, estimated {by_pairs:.2g} s in blocks and {by_tree:.2g} s by a tree"
    if by_pairs <= by_tree:
        return SearchChoice(impl="blocks", reason=estimate)
    tree = kdtree.least_bytes(query.points, k)
    if tree > budget_bytes:
        needs = f"needs {format_bytes(tree)} of a budget of {format_bytes(budget_bytes)}"
        return SearchChoice(impl="blocks", reason=f"{estimate}; the tree {needs}")
    return SearchChoice(impl="kdtree", reason=estimate)
