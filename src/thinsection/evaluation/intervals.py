"""One way to a 95 % confidence interval, for every score of every command.

The units that were sampled (patients, else slides, else rows) are drawn again by the Bayesian
bootstrap: a draw gives each unit a weight from a standard exponential law. No unit ever weighs 0,
so that no class, fold or pair is ever lost and every draw counts. From the draws comes a standard
error; from the standard error and the kind of the metric (`Kind`) come the bounds. How often the
bounds hold the true score is measured by `benchmarks/bench_coverage.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

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
    folds_of,
    kind_of,
)
from thinsection.types import MIB

DRAWS = 2000
LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
MIN_UNITS = 3  # of each class; with fewer there is no interval
BLOCK_BYTES = 64 * MIB  # of row weights at a time
NEAREST = 1e-9  # distance from a bound, which has no logit


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Range in which the score of other units, drawn as these were, is expected."""

    low: float  # NaN where there is no interval
    high: float
    level: float  # coverage that is promised, 0.95 for 95 %
    draws: int  # resamples; all of them count
    seed: int  # of the resamples
    unit: str  # what was resampled: patients, slides, cases, images or rows
    units: int  # how many there are
    missing: str = ""  # why there is no interval


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

    def coins(self, *, ranking: bool) -> float:
        """Independent trials that the rows are worth at most.

        A case that the model does not recognise ranks at random, and a mean over K classes
        averages K shares: m rows of the rarest class are worth K m coins, 2 m without classes. In
        a fold of few rows they are worth no more than it has pairs. Fewer by `fold_inflation`.
        """
        sides = 2 if self.classes is None else max(2, len(np.unique(self.classes)))
        repeats = 1 if self.fold is None else len(np.unique(self.fold)) / self.folds
        shared = repeats * self.fold_inflation
        if not ranking:
            return sides * int(self.rarest.sum()) / shared
        total = 0
        for rows in folds_of(self.fold, len(self.codes)):
            few = int(self.rarest[rows].sum())
            others = len(rows) - few
            pairs = few * others
            if self.events is not None:  # those with an event are compared too
                pairs += few * (few - 1) // 2
            total += min(sides * few, pairs)
        return total / shared

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

    def scores(self, scorers: Sequence[Scorer], seed: int) -> FloatVector:
        """(DRAWS, M) scores of M scorers on the same resamples.

        Memory: BLOCK_BYTES of weights plus what a scorer makes of them.
        """
        blocks = [
            np.stack([score(weights) for score in scorers], axis=1)
            for weights in self.weights(seed)
        ]
        return np.concatenate(blocks)

    @property
    def inflation(self) -> float:
        """Variance of a score over that of its resamples.

        The mean of n values has the variance S / (n (n - 1)) for a sum S of squares, its Bayesian
        resamples S / (n (n + 1)). With k folds the models differ too: the variance is 1 + 1 / (k -
        1) times as large, the test part over the training part, which the simulations need.
        """
        few = (self.fewest + 1) / (self.fewest - 1)
        return few * self.fold_inflation

    @property
    def fold_inflation(self) -> float:
        """1 + 1 / (k - 1) for k folds, 1 for one model."""
        return self.folds / (self.folds - 1) if self.folds > 1 else 1.0


