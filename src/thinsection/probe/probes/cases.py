"""Probes of cases (slides, patients) over folds: logistic regression, ABMIL, Cox regression."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import cross_entropy

from thinsection.errors import DatasetError, importing, require
from thinsection.probe import intervals, statistics
from thinsection.probe import protocol as suites
from thinsection.probe.data.cases import ReadEmbeddings
from thinsection.probe.data.files import read_embeddings
from thinsection.probe.data.sets import CaseSet, SurvivalSet, check_finite
from thinsection.probe.honest import honest_cases
from thinsection.probe.protocol import NANOPATH, Protocol
from thinsection.probe.result import Predictions, ProbeResult, Risks
from thinsection.probe.statistics import FloatVector, Fold, Scorer, macro_auroc
from thinsection.weights.placement import resolve_device

Folds = Sequence[Fold]
Probability = npt.NDArray[np.float64]  # (n, K)
_Bag = Callable[[int, np.random.Generator | None], torch.Tensor]  # a case's tiles (n, D)


def slide_probe(cases: CaseSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Logistic regression: the mean AUROC over folds at the best C (ties: the smallest C).

    Memory: 8 n D (scikit-learn's copy) + 8 n K per C.

    Raises:
        DatasetError: a fold lacks a class.
        InvalidInputError: a class has fewer cases than folds.
        ConfigError: the protocol defines no slide probe.
    """
    settings: suites.LogisticSettings = protocol.require("logistic")
    if protocol.inner_folds:
        parts, found, beside = honest_cases(slide_probe, cases, protocol, _label_folds)
        shares: list[Any] = [r.predictions.probability for r in found if r.predictions]
        return _classified("slide", cases, parts, shares, protocol=protocol, details=beside)
    folds, x = _label_folds(cases, protocol), cases.vectors
    x = x.astype(np.float64) if settings.double else x
    solver: dict[str, Any] = {"solver": "lbfgs"}
    if cases.name in settings.liblinear_tasks:
        solver = {"solver": "liblinear", "dual": len(x) < x.shape[1]}

    def fit(c: float, train: npt.NDArray, val: npt.NDArray) -> Probability:
        given = {"class_weight": "balanced", "max_iter": settings.max_iter, "random_state": 0}
        model = LogisticRegression(C=c, **given, **solver).fit(x[train], cases.labels[train])
        return model.predict_proba(x[val])  # type: ignore[no-any-return]

    by_c = {c: [fit(c, *fold) for fold in folds] for c in settings.cs}
    scores = {c: _fold_scores(folds, _aurocs(cases, folds, parts)) for c, parts in by_c.items()}
    best = max(scores, key=lambda c: np.mean(scores[c]))  # max keeps the first of equals
    details = {
        "best_c": best,
        "score_by_c": {f"{c:g}": float(np.mean(s)) for c, s in scores.items()},
        "fold_scores": scores[best],
    }
    return _classified("slide", cases, folds, by_c[best], protocol=protocol, details=details)


def _label_folds(cases: CaseSet, protocol: Protocol) -> Folds:
    """The dataset's own folds, or the protocol's stratified ones.

    Raises DatasetError: a part of a fold lacks a class, so that it can neither train nor score.
    """
    names, draw = cases.class_names, statistics.stratified_folds
    folds = _folds(cases, protocol, cases.labels, partial(draw, cases.labels, class_names=names))
    for i, fold in enumerate(folds):
        for part, rows in zip(("train", "validation"), fold, strict=True):
            absent = set(range(len(names))) - set(cases.labels[rows].tolist())
            rule = f"the {part} part of each fold must hold every class"
            missing = ", ".join(names[c] for c in sorted(absent))
            found = f"none of {missing} in fold {i} of {cases.name!r}"
            require(not absent, rule, found, error=DatasetError)
    return folds


