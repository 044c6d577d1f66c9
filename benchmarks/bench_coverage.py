"""Does a 95 % confidence interval hold the true score, and does a test find only what is there?

Cohorts are drawn from populations that are known. `test`: one fixed score on n cases
(`predict --labels`, `probe`). `train`: cross-validation, where each fold has a linear head of its
own in closed form, fitted to the other folds; patients are kept whole. `sites`: the same, each fold
one site with a shift of its own, which is the same in all cohorts: the interval is about other
patients of these sites. Cases are of one patient each, or of patients with 1 to 5 cases. Each cell
has the share of cohorts whose interval holds the truth with its exact binomial interval, the median
width, and beside both a published method on the same cohorts. Equal models are compared the same
way: the share that is called different is the type I error. `bench_p_values` has the other
p values.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest, norm

from benchmarks.harness import arguments, finish
from thinsection.evaluation import comparison
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.external import calibration_line
from thinsection.evaluation.intervals import Sampling, interval
from thinsection.evaluation.metrics import (
    Scorers,
    chance_of,
    class_scorers,
    value_scorers,
)
from thinsection.evaluation.survival import concordance

DIM = 6
FOLDS = 5
SIZES = (20, 60, 200)  # cases
MOST_CASES = (1, 5)  # of a patient
OWN = 0.6  # share of a patient in the variance of its cases
POPULATION = 6000
PAIRED = 1500  # of them, where pairs are compared
TRUTHS = 30  # cohorts whose heads score everybody
PENALTY = 1.0
BOOTSTRAP = 100  # resamples of the published bootstrap
SHIFT = 0.5  # standard deviation of the shifts of sites
CENSORED = 0.7
SHOWN = (
    "auroc",
    "auprc",
    "balanced_accuracy",
    "macro_f1",
    "weighted_kappa",
    "brier",
)
Array = np.ndarray


class Kind(NamedTuple):
    """Population: classes with a share of positive cases, values, or times."""

    name: str
    share: float  # of positive cases
    signal: float  # distance of the classes' means, or weight of the first channel


KINDS = (
    Kind("classes", 0.5, 0.0),
    Kind("classes", 0.5, 1.0),
    Kind("classes", 0.5, 2.2),
    Kind("classes", 0.1, 1.0),
    Kind("classes", 0.1, 2.2),
    Kind("values", 0.5, 0.0),
    Kind("values", 0.5, 1.0),
    Kind("times", 0.5, 0.0),
    Kind("times", 0.5, 1.0),
)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """n cases of patients."""

    x: Array  # (n, DIM)
    truth: Array  # (n,) classes or values; (n, 2) event and time
    patient: Array  # (n,)


def draw(kind: Kind, rng: np.random.Generator, n: int, most: int) -> Drawn:
    """Draws n cases, 1 to `most` a patient; a patient has one class."""
    sizes = rng.integers(1, most + 1, n)
    patient = np.repeat(np.arange(n), sizes)[:n]
    patients = int(patient[-1]) + 1
    own = rng.normal(size=(patients, DIM))[patient]
    x = own * OWN**0.5 + rng.normal(size=(n, DIM)) * (1 - OWN) ** 0.5
    if kind.name == "classes":
        truth = (rng.random(patients) < kind.share).astype(int)[patient]
        x[:, 0] += kind.signal * truth
    elif kind.name == "values":
        shared = rng.normal(size=patients)[patient]
        noise = shared * OWN**0.5 + rng.normal(size=n) * (1 - OWN) ** 0.5
        truth = kind.signal * x[:, 0] + noise
    else:
        hazard = np.exp(kind.signal * own[:, 0])
        death = rng.exponential(size=patients)[patient] / hazard
        odds = CENSORED / (1 - CENSORED)
        limit = rng.exponential(size=patients)[patient] / hazard / odds
        # ties: times are whole months
        time = np.ceil(24 * np.minimum(death, limit))
        truth = np.stack([death <= limit, time], axis=1)
    return Drawn(x=x, truth=truth, patient=patient)


def fit(kind: Kind, x: Array, truth: Array) -> tuple[Array, float]:
    """Weights and offset of a linear head: discriminant analysis, or ridge regression."""
    if kind.name == "classes":
        means = [x[truth == label].mean(axis=0) for label in (0, 1)]
        residual = x - np.where(truth[:, None] == 1, means[1], means[0])
        spread = (residual.T @ residual + PENALTY * np.eye(DIM)) / len(x)
        weights = np.linalg.solve(spread, means[1] - means[0])
        prior = truth.mean()
        offset = np.log(prior / (1 - prior)) - weights @ (means[0] + means[1]) / 2
        return weights, float(offset)
    y = truth
    if kind.name == "times":
        # martingale-like: events early in the order of time
        order = np.argsort(np.argsort(truth[:, 1])) / len(truth)
        y = truth[:, 0] - order
    center = x - x.mean(axis=0)
    gram = center.T @ center + PENALTY * np.eye(DIM)
    weights = np.linalg.solve(gram, center.T @ (y - y.mean()))
    return weights, float(y.mean() - x.mean(axis=0) @ weights)


def fixed_head(kind: Kind) -> tuple[Array, float]:
    """Head that no case of the cohorts has trained; without signal it guesses."""
    weights = np.zeros(DIM)
    weights[0] = kind.signal or 1.0
    weights[1] = 0.3
    offset = 0.0
    if kind.name == "classes":
        prior = np.log(kind.share / (1 - kind.share))
        offset = prior - kind.signal**2 / 2
    return weights, float(offset)


def scorers_of(kind: Kind, truth: Array, answer: Array, fold: Array | None) -> Scorers:
    """Metrics that `train` prints for the kind of target."""
    if kind.name == "values":
        return value_scorers(truth, answer, fold)
    if kind.name == "times":
        event, time = truth[:, 0] == 1, truth[:, 1]
        return {"c_index": concordance(event, time, answer, fold)}
    share = 1 / (1 + np.exp(-np.clip(answer, -30, 30)))
    both = np.stack([1 - share, share], axis=1)
    scorers = class_scorers(truth, (share > 0.5).astype(int), 2, both, fold)
    return {name: scorers[name] for name in SHOWN}


def groups_of(drawn: Drawn) -> Groups:
    """The patients of cases."""
    return Groups("patients", tuple(f"{p:06d}" for p in drawn.patient))


def sampling_of(kind: Kind, drawn: Drawn, fold: Array | None) -> Sampling:
    """Patients, with classes or events."""
    return Sampling.of_rows(
        groups_of(drawn),
        classes=drawn.truth if kind.name == "classes" else None,
        events=drawn.truth[:, 0] if kind.name == "times" else None,
        fold=fold,
    )


def folds_of_patients(kind: Kind, rng: np.random.Generator, drawn: Drawn) -> Array:
    """Fold of each case, patients whole, stratified by class or event."""
    first = np.unique(drawn.patient, return_index=True)[1]
    strata = np.zeros(len(first), int)
    if kind.name != "values":
        labels = drawn.truth if kind.name == "classes" else drawn.truth[:, 0]
        strata = labels[first].astype(int)
    fold = np.empty(len(first), int)
    start = 0
    for label in np.unique(strata):
        rows = rng.permutation(np.flatnonzero(strata == label))
        fold[rows] = (np.arange(len(rows)) + start) % FOLDS
        start += len(rows)
    return fold[drawn.patient]


class Scored(NamedTuple):
    """A cohort with the answers of its heads."""

    drawn: Drawn
    answer: Array
    fold: Array | None
    heads: list[tuple[Array, float]]


def shifts_of(mode: str) -> Array:
    """Shift (FOLDS, DIM) of the embeddings of each fold: its site's, the same in all cohorts."""
    if mode != "sites":
        return np.zeros((FOLDS, DIM))
    return SHIFT * np.random.default_rng(77).normal(size=(FOLDS, DIM))


