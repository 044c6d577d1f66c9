"""Reference implementation: a flat query, a search over every pair, and the distances.

|a|^2 + |b|^2 - 2ab loses the digits that decide which of two close points is nearer. Therefore
distances are d = sqrt(((eps + dx*dx) + (eps + dy*dy)) + (eps + dz*dz)), with each operation rounded
to the dtype of the coordinates; terms in bfloat16 and float16 are summed in float32 and rounded
once, as in torch.sum. All implementations use these distances, so that they agree to the bit.

Legend: P present points, Q queries, D dimensions (2 or 3), over all batch elements.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from thinsection.errors import BudgetError
from thinsection.types import format_bytes

_HALF_DTYPES = (torch.bfloat16, torch.float16)
NO_SELF = -1  # for a query that is not one of the points


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighborQuery:
    """Queries and points, sorted by group; within a group their order is kept.

    A *group* is a pair (batch element, the caller's group id), so searches need no special cases.
    """

    points: Tensor  # (P, D) coordinates of the present points
    point_group: Tensor  # (P,) int64, ascending
    queries: Tensor  # (Q, D), the same dtype and device as the points
    query_group: (
        Tensor  # (Q,) int64, ascending; neighbours are points of the same group
    )
    query_self: (
        Tensor  # (Q,) int64 position of the point that it is, left out, or NO_SELF
    )

    def ranges(self) -> tuple[Tensor, Tensor]:
        """First and one-past-last point of each query's group, (Q,) int64 each."""
        first = torch.searchsorted(self.point_group, self.query_group)
        last = torch.searchsorted(self.point_group, self.query_group, right=True)
        return first, last

    def rows(self, index: Tensor) -> "NeighborQuery":
        """The same points with only some of the queries; `index` is ascending."""
        return replace(
            self,
            queries=self.queries[index],
            query_group=self.query_group[index],
            query_self=self.query_self[index],
        )


class Nearest(NamedTuple):
    """Neighbours (Q, k) of every query, in ascending distance; ties go to the lower position."""

    distances: Tensor
    # int64 into `NeighborQuery.points`; -1, at inf, if there are no more neighbours
    positions: Tensor

    @classmethod
    def none_yet(cls, query: NeighborQuery, k: int) -> "Nearest":
        """Empty result: no neighbours for any query; distances in float32 or wider."""
        shape = (len(query.queries), k)
        dtype = torch.promote_types(query.points.dtype, torch.float32)
        distances = query.points.new_full(shape, torch.inf, dtype=dtype)
        return cls(distances, torch.full_like(distances, -1, dtype=torch.int64))


def order_by_group(group: Tensor) -> Tensor:
    """Positions that sort `group` (n,) in ascending order; equal ids keep their order."""
    if group.numel() < 2 or bool((group[1:] >= group[:-1]).all()):
        return torch.arange(group.numel(), device=group.device)
    return torch.sort(group, stable=True).indices


def distances_between(a: Tensor, b: Tensor, *, eps: float = 0.0) -> Tensor:
    """Distances of broadcast coordinates (..., D), D >= 2; (R, 1, D) and (C, D) give all pairs.

    For half types the result is float32.

    Memory: two arrays of the result's size.
    """
    is_half = a.dtype in _HALF_DTYPES
    total: Tensor | None = None
    for axis in range(a.shape[-1]):
        term = (a[..., axis] - b[..., axis]).square_()
        if eps:
            term.add_(eps)
        if is_half:
            term = term.float()
        total = term if total is None else total.add_(term)
    assert total is not None
    if is_half:
        return total.to(a.dtype).pow_(0.5).float()
    return total.pow_(0.5)


def relative_error(dtype: torch.dtype) -> float:
    """Bound on the relative rounding error of the distances in this module."""
    # the square has six roundings (difference twice, square, eps, two sums), which the root halves,
    # and the root rounds once more: 4 units of half an epsilon, doubled for safety
    return 4 * torch.finfo(dtype).eps


def search(
    query: NeighborQuery, k: int, *, eps: float = 0.0, budget_bytes: int
) -> Nearest:
    """The k nearest points in each query's group. Memory: Q P (2 D + 6) numbers, in the budget."""
    num_queries = len(query.queries)
    num_points, num_dims = query.points.shape
    numbers = num_queries * num_points * (2 * num_dims + 6)
    needed = numbers * max(4, query.points.element_size())
    if needed > budget_bytes:
        raise BudgetError(
            f"impl 'reference' needs {format_bytes(needed)} for {num_queries} queries and "
            f"{num_points} points, the budget is {format_bytes(budget_bytes)}; use 'blocks'"
        )
    difference = query.queries[:, None, :] - query.points[None, :, :]
    distances = torch.sum(eps + difference**2, dim=-1) ** 0.5
    distances = distances.to(torch.promote_types(distances.dtype, torch.float32))
    all_positions = torch.arange(num_points, device=distances.device)
    other_group = query.query_group[:, None] != query.point_group[None, :]
    itself = query.query_self[:, None] == all_positions
    distances[other_group | itself] = torch.inf
    missing = (0, max(0, k - num_points))
    distances = torch.nn.functional.pad(distances, missing, value=torch.inf)
    # a stable sort gives ties to the lower position
    distances, positions = torch.sort(distances, dim=1, stable=True)
    distances = distances[:, :k]
    positions = positions[:, :k].masked_fill(distances.isinf(), -1)
    return Nearest(distances=distances, positions=positions)
