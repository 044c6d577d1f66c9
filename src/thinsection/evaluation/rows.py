"""Predictions of a model row by row, with the truth, and every metric of them.

Intervals resample these rows, comparisons of two models pair them, and pages draw them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass, replace

import numpy as np
import numpy.typing as npt

from thinsection.config import as_mapping
from thinsection.evaluation import intervals, metrics
from thinsection.evaluation.cases import Groups, Unit, take_rows
from thinsection.evaluation.comparison import permutation_p, permuted_rows
from thinsection.evaluation.intervals import Interval, Sampling
from thinsection.evaluation.metrics import (
    Counts,
    FloatVector,
    IndexArray,
    Scorers,
    Weights,
)
from thinsection.evaluation.survival import concordance
from thinsection.types import Document, Json

PERMUTATIONS = 199  # number of permutations of the truth for a p value
Details = Document  # plain values, as JSON holds them
METRIC_WORDS = {
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "c_index": "Harrell's c-index",
    "robustness_index": "robustness index",
    "weighted_jaccard": "weighted Jaccard",
    "weighted_kappa": "quadratically weighted kappa",
    "auprc": "AUPRC",
    "brier": "Brier score",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
    "r2": "R²",
    "mae": "mean absolute error",
    "map": "mean average precision",
    "ece": "expected calibration error",
    "cosine": "mean cosine",
    "clustering_score": "clustering score",
    "apd": "average performance drop",
    "croma": "cross-confounder robustness margin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Predictions row by row, with their metrics (`scorers`) and the columns of their table."""

    ids: tuple[str, ...]  # (N,) names of the rows
    # groups of the rows that an interval resamples; None if unknown: each row is its own group
    groups: Groups | None
    # (N,), fold of the model that predicted a row; None if there is one model
    fold: IndexArray | None = None

    @property
    def scorers(self) -> Scorers:
        """Every metric as a function of row weights."""
        raise NotImplementedError

    @property
    def sampling(self) -> Sampling:
        """Units that an interval resamples, and how many of each class there are."""
        # number of repeats of a cross-validation
        runs = len(self.ids) // len(set(self.ids))
        return Sampling.of_rows(
            self.units,
            classes=getattr(self, "truth", None) if self.classed else None,
            events=getattr(self, "event", None),
            fold=self.fold,
            folds=None if self.fold is None else len(np.unique(self.fold)) // runs,
        )

    @property
    def units(self) -> Groups:
        """The group of each row: its patient if that is known, else the row itself."""
        unit: Unit = "rows" if self.fold is None else "cases"
        return self.groups or Groups.each(self.ids, unit)

    @property
    def first_rows(self) -> IndexArray:
        """The first row of each id, so that a repeated case counts once."""
        return np.sort(np.unique(self.ids, return_index=True)[1])

    @property
    def classed(self) -> bool:
        """True if `truth` consists of classes."""
        return False

    def value(self, metric: str) -> float:
        """One metric with every row counted once."""
        return float(self.scorers[metric](np.ones((1, len(self.ids))))[0])

    def interval(self, metric: str, *, seed: int) -> Interval:
        """The 95 % confidence interval of one metric."""
        return intervals.interval(
            self.sampling, self.scorers[metric], metric, seed=seed
        )


