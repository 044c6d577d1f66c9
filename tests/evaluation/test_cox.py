"""Cox regression of many features equals that of two other packages, and of its own equations."""

import warnings

import numpy as np
import pandas
import pytest
from lifelines import CoxPHFitter
from tests.support.scikit_survival_figures import (
    COHORTS,
    NETS,
    PENALTIES,
    FollowUp,
    drawn,
    figures,
)

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cox import cox_elastic_net, cox_ridge

RIDGES = [(name, k) for name in COHORTS for k in range(len(PENALTIES))]
ELASTIC_NETS = [(name, k) for name in COHORTS for k in range(len(NETS))]


def ridge(cohort: FollowUp, penalty: float, max_steps: int = 100) -> np.ndarray:
    return cox_ridge(*cohort, penalty=penalty, max_steps=max_steps)


def net(cohort: FollowUp, penalty: float, l1_ratio: float) -> np.ndarray:
    return cox_elastic_net(
        *cohort, penalty=penalty, l1_ratio=l1_ratio, max_steps=100_000
    )


def log_likelihood(cohort: FollowUp, coefficients: np.ndarray) -> float:
    """Breslow's, from the words of his paper: a loop over the events."""
    risk = cohort.x @ coefficients
    total = 0.0
    for case in np.flatnonzero(cohort.event):
        observed = cohort.time >= cohort.time[case]
        total += risk[case] - np.log(np.exp(risk[observed]).sum())
    return total


def slope(cohort: FollowUp, coefficients: np.ndarray) -> np.ndarray:
    """Of the log likelihood, by small differences."""
    found = []
    for unit in np.eye(len(coefficients)) * 1e-5:
        ahead = log_likelihood(cohort, coefficients + unit)
        found.append((ahead - log_likelihood(cohort, coefficients - unit)) / 2e-5)
    return np.array(found)


@pytest.mark.parametrize(("name", "k"), RIDGES)
def test_a_ridge_is_scikit_survivals(name: str, k: int) -> None:
    expected = np.array(figures()["ridge"][name][k])
    ours = ridge(drawn(name), PENALTIES[k])
    np.testing.assert_allclose(ours, expected, atol=1e-7 * np.abs(expected).max())


@pytest.mark.parametrize(("name", "k"), ELASTIC_NETS)
def test_an_elastic_net_is_scikit_survivals_and_its_features_are_the_same(
    name: str, k: int
) -> None:
    expected = np.array(figures()["elastic net"][name][k])
    ours = net(drawn(name), *NETS[k])
    np.testing.assert_array_equal(ours != 0, expected != 0)
    # scikit-survival ends early: ours reaches a higher likelihood
    largest = max(np.abs(expected).max(), 1e-9)
    np.testing.assert_allclose(ours, expected, atol=2e-4 * largest)


@pytest.mark.parametrize("penalty", [0.0, 0.02, 0.5])
def test_a_ridge_without_ties_is_lifelines(penalty: float) -> None:
    cohort = drawn("no ties")
    # lifelines' penalty is of a case, and of features in units of their spread
    x = (cohort.x - cohort.x.mean(axis=0)) / cohort.x.std(axis=0, ddof=1)
    table = pandas.DataFrame(x).assign(event=cohort.event, time=cohort.time)
    judge = CoxPHFitter(penalizer=penalty).fit(
        table, "time", "event", fit_options={"precision": 1e-12}
    )
    ours = ridge(cohort._replace(x=x), penalty * len(x))
    np.testing.assert_allclose(ours, judge.params_.to_numpy(), atol=1e-7)


def test_an_elastic_net_without_ties_is_lifelines() -> None:
    cohort = drawn("no ties")
    x = (cohort.x - cohort.x.mean(axis=0)) / cohort.x.std(axis=0, ddof=1)
    table = pandas.DataFrame(x).assign(event=cohort.event, time=cohort.time)
    with warnings.catch_warnings():
        # it says that its smooth form of the penalty has not quite ended
        warnings.simplefilter("ignore")
        judge = CoxPHFitter(penalizer=0.07, l1_ratio=0.5).fit(table, "time", "event")
    ours = net(cohort._replace(x=x), 0.07, 0.5)
    np.testing.assert_allclose(ours, judge.params_.to_numpy(), atol=2e-3)


