"""Usual embeddings: the largest distance from the training cases that still counts as similar.

Shapes: n training cases, D channels, R axes. Source: Ledoit and Wolf, "A well-conditioned estimator
for large-dimensional covariance matrices", 2004.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from thinsection.errors import InvalidInputError
from thinsection.types import Floats, Reals

BLOCK = 1024  # cases that are processed together


@dataclass(frozen=True)
class Usual:
    """Mean embeddings (D,) of the training cases: mean, covariance and largest usual distance.

    The covariance is Ledoit and Wolf's shrinkage estimate, stored as R axes and their variances. In
    all other directions the variance is `floor`.
    """

    mean: Floats  # (D,)
    axes: Floats  # (R, D), orthonormal
    variances: Floats  # (R,)
    floor: float
    # 99 % of the training cases are nearer than this to the other training cases
    threshold: float
    within: Floats  # (R,) variance of the tiles of one case along each axis
    within_floor: float  # variance of the tiles of one case in any other direction
    num_tiles: float  # tiles per training case, harmonic mean

    @classmethod
    def of(
        cls,
        means: Reals,
        residuals: Iterable[Reals] = (),
        num_tiles: Sequence[float] = (),
    ) -> "Usual":
        """Usual embeddings from the training cases.

        Args:
            means: mean embedding of each case, (n, D), n >= 3.
            residuals: some tiles of each case minus the mean of the case, (tiles, D).
            num_tiles: tiles of each case.

        Memory: 32 D² bytes.
        """
        n, dim = means.shape
        if n < 3:
            raise InvalidInputError(f"training cases must be at least 3, got {n}")
        mean = means.mean(0, dtype=np.float64)

        def by_block(values: Callable[[Floats], Floats]) -> Iterator[Floats]:
            for first in range(0, n, BLOCK):
                yield values(means[first : first + BLOCK] - mean)

        if n > dim:
            products = by_block(lambda z: z.T @ z)
            squares, columns = np.linalg.eigh(reduce(np.add, products))
            squares = squares[::-1].clip(0)
            axes = np.ascontiguousarray(columns.T[::-1])
        else:
            _, singular, axes = np.linalg.svd(means - mean, full_matrices=False)
            squares = singular**2
        variances = squares / n
        lengths = np.concatenate([*by_block(lambda z: (z**2).sum(1))])
        shrink, floor = _shrinkage(lengths, variances, mean)
        # Distance of each case from the other cases. Without the case, the covariance is a rank-one
        # update (Sherman-Morrison).
        variances_of_others = (1 - shrink) * n / (n - 1) * variances + floor
        q = np.concatenate(
            [*by_block(lambda z: ((z @ axes.T) ** 2 / variances_of_others).sum(1))]
        )
        b = (1 - shrink) * n / (n - 1) ** 2
        distances = n / (n - 1) * np.sqrt(q / np.maximum(1 - b * q, 1e-9))
        within, within_floor = _tile_variance(residuals, axes)
        usual_tiles = 1.0
        if num_tiles:
            usual_tiles = 1 / float(np.mean([1 / count for count in num_tiles]))
        return cls(
            mean=mean,
            axes=axes,
            variances=(1 - shrink) * variances + floor,
            floor=floor,
            threshold=float(np.quantile(distances, 0.99)),
            within=within,
            within_floor=within_floor,
            num_tiles=usual_tiles,
        )

    @property
    def center(self) -> Floats:
        """Mean in float32, as a model file stores it; sketches are relative to it."""
        return self.mean.astype(np.float32).astype(np.float64)

    def distance(self, embedding: Reals, num_tiles: float | None = None) -> float:
        """Mahalanobis distance of a mean embedding (D,) of `num_tiles` tiles (None: as usual).

        The mean of fewer tiles than usual varies more: by the variance of a case's tiles times
        1 / tiles - 1 / usual tiles.
        """
        extra = max(0.0, 1 / (num_tiles or self.num_tiles) - 1 / self.num_tiles)
        z = embedding - self.mean
        along = (self.axes @ z) ** 2
        beyond = 0.0  # squared length outside the axes
        if len(self.axes) < len(z):
            beyond = max(0.0, float(z @ z - along.sum()))
        variances = self.variances + extra * self.within
        floor = self.floor + extra * self.within_floor
        return float(np.sqrt((along / variances).sum() + beyond / floor))


def _shrinkage(lengths: Floats, variances: Floats, mean: Floats) -> tuple[float, float]:
    """Ledoit and Wolf's shrinkage, and the variance that it adds in every direction.

    Args:
        lengths: squared length of each case minus the mean, (n,).
        variances: variances of the cases along the axes.
        mean: (D,).
    """
    n = len(lengths)
    dim = len(mean)
    level = variances.sum() / dim
    square = (variances**2).sum()
    spread = ((lengths**2).sum() / n - square) / n
    shrink = min(1.0, spread / max(square - dim * level**2, 1e-300))
    # equal cases differ only by float32 rounding; a lower bound keeps distances finite
    rounding = (np.finfo(np.float32).eps * np.abs(mean).max()) ** 2
    floor = float(max(shrink * level, 1e-9 * level, rounding, 1e-30))
    return shrink, floor


def _tile_variance(residuals: Iterable[Reals], axes: Floats) -> tuple[Floats, float]:
    """Variance of a case's tiles along axes (R, D), and in all other directions."""
    rank, dim = axes.shape
    along = np.zeros(rank)
    beyond = 0.0
    degrees = 0
    for tiles in residuals:
        projected = ((tiles @ axes.T) ** 2).sum(axis=0)
        along += projected
        beyond += max(0.0, float((tiles**2).sum() - projected.sum()))
        degrees += len(tiles) - 1
    degrees = max(1, degrees)
    return along / degrees, beyond / degrees / max(1, dim - rank)
