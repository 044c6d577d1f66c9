"""Probes of tile embeddings: a linear layer, nearest neighbours, few shots, robustness.

Shapes: N training and Nq validation rows, D channels, K classes, S support sets.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import softmax
from torch.nn.functional import cross_entropy, linear

from thinsection.attention.products import fast_products
from thinsection.errors import DatasetError, InvalidInputError, require
from thinsection.probe import intervals, statistics
from thinsection.probe import protocol as suites
from thinsection.probe.compute import cosine_neighbours, rows_within, to_device, unit_rows
from thinsection.probe.data import sets
from thinsection.probe.data.sets import Embeddings, Labels, RobustnessSet, TileSet
from thinsection.probe.groups import group_rows
from thinsection.probe.honest import honest_tiles
from thinsection.probe.protocol import NANOPATH, Protocol
from thinsection.probe.result import ProbeResult, Ratios, classified
from thinsection.probe.statistics import IndexArray
from thinsection.types import GIB
from thinsection.weights.placement import resolve_device

VOTE_BYTES = 1 << 26  # of votes that are counted at a time
SET_BLOCK = 64  # support sets at a time
QUERY_BLOCK = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHead:
    """The best epoch of one learning rate."""

    lr: float
    epoch: int  # from 1: of the best validation score, the first one on ties
    score: float  # that score
    weight: npt.NDArray[np.float32]  # (K, D) at that epoch
    bias: npt.NDArray[np.float32]  # (K,)
    prediction: Labels  # (Nq,) of the validation rows at that epoch
    scores: tuple[float, ...] = ()  # of validation after each epoch
    losses: tuple[float, ...] = ()  # of training, mean of each epoch


def linear_probe(
    data: TileSet, *, protocol: Protocol = NANOPATH, device: str = "cpu"
) -> ProbeResult:
    """One linear layer on frozen embeddings: the best score over learning rate x epoch.

    Of equal scores the first rate and the first epoch count.

    Memory: the embeddings (once more on CUDA) + 5 K D floats of weights and AdamW's state.

    Raises:
        DatasetError: the splits do not fit each other.
        ConfigError: the protocol defines no linear probe.
    """
    data = sets.check_tile_set(data)
    settings: suites.LinearSettings = protocol.require("linear")
    if protocol.inner_folds:
        return honest_tiles(partial(linear_probe, device=device), data, protocol)
    heads = {
        f"{lr:g}": train_head(data, settings, lr=lr, seed=protocol.seed + i, device=device)
        for i, lr in enumerate(settings.lrs)
    }
    best = max(heads.values(), key=lambda head: head.score)  # max keeps the first of equals
    logits = data.val.embeddings.astype(np.float64) @ best.weight.T.astype(np.float64) + best.bias
    details = {
        "best_lr": best.lr,
        "best_epoch": best.epoch,
        "score_by_lr": {lr: head.score for lr, head in heads.items()},
        "best_epoch_by_lr": {lr: head.epoch for lr, head in heads.items()},
        "last_loss_by_lr": {lr: head.losses[-1] for lr, head in heads.items()},
        "curve": {lr: list(head.scores) for lr, head in heads.items()},
    }
    metric, guess, share = settings.metric, best.prediction, softmax(logits, axis=1)
    return classified(
        "linear", data, guess, metric=metric, protocol=protocol, details=details, probability=share
    )


def train_head(
    data: TileSet, settings: suites.LinearSettings, *, lr: float, seed: int, device: str = "cpu"
) -> LinearHead:
    """Trains one head; the same seed gives the same bits on the same device and thread count.

    Weights and orders are drawn on the CPU, so that every device starts alike and sees the same
    batches. Nothing touches the global random state.
    """
    where = resolve_device(device, mps=False)
    generator = torch.Generator().manual_seed(seed)
    x, y = to_device(data.train.embeddings, where), to_device(data.train.labels, where)
    val = to_device(data.val.embeddings, where)
    start = initial_head(data.num_classes, x.shape[1], generator)
    weight, bias = (p.to(where).requires_grad_() for p in start)
    optimizer = torch.optim.AdamW([weight, bias], lr=lr, weight_decay=settings.weight_decay)
    per_epoch = math.ceil(len(x) / settings.batch_size)
    steps_left = settings.max_steps or (settings.epochs or 0) * per_epoch
    best: LinearHead | None = None
    scores, losses = [], []
    for epoch in range(1, math.ceil(steps_left / per_epoch) + 1):
        order = torch.randperm(len(x), generator=generator).to(where)
        batches = torch.split(order, settings.batch_size)[:steps_left]
        loss_sum = torch.zeros((), device=where, dtype=torch.float64)
        for batch in batches:
            loss = cross_entropy(linear(x[batch], weight, bias), y[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss_sum += loss.detach() * len(batch)
        steps_left -= len(batches)
        losses.append(float(loss_sum) / sum(map(len, batches)))
        with torch.no_grad():
            guess = linear(val, weight, bias).argmax(dim=1).cpu().numpy()
        scores.append(_score(data, guess, settings.metric))
        if best is None or scores[-1] > best.score or settings.last_epoch:
            w, b = (p.detach().cpu().numpy().copy() for p in (weight, bias))
            at: dict[str, Any] = {"lr": lr, "epoch": epoch, "score": scores[-1]}
            best = LinearHead(**at, weight=w, bias=b, prediction=guess)
    if best is None or not math.isfinite(losses[-1]):
        found = f"{losses[-1]} at learning rate {lr:g} in {data.name!r}; scale the embeddings"
        raise InvalidInputError(f"training loss must stay finite, got {found}")
    return replace(best, scores=tuple(scores), losses=tuple(losses))


def initial_head(
    num_classes: int, dim: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """nn.Linear's own start, uniform in ±1/sqrt(D), from a generator of its own."""
    bound = 1 / math.sqrt(dim)
    shapes = ((num_classes, dim), (num_classes,))
    weight, bias = (torch.empty(s).uniform_(-bound, bound, generator=generator) for s in shapes)
    return weight, bias


