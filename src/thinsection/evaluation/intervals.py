"""The 95 % confidence interval, by one method for every score of every command.

The rows of a unit vary together; a unit is a patient, or a case or row if patients are unknown. The
variance of a score comes from its jackknife over units, which leaves out each unit once. For the
AUROC it equals DeLong's variance, and Obuchowski's if units have several rows. The bounds follow
from the variance and from the kind of the metric (`Kind`). `benchmarks/bench_coverage.py` measures
how often they contain the true score.

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

DRAWS = 2000  # number of bootstrap draws, for the calibration error
LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
MIN_UNITS = 5  # number of units of each class from which there is an interval
MAX_BLOCKS = 1000  # with more units than this, the jackknife leaves out blocks of units
# Degrees of freedom with which the variance of a simple law is averaged with the measured variance.
PRIOR_DEGREES: dict[Kind, int] = {"ranking": 4, "share": 4, "loss": 4, "explained": 2}
BLOCK_BYTES = 64 * MIB  # bytes of row weights at a time
# distance from chance, in standard errors, at which `fold_inflation` has fallen halfway from 2 to 1
HALF_INFLATION_DISTANCE = 4.0
EPSILON = 1e-9  # smallest distance from 0 and 1, where a logit is infinite
NORMAL = 1.96  # half of a 95 % interval in standard errors
FISHER: tuple[Kind, ...] = (
    "correlation",
    "agreement",
)  # kinds that use Fisher's z scale
# steps of the search for an end of the interval, since the inflation depends on the end itself
INFLATION_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Confidence interval of a score."""

    low: float  # NaN if there is no interval
    high: float
    level: float  # nominal coverage, 0.95 for 95 %
    method: str  # method, with its papers; '' if there is no interval
    unit: str  # kind of the independent units: patients, slides, cases, images or rows
    units: int  # number of units
    missing: str = ""  # reason why there is no interval


