"""A locked model on cases with labels: how well it does where nothing was fitted.

OUT/validation_MODEL/validation.json, index.html   figures with 95 % intervals; their page
                     cases.csv                     truth and answer of each labelled case

Cases of the training set are left out and named. Where all cases are of it, what is written is an
internal validation and says so.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.errors import DatasetError
from thinsection.evaluation import external, horizons
from thinsection.evaluation.cases import listed_names
from thinsection.evaluation.external import Estimate
from thinsection.evaluation.intervals import DRAWS, Sampling
from thinsection.evaluation.labels import Cohort, Floats, Target
from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    Scorers,
    class_scorers,
    value_scorers,
)
from thinsection.evaluation.survival import comparable_pairs, concordance
from thinsection.files.atomic import write_json, write_table, write_text
from thinsection.predict.model_file import Lock, ModelCard, Seen, versions
from thinsection.predict.tested import HEADLINE, score_table
from thinsection.predict.validation_page import validation_page
from thinsection.probe.curves import Column, Columns, RiskGroup, risk_group, round_times
from thinsection.store.identity import file_sum

SEED = 0  # of the resamples
FEW_INNER_CASES = 50
RETRAIN = "train the model again with this version to have it"
OLD_MODEL = "the model file fixes no threshold and no baseline hazard"
OF_CASE = ("auroc", "auprc", "brier", "ece")
OF_CLASSES = ("auroc", "auprc", "balanced_accuracy", "macro_f1", "brier", "ece")
OF_VALUES = ("r2", "mae", "pearson", "spearman")


@dataclass(frozen=True, kw_only=True)
class Locked:
    """A model that is not changed any more."""

    card: ModelCard
    file: str  # name of its file
    sha256: str  # of the file


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What a model says of a labelled case."""

    answers: tuple[float, ...]  # () where it says nothing
    members: int  # heads that were asked
    seen: Seen  # how the case is known from training
    warnings: tuple[str, ...]
    error: str


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The n cases that are scored."""

    target: Target
    truth: Floats  # (n, T), see `Cohort.values`
    answers: Floats  # (n, K), see `Target.answers`
    patients: tuple[str, ...]  # (n,)

    @property
    def unit(self) -> str:
        """What is resampled."""
        several = len(set(self.patients)) < len(self.patients)
        return "patients" if several else "cases"

    def sampling(
        self, *, classes: np.ndarray | None = None, events: np.ndarray | None = None
    ) -> Sampling:
        """Patients as units, with the classes or events by which they are counted."""
        return Sampling.of_rows(
            len(self.patients),
            self.patients,
            unit=self.unit,
            classes=classes,
            events=events,
        )


def write_validation(
    out: Path,
    model: Locked,
    cohort: Cohort,
    answered: Sequence[Answered],
    *,
    table: Path,
) -> dict[str, Any]:
    """Writes the figures, their page and the table of cases; what validation.json holds.

    Args:
        out: OUT/validation_MODEL.
        model: the model, whose card says what training fixed.
        cohort: cases with labels.
        answered: what the model says of each, (n,).
        table: file of the labels.

    Memory: BLOCK_BYTES of weights, and 16 n² bytes for survival.

    Raises DatasetError: no case is left, or no two times can be compared.
    """
    left_out = [_why_left_out(one) for one in answered]
    internal = all(one.seen in ("name", "content") for one in answered)
    if internal:
        left_out = [_why_no_test(one, model.card) for one in answered]
    kept = [i for i, why in enumerate(left_out) if not why]
    if not kept:
        shown = "; ".join(dict.fromkeys(left_out))
        raise DatasetError(
            f"labels must have cases that the model can be tested on, got none of "
            f"{len(answered)} ({shown}); give cases that were not trained on"
        )
    rows = Rows(
        target=model.card.target,
        truth=cohort.array[kept],
        answers=np.array([answered[i].answers for i in kept]),
        patients=tuple(cohort.patients[i] for i in kept),
    )
    document = {
        "validation": "internal" if internal else "external",
        "model": {
            "name": model.card.name,
            "file": model.file,
            "sha256": model.sha256,
            "head": model.card.head.head,
            "members": len(model.card.members),
        },
        "labels": {"file": table.name, "sha256": file_sum(table)},
        "task": rows.target.kind,
        "target": list(cohort.target.columns),
        "outputs": list(rows.target.names),
        "cases": len(kept),
        "slides": sum(len(cohort.slides[i]) for i in kept),
        "patients": len(set(rows.patients)),
        "left_out": [
            {"case": cohort.cases[i], "why": why}
            for i, why in enumerate(left_out)
            if why
        ],
        "account": list(cohort.account),
        "warnings": [
            *cohort.warnings,
            *_warnings(rows, cohort, answered, kept),
            *_threshold_warnings(model.card.lock),
        ],
        "resamples": {"number": DRAWS, "unit": rows.unit, "seed": SEED},
        "versions": versions(),
        **_figures(rows, model.card.lock),
    }
    write_table(out / "cases.csv", _case_lines(rows.target, cohort, answered, left_out))
    write_json(out / "validation.json", document)
    curves = Columns(_columns(rows), rows.sampling())
    page = validation_page(document, curves, rows.truth, rows.answers)
    write_text(out / "index.html", page)
    return document


def _why_left_out(one: Answered) -> str:
    """Why a case is not scored; '' where it is."""
    if one.seen == "name":
        return "of the training set"
    if one.seen == "content":
        return "the embeddings of a training slide under another name"
    return _why_unanswered(one)


def _why_unanswered(one: Answered) -> str:
    return "" if one.answers else f"no prediction: {one.error}"


def _why_no_test(one: Answered, card: ModelCard) -> str:
    """Why a training case is not scored: no head is left that has not seen it."""
    if one.answers and one.members == len(card.members):
        return "of the training set, and every head has seen it"
    return _why_unanswered(one)


def _warnings(
    rows: Rows, cohort: Cohort, answered: Sequence[Answered], kept: Sequence[int]
) -> list[str]:
    """What a reader must know before the figures."""
    warnings = []
    near = [cohort.cases[i] for i in kept if answered[i].seen == "near"]
    if near:
        warnings.append(
            f"nearly the mean embedding of a training slide: {len(near)} of {len(kept)} cases "
            f"({listed_names(near)}); if they show the same tissue, the figures flatter"
        )
    unlike = [
        cohort.cases[i]
        for i in kept
        if any(
            line.startswith("unlike the training set") for line in answered[i].warnings
        )
    ]
    if unlike:
        warnings.append(
            f"unlike the training set: {len(unlike)} of {len(kept)} cases "
            f"({listed_names(unlike)})"
        )
    if rows.unit == "patients":
        warnings.append(
            f"{len(rows.patients)} cases are of {len(set(rows.patients))} patients: intervals of "
            "discrimination and calibration error resample patients; those of the threshold, the "
            "calibration line and survival take cases as independent and are too narrow"
        )
    return warnings


def _threshold_warnings(lock: Lock | None) -> list[str]:
    """A sentence where a threshold was chosen on few cases."""
    if lock is None or not lock.thresholds or lock.inner_cases >= FEW_INNER_CASES:
        return []
    return [
        f"the threshold was chosen on {lock.inner_cases} inner cases: other cases would have given "
        "another one"
    ]


def _figures(rows: Rows, lock: Lock | None) -> dict[str, Any]:
    """All figures: the headline, scores, and what belongs to the kind of the target."""
    kind = rows.target.kind
    figures: dict[str, Any] = {
        "outcomes": [],
        "classes": None,
        "values": None,
        "survival": None,
        "missing": [],
    }
    if lock is None and kind not in ("multiclass", "regression"):
        figures["missing"].append(f"{OLD_MODEL}; {RETRAIN}")
    fixed = lock or Lock()
    if kind in ("cox", "discrete"):
        scores, survival, missing = _survival(rows, fixed)
        figures["survival"] = survival
        figures["missing"] += missing
    elif kind == "regression":
        scores = _pick(
            score_table(
                value_scorers(rows.truth, rows.answers), rows.sampling(), seed=SEED
            ),
            OF_VALUES,
        )
        figures["values"] = _value_line(rows)
    else:
        outcomes = _outcomes(rows, fixed)
        figures["outcomes"] = outcomes
        scores = outcomes[0]["scores"]
        if kind == "multiclass":
            scores, figures["classes"] = _classes(rows)
        if kind == "multilabel":
            scores = {}
        if lock is not None and kind != "multiclass":
            for outcome in outcomes:
                if outcome["threshold"] is None:
                    figures["missing"].append(
                        f"{outcome['name']}: no threshold, as its inner cases were of one class"
                    )
    metric = HEADLINE.get(kind, "auroc")
    if kind == "regression":
        metric = "r2"
    headline = scores.get(metric) or {"value": None, "low": None, "high": None}
    figures["metric"] = metric
    figures["value"] = headline["value"]
    figures["interval"] = [headline["low"], headline["high"]]
    figures["scores"] = scores
    return figures


def _pick(table: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: table[name] for name in names}


def _columns(rows: Rows) -> list[Column]:
    """Each class or label against the rest; of two classes the second alone."""
    target = rows.target
    if target.kind == "multilabel":
        truths = [label == 1 for label in rows.truth.T]
    elif target.exclusive:
        truths = [rows.truth[:, 0] == k for k in range(len(target.names))]
    else:
        return []
    columns = [
        Column(name, truth, probability)
        for name, truth, probability in zip(
            target.names, truths, rows.answers.T, strict=True
        )
    ]
    return columns[1:] if target.kind == "binary" else columns


def _outcomes(rows: Rows, lock: Lock) -> list[dict[str, Any]]:
    """Figures of each class or label against the rest; of two classes the second alone."""
    multiclass = rows.target.kind == "multiclass"
    outcomes = []
    for k, column in enumerate(_columns(rows)):
        threshold = lock.thresholds.get(column.name)
        called = None
        if multiclass:
            called = rows.answers.argmax(axis=1) == k
        elif threshold is not None:
            called = column.probability >= threshold
        by = "largest probability" if multiclass else "threshold"
        outcomes.append(
            {
                "name": column.name,
                "threshold": threshold,
                "threshold_cases": lock.inner_cases if threshold is not None else 0,
                "called_by": by if called is not None else None,
                **_outcome(rows, column.truth, column.probability, called),
            }
        )
    return outcomes


def _outcome(
    rows: Rows, truth: Flags, probability: FloatVector, called: Flags | None
) -> dict[str, Any]:
    """Discrimination, calibration, calls and net benefit of one class or label."""
    labels = truth.astype(np.int64)
    shares = np.stack([1 - probability, probability], axis=1)
    scorers = class_scorers(labels, (probability > 0.5).astype(np.int64), 2, shares)
    line = external.calibration_line(truth, probability)
    calls = None
    if called is not None:
        metrics = external.threshold_metrics(truth, called)
        calls = {name: plain_estimate(found) for name, found in metrics.items()}
    decision = external.decision_curve(truth, probability)
    return {
        "positive": int(truth.sum()),
        "scores": score_table(
            _pick(scorers, OF_CASE), rows.sampling(classes=labels), seed=SEED
        ),
        "calls": calls,
        "counts": None if called is None else _counts(truth, called),
        "calibration": None
        if line is None
        else {
            "intercept": plain_estimate(line.intercept),
            "slope": plain_estimate(line.slope),
        },
        "calibration_curve": [
            {"predicted": one.predicted, "observed": plain_estimate(one.observed)}
            for one in external.calibration_curve(truth, probability)
        ],
        "decision_curve": {
            "thresholds": decision.thresholds.tolist(),
            "model": decision.model.tolist(),
            "treat_all": decision.treat_all.tolist(),
        },
    }


def _counts(truth: Flags, called: Flags) -> dict[str, int]:
    return {
        "true_positive": int((truth & called).sum()),
        "false_positive": int((~truth & called).sum()),
        "false_negative": int((truth & ~called).sum()),
        "true_negative": int((~truth & ~called).sum()),
    }


def _classes(rows: Rows) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores over several classes, and the confusion matrix with an interval of each share."""
    truth = rows.truth[:, 0].astype(np.int64)
    predicted = rows.answers.argmax(axis=1)
    num_classes = len(rows.target.names)
    scorers: Scorers = class_scorers(truth, predicted, num_classes, rows.answers)
    scores = score_table(
        _pick(scorers, OF_CLASSES), rows.sampling(classes=truth), seed=SEED
    )
    counts = np.zeros((num_classes, num_classes), dtype=np.int64)
    np.add.at(counts, (truth, predicted), 1)
    shares = [
        [
            plain_estimate(external.proportion(int(count), int(row.sum())))
            for count in row
        ]
        for row in counts
    ]
    right = external.proportion(int(np.trace(counts)), len(truth))
    return scores, {
        "names": list(rows.target.names),
        "counts": counts.tolist(),
        "shares": shares,
        "accuracy": plain_estimate(right),
    }


