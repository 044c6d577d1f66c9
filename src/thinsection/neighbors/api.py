"""Nearest neighbours: check the arguments, choose an implementation, search, put in place."""

from thinsection.neighbors.arguments import Arguments, Array, Neighbors
from thinsection.neighbors.choice import Choice, Impl, choose
from thinsection.types import MIB

DEFAULT_BUDGET_BYTES = 256 * MIB


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

    Memory: N * (D * itemsize + 24) for the sorted copy, N * k * 16 for the result and
        as much for its unsorted form, plus
        budget_bytes at most.

    Raises:
        InvalidInputError: shapes, dtypes, k or non-finite coordinates of present points.
        BudgetError: the implementation asked for does not fit into the budget.
    """
    problem, placement = Arguments(points, queries, k=k, mask=mask, group=group).flatten()
    choice = choose(problem, k, impl=impl, budget_bytes=budget_bytes)
    return placement.put(choice.search(problem, k, budget_bytes=budget_bytes), k)


def explain(
    points: Array,
    queries: Array | None = None,
    *,
    k: int,
    mask: Array | None = None,
    group: Array | tuple[Array, Array] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    impl: Impl = "auto",
) -> Choice:
    """What `nearest_neighbors` of the same arguments takes, and why; it does not search."""
    problem, _ = Arguments(points, queries, k=k, mask=mask, group=group).flatten()
    return choose(problem, k, impl=impl, budget_bytes=budget_bytes)
