"""One way to a 95 % confidence interval, for every score of every command.

The rows of a unit (a patient, else what counts as its own) vary together. The variance of a score
is that of its jackknife over units: each unit is left out once. For the AUROC this is DeLong's
variance, for units of several rows Obuchowski's. From the variance and the kind of the metric
(`Kind`) come the bounds. How often they hold the true score is measured by
`benchmarks/bench_coverage.py`.

Sources: Efron and Stein, Annals of Statistics 9 (1981), 586; Arvesen, Annals of Mathematical
Statistics 40 (1969), 2076; DeLong et al., Biometrics 44 (1988); Obuchowski, Biometrics 53 (1997);
Newcombe, Statist. Med. 25 (2006), 559 (method 5); Wilson, JASA 22 (1927); Fisher (1921); Zou and
Donner, Statist. Med. 27 (2008), 1693; Lam, Gopal and Qian, arXiv 2309.14621 (2023); Boyd et al.,
ECML PKDD 2013.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    IndexArray,
    KappaScorer,
    Kind,
    MeanScorer,
    Scorer,
    ShareScorer,
    chance_of,
    kind_of,
)
from thinsection.types import MIB, Floats

DRAWS = 2000  # of the bootstrap, for the calibration error
LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
MIN_UNITS = 5  # of each class; with fewer there is no interval
MOST_BLOCKS = 1000  # of units; with more units the jackknife leaves out blocks of them
# degrees of freedom that the variance of a simple law is worth beside the measured one
PRIOR_DEGREES: dict[Kind, int] = {"ranking": 4, "share": 4, "loss": 4, "explained": 2}
BLOCK_BYTES = 64 * MIB  # of row weights at a time
KNOWN = 4.0  # standard errors from chance at which half of `fold_inflation` is gone
NEAREST = 1e-9  # distance from a bound, which has no logit
NORMAL = 1.96  # quantile by which half a width is a standard error
FISHER: tuple[Kind, ...] = ("correlation", "agreement")  # have his z
STEPS = 8  # of the search for an end whose inflation depends on it


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
        return order[self.codes] % MOST_BLOCKS

    @cached_property
    def cells(self) -> tuple[IndexArray, IndexArray]:
        """Block and stratum (2, C) of each cell of rows that move together, and (N,) the cells."""
        keys = np.stack([self.blocks, self.strata])
        cells, cell_of_row = np.unique(keys, axis=1, return_inverse=True)
        return cells, cell_of_row.reshape(-1)

    def influences(self, score: Callable[[FloatVector], Floats]) -> Floats:
        """(C, ...) loss of a score without each cell, times (n - 1) / n for n cells of a stratum.

        `score` maps row weights (B, N) to (B, ...). NaN where the score has no value without a
        cell. Memory: BLOCK_BYTES of weights plus what a scorer makes of them.
        """
        cells, cell_of_row = self.cells
        count = cells.shape[1]
        num_rows = len(self.codes)
        point = score(np.ones((1, num_rows)))
        most = max(1, BLOCK_BYTES // (8 * max(1, num_rows)))
        without = []
        for start in range(0, count, most):
            stop = min(start + most, count)
            kept = np.arange(start, stop)[:, None] != cell_of_row
            without.append(score(kept.astype(np.float64)))
        losses = point - np.concatenate(without)
        of_stratum = np.bincount(cells[1])[cells[1]]
        share = (of_stratum - 1) / of_stratum
        return np.asarray(losses * share.reshape(-1, *[1] * (losses.ndim - 1)))

    def variance(self, influences: Floats, *, skewed: bool = False) -> Variance:
        """Variance of a score from the influence (C,) of each cell.

        Strata add up, n / (n - 1) times their sum of squares; units of several strata add the
        products (Obuchowski). `skewed`: the degrees of freedom are those of a variance of values
        with the kurtosis of the influences, for means that a few large values decide.
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
        if skewed and both > NEAREST**2:
            squares = sums.sum(axis=0) ** 2
            excess = (squares**2).sum() / squares.sum() ** 2 - 1 / self.units
            degrees = min(self.units - 1, max(2.0, 2 / max(excess, NEAREST)))
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
    (`metrics.kind_of`), see `bounds_of`; means of shares have `bounds_of_shares`. `seed` is that
    of the bootstrap, which the calibration error (a distance) alone needs.

    Below MIN_UNITS units of a class there is none, nor where the score depends on one unit, and
    `missing` says so. Memory: as `Sampling.influences`.
    """
    point = float(scorer(np.ones((1, len(sampling.codes))))[0])
    missing = why_missing(sampling, point)
    low = np.nan
    high = np.nan
    kind = kind_of(metric)
    if not missing and kind == "distance":
        spread = scorer.spread  # type: ignore[attr-defined]
        drawn = np.concatenate([spread(w) for w in sampling.weights(seed)])
        low, high = distance_bounds(point, drawn, sampling)
    elif not missing:
        chance = chance_of(metric, len(sampling.units_by_stratum))
        shares = _parts_of(scorer, ShareScorer)
        kappas = _parts_of(scorer, KappaScorer)
        if shares:
            low, high = bounds_of_shares(sampling, shares, chance)
        elif kappas:
            low, high = bounds_of_kappa(sampling, kappas, point)
        else:
            influences = sampling.influences(scorer)
            variance = sampling.variance(influences, skewed=kind in ("loss", "error"))
            center = point
            if kind == "explained":
                center += float(influences.sum())  # Quenouille's correction of the bias
            if np.isfinite(influences).all():
                low, high = bounds_of(center, variance, sampling, kind, chance)
            else:
                one = sampling.unit.removesuffix("s")
                missing = f"the score has no value without one {one}"
    return Interval(
        low=low,
        high=high,
        level=LEVEL,
        method="" if missing else METHODS[kind],
        unit=sampling.unit,
        units=sampling.units,
        missing=missing,
    )


Part = TypeVar("Part", ShareScorer, KappaScorer)


def _parts_of(scorer: Scorer, kind: type[Part]) -> list[Part]:
    """The scores of a kind that a score is the mean of; none where it is another score."""
    scorers = scorer.scorers if isinstance(scorer, MeanScorer) else [scorer]
    parts = [one for one in scorers if isinstance(one, kind)]
    return parts if len(parts) == len(scorers) else []


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


# papers by kind; the variance is that of the jackknife over units
METHODS: dict[Kind, str] = {
    "ranking": "DeLong and Obuchowski's variance, Newcombe's score interval",
    "share": "jackknife, Wilson's score interval of each class, MOVER (Zou and Donner 2008)",
    "agreement": "jackknife of the smoothed table, Fisher's z",
    "correlation": "jackknife, Fisher's z",
    "loss": "jackknife of the logarithm",
    "error": "jackknife, Wilson's score interval",
    "explained": "jackknife of log(1 - R²)",
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
    averaged with that of the law, which counts as PRIOR_DEGREES of freedom.

    - ranking (AUROC, c-index): the law is that of Hanley and McNeil (Newcombe's method 5).
    - share and error (Brier): that of a share of heads (Wilson). Errors are less spread than this
      law, so that it counts only where nothing is measured.
    - correlation and agreement (kappa), loss (absolute error), explained (R²): constant on Fisher's
      z scale, on that of the logarithm, and of log(1 - R²). That of a correlation counts only where
      nothing is measured.

    `chance`: score of a model that knows nothing, see `Sampling.fold_inflation`.
    """
    if kind in ("ranking", "share", "error"):
        law = _ranking_law(sampling) if kind == "ranking" else _share_law(sampling)
        inner = _inverted(
            point,
            variance,
            sampling,
            law,
            chance=chance,
            prior=PRIOR_DEGREES.get(kind, 0),
            ends=(0.0, 1.0),
        )
        return min(inner[0], point), max(inner[1], point)
    # a scale without bounds, and the variance on it that rows of a simple law have
    degrees = max(1, sampling.units - 3)
    if kind in FISHER:
        center = float(np.arctanh(np.clip(point, NEAREST - 1, 1 - NEAREST)))
        slope = 1 / max(NEAREST, 1 - point**2)
        least = 1 / degrees  # of normal values
        inverse: Callable[[FloatVector], FloatVector] = np.tanh
    elif kind == "loss":
        center = float(np.log(max(point, NEAREST)))
        slope = 1 / max(NEAREST, point)
        least = 1 / sampling.units  # of the exponential law
        inverse = np.exp
    else:
        center = float(np.log(max(1 - point, NEAREST)))
        slope = 1 / max(NEAREST, 1 - point)
        least = 4 * max(point, 0.5) / degrees  # of normal values
        inverse = _one_minus_exp
    ends = _inverted(
        center,
        Variance(variance.value * slope**2, variance.degrees),
        sampling,
        lambda _: least,
        chance=chance,
        prior=PRIOR_DEGREES.get(kind, 0),
        ends=(center - 50.0, center + 50.0),
    )
    low, high = sorted(inverse(np.array(ends)).tolist())
    return low, high