def _value_line(rows: Rows) -> dict[str, Any] | None:
    """Line of the measured on the predicted value; None where that is not known."""
    line = external.value_line(rows.truth[:, 0], rows.answers[:, 0])
    if line is None:
        return None
    return {
        "intercept": plain_estimate(line.intercept),
        "slope": plain_estimate(line.slope),
    }


def _survival(
    rows: Rows, lock: Lock
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Scores, figures by risk group and by time, and what is missing."""
    event = rows.truth[:, 0] == 1
    time = rows.truth[:, 1]
    risk = rows.target.risk(rows.answers)
    if not comparable_pairs(event, time).any():
        raise DatasetError(
            "labels must have two cases whose times can be compared, got none of "
            f"{len(time)} cases; give cases with an event before another's time"
        )
    sampling = rows.sampling(events=event)
    scores = score_table(
        {"c_index": concordance(event, time, risk)}, sampling, seed=SEED
    )
    times = horizons.usable_times(event, time, lock.horizons)
    missing = [
        f"no scores at {t:g}: fewer than {horizons.MIN_OF_EACH} events before, or cases after it"
        for t in lock.horizons
        if t not in times
    ]
    survival = None
    if lock.times:
        baseline = (np.array(lock.times), np.array(lock.hazard))
        survival = external.survival_probability(baseline, risk, np.array(times))
    elif rows.target.kind == "discrete":
        missing.append(
            "no Brier score: the model predicts intervals of time, no survival"
        )
    at_times = []
    for i, t in enumerate(times):
        scorers: Scorers = {"auroc": horizons.auroc_until(event, time, risk, t)}
        if survival is not None:
            scorers["brier"] = horizons.brier_at(event, time, survival[:, i], t)
        at_times.append({"time": t, **score_table(scorers, sampling, seed=SEED)})
    ratio = None
    groups: list[RiskGroup] = []
    ticks = round_times(float(time.max()))
    if lock.risk_cut is not None:
        high = risk > lock.risk_cut
        for name, of_group in (("low risk", ~high), ("high risk", high)):
            if of_group.any():
                groups.append(risk_group(name, event[of_group], time[of_group], ticks))
        found = None
        if len(groups) == 2:
            found = external.hazard_ratio(event, time, high.astype(np.float64))
        ratio = None if found is None else plain_estimate(found)
        if found is None:
            missing.append(
                "no hazard ratio: all cases are in one group, or one group has no event"
            )
    slope = None
    if rows.target.kind == "cox":
        slope = _risk_slope(event, time, risk)
    return (
        scores,
        {
            "events": int(event.sum()),
            "median_time": float(np.median(time)),
            "risk_cut": lock.risk_cut,
            "groups": groups,
            "ticks": ticks.tolist(),
            "hazard_ratio": ratio,
            "slope": slope,
            "at_times": at_times,
            "calibration": _survival_calibration(event, time, survival, times),
        },
        missing,
    )


def _risk_slope(
    event: Flags, time: FloatVector, risk: FloatVector
) -> dict[str, Any] | None:
    """Slope of the log hazard on the log risk: 1 where risks are spread as they should be."""
    found = external.hazard_ratio(event, time, risk)
    if found is None:
        return None
    value, low, high = np.log([found.value, found.low, found.high]).tolist()
    return {
        "value": value,
        "low": low,
        "high": high,
        "cases": found.cases,
        "method": found.method,
    }


def _survival_calibration(
    event: Flags, time: FloatVector, survival: Floats | None, times: Sequence[float]
) -> dict[str, Any] | None:
    """Observed survival of cases of similar predicted survival, at the middle time."""
    if survival is None or not times:
        return None
    place = len(times) // 2
    bins = external.survival_bins(event, time, survival[:, place], times[place])
    return {
        "time": times[place],
        "bins": [
            {"predicted": one.predicted, "observed": plain_estimate(one.observed)}
            for one in bins
        ],
    }


def plain_estimate(found: Estimate) -> dict[str, Any]:
    """An estimate for JSON, None in place of NaN."""
    told = asdict(found)
    for name in ("value", "low", "high"):
        told[name] = told[name] if np.isfinite(told[name]) else None
    return told


def _case_lines(
    target: Target,
    cohort: Cohort,
    answered: Sequence[Answered],
    left_out: Sequence[str],
) -> list[dict[str, Any]]:
    """Rows of cases.csv."""
    lines = []
    for i, one in enumerate(answered):
        values = cohort.values[i]
        line: dict[str, Any] = {
            "case_id": cohort.cases[i],
            "patient_id": cohort.patients[i],
            "slides": ";".join(cohort.slides[i]),
        }
        if target.exclusive:
            line["truth"] = target.names[int(values[0])]
        else:
            columns = cohort.target.columns
            line |= {
                f"truth_{column}": value
                for column, value in zip(columns, values, strict=True)
            }
        line |= target.cells(one.answers)
        line["members"] = one.members
        line["left_out"] = left_out[i]
        line["warnings"] = "; ".join(one.warnings)
        lines.append(line)
    return lines
