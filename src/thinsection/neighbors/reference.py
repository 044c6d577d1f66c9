"""The executable specification of the search: every pair, in plain steps. Float64-able, O(N^2)."""

import torch

from thinsection.errors import BudgetError
from thinsection.neighbors.query import Found, NeighborQuery
from thinsection.units import format_bytes


def search(query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int) -> Found:
    """The k nearest points of each query's own group.

    Memory: Q * P * (2 D + 6) numbers of the points' dtype; checked against budget_bytes.

    Raises:
        BudgetError: the pairs do not fit into the budget.
    """
    num_queries, num_points = query.num_queries, query.num_points
    numbers = num_queries * num_points * (2 * query.points.shape[1] + 6)
    need = numbers * max(4, query.points.element_size())
    if need > budget_bytes:
        raise BudgetError(
            f"impl 'reference' needs {format_bytes(need)} for {num_queries} queries and "
            f"{num_points} points, the budget is {format_bytes(budget_bytes)}; use 'blocks'"
        )
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
