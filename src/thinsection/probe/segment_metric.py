"""Scores of a segmentation: macro Jaccard per image, and its weighted mean over images."""

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.integer]
Counts = npt.NDArray[np.int64]  # (N, K, K) per image, rows truth


def image_counts(truth: Labels, prediction: Labels, num_classes: int) -> Counts:
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
