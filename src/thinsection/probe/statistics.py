"""Every metric, of confusion matrices or of rows under weights; and folds as the suites draw them.

A `Scorer` maps row weights (B, N), how often each of B resamples drew a row, to the scores (B,) of
the rows repeated so often: one set of draws serves every metric and every model of the same rows.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError, require
from thinsection.probe.groups import Groups

Counts = npt.NDArray[np.int64]  # (..., K, K): rows truth, columns prediction
FloatVector = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Fold = tuple[IndexArray, IndexArray]  # indices of the training and of the validation rows
Scorer = Callable[[npt.NDArray], FloatVector]  # of B confusion matrices or sets of weights, (B,)
Scorers = dict[str, Scorer]

ECE_BINS = 15  # of equal width; Guo et al. 2017
LOWER_IS_BETTER = frozenset({"brier", "ece"})


def ratio(top: npt.ArrayLike, bottom: npt.ArrayLike, *, empty: float = 0.0) -> FloatVector:
    """top / bottom in float64; `empty` where bottom is not positive."""
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    out: FloatVector = np.full(np.broadcast(top, bottom).shape, empty)
    np.divide(top, bottom, out=out, where=bottom > 0)
    return out


def confusion_matrix(truth: IndexArray, prediction: IndexArray, num_classes: int) -> Counts:
    """(K, K) counts, rows truth, columns prediction.

    Raises InvalidInputError: lengths differ or a label is outside 0..K-1.
    """
    rule = f"prediction must have the shape of truth {truth.shape}"
    require(prediction.shape == truth.shape, rule, prediction.shape)
    for name, labels in (("truth", truth), ("prediction", prediction)):
        if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
            found = f"{labels.min()}..{labels.max()}"
            raise InvalidInputError(f"{name} must lie in 0..{num_classes - 1}, got {found}")
    return np.asarray(image_counts(truth[None], prediction[None], num_classes)[0])


def image_counts(truth: npt.NDArray, prediction: npt.NDArray, num_classes: int) -> Counts:
    """Confusion matrices (N, K, K) of images (N, H, W). Memory: 8 N H W bytes."""
    n, cells = len(truth), num_classes * num_classes
    pair = truth.reshape(n, -1).astype(np.int64) * num_classes + prediction.reshape(n, -1)
    pair += cells * np.arange(n)[:, None]
    return np.bincount(pair.ravel(), minlength=n * cells).reshape(n, num_classes, num_classes)


def _tallies(counts: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray]:
    """Rows (px) of each class that are right, predicted as it, and truly of it; (..., K) each."""
    return np.diagonal(counts, axis1=-2, axis2=-1), counts.sum(axis=-2), counts.sum(axis=-1)


def per_class_scores(counts: npt.NDArray) -> dict[str, FloatVector]:
    """Precision, recall and F1 per class, (..., K) each; 0 where a ratio is 0 / 0."""
    hits, predicted, present = _tallies(counts)
    f1 = ratio(2 * hits, predicted + present)
    return {"precision": ratio(hits, predicted), "recall": ratio(hits, present), "f1": f1}


def macro_f1(counts: npt.NDArray) -> FloatVector:
    """Mean F1 over the classes that occur in truth or prediction; (...,) of (..., K, K)."""
    seen = counts.sum(axis=-2) + counts.sum(axis=-1) > 0
    return ratio(per_class_scores(counts)["f1"].sum(axis=-1), seen.sum(axis=-1))


def balanced_accuracy(counts: npt.NDArray) -> FloatVector:
    """Mean recall over the classes that occur in truth; (...,) of (..., K, K)."""
    present = counts.sum(axis=-1) > 0
    return ratio(per_class_scores(counts)["recall"].sum(axis=-1), present.sum(axis=-1))


def weighted_kappa(counts: npt.NDArray) -> FloatVector:
    """Cohen's kappa with quadratic weights, (...,) of (..., K, K); 1 where all is one class."""
    grade, both = np.arange(counts.shape[-1]), (-2, -1)
    cost = (grade[:, None] - grade) ** 2.0
    chance = counts.sum(axis=-1)[..., None] * counts.sum(axis=-2)[..., None, :]
    expected = ratio((chance * cost).sum(axis=both), counts.sum(axis=both))
    return 1 - ratio((counts * cost).sum(axis=both), expected)


METRICS: Scorers = {"macro_f1": macro_f1, "balanced_accuracy": balanced_accuracy}


