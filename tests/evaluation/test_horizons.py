"""Scores at a time equal scikit-survival's, also under weights, and their intervals cover."""

import numpy as np
import pytest
from tests.support.scikit_survival_figures import (
    TIMES,
    figures,
    follow_up,
    scored_cases,
)
from tests.support.survival_scores import plain_scores
from tests.support.units import units

from thinsection.evaluation.intervals import Sampling, interval
from thinsection.evaluation.survival import auroc_until, brier_at, usable_times


@pytest.mark.parametrize("counted", ["once", "by count"])
def test_scores_are_scikit_survivals_of_the_cases_repeated_by_weight(
    counted: str,
) -> None:
    event, time, risk, survival, counts = scored_cases()
    expected = figures()["at times"][counted]
    counts = np.ones_like(counts) if counted == "once" else counts
    columns = (np.repeat(x, counts, axis=0) for x in (event, time, risk, survival))
    plain = plain_scores(*columns, times=TIMES)
    weights = counts[None].astype(float)
    for k, t in enumerate(TIMES):
        auroc = auroc_until(event, time, risk, t)(weights)[0]
        brier = brier_at(event, time, survival[:, k], t)(weights)[0]
        assert auroc == pytest.approx(expected["auroc"][k], abs=1e-9)
        assert brier == pytest.approx(expected["brier"][k], abs=1e-9)
        # the judge of other tests, which is exact too
        assert plain[k] == pytest.approx((auroc, brier), abs=1e-9)


def test_without_censoring_they_are_the_plain_scores() -> None:
    from sklearn.metrics import roc_auc_score

    _, time, risk = follow_up(2, 80)
    event = np.ones(80, dtype=bool)
    late = time > 30
    weights = np.ones((1, 80))
    assert auroc_until(event, time, risk, 30)(weights)[0] == pytest.approx(
        roc_auc_score(~late, risk), abs=1e-12
    )
    survival = np.linspace(0, 1, 80)
    assert brier_at(event, time, survival, 30)(weights)[0] == pytest.approx(
        ((survival - late) ** 2).mean(), abs=1e-12
    )


@pytest.mark.check
def test_intervals_hold_the_scores_of_a_large_cohort() -> None:
    """80 cohorts of 60 cases: at least .90 of the intervals hold (.95 promised, 2 errors off)."""
    event, time, risk = follow_up(3, 20_000)
    survival = np.exp(-np.exp(0.8 * risk) * 0.5)
    one = np.ones((1, 20_000))
    true_auroc = auroc_until(event, time, risk, 30)(one)[0]
    true_brier = brier_at(event, time, survival, 30)(one)[0]
    held = np.zeros(2)
    for seed in range(80):
        event, time, risk = follow_up(100 + seed, 60)
        survival = np.exp(-np.exp(0.8 * risk) * 0.5)
        sampling = Sampling.of_rows(units(60), events=event)
        found = interval(sampling, auroc_until(event, time, risk, 30), "auroc", seed=0)
        held[0] += found.low <= true_auroc <= found.high
        found = interval(sampling, brier_at(event, time, survival, 30), "brier", seed=0)
        held[1] += found.low <= true_brier <= found.high
    assert (held >= 72).all(), held


def test_times_with_few_events_before_or_cases_after_are_left_out() -> None:
    event, time, _ = follow_up(4, 60)
    assert usable_times(event, time, [0.5, 30.0, 1000.0]) == [30.0]
