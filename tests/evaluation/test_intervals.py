"""Variances are DeLong's and the textbook's; bounds are Wilson's, Newcombe's and Fisher's."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import binomtest, t
from tests.support.units import units

from thinsection.errors import InvalidInputError
from thinsection.evaluation import intervals
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.intervals import (
    Interval,
    Sampling,
    Variance,
    bounds_of,
    distance_bounds,
    interval,
    why_missing,
)
from thinsection.evaluation.metrics import (
    KappaScorer,
    MeanScorer,
    Scorer,
    class_scorers,
    pearson,
    weighted_auroc,
)
from thinsection.evaluation.survival import concordance


def exact(hits: int, trials: int) -> tuple[float, float]:
    """The bounds of Clopper and Pearson, by SciPy."""
    bounds = binomtest(hits, trials).proportion_ci(0.95, method="exact")
    return bounds.low, bounds.high


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


# variances


def auroc(score: np.ndarray, positive: np.ndarray) -> Scorer:
    return lambda weights: weighted_auroc(score, positive, weights)


def delong_variance(score: np.ndarray, positive: np.ndarray) -> float:
    """Variance of an AUROC by the sample variances of DeLong's components."""
    wins = np.sign(score[positive][:, None] - score[~positive]) / 2 + 0.5
    up = wins.mean(axis=1).var(ddof=1) / positive.sum()
    down = wins.mean(axis=0).var(ddof=1) / (~positive).sum()
    return float(up + down)


