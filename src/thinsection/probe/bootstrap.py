"""Bootstrap confidence intervals: seeded, vectorised over the draws.

A resample of n rows with replacement is a multinomial count per row. For metrics of a confusion
matrix the counts per cell are enough (the cells of a resample are multinomial too), so that the
cost does not depend on n at all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.types import MIB

DRAWS = 2000
LEVEL = 0.95
BLOCK_BYTES = 64 * MIB  # of row weights at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A percentile interval.

    Attributes:
        low, high: its ends.
        level: its coverage, 0.95 for 95 %.
        draws: resamples that gave a number (a draw without a class gives no AUROC).
        seed: of the resamples.
    """

    low: float
    high: float
    level: float
    draws: int
    seed: int


def bootstrap_counts(
    counts: npt.NDArray[np.int64],
    score: Callable[[npt.NDArray], npt.NDArray[np.float64]],
    *,
    seed: int,
    draws: int = DRAWS,
) -> Interval:
    """Interval of a score of a confusion matrix.

    Args:
        counts: (K, K) counts.
        score: maps (B, K, K) to (B,).
        seed: of the resamples.
        draws: number of resamples.

    Memory: about 8 B K² bytes, B = draws.
    """
    total, cells = int(counts.sum()), counts.ravel()
    resampled = np.random.default_rng(seed).multinomial(total, cells / total, size=draws)
    return _interval(score(resampled.reshape(draws, *counts.shape)), seed)


def bootstrap_rows(
    num_rows: int,
    score: Callable[[npt.NDArray], npt.NDArray[np.float64]],
    *,
    seed: int,
    draws: int = DRAWS,
) -> Interval:
    """Interval of a score that takes row weights.

    Args:
        num_rows: rows that are resampled.
        score: maps weights (B, N), how often each row was drawn, to (B,).
        seed: of the resamples; the result does not depend on the block size.
        draws: number of resamples.

    Memory: BLOCK_BYTES of weights plus what `score` makes of them.
    """
    rng = np.random.default_rng(seed)
    block = max(1, BLOCK_BYTES // (8 * max(1, num_rows)))
    values = []
    for start in range(0, draws, block):
        size = min(block, draws - start)
        weights = np.stack(
            [
                np.bincount(rng.integers(0, num_rows, num_rows), minlength=num_rows)
                for _ in range(size)
            ]
        )
        values.append(score(weights))
    return _interval(np.concatenate(values), seed)


def _interval(values: npt.NDArray[np.float64], seed: int) -> Interval:
    finite = values[np.isfinite(values)]
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(finite, [tail, 100 - tail]) if len(finite) else (np.nan, np.nan)
    return Interval(low=float(low), high=float(high), level=LEVEL, draws=len(finite), seed=seed)