def tied_weights(scores: FloatVector, positive: Flags, weights: npt.NDArray) -> list[npt.NDArray]:
    """Weights (B, ties) of positive and of negative rows at each distinct score, ascending."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores[order]) > 0])
    ordered = weights[:, order].astype(np.float64)
    ends = (ordered * of[order] for of in (positive, ~positive))
    return [np.add.reduceat(of, starts, axis=1) for of in ends]


def weighted_auroc(scores: FloatVector, positive: Flags, weights: npt.NDArray) -> FloatVector:
    """Area under the ROC curve under weights (B, N), ties counted half; (B,).

    NaN where no positive or no negative row is left. Memory: about 4 float64 arrays (B, N).
    """
    up, down = tied_weights(scores, positive, weights)
    wins = (up * (np.cumsum(down, axis=1) - down + 0.5 * down)).sum(axis=1)
    return ratio(wins, up.sum(axis=1) * down.sum(axis=1), empty=np.nan)


def average_precision(scores: FloatVector, positive: Flags, weights: npt.NDArray) -> FloatVector:
    """As `weighted_auroc`: the mean precision at the positive rows."""
    up, down = tied_weights(-scores, positive, weights)
    hits = up.cumsum(axis=1)
    precision = ratio(hits, hits + down.cumsum(axis=1))
    return ratio((up * precision).sum(axis=1), up.sum(axis=1), empty=np.nan)


def macro_area(
    area: Callable[..., FloatVector], p: FloatVector, truth: IndexArray, weights: npt.NDArray
) -> FloatVector:
    """Of shares p (N, K) an area for class 1 of two, else the one-versus-rest mean; (B,)."""
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    of_class = [area(p[:, c], truth == c, weights) for c in classes]
    return np.mean(of_class, axis=0)  # type: ignore[no-any-return]


macro_auroc = partial(macro_area, weighted_auroc)


def concordance(event: Flags, time: FloatVector, risk: FloatVector) -> Scorer:
    """Harrell's c-index of cases under weights (B, n): a pair weighs as its cases were drawn.

    A pair (i, j) counts where i had the event and time_i < time_j, or the times are equal and j was
    censored; it is concordant by 1 where risk_i > risk_j and by 0.5 where they are equal.

    Memory: 16 n². Raises InvalidInputError: no pair is comparable.
    """
    earlier = time[:, None] < time
    tied = (time[:, None] == time) & ~event
    comparable = (event[:, None] & (earlier | tied)).astype(np.float64)
    found = "none; it needs an event before another case's time"
    require(comparable.any(), "a fold must have comparable pairs", found)
    concordant = comparable * (np.sign(risk[:, None] - risk) / 2 + 0.5)

    def weighted(weights: npt.NDArray) -> FloatVector:
        w = weights.astype(np.float64)
        top, bottom = ((w @ m * w).sum(axis=1) for m in (concordant, comparable))
        return ratio(top, bottom, empty=np.nan)

    return weighted


def calibration_bins(
    p: FloatVector, truth: IndexArray, weights: npt.NDArray
) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray]:
    """(rows, confidence x rows, right rows) by bin of the predicted class's share; (B, ECE_BINS).

    Source: Guo et al., On calibration of modern neural networks, ICML 2017.
    """
    guess, sure, last = p.argmax(axis=1), p.max(axis=1), ECE_BINS - 1
    of_bin = np.eye(ECE_BINS)[np.clip(np.ceil(sure * ECE_BINS).astype(np.int64) - 1, 0, last)]
    right = (guess == truth).astype(np.float64)
    return weights @ of_bin, weights @ (of_bin * sure[:, None]), weights @ (of_bin * right[:, None])


def calibration_error(p: FloatVector, truth: IndexArray, weights: npt.NDArray) -> FloatVector:
    """Expected calibration error of the predicted class, (B,)."""
    rows, sure, right = calibration_bins(p, truth, weights)
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
    middle, out = (weights.sum(axis=1)[:, None] + 1) / 2, np.empty((len(weights), x.shape[1]))
    for t in range(x.shape[1]):
        a, b = (_ranks(v[:, t], weights) - middle for v in (x, y))
        top, *spreads = ((weights * p * q).sum(axis=1) for p, q in ((a, b), (a, a), (b, b)))
        out[:, t] = ratio(top, np.sqrt(spreads[0] * spreads[1]), empty=np.nan)
    return out


def _ranks(values: FloatVector, weights: npt.NDArray) -> FloatVector:
    """Mean rank (B, N) that each row would have among the rows repeated by their weights."""
    place = np.unique(values, return_inverse=True)[1]
    of_place = np.stack([np.bincount(place, w) for w in weights])
    return np.asarray((of_place.cumsum(axis=1) - (of_place - 1) / 2)[:, place])


def class_scorers(
    truth: IndexArray, prediction: IndexArray, num_classes: int, p: FloatVector | None = None
) -> Scorers:
    """Of a classification (N,): from the labels, and with the shares `p` (N, K) the rest.

    More than two classes are averaged one against the rest; Brier sums over classes (class 1 alone
    for two); ECE is of the class that is predicted. A resample without a class gives NaN where a
    metric has no value then. Memory: about 6 arrays of the weights' shape.
    """
    from scipy import sparse  # here, as `probe --help` must not wait for it

    n, k = len(truth), num_classes
    cells = sparse.csr_array((np.ones(n), (np.arange(n), truth * k + prediction)), shape=(n, k**2))

    def of_counts(score: Scorer, weights: npt.NDArray) -> FloatVector:
        return score((weights @ cells).reshape(len(weights), k, k))

    by_label = {**METRICS, "weighted_kappa": weighted_kappa}
    scorers: Scorers = {name: partial(of_counts, score) for name, score in by_label.items()}
    if p is None:
        return scorers
    off = ((p - np.eye(k)[truth]) ** 2).sum(axis=1) / (1 + (k == 2))
    return scorers | {
        "auroc": partial(macro_auroc, p, truth),
        "auprc": partial(macro_area, average_precision, p, truth),
        "brier": lambda weights: ratio(weights @ off, weights.sum(axis=1), empty=np.nan),
        "ece": partial(calibration_error, p, truth),
    }


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


def over_folds(fold: IndexArray | None, n: int, make: Callable[[IndexArray], Scorers]) -> Scorers:
    """The mean over folds of what `make` gives for the rows of each; `fold` (N,) numbers them.

    Rows of two models are so never ranked against each other; None: one model made all rows. A fold
    counts as often as its rows were drawn, also where its only patient was drawn twice or never.
    """
    if fold is None:
        return make(np.arange(n))
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
    return {name: float(score(np.ones((1, num_rows)))[0]) for name, score in scorers.items()}


def class_jaccard(counts: Counts) -> FloatVector:
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
    """What predicting background everywhere scores on the same truth."""
    empty = np.zeros_like(counts)
    empty[:, :, 0] = counts.sum(axis=2)
    return weighted_jaccard(empty, background_weight)


def stratified_folds(
    labels: npt.ArrayLike, *, folds: int = 3, seed: int = 1337, class_names: Sequence[str] = ()
) -> list[Fold]:
    """Stratified, shuffled folds: StratifiedKFold(folds, shuffle, random_state=seed).

    Raises InvalidInputError: a class has fewer rows than folds; by its name, where these are given.
    """
    from sklearn.model_selection import StratifiedKFold

    labels = np.asarray(labels)
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes):
        least, smallest = counts.min(), classes[counts.argmin()]
        found = f"{least} of class {str(class_names[smallest] if class_names else smallest)!r}"
        require(least >= folds, f"each class must have >= {folds} rows for {folds} folds", found)
    splitter = StratifiedKFold(n_splits=folds, shuffle=True, random_state=seed)
    return list(splitter.split(np.zeros(len(labels)), labels))


def grouped_folds(
    labels: npt.ArrayLike, groups: Sequence[str], *, folds: int = 3, seed: int = 1337
) -> list[Fold]:
    """Folds that keep a group (patient, slide) whole, stratified as well as that allows.

    Raises InvalidInputError: fewer groups than folds, or lengths differ.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    labels, n = np.asarray(labels), len(set(groups))
    found = f"{len(groups)} for {len(labels)} rows"
    require(len(groups) == len(labels), "groups must have one entry a row", found)
    require(n >= folds, f"groups must be at least {folds} for {folds} folds", n)
    splitter = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    return list(splitter.split(np.zeros(len(labels)), labels, groups=np.asarray(groups)))


