"""Checks of other people's modules before our arithmetic takes their place."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinsection.errors import RescueError

_TOLERANCE_LOW_PRECISION = 0.03


def check_signature(function: Callable[..., Any], expected: str, name: str) -> None:
    """Raise RescueError where the parameters of `function` are not these."""
    parameters = ", ".join(inspect.signature(function).parameters)
    if parameters != expected:
        raise RescueError(
            f"{name} must have the parameters ({expected}), got ({parameters})"
        )


def check_attributes(owner: object, names: tuple[str, ...], what: str) -> None:
    """Raise RescueError where `owner` does not have all these attributes."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise RescueError(f"{what} must have {', '.join(missing)}, got {type(owner)}")


def check_equal(
    theirs: Tensor, ours: Tensor, *, tolerance_fp32: float, what: str
) -> None:
    """Raise RescueError where two results differ by more than rounding, or are not numbers."""
    scale = float(theirs.abs().max())
    worst = float((theirs - ours).abs().max())
    is_fp32 = theirs.dtype == torch.float32
    tolerance = tolerance_fp32 if is_fp32 else _TOLERANCE_LOW_PRECISION
    # a difference that is NaN has to be refused too
    is_close = worst <= tolerance * max(scale, 1e-6)
    if not is_close:
        raise RescueError(
            f"{what}, got a difference of {worst:.2g} at values of {scale:.2g}; "
            "it may be another revision"
        )
