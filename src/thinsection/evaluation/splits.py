"""Folds of rows, drawn as benchmark suites draw them: stratified, grouped, few-shot."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.metrics import Fold, IndexArray


def stratified_folds(
    labels: npt.ArrayLike,
    *,
    folds: int = 3,
    seed: int = 1337,
    class_names: Sequence[str] = (),
) -> list[Fold]:
    """Stratified, shuffled folds: StratifiedKFold(folds, shuffle, random_state=seed).

    Raises InvalidInputError: a class has fewer rows than folds; it is named by `class_names`.
    """
    from sklearn.model_selection import StratifiedKFold

    labels = np.asarray(labels)
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) and counts.min() < folds:
        rarest = classes[counts.argmin()]
        name = str(class_names[rarest] if class_names else rarest)
        raise InvalidInputError(
            f"each class must have >= {folds} rows for {folds} folds, "
            f"got {counts.min()} of class {name!r}"
        )
    splitter = StratifiedKFold(n_splits=folds, shuffle=True, random_state=seed)
    return list(splitter.split(np.zeros(len(labels)), labels))


def grouped_folds(
    labels: npt.ArrayLike, groups: Sequence[str], *, folds: int = 3, seed: int = 1337
) -> list[Fold]:
    """Folds in which no group (patient, slide) is divided, stratified as well as possible.

    Raises InvalidInputError: fewer groups than folds, or lengths differ.
    """
    from sklearn.model_selection import StratifiedGroupKFold

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
    splitter = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    return list(
        splitter.split(np.zeros(len(labels)), labels, groups=np.asarray(groups))
    )


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
