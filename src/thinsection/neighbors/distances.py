"""Euclidean distances from differences, with one order of operations whatever the block.

|a|^2 + |b|^2 - 2ab loses the digits that decide which of two near points is nearer; a difference
of coordinates loses none. Every implementation takes its distances from here, so that they agree
to the bit: d = sqrt(((eps + dx*dx) + (eps + dy*dy)) + (eps + dz*dz)), each operation rounded to the
coordinates' dtype; bfloat16 and float16 terms are summed in float32 and rounded once, as torch.sum
does.
The root is torch's pow(0.5): it may be off by a unit in the last place (numpy's is not), but it is
a function of the number alone, not of its place in memory.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def pair_distances(queries: Tensor, points: Tensor, *, eps: float = 0.0) -> Tensor:
    """Distances of all pairs, (R, C), of queries (R, D) and points (C, D); half types as float32.

    Memory: two (R, C) arrays.
    """
    return _from_axes(
        (queries[:, axis, None] - points[None, :, axis] for axis in range(queries.shape[1])), eps
    )


def candidate_distances(queries: Tensor, candidates: Tensor, *, eps: float = 0.0) -> Tensor:
    """Distances (R, m) of each query (R, D) to its own candidates (R, m, D); half as float32."""
    return _from_axes(
        (queries[:, axis, None] - candidates[:, :, axis] for axis in range(queries.shape[1])), eps
    )


def relative_error(dtype: torch.dtype) -> float:
    """Bound on the relative rounding error of a distance of this module.

    Six roundings of the square (difference twice, square, eps, two sums) halve under the root, and
    the root rounds once more: 4 units of half an epsilon; doubled for safety.
    """
    return 4 * torch.finfo(dtype).eps


def _from_axes(differences: Iterable[Tensor], eps: float) -> Tensor:
    total: Tensor | None = None
    dtype = torch.float32
    for difference in differences:
        dtype = difference.dtype
        term = difference.square_()
        if eps:
            term.add_(eps)
        if total is None:
            total = term.float() if dtype in _HALF else term
        else:
            total += term
    assert total is not None  # D >= 2
    if dtype in _HALF:
        return total.to(dtype).pow_(0.5).float()
    return total.pow_(0.5)
