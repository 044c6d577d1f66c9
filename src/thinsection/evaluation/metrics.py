"""Every metric, of confusion matrices or of rows under weights.

A `Scorer` maps row weights (B, N), the weight of each row in each of B resamples, to the scores
(B,) of the rows so weighted: one set of draws serves every metric and every model of the same rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.calibration import ECE_BINS, CalibrationError

if TYPE_CHECKING:
    from scipy import sparse

Counts = npt.NDArray[np.int64]  # (..., K, K): rows truth, columns prediction
FloatVector = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Weights = npt.NDArray[np.float64]  # (B, N): of each row in each of B resamples
Tallies = Counts | Weights  # confusion matrices of rows, or of rows under weights
# indices of the training and of the validation rows
Fold = tuple[IndexArray, IndexArray]
# weights of rows, or B confusion matrices -> scores (B,)
Scorer = Callable[[Weights], FloatVector]
Scorers = dict[str, Scorer]

Kind = Literal[
    "ranking",
    "share",
    "agreement",
    "correlation",
    "loss",
    "error",
    "explained",
    "distance",
    "median",
]
_KINDS: dict[str, Kind] = {
    "auroc": "ranking",
    "c_index": "ranking",
    "brier": "error",
    "mae": "loss",
    "ece": "distance",
    "weighted_kappa": "agreement",
    "pearson": "correlation",
    "spearman": "correlation",
    "cosine": "correlation",
    "r2": "explained",
    "croma": "median",
}
_CHANCE = {
    "auroc": 0.5,
    "c_index": 0.5,
    "pearson": 0.0,
    "spearman": 0.0,
    "weighted_kappa": 0.0,
}
LOWER_IS_BETTER = frozenset({"brier", "ece", "mae"})
_PAIRS_OF_A_FOLD = "pairs of cases that the same model scored"
_POOLED = {
    "auroc": _PAIRS_OF_A_FOLD,
    "c_index": _PAIRS_OF_A_FOLD,
    "pearson": "all cases, less the mean of each fold",
    "spearman": "ranks of all cases, less their mean in each fold",
}


# metrics that are printed for classes and labels, one for each question
_SHOWN = {
    "binary": ("auroc", "auprc", "balanced_accuracy", "brier", "ece"),
    "multilabel": ("auroc", "auprc", "balanced_accuracy", "brier", "ece"),
    "multiclass": (
        "auroc",
        "auprc",
        "balanced_accuracy",
        "macro_f1",
        "brier",
        "ece",
    ),
    "ordinal": ("weighted_kappa", "mae", "balanced_accuracy", "ece"),
}
# number of rows that are added to a table of truth and prediction, for the interval of kappa
ADDED_ROWS = 2
MIN_OF_BIN = 10  # smallest number of cases for each bin of the calibration error


def shown_metrics(task: str, num_cases: int) -> tuple[str, ...]:
    """Metrics that are printed for classes or labels, the main metric first; else ()."""
    return shown_of(_SHOWN.get(task, ()), num_cases)


def shown_of(names: Sequence[str], num_cases: int) -> tuple[str, ...]:
    """Metrics for which there are enough cases.

    The calibration error needs MIN_OF_BIN cases for each of its bins. With fewer cases, chance
    decides the gaps.
    """
    enough = num_cases >= MIN_OF_BIN * ECE_BINS
    return tuple(name for name in names if enough or name != "ece")


def kind_of(metric: str) -> Kind:
    """Kind of a metric, which decides how its interval is made; see `intervals.interval`."""
    return _KINDS.get(metric, "share")


def chance_of(metric: str, num_classes: int) -> float | None:
    """Score of a model without any information; None if it depends on the cases."""
    if metric in ("balanced_accuracy", "macro_f1"):
        return 1 / max(2, num_classes)
    return _CHANCE.get(metric)


def pooled_over(metric: str) -> str:
    """Cases or pairs that a metric of several folds is computed from, in words."""
    return _POOLED.get(metric, "all cases")


def weighted_median(values: FloatVector, weights: Weights) -> FloatVector:
    """Medians (B,) of values (N,) that count weights (B, N) times; NaN for weights of 0.

    With integer weights it is the median of the repeated values.
    """
    order = np.argsort(values)
    sums = weights[:, order].cumsum(axis=1)
    half = sums[:, -1:] / 2
    middle = values[order][
        [(sums >= half).argmax(axis=1), (sums > half).argmax(axis=1)]
    ]
    found: FloatVector = middle.mean(axis=0)
    found[half[:, 0] == 0] = np.nan
    return found


def ratio(
    top: npt.ArrayLike, bottom: npt.ArrayLike, *, empty: float = 0.0
) -> FloatVector:
    """top / bottom in float64; `empty` where bottom is not positive."""
    numerator = np.asarray(top, dtype=np.float64)
    denominator = np.asarray(bottom, dtype=np.float64)
    out: FloatVector = np.full(np.broadcast(numerator, denominator).shape, empty)
    np.divide(numerator, denominator, out=out, where=denominator > 0)
    return out


def confusion_matrix(
    truth: IndexArray, prediction: IndexArray, num_classes: int
) -> Counts:
    """(K, K) counts, rows truth, columns prediction.

    Raises InvalidInputError: lengths differ or a label is outside 0..K-1.
    """
    if prediction.shape != truth.shape:
        raise InvalidInputError(
            f"prediction must have the shape of truth {truth.shape}, got {prediction.shape}"
        )
    for name, labels in (("truth", truth), ("prediction", prediction)):
        if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
            raise InvalidInputError(
                f"{name} must be in 0..{num_classes - 1}, got {labels.min()}..{labels.max()}"
            )
    return np.asarray(image_counts(truth[None], prediction[None], num_classes)[0])


def image_counts(
    truth: npt.NDArray[np.integer],
    prediction: npt.NDArray[np.integer],
    num_classes: int,
) -> Counts:
    """Confusion matrices (N, K, K) of images (N, H, W). Memory: 8 N H W bytes."""
    count = len(truth)
    num_cells = num_classes * num_classes
    true_class = truth.reshape(count, -1).astype(np.int64)
    cell = true_class * num_classes + prediction.reshape(count, -1)
    cell += num_cells * np.arange(count)[:, None]
    counts = np.bincount(cell.ravel(), minlength=count * num_cells)
    return counts.reshape(count, num_classes, num_classes)


def _tallies(
    counts: Tallies,
) -> tuple[npt.NDArray[np.number], npt.NDArray[np.number], npt.NDArray[np.number]]:
    """Rows (px) of each class that are right, predicted as it, and truly of it; (..., K) each."""
    return (
        np.diagonal(counts, axis1=-2, axis2=-1),
        counts.sum(axis=-2),
        counts.sum(axis=-1),
    )


def per_class_scores(counts: Tallies) -> dict[str, FloatVector]:
    """Precision, recall and F1 per class, (..., K) each; 0 where a ratio is 0 / 0."""
    hits, predicted, present = _tallies(counts)
    return {
        "precision": ratio(hits, predicted),
        "recall": ratio(hits, present),
        "f1": ratio(2 * hits, predicted + present),
    }


def macro_f1(counts: Tallies) -> FloatVector:
    """Mean F1 over the classes that occur in truth or prediction; (...,) of (..., K, K)."""
    seen = counts.sum(axis=-2) + counts.sum(axis=-1) > 0
    return ratio(per_class_scores(counts)["f1"].sum(axis=-1), seen.sum(axis=-1))


def balanced_accuracy(counts: Tallies) -> FloatVector:
    """Mean recall over the classes that occur in truth; (...,) of (..., K, K)."""
    present = counts.sum(axis=-1) > 0
    return ratio(per_class_scores(counts)["recall"].sum(axis=-1), present.sum(axis=-1))


def weighted_kappa(counts: Tallies) -> FloatVector:
    """Cohen's kappa with quadratic weights, (...,) of (..., K, K); 1 where all is one class."""
    grade = np.arange(counts.shape[-1])
    cost = (grade[:, None] - grade) ** 2.0
    chance = counts.sum(axis=-1)[..., None] * counts.sum(axis=-2)[..., None, :]
    expected = ratio((chance * cost).sum(axis=(-2, -1)), counts.sum(axis=(-2, -1)))
    return 1 - ratio((counts * cost).sum(axis=(-2, -1)), expected)


