"""Calibration errors as THUNDER defines them: five bins, five figures.

Source: THUNDER (MICS-Lab/thunder), `thunder.utils.calibration_metrics`.
"""

from itertools import pairwise

import numpy as np

from thinsection.evaluation.metrics import Flags, FloatVector, IndexArray

NUM_BINS = 5
MIN_CONFIDENCE = 0.01  # a bin of TACE counts above this mean confidence


def thunder_calibration(
    probability: FloatVector, truth: IndexArray
) -> dict[str, float]:
    """Calibration errors of the predicted class of N rows, from probabilities (N, K).

    ECE weighs bins of equal width by their rows, MCE is the largest gap of a bin, SCE the
    mean gap over all bins, empty ones counted as 0. ACE is the mean gap of bins with
    equally many rows, and TACE the same over bins whose mean confidence is above 0.01.
    Memory: 4 N numbers.
    """
    confidence = probability.max(axis=1)
    correct = probability.argmax(axis=1) == truth
    edges = np.linspace(0, 1, NUM_BINS + 1)
    gaps = []
    shares = []
    for low, high in pairwise(edges):
        rows = (confidence > low) & (confidence <= high)
        if rows.any():
            gaps.append(_gap(confidence[rows], correct[rows]))
            shares.append(rows.mean())
    # a share of 1 / NUM_BINS each, the last bin takes the remainder
    order = np.argsort(confidence)
    per_bin = len(order) // NUM_BINS
    cuts = [per_bin * i for i in range(1, NUM_BINS)]
    adaptive = []
    counted = []
    for members in np.split(order, cuts):
        if len(members):
            gap = _gap(confidence[members], correct[members])
            adaptive.append(gap)
            if confidence[members].mean() > MIN_CONFIDENCE:
                counted.append(gap)
    return {
        "ece": float(np.dot(gaps, shares)),
        "mce": float(max(gaps)),
        "sce": float(sum(gaps) / NUM_BINS),
        "ace": float(sum(adaptive) / NUM_BINS),
        "tace": float(np.mean(counted)) if counted else 0.0,
    }


def _gap(confidence: FloatVector, correct: Flags) -> float:
    """Mean confidence of a bin's rows against the share of them that is correct."""
    return float(abs(confidence.mean() - correct.mean()))
