"""Folds of rows, drawn as benchmark suites draw them: stratified, grouped, few-shot."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.metrics import FloatVector, Fold, IndexArray
from thinsection.types import Floats


def stratified_folds(
    labels: npt.ArrayLike,
    *,
    folds: int = 3,
    seed: int = 1337,
    class_names: Sequence[str] = (),
) -> list[Fold]:
    """Stratified, shuffled folds: StratifiedKFold(folds, shuffle, random_state=seed).

    Written here because the import of scikit-learn costs more than a small training.

    Raises InvalidInputError: a class has fewer rows than folds; it is named by `class_names`.
    """
    labels = np.asarray(labels)
    classes, first_rows, codes, counts = np.unique(
        labels, return_index=True, return_inverse=True, return_counts=True
    )
    if len(classes) and counts.min() < folds:
        rarest = classes[counts.argmin()]
        name = str(class_names[rarest] if class_names else rarest)
        raise InvalidInputError(
            f"each class must have >= {folds} rows for {folds} folds, "
            f"got {counts.min()} of class {name!r}"
        )
    # classes are numbered in the order in which they appear
    codes = np.argsort(np.argsort(first_rows))[codes]
    sorted_codes = np.sort(codes)
    rng = np.random.RandomState(seed)
    fold_of_row = np.zeros(len(labels), np.int64)
    for code in range(len(classes)):
        sizes = [np.count_nonzero(sorted_codes[i::folds] == code) for i in range(folds)]
        of_class = np.repeat(np.arange(folds), sizes)
        rng.shuffle(of_class)
        fold_of_row[codes == code] = of_class
    return _folds_of(fold_of_row, folds)


def grouped_folds(
    labels: npt.ArrayLike, groups: Sequence[str], *, folds: int = 3, seed: int = 1337
) -> list[Fold]:
    """Folds in which no group (patient, slide) is divided, stratified as well as possible.

    StratifiedGroupKFold(folds, shuffle, random_state=seed): groups whose classes are most uneven
    come first, and each goes to the fold that leaves the folds most even.

    Raises InvalidInputError: fewer groups than folds, or lengths differ.
    """
    labels = np.asarray(labels)
    num_groups = len(set(groups))
    if len(groups) != len(labels):
        raise InvalidInputError(
            f"groups must have one entry per row, got {len(groups)} for {len(labels)} rows"
        )
    if num_groups < folds:
        raise InvalidInputError(
            f"groups must be at least {folds} for {folds} folds, got {num_groups}; use at most "
            f"{num_groups} folds"
        )
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    _, group_of_row = np.unique(np.asarray(groups), return_inverse=True)
    counts_by_group = np.zeros((num_groups, len(counts)))
    np.add.at(counts_by_group, (group_of_row, codes), 1)
    order = np.arange(num_groups)
    np.random.RandomState(seed).shuffle(order)
    uneven = np.std(counts_by_group[order], axis=1)
    counts_by_fold = np.zeros((folds, len(counts)))
    fold_of_group = np.zeros(num_groups, np.int64)
    for group in order[np.argsort(-uneven, kind="stable")]:
        fold = _evenest_fold(counts_by_fold, counts_by_group[group], totals=counts)
        counts_by_fold[fold] += counts_by_group[group]
        fold_of_group[group] = fold
    return _folds_of(fold_of_group[group_of_row], folds)


def _evenest_fold(
    counts_by_fold: Floats, added: FloatVector, *, totals: IndexArray
) -> int:
    """Fold that leaves the folds most even with the rows `added`; of equal ones the smallest."""
    best = 0
    least = math.inf
    fewest = math.inf
    for fold, size in enumerate(counts_by_fold.sum(axis=1)):
        proposed = counts_by_fold.copy()
        proposed[fold] += added
        spread = float(np.std(proposed / totals, axis=0).mean())
        if spread < least or (_is_close(spread, least) and size < fewest):
            best = fold
            least = spread
            fewest = size
    return best


def _is_close(x: float, y: float) -> bool:
    """As `numpy.isclose`, which is slow for single numbers."""
    return abs(x - y) <= 1e-8 + 1e-5 * abs(y)


def _folds_of(fold_of_row: IndexArray, folds: int) -> list[Fold]:
    """Rows of the other folds and rows of each fold."""
    return [
        (np.flatnonzero(fold_of_row != fold), np.flatnonzero(fold_of_row == fold))
        for fold in range(folds)
    ]


def drawn_folds(
    labels: IndexArray,
    groups: Groups | None,
    *,
    folds: int,
    seed: int,
    class_names: Sequence[str] = (),
) -> tuple[list[Fold], str]:
    """Folds over groups ('over patients'), or over rows ('') if there are too few groups."""
    if groups is not None and len(set(groups.of_row)) >= folds:
        drawn = grouped_folds(labels, groups.of_row, folds=folds, seed=seed)
        return drawn, f"over {groups.unit}"
    drawn = stratified_folds(labels, folds=folds, seed=seed, class_names=class_names)
    return drawn, ""


def shuffled_folds(n: int, *, folds: int = 3, seed: int = 1337) -> list[Fold]:
    """arange(n) shuffled by default_rng(seed), cut by array_split; each part validates once.

    Raises InvalidInputError: n < folds.
    """
    if n < folds:
        raise InvalidInputError(
            f"number of rows must be >= {folds} for {folds} folds, got {n}"
        )
    order = np.arange(n)
    np.random.default_rng(seed).shuffle(order)
    parts = np.array_split(order, folds)
    drawn = []
    for i, part in enumerate(parts):
        others = [*parts[:i], *parts[i + 1 :]]
        drawn.append((np.concatenate(others), part))
    return drawn


def draw_rows(labels: IndexArray, most: int, *, seed: int) -> IndexArray:
    """Sorted indices of at most `most` rows of each class."""
    rng = np.random.default_rng(seed)
    rows_by_class = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) > most:
            rows = rng.choice(rows, most, replace=False)
        rows_by_class.append(rows)
    return np.sort(np.concatenate(rows_by_class))
