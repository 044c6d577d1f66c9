"""Which implementation, decided once from sizes, with the reason in words."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from thinsection.config import nearest
from thinsection.errors import InvalidInputError
from thinsection.neighbors import blocks, kdtree, reference
from thinsection.neighbors.problem import Found, Problem
from thinsection.units import format_bytes

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
class Choice:
    """An implementation by name and why it was taken."""

    impl: str
    reason: str

    def search(self, problem: Problem, k: int, *, eps: float = 0.0, budget_bytes: int) -> Found:
        """Runs it."""
        return _SEARCHES[self.impl](problem, k, eps=eps, budget_bytes=budget_bytes)


def choose(problem: Problem, k: int, *, impl: str, budget_bytes: int) -> Choice:
    """The implementation for this problem; never replaced later, whatever happens.

    Raises:
        InvalidInputError: no implementation has that name.
    """
    if impl not in get_args(Impl):
        hint = nearest(impl, get_args(Impl))
        raise InvalidInputError(
            f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}{hint}"
        )
    if impl != "auto":
        return Choice(impl=impl, reason="asked for")
    if problem.points.device.type != "cpu":
        return Choice(
            impl="blocks", reason=f"points are on {problem.points.device}, the tree is for a cpu"
        )
    pairs, points, queries = problem.num_pairs(), problem.num_points, problem.num_queries
    by_pairs = pairs * _SECONDS_PER_PAIR
    by_tree = points * _SECONDS_PER_TREE_POINT + queries * (k + 4) * _SECONDS_PER_QUERY_AND_NEIGHBOR
    estimate = f"{pairs} pairs, estimated {by_pairs:.2g} s in blocks and {by_tree:.2g} s by a tree"
    if by_pairs <= by_tree:
        return Choice(impl="blocks", reason=estimate)
    tree = kdtree.least_bytes(problem.points, k)
    if tree > budget_bytes:
        too_small = (
            f"the tree needs {format_bytes(tree)} of a budget of {format_bytes(budget_bytes)}"
        )
        return Choice(impl="blocks", reason=f"{estimate}; {too_small}")
    return Choice(impl="kdtree", reason=estimate)