METRICS: dict[str, Callable[[Tallies], FloatVector]] = {
    "macro_f1": macro_f1,
    "balanced_accuracy": balanced_accuracy,
}


def tied_weights(
    scores: FloatVector, positive: Flags, weights: Weights
) -> list[FloatVector]:
    """Weights (B, ties) of positive and of negative rows at each distinct score, ascending."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores[order]) > 0])
    ordered = weights[:, order].astype(np.float64)
    is_positive = positive[order]
    return [
        np.add.reduceat(ordered * is_positive, starts, axis=1),
        np.add.reduceat(ordered * ~is_positive, starts, axis=1),
    ]


def folds_of(fold: IndexArray | None, num_rows: int) -> list[IndexArray]:
    """Rows of each fold; one fold of all rows where `fold` is None."""
    if fold is None:
        return [np.arange(num_rows)]
    return [np.flatnonzero(fold == f) for f in np.unique(fold)]


def weighted_auroc(
    scores: FloatVector,
    positive: Flags,
    weights: Weights,
    fold: IndexArray | None = None,
) -> FloatVector:
    """Area under the ROC curve under weights (B, N), ties counted half; (B,).

    The share of pairs of a positive and a negative row of the same fold in which the positive one
    has the higher score. Rows of two models are never ranked against each other, and a fold counts
    by its pairs. NaN if there is no pair.

    Memory: about 4 float64 arrays (B, N).
    """
    wins = np.zeros(len(weights))
    pairs = np.zeros(len(weights))
    for rows in folds_of(fold, len(scores)):
        up, down = tied_weights(scores[rows], positive[rows], weights[:, rows])
        below = np.cumsum(down, axis=1) - 0.5 * down
        wins += (up * below).sum(axis=1)
        pairs += up.sum(axis=1) * down.sum(axis=1)
    return ratio(wins, pairs, empty=np.nan)


def average_precision(
    scores: FloatVector,
    positive: Flags,
    weights: Weights,
    fold: IndexArray | None = None,
) -> FloatVector:
    """Mean precision at the positive rows under weights (B, N); (B,).

    All rows are pooled, whatever their fold: a fold has too few positive rows for a precision of
    its own. NaN without a positive row. Memory: as `weighted_auroc`.
    """
    up, down = tied_weights(-scores, positive, weights)
    hits = up.cumsum(axis=1)
    precision = ratio(hits, hits + down.cumsum(axis=1))
    return ratio((up * precision).sum(axis=1), up.sum(axis=1), empty=np.nan)


def macro_area(
    area: Callable[..., FloatVector],
    p: FloatVector,
    truth: IndexArray,
    weights: Weights,
    fold: IndexArray | None = None,
) -> FloatVector:
    """Area of class 1 of two by shares p (N, K), else the one-versus-rest mean; (B,)."""
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    areas = [area(p[:, c], truth == c, weights, fold) for c in classes]
    return np.asarray(np.mean(areas, axis=0))


macro_auroc = partial(macro_area, weighted_auroc)


def pearson(
    x: FloatVector, y: FloatVector, weights: Weights, fold: IndexArray | None = None
) -> FloatVector:
    """Correlation by column of x and y (N, T) under weights, (B, T); NaN if one is constant.

    Covariances are computed within folds and summed. The mean prediction of a model is lowest for
    the fold whose test cases are highest; a correlation over all folds would count that as an
    error.

    Memory: 3 (B, T).
    """
    sums = [np.zeros((len(weights), x.shape[1])) for _ in range(3)]
    for rows in folds_of(fold, len(x)):
        w = weights[:, rows]
        total = w.sum(axis=1, keepdims=True)
        a = x[rows] - x[rows].mean(axis=0)  # nothing cancels near 0
        b = y[rows] - y[rows].mean(axis=0)
        for i, (u, v) in enumerate(((a, b), (a, a), (b, b))):
            # a fold without weight adds nothing
            sums[i] += w @ (u * v) - ratio((w @ u) * (w @ v), total, empty=0.0)
    spread = np.sqrt(np.maximum(sums[1], 0) * np.maximum(sums[2], 0))
    tiny = 1e-12 * np.sqrt((x**2).sum(axis=0) * (y**2).sum(axis=0))
    return ratio(sums[0], np.where(spread > tiny, spread, 0), empty=np.nan)


def spearman(
    x: FloatVector, y: FloatVector, weights: Weights, fold: IndexArray | None = None
) -> FloatVector:
    """Rank correlation by column of (N, T) under weights, ties at their mean rank; (B, T).

    Ranks are those among all rows; their covariances are taken within folds, as by `pearson`.
    Memory: 4 (B, N).
    """
    out = np.empty((len(weights), x.shape[1]))
    for t in range(x.shape[1]):
        a = weighted_ranks(x[:, t], weights)
        b = weighted_ranks(y[:, t], weights)
        sums = np.zeros((3, len(weights)))
        for rows in folds_of(fold, len(x)):
            w = weights[:, rows]
            total = w.sum(axis=1, keepdims=True)
            p = a[:, rows] - ratio((w * a[:, rows]).sum(axis=1, keepdims=True), total)
            q = b[:, rows] - ratio((w * b[:, rows]).sum(axis=1, keepdims=True), total)
            sums += [
                (w * p * q).sum(axis=1),
                (w * p * p).sum(axis=1),
                (w * q * q).sum(axis=1),
            ]
        out[:, t] = ratio(sums[0], np.sqrt(sums[1] * sums[2]), empty=np.nan)
    return out


def r_squared(x: FloatVector, y: FloatVector, weights: Weights) -> FloatVector:
    """1 - squared error over variance, of truth x and predictions y (N, T), all rows pooled."""
    center = weights @ x / weights.sum(axis=1, keepdims=True)
    spread = weights @ x**2 - weights.sum(axis=1, keepdims=True) * center**2
    return 1 - ratio(weights @ (x - y) ** 2, spread, empty=np.nan)


def absolute_error(x: FloatVector, y: FloatVector, weights: Weights) -> FloatVector:
    """Mean absolute error of truth x and predictions y (N, T), all rows pooled; (B, T)."""
    return ratio(weights @ np.abs(x - y), weights.sum(axis=1, keepdims=True))


def weighted_ranks(values: FloatVector, weights: Weights) -> FloatVector:
    """Mean rank (B, N) that each row would have among the rows repeated by their weights."""
    place = np.unique(values, return_inverse=True)[1]
    of_place = np.stack([np.bincount(place, w) for w in weights])
    return (of_place.cumsum(axis=1) - (of_place - 1) / 2)[:, place]


@dataclass(frozen=True, kw_only=True)
class ShareScorer:
    """Mean over classes of a share of rows, or of a score that rises with it; a `Scorer`."""

    mean: Scorer
    shares: Callable[
        [Weights], Weights
    ]  # (B, N) -> (B, K); NaN for a class without rows
    rows: Flags  # (N, K), rows that the share of a class counts
    # True if the share is binomial for independent rows; a precision also depends on other rows
    binomial: bool
    score: Callable[[float], float]  # score of a class from its share
    paired: bool = False  # True if an error counts in two classes

    def __call__(self, weights: Weights) -> FloatVector:
        """Scores (B,) for weights (B, N)."""
        return self.mean(weights)


@dataclass(frozen=True)
class KappaScorer:
    """Quadratically weighted kappa of N rows of K classes; a `Scorer`."""

    cells: "sparse.csr_array"  # (N, K²), the cell of truth and prediction of each row
    num_classes: int
    added: float = 0.0  # number of rows that are added to each cell

    def __call__(self, weights: Weights) -> FloatVector:
        """Scores (B,) for weights (B, N)."""
        return self._of_counts(weights @ self.cells + self.added)

    def smoothed(self) -> "KappaScorer":
        """The same score with ADDED_ROWS more rows, spread over all cells.

        A cell that is empty here could have rows in another sample.

        Source: Gart and Zweifel, Biometrika 54 (1967): half a row in each cell of two classes.
        """
        return replace(self, added=ADDED_ROWS / self.num_classes**2)

    def losses_of_added(self) -> FloatVector:
        """(K²,), loss of the score without the added rows of each cell."""
        counts = np.asarray(self.cells.sum(axis=0)) + self.added
        without = counts - self.added * np.eye(len(counts))
        return self._of_counts(counts[None]) - self._of_counts(without)

    def _of_counts(self, counts: Weights) -> FloatVector:
        return weighted_kappa(
            counts.reshape(len(counts), self.num_classes, self.num_classes)
        )


def _same(share: float) -> float:
    return share


def f1_of_jaccard(jaccard: float) -> float:
    """F1 of a class from its Jaccard index."""
    return 2 * jaccard / (1 + jaccard)


def class_scorers(
    truth: IndexArray,
    prediction: IndexArray,
    num_classes: int,
    p: FloatVector | None = None,
    fold: IndexArray | None = None,
) -> Scorers:
    """Scores of a classification (N,): from the labels, and with the shares `p` (N, K) the rest.

    More than two classes are averaged one against the rest; Brier sums over classes (class 1 alone
    for two); ECE is of the class that is predicted. `fold` (N,) numbers the models that made the
    rows: AUROC ranks within a fold, the others pool all rows. Memory: about 6 arrays of the
    weights' shape.
    """
    from scipy import sparse  # here, as `probe --help` must not wait for it

    count = len(truth)
    places = (np.arange(count), truth * num_classes + prediction)
    cells = sparse.csr_array((np.ones(count), places), shape=(count, num_classes**2))

    def by_counts(score: Scorer, weights: Weights) -> FloatVector:
        counts = (weights @ cells).reshape(len(weights), num_classes, num_classes)
        return score(counts)

    truly = truth[:, None] == np.arange(num_classes)
    scorers: Scorers = {
        "macro_f1": ShareScorer(
            mean=partial(by_counts, macro_f1),
            shares=partial(by_counts, class_jaccard),
            rows=truly | (prediction[:, None] == np.arange(num_classes)),
            binomial=True,
            score=f1_of_jaccard,
            paired=True,
        ),
        "balanced_accuracy": ShareScorer(
            mean=partial(by_counts, balanced_accuracy),
            shares=partial(by_counts, _recall),
            rows=truly,
            binomial=True,
            score=_same,
        ),
        "weighted_kappa": KappaScorer(cells, num_classes),
    }
    if p is not None:
        squared = ((p - np.eye(num_classes)[truth]) ** 2).sum(axis=1)
        if num_classes == 2:
            squared /= 2
        scorers["auroc"] = partial(macro_auroc, p, truth, fold=fold)
        ranked = [1] if num_classes == 2 else [*range(num_classes)]
        scorers["auprc"] = ShareScorer(
            mean=partial(macro_area, average_precision, p, truth),
            shares=partial(_precisions, p[:, ranked], truly[:, ranked]),
            rows=truly[:, ranked],
            binomial=False,
            score=_same,
        )
        scorers["brier"] = partial(_weighted_mean, squared)
        scorers["ece"] = CalibrationError(p, truth)
    return scorers


def class_distance(truth: IndexArray, prediction: IndexArray) -> Scorer:
    """Mean distance of predicted (N,) from true classes (N,), in steps of their order."""
    steps = np.abs(prediction - truth).astype(np.float64)
    return partial(_weighted_mean, steps)


def _recall(counts: Tallies) -> FloatVector:
    """Share of each class's rows that are right, (..., K); NaN of a class without rows."""
    hits, _, present = _tallies(counts)
    return ratio(hits, present, empty=np.nan)


