"""One way to a 95 % confidence interval, for every score of every command.

The rows of a unit (a patient, else what counts as its own) vary together. The variance of a score
is that of its infinitesimal jackknife over units: the sum of squares of the score's derivatives by
the weight of each unit. For the AUROC this is DeLong's variance, for units of several rows
Obuchowski's. From the variance and the kind of the metric (`Kind`) come the bounds. How often
they hold the true score is measured by `benchmarks/bench_coverage.py`.

Sources: Efron, "The jackknife, the bootstrap and other resampling plans", 1982, chapter 6; DeLong
et al., Biometrics 44 (1988); Obuchowski, Biometrics 53 (1997); Newcombe, Statist. Med. 25 (2006),
559 (method 5); Wilson, JASA 22 (1927); Fisher (1921).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    IndexArray,
    Kind,
    Scorer,
    chance_of,
    kind_of,
)
from thinsection.types import MIB

DRAWS = 2000  # of the bootstrap, for the calibration error
LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
MIN_UNITS = 3  # of each class; with fewer there is no interval
MOST_BLOCKS = 1000  # of units; with more units the jackknife moves blocks of them
STEP = 1e-4  # of a weight, for a derivative
PRIOR_DEGREES = 4  # that the variance of a simple law is worth beside the measured one
BLOCK_BYTES = 64 * MIB  # of row weights at a time
KNOWN = 4.0  # standard errors from chance at which half of `fold_inflation` is gone
NEAREST = 1e-9  # distance from a bound, which has no logit


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Range in which the score of other units, drawn as these were, is expected."""

    low: float  # NaN where there is no interval
    high: float
    level: float  # coverage that is promised, 0.95 for 95 %
    method: str  # names of its papers; '' where there is no interval
    unit: str  # who varies: patients, slides, cases, images or rows
    units: int  # how many there are
    missing: str = ""  # why there is no interval


