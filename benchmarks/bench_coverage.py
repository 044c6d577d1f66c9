"""Does a 95 % confidence interval hold the true score, and does a test find only what is there?

Cohorts are drawn from a population that is known: Gaussian embeddings, a linear head in closed
form. `test`: one head and one test set (`predict --labels`, `probe`). `slides`: the same with rows
of slides, 1 to 5 a patient. `train`: cross-validation, where each fold has a head of its own,
fitted to the other folds, with its own offset and scale; cases of 1 to 5 slides. The truth is the
mean score of the procedure's heads on the population. Each cell has the share of cohorts whose
interval holds it; cohorts without an interval are counted.
"""

from typing import Any

import numpy as np

from benchmarks.harness import arguments, finish
from thinsection.evaluation import intervals
from thinsection.evaluation.cases import Groups
from thinsection.evaluation.comparison import delong
from thinsection.evaluation.intervals import Sampling, interval
from thinsection.evaluation.metrics import Scorers, class_scorers, value_scorers
from thinsection.evaluation.survival import concordance

DIM = 6
FOLDS = 5
SIZES = (8, 12, 20, 40, 100, 200)
TEST_SIZES = (12, 20, 40, 100)
SHARES = (0.5, 0.1)  # of positive cases
SIGNALS = {"weak": 1.0, "strong": 2.2}  # distance of the classes' means
POPULATION = 20_000
PAIRED = 2000  # of them, where pairs are compared
TRUTHS = 60  # cohorts whose heads score everybody
PENALTY = 1.0
CENSORED = 0.4
Array = np.ndarray


def draw_classes(
    rng: np.random.Generator, n: int, share: float, signal: float
) -> tuple[Array, Array]:
    """Embeddings (n, DIM) and labels (n,): class means `signal` apart, noise of 1 to 5 slides."""
    positives = max(1, round(n * share))
    labels = np.r_[np.ones(positives, int), np.zeros(n - positives, int)]
    slides = rng.integers(1, 6, n)
    noise = rng.normal(size=(n, DIM)) * np.sqrt(0.6 + 0.4 / slides)[:, None]
    noise[:, 0] += signal * labels
    return noise, labels


def draw_values(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Embeddings (n, DIM) and values (n,) of which they explain a half."""
    x = rng.normal(size=(n, DIM))
    return x, x[:, 0] + rng.normal(size=n)


def draw_times(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Embeddings (n, DIM), and (n, 2) of event and time."""
    x = rng.normal(size=(n, DIM))
    time = rng.exponential(np.exp(-x[:, 0]))
    limit = rng.exponential(np.exp(-x[:, 0]) * (1 - CENSORED) / CENSORED)
    return x, np.stack([time <= limit, np.minimum(time, limit)], axis=1)


def fit_line(x: Array, y: Array) -> tuple[Array, float]:
    """Weights and offset of a ridge regression."""
    center = x - x.mean(axis=0)
    gram = center.T @ center + PENALTY * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, center.T @ (y - y.mean()))
    return weights, float(y.mean() - x.mean(axis=0) @ weights)


def fit_classes(x: Array, y: Array) -> tuple[Array, float]:
    """Weights and offset of the log-odds, by linear discriminant analysis."""
    means = [x[y == label].mean(axis=0) for label in (0, 1)]
    residual = x - np.where(y[:, None] == 1, means[1], means[0])
    spread = (residual.T @ residual + PENALTY * np.eye(x.shape[1])) / len(x)
    weights = np.linalg.solve(spread, means[1] - means[0])
    offset = -weights @ (means[0] + means[1]) / 2 + np.log(y.mean() / (1 - y.mean()))
    return weights, float(offset)


def stratified(rng: np.random.Generator, strata: Array, folds: int) -> Array:
    """The fold of each row."""
    fold = np.empty(len(strata), int)
    for label in np.unique(strata):
        rows = rng.permutation(np.flatnonzero(strata == label))
        fold[rows] = (np.arange(len(rows)) + rng.integers(folds)) % folds
    return fold


def score_rows(kind: str, truth: Array, answer: Array, fold: Array | None) -> Scorers:
    """Every metric that `train` prints for the kind of target."""
    if kind == "values":
        return value_scorers(truth, answer, fold)
    if kind == "times":
        event, time = truth[:, 0] == 1, truth[:, 1]
        return {"c_index": concordance(event, time, answer, fold)}
    share = 1 / (1 + np.exp(-np.clip(answer, -30, 30)))
    both = np.stack([1 - share, share], axis=1)
    return class_scorers(truth, (share > 0.5).astype(int), 2, both, fold)


