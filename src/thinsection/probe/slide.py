"""Slide probe: logistic regression on one vector per case, swept over C, over folds."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import DatasetError
from thinsection.probe.bootstrap import bootstrap_rows
from thinsection.probe.cases import CaseSet
from thinsection.probe.metrics import macro_auroc
from thinsection.probe.protocol import NANOPATH, LogisticSettings, Protocol
from thinsection.probe.result import Predictions, ProbeResult
from thinsection.probe.splits import Fold, stratified_folds

Probability = npt.NDArray[np.float64]  # (n, K)


def slide_probe(cases: CaseSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Mean AUROC over folds at the best C (ties: the smallest C).

    Memory: 8 n D (scikit-learn's float64 copy) + 8 n K per C.

    Raises:
        DatasetError: a fold lacks a class.
        InvalidInputError: a class has fewer cases than folds.
        ConfigError: the protocol defines no slide probe.
    """
    settings: LogisticSettings = protocol.require("logistic")
    folds = case_folds(cases, protocol)
    by_c = {c: [_fit(cases, fold, c, settings.max_iter) for fold in folds] for c in settings.cs}
    scores = {c: _fold_scores(cases, folds, parts) for c, parts in by_c.items()}
    best = max(scores, key=lambda c: np.mean(scores[c]))
    details: dict[str, Any] = {
        "best_c": best,
        "score_by_c": {f"{c:g}": float(np.mean(s)) for c, s in scores.items()},
        "fold_scores": scores[best],
    }
    return fold_result("slide", cases, folds, by_c[best], protocol=protocol, details=details)


def case_folds(cases: CaseSet, protocol: Protocol) -> list[Fold]:
    """The dataset's own folds, or the protocol's stratified ones.

    Raises:
        DatasetError: a part of a fold lacks a class, so that it can neither train nor score.
    """
    if cases.folds is not None:
        folds = list(cases.folds)
    else:
        folds = stratified_folds(
            cases.labels, folds=protocol.folds, seed=protocol.seed, class_names=cases.class_names
        )
    for i, fold in enumerate(folds):
        for part, rows in zip(("train", "validation"), fold, strict=True):
            absent = set(range(len(cases.class_names))) - set(cases.labels[rows].tolist())
            if absent:
                names = ", ".join(cases.class_names[c] for c in sorted(absent))
                raise DatasetError(
                    f"the {part} part of each fold must hold every class, got none of {names} "
                    f"in fold {i} of {cases.name!r}"
                )
    return folds


def fold_result(
    probe: str,
    cases: CaseSet,
    folds: list[Fold],
    parts: list[Probability],
    *,
    protocol: Protocol,
    details: dict[str, Any],
) -> ProbeResult:
    """The result of probabilities per fold: mean fold AUROC, interval over cases in the folds.

    The interval resamples all validation rows together and scores each fold on its own rows, so
    that probabilities of two models are never ranked against each other.
    """
    rows = np.concatenate([val for _, val in folds])
    probability, truth = np.concatenate(parts), cases.labels[rows]
    edges = np.cumsum([0, *(len(val) for _, val in folds)])
    spans = [slice(a, b) for a, b in pairwise(edges)]

    def mean_auroc(weights: npt.NDArray) -> npt.NDArray[np.float64]:
        areas = [macro_auroc(probability[s], truth[s], weights[:, s]) for s in spans]
        return np.mean(areas, axis=0)  # type: ignore[no-any-return]

    return ProbeResult(
        probe=probe,
        dataset=cases.name,
        metric="auroc",
        score=float(np.mean(_fold_scores(cases, folds, parts))),
        interval=bootstrap_rows(len(rows), mean_auroc, seed=protocol.seed),
        protocol=protocol,
        details=details,
        facts={
            "cases": len(cases.ids),
            "dim": int(cases.vectors.shape[1]),
            "fold_sizes": [[len(train), len(val)] for train, val in folds],
            **cases.facts,
        },
        predictions=Predictions(
            class_names=cases.class_names,
            ids=tuple(cases.ids[i] for i in rows),
            truth=truth,
            prediction=probability.argmax(axis=1),
            probability=probability,
        ),
    )


def _fit(cases: CaseSet, fold: Fold, c: float, max_iter: int) -> Probability:
    """Class probabilities of the validation rows."""
    from sklearn.linear_model import LogisticRegression

    train, val = fold
    model = LogisticRegression(C=c, class_weight="balanced", max_iter=max_iter, random_state=0)
    model.fit(cases.vectors[train].astype(np.float64), cases.labels[train])
    return model.predict_proba(cases.vectors[val].astype(np.float64))  # type: ignore[no-any-return]


def _fold_scores(cases: CaseSet, folds: list[Fold], parts: list[Probability]) -> list[float]:
    return [
        float(macro_auroc(probability, cases.labels[val])[0])
        for (_, val), probability in zip(folds, parts, strict=True)
    ]
