"""Intervals hold the true score: simulated cohorts whose truth is known, seeded.

A cell of SETS cohorts whose intervals hold the truth with probability .95 has a coverage below
LEAST with a probability of about .001 (binomial; .92 less its error would be laxer still). The full
size, 300 cohorts a cell and more cells, is `benchmarks/bench_coverage.py`.
"""

import numpy as np
import pytest
from benchmarks.bench_coverage import (
    Kind,
    cohort,
    cover,
    fixed_head,
    scorers_of,
    true_scores,
)
from scipy.stats import binom, norm
from tests.support.units import units

from thinsection.evaluation import intervals
from thinsection.evaluation.intervals import Sampling, drawn_variance, interval
from thinsection.evaluation.metrics import class_scorers, macro_f1, weighted_auroc

SETS = 60
LEAST = float(binom.ppf(0.001, SETS, 0.95)) / SETS  # .85


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench_coverage.POPULATION", 4000)
    monkeypatch.setattr("benchmarks.bench_coverage.PAIRED", 600)
    monkeypatch.setattr("benchmarks.bench_coverage.TRUTHS", 20)
    monkeypatch.setattr("benchmarks.bench_coverage.BOOTSTRAP", 20)


@pytest.mark.check
@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("mode", ["test", "train"])
@pytest.mark.parametrize(
    ("kind", "metric"),
    [
        (Kind("classes", 0.5, 2.2), "auroc"),
        (Kind("classes", 0.1, 1.0), "auroc"),
        # the model hardly ever calls the rare class
        (Kind("classes", 0.1, 1.0), "weighted_kappa"),
        (Kind("values", 0.5, 0.0), "pearson"),
        (Kind("values", 0.5, 1.0), "r2"),
        (Kind("times", 0.5, 1.0), "c_index"),
    ],
)
def test_headline_scores_are_covered(
    kind: Kind, metric: str, mode: str, most: int
) -> None:
    cases = 200 if kind.share < 0.5 else 60
    found = cover(kind, cases, most, mode, sets=SETS, seed=3)
    assert found["metrics"][metric]["ours"]["coverage"] >= LEAST


@pytest.mark.check
def test_cases_as_units_would_not_cover_where_patients_have_several() -> None:
    """The judge of the simulation: the same cohorts by case miss the truth."""
    kind = Kind("classes", 0.5, 1.0)
    rng = np.random.default_rng(8)
    truth = true_scores(kind, [fixed_head(kind)])["auroc"]
    held = np.zeros(2)
    for _ in range(SETS):
        one = cohort(kind, rng, 200, 5, "test")
        assert one is not None
        scorer = scorers_of(kind, one.drawn.truth, one.answer, None)["auroc"]
        for place, names in enumerate((one.drawn.patient.tolist(), 200)):
            sampling = Sampling.of_rows(units(names), classes=one.drawn.truth)
            found = interval(sampling, scorer, "auroc")
            held[place] += found.low <= truth <= found.high
    assert held[0] / SETS >= LEAST
    assert held[1] < held[0]


def test_too_few_cases_of_a_class_have_no_interval_and_it_is_said() -> None:
    truth = np.r_[np.ones(4, int), np.zeros(18, int)]
    share = np.linspace(0.9, 0.1, 22)
    scorers = class_scorers(
        truth, (share > 0.5).astype(int), 2, np.stack([1 - share, share], 1)
    )
    found = interval(
        Sampling.of_rows(units(22, "cases"), classes=truth),
        scorers["auroc"],
        "auroc",
        seed=0,
    )
    assert np.isnan(found.low)
    assert found.missing == "at least 5 cases of each class are needed, got 4"


def test_resamples_do_not_depend_on_the_size_of_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling = Sampling.of_rows(units([f"s{i // 4}" for i in range(40)]))
    whole = np.concatenate([*sampling.weights(3)])
    monkeypatch.setattr(intervals, "BLOCK_BYTES", 8 * 40 * 7)
    blocks = [*sampling.weights(3)]
    assert max(map(len, blocks)) == 7
    np.testing.assert_array_equal(np.concatenate(blocks), whole)


def test_the_variance_of_a_mean_is_the_textbooks() -> None:
    values = np.random.default_rng(1).normal(size=30)
    sampling = Sampling.of_rows(units(30))
    drawn = [w @ values / w.sum(axis=1) for w in sampling.weights(0, 40_000)]
    variance = drawn_variance(np.concatenate(drawn), sampling)
    assert variance.value == pytest.approx(values.var(ddof=1) / 30, rel=0.03)


@pytest.mark.check
def test_tiles_of_few_slides_are_covered_where_rows_alone_are_not() -> None:
    rng = np.random.default_rng(10)
    correlation, true = 0.2, 0.75
    spread = 1 / correlation - 1
    slides, tiles = 10, 100
    groups = [f"s{i // tiles}" for i in range(slides * tiles)]
    held = np.zeros(2)
    for seed in range(SETS):
        share = rng.beta(true * spread, (1 - true) * spread, slides)
        truth = rng.integers(0, 2, slides * tiles)
        right = rng.random(slides * tiles) < np.repeat(share, tiles)
        guess = np.where(right, truth, 1 - truth)
        scorer = class_scorers(truth, guess, 2)["macro_f1"]
        for i, names in enumerate((groups, len(truth))):
            sampling = Sampling.of_rows(units(names), classes=truth)
            found = interval(sampling, scorer, "macro_f1", seed=seed)
            held[i] += found.low <= true <= found.high
    assert held[0] / SETS >= LEAST
    assert held[1] / SETS < 0.6


def test_scores_of_one_fold_are_scikit_learns() -> None:
    from sklearn.metrics import average_precision_score, r2_score, roc_auc_score

    rng = np.random.default_rng(2)
    positive = rng.random(60) < 0.3
    share = norm.cdf(positive + rng.normal(size=60))
    once = np.ones((1, 60))
    scorers = class_scorers(
        positive.astype(int),
        (share > 0.5).astype(int),
        2,
        np.stack([1 - share, share], 1),
    )
    assert scorers["auroc"](once)[0] == pytest.approx(roc_auc_score(positive, share))
    wanted = average_precision_score(positive, share)
    assert scorers["auprc"](once)[0] == pytest.approx(wanted)
    from thinsection.evaluation.metrics import value_scorers

    values = value_scorers(share, positive.astype(float))
    assert values["r2"](once)[0] == pytest.approx(r2_score(share, positive))
    assert macro_f1(np.array([[5, 0], [0, 5]])) == 1


def test_areas_of_folds_count_by_their_pairs() -> None:
    rng = np.random.default_rng(3)
    positive = rng.random(40) < 0.4
    score = positive + rng.normal(size=40)
    fold = rng.integers(0, 4, 40)
    wins, pairs = 0.0, 0
    for i in np.flatnonzero(positive):
        for j in np.flatnonzero(~positive):
            if fold[i] == fold[j]:
                wins += float(score[i] > score[j])
                pairs += 1
    found = weighted_auroc(score, positive, np.ones((1, 40)), fold)[0]
    assert found == pytest.approx(wins / pairs)
