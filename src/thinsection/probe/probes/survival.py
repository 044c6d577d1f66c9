"""Survival probe: Cox regression on one vector per case, Harrell's c-index, over folds."""

from functools import partial

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, MissingDependencyError
from thinsection.probe.data.sets import SurvivalSet
from thinsection.probe.metrics import FloatVector, ratio
from thinsection.probe.protocol import NANOPATH, Protocol, SurvivalSettings
from thinsection.probe.result import ProbeResult, Risks
from thinsection.probe.statistics import Fold, bootstrap_folds, shuffled_folds


def survival_probe(cases: SurvivalSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Mean c-index over folds of a Cox model on vectors z-scored by their training fold.

    Memory: 8 (n D + D²) of the solver, and n² of the bootstrap per fold.

    Raises:
        MissingDependencyError: scikit-survival is not installed.
        InvalidInputError: a fold without comparable pairs.
        ConfigError: the protocol defines no survival probe.
    """
    settings: SurvivalSettings = protocol.require("survival")
    folds = cases.folds or shuffled_folds(len(cases.ids), folds=protocol.folds, seed=protocol.seed)
    risks = [_fit_risk(cases, fold, settings) for fold in folds]
    rows = np.concatenate([val for _, val in folds])
    pairs = [
        comparable_pairs(cases.event[val], cases.time[val], risk)
        for (_, val), risk in zip(folds, risks, strict=True)
    ]
    scores = [concordance(*p) for p in pairs]
    weighted = [partial(_weighted_concordance, *p) for p in pairs]
    return ProbeResult(
        probe="survival",
        dataset=cases.name,
        metric="c_index",
        score=float(np.mean(scores)),
        interval=bootstrap_folds(folds, weighted, seed=protocol.seed),
        protocol=protocol,
        details={"fold_scores": scores, "model": settings.model},
        facts={
            "cases": len(cases.ids),
            "events": int(cases.event.sum()),
            "dim": int(cases.vectors.shape[1]),
            "fold_sizes": [[len(train), len(val)] for train, val in folds],
            **cases.facts,
        },
        risks=Risks(
            ids=tuple(cases.ids[i] for i in rows),
            risk=np.concatenate(risks),
            high=np.concatenate([risk > np.median(risk) for risk in risks]),
            event=cases.event[rows],
            time=cases.time[rows],
        ),
    )


def comparable_pairs(
    event: npt.NDArray[np.bool_], time: FloatVector, risk: FloatVector
) -> tuple[FloatVector, FloatVector]:
    """(concordant, comparable), (n, n) each: Harrell's pairs (i, j), i with the event first.

    A pair counts where i had the event and time_i < time_j, or the times are equal and j was
    censored; concordant is 1 where risk_i > risk_j and 0.5 where they are equal.

    Memory: 16 n².
    """
    earlier = time[:, None] < time[None, :]
    tied = (time[:, None] == time[None, :]) & ~event[None, :]
    comparable = (event[:, None] & (earlier | tied)).astype(np.float64)
    higher = np.sign(risk[:, None] - risk[None, :]) / 2 + 0.5
    return comparable * higher, comparable


def concordance(concordant: FloatVector, comparable: FloatVector) -> float:
    """Harrell's c-index.

    Raises:
        InvalidInputError: no pair is comparable.
    """
    if not comparable.any():
        raise InvalidInputError(
            "a fold must have comparable pairs, got none; it needs an event before another "
            "case's time"
        )
    return float(concordant.sum() / comparable.sum())


def _weighted_concordance(
    concordant: FloatVector, comparable: FloatVector, weights: npt.NDArray
) -> FloatVector:
    """Of resampled cases (B, n): a pair weighs as often as both of its cases were drawn."""
    w = weights.astype(np.float64)
    top, bottom = ((w @ m * w).sum(axis=1) for m in (concordant, comparable))
    return ratio(top, bottom, empty=np.nan)


def _fit_risk(cases: SurvivalSet, fold: Fold, settings: SurvivalSettings) -> FloatVector:
    """Risk scores of the validation cases."""
    try:
        from sksurv.linear_model import CoxnetSurvivalAnalysis, CoxPHSurvivalAnalysis
        from sksurv.util import Surv
    except ImportError as error:
        raise MissingDependencyError(
            f"the survival probe needs scikit-survival, got {error}; install thinsection[probe]"
        ) from error
    train, val = fold
    x = cases.vectors.astype(np.float64)
    mean, spread = x[train].mean(axis=0), x[train].std(axis=0)
    x = (x - mean) / np.where(spread > 0, spread, 1.0)
    if settings.model == "cox":
        model = CoxPHSurvivalAnalysis(alpha=settings.alpha, ties="breslow")
    else:
        model = CoxnetSurvivalAnalysis(alphas=[settings.alpha], l1_ratio=settings.l1_ratio)
    model.fit(x[train], Surv.from_arrays(cases.event[train], cases.time[train]))
    return np.asarray(model.predict(x[val]), dtype=np.float64)
