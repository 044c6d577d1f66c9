"""Probes of tile embeddings: a linear layer and its calibration, neighbours, few shots, retrieval.

Shapes: N training and Nq validation rows, D channels, K classes, S support sets.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import softmax
from torch.nn.functional import cross_entropy, linear

from thinsection.attention.products import fast_products
from thinsection.errors import DatasetError, InvalidInputError
from thinsection.evaluation import metrics
from thinsection.evaluation.calibration import calibration_bins
from thinsection.evaluation.embeddings import Embeddings
from thinsection.evaluation.metrics import Flags, FloatVector, IndexArray
from thinsection.evaluation.rows import Ratios
from thinsection.probe import protocol as suites
from thinsection.probe.compute import (
    nearest_rows,
    rows_within,
    to_device,
    unit_rows,
)
from thinsection.probe.data.sets import Labels, TileSet, check_tile_set
from thinsection.probe.honest import Prediction, tile_probe
from thinsection.probe.protocol import NANOPATH, Protocol, Similarity
from thinsection.probe.result import ProbeResult, scored, selection_words
from thinsection.types import GIB
from thinsection.weights.placement import resolve_device

THUNDER_BINS = 5
THUNDER_MIN_CONFIDENCE = 0.01  # a bin of TACE counts above this mean confidence
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

    Of equal scores the first rate and the first epoch count. Memory: the embeddings (once more on
    CUDA) + 5 K D floats of weights and AdamW's state. Raises DatasetError, ConfigError: as of
    `tile_probe`.
    """

    def predict(
        data: TileSet, settings: suites.LinearSettings, seed: int
    ) -> Prediction:
        heads = {
            f"{lr:g}": train_head(data, settings, lr=lr, seed=seed + i, device=device)
            for i, lr in enumerate(settings.lrs)
        }
        # max keeps the first of equals
        best = max(heads.values(), key=lambda head: head.score)
        weight = best.weight.T.astype(np.float64)
        details = {
            "best_lr": best.lr,
            "best_epoch": best.epoch,
            "score_by_lr": {lr: head.score for lr, head in heads.items()},
            "best_epoch_by_lr": {lr: head.epoch for lr, head in heads.items()},
            "last_loss_by_lr": {lr: head.losses[-1] for lr, head in heads.items()},
            "curve": {lr: list(head.scores) for lr, head in heads.items()},
        }
        logits = data.val.embeddings.astype(np.float64) @ weight + best.bias
        return best.prediction, softmax(logits, axis=1), details

    return tile_probe("linear", suites.LinearSettings, predict, data, protocol)


def calibration_probe(
    data: TileSet, *, protocol: Protocol = NANOPATH, device: str = "cpu"
) -> ProbeResult:
    """Expected calibration error of the linear probe, with its reliability by confidence.

    The score has 15 bins (Guo et al.); `details["thunder"]` has THUNDER's five figures, which
    take 5 bins.

    Memory and Raises: as of `linear_probe`. Source: Guo et al., On calibration of modern
    neural networks, ICML 2017.
    """
    result = linear_probe(data, protocol=protocol, device=device)
    rows = result.predictions
    # a linear probe classifies
    assert rows is not None
    assert rows.probability is not None
    bins = calibration_bins(rows.probability, rows.truth, np.ones((1, len(rows.ids))))
    filled = bins[0][0] > 0
    count, confidence_sum, right_sum = (part[0][filled] for part in bins)
    reliability = {
        "rows": count.tolist(),
        "confidence": (confidence_sum / count).tolist(),
        "right": (right_sum / count).tolist(),
    }
    details = {
        "linear_score": result.score,
        "selected_on": selection_words(result),
        "largest_gap": float((np.abs(confidence_sum - right_sum) / count).max()),
        "thunder": thunder_calibration(rows.probability, rows.truth),
        "reliability": reliability,
    }
    return scored(
        "calibration",
        data,
        rows,
        "ece",
        protocol=protocol,
        details=details,
        facts=result.facts,
    )


