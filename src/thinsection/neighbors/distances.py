"""Euclidean distances from differences, with one order of operations whatever the block.

|a|^2 + |b|^2 - 2ab loses the digits that decide which of two near points is nearer; a difference
of coordinates loses none. Every implementation takes its distances from here, so that they agree
to the bit: d = sqrt(((eps + dx*dx) + (eps + dy*dy)) + (eps + dz*dz)), each operation rounded to the
coordinates' dtype; bfloat16 and float16 terms are summed in float32 and rounded once, as torch.sum
does.
The root is torch's pow(0.5): it may be off by a unit in the last place (numpy's is not), but it is
a function of the number alone, not of its place in memory.
"""

import torch
from torch import Tensor

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
