"""Differences between models, and differences from chance.

Models are compared by paired tests on the same cases, with corrections and ranks. Linear heads on
mean embeddings tell which score permuted labels reach, and whether a site can be predicted. Labels
are exchanged between patients with equally many cases. The folds are those of the true labels, and
p is the share of permutations that score at least as high.

Shapes: n cases, M models, D channels, K classes, P permutations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thinsection.errors import InvalidInputError
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.intervals import LEVEL, TAIL, Interval, Sampling, interval
from thinsection.evaluation.metrics import (
    Flags,
    FloatVector,
    Fold,
    IndexArray,
    Scorer,
    balanced_accuracy,
    class_scorers,
    image_counts,
    macro_auroc,
    pearson,
    ratio,
)
from thinsection.evaluation.splits import grouped_folds
from thinsection.types import Floats

POWER = 0.8  # power of `Difference.detectable`
MIN_GROUPS = 3  # smallest number of groups for a test
PERMUTATIONS = 199
SITE_PERMUTATIONS = 99  # each fits a logistic regression in every fold
SITE_FOLDS = 5
MIN_OF_SITE = 10  # smallest number of cases of a site for the probe of sites
SITE_COMPONENTS = 32  # number of principal components for the probe of sites
RIDGE = 1.0  # penalty, for channels with the variance 1 / D


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Score of one model minus that of another on the same rows."""

    value: float
    low: float  # lower end of the interval
    high: float  # upper end
    p_value: float  # two-sided, for no difference; not corrected for several tests
    standard_error: float
    level: float  # nominal coverage of the interval
    groups: int  # number of independent units

    @property
    def detectable(self) -> float:
        """Smallest true difference that a test of this level would find with the power POWER."""
        from scipy.special import ndtri

        return float(ndtri([1 - TAIL, POWER]).sum() * self.standard_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jackknifed:
    """Scores of M models on rows of the same units, and the influence of each unit on them."""

    observed: FloatVector  # (M,)
    influences: Floats  # (C, M), see `Sampling.influences`
    samplings: Sequence[Sampling]  # (M,)
    chance: float | None  # score of a model without any information; None if unknown

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


def why_no_test(sampling: Sampling) -> str:
    """Sentence on what a significance test lacks; '' where there can be one."""
    if sampling.units < MIN_GROUPS:
        return (
            f"number of groups must be >= {MIN_GROUPS} for a significance test, got "
            f"{sampling.units}"
        )
    if sampling.fewest < 2:
        return (
            f"each class must have >= 2 groups for a significance test, got {sampling.fewest} "
            "of the rarest class"
        )
    return ""


def jackknife(
    scorers: Sequence[Scorer],
    samplings: Sampling | Sequence[Sampling],
    *,
    chance: float | None = None,
) -> Jackknifed:
    """The score of each model on its rows, and the influence of each unit on it.

    The difference of two AUROCs has DeLong's variance, or Obuchowski's if units have several rows.

    Args:
        scorers: one scorer per model.
        samplings: sampling of the rows of each model, or of rows that all models share. The rows
            may differ, as with another number of repeats; their units and strata must be the same.
        chance: see `Sampling.fold_inflation`; the distance is that of the model nearer to chance.

    Memory: as `Sampling.influences`.

    Raises InvalidInputError: fewer than MIN_GROUPS units, or fewer than 2 units of a class;
    different units; a score without a value if one unit is left out.

    Source: DeLong et al., Biometrics 44 (1988); Obuchowski, Biometrics 53 (1997); Arvesen, Annals
    of Mathematical Statistics 40 (1969).
    """
    if isinstance(samplings, Sampling):
        samplings = [samplings] * len(scorers)
    first = samplings[0]
    reason = why_no_test(first)
    if reason:
        raise InvalidInputError(reason)
    for other in samplings[1:]:
        if not np.array_equal(other.cells[0], first.cells[0]):
            raise InvalidInputError(
                "models must be scored on the same groups and classes, got "
                f"{first.units} and {other.units} groups"
            )
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


def _tested(value: float, error: float, *, degrees: float, groups: int) -> Difference:
    """The difference with its interval and p value by Student's t."""
    from scipy.special import stdtr, stdtrit

    half = float(stdtrit(degrees, 1 - TAIL)) * error
    if value == 0:
        p_value = 1.0  # equal predictions have no spread and do not differ
    elif error:
        p_value = float(2 * stdtr(degrees, -abs(value) / error))
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
    """For each row, the row whose label it gets in a permutation of units, (N,).

    Units exchange their labels. None if a unit has several different labels.

    Args:
        labels: (N,) or (N, T).
        codes: unit of each row, (N,).
        rng: decides the permutation.
    """
    _, first, unit = np.unique(codes, return_index=True, return_inverse=True)
    if not (labels[first][unit] == labels).all():
        return None
    return first[rng.permutation(len(first))][unit]


def permutation_p(score: float, null_scores: npt.ArrayLike) -> float:
    """p value: share of permutations that score at least as high; the true order counts as one.

    Source: Phipson and Smyth, Statist. Appl. Genet. Mol. Biol. 9 (2010).
    """
    null = np.asarray(null_scores, dtype=np.float64)
    as_high = int((null >= score - 1e-12).sum())
    return (1 + as_high) / (1 + len(null))


def holm(p_values: npt.ArrayLike) -> FloatVector:
    """p values (m,) corrected for the number of tests, so that the family-wise error rate holds.

    Source: Holm, Scand. J. Statist. 6 (1979).
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    return np.minimum(steps, 1)[np.argsort(order, kind="stable")]


def tied_ranks(better: Flags) -> IndexArray:
    """Rank (M,) from 1: one more than the number of significantly better models.

    `better[a, b]` is True if model a is significantly better than model b.
    """
    return np.asarray(1 + better.sum(axis=0))


def mean_ranks(scores: FloatVector, *, lower: Sequence[bool]) -> FloatVector:
    """Mean over tasks of the rank of scores (tasks, M), best 1, ties at their mean rank; (M,).

    `lower` is True for tasks in which the lower score is better. A missing score (NaN) has no rank.
    """
    from scipy.stats import rankdata

    sign = np.where(np.array(lower), 1.0, -1.0)[:, None]
    ranks = np.array([rankdata(row, nan_policy="omit") for row in sign * scores])
    return ratio(np.nansum(ranks, axis=0), np.isfinite(ranks).sum(axis=0), empty=np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permuted:
    """Score of the true labels beside the scores of permuted labels."""

    metric: str
    value: float  # score of the true labels
    mean: float  # mean score of the permutations
    low: float  # 2.5th and 97.5th percentile of the permutations
    high: float
    p_value: float  # (1 + permutations that score as high) / (1 + permutations)
    permutations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteProbe:
    """Score of a linear head that predicts the site of cases outside its training set."""

    sites: int
    cases: int
    left_out: int  # number of cases of sites with too few cases
    permuted: Permuted
    interval: Interval


def permute_patients(
    patients: IndexArray, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """(n,), row whose label each row gets; patients with equally many rows exchange labels."""
    source_rows = np.arange(len(patients))
    rows_by_patient = [np.flatnonzero(patients == p) for p in np.unique(patients)]
    sizes = np.array([len(rows) for rows in rows_by_patient])
    for size in np.unique(sizes):
        alike = np.flatnonzero(sizes == size)
        for target, source in zip(alike, rng.permutation(alike), strict=True):
            source_rows[rows_by_patient[target]] = rows_by_patient[source]
    return source_rows


def permuted_labels(
    means: Floats,
    values: FloatVector,
    num_classes: int,
    folds: Sequence[Fold],
    patients: IndexArray,
    *,
    seed: int,
    permutations: int = PERMUTATIONS,
) -> Permuted | None:
    """Score of a linear head with the true labels (n,) and with permuted labels.

    The head is a ridge regression on mean embeddings (n, D), standardised on training cases.
    Classes (K >= 2) are scored by AUROC, values (`num_classes` 0) by Pearson's correlation. Both
    are computed within folds, as by `train`. None if the true labels or all permutations have no
    score, because no fold has two classes.

    Memory: 3 n D + 6 n K P + 2 min(n, D)² floats, and 3 D K P if D < n.
    """
    rng = np.random.default_rng(seed)
    orders = [permute_patients(patients, rng) for _ in range(permutations)]
    sources = np.stack([np.arange(len(values)), *orders])
    labels = values[sources]  # (1 + P, n)
    columns = num_classes or 1
    targets = labels[..., None]
    if num_classes:
        targets = (labels[..., None] == np.arange(num_classes)).astype(np.float64)
    flat = targets.transpose(1, 0, 2).reshape(len(values), -1)  # (n, (1 + P) K)
    predictions = [_ridge(means, flat, train, test) for train, test in folds]
    predicted = np.concatenate(predictions).reshape(-1, len(sources), columns)
    tested = np.concatenate([test for _, test in folds])
    sizes = [len(test) for _, test in folds]
    fold_of_row = np.repeat(np.arange(len(folds)), sizes)
    ones = np.ones((1, len(tested)))
    scores = []
    for number in range(len(sources)):
        truth = labels[number, tested]
        prediction = predicted[:, number]
        if num_classes:
            classes = truth.astype(np.int64)
            score = macro_auroc(prediction, classes, ones, fold_of_row)[0]
        else:
            score = pearson(truth[:, None], prediction, ones, fold_of_row)[0, 0]
        scores.append(float(score))
    if not np.isfinite(scores[0]) or not np.isfinite(scores[1:]).any():
        return None
    return _permuted("auroc" if num_classes else "pearson", scores)


def _ridge(
    means: Floats,
    targets: Floats,
    train: IndexArray,
    test: IndexArray,
) -> Floats:
    """Predictions (test, columns) by a ridge regression in its smaller form, primal or dual."""
    center = means[train].mean(axis=0)
    spread = means[train].std(axis=0)
    spread[spread == 0] = 1.0
    scale = spread * means.shape[1] ** 0.5
    x = (means[train] - center) / scale
    middle = targets[train].mean(axis=0)
    y = targets[train] - middle
    x_test = (means[test] - center) / scale
    if len(x) > x.shape[1]:
        weight = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ y)
        return np.asarray(x_test @ weight + middle)
    dual = np.linalg.solve(x @ x.T + RIDGE * np.eye(len(x)), y)
    # in this order there is no matrix of channels by columns
    return np.asarray((x_test @ x.T) @ dual + middle)


def _permuted(metric: str, scores: Sequence[float]) -> Permuted:
    """Summary of `scores`: first that of the true labels, then those of the permutations."""
    null = np.array(scores[1:])
    null = null[np.isfinite(null)]
    low, high = np.quantile(null, (0.025, 0.975))
    return Permuted(
        metric=metric,
        value=scores[0],
        mean=float(null.mean()),
        low=float(low),
        high=float(high),
        p_value=permutation_p(scores[0], null),
        permutations=len(null),
    )


def site_probe(
    means: Floats,
    sites: Sequence[str],
    groups: Groups,
    *,
    seed: int,
    permutations: int = SITE_PERMUTATIONS,
) -> SiteProbe | None:
    """Cross-validated score of a logistic regression that predicts the site of a case.

    Its inputs are mean embeddings (n, D), reduced to at most SITE_COMPONENTS principal components,
    which do not depend on the sites. The score is the balanced accuracy. Sites with fewer than
    MIN_OF_SITE cases are left out; None if fewer than two sites remain.

    Memory: n D floats.
    """
    names, codes, counts = np.unique(sites, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(counts[codes] >= MIN_OF_SITE)
    large_sites = np.unique(codes[rows])
    num_sites = len(large_sites)
    if num_sites < 2:
        return None
    labels = np.searchsorted(large_sites, codes[rows])
    patients = np.unique(groups.codes[rows], return_inverse=True)[1]
    centred = means[rows] - means[rows].mean(axis=0)
    u, size, _ = np.linalg.svd(centred, full_matrices=False)
    x = (u * size)[:, :SITE_COMPONENTS]
    x /= float(x.std()) or 1.0  # unit mean variance
    rng = np.random.default_rng(seed)
    predicted, fold = _site_predictions(x, labels, patients, seed)
    scores = [_balanced(labels, predicted, num_sites)]
    for _ in range(permutations):
        permuted = labels[permute_patients(patients, rng)]
        predicted_by_chance, _ = _site_predictions(x, permuted, patients, seed)
        scores.append(_balanced(permuted, predicted_by_chance, num_sites))
    sampling = Sampling.of_rows(
        groups.take(rows),
        classes=labels,
        fold=fold,
    )
    scorer = class_scorers(labels, predicted, num_sites)["balanced_accuracy"]
    return SiteProbe(
        sites=num_sites,
        cases=len(rows),
        left_out=len(names[codes]) - len(rows),
        permuted=_permuted("balanced_accuracy", scores),
        interval=interval(sampling, scorer, "balanced_accuracy", seed=seed),
    )


def _site_predictions(
    x: Floats, labels: IndexArray, patients: IndexArray, seed: int
) -> tuple[IndexArray, IndexArray]:
    """Predicted site of each case, by the model of the fold that tests it; and the fold."""
    from sklearn.linear_model import LogisticRegression

    predicted = np.zeros(len(labels), dtype=np.int64)
    fold = np.zeros(len(labels), dtype=np.int64)
    names = [str(patient) for patient in patients]
    folds = grouped_folds(labels, names, folds=SITE_FOLDS, seed=seed)
    for number, (train, test) in enumerate(folds):
        model = LogisticRegression(class_weight="balanced", max_iter=300, tol=1e-3)
        predicted[test] = model.fit(x[train], labels[train]).predict(x[test])
        fold[test] = number
    return predicted, fold


def _balanced(truth: IndexArray, predicted: IndexArray, num_classes: int) -> float:
    counts = image_counts(truth[None], predicted[None], num_classes)[0]
    return float(balanced_accuracy(counts))
