"""Scores of a user's own predictions: 95 % interval of a metric, and the difference of two models.

The values are those that `thinsection train` and `predict --labels` print for the same
predictions. The rows of a patient vary together, so the patient is the unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinsection.config import nearest
from thinsection.errors import InvalidInputError
from thinsection.evaluation import comparison
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.cell_values import class_name, event_of
from thinsection.evaluation.labels import encode_labels
from thinsection.evaluation.metrics import Flags, FloatVector, IndexArray, chance_of
from thinsection.evaluation.own_rows import (
    Values,
    cases_and_groups,
    check_finite_rows,
    numbers_of,
    texts_of,
)
from thinsection.evaluation.rows import METRIC_WORDS, Predictions, Risks, Rows
from thinsection.evaluation.rows import Values as ValueRows
from thinsection.types import Floats, counted, rounded

OF_RANKS = ("auroc", "auprc")
OF_PROBABILITIES = ("brier", "ece")
OF_CLASSES = ("balanced_accuracy", "macro_f1", "weighted_kappa")
OF_VALUES = ("pearson", "spearman", "r2", "mae")
OF_RISKS = ("c_index",)
METRICS = (*OF_RANKS, *OF_PROBABILITIES, *OF_CLASSES, *OF_VALUES, *OF_RISKS)
SEED = 0  # seed of the bootstrap, as in a validation; only ece needs it
_POSITIVE = "1"  # positive class of labels 0 and 1
_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MetricInterval:
    """Value of a metric with its 95 % confidence interval."""

    metric: str
    value: float
    low: float  # NaN if there is no interval
    high: float
    level: float  # nominal coverage, 0.95
    method: str  # method of the interval, with its papers
    rows: int
    units: int  # number of independent units
    unit: str  # kind of the units: patients, cases or rows
    missing: str = ""  # reason why there is no interval

    def __repr__(self) -> str:
        words = f"{_metric_words(self.metric)} {rounded(self.value, self.rows)}"
        if self.missing:
            return f"{words}, no interval: {self.missing}"
        ends = f"{rounded(self.low, self.rows)} to {rounded(self.high, self.rows)}"
        return f"{words}, {100 * self.level:.0f} % CI {ends} ({_rows_words(self)})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """Difference of a metric between two models on the same rows."""

    metric: str
    first: float  # score of the first model
    second: float
    difference: float  # first - second
    low: float  # ends of the interval of the difference
    high: float
    level: float  # nominal coverage, 0.95
    p_value: float  # two-sided, for no difference; not corrected for several tests
    detectable: float  # true difference that the test would find with a power of 80 %
    rows: int
    units: int  # number of independent units
    unit: str  # kind of the units: patients, cases or rows

    def __repr__(self) -> str:
        values = (self.first, self.second, self.difference, self.low, self.high)
        first, second, difference, low, high = (
            rounded(value, self.rows) for value in values
        )
        return (
            f"{_metric_words(self.metric)} {first} - {second} = {difference}, "
            f"{100 * self.level:.0f} % CI {low} to {high}, p = {self.p_value:.2g} "
            f"({_rows_words(self)})"
        )


def interval(
    labels: Values,
    scores: Values | Floats,
    metric: str = "auroc",
    *,
    patients: Values | None = None,
    positive: object = None,
    classes: Sequence[object] | None = None,
    time: Values | None = None,
    cases: Values | None = None,
    fold: Values | None = None,
    seed: int = SEED,
) -> MetricInterval:
    """Value of a metric with its 95 % confidence interval, patients as the units.

    The interval is that of `train` and of a validation for the same predictions: a jackknife over
    patients, with bounds by the kind of the metric.

    Args:
        labels: true class, number or event of each row, (N,): a list, an array or a column.
        scores: predictions. (N,) is the probability or score of the positive class, a predicted
            class, a number or a risk. (N, K) has the probability of each of K classes.
        metric: 'auroc', 'auprc', 'brier', 'ece', 'balanced_accuracy', 'macro_f1',
            'weighted_kappa', 'pearson', 'spearman', 'r2', 'mae' or 'c_index'.
        patients: patient of each row; without them, each case or row is its own unit.
        positive: class whose score (N,) is passed. Not needed for labels 0 and 1.
        classes: classes of the columns of (N, K), in their order; else they are sorted.
        time: of 'c_index', the time of the event or of the end of follow-up.
        cases: id of each row, if a case was predicted several times (repeated folds).
        fold: number of the model that predicted each row. Ranks are then compared within a model,
            and the interval is that of a cross-validation.
        seed: seed of the bootstrap, which only 'ece' needs.

    Returns:
        `value`, `low` and `high`; `missing` says why there is no interval.

    Memory: 64 MiB of row weights, and about 6 arrays of their size.

    Raises:
        InvalidInputError: another length, a missing value, scores that do not fit the metric.

    Source: `thinsection.evaluation.intervals` names the papers of each method.

    Examples:
        >>> grades = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
        >>> scores = [0.1, 0.2, 0.3, 0.2, 0.6, 0.4, 0.5, 0.9, 0.8, 0.7, 0.9, 0.6]
        >>> ts.interval(grades, scores, "auroc")
        AUROC 0.96, 95 % CI 0.65 to 1.00 (12 rows)
    """
    rows = _rows_of(
        labels,
        scores,
        metric,
        groups=_groups(labels, cases, patients),
        positive=positive,
        classes=classes,
        time=time,
        fold=fold,
    )
    bounds = rows.interval(metric, seed=seed)
    return MetricInterval(
        metric=metric,
        value=rows.value(metric),
        low=bounds.low,
        high=bounds.high,
        level=bounds.level,
        method=bounds.method,
        rows=len(rows.ids),
        units=bounds.units,
        unit=bounds.unit,
        missing=bounds.missing,
    )


def compare(
    labels: Values,
    first: Values | Floats,
    second: Values | Floats,
    metric: str = "auroc",
    *,
    patients: Values | None = None,
    positive: object = None,
    classes: Sequence[object] | None = None,
    time: Values | None = None,
    cases: Values | None = None,
    fold: Values | None = None,
) -> Comparison:
    """Compares two models on the same rows: difference of a metric, interval and p value.

    A paired jackknife over patients, as `train --compare` and `probe compare` use it. For AUROCs it
    is DeLong's test.

    Args:
        labels: as for `interval`.
        first, second: predictions of the two models, as `scores` of `interval`.
        metric: as for `interval`, without 'ece'.
        patients, positive, classes, time, cases, fold: as for `interval`.

    Returns:
        The difference first - second with its interval, and the p value for no difference.

    Memory: as `interval`, twice.

    Raises:
        InvalidInputError: as `interval`; fewer than 3 patients, or fewer than 2 of a class.

    Source: DeLong et al., Biometrics 44 (1988); Obuchowski, Biometrics 53 (1997).

    Examples:
        >>> ages = [30, 42, 55, 61, 70, 48]
        >>> first = [33, 40, 50, 60, 75, 47]
        >>> second = [40, 50, 47, 50, 60, 60]
        >>> ts.compare(ages, first, second, "mae")
        mean absolute error 2.83 - 9.83 = -7.00, 95 % CI -10.18 to -3.82, p = 0.0024 (6 rows)
    """
    if metric == "ece":
        raise InvalidInputError(
            "metric must be one whose difference has a test, got 'ece'; compare the interval of "
            "each model, or use 'brier'"
        )
    groups = _groups(labels, cases, patients)
    models = [
        _rows_of(
            labels,
            scores,
            metric,
            groups=groups,
            positive=positive,
            classes=classes,
            time=time,
            fold=fold,
        )
        for scores in (first, second)
    ]
    sampling = models[0].sampling
    jackknifed = comparison.jackknife(
        [rows.scorers[metric] for rows in models],
        [rows.sampling for rows in models],
        chance=chance_of(metric, len(sampling.units_by_stratum)),
    )
    difference = jackknifed.difference(0, 1)
    return Comparison(
        metric=metric,
        first=float(jackknifed.observed[0]),
        second=float(jackknifed.observed[1]),
        difference=difference.value,
        low=difference.low,
        high=difference.high,
        level=difference.level,
        p_value=difference.p_value,
        detectable=difference.detectable,
        rows=len(models[0].ids),
        units=sampling.units,
        unit=sampling.unit,
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """Names of the rows, and their units."""

    ids: tuple[str, ...]
    groups: Groups


def _groups(labels: Values, cases: Values | None, patients: Values | None) -> _Units:
    ids, groups = cases_and_groups(len(labels), cases, patients)
    return _Units(ids, groups)


def _rows_of(
    labels: Values,
    scores: Values | Floats,
    metric: str,
    *,
    groups: _Units,
    positive: object,
    classes: Sequence[object] | None,
    time: Values | None,
    fold: Values | None,
) -> Rows:
    """Predictions row by row, in the form that every interval of this package takes."""
    if metric not in METRICS:
        raise InvalidInputError(
            f"metric must be one of {', '.join(METRICS)}, got {metric!r}"
            f"{nearest(metric, METRICS)}"
        )
    num_rows = len(labels)
    folds = None if fold is None else _fold_numbers(fold, num_rows)
    if metric in OF_VALUES:
        truth = numbers_of(labels, "labels")
        predicted = numbers_of(scores, "scores", num_rows)
        return ValueRows(
            ids=groups.ids,
            groups=groups.groups,
            fold=folds,
            target_names=("value",),
            truth=truth[:, None],
            prediction=predicted[:, None],
        )
    if metric in OF_RISKS:
        if time is None:
            raise InvalidInputError(
                f"time must be given for {metric!r}, got none; pass time=..., one for each row"
            )
        risk = numbers_of(scores, "scores", num_rows)
        return Risks(
            ids=groups.ids,
            groups=groups.groups,
            fold=folds,
            risk=risk,
            high=risk > np.median(risk),
            event=_events(labels),
            time=numbers_of(time, "time", num_rows),
        )
    return _classified(
        texts_of(labels, "labels"),
        scores,
        metric,
        groups=groups,
        positive=None if positive is None else texts_of([positive], "positive")[0],
        classes=None if classes is None else texts_of(list(classes), "classes"),
        fold=folds,
    )


def _classified(
    labels: tuple[str, ...],
    scores: Values | Floats,
    metric: str,
    *,
    groups: _Units,
    positive: str | None,
    classes: tuple[str, ...] | None,
    fold: IndexArray | None,
) -> Predictions:
    """Predictions of classes: from probabilities (N, K), scores (N,) or predicted classes (N,)."""
    names, truth = encode_labels(labels, "labels", classes or ())
    if len(names) < 2:
        raise InvalidInputError(f"labels must have two classes, got only {names[0]!r}")
    if positive is not None:
        positive = class_name(positive)
        if positive not in names:
            raise InvalidInputError(
                f"positive must be one of {', '.join(names)}, got {positive!r}"
                f"{nearest(positive, names)}"
            )
    num_rows = len(labels)
    shape = np.shape(scores)
    if len(shape) == 2:
        probability = _columns(scores, num_rows, names)
    elif metric in OF_CLASSES and _are_classes(scores, names, num_rows):
        predicted = encode_labels(texts_of(scores, "scores", num_rows), "scores", names)
        return Predictions(
            ids=groups.ids,
            groups=groups.groups,
            fold=fold,
            class_names=names,
            truth=truth,
            prediction=predicted[1],
        )
    else:
        positive = positive or _usual_positive(names)
        score = numbers_of(scores, "scores", num_rows)
        # the first column is that of the other class
        order = [name for name in names if name != positive] + [positive]
        truth = np.array([order.index(names[label]) for label in truth], dtype=np.int64)
        names = tuple(order)
        probability = np.stack([1 - score, score], axis=1)
    if len(names) == 2 and positive == names[0]:
        names = names[::-1]
        truth = 1 - truth
        probability = probability[:, ::-1]
    needs_probabilities = metric not in OF_RANKS
    if needs_probabilities and not ((probability >= 0) & (probability <= 1)).all():
        raise InvalidInputError(
            f"scores must be probabilities from 0 to 1 for {metric!r}, got "
            f"{float(probability.min()):g} to {float(probability.max()):g}"
        )
    prediction = probability.argmax(axis=1)
    if len(names) == 2:
        prediction = (probability[:, 1] > _THRESHOLD).astype(np.int64)
    return Predictions(
        ids=groups.ids,
        groups=groups.groups,
        fold=fold,
        class_names=names,
        truth=truth,
        prediction=prediction,
        probability=probability,
    )


def _columns(
    scores: Values | Floats, num_rows: int, names: Sequence[str]
) -> FloatVector:
    """Probabilities (N, K), a column for each class."""
    columns = np.asarray(scores, dtype=np.float64)
    if columns.shape != (num_rows, len(names)):
        raise InvalidInputError(
            f"scores must be of shape ({num_rows}, {len(names)}), a column for each of "
            f"{', '.join(names)}, got {columns.shape}; classes=[...] names the columns"
        )
    check_finite_rows(columns, "scores")
    return columns


def _are_classes(scores: Values | Floats, names: Sequence[str], num_rows: int) -> bool:
    """True if every score is the name of a class."""
    texts = texts_of(scores, "scores", num_rows)
    return {class_name(text) for text in texts} <= {*names}


def _usual_positive(names: Sequence[str]) -> str:
    """The positive class of labels 0 and 1; other classes have to be chosen."""
    if len(names) > 2:
        raise InvalidInputError(
            f"scores must be of shape (N, {len(names)}) for {len(names)} classes, got (N,); pass "
            "a probability for each class"
        )
    if set(names) != {"0", _POSITIVE}:
        raise InvalidInputError(
            f"positive must be {names[0]!r} or {names[1]!r} where scores are (N,), got None; "
            f"pass positive={names[1]!r} if the scores are those of {names[1]!r}"
        )
    return _POSITIVE


def _events(labels: Values) -> Flags:
    """True for the rows with an event."""
    texts = texts_of(labels, "labels")
    events = [event_of(text) for text in texts]
    if None in events:
        wrong = texts[events.index(None)]
        raise InvalidInputError(
            f"labels must be 1 (event) or 0 (censored) for 'c_index', got {wrong!r}"
        )
    return np.array(events, dtype=bool)


def _fold_numbers(fold: Values, num_rows: int) -> IndexArray:
    """Number of the model of each row; any names are allowed."""
    names = texts_of(fold, "fold", num_rows)
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _metric_words(metric: str) -> str:
    return METRIC_WORDS.get(metric, metric)


def _rows_words(value: MetricInterval | Comparison) -> str:
    """Numbers of rows and of units: '60 rows of 40 patients'."""
    words = counted(value.rows, "row")
    if value.unit == "rows":
        return words
    return f"{words} of {counted(value.units, value.unit.removesuffix('s'))}"
