"""Resampling, seeded, over patients, else slides, else rows: intervals, and differences of models.

A resample of n units (rows, or groups of them) with replacement is a count per unit; for metrics of
a confusion matrix the units' own matrices are enough. Models are compared on the same resamples: a
difference d is held against its standard error over them, se, widened by sqrt(G / (G - 1)) for G
groups, by Student's t with G - 1 degrees of freedom. Its interval leaves out 0 exactly where
p < 1 - level, also for few groups, where percentiles are too narrow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from thinsection.errors import require
from thinsection.probe import statistics
from thinsection.probe.groups import Groups
from thinsection.probe.statistics import Flags, FloatVector, Fold, IndexArray, Scorer, ratio
from thinsection.types import MIB

DRAWS = 2000
LEVEL = 0.95
BLOCK_BYTES = 64 * MIB  # of row weights at a time
LOGIT_CLIP = 1e-4  # of a draw whose score lies at a bound, which has no logit
POWER = 0.8  # of `Difference.detectable`
MIN_GROUPS = 3  # for a test
Bounds = tuple[float, float]  # lowest and highest
Test = Literal["bootstrap", "delong"]
_Draw = Callable[[np.random.Generator, int], IndexArray]  # so many sets of weights


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
    bounds: Bounds = (0.0, 1.0),
) -> Interval:
    """Interval of a score that maps weights (B, N), how often each row was drawn, to (B,).

    Rows of one group are drawn together: tiles of a slide are no independent witnesses. With n
    units of resampling the interval is logit(score) ± t(n - 1) sqrt(n / (n - 1)) s, where s is the
    standard deviation of the draws' logits: percentiles are too narrow for few units (coverage in
    `tests/probe/test_coverage.py`). A score at a bound, where no draw differs, gets the bound that
    n faultless units give: 0.025^(1/n). `unit` is what a row is, where it is drawn by itself;
    `bounds` are the least and the largest score there can be. Memory: BLOCK_BYTES of weights plus
    what `score` makes of them. Source: t and sqrt(n / (n - 1)): Hesterberg, "What teachers should
    know about the bootstrap", American Statistician 69 (2015), 4.3; 0.025^(1/n): Clopper and
    Pearson, Biometrika 26 (1934).
    """
    codes = np.arange(num_rows) if groups is None else groups.codes
    units = int(codes.max()) + 1

    def draw(rng: np.random.Generator, draws: int) -> IndexArray:
        drawn = (rng.integers(0, units, units) for _ in range(draws))
        return np.stack([np.bincount(rows, minlength=units) for rows in drawn])[:, codes]

    once, unit = np.ones(num_rows, dtype=np.int64), unit if groups is None else groups.unit
    return _bootstrap(draw, once, score, bounds, seed=seed, unit=unit, units=units)


def _scores(draw: _Draw, scorers: Sequence[Scorer], num_weights: int, seed: int) -> FloatVector:
    """(DRAWS, M) scores of resamples; they do not depend on the block size."""
    rng, block = np.random.default_rng(seed), max(1, BLOCK_BYTES // (8 * max(1, num_weights)))
    sizes = (min(block, DRAWS - start) for start in range(0, DRAWS, block))
    weights = (draw(rng, size) for size in sizes)
    return np.concatenate([np.stack([score(w) for score in scorers], axis=1) for w in weights])


def _bootstrap(
    draw: _Draw, given: IndexArray, score: Scorer, bounds: Bounds = (0.0, 1.0), **known: Any
) -> Interval:
    """The interval of resamples that `draw` gives, around the score of the weights as given."""
    point, values = float(score(given[None])[0]), _scores(draw, [score], len(given), known["seed"])
    values = values[np.isfinite(values)]
    low, high = _ends(point, values, known["units"], bounds)
    return Interval(low=low, high=high, level=LEVEL, draws=len(values), **known)


def _ends(point: float, values: FloatVector, n: int, bounds: Bounds) -> Bounds:
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
        statistics.confusion_matrix(truth, prediction, num_classes)  # whose checks the cells need
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
    folds: Sequence[Fold], scores: Sequence[Scorer], *, seed: int, groups: Groups | None = None
) -> Interval:
    """Interval of the mean over folds of a score of each fold's own validation cases.

    All of them are resampled together, a case (group) of several folds (repeats) as one; cases of
    two models are never ranked against each other. Memory: as `bootstrap_rows`.
    """
    rows = np.unique(np.concatenate([val for _, val in folds]))
    parts = [np.searchsorted(rows, val) for _, val in folds]

    def mean_score(weights: npt.NDArray) -> FloatVector:
        of_each = [f(weights[:, part]) for f, part in zip(scores, parts, strict=True)]
        return np.mean(of_each, axis=0)  # type: ignore[no-any-return]

    of_rows = None if groups is None else groups.take(rows)
    return bootstrap_rows(len(rows), mean_score, seed=seed, groups=of_rows, unit="cases")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Score of one model minus that of another on the same rows."""

    value: float
    low: float  # with `high` the interval
    high: float
    p_value: float  # two-sided, of no difference; not corrected
    standard_error: float
    level: float  # of the interval
    test: Test
    groups: int  # that were resampled (rows, where there are no groups)

    @property
    def detectable(self) -> float:
        """The true difference that a test of this level would find in POWER of such data sets."""
        from scipy.stats import norm

        return float(norm.ppf([1 - (1 - self.level) / 2, POWER]).sum() * self.standard_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampled:
    """Scores of M models: as observed, and on each of the same resamples."""

    observed: FloatVector  # (M,)
    values: FloatVector  # (DRAWS, M); NaN where a draw leaves a metric without a value
    groups: int

    def difference(self, a: int, b: int) -> Difference:
        """Model a minus model b."""
        drawn = self.values[:, a] - self.values[:, b]
        drawn = drawn[np.isfinite(drawn)]
        spread = float(drawn.std(ddof=1)) if len(drawn) > 1 else np.nan
        value = float(self.observed[a] - self.observed[b])
        return _tested(value, spread * (self.groups / (self.groups - 1)) ** 0.5, self.groups)


def resample(
    scorers: Sequence[Scorer], num_rows: int, *, groups: Sequence[str] | None = None, seed: int
) -> Resampled:
    """The score of each model on the rows, and on DRAWS resamples of groups (N,), else of rows.

    Memory: BLOCK_BYTES of weights plus what a scorer makes of them. Raises InvalidInputError: fewer
    than MIN_GROUPS groups.
    """
    place, count = _places(groups, num_rows)
    require(len(place) == num_rows, "groups must be one a row", f"{len(place)} for {num_rows}")
    require(count >= MIN_GROUPS, f"groups must be >= {MIN_GROUPS} for a test", count)

    def draw(rng: np.random.Generator, draws: int) -> IndexArray:
        return rng.multinomial(count, np.full(count, 1 / count), size=draws)[:, place]

    observed = np.array([float(score(np.ones((1, num_rows)))[0]) for score in scorers])
    values = _scores(draw, scorers, num_rows, seed)
    return Resampled(observed=observed, values=values, groups=count)


def _places(groups: Sequence[str] | None, num_rows: int) -> tuple[IndexArray, int]:
    """The number of each row's group, and how many groups there are."""
    place = np.arange(num_rows) if groups is None else np.unique(groups, return_inverse=True)[1]
    return place, int(place.max(initial=-1)) + 1


def delong(
    scores: Sequence[FloatVector], positive: Flags, *, groups: Sequence[str] | None = None
) -> Difference:
    """AUROC of the first of two scores (N,) minus that of the second, by DeLong's covariance.

    With `groups` the rows of a group count together, as Obuchowski has it; without them it is
    DeLong's test to the digit. Memory: 8 (positives x negatives) bytes at a time. Source: DeLong
    et al., Biometrics 44 (1988); Obuchowski, Biometrics 53 (1997).
    """
    n, m = len(positive), int(positive.sum())
    place, count = _places(groups, n)
    require(1 < m < n - 1, "scores must have >= 2 rows of either class", f"{m} of {n} positive")
    areas, up, down = np.empty(2), np.zeros((2, count)), np.zeros((2, count))
    with_up, with_down = (np.bincount(place[of], minlength=count) for of in (positive, ~positive))
    for i, score in enumerate(scores):
        wins = np.sign(score[positive][:, None] - score[~positive]) / 2 + 0.5
        areas[i] = wins.mean()
        up[i] = np.bincount(place[positive], wins.mean(axis=1), count) - with_up * areas[i]
        down[i] = np.bincount(place[~positive], wins.mean(axis=0), count) - with_down * areas[i]
    up, down = up[0] - up[1], down[0] - down[1]
    few = [np.count_nonzero(of) for of in (with_up, with_down)]
    variance = few[0] / (few[0] - 1) * (up @ up) / m**2
    variance += few[1] / (few[1] - 1) * (down @ down) / (n - m) ** 2
    variance += 2 * count / (count - 1) * (up @ down) / (m * (n - m))
    error = float(np.sqrt(max(0.0, variance)))
    return _tested(float(areas[0] - areas[1]), error, count, test="delong")


def _tested(value: float, error: float, groups: int, test: Test = "bootstrap") -> Difference:
    """With interval and p: by Student's t for a bootstrap, by the normal for DeLong."""
    from scipy import stats

    law = stats.norm if test == "delong" else stats.t(groups - 1)
    half = float(law.ppf(1 - (1 - LEVEL) / 2)) * error
    # equal predictions have no spread and are no different
    p_value = 1.0 if value == 0 else float(2 * law.sf(abs(value) / error)) if error else 0.0
    known = {"value": value, "low": value - half, "high": value + half, "p_value": p_value}
    return Difference(**known, standard_error=error, level=LEVEL, test=test, groups=groups)


def holm(p_values: npt.ArrayLike) -> FloatVector:
    """p values (m,) corrected so that any false claim among them has the chance of one.

    Source: Holm, Scand. J. Statist. 6 (1979).
    """
    p = np.asarray(p_values, dtype=np.float64)
    order, m = np.argsort(p, kind="stable"), len(p)
    steps = np.maximum.accumulate((m - np.arange(m)) * p[order])
    return np.minimum(steps, 1)[np.argsort(order, kind="stable")]


def tied_ranks(better: Flags) -> IndexArray:
    """Rank (M,) from 1: one more than models beyond doubt better (`better[a, b]`: a than b)."""
    return np.asarray(1 + better.sum(axis=0))


def mean_ranks(scores: npt.NDArray, *, lower: Sequence[bool]) -> FloatVector:
    """Mean over tasks of the rank of scores (tasks, M), best 1, ties at their mean rank; (M,).

    In the tasks of `lower` the lower score is better; without a score (NaN) there is no rank.
    """
    from scipy.stats import rankdata

    sign = np.where(np.array(lower), 1.0, -1.0)[:, None]
    ranks = np.array([rankdata(row, nan_policy="omit") for row in sign * scores])
    return ratio(np.nansum(ranks, axis=0), np.isfinite(ranks).sum(axis=0), empty=np.nan)