def _one_minus_exp(value: FloatVector) -> FloatVector:
    return 1 - np.exp(value)


def bounds_of_kappa(
    sampling: Sampling, scorers: Sequence[KappaScorer], point: float
) -> tuple[float, float]:
    """Lowest and highest mean of kappas, of the same rows and classes.

    A model that hardly ever calls a class has cells without a row, whose share no jackknife can
    see: by simulation its interval then held the true kappa in .75 to .90. So the table is smoothed
    (`KappaScorer.smoothed`), and the added rows vary as rows that are each their own unit.
    """
    smoothed = [scorer.smoothed() for scorer in scorers]
    mean = MeanScorer(smoothed)
    center = float(mean(np.ones((1, len(sampling.codes))))[0])
    measured = sampling.variance(sampling.influences(mean))
    losses = np.mean([scorer.losses_of_added() for scorer in smoothed], axis=0)
    added = float((losses**2).sum()) / smoothed[0].added
    variance = Variance(measured.value + added, measured.degrees)
    low, high = bounds_of(center, variance, sampling, "agreement", 0.0)
    return min(low, point), max(high, point)


def bounds_of_shares(
    sampling: Sampling, scorers: Sequence[ShareScorer], chance: float | None
) -> tuple[float, float]:
    """Lowest and highest mean of scores that are each the mean over classes of a share.

    Each share has Wilson's interval, and the distances of its ends from it are those of the mean,
    by the variance that is recovered from them (MOVER, Zou and Donner 2008). So a class of which
    no row is right has an upper end. F1 rises with the share of right rows among those of the class
    and those called so (Lam et al. 2023). Of an AUPRC the positive units count (Boyd et al. 2013).

    A share of rows that are each their own unit has the binomial variance, with Student's
    quantile of all units. Other shares have their measured one, averaged as in `bounds_of`.

    `chance`: see `Sampling.fold_inflation`; None: that of an AUPRC, the share of positive rows.
    """
    shares = [
        share
        for scorer in scorers
        for share in _shares_of(sampling, scorer, 1 / len(scorers))
    ]
    point = sum(share.weight * share.score(share.value) for share in shares)
    chance_score = chance
    if chance_score is None:
        chance_score = sum(share.weight * share.frequency for share in shares)
    correlation = _correlation(shares)

    def reach(inflation: float, side: int) -> float:
        distances = np.array([share.distance(inflation, side) for share in shares])
        return float(max(0.0, distances @ correlation @ distances) ** 0.5)

    error = (reach(1.0, 0) + reach(1.0, 1)) / 2 / NORMAL
    ends = []
    for side, sign in enumerate((-1, 1)):
        end = point
        for _ in range(STEPS):
            distance = (end - chance_score) / max(error, NEAREST)
            inflation = sampling.fold_inflation(distance)
            end = point + sign * reach(inflation, side)
        ends.append(min(1.0, max(0.0, end)))
    return ends[0], ends[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """One share of a mean, with all that its bounds need."""

    value: float
    weight: float  # in the mean
    score: Callable[[float], float]
    frequency: float  # of the rows that it counts, among all
    influences: FloatVector  # (units,)
    paired: bool  # an error of its class is one of another class too
    trials: float  # independent ones of a binomial law with its variance
    quantile: float

    def distance(self, inflation: float, side: int) -> float:
        """How far the mean reaches below (`side` 0) or above because of this share."""
        bounds = wilson(self.value, self.trials / inflation, self.quantile)
        end = self.score(min(1.0, max(0.0, bounds[side])))
        return self.weight * abs(end - self.score(self.value))


def _shares_of(
    sampling: Sampling, scorer: ShareScorer, weight: float
) -> Iterator[_Share]:
    """The shares of a mean, of the classes that have rows."""
    from scipy.stats import t

    present = np.flatnonzero(scorer.rows.any(axis=0))
    values = scorer.shares(np.ones((1, len(sampling.codes))))[0]
    losses = np.nan_to_num(sampling.influences(scorer.shares))
    for place in present:
        rows = scorer.rows[:, place]
        units = len(np.unique(sampling.codes[rows]))
        value = float(values[place])
        law = value * (1 - value) / units
        trials = float(units)
        degrees = float(max(1, sampling.units - len(present)))
        if not scorer.binomial or units < rows.sum():
            variance = sampling.variance(losses[:, place])
            ratio = _variance_ratio(variance, law, PRIOR_DEGREES["share"])
            trials = units / ratio
            degrees = variance.degrees + PRIOR_DEGREES["share"]
        yield _Share(
            value=value,
            weight=weight / len(present),
            score=scorer.score,
            frequency=float(rows.mean()),
            influences=np.bincount(sampling.cells[0][0], losses[:, place]).astype(
                np.float64
            ),
            paired=scorer.paired,
            trials=trials,
            quantile=float(t.ppf(1 - TAIL, degrees)),
        )


def _correlation(shares: Sequence[_Share]) -> Floats:
    """Correlations of shares by their influences.

    Of two that have none, as all rows are right, it is 1 where their errors are the same ones.
    """
    influences = np.stack([share.influences for share in shares])
    size = np.sqrt((influences**2).sum(axis=1))
    still = size < NEAREST
    size[still] = np.inf
    correlation = influences @ influences.T / np.outer(size, size)
    paired = still & np.array([share.paired for share in shares])
    correlation[np.ix_(paired, paired)] = 1.0
    np.fill_diagonal(correlation, 1.0)
    return correlation


def wilson(share: float, trials: float, quantile: float) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    square = quantile**2
    middle = (share + square / 2 / trials) / (1 + square / trials)
    variance = share * (1 - share) / trials + square / 4 / trials**2
    half = quantile / (1 + square / trials) * variance**0.5
    return middle - half, middle + half


def _variance_ratio(variance: Variance, law: float, prior: float) -> float:
    """The measured variance over that of a law, drawn to 1 as by `prior` degrees of freedom."""
    if variance.value <= NEAREST**2 or law <= NEAREST**2:
        return 1.0
    measured = variance.degrees * variance.value / law
    return float((measured + prior) / (variance.degrees + prior))


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
    ratio = _variance_ratio(variance, at_point, prior)
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