def train_head(
    data: TileSet,
    settings: suites.LinearSettings,
    *,
    lr: float,
    seed: int,
    device: str = "cpu",
) -> LinearHead:
    """Trains one head; the same seed gives the same bits on the same device and thread count.

    Weights and orders are drawn on the CPU, so that every device starts alike and sees the same
    batches. Nothing touches the global random state.
    """
    where = resolve_device(device, mps=False)
    generator = torch.Generator().manual_seed(seed)
    x = to_device(data.train.embeddings, where)
    y = to_device(data.train.labels, where)
    val = to_device(data.val.embeddings, where)
    start = initial_head(data.num_classes, x.shape[1], generator)
    weight, bias = (p.to(where).requires_grad_() for p in start)
    optimizer = torch.optim.AdamW(
        [weight, bias], lr=lr, weight_decay=settings.weight_decay
    )
    per_epoch = math.ceil(len(x) / settings.batch_size)
    steps_left = settings.max_steps or (settings.epochs or 0) * per_epoch
    patience = settings.patience_epochs(steps_left / per_epoch)
    best: LinearHead | None = None
    scores = []
    losses = []
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
            prediction = linear(val, weight, bias).argmax(dim=1).cpu().numpy()
        scores.append(_score(data, prediction, settings.metric))
        if best is None or scores[-1] > best.score or settings.last_epoch:
            best = LinearHead(
                lr=lr,
                epoch=epoch,
                score=scores[-1],
                weight=weight.detach().cpu().numpy().copy(),
                bias=bias.detach().cpu().numpy().copy(),
                prediction=prediction,
            )
        if epoch - best.epoch >= patience:
            break
    if best is None or not math.isfinite(losses[-1]):
        raise InvalidInputError(
            f"training loss must stay finite, got {losses[-1]} at learning rate {lr:g} "
            f"in {data.name!r}; scale the embeddings"
        )
    return replace(best, scores=tuple(scores), losses=tuple(losses))