def _folds(
    cases: CaseSet | SurvivalSet,
    protocol: Protocol,
    labels: npt.NDArray,
    draw: Callable[..., Folds],
) -> Folds:
    """The dataset's own folds, else drawn ones: over patients where one has several cases.

    Raises DatasetError: the parts of a fold share patients, or cases of one vector.
    """
    drawn = {"folds": protocol.folds, "seed": protocol.seed}
    if cases.together:
        draw = partial(statistics.grouped_folds, labels, cases.together)
    folds = cases.folds or draw(**drawn)
    cases.leakage(folds)
    return folds


def _aurocs(cases: CaseSet, folds: Folds, parts: Sequence[Probability]) -> list[Scorer]:
    """By fold: the AUROC of its validation rows under weights."""
    pairs = zip(parts, folds, strict=True)
    return [partial(macro_auroc, part, cases.labels[val]) for part, (_, val) in pairs]


def _fold_scores(folds: Folds, scorers: list[Scorer]) -> list[float]:
    """By fold: the score of its validation rows, each counted once."""
    pairs = zip(scorers, folds, strict=True)
    return [float(score(np.ones((1, len(val))))[0]) for score, (_, val) in pairs]


def _over_folds(
    cases: CaseSet | SurvivalSet, folds: Folds, scorers: list[Scorer], **known: Any
) -> ProbeResult:
    """The mean of the folds' scores, with an interval over cases in the folds."""
    protocol, own = known["protocol"], known.pop("facts", {})
    sizes = [[len(train), len(val)] for train, val in folds]
    facts = {"cases": len(cases.ids), **own, "dim": cases.vectors.shape[1], "fold_sizes": sizes}
    return ProbeResult(
        dataset=cases.name,
        score=float(np.mean(_fold_scores(folds, scorers))),
        interval=intervals.bootstrap_folds(folds, scorers, seed=protocol.seed, groups=cases.groups),
        facts={**facts, **cases.facts, **cases.hashes(folds), "leakage": cases.leakage(folds)},
        **known,
    )


def _classified(
    probe: str, cases: CaseSet, folds: Folds, parts: Sequence[Probability], **known: Any
) -> ProbeResult:
    """The result of class probabilities of each fold's validation rows."""
    rows, probability = np.concatenate([val for _, val in folds]), np.concatenate(parts)
    fold = np.repeat(np.arange(len(folds)), [len(val) for _, val in folds])
    predictions = Predictions(
        class_names=cases.class_names,
        ids=tuple(cases.ids[i] for i in rows),
        truth=cases.labels[rows],
        prediction=probability.argmax(axis=1),
        probability=probability,
        groups=cases.groups and cases.groups.take(rows),
        fold=fold,
    )
    known = {"probe": probe, "metric": "auroc", "predictions": predictions, **known}
    return _over_folds(cases, folds, _aurocs(cases, folds, parts), **known)


def abmil_probe(
    cases: CaseSet,
    *,
    protocol: Protocol = NANOPATH,
    device: str = "cpu",
    read: ReadEmbeddings = read_embeddings,
) -> ProbeResult:
    """Mean AUROC over folds of one attention model per fold, trained for a fixed number of epochs.

    Args:
        cases: labels, folds and files of tile embeddings; `vectors` are not used.
        protocol: settings and seed; fold i is seeded with seed + i.
        device: where the model trains.
        read: reads one file.

    Memory: the tiles of one case + the model; tiles are read again each epoch, never kept.

    Raises:
        InvalidInputError: another number of bags than cases, an empty bag, non-finite tiles.
        DatasetError: a fold lacks a class.

    Source: Ilse, Tomczak, Welling, "Attention-based deep multiple instance learning", ICML 2018.
    """
    settings: suites.AbmilSettings = protocol.require("abmil")
    sizes = (len(cases.files), len(cases.ids))
    require(sizes[0] == sizes[1], "files must be one list a case", f"{sizes[0]} for {sizes[1]}")
    folds, where = _label_folds(cases, protocol), resolve_device(device, mps=False)

    def bag(case: int, rng: np.random.Generator | None) -> torch.Tensor:
        return torch.from_numpy(_tiles(cases.files[case], read, settings.bag_size, rng)).to(where)

    seeds = range(protocol.seed, protocol.seed + len(folds))
    trained = (_train_fold(cases, bag, *pair, settings) for pair in zip(folds, seeds, strict=True))
    parts, losses = zip(*trained, strict=True)
    details = {"first_loss": losses[0][0], "last_loss": losses[0][-1]}
    return _classified("abmil", cases, folds, parts, protocol=protocol, details=details)


