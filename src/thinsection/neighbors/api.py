"""Nearest neighbours: check the arguments, choose an implementation once, search."""

from dataclasses import dataclass
from typing import Literal, get_args

from thinsection.config import nearest
from thinsection.errors import InvalidInputError
from thinsection.neighbors import reference
from thinsection.neighbors.blocks import in_blocks
from thinsection.neighbors.query import Array, Groups, Neighbors, flat_query
from thinsection.neighbors.reference import Nearest, NeighborQuery
from thinsection.neighbors.tree import by_tree, least_tree_bytes
from thinsection.types import MIB, format_bytes

DEFAULT_BUDGET_BYTES = 256 * MIB
Impl = Literal["auto", "blocks", "kdtree", "reference"]

# measured on one core (benchmarks/bench_neighbors.py); only their ratio decides
_SECONDS_PER_PAIR = 4e-9
_SECONDS_PER_TREE_POINT = 4e-7
_SECONDS_PER_QUERY_AND_NEIGHBOR = 3e-7

_SEARCHES = {
    "blocks": in_blocks,
    "kdtree": by_tree,
    "reference": reference.search,
}


@dataclass(frozen=True, slots=True)
class SearchChoice:
    """An implementation by name and why it was taken."""

    impl: str
    reason: str

    def search(
        self, query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int
    ) -> Nearest:
        """The k nearest of each query by this implementation."""
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
    """The implementation that `nearest_neighbors` takes for these arguments, and why; no search."""
    query = flat_query(points, queries, k, mask, group).query
    return choose(query, k, impl=impl, budget_bytes=budget_bytes)


def choose(
    query: NeighborQuery, k: int, *, impl: str, budget_bytes: int
) -> SearchChoice:
    """The implementation for this query; never replaced later, whatever happens."""
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