def initial_head(
    num_classes: int, dim: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """nn.Linear's own start, uniform in ±1/sqrt(D), from a generator of its own."""
    bound = 1 / math.sqrt(dim)
    shapes = ((num_classes, dim), (num_classes,))
    return [torch.empty(s).uniform_(-bound, bound, generator=generator) for s in shapes]


def _score(data: TileSet, prediction: Labels, metric: str) -> float:
    counts = metrics.confusion_matrix(data.val.labels, prediction, data.num_classes)
    return float(metrics.METRICS[metric](counts))


def knn_probe(
    data: TileSet,
    *,
    protocol: Protocol = NANOPATH,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> ProbeResult:
    """Cosine neighbours vote, no training: the best score over k, ties to the smallest k.

    A k beyond the number of training rows cannot be tried; `details["left_out_ks"]` names it.

    Memory: budget_bytes + 8 Nq k_max + 8 Nq K. Raises DatasetError, ConfigError: as `tile_probe`.
    """

    def predict(data: TileSet, settings: suites.KnnSettings, seed: int) -> Prediction:
        ks = sorted(k for k in settings.ks if k <= len(data.train))
        near = _neighbour_labels(data, max(ks), "cosine", device, budget_bytes)
        scores: dict[int, float] = {}
        for k in ks:
            labels = count_votes(near[:, :k], data.num_classes).argmax(axis=1)
            scores[k] = _score(data, labels, settings.metric)
        best = max(scores, key=scores.__getitem__)  # max keeps the first of equals
        votes = count_votes(near[:, :best], data.num_classes)
        details = {
            "best_k": best,
            "score_by_k": {str(k): score for k, score in scores.items()},
            "left_out_ks": [k for k in settings.ks if k not in ks],
        }
        return votes.argmax(axis=1), votes / best, details

    return tile_probe("knn", suites.KnnSettings, predict, data, protocol)


def _neighbour_labels(
    data: TileSet, k: int, similarity: Similarity, device: str, budget_bytes: int
) -> Labels:
    """Labels (Nq, k) of the training rows nearest to each validation row."""
    nearest = nearest_rows(
        data.val.embeddings,
        data.train.embeddings,
        k,
        similarity=similarity,
        device=device,
        budget_bytes=budget_bytes,
    )
    return data.train.labels[nearest]


def retrieval_probe(
    data: TileSet,
    *,
    protocol: Protocol = NANOPATH,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> ProbeResult:
    """Mean average precision at the largest k; recall and majority vote at each.

    A query's average precision at k is the sum, over its hits among the k nearest, of the
    precision at their rank, divided by k; recall at k asks for one hit.

    Neighbours are by cosine, as in THUNDER; under the protocol `pathobench` by l2, as in
    Patho-Bench's configuration.

    Memory: budget_bytes + 24 Nq k. Source: Patho-Bench, RetrievalExperiment.
    """
    check_tile_set(data)
    train, val = data.train, data.val
    settings = protocol.retrieval
    ks = [k for k in settings.ks if k <= len(train)]
    near = _neighbour_labels(data, ks[-1], settings.similarity, device, budget_bytes)
    hit = near == val.labels[:, None]
    precision = hit * (hit.cumsum(axis=1) / np.arange(1, ks[-1] + 1))
    details: dict[str, object] = {"k": ks[-1], "similarity": settings.similarity}
    for k in ks:
        votes = count_votes(near[:, :k], data.num_classes)
        own = votes[np.arange(len(votes)), val.labels]
        details[f"recall_at_{k}"] = float(hit[:, :k].any(axis=1).mean())
        details[f"majority_at_{k}"] = float((own == votes.max(axis=1)).mean())
        score = float(precision[:, :k].sum(axis=1).mean() / k)
        details[f"map_at_{k}"] = score
    rows = Ratios(
        metric="map",
        ids=val.ids,
        groups=val.groups,
        top=precision.mean(axis=1),
        bottom=np.ones(len(val)),
    )
    facts = {
        "train_rows": len(train),
        "val_rows": len(val),
        **data.facts,
        **data.hashes,
    }
    return scored(
        "retrieval",
        data,
        rows,
        "map",
        score=score,  # at the largest k
        protocol=protocol,
        details=details,
        facts=facts,
    )


def check_all(data: TileSet, protocol: Protocol) -> TileSet:
    """The checked set, where all three probes can have it: asked before the first one runs."""
    data = check_tile_set(data)
    protocol.require("linear", suites.LinearSettings)
    protocol.require("knn", suites.KnnSettings)
    draw_support_sets(
        data.train.labels,
        data.class_names,
        shots=protocol.require("fewshot", suites.FewshotSettings).shots,
        num_sets=1,
        seed=protocol.seed,
    )
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
    data: TileSet,
    *,
    protocol: Protocol = NANOPATH,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> ProbeResult:
    """SimpleShot: class means of small random support sets vote, ties to the lowest label.

    Memory: budget_bytes + 8 Nq K + 8 S K shots (the draws). Raises DatasetError, ConfigError: as of
    `tile_probe`, or a class has fewer training rows than shots; BudgetError: one support set with
    its prototypes does not fit.
    """

    def predict(
        data: TileSet, settings: suites.FewshotSettings, seed: int
    ) -> Prediction:
        support = draw_support_sets(
            data.train.labels,
            data.class_names,
            shots=settings.shots,
            num_sets=settings.support_sets,
            seed=seed,
        )
        votes = simpleshot_votes(
            data.train.embeddings,
            data.val.embeddings,
            support,
            device=device,
            budget_bytes=budget_bytes,
        )
        details = {"shots": settings.shots, "support_sets": settings.support_sets}
        return votes.argmax(axis=1), votes / settings.support_sets, details

    return tile_probe(
        "fewshot", suites.FewshotSettings, predict, data, protocol, select=False
    )


def draw_support_sets(
    labels: Labels,
    class_names: tuple[str, ...],
    *,
    shots: int,
    num_sets: int,
    seed: int,
) -> IndexArray:
    """Row indices (num_sets, K, shots), drawn without replacement within a set and class.

    Raises DatasetError: a class has fewer than `shots` rows.
    """
    rows_by_class = [np.flatnonzero(labels == c) for c in range(len(class_names))]
    for name, rows in zip(class_names, rows_by_class, strict=True):
        if len(rows) < shots:
            raise DatasetError(
                f"each class must have >= {shots} training rows for {shots} shots, got "
                f"{len(rows)} of class {name!r}; label more tiles or remove the class"
            )
    rng = np.random.default_rng(seed)
    support = np.empty((num_sets, len(class_names), shots), dtype=np.int64)
    for one_set in support:
        for c, rows in enumerate(rows_by_class):
            one_set[c] = rng.choice(rows, shots, replace=False)
    return support


def simpleshot_votes(
    train: Embeddings,
    queries: Embeddings,
    support: IndexArray,
    *,
    device: str = "cpu",
    budget_bytes: int = GIB,
) -> IndexArray:
    """Number of support sets that vote for each class, (Nq, K).

    With support mean m and unit prototype p the cosine of a query q ranks as (q - m) . p, since
    |q - m| is the same for every class. All embeddings are shifted by one fixed vector first
    (the training mean), which changes nothing but the rounding.

    Memory: budget_bytes + 8 Nq K.
    """
    where = resolve_device(device, mps=False)
    _, num_classes, shots = support.shape
    dim = train.shape[1]
    half = budget_bytes // 2  # one half for sets, one for queries
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
            # classes have equally many shots
            means = class_means.mean(dim=1, keepdim=True)
            prototypes = unit_rows((class_means - means).flatten(0, 1))
            projected = prototypes.view_as(class_means) * means
            offsets = projected.sum(dim=2).flatten()  # m . p
            for start in range(0, len(queries), rows):
                part = slice(start, start + rows)
                shifted = to_device(queries[part], where) - shift
                cosine = (shifted @ prototypes.T).sub_(offsets)
                by_set = cosine.view(len(cosine), len(chosen), num_classes)
                winner = by_set.argmax(dim=2).cpu().numpy()
                votes[part] += count_votes(winner, num_classes)
    return votes


def thunder_calibration(
    probability: FloatVector, truth: IndexArray
) -> dict[str, float]:
    """Calibration errors of the predicted class of N rows, from probabilities (N, K).

    ECE weighs bins of equal width by their rows, MCE is the largest gap of a bin, SCE the
    mean gap over all bins, empty ones counted as 0. ACE is the mean gap of bins with
    equally many rows, and TACE the same over bins whose mean confidence is above 0.01.
    Memory: 4 N numbers.

    Source: THUNDER (MICS-Lab/thunder), `thunder.utils.calibration_metrics`.
    """
    confidence = probability.max(axis=1)
    correct = probability.argmax(axis=1) == truth
    edges = np.linspace(0, 1, THUNDER_BINS + 1)
    gaps = []
    shares = []
    for low, high in pairwise(edges):
        rows = (confidence > low) & (confidence <= high)
        if rows.any():
            gaps.append(_calibration_gap(confidence[rows], correct[rows]))
            shares.append(rows.mean())
    # a share of 1 / THUNDER_BINS each, the last bin takes the remainder
    order = np.argsort(confidence)
    per_bin = len(order) // THUNDER_BINS
    cuts = [per_bin * i for i in range(1, THUNDER_BINS)]
    adaptive = []
    counted = []
    for members in np.split(order, cuts):
        if len(members):
            gap = _calibration_gap(confidence[members], correct[members])
            adaptive.append(gap)
            if confidence[members].mean() > THUNDER_MIN_CONFIDENCE:
                counted.append(gap)
    return {
        "ece": float(np.dot(gaps, shares)),
        "mce": float(max(gaps)),
        "sce": float(sum(gaps) / THUNDER_BINS),
        "ace": float(sum(adaptive) / THUNDER_BINS),
        "tace": float(np.mean(counted)) if counted else 0.0,
    }


def _calibration_gap(confidence: FloatVector, correct: Flags) -> float:
    """Mean confidence of a bin's rows against the share of them that is correct."""
    return float(abs(confidence.mean() - correct.mean()))
