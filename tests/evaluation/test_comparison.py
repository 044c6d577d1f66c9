"""Paired differences: who is called different, how often, and against the textbooks' own sums."""

from functools import partial

import numpy as np
import pytest
from benchmarks.bench_coverage import Kind, called_different
from scipy import stats
from tests.support.units import units

from thinsection.errors import InvalidInputError
from thinsection.evaluation import metrics
from thinsection.evaluation.comparison import (
    Difference,
    Jackknifed,
    holm,
    jackknife,
    mean_ranks,
    permutation_p,
    permuted_rows,
    tied_ranks,
)
from thinsection.evaluation.intervals import Sampling


def two_encoders(
    rng: np.random.Generator, slides: int, tiles: int, gain: float = 0.0
) -> tuple[list[metrics.Scorers], list[str]]:
    """Two classifiers whose rights and wrongs cluster in slides, the first right more often."""
    n = slides * tiles
    truth, group = rng.integers(0, 3, n), np.repeat(np.arange(slides), tiles)
    shared = rng.normal(size=slides)[group] * 0.8  # a slide is hard for both
    scorers = []
    for lift in (gain, 0.0):
        own = rng.normal(size=slides)[group] * 0.5
        right = shared + own + rng.normal(size=n) + lift > -0.3
        guess = np.where(right, truth, (truth + rng.integers(1, 3, n)) % 3)
        scorers.append(metrics.class_scorers(truth, guess, 3))
    return scorers, [f"slide {g}" for g in group]


def jackknife_of(
    scorers: list[metrics.Scorer], rows: int, *, groups: object = None
) -> Jackknifed:
    return jackknife(
        scorers, Sampling.of_rows(units(rows if groups is None else groups))
    )


def delong(
    scores: list[np.ndarray], positive: np.ndarray, sampling: Sampling
) -> Difference:
    """The difference of the AUROCs of two scores."""
    scorers = [partial(metrics.weighted_auroc, score, positive) for score in scores]
    return jackknife(scorers, sampling, chance=0.5).difference(0, 1)


def sampling_of(positive: np.ndarray, groups: object = None) -> Sampling:
    return Sampling.of_rows(
        units(len(positive) if groups is None else groups), classes=positive
    )


def share_called_different(seeds: range, gain: float, **size: int) -> float:
    called = 0
    for seed in seeds:
        scorers, groups = two_encoders(np.random.default_rng(seed), gain=gain, **size)
        pair = [s["balanced_accuracy"] for s in scorers]
        found = jackknife_of(pair, len(groups), groups=groups).difference(0, 1)
        called += found.p_value < 0.05
    return called / len(seeds)


@pytest.mark.check
@pytest.mark.parametrize(("slides", "tiles"), [(10, 60), (30, 20)])
def test_of_100_pairs_of_equal_encoders_at_most_12_percent_are_called_different(
    slides: int, tiles: int
) -> None:
    assert (
        share_called_different(range(7000, 7100), 0.0, slides=slides, tiles=tiles)
        <= 0.12  # .05 and 3 binomial errors of .022
    )


@pytest.mark.check
def test_a_true_difference_is_found_and_its_detectable_size_is_told() -> None:
    weak, strong = (
        share_called_different(range(100, 160), gain, slides=30, tiles=20)
        for gain in (0.25, 0.8)
    )
    assert strong >= 0.9 > weak
    scorers, groups = two_encoders(np.random.default_rng(1), 30, 20)
    pair = [s["balanced_accuracy"] for s in scorers]
    found = jackknife_of(pair, len(groups), groups=groups).difference(0, 1)
    assert found.detectable == pytest.approx(2.8016 * found.standard_error, rel=1e-4)


def test_the_interval_leaves_out_zero_exactly_where_p_is_below_the_level() -> None:
    for seed in range(12):
        scorers, groups = two_encoders(np.random.default_rng(seed), 12, 15, gain=0.4)
        pair = [s["macro_f1"] for s in scorers]
        found = jackknife_of(pair, len(groups), groups=groups).difference(0, 1)
        assert (found.low > 0 or found.high < 0) == (found.p_value < 0.05)
        swapped = jackknife_of(pair[::-1], len(groups), groups=groups).difference(0, 1)
        assert swapped.p_value == pytest.approx(found.p_value)
        assert (swapped.low, swapped.high) == pytest.approx((-found.high, -found.low))


def test_a_model_does_not_differ_from_itself() -> None:
    scorers, groups = two_encoders(np.random.default_rng(0), 8, 10)
    twice = [scorers[0]["macro_f1"]] * 2
    found = jackknife_of(twice, len(groups), groups=groups).difference(0, 1)
    assert (found.value, found.p_value, found.low, found.high) == (0, 1, 0, 0)


def test_a_paired_jackknife_of_means_is_the_paired_t_test() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(0.25, 1, 60), rng.normal(0, 1, 60)
    pair = [lambda w, v=v: w @ v / w.sum(axis=1) for v in (a, b)]
    found = jackknife_of(pair, 60).difference(0, 1)
    assert found.p_value == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-3)


def test_fewer_than_three_groups_allow_no_test() -> None:
    with pytest.raises(
        InvalidInputError, match="groups must be >= 3 for a significance test, got 2"
    ):
        jackknife_of([lambda w: w[:, 0]], 4, groups=["a", "a", "b", "b"])


def delong_by_hand(a: np.ndarray, b: np.ndarray, positive: np.ndarray) -> float:
    """Standard error of the difference, from the sample covariances of the components."""
    up, down = [], []
    for score in (a, b):
        x, y = score[positive], score[~positive]
        wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)
        up.append(wins.mean(axis=1))
        down.append(wins.mean(axis=0))
    s = np.cov(up) / positive.sum() + np.cov(down) / (~positive).sum()
    return float(np.sqrt(s[0, 0] + s[1, 1] - 2 * s[0, 1]))


