"""Metrics and intervals against scikit-learn and against resampling row by row."""

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from tests.support.units import units

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import group_rows
from thinsection.evaluation.intervals import Interval, Sampling, interval
from thinsection.evaluation.metrics import (
    balanced_accuracy,
    class_scorers,
    confusion_matrix,
    macro_auroc,
    macro_f1,
    weighted_auroc,
)

TRUTH, GUESS = np.random.default_rng(11).integers(0, 4, (2, 200))


def test_macro_f1_and_balanced_accuracy_are_scikit_learns() -> None:
    counts = confusion_matrix(
        TRUTH, GUESS, 5
    )  # class 4 occurs nowhere and does not count
    assert macro_f1(counts) == pytest.approx(f1_score(TRUTH, GUESS, average="macro"))
    assert balanced_accuracy(counts) == pytest.approx(
        balanced_accuracy_score(TRUTH, GUESS)
    )


def test_auroc_is_scikit_learns_with_ties_and_for_many_classes() -> None:
    rng = np.random.default_rng(12)
    scores = rng.integers(0, 6, 200) / 5.0
    positive = TRUTH > 1
    area = weighted_auroc(scores, positive, np.ones((1, 200)))[0]
    assert area == pytest.approx(roc_auc_score(positive, scores))
    probability = rng.dirichlet(np.ones(4), 200)
    expected = roc_auc_score(TRUTH, probability, multi_class="ovr", average="macro")
    assert macro_auroc(probability, TRUTH, np.ones((1, 200)))[0] == pytest.approx(
        expected
    )


def test_auroc_under_weights_is_that_of_repeated_rows() -> None:
    rng = np.random.default_rng(13)
    weights = rng.integers(0, 3, (4, 200))
    scores, positive = rng.integers(0, 9, 200) / 8.0, TRUTH > 1
    for w, area in zip(weights, weighted_auroc(scores, positive, weights), strict=True):
        assert area == pytest.approx(
            roc_auc_score(np.repeat(positive, w), np.repeat(scores, w))
        )


def test_auroc_of_one_class_is_no_number() -> None:
    assert np.isnan(
        macro_auroc(np.full((3, 2), 0.5), np.array([1, 1, 1]), np.ones((1, 3)))
    )


def test_labels_outside_the_classes_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"prediction must be in 0\.\.1, got 0\.\.2"
    ):
        confusion_matrix(np.array([0, 1]), np.array([0, 2]), 2)


def labelled_interval(
    truth: np.ndarray,
    guess: np.ndarray,
    metric: str,
    classes: int,
    *,
    groups: object = None,
    seed: int = 0,
) -> Interval:
    scorer = class_scorers(truth, guess, classes)[metric]
    sampling = Sampling.of_rows(
        units(len(truth) if groups is None else groups), classes=truth
    )
    return interval(sampling, scorer, metric, seed=seed)


def test_the_interval_of_labels_is_that_of_resampled_rows() -> None:
    counts = confusion_matrix(TRUTH, GUESS, 4)
    found = labelled_interval(TRUTH, GUESS, "macro_f1", 4)
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 200, (2000, 200))
    slow = [f1_score(TRUTH[r], GUESS[r], average="macro") for r in rows[:600]]
    np.testing.assert_allclose(
        [found.low, found.high], np.percentile(slow, [2.5, 97.5]), atol=0.04
    )
    assert found.low < macro_f1(counts) < found.high


def test_an_interval_reproduces_to_the_bit_and_knows_its_units() -> None:
    a, b = (labelled_interval(TRUTH, GUESS, "balanced_accuracy", 4) for _ in range(2))
    assert a == b
    assert (a.unit, a.units) == ("rows", 200)


def test_tiles_of_a_slide_are_drawn_together() -> None:
    slides = group_rows([f"s{i // 20}" for i in range(200)], where="here")
    truth = np.repeat(np.arange(10) % 2, 20)
    alike = np.repeat(np.arange(10) // 5, 20)  # a slide is right or wrong as a whole
    rows, clusters = (
        labelled_interval(truth, alike, "balanced_accuracy", 2, groups=groups)
        for groups in (None, slides)
    )
    assert (clusters.unit, clusters.units) == ("slides", 10)
    assert clusters.high - clusters.low > 3.5 * (rows.high - rows.low)


def test_a_faultless_score_is_not_certain() -> None:
    truth = np.arange(30) % 2
    found = labelled_interval(truth, truth, "macro_f1", 2)
    assert found.high == pytest.approx(1)
    assert found.low == pytest.approx(0.025 ** (1 / 30), abs=0.02)
