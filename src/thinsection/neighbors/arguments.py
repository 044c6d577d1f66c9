"""Arguments of a search, checked, as torch tensors in one flat problem, and the result put back."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.errors import InvalidInputError
from thinsection.neighbors.problem import NO_SELF, Found, Problem, order_by_group

_ROWS = 1 << 14  # rows put in place at a time, to keep the temporaries small

Array = Tensor | npt.NDArray[Any]


class Neighbors(NamedTuple):
    """Neighbours of each query, nearest first.

    Attributes:
        distances: (..., Q, k), inf where there is no further neighbour.
        indices: (..., Q, k) int64 into the points of the same batch element, -1 where none.
    """

    distances: Any
    indices: Any


class Arguments:
    """Checked arguments as torch tensors with one batch dimension: (B, N, D), (B, N)."""

    def __init__(
        self,
        points: Array,
        queries: Array | None,
        *,
        k: int,
        mask: Array | None,
        group: Array | tuple[Array, Array] | None,
    ) -> None:
        self.is_numpy = isinstance(points, np.ndarray)
        self.points = _coordinates(points, "points")
        lead = self.points.shape[:-2]
        num_points, num_dims = self.points.shape[-2:]
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= num_points:
            raise InvalidInputError(
                f"k must be an int from 1 to the {num_points} points, got {k!r}"
            )
        self.queries = None if queries is None else _coordinates(queries, "queries")
        if self.queries is not None and (
            self.queries.shape[:-2] != lead
            or self.queries.shape[-1] != num_dims
            or self.queries.dtype != self.points.dtype
            or self.queries.device != self.points.device
        ):
            raise InvalidInputError(
                f"queries must have the batch shape, dimensions, dtype and device of the points "
                f"{_describe(self.points)}, got {_describe(self.queries)}"
            )
        pair = group if isinstance(group, tuple) else (group, None)
        if group is not None and (queries is not None) != isinstance(group, tuple):
            raise InvalidInputError(
                "group must be a pair (of the points, of the queries) exactly when queries are "
                f"given, got {type(group).__name__}"
            )
        like, device = (*lead, num_points), self.points.device
        self.mask = None if mask is None else _per_point(mask, like, "mask", device).bool()
        self.group = None if pair[0] is None else _ids(pair[0], like, device)
        query_like = like if self.queries is None else tuple(self.queries.shape[:-1])
        self.query_group = None if pair[1] is None else _ids(pair[1], query_like, device)
        self.query_shape = query_like
        _check_finite(self.points, self.mask, "points")
        if self.queries is not None:
            _check_finite(self.queries, None, "queries")

    def flatten(self) -> tuple[Problem, "Placement"]:
        """The flat search, in the order of the groups, and where its results belong."""
        num_points, num_dims = self.points.shape[-2:]
        ids, query_ids = self._group_ids()
        order = order_by_group(ids)
        if self.mask is not None:
            order = order[self.mask.reshape(-1)[order]]
        points, point_group = self.points.reshape(-1, num_dims)[order], ids[order]
        if self.queries is None:
            query_order, queries, query_group = order, points, point_group
            query_self = torch.arange(order.numel(), device=order.device)
        else:
            query_order = order_by_group(query_ids)
            queries = self.queries.reshape(-1, num_dims)[query_order]
            query_group = query_ids[query_order]
            query_self = torch.full_like(query_order, NO_SELF)
        problem = Problem(
            points=points,
            point_group=point_group,
            queries=queries,
            query_group=query_group,
            query_self=query_self,
        )
        placement = Placement(
            point_order=order,
            query_order=query_order,
            num_points=num_points,
            query_shape=self.query_shape,
            is_numpy=self.is_numpy,
        )
        return problem, placement

    def _group_ids(self) -> tuple[Tensor, Tensor]:
        """One id per pair (batch element, group), for points (B*N,) and queries (B*Q,)."""
        batch = torch.arange(self.points.shape[:-2].numel(), device=self.points.device)
        of_points = batch.repeat_interleave(self.points.shape[-2])
        of_queries = of_points
        if self.queries is not None:
            of_queries = batch.repeat_interleave(self.queries.shape[-2])
        if self.group is None:
            return of_points, of_queries
        parts = [self.group.reshape(-1)]
        if self.query_group is not None:
            parts.append(self.query_group.reshape(-1))
        _, dense = torch.unique(torch.cat(parts), return_inverse=True)
        count = int(dense.max()) + 1 if dense.numel() else 1
        of_points = of_points * count + dense[: parts[0].numel()]
        if self.query_group is None:
            return of_points, of_points
        return of_points, of_queries * count + dense[parts[0].numel() :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """From the flat, sorted search back to the arguments' order.

    Attributes:
        point_order: (P,) flat index of each point of the problem, over batches of num_points.
        query_order: (Q,) row of the result of each query of the problem.
        num_points: points of one batch element.
        query_shape: batch dimensions and queries of the result.
        is_numpy: whether NumPy arrays go back.
    """

    point_order: Tensor
    query_order: Tensor
    num_points: int
    query_shape: tuple[int, ...]
    is_numpy: bool

    def put(self, found: Found, k: int) -> Neighbors:
        """The result in the order of the arguments; absent queries have no neighbour."""
        num_rows = math.prod(self.query_shape)
        distances = found.distances.new_full((num_rows, k), torch.inf)
        indices = found.positions.new_full((num_rows, k), -1)
        for start in range(0, found.positions.shape[0], _ROWS):
            rows = self.query_order[start : start + _ROWS]
            distances[rows] = found.distances[start : start + _ROWS]
            position = found.positions[start : start + _ROWS]
            if self.point_order.numel():
                index = self.point_order[position.clamp(min=0)] % self.num_points
                indices[rows] = index.masked_fill_(position < 0, -1)
        distances = distances.reshape(*self.query_shape, k)
        indices = indices.reshape(*self.query_shape, k)
        if self.is_numpy:
            return Neighbors(distances.numpy(), indices.numpy())
        return Neighbors(distances, indices)


def _coordinates(values: Array, name: str) -> Tensor:
    tensor = _tensor(values, name)
    if tensor.ndim < 2 or tensor.shape[-1] not in (2, 3):
        raise InvalidInputError(
            f"{name} must be of shape (..., N, 2) or (..., N, 3), got {_describe(tensor)}"
        )
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise InvalidInputError(f"{name} must be real numbers, got {tensor.dtype}")
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
        raise InvalidInputError(f"{name} must be numbers, got {values.dtype}")
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def _per_point(values: Array, shape: tuple[int, ...], name: str, device: torch.device) -> Tensor:
    tensor = _tensor(values, name)
    if tuple(tensor.shape) != shape:
        raise InvalidInputError(f"{name} must be of shape {shape}, got {tuple(tensor.shape)}")
    return tensor.to(device)


def _ids(values: Array, shape: tuple[int, ...], device: torch.device) -> Tensor:
    ids = _per_point(values, shape, "group", device)
    if ids.is_floating_point():
        raise InvalidInputError(f"group must be integer ids, got {ids.dtype}")
    return ids.to(torch.int64)


def _check_finite(coordinates: Tensor, mask: Tensor | None, name: str) -> None:
    limit = torch.finfo(coordinates.dtype).max ** 0.5 / 1e3  # squares and their sum stay finite
    wrong = ~(coordinates.abs() <= limit).all(dim=-1)
    if mask is not None:
        wrong &= mask
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        raise InvalidInputError(
            f"{name} must be finite and below {limit:.0e} where present, got "
            f"{coordinates[first].tolist()} at {first}; mask it out"
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
