"""The protocol `honest`: settings are chosen on inner folds of what trains, seeds are repeated, and
the scored rows are looked at once, with settings that no scored row had a say in.

A probe is here its own function, run under protocols that are narrowed to one setting. Beside the
score stand that of permuted labels (what the probe makes of nothing) and a learning curve.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.evaluation.cases import Groups
from thinsection.evaluation.comparison import permuted_rows
from thinsection.evaluation.metrics import (
    FloatVector,
    Fold,
    IndexArray,
    mean_with_value,
)
from thinsection.evaluation.splits import draw_rows, drawn_folds
from thinsection.probe.data.sets import (
    CaseSet,
    Split,
    SurvivalSet,
    TileSet,
    check_tile_set,
)
from thinsection.probe.protocol import Protocol
from thinsection.probe.result import Choice, ProbeResult, choices, classified

# labels (Nq,), shares (Nq, K), details
Guess = tuple[IndexArray, FloatVector, dict[str, Any]]
Guesser = Callable[[TileSet, Any, int], Guess]  # of data, settings and seed
Run = Callable[..., ProbeResult]  # (data, protocol=...): a probe
_Score = Callable[..., float]  # of permuted labels (seed), of some rows (shots, seed)
MIN_SURVIVORS = 16  # with and without event, for a model to be fitted


def tile_probe(
    name: str, guess: Guesser, data: TileSet, protocol: Protocol, *, select: bool = True
) -> ProbeResult:
    """The result of a guess as the protocol has it; without `select` there is nothing to choose.

    Memory: that of the guess; under `honest` the training rows once more. Raises DatasetError: the
    splits do not fit each other; ConfigError: the protocol does not define the probe.
    """
    data = check_tile_set(data)
    settings = protocol.require(name)
    if protocol.inner_folds:
        run: Run = partial(tile_probe, name, guess, select=select)
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
    p, values = replace(protocol, inner_folds=0), [float(v) for v in choice]
    if p.linear and len(values) == 2:
        rate, epochs = (values[0],), int(values[1])
        return replace(
            p, linear=replace(p.linear, lrs=rate, epochs=epochs, last_epoch=True)
        )
    if p.fewshot and most_shots is not None:
        p = replace(
            p, fewshot=replace(p.fewshot, shots=min(most_shots, p.fewshot.shots))
        )
    if not values:
        return p
    return replace(  # a probe reads its own alone
        p,
        knn=p.knn and replace(p.knn, ks=(int(values[0]),)),
        logistic=p.logistic and replace(p.logistic, cs=(values[0],)),
        survival=p.survival and replace(p.survival, alphas=(values[0],)),
    )


def _best(scores: list[dict[Choice, float]]) -> Choice:
    """Best setting on the mean of those that every fold tried; of equal ones the first."""
    means: dict[Choice, float] = {}
    for choice in scores[0]:
        if all(choice in of_fold for of_fold in scores):
            means[choice] = float(mean_with_value([one[choice] for one in scores]))
    return max(means, key=means.__getitem__)


def _honest_tiles(
    run: Run, data: TileSet, protocol: Protocol, *, select: bool
) -> ProbeResult:
    """Result under a protocol with inner folds, see `tile_probe`."""
    train, n = data.train, data.num_classes
    choice, words = (), "nothing was selected"
    if select:
        inner, seed = protocol.inner_folds, protocol.seed
        folds, over = drawn_folds(train.labels, train.groups, folds=inner, seed=seed)
        swept = replace(protocol, inner_folds=0)
        parts = [
            replace(data, train=train.take(a), val=train.take(b)) for a, b in folds
        ]
        choice = _best([choices(run(part, protocol=swept)) for part in parts])
        words = f"chosen on {inner} inner folds of the training rows {over}".strip()
    chosen = narrowed(protocol, choice)
    seeds = range(protocol.seed, protocol.seed + protocol.repeats)
    runs = [run(data, protocol=replace(chosen, seed=seed)) for seed in seeds]

    def trained_on(part: Split) -> float:
        least = int(np.bincount(part.labels, minlength=n).min())
        fitting = (min(int(choice[0]), len(part)),) if len(choice) == 1 else choice
        fits = narrowed(protocol, fitting, most_shots=least)
        return run(replace(data, train=part), protocol=fits).score

    def null(seed: int) -> float:
        return trained_on(
            replace(
                train,
                labels=train.labels[permuted(train.labels, train.groups, seed)],
            )
        )

    def learnt(shots: int, seed: int) -> float:
        return trained_on(train.take(draw_rows(train.labels, shots, seed=seed)))

    scores, guesses = (
        [r.score for r in runs],
        [r.predictions for r in runs if r.predictions],
    )
    details = {"selected": ", ".join(map(str, choice)), "selected_on": words}
    details |= beside(protocol, scores, null, learnt, least=np.bincount(train.labels))
    more: dict[str, Any] = {
        "metric": runs[0].metric,
        "protocol": protocol,
        "details": details,
    }
    more |= {"repeats": np.stack([g.prediction for g in guesses])}
    more |= {"probability": guesses[0].probability}
    return classified(runs[0].probe, data, guesses[0].prediction, **more)


def beside(
    p: Protocol,
    scores: list[float],
    null: _Score,
    learnt: _Score,
    *,
    least: npt.NDArray[np.number],
) -> dict[str, Any]:
    """Scores beside the score: of each seed, of permuted labels, and the learning curve."""
    seeds = range(p.seed, p.seed + p.null_draws)
    by_null, shots = (
        [null(seed) for seed in seeds],
        [k for k in p.shots if k < least.min()],
    )
    curve = {
        str(k): float(mean_with_value([learnt(k, seed) for seed in seeds]))
        for k in shots
    }
    curve["all"] = float(np.mean(scores))
    return {
        "seed_scores": scores,
        "null_score": float(mean_with_value(by_null)),
        "null_scores": by_null,
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
    cases: CaseSet | SurvivalSet,
    protocol: Protocol,
    folds_of: Callable[..., Any],
) -> tuple[list[Fold], list[ProbeResult], dict[str, Any]]:
    """A probe of cases: folds (of each seed), the result of each, what stands beside the score.

    Memory: that of the probe, and the cases of a fold once more.
    """
    seeds = range(
        protocol.seed, protocol.seed + (1 if cases.folds else protocol.repeats)
    )
    by_seed = [folds_of(cases, replace(protocol, seed=seed)) for seed in seeds]
    outer = [fold for folds in by_seed for fold in folds]
    swept = replace(protocol, inner_folds=0, folds=protocol.inner_folds)
    chosen = [
        _best([choices(run(cases.take(train), protocol=swept))]) for train, _ in outer
    ]
    pairs = zip(outer, (narrowed(protocol, choice) for choice in chosen), strict=True)
    parts = [run(replace(cases, folds=(fold,)), protocol=own) for fold, own in pairs]
    usual, labels = (
        narrowed(protocol, Counter(chosen).most_common(1)[0][0]),
        cases.strata,
    )

    def null(seed: int) -> float:
        order, scores = np.arange(len(labels)), []
        for train, val in by_seed[0]:
            mixed = order.copy()
            groups = cases.groups and cases.groups.take(train)
            mixed[train] = train[permuted(labels[train], groups, seed)]
            data = replace(cases.relabelled(mixed), folds=((train, val),))
            scores.append(run(data, protocol=usual).score)
        return float(mean_with_value(scores))

    def learnt(shots: int, seed: int) -> float:
        few = tuple(
            (a[draw_rows(labels[a], shots, seed=seed)], b) for a, b in by_seed[0]
        )
        return run(replace(cases, folds=few), protocol=usual).score

    by_fold = np.array([part.score for part in parts]).reshape(len(by_seed), -1)
    per_seed = mean_with_value(by_fold.T)
    training_share = len(by_seed[0][0][0]) / len(labels)
    least = np.asarray(np.bincount(labels) * training_share, dtype=np.float64)
    if isinstance(cases, SurvivalSet):
        shots = tuple(k for k in protocol.shots if k >= MIN_SURVIVORS)
        protocol = replace(protocol, shots=shots)
    details: dict[str, Any] = {
        "selected": dict(Counter(", ".join(map(str, c)) for c in chosen))
    }
    details["selected_on"] = (
        f"chosen on {protocol.inner_folds} inner folds of the training cases"
    )
    return (
        outer,
        parts,
        details | beside(protocol, per_seed.tolist(), null, learnt, least=least),
    )