def label_permutation_p(
    rows: "Predictions",
    metric: str,
    *,
    seed: int,
    permutations: int = PERMUTATIONS,
) -> float | None:
    """p value of a score on a test split, by permutations of its truth over units.

    None if a unit has several labels, since units then cannot exchange them.

    Memory: that of one scorer.
    """
    rng = np.random.default_rng(seed)
    codes = rows.sampling.codes
    null = []
    for _ in range(permutations):
        order = permuted_rows(rows.truth, codes, rng)
        if order is None:
            return None
        null.append(rows.relabelled(order).value(metric))
    return permutation_p(rows.value(metric), null)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions(_Rows):
    """Predictions of a classification."""

    class_names: tuple[str, ...]  # names of the classes 0..K-1
    truth: IndexArray  # (N,)
    prediction: IndexArray  # (N,)
    probability: FloatVector | None = None  # (N, K) class scores that sum to 1
    # (R, N), predictions of each seed, if each seed is scored
    repeats: IndexArray | None = None

    @property
    def classed(self) -> bool:
        """True: `truth` consists of classes."""
        return True

    def relabelled(self, order: IndexArray) -> "Predictions":
        """The same rows with the truth in another order."""
        return replace(self, truth=self.truth[order])

    @property
    def scorers(self) -> Scorers:
        """Every metric; metrics of predicted labels are means over the seeds."""
        k = len(self.class_names)
        scorers = metrics.class_scorers(
            self.truth, self.prediction, k, self.probability, self.fold
        )
        if self.repeats is None:
            return scorers
        by_seed = [
            metrics.class_scorers(self.truth, labels, k) for labels in self.repeats
        ]
        for name in by_seed[0]:
            scorers[name] = metrics.MeanScorer([seed[name] for seed in by_seed])
        return scorers

    @property
    def columns(self) -> dict[str, Iterable[object]]:
        """For the table of rows, by header."""
        names = self.class_names
        columns: dict[str, Iterable[object]] = {
            "truth": [names[label] for label in self.truth],
            "prediction": [names[label] for label in self.prediction],
            "correct": (self.truth == self.prediction).astype(int),
        }
        if self.repeats is not None:
            for i, labels in enumerate(self.repeats):
                columns[f"seed_{i}"] = [names[label] for label in labels]
        if self.probability is not None:
            # all digits are stored: a probability of 1/3 lies on the edge of a bin of ECE
            for name, share in zip(names, self.probability.T, strict=False):
                columns[f"p_{name}"] = share.tolist()
        return columns

    @property
    def counts(self) -> Counts:
        """The confusion matrix, (K, K), rows truth."""
        return metrics.confusion_matrix(
            self.truth, self.prediction, len(self.class_names)
        )

    @property
    def each(self) -> IndexArray:
        """(R, N): the predictions to score, with one row per seed."""
        return self.prediction[None] if self.repeats is None else self.repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Risks(_Rows):
    """Risks of n cases, each from the model of the fold that left it out."""

    risk: FloatVector  # (n,), comparable within a fold only
    high: npt.NDArray[
        np.bool_
    ]  # (n,), True if the risk is above the median of its fold
    event: npt.NDArray[np.bool_]  # (n,), True if the event was observed
    time: FloatVector  # (n,), time of the event or of the end of follow-up

    def take(self, rows: IndexArray) -> "Risks":
        """Some of the rows."""
        columns = ("ids", "groups", "fold", "risk", "high", "event", "time")
        return take_rows(self, rows, columns)

    @property
    def scorers(self) -> Scorers:
        """The c-index."""
        return {"c_index": concordance(self.event, self.time, self.risk, self.fold)}

    @property
    def columns(self) -> dict[str, Iterable[object]]:
        """For the table of rows, by header."""
        return {
            "risk": self.risk.tolist(),
            "above_fold_median": self.high.astype(int),
            "event": self.event.astype(int),
            "time": self.time.tolist(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Values(_Rows):
    """Predicted numbers; a metric is its mean over targets."""

    target_names: tuple[str, ...]  # (T,)
    truth: FloatVector  # (N, T)
    prediction: FloatVector

    @property
    def scorers(self) -> Scorers:
        """Correlations, R² and absolute error."""
        return metrics.value_scorers(self.truth, self.prediction, self.fold)

    @property
    def columns(self) -> dict[str, Iterable[object]]:
        """For the table of rows, by header."""
        columns: dict[str, Iterable[object]] = {}
        for t, name in enumerate(self.target_names):
            columns[f"true {name}"] = self.truth[:, t].tolist()
            columns[f"predicted {name}"] = self.prediction[:, t].tolist()
        return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios(_Rows):
    """Parts that each row adds to a score that is sum / sum: neighbours of a kind, a cosine, ..."""

    metric: str
    top: FloatVector  # (N,)
    bottom: FloatVector  # (N,), ones where the score is a mean

    @property
    def scorers(self) -> Scorers:
        """The one metric."""

        def mean(weights: Weights) -> FloatVector:
            return metrics.ratio(
                weights @ self.top, weights @ self.bottom, empty=np.nan
            )

        return {self.metric: mean}

    @property
    def columns(self) -> dict[str, Iterable[object]]:
        """For the table of rows, by header."""
        return {"top": self.top.tolist(), "bottom": self.bottom.tolist()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins(_Rows):
    """Numbers whose score is their median; where there are parts, the median of their medians."""

    metric: str
    margin: FloatVector  # (N,)
    part: IndexArray  # (N,), number of the part of each row

    @property
    def scorers(self) -> Scorers:
        """The one metric."""
        parts = [np.flatnonzero(self.part == part) for part in np.unique(self.part)]

        def median(weights: Weights) -> FloatVector:
            medians = [
                metrics.weighted_median(self.margin[rows], weights[:, rows])
                for rows in parts
            ]
            # a part that no weight has is left out
            return np.nanmedian(np.stack(medians), axis=0)

        return {self.metric: median}

    @property
    def columns(self) -> dict[str, Iterable[object]]:
        """For the table of rows, by header."""
        return {"margin": self.margin.tolist()}


Rows = Predictions | Risks | Values | Ratios | Margins


def per_class_rows(predictions: Predictions) -> list[Details]:
    """One mapping a class: name, rows, precision, recall, F1."""
    counts = predictions.counts
    columns = {"rows": counts.sum(axis=1), **metrics.per_class_scores(counts)}
    rows = []
    for c, name in enumerate(predictions.class_names):
        values = {header: column[c].item() for header, column in columns.items()}
        rows.append({"name": name, **values})
    return rows


def strict(value: object) -> Json:
    """The value with only what strict JSON holds: NaN and infinities become None."""
    if is_dataclass(value) and not isinstance(value, type):
        value = as_mapping(value)
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