def cohort(
    kind: Kind, rng: np.random.Generator, n: int, most: int, mode: str
) -> Scored | None:
    """A scored cohort; None where a fold has a class alone."""
    drawn = draw(kind, rng, n, most)
    if mode == "test":
        weights, offset = fixed_head(kind)
        return Scored(drawn, drawn.x @ weights + offset, None, [(weights, offset)])
    fold = folds_of_patients(kind, rng, drawn)
    drawn.x[:] += shifts_of(mode)[fold]
    answer = np.empty(n)
    heads = []
    for f in range(FOLDS):
        train = fold != f
        labels = drawn.truth[train]
        if kind.name == "classes" and not 0 < labels.mean() < 1:
            return None
        weights, offset = fit(kind, drawn.x[train], labels)
        answer[~train] = drawn.x[~train] @ weights + offset
        heads.append((weights, offset))
    return Scored(drawn, answer, fold, heads)


def true_scores(
    kind: Kind, heads: list[tuple[Array, float]], mode: str = "train"
) -> dict[str, float]:
    """Scores of heads on everybody, each head scoring everybody of its own site."""
    count = PAIRED if kind.name == "times" else POPULATION
    everybody = draw(kind, np.random.default_rng(99), count, 1)
    shifts = shifts_of(mode)[: len(heads)]
    parts = [
        (everybody.x + shift) @ weights + offset
        for shift, (weights, offset) in zip(shifts, heads, strict=True)
    ]
    if kind.name == "times":
        values = []
        for answer in parts:
            scorer = scorers_of(kind, everybody.truth, answer, None)["c_index"]
            values.append(float(scorer(np.ones((1, count)))[0]))
        return {"c_index": float(np.mean(values))}
    truth = np.concatenate([everybody.truth] * len(heads))
    fold = np.repeat(np.arange(len(heads)), count)
    answer = np.concatenate(parts)
    scorers = scorers_of(kind, truth, answer, fold)
    every = np.ones((1, len(answer)))
    return {name: float(score(every)[0]) for name, score in scorers.items()}


