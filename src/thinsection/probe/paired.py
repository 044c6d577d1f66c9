"""Models on the same rows: paired differences with interval and test, correction, ranks.

Every model is scored on the same resamples, drawn by groups (patients, slides) where rows cluster.
A difference d is held against its standard error over the resamples, se, widened by
sqrt(G / (G - 1)) for G groups, by Student's t with G - 1 degrees of freedom: its interval leaves
out 0 exactly where p < 1 - level, also for few groups, where percentiles are too narrow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from thinsection.errors import require
from thinsection.probe.statistics import BLOCK_BYTES, DRAWS, LEVEL, FloatVector, Scorer, ratio

POWER = 0.8  # of `Difference.detectable`
MIN_GROUPS = 3  # for a test


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Score of one model minus that of another on the same rows."""

    value: float
    low: float  # with `high` the interval
    high: float
    p_value: float  # two-sided, of no difference; not corrected
    standard_error: float
    level: float  # of the interval
    test: Literal["bootstrap", "delong"]
    groups: int  # that were resampled (rows, where there are no groups)

    @property
    def detectable(self) -> float:
        """The true difference that a test of this level would find in POWER of such data sets."""
        z = stats.norm.ppf([1 - (1 - self.level) / 2, POWER]).sum()
        return float(z * self.standard_error)


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
    """Every model's score on the rows and on DRAWS resamples of them.

    Args:
        scorers: of each model, row weights (B, N) to (B,); see `metrics`.
        num_rows: N.
        groups: (N,) of each row, drawn whole; None draws rows.
        seed: of the draws.

    Memory: BLOCK_BYTES of weights plus what a scorer makes of them.

    Raises InvalidInputError: fewer than MIN_GROUPS groups.
    """
    place = np.arange(num_rows) if groups is None else np.unique(groups, return_inverse=True)[1]
    require(len(place) == num_rows, "groups must be one a row", f"{len(place)} for {num_rows}")
    count = int(place.max(initial=-1)) + 1
    require(count >= MIN_GROUPS, f"groups must be >= {MIN_GROUPS} for a test", count)
    rng, parts = np.random.default_rng(seed), []
    block = max(1, BLOCK_BYTES // (8 * num_rows))
    for start in range(0, DRAWS, block):
        size = min(block, DRAWS - start)
        weights = rng.multinomial(count, np.full(count, 1 / count), size=size)[:, place]
        parts.append(np.stack([score(weights) for score in scorers], axis=1))
    once = np.ones((1, num_rows))
    observed = np.array([float(score(once)[0]) for score in scorers])
    return Resampled(observed=observed, values=np.concatenate(parts), groups=count)


def delong(
    scores: Sequence[FloatVector],
    positive: npt.NDArray[np.bool_],
    *,
    groups: Sequence[str] | None = None,
) -> Difference:
    """AUROC of the first of two scores (N,) minus that of the second, by DeLong's covariance.

    With `groups` the rows of a group count together, as Obuchowski has it; without them it is
    DeLong's test to the digit. Memory: 8 (positives x negatives) bytes at a time.

    Source: DeLong et al., Biometrics 44 (1988); Obuchowski, Biometrics 53 (1997).
    """
    n = len(positive)
    place = np.arange(n) if groups is None else np.unique(groups, return_inverse=True)[1]
    count, m = int(place.max(initial=-1)) + 1, int(positive.sum())
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


def _tested(
    value: float, error: float, groups: int, test: Literal["bootstrap", "delong"] = "bootstrap"
) -> Difference:
    """With interval and p: by Student's t for a bootstrap, by the normal for DeLong."""
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


def tied_ranks(better: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Rank (M,) from 1 of each model: one more than there are models beyond doubt better than it.

    `better[a, b]`: a is better than b, significantly. Models that cannot be told apart from the
    best share rank 1.
    """
    ranks: npt.NDArray[np.int64] = 1 + better.sum(axis=0)
    return ranks


def mean_ranks(scores: npt.NDArray, *, lower: Sequence[bool] = ()) -> FloatVector:
    """Mean over tasks of the rank of scores (tasks, M), best 1, ties at their mean rank; (M,).

    `lower` names the tasks whose lower score is the better one. A model without a score (NaN) in a
    task has no rank there.
    """
    sign = np.where(np.array([*lower] or [False] * len(scores)), 1.0, -1.0)[:, None]
    ranks = np.array([stats.rankdata(row, nan_policy="omit") for row in sign * scores])
    return ratio(np.nansum(ranks, axis=0), np.isfinite(ranks).sum(axis=0), empty=np.nan)
