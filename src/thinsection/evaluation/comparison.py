"""Differences between models: paired tests on the same cases, corrections, ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.intervals import LEVEL, TAIL, Sampling
from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    IndexArray,
    Scorer,
    folds_of,
    ratio,
)

POWER = 0.8  # of `Difference.detectable`
MIN_GROUPS = 3  # for a test
Test = Literal["jackknife", "delong"]


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
    groups: int  # independent units

    @property
    def detectable(self) -> float:
        """True difference that a test of this level would find in POWER of such data sets."""
        from scipy.stats import norm

        return float(norm.ppf([1 - TAIL, POWER]).sum() * self.standard_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jackknifed:
    """Scores of M models on the same rows, and the influence of each cell of rows on them."""

    observed: FloatVector  # (M,)
    influences: npt.NDArray[np.float64]  # (C, M), see `Sampling.influences`
    sampling: Sampling
    chance: float | None  # score of a model that knows nothing, where it is known

    def difference(self, a: int, b: int) -> Difference:
        """Model a minus model b, by Student's t with the degrees of Welch and Satterthwaite."""
        influence = self.influences[:, a] - self.influences[:, b]
        variance = self.sampling.variance(influence)
        return _tested(
            float(self.observed[a] - self.observed[b]),
            (variance.value * self.sampling.fold_inflation(self._distance(a, b)))
            ** 0.5,
            degrees=variance.degrees,
            test="jackknife",
            groups=self.sampling.units,
        )

    def _distance(self, a: int, b: int) -> float | None:
        """Distance from chance of the model that is nearer to it, in standard errors."""
        if self.chance is None:
            return None
        distances = []
        for model in (a, b):
            error = self.sampling.variance(self.influences[:, model]).value ** 0.5
            distances.append(ratio(self.observed[model] - self.chance, error))
        return float(min(distances))


def jackknife(
    scorers: Sequence[Scorer], sampling: Sampling, *, chance: float | None = None
) -> Jackknifed:
    """The score of each model on the rows, and what each unit adds to it.

    `chance`: see `Sampling.fold_inflation`, whose distance is that of the model nearer to chance.
    Memory: as `Sampling.influences`. Raises InvalidInputError: fewer than MIN_GROUPS units, or
    units of a class.
    """
    _check_units(sampling)
    every = np.ones((1, len(sampling.codes)))
    observed = np.array([float(score(every)[0]) for score in scorers])
    influences = [sampling.influences(score) for score in scorers]
    return Jackknifed(
        observed=observed,
        influences=np.stack(influences, axis=1),
        sampling=sampling,
        chance=chance,
    )


def delong(
    scores: Sequence[FloatVector],
    positive: Flags,
    sampling: Sampling,
    *,
    folds: Sequence[IndexArray | None] = (None, None),
) -> Difference:
    """AUROC of the first of two scores (N,) minus that of the second, by DeLong's covariance.

    With one model and a row a unit it is DeLong's test to the digit, but for Student's t in place
    of the normal law, with the degrees of freedom of Welch and Satterthwaite: the normal law calls
    .08 of equal models different where a class has five cases. With units of several rows it is
    Obuchowski's. `folds`: the model that made each row, (N,), for either score: areas are of pairs
    of the same fold, and the variance is that of k models.

    Memory: 8 (positives x negatives) bytes at a time. Source: DeLong et al., Biometrics 44 (1988);
    Obuchowski, Biometrics 53 (1997).
    """
    _check_units(sampling)
    if not 1 < positive.sum() < len(positive) - 1:
        raise InvalidInputError(
            f"scores must have >= 2 rows of each class, got {int(positive.sum())} positive rows "
            f"of {len(positive)}"
        )
    area, influence_of_first = _area(scores[0], positive, folds[0])
    other_area, influence_of_second = _area(scores[1], positive, folds[1])
    influence = influence_of_first - influence_of_second
    sums = []
    variances = []
    degrees = []
    for rows in (positive, ~positive):
        by_unit = np.bincount(sampling.codes[rows], influence[rows], sampling.units)
        num_units = len(np.unique(sampling.codes[rows]))
        sums.append(by_unit)
        variances.append(num_units / (num_units - 1) * float(by_unit @ by_unit))
        degrees.append(num_units - 1)
    both = 2 * sampling.units / (sampling.units - 1) * float(sums[0] @ sums[1])
    total = sum(variances)
    # Welch and Satterthwaite
    parts = [v**2 / d for v, d in zip(variances, degrees, strict=True)]
    distances = []
    for one, row_influence in (
        (area, influence_of_first),
        (other_area, influence_of_second),
    ):
        own = np.bincount(sampling.codes, row_influence, sampling.units)
        distances.append(float(ratio(one - 0.5, float(own @ own) ** 0.5)))
    inflation = sampling.fold_inflation(min(distances))
    error = (max(0.0, total + both) * inflation) ** 0.5
    return _tested(
        area - other_area,
        error,
        degrees=total**2 / sum(parts) if total else sum(degrees),
        test="delong",
        groups=sampling.units,
    )


