"""Bootstrap intervals of scores, seeded: over patients, else slides, else rows.

A resample of n units (rows, or groups of them) with replacement is a count per unit; for metrics of
a confusion matrix the units' own matrices are enough.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.probe.groups import Groups
from thinsection.probe.statistics import (
    BLOCK_BYTES,
    DRAWS,
    LEVEL,
    FloatVector,
    Fold,
    IndexArray,
    Scorer,
    confusion_matrix,
)

LOGIT_CLIP = 1e-4  # of a draw whose score lies at a bound, which has no logit


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where the score of other units, drawn as these were, is expected (see `bootstrap_rows`)."""

    low: float
    high: float
    level: float  # its coverage, 0.95 for 95 %
    draws: int  # resamples that gave a number (a draw without a class gives no AUROC)
    seed: int  # of the resamples
    unit: str = "rows"  # what was resampled: patients, slides, cases, images or rows
    units: int = 0  # how many there are


def bootstrap_rows(
    num_rows: int,
    score: Scorer,
    *,
    seed: int,
    groups: Groups | None = None,
    unit: str = "rows",
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Interval:
    """Interval of a score that maps weights (B, N), how often each row was drawn, to (B,).

    Rows of one group are drawn together: tiles of a slide are no independent witnesses. With n
    units of resampling the interval is logit(score) ± t(n - 1) sqrt(n / (n - 1)) s, where s is the
    standard deviation of the draws' logits: percentiles are too narrow for few units (coverage in
    `tests/probe/test_coverage.py`). A score at a bound, where no draw differs, gets the bound that
    n faultless units give: 0.025^(1/n).

    Args:
        num_rows: N.
        score: of weights.
        seed: of the draws; the result does not depend on the block size.
        groups: of the rows; None draws rows.
        unit: what a row is, where it is drawn by itself.
        bounds: the least and the largest score there can be.

    Memory: BLOCK_BYTES of weights plus what `score` makes of them.

    Source: t and sqrt(n / (n - 1)): Hesterberg, "What teachers should know about the bootstrap",
    American Statistician 69 (2015), 4.3; 0.025^(1/n): Clopper and Pearson, Biometrika 26 (1934).
    """
    codes = None if groups is None else groups.codes
    units = num_rows if codes is None else int(codes.max()) + 1

    def draw(rng: np.random.Generator, draws: int) -> IndexArray:
        drawn = (rng.integers(0, units, units) for _ in range(draws))
        found = np.stack([np.bincount(rows, minlength=units) for rows in drawn])
        return found if codes is None else found[:, codes]

    once, unit = np.ones(num_rows, dtype=np.int64), unit if groups is None else groups.unit
    return _bootstrap(draw, once, score, seed=seed, unit=unit, units=units, bounds=bounds)


def _bootstrap(
    draw: Callable[[np.random.Generator, int], IndexArray],
    given: IndexArray,
    score: Scorer,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    **known: Any,
) -> Interval:
    """The interval of resamples that `draw` gives, around the score of the weights as given."""
    rng, point = np.random.default_rng(known["seed"]), float(score(given[None])[0])
    block = max(1, BLOCK_BYTES // (8 * max(1, len(given))))
    sizes = (min(block, DRAWS - start) for start in range(0, DRAWS, block))
    values = np.concatenate([score(draw(rng, size)) for size in sizes])
    values = values[np.isfinite(values)]
    low, high = _ends(point, values, known["units"], bounds)
    return Interval(low=low, high=high, level=LEVEL, draws=len(values), **known)


def _ends(
    point: float, values: FloatVector, n: int, bounds: tuple[float, float]
) -> tuple[float, float]:
    """Of `bootstrap_rows`; NaN where one unit, or no draw with a number, is all there is."""
    from scipy.stats import t

    if n < 2 or not len(values) or not np.isfinite(point):
        return np.nan, np.nan
    tail = (1 - LEVEL) / 2
    reach = t.ppf(1 - tail, n - 1) * np.sqrt(n / (n - 1))
    least, width = bounds[0], bounds[1] - bounds[0]
    if point in bounds and np.ptp(values) == 0:
        low, high = (tail ** (1 / n), 1.0) if point == bounds[1] else (0.0, 1 - tail ** (1 / n))
    else:
        share = np.clip((np.r_[point, values] - least) / width, LOGIT_CLIP, 1 - LOGIT_CLIP)
        logits = np.log(share / (1 - share))
        low, high = 1 / (1 + np.exp(-logits[0] + np.array([reach, -reach]) * logits[1:].std()))
    return min(point, float(least + width * low)), max(point, float(least + width * high))


def bootstrap_predictions(
    truth: IndexArray,
    predictions: IndexArray,
    score: Scorer,
    *,
    num_classes: int,
    seed: int,
    groups: Groups | None = None,
) -> tuple[float, Interval]:
    """The mean over C predictions (C, N) of a score of confusion matrices, and its interval.

    Memory: 8 C K² a group, or a pattern of truth and predictions, + BLOCK_BYTES.
    """
    cells, n, unit = truth * num_classes + predictions, len(truth), "rows"
    if groups is None:  # rows of one pattern of cells are alike: their number is drawn
        _, units, times = np.unique(cells, axis=1, return_inverse=True, return_counts=True)
    else:
        units, unit, n = groups.codes, groups.unit, len(set(groups.of_row))
        times = np.ones(n, dtype=np.int64)
    counts = np.zeros((len(cells), len(times), num_classes**2))
    for tally, cell, prediction in zip(counts, cells, predictions, strict=True):
        confusion_matrix(truth, prediction, num_classes)  # whose checks the cells need
        np.add.at(tally, (units.ravel(), cell), 1)
    counts /= times[:, None]

    def mean_score(weights: npt.NDArray) -> FloatVector:
        of_each = [score((weights @ t).reshape(-1, num_classes, num_classes)) for t in counts]
        return np.mean(of_each, axis=0)  # type: ignore[no-any-return]

    def draw(rng: np.random.Generator, draws: int) -> IndexArray:
        return rng.multinomial(n, times / n, size=draws)

    interval = _bootstrap(draw, times, mean_score, seed=seed, unit=unit, units=n)
    return float(mean_score(times[None])[0]), interval


def bootstrap_folds(
    folds: Sequence[Fold],
    scores: Sequence[Scorer],
    *,
    seed: int,
    groups: Groups | None = None,
    unit: str = "cases",
) -> Interval:
    """Interval of the mean over folds of a score of each fold's own validation rows.

    All validation rows are resampled together, a row (group) of several folds (repeats) as one;
    rows of two models are never ranked against each other. Memory: as `bootstrap_rows`.
    """
    rows = np.unique(np.concatenate([val for _, val in folds]))
    parts = [
        (score, np.searchsorted(rows, val)) for score, (_, val) in zip(scores, folds, strict=True)
    ]

    def mean_score(weights: npt.NDArray) -> FloatVector:
        mean: FloatVector = np.mean([f(weights[:, part]) for f, part in parts], axis=0)
        return mean

    of_rows = None if groups is None else groups.take(rows)
    return bootstrap_rows(len(rows), mean_score, seed=seed, groups=of_rows, unit=unit)
