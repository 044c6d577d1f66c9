"""Results of probes, and their plain form for a result file."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation import metrics
from thinsection.evaluation.intervals import Interval
from thinsection.evaluation.metrics import FloatVector, IndexArray
from thinsection.evaluation.rows import (
    METRIC_WORDS,
    Details,
    Predictions,
    Rows,
    label_permutation_p,
    per_class_rows,
    strict,
)
from thinsection.probe.data.sets import (
    LEFT_OUT,
    CaseSet,
    RobustnessSet,
    SurvivalSet,
    TileSet,
    ValueSet,
)
from thinsection.probe.protocol import Protocol

FORMAT_VERSION = 1
SWEPT = ("score_by_k", "score_by_c", "score_by_alpha")  # details
Choice = tuple[str | float, ...]  # of settings


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