def scores_of(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    positive = rng.random(count) < 0.3
    return np.round(positive + rng.normal(size=count), 1), positive


@pytest.mark.parametrize("seed", [1, 2])
def test_the_variance_of_an_auroc_is_delongs(seed: int) -> None:
    score, positive = scores_of(seed, 50)
    sampling = Sampling.of_rows(units(50), classes=positive)
    variance = sampling.variance(sampling.influences(auroc(score, positive)))
    assert variance.value == pytest.approx(delong_variance(score, positive), rel=1e-3)


def test_rows_that_a_unit_repeats_add_nothing() -> None:
    score, positive = scores_of(3, 40)
    names = np.repeat(np.arange(40), 4)
    sampling = Sampling.of_rows(units(names.tolist()), classes=positive[names])
    scorer = auroc(score[names], positive[names])
    variance = sampling.variance(sampling.influences(scorer))
    assert variance.value == pytest.approx(delong_variance(score, positive), rel=1e-3)
    apart = Sampling.of_rows(units(160), classes=positive[names])
    too_small = apart.variance(apart.influences(scorer)).value
    assert too_small < 0.3 * variance.value


def test_the_variance_of_a_mean_is_that_of_the_textbook() -> None:
    values = np.random.default_rng(4).exponential(size=30)
    sampling = Sampling.of_rows(units(30))
    variance = sampling.variance(
        sampling.influences(lambda w: w @ values / w.sum(axis=1))
    )
    assert variance.value == pytest.approx(values.var(ddof=1) / 30, rel=1e-3)
    assert variance.degrees == pytest.approx(29)


def test_a_patient_of_both_classes_makes_them_vary_together() -> None:
    """Of 20 patients each has a positive and a negative row whose scores rise together."""
    rng = np.random.default_rng(5)
    patient = np.repeat(np.arange(20), 2)
    positive = np.tile([True, False], 20)
    score = 3 * rng.normal(size=20)[patient] + 0.1 * rng.normal(size=40)
    one = Sampling.of_rows(units(patient.tolist()), classes=positive)
    apart = Sampling.of_rows(units(40), classes=positive)
    scorer = auroc(score, positive)
    together = one.variance(one.influences(scorer)).value
    assert together < 0.2 * apart.variance(apart.influences(scorer)).value


def test_blocks_of_many_units_give_nearly_the_variance_of_the_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    score, positive = scores_of(6, 1500)
    scorer = auroc(score, positive)
    sampling = Sampling.of_rows(units(1500), classes=positive)
    assert len(np.unique(sampling.blocks)) == intervals.MAX_BLOCKS
    found = sampling.variance(sampling.influences(scorer)).value
    assert found == pytest.approx(delong_variance(score, positive), rel=0.2)


# cross-validation


def test_a_cross_validated_score_at_chance_has_twice_the_variance() -> None:
    sampling = Sampling.of_rows(units(40), folds=5)
    assert sampling.fold_inflation(0.0) == sampling.fold_inflation(-3.0) == 2
    assert sampling.fold_inflation(intervals.HALF_INFLATION_DISTANCE) == 1.5
    assert 1 < sampling.fold_inflation(30.0) < 1.02
    assert Sampling.of_rows(units(40)).fold_inflation(0.0) == 1


@pytest.mark.parametrize(("folds", "factor"), [(1, 1), (2, 2), (3, 1.5), (5, 1.25)])
def test_without_a_chance_fewer_folds_differ_more(folds: int, factor: float) -> None:
    assert Sampling.of_rows(units(9), folds=folds).fold_inflation() == factor


@pytest.mark.check
def test_a_sum_over_pairs_of_folds_has_twice_the_variance_by_simulation() -> None:
    """Correlations without signal of least-squares fits to the other folds."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(400):
        x = rng.normal(size=(100, 4))
        y = rng.normal(size=100)
        fold = np.arange(100) % 5
        answer = np.empty(100)
        for f in range(5):
            train = fold != f
            answer[~train] = x[~train] @ np.linalg.lstsq(x[train], y[train])[0]
        once = np.ones((1, 100))
        found.append(pearson(y[:, None], answer[:, None], once, fold)[0, 0])
    assert np.var(found) * 100 == pytest.approx(2, abs=0.45)


# bounds


def wilson(share: float, trials: float, quantile: float) -> tuple[float, float]:
    """Wilson's interval for a quantile."""
    middle = (share + quantile**2 / 2 / trials) / (1 + quantile**2 / trials)
    inner = share * (1 - share) / trials + quantile**2 / 4 / trials**2
    half = quantile / (1 + quantile**2 / trials) * inner**0.5
    return middle - half, middle + half


PRIOR = intervals.PRIOR_DEGREES["share"]


def quantile_of(degrees: float) -> float:
    return float(t.ppf(0.975, degrees + PRIOR))


@pytest.mark.parametrize(("hits", "trials"), [(6, 20), (19, 20), (100, 400)])
def test_a_share_of_rows_has_wilsons_bounds(hits: int, trials: int) -> None:
    share = hits / trials
    sampling = Sampling.of_rows(units(trials))
    variance = Variance(share * (1 - share) / trials, trials - 1)
    bounds = bounds_of(share, variance, sampling, "share")
    assert bounds == pytest.approx(wilson(share, trials, quantile_of(trials - 1)))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_faultless_share_is_bounded_on_one_side(share: float) -> None:
    sampling = Sampling.of_rows(units(20))
    bounds = bounds_of(share, Variance(0.0, 19), sampling, "share")
    assert bounds == pytest.approx(wilson(share, 20, quantile_of(19)), abs=1e-6)


def test_a_small_variance_of_few_units_is_not_believed() -> None:
    sampling = Sampling.of_rows(units(6))
    law = 0.25 / 6
    tiny = bounds_of(0.5, Variance(law / 100, 5), sampling, "share")
    lower = Variance((5 / 100 + PRIOR) / (5 + PRIOR) * law, 1e9)
    assert tiny[1] - 0.5 > bounds_of(0.5, lower, sampling, "share")[1] - 0.5


def test_a_ranking_has_the_variance_of_hanley_and_mcneil() -> None:
    """Both bounds lie where the point is a quantile of their standard errors away."""
    positive = np.arange(40) < 10
    sampling = Sampling.of_rows(units(40), classes=positive)

    def law(true: float) -> float:
        q1 = true / (2 - true)
        q2 = 2 * true**2 / (1 + true)
        middle = (10 + 30) / 2 - 1
        parts = (middle * (q1 - true**2), middle * (q2 - true**2))
        return (true * (1 - true) + sum(parts)) / (10 * 30)

    bounds = bounds_of(0.8, Variance(law(0.8), 20), sampling, "ranking")
    for bound in bounds:
        distance = abs(bound - 0.8) / law(bound) ** 0.5
        assert distance == pytest.approx(quantile_of(20), rel=1e-6)


def test_a_faultless_ranking_has_an_honest_bound() -> None:
    positive = np.arange(12) < 6
    found = interval(
        Sampling.of_rows(units(12), classes=positive),
        auroc(positive + 0.0, positive),
        "auroc",
    )
    assert found.high == pytest.approx(1.0)
    assert 0.6 < found.low < 0.8


@pytest.mark.parametrize("patients", [30, 400])
def test_patients_of_both_classes_count_in_both(patients: int) -> None:
    """A faultless score of rows of both classes is at least as certain as of one each."""
    lows = {}
    for name, of_row in (("one", [0, 0]), ("both", [0, 1])):
        flips = np.arange(patients)[:, None] % 2 * (name == "one")
        positive = ((np.array(of_row) + flips) % 2 == 1).ravel()
        sampling = Sampling.of_rows(
            units(np.repeat(np.arange(patients), 2)), classes=positive
        )
        found = interval(sampling, auroc(positive + 0.0, positive), "auroc")
        lows[name] = found.low
    assert lows["both"] > lows["one"] > 1 - 5 / patients


@pytest.mark.parametrize("patients", [30, 400])
def test_survival_without_censoring_is_no_less_certain_than_with_it(
    patients: int,
) -> None:
    time = np.arange(patients) + 1.0
    lows = []
    for num_censored in (0, patients // 10):
        event = np.arange(patients) >= num_censored
        sampling = Sampling.of_rows(units(patients), events=event)
        lows.append(interval(sampling, concordance(event, time, -time), "c_index").low)
    assert lows[0] > 1 - 5 / patients
    assert lows[0] >= lows[1] - 0.01


def kappa_of(
    truth: npt.NDArray[np.int64], prediction: npt.NDArray[np.int64], k: int
) -> Scorer:
    """Scorer of the kappa of k classes."""
    return class_scorers(truth, prediction, k)["weighted_kappa"]


@pytest.mark.parametrize("added", [0.0, 0.5])
def test_the_variance_of_kappa_is_that_of_fleiss_cohen_and_everitt(
    added: float,
) -> None:
    """Their large-sample variance by hand, on the smoothed table, with Fisher's z."""
    counts = np.array([[300.0, 60.0], [90.0, 150.0]])
    truth = np.repeat([0, 0, 1, 1], counts.ravel().astype(int))
    prediction = np.repeat([0, 1, 0, 1], counts.ravel().astype(int))
    scorer = kappa_of(truth, prediction, 2)
    assert isinstance(scorer, KappaScorer)
    sampling = Sampling.of_rows(units(600), classes=truth)
    if not added:
        measured = sampling.variance(sampling.influences(scorer)).value
        expected, _ = cohens_kappa_error(counts)
        assert measured**0.5 == pytest.approx(expected, rel=5e-3)
        return
    found = interval(sampling, scorer, "weighted_kappa")
    error, kappa = cohens_kappa_error(counts + added)
    reach = 1.96 * error / (1 - kappa**2)
    ends = np.tanh(np.arctanh(kappa) + np.array([-reach, reach]))
    assert [found.low, found.high] == pytest.approx(ends, abs=2e-3)


def cohens_kappa_error(counts: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Standard error of Cohen's kappa of two classes, and kappa.

    Source: Fleiss, Cohen and Everitt, Psychological Bulletin 72 (1969), equation 13.
    """
    p = counts / counts.sum()
    rows = p.sum(axis=1)
    columns = p.sum(axis=0)
    observed = np.trace(p)
    chance = float(rows @ columns)
    kappa = (observed - chance) / (1 - chance)
    first = sum(
        p[i, i] * (1 - (rows[i] + columns[i]) * (1 - kappa)) ** 2 for i in range(2)
    )
    second = (1 - kappa) ** 2 * sum(
        p[i, j] * (columns[i] + rows[j]) ** 2 for i, j in ((0, 1), (1, 0))
    )
    third = (kappa - chance * (1 - kappa)) ** 2
    variance = (first + second - third) / (1 - chance) ** 2 / counts.sum()
    return float(variance**0.5), float(kappa)


def test_kappa_of_a_class_that_is_never_predicted_has_a_width() -> None:
    """Nothing varies in the rows: each is called the frequent class."""
    truth = (np.arange(200) < 20).astype(np.int64)
    never = np.zeros(200, dtype=np.int64)
    found = interval(
        Sampling.of_rows(units(200), classes=truth),
        kappa_of(truth, never, 2),
        "weighted_kappa",
    )
    assert -0.3 < found.low < -0.05
    assert 0.1 < found.high < 0.3


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_a_faultless_kappa_reaches_1_and_not_more(classes: int) -> None:
    truth = np.arange(60) % classes
    found = interval(
        Sampling.of_rows(units(60), classes=truth),
        kappa_of(truth, truth, classes),
        "weighted_kappa",
    )
    assert found.high == 1
    assert 0.5 < found.low < 0.9


def test_equal_kappas_of_seeds_have_the_interval_of_one() -> None:
    rng = np.random.default_rng(2)
    truth = rng.integers(0, 3, 90)
    prediction = np.where(rng.random(90) < 0.6, truth, rng.integers(0, 3, 90))
    scorer = kappa_of(truth, prediction, 3)
    sampling = Sampling.of_rows(units(90), classes=truth)
    one = interval(sampling, scorer, "weighted_kappa")
    three = interval(sampling, MeanScorer([scorer] * 3), "weighted_kappa")
    assert (three.low, three.high) == pytest.approx((one.low, one.high))


def test_rows_of_patients_that_are_repeated_leave_kappa_as_uncertain() -> None:
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 3, 400)
    prediction = np.where(rng.random(400) < 0.6, truth, rng.integers(0, 3, 400))
    one = interval(
        Sampling.of_rows(units(400), classes=truth),
        kappa_of(truth, prediction, 3),
        "weighted_kappa",
    )
    patients = Groups("patients", tuple(map(str, np.tile(np.arange(400), 3))))
    three = interval(
        Sampling.of_rows(patients, classes=np.tile(truth, 3)),
        kappa_of(np.tile(truth, 3), np.tile(prediction, 3), 3),
        "weighted_kappa",
    )
    # the same rows are added to a table of three times as many
    assert (three.low, three.high) == pytest.approx((one.low, one.high), abs=0.01)


def test_a_correlation_of_28_rows_has_fishers_bounds() -> None:
    """With a standard error of 1 / sqrt(28 - 3) = 0.2 on the scale of z."""
    variance = Variance((0.2 * (1 - 0.5**2)) ** 2, 27)
    sampling = Sampling.of_rows(units(28))
    low, high = bounds_of(0.5, variance, sampling, "correlation")
    reach = 0.2 * float(t.ppf(0.975, 27))
    assert math.atanh(low) == pytest.approx(math.atanh(0.5) - reach, rel=1e-5)
    assert math.atanh(high) == pytest.approx(math.atanh(0.5) + reach, rel=1e-5)


def test_a_correlation_at_chance_has_the_larger_variance_of_folds() -> None:
    sampling = Sampling.of_rows(units(28), folds=5)
    low, high = bounds_of(0.0, Variance(0.04, 27), sampling, "correlation", 0.0)
    flat_low, flat_high = bounds_of(0.0, Variance(0.04, 27), sampling, "correlation")
    assert low < flat_low  # no signal there
    assert low < -high  # knows more the farther it is from chance
    assert flat_high == pytest.approx(-flat_low)


def test_a_loss_and_an_explained_share_are_bounded_on_their_scales() -> None:
    sampling = Sampling.of_rows(units(16))
    low, high = bounds_of(2.0, Variance(0.25, 15), sampling, "loss")
    reach = quantile_of(15) / 4
    assert low == pytest.approx(2 * math.exp(-reach), rel=1e-5)
    assert high == pytest.approx(2 * math.exp(reach), rel=1e-5)
    low, high = bounds_of(0.5, Variance(0.02, 15), sampling, "explained")
    assert (1 - low) * (1 - high) == pytest.approx(0.25, rel=1e-5)
    assert low < 0.5 < high < 1


def test_an_error_that_is_measured_is_not_mixed_with_the_law() -> None:
    sampling = Sampling.of_rows(units(100))
    narrow = bounds_of(0.2, Variance(0.0004, 99), sampling, "error")
    assert narrow[1] - narrow[0] == pytest.approx(2 * 1.984 * 0.02, rel=0.03)


# means of shares


def of_classes(
    truth: np.ndarray, prediction: np.ndarray, metric: str, names: object = None
) -> Interval:
    groups = units(len(truth) if names is None else names)
    sampling = Sampling.of_rows(groups, classes=truth)
    classes = int(truth.max()) + 1
    return interval(sampling, class_scorers(truth, prediction, classes)[metric], metric)


def test_a_balanced_accuracy_has_the_bounds_of_zou_and_donner() -> None:
    """Of 12 and 28 rows, of which 9 and 26 are right."""
    truth = np.repeat([0, 1], [12, 28])
    prediction = truth.copy()
    prediction[[0, 1, 2]] = 1
    prediction[[12, 13]] = 0
    found = of_classes(truth, prediction, "balanced_accuracy")
    quantile = float(t.ppf(0.975, 38))
    shares = np.array([9 / 12, 26 / 28])
    ends = np.array([wilson(9 / 12, 12, quantile), wilson(26 / 28, 28, quantile)])
    reach = np.sqrt(((ends.T - shares) ** 2).sum(axis=1)) / 2
    assert found.low == pytest.approx(shares.mean() - reach[0])
    assert found.high == pytest.approx(shares.mean() + reach[1])


@pytest.mark.parametrize("metric", ["balanced_accuracy", "macro_f1"])
def test_a_class_of_which_no_row_is_right_has_an_upper_end(metric: str) -> None:
    """No row varies, as all are called 0; 8 positive rows may hide a recall of a third."""
    truth = np.repeat([0, 1], [72, 8])
    found = of_classes(truth, np.zeros(80, int), metric)
    upper = wilson(0.0, 8, float(t.ppf(0.975, 78)))[1]
    if metric == "macro_f1":
        upper = 2 * upper / (1 + upper)
    point = 0.5 if metric == "balanced_accuracy" else 72 / 76 / 2
    assert found.high == pytest.approx(point + upper / 2, abs=0.01)


def test_a_faultless_macro_f1_is_as_uncertain_as_all_rows() -> None:
    truth = np.arange(30) % 2
    found = of_classes(truth, truth, "macro_f1")
    assert found.high == 1
    assert found.low == pytest.approx(wilson(1.0, 30, 2.05)[0], abs=0.01)


def test_three_classes_have_three_shares() -> None:
    rng = np.random.default_rng(9)
    truth = rng.integers(0, 3, 300)
    right = rng.random(300) < 0.8
    prediction = np.where(right, truth, (truth + 1) % 3)
    found = of_classes(truth, prediction, "balanced_accuracy")
    counts = np.bincount(truth)
    recall = np.bincount(truth, right) / counts
    error = np.sqrt((recall * (1 - recall) / counts).sum()) / 3
    assert found.high - found.low == pytest.approx(2 * 1.968 * error, rel=0.02)


def test_a_mean_over_labels_is_that_of_all_their_shares() -> None:
    rng = np.random.default_rng(10)
    truth = rng.integers(0, 2, (2, 60))
    prediction = np.where(rng.random((2, 60)) < 0.75, truth, 1 - truth)
    sampling = Sampling.of_rows(units(60))
    scorers = [
        class_scorers(t, p, 2)["balanced_accuracy"]
        for t, p in zip(truth, prediction, strict=True)
    ]
    one = interval(sampling, MeanScorer(scorers[:1]), "balanced_accuracy")
    assert one == interval(sampling, scorers[0], "balanced_accuracy")
    twice = interval(sampling, MeanScorer(scorers[:1] * 2), "balanced_accuracy")
    assert (twice.low, twice.high) == pytest.approx((one.low, one.high), abs=0.003)
    both = interval(sampling, MeanScorer(scorers), "balanced_accuracy")
    assert both.high - both.low < 0.85 * (one.high - one.low)


def test_rows_of_a_patient_widen_a_share() -> None:
    rng = np.random.default_rng(11)
    patient = np.repeat(np.arange(20), 4)
    truth = np.arange(20)[patient] % 2
    prediction = np.where(rng.random(20) < 0.8, 1, 0)[patient] * truth
    alone = of_classes(truth, prediction, "balanced_accuracy")
    kept = of_classes(truth, prediction, "balanced_accuracy", patient.tolist())
    assert kept.high - kept.low > 1.5 * (alone.high - alone.low)


def test_an_auprc_has_as_many_trials_as_positive_rows() -> None:
    """A faultless ranking of 10 positive rows says as little as 10 of 10 successes."""
    positive = np.arange(100) < 10
    share = np.where(positive, 0.9, 0.1)
    both = np.stack([1 - share, share], axis=1)
    scorer = class_scorers(positive.astype(int), positive.astype(int), 2, both)["auprc"]
    sampling = Sampling.of_rows(units(100), classes=positive)
    found = interval(sampling, scorer, "auprc")
    assert found.high == 1
    assert 0.55 < found.low < 0.75


def test_a_score_that_one_unit_decides_has_no_interval() -> None:
    """Without the first of six there is nothing to divide by."""
    found = interval(
        Sampling.of_rows(units([f"p{i}" for i in range(6)], "patients")),
        lambda weights: np.where(weights[:, 0] > 0, 0.5, np.nan),
        "pearson",
    )
    assert math.isnan(found.low)
    assert found.missing == "the score has no value without one patient"


# published examples


def test_the_radiologists_area_is_the_published_one() -> None:
    """Ratings of 109 CT images (Hanley and McNeil, Radiology 143, 1982, table I).

    Stata's manual, roctab: area .8932, DeLong's standard error .0307, [.83295, .95339].
    """
    normal = np.repeat(np.arange(5), [33, 6, 6, 11, 2])
    abnormal = np.repeat(np.arange(5), [3, 2, 2, 11, 33])
    score = np.concatenate([normal, abnormal]).astype(float)
    positive = np.arange(109) >= 58
    sampling = Sampling.of_rows(units(109), classes=positive)
    scorer = auroc(score, positive)
    area = float(scorer(np.ones((1, 109)))[0])
    error = sampling.variance(sampling.influences(scorer)).value ** 0.5
    assert area == pytest.approx(0.8932, abs=5e-5)
    assert error == pytest.approx(0.0307, abs=5e-5)
    assert area - 1.959964 * error == pytest.approx(0.83295, abs=1e-5)
    assert area + 1.959964 * error == pytest.approx(0.95339, abs=1e-5)


# distances


def test_a_distance_reaches_as_far_as_the_gaps_of_resamples() -> None:
    sampling = Sampling.of_rows(units(9))
    drawn = np.linspace(0.0, 0.4, 41)  # the 97.5th percentile is 0.39
    low, high = distance_bounds(0.5, drawn, sampling)
    assert low == pytest.approx(0.5 - 0.39 * math.sqrt(1.25))
    assert high == pytest.approx(0.5 + 0.39 * math.sqrt(1.25))


def test_a_distance_lies_between_0_and_1() -> None:
    sampling = Sampling.of_rows(units(9))
    assert distance_bounds(0.5, np.full(3, 0.9), sampling) == (0.0, 1.0)


def test_a_small_distance_leaves_room_for_units_that_no_row_has_shown() -> None:
    low, high = distance_bounds(0.0, np.zeros(3), Sampling.of_rows(units(16)))
    assert low == 0.0
    assert high == pytest.approx(exact(0, 16)[1])


# whole intervals


def test_an_interval_names_its_method_and_its_units() -> None:
    names = ["p", "q", "r", "s", "s", "t"]
    sampling = Sampling.of_rows(units(names, "cases"))
    values = np.array([1.0, 2.0, 3.0, 4.0, 4.0, 2.5])
    bounds = interval(sampling, lambda w: w @ values / w.sum(axis=1), "mae")
    assert bounds.level == 0.95
    assert bounds.method == intervals.METHODS["loss"]
    assert (bounds.unit, bounds.units, bounds.missing) == ("cases", 5, "")
    assert 0 < bounds.low < values.mean() < bounds.high


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
        method="",
        unit="slides",
        units=9,
        missing="the score has no value",
    )


def test_five_units_are_enough_and_four_are_not() -> None:
    assert why_missing(Sampling.of_rows(units(5))) == ""
    assert (
        why_missing(Sampling.of_rows(units(4))) == "at least 5 rows are needed, got 4"
    )


def test_the_reason_names_classes_and_events() -> None:
    classes = np.array([0, 0, 0, 0, 1])
    assert (
        why_missing(Sampling.of_rows(units(5, "cases"), classes=classes))
        == "at least 5 cases of each class are needed, got 1"
    )
    assert (
        why_missing(Sampling.of_rows(units(5, "cases"), events=classes))
        == "at least 5 cases with an event are needed, got 1"
    )