def interval(sampling: Sampling, scorer: Scorer, metric: str, *, seed: int) -> Interval:
    """The 95 % confidence interval of a score of N rows, from DRAWS resamples of units.

    `scorer` maps row weights (B, N) to scores (B,). `metric` decides the kind of the interval
    (`metrics.kind_of`):

    - ranking (AUROC, c-index), share (AUPRC, accuracy, F1, ...), agreement (kappa, moved to 0..1):
      Clopper and Pearson's bounds at the effective number of trials, score (1 - score) / variance,
      reduced by Student's t with m - 1 degrees of freedom, m the units of the rarest class. At
      most `Sampling.coins` trials are counted, which bounds a faultless score.
    - correlation, loss (absolute error), error (Brier), explained (R²): score ± t · standard error
      on Fisher's z scale, of logarithms, and of log(1 - R²), the variance at least
      `_least_variance`.
    - distance (ECE): score ± the 97.5th percentile of the distance between the gaps of a resample
      and those of the sample; by the triangle inequality the true distance is no farther.

    The upper end of error and distance leaves room for what no case has shown (`_with_unseen`).

    Below MIN_UNITS units of a class there is none, and `missing` says so. Memory: as
    `Sampling.scores`. Source: Korn and Graubard, Survey Methodology 24 (1998); Clopper and Pearson,
    Biometrika 26 (1934).
    """
    point = float(scorer(np.ones((1, len(sampling.codes))))[0])
    missing = why_missing(sampling, point)
    low = np.nan
    high = np.nan
    draws = 0
    if not missing:
        kind = kind_of(metric)
        varied = scorer.spread if kind == "distance" else scorer  # type: ignore[attr-defined]
        drawn = sampling.scores([varied], seed)[:, 0]
        low, high = bounds_of(point, drawn, sampling, kind)
        draws = len(drawn)
    return Interval(
        low=low,
        high=high,
        level=LEVEL,
        draws=draws,
        seed=seed,
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


def bounds_of(
    point: float, drawn: FloatVector, sampling: Sampling, kind: Kind
) -> tuple[float, float]:
    """Lowest and highest score that a point and its resamples (B,) allow; see `interval`."""
    from scipy.stats import t

    quantile = float(t.ppf(1 - TAIL, sampling.fewest - 1))
    inflation = sampling.inflation
    if kind in ("share", "ranking"):
        coins = sampling.coins(ranking=kind == "ranking")
        variance_of_draws = float(drawn.var()) * inflation
        return _share_bounds(
            point, variance_of_draws, quantile, coins, float(drawn.mean())
        )
    if kind == "agreement":
        coins = sampling.coins(ranking=False)
        variance_of_draws = float(drawn.var()) * inflation / 4
        middle = float((drawn.mean() + 1) / 2)
        low, high = _share_bounds(
            (point + 1) / 2, variance_of_draws, quantile, coins, middle
        )
        return 2 * low - 1, 2 * high - 1
    if kind == "distance":
        reach = float(np.quantile(drawn, 1 - TAIL)) * inflation**0.5
        high = max(point + reach, _with_unseen(point, sampling))
        return max(0.0, point - reach), min(1.0, high)
    center = _stretched(point, kind)
    variance = _stretched(drawn, kind).var() * inflation
    variance = max(variance, _least_variance(point, kind, sampling))
    ends = center + quantile * variance**0.5 * np.array([-1.0, 1.0])
    low, high = sorted(_shrunk(ends, kind).tolist())
    if kind == "error":
        high = min(1.0, max(high, _with_unseen(point, sampling)))
    return low, high


def _share_bounds(
    share: float, variance: float, quantile: float, coins: float, center: float
) -> tuple[float, float]:
    """Clopper and Pearson's bounds of a share that is known with a variance.

    `coins`: the most independent trials that the share may stand for. `center`: the mean of the
    resamples, whose spread stands for that of a share of 0 or 1 (a place of a curve).
    """
    from scipy.stats import beta, norm

    effective = coins
    if variance > NEAREST**2:
        spread = share * (1 - share) or center * (1 - center)
        by_variance = spread / variance
        effective = min(coins, by_variance * (norm.ppf(1 - TAIL) / quantile) ** 2)
    hits = share * effective
    misses = effective - hits
    low = beta.ppf(TAIL, hits, misses + 1) if hits > NEAREST else 0.0
    high = beta.ppf(1 - TAIL, hits + 1, misses) if misses > NEAREST else 1.0
    return float(min(low, share)), float(max(high, share))


def _with_unseen(point: float, sampling: Sampling) -> float:
    """An error in 0..1 where as many units as may be unseen have an error of 1.

    A share of 1 - 0.025^(1/n) of all units may be missing from n of them: a few cases without a
    bad error do not show that there are none.
    """
    unseen = 1 - TAIL ** (sampling.fold_inflation / sampling.units)
    return float(point + (1 - point) * unseen)


def _least_variance(point: float, kind: Kind, sampling: Sampling) -> float:
    """Variance on the scale of `_stretched` that rows of a simple law have.

    Resamples of few units vary too little. Correlations and R²: those of normal values; losses:
    those of the exponential law.
    """
    degrees = max(1, sampling.units - sampling.folds - 2)
    if kind == "correlation":
        return sampling.fold_inflation / degrees
    if kind == "explained":
        return 4 * max(point, 0.5) * sampling.fold_inflation / degrees
    return sampling.fold_inflation / sampling.fewest


def _stretched(score: npt.ArrayLike, kind: Kind) -> FloatVector:
    """Scores on a scale without bounds."""
    x = np.asarray(score, dtype=np.float64)
    if kind == "correlation":
        return np.arctanh(np.clip(x, NEAREST - 1, 1 - NEAREST))
    if kind in ("loss", "error"):
        return np.log(np.maximum(x, NEAREST))
    return np.log(np.maximum(1 - x, NEAREST))


def _shrunk(value: FloatVector, kind: Kind) -> FloatVector:
    """Inverse of `_stretched`."""
    if kind == "correlation":
        return np.tanh(value)
    if kind in ("loss", "error"):
        return np.exp(value)
    return 1 - np.exp(value)
