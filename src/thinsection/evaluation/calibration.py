"""Calibration of predicted probabilities: its error by bins, and the temperature of logits."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatVector = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]

ECE_BINS = 15  # number of bins, of equal width; Guo et al. 2017
# cases; with fewer a fitted temperature says more of chance than of the head
MIN_TEMPERED = 25
TEMPERATURES = (0.2, 8.0)  # range of the search
TRIED = 121
PRIOR_SPREAD = 0.5  # standard deviation of log temperature that is expected


def calibration_bins(
    p: FloatVector, truth: IndexArray, weights: FloatVector
) -> tuple[FloatVector, FloatVector, FloatVector]:
    """Rows, confidence x rows and right rows by bin of the predicted class's share; (B, ECE_BINS).

    Args:
        p: shares (N, K).
        truth: labels (N,).
        weights: of rows, (B, N).

    Memory: 8 N ECE_BINS. Source: Guo et al., "On calibration of modern neural networks", ICML 2017.
    """
    confidence = p.max(axis=1)
    bins = np.ceil(confidence * ECE_BINS).astype(np.int64) - 1
    in_bin = np.eye(ECE_BINS)[np.clip(bins, 0, ECE_BINS - 1)]
    right = (p.argmax(axis=1) == truth).astype(np.float64)
    return (
        weights @ in_bin,
        weights @ (in_bin * confidence[:, None]),
        weights @ (in_bin * right[:, None]),
    )


@dataclass(frozen=True)
class CalibrationError:
    """Expected calibration error of the predicted class: a scorer, and how far its gaps vary."""

    p: FloatVector  # (N, K)
    truth: IndexArray  # (N,)

    def __call__(self, weights: FloatVector) -> FloatVector:
        """Sum over bins of |confidence - right|, a share of all rows; (B,) for weights (B, N)."""
        return np.asarray(np.abs(self._gaps(weights)).sum(axis=1))

    def spread(self, weights: FloatVector) -> FloatVector:
        """Sum over bins of |gap - gap of the sample|, (B,): what chance alone may add."""
        sample = self._gaps(np.ones((1, len(self.truth))))
        return np.asarray(np.abs(self._gaps(weights) - sample).sum(axis=1))

    def _gaps(self, weights: FloatVector) -> FloatVector:
        """(B, ECE_BINS) confidence - right of each bin, a share of all rows."""
        _, confidence, right = calibration_bins(self.p, self.truth, weights)
        return np.asarray((confidence - right) / weights.sum(axis=1, keepdims=True))


def shared_temperature(loss: Callable[[float], float], num_cases: int) -> float:
    """One temperature for the logits of all folds, from the inner cases of all of them.

    The posterior mode for a log temperature that is expected at 0 with PRIOR_SPREAD; with fewer
    than MIN_TEMPERED cases it is 1.

    Args:
        loss: negative log likelihood of all inner cases, summed, at a temperature.
        num_cases: how many inner cases there are.

    Source: Guo et al. 2017 (the likelihood).
    """
    if num_cases < MIN_TEMPERED:
        return 1.0

    def penalised(temperature: float) -> float:
        return loss(temperature) + (math.log(temperature) / PRIOR_SPREAD) ** 2 / 2

    return float(min(np.geomspace(*TEMPERATURES, TRIED), key=penalised))