class Variance(NamedTuple):
    """Variance of a score, and how well it is known."""

    value: float  # of rows that one model scored, see `Sampling.fold_inflation`
    degrees: float  # of freedom, by Welch and Satterthwaite


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Unit and class of each of N rows, and the model that scored it."""

    codes: IndexArray  # (N,) unit, 0..G-1
    unit: str
    classes: IndexArray | None = None  # (N,); None: there are none
    events: Flags | None = None  # (N,) of survival; None: there are none
    fold: IndexArray | None = None  # (N,); None: one model scored all rows
    folds: int = 1  # models of one cross-validation

    @classmethod
    def of_rows(
        cls,
        groups: Groups,
        *,
        classes: npt.NDArray[np.generic] | None = None,
        events: npt.NDArray[np.generic] | None = None,
        fold: IndexArray | None = None,
        folds: int | None = None,
    ) -> "Sampling":
        """Sampling of rows by their units; without knowing these nobody can resample.

        Args:
            groups: the unit of each row, (N,).
            classes: class of each row, (N,).
            events: whether each row had the event, (N,).
            fold: the model that scored each row, (N,).
            folds: models of one cross-validation; None: as many as `fold` has. Fewer where the
                cross-validation is repeated.
        """
        codes = groups.codes
        for name, rows in (("classes", classes), ("events", events), ("fold", fold)):
            if rows is not None and len(rows) != len(codes):
                raise InvalidInputError(
                    f"groups must have one entry per row, got {len(codes)} for "
                    f"{len(rows)} {name}"
                )
        if folds is None:
            folds = 1 if fold is None else len(np.unique(fold))
        return cls(
            codes=codes,
            unit=groups.unit,
            classes=None if classes is None else np.asarray(classes, dtype=np.int64),
            events=None if events is None else np.asarray(events, dtype=bool),
            fold=fold,
            folds=folds,
        )

    @cached_property
    def units(self) -> int:
        """Number of units."""
        return int(self.codes.max(initial=-1)) + 1

    @cached_property
    def strata(self) -> IndexArray:
        """(N,) class of each row, or whether it had the event; 0 where there are neither."""
        if self.events is not None:
            return self.events.astype(np.int64)
        if self.classes is None:
            return np.zeros(len(self.codes), dtype=np.int64)
        return np.unique(self.classes, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def units_by_stratum(self) -> IndexArray:
        """Number of units in each stratum."""
        num_strata = int(self.strata.max(initial=0)) + 1
        pairs = np.unique(np.stack([self.strata, self.codes]), axis=1)
        return np.bincount(pairs[0], minlength=num_strata)

    @cached_property
    def rarest(self) -> Flags:
        """(N,), True for rows of the class with the fewest units, for events, else for all."""
        if self.events is not None:
            return self.events
        if self.classes is None:
            return np.ones(len(self.codes), dtype=bool)
        labels = np.unique(self.classes)
        if len(labels) < 2:
            return np.zeros(len(self.codes), dtype=bool)
        sizes = [len(np.unique(self.codes[self.classes == label])) for label in labels]
        return np.asarray(self.classes == labels[int(np.argmin(sizes))])

    @cached_property
    def fewest(self) -> int:
        """Units of the rarest class, or with an event; all units where there are no classes."""
        return len(np.unique(self.codes[self.rarest]))

    @cached_property
    def blocks(self) -> IndexArray:
        """(N,) unit of each row, or the block of its unit where there are too many units."""
        if self.units <= MOST_BLOCKS:
            return self.codes
        # a fixed order: the same rows have the same blocks
        order = np.random.default_rng(0).permutation(self.units)
        return np.asarray(order[self.codes] % MOST_BLOCKS)

    @cached_property
    def cells(self) -> tuple[IndexArray, IndexArray]:
        """Block and stratum (2, C) of each cell of rows that move together, and (N,) the cells."""
        keys = np.stack([self.blocks, self.strata])
        cells, cell_of_row = np.unique(keys, axis=1, return_inverse=True)
        return cells, cell_of_row.reshape(-1)

    def influences(
        self, score: Callable[[FloatVector], npt.NDArray[np.float64]]
    ) -> npt.NDArray[np.float64]:
        """(C, ...) derivative of a score by the weight of each cell, times the weight's step.

        `score` maps row weights (B, N) to (B, ...). Memory: BLOCK_BYTES of weights plus what a
        scorer makes of them.
        """
        cells, cell_of_row = self.cells
        count = cells.shape[1]
        num_rows = len(self.codes)
        point = score(np.ones((1, num_rows)))
        most = max(1, BLOCK_BYTES // (8 * max(1, num_rows)))
        moved = []
        for start in range(0, count, most):
            stop = min(start + most, count)
            one_cell = np.arange(start, stop)[:, None] == cell_of_row
            moved.append(score(1.0 + STEP * one_cell))
        return np.asarray((np.concatenate(moved) - point) / STEP)

    def variance(self, influences: npt.NDArray[np.float64]) -> Variance:
        """Variance of a score from the influence (C,) of each cell.

        Strata add up, n / (n - 1) times their sum of squares; units of several strata add the
        products (Obuchowski).
        """
        blocks, strata = self.cells[0]
        num_blocks = int(self.blocks.max(initial=-1)) + 1
        parts = []
        sums = np.zeros((int(strata.max(initial=0)) + 1, num_blocks))
        np.add.at(sums, (strata, blocks), influences)
        for stratum, units in enumerate(self.units_by_stratum):
            factor = units / (units - 1) if units > 1 else 1.0
            parts.append(factor * float(sums[stratum] @ sums[stratum]))
        total = sum(parts)
        products = float((sums.sum(axis=0) ** 2).sum() - (sums**2).sum())
        both = max(0.0, total + products * self.units / max(1, self.units - 1))
        shares = [
            part**2 / max(1, units - 1)
            for part, units in zip(parts, self.units_by_stratum, strict=True)
        ]
        degrees = total**2 / sum(shares) if total > NEAREST**2 else self.fewest - 1
        return Variance(both, float(degrees))

    def weights(self, seed: int, draws: int | None = None) -> Iterator[FloatVector]:
        """Blocks (B, N) of weights, `draws` (DRAWS) in all, the same for every block size.

        The weights of a draw have the mean 1 over units. Memory: BLOCK_BYTES. Source: Rubin, "The
        Bayesian bootstrap", Annals of Statistics 9 (1981).
        """
        rng = np.random.default_rng(seed)
        left = DRAWS if draws is None else draws
        most = max(1, BLOCK_BYTES // (8 * max(1, len(self.codes))))
        while left:
            size = min(most, left)
            drawn = rng.standard_exponential((size, self.units))
            drawn /= drawn.mean(axis=1, keepdims=True)
            yield drawn if self.units == len(self.codes) else drawn[:, self.codes]
            left -= size

    def fold_inflation(self, distance: float | None = None) -> float:
        """Variance of a cross-validated score over that of the same rows scored by one model.

        `distance`: of the score from chance, in standard errors; None where chance has no value
        that is known. At chance it is 2: each two folds test each other's training cases, so that
        every product of two folds counts twice. Where the models know what they do, a case that
        trains moves them little, and it falls to 1. Without a distance it is 1 + 1 / (k - 1) for
        k folds, the test part over the training part (Nadeau and Bengio, Machine Learning 52,
        2003).
        """
        if self.folds < 2:
            return 1.0
        if distance is None:
            return self.folds / (self.folds - 1)
        return 1 + 1 / (1 + (max(0.0, distance) / KNOWN) ** 2)


def interval(
    sampling: Sampling, scorer: Scorer, metric: str, *, seed: int = 0
) -> Interval:
    """The 95 % confidence interval of a score of N rows.

    `scorer` maps row weights (B, N) to scores (B,). `metric` decides the kind of the interval
    (`metrics.kind_of`), see `bounds_of`. `seed` is that of the bootstrap, which the calibration
    error (a distance) alone needs.

    Below MIN_UNITS units of a class there is none, and `missing` says so. Memory: as
    `Sampling.influences`.
    """
    point = float(scorer(np.ones((1, len(sampling.codes))))[0])
    missing = why_missing(sampling, point)
    low = np.nan
    high = np.nan
    method = ""
    if not missing:
        kind = kind_of(metric)
        method = METHODS[kind]
        if kind == "distance":
            spread = scorer.spread  # type: ignore[attr-defined]
            drawn = np.concatenate([spread(w) for w in sampling.weights(seed)])
            low, high = distance_bounds(point, drawn, sampling)
        else:
            variance = sampling.variance(sampling.influences(scorer))
            chance = chance_of(metric, len(sampling.units_by_stratum))
            low, high = bounds_of(point, variance, sampling, kind, chance)
    return Interval(
        low=low,
        high=high,
        level=LEVEL,
        method=method,
        unit=sampling.unit,
        units=sampling.units,
        missing=missing,
    )


def why_missing(sampling: Sampling, point: float = 0.0) -> str:
    """Why there is no interval, in words; '' where there is one."""
    if not np.isfinite(point):
        return "the score has no value"
    if sampling.fewest >= MIN_UNITS:
        return ""
    if sampling.events is not None:
        which = " with an event"
    elif sampling.classes is not None:
        which = " of each class"
    else:
        which = ""
    needed = f"at least {MIN_UNITS} {sampling.unit}{which} are needed"
    return f"{needed}, got {sampling.fewest}"


# papers by kind; the variance is that of the infinitesimal jackknife over units
METHODS: dict[Kind, str] = {
    "ranking": "DeLong and Obuchowski's variance, Newcombe's score interval",
    "share": "infinitesimal jackknife, Wilson's score interval",
    "agreement": "infinitesimal jackknife, Wilson's score interval",
    "correlation": "infinitesimal jackknife, Fisher's z",
    "loss": "infinitesimal jackknife of the logarithm",
    "error": "infinitesimal jackknife, Wilson's score interval",
    "explained": "infinitesimal jackknife of log(1 - R²)",
    "distance": "Bayesian bootstrap (Rubin 1981), triangle inequality",
}


def drawn_variance(drawn: FloatVector, sampling: Sampling) -> Variance:
    """Variance of a score from its values (B,) on resamples of units.

    The mean of n values has the variance S / (n (n - 1)) for a sum S of squares, its Bayesian
    resamples S / (n (n + 1)).
    """
    few = (sampling.fewest + 1) / (sampling.fewest - 1)
    return Variance(float(drawn.var()) * few, sampling.fewest - 1)


def bounds_of(
    point: float,
    variance: Variance,
    sampling: Sampling,
    kind: Kind,
    chance: float | None = None,
) -> tuple[float, float]:
    """Lowest and highest score that a point and its variance allow, by the kind of the metric.

    They are the true values t with (point - t)² <= q² v(t), q a quantile of Student's t and v the
    variance where t is true: the measured one, in proportion to a law that is known for t.

    A measured variance of few units is itself uncertain, and 0 for a faultless score. So it is
    averaged with that of the law, which counts as PRIOR_DEGREES degrees of freedom.

    - ranking (AUROC, c-index): the law is that of Hanley and McNeil (Newcombe's method 5).
    - share (AUPRC, accuracy, F1, ...), agreement (kappa, moved to 0..1) and error (Brier): that of
      a share of heads (Wilson). Errors are less spread than this law, so that it counts only
      where nothing is measured.
    - correlation, loss (absolute error), explained (R²): constant on Fisher's z scale, on that of
      the logarithm, and of log(1 - R²).

    `chance`: score of a model that knows nothing, see `Sampling.fold_inflation`.
    """
    if kind == "agreement":
        half = Variance(variance.value / 4, variance.degrees)
        middle = None if chance is None else (chance + 1) / 2
        low, high = bounds_of((point + 1) / 2, half, sampling, "share", middle)
        return 2 * low - 1, 2 * high - 1
    if kind in ("ranking", "share", "error"):
        law = _ranking_law(sampling) if kind == "ranking" else _share_law(sampling)
        prior = 0 if kind == "error" else PRIOR_DEGREES
        inner = _inverted(
            point,
            variance,
            sampling,
            law,
            chance=chance,
            prior=prior,
            ends=(0.0, 1.0),
        )
        return min(inner[0], point), max(inner[1], point)
    center = float(_stretched(point, kind))
    least = _least_variance(point, kind, sampling)
    stretched = Variance(variance.value * _slope(point, kind) ** 2, variance.degrees)
    ends = _inverted(
        center,
        stretched,
        sampling,
        lambda _: least,
        chance=chance,
        prior=PRIOR_DEGREES,
        ends=(center - 50.0, center + 50.0),
    )
    low, high = sorted(_shrunk(np.array(ends), kind).tolist())
    return low, high


def _inverted(
    point: float,
    variance: Variance,
    sampling: Sampling,
    law: Callable[[float], float],
    *,
    chance: float | None,
    prior: float,
    ends: tuple[float, float],
) -> tuple[float, float]:
    """True values between `ends` from which the point is not farther than chance allows."""
    from scipy.optimize import brentq
    from scipy.stats import t

    at_point = law(point)
    ratio = 1.0  # of the measured variance to the law's
    if variance.value > NEAREST**2 and at_point > NEAREST**2:
        measured = variance.degrees * variance.value / at_point
        ratio = (measured + prior) / (variance.degrees + prior)
    quantile = float(t.ppf(1 - TAIL, variance.degrees + prior))
    error = (ratio * max(at_point, NEAREST**2)) ** 0.5

    def excess(true: float) -> float:
        distance = None if chance is None else (true - chance) / error
        allowed = quantile**2 * ratio * law(true) * sampling.fold_inflation(distance)
        return (point - true) ** 2 - allowed

    low, high = ends
    inside = min(max(point, low + NEAREST), high - NEAREST)
    if excess(inside) >= 0:
        return point, point
    if point > low + NEAREST and excess(low) > 0:
        low = float(brentq(excess, low, inside))
    if point < high - NEAREST and excess(high) > 0:
        high = float(brentq(excess, inside, high))
    return low, high


def _ranking_law(sampling: Sampling) -> Callable[[float], float]:
    """Variance of an AUROC t of m and n units (Hanley and McNeil, Radiology 143, 1982).

    Of several classes the rarest against the rest; of survival those with an event against all.
    """
    few = max(1, sampling.fewest)
    others = max(1, sampling.units - few)

    def law(true: float) -> float:
        half = (few + others) / 2 - 1
        shape = 1 + half * (1 - true) / (2 - true) + half * true / (1 + true)
        return true * (1 - true) / (few * others) * shape

    return law


def _share_law(sampling: Sampling) -> Callable[[float], float]:
    """Variance of a mean over classes of shares t of their units."""
    units = sampling.units_by_stratum if sampling.events is None else [sampling.units]
    counts = [max(1, int(count)) for count in units]
    effective = len(counts) ** 2 / sum(1 / count for count in counts)
    return lambda true: true * (1 - true) / effective


def distance_bounds(
    point: float, drawn: FloatVector, sampling: Sampling
) -> tuple[float, float]:
    """Score ± the 97.5th percentile (B,) of the distance between resampled and sampled gaps.

    By the triangle inequality the true distance is no farther. The upper end leaves room for
    what no case has shown: 1 - 0.025^(1/n) of all units may be missing from n of them.
    """
    few = (sampling.fewest + 1) / (sampling.fewest - 1)
    reach = float(np.quantile(drawn, 1 - TAIL))
    reach *= (few * sampling.fold_inflation()) ** 0.5
    unseen = 1 - TAIL ** (sampling.fold_inflation() / sampling.units)
    high = max(point + reach, point + (1 - point) * unseen)
    return max(0.0, point - reach), min(1.0, high)


def _least_variance(point: float, kind: Kind, sampling: Sampling) -> float:
    """Variance on the scale of `_stretched` that rows of a simple law have.

    Correlations and R²: those of normal values; losses: those of the exponential law.
    """
    degrees = max(1, sampling.units - sampling.folds - 2)
    if kind == "correlation":
        return 1 / degrees
    if kind == "explained":
        return 4 * max(point, 0.5) / degrees
    return 1 / sampling.fewest


def _stretched(score: npt.ArrayLike, kind: Kind) -> FloatVector:
    """Scores on a scale without bounds."""
    x = np.asarray(score, dtype=np.float64)
    if kind == "correlation":
        return np.arctanh(np.clip(x, NEAREST - 1, 1 - NEAREST))
    if kind == "loss":
        return np.log(np.maximum(x, NEAREST))
    return np.log(np.maximum(1 - x, NEAREST))


def _slope(point: float, kind: Kind) -> float:
    """Derivative of `_stretched`."""
    if kind == "correlation":
        return float(1 / max(NEAREST, 1 - point**2))
    if kind == "loss":
        return 1 / max(NEAREST, point)
    return 1 / max(NEAREST, 1 - point)


def _shrunk(value: FloatVector, kind: Kind) -> FloatVector:
    """Inverse of `_stretched`."""
    if kind == "correlation":
        return np.tanh(value)
    if kind == "loss":
        return np.exp(value)
    return 1 - np.exp(value)