def test_delong_is_delongs() -> None:
    rng = np.random.default_rng(4)
    positive = rng.random(90) < 0.4
    a, b = (np.round(positive + rng.normal(size=90), 1) for _ in range(2))
    found = delong([a, b], positive, sampling_of(positive))
    expected = delong_by_hand(a, b, positive)
    assert found.standard_error == pytest.approx(expected)
    # Student's t of about 88 degrees of freedom in place of the normal law
    assert found.p_value == pytest.approx(
        2 * stats.norm.sf(abs(found.value) / expected), rel=0.05, abs=2e-3
    )
    names = [f"{i:02}" for i in range(90)]
    assert delong([a, b], positive, sampling_of(positive, names)) == found


def test_delong_of_groups_sees_that_rows_repeat() -> None:
    rng = np.random.default_rng(6)
    positive = rng.random(70) < 0.5
    a, b = (positive + rng.normal(size=70) for _ in range(2))
    five = [np.repeat(v, 5) for v in (a, b, positive)]
    groups = np.repeat(np.arange(70), 5).astype(str)
    once = delong([a, b], positive, sampling_of(positive))
    repeated = delong(five[:2], five[2], sampling_of(five[2], groups))
    assert repeated.standard_error == pytest.approx(once.standard_error, rel=1e-9)
    assert (
        delong(five[:2], five[2], sampling_of(five[2])).standard_error
        < 0.5 * once.standard_error
    )


def test_delong_and_the_jackknife_agree() -> None:
    rng = np.random.default_rng(8)
    positive = rng.random(200) < 0.4
    scores = [positive + rng.normal(0, spread, 200) for spread in (1.0, 1.4)]
    shares = [1 / (1 + np.exp(-s)) for s in scores]
    pair = []
    for share in shares:
        both = np.stack([1 - share, share], axis=1)
        pair.append(
            metrics.class_scorers(positive.astype(int), both.argmax(1), 2, both)[
                "auroc"
            ]
        )
    sampling = sampling_of(positive)
    drawn = jackknife(pair, sampling).difference(0, 1)
    exact = delong(scores, positive, sampling)
    assert drawn.value == pytest.approx(exact.value)
    assert drawn.standard_error == pytest.approx(exact.standard_error, rel=1e-3)


def test_the_correction_is_holms_own_example() -> None:
    p = np.array([0.01, 0.04, 0.03, 0.005])
    np.testing.assert_allclose(holm(p), [0.03, 0.06, 0.06, 0.02])


def test_ranks_share_what_cannot_be_told_apart() -> None:
    better = np.zeros((3, 3), dtype=bool)
    better[0, 2] = True  # 0 beats 2; 1 can be told from neither
    assert tied_ranks(better).tolist() == [1, 1, 2]
    scores = np.array([[0.9, 0.8, 0.8], [0.2, 0.1, 0.3], [0.5, np.nan, 0.4]])
    np.testing.assert_allclose(
        mean_ranks(scores, lower=[False, True, False]),
        [(1 + 2 + 1) / 3, (2.5 + 1) / 2, (2.5 + 3 + 2) / 3],
    )


@pytest.mark.check
@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("mode", ["test", "train"])
@pytest.mark.parametrize("kind", [("classes", 0.5, 1.0), ("values", 0.5, 1.0)])
def test_equal_models_are_called_different_in_5_percent(
    kind: tuple[str, float, float], mode: str, most: int
) -> None:
    """Of 200 pairs of 60 cases, of patients with up to 5: .05 and 3 binomial errors of .0154."""
    found = called_different(Kind(*kind), 60, most, mode, 200)
    assert found is not None
    assert found["type_1_error"] <= 0.05 + 0.046


@pytest.mark.check
def test_of_one_test_set_power_is_delongs() -> None:
    """The normal law calls at most .03 more different at 40 cases."""
    rng = np.random.default_rng(5)
    positive = np.arange(40) < 20
    called = np.zeros(2)
    for _ in range(200):
        shared = rng.normal(size=40)
        scores = [1.0 * positive + shared, 0.1 * positive + shared]
        scores = [score + 0.6 * rng.normal(size=40) for score in scores]
        found = delong(scores, positive, sampling_of(positive))
        error = delong_by_hand(scores[0], scores[1], positive)
        called += found.p_value < 0.05, abs(found.value) / error > 1.96
    assert called[1] >= 100  # there is a power to lose
    assert called[0] >= called[1] - 6


@pytest.mark.check
def test_p_of_permuted_patients_is_uniform_where_labels_mean_nothing() -> None:
    """80 slides of 20 patients, 150 data sets: p <= .05 in .05, 3 errors of .018 allowed."""
    rng = np.random.default_rng(6)
    patient = np.repeat(np.arange(20), 4)
    called = 0
    for _ in range(150):
        labels = rng.permutation(np.arange(20) % 2)[patient]
        score = rng.normal(size=20)[patient] + 0.3 * rng.normal(size=80)

        def area(y: np.ndarray, score: np.ndarray = score) -> float:
            return float(metrics.weighted_auroc(score, y == 1, np.ones((1, 80)))[0])

        null = []
        for _ in range(39):
            order = permuted_rows(labels, patient, rng)
            assert order is not None
            null.append(area(labels[order]))
        called += permutation_p(area(labels), null) <= 0.05
    assert called / 150 <= 0.05 + 0.054


def test_units_of_several_labels_cannot_be_permuted() -> None:
    rng = np.random.default_rng(0)
    assert permuted_rows(np.array([0, 1, 1]), np.array([0, 0, 1]), rng) is None