class Population:
    """Cohorts of one kind, their heads, and the scores of these on everybody."""

    def __init__(self, kind: str, share: float, signal: float) -> None:
        self.kind = kind
        self.share = share
        self.signal = signal
        self.everybody = self.draw(np.random.default_rng(99), POPULATION)

    def draw(self, rng: np.random.Generator, n: int) -> tuple[Array, Array]:
        """Embeddings and truth of n cases."""
        if self.kind == "values":
            return draw_values(rng, n)
        if self.kind == "times":
            return draw_times(rng, n)
        return draw_classes(rng, n, self.share, self.signal)

    def fit(self, x: Array, truth: Array) -> tuple[Array, float]:
        """A head: weights and offset."""
        if self.kind == "values":
            return fit_line(x, truth)
        if self.kind == "times":
            return fit_line(x, -np.log(truth[:, 1]))
        return fit_classes(x, truth)

    def strata(self, truth: Array) -> Array:
        """What folds are stratified by."""
        if self.kind == "values":
            return np.zeros(len(truth), int)
        return (truth if self.kind == "classes" else truth[:, 0]).astype(int)


def cross_validate(
    population: Population, rng: np.random.Generator, n: int
) -> tuple[Array, Array, Array, list[tuple[Array, float]]] | None:
    """Truth, answers and fold of n cases, and the heads; None where a class is too rare."""
    x, truth = population.draw(rng, n)
    strata = population.strata(truth)
    rarest = int(np.bincount(strata).min()) if strata.any() else n
    folds = min(FOLDS, rarest)
    if folds < 2:
        return None
    fold = stratified(rng, strata, folds)
    answers = np.empty(n)
    heads = []
    for f in range(folds):
        head = population.fit(x[fold != f], truth[fold != f])
        answers[fold == f] = x[fold == f] @ head[0] + head[1]
        heads.append(head)
    return truth, answers, fold, heads


def true_scores(
    population: Population, heads: list[tuple[Array, float]]
) -> dict[str, float]:
    """Scores of heads on everybody, each head scoring everybody."""
    x, truth = population.everybody
    answers = np.concatenate([x @ weights + offset for weights, offset in heads])
    if population.kind == "times":
        few = slice(0, PAIRED)
        scorers_by_head = [
            score_rows("times", truth[few], x[few] @ w + b, None) for w, b in heads
        ]
        every = np.ones((1, PAIRED))
        return {
            "c_index": float(np.mean([s["c_index"](every)[0] for s in scorers_by_head]))
        }
    repeated = np.concatenate([truth] * len(heads))
    fold = np.repeat(np.arange(len(heads)), len(truth))
    scorers = score_rows(population.kind, repeated, answers, fold)
    every = np.ones((1, len(repeated)))
    return {name: float(score(every)[0]) for name, score in scorers.items()}


def sampling_of(
    population: Population,
    truth: Array,
    fold: Array | None = None,
    groups: Any = None,
) -> Sampling:
    """The units of a cohort."""
    classes = truth if population.kind == "classes" else None
    events = truth[:, 0] if population.kind == "times" else None
    names = np.arange(len(truth)).astype(str) if groups is None else groups
    return Sampling.of_rows(
        Groups.each(names, "patients"), classes=classes, events=events, fold=fold
    )


def tally(
    cohorts: list[tuple[Scorers, Sampling]], truths: dict[str, float]
) -> dict[str, Any]:
    """By metric: share of intervals that hold the truth, their width, cohorts without one."""
    cell: dict[str, Any] = {}
    for name, truth in truths.items():
        held = []
        width = []
        for seed, (scorers, sampling) in enumerate(cohorts):
            found = interval(sampling, scorers[name], name, seed=seed)
            if found.missing:
                continue
            held.append(found.low <= truth <= found.high)
            width.append(found.high - found.low)
        cell[name] = {
            "truth": round(truth, 4),
            "coverage": round(float(np.mean(held)), 3) if held else None,
            "median_width": round(float(np.median(width)), 3) if width else None,
            "without_interval": len(cohorts) - len(held),
        }
    return cell


def cover_train(population: Population, n: int, sets: int, seed: int) -> dict[str, Any]:
    """Coverage of cross-validated scores of n cases."""
    rng = np.random.default_rng([seed, n])
    cohorts = []
    truths = []
    for _ in range(sets):
        validated = cross_validate(population, rng, n)
        if validated is None:
            continue
        truth, answers, fold, heads = validated
        try:
            scorers = score_rows(population.kind, truth, answers, fold)
        except ValueError:  # no comparable pair: refused before training
            continue
        cohorts.append((scorers, sampling_of(population, truth, fold)))
        if len(truths) < (TRUTHS if population.kind != "times" else 15):
            truths.append(true_scores(population, heads))
    if not cohorts:
        return {"refused": sets}
    means = {k: float(np.mean([t[k] for t in truths])) for k in truths[0]}
    return tally(cohorts, means) | {"refused": sets - len(cohorts)}


