"""Intervals hold what they promise: simulated data sets whose true score is known, seeded."""

from functools import partial

import numpy as np
import pytest
from scipy.stats import norm

from thinsection.probe import intervals
from thinsection.probe.groups import group_rows
from thinsection.probe.intervals import bootstrap_folds, bootstrap_predictions
from thinsection.probe.statistics import macro_auroc, macro_f1, stratified_folds

SETS, LEAST = 300, 0.92
CORRELATION, TRUE = 0.2, 0.75  # of tiles within a slide, and the score of all slides there could be


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "DRAWS", 500)


def tiles(rng: np.random.Generator, slides: int, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Truth and prediction; the share of right tiles of a slide is beta distributed."""
    spread = 1 / CORRELATION - 1
    share = rng.beta(TRUE * spread, (1 - TRUE) * spread, slides)
    truth = rng.integers(0, 2, slides * each)
    right = rng.random(slides * each) < np.repeat(share, each)
    return truth, np.where(right, truth, 1 - truth)


@pytest.mark.parametrize(("slides", "each"), [(10, 300), (20, 100), (60, 50)])
def test_tiles_in_slides_are_covered_where_rows_alone_are_not(slides: int, each: int) -> None:
    rng = np.random.default_rng(slides)
    groups = group_rows([f"s{i // each}" for i in range(slides * each)], where="here")
    held = np.zeros(2)
    for seed in range(SETS):
        truth, guess = tiles(rng, slides, each)
        for i, of in enumerate((groups, None)):
            _, found = bootstrap_predictions(
                truth, guess[None], macro_f1, num_classes=2, seed=seed, groups=of
            )
            held[i] += found.low <= TRUE <= found.high
    by_slide, by_row = held / SETS
    assert by_slide >= LEAST
    assert by_row < 0.6  # what the issue found


@pytest.mark.parametrize("cases", [30, 90])
def test_cases_in_folds_are_covered(cases: int) -> None:
    rng, held = np.random.default_rng(cases), 0
    labels = np.arange(cases) % 2
    truth = norm.cdf(1 / np.sqrt(2))  # the area of two normals one deviation apart
    for seed in range(SETS):
        share = norm.cdf(rng.normal(size=cases) + labels)
        folds = stratified_folds(labels, seed=seed)
        scorers = [
            partial(macro_auroc, np.c_[1 - share[val], share[val]], labels[val]) for _, val in folds
        ]
        found = bootstrap_folds(folds, scorers, seed=seed)
        held += found.low <= truth <= found.high
    assert held / SETS >= LEAST