@pytest.mark.parametrize("name", ["ties", "mostly tied and censored"])
def test_the_slope_of_the_penalised_likelihood_is_zero_at_the_coefficients(
    name: str,
) -> None:
    cohort = drawn(name)
    found = ridge(cohort, 2.0)
    np.testing.assert_allclose(slope(cohort, found), 2.0 * found, atol=1e-6)
    found = net(cohort, 0.07, 0.5)
    rest = slope(cohort, found) / len(cohort.x) - 0.035 * found
    used = found != 0
    assert 0 < used.sum() < len(found)
    np.testing.assert_allclose(rest[used], 0.035 * np.sign(found[used]), atol=1e-6)
    assert (np.abs(rest[~used]) <= 0.035).all()


def test_a_feature_that_is_constant_has_the_coefficient_0() -> None:
    cohort = drawn("ties")
    x = np.column_stack([cohort.x, np.full(len(cohort.x), 7.0)])
    with_constant = cohort._replace(x=x)
    for fit in (lambda c: ridge(c, 2.0), lambda c: net(c, 0.07, 0.5)):
        *others, constant = fit(with_constant)
        assert constant == 0
        np.testing.assert_allclose(others, fit(cohort), atol=1e-9)


def test_two_equal_features_share_what_one_would_have() -> None:
    cohort = drawn("ties")
    x = cohort.x[:, :1]
    one = ridge(cohort._replace(x=x), 1.0)
    two = ridge(cohort._replace(x=np.repeat(x, 2, axis=1)), 2.0)
    np.testing.assert_allclose(two, [one[0] / 2] * 2, atol=1e-9)


def test_order_of_the_cases_and_a_shift_of_the_features_change_nothing() -> None:
    cohort = drawn("ties")
    order = np.random.default_rng(0).permutation(len(cohort.x))
    mixed = FollowUp(cohort.x[order] + 100, cohort.event[order], cohort.time[order])
    np.testing.assert_allclose(ridge(mixed, 2.0), ridge(cohort, 2.0), atol=1e-9)
    np.testing.assert_allclose(net(mixed, 0.07, 0.5), net(cohort, 0.07, 0.5), atol=1e-8)


def test_cases_in_perfect_order_and_a_feature_of_enormous_spread_have_finite_answers() -> (
    None
):
    time = np.arange(1.0, 41.0)
    ordered = FollowUp(-time[:, None] * 1e3, np.ones(40, bool), time)
    for found in (ridge(ordered, 1e-3), net(ordered, 1e-3, 0.5)):
        assert np.isfinite(found).all() and found[0] > 0


def test_one_event_is_enough_and_none_is_refused() -> None:
    cohort = drawn("ties")
    event = np.zeros(len(cohort.x), bool)
    with pytest.raises(InvalidInputError, match="at least one case, got 120 censored"):
        ridge(cohort._replace(event=event), 2.0)
    with pytest.raises(InvalidInputError, match="at least one case, got 120 censored"):
        net(cohort._replace(event=event), 0.07, 0.5)
    # observed by several
    event[np.argsort(cohort.time)[20]] = True
    one = cohort._replace(event=event)
    found = ridge(one, 2.0)
    assert np.abs(found).max() > 0
    np.testing.assert_allclose(slope(one, found), 2.0 * found, atol=1e-6)


def test_a_last_case_with_the_only_event_says_nothing() -> None:
    cohort = drawn("no ties")
    event = cohort.time == cohort.time.max()
    assert not ridge(cohort._replace(event=event), 2.0).any()
    assert not net(cohort._replace(event=event), 0.07, 0.5).any()


def test_a_fit_that_does_not_end_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"max_iter must be enough .*, got 2; "):
        ridge(drawn("ties"), 2.0, max_steps=2)
    with pytest.raises(InvalidInputError, match=r"max_iter must be enough .*, got 3; "):
        cox_elastic_net(*drawn("ties"), penalty=0.07, l1_ratio=0.5, max_steps=3)