def published(
    kind: Kind, scored: Scored, scorers: Scorers, sampling: Sampling, seed: int
) -> Iterator[tuple[str, str, float, float]]:
    """Metric, method and bounds by published methods, written here and not by the package."""
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(
        sampling.units, np.full(sampling.units, 1 / sampling.units), BOOTSTRAP
    )
    weights = drawn[:, sampling.codes].astype(float)
    for name, score in scorers.items():
        low, high = np.nanquantile(score(weights), (0.025, 0.975))
        yield name, "cluster bootstrap, percentile", low, high
    if kind.name == "values" and sampling.units == len(sampling.codes):
        r = float(scorers["pearson"](np.ones((1, len(sampling.codes))))[0])
        ends = np.tanh(
            np.arctanh(r) + np.array([-1.96, 1.96]) / (sampling.units - 3) ** 0.5
        )
        yield "pearson", "Fisher's z", *ends
    if kind.name == "classes" and scored.fold is None:
        truth = scored.drawn.truth == 1
        won = np.sign(scored.answer[truth][:, None] - scored.answer[~truth]) / 2 + 0.5
        area = min(max(won.mean(), 1e-6), 1 - 1e-6)
        variance = 0.0
        for axis, rows in ((1, truth), (0, ~truth)):
            by_unit = np.bincount(sampling.codes[rows], won.mean(axis=axis) - area)
            count = len(np.unique(sampling.codes[rows]))
            variance += count / (count - 1) * (by_unit**2).sum() / rows.sum() ** 2
        reach = 1.96 * variance**0.5 / (area * (1 - area))
        ends = 1 / (1 + np.exp(-np.log(area / (1 - area)) - np.array([-reach, reach])))
        yield "auroc", "DeLong (Obuchowski), logit", *ends


