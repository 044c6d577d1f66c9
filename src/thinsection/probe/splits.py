"""Folds, exactly as the suites draw them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError

IndexArray = npt.NDArray[np.int64]
Fold = tuple[IndexArray, IndexArray]  # indices of the training and of the validation rows


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
