"""Folds exactly as the suites draw them, and bootstrap confidence intervals, seeded.

A resample of n rows with replacement is a multinomial count per row. For metrics of a confusion
matrix the counts per cell are enough (the cells of a resample are multinomial too), so that the
cost does not depend on n at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.types import MIB

IndexArray = npt.NDArray[np.int64]
Fold = tuple[IndexArray, IndexArray]  # indices of the training and of the validation rows

DRAWS = 2000
LEVEL = 0.95
BLOCK_BYTES = 64 * MIB  # of row weights at a time


def stratified_folds(
    labels: npt.ArrayLike,
    *,
    folds: int = 3,
    seed: int = 1337,
    class_names: Sequence[str] | None = None,
) -> list[Fold]:
    """Stratified, shuffled folds: StratifiedKFold(folds, shuffle, random_state=seed).

    Args:
        labels: one a row.
        folds: how many.
        seed: of the shuffle.
        class_names: what the labels 0..K-1 stand for, for the error.

    Raises:
        InvalidInputError: a class has fewer rows than there are folds.
    """
    from sklearn.model_selection import StratifiedKFold

    labels = np.asarray(labels)
    _check_class_sizes(labels, folds, class_names)
    splitter = StratifiedKFold(n_splits=folds, shuffle=True, random_state=seed)
    return [_int64(fold) for fold in splitter.split(np.zeros(len(labels)), labels)]


def grouped_folds(
    labels: npt.ArrayLike, groups: Sequence[str], *, folds: int = 3, seed: int = 1337
) -> list[Fold]:
    """Folds that keep a group (patient, slide) whole, stratified as well as that allows.

    Raises:
        InvalidInputError: fewer groups than folds, or lengths differ.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    labels = np.asarray(labels)
    if len(groups) != len(labels):
        raise InvalidInputError(
            f"groups must have one entry a row, got {len(groups)} for {len(labels)} rows"
        )
    if len(set(groups)) < folds:
        raise InvalidInputError(
            f"groups must be at least {folds} for {folds} folds, got {len(set(groups))}"
        )
    splitter = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    parts = splitter.split(np.zeros(len(labels)), labels, groups=np.asarray(groups))
    return [_int64(fold) for fold in parts]


def shuffled_folds(n: int, *, folds: int = 3, seed: int = 1337) -> list[Fold]:
    """arange(n) shuffled by default_rng(seed), cut by array_split; each part validates once.

    Raises:
        InvalidInputError: n < folds.
    """
    if n < folds:
        raise InvalidInputError(f"n must be >= {folds} for {folds} folds, got {n}")
    order = np.arange(n)
    np.random.default_rng(seed).shuffle(order)
    parts = np.array_split(order, folds)
    return [
        _int64((np.concatenate([p for j, p in enumerate(parts) if j != i]), part))
        for i, part in enumerate(parts)
    ]


def _check_class_sizes(labels: npt.NDArray, folds: int, class_names: Sequence[str] | None) -> None:
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) and counts.min() < folds:
        smallest = classes[counts.argmin()]
        name = smallest if class_names is None else class_names[smallest]
        raise InvalidInputError(
            f"each class must have >= {folds} rows for {folds} folds, "
            f"got {counts.min()} of class {str(name)!r}"
        )


def _int64(fold: tuple[npt.NDArray, npt.NDArray]) -> Fold:
    return fold[0].astype(np.int64), fold[1].astype(np.int64)


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
