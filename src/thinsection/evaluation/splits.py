"""Folds of rows, drawn as the suites draw them: stratified, grouped, few-shot."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from thinsection.errors import require
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

    Raises InvalidInputError: a class has fewer rows than folds; by its name, where these are given.
    """
    from sklearn.model_selection import StratifiedKFold

    labels = np.asarray(labels)
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes):
        least, smallest = counts.min(), classes[counts.argmin()]
        found = f"{least} of class {str(class_names[smallest] if class_names else smallest)!r}"
        require(
            least >= folds,
            f"each class must have >= {folds} rows for {folds} folds",
            found,
        )
    splitter = StratifiedKFold(n_splits=folds, shuffle=True, random_state=seed)
    return list(splitter.split(np.zeros(len(labels)), labels))


def grouped_folds(
    labels: npt.ArrayLike, groups: Sequence[str], *, folds: int = 3, seed: int = 1337
) -> list[Fold]:
    """Folds that keep a group (patient, slide) whole, stratified as well as that allows.

    Raises InvalidInputError: fewer groups than folds, or lengths differ.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    labels, n = np.asarray(labels), len(set(groups))
    found = f"{len(groups)} for {len(labels)} rows"
    require(len(groups) == len(labels), "groups must have one entry a row", found)
    require(n >= folds, f"groups must be at least {folds} for {folds} folds", n)
    splitter = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    return list(
        splitter.split(np.zeros(len(labels)), labels, groups=np.asarray(groups))
    )


def drawn_folds(
    labels: IndexArray,
    groups: Groups | None,
    *,
    class_names: Sequence[str] = (),
    **known: int,
) -> tuple[list[Fold], str]:
    """Folds over groups, where there are enough, else over rows; and over what."""
    if groups is not None and len({*groups.of_row}) >= known["folds"]:
        return grouped_folds(labels, groups.of_row, **known), f"over {groups.unit}"
    return stratified_folds(labels, **known, class_names=class_names), ""


def shuffled_folds(n: int, *, folds: int = 3, seed: int = 1337) -> list[Fold]:
    """arange(n) shuffled by default_rng(seed), cut by array_split; each part validates once.

    Raises InvalidInputError: n < folds.
    """
    require(n >= folds, f"n must be >= {folds} for {folds} folds", n)
    order = np.arange(n)
    np.random.default_rng(seed).shuffle(order)
    parts = np.array_split(order, folds)
    return [
        (np.concatenate([*parts[:i], *parts[i + 1 :]]), part)
        for i, part in enumerate(parts)
    ]


def draw_rows(labels: IndexArray, most: int, *, seed: int) -> IndexArray:
    """Sorted indices of at most `most` rows of each class."""
    rng = np.random.default_rng(seed)
    of_class = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    kept = [
        rng.choice(r, most, replace=False) if len(r) > most else r for r in of_class
    ]
    return np.sort(np.concatenate(kept))
