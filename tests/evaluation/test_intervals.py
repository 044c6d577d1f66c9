"""Bounds of intervals are those of textbooks: exact binomial, Fisher's z, the exponential law."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import binomtest
from tests.support.units import units

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.intervals import (
    Interval,
    Sampling,
    bounds_of,
    interval,
    why_missing,
)
from thinsection.evaluation.metrics import FloatVector, Kind, class_scorers

# 97.5th percentiles of printed tables: of the normal law, and of Student's t by degrees of freedom
Z = 1.959964
T = {2: 4.302653, 4: 2.776445, 15: 2.131450, 27: 2.051831}


def exact(hits: int, trials: int) -> tuple[float, float]:
    """The bounds of Clopper and Pearson, by SciPy."""
    bounds = binomtest(hits, trials).proportion_ci(0.95, method="exact")
    return bounds.low, bounds.high


def without_spread(
    point: float, kind: Kind, num_rows: int, *, folds: int = 1
) -> tuple[float, float]:
    """Bounds of a score of rows which every resample repeats."""
    sampling = Sampling.of_rows(units(num_rows), folds=folds)
    return bounds_of(point, np.full(7, point), sampling, kind)


# units, classes and folds of rows


def test_each_row_is_a_unit_where_there_are_no_groups() -> None:
    sampling = Sampling.of_rows(units(3))
    assert sampling.codes.tolist() == [0, 1, 2]
    assert (sampling.unit, sampling.units, sampling.fewest) == ("rows", 3, 3)


def test_rows_of_one_name_are_one_unit() -> None:
    sampling = Sampling.of_rows(units(["b", "a", "b", "c"], "images"))
    assert sampling.codes.tolist() == [1, 0, 1, 2]
    assert (sampling.unit, sampling.units, sampling.fewest) == ("images", 3, 3)


def test_groups_bring_the_word_for_their_unit() -> None:
    groups = Groups("patients", ("p", "q", "p"))
    sampling = Sampling.of_rows(groups)
    assert sampling.codes.tolist() == [0, 1, 0]
    assert sampling.unit == "patients"


def test_no_rows_have_no_units() -> None:
    assert Sampling.of_rows(units(0)).units == 0


def test_groups_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"one entry per row, got 2 for 3 classes"
    ):
        Sampling.of_rows(units(["a", "b"]), classes=np.zeros(3, int))


def test_the_number_of_models_is_that_of_the_folds_unless_it_is_passed() -> None:
    fold = np.array([0, 1, 2, 3])
    assert Sampling.of_rows(units(4)).folds == 1
    assert Sampling.of_rows(units(4), fold=fold).folds == 4
    assert Sampling.of_rows(units(4), fold=fold, folds=2).folds == 2


def test_the_rarest_class_is_the_one_of_fewest_units_not_of_fewest_rows() -> None:
    patients = ["p", "p", "p", "q", "r"]
    classes = np.array([0, 0, 0, 1, 1])
    sampling = Sampling.of_rows(units(patients), classes=classes)
    assert sampling.rarest.tolist() == [True, True, True, False, False]
    assert sampling.fewest == 1


def test_rows_of_one_class_alone_have_no_rarest_class() -> None:
    sampling = Sampling.of_rows(units(4), classes=np.zeros(4, int))
    assert sampling.fewest == 0


def test_two_classes_are_enough_for_a_rarest_one() -> None:
    sampling = Sampling.of_rows(units(5), classes=np.array([0, 1, 0, 1, 0]))
    assert sampling.rarest.tolist() == [False, True, False, True, False]


def test_survival_is_judged_by_the_units_with_an_event() -> None:
    events = np.array([1, 0, 1, 0, 0])
    sampling = Sampling.of_rows(units(["p", "q", "p", "r", "s"]), events=events)
    assert sampling.rarest.tolist() == [True, False, True, False, False]
    assert sampling.fewest == 1


# trials that rows are worth


def coins_of_pairs(few: Sequence[bool], *, events: bool = False) -> float:
    """Coins of the ranking of rows of one fold."""
    rows = np.array(few)
    if events:
        return Sampling.of_rows(units(len(rows)), events=rows).coins(ranking=True)
    return Sampling.of_rows(units(len(rows)), classes=rows).coins(ranking=True)


def test_a_share_is_worth_two_coins_a_row_without_classes() -> None:
    assert Sampling.of_rows(units(9)).coins(ranking=False) == 18


def test_a_share_is_worth_as_many_coins_a_rare_row_as_there_are_classes() -> None:
    three = Sampling.of_rows(units(9), classes=np.array([0, 0, 0, 0, 1, 1, 1, 2, 2]))
    assert three.coins(ranking=False) == 3 * 2
    two = Sampling.of_rows(units(9), classes=np.array([0, 0, 0, 0, 0, 0, 1, 1, 1]))
    assert two.coins(ranking=False) == 2 * 3


def test_a_ranking_is_worth_no_more_coins_than_it_has_pairs() -> None:
    assert coins_of_pairs([True, False]) == 1
    assert coins_of_pairs([True, False, False]) == 2
    assert coins_of_pairs([True, False, False, False]) == 2  # two for the one rare row
    assert coins_of_pairs([True, True, True, False, False, False, False]) == 6


@pytest.mark.parametrize("num_events", [1, 2, 3, 4])
@pytest.mark.parametrize("num_censored", [0, 1, 2, 6])
def test_events_are_compared_with_each_other_too(
    num_events: int, num_censored: int
) -> None:
    rows = [True] * num_events + [False] * num_censored
    pairs = sum(one or other for one, other in itertools.combinations(rows, 2))
    assert coins_of_pairs(rows, events=True) == min(2 * num_events, pairs)


def test_coins_of_folds_are_counted_fold_by_fold() -> None:
    classes = np.array([1, 0, 0, 0, 1, 1, 0, 1])
    fold = np.array([0, 0, 0, 0, 1, 1, 1, 2])
    sampling = Sampling.of_rows(units(8), classes=classes, fold=fold)
    # the rarer class has 4 of 8 rows, class 0: fold 0 has 3 of it and 3 pairs, fold 1 has 1 of it
    # and 2 pairs, fold 2 has none; models of 3 folds differ by 1 + 1 / 2
    assert sampling.coins(ranking=True) == pytest.approx((3 + 2 + 0) / 1.5)


def test_a_repeated_cross_validation_brings_no_more_coins() -> None:
    once = Sampling.of_rows(units(6), fold=np.array([0, 0, 0, 1, 1, 1]))
    twice = Sampling.of_rows(units(12), fold=np.repeat([0, 1, 2, 3], 3), folds=2)
    assert once.coins(ranking=False) == twice.coins(ranking=False) == 6


@pytest.mark.parametrize(("folds", "factor"), [(1, 1), (2, 2), (3, 1.5), (5, 1.25)])
def test_models_of_fewer_folds_differ_more(folds: int, factor: float) -> None:
    assert Sampling.of_rows(units(9), folds=folds).fold_inflation == factor
    assert Sampling.of_rows(units(9), folds=folds).inflation == pytest.approx(
        1.25 * factor
    )


# shares


@pytest.mark.parametrize(("hits", "num_rows"), [(15, 10), (1, 10), (30, 21)])
def test_a_share_without_spread_has_the_exact_binomial_bounds(
    hits: int, num_rows: int
) -> None:
    trials = 2 * num_rows
    bounds = without_spread(hits / trials, "share", num_rows)
    assert bounds == pytest.approx(exact(hits, trials))


@pytest.mark.parametrize("hits", [0, 20])
def test_a_share_of_nothing_or_all_has_one_sided_bounds(hits: int) -> None:
    assert without_spread(hits / 20, "share", 10) == pytest.approx(exact(hits, 20))


def test_a_share_of_folds_has_the_bounds_of_fewer_trials() -> None:
    assert without_spread(0.7, "share", 10, folds=2) == pytest.approx(exact(7, 10))


def five_units_of_ten_rows() -> Sampling:
    return Sampling.of_rows(units([f"s{i // 10}" for i in range(50)]))


def draws_worth(trials: int, share: float, *, around: float) -> FloatVector:
    """Two draws of 5 units whose spread is that of a share of so many trials."""
    inflation = (5 + 1) / (5 - 1)
    variance = share * (1 - share) / trials * (Z / T[4]) ** 2 / inflation
    return around + math.sqrt(variance) * np.array([-1.0, 1.0])


@pytest.mark.parametrize(("hits", "trials"), [(6, 8), (3, 20)])
def test_a_share_that_varies_has_the_bounds_of_its_effective_trials(
    hits: int, trials: int
) -> None:
    share = hits / trials
    drawn = draws_worth(trials, share, around=share)
    bounds = bounds_of(share, drawn, five_units_of_ten_rows(), "share")
    assert bounds == pytest.approx(exact(hits, trials), rel=1e-5)


def test_a_share_that_varies_little_is_worth_its_coins_at_most() -> None:
    drawn = draws_worth(1_000, 0.75, around=0.75)
    bounds = bounds_of(0.75, drawn, five_units_of_ten_rows(), "share")
    assert bounds == pytest.approx(exact(75, 100))


@pytest.mark.parametrize("point", [0, 1])
def test_the_resamples_tell_the_spread_of_a_share_that_has_none(point: int) -> None:
    drawn = draws_worth(8, 0.9, around=0.9)
    bounds = bounds_of(point, drawn, five_units_of_ten_rows(), "share")
    assert bounds == pytest.approx(exact(8 * point, 8), rel=1e-5)


def test_a_ranking_is_a_share_of_pairs() -> None:
    sampling = Sampling.of_rows(units(7), classes=np.array([0, 0, 0, 1, 1, 1, 1]))
    bounds = bounds_of(0.5, np.full(3, 0.5), sampling, "ranking")
    assert bounds == pytest.approx(exact(3, 6))


@pytest.mark.parametrize("share", [0.75, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_an_agreement_is_a_share_on_a_scale_of_twice_the_length(
    share: float, spread: float
) -> None:
    sampling = five_units_of_ten_rows()
    drawn = 0.75 + spread * np.array([-1.0, 1.0])
    low, high = bounds_of(share, drawn, sampling, "share")
    bounds = bounds_of(2 * share - 1, 2 * drawn - 1, sampling, "agreement")
    assert bounds == pytest.approx((2 * low - 1, 2 * high - 1))
    assert low < high


# correlations, losses, errors


def test_a_correlation_of_28_rows_has_fishers_bounds() -> None:
    """With a standard error of 1 / sqrt(28 - 3) = 0.2 on the scale of z."""
    low, high = without_spread(0.5, "correlation", 28)
    assert math.atanh(low) == pytest.approx(math.atanh(0.5) - 0.2 * T[27], rel=1e-5)
    assert math.atanh(high) == pytest.approx(math.atanh(0.5) + 0.2 * T[27], rel=1e-5)


def test_a_correlation_of_folds_has_a_larger_error() -> None:
    """With 20 - 2 - 2 degrees of freedom, and twice the variance."""
    sampling = Sampling.of_rows(units([f"s{i % 16}" for i in range(20)]), folds=2)
    low, _ = bounds_of(0.0, np.zeros(3), sampling, "correlation")
    assert math.atanh(low) == pytest.approx(-T[15] * math.sqrt(2 / 12), rel=1e-5)


def test_a_correlation_of_three_rows_has_one_degree_of_freedom() -> None:
    low, high = without_spread(0.0, "correlation", 3)
    assert math.atanh(high) == pytest.approx(T[2], rel=1e-5)
    assert low == -high


def test_resamples_that_vary_more_than_the_law_widen_a_correlation() -> None:
    drawn = np.tanh(math.atanh(0.5) + np.array([-0.6, 0.6]))
    low, high = bounds_of(0.5, drawn, Sampling.of_rows(units(28)), "correlation")
    error = 0.6 * math.sqrt(29 / 27)
    assert math.atanh(high) - math.atanh(0.5) == pytest.approx(T[27] * error, rel=1e-5)
    assert math.atanh(0.5) - math.atanh(low) == pytest.approx(T[27] * error, rel=1e-5)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_faultless_correlation_has_bounds_too(sign: float) -> None:
    near, far = sorted(
        without_spread(sign, "correlation", 28), key=lambda bound: abs(bound - sign)
    )
    assert near == pytest.approx(sign, abs=1e-9)
    assert 1e-9 < abs(far - sign) < 1e-7


@pytest.mark.parametrize("point", [2.0, 0.02])
def test_a_loss_of_16_rows_has_the_relative_error_of_an_exponential_law(
    point: float,
) -> None:
    """The mean of 16 such values has a standard error of a quarter."""
    low, high = without_spread(point, "loss", 16)
    assert low == pytest.approx(point * math.exp(-T[15] / 4), rel=1e-5)
    assert high == pytest.approx(point * math.exp(T[15] / 4), rel=1e-5)


def test_a_loss_of_folds_has_twice_the_variance() -> None:
    _, high = without_spread(1.0, "loss", 16, folds=2)
    assert math.log(high) == pytest.approx(T[15] / 4 * math.sqrt(2), rel=1e-5)


def test_an_error_has_the_lower_bound_of_a_loss() -> None:
    low, _ = without_spread(0.3, "error", 16)
    assert low == pytest.approx(0.3 * math.exp(-T[15] / 4), rel=1e-5)


def test_a_large_error_has_the_upper_bound_of_a_loss() -> None:
    _, high = without_spread(0.5, "error", 16)
    assert high == pytest.approx(0.5 * math.exp(T[15] / 4), rel=1e-5)


def test_a_small_error_leaves_room_for_units_that_no_row_has_shown() -> None:
    """As many as 0 of 16 leave open, each of them wholly wrong."""
    unseen = exact(0, 16)[1]
    _, high = without_spread(0.01, "error", 16)
    assert high == pytest.approx(0.01 + 0.99 * unseen)
    _, high_of_folds = without_spread(0.01, "error", 16, folds=2)
    assert high_of_folds == pytest.approx(0.01 + 0.99 * exact(0, 8)[1])


def test_an_error_is_at_most_1() -> None:
    assert without_spread(0.9, "error", 16)[1] == 1.0


@pytest.mark.parametrize(("point", "least"), [(0.75, 0.75), (0.2, 0.5), (-1.0, 0.5)])
def test_r_squared_has_the_error_of_normal_values(point: float, least: float) -> None:
    """The variance of log(1 - R²) is about 4 R² / (28 - 3)."""
    low, high = without_spread(point, "explained", 28)
    factor = math.exp(T[27] * math.sqrt(4 * least / 25))
    assert 1 - low == pytest.approx((1 - point) * factor, rel=1e-5)
    assert 1 - high == pytest.approx((1 - point) / factor, rel=1e-5)


def test_r_squared_of_folds_has_a_larger_error() -> None:
    _, high = without_spread(0.5, "explained", 16, folds=2)
    error = math.sqrt(4 * 0.5 * 2 / (16 - 2 - 2))
    assert 1 - high == pytest.approx(0.5 * math.exp(-T[15] * error), rel=1e-5)


# distances


def test_a_distance_reaches_as_far_as_the_gaps_of_resamples() -> None:
    sampling = Sampling.of_rows(units(9))
    drawn = np.linspace(0.0, 0.4, 41)  # the 97.5th percentile is 0.39
    low, high = bounds_of(0.5, drawn, sampling, "distance")
    assert low == pytest.approx(0.5 - 0.39 * math.sqrt(1.25))
    assert high == pytest.approx(0.5 + 0.39 * math.sqrt(1.25))


def test_a_distance_lies_between_0_and_1() -> None:
    sampling = Sampling.of_rows(units(9))
    assert bounds_of(0.5, np.full(3, 0.9), sampling, "distance") == (0.0, 1.0)


def test_a_small_distance_leaves_room_for_units_that_no_row_has_shown() -> None:
    low, high = bounds_of(0.0, np.zeros(3), Sampling.of_rows(units(16)), "distance")
    assert low == 0.0
    assert high == pytest.approx(exact(0, 16)[1])


# whole intervals


def test_an_interval_says_what_was_resampled_and_how_often() -> None:
    names = ["p", "q", "r", "s", "s"]
    sampling = Sampling.of_rows(units(names, "cases"))
    values = np.array([1.0, 2.0, 3.0, 4.0, 4.0])
    bounds = interval(sampling, lambda w: w @ values / w.sum(axis=1), "mae", seed=6)
    assert (bounds.level, bounds.draws, bounds.seed) == (0.95, 2000, 6)
    assert (bounds.unit, bounds.units, bounds.missing) == ("cases", 4, "")
    assert 0 < bounds.low < values.mean() < bounds.high


def test_the_bounds_are_those_of_the_resamples_of_the_seed() -> None:
    sampling = Sampling.of_rows(units(30))
    values = np.random.default_rng(0).exponential(size=30)

    def mean(weights: FloatVector) -> FloatVector:
        return np.asarray(weights @ values / weights.sum(axis=1))

    bounds = interval(sampling, mean, "mae", seed=1)
    drawn = sampling.scores([mean], 1)[:, 0]
    assert len(drawn) == 2000
    assert (bounds.low, bounds.high) == bounds_of(
        float(values.mean()), drawn, sampling, "loss"
    )
    other = interval(sampling, mean, "mae", seed=2)
    assert other.low != bounds.low


def test_scores_of_the_same_resamples_stand_side_by_side() -> None:
    sampling = Sampling.of_rows(units(5))
    drawn = sampling.scores([lambda w: w[:, 0], lambda w: 2 * w[:, 0]], 3)
    assert drawn.shape == (2000, 2)
    np.testing.assert_array_equal(drawn[:, 1], 2 * drawn[:, 0])


def test_rows_of_a_unit_have_one_weight_and_units_weigh_1_on_average() -> None:
    sampling = Sampling.of_rows(units(["p", "q", "p", "r", "p"]))
    (weights,) = sampling.weights(0, 50)
    assert weights.shape == (50, 5)
    np.testing.assert_array_equal(weights[:, 0], weights[:, 2])
    np.testing.assert_array_equal(weights[:, 0], weights[:, 4])
    np.testing.assert_allclose(weights[:, [0, 1, 3]].mean(axis=1), 1)


def test_a_calibration_error_of_0_is_bounded_by_its_gaps_and_the_unseen() -> None:
    truth = np.arange(16) % 2
    certain = np.eye(2)[truth]
    scorer = class_scorers(truth, truth, 2, certain)["ece"]
    sampling = Sampling.of_rows(units(16))
    bounds = interval(sampling, scorer, "ece", seed=0)
    assert bounds.low == 0.0
    assert bounds.high == pytest.approx(exact(0, 16)[1])


def test_a_score_without_a_value_has_no_interval() -> None:
    bounds = interval(
        Sampling.of_rows(units(9, "slides")),
        lambda weights: np.full(len(weights), np.nan),
        "auroc",
        seed=4,
    )
    assert math.isnan(bounds.low)
    assert math.isnan(bounds.high)
    assert bounds == Interval(
        low=bounds.low,
        high=bounds.high,
        level=0.95,
        draws=0,
        seed=4,
        unit="slides",
        units=9,
        missing="the score has no value",
    )


def test_three_units_are_enough_and_two_are_not() -> None:
    assert why_missing(Sampling.of_rows(units(3))) == ""
    assert (
        why_missing(Sampling.of_rows(units(2))) == "at least 3 rows are needed, got 2"
    )


def test_the_reason_names_classes_and_events() -> None:
    classes = np.array([0, 0, 0, 0, 1])
    assert (
        why_missing(Sampling.of_rows(units(5, "cases"), classes=classes))
        == "at least 3 cases of each class are needed, got 1"
    )
    assert (
        why_missing(Sampling.of_rows(units(5, "cases"), events=classes))
        == "at least 3 cases with an event are needed, got 1"
    )
