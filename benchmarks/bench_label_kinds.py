"""Do the intervals of ordered classes and of several labels with blanks hold the true score?

Ordered classes: a latent grade is cut into K classes, equally frequent or 10 to 1 from the lowest
to the highest. `test`: one fixed model that knows the law of the grade. `train`: five folds, each
with a discriminant of its own. Several labels: three of one model, 3 in 10 cells blank, scored as
`train` and `predict --labels` score them. Cases are of one patient each, or of patients with three.
Each cell has the share of cohorts whose interval holds the truth, and the median width, as in
`bench_coverage`. Where a class has fewer than 5 patients there is no interval.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import norm

from benchmarks.bench_coverage import FOLDS, OWN, Array, Tally
from benchmarks.harness import arguments, finish
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.intervals import interval
from thinsection.evaluation.target import Target
from thinsection.predict.tested import Tested

DIM = 4
SIZES = (20, 60, 200)  # cases
POPULATION = 40_000  # cases that give the true scores
SMOKE_POPULATION = 2_000
TRUTHS = 12  # cohorts whose models score everybody
WEAK, STRONG, NEAR = 0.4, 0.85, 0.97  # correlation of the first channel and the grade
PREVALENCES = (0.5, 0.3, 0.15)  # of three labels
BLANK = 0.3
ORDERED = ("weighted_kappa", "mae", "balanced_accuracy")
Model = Callable[[Array], Array]  # channels (n, DIM) -> probabilities (n, K)


@dataclass(frozen=True, kw_only=True)
class Grades:
    """Population of ordered classes."""

    classes: int
    ratio: float  # of the lowest class to the highest
    signal: float

    @property
    def cuts(self) -> Array:
        """Grades between the classes."""
        share = np.geomspace(self.ratio, 1, self.classes)
        return norm.ppf(np.cumsum(share / share.sum())[:-1])

    def draw(self, rng: np.random.Generator, n: int, each: int) -> tuple[Array, ...]:
        """Channels (n, DIM), class and patient of each case; a patient has one class."""
        patient = np.repeat(np.arange(-(-n // each)), each)[:n]
        patients = int(patient[-1]) + 1
        grade = rng.normal(size=patients)[patient]
        own = rng.normal(size=(patients, DIM))[patient] * OWN**0.5
        noise = own + rng.normal(size=(n, DIM)) * (1 - OWN) ** 0.5
        noise[:, 0] *= (1 - self.signal**2) ** 0.5
        noise[:, 0] += self.signal * grade
        return noise, np.searchsorted(self.cuts, grade), patient

    def fixed_model(self, x: Array) -> Array:
        """Probabilities of the classes for whoever knows the law."""
        error = (1 - self.signal**2) ** 0.5
        below = norm.cdf((self.cuts - self.signal * x[:, :1]) / error)
        ends = np.zeros((len(x), 1)), np.ones((len(x), 1))
        return np.diff(np.concatenate([ends[0], below, ends[1]], axis=1), axis=1)


def fitted_model(x: Array, truth: Array, classes: int) -> Model:
    """Ridge regression on the class, then a discriminant of its value."""
    center = x - x.mean(axis=0)
    weights = np.linalg.solve(center.T @ center + np.eye(DIM), center.T @ truth)
    value = x @ weights
    present = np.unique(truth)
    means = np.array([value[truth == k].mean() for k in present])
    share = np.array([(truth == k).mean() for k in present])
    residual = value - means[np.searchsorted(present, truth)]
    variance = residual.var() + 1e-6

    def predict(new: Array) -> Array:
        logits = -(((new @ weights)[:, None] - means) ** 2) / 2 / variance
        p = share * np.exp(logits - logits.max(axis=1, keepdims=True))
        full = np.zeros((len(new), classes))
        full[:, present] = p / p.sum(axis=1, keepdims=True)
        return full

    return predict


def tested(
    target: Target, truth: Array, answers: Array, patient: Array, fold: Array
) -> Tested:
    """Cases as `train` and `predict` score them."""
    names = tuple(map(str, range(len(truth))))
    return Tested(
        target=target,
        cases=names,
        groups=Groups("patients", tuple(f"{one:06d}" for one in patient)),
        slides=tuple((name,) for name in names),
        fold=fold,
        truth=truth.reshape(len(truth), -1).astype(float),
        answers=answers,
    )


def scores(cases: Tested) -> dict[str, float]:
    """Score of each metric."""
    every = np.ones((1, len(cases.cases)))
    return {name: float(score(every)[0]) for name, score in cases.scorers.items()}


def counted(cohorts: list[Tested], truth: dict[str, float]) -> dict[str, Any]:
    """Coverage of each metric."""
    tallies = {name: Tally(value) for name, value in truth.items()}
    for cases in cohorts:
        sampling = cases.sampling
        for name, scorer in cases.scorers.items():
            bounds = interval(sampling, scorer, name)
            if name in tallies and not bounds.missing:
                tallies[name].add(bounds.low, bounds.high)
    return {
        name: {"truth": round(truth[name], 4), **tally.cell()}
        for name, tally in tallies.items()
        if tally.held
    }


def cover_grades(
    grades: Grades, n: int, each: int, mode: str, sets: int, *, population: int
) -> dict[str, Any]:
    """Coverage of ordered classes."""
    rng = np.random.default_rng([n, each, grades.classes, len(mode)])
    names = tuple(str(k + 1) for k in range(grades.classes))
    target = Target(kind="ordinal", columns=("grade",), names=names)
    everybody, labels, owner = grades.draw(np.random.default_rng(99), population, 1)
    cohorts = []
    truths = []
    for _ in range(sets):
        x, truth, patient = grades.draw(rng, n, each)
        fold = np.zeros(n, int)
        models: list[Model] = [grades.fixed_model]
        if mode == "train":
            fold = rng.permutation(np.arange(patient[-1] + 1) % FOLDS)[patient]
            models = [
                fitted_model(x[fold != f], truth[fold != f], grades.classes)
                for f in range(FOLDS)
            ]
        answers = np.empty((n, grades.classes))
        for f, model in enumerate(models):
            answers[fold == f] = model(x[fold == f])
        cohorts.append(tested(target, truth, answers, patient, fold))
        if len(truths) < (1 if mode == "test" else TRUTHS):
            parts = [model(everybody) for model in models]
            size = len(models)
            pooled = tested(
                target,
                np.tile(labels, size),
                np.concatenate(parts),
                np.tile(owner, size),
                np.zeros(size * population, int),
            )
            truths.append(scores(pooled))
    truth_of = {name: float(np.mean([one[name] for one in truths])) for name in ORDERED}
    return counted(cohorts, truth_of)


def cover_labels(n: int, each: int, sets: int, *, population: int) -> dict[str, Any]:
    """Coverage of the mean over three labels with blanks, by a fixed model."""
    rng = np.random.default_rng([n, each])
    names = ("first", "second", "third")
    target = Target(kind="multilabel", columns=names, names=names)
    cut = norm.ppf(1 - np.array(PREVALENCES))

    def draw(generator: np.random.Generator, count: int, size: int) -> Tested:
        patient = np.repeat(np.arange(-(-count // size)), size)[:count]
        own = generator.normal(size=(int(patient[-1]) + 1, 2, 3))[patient]
        noise = own[:, 0] * OWN**0.5
        noise += generator.normal(size=(count, 3)) * (1 - OWN) ** 0.5
        truth = (own[:, 1] > cut).astype(float)
        signal = 0.6 * own[:, 1] + 0.8 * noise
        answers = norm.cdf((0.6 * signal - cut) / 0.8)
        return tested(target, truth, answers, patient, np.zeros(count, int))

    truth = scores(draw(np.random.default_rng(99), population, 1))
    cohorts = []
    for _ in range(sets):
        cases = draw(rng, n, each)
        cases.truth[rng.random(cases.truth.shape) < BLANK] = np.nan
        # every case has a label
        empty = np.isnan(cases.truth).all(axis=1)
        cases.truth[empty, 0] = 0.0
        cohorts.append(cases)
    return counted(cohorts, truth)


def tasks(
    sets: int, sizes: tuple[int, ...], population: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every cell with its name."""
    for n in sizes:
        for each in (1, 3):
            cell = partial(cover_labels, n, each, sets, population=population)
            yield f"labels n={n} cases={each}", cell
            for classes in (3, 5):
                for ratio in (1, 10):
                    for signal in (WEAK, STRONG, NEAR):
                        for mode in ("test", "train"):
                            grades = Grades(classes=classes, ratio=ratio, signal=signal)
                            name = f"{mode} classes={classes} 1:{ratio} {signal:g}"
                            cell = partial(
                                cover_grades,
                                grades,
                                n,
                                each,
                                mode,
                                sets,
                                population=population,
                            )
                            yield f"{name} n={n} cases={each}", cell


def run(task: tuple[str, Callable[[], Any]]) -> tuple[str, Any]:
    """Name and result of a cell."""
    return task[0], task[1]()


def main() -> None:
    """Every cell, in `--jobs` processes."""
    args = arguments(__doc__ or "", jobs="processes")
    sets = 6 if args.smoke else 300
    sizes = SIZES[1:2] if args.smoke else SIZES
    population = SMOKE_POPULATION if args.smoke else POPULATION
    results: dict[str, Any] = {"cohorts": sets, "cells": {}}
    with ProcessPoolExecutor(int(args.jobs or 1)) as pool:
        for name, cell in pool.map(run, tasks(sets, sizes, population)):
            results["cells"][name] = cell
            print(name, cell, flush=True)
    finish("bench_label_kinds", results, args)


if __name__ == "__main__":
    main()