def _area(
    score: FloatVector, positive: Flags, fold: IndexArray | None
) -> tuple[float, FloatVector]:
    """AUROC over pairs of the same fold, and the influence (N,) of each row on it."""
    wins = np.zeros(len(score))
    pairs = np.zeros(len(score))
    for rows in folds_of(fold, len(score)):
        up = rows[positive[rows]]
        down = rows[~positive[rows]]
        won = np.sign(score[up][:, None] - score[down]) / 2 + 0.5
        wins[up] = won.sum(axis=1)
        wins[down] = won.sum(axis=0)
        pairs[up] = len(down)
        pairs[down] = len(up)
    total = pairs[positive].sum()
    area = float(wins[positive].sum() / total)
    return area, (wins - area * pairs) / total


def _check_units(sampling: Sampling) -> None:
    if sampling.units < MIN_GROUPS:
        raise InvalidInputError(
            f"number of groups must be >= {MIN_GROUPS} for a test, got {sampling.units}"
        )
    if sampling.fewest < 2:
        raise InvalidInputError(
            f"each class must have >= 2 groups for a test, got {sampling.fewest} of the rarest "
            "class"
        )


def _tested(
    value: float, error: float, *, degrees: float, test: Test, groups: int
) -> Difference:
    """The difference with its interval and p value by Student's t."""
    from scipy.stats import t

    half = float(t.ppf(1 - TAIL, degrees)) * error
    if value == 0:
        p_value = 1.0  # equal predictions have no spread and do not differ
    elif error:
        p_value = float(2 * t.sf(abs(value) / error, degrees))
    else:
        p_value = 0.0
    return Difference(
        value=value,
        low=value - half,
        high=value + half,
        p_value=p_value,
        standard_error=error,
        level=LEVEL,
        test=test,
        groups=groups,
    )


def permuted_rows(
    labels: npt.NDArray[np.generic], codes: IndexArray, rng: np.random.Generator
) -> IndexArray | None:
    """For each row the row whose label it takes in a permutation of units, (N,).

    Units exchange their labels, which must be one a unit; None where a unit has several.

    Args:
        labels: (N,) or (N, T).
        codes: unit of each row, (N,).
        rng: decides the permutation.
    """
    _, first, place = np.unique(codes, return_index=True, return_inverse=True)
    if not (labels[first][place] == labels).all():
        return None
    return np.asarray(first[rng.permutation(len(first))][place])


def permutation_p(score: float, null_scores: npt.ArrayLike) -> float:
    """Share of permutations, the observed order among them, that score as high as this one.

    Source: Phipson and Smyth, Statist. Appl. Genet. Mol. Biol. 9 (2010).
    """
    null = np.asarray(null_scores, dtype=np.float64)
    as_high = int((null >= score - 1e-12).sum())
    return (1 + as_high) / (1 + len(null))


def holm(p_values: npt.ArrayLike) -> FloatVector:
    """p values (m,) corrected so that any false claim among them has the chance of one.

    Source: Holm, Scand. J. Statist. 6 (1979).
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    return np.minimum(steps, 1)[np.argsort(order, kind="stable")]


def tied_ranks(better: Flags) -> IndexArray:
    """Rank (M,) from 1: one more than models beyond doubt better (`better[a, b]`: a than b)."""
    return np.asarray(1 + better.sum(axis=0))


def mean_ranks(scores: FloatVector, *, lower: Sequence[bool]) -> FloatVector:
    """Mean over tasks of the rank of scores (tasks, M), best 1, ties at their mean rank; (M,).

    In the tasks of `lower` the lower score is better; without a score (NaN) there is no rank.
    """
    from scipy.stats import rankdata

    sign = np.where(np.array(lower), 1.0, -1.0)[:, None]
    ranks = np.array([rankdata(row, nan_policy="omit") for row in sign * scores])
    return ratio(np.nansum(ranks, axis=0), np.isfinite(ranks).sum(axis=0), empty=np.nan)
