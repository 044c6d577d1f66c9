"""The protocol `honest`: nested cross-validation.

Hyperparameters are selected by cross-validation inside the training rows. The final fit is repeated
with several seeds. The test rows are used only to score it.

This module calls the function of a probe again and again, with protocols that are restricted to one
hyperparameter setting. Beside the score it reports the score with permuted training labels (chance
level) and a learning curve.
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
    nan_mean,
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

# predicted labels (Nq,) of Nq test rows, class probabilities (Nq, K), details
Prediction = tuple[IndexArray, FloatVector, Details]
TileSettings = TypeVar("TileSettings", LinearSettings, KnnSettings, FewshotSettings)
Predict = Callable[[TileSet, TileSettings, int], Prediction]  # (data, settings, seed)
ProbeFunction = Callable[..., ProbeResult]  # (data, protocol=...)
Cases = CaseSet | SurvivalSet
# fewest cases of each kind (event, censored) that a survival model is fitted to
MIN_SURVIVAL_SHOTS = 16


def tile_probe(
    name: str,
    kind: type[TileSettings],
    predict: Predict[TileSettings],
    data: TileSet,
    protocol: Protocol,
    *,
    select: bool = True,
) -> ProbeResult:
    """Runs the predictor under the protocol, with nested selection if it has inner folds.

    `select=False`: the probe has no hyperparameter.

    Memory: that of `predict`; under `honest` the training rows once more. Raises DatasetError: the
    splits do not fit each other; ConfigError: the protocol does not define the probe.
    """
    data = check_tile_set(data)
    settings = protocol.require(name, kind)
    if protocol.inner_folds:
        probe = partial(tile_probe, name, kind, predict, select=select)
        return _honest_tiles(probe, data, protocol, select=select)
    labels, probability, details = predict(data, settings, protocol.seed)
    return classified(
        name,
        data,
        labels,
        metric=settings.metric,
        protocol=protocol,
        probability=probability,
        details=details,
    )


def restricted(
    protocol: Protocol, choice: Choice, *, most_shots: int | None = None
) -> Protocol:
    """The protocol with one setting in each sweep, so that there is nothing to select.

    The result has no inner folds, so a probe runs once with it, whatever its `repeats`.
    """
    p = replace(protocol, inner_folds=0)
    values = [float(value) for value in choice]
    # only a linear probe chooses two values: learning rate and epoch
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
    # set in every section: a probe reads only its own section
    return replace(
        p,
        knn=p.knn and replace(p.knn, ks=(int(value),)),
        logistic=p.logistic and replace(p.logistic, cs=(value,)),
        survival=p.survival and replace(p.survival, alphas=(value,)),
    )


def _best(scores: Sequence[dict[Choice, float]]) -> Choice:
    """The setting with the highest mean score over the folds; the first of ties.

    Only settings that every fold tried are compared.
    """
    means: dict[Choice, float] = {}
    for choice in scores[0]:
        if all(choice in fold_scores for fold_scores in scores):
            means[choice] = float(
                nan_mean([fold_scores[choice] for fold_scores in scores])
            )
    return max(means, key=means.__getitem__)


def _honest_tiles(
    probe: ProbeFunction, data: TileSet, protocol: Protocol, *, select: bool
) -> ProbeResult:
    """Result under a protocol with inner folds, see `tile_probe`."""
    train = data.train
    choice: Choice = ()
    words = "nothing was selected"
    if select:
        choice, words = _choose_setting(probe, data, protocol)
    chosen = restricted(protocol, choice)
    seeds = range(protocol.seed, protocol.seed + protocol.repeats)
    results = [probe(data, protocol=replace(chosen, seed=seed)) for seed in seeds]

    def score_trained_on(part: Split) -> float:
        smallest = int(np.bincount(part.labels, minlength=data.num_classes).min())
        usable_choice = choice
        # kNN is the only tile probe that chooses one value: k, at most the number of training rows
        if len(choice) == 1:
            usable_choice = (min(int(choice[0]), len(part)),)
        part_protocol = restricted(protocol, usable_choice, most_shots=smallest)
        return probe(replace(data, train=part), protocol=part_protocol).score

    def null_score(seed: int) -> float:
        order = permutation_of_labels(train.labels, train.groups, seed)
        labels = train.labels[order]
        return score_trained_on(replace(train, labels=labels))

    def shots_score(shots: int, seed: int) -> float:
        return score_trained_on(train.take(draw_rows(train.labels, shots, seed=seed)))

    details = {
        "selected": ", ".join(map(str, choice)),
        "selected_on": words,
        **_scores_beside(
            protocol,
            [result.score for result in results],
            null_score,
            shots_score,
            smallest_class=np.bincount(train.labels).min(),
        ),
    }
    predictions = [result.predictions for result in results if result.predictions]
    return classified(
        results[0].probe,
        data,
        predictions[0].prediction,
        metric=results[0].metric,
        protocol=protocol,
        details=details,
        probability=predictions[0].probability,
        repeats=np.stack([each.prediction for each in predictions]),
    )


def _choose_setting(
    probe: ProbeFunction, data: TileSet, protocol: Protocol
) -> tuple[Choice, str]:
    """The best setting on inner folds of the training rows, and a sentence about these folds."""
    train = data.train
    inner_folds = protocol.inner_folds
    # `drawn_over`: 'over patients', or '' for folds over rows
    folds, drawn_over = drawn_folds(
        train.labels, train.groups, folds=inner_folds, seed=protocol.seed
    )
    sweep = replace(protocol, inner_folds=0)
    scores = []
    for training_rows, validation_rows in folds:
        part = replace(
            data, train=train.take(training_rows), val=train.take(validation_rows)
        )
        scores.append(choices(probe(part, protocol=sweep)))
    words = f"chosen on {inner_folds} inner folds of the training rows {drawn_over}"
    return _best(scores), words.strip()


def _scores_beside(
    protocol: Protocol,
    scores: list[float],
    null_score: Callable[[int], float],
    shots_score: Callable[[int, int], float],
    *,
    smallest_class: float,
) -> Details:
    """Details of a result: score of each seed, scores with permuted labels, learning curve.

    `null_score` takes a seed; `shots_score` takes a number of rows per class and a seed.
    """
    seeds = range(protocol.seed, protocol.seed + protocol.null_draws)
    null_scores = [null_score(seed) for seed in seeds]
    curve: dict[str, float] = {}
    for shots in protocol.shots:
        if shots < smallest_class:
            draws = [shots_score(shots, seed) for seed in seeds]
            curve[str(shots)] = float(nan_mean(draws))
    curve["all"] = float(np.mean(scores))
    return {
        "seed_scores": scores,
        "null_score": float(nan_mean(null_scores)),
        "null_scores": null_scores,
        "score_by_shots": curve,
    }


def permutation_of_labels(
    labels: IndexArray, groups: Groups | None, seed: int
) -> IndexArray:
    """Row indices whose labels permute `labels`: row i takes the label of row result[i].

    Patients swap labels as a whole if each of them has one label; otherwise single rows swap them.
    """
    rng = np.random.default_rng(seed)
    codes = np.arange(len(labels)) if groups is None else groups.codes
    order = permuted_rows(labels, codes, rng)
    return rng.permutation(len(labels)) if order is None else order


def honest_cases(
    probe: ProbeFunction,
    cases: Cases,
    protocol: Protocol,
    draw_folds: Callable[[Cases, Protocol], Sequence[Fold]],
) -> tuple[list[Fold], list[ProbeResult], Details]:
    """Runs a probe of cases under the protocol.

    Returns the outer folds of all seeds, a result for each fold, and the details (scores with
    permuted labels, learning curve).

    Memory: that of the probe, and the cases of a fold once more.
    """
    repeats = 1 if cases.folds else protocol.repeats
    seeds = range(protocol.seed, protocol.seed + repeats)
    by_seed = [draw_folds(cases, replace(protocol, seed=seed)) for seed in seeds]
    outer = [*chain.from_iterable(by_seed)]
    # the probe's own cross-validation on the training cases of an outer fold is the inner loop
    inner = replace(protocol, inner_folds=0, folds=protocol.inner_folds)
    chosen = [
        _best([choices(probe(cases.take(train), protocol=inner))]) for train, _ in outer
    ]
    results = [
        probe(replace(cases, folds=(fold,)), protocol=restricted(protocol, choice))
        for fold, choice in zip(outer, chosen, strict=True)
    ]
    # the setting that most folds chose
    usual = restricted(protocol, Counter(chosen).most_common(1)[0][0])
    # classes; for survival cases, whether the event was observed
    labels = cases.strata

    def null_score(seed: int) -> float:
        scores = []
        order = np.arange(len(labels))
        for train, val in by_seed[0]:
            # only the training cases get permuted labels
            label_rows = order.copy()
            groups = cases.groups and cases.groups.take(train)
            permutation = permutation_of_labels(labels[train], groups, seed)
            label_rows[train] = train[permutation]
            data = replace(cases.relabelled(label_rows), folds=((train, val),))
            scores.append(probe(data, protocol=usual).score)
        return float(nan_mean(scores))

    def shots_score(shots: int, seed: int) -> float:
        few = tuple(
            (train[draw_rows(labels[train], shots, seed=seed)], val)
            for train, val in by_seed[0]
        )
        return probe(replace(cases, folds=few), protocol=usual).score

    by_fold = np.array([result.score for result in results]).reshape(len(by_seed), -1)
    training_share = len(by_seed[0][0][0]) / len(labels)
    if isinstance(cases, SurvivalSet):
        shots = tuple(k for k in protocol.shots if k >= MIN_SURVIVAL_SHOTS)
        protocol = replace(protocol, shots=shots)
    details = {
        "selected": dict(Counter(", ".join(map(str, choice)) for choice in chosen)),
        "selected_on": f"chosen on {protocol.inner_folds} inner folds of the training cases",
        **_scores_beside(
            protocol,
            nan_mean(by_fold.T).tolist(),
            null_score,
            shots_score,
            smallest_class=(np.bincount(labels) * training_share).min(),
        ),
    }
    return outer, results, details