def _precisions(p: FloatVector, positive: Flags, weights: Weights) -> Weights:
    """Average precision (B, K) of classes by shares p (N, K) and flags (N, K)."""
    columns = zip(p.T, positive.T, strict=True)
    return np.stack([average_precision(s, f, weights) for s, f in columns], axis=1)


def _weighted_mean(values: FloatVector, weights: Weights) -> FloatVector:
    """Mean (B,) of values (n,) under weights (B, n)."""
    return ratio(weights @ values, weights.sum(axis=1), empty=np.nan)


def value_scorers(
    truth: FloatVector, prediction: FloatVector, fold: IndexArray | None = None
) -> Scorers:
    """Pearson, Spearman, R² and absolute error of values (N,), or their mean over targets (N, T).

    A target that is constant in a resample does not count there. `fold` (N,) numbers the models:
    correlations are taken within a fold. Memory: 5 arrays of the weights' shape and 6 (B, T).
    """
    x = np.asarray(truth, dtype=np.float64).reshape(len(truth), -1)
    y = np.asarray(prediction, dtype=np.float64).reshape(len(truth), -1)

    def mean_over_targets(
        score: Callable[..., FloatVector], weights: Weights
    ) -> FloatVector:
        return nan_mean(score(x, y, weights).T)

    return {
        "pearson": partial(mean_over_targets, partial(pearson, fold=fold)),
        "spearman": partial(mean_over_targets, partial(spearman, fold=fold)),
        "r2": partial(mean_over_targets, r_squared),
        "mae": partial(mean_over_targets, absolute_error),
    }


