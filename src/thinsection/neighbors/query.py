"""One flat search out of batches, masks and groups, so that an implementation sees no special case.

Legend: P present points, Q queries, D dimensions (2 or 3), B batch elements flattened, N points of
one batch element. A *group* here is a pair (batch element, the caller's group id).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

NO_SELF = -1  # a query that is none of the points


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighborQuery:
    """Queries and points in the order of their groups; within a group in the order given.

    Attributes:
        points: (P, D) coordinates of the present points.
        point_group: (P,) int64, ascending.
        queries: (Q, D), the same dtype and device as the points.
        query_group: (Q,) int64, ascending; a query's neighbours are the points of its group.
        query_self: (Q,) int64 position of the point that the query is, or NO_SELF; it is left out.
    """

    points: Tensor
    point_group: Tensor
    queries: Tensor
    query_group: Tensor
    query_self: Tensor

    @property
    def num_points(self) -> int:
        return self.points.shape[0]

    @property
    def num_queries(self) -> int:
        return self.queries.shape[0]

    def ranges(self) -> tuple[Tensor, Tensor]:
        """First and one-past-last point of each query's group, (Q,) int64 each."""
        first = torch.searchsorted(self.point_group, self.query_group)
        last = torch.searchsorted(self.point_group, self.query_group, right=True)
        return first, last

    def num_pairs(self) -> int:
        """Pairs of a query and a point of its group: what a search without an index computes."""
        first, last = self.ranges()
        return int((last - first).sum())

    def rows(self, index: Tensor) -> "NeighborQuery":
        """The same points with some of the queries; `index` is ascending."""
        return replace(
            self,
            queries=self.queries[index],
            query_group=self.query_group[index],
            query_self=self.query_self[index],
        )


class Found(NamedTuple):
    """Neighbours (Q, k) of every query: distance ascending, ties to the lower position.

    Positions are int64 into `NeighborQuery.points`; without a further neighbour -1, at inf.
    """

    distances: Tensor
    positions: Tensor

    @classmethod
    def nothing(cls, query: NeighborQuery, k: int) -> "Found":
        """No neighbour for any query yet; distances in float32 or wider."""
        dtype = torch.promote_types(query.points.dtype, torch.float32)
        distances = query.points.new_full((query.num_queries, k), torch.inf, dtype=dtype)
        return cls(distances, torch.full_like(distances, -1, dtype=torch.int64))


def order_by_group(group: Tensor) -> Tensor:
    """Positions that bring `group` (n,) into ascending order, equal ids in the order given."""
    if group.numel() < 2 or bool((group[1:] >= group[:-1]).all()):
        return torch.arange(group.numel(), device=group.device)
    return torch.sort(group, stable=True).indices
