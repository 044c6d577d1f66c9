"""What every head offers; and those whose logits are a sum over tiles, beside an MLP on the mean.

Shapes: N rows of a bag (the tiles of a slide, or of all slides of a case; one row a slide where
they are slide embeddings), D channels of an embedding, H hidden ones, A attentions (1, or one an
output), K outputs: classes, values, a risk, intervals of time.

**Evidence.** `evidence[n, k]` is what tile n adds to logit k. In a sum over tiles it is attention
times class evidence, a_n w_k . h_n, and evidence.sum(0) + bias = logits exactly (Javed et al.,
"Additive MIL", 2022, eq. 5, on a linear classifier). CLAM and MIL-Lab show the attention alone:
that is `attention`. What a head does beyond this is said in its docstring.

Sources: Ilse et al., "Attention-based deep multiple instance learning", 2018. Lu et al.,
"Data-efficient and weakly supervised computational pathology on whole-slide images", 2021 (CLAM).
Li et al., "Dual-stream multiple instance learning network", 2021 (DSMIL). Ours equal the authors'
modules with the same weights, see docs/predictions.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.errors import ConfigError, require
from thinsection.pool.pooling import GatedAttention
from thinsection.predict.heads.config import HeadConfig, Recipe

QUERY_DIM = 128  # channels of a query of DSMIL, as published
Criterion = Callable[[Tensor, Tensor], Tensor]  # logits (K,), target -> loss


class HeadOutput(NamedTuple):
    """Of one bag."""

    logits: Tensor  # (K,)
    attention: Tensor | None = None  # (N, A), a softmax over tiles
    evidence: Tensor | None = None  # (N, K), see above
    instances: Tensor | None = None  # (N, H or K), what `extra_loss` reads


class Head(nn.Module, ABC):
    """One bag in, its logits out; a bag is a batch of its own."""

    recipe: ClassVar[Recipe] = Recipe()
    bag_weight = 1.0  # of the bag's loss; the rest is of `extra_loss`
    needs_cells = False  # whether `forward` reads where tiles lie

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__()
        self.dim, self.outputs, self.settings = dim, outputs, settings

    @abstractmethod
    def forward(self, features: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """Logits, attention and evidence of one bag.

        Args:
            features: (N, D) float32, N >= 1.
            coords: int64 (N, 2), column and row of each tile in units of tiles (`grid_cells`); only
                'transformer' reads them.

        Memory: 4 N (D + H + 3 attention_dim) bytes in inference unless the head says otherwise.
        """

    def extra_loss(
        self, output: HeadOutput, target: Tensor, criterion: Criterion
    ) -> Tensor:
        """What the method's authors add to the bag's loss; weighs 1 - `bag_weight`."""
        return output.logits.new_zeros(())

    def loss(self, output: HeadOutput, target: Tensor, criterion: Criterion) -> Tensor:
        """bag_weight * criterion(logits, target) + (1 - bag_weight) * extra_loss."""
        bag = criterion(output.logits, target)
        if self.bag_weight == 1:
            return bag
        extra = self.extra_loss(output, target, criterion)
        return self.bag_weight * bag + (1 - self.bag_weight) * extra


def projection(dim: int, settings: HeadConfig) -> tuple[nn.Module, int]:
    """Linear, ReLU, dropout to `hidden_dim` channels, and their number; 0: nothing."""
    hidden = settings.hidden_dim
    if not hidden:
        return nn.Identity(), dim
    return nn.Sequential(
        nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(settings.dropout)
    ), hidden


class LinearHead(Head):
    """W mean(x) + b. Evidence: w_k . x_n / N; attention: 1 / N."""

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.classifier = nn.Linear(dim, outputs)

    def forward(self, features: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`."""
        logits = self.classifier(features.mean(0))
        if self.training:
            return HeadOutput(logits)
        share = features.new_full((len(features), 1), 1 / len(features))
        return HeadOutput(
            logits, share, features @ self.classifier.weight.T / len(features)
        )