def nan_mean(scores: npt.ArrayLike) -> FloatVector:
    """Mean over the first axis (folds, targets) without NaN; NaN if all values are NaN."""
    values = np.asarray(scores, dtype=np.float64)
    num_finite = np.isfinite(values).sum(axis=0)
    return ratio(np.nansum(values, axis=0), num_finite, empty=np.nan)


def fold_mean(scorers: Sequence[Scorer], parts: Sequence[IndexArray]) -> Scorer:
    """Mean over folds of a score of the rows of each: what the suites' protocols print."""

    def score(weights: Weights) -> FloatVector:
        pairs = zip(scorers, parts, strict=True)
        return nan_mean([of_fold(weights[:, rows]) for of_fold, rows in pairs])

    return score


@dataclass(frozen=True)
class RowsScorer:
    """A score of some of the rows: of a label those that have it."""

    scorer: Scorer
    rows: IndexArray

    def __call__(self, weights: Weights) -> FloatVector:
        """(B,) of weights (B, N)."""
        return self.scorer(weights[:, self.rows])

    def spread(self, weights: Weights) -> FloatVector:
        """Spread (B,) of an error that has one (`CalibrationError.spread`)."""
        spread = self.scorer.spread(weights[:, self.rows])  # type: ignore[attr-defined]
        return np.asarray(spread)