class Tally:
    """Intervals of one metric by one method: how many hold the truth, and how wide they are."""

    def __init__(self, truth: float) -> None:
        self.truth = truth
        self.held = list[bool]()
        self.width = list[float]()

    def add(self, low: float, high: float) -> None:
        """Counts an interval."""
        self.held.append(bool(low <= self.truth <= high))
        self.width.append(float(high - low))

    def cell(self) -> dict[str, Any]:
        """Coverage with its exact binomial interval, and the median width."""
        ends = binomtest(sum(self.held), len(self.held)).proportion_ci(0.95)
        return {
            "coverage": round(float(np.mean(self.held)), 3),
            "binomial": [round(ends.low, 3), round(ends.high, 3)],
            "width": round(float(np.median(self.width)), 3),
            "cohorts": len(self.held),
        }


def cover(
    kind: Kind, n: int, most: int, mode: str, *, sets: int, seed: int
) -> dict[str, Any]:
    """Coverage by metric and method, and the cohorts without an interval."""
    rng = np.random.default_rng([seed, n, most, len(mode)])
    cohorts = [cohort(kind, rng, n, most, mode) for _ in range(sets)]
    whole = [one for one in cohorts if one is not None]
    if len(whole) < sets / 2:
        return {"refused": sets - len(whole)}
    heads = [
        true_scores(kind, one.heads, mode)
        for one in whole[: 1 if mode == "test" else TRUTHS]
    ]
    truths = {
        name: float(np.nanmean([head[name] for head in heads])) for name in heads[0]
    }
    tallies = {name: {"ours": Tally(truth)} for name, truth in truths.items()}
    without = 0
    reasons = set[str]()
    for number, one in enumerate(whole):
        sampling = sampling_of(kind, one.drawn, one.fold)
        try:
            scorers = scorers_of(kind, one.drawn.truth, one.answer, one.fold)
        except ValueError:
            without += 1
            continue
        scorers = {name: scorers[name] for name in truths}
        bounds = {
            name: interval(sampling, score, name) for name, score in scorers.items()
        }
        missing = {found.missing for found in bounds.values()} - {""}
        if missing:
            without += 1
            reasons |= {" ".join(text.split(", got")[0].split()) for text in missing}
            continue
        for name, found in bounds.items():
            tallies[name]["ours"].add(found.low, found.high)
        for name, method, low, high in published(kind, one, scorers, sampling, number):
            tallies[name].setdefault(method, Tally(truths[name])).add(low, high)
    cells = {
        name: {"truth": round(truths[name], 4)}
        | {method: tally.cell() for method, tally in methods.items() if tally.held}
        for name, methods in tallies.items()
    }
    return {
        "metrics": cells,
        "refused": sets - len(whole),
        "without_interval": without,
        "reasons": sorted(reasons),
    }


def cover_calibration(n: int, most: int, share: float, sets: int) -> dict[str, Any]:
    """Coverage of the calibration line of a model that is right on average, slope 1."""
    kind = Kind("classes", share, 1.0)
    rng = np.random.default_rng([n, most, 5])
    tallies = {"intercept": Tally(0.0), "slope": Tally(1.0)}
    for _ in range(sets):
        x = draw(kind, rng, n, most)
        # the truth is drawn from the predicted probability, with a patient's part in common
        shared = rng.normal(size=n)[x.patient] * OWN**0.5
        noise = norm.cdf(shared + rng.normal(size=n) * (1 - OWN) ** 0.5)
        p = 1 / (1 + np.exp(-x.x[:, 0] - np.log(share / (1 - share))))
        groups = Groups("patients", tuple(map(str, x.patient)))
        line = calibration_line(noise < p, p, groups)
        if line is not None:
            tallies["intercept"].add(line.intercept.low, line.intercept.high)
            tallies["slope"].add(line.slope.low, line.slope.high)
    return {k: tally.cell() for k, tally in tallies.items() if tally.held}


