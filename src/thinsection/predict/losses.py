"""Targets and losses of each kind of task."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from thinsection.evaluation.outliers import FAR
from thinsection.evaluation.target import Floats, Target
from thinsection.predict.heads.head import Criterion


def targets_of(target: Target, values: Floats) -> Tensor:
    """One row per case for the criterion: class; labels; scaled value; event and time.

    A blank label is NaN.

    Logits of ordered classes are their log probabilities (`OrdinalHead`): the loss of classes is
    their negative log likelihood too.
    """
    if target.exclusive:
        return torch.from_numpy(values[:, 0].astype(np.int64))
    if target.kind == "regression":
        values = (values - target.center) / target.spread
    if target.kind == "discrete":
        bins = np.searchsorted(target.edges, values[:, 1], side="left")
        values = np.stack([values[:, 0], bins], axis=1)
    return torch.from_numpy(values.astype(np.float32))


def criterion_of(target: Target, train: Tensor, *, weighted: bool) -> Criterion:
    """Loss of one case from logits (K,) and its target; 'cox' has none, see `cox_loss`.

    Args:
        target: predicted target.
        train: targets of the training cases.
        weighted: True gives rare classes a larger weight.
    """
    if target.exclusive:
        return _class_loss(len(target.names), train, weighted=weighted)
    if target.kind == "multilabel":
        return _label_loss(train, weighted=weighted)
    if target.kind == "regression":
        # squared error, but linear beyond FAR: one far value does not rule the gradient
        return lambda z, y: 2 * F.huber_loss(z.float(), y, delta=FAR)
    return discrete_loss


def _class_loss(num_classes: int, train: Tensor, *, weighted: bool) -> Criterion:
    weights = torch.ones(num_classes)
    if weighted:
        counts = torch.bincount(train, minlength=num_classes)
        weights = len(train) / (num_classes * counts)
    return lambda z, y: F.cross_entropy(z.float(), y) * weights.to(z.device)[y]


def _label_loss(train: Tensor, *, weighted: bool) -> Criterion:
    """Loss of the labels of a case that are not blank, over the number of all labels.

    So each known label of each case weighs the same: the sum over cases is that of the losses of
    the labels, each over the cases that have it.
    """
    positives = (train == 1).sum(0).float()
    weights = torch.ones_like(positives)
    if weighted:
        weights = (train == 0).sum(0) / positives

    def loss(z: Tensor, y: Tensor) -> Tensor:
        is_known = ~y.isnan()
        losses = F.binary_cross_entropy_with_logits(
            z.float(),
            y.nan_to_num(),
            pos_weight=weights.to(z.device),
            reduction="none",
        )
        return torch.where(is_known, losses, 0).mean()

    return loss


def discrete_loss(logits: Tensor, y: Tensor) -> Tensor:
    """-log likelihood of an event in an interval, or of no event up to it; y = (event, interval).

    Source: Zadeh and Schmid, Bias in cross-entropy-based training of deep survival networks, 2020.
    """
    event = y[0]
    place = int(y[1])
    survived = F.logsigmoid(-logits.float()).cumsum(0)
    before = survived[place - 1] if place else survived.new_zeros(())
    seen = before + F.logsigmoid(logits[place].float())
    return torch.where(event == 1, -seen, -survived[place])


def cox_loss(risk: Tensor, y: Tensor) -> Tensor:
    """-log partial likelihood (Breslow) per event, risks (n,) and y (n, 2): event, time."""
    event = y[:, 0] == 1
    time = y[:, 1]
    at_risk = torch.where(time[None] >= time[:, None], risk[None].float(), -torch.inf)
    terms = (at_risk.logsumexp(1) - risk.float())[event]
    return terms.sum() / max(1, int(event.sum()))
