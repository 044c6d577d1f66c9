"""Colours and clusters of a slide's tiles, from the principal components of their embeddings."""

import numpy as np
import numpy.typing as npt

from thinsection.store.tile_tables import EmbeddingRows

# rows for fitting the components, and rows that are projected at a time
_FIT_ROWS = 8192
_BLOCK_ROWS = 4096
# components for clustering; the first three become colours
_COMPONENTS = 32

Scores = npt.NDArray[np.float32]


def component_scores(rows: EmbeddingRows, budget_bytes: int) -> Scores:
    """First principal components (N, up to 32) of embeddings, with a fixed sign for each one.

    They are fitted to up to 8192 rows, spread evenly.

    Memory:
        12 D bytes per fitted row (a small budget lowers their number), 8 D² for their products,
        16 KiB D per block, 128 N.
    """
    num_rows, dim = rows.shape
    affordable = max(256, budget_bytes // (12 * dim))
    num_fit = int(min(_FIT_ROWS, num_rows, affordable))
    fit_indices = np.linspace(0, num_rows - 1, num_fit).astype(np.int64)
    sample = rows[fit_indices].astype(np.float32)
    mean = sample.mean(axis=0) if num_fit else np.zeros(dim, dtype=np.float32)
    sample -= mean
    _, vectors = np.linalg.eigh(sample.T @ sample)
    axes = vectors[:, ::-1][:, :_COMPONENTS].astype(np.float32)
    largest = np.abs(axes).argmax(axis=0)
    axes *= np.sign(axes[largest, np.arange(axes.shape[1])])
    scores = [np.empty((0, axes.shape[1]), dtype=np.float32)]
    for start in range(0, num_rows, _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS].astype(np.float32)
        scores.append((block - mean) @ axes)
    return np.concatenate(scores)


def component_colours(scores: Scores) -> npt.NDArray[np.float64]:
    """First three components as red, green and blue; percentiles 1 and 99 become 0 and 255."""
    first = np.zeros((len(scores), 3), dtype=np.float32)
    first[:, : scores.shape[1]] = scores[:, :3]
    low, high = np.percentile(first, (1, 99), axis=0) if len(first) else (0, 1)
    span = np.where(high > low, high - low, 1.0)
    return np.asarray(np.clip((first - low) / span * 255, 0, 255))


def tile_clusters(scores: Scores, count: int) -> npt.NDArray[np.int64]:
    """Clusters the scores by seeded k-means; the largest cluster is 0."""
    from scipy.cluster.vq import kmeans, vq  # slow to import

    if len(scores) <= count:
        return np.arange(len(scores))
    centres, _ = kmeans(scores, count, iter=5, seed=0)
    labels, _ = vq(scores, centres)
    by_size = np.argsort(-np.bincount(labels), kind="stable")
    return np.asarray(np.argsort(by_size)[labels])
