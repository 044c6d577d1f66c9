"""The executable specification of the search: every pair, in plain steps; and the distances of all.

|a|^2 + |b|^2 - 2ab loses the digits that decide which of two near points is nearer; a difference
of coordinates loses none. Every implementation takes its distances from here, so that they agree
to the bit: d = sqrt(((eps + dx*dx) + (eps + dy*dy)) + (eps + dz*dz)), each operation rounded to the
coordinates' dtype; bfloat16 and float16 terms are summed in float32 and rounded once, as torch.sum
does. The root is torch's pow(0.5): it may be off by a unit in the last place (numpy's is not), but
it is a function of the number alone, not of its place in memory.
"""

import torch
from torch import Tensor

from thinsection.errors import BudgetError
from thinsection.neighbors.query import Found, NeighborQuery
from thinsection.units import format_bytes

_HALF = (torch.bfloat16, torch.float16)


def distances_between(a: Tensor, b: Tensor, *, eps: float = 0.0) -> Tensor:
    """Distances of broadcast coordinates (..., D), D >= 2: all pairs are of (R, 1, D) and (C, D).

    Half types come back as float32.

    Memory: two arrays of the result's size.
    """
    total: Tensor | None = None
    for axis in range(a.shape[-1]):
        term = (a[..., axis] - b[..., axis]).square_()
        if eps:
            term.add_(eps)
        if total is None:
            total = term.float() if term.dtype in _HALF else term
        else:
            total += term
    assert total is not None
    if a.dtype in _HALF:
        return total.to(a.dtype).pow_(0.5).float()
    return total.pow_(0.5)


def relative_error(dtype: torch.dtype) -> float:
    """Bound on the relative rounding error of a distance of this module.

    Six roundings of the square (difference twice, square, eps, two sums) halve under the root, and
    the root rounds once more: 4 units of half an epsilon; doubled for safety.
    """
    return 4 * torch.finfo(dtype).eps


def search(query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int) -> Found:
    """The k nearest points of each query's own group.

    Memory: Q * P * (2 D + 6) numbers of the points' dtype; checked against budget_bytes.

    Raises:
        BudgetError: the pairs do not fit into the budget.
    """
    num_points = query.num_points
    numbers = query.num_queries * num_points * (2 * query.points.shape[1] + 6)
    need = numbers * max(4, query.points.element_size())
    if need > budget_bytes:
        needs = f"{format_bytes(need)} for {query.num_queries} queries and {num_points} points"
        budget = format_bytes(budget_bytes)
        raise BudgetError(f"impl 'reference' needs {needs}, the budget is {budget}; use 'blocks'")
    difference = query.queries[:, None, :] - query.points[None, :, :]
    distance = torch.sum(eps + difference**2, dim=-1) ** 0.5
    distance = distance.to(torch.promote_types(distance.dtype, torch.float32))

    other_group = query.query_group[:, None] != query.point_group[None, :]
    itself = query.query_self[:, None] == torch.arange(num_points, device=distance.device)
    distance[other_group | itself] = torch.inf

    missing = max(0, k - num_points)
    distance = torch.nn.functional.pad(distance, (0, missing), value=torch.inf)
    distance, position = torch.sort(distance, dim=1, stable=True)  # ties: the lower position first
    distance, position = distance[:, :k], position[:, :k]
    return Found(distances=distance, positions=position.masked_fill(distance.isinf(), -1))
