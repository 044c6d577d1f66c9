"""Probes over folds: logistic and Cox regression of slides (cases); HEST's ridge."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

from thinsection.errors import DatasetError
from thinsection.evaluation import metrics
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.comparison import permuted_labels
from thinsection.evaluation.cox import cox_elastic_net, cox_ridge
from thinsection.evaluation.embeddings import check_finite
from thinsection.evaluation.intervals import interval
from thinsection.evaluation.metrics import FloatVector, Fold, IndexArray, Scorer
from thinsection.evaluation.rows import (
    Details,
    Predictions,
    Risks,
    Values,
)
from thinsection.evaluation.splits import grouped_folds, stratified_folds
from thinsection.evaluation.survival import concordance, martingale_residuals
from thinsection.probe import protocol as suites
from thinsection.probe.data.sets import CaseSet, SurvivalSet, ValueSet, data_hashes
from thinsection.probe.honest import Cases, ProbeFunction, honest_cases
from thinsection.probe.protocol import NANOPATH, Protocol
from thinsection.probe.result import ProbeResult, scored

Folds = Sequence[Fold]
Parts = Sequence[FloatVector]  # answers of each fold's model on its validation rows


def slide_probe(cases: CaseSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Logistic regression: the mean AUROC over folds at the best C (ties: the smallest C).

    Memory: 8 n D (scikit-learn's copy) + 8 n K per C. Raises DatasetError: a fold lacks a class;
    InvalidInputError: a class has fewer cases than folds; ConfigError: the protocol defines no
    slide probe.
    """
    settings = protocol.require("logistic", suites.LogisticSettings)
    if protocol.inner_folds:
        return _nested("slide", slide_probe, cases, protocol)
    x = cases.vectors.astype(np.float64) if settings.double else cases.vectors
    uses_liblinear = cases.name in settings.liblinear_tasks

    def fit(c: float, train: IndexArray, val: IndexArray) -> FloatVector:
        model = LogisticRegression(
            C=c,
            class_weight="balanced",
            max_iter=settings.max_iter,
            random_state=0,
            solver="liblinear" if uses_liblinear else "lbfgs",
            dual=uses_liblinear and len(x) < x.shape[1],
        )
        model.fit(x[train], cases.labels[train])
        return np.asarray(model.predict_proba(x[val]))

    folds = _folds(cases, protocol)
    best, parts, scores = _sweep(cases, folds, settings.cs, fit)
    details = {
        "best_c": best,
        "score_by_c": {
            f"{c:g}": float(metrics.nan_mean(fold_scores))
            for c, fold_scores in scores.items()
        },
        "fold_scores": scores[best],
    }
    return _result("slide", cases, folds, parts, protocol=protocol, details=details)


