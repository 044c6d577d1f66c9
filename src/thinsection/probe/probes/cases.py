"""Probes over folds: logistic and Cox regression of slides (cases); HEST's ridge."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

from thinsection.errors import DatasetError, importing, require
from thinsection.evaluation import metrics
from thinsection.evaluation.embeddings import check_finite
from thinsection.evaluation.intervals import interval
from thinsection.evaluation.metrics import FloatVector, Fold, IndexArray, Scorer
from thinsection.evaluation.splits import grouped_folds, stratified_folds
from thinsection.evaluation.survival import concordance
from thinsection.probe import protocol as suites
from thinsection.probe.data.sets import CaseSet, SurvivalSet, ValueSet, data_hashes
from thinsection.probe.honest import honest_cases
from thinsection.probe.protocol import NANOPATH, Protocol
from thinsection.probe.result import (
    Predictions,
    ProbeResult,
    Risks,
    Values,
    label_permutation_p,
    scored,
)

Cases = CaseSet | SurvivalSet
Folds = Sequence[Fold]
Parts = Sequence[Any]  # what the model of each fold answers of its validation rows


def slide_probe(cases: CaseSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Logistic regression: the mean AUROC over folds at the best C (ties: the smallest C).

    Memory: 8 n D (scikit-learn's copy) + 8 n K per C. Raises DatasetError: a fold lacks a class;
    InvalidInputError: a class has fewer cases than folds; ConfigError: the protocol defines no
    slide probe.
    """
    settings: suites.LogisticSettings = protocol.require("logistic")
    if protocol.inner_folds:
        return _nested("slide", slide_probe, cases, protocol)
    x = cases.vectors.astype(np.float64) if settings.double else cases.vectors
    solver: dict[str, Any] = {"solver": "lbfgs"}
    if cases.name in settings.liblinear_tasks:
        solver = {"solver": "liblinear", "dual": len(x) < x.shape[1]}
    given = {
        "class_weight": "balanced",
        "max_iter": settings.max_iter,
        "random_state": 0,
        **solver,
    }

    def fit(c: float, train: IndexArray, val: IndexArray) -> FloatVector:
        model = LogisticRegression(C=c, **given).fit(x[train], cases.labels[train])
        return model.predict_proba(x[val])  # type: ignore[no-any-return]

    folds = _folds(cases, protocol)
    best, parts, scores = _swept(cases, folds, settings.cs, fit)
    by_c = {
        f"{c:g}": float(metrics.mean_with_value(of_folds))
        for c, of_folds in scores.items()
    }
    details = {"best_c": best, "score_by_c": by_c, "fold_scores": scores[best]}
    return _result("slide", cases, folds, parts, protocol=protocol, details=details)


