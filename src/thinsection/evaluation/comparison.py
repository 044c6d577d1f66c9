"""Differences between models: paired tests on the same cases, corrections, ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.intervals import LEVEL, TAIL, Sampling
from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    IndexArray,
    Scorer,
    ratio,
)

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
    groups: int  # independent units

    @property
    def detectable(self) -> float:
        """True difference that a test of this level would find in POWER of such data sets."""
        from scipy.stats import norm

        return float(norm.ppf([1 - TAIL, POWER]).sum() * self.standard_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jackknifed:
    """Scores of M models on rows of the same units, and what each unit adds to them."""

    observed: FloatVector  # (M,)
    influences: npt.NDArray[np.float64]  # (C, M), see `Sampling.influences`
    samplings: Sequence[Sampling]  # (M,)
    chance: float | None  # score of a model that knows nothing, where it is known

    @property
    def units(self) -> int:
        """Number of independent units."""
        return self.samplings[0].units

    def difference(self, a: int, b: int) -> Difference:
        """Model a minus model b, by Student's t with the degrees of Welch and Satterthwaite."""
        variance = self.samplings[a].variance(
            self.influences[:, a] - self.influences[:, b]
        )
        distance = self._distance(a, b)
        inflation = max(self.samplings[m].fold_inflation(distance) for m in (a, b))
        return _tested(
            float(self.observed[a] - self.observed[b]),
            (variance.value * inflation) ** 0.5,
            degrees=variance.degrees,
            groups=self.units,
        )

    def _distance(self, a: int, b: int) -> float | None:
        """Distance from chance of the model that is nearer to it, in standard errors."""
        if self.chance is None:
            return None
        distances = []
        for model in (a, b):
            variance = self.samplings[model].variance(self.influences[:, model])
            error = variance.value**0.5
            distances.append(ratio(self.observed[model] - self.chance, error))
        return float(min(distances))


def jackknife(
    scorers: Sequence[Scorer],
    samplings: Sampling | Sequence[Sampling],
    *,
    chance: float | None = None,
) -> Jackknifed:
    """The score of each model on its rows, and what each unit adds to it.

    The difference of two AUROCs has DeLong's variance, with units of several rows Obuchowski's.

    Args:
        scorers: one a model.
        samplings: of the rows of each model, or of the rows that all share. The rows may differ,
            as those of another number of repeats; their units and strata may not.
        chance: see `Sampling.fold_inflation`, whose distance is that of the model nearer to chance.

    Memory: as `Sampling.influences`. Raises InvalidInputError: fewer than MIN_GROUPS units, or 2
    units of a class; other units; a score that depends on one unit.

    Source: DeLong et al., Biometrics 44 (1988); Obuchowski, Biometrics 53 (1997); Arvesen, Annals
    of Mathematical Statistics 40 (1969).
    """
    if isinstance(samplings, Sampling):
        samplings = [samplings] * len(scorers)
    _check_units(samplings)
    observed = []
    influences = []
    for score, sampling in zip(scorers, samplings, strict=True):
        every = np.ones((1, len(sampling.codes)))
        observed.append(float(score(every)[0]))
        influences.append(sampling.influences(score))
    if not np.isfinite(influences).all():
        raise InvalidInputError(
            "scores must have a value without any one of the "
            f"{samplings[0].units} {samplings[0].unit} for a test, got none without one of them"
        )
    return Jackknifed(
        observed=np.array(observed),
        influences=np.stack(influences, axis=1),
        samplings=samplings,
        chance=chance,
    )


def _check_units(samplings: Sequence[Sampling]) -> None:
    first = samplings[0]
    if first.units < MIN_GROUPS:
        raise InvalidInputError(
            f"number of groups must be >= {MIN_GROUPS} for a test, got {first.units}"
        )
    if first.fewest < 2:
        raise InvalidInputError(
            f"each class must have >= 2 groups for a test, got {first.fewest} of the rarest "
            "class"
        )
    for other in samplings[1:]:
        if not np.array_equal(other.cells[0], first.cells[0]):
            raise InvalidInputError(
                "models must be scored on the same groups and classes, got "
                f"{first.units} and {other.units} groups"
            )


def _tested(value: float, error: float, *, degrees: float, groups: int) -> Difference:
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
