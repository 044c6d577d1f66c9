"""Scores of predictions, and folds exactly as the suites draw them."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, require
from thinsection.probe.groups import Groups
from thinsection.types import MIB

Counts = npt.NDArray[np.int64]  # (..., K, K): rows truth, columns prediction
FloatVector = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]
Fold = tuple[IndexArray, IndexArray]  # indices of the training and of the validation rows
Scorer = Callable[[npt.NDArray], FloatVector]  # of B confusion matrices or sets of weights, (B,)

DRAWS = 2000
LEVEL = 0.95
BLOCK_BYTES = 64 * MIB  # of row weights at a time


def ratio(top: npt.ArrayLike, bottom: npt.ArrayLike, *, empty: float = 0.0) -> FloatVector:
    """top / bottom in float64; `empty` where bottom is not positive."""
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    out: FloatVector = np.full(np.broadcast(top, bottom).shape, empty)
    np.divide(top, bottom, out=out, where=bottom > 0)
    return out


def confusion_matrix(truth: IndexArray, prediction: IndexArray, num_classes: int) -> Counts:
    """(K, K) counts, rows truth, columns prediction.

    Raises InvalidInputError: lengths differ or a label is outside 0..K-1.
    """
    rule = f"prediction must have the shape of truth {truth.shape}"
    require(prediction.shape == truth.shape, rule, prediction.shape)
    for name, labels in (("truth", truth), ("prediction", prediction)):
        if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
            found = f"{labels.min()}..{labels.max()}"
            raise InvalidInputError(f"{name} must lie in 0..{num_classes - 1}, got {found}")
    counts: Counts = image_counts(truth[None], prediction[None], num_classes)[0]
    return counts


def image_counts(truth: npt.NDArray, prediction: npt.NDArray, num_classes: int) -> Counts:
    """Confusion matrices (N, K, K) of images (N, H, W). Memory: 8 N H W bytes."""
    n, cells = len(truth), num_classes * num_classes
    pair = truth.reshape(n, -1).astype(np.int64) * num_classes + prediction.reshape(n, -1)
    pair += cells * np.arange(n)[:, None]
    counts = np.bincount(pair.ravel(), minlength=n * cells)
    return counts.reshape(n, num_classes, num_classes)


def _tallies(counts: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray]:
    """Rows (px) of each class that are right, predicted as it, and truly of it; (..., K) each."""
    return np.diagonal(counts, axis1=-2, axis2=-1), counts.sum(axis=-2), counts.sum(axis=-1)


def per_class_scores(counts: npt.NDArray) -> dict[str, FloatVector]:
    """Precision, recall and F1 per class, (..., K) each; 0 where a ratio is 0 / 0."""
    hits, predicted, present = _tallies(counts)
    f1 = ratio(2 * hits, predicted + present)
    return {"precision": ratio(hits, predicted), "recall": ratio(hits, present), "f1": f1}


def macro_f1(counts: npt.NDArray) -> FloatVector:
    """Mean F1 over the classes that occur in truth or prediction; (...,) of (..., K, K)."""
    _, predicted, present = _tallies(counts)
    seen = predicted + present > 0
    return ratio(per_class_scores(counts)["f1"].sum(axis=-1), seen.sum(axis=-1))


def balanced_accuracy(counts: npt.NDArray) -> FloatVector:
    """Mean recall over the classes that occur in truth; (...,) of (..., K, K)."""
    present = counts.sum(axis=-1) > 0
    return ratio(per_class_scores(counts)["recall"].sum(axis=-1), present.sum(axis=-1))


METRICS: dict[str, Scorer] = {"macro_f1": macro_f1, "balanced_accuracy": balanced_accuracy}


def weighted_auroc(
    scores: FloatVector, positive: npt.NDArray[np.bool_], weights: npt.NDArray
) -> FloatVector:
    """Area under the ROC curve under B sets of row weights, ties counted half; (B,).

    NaN where a set of weights leaves no positive or no negative row.

    Memory: about 4 arrays of the shape of `weights` (B, N), float64.
    """
    up, down = tied_weights(scores, positive, weights)
    below = np.cumsum(down, axis=1) - down
    wins = (up * (below + 0.5 * down)).sum(axis=1)
    return ratio(wins, up.sum(axis=1) * down.sum(axis=1), empty=np.nan)


def tied_weights(
    scores: FloatVector, positive: npt.NDArray[np.bool_], weights: npt.NDArray
) -> tuple[npt.NDArray, npt.NDArray]:
    """Weights (B, ties) of positive and of negative rows at each distinct score, ascending."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores[order]) > 0])
    ordered = weights[:, order].astype(np.float64)
    up, down = (
        np.add.reduceat(ordered * of[order], starts, axis=1) for of in (positive, ~positive)
    )
    return up, down


