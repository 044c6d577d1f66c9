"""Arguments of a search, checked, as torch tensors in one flat problem, and the result put back."""

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
        self.lead = self.points.shape[:-2]
        num_points, num_dims = self.points.shape[-2:]
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= num_points:
            raise InvalidInputError(
                f"k must be an int from 1 to the {num_points} points, got {k!r}"
            )
        self.queries = None if queries is None else _coordinates(queries, "queries")
        if self.queries is not None and (
            self.queries.shape[:-2] != self.lead
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
        like, device = (*self.lead, num_points), self.points.device
        self.mask = None if mask is None else _per_point(mask, like, "mask", device).bool()
        self.group = None if pair[0] is None else _ids(pair[0], like, device)
        query_like = like if self.queries is None else tuple(self.queries.shape[:-1])
        self.query_group = None if pair[1] is None else _ids(pair[1], query_like, device)
        self.query_shape = query_like
        _check_finite(self.points, self.mask, "points")
        if self.queries is not None:
            _check_finite(self.queries, None, "queries")

    def problem(self) -> Problem:
        """The flat search, in the order of the groups."""
        num_points = self.points.shape[-2]
        num_queries = self.query_shape[-1]
        batches = self.lead.numel()
        ids, query_ids = self._group_ids(batches, num_points, num_queries)
        order = order_by_group(ids)
        if self.mask is not None:
            order = order[self.mask.reshape(-1)[order]]
        points = self.points.reshape(-1, self.points.shape[-1])[order]
        self._order, self._num_points = order, num_points
        if self.queries is None:
            self._query_order = order
            own = torch.arange(order.numel(), device=order.device)
            return Problem(
                points=points,
                point_group=ids[order],
                queries=points,
                query_group=ids[order],
                query_self=own,
            )
        self._query_order = order_by_group(query_ids)
        queries = self.queries.reshape(-1, self.queries.shape[-1])[self._query_order]
        return Problem(
            points=points,
            point_group=ids[order],
            queries=queries,
            query_group=query_ids[self._query_order],
            query_self=torch.full_like(self._query_order, NO_SELF),
        )

    def in_place(self, problem: Problem, found: Found, k: int) -> Neighbors:
        """The result in the order of the arguments; absent queries have no neighbour."""
        shape = (*self.query_shape, k)
        num_rows = int(np.prod(self.query_shape))
        device = self.points.device
        distances = found.distances.new_full((num_rows, k), torch.inf)
        indices = torch.full((num_rows, k), -1, dtype=torch.int64, device=device)
        for start in range(0, found.positions.shape[0], _ROWS):
            rows = self._query_order[start : start + _ROWS]
            distances[rows] = found.distances[start : start + _ROWS]
            position = found.positions[start : start + _ROWS]
            index = self._order[position.clamp(min=0)] % self._num_points
            indices[rows] = index.masked_fill_(position < 0, -1)
        distances, indices = distances.reshape(shape), indices.reshape(shape)
        if self.is_numpy:
            return Neighbors(distances.numpy(), indices.numpy())
        return Neighbors(distances, indices)

    def _group_ids(self, batches: int, num_points: int, num_queries: int) -> tuple[Tensor, Tensor]:
        """One id per pair (batch element, group), for points (B*N,) and queries (B*Q,)."""
        device = self.points.device
        batch = torch.arange(batches, device=device)
        of_points = batch.repeat_interleave(num_points)
        of_queries = of_points if self.queries is None else batch.repeat_interleave(num_queries)
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
