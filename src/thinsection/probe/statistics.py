"""Folds exactly as the suites draw them, and bootstrap confidence intervals, seeded.

A resample of n rows with replacement is a multinomial count per row. For metrics of a confusion
matrix the counts per cell are enough (the cells of a resample are multinomial too), so that the
cost does not depend on n at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.types import MIB

IndexArray = npt.NDArray[np.int64]
Fold = tuple[IndexArray, IndexArray]  # indices of the training and of the validation rows
Scorer = Callable[[npt.NDArray], npt.NDArray[np.float64]]  # of B resamples at once, (B,)

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

    Raises:
        InvalidInputError: a class has fewer rows than there are folds; by its name in
            `class_names`, where these are given.
    """
    from sklearn.model_selection import StratifiedKFold

    labels = np.asarray(labels)
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) and counts.min() < folds:
        smallest = classes[counts.argmin()]
        name = smallest if class_names is None else class_names[smallest]
        raise InvalidInputError(
            f"each class must have >= {folds} rows for {folds} folds, "
            f"got {counts.min()} of class {str(name)!r}"
        )
    splitter = StratifiedKFold(n_splits=folds, shuffle=True, random_state=seed)
    return list(splitter.split(np.zeros(len(labels)), labels))


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
    return list(splitter.split(np.zeros(len(labels)), labels, groups=np.asarray(groups)))


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
    return [(np.concatenate([*parts[:i], *parts[i + 1 :]]), part) for i, part in enumerate(parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A percentile interval."""

    low: float
    high: float
    level: float  # its coverage, 0.95 for 95 %
    draws: int  # resamples that gave a number (a draw without a class gives no AUROC)
    seed: int  # of the resamples


def bootstrap_counts(counts: npt.NDArray[np.int64], score: Scorer, *, seed: int) -> Interval:
    """Interval of a score that maps confusion matrices (B, K, K) to (B,).

    Memory: about 8 DRAWS K² bytes.
    """
    total, cells = int(counts.sum()), counts.ravel()
    resampled = np.random.default_rng(seed).multinomial(total, cells / total, size=DRAWS)
    return _interval(score(resampled.reshape(DRAWS, *counts.shape)), seed)


def bootstrap_rows(num_rows: int, score: Scorer, *, seed: int) -> Interval:
    """Interval of a score that maps weights (B, N), how often each row was drawn, to (B,).

    The result does not depend on the block size.

    Memory: BLOCK_BYTES of weights plus what `score` makes of them.
    """
    rng = np.random.default_rng(seed)
    block = max(1, BLOCK_BYTES // (8 * max(1, num_rows)))

    def weights() -> npt.NDArray[np.int64]:
        return np.bincount(rng.integers(0, num_rows, num_rows), minlength=num_rows)

    sizes = (min(block, DRAWS - start) for start in range(0, DRAWS, block))
    return _interval(
        np.concatenate([score(np.stack([weights() for _ in range(size)])) for size in sizes]), seed
    )


def bootstrap_folds(folds: Sequence[Fold], scores: Sequence[Scorer], *, seed: int) -> Interval:
    """Interval of the mean over folds of a score of each fold's own validation rows.

    All validation rows are resampled together; rows of two models are never ranked against each
    other. Memory: as `bootstrap_rows`.
    """
    edges = np.cumsum([0, *(len(val) for _, val in folds)])
    parts = [(score, slice(*edge)) for score, edge in zip(scores, pairwise(edges), strict=True)]

    def mean_score(weights: npt.NDArray) -> npt.NDArray[np.float64]:
        mean: npt.NDArray[np.float64] = np.mean([f(weights[:, part]) for f, part in parts], axis=0)
        return mean

    return bootstrap_rows(int(edges[-1]), mean_score, seed=seed)


def _interval(values: npt.NDArray[np.float64], seed: int) -> Interval:
    finite = values[np.isfinite(values)]
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(finite, [tail, 100 - tail]) if len(finite) else (np.nan, np.nan)
    return Interval(low=float(low), high=float(high), level=LEVEL, draws=len(finite), seed=seed)