def _score(data: TileSet, prediction: Labels, metric: str) -> float:
    counts = statistics.confusion_matrix(data.val.labels, prediction, data.num_classes)
    return float(statistics.METRICS[metric](counts))


def knn_probe(
    data: TileSet, *, protocol: Protocol = NANOPATH, device: str = "cpu", budget_bytes: int = GIB
) -> ProbeResult:
    """Cosine neighbours vote, no training: the best score over k, ties to the smallest k.

    A k beyond the number of training rows cannot be tried; `details["left_out_ks"]` names it.

    Memory: budget_bytes + 8 Nq k_max + 8 Nq K.

    Raises:
        DatasetError: the splits do not fit each other.
        ConfigError: the protocol defines no kNN probe.
    """
    data = sets.check_tile_set(data)
    settings: suites.KnnSettings = protocol.require("knn")
    if protocol.inner_folds:
        given: dict[str, Any] = {"device": device, "budget_bytes": budget_bytes}
        return honest_tiles(partial(knn_probe, **given), data, protocol)
    ks = sorted(k for k in settings.ks if k <= len(data.train))
    rows, bank = data.val.embeddings, data.train.embeddings
    found = cosine_neighbours(rows, bank, max(ks), device=device, budget_bytes=budget_bytes)
    labels, num_classes = data.train.labels[found], data.num_classes
    guesses = ((k, count_votes(labels[:, :k], num_classes).argmax(axis=1)) for k in ks)
    scores = {k: _score(data, guess, settings.metric) for k, guess in guesses}
    best = max(scores, key=scores.__getitem__)  # max keeps the first of equals
    votes = count_votes(labels[:, :best], num_classes)
    details = {
        "best_k": best,
        "score_by_k": {str(k): v for k, v in scores.items()},
        "left_out_ks": [k for k in settings.ks if k not in ks],
    }
    metric, guess, share = settings.metric, votes.argmax(axis=1), votes / best
    return classified(
        "knn", data, guess, metric=metric, protocol=protocol, details=details, probability=share
    )


def check_all(data: TileSet, protocol: Protocol) -> TileSet:
    """The checked set, where all three probes can have it: asked before the first one runs."""
    data = sets.check_tile_set(data)
    for probe in ("linear", "knn", "fewshot"):
        protocol.require(probe)
    settings: suites.FewshotSettings = protocol.require("fewshot")
    train, names = data.train.labels, data.class_names
    draw_support_sets(train, names, shots=settings.shots, num_sets=1, seed=protocol.seed)
    return data