@dataclass(frozen=True)
class MeanScorer:
    """The mean of several scores of the same rows; of labels, or of seeds."""

    scorers: Sequence[Scorer]

    def __call__(self, weights: Weights) -> FloatVector:
        """(B,) of weights (B, N)."""
        scores = [score(weights) for score in self.scorers]
        return np.asarray(np.mean(scores, axis=0))

    def spread(self, weights: Weights) -> FloatVector:
        """Mean spread (B,) of errors that have one (`CalibrationError.spread`)."""
        spreads = [score.spread(weights) for score in self.scorers]  # type: ignore[attr-defined]
        return np.asarray(np.mean(spreads, axis=0))


def all_scores(scorers: Scorers, num_rows: int) -> dict[str, float]:
    """Each metric with every row counted once."""
    return {
        name: float(score(np.ones((1, num_rows)))[0]) for name, score in scorers.items()
    }


def class_jaccard(counts: Tallies) -> FloatVector:
    """(..., K): intersection / union of the pixels of a class; NaN for one that is nowhere."""
    hits, predicted, present = _tallies(counts)
    return ratio(hits, predicted + present - hits, empty=np.nan)


def image_jaccard(counts: Counts) -> FloatVector:
    """(N,): the mean of `class_jaccard` over the classes of an image; 0 where there is none."""
    each = class_jaccard(counts)
    return ratio(np.nansum(each, axis=1), np.isfinite(each).sum(axis=1))


def image_weights(counts: Counts, background_weight: float) -> FloatVector:
    """(N,): 1 where the truth is background alone, else max(1, weight * their fraction)."""
    empty = counts.sum(axis=2)[:, 1:].sum(axis=1) == 0
    return np.where(empty, 1.0, max(1.0, background_weight * float(empty.mean())))


def weighted_jaccard(counts: Counts, background_weight: float) -> float:
    """The score: the weighted mean of the images' Jaccard."""
    weights = image_weights(counts, background_weight)
    return float(np.average(image_jaccard(counts), weights=weights))


def background_score(counts: Counts, background_weight: float) -> float:
    """Score of predicting background everywhere, on the same truth."""
    empty = np.zeros_like(counts)
    empty[:, :, 0] = counts.sum(axis=2)
    return weighted_jaccard(empty, background_weight)
