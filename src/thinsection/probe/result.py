"""What a probe returns, and its plain form for a result file."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.config import as_mapping
from thinsection.errors import InvalidInputError
from thinsection.probe.data.sets import TileSet
from thinsection.probe.metrics import METRICS, confusion_matrix, per_class_scores
from thinsection.probe.protocol import Metric, Protocol
from thinsection.probe.statistics import Interval, bootstrap_counts, bootstrap_rows

FORMAT_VERSION = 1
METRIC_WORDS = {
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "c_index": "Harrell's c-index",
    "robustness_index": "robustness index",
    "weighted_jaccard": "weighted Jaccard",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Predictions of a classification, row by row.

    Attributes:
        class_names: of labels 0..K-1.
        ids: (N,) names of the rows.
        truth, prediction: int64 (N,).
        probability: float64 (N, K) class scores that sum to 1, or None.
    """

    class_names: tuple[str, ...]
    ids: tuple[str, ...]
    truth: npt.NDArray[np.int64]
    prediction: npt.NDArray[np.int64]
    probability: npt.NDArray[np.float64] | None = None

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """The confusion matrix, (K, K), rows truth."""
        return confusion_matrix(self.truth, self.prediction, len(self.class_names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Risks:
    """Risks of cases, each from the model of the fold that left it out.

    Attributes:
        ids: (n,) names of the cases.
        risk: float64 (n,), comparable within a fold only.
        high: bool (n,), True where the risk is above its fold's median.
        event, time: the follow-up, (n,) each.
    """

    ids: tuple[str, ...]
    risk: npt.NDArray[np.float64]
    high: npt.NDArray[np.bool_]
    event: npt.NDArray[np.bool_]
    time: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Images of a segmentation to look at."""

    images: npt.NDArray[np.uint8]  # (M, H, W, 3)
    truth: npt.NDArray[np.uint8]  # (M, H, W) labels 0..K-1; 0 is background
    prediction: npt.NDArray[np.uint8]
    class_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """One probe's score and everything that a person or another suite needs beside it.

    Attributes:
        probe: its name: that of the files of its report.
        dataset: name of the data.
        metric, score: what is compared between encoders.
        interval: bootstrap interval of the score, over rows.
        protocol: the whole frozen protocol.
        details: what the sweep saw (per learning rate, per k, per fold, ...), plain values.
        facts: of the data (sizes, source, split rule, encoder), plain values.
        predictions: row by row, where the probe classifies.
        risks: case by case, where it predicts survival.
        examples: images with masks, where it segments.
        remarks: what a person should read beside the score, line by line.
    """

    probe: str
    dataset: str
    metric: str
    score: float
    interval: Interval | None
    protocol: Protocol
    details: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    predictions: Predictions | None = None
    risks: Risks | None = None
    examples: Examples | None = None
    remarks: tuple[str, ...] = ()

    @property
    def metric_words(self) -> str:
        """The metric as a person reads it."""
        return METRIC_WORDS.get(self.metric, self.metric)

    def as_mapping(self) -> dict[str, Any]:
        """Plain nested values without the rows (these go to CSV); NaN becomes None."""
        mapping: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "probe": self.probe,
            "dataset": self.dataset,
            "metric": self.metric,
            "score": self.score,
            "interval": None if self.interval is None else as_mapping(self.interval),
            "details": self.details,
            "data": self.facts,
            "protocol": self.protocol.as_mapping(),
        }
        if self.predictions is not None:
            mapping["classes"] = per_class_rows(self.predictions)
            mapping["confusion_matrix"] = self.predictions.counts.tolist()
        return strict(mapping)  # type: ignore[no-any-return]


def per_class_rows(predictions: Predictions) -> list[dict[str, Any]]:
    """One mapping a class: name, rows, precision, recall, F1."""
    counts = predictions.counts
    columns = {"rows": counts.sum(axis=1), **per_class_scores(counts)}
    return [
        {"name": name, **{key: values[c].item() for key, values in columns.items()}}
        for c, name in enumerate(predictions.class_names)
    ]


def classified(
    probe: str,
    data: TileSet,
    prediction: npt.NDArray[np.int64],
    *,
    metric: Metric,
    protocol: Protocol,
    details: dict[str, Any],
    probability: npt.NDArray[np.float64] | None = None,
) -> ProbeResult:
    """The result of a tile probe from its predictions on the validation split."""
    rows = Predictions(
        class_names=data.class_names,
        ids=data.val.ids,
        truth=data.val.labels,
        prediction=prediction,
        probability=probability,
    )
    sizes = {"train_rows": len(data.train), "val_rows": len(data.val)}
    return ProbeResult(
        probe=probe,
        dataset=data.name,
        metric=metric,
        score=float(METRICS[metric](rows.counts)),
        interval=bootstrap_counts(rows.counts, METRICS[metric], seed=protocol.seed),
        protocol=protocol,
        details=details,
        facts={**sizes, "dim": int(data.train.embeddings.shape[1]), **data.facts},
        predictions=rows,
    )


def tileset_result(results: Sequence[ProbeResult]) -> ProbeResult:
    """The tile-set score: the mean of probes of the same rows.

    Its interval resamples the rows for all at once.

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
    first = results[0]

    def scores(weights: npt.NDArray, p: Predictions) -> npt.NDArray[np.float64]:
        k = len(p.class_names)
        cells = np.eye(k * k)[p.truth * k + p.prediction]  # (N, K²)
        return METRICS[first.metric]((weights @ cells).reshape(len(weights), k, k))

    return replace(
        first,
        probe="tileset",
        score=float(np.mean([r.score for r in results])),
        interval=bootstrap_rows(
            len(rows[0].ids),
            lambda weights: np.mean([scores(weights, p) for p in rows], axis=0),
            seed=first.protocol.seed,
        ),
        details={r.probe: r.score for r in results},
        predictions=None,
    )


def strict(value: Any) -> Any:
    """The value with only what strict JSON holds: NaN and infinities become None."""
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