def called_different(
    kind: Kind, n: int, most: int, mode: str, sets: int
) -> dict[str, Any] | None:
    """Share of cohorts in which two equally good models are called different at .05."""
    rng = np.random.default_rng([n, most, len(mode), 7])
    called = list[bool]()
    for _ in range(sets):
        drawn = draw(kind, rng, n, most)
        fold = None if mode == "test" else folds_of_patients(kind, rng, drawn)
        answers = []
        for _ in range(2):
            seen = drawn.x + rng.normal(size=drawn.x.shape)
            if fold is None:
                weights, offset = fixed_head(kind)
                answers.append(seen @ weights + offset)
                continue
            answer = np.empty(n)
            for f in range(FOLDS):
                train = fold != f
                if kind.name == "classes" and not 0 < drawn.truth[train].mean() < 1:
                    break
                weights, offset = fit(kind, seen[train], drawn.truth[train])
                answer[~train] = seen[~train] @ weights + offset
            answers.append(answer)
        sampling = sampling_of(kind, drawn, fold)
        if sampling.fewest < 3:
            continue
        name = {"classes": "auroc", "values": "pearson", "times": "c_index"}[kind.name]
        try:
            scorers = [scorers_of(kind, drawn.truth, a, fold)[name] for a in answers]
            models = comparison.jackknife(scorers, sampling, chance=chance_of(name, 2))
        except ValueError:
            continue
        found = models.difference(0, 1)
        called.append(found.p_value < 0.05)
    if len(called) < sets / 2:
        return None
    return error_of(called)


def error_of(called: list[bool]) -> dict[str, Any]:
    """Share of cohorts in which something was found, with its exact binomial interval."""
    ends = binomtest(sum(called), len(called)).proportion_ci(0.95)
    return {
        "type_1_error": round(float(np.mean(called)), 3),
        "binomial": [round(ends.low, 3), round(ends.high, 3)],
        "cohorts": len(called),
    }


@dataclass(frozen=True)
class Task:
    """One cell of the tables, to be computed by any process."""

    table: str
    name: str
    cell: Callable[[], dict[str, Any] | None]

    def __call__(self) -> tuple[str, str, dict[str, Any] | None]:
        """Table, name and cell."""
        return self.table, self.name, self.cell()


def run(task: Task) -> tuple[str, str, dict[str, Any] | None]:
    """The task's cell."""
    return task()


def tasks(sets: int, sizes: tuple[int, ...]) -> Iterator[Task]:
    """Every cell."""
    for kind in KINDS:
        for n in sizes:
            for most in MOST_CASES:
                name = f"{kind.name} {kind.share:g} {kind.signal:g} n={n} cases={most}"
                for mode in ("test", "train", "sites"):
                    if mode == "sites" and kind.signal != 1:
                        continue
                    yield Task(
                        "cells",
                        f"{mode} {name}",
                        partial(cover, kind, n, most, mode, sets=sets, seed=0),
                    )
                    if mode == "sites":
                        continue
                    yield Task(
                        "type_1_error",
                        f"{mode} {name}",
                        partial(called_different, kind, n, most, mode, sets),
                    )
    for n in (60, 200, 1000):
        for most in MOST_CASES:
            for share in (0.5, 0.1):
                yield Task(
                    "calibration",
                    f"n={n} share={share:g} cases={most}",
                    partial(cover_calibration, n, most, share, sets),
                )


def main() -> None:
    """Every cell, in `--jobs` processes."""
    args = arguments(__doc__ or "", jobs="processes")
    sets = 6 if args.smoke else 300
    sizes = SIZES[1:2] if args.smoke else SIZES
    results: dict[str, Any] = {
        "cohorts": sets,
        "cells": {},
        "calibration": {},
        "type_1_error": {},
    }
    with ProcessPoolExecutor(int(args.jobs or 1)) as pool:
        for table, name, cell in pool.map(run, tasks(sets, sizes)):
            results[table][name] = cell
            print(table, name, cell, flush=True)
    finish("bench_coverage", results, args)


if __name__ == "__main__":
    main()
