"""Intervals hold the true score: simulated cohorts whose truth is known, seeded.

A cell of SETS cohorts whose intervals hold the truth with probability .95 has a coverage below
LEAST with a probability of about .001 (binomial; .92 less its error would be laxer still). The full
size, 200 cohorts a cell and more cells, is `benchmarks/bench_coverage.py`.
"""

import numpy as np
import pytest
from benchmarks.bench_coverage import Population, cover_test, cover_train
from scipy.stats import binom, norm
from tests.support.units import units

from thinsection.evaluation import intervals
from thinsection.evaluation.intervals import Sampling, interval
from thinsection.evaluation.metrics import class_scorers, macro_f1, weighted_auroc

SETS = 60
LEAST = float(binom.ppf(0.001, SETS, 0.95)) / SETS  # .85


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "DRAWS", 200)
    monkeypatch.setattr("benchmarks.bench_coverage.POPULATION", 4000)
    monkeypatch.setattr("benchmarks.bench_coverage.PAIRED", 600)
    monkeypatch.setattr("benchmarks.bench_coverage.TRUTHS", 20)


@pytest.mark.check
@pytest.mark.parametrize(
    ("kind", "share", "cases"),
    [
        ("classes", 0.5, 12),
        ("classes", 0.1, 40),
        ("values", 0.5, 20),
        ("times", 0.5, 20),
    ],
)
def test_cross_validated_scores_are_covered(
    kind: str, share: float, cases: int
) -> None:
    found = cover_train(Population(kind, share, 1.0), cases, SETS, 3)
    found.pop("refused")
    for name, cell in found.items():
        assert cell["coverage"] >= LEAST, (name, cell)
        assert cell["without_interval"] == 0


@pytest.mark.check
@pytest.mark.parametrize("slides", [False, True])
@pytest.mark.parametrize(("share", "signal"), [(0.5, 2.2), (0.1, 1.0)])
def test_scores_of_one_test_set_are_covered(
    share: float, signal: float, slides: bool
) -> None:
    found = cover_test(Population("classes", share, signal), 40, SETS, 3, slides=slides)
    found.pop("refused")
    for name, cell in found.items():
        assert cell["coverage"] >= LEAST, (name, cell)


def test_a_faultless_score_of_12_cases_has_an_honest_bound() -> None:
    """12 cases of 6 and 6: as 12 coins, of which none fell wrong."""
    positive = np.arange(12) < 6
    sampling = Sampling.of_rows(units(12), classes=positive)
    found = interval(
        sampling,
        lambda weights: weighted_auroc(positive + 0.0, positive, weights),
        "auroc",
        seed=0,
    )
    assert found.high == 1.0
    assert found.low == pytest.approx(0.025 ** (1 / 12))
    # folds of few pairs say less
    fold = np.arange(12) % 5
    folded = interval(
        Sampling.of_rows(units(12), classes=positive, fold=fold),
        lambda weights: weighted_auroc(positive + 0.0, positive, weights, fold),
        "auroc",
        seed=0,
    )
    assert folded.low < found.low - 0.1


def test_every_resample_counts_with_one_positive_case_a_fold() -> None:
    rng = np.random.default_rng(0)
    positive = np.arange(50) < 5
    fold = np.r_[np.arange(5), np.arange(45) % 5]
    sampling = Sampling.of_rows(units(50), classes=positive, fold=fold)
    score = positive + rng.normal(size=50)
    drawn = sampling.scores([lambda w: weighted_auroc(score, positive, w, fold)], 0)
    assert np.isfinite(drawn).all()
    assert len(drawn) == intervals.DRAWS


def test_too_few_cases_of_a_class_have_no_interval_and_it_is_said() -> None:
    truth = np.r_[np.ones(2, int), np.zeros(20, int)]
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
    assert found.missing == "at least 3 cases of each class are needed, got 2"


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
    variance = np.concatenate(drawn).var() * sampling.inflation
    assert variance == pytest.approx(values.var(ddof=1) / 30, rel=0.03)


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
