import numpy as np
import pytest
from scipy.stats import kstest
from tests.support.units import units

from thinsection.evaluation.comparison import (
    permute_patients,
    permuted_labels,
    site_probe,
)
from thinsection.evaluation.splits import stratified_folds
from thinsection.evaluation.survival import martingale_residuals


def test_labels_change_places_between_patients_of_one_size() -> None:
    patients = np.array([0, 0, 1, 2, 2, 3, 4])
    taken = permute_patients(patients, np.random.default_rng(3))
    assert sorted(taken) == [*range(7)]
    assert {tuple(patients[taken[[0, 1]]]), tuple(patients[taken[[3, 4]]])} == {
        (0, 0),
        (2, 2),
    }


@pytest.mark.check
def test_permuted_labels_have_a_uniform_p_and_a_signal_is_found() -> None:
    found = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        labels = np.arange(30) % 2
        means = rng.normal(size=(30, 8))
        folds = stratified_folds(labels, folds=3, seed=seed)
        own = permuted_labels(
            means, labels.astype(float), 2, folds, np.arange(30), seed=seed
        )
        found.append(own.p_value)
    assert kstest(found, "uniform").pvalue > 0.01
    means[:, 0] += 3 * labels
    own = permuted_labels(
        means, labels.astype(float), 2, folds, np.arange(30), seed=seed
    )
    assert own is not None
    assert own.p_value == 1 / 200
    assert own.value > 0.9
    assert own.low < 0.5 < own.high
    values = means[:, 0]
    own = permuted_labels(means, values, 0, folds, np.arange(30), seed=seed)
    assert own.metric == "pearson"
    assert own is not None
    assert own.p_value == 1 / 200


def test_labels_that_no_fold_can_rank_have_no_p_value() -> None:
    """The only positive patient is alone in each of its folds' classes."""
    labels = np.r_[np.ones(4), np.zeros(8)]
    patients = np.r_[np.zeros(4, int), np.repeat([1, 2, 3], [3, 3, 2])]
    folds = [
        (np.flatnonzero(patients != p), np.flatnonzero(patients == p)) for p in range(4)
    ]
    means = np.random.default_rng(3).normal(size=(12, 5))
    assert permuted_labels(means, labels, 2, folds, patients, seed=0) is None


def test_a_site_that_embeddings_show_is_found_and_another_is_not() -> None:
    rng = np.random.default_rng(0)
    sites = [f"h{i % 3}" for i in range(60)] + ["small"] * 4
    means = rng.normal(size=(64, 6))
    shown = means.copy()
    shown[:60, 0] += 3 * (np.arange(60) % 3)
    probe = site_probe(shown, sites, units(64), seed=0, permutations=19)
    assert probe is not None
    assert (probe.sites, probe.cases, probe.left_out) == (3, 60, 4)
    assert probe.permuted.p_value == 1 / 20
    assert probe.interval.low > 1 / 3
    assert site_probe(shown[:10], sites[:10], units(10), seed=0) is None


@pytest.mark.check
def test_p_of_the_site_is_uniform_where_embeddings_do_not_show_it() -> None:
    found = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        sites = [f"h{i % 2}" for i in range(24)]
        means = rng.normal(size=(24, 4))
        probe = site_probe(means, sites, units(24), seed=seed, permutations=9)
        assert probe is not None
        found.append(probe.permuted.p_value)
    assert np.mean(np.array(found) <= 0.1) <= 0.25
    # p is one of .1, .2, ..., 1: half a step down it is as far from the uniform as can be
    assert kstest(np.array(found) - 0.05, "uniform").pvalue > 0.01


def test_martingale_residuals_are_events_minus_the_hazard_of_lifelines() -> None:
    lifelines = pytest.importorskip("lifelines")
    rng = np.random.default_rng(1)
    event = rng.random(60) < 0.6
    time = rng.integers(1, 20, 60).astype(float)  # with ties
    fitter = lifelines.NelsonAalenFitter(nelson_aalen_smoothing=False).fit(time, event)
    expected = event - fitter.predict(time).to_numpy()
    np.testing.assert_allclose(martingale_residuals(event, time), expected, atol=1e-12)
