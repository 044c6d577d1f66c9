"""Arguments of a search, checked, as one flat query of torch tensors, and the result put back."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.errors import InvalidInputError
from thinsection.neighbors.query import NO_SELF, Found, NeighborQuery, order_by_group

_ROWS = 1 << 14  # rows put in place at a time, to keep the temporaries small

Array = Tensor | npt.NDArray[Any]


class Neighbors(NamedTuple):
    """Neighbours (..., Q, k) of each query, nearest first.

    Indices are int64 into the points of the same batch element; -1, at inf, where there is none.
    """

    distances: Any
    indices: Any


def flat_query(
    points: Array,
    queries: Array | None,
    *,
    k: int,
    mask: Array | None,
    group: Array | tuple[Array, Array] | None,
) -> tuple[NeighborQuery, Callable[[Found], Neighbors]]:
    """The search over all batch elements and groups at once, and what puts its result in place.

    Raises:
        InvalidInputError: as `nearest_neighbors`.
    """
    places = _coordinates(points, "points")
    (*lead, num_points, num_dims), device = places.shape, places.device
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= num_points:
        raise InvalidInputError(f"k must be an int from 1 to the {num_points} points, got {k!r}")
    asked = None if queries is None else _queries(queries, places)
    if group is not None and (queries is not None) != isinstance(group, tuple):
        rule = "a pair (of the points, of the queries) exactly when queries are given"
        raise InvalidInputError(f"group must be {rule}, got {type(group).__name__}")
    shape = (*lead, num_points)
    query_shape = shape if asked is None else tuple(asked.shape[:-1])
    present = None if mask is None else _per_point(mask, shape, "mask", device).bool()
    both = group if isinstance(group, tuple) else () if group is None else (group,)
    shapes = (shape, query_shape)[: len(both)]
    ids = [_ids(x, s, device) for x, s in zip(both, shapes)]
    _check_finite(places, present, "points")

    point_group, query_group = _dense_groups(shape, query_shape, ids, device)
    order = order_by_group(point_group)
    if present is not None:
        order = order[present.reshape(-1)[order]]
    flat_points, point_group = places.reshape(-1, num_dims)[order], point_group[order]
    if asked is None:
        query_order, flat_queries, query_group = order, flat_points, point_group
        query_self = torch.arange(order.numel(), device=device)
    else:
        query_order = order_by_group(query_group)
        flat_queries = asked.reshape(-1, num_dims)[query_order]
        query_group = query_group[query_order]
        query_self = torch.full_like(query_order, NO_SELF)
    query = NeighborQuery(
        points=flat_points,
        point_group=point_group,
        queries=flat_queries,
        query_group=query_group,
        query_self=query_self,
    )
    return query, partial(
        _put,
        point_order=order,
        query_order=query_order,
        num_points=num_points,
        query_shape=query_shape,
        is_numpy=isinstance(points, np.ndarray),
    )


def _put(
    found: Found,
    *,
    point_order: Tensor,
    query_order: Tensor,
    num_points: int,
    query_shape: tuple[int, ...],
    is_numpy: bool,
) -> Neighbors:
    """The result in the order of the arguments; absent queries have no neighbour.

    `point_order` (P,) is the flat index of each point of the query, over batches of num_points,
    `query_order` (Q,) the row of the result of each of its queries.
    """
    shape = (math.prod(query_shape), found.positions.shape[1])
    distances = found.distances.new_full(shape, torch.inf)
    indices = found.positions.new_full(shape, -1)
    for start in range(0, len(query_order), _ROWS):
        rows = query_order[start : start + _ROWS]
        distances[rows] = found.distances[start : start + _ROWS]
        position = found.positions[start : start + _ROWS]
        if point_order.numel():
            index = point_order[position.clamp(min=0)] % num_points
            indices[rows] = index.masked_fill_(position < 0, -1)
    both = [x.reshape(*query_shape, shape[1]) for x in (distances, indices)]
    return Neighbors(*(x.numpy() if is_numpy else x for x in both))


def _coordinates(values: Array, name: str) -> Tensor:
    tensor = _tensor(values, name)
    if tensor.ndim < 2 or tensor.shape[-1] not in (2, 3):
        shapes = "(..., N, 2) or (..., N, 3)"
        raise InvalidInputError(f"{name} must be of shape {shapes}, got {_describe(tensor)}")
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise InvalidInputError(f"{name} must be real numbers, got {tensor.dtype}")
    if not tensor.is_floating_point():
        return tensor.double()
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _queries(values: Array, points: Tensor) -> Tensor:
    queries = _coordinates(values, "queries")
    same = (points.dtype, points.device, points.shape[:-2], points.shape[-1])
    if (queries.dtype, queries.device, queries.shape[:-2], queries.shape[-1]) != same:
        rule = "have the batch shape, dimensions, dtype and device of the points"
        got = f"{_describe(points)}, got {_describe(queries)}"
        raise InvalidInputError(f"queries must {rule} {got}")
    _check_finite(queries, None, "queries")
    return queries


def _dense_groups(
    shape: tuple[int, ...], query_shape: tuple[int, ...], ids: list[Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """One id per pair (batch element, group), for points (B*N,) and queries (B*Q,).

    `ids` of the points, and of the queries where they have their own.
    """
    batch = torch.arange(math.prod(shape[:-1]), device=device)
    of_points, of_queries = (batch.repeat_interleave(s[-1]) for s in (shape, query_shape))
    if not ids:
        return of_points, of_queries
    _, dense = torch.unique(torch.cat([x.reshape(-1) for x in ids]), return_inverse=True)
    count = int(dense.max()) + 1 if dense.numel() else 1
    of_points = of_points * count + dense[: of_points.numel()]
    if len(ids) == 1:
        return of_points, of_points
    return of_points, of_queries * count + dense[of_points.numel() :]


def _tensor(values: Array, name: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    if not isinstance(values, np.ndarray):
        kind = type(values).__name__
        raise InvalidInputError(f"{name} must be a NumPy array or a torch tensor, got {kind}")
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
        got = f"{coordinates[first].tolist()} at {first}; mask it out"
        rule = f"finite and below {limit:.0e} where present"
        raise InvalidInputError(f"{name} must be {rule}, got {got}")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
