"""kNN probe: cosine neighbours vote; no training, so it shows the embedding space as it is."""

from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.probe.compute import DEFAULT_BUDGET_BYTES, cosine_neighbours
from thinsection.probe.data.sets import Labels, TileSet, check_tile_set
from thinsection.probe.metrics import confusion_matrix, score_counts
from thinsection.probe.protocol import NANOPATH, KnnSettings, Protocol
from thinsection.probe.result import ProbeResult, classified

VOTE_BYTES = 1 << 26  # of one-hot neighbours at a time


def knn_probe(
    data: TileSet,
    *,
    protocol: Protocol = NANOPATH,
    device: str = "cpu",
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> ProbeResult:
    """The best validation score over k, ties to the smallest k.

    A k beyond the number of training rows cannot be tried; `details["left_out_ks"]` names it.

    Memory: budget_bytes + 8 Nq k_max.

    Raises:
        DatasetError: the splits do not fit each other.
        ConfigError: the protocol defines no kNN probe.
    """
    check_tile_set(data)
    settings: KnnSettings = protocol.require("knn")
    ks = [k for k in settings.ks if k <= len(data.train)]
    neighbours = cosine_neighbours(
        data.val.embeddings,
        data.train.embeddings,
        max(ks),
        device=device,
        budget_bytes=budget_bytes,
    )
    neighbour_labels = data.train.labels[neighbours]
    scores: dict[int, float] = {}
    votes_of: dict[int, npt.NDArray[np.int64]] = {}
    for k in sorted(ks):
        votes = count_votes(neighbour_labels[:, :k], data.num_classes)
        counts = confusion_matrix(data.val.labels, votes.argmax(axis=1), data.num_classes)
        scores[k] = float(score_counts(counts, settings.metric))
        if scores[k] > max((s for j, s in scores.items() if j < k), default=-1.0):
            votes_of = {k: votes}  # only a better k replaces a smaller one
    best, votes = next(iter(votes_of.items()))
    details: dict[str, Any] = {
        "best_k": best,
        "score_by_k": {str(k): v for k, v in scores.items()},
        "left_out_ks": [k for k in settings.ks if k not in ks],
    }
    return classified(
        "knn",
        data,
        votes.argmax(axis=1),
        metric=settings.metric,
        protocol=protocol,
        details=details,
        probability=votes / best,
    )


def count_votes(neighbour_labels: Labels, num_classes: int) -> npt.NDArray[np.int64]:
    """Votes (N, K) of neighbours' labels (N, k); argmax breaks ties to the lowest label.

    Memory: 8 N K + VOTE_BYTES.
    """
    n, k = neighbour_labels.shape
    votes = np.empty((n, num_classes), dtype=np.int64)
    step = max(1, VOTE_BYTES // (16 * max(k, num_classes)))
    for start in range(0, n, step):
        block = neighbour_labels[start : start + step]
        cells = block + num_classes * np.arange(len(block))[:, None]
        flat = np.bincount(cells.ravel(), minlength=len(block) * num_classes)
        votes[start : start + step] = flat.reshape(len(block), num_classes)
    return votes
