"""Results of probes, and their plain form for a result file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace

import numpy as np
import numpy.typing as npt

from thinsection.config import as_mapping
from thinsection.errors import InvalidInputError
from thinsection.evaluation import intervals, metrics
from thinsection.evaluation.cases import Groups, Unit
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
from thinsection.probe.data.sets import (
    LEFT_OUT,
    CaseSet,
    RobustnessSet,
    SurvivalSet,
    TileSet,
    ValueSet,
)
from thinsection.probe.protocol import Protocol
from thinsection.types import Json

FORMAT_VERSION = 1
PERMUTATIONS = 199  # of the truth, for a p value
SWEPT = ("score_by_k", "score_by_c", "score_by_alpha")  # details
Choice = tuple[str | float, ...]  # of settings
Details = dict[str, Json]  # plain values, as JSON holds them
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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Answers of a probe row by row: `scorers` and `columns` (for the table, by header) of it."""

    ids: tuple[str, ...]  # (N,) names of the rows
    # of the rows: what is resampled; None: nobody knows, so that each row counts as its own
    groups: Groups | None
    # (N,) of the model that predicted a row; None: one model
    fold: IndexArray | None = None

    @property
    def scorers(self) -> Scorers:
        """Every metric as a function of row weights."""
        raise NotImplementedError

    @property
    def sampling(self) -> Sampling:
        """Units that an interval resamples, and how many of each class there are."""
        # of a repeated cross-validation
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
        """The unit of each row: its patient, else itself."""
        unit: Unit = "rows" if self.fold is None else "cases"
        return self.groups or Groups.each(self.ids, unit)

    @property
    def first_rows(self) -> IndexArray:
        """The first row of each id: a case once, however often it was repeated."""
        return np.sort(np.unique(self.ids, return_index=True)[1])

    @property
    def classed(self) -> bool:
        """True where `truth` are classes."""
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

    None where a unit has several labels: units cannot exchange them then. Memory: that of one
    scorer.
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

    class_names: tuple[str, ...]  # of labels 0..K-1
    truth: IndexArray  # (N,)
    prediction: IndexArray  # (N,)
    probability: FloatVector | None = None  # (N, K) class scores that sum to 1
    # (R, N) predictions of each seed, where they are scored
    repeats: IndexArray | None = None

    @property
    def classed(self) -> bool:
        """`truth` are classes."""
        return True

    def relabelled(self, order: IndexArray) -> "Predictions":
        """The rows with the truth of others."""
        return replace(self, truth=self.truth[order])

    @property
    def scorers(self) -> Scorers:
        """Every metric; of labels the mean over seeds."""
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
            # every digit: a share of 1/3 lies on the edge of a bin of ECE
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
        """(R, N): what is scored, one row of it a seed."""
        return self.prediction[None] if self.repeats is None else self.repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Risks(_Rows):
    """Risks of n cases, each from the model of the fold that left it out."""

    risk: FloatVector  # (n,), comparable within a fold only
    high: npt.NDArray[np.bool_]  # (n,), True where the risk is above its fold's median
    event: npt.NDArray[np.bool_]  # the follow-up, as the next
    time: FloatVector

    def take(self, rows: IndexArray) -> "Risks":
        """Some of the rows."""
        return replace(
            self,
            ids=tuple(self.ids[i] for i in rows),
            groups=self.groups and self.groups.take(rows),
            fold=None if self.fold is None else self.fold[rows],
            risk=self.risk[rows],
            high=self.high[rows],
            event=self.event[rows],
            time=self.time[rows],
        )

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


Rows = Predictions | Risks | Values | Ratios


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Images of a segmentation to look at."""

    images: npt.NDArray[np.uint8]  # (M, H, W, 3)
    truth: npt.NDArray[np.uint8]  # (M, H, W) labels 0..K-1; 0 is background
    prediction: npt.NDArray[np.uint8]
    class_names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """One probe's score and everything that a person or another suite needs beside it."""

    probe: str  # its name: that of the files of its report
    dataset: str  # name of the data
    metric: str
    score: float  # what is compared between encoders
    interval: Interval | None  # of the score, over rows
    protocol: Protocol  # the whole of it
    # plain values: what the sweep saw (per learning rate, k, fold, ...), and what the data are
    # (sizes, source, split rule, encoder)
    details: Details = field(default_factory=dict)
    facts: Details = field(default_factory=dict)
    # answers row by row: enough to compare it with another result of the same rows
    rows: Rows | None = None
    examples: Examples | None = None  # images with masks, where it segments
    # what a person should read beside the score, line by line
    remarks: tuple[str, ...] = ()

    @property
    def left_out(self) -> dict[str, str]:
        """Why a slide or file could not be used, by name."""
        return dict(self.facts.get(LEFT_OUT, {}))

    @property
    def metric_words(self) -> str:
        """The metric as a person reads it."""
        return METRIC_WORDS.get(self.metric, self.metric)

    @property
    def predictions(self) -> Predictions | None:
        """The rows of a probe that classifies."""
        return self.rows if isinstance(self.rows, Predictions) else None

    def as_mapping(self) -> Details:
        """Plain nested values without the rows (these go to CSV); NaN becomes None."""
        mapping: dict[str, object] = {
            "format_version": FORMAT_VERSION,
            "probe": self.probe,
            "dataset": self.dataset,
            "metric": self.metric,
            "score": self.score,
            "interval": self.interval,
            "details": self.details,
            "data": self.facts,
            "protocol": self.protocol,
        }
        rows = self.rows
        if rows is not None:
            scorers = rows.scorers
            mapping["metrics"] = metrics.all_scores(scorers, len(rows.ids))
            mapping["pooled_over"] = {n: metrics.pooled_over(n) for n in scorers}
        if isinstance(rows, Predictions):
            mapping["classes"] = per_class_rows(rows)
            mapping["confusion_matrix"] = rows.counts.tolist()
        plain: Details = strict(mapping)
        return plain


