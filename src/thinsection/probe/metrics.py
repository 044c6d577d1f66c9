"""Every metric of a table of predictions, each a `Scorer`: row weights (B, N) in, (B,) out.

Weights say how often a resample drew a row; a score under weights is the score of the rows repeated
so often, so that one set of draws serves every metric and every model of the same rows.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from thinsection.probe import statistics
from thinsection.probe.statistics import FloatVector, IndexArray, Scorer, ratio

ECE_BINS = 15  # of equal width; Guo et al. 2017
LOWER_IS_BETTER = frozenset({"brier", "ece"})
Scorers = dict[str, Scorer]


def class_scorers(
    truth: IndexArray,
    prediction: IndexArray,
    num_classes: int,
    probability: FloatVector | None = None,
) -> Scorers:
    """Of a classification (N,): from the labels, and with `probability` (N, K) the rest.

    More than two classes are averaged one against the rest; Brier sums over classes (class 1 alone
    for two); ECE is of the class that is predicted. A resample without a class gives NaN where a
    metric has no value then. Memory: about 6 arrays of the weights' shape.
    """
    from scipy import sparse  # here, as `probe --help` must not wait for it

    cells = sparse.csr_array(
        (np.ones(len(truth)), (np.arange(len(truth)), truth * num_classes + prediction)),
        shape=(len(truth), num_classes**2),
    )

    def of_counts(score: Callable[[npt.NDArray], FloatVector], weights: npt.NDArray) -> FloatVector:
        return score((weights @ cells).reshape(len(weights), num_classes, num_classes))

    by_label = {**statistics.METRICS, "weighted_kappa": weighted_kappa}
    scorers: Scorers = {name: partial(of_counts, score) for name, score in by_label.items()}
    if probability is None:
        return scorers
    off = ((probability - np.eye(num_classes)[truth]) ** 2).sum(axis=1) / (1 + (num_classes == 2))
    scorers["auroc"] = partial(statistics.macro_auroc, probability, truth)
    scorers["auprc"] = partial(macro_auprc, probability, truth)
    scorers["brier"] = lambda weights: ratio(weights @ off, weights.sum(axis=1), empty=np.nan)
    scorers["ece"] = partial(calibration_error, probability, truth)
    return scorers


def survival_scorers(event: npt.NDArray[np.bool_], time: FloatVector, risk: FloatVector) -> Scorers:
    """Harrell's c-index of risks (N,). Memory: 16 N²."""
    return {"c_index": statistics.concordance(event, time, risk)}


def value_scorers(truth: FloatVector, prediction: FloatVector) -> Scorers:
    """Pearson and Spearman correlation of values (N,), or their mean over targets of (N, T).

    A target that is constant in a resample does not count there. Memory: 5 arrays of the weights'
    shape and 6 (B, T).
    """
    pair = [np.asarray(v, dtype=np.float64).reshape(len(v), -1) for v in (truth, prediction)]

    def mean(by_target: Callable[..., FloatVector], weights: npt.NDArray) -> FloatVector:
        found = by_target(*pair, weights)
        return ratio(np.nansum(found, axis=1), np.isfinite(found).sum(axis=1), empty=np.nan)

    return {"pearson": partial(mean, pearson), "spearman": partial(mean, spearman)}


def over_folds(
    fold: IndexArray | None, num_rows: int, make: Callable[[IndexArray], Scorers]
) -> Scorers:
    """The mean over folds of what `make` gives for the rows of each; `fold` (N,) numbers them.

    Rows of two models are so never ranked against each other; None: one model made all rows. A fold
    counts as often as its rows were drawn, also where its only patient was drawn twice or never.
    """
    if fold is None:
        return make(np.arange(num_rows))
    parts = [(rows, make(rows)) for f in np.unique(fold) for rows in [np.flatnonzero(fold == f)]]

    def mean(name: str, weights: npt.NDArray) -> FloatVector:
        scores = np.array([scorers[name](weights[:, rows]) for rows, scorers in parts])
        drawn = np.array([weights[:, rows].sum(axis=1) / len(rows) for rows, _ in parts])
        scores[drawn == 0] = 0
        return ratio((drawn * scores).sum(axis=0), drawn.sum(axis=0), empty=np.nan)

    return {name: partial(mean, name) for name in parts[0][1]}


def mean_of(scorers: Sequence[Scorer]) -> Scorer:
    """The mean of several scores of the same rows."""
    return lambda weights: np.mean([score(weights) for score in scorers], axis=0)