def _tiles(
    files: Sequence[Path], read: ReadEmbeddings, bag_size: int, rng: np.random.Generator | None
) -> npt.NDArray[np.float32]:
    """Tiles (n, D) of a case: all of them, or where rng is given at most `bag_size`, in order."""
    tiles = np.concatenate([read(path) for path in files])
    require(len(tiles) > 0, "a bag must hold tiles", f"none in {files!r}")
    if rng is not None and len(tiles) > bag_size:
        tiles = tiles[np.sort(rng.choice(len(tiles), bag_size, replace=False))]
    tiles = np.ascontiguousarray(tiles, dtype=np.float32)
    if not np.isfinite(tiles).all():
        check_finite(tiles, [f"{files[0].name}:{i}" for i in range(len(tiles))])
    return tiles


def _gated_attention(widths: dict[str, tuple[int, int]], seed: int) -> torch.nn.ModuleDict:
    """Linear layers, initialised from a generator of their own (uniform in ±1/sqrt(fan in))."""
    generator = torch.Generator().manual_seed(seed)
    meta = {k: torch.nn.Linear(*w, device="meta") for k, w in widths.items()}
    layers = {k: layer.to_empty(device="cpu") for k, layer in meta.items()}
    with torch.no_grad():
        for layer in layers.values():
            bound = layer.in_features**-0.5
            for parameter in layer.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
    return torch.nn.ModuleDict(layers)


def _attend(layers: torch.nn.ModuleDict, tiles: torch.Tensor) -> torch.Tensor:
    """Logits (K,) of one bag (n, D)."""
    hidden = torch.relu(layers["project"](tiles))
    gated = torch.tanh(layers["value"](hidden)) * torch.sigmoid(layers["gate"](hidden))
    share = torch.softmax(layers["weight"](gated), dim=0)
    logits: torch.Tensor = layers["classify"]((share * hidden).sum(dim=0))
    return logits


def _train_fold(
    cases: CaseSet, bag: _Bag, fold: Fold, seed: int, settings: suites.AbmilSettings
) -> tuple[Probability, list[float]]:
    """Probabilities (n_val, K) after the last epoch, and the mean loss of each epoch."""
    rng, (train, val), first = np.random.default_rng(seed), fold, bag(int(fold[0][0]), None)
    dim, device, num_classes = first.shape[1], first.device, len(cases.class_names)
    h = settings.hidden
    widths = {"project": (dim, h), "value": (h, h), "gate": (h, h), "weight": (h, 1)}
    layers = _gated_attention({**widths, "classify": (h, num_classes)}, seed).to(device)
    decay = settings.weight_decay
    optimizer = torch.optim.AdamW(layers.parameters(), lr=settings.lr, weight_decay=decay)
    counts = np.bincount(cases.labels[train], minlength=num_classes)
    balance = torch.tensor(len(train) / (num_classes * counts), dtype=torch.float32, device=device)
    losses = []
    for _ in range(settings.epochs):
        total = 0.0
        for case in rng.permutation(train):
            target = torch.tensor(int(cases.labels[case]), device=device)
            # one bag a step: `weight=` would cancel under mean reduction, so it is applied here
            loss = balance[target] * cross_entropy(_attend(layers, bag(int(case), rng)), target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach())
        losses.append(total / len(train))
    with torch.inference_mode():
        rows = [torch.softmax(_attend(layers, bag(int(case), None)).double(), 0) for case in val]
    return torch.stack(rows).cpu().numpy(), losses