def macro_auroc(
    probability: FloatVector, truth: IndexArray, weights: npt.NDArray | None = None
) -> FloatVector:
    """AUROC of class 1 for two classes, else the one-versus-rest mean; (B,), B = 1 unweighted.

    Memory: see `weighted_auroc`.

    Raises InvalidInputError: unweighted, and a class is absent or alone.
    """
    given = np.ones((1, len(truth))) if weights is None else weights
    classes = [1] if probability.shape[1] == 2 else range(probability.shape[1])
    area = [weighted_auroc(probability[:, c], truth == c, given) for c in classes]
    mean: FloatVector = np.mean(area, axis=0)
    if weights is None and np.isnan(mean[0]):
        raise InvalidInputError("auroc needs rows of every class, got a class without any")
    return mean


def concordance(event: npt.NDArray[np.bool_], time: FloatVector, risk: FloatVector) -> Scorer:
    """Harrell's c-index of cases under weights (B, n): a pair weighs as its cases were drawn.

    A pair (i, j) counts where i had the event and time_i < time_j, or the times are equal and j was
    censored; it is concordant by 1 where risk_i > risk_j and by 0.5 where they are equal.

    Memory: 16 n². Raises InvalidInputError: no pair is comparable.
    """
    earlier = time[:, None] < time
    tied = (time[:, None] == time) & ~event
    comparable = (event[:, None] & (earlier | tied)).astype(np.float64)
    found = "none; it needs an event before another case's time"
    require(comparable.any(), "a fold must have comparable pairs", found)
    concordant = comparable * (np.sign(risk[:, None] - risk) / 2 + 0.5)

    def weighted(weights: npt.NDArray) -> FloatVector:
        w = weights.astype(np.float64)
        top, bottom = ((w @ m * w).sum(axis=1) for m in (concordant, comparable))
        return ratio(top, bottom, empty=np.nan)

    return weighted


def class_jaccard(counts: Counts) -> FloatVector:
    """(..., K): intersection / union of the pixels of a class; NaN for one that is nowhere."""
    hits, predicted, present = _tallies(counts)
    return ratio(hits, predicted + present - hits, empty=np.nan)


def image_jaccard(counts: Counts) -> FloatVector:
    """(N,): the mean of `class_jaccard` over the classes of an image; 0 where there is none."""
    each = class_jaccard(counts)
    return ratio(np.nansum(each, axis=1), np.isfinite(each).sum(axis=1))


def image_weights(counts: Counts, background_weight: float) -> FloatVector:
    """(N,): 1 where the truth is background alone, else max(1, weight * their fraction)."""
    empty = counts.sum(axis=2)[:, 1:].sum(axis=1) == 0
    return np.where(empty, 1.0, max(1.0, background_weight * float(empty.mean())))


def weighted_jaccard(counts: Counts, background_weight: float) -> float:
    """The score: the weighted mean of the images' Jaccard."""
    weights = image_weights(counts, background_weight)
    return float(np.average(image_jaccard(counts), weights=weights))


def background_score(counts: Counts, background_weight: float) -> float:
    """What predicting background everywhere scores on the same truth."""
    empty = np.zeros_like(counts)
    empty[:, :, 0] = counts.sum(axis=2)
    return weighted_jaccard(empty, background_weight)


def stratified_folds(
    labels: npt.ArrayLike, *, folds: int = 3, seed: int = 1337, class_names: Sequence[str] = ()
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
        require(least >= folds, f"each class must have >= {folds} rows for {folds} folds", found)
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
    return list(splitter.split(np.zeros(len(labels)), labels, groups=np.asarray(groups)))


def first_fold(
    labels: IndexArray, groups: Groups | None, *, folds: int, seed: int, class_names: Sequence[str]
) -> tuple[Fold, str]:
    """The first of `first_folds`, and that in words."""
    found, over = first_folds(labels, groups, folds, seed, class_names)
    stratified = "" if over.startswith("over") else "stratified "
    return found[0], f"{stratified}fold 0 of {folds}{over and ' '}{over}, seed {seed}"


def first_folds(
    labels: IndexArray,
    groups: Groups | None,
    folds: int,
    seed: int,
    class_names: Sequence[str] = (),
) -> tuple[list[Fold], str]:
    """Folds over groups, where there are enough, else over rows; and over what."""
    if groups is not None and len({*groups.of_row}) >= folds:
        found = grouped_folds(labels, groups.of_row, folds=folds, seed=seed)
        return found, f"over {groups.unit}"
    return stratified_folds(labels, folds=folds, seed=seed, class_names=class_names), ""


def shuffled_folds(n: int, *, folds: int = 3, seed: int = 1337) -> list[Fold]:
    """arange(n) shuffled by default_rng(seed), cut by array_split; each part validates once.

    Raises InvalidInputError: n < folds.
    """
    require(n >= folds, f"n must be >= {folds} for {folds} folds", n)
    order = np.arange(n)
    np.random.default_rng(seed).shuffle(order)
    parts = np.array_split(order, folds)
    return [(np.concatenate([*parts[:i], *parts[i + 1 :]]), part) for i, part in enumerate(parts)]


def draw_rows(labels: IndexArray, most: int, *, seed: int) -> IndexArray:
    """Sorted indices of at most `most` rows of each class."""
    rng = np.random.default_rng(seed)
    of_class = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    kept = [rng.choice(r, most, replace=False) if len(r) > most else r for r in of_class]
    return np.sort(np.concatenate(kept))
