"""Scores: pure functions of confusion matrices, or of class scores and labels."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError

Counts = npt.NDArray[np.int64]  # (..., K, K): rows truth, columns prediction
FloatVector = npt.NDArray[np.float64]


def ratio(top: npt.ArrayLike, bottom: npt.ArrayLike, *, empty: float = 0.0) -> FloatVector:
    """top / bottom in float64; `empty` where bottom is not positive."""
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    out: FloatVector = np.full(np.broadcast(top, bottom).shape, empty)
    np.divide(top, bottom, out=out, where=bottom > 0)
    return out


def confusion_matrix(
    truth: npt.NDArray[np.int64], prediction: npt.NDArray[np.int64], num_classes: int
) -> Counts:
    """(K, K) counts, rows truth, columns prediction.

    Raises:
        InvalidInputError: lengths differ or a label is outside 0..K-1.
    """
    if truth.shape != prediction.shape:
        raise InvalidInputError(
            f"prediction must have the shape of truth {truth.shape}, got {prediction.shape}"
        )
    for name, labels in (("truth", truth), ("prediction", prediction)):
        if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
            raise InvalidInputError(
                f"{name} must lie in 0..{num_classes - 1}, got {labels.min()}..{labels.max()}"
            )
    counts: Counts = image_counts(truth[None], prediction[None], num_classes)[0]
    return counts


def per_class_scores(counts: npt.NDArray) -> dict[str, FloatVector]:
    """Precision, recall and F1 per class, (..., K) each; 0 where a ratio is 0 / 0."""
    hits = np.diagonal(counts, axis1=-2, axis2=-1)
    predicted, present = counts.sum(axis=-2), counts.sum(axis=-1)
    f1 = ratio(2 * hits, predicted + present)
    return {"precision": ratio(hits, predicted), "recall": ratio(hits, present), "f1": f1}


def macro_f1(counts: npt.NDArray) -> FloatVector:
    """Mean F1 over the classes that occur in truth or prediction; (...,) of (..., K, K)."""
    seen = (counts.sum(axis=-2) + counts.sum(axis=-1)) > 0
    return ratio(per_class_scores(counts)["f1"].sum(axis=-1), seen.sum(axis=-1))


def balanced_accuracy(counts: npt.NDArray) -> FloatVector:
    """Mean recall over the classes that occur in truth; (...,) of (..., K, K)."""
    present = counts.sum(axis=-1) > 0
    return ratio(per_class_scores(counts)["recall"].sum(axis=-1), present.sum(axis=-1))


METRICS: dict[str, Callable[[npt.NDArray], FloatVector]] = {
    "macro_f1": macro_f1,
    "balanced_accuracy": balanced_accuracy,
}


def weighted_auroc(
    scores: FloatVector, positive: npt.NDArray[np.bool_], weights: npt.NDArray
) -> FloatVector:
    """Area under the ROC curve under B sets of row weights, ties counted half; (B,).

    NaN where a set of weights leaves no positive or no negative row.

    Memory: about 4 arrays of the shape of `weights` (B, N), float64.
    """
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores[order]) > 0])
    sorted_weights = weights[:, order].astype(np.float64)
    up = np.add.reduceat(sorted_weights * positive[order], starts, axis=1)
    down = np.add.reduceat(sorted_weights * ~positive[order], starts, axis=1)
    below = np.cumsum(down, axis=1) - down
    wins = (up * (below + 0.5 * down)).sum(axis=1)
    return ratio(wins, up.sum(axis=1) * down.sum(axis=1), empty=np.nan)


def macro_auroc(
    probability: FloatVector, truth: npt.NDArray[np.int64], weights: npt.NDArray | None = None
) -> FloatVector:
    """AUROC of class 1 for two classes, else the one-versus-rest mean; (B,), B = 1 unweighted.

    Memory: see `weighted_auroc`.

    Raises:
        InvalidInputError: unweighted, and a class is absent or alone.
    """
    given = np.ones((1, len(truth))) if weights is None else weights
    classes = [1] if probability.shape[1] == 2 else range(probability.shape[1])
    area = [weighted_auroc(probability[:, c], truth == c, given) for c in classes]
    mean: FloatVector = np.mean(area, axis=0)
    if weights is None and np.isnan(mean[0]):
        raise InvalidInputError("auroc needs rows of every class, got a class without any")
    return mean


def image_counts(truth: npt.NDArray, prediction: npt.NDArray, num_classes: int) -> Counts:
    """Confusion matrices (N, K, K) of images (N, H, W). Memory: 8 N H W bytes."""
    n, cells = len(truth), num_classes * num_classes
    pair = truth.reshape(n, -1).astype(np.int64) * num_classes + prediction.reshape(n, -1)
    pair += cells * np.arange(n)[:, None]
    counts = np.bincount(pair.ravel(), minlength=n * cells)
    return counts.reshape(n, num_classes, num_classes)


def _overlap(counts: Counts) -> tuple[Counts, Counts]:
    """Pixels of each class in truth and prediction, and in either; (..., K) each."""
    hits = np.diagonal(counts, axis1=-2, axis2=-1)
    return hits, counts.sum(axis=-2) + counts.sum(axis=-1) - hits


def image_jaccard(counts: Counts) -> FloatVector:
    """(N,): the mean of intersection / union over classes in truth or prediction; none gives 0."""
    hits, union = _overlap(counts)
    return ratio(ratio(hits, union).sum(axis=1), (union > 0).sum(axis=1))


def class_jaccard(counts: Counts) -> FloatVector:
    """(K,): intersection / union over all pixels; NaN for a class that is nowhere."""
    return ratio(*_overlap(counts.sum(axis=0)), empty=np.nan)


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