def survival_probe(cases: SurvivalSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Mean Harrell's c-index over folds of a Cox model.

    Memory: 32 n D + 16 D² of the solver, and n² of the bootstrap per fold. Raises DatasetError: a
    fold trains on censored cases alone; InvalidInputError: the model cannot be fitted; ConfigError:
    the protocol defines no survival probe.
    """
    settings = protocol.require("survival", suites.SurvivalSettings)
    if protocol.inner_folds:
        return _nested("survival", survival_probe, cases, protocol)
    folds = _folds(cases, protocol)
    fit = partial(_risk, cases, settings)
    best, parts, scores = _sweep(cases, folds, settings.alphas, fit)
    details = {
        "fold_scores": scores[best],
        "model": settings.model,
        "score_by_alpha": {
            alpha: float(metrics.nan_mean(fold_scores))
            for alpha, fold_scores in scores.items()
        },
    }
    return _result("survival", cases, folds, parts, protocol=protocol, details=details)


def _risk(
    cases: SurvivalSet,
    settings: suites.SurvivalSettings,
    alpha: float,
    train: IndexArray,
    val: IndexArray,
) -> FloatVector:
    """Risk scores of the validation cases."""
    x = cases.vectors.astype(np.float64)
    if settings.z_scores:
        x = (x - x[train].mean(axis=0)) / (x[train].std(axis=0) + 1e-8)
    if settings.rotate and x.shape[1] > len(train):
        x = x @ np.linalg.svd(x[train], full_matrices=False)[2].T
    arguments = x[train], cases.event[train], cases.time[train]
    if settings.model == "cox":
        coefficients = cox_ridge(*arguments, penalty=alpha, max_steps=settings.max_iter)
    else:
        assert settings.l1_ratio is not None, "every elastic net has a ratio"
        coefficients = cox_elastic_net(
            *arguments,
            penalty=alpha,
            l1_ratio=settings.l1_ratio,
            max_steps=settings.max_iter,
        )
    return x[val] @ coefficients


def _sweep(
    cases: Cases,
    folds: Folds,
    values: Sequence[float],
    fit: Callable[[float, IndexArray, IndexArray], FloatVector],
) -> tuple[float, list[FloatVector], dict[float, list[float]]]:
    """The best value of a sweep, answers of its folds, and the scores of each value's folds."""
    answers: dict[float, list[FloatVector]] = {}
    scores: dict[float, list[float]] = {}
    means: dict[float, float] = {}
    for value in values:
        answers[value] = [fit(value, train, val) for train, val in folds]
        scorers = _scorers(cases, folds, answers[value])
        scores[value] = _fold_scores(folds, scorers)
        means[value] = float(metrics.nan_mean(scores[value]))
    best = max(means, key=means.__getitem__)  # max keeps the first of equals
    return best, answers[best], scores


def _nested(
    name: str, probe: ProbeFunction, cases: Cases, protocol: Protocol
) -> ProbeResult:
    """Result under a protocol with inner folds."""
    folds, results, details = honest_cases(probe, cases, protocol, _folds)
    parts = []
    for result in results:
        rows = result.rows
        if isinstance(rows, Predictions) and rows.probability is not None:
            parts.append(rows.probability)
        elif isinstance(rows, Risks):
            parts.append(rows.risk)
    return _result(name, cases, folds, parts, protocol=protocol, details=details)


def _folds(cases: Cases, protocol: Protocol) -> Folds:
    """The dataset's own folds, else drawn ones: over patients where one has several cases.

    They are stratified by label, or event. Raises DatasetError: the parts of a fold share patients,
    or cases of one vector, or a part lacks a class, so that it can neither train nor score, or the
    training part of survival lacks an event.
    """
    strata = cases.strata
    names = cases.class_names if isinstance(cases, CaseSet) else ()
    folds: Folds
    if cases.folds:
        folds = cases.folds
    elif cases.shared_patients:
        folds = grouped_folds(
            strata, cases.shared_patients, folds=protocol.folds, seed=protocol.seed
        )
    else:
        folds = stratified_folds(
            strata, folds=protocol.folds, seed=protocol.seed, class_names=names
        )
    cases.leakage(folds)
    for number, fold in enumerate(folds):
        for part, rows in zip(("train", "validation"), fold, strict=True):
            present = set(strata[rows].tolist())
            missing = [name for c, name in enumerate(names) if c not in present]
            if missing:
                raise DatasetError(
                    f"the {part} part of each fold must contain every class, got none of "
                    f"{', '.join(missing)} in fold {number} of {cases.name!r}"
                )
        if isinstance(cases, SurvivalSet) and not cases.event[fold[0]].any():
            raise DatasetError(
                "the train part of each fold must contain a case with an event, got censored cases "
                f"alone in fold {number} of {cases.name!r}"
            )
    return folds


def _scorers(cases: Cases, folds: Folds, parts: Parts) -> list[Scorer]:
    """Score of each fold's validation rows under weights: AUROC or Harrell's c-index."""
    scorers: list[Scorer] = []
    for part, (_, val) in zip(parts, folds, strict=True):
        if isinstance(cases, CaseSet):
            scorers.append(partial(metrics.macro_auroc, part, cases.labels[val]))
        else:
            scorers.append(concordance(cases.event[val], cases.time[val], part))
    return scorers


def _fold_scores(folds: Folds, scorers: list[Scorer]) -> list[float]:
    """Score of each fold's validation rows, each counted once."""
    pairs = zip(scorers, folds, strict=True)
    return [float(score(np.ones((1, len(val))))[0]) for score, (_, val) in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoredRows:
    """All validation rows, fold after fold."""

    rows: IndexArray  # of the data
    ids: tuple[str, ...]
    groups: Groups | None
    fold: IndexArray  # number of the fold of each row

    @classmethod
    def of_folds(cls, data: Cases | ValueSet, folds: Folds) -> "_ScoredRows":
        """Validation rows of folds."""
        rows = np.concatenate([val for _, val in folds])
        sizes = [len(val) for _, val in folds]
        return cls(
            rows=rows,
            ids=tuple(data.ids[row] for row in rows),
            groups=data.groups.take(rows) if data.groups else None,
            fold=np.repeat(np.arange(len(folds)), sizes),
        )


def _result(
    probe: str,
    cases: Cases,
    folds: Folds,
    parts: Parts,
    *,
    protocol: Protocol,
    details: Details,
) -> ProbeResult:
    """The score of the folds' answers, with an interval over cases."""
    scored_rows = _ScoredRows.of_folds(cases, folds)
    facts: Details = {"cases": len(cases.ids)}
    answered: Predictions | Risks
    if isinstance(cases, CaseSet):
        metric = "auroc"
        answered = _predictions(cases, scored_rows, parts)
    else:
        metric = "c_index"
        answered = _risks(cases, scored_rows, parts)
        facts["events"] = int(cases.event.sum())
    facts |= {
        "dim": cases.vectors.shape[1],
        "fold_sizes": [[len(train), len(val)] for train, val in folds],
        **cases.facts,
        **cases.hashes(folds),
        "leakage": cases.leakage(folds),
    }
    score = None  # one score of pairs of the same fold
    score_interval = None
    if protocol.inner_folds:
        details = {**details, "null_p": _null_p(cases, folds, seed=protocol.seed)}
    else:  # the suite's own: a mean over folds
        scorers = _scorers(cases, folds, parts)
        score = float(metrics.nan_mean(_fold_scores(folds, scorers)))
        rows_by_fold = metrics.folds_of(scored_rows.fold, len(scored_rows.rows))
        mean = metrics.fold_mean(scorers, rows_by_fold)
        score_interval = interval(answered.sampling, mean, metric, seed=protocol.seed)
    return scored(
        probe,
        cases,
        answered,
        metric,
        protocol=protocol,
        details=details,
        facts=facts,
        score=score,
        interval=score_interval,
    )


def _null_p(cases: Cases, folds: Folds, *, seed: int) -> float | None:
    """p value of a linear head on the vectors, by permutations of outcomes over patients.

    None where no fold has two classes.

    The head is fitted anew for each permutation. Permutations of the truth alone, beside the same
    answers, would give too small a p: each fold's cases also trained the models of the others, so
    that the scores of the folds depend on each other. The outcome of survival is its martingale
    residual. Memory: as `permuted_labels`.
    """
    patients = np.unique(cases.shared_patients or cases.ids, return_inverse=True)[1]
    if isinstance(cases, CaseSet):
        outcome = cases.labels.astype(np.float64)
        num_classes = len(cases.class_names)
    else:
        outcome = martingale_residuals(cases.event, cases.time)
        num_classes = 0
    vectors = cases.vectors.astype(np.float64)
    permuted = permuted_labels(
        vectors, outcome, num_classes, folds, patients, seed=seed
    )
    return None if permuted is None else permuted.p_value


def _predictions(cases: CaseSet, scored_rows: _ScoredRows, parts: Parts) -> Predictions:
    """Predicted classes of all validation cases."""
    probability = np.concatenate(parts)
    return Predictions(
        ids=scored_rows.ids,
        groups=scored_rows.groups,
        fold=scored_rows.fold,
        class_names=cases.class_names,
        truth=cases.labels[scored_rows.rows],
        prediction=probability.argmax(axis=1),
        probability=probability,
    )


def _risks(cases: SurvivalSet, scored_rows: _ScoredRows, parts: Parts) -> Risks:
    """Predicted risks of all validation cases; high ones are above the median of their fold."""
    return Risks(
        ids=scored_rows.ids,
        groups=scored_rows.groups,
        fold=scored_rows.fold,
        event=cases.event[scored_rows.rows],
        time=cases.time[scored_rows.rows],
        risk=np.concatenate(parts),
        high=np.concatenate([risk > np.median(risk) for risk in parts]),
    )


def regression_probe(data: ValueSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Mean Pearson correlation over targets, then over folds, of ridge on principal components.

    Per fold: z-scores, PCA, ridge without intercept at alpha 100 / (components x targets). A target
    that is constant in a fold's validation rows does not count there (HEST's mean is NaN then).

    Memory: 8 N D + 16 N T. Source: HEST-1k (mahmoodlab/HEST), `hest.bench`.
    """
    check_finite(data.embeddings, data.ids)
    predictions = []
    pearson_by_fold = []
    for train, val in data.folds:
        prediction = _ridge(data, train, val, protocol)
        ones = np.ones((1, len(val)))
        predictions.append(prediction)
        pearson_by_fold.append(metrics.pearson(data.targets[val], prediction, ones)[0])
    scores = [float(np.nanmean(by_target)) for by_target in pearson_by_fold]
    target_means = np.nanmean(pearson_by_fold, axis=0).tolist()
    scored_rows = _ScoredRows.of_folds(data, data.folds)
    values = Values(
        ids=scored_rows.ids,
        groups=scored_rows.groups,
        fold=scored_rows.fold,
        target_names=data.target_names,
        truth=data.targets[scored_rows.rows],
        prediction=np.concatenate(predictions),
    )
    rows_by_fold = metrics.folds_of(scored_rows.fold, len(scored_rows.rows))
    scorers = [
        metrics.value_scorers(values.truth[rows], values.prediction[rows])["pearson"]
        for rows in rows_by_fold
    ]
    mean = metrics.fold_mean(scorers, rows_by_fold)
    folds = [(train.tolist(), val.tolist()) for train, val in data.folds]
    hashed_rows = (data.ids, data.targets.tolist(), folds)
    return scored(
        "regression",
        data,
        values,
        "pearson",
        protocol=protocol,
        details={
            "fold_scores": scores,
            "pearson_by_target": dict(
                zip(data.target_names, target_means, strict=True)
            ),
        },
        facts={
            "rows": len(data.ids),
            "dim": data.embeddings.shape[1],
            **data.facts,
            **data_hashes([data.embeddings], hashed_rows),
        },
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
    train_scores = scaler.transform(data.embeddings[train])
    val_scores = scaler.transform(data.embeddings[val])
    num_components = min(settings.components, *train_scores.shape)
    pca = PCA(n_components=num_components, random_state=settings.seed)
    # `fit_transform`, as HEST has it: of a randomised decomposition it is not `transform` of `fit`
    x_train = pca.fit_transform(train_scores).astype(np.float32).astype(np.float64)
    x_val = pca.transform(val_scores).astype(np.float32).astype(np.float64)
    model = Ridge(
        solver="lsqr",
        alpha=100 / (num_components * data.targets.shape[1]),
        random_state=settings.seed,
        fit_intercept=False,
        max_iter=1000,
    )
    model.fit(x_train, data.targets[train])
    return np.asarray(model.predict(x_val), dtype=np.float64).reshape(len(val), -1)
