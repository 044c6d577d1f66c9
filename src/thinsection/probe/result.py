"""What a probe returns, and its plain form for a result file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.config import as_mapping
from thinsection.errors import require
from thinsection.probe import intervals, statistics
from thinsection.probe.data.sets import TileSet
from thinsection.probe.groups import Groups
from thinsection.probe.intervals import Bounds, Interval
from thinsection.probe.protocol import Metric, Protocol
from thinsection.probe.statistics import METRICS, Counts, FloatVector, IndexArray, Scorers

FORMAT_VERSION = 1
SWEPT = ("score_by_k", "score_by_c", "score_by_alpha")  # details
Choice = tuple[Any, ...]  # of settings
METRIC_WORDS = {
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "c_index": "Harrell's c-index",
    "robustness_index": "robustness index",
    "weighted_jaccard": "weighted Jaccard",
    "pearson": "Pearson correlation",
    "map": "mean average precision",
    "ece": "expected calibration error",
    "cosine": "mean cosine",
    "clustering_score": "clustering score",
    "apd": "average performance drop",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What a probe says row by row: `scorers` and `columns` (for the table, by header) of it."""

    ids: tuple[str, ...]  # (N,) names of the rows
    groups: Groups | None = None  # of the rows: what is resampled; None: the rows themselves
    fold: IndexArray | None = None  # (N,) of the model that predicted a row; None: one model

    @property
    def scorers(self) -> Scorers:
        """Every metric, its mean over folds."""
        return statistics.over_folds(self.fold, len(self.ids), self._scorers)

    def _scorers(self, rows: IndexArray) -> Scorers:
        """Of the rows of one fold."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions(_Rows):
    """Predictions of a classification."""

    class_names: tuple[str, ...]  # of labels 0..K-1
    truth: IndexArray  # (N,)
    prediction: IndexArray  # (N,)
    probability: FloatVector | None = None  # (N, K) class scores that sum to 1
    repeats: IndexArray | None = None  # (R, N) predictions of each seed, where they are scored

    def _scorers(self, rows: IndexArray) -> Scorers:  # of labels over seeds, their mean
        truth, k, p = self.truth[rows], len(self.class_names), self.probability
        seeds = [statistics.class_scorers(truth, guess[rows], k) for guess in self.each]
        labels = {name: statistics.mean_of([s[name] for s in seeds]) for name in seeds[0]}
        share = None if p is None else p[rows]
        return statistics.class_scorers(truth, self.prediction[rows], k, share) | labels

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
        return statistics.confusion_matrix(self.truth, self.prediction, len(self.class_names))

    @property
    def each(self) -> IndexArray:
        """(R, N): what is scored, one row of it a seed."""
        return self.prediction[None] if self.repeats is None else self.repeats

    def score(self, metric: str, *, seed: int) -> tuple[float, Interval]:
        """The mean over the seeds, with an interval over groups (rows)."""
        known: dict[str, Any] = {"num_classes": len(self.class_names), "groups": self.groups}
        score = METRICS[metric]
        return intervals.bootstrap_predictions(self.truth, self.each, score, seed=seed, **known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Risks(_Rows):
    """Risks of n cases, each from the model of the fold that left it out."""

    risk: FloatVector  # (n,), comparable within a fold only
    high: npt.NDArray[np.bool_]  # (n,), True where the risk is above its fold's median
    event: npt.NDArray[np.bool_]  # the follow-up, as the next
    time: FloatVector

    def _scorers(self, rows: IndexArray) -> Scorers:
        event, time, risk = self.event[rows], self.time[rows], self.risk[rows]
        return {"c_index": statistics.concordance(event, time, risk)}

    @property
    def columns(self) -> dict[str, Iterable[Any]]:
        """For the table of rows, by header."""
        flags = {"above_fold_median": self.high.astype(int), "event": self.event.astype(int)}
        return {"risk": self.risk.tolist(), **flags, "time": self.time.tolist()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Values(_Rows):
    """Predicted numbers; a metric is its mean over targets."""

    target_names: tuple[str, ...]  # (T,)
    truth: FloatVector  # (N, T)
    prediction: FloatVector

    def _scorers(self, rows: IndexArray) -> Scorers:
        return statistics.value_scorers(self.truth[rows], self.prediction[rows])

    @property
    def columns(self) -> dict[str, Iterable[Any]]:
        """For the table of rows, by header."""
        kinds = {"true": self.truth, "predicted": self.prediction}
        of_target = [(k, n, t) for t, n in enumerate(self.target_names) for k in kinds]
        return {f"{kind} {name}": kinds[kind][:, t].tolist() for kind, name, t in of_target}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios(_Rows):
    """What each row adds to a score that is sum / sum: neighbours of a kind, a cosine, ..."""

    metric: str
    top: FloatVector  # (N,)
    bottom: FloatVector  # (N,), ones where the score is a mean

    def _scorers(self, rows: IndexArray) -> Scorers:
        t, b = self.top[rows], self.bottom[rows]
        return {self.metric: lambda w: statistics.ratio(w @ t, w @ b, empty=np.nan)}

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
    remarks: tuple[str, ...] = ()  # what a person should read beside the score, line by line

    @property
    def metric_words(self) -> str:
        """The metric as a person reads it."""
        return METRIC_WORDS.get(self.metric, self.metric)

    @property
    def rows(self) -> Rows | None:
        """What it says of each row: enough to compare it with another result of the same rows."""
        return self.predictions or self.risks or self.values or self.ratios

    def as_mapping(self) -> dict[str, Any]:
        """Plain nested values without the rows (these go to CSV); NaN becomes None."""
        names = ("probe", "dataset", "metric", "score", "interval", "details")
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        mapping = {"format_version": FORMAT_VERSION, **own}
        mapping |= {"data": self.facts, "protocol": self.protocol}
        if self.rows is not None:
            mapping["metrics"] = statistics.all_scores(self.rows.scorers, len(self.rows.ids))
        if self.predictions is not None:
            mapping["classes"] = per_class_rows(self.predictions)
            mapping["confusion_matrix"] = self.predictions.counts.tolist()
        return strict(mapping)  # type: ignore[no-any-return]


def per_class_rows(predictions: Predictions) -> list[dict[str, Any]]:
    """One mapping a class: name, rows, precision, recall, F1."""
    counts = predictions.counts
    columns = {"rows": counts.sum(axis=1), **statistics.per_class_scores(counts)}
    rows = zip(predictions.class_names, *(v.tolist() for v in columns.values()), strict=True)
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
    more |= {"class_names": data.class_names, "groups": data.val.groups, "ids": data.val.ids}
    rows = Predictions(truth=data.val.labels, prediction=prediction, **more)
    sizes = {"train_rows": len(data.train), "val_rows": len(data.val)}
    facts = {**sizes, "dim": int(data.train.embeddings.shape[1]), **data.facts, **data.hashes}
    score, interval = rows.score(metric, seed=protocol.seed)
    known: dict[str, Any] = {"protocol": protocol, "details": details, "facts": facts}
    return scored(probe, data, rows, metric, score=score, interval=interval, **known)


def scored(
    probe: str, data: Any, rows: Rows, metric: str, *, bounds: Bounds = (0.0, 1.0), **known: Any
) -> ProbeResult:
    """The result whose score is a metric of its rows, with its interval, where none are given."""
    scorer, n = rows.scorers[metric], len(rows.ids)
    if "score" not in known:
        known["score"] = statistics.all_scores({metric: scorer}, n)[metric]
    if "interval" not in known:
        drawn: dict[str, Any] = {"seed": known["protocol"].seed, "groups": rows.groups}
        known["interval"] = intervals.bootstrap_rows(n, scorer, bounds=bounds, **drawn)
    known[type(rows).__name__.lower()] = rows  # its field: `values`, say
    return ProbeResult(probe=probe, dataset=data.name, metric=metric, **known)


def choices(result: ProbeResult) -> dict[Choice, float]:
    """The score of each setting that a probe tried."""
    d = result.details
    if curve := d.get("curve"):
        return {(lr, e): s for lr, scores in curve.items() for e, s in enumerate(scores, 1)}
    swept: dict[Any, float] = next((d[key] for key in SWEPT if key in d), {})
    return {(value,): score for value, score in swept.items()} or {(): result.score}


def selection_words(result: ProbeResult) -> str:
    """Where the settings of a score were chosen."""
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
    alike = len(rows) == len(results) and len({p.ids for p in rows}) == len(metrics) == 1
    found = f"{sorted(metrics)} of {[r.dataset for r in results]}"
    require(alike, "results must be probes of the same rows with one metric", found)
    first, size = results[0], (max(len(p.each) for p in rows), len(rows[0].truth))
    # a probe of one seed stands beside each seed of the others
    every = replace(rows[0], repeats=np.concatenate([np.resize(p.each, size) for p in rows]))
    _, interval = every.score(first.metric, seed=first.protocol.seed)
    details: dict[str, Any] = {r.probe: r.score for r in results}
    score = float(np.mean([*details.values()]))
    details["selected_on"] = "; ".join(f"{r.probe}: {selection_words(r)}" for r in results)
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
