"""One temperature for all folds: none from few cases, a known one from many."""

import numpy as np
from scipy.special import expit

from thinsection.evaluation.calibration import MIN_TEMPERED, shared_temperature


def loss_of(logits: np.ndarray, truth: np.ndarray):
    def loss(temperature: float) -> float:
        p = expit(logits / temperature)
        return float(-np.log(np.where(truth, p, 1 - p) + 1e-300).sum())

    return loss


def test_the_temperature_of_overconfident_logits_is_found() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=3000) * 1.5
    truth = rng.random(3000) < expit(logits)
    assert abs(shared_temperature(loss_of(3 * logits, truth), 3000) - 3) < 0.25


def test_few_inner_cases_have_no_temperature() -> None:
    logits = np.linspace(-9, 9, MIN_TEMPERED - 1)
    loss = loss_of(logits, logits > 0)
    assert shared_temperature(loss, len(logits)) == 1.0


def test_faultless_inner_cases_do_not_run_to_the_bound() -> None:
    """Without a prior the likelihood of separated cases asks for the least temperature, .2."""
    logits = np.linspace(-3, 3, 30)
    found = shared_temperature(loss_of(logits, logits > 0), 30)
    assert 0.35 < found < 1
