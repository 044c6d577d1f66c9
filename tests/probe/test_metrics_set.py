"""Every metric under weights: scikit-learn's and SciPy's on the rows repeated so often."""

import itertools

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from thinsection.evaluation import metrics

N, K = 120, 4
TRUTH = np.random.default_rng(5).integers(0, K, N)
SHARES = np.random.default_rng(6).dirichlet(np.ones(K), N)
SHARES = np.round(SHARES * 8 + 1e-3 * np.eye(K)[TRUTH], 1)
SHARES = (SHARES + 0.05) / (SHARES + 0.05).sum(axis=1, keepdims=True)  # with ties
WEIGHTS = np.random.default_rng(7).integers(0, 3, (3, N))
WEIGHTS[0] = 1


def repeated(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = np.repeat(np.arange(N), w)
    return TRUTH[rows], SHARES[rows].argmax(axis=1), SHARES[rows]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("macro_f1", lambda t, g, p: sk.f1_score(t, g, average="macro")),
        ("balanced_accuracy", lambda t, g, p: sk.balanced_accuracy_score(t, g)),
        (
            "weighted_kappa",
            lambda t, g, p: sk.cohen_kappa_score(t, g, weights="quadratic"),
        ),
        ("auroc", lambda t, g, p: sk.roc_auc_score(t, p, multi_class="ovr")),
        (
            "auprc",
            lambda t, g, p: sk.average_precision_score(
                np.eye(K)[t], p, average="macro"
            ),
        ),
        ("brier", lambda t, g, p: ((p - np.eye(K)[t]) ** 2).sum(axis=1).mean()),
    ],
)
def test_a_metric_under_weights_is_scikit_learns_of_repeated_rows(name, theirs) -> None:  # type: ignore[no-untyped-def]
    scorers = metrics.class_scorers(TRUTH, SHARES.argmax(axis=1), K, SHARES)
    for w, score in zip(WEIGHTS, scorers[name](WEIGHTS), strict=True):
        assert score == pytest.approx(theirs(*repeated(w)), abs=1e-12)


def test_brier_of_two_classes_is_scikit_learns() -> None:
    share, truth = SHARES[:, :2] / SHARES[:, :2].sum(axis=1, keepdims=True), TRUTH % 2
    scorers = metrics.class_scorers(truth, share.argmax(axis=1), 2, share)
    assert metrics.all_scores(scorers, N)["brier"] == pytest.approx(
        sk.brier_score_loss(truth, share[:, 1])
    )


def test_the_calibration_error_is_the_gap_of_bins_weighted_by_their_rows() -> None:
    sure, right = SHARES.max(axis=1), SHARES.argmax(axis=1) == TRUTH
    edges, expected = np.linspace(0, 1, 16), 0.0
    for low, high in itertools.pairwise(edges):
        of = (sure > low) & (sure <= high)
        expected += abs(sure[of].sum() - right[of].sum()) / N
    scorers = metrics.class_scorers(TRUTH, SHARES.argmax(axis=1), K, SHARES)
    assert metrics.all_scores(scorers, N)["ece"] == pytest.approx(expected)


def test_correlations_under_weights_are_scipys_of_repeated_rows() -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(N, 2))
    y = np.round(x + rng.normal(size=(N, 2)), 1)  # with ties
    scorers = metrics.value_scorers(x, y)
    for w in (0, 1, 2):
        rows = np.repeat(np.arange(N), WEIGHTS[w])
        pairs = [(x[rows, t], y[rows, t]) for t in (0, 1)]
        found = {name: score(WEIGHTS)[w] for name, score in scorers.items()}
        assert found["pearson"] == pytest.approx(
            np.mean([stats.pearsonr(*p)[0] for p in pairs])
        )
        assert found["spearman"] == pytest.approx(
            np.mean([stats.spearmanr(*p)[0] for p in pairs])
        )


def test_a_constant_target_has_no_correlation_and_does_not_count() -> None:
    x = np.random.default_rng(9).normal(size=(N, 2))
    y = np.stack([x[:, 0], np.full(N, 7.3)], axis=1)
    scores = metrics.all_scores(metrics.value_scorers(x, y), N)
    assert scores["pearson"] == pytest.approx(1)
    assert scores["spearman"] == pytest.approx(1)
