"""Labels of cases, over folds: logistic regression on case means, or ABMIL on bags of tiles.

ABMIL: gated attention weighs the tiles of a case, then classifies; Ilse, Tomczak, Welling,
"Attention-based deep multiple instance learning", ICML 2018.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.linear_model import LogisticRegression

from thinsection.errors import DatasetError, InvalidInputError
from thinsection.probe.data.cases import ReadEmbeddings
from thinsection.probe.data.files import read_embeddings
from thinsection.probe.data.sets import CaseSet, check_finite
from thinsection.probe.metrics import macro_auroc
from thinsection.probe.protocol import NANOPATH, AbmilSettings, LogisticSettings, Protocol
from thinsection.probe.result import Predictions, ProbeResult
from thinsection.probe.statistics import Fold, bootstrap_folds, stratified_folds
from thinsection.weights.placement import resolve_device

Probability = npt.NDArray[np.float64]  # (n, K)
_Bag = Callable[[int, np.random.Generator | None], torch.Tensor]  # a case's tiles (n, D)


def slide_probe(cases: CaseSet, *, protocol: Protocol = NANOPATH) -> ProbeResult:
    """Mean AUROC over folds at the best C (ties: the smallest C).

    Memory: 8 n D (scikit-learn's float64 copy) + 8 n K per C.

    Raises:
        DatasetError: a fold lacks a class.
        InvalidInputError: a class has fewer cases than folds.
        ConfigError: the protocol defines no slide probe.
    """
    settings: LogisticSettings = protocol.require("logistic")
    folds = case_folds(cases, protocol)
    by_c = {c: [_fit(cases, fold, c, settings.max_iter) for fold in folds] for c in settings.cs}
    scores = {c: _fold_scores(cases, folds, parts) for c, parts in by_c.items()}
    best = max(scores, key=lambda c: np.mean(scores[c]))
    details = {
        "best_c": best,
        "score_by_c": {f"{c:g}": float(np.mean(s)) for c, s in scores.items()},
        "fold_scores": scores[best],
    }
    return _result("slide", cases, folds, by_c[best], protocol=protocol, details=details)


def case_folds(cases: CaseSet, protocol: Protocol) -> Sequence[Fold]:
    """The dataset's own folds, or the protocol's stratified ones.

    Raises:
        DatasetError: a part of a fold lacks a class, so that it can neither train nor score.
    """
    names = cases.class_names
    folds = cases.folds or stratified_folds(
        cases.labels, folds=protocol.folds, seed=protocol.seed, class_names=names
    )
    for i, fold in enumerate(folds):
        for part, rows in zip(("train", "validation"), fold, strict=True):
            absent = sorted(set(range(len(names))) - set(cases.labels[rows].tolist()))
            if absent:
                raise DatasetError(
                    f"the {part} part of each fold must hold every class, got none of "
                    f"{', '.join(names[c] for c in absent)} in fold {i} of {cases.name!r}"
                )
    return folds


def _result(
    probe: str,
    cases: CaseSet,
    folds: Sequence[Fold],
    parts: list[Probability],
    *,
    protocol: Protocol,
    details: dict[str, Any],
) -> ProbeResult:
    """The result of probabilities per fold: mean fold AUROC, interval over cases in the folds."""
    rows, probability = np.concatenate([val for _, val in folds]), np.concatenate(parts)
    weighted = [
        partial(macro_auroc, part, cases.labels[val])
        for part, (_, val) in zip(parts, folds, strict=True)
    ]
    return ProbeResult(
        probe=probe,
        dataset=cases.name,
        metric="auroc",
        score=float(np.mean(_fold_scores(cases, folds, parts))),
        interval=bootstrap_folds(folds, weighted, seed=protocol.seed),
        protocol=protocol,
        details=details,
        facts={
            "cases": len(cases.ids),
            "dim": int(cases.vectors.shape[1]),
            "fold_sizes": [[len(train), len(val)] for train, val in folds],
            **cases.facts,
        },
        predictions=Predictions(
            class_names=cases.class_names,
            ids=tuple(cases.ids[i] for i in rows),
            truth=cases.labels[rows],
            prediction=probability.argmax(axis=1),
            probability=probability,
        ),
    )


def _fit(cases: CaseSet, fold: Fold, c: float, max_iter: int) -> Probability:
    """Class probabilities of the validation rows."""
    train, val = fold
    model = LogisticRegression(C=c, class_weight="balanced", max_iter=max_iter, random_state=0)
    model.fit(cases.vectors[train].astype(np.float64), cases.labels[train])
    return model.predict_proba(cases.vectors[val].astype(np.float64))  # type: ignore[no-any-return]


def _fold_scores(cases: CaseSet, folds: Sequence[Fold], parts: list[Probability]) -> list[float]:
    return [
        float(macro_auroc(probability, cases.labels[val])[0])
        for (_, val), probability in zip(folds, parts, strict=True)
    ]


def abmil_probe(
    cases: CaseSet,
    *,
    protocol: Protocol = NANOPATH,
    device: str = "cpu",
    read: ReadEmbeddings = read_embeddings,
) -> ProbeResult:
    """Mean AUROC over folds of one model per fold, trained for a fixed number of epochs.

    Args:
        cases: labels, folds and files of tile embeddings; `vectors` are not used.
        protocol: settings and seed; fold i is seeded with seed + i.
        device: where the model trains.
        read: reads one file.

    Memory: the tiles of one case + the model; tiles are read again each epoch, never kept.

    Raises:
        InvalidInputError: another number of bags than cases, an empty bag, non-finite tiles.
        DatasetError: a fold lacks a class.
    """
    settings: AbmilSettings = protocol.require("abmil")
    if len(cases.files) != len(cases.ids):
        raise InvalidInputError(
            f"files must be one list a case, got {len(cases.files)} for {len(cases.ids)}"
        )
    folds, where = case_folds(cases, protocol), resolve_device(device, mps=False)

    def bag(case: int, rng: np.random.Generator | None) -> torch.Tensor:
        tiles = _tiles(cases.files[case], read, settings.bag_size, rng)
        return torch.from_numpy(tiles).to(where)

    trained = [
        _train_fold(cases, bag, fold, settings=settings, seed=protocol.seed + i, device=where)
        for i, fold in enumerate(folds)
    ]
    losses = trained[0][1]
    details = {"first_loss": losses[0], "last_loss": losses[-1]}
    parts = [probability for probability, _ in trained]
    return _result("abmil", cases, folds, parts, protocol=protocol, details=details)


def _tiles(
    files: Sequence[Path], read: ReadEmbeddings, bag_size: int, rng: np.random.Generator | None
) -> npt.NDArray[np.float32]:
    """Tiles (n, D) of a case: all of them, or where rng is given at most `bag_size`, in order."""
    tiles = np.concatenate([read(path) for path in files])
    if not len(tiles):
        raise InvalidInputError(f"a bag must hold tiles, got none in {files!r}")
    if rng is not None and len(tiles) > bag_size:
        tiles = tiles[np.sort(rng.choice(len(tiles), bag_size, replace=False))]
    tiles = np.ascontiguousarray(tiles, dtype=np.float32)
    if not np.isfinite(tiles).all():
        check_finite(tiles, [f"{files[0].name}:{i}" for i in range(len(tiles))])
    return tiles


def gated_attention(
    dim: int, hidden: int, num_classes: int, generator: torch.Generator
) -> torch.nn.ModuleDict:
    """The layers, initialised from a generator of their own (uniform in ±1/sqrt(fan in))."""
    widths = {
        "project": (dim, hidden),
        "value": (hidden, hidden),
        "gate": (hidden, hidden),
        "weight": (hidden, 1),
        "classify": (hidden, num_classes),
    }
    with torch.device("meta"):
        layers = torch.nn.ModuleDict({k: torch.nn.Linear(*w) for k, w in widths.items()})
    layers = layers.to_empty(device="cpu")
    with torch.no_grad():
        for layer in layers.values():
            bound = layer.in_features**-0.5  # type: ignore[operator]
            for parameter in layer.parameters():
                parameter.uniform_(-bound, bound, generator=generator)  # type: ignore[arg-type]
    return layers


def attend(layers: torch.nn.ModuleDict, tiles: torch.Tensor) -> torch.Tensor:
    """Logits (K,) of one bag (n, D)."""
    hidden = torch.relu(layers["project"](tiles))
    gated = torch.tanh(layers["value"](hidden)) * torch.sigmoid(layers["gate"](hidden))
    share = torch.softmax(layers["weight"](gated), dim=0)
    logits: torch.Tensor = layers["classify"]((share * hidden).sum(dim=0))
    return logits


def _train_fold(
    cases: CaseSet,
    bag: _Bag,
    fold: Fold,
    *,
    settings: AbmilSettings,
    seed: int,
    device: torch.device,
) -> tuple[npt.NDArray[np.float64], list[float]]:
    """Probabilities (n_val, K) after the last epoch, and the mean loss of each epoch."""
    rng = np.random.default_rng(seed)
    train, val = fold
    dim = bag(int(train[0]), None).shape[1]
    generator, num_classes = torch.Generator().manual_seed(seed), len(cases.class_names)
    layers = gated_attention(dim, settings.hidden, num_classes, generator).to(device)
    decay = settings.weight_decay
    optimizer = torch.optim.AdamW(layers.parameters(), lr=settings.lr, weight_decay=decay)
    counts = np.bincount(cases.labels[train], minlength=num_classes)
    balance = torch.tensor(len(train) / (len(counts) * counts), dtype=torch.float32, device=device)
    losses = []
    for _ in range(settings.epochs):
        total = 0.0
        for case in rng.permutation(train):
            logits = attend(layers, bag(int(case), rng))
            target = torch.tensor(int(cases.labels[case]), device=device)
            # one bag a step: `weight=` would cancel under mean reduction, so it is applied here
            loss = balance[target] * torch.nn.functional.cross_entropy(logits, target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach())
        losses.append(total / len(train))
    with torch.inference_mode():
        rows = [torch.softmax(attend(layers, bag(int(case), None)).double(), 0) for case in val]
    return torch.stack(rows).cpu().numpy(), losses
