"""ALiBi's slopes: one per head, geometric."""

import math

import torch

from thinsection.errors import InvalidInputError


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Slopes (H,) float64, all > 0.

    For a power of two they are p, p², ..., p^H with p = 2^(-2^-(log2 H - 3)); otherwise those of
    the next lower power of two, followed by every second one of the next higher.

    Source: Press, Smith, Lewis, "Train Short, Test Long", 2022; the rule of its released code.
    """
    if num_heads < 1:
        raise InvalidInputError(f"num_heads must be >= 1, got {num_heads}")
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = _power_of_two(lower)
    if lower < num_heads:
        slopes += _power_of_two(2 * lower)[0::2][: num_heads - lower]
    return torch.tensor(slopes, dtype=torch.float64)


def _power_of_two(num_heads: int) -> list[float]:
    first = 2.0 ** -(2.0 ** -(math.log2(num_heads) - 3))
    return [first**power for power in range(1, num_heads + 1)]