class MlpHead(Head):
    """Linear(ReLU(Linear(mean(x)))). No sum over tiles, so no attention and no evidence."""

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.embed, hidden = projection(dim, settings)
        self.classifier = nn.Linear(hidden, outputs)

    def forward(self, features: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`."""
        return HeadOutput(self.classifier(self.embed(features.mean(0))))


class AbmilHead(Head):
    """sum of a_n (W h_n) + b, h = projection of x, a = softmax over tiles of a gated score."""

    branches = False  # whether each output has an attention of its own

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.embed, hidden = projection(dim, settings)
        attentions = outputs if self.branches else 1
        width, drop = settings.attention_dim, settings.dropout
        self.attention = GatedAttention(hidden, width, attentions, dropout=drop)
        self.classifier = nn.Linear(hidden, outputs)

    def forward(self, features: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`."""
        return self.pooled(self.embed(features))

    def pooled(self, hidden: Tensor) -> HeadOutput:
        """The same of projected tiles (N, H)."""
        attention = self.attention(hidden).softmax(0)
        evidence = attention * (hidden @ self.classifier.weight.T)
        logits = evidence.sum(0) + self.classifier.bias
        return HeadOutput(logits, attention, evidence, hidden)


class ClamHead(AbmilHead):
    """ABMIL, trained with a loss on the tiles of highest and lowest attention as well.

    The target is a class, or 0 and 1 for each (K,). For a true class the `instances` tiles of
    highest attention are to be positive and those of lowest negative by a classifier of the class;
    with `subtyping` those of highest attention are to be negative for the other classes.
    """

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.bag_weight = 1 - settings.instance_weight
        hidden = self.classifier.in_features
        self.instance_classifiers = nn.ModuleList(
            nn.Linear(hidden, 2) for _ in range(outputs)
        )

    def extra_loss(
        self, output: HeadOutput, target: Tensor, criterion: Criterion
    ) -> Tensor:
        """CLAM's instance loss (cross-entropy); raises ConfigError where targets are no classes."""
        _, attention, _, hidden = output
        assert attention is not None and hidden is not None
        hot = F.one_hot(target, self.outputs) if target.ndim == 0 else target.long()
        classes = tuple(hot.shape) == (self.outputs,) and torch.equal(
            hot, target.expand_as(hot)
        )
        classes = classes or (target.ndim == 0 and not target.is_floating_point())
        rule = "targets of CLAM's instance loss must be classes"
        require(classes, rule, f"{target}; take head 'abmil'", error=ConfigError)
        count, losses = min(self.settings.instances, len(hidden)), []
        for k, classifier in enumerate(self.instance_classifiers):
            score = attention[:, k if self.branches else 0].detach()
            top, low = score.topk(count).indices, (-score).topk(count).indices
            rows, truth = top, top.new_zeros(count)
            if hot[k]:
                rows, truth = torch.cat([top, low]), torch.cat([truth + 1, truth])
            if hot[k] or self.settings.subtyping:
                losses.append(F.cross_entropy(classifier(hidden[rows]), truth))
        total = torch.stack(losses).sum() if losses else hidden.new_zeros(())
        return total / self.outputs if self.settings.subtyping else total


class ClamBranchesHead(ClamHead):
    """CLAM-MB: each output has an attention of its own."""

    branches = True


class DsmilHead(Head):
    """Tiles vote by their likeness to the critical tile of each class.

    Logit k is sum over classes j of w_kj . (sum of a_nj x_n) + b_k, a_.j the softmax over tiles of
    q_n . q_m(j) / sqrt(128), m(j) the tile whose own logit c_nj is highest. Evidence:
    sum over j of a_nj w_kj . x_n. The loss is half the bag's and half that of max over n of c_n.
    """

    recipe = Recipe(lr=1e-3)
    bag_weight = 0.5

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.instance_classifier = nn.Linear(dim, outputs)
        first, second = nn.Linear(dim, QUERY_DIM), nn.Linear(QUERY_DIM, QUERY_DIM)
        self.query = nn.Sequential(first, nn.ReLU(), second, nn.Tanh())
        self.classifier = nn.Conv1d(outputs, outputs, kernel_size=dim)

    def forward(self, features: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`. Memory: 4 N (D + 256 + K²) bytes."""
        instances = self.instance_classifier(features)
        critical = features[instances.argmax(0)]
        score = self.query(features) @ self.query(critical).T
        attention = (score / QUERY_DIM**0.5).softmax(0)
        weight = self.classifier.weight.flatten(0, 1)
        votes = (features @ weight.T).view(-1, self.outputs, self.outputs)
        evidence = (votes * attention[:, None]).sum(2)
        return HeadOutput(
            evidence.sum(0) + self.classifier.bias, attention, evidence, instances
        )

    def extra_loss(
        self, output: HeadOutput, target: Tensor, criterion: Criterion
    ) -> Tensor:
        """The criterion on the highest logit of any tile."""
        assert output.instances is not None
        return criterion(output.instances.amax(0), target)
