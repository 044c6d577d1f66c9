"""Results of probes, and their plain form for a result file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.config import as_mapping
from thinsection.errors import InvalidInputError
from thinsection.evaluation import intervals, metrics
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.comparison import permutation_p, permuted_rows
from thinsection.evaluation.intervals import Interval, Sampling
from thinsection.evaluation.metrics import Counts, FloatVector, IndexArray, Scorers
from thinsection.evaluation.survival import concordance
from thinsection.probe.data.sets import TileSet
from thinsection.probe.protocol import Metric, Protocol

FORMAT_VERSION = 1
PERMUTATIONS = 199  # of the truth, for a p value
SWEPT = ("score_by_k", "score_by_c", "score_by_alpha")  # details
Choice = tuple[Any, ...]  # of settings
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
    groups: Groups | None = (
        None  # of the rows: what is resampled; None: the rows themselves
    )
    fold: IndexArray | None = (
        None  # (N,) of the model that predicted a row; None: one model
    )

    @property
    def scorers(self) -> Scorers:
        """Every metric as a function of row weights."""
        raise NotImplementedError

    @property
    def sampling(self) -> Sampling:
        """Units that an interval resamples, and how many of each class there are."""
        runs = len(self.ids) // len(set(self.ids))  # of a repeated cross-validation
        return Sampling.of_rows(
            len(self.ids),
            self.groups or self.ids,
            unit="rows" if self.fold is None else "cases",
            classes=getattr(self, "truth", None) if self.classed else None,
            events=getattr(self, "event", None),
            fold=self.fold,
            folds=None if self.fold is None else len(np.unique(self.fold)) // runs,
        )

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
    rows: "Predictions | Risks", metric: str, *, seed: int
) -> float | None:
    """p value of a score, by PERMUTATIONS of the truth over units within each fold.

    Of a repeated cross-validation the first run counts. None where a unit has several labels:
    units cannot exchange them then. Memory: that of one scorer.
    """
    if rows.fold is not None:
        first_run = np.sort(np.unique(rows.ids, return_index=True)[1])
        rows = rows.take(first_run)
    truth = rows.outcome
    rng = np.random.default_rng(seed)
    codes = rows.sampling.codes
    null = []
    for _ in range(PERMUTATIONS):
        order = np.arange(len(rows.ids))
        for part in metrics.folds_of(rows.fold, len(order)):
            permuted = permuted_rows(truth[part], codes[part], rng)
            if permuted is None:
                return None
            order[part] = part[permuted]
        null.append(rows.relabelled(order).value(metric))
    return permutation_p(rows.value(metric), null)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions(_Rows):
    """Predictions of a classification."""

    class_names: tuple[str, ...]  # of labels 0..K-1
    truth: IndexArray  # (N,)
    prediction: IndexArray  # (N,)
    probability: FloatVector | None = None  # (N, K) class scores that sum to 1
    repeats: IndexArray | None = (
        None  # (R, N) predictions of each seed, where they are scored
    )

    @property
    def classed(self) -> bool:
        """`truth` are classes."""
        return True

    @property
    def outcome(self) -> IndexArray:
        """(N, 1), what is predicted."""
        return self.truth[:, None]

    def take(self, rows: IndexArray) -> "Predictions":
        """Some of the rows."""
        return replace(
            self,
            ids=tuple(self.ids[i] for i in rows),
            groups=self.groups and self.groups.take(rows),
            fold=None if self.fold is None else self.fold[rows],
            truth=self.truth[rows],
            prediction=self.prediction[rows],
            probability=None if self.probability is None else self.probability[rows],
            repeats=None if self.repeats is None else self.repeats[:, rows],
        )

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
        seeds = [metrics.class_scorers(self.truth, of, k) for of in self.repeats]
        means: Scorers = {
            name: metrics.MeanScorer([seed[name] for seed in seeds])
            for name in seeds[0]
        }
        return scorers | means

    @property
    def columns(self) -> dict[str, Iterable[Any]]:
        """For the table of rows, by header."""
        names = self.class_names
        shares = () if self.probability is None else self.probability.T
        seeds = () if self.repeats is None else self.repeats
        return {
            "truth": [names[t] for t in self.truth],
            "prediction": [names[g] for g in self.prediction],
            "correct": (self.truth == self.prediction).astype(int),
            **{f"seed_{i}": [names[g] for g in of] for i, of in enumerate(seeds)},
            # every digit: a share of 1/3 lies on the edge of a bin of ECE
            **{f"p_{n}": s.tolist() for n, s in zip(names, shares, strict=False)},
        }

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

    @property
    def outcome(self) -> FloatVector:
        """(n, 2), what is predicted."""
        return np.stack([self.event, self.time], axis=1)

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

    def relabelled(self, order: IndexArray) -> "Risks":
        """The rows with the follow-up of others."""
        return replace(self, event=self.event[order], time=self.time[order])

    @property
    def scorers(self) -> Scorers:
        """The c-index."""
        return {"c_index": concordance(self.event, self.time, self.risk, self.fold)}

    @property
    def columns(self) -> dict[str, Iterable[Any]]:
        """For the table of rows, by header."""
        flags = {
            "above_fold_median": self.high.astype(int),
            "event": self.event.astype(int),
        }
        return {"risk": self.risk.tolist(), **flags, "time": self.time.tolist()}


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
    def columns(self) -> dict[str, Iterable[Any]]:
        """For the table of rows, by header."""
        kinds = {"true": self.truth, "predicted": self.prediction}
        of_target = [(k, n, t) for t, n in enumerate(self.target_names) for k in kinds]
        return {
            f"{kind} {name}": kinds[kind][:, t].tolist() for kind, name, t in of_target
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios(_Rows):
    """Parts that each row adds to a score that is sum / sum: neighbours of a kind, a cosine, ..."""

    metric: str
    top: FloatVector  # (N,)
    bottom: FloatVector  # (N,), ones where the score is a mean

    @property
    def scorers(self) -> Scorers:
        """The one metric."""
        return {
            self.metric: lambda w: metrics.ratio(
                w @ self.top, w @ self.bottom, empty=np.nan
            )
        }

    @property
    def columns(self) -> dict[str, Iterable[Any]]:
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
    details: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    predictions: Predictions | None = None  # row by row, where the probe classifies
    risks: Risks | None = None  # case by case, where it predicts survival
    values: Values | None = None  # row by row, where it predicts numbers
    ratios: Ratios | None = None  # row by row, where the score is a ratio of sums
    examples: Examples | None = None  # images with masks, where it segments
    remarks: tuple[
        str, ...
    ] = ()  # what a person should read beside the score, line by line

    @property
    def metric_words(self) -> str:
        """The metric as a person reads it."""
        return METRIC_WORDS.get(self.metric, self.metric)

    @property
    def rows(self) -> Rows | None:
        """Answers row by row: enough to compare it with another result of the same rows."""
        return self.predictions or self.risks or self.values or self.ratios

    def as_mapping(self) -> dict[str, Any]:
        """Plain nested values without the rows (these go to CSV); NaN becomes None."""
        names = ("probe", "dataset", "metric", "score", "interval", "details")
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        mapping = {"format_version": FORMAT_VERSION, **own}
        mapping |= {"data": self.facts, "protocol": self.protocol}
        if self.rows is not None:
            mapping["metrics"] = metrics.all_scores(
                self.rows.scorers, len(self.rows.ids)
            )
            mapping["pooled_over"] = {
                name: metrics.pooled_over(name) for name in self.rows.scorers
            }
        if self.predictions is not None:
            mapping["classes"] = per_class_rows(self.predictions)
            mapping["confusion_matrix"] = self.predictions.counts.tolist()
        return strict(mapping)  # type: ignore[no-any-return]


def per_class_rows(predictions: Predictions) -> list[dict[str, Any]]:
    """One mapping a class: name, rows, precision, recall, F1."""
    counts = predictions.counts
    columns = {"rows": counts.sum(axis=1), **metrics.per_class_scores(counts)}
    rows = zip(
        predictions.class_names, *(v.tolist() for v in columns.values()), strict=True
    )
    return [dict(zip(("name", *columns), row, strict=True)) for row in rows]


def classified(
    probe: str,
    data: TileSet,
    prediction: IndexArray,
    *,
    metric: Metric,
    protocol: Protocol,
    details: dict[str, Any],
    **more: Any,
) -> ProbeResult:
    """The result of a tile probe from its predictions on the validation split.

    `more` may hold `probability` and `repeats`, see `Predictions`.
    """
    more |= {
        "class_names": data.class_names,
        "groups": data.val.groups,
        "ids": data.val.ids,
    }
    rows = Predictions(truth=data.val.labels, prediction=prediction, **more)
    sizes = {"train_rows": len(data.train), "val_rows": len(data.val)}
    facts = {
        **sizes,
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
    probe: str, data: Any, rows: Rows, metric: str, *, protocol: Protocol, **known: Any
) -> ProbeResult:
    """The result whose score is a metric of its rows, with its interval, where none are given."""
    if "score" not in known:
        known["score"] = rows.value(metric)
    if "interval" not in known:
        known["interval"] = rows.interval(metric, seed=protocol.seed)
    known[type(rows).__name__.lower()] = rows  # its field: `values`, say
    return ProbeResult(
        probe=probe, dataset=data.name, metric=metric, protocol=protocol, **known
    )


def choices(result: ProbeResult) -> dict[Choice, float]:
    """The score of each setting that a probe tried."""
    d = result.details
    if curve := d.get("curve"):
        return {
            (lr, e): s for lr, scores in curve.items() for e, s in enumerate(scores, 1)
        }
    swept: dict[Any, float] = next((d[key] for key in SWEPT if key in d), {})
    return {(value,): score for value, score in swept.items()} or {(): result.score}


def selection_words(result: ProbeResult) -> str:
    """Sentence on where the settings of a score were chosen."""
    protocol, details, tried = result.protocol, result.details, len(choices(result))
    if "selected_on" in details:
        return str(details["selected_on"])
    if "best_epochs" in details:
        rule = "the epoch of the least loss on the scored images"
    elif tried > 1:
        rule = f"the best of {tried} settings on the scored rows"
    else:
        return "nothing was selected"
    return f"{rule}, as {protocol.name} has it: too high for a claim about new patients"


def tileset_result(results: Sequence[ProbeResult]) -> ProbeResult:
    """The tile-set score: the mean of probes of the same rows.

    Its interval resamples the rows, or their groups, for all at once. Raises InvalidInputError:
    probes of other rows, or with other metrics.
    """
    rows = [r.predictions for r in results if r.predictions is not None]
    metrics = {r.metric for r in results}
    alike = (
        len(rows) == len(results) and len({p.ids for p in rows}) == len(metrics) == 1
    )
    if not alike:
        raise InvalidInputError(
            "results must be probes of the same rows with one metric, "
            f"got {sorted(metrics)} of {[r.dataset for r in results]}"
        )
    first = results[0]
    size = (max(len(p.each) for p in rows), len(rows[0].truth))
    # a probe of one seed stands beside each seed of the others
    every = replace(
        rows[0], repeats=np.concatenate([np.resize(p.each, size) for p in rows])
    )
    interval = every.interval(first.metric, seed=first.protocol.seed)
    details: dict[str, Any] = {r.probe: r.score for r in results}
    score = float(np.mean([*details.values()]))
    details["selected_on"] = "; ".join(
        f"{r.probe}: {selection_words(r)}" for r in results
    )
    if nulls := [r.details["null_score"] for r in results if "null_score" in r.details]:
        details["null_score"] = float(np.mean(nulls))
    first = replace(first, probe="tileset", predictions=None)
    return replace(first, score=score, interval=interval, details=details)


def strict(value: Any) -> Any:
    """The value with only what strict JSON holds: NaN and infinities become None."""
    if is_dataclass(value):
        value = as_mapping(value)
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