def all_scores(scorers: Scorers, num_rows: int) -> dict[str, float]:
    """Each metric with every row counted once."""
    once = np.ones((1, num_rows))
    return {name: float(score(once)[0]) for name, score in scorers.items()}


def weighted_kappa(counts: npt.NDArray) -> FloatVector:
    """Cohen's kappa with quadratic weights, (...,) of confusion matrices (..., K, K).

    1 where truth and prediction are one and the same class throughout.
    """
    grade = np.arange(counts.shape[-1])
    cost = (grade[:, None] - grade) ** 2.0
    chance = counts.sum(axis=-1)[..., None] * counts.sum(axis=-2)[..., None, :]
    expected = ratio((chance * cost).sum(axis=(-2, -1)), counts.sum(axis=(-2, -1)))
    return 1 - ratio((counts * cost).sum(axis=(-2, -1)), expected)


def macro_auprc(probability: FloatVector, truth: IndexArray, weights: npt.NDArray) -> FloatVector:
    """Average precision of class 1 for two classes, else the one-versus-rest mean; (B,)."""
    classes = [1] if probability.shape[1] == 2 else range(probability.shape[1])
    areas = []
    for c in classes:
        up, down = statistics.tied_weights(-probability[:, c], truth == c, weights)
        hits = up.cumsum(axis=1)
        precision = ratio(hits, hits + down.cumsum(axis=1))
        areas.append(ratio((up * precision).sum(axis=1), up.sum(axis=1), empty=np.nan))
    return np.mean(areas, axis=0)  # type: ignore[no-any-return]


def calibration_bins(
    probability: FloatVector, truth: IndexArray, weights: npt.NDArray, bins: int = ECE_BINS
) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray]:
    """(rows, mean confidence x rows, right rows) by bin of the predicted class's share; (B, bins).

    Source: Guo et al., On calibration of modern neural networks, ICML 2017.
    """
    guess, sure = probability.argmax(axis=1), probability.max(axis=1)
    of_bin = np.eye(bins)[np.clip(np.ceil(sure * bins).astype(np.int64) - 1, 0, bins - 1)]
    right = (guess == truth).astype(np.float64)
    return weights @ of_bin, weights @ (of_bin * sure[:, None]), weights @ (of_bin * right[:, None])


def calibration_error(
    probability: FloatVector, truth: IndexArray, weights: npt.NDArray
) -> FloatVector:
    """Expected calibration error of the predicted class, (B,)."""
    rows, sure, right = calibration_bins(probability, truth, weights)
    return ratio(np.abs(sure - right).sum(axis=1), rows.sum(axis=1))


def pearson(x: FloatVector, y: FloatVector, weights: npt.NDArray) -> FloatVector:
    """Correlation by column of x and y (N, T) under weights, (B, T); NaN where one is constant."""
    total = np.maximum(weights.sum(axis=1, keepdims=True), 1.0)  # 0 where no row was drawn
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)  # near 0 nothing cancels

    def covariance(a: FloatVector, b: FloatVector) -> FloatVector:
        return weights @ (a * b) - (weights @ a) * (weights @ b) / total  # type: ignore[no-any-return]

    spread = np.sqrt(np.maximum(covariance(x, x), 0) * np.maximum(covariance(y, y), 0))
    tiny = 1e-12 * np.sqrt((x**2).sum(axis=0) * (y**2).sum(axis=0))
    return ratio(covariance(x, y), np.where(spread > tiny, spread, 0), empty=np.nan)


def spearman(x: FloatVector, y: FloatVector, weights: npt.NDArray) -> FloatVector:
    """Rank correlation by column of (N, T) under weights, ties at their mean rank; (B, T)."""
    total, out = weights.sum(axis=1), np.empty((len(weights), x.shape[1]))
    for t in range(x.shape[1]):
        a, b = (_ranks(v[:, t], weights) - (total[:, None] + 1) / 2 for v in (x, y))
        top, *spreads = ((weights * p * q).sum(axis=1) for p, q in ((a, b), (a, a), (b, b)))
        out[:, t] = ratio(top, np.sqrt(spreads[0] * spreads[1]), empty=np.nan)
    return out


def _ranks(values: FloatVector, weights: npt.NDArray) -> FloatVector:
    """Mean rank (B, N) that each row would have among the rows repeated by their weights."""
    _, place = np.unique(values, return_inverse=True)
    of_place = np.stack([np.bincount(place, w) for w in weights])
    ranks: FloatVector = (of_place.cumsum(axis=1) - (of_place - 1) / 2)[:, place]
    return ranks
