"""The tile-set score: the mean of the linear, kNN and few-shot scores on the same tiles."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.probe.bootstrap import bootstrap_rows
from thinsection.probe.metrics import score_counts
from thinsection.probe.protocol import Metric
from thinsection.probe.result import Predictions, ProbeResult


def tileset_result(results: Sequence[ProbeResult]) -> ProbeResult:
    """The mean of probes of the same rows; its interval resamples the rows for all at once.

    Memory: 8 N K² + the bootstrap's block.

    Raises:
        InvalidInputError: probes of other rows, or with other metrics.
    """
    rows = [r.predictions for r in results if r.predictions is not None]
    metrics = {r.metric for r in results}
    if len(rows) != len(results) or len({p.ids for p in rows}) != 1 or len(metrics) != 1:
        raise InvalidInputError(
            f"results must be probes of the same rows with one metric, got {sorted(metrics)} of "
            f"{[r.dataset for r in results]}"
        )
    first, metric = results[0], metrics.pop()
    return ProbeResult(
        probe="tileset",
        dataset=first.dataset,
        metric=metric,
        score=float(np.mean([r.score for r in results])),
        interval=bootstrap_rows(
            len(rows[0].ids),
            lambda weights: np.mean([_scores(p, weights, metric) for p in rows], axis=0),
            seed=first.protocol.seed,
        ),
        protocol=first.protocol,
        details={r.probe: r.score for r in results},
        facts=first.facts,
    )


def _scores(rows: Predictions, weights: npt.NDArray, metric: str) -> npt.NDArray[np.float64]:
    """Scores (B,) under row weights (B, N)."""
    k = len(rows.class_names)
    cells = np.eye(k * k)[rows.truth * k + rows.prediction]  # (N, K²)
    counts = (weights @ cells).reshape(len(weights), k, k)
    named: Metric = "macro_f1" if metric == "macro_f1" else "balanced_accuracy"
    return score_counts(counts, named)
