"""Sums of tiles, weighted by the softmax of their scores, from blocks of tiles that come in turn.

Shapes: n tiles of a block, A scores of a tile, E channels of a value.
"""

import torch
from torch import Tensor


class SoftmaxSums:
    """A weighted sum of values for each score; the weights are a softmax over all tiles.

    The result does not depend on where the blocks end, except in the last bits.

    Memory: A (E + 2) float64, whatever the number of tiles.
    Source: Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
    """

    def __init__(self) -> None:
        self._largest: Tensor | None = None  # (A,), of all scores so far
        self._weights = torch.empty(0)  # (A,), sums of exp(score - largest)
        self._sums = torch.empty(0)  # (A, E), sums of exp(score - largest) * value

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Adds a block of tiles.

        Args:
            scores: (n, A).
            values: (n, E) for all scores, or (n, A, E) with values of its own for each.
        """
        scores = scores.double()
        largest = scores.amax(0)
        if self._largest is not None:
            largest = torch.maximum(largest, self._largest)
        weights = (scores - largest).exp()
        # products in the values' own precision, their sum over blocks in float64
        of_values = weights.to(values.dtype)
        if values.ndim == 2:
            sums = (of_values.T @ values).double()
        else:
            sums = torch.einsum("na,nae->ae", of_values, values).double()
        totals = weights.sum(0)
        if self._largest is not None:
            earlier = (self._largest - largest).exp()
            totals += earlier * self._weights
            sums += earlier[:, None] * self._sums
        self._largest = largest
        self._weights = totals
        self._sums = sums

    def result(self) -> Tensor:
        """Weighted sums (A, E) float64 of all tiles so far."""
        return self._sums / self._weights[:, None]
