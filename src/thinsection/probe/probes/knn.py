"""kNN probe: cosine neighbours vote; no training, so it shows the embedding space as it is."""

import numpy as np
import numpy.typing as npt

from thinsection.probe.compute import cosine_neighbours
from thinsection.probe.data.sets import Labels, TileSet, check_tile_set
from thinsection.probe.metrics import METRICS, confusion_matrix
from thinsection.probe.protocol import NANOPATH, KnnSettings, Protocol
from thinsection.probe.result import ProbeResult, classified
from thinsection.types import GIB

VOTE_BYTES = 1 << 26  # of one-hot neighbours at a time


def knn_probe(
    data: TileSet, *, protocol: Protocol = NANOPATH, device: str = "cpu", budget_bytes: int = GIB
) -> ProbeResult:
    """The best validation score over k, ties to the smallest k.

    A k beyond the number of training rows cannot be tried; `details["left_out_ks"]` names it.

    Memory: budget_bytes + 8 Nq k_max + 8 Nq K.

    Raises:
        DatasetError: the splits do not fit each other.
        ConfigError: the protocol defines no kNN probe.
    """
    check_tile_set(data)
    settings: KnnSettings = protocol.require("knn")
    ks = sorted(k for k in settings.ks if k <= len(data.train))
    rows, bank = data.val.embeddings, data.train.embeddings
    found = cosine_neighbours(rows, bank, max(ks), device=device, budget_bytes=budget_bytes)
    labels = data.train.labels[found]

    def score(k: int) -> float:
        prediction = count_votes(labels[:, :k], data.num_classes).argmax(axis=1)
        counts = confusion_matrix(data.val.labels, prediction, data.num_classes)
        return float(METRICS[settings.metric](counts))

    scores = {k: score(k) for k in ks}
    best = max(scores, key=scores.__getitem__)  # max keeps the first of equals
    votes = count_votes(labels[:, :best], data.num_classes)
    return classified(
        "knn",
        data,
        votes.argmax(axis=1),
        metric=settings.metric,
        protocol=protocol,
        details={
            "best_k": best,
            "score_by_k": {str(k): v for k, v in scores.items()},
            "left_out_ks": [k for k in settings.ks if k not in ks],
        },
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
