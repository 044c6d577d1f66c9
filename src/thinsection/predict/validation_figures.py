"""Figures of a validation: discrimination, calibration, decisions, net benefit, survival."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from thinsection.errors import DatasetError
from thinsection.evaluation import external
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.external import Estimate, recalibrated, smooth_calibration
from thinsection.evaluation.intervals import Sampling
from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    IndexArray,
    Scorers,
    class_distance,
    class_scorers,
    shown_of,
    value_scorers,
)
from thinsection.evaluation.plots import RiskGroup, risk_group, round_times
from thinsection.evaluation.rows import strict
from thinsection.evaluation.survival import (
    MIN_OF_EACH,
    auroc_until,
    brier_at,
    comparable_pairs,
    concordance,
    hazard_ratio,
    survival_bins,
    survival_probability,
    usable_times,
)
from thinsection.predict.model_file import Lock
from thinsection.predict.tested import (
    HEADLINE,
    Score,
    Tested,
    mean_over_labels,
    outcome_columns,
    score_table,
)
from thinsection.types import Document, Floats

SEED = 0  # seed of the bootstrap samples
OLD_MODEL = (
    "the model file contains no threshold and no baseline hazard; train the model again with "
    "this version to have them"
)
OF_CASE = ("auroc", "auprc", "brier", "ece")
AFTER = ("brier", "ece")  # scores that change after recalibration
OF_CLASSES = ("auroc", "auprc", "balanced_accuracy", "macro_f1", "brier", "ece")
OF_ORDERED_CLASSES = ("weighted_kappa", "mae", "balanced_accuracy", "ece")
OF_VALUES = ("r2", "mae", "pearson", "spearman")


class Survival(NamedTuple):
    """Follow-up and risk of the scored cases, (n,) each."""

    event: Flags
    time: FloatVector
    risk: FloatVector


def figures(rows: Tested, lock: Lock | None) -> Document:
    """All figures, as JSON stores them: headline, scores, and those for the kind of target.

    Args:
        rows: the scored cases.
        lock: values fixed in training; None if the model file was written by an earlier version.

    Raises DatasetError: no two survival times can be compared.
    """
    kind = rows.target.kind
    parts: Document = {
        "outcomes": [],
        "averaged": [],  # with several labels: labels whose mean score is reported
        "classes": None,
        "values": None,
        "survival": None,
    }
    missing = []
    if lock is None and kind not in ("multiclass", "ordinal", "regression"):
        missing.append(OLD_MODEL)
    scores: dict[str, Score] = {}
    if kind in ("cox", "discrete"):
        scores, parts["survival"], without = _survival(rows, lock or Lock())
        missing += without
    elif kind == "regression":
        scorers = _pick(value_scorers(rows.truth, rows.answers, rows.fold), OF_VALUES)
        sampling = Sampling.of_rows(rows.groups, fold=rows.fold)
        scores = score_table(scorers, sampling, seed=SEED)
        parts["values"] = external.value_line(
            rows.truth[:, 0], rows.answers[:, 0], rows.groups
        )
    else:
        parts["outcomes"] = _outcomes(rows, lock or Lock())
        if kind == "binary":
            scores = parts["outcomes"][0]["scores"]
        elif kind in ("multiclass", "ordinal"):
            scores, parts["classes"] = _classes(rows)
        else:
            scores, parts["averaged"], without = _label_means(rows)
            missing += without
        if lock is not None and kind not in ("multiclass", "ordinal"):
            missing += [
                f"{outcome['name']}: no threshold, because its validation cases had only one "
                "class"
                for outcome in parts["outcomes"]
                if outcome["threshold"] is None
            ]
    metric = "r2" if kind == "regression" else HEADLINE.get(kind, "auroc")
    value = None
    interval: list[float | None] = [None, None]
    if metric in scores:
        value = scores[metric]["value"]
        interval = [scores[metric]["low"], scores[metric]["high"]]
    document = {
        **parts,
        "missing": missing,
        "metric": metric,
        "value": value,
        "interval": interval,
        "scores": scores,
    }
    plain: Document = strict(document)
    return plain


def _pick(scorers: Scorers, names: Sequence[str]) -> Scorers:
    return {name: scorers[name] for name in names}


def _outcomes(rows: Tested, lock: Lock) -> list[Document]:
    """Figures of each outcome of `outcome_columns`."""
    several_classes = rows.target.kind in ("multiclass", "ordinal")
    predicted = rows.answers.argmax(axis=1)
    outcomes = []
    for k, column in enumerate(outcome_columns(rows)):
        threshold = lock.thresholds.get(column.name)
        called = None
        if rows.target.kind == "multiclass":
            called = predicted == k
        elif rows.target.kind == "ordinal":
            called = predicted > k
        elif threshold is not None:
            called = column.probability >= threshold
        by = "largest probability" if several_classes else "threshold"
        outcomes.append(
            {
                "name": column.name,
                "threshold": threshold,
                "threshold_cases": lock.inner_cases if threshold is not None else 0,
                "called_by": by if called is not None else None,
                **_outcome(
                    rows if column.rows is None else rows.take(column.rows),
                    column.truth,
                    column.probability,
                    called,
                ),
            }
        )
    return outcomes


def _outcome(
    rows: Tested, truth: Flags, probability: FloatVector, called: Flags | None
) -> Document:
    """Discrimination, calibration, decisions and net benefit for one class or label."""
    sampling = Sampling.of_rows(rows.groups, classes=truth, fold=rows.fold)
    decision = external.decision_curve(truth, probability, sampling)
    calls = None
    counts = None
    if called is not None:
        calls = external.threshold_metrics(truth, called, rows.groups)
        counts = {
            "true_positive": int((truth & called).sum()),
            "false_positive": int((~truth & called).sum()),
            "false_negative": int((truth & ~called).sum()),
            "true_negative": int((~truth & ~called).sum()),
        }
    return {
        "cases": len(truth),
        "units": rows.groups.total,
        "positive": int(truth.sum()),
        "scores": score_table(
            _label_scorers(truth, probability, rows.fold), sampling, seed=SEED
        ),
        "calls": calls,
        "counts": counts,
        "calibration": external.calibration_line(truth, probability, rows.groups),
        "calibration_curve": external.calibration_curve(
            truth, probability, rows.groups
        ),
        "smooth_calibration": _smooth(truth, probability, rows.groups),
        "recalibration": _recalibration(truth, probability, rows.groups, sampling),
        "decision_curve": {
            name: array.tolist() for name, array in vars(decision).items()
        },
    }


def _label_means(rows: Tested) -> tuple[dict[str, Score], list[str], list[str]]:
    """Mean scores over labels with both classes, their names, and why others are left out."""
    labels = []
    names = []
    missing = []
    for column in outcome_columns(rows):
        if column.rows is None or column.truth.all() or not column.truth.any():
            missing.append(
                f"{column.name}: not in the mean over labels, because it has no cases of two "
                "classes"
            )
            continue
        scorers = _label_scorers(
            column.truth, column.probability, rows.fold[column.rows]
        )
        labels.append((column.rows, scorers))
        names.append(column.name)
    if not labels:
        return {}, names, missing
    sampling = Sampling.of_rows(
        rows.groups, classes=rows.target.strata(rows.truth), fold=rows.fold
    )
    return score_table(mean_over_labels(labels), sampling, seed=SEED), names, missing


def _label_scorers(
    truth: Flags,
    probability: FloatVector,
    fold: IndexArray | None = None,
    *,
    names: Sequence[str] = OF_CASE,
) -> Scorers:
    """Scores of one class or label against the rest."""
    shares = np.stack([1 - probability, probability], axis=1)
    calls = (probability > 0.5).astype(np.int64)
    scorers = class_scorers(truth.astype(np.int64), calls, 2, shares, fold)
    return _pick(scorers, shown_of(names, len(truth)))


def _smooth(
    truth: Flags, probability: FloatVector, groups: Groups
) -> dict[str, list[float]] | None:
    """Smooth calibration curve with its band; None if there are too few cases."""
    band = smooth_calibration(truth, probability, groups)
    if band is None:
        return None
    return {
        "predicted": band.x.tolist(),
        "observed": band.y.tolist(),
        "low": band.low.tolist(),
        "high": band.high.tolist(),
    }


def _recalibration(
    truth: Flags, probability: FloatVector, groups: Groups, sampling: Sampling
) -> Document | None:
    """Recalibration on these cases, and the calibration after it; None if it is not possible."""
    new = recalibrated(truth, probability, groups)
    line = None
    if new is not None:
        line = external.calibration_line(truth, new.probability, groups)
    if new is None or line is None:
        return None
    return {
        "intercept": new.intercept,
        "slope": new.slope,
        "calibration": line,
        "scores": score_table(
            _label_scorers(truth, new.probability, names=AFTER), sampling, seed=SEED
        ),
        "smooth_calibration": _smooth(truth, new.probability, groups),
    }


def _classes(rows: Tested) -> tuple[dict[str, Score], Document]:
    """Scores over several classes, and the confusion matrix with an interval for each fraction."""
    truth = rows.truth[:, 0].astype(np.int64)
    predicted = rows.answers.argmax(axis=1)
    num_classes = len(rows.target.names)
    scorers: Scorers = class_scorers(
        truth, predicted, num_classes, rows.answers, rows.fold
    )
    scorers["mae"] = class_distance(truth, predicted)
    ordered = rows.target.kind == "ordinal"
    names = shown_of(OF_ORDERED_CLASSES if ordered else OF_CLASSES, len(truth))
    sampling = Sampling.of_rows(rows.groups, classes=truth, fold=rows.fold)
    scores = score_table(_pick(scorers, names), sampling, seed=SEED)
    counts = np.zeros((num_classes, num_classes), dtype=np.int64)
    np.add.at(counts, (truth, predicted), 1)
    shares = [
        [
            external.proportion(
                predicted[truth == true_class] == k,
                rows.groups.take(np.flatnonzero(truth == true_class)),
            )
            for k in range(num_classes)
        ]
        for true_class in range(num_classes)
    ]
    return scores, {
        "names": list(rows.target.names),
        "counts": counts.tolist(),
        "shares": shares,
        "accuracy": external.proportion(truth == predicted, rows.groups),
    }


def _survival(rows: Tested, lock: Lock) -> tuple[dict[str, Score], Document, list[str]]:
    """Scores, figures by risk group and by time, and the reasons for missing figures."""
    cases = Survival(
        event=rows.truth[:, 0] == 1,
        time=rows.truth[:, 1],
        risk=rows.target.risk(rows.answers),
    )
    blocks = comparable_pairs(cases.event, cases.time, rows.fold)
    if not any(block.any() for _, block in blocks):
        raise DatasetError(
            "labels must contain two cases whose times can be compared, got none in "
            f"{len(cases.time)} cases; add cases with an event before the end of another case"
        )
    sampling = Sampling.of_rows(rows.groups, events=cases.event, fold=rows.fold)
    scorers: Scorers = {"c_index": concordance(*cases, rows.fold)}
    scores = score_table(scorers, sampling, seed=SEED)
    times = usable_times(cases.event, cases.time, lock.horizons)
    missing = [
        f"no scores at {t:g}: fewer than {MIN_OF_EACH} events before this time, or "
        "fewer cases after it"
        for t in lock.horizons
        if t not in times
    ]
    survival = None
    if lock.times:
        baseline = (np.array(lock.times), np.array(lock.hazard))
        survival = survival_probability(baseline, cases.risk, np.array(times))
    elif rows.target.kind == "discrete":
        missing.append(
            "no Brier score: the model predicts time intervals, not survival"
        )
    at_times = _scores_at(cases, survival, times, sampling)
    ticks = round_times(float(cases.time.max()))
    groups, ratio = _risk_groups(cases, rows.groups, lock.risk_cut, ticks)
    if lock.risk_cut is not None and ratio is None:
        missing.append(
            "no hazard ratio: all cases are in one group, or one group has no event"
        )
    calibration = None
    if survival is not None and times:
        place = len(times) // 2
        bins = survival_bins(
            cases.event, cases.time, survival[:, place], times[place], rows.groups
        )
        calibration = {"time": times[place], "bins": bins}
    slope = None
    if rows.target.kind == "cox":
        # a slope of 1 means that the predicted risks have the right spread
        slope = hazard_ratio(*cases, rows.groups)
    if slope is not None:
        value, low, high = np.log([slope.value, slope.low, slope.high]).tolist()
        slope = replace(slope, value=value, low=low, high=high)
    parts = {
        "events": int(cases.event.sum()),
        "median_time": float(np.median(cases.time)),
        "risk_cut": lock.risk_cut,
        "groups": groups,
        "ticks": ticks.tolist(),
        "hazard_ratio": ratio,
        "slope": slope,
        "at_times": at_times,
        "calibration": calibration,
    }
    return scores, parts, missing


def _scores_at(
    cases: Survival,
    survival: Floats | None,
    times: Sequence[float],
    sampling: Sampling,
) -> list[Document]:
    """AUROC at each time; with predicted survival (n, times) also the Brier score."""
    event, time, risk = cases
    rows = []
    for i, t in enumerate(times):
        scorers: Scorers = {"auroc": auroc_until(event, time, risk, t)}
        if survival is not None:
            scorers["brier"] = brier_at(event, time, survival[:, i], t)
        counts = {
            "events": int((event & (time <= t)).sum()),
            "at_risk": int((time > t).sum()),
        }
        rows.append({"time": t, **counts, **score_table(scorers, sampling, seed=SEED)})
    return rows


def _risk_groups(
    cases: Survival, patients: Groups, cut: float | None, ticks: FloatVector
) -> tuple[list[RiskGroup], Estimate | None]:
    """Curves of low and high risk, and the hazard ratio; [] and None if there is no cut-off."""
    if cut is None:
        return [], None
    event, time, risk = cases
    high = risk > cut
    groups = [
        risk_group(
            name,
            event[members],
            time[members],
            patients.take(np.flatnonzero(members)),
            ticks,
        )
        for name, members in (("low risk", ~high), ("high risk", high))
        if members.any()
    ]
    if len(groups) < 2:
        return groups, None
    return groups, hazard_ratio(event, time, high.astype(np.float64), patients)
