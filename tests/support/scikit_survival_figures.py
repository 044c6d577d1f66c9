"""Figures of scikit-survival on drawn cohorts, with which tests compare our own.

scikit-survival is under the GPL, so nothing of ours depends on it. Its figures are kept in
`tests/evaluation/scikit_survival.json`. To make them anew, in an environment of their own:

    python -m venv /tmp/judge && /tmp/judge/bin/pip install scikit-survival==0.28.0
    PYTHONPATH=src:. /tmp/judge/bin/python -m tests.support.scikit_survival_figures
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

PATH = Path(__file__).parents[1] / "evaluation" / "scikit_survival.json"
TIMES = (15.0, 30.0, 45.0)
PENALTIES = (0.1, 2.0, 50.0)
NETS = ((0.02, 0.5), (0.07, 0.5), (0.07, 1.0))  # penalty, share of the absolute values


class FollowUp(NamedTuple):
    """Features (n, D), events (n,) and times (n,)."""

    x: np.ndarray
    event: np.ndarray
    time: np.ndarray


def drawn(name: str) -> FollowUp:
    """A cohort of `COHORTS`: its outcome depends on some of the features."""
    n, dim, unit, censoring, spread, shared = COHORTS[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    x = rng.normal(size=(n, dim)) + shared * rng.normal(size=(n, 1))
    risk = x @ (rng.normal(size=dim) * (rng.random(dim) < 0.4))
    death = rng.exponential(np.exp(-risk / max(risk.std(), 1e-9)) * 50)
    censored = rng.exponential(50 * censoring, size=n)
    time = np.minimum(death, censored)
    if unit:
        time = np.ceil(time / unit)
    return FollowUp(x * spread + 3, death <= censored, time)


# cases, features, unit of time (0: no ties), mean time to censoring, spread, share in common
COHORTS = {
    "no ties": (90, 5, 0, 2, 1, 0),
    "ties": (120, 6, 10, 2, 1, 0.5),
    "mostly tied and censored": (80, 4, 40, 0.3, 1, 0),
    "more features than cases": (40, 60, 5, 1, 1, 0.3),
    "features of a large spread": (70, 3, 5, 1, 20, 0),
}


def follow_up(seed: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Event, time with ties, and a risk with ties."""
    rng = np.random.default_rng(seed)
    risk = np.round(rng.normal(size=n), 1)
    death = rng.exponential(np.exp(-0.8 * risk) * 60)
    censored = rng.uniform(10, 120, size=n)
    time = np.ceil(np.minimum(death, censored))
    return death <= censored, time, risk


def scored_cases() -> tuple[np.ndarray, ...]:
    """Events, times, risks (n,), predicted survival (n, 3), and how often each case counts."""
    event, time, risk = follow_up(0, 150)
    survival = np.exp(-np.exp(0.8 * risk)[:, None] * np.array([0.2, 0.5, 0.9]))
    counts = np.random.default_rng(1).integers(1, 4, size=150)
    return event, time, risk, survival, counts


def survivors() -> FollowUp:
    """90 cases, whose times tie by the day."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(90, 5)) * np.array([1, 2, 3, 4, 5]) + 7
    hazard = 0.9 * (x[:, 0] - 7)
    time = np.ceil(np.exp(1 - hazard + rng.normal(size=90)) * 4)
    return FollowUp(x.astype(np.float32), rng.random(90) < 0.6, time)


@cache
def figures() -> dict:
    """What scikit-survival said, as it was kept."""
    return json.loads(PATH.read_text())


def _cox(cohort: FollowUp, alpha: float) -> list[float]:
    from sksurv.linear_model import CoxPHSurvivalAnalysis
    from sksurv.util import Surv

    outcome = Surv.from_arrays(cohort.event, cohort.time)
    model = CoxPHSurvivalAnalysis(alpha=alpha, ties="breslow", n_iter=1000)
    return model.fit(cohort.x, outcome).coef_.tolist()


def _coxnet(cohort: FollowUp, alpha: float, l1_ratio: float) -> list[float]:
    from sksurv.linear_model import CoxnetSurvivalAnalysis
    from sksurv.util import Surv

    outcome = Surv.from_arrays(cohort.event, cohort.time)
    model = CoxnetSurvivalAnalysis(
        alphas=[alpha], l1_ratio=l1_ratio, max_iter=1_000_000, tol=1e-12
    )
    return model.fit(cohort.x, outcome).coef_[:, 0].tolist()


def _at_times(counts: np.ndarray) -> dict[str, list[float]]:
    from sksurv import metrics
    from sksurv.util import Surv

    *columns, _ = scored_cases()
    event, time, risk, survival = (np.repeat(x, counts, axis=0) for x in columns)
    outcome = Surv.from_arrays(event, time)
    auroc, _ = metrics.cumulative_dynamic_auc(outcome, outcome, risk, TIMES)
    brier = metrics.brier_score(outcome, outcome, survival, TIMES)[1]
    return {"auroc": auroc.tolist(), "brier": brier.tolist()}


def _probe() -> dict[str, list[float]]:
    """C-index of each fold in nanopath's protocol, and of one fold in Patho-Bench's."""
    from sksurv.linear_model import CoxnetSurvivalAnalysis, CoxPHSurvivalAnalysis
    from sksurv.util import Surv

    from thinsection.evaluation.splits import stratified_folds

    data = survivors()
    outcome = Surv.from_arrays(data.event, data.time)
    scores = []
    for train, val in stratified_folds(data.event.astype(int)):
        x = data.x.astype(np.float64)
        x = (x - x[train].mean(axis=0)) / x[train].std(axis=0)
        model = CoxPHSurvivalAnalysis(alpha=2.0, ties="breslow")
        scores.append(model.fit(x[train], outcome[train]).score(x[val], outcome[val]))
    net = CoxnetSurvivalAnalysis(alphas=[0.07], l1_ratio=0.5)
    net.fit(data.x[:60], outcome[:60])
    return {
        "nanopath": scores,
        "pathobench": [net.score(data.x[60:], outcome[60:])],
    }


def main() -> None:
    """Writes the figures."""
    from importlib.metadata import version

    kept = {
        "scikit-survival": version("scikit-survival"),
        "ridge": {n: [_cox(drawn(n), a) for a in PENALTIES] for n in COHORTS},
        "elastic net": {n: [_coxnet(drawn(n), *net) for net in NETS] for n in COHORTS},
        "at times": {
            "once": _at_times(np.ones(150, int)),
            "by count": _at_times(scored_cases()[-1]),
        },
        "probe": _probe(),
    }
    PATH.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