def cover_test(
    population: Population, n: int, sets: int, seed: int, *, slides: bool
) -> dict[str, Any]:
    """Coverage of the scores of one head, fitted to 60 other cases, on n cases or patients."""
    rng = np.random.default_rng([seed, n, 1])
    head = population.fit(*population.draw(rng, 60))
    cohorts = []
    for _ in range(sets):
        x, truth = population.draw(rng, n)
        groups = None
        if slides:
            patient = np.repeat(np.arange(n), rng.integers(1, 6, n))
            x = x[patient] * 0.8 + 0.6 * rng.normal(size=(len(patient), DIM))
            truth = truth[patient]
            groups = patient.astype(str)
        answers = x @ head[0] + head[1]
        try:
            scorers = score_rows(population.kind, truth, answers, None)
        except ValueError:
            continue
        cohorts.append((scorers, sampling_of(population, truth, groups=groups)))
    if not cohorts:
        return {"refused": sets}
    if slides:
        population = slide_population(population)
    truths = true_scores(population, [head])
    return tally(cohorts, truths) | {"refused": sets - len(cohorts)}


def slide_population(population: Population) -> Population:
    """The population of slides, each of one of its patients."""
    rng = np.random.default_rng(98)
    other = Population(population.kind, population.share, population.signal)
    x, truth = population.everybody
    patient = np.repeat(np.arange(len(truth)), rng.integers(1, 6, len(truth)))
    noise = rng.normal(size=(len(patient), DIM))
    other.everybody = x[patient] * 0.8 + 0.6 * noise, truth[patient]
    return other


def called_different(
    n: int, share: float, gain: float, sets: int, *, folds: bool
) -> float:
    """Share of cohorts in which two heads are called different; embeddings differ by `gain`."""
    rng = np.random.default_rng([n, int(100 * share), int(100 * gain)])
    population = Population("classes", share, 1.0)
    called = 0
    for _ in range(sets):
        x, truth = population.draw(rng, n)
        shared = 0.6 * rng.normal(size=(n, DIM))
        scores = []
        fold = stratified(rng, truth, min(FOLDS, int(truth.sum()))) if folds else None
        for extra in (gain, 0.0):
            own = x * 0.5 + shared + 0.6 * rng.normal(size=(n, DIM))
            own[:, 0] += (0.5 + extra) * truth
            if fold is None:
                scores.append(own[:, 0] + 0.3 * own[:, 1])
                continue
            answers = np.empty(n)
            for f in np.unique(fold):
                weights, offset = fit_classes(own[fold != f], truth[fold != f])
                answers[fold == f] = own[fold == f] @ weights + offset
            scores.append(answers)
        sampling = sampling_of(population, truth, fold)
        found = delong(scores, truth == 1, sampling, folds=(fold, fold))
        called += found.p_value < 0.05
    return round(called / sets, 3)


def main() -> None:
    """Every cell."""
    args = arguments(__doc__ or "")
    sets = 4 if args.smoke else 200
    intervals.DRAWS = 200 if args.smoke else 500
    sizes = SIZES[2:4] if args.smoke else SIZES
    results: dict[str, Any] = {"cohorts": sets, "draws": intervals.DRAWS, "cells": {}}
    kinds = [("values", 0.5, 0.0), ("times", 0.5, 0.0)]
    kinds += [("classes", share, s) for share in SHARES for s in SIGNALS.values()]
    for kind, share, signal in kinds:
        population = Population(kind, share, signal)
        for n in sizes:
            name = f"{kind} {share:g} {signal:g} n={n}"
            cells = {
                "train": cover_train(population, n, sets, 0),
                "test": cover_test(population, n, sets, 0, slides=False),
                "slides": cover_test(population, n, sets, 0, slides=True),
            }
            for mode, cell in cells.items():
                results["cells"][f"{mode} {name}"] = cell
                print(mode, name, cell, flush=True)
    results["called_different"] = {
        f"{'train' if folds else 'test'} n={n} share={share:g} gain={gain:g}": (
            called_different(n, share, gain, 4 * sets, folds=folds)
        )
        for folds in (False, True)
        for n in TEST_SIZES
        for share in SHARES
        if n * share >= 3
        for gain in (0.0, 0.6)
    }
    finish("bench_coverage", results, args)


if __name__ == "__main__":
    main()