class Variance(NamedTuple):
    """Variance of a score, and its degrees of freedom."""

    value: float  # as if one model had scored all rows, see `Sampling.fold_inflation`
    degrees: float  # degrees of freedom, by Welch and Satterthwaite


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Unit and class of each of N rows, and the model that scored it."""

    codes: IndexArray  # (N,), number 0..G-1 of each row's unit
    unit: str  # kind of the units
    classes: IndexArray | None = None  # (N,), class of each row; None without classes
    events: Flags | None = (
        None  # (N,), True if the event was observed; None without survival
    )
    fold: IndexArray | None = (
        None  # (N,), model of each row; None if one model scored all rows
    )
    folds: int = 1  # number of models of one cross-validation

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
        """Sampling of rows by their units.

        Args:
            groups: the unit of each row, (N,).
            classes: class of each row, (N,).
            events: whether each row had the event, (N,).
            fold: the model that scored each row, (N,).
            folds: number of models of one cross-validation; None counts those in `fold`, which has
                more if the cross-validation is repeated.
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
        """(N,), class of each row, or 1 for an event; 0 without classes and events."""
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
        """(N,), True for rows with an event, or of the rarest class; for all without either."""
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
        """Number of units of the rarest class, or with an event; of all units without classes."""
        return len(np.unique(self.codes[self.rarest]))

    @cached_property
    def blocks(self) -> IndexArray:
        """(N,), unit of each row, or the block of its unit if there are too many units."""
        if self.units <= MAX_BLOCKS:
            return self.codes
        # the seed is fixed, so that the same rows have the same blocks
        order = np.random.default_rng(0).permutation(self.units)
        return order[self.codes] % MAX_BLOCKS

    @cached_property
    def cells(self) -> tuple[IndexArray, IndexArray]:
        """Block and stratum (2, C) of each cell, and (N,) the cell of each row.

        A cell has the rows of one block in one stratum; the jackknife leaves them out together.
        """
        keys = np.stack([self.blocks, self.strata])
        cells, cell_of_row = np.unique(keys, axis=1, return_inverse=True)
        return cells, cell_of_row.reshape(-1)

    def influences(self, score: Callable[[FloatVector], Floats]) -> Floats:
        """(C, ...), loss of a score without each cell, times (n - 1) / n for n cells of a stratum.

        `score` maps row weights (B, N) to (B, ...). A loss is NaN if the score has no value without
        the cell.

        Memory: BLOCK_BYTES of weights, and the scorer's own arrays.
        """
        cells, cell_of_row = self.cells
        count = cells.shape[1]
        num_rows = len(self.codes)
        point = score(np.ones((1, num_rows)))
        most = max(1, BLOCK_BYTES // (8 * max(1, num_rows)))
        without = []
        for start in range(0, count, most):
            stop = min(start + most, count)
            is_counted = np.arange(start, stop)[:, None] != cell_of_row
            without.append(score(is_counted.astype(np.float64)))
        losses = point - np.concatenate(without)
        cells_of_stratum = np.bincount(cells[1])[cells[1]]
        share = (cells_of_stratum - 1) / cells_of_stratum
        return np.asarray(losses * share.reshape(-1, *[1] * (losses.ndim - 1)))

    def variance(self, influences: Floats, *, skewed: bool = False) -> Variance:
        """Variance of a score from the influence (C,) of each cell.

        It is the sum over strata of n / (n - 1) times their sum of squares. Units that have rows in
        several strata add the products of their influences (Obuchowski). With `skewed`, the degrees
        of freedom account for the kurtosis of the influences, for means that depend on a few large
        values.
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
        degrees = total**2 / sum(shares) if total > EPSILON**2 else self.fewest - 1
        if skewed and both > EPSILON**2:
            squares = sums.sum(axis=0) ** 2
            excess = (squares**2).sum() / squares.sum() ** 2 - 1 / self.units
            degrees = min(self.units - 1, max(2.0, 2 / max(excess, EPSILON)))
        return Variance(both, float(degrees))

    def weights(self, seed: int, draws: int | None = None) -> Iterator[FloatVector]:
        """Yields blocks (B, N) of row weights of `draws` (None: DRAWS) bootstrap draws.

        The weights of a draw have the mean 1 over units. The block size does not change them.

        Memory: BLOCK_BYTES.

        Source: Rubin, "The Bayesian bootstrap", Annals of Statistics 9 (1981).
        """
        rng = np.random.default_rng(seed)
        num_left = DRAWS if draws is None else draws
        most = max(1, BLOCK_BYTES // (8 * max(1, len(self.codes))))
        while num_left:
            size = min(most, num_left)
            weights = rng.standard_exponential((size, self.units))
            weights /= weights.mean(axis=1, keepdims=True)
            yield weights if self.units == len(self.codes) else weights[:, self.codes]
            num_left -= size

    def fold_inflation(self, distance: float | None = None) -> float:
        """Ratio of the variance of a cross-validated score to that of a score of one model.

        `distance` is the distance of the score from chance, in standard errors; None if the score
        of chance is unknown. At chance the ratio is 2: any two folds test each other's training
        cases, so that every product of two folds counts twice. The ratio falls to 1 for models that
        are far from chance, since one training case changes them little. Without a distance it is
        1 + 1 / (k - 1) for k folds, by the ratio of test to training cases (Nadeau and Bengio,
        Machine Learning 52, 2003).
        """
        if self.folds < 2:
            return 1.0
        if distance is None:
            return self.folds / (self.folds - 1)
        return 1 + 1 / (1 + (max(0.0, distance) / HALF_INFLATION_DISTANCE) ** 2)


def interval(
    sampling: Sampling, scorer: Scorer, metric: str, *, seed: int = 0
) -> Interval:
    """The 95 % confidence interval of a score of N rows.

    `scorer` maps row weights (B, N) to scores (B,). `metric` decides the kind of the interval
    (`metrics.kind_of`), see `bounds_of`; means of shares use `bounds_of_shares`. `seed` is the seed
    of the bootstrap, which only the calibration error (a distance) and medians need.

    There is no interval if a class has fewer than MIN_UNITS units, or if the score has no value
    without one of the units; `missing` then gives the reason.

    Memory: as `Sampling.influences`.
    """
    point = float(scorer(np.ones((1, len(sampling.codes))))[0])
    missing = why_missing(sampling, point)
    low = np.nan
    high = np.nan
    kind = kind_of(metric)
    if not missing and kind == "distance":
        spread = scorer.spread  # type: ignore[attr-defined]
        resampled = np.concatenate([spread(w) for w in sampling.weights(seed)])
        low, high = distance_bounds(point, resampled, sampling)
    elif not missing and kind == "median":
        drawn = np.concatenate([scorer(w) for w in sampling.weights(seed)])
        low, high = median_bounds(point, drawn, sampling)
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
    """The scores of a kind of which a score is the mean; none if it is another kind of score."""
    scorers = scorer.scorers if isinstance(scorer, MeanScorer) else [scorer]
    parts = [one for one in scorers if isinstance(one, kind)]
    return parts if len(parts) == len(scorers) else []


def why_missing(sampling: Sampling, point: float = 0.0) -> str:
    """Reason why there is no interval; '' if there is one."""
    if not np.isfinite(point):
        return "the score has no value"
    if sampling.fewest >= MIN_UNITS:
        return ""
    if sampling.events is not None:
        condition = " with an event"
    elif sampling.classes is not None:
        condition = " of each class"
    else:
        condition = ""
    needed = f"at least {MIN_UNITS} {sampling.unit}{condition} are needed"
    return f"{needed}, got {sampling.fewest}"


# method and papers by kind
METHODS: dict[Kind, str] = {
    "ranking": "DeLong and Obuchowski's variance, Newcombe's score interval",
    "share": "jackknife, Wilson's score interval of each class, MOVER (Zou and Donner 2008)",
    "agreement": "jackknife of the smoothed table, Fisher's z",
    "correlation": "jackknife, Fisher's z",
    "loss": "jackknife of the logarithm",
    "error": "jackknife, Wilson's score interval",
    "explained": "jackknife of log(1 - R²)",
    "distance": "Bayesian bootstrap (Rubin 1981), triangle inequality",
    "median": "Bayesian bootstrap (Rubin 1981), percentiles",
}


def drawn_variance(drawn: FloatVector, sampling: Sampling) -> Variance:
    """Variance of a score from its values (B,) on resamples of units.

    For a sum S of squares, the mean of n values has the variance S / (n (n - 1)), but the variance
    over its Bayesian resamples is S / (n (n + 1)). The result is corrected for that.
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
    """Lowest and highest true score that are compatible with a measured score, by its kind.

    The interval contains the true scores t with (point - t)² <= q² v(t). Here q is a quantile of
    Student's t, and v(t) is the variance if t is the true score. v(t) is proportional to a law, and
    the measured variance gives the factor.

    A variance that is measured on few units is uncertain, and it is 0 for a perfect score. So it is
    averaged with the variance of the law, which counts as PRIOR_DEGREES degrees of freedom.

    - ranking (AUROC, c-index): the law of Hanley and McNeil (Newcombe's method 5).
    - share and error (Brier score): the binomial law (Wilson). Errors vary less than by this law,
      so it is used for an error only if the measured variance is 0.
    - correlation and agreement (kappa), loss (absolute error), explained (R²): a constant variance
      on the scale of Fisher's z, of the logarithm, and of log(1 - R²). The law of a correlation is
      used only if the measured variance is 0.

    `chance` is the score of a model without any information, see `Sampling.fold_inflation`.
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
    # a scale without bounds, and the variance on it by a simple law
    degrees = max(1, sampling.units - 3)
    if kind in FISHER:
        center = float(np.arctanh(np.clip(point, EPSILON - 1, 1 - EPSILON)))
        slope = 1 / max(EPSILON, 1 - point**2)
        law_variance = 1 / degrees  # by the normal law
        inverse: Callable[[FloatVector], FloatVector] = np.tanh
    elif kind == "loss":
        center = float(np.log(max(point, EPSILON)))
        slope = 1 / max(EPSILON, point)
        law_variance = 1 / sampling.units  # by the exponential law
        inverse = np.exp
    else:
        center = float(np.log(max(1 - point, EPSILON)))
        slope = 1 / max(EPSILON, 1 - point)
        law_variance = 4 * max(point, 0.5) / degrees  # by the normal law
        inverse = _one_minus_exp
    ends = _inverted(
        center,
        Variance(variance.value * slope**2, variance.degrees),
        sampling,
        lambda _: law_variance,
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

    A model that rarely predicts a class leaves cells of the table empty, and the jackknife cannot
    see their variance: in simulations the intervals then contained the true kappa in only 75 to
    90 %. So the table is smoothed (`KappaScorer.smoothed`), and each added row varies as a unit of
    its own.
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
    """Lowest and highest mean of scores, each of which is a mean of shares over classes.

    Each share has Wilson's interval. The distances of its ends from the share are combined to the
    distances of the ends from the mean (MOVER, Zou and Donner 2008). So a class without any correct
    row still has an upper end above 0. F1 is a function of the share of correct rows among the rows
    that are of the class or predicted as the class (Lam et al. 2023). For an AUPRC, the positive
    units count (Boyd et al. 2013).

    If each row is its own unit, a share has the binomial variance, with Student's quantile for all
    units. Other shares have their measured variance, averaged as in `bounds_of`.

    `chance`: see `Sampling.fold_inflation`; None for an AUPRC takes the share of positive rows.
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
        for _ in range(INFLATION_STEPS):
            distance = (end - chance_score) / max(error, EPSILON)
            inflation = sampling.fold_inflation(distance)
            end = point + sign * reach(inflation, side)
        ends.append(min(1.0, max(0.0, end)))
    return ends[0], ends[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """One share of a mean of shares, with the values that its bounds need."""

    value: float
    weight: float  # weight in the mean
    score: Callable[[float], float]  # score of a value of the share
    frequency: float  # share of the counted rows among all rows
    influences: FloatVector  # (units,)
    paired: bool  # True if an error of its class is also an error of another class
    trials: (
        float  # number of independent trials of a binomial law with the same variance
    )
    quantile: float  # quantile of Student's t

    def distance(self, inflation: float, side: int) -> float:
        """Distance of the lower (`side` 0) or upper end from the mean, due to this share."""
        bounds = wilson(self.value, self.trials / inflation, self.quantile)
        end = self.score(min(1.0, max(0.0, bounds[side])))
        return self.weight * abs(end - self.score(self.value))


def _shares_of(
    sampling: Sampling, scorer: ShareScorer, weight: float
) -> Iterator[_Share]:
    """The shares of a mean, for the classes that have rows."""
    from scipy.special import stdtrit

    present = np.flatnonzero(scorer.rows.any(axis=0))
    values = scorer.shares(np.ones((1, len(sampling.codes))))[0]
    losses = np.nan_to_num(sampling.influences(scorer.shares))
    for label in present:
        rows = scorer.rows[:, label]
        units = len(np.unique(sampling.codes[rows]))
        value = float(values[label])
        law = value * (1 - value) / units
        trials = float(units)
        degrees = float(max(1, sampling.units - len(present)))
        if not scorer.binomial or units < rows.sum():
            variance = sampling.variance(losses[:, label])
            ratio = _variance_ratio(variance, law, PRIOR_DEGREES["share"])
            trials = units / ratio
            degrees = variance.degrees + PRIOR_DEGREES["share"]
        yield _Share(
            value=value,
            weight=weight / len(present),
            score=scorer.score,
            frequency=float(rows.mean()),
            influences=np.bincount(sampling.cells[0][0], losses[:, label]).astype(
                np.float64
            ),
            paired=scorer.paired,
            trials=trials,
            quantile=float(stdtrit(degrees, 1 - TAIL)),
        )


def _correlation(shares: Sequence[_Share]) -> Floats:
    """Correlations of shares by their influences.

    The influences of a share are 0 if all its rows are correct. The correlation of two such shares
    is 1 if each error of one class is also an error of the other class.
    """
    influences = np.stack([share.influences for share in shares])
    size = np.sqrt((influences**2).sum(axis=1))
    is_constant = size < EPSILON
    size[is_constant] = np.inf
    correlation = influences @ influences.T / np.outer(size, size)
    paired = is_constant & np.array([share.paired for share in shares])
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
    """Ratio of the measured variance to that of a law, averaged with 1 by `prior` degrees."""
    if variance.value <= EPSILON**2 or law <= EPSILON**2:
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
    """Lowest and highest true value between `ends` that are compatible with the point."""
    from scipy.optimize import brentq
    from scipy.special import stdtrit

    at_point = law(point)
    ratio = _variance_ratio(variance, at_point, prior)
    quantile = float(stdtrit(variance.degrees + prior, 1 - TAIL))
    error = (ratio * max(at_point, EPSILON**2)) ** 0.5

    def excess(true: float) -> float:
        distance = None if chance is None else (true - chance) / error
        allowed = quantile**2 * ratio * law(true) * sampling.fold_inflation(distance)
        return (point - true) ** 2 - allowed

    low, high = ends
    inside = min(max(point, low + EPSILON), high - EPSILON)
    if excess(inside) >= 0:
        return point, point
    if point > low + EPSILON and excess(low) > 0:
        low = float(brentq(excess, low, inside))
    if point < high - EPSILON and excess(high) > 0:
        high = float(brentq(excess, inside, high))
    return low, high


def _ranking_law(sampling: Sampling) -> Callable[[float], float]:
    """Variance of an AUROC t of m and n units (Hanley and McNeil, Radiology 143, 1982).

    With several classes, m is the rarest class and n the others; a unit with rows of both counts
    in both. In survival, m are the units with an event and n those without. Since an event is also
    compared with later events, n is at least half of m.
    """
    few = max(1, sampling.fewest)
    others: float = max(1, len(np.unique(sampling.codes[~sampling.rarest])))
    if sampling.events is not None:
        others = max(others, few / 2)

    def law(true: float) -> float:
        half = (few + others) / 2 - 1
        shape = 1 + half * (1 - true) / (2 - true) + half * true / (1 + true)
        return true * (1 - true) / (few * others) * shape

    return law


def _share_law(sampling: Sampling) -> Callable[[float], float]:
    """Variance of a mean over classes, if t is the share in each class."""
    units = sampling.units_by_stratum if sampling.events is None else [sampling.units]
    counts = [max(1, int(count)) for count in units]
    effective = len(counts) ** 2 / sum(1 / count for count in counts)
    return lambda true: true * (1 - true) / effective


def median_bounds(
    point: float, drawn: FloatVector, sampling: Sampling
) -> tuple[float, float]:
    """Percentiles of `drawn` (B,), a median of resampled units: the jackknife of one is wrong.

    Their distances from the score are widened for few units, as in `drawn_variance`.
    """
    few = ((sampling.fewest + 1) / (sampling.fewest - 1)) ** 0.5
    low, high = np.quantile(drawn, [TAIL, 1 - TAIL])
    return point - few * (point - float(low)), point + few * (float(high) - point)


def distance_bounds(
    point: float, drawn: FloatVector, sampling: Sampling
) -> tuple[float, float]:
    """Score ± the 97.5th percentile of `drawn` (B,), distances of resampled from sampled gaps.

    By the triangle inequality the true distance is not farther away. The upper end also allows for
    kinds of units that are missing from the sample: a kind with a share of 1 - 0.025^(1/n) is
    missing from n units with a probability of 2.5 %.
    """
    few = (sampling.fewest + 1) / (sampling.fewest - 1)
    reach = float(np.quantile(drawn, 1 - TAIL))
    reach *= (few * sampling.fold_inflation()) ** 0.5
    unseen = 1 - TAIL ** (sampling.fold_inflation() / sampling.units)
    high = max(point + reach, point + (1 - point) * unseen)
    return max(0.0, point - reach), min(1.0, high)
