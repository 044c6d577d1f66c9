"""The protocol `honest`: settings are chosen on inner folds of what trains, seeds are repeated, and
the scored rows are looked at once, with settings that no scored row had a say in.

A probe is here its own function, run under protocols that are narrowed to one setting. Beside the
score stand that of permuted labels (what the probe makes of nothing) and a learning curve.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np

from thinsection.evaluation.cases import Groups
from thinsection.evaluation.comparison import permuted_rows
from thinsection.evaluation.metrics import (
    FloatVector,
    Fold,
    IndexArray,
    mean_with_value,
)
from thinsection.evaluation.rows import Details
from thinsection.evaluation.splits import draw_rows, drawn_folds
from thinsection.probe.data.sets import (
    CaseSet,
    Split,
    SurvivalSet,
    TileSet,
    check_tile_set,
)
from thinsection.probe.protocol import (
    FewshotSettings,
    KnnSettings,
    LinearSettings,
    Protocol,
)
from thinsection.probe.result import Choice, ProbeResult, choices, classified

# labels (Nq,), shares (Nq, K), details
Guess = tuple[IndexArray, FloatVector, Details]
TileSettings = TypeVar("TileSettings", LinearSettings, KnnSettings, FewshotSettings)
Guesser = Callable[[TileSet, TileSettings, int], Guess]  # of data, settings and seed
Run = Callable[..., ProbeResult]  # (data, protocol=...): a probe
Cases = CaseSet | SurvivalSet
MIN_SURVIVORS = 16  # with and without event, for a model to be fitted


def tile_probe(
    name: str,
    kind: type[TileSettings],
    guess: Guesser[TileSettings],
    data: TileSet,
    protocol: Protocol,
    *,
    select: bool = True,
) -> ProbeResult:
    """The result of a guess as the protocol has it; without `select` there is nothing to choose.

    Memory: that of the guess; under `honest` the training rows once more. Raises DatasetError: the
    splits do not fit each other; ConfigError: the protocol does not define the probe.
    """
    data = check_tile_set(data)
    settings = protocol.require(name, kind)
    if protocol.inner_folds:
        run = partial(tile_probe, name, kind, guess, select=select)
        return _honest_tiles(run, data, protocol, select=select)
    prediction, share, details = guess(data, settings, protocol.seed)
    return classified(
        name,
        data,
        prediction,
        metric=settings.metric,
        protocol=protocol,
        probability=share,
        details=details,
    )


def narrowed(
    protocol: Protocol, choice: Choice, *, most_shots: int | None = None
) -> Protocol:
    """The protocol with one setting of each sweep, nothing to select, for one seed."""
    p = replace(protocol, inner_folds=0)
    values = [float(value) for value in choice]
    if p.linear and len(values) == 2:
        rate, epochs = values
        linear = replace(p.linear, lrs=(rate,), epochs=int(epochs), last_epoch=True)
        return replace(p, linear=linear)
    if p.fewshot and most_shots is not None:
        shots = min(most_shots, p.fewshot.shots)
        p = replace(p, fewshot=replace(p.fewshot, shots=shots))
    if not values:
        return p
    value = values[0]
    return replace(  # a probe reads its own alone
        p,
        knn=p.knn and replace(p.knn, ks=(int(value),)),
        logistic=p.logistic and replace(p.logistic, cs=(value,)),
        survival=p.survival and replace(p.survival, alphas=(value,)),
    )


def _best(scores: Sequence[dict[Choice, float]]) -> Choice:
    """Best setting on the mean of those that every fold tried; of equal ones the first."""
    means: dict[Choice, float] = {}
    for choice in scores[0]:
        if all(choice in of_fold for of_fold in scores):
            means[choice] = float(
                mean_with_value([of_fold[choice] for of_fold in scores])
            )
    return max(means, key=means.__getitem__)


def _honest_tiles(
    run: Run, data: TileSet, protocol: Protocol, *, select: bool
) -> ProbeResult:
    """Result under a protocol with inner folds, see `tile_probe`."""
    train = data.train
    choice: Choice = ()
    words = "nothing was selected"
    if select:
        choice, words = _choose_setting(run, data, protocol)
    chosen = narrowed(protocol, choice)
    seeds = range(protocol.seed, protocol.seed + protocol.repeats)
    runs = [run(data, protocol=replace(chosen, seed=seed)) for seed in seeds]

    def score_trained_on(part: Split) -> float:
        smallest = int(np.bincount(part.labels, minlength=data.num_classes).min())
        fitting = choice
        if len(choice) == 1:  # a number of neighbours
            fitting = (min(int(choice[0]), len(part)),)
        own = narrowed(protocol, fitting, most_shots=smallest)
        return run(replace(data, train=part), protocol=own).score

    def null_score(seed: int) -> float:
        labels = train.labels[permuted(train.labels, train.groups, seed)]
        return score_trained_on(replace(train, labels=labels))

    def shots_score(shots: int, seed: int) -> float:
        return score_trained_on(train.take(draw_rows(train.labels, shots, seed=seed)))

    details = {
        "selected": ", ".join(map(str, choice)),
        "selected_on": words,
        **_scores_beside(
            protocol,
            [r.score for r in runs],
            null_score,
            shots_score,
            smallest_class=np.bincount(train.labels).min(),
        ),
    }
    guesses = [r.predictions for r in runs if r.predictions]
    return classified(
        runs[0].probe,
        data,
        guesses[0].prediction,
        metric=runs[0].metric,
        protocol=protocol,
        details=details,
        probability=guesses[0].probability,
        repeats=np.stack([g.prediction for g in guesses]),
    )


def _choose_setting(run: Run, data: TileSet, protocol: Protocol) -> tuple[Choice, str]:
    """The best setting on inner folds of the training rows, and these in words."""
    train = data.train
    inner_folds = protocol.inner_folds
    folds, unit_words = drawn_folds(
        train.labels, train.groups, folds=inner_folds, seed=protocol.seed
    )
    swept = replace(protocol, inner_folds=0)
    scores = []
    for fitted, scored in folds:
        part = replace(data, train=train.take(fitted), val=train.take(scored))
        scores.append(choices(run(part, protocol=swept)))
    words = f"chosen on {inner_folds} inner folds of the training rows {unit_words}"
    return _best(scores), words.strip()


def _scores_beside(
    protocol: Protocol,
    scores: list[float],
    null_score: Callable[[int], float],
    shots_score: Callable[[int, int], float],
    *,
    smallest_class: float,
) -> Details:
    """Scores beside the score: of each seed, of permuted labels, and the learning curve.

    `null_score` takes a seed; `shots_score` a number of rows per class and a seed.
    """
    seeds = range(protocol.seed, protocol.seed + protocol.null_draws)
    null_scores = [null_score(seed) for seed in seeds]
    curve: dict[str, float] = {}
    for shots in protocol.shots:
        if shots < smallest_class:
            draws = [shots_score(shots, seed) for seed in seeds]
            curve[str(shots)] = float(mean_with_value(draws))
    curve["all"] = float(np.mean(scores))
    return {
        "seed_scores": scores,
        "null_score": float(mean_with_value(null_scores)),
        "null_scores": null_scores,
        "score_by_shots": curve,
    }


def permuted(labels: IndexArray, groups: Groups | None, seed: int) -> IndexArray:
    """For each row the row whose label it takes: of patients, where each has one label."""
    rng = np.random.default_rng(seed)
    codes = np.arange(len(labels)) if groups is None else groups.codes
    order = permuted_rows(labels, codes, rng)
    return rng.permutation(len(labels)) if order is None else order


def honest_cases(
    run: Run,
    cases: Cases,
    protocol: Protocol,
    draw_folds: Callable[[Cases, Protocol], Sequence[Fold]],
) -> tuple[list[Fold], list[ProbeResult], Details]:
    """A probe of cases: folds (of each seed), the result of each, what stands beside the score.

    Memory: that of the probe, and the cases of a fold once more.
    """
    repeats = 1 if cases.folds else protocol.repeats
    seeds = range(protocol.seed, protocol.seed + repeats)
    by_seed = [draw_folds(cases, replace(protocol, seed=seed)) for seed in seeds]
    outer = [*chain.from_iterable(by_seed)]
    swept = replace(protocol, inner_folds=0, folds=protocol.inner_folds)
    chosen = [
        _best([choices(run(cases.take(train), protocol=swept))]) for train, _ in outer
    ]
    results = [
        run(replace(cases, folds=(fold,)), protocol=narrowed(protocol, choice))
        for fold, choice in zip(outer, chosen, strict=True)
    ]
    usual = narrowed(protocol, Counter(chosen).most_common(1)[0][0])
    labels = cases.strata

    def null_score(seed: int) -> float:
        scores = []
        order = np.arange(len(labels))
        for train, val in by_seed[0]:
            mixed = order.copy()
            groups = cases.groups and cases.groups.take(train)
            mixed[train] = train[permuted(labels[train], groups, seed)]
            data = replace(cases.relabelled(mixed), folds=((train, val),))
            scores.append(run(data, protocol=usual).score)
        return float(mean_with_value(scores))

    def shots_score(shots: int, seed: int) -> float:
        few = tuple(
            (train[draw_rows(labels[train], shots, seed=seed)], val)
            for train, val in by_seed[0]
        )
        return run(replace(cases, folds=few), protocol=usual).score

    by_fold = np.array([result.score for result in results]).reshape(len(by_seed), -1)
    training_share = len(by_seed[0][0][0]) / len(labels)
    if isinstance(cases, SurvivalSet):
        shots = tuple(k for k in protocol.shots if k >= MIN_SURVIVORS)
        protocol = replace(protocol, shots=shots)
    details = {
        "selected": dict(Counter(", ".join(map(str, choice)) for choice in chosen)),
        "selected_on": f"chosen on {protocol.inner_folds} inner folds of the training cases",
        **_scores_beside(
            protocol,
            mean_with_value(by_fold.T).tolist(),
            null_score,
            shots_score,
            smallest_class=(np.bincount(labels) * training_share).min(),
        ),
    }
    return outer, results, details