def per_class_rows(predictions: Predictions) -> list[Details]:
    """One mapping a class: name, rows, precision, recall, F1."""
    counts = predictions.counts
    columns = {"rows": counts.sum(axis=1), **metrics.per_class_scores(counts)}
    rows = []
    for c, name in enumerate(predictions.class_names):
        values = {header: column[c].item() for header, column in columns.items()}
        rows.append({"name": name, **values})
    return rows


def classified(
    probe: str,
    data: TileSet,
    prediction: IndexArray,
    *,
    metric: str,
    protocol: Protocol,
    details: Details,
    probability: FloatVector | None = None,
    repeats: IndexArray | None = None,
) -> ProbeResult:
    """The result of a tile probe from its predictions on the validation split.

    `probability` and `repeats`: see `Predictions`.
    """
    rows = Predictions(
        ids=data.val.ids,
        groups=data.val.groups,
        class_names=data.class_names,
        truth=data.val.labels,
        prediction=prediction,
        probability=probability,
        repeats=repeats,
    )
    facts = {
        "train_rows": len(data.train),
        "val_rows": len(data.val),
        "dim": int(data.train.embeddings.shape[1]),
        **data.facts,
        **data.hashes,
    }
    if protocol.inner_folds and "null_score" in details:
        null_p = label_permutation_p(rows, metric, seed=protocol.seed)
        details = {**details, "null_p": null_p}
    return scored(
        probe, data, rows, metric, protocol=protocol, details=details, facts=facts
    )


def scored(
    probe: str,
    data: TileSet | ValueSet | RobustnessSet | CaseSet | SurvivalSet,
    rows: Rows,
    metric: str,
    *,
    protocol: Protocol,
    details: Details,
    facts: Details,
    score: float | None = None,
    interval: Interval | None = None,
) -> ProbeResult:
    """The result whose score is a metric of its rows, with its interval, where none are given."""
    if score is None:
        score = rows.value(metric)
    if interval is None:
        interval = rows.interval(metric, seed=protocol.seed)
    return ProbeResult(
        probe=probe,
        dataset=data.name,
        metric=metric,
        score=score,
        interval=interval,
        protocol=protocol,
        details=details,
        facts=facts,
        rows=rows,
    )


def choices(result: ProbeResult) -> dict[Choice, float]:
    """The score of each setting that a probe tried."""
    details = result.details
    scores: dict[Choice, float] = {}
    for lr, by_epoch in details.get("curve", {}).items():
        scores |= {(lr, epoch): score for epoch, score in enumerate(by_epoch, 1)}
    if scores:
        return scores
    for key in SWEPT:
        if key in details:
            return {(value,): score for value, score in details[key].items()}
    return {(): result.score}


def selection_words(result: ProbeResult) -> str:
    """Sentence on where the settings of a score were chosen."""
    protocol = result.protocol
    details = result.details
    tried = len(choices(result))
    if "selected_on" in details:
        return str(details["selected_on"])
    if "best_epochs" in details:
        rule = "the epoch with the lowest loss on the scored images"
    elif tried > 1:
        rule = f"the best of {tried} settings on the scored rows"
    else:
        return "nothing was selected"
    return (
        f"{rule}, as the protocol {protocol.name} requires: the score is too high for a claim "
        "about new patients"
    )


def tileset_result(results: Sequence[ProbeResult]) -> ProbeResult:
    """The tile-set score: the mean of probes of the same rows.

    Its interval is of the rows, or their groups, for all at once. Raises InvalidInputError:
    probes of other rows, or with other metrics.
    """
    rows = [r.predictions for r in results if r.predictions is not None]
    metric_names = {r.metric for r in results}
    row_ids = {p.ids for p in rows}
    if len(rows) < len(results) or len(row_ids) != 1 or len(metric_names) != 1:
        raise InvalidInputError(
            "results must be probes of the same rows with one metric, got "
            f"{sorted(metric_names)} of {[r.dataset for r in results]}"
        )
    first = results[0]
    # a probe of one seed stands beside each seed of the others
    size = (max(len(p.each) for p in rows), len(rows[0].truth))
    repeats = np.concatenate([np.resize(p.each, size) for p in rows])
    all_rows = replace(rows[0], repeats=repeats)
    words = [f"{r.probe}: {selection_words(r)}" for r in results]
    details: Details = {r.probe: r.score for r in results}
    details["selected_on"] = "; ".join(words)
    nulls = [r.details["null_score"] for r in results if "null_score" in r.details]
    if nulls:
        details["null_score"] = float(np.mean(nulls))
    return replace(
        first,
        probe="tileset",
        score=float(np.mean([r.score for r in results])),
        interval=all_rows.interval(first.metric, seed=first.protocol.seed),
        details=details,
        rows=None,
    )


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