def survival_probe(cases: SurvivalSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Mean Harrell's c-index over folds of a Cox model.

    Memory: 8 (n D + D²) of the solver, and n² of the bootstrap per fold.

    Raises:
        MissingDependencyError: scikit-survival is not installed.
        InvalidInputError: a fold without comparable pairs.
        ConfigError: the protocol defines no survival probe.
    """
    settings: suites.SurvivalSettings = protocol.require("survival")
    if protocol.inner_folds:
        parts, found, beside = honest_cases(survival_probe, cases, protocol, _event_folds)
        risks = [r.risks.risk for r in found if r.risks]
        return _at_risk(cases, parts, risks, protocol, beside)
    folds = _event_folds(cases, protocol)
    by_alpha = {a: [_fit_risk(cases, f, settings, a) for f in folds] for a in settings.alphas}
    scores = {
        a: _fold_scores(folds, _concordances(cases, folds, risks)) for a, risks in by_alpha.items()
    }
    best = max(scores, key=lambda a: np.mean(scores[a]))  # max keeps the first of equals
    means = {a: float(np.mean(of_folds)) for a, of_folds in scores.items()}
    details = {"fold_scores": scores[best], "model": settings.model, "score_by_alpha": means}
    return _at_risk(cases, folds, by_alpha[best], protocol, details)


def _event_folds(cases: SurvivalSet, protocol: Protocol) -> Folds:
    """The dataset's own folds, or the protocol's, stratified by event."""
    draw = partial(statistics.stratified_folds, cases.strata)
    return _folds(cases, protocol, cases.strata, draw)


def _concordances(cases: SurvivalSet, folds: Folds, risks: Sequence[FloatVector]) -> list[Scorer]:
    event, time, pairs = cases.event, cases.time, zip(risks, folds, strict=True)
    return [statistics.concordance(event[val], time[val], risk) for risk, (_, val) in pairs]


def _at_risk(
    cases: SurvivalSet,
    folds: Folds,
    risks: Sequence[FloatVector],
    protocol: Protocol,
    details: dict[str, Any],
) -> ProbeResult:
    """The result of each fold's risks."""
    rows, event, time = np.concatenate([val for _, val in folds]), cases.event, cases.time
    scorers = _concordances(cases, folds, risks)
    return _over_folds(
        cases,
        folds,
        scorers,
        probe="survival",
        metric="c_index",
        protocol=protocol,
        details=details,
        facts={"events": int(event.sum())},
        risks=Risks(
            ids=tuple(cases.ids[i] for i in rows),
            risk=np.concatenate(risks),
            high=np.concatenate([risk > np.median(risk) for risk in risks]),
            event=event[rows],
            time=time[rows],
            groups=cases.groups and cases.groups.take(rows),
            fold=np.repeat(np.arange(len(folds)), [len(val) for _, val in folds]),
        ),
    )


def _fit_risk(
    cases: SurvivalSet, fold: Fold, settings: suites.SurvivalSettings, alpha: float
) -> FloatVector:
    """Risk scores of the validation cases."""
    with importing("the survival probe needs scikit-survival", "probe"):
        from sksurv.linear_model import CoxnetSurvivalAnalysis, CoxPHSurvivalAnalysis
        from sksurv.util import Surv
    train, val = fold
    x = cases.vectors.astype(np.float64)
    if settings.z_scores:
        x = (x - x[train].mean(axis=0)) / (x[train].std(axis=0) + 1e-8)
    if settings.rotate and x.shape[1] > len(train):
        x = x @ np.linalg.svd(x[train], full_matrices=False)[2].T
    steps = settings.max_iter
    if settings.model == "cox":
        model = CoxPHSurvivalAnalysis(alpha=alpha, ties="breslow", n_iter=steps)
    else:
        model = CoxnetSurvivalAnalysis(alphas=[alpha], l1_ratio=settings.l1_ratio, max_iter=steps)
    model.fit(x[train], Surv.from_arrays(cases.event[train], cases.time[train]))
    return np.asarray(model.predict(x[val]), dtype=np.float64)