def survival_probe(cases: SurvivalSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Mean Harrell's c-index over folds of a Cox model.

    Memory: 8 (n D + D²) of the solver, and n² of the bootstrap per fold. Raises
    MissingDependencyError: scikit-survival is not installed; ConfigError: the protocol defines no
    survival probe.
    """
    settings: suites.SurvivalSettings = protocol.require("survival")
    if protocol.inner_folds:
        return _nested("survival", survival_probe, cases, protocol)
    folds = _folds(cases, protocol)
    best, parts, scores = _swept(
        cases, folds, settings.alphas, partial(_risk, cases, settings)
    )
    means = {
        a: float(metrics.mean_with_value(of_folds)) for a, of_folds in scores.items()
    }
    details = {
        "fold_scores": scores[best],
        "model": settings.model,
        "score_by_alpha": means,
    }
    return _result("survival", cases, folds, parts, protocol=protocol, details=details)


def _risk(
    cases: SurvivalSet,
    settings: suites.SurvivalSettings,
    alpha: float,
    *fold: IndexArray,
) -> FloatVector:
    """Risk scores of the validation cases."""
    train, val = fold
    with importing("the survival probe needs scikit-survival", "probe"):
        from sksurv.linear_model import CoxnetSurvivalAnalysis, CoxPHSurvivalAnalysis
        from sksurv.util import Surv
    x = cases.vectors.astype(np.float64)
    if settings.z_scores:
        x = (x - x[train].mean(axis=0)) / (x[train].std(axis=0) + 1e-8)
    if settings.rotate and x.shape[1] > len(train):
        x = x @ np.linalg.svd(x[train], full_matrices=False)[2].T
    steps = settings.max_iter
    if settings.model == "cox":
        model = CoxPHSurvivalAnalysis(alpha=alpha, ties="breslow", n_iter=steps)
    else:
        model = CoxnetSurvivalAnalysis(
            alphas=[alpha], l1_ratio=settings.l1_ratio, max_iter=steps
        )
    model.fit(x[train], Surv.from_arrays(cases.event[train], cases.time[train]))
    return np.asarray(model.predict(x[val]), dtype=np.float64)


def _swept(
    cases: Cases, folds: Folds, values: Sequence[float], fit: Callable[..., FloatVector]
) -> tuple[float, list[FloatVector], dict[float, list[float]]]:
    """The best value of a sweep, what its folds answer, and the scores of each value's folds."""
    answers = {value: [fit(value, *fold) for fold in folds] for value in values}
    scorers = {value: _scorers(cases, folds, parts) for value, parts in answers.items()}
    scores = {
        value: _fold_scores(folds, of_folds) for value, of_folds in scorers.items()
    }
    best = max(
        scores, key=lambda value: float(metrics.mean_with_value(scores[value]))
    )  # max keeps the first of equals
    return best, answers[best], scores


def _nested(
    name: str, run: Callable[..., Any], cases: Cases, protocol: Protocol
) -> ProbeResult:
    """Under a protocol with inner folds."""
    folds, found, beside = honest_cases(run, cases, protocol, _folds)
    known = [
        (r.predictions and r.predictions.probability, r.risks and r.risks.risk)
        for r in found
    ]
    parts = [risk if share is None else share for share, risk in known]
    return _result(name, cases, folds, parts, protocol=protocol, details=beside)


def _folds(cases: Cases, protocol: Protocol) -> Folds:
    """The dataset's own folds, else drawn ones: over patients where one has several cases.

    They are stratified by label, or event. Raises DatasetError: the parts of a fold share patients,
    or cases of one vector, or a part lacks a class, so that it can neither train nor score.
    """
    strata, drawn = cases.strata, {"folds": protocol.folds, "seed": protocol.seed}
    names = cases.class_names if isinstance(cases, CaseSet) else ()
    if cases.folds:
        folds: Folds = cases.folds
    elif cases.shared_patients:
        folds = grouped_folds(strata, cases.shared_patients, **drawn)
    else:
        folds = stratified_folds(strata, class_names=names, **drawn)
    cases.leakage(folds)
    for i, fold in enumerate(folds):
        for part, rows in zip(("train", "validation"), fold, strict=True):
            there = set(strata[rows].tolist())
            missing = ", ".join(name for c, name in enumerate(names) if c not in there)
            rule = f"the {part} part of each fold must hold every class"
            found = f"none of {missing} in fold {i} of {cases.name!r}"
            require(not missing, rule, found, error=DatasetError)
    return folds


def _scorers(cases: Cases, folds: Folds, parts: Parts) -> list[Scorer]:
    """By fold: the score of its validation rows, AUROC or Harrell's c-index, under weights."""
    pairs = [(part, val) for part, (_, val) in zip(parts, folds, strict=True)]
    if isinstance(cases, CaseSet):
        return [
            partial(metrics.macro_auroc, part, cases.labels[val]) for part, val in pairs
        ]
    event, time = cases.event, cases.time
    return [concordance(event[val], time[val], risk) for risk, val in pairs]


def _fold_scores(folds: Folds, scorers: list[Scorer]) -> list[float]:
    """By fold: the score of its validation rows, each counted once."""
    pairs = zip(scorers, folds, strict=True)
    return [float(score(np.ones((1, len(val))))[0]) for score, (_, val) in pairs]


def _rows(data: Cases | ValueSet, folds: Folds) -> tuple[IndexArray, dict[str, Any]]:
    """All validation rows, fold after fold, and whose they are."""
    rows, sizes = (
        np.concatenate([val for _, val in folds]),
        [len(val) for _, val in folds],
    )
    ids, groups = (
        tuple(data.ids[i] for i in rows),
        data.groups and data.groups.take(rows),
    )
    return rows, {
        "ids": ids,
        "groups": groups,
        "fold": np.repeat(np.arange(len(folds)), sizes),
    }


def _result(
    probe: str,
    cases: Cases,
    folds: Folds,
    parts: Parts,
    *,
    protocol: Protocol,
    **known: Any,
) -> ProbeResult:
    """The score of what the folds answer, with an interval over cases."""
    (rows, said), answers = _rows(cases, folds), np.concatenate(parts)
    facts: dict[str, Any] = {"cases": len(cases.ids)}
    if isinstance(cases, CaseSet):
        said |= {"class_names": cases.class_names, "truth": cases.labels[rows]}
        said |= {"prediction": answers.argmax(axis=1), "probability": answers}
        metric = "auroc"
        known["predictions"] = Predictions(**said)
    else:
        high = np.concatenate([risk > np.median(risk) for risk in parts])
        said |= {"event": cases.event[rows], "time": cases.time[rows], "risk": answers}
        metric = "c_index"
        known["risks"] = Risks(high=high, **said)
        facts["events"] = int(cases.event.sum())
    facts |= {
        "dim": cases.vectors.shape[1],
        "fold_sizes": [[len(train), len(val)] for train, val in folds],
        **cases.facts,
        **cases.hashes(folds),
        "leakage": cases.leakage(folds),
    }
    said_rows = known.get("predictions") or known["risks"]
    if protocol.inner_folds:  # one score of pairs of the same fold
        score = said_rows.value(metric)
        found = said_rows.interval(metric, seed=protocol.seed)
        null_p = label_permutation_p(said_rows, metric, seed=protocol.seed)
        known["details"] = {**known["details"], "null_p": null_p}
    else:  # the suite's own: a mean over folds
        scorers = _scorers(cases, folds, parts)
        score = float(metrics.mean_with_value(_fold_scores(folds, scorers)))
        mean = metrics.fold_mean(scorers, metrics.folds_of(said["fold"], len(rows)))
        found = interval(said_rows.sampling, mean, metric, seed=protocol.seed)
    return ProbeResult(
        probe=probe,
        dataset=cases.name,
        metric=metric,
        score=score,
        interval=found,
        facts=facts,
        protocol=protocol,
        **known,
    )


def regression_probe(data: ValueSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Mean Pearson correlation over targets, then over folds, of ridge on principal components.

    Per fold: z-scores, PCA, ridge without intercept at alpha 100 / (components x targets). A target
    that is constant in a fold's validation rows does not count there (HEST's mean is NaN then).

    Memory: 8 N D + 16 N T. Source: HEST-1k (mahmoodlab/HEST), `hest.bench`.
    """
    check_finite(data.embeddings, data.ids)
    rows, known = _rows(data, data.folds)
    guesses = [_ridge(data, *fold, protocol) for fold in data.folds]
    pairs = zip(guesses, (val for _, val in data.folds), strict=True)
    by_target = [
        metrics.pearson(data.targets[v], g, np.ones((1, len(v))))[0] for g, v in pairs
    ]
    known |= {"truth": data.targets[rows], "prediction": np.concatenate(guesses)}
    scores = [float(np.nanmean(found)) for found in by_target]
    means = dict(
        zip(data.target_names, np.nanmean(by_target, axis=0).tolist(), strict=True)
    )
    details = {"fold_scores": scores, "pearson_by_target": means}
    asked = (
        data.ids,
        data.targets.tolist(),
        [(t.tolist(), v.tolist()) for t, v in data.folds],
    )
    facts = {"rows": len(data.ids), "dim": data.embeddings.shape[1], **data.facts}
    facts |= data_hashes([data.embeddings], asked)
    values = Values(target_names=data.target_names, **known)
    parts = metrics.folds_of(known["fold"], len(rows))
    by_fold = [
        metrics.value_scorers(values.truth[part], values.prediction[part])["pearson"]
        for part in parts
    ]
    mean = metrics.fold_mean(by_fold, parts)
    return scored(
        "regression",
        data,
        values,
        "pearson",
        protocol=protocol,
        details=details,
        facts=facts,
        score=float(np.nanmean(scores)),
        interval=interval(values.sampling, mean, "pearson", seed=protocol.seed),
    )


def _ridge(
    data: ValueSet, train: IndexArray, val: IndexArray, protocol: Protocol
) -> FloatVector:
    """Predictions (n_val, T) by HEST's rule.

    HEST hands the components on as torch tensors: they are rounded to float32, and
    scikit-learn converts them to float64 for the fit.
    """
    settings = protocol.regression
    scaler = StandardScaler().fit(data.embeddings[train])
    x = [scaler.transform(data.embeddings[rows]) for rows in (train, val)]
    most = min(settings.components, *x[0].shape)
    pca = PCA(n_components=most, random_state=settings.seed)
    # `fit_transform`, as HEST has it: of a randomised decomposition it is not `transform` of `fit`
    x = [
        part.astype(np.float32).astype(np.float64)
        for part in (pca.fit_transform(x[0]), pca.transform(x[1]))
    ]
    alpha = 100 / (most * data.targets.shape[1])
    known = {"random_state": settings.seed, "fit_intercept": False, "max_iter": 1000}
    model = Ridge(solver="lsqr", alpha=alpha, **known).fit(x[0], data.targets[train])
    return np.asarray(model.predict(x[1]), dtype=np.float64).reshape(len(val), -1)