def drawn_folds(
    labels: IndexArray, groups: Groups | None, *, class_names: Sequence[str] = (), **known: int
) -> tuple[list[Fold], str]:
    """Folds over groups, where there are enough, else over rows; and over what."""
    if groups is not None and len({*groups.of_row}) >= known["folds"]:
        return grouped_folds(labels, groups.of_row, **known), f"over {groups.unit}"
    return stratified_folds(labels, **known, class_names=class_names), ""


def shuffled_folds(n: int, *, folds: int = 3, seed: int = 1337) -> list[Fold]:
    """arange(n) shuffled by default_rng(seed), cut by array_split; each part validates once.

    Raises InvalidInputError: n < folds.
    """
    require(n >= folds, f"n must be >= {folds} for {folds} folds", n)
    order = np.arange(n)
    np.random.default_rng(seed).shuffle(order)
    parts = np.array_split(order, folds)
    return [(np.concatenate([*parts[:i], *parts[i + 1 :]]), part) for i, part in enumerate(parts)]


def draw_rows(labels: IndexArray, most: int, *, seed: int) -> IndexArray:
    """Sorted indices of at most `most` rows of each class."""
    rng = np.random.default_rng(seed)
    of_class = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    kept = [rng.choice(r, most, replace=False) if len(r) > most else r for r in of_class]
    return np.sort(np.concatenate(kept))
