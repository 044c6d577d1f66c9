"""Scores: pure functions of confusion matrices, or of class scores and labels."""

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.probe.protocol import Metric

Counts = npt.NDArray[np.int64]  # (..., K, K): rows truth, columns prediction
FloatVector = npt.NDArray[np.float64]


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
    hits = np.diagonal(counts, axis1=-2, axis2=-1).astype(np.float64)
    predicted, present = counts.sum(axis=-2), counts.sum(axis=-1)
    return {
        "precision": _ratio(hits, predicted),
        "recall": _ratio(hits, present),
        "f1": _ratio(2 * hits, predicted + present),
    }


def macro_f1(counts: npt.NDArray) -> FloatVector:
    """Mean F1 over the classes that occur in truth or prediction; (...,) of (..., K, K)."""
    seen = (counts.sum(axis=-2) + counts.sum(axis=-1)) > 0
    return _ratio(per_class_scores(counts)["f1"].sum(axis=-1), seen.sum(axis=-1))


def balanced_accuracy(counts: npt.NDArray) -> FloatVector:
    """Mean recall over the classes that occur in truth; (...,) of (..., K, K)."""
    present = counts.sum(axis=-1) > 0
    return _ratio(per_class_scores(counts)["recall"].sum(axis=-1), present.sum(axis=-1))


METRICS = {"macro_f1": macro_f1, "balanced_accuracy": balanced_accuracy}


def score_counts(counts: npt.NDArray, metric: Metric) -> FloatVector:
    """The named metric of one or many confusion matrices."""
    return METRICS[metric](counts)


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
    pairs = up.sum(axis=1) * down.sum(axis=1)
    area: FloatVector = np.full(len(wins), np.nan)
    np.divide(wins, pairs, out=area, where=pairs > 0)
    return area


def macro_auroc(
    probability: npt.NDArray[np.float64],
    truth: npt.NDArray[np.int64],
    weights: npt.NDArray | None = None,
) -> FloatVector:
    """AUROC of class 1 for two classes, else the one-versus-rest mean; (B,), B = 1 unweighted.

    Memory: see `weighted_auroc`.

    Raises:
        InvalidInputError: unweighted, and a class is absent or alone.
    """
    one = np.ones((1, len(truth)))
    classes = [1] if probability.shape[1] == 2 else range(probability.shape[1])
    area = [
        weighted_auroc(probability[:, c], truth == c, one if weights is None else weights)
        for c in classes
    ]
    mean: FloatVector = np.mean(area, axis=0)
    if weights is None and np.isnan(mean[0]):
        raise InvalidInputError("auroc needs rows of every class, got a class without any")
    return mean


def image_counts(truth: npt.NDArray, prediction: npt.NDArray, num_classes: int) -> Counts:
    """Confusion matrices (N, K, K) of images (N, H, W). Memory: 8 N H W bytes."""
    n = len(truth)
    cells = num_classes * num_classes
    pair = truth.reshape(n, -1).astype(np.int64) * num_classes + prediction.reshape(n, -1)
    pair += cells * np.arange(n)[:, None]
    counts = np.bincount(pair.ravel(), minlength=n * cells)
    return counts.reshape(n, num_classes, num_classes)


def image_jaccard(counts: Counts) -> npt.NDArray[np.float64]:
    """(N,): the mean of intersection / union over classes in truth or prediction; none gives 0."""
    hits = np.diagonal(counts, axis1=1, axis2=2)
    union = counts.sum(axis=1) + counts.sum(axis=2) - hits
    present = union > 0
    per_class = np.where(present, hits / np.maximum(union, 1), 0.0)
    return per_class.sum(axis=1) / np.maximum(present.sum(axis=1), 1)  # type: ignore[no-any-return]


def class_jaccard(counts: Counts) -> npt.NDArray[np.float64]:
    """(K,): intersection / union over all pixels; NaN for a class that is nowhere."""
    whole = counts.sum(axis=0)
    hits = np.diagonal(whole)
    union = whole.sum(axis=0) + whole.sum(axis=1) - hits
    return np.where(union > 0, hits / np.maximum(union, 1), np.nan)


def image_weights(counts: Counts, background_weight: float) -> npt.NDArray[np.float64]:
    """(N,): 1 where the truth is background alone, else max(1, weight * their fraction)."""
    truth = counts.sum(axis=2)
    empty = truth[:, 1:].sum(axis=1) == 0
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


def _ratio(top: npt.NDArray, bottom: npt.NDArray) -> FloatVector:
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    ratio: FloatVector = np.zeros(np.broadcast(top, bottom).shape)
    np.divide(top, bottom, out=ratio, where=bottom > 0)
    return ratio