def count_votes(voted: Labels, num_classes: int) -> IndexArray:
    """Votes (N, K) of the labels (N, k) that voters gave; argmax breaks ties to the lowest label.

    Memory: 8 N K + VOTE_BYTES.
    """
    n, k = voted.shape
    votes = np.empty((n, num_classes), dtype=np.int64)
    step = max(1, VOTE_BYTES // (16 * max(k, num_classes)))
    for start in range(0, n, step):
        block = voted[start : start + step]
        cells = block + num_classes * np.arange(len(block))[:, None]
        flat = np.bincount(cells.ravel(), minlength=len(block) * num_classes)
        votes[start : start + step] = flat.reshape(len(block), num_classes)
    return votes


def fewshot_probe(
    data: TileSet, *, protocol: Protocol = NANOPATH, device: str = "cpu", budget_bytes: int = GIB
) -> ProbeResult:
    """SimpleShot: class means of small random support sets vote, ties to the lowest label.

    Memory: budget_bytes + 8 Nq K + 8 S K shots (the draws).

    Raises:
        DatasetError: a class has fewer training rows than shots.
        ConfigError: the protocol defines no few-shot probe.
        BudgetError: one support set with its prototypes does not fit.
    """
    data = sets.check_tile_set(data)
    settings: suites.FewshotSettings = protocol.require("fewshot")
    if protocol.inner_folds:
        given: dict[str, Any] = {"device": device, "budget_bytes": budget_bytes}
        return honest_tiles(partial(fewshot_probe, **given), data, protocol, select=False)
    shots, num_sets, train = settings.shots, settings.support_sets, data.train
    drawn = {"shots": shots, "num_sets": num_sets, "seed": protocol.seed}
    support, rows = draw_support_sets(train.labels, data.class_names, **drawn), data.val.embeddings
    bank = train.embeddings
    votes = simpleshot_votes(bank, rows, support, device=device, budget_bytes=budget_bytes)
    details = {"shots": shots, "support_sets": num_sets}
    metric, guess, share = settings.metric, votes.argmax(axis=1), votes / num_sets
    return classified(
        "fewshot", data, guess, metric=metric, protocol=protocol, details=details, probability=share
    )


def draw_support_sets(
    labels: Labels, class_names: tuple[str, ...], *, shots: int, num_sets: int, seed: int
) -> IndexArray:
    """Row indices (num_sets, K, shots), drawn without replacement within a set and class.

    Raises DatasetError: a class has fewer than `shots` rows.
    """
    rows_of = [np.flatnonzero(labels == c) for c in range(len(class_names))]
    rule = f"each class must have >= {shots} training rows for {shots} shots"
    for name, rows in zip(class_names, rows_of, strict=True):
        found = f"{len(rows)} of class {name!r}; label more tiles or drop the class"
        require(len(rows) >= shots, rule, found, error=DatasetError)
    draw = np.random.default_rng(seed).choice
    return np.array([[draw(r, shots, replace=False) for r in rows_of] for _ in range(num_sets)])


def simpleshot_votes(
    train: Embeddings,
    queries: Embeddings,
    support: IndexArray,
    *,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> IndexArray:
    """How many support sets vote for each class, (Nq, K).

    With support mean m and unit prototype p the cosine of a query q ranks as (q - m) . p, since
    |q - m| is the same for every class. All embeddings are shifted by one fixed vector first
    (the training mean), which changes nothing but the rounding.

    Memory: budget_bytes + 8 Nq K.
    """
    where = resolve_device(device, mps=False)
    _, num_classes, shots = support.shape
    half, dim = budget_bytes // 2, train.shape[1]  # half of the budget for sets, half for queries
    per_set = num_classes * dim * 4 * (2 * shots + 4)
    block = rows_within(half, per_set, name="support set", most=SET_BLOCK)
    per_query = 8 * dim + block * num_classes * 8 + block * 24
    rows = rows_within(half, per_query, name="query", most=QUERY_BLOCK)
    shift = to_device(train.mean(axis=0, dtype=np.float64).astype(np.float32), where)
    votes = np.zeros((len(queries), num_classes), dtype=np.int64)
    with torch.inference_mode(), fast_products():
        for first in range(0, len(support), block):
            chosen = to_device(train[support[first : first + block]], where) - shift
            class_means = chosen.mean(dim=2)  # of (sets, K, shots, D)
            means = class_means.mean(dim=1, keepdim=True)  # classes have equally many shots
            prototypes = unit_rows((class_means - means).flatten(0, 1))
            offsets = (prototypes.view_as(class_means) * means).sum(dim=2).flatten()  # m . p
            for start in range(0, len(queries), rows):
                part = slice(start, start + rows)
                cosine = ((to_device(queries[part], where) - shift) @ prototypes.T).sub_(offsets)
                winner = cosine.view(len(cosine), len(chosen), num_classes).argmax(dim=2)
                votes[part] += count_votes(winner.cpu().numpy(), num_classes)
    return votes


def _vote_by_k(near: IndexArray, biology: IndexArray) -> dict[int, float]:
    """Balanced accuracy of the vote of the first k neighbours, where every tile has so many."""
    full, num_classes = int((near >= 0).all(axis=0).sum()), int(biology.max()) + 1
    score = statistics.balanced_accuracy
    found = {}
    for k in (k for k in (1, 3, 5, 7, 9, *range(11, full + 1, 10)) if k <= full):
        guess = count_votes(biology[near[:, :k]], num_classes).argmax(axis=1)
        found[k] = float(score(statistics.confusion_matrix(biology, guess, num_classes)))
    return found


def _checked_columns(data: RobustnessSet) -> tuple[npt.NDArray, tuple[tuple[str, ...], ...]]:
    """Embeddings, and what is told of each tile: biology, centre, slide."""
    x, columns = data.embeddings, (data.biological_class, data.medical_center, data.slide_id)
    found = f"{[len(column) for column in columns]} for {len(x)} tiles"
    require({*map(len, columns)} == {len(x)}, "columns must be one entry a tile", found)
    sets.check_vectors(x, data.slide_id)
    return x, columns


def _kinds(
    near: npt.NDArray[np.int64], biology: npt.NDArray, centre: npt.NDArray
) -> dict[str, npt.NDArray[np.int64]]:
    """How many neighbours of each row share biology (s, else o), then centre (s, else o); (N,)."""
    there, kin, home = near >= 0, *(of[near] == of[:, None] for of in (biology, centre))
    return {
        "so": (there & kin & ~home).sum(axis=1),
        "os": (there & ~kin & home).sum(axis=1),
        "ss": (there & kin & home).sum(axis=1),
        "oo": (there & ~kin & ~home).sum(axis=1),
    }


def _ratios(data: RobustnessSet, kinds: dict[str, npt.NDArray[np.int64]]) -> Ratios:
    """SO and SO + OS of each tile."""
    either = kinds["so"] + kinds["os"]
    rule = "neighbours must include same-class other-centre or other-class same-centre tiles"
    found = f"neither in {data.name!r}; the index needs two classes and two centres"
    require(either.any(), rule, found)
    return Ratios(
        metric="robustness_index",
        ids=tuple(f"{name}:{i}" for i, name in enumerate(data.slide_id)),
        top=kinds["so"].astype(np.float64),
        bottom=either.astype(np.float64),
        groups=data.groups or group_rows(data.slide_id, where=repr(data.name)),
    )


def robustness_probe(
    data: RobustnessSet,
    *,
    protocol: Protocol = NANOPATH,
    k: int | None = None,
    choose_k: bool = False,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> ProbeResult:
    """The robustness index: do neighbours share biology or hospital? Its interval is over slides.

    Among the k nearest tiles of other slides, SO have the same biological class and another medical
    centre, OS another class and the same centre. The index is SO / (SO + OS): 1 follows biology
    only, 0 the centre only. Without `k` the protocol decides it by the subset's name; `choose_k`
    takes the one whose majority vote names the biological class with the best balanced accuracy.

    Memory: budget_bytes + 10 N k.

    Raises:
        InvalidInputError: columns of different lengths, NaN, or no SO and no OS neighbour at all.

    Source: PathoROB (bifold-pathomics).
    """
    settings: suites.RobustnessSettings = protocol.require("robustness")
    x, columns = _checked_columns(data)
    biology, centre, slide = (np.unique(c, return_inverse=True)[1] for c in columns)
    k = k or dict(settings.k_by_subset).get(data.name, settings.default_k)
    most = min(settings.max_k, len(x)) if choose_k else k
    near = cosine_neighbours(x, x, most, groups=slide, device=device, budget_bytes=budget_bytes)
    by_k = _vote_by_k(near, biology) if choose_k else {}
    k = max(by_k, key=lambda k: by_k[k]) if by_k else k  # max keeps the first of equals
    near = near[:, :k]
    kinds = _kinds(near, biology, centre)
    ratios = _ratios(data, kinds)

    def index(weights: npt.NDArray) -> npt.NDArray[np.float64]:
        return statistics.ratio(weights @ ratios.top, weights @ ratios.bottom, empty=np.nan)

    details = {
        "k": k,
        **({"selected_on": "k by the vote for biology on the same tiles"} if choose_k else {}),
        **{name: int(counts.sum()) for name, counts in kinds.items()},
        "biology_by_k": {str(k): v for k, v in by_k.items()},
        "tiles_with_fewer_neighbours": int((near < 0).any(axis=1).sum()),
    }
    facts = {"tiles": len(x), "slides": len(set(data.slide_id)), "dim": int(x.shape[1])}
    return ProbeResult(
        probe="robustness",
        dataset=data.name,
        metric="robustness_index",
        score=float(index(np.ones((1, len(x))))[0]),
        interval=intervals.bootstrap_rows(len(x), index, seed=protocol.seed, groups=ratios.groups),
        ratios=ratios,
        protocol=protocol,
        details=details,
        facts={**facts, **data.facts, **sets.data_hashes([x], columns)},
    )
