"""Linear probe: one linear layer trained on frozen embeddings, swept over learning rates."""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import softmax

from thinsection.errors import InvalidInputError
from thinsection.probe.compute import to_device
from thinsection.probe.data.sets import TileSet, check_tile_set
from thinsection.probe.metrics import METRICS, confusion_matrix
from thinsection.probe.protocol import NANOPATH, LinearSettings, Protocol
from thinsection.probe.result import ProbeResult, classified
from thinsection.weights.placement import resolve_device


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHead:
    """The best epoch of one learning rate."""

    lr: float
    epoch: int  # from 1: of the best validation score, the first one on ties
    score: float  # that score
    weight: npt.NDArray[np.float32]  # (K, D) at that epoch
    bias: npt.NDArray[np.float32]  # (K,)
    prediction: npt.NDArray[np.int64]  # labels (N,) of the validation rows at that epoch
    scores: tuple[float, ...] = ()  # of validation after each epoch
    losses: tuple[float, ...] = ()  # of training, mean of each epoch


def linear_probe(
    data: TileSet, *, protocol: Protocol = NANOPATH, device: str = "cpu"
) -> ProbeResult:
    """The best validation score over learning rate x epoch (ties: first rate, first epoch).

    Memory: the embeddings (once more on CUDA) + 5 K D floats of weights and AdamW's state.

    Raises:
        DatasetError: the splits do not fit each other.
        ConfigError: the protocol defines no linear probe.
    """
    check_tile_set(data)
    settings: LinearSettings = protocol.require("linear")
    heads = [
        train_head(data, settings, lr=lr, seed=protocol.seed + i, device=device)
        for i, lr in enumerate(settings.lrs)
    ]
    best = max(heads, key=lambda head: head.score)  # max keeps the first of equals
    logits = data.val.embeddings.astype(np.float64) @ best.weight.T.astype(np.float64) + best.bias
    return classified(
        "linear",
        data,
        best.prediction,
        metric=settings.metric,
        protocol=protocol,
        details={
            "best_lr": best.lr,
            "best_epoch": best.epoch,
            "score_by_lr": {f"{h.lr:g}": h.score for h in heads},
            "best_epoch_by_lr": {f"{h.lr:g}": h.epoch for h in heads},
            "last_loss_by_lr": {f"{h.lr:g}": h.losses[-1] for h in heads},
            "curve": {f"{h.lr:g}": list(h.scores) for h in heads},
        },
        probability=softmax(logits, axis=1),
    )


def train_head(
    data: TileSet, settings: LinearSettings, *, lr: float, seed: int, device: str = "cpu"
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
            logits = torch.nn.functional.linear(x[batch], weight, bias)
            loss = torch.nn.functional.cross_entropy(logits, y[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss_sum += loss.detach() * len(batch)
        steps_left -= len(batches)
        losses.append(float(loss_sum) / sum(map(len, batches)))
        with torch.no_grad():
            logits = torch.nn.functional.linear(val, weight, bias)
        prediction = logits.argmax(dim=1).cpu().numpy()
        counts = confusion_matrix(data.val.labels, prediction, data.num_classes)
        scores.append(float(METRICS[settings.metric](counts)))
        if best is None or scores[-1] > best.score:
            w, b = (p.detach().cpu().numpy().copy() for p in (weight, bias))
            best = LinearHead(
                lr=lr, epoch=epoch, score=scores[-1], weight=w, bias=b, prediction=prediction
            )
    if best is None or not math.isfinite(losses[-1]):
        raise InvalidInputError(
            f"training loss must stay finite, got {losses[-1]} at learning rate {lr:g} in "
            f"{data.name!r}; scale the embeddings"
        )
    return replace(best, scores=tuple(scores), losses=tuple(losses))


def initial_head(
    num_classes: int, dim: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """nn.Linear's own start, uniform in ±1/sqrt(D), from a generator of its own."""
    bound = 1 / math.sqrt(dim)
    weight = torch.empty(num_classes, dim).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(num_classes).uniform_(-bound, bound, generator=generator)
    return weight, bias
