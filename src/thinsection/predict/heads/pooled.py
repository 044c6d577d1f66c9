"""Heads on a mean of rows: a linear layer, an MLP, gated attention; and CLAM and DSMIL.

CLAM and DSMIL train on single tiles as well.

Sources: Ilse et al., "Attention-based deep multiple instance learning", 2018. Lu et al.,
"Data-efficient and weakly supervised computational pathology on whole-slide images", 2021 (CLAM).
Li et al., "Dual-stream multiple instance learning network", 2021 (DSMIL). With the same weights
ours equal the authors' modules, see docs/validation/predictions.md.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.errors import ConfigError
from thinsection.pool.abmil import GatedAttention
from thinsection.pool.dropout import Dropout
from thinsection.predict.heads.config import BLOCK_ROWS, HeadConfig
from thinsection.predict.heads.head import Criterion, Head, HeadOutput, Recipe, Survey

QUERY_DIM = 128  # channels of a query of DSMIL, as published


def projection(dim: int, settings: HeadConfig) -> tuple[nn.Module, int]:
    """Linear, ReLU, dropout to `hidden_dim` channels, and their number; 0: nothing."""
    hidden = settings.hidden_dim
    if not hidden:
        return nn.Identity(), dim
    layers = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), Dropout(settings.dropout))
    return layers, hidden


class LinearHead(Head):
    """W mean(x) + b. Evidence: w_k . x_n / N; attention: 1 / N."""

    recipe = Recipe(starts=1)  # a convex loss ends in the same place from all weights
    reads_blocks = True

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.classifier = nn.Linear(dim, outputs)

    def forward(self, embeddings: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`. Memory in inference: 4 N (K + 1) bytes."""
        if self.training:
            return HeadOutput(self.classifier(embeddings.mean(0)))
        blocks = self.parts_of(embeddings)
        return self.of_values(torch.cat([self.of_block(block)[0] for block in blocks]))

    def of_block(self, block: Tensor, survey: Survey = ()) -> tuple[Tensor, ...]:
        """Class values (n, K) of tiles (n, D)."""
        return (block @ self.classifier.weight.T,)

    def of_values(self, *values: Tensor) -> HeadOutput:
        """See `Head.of_values`: the values are class values (N, K)."""
        (class_values,) = values
        count = len(class_values)
        mean = class_values.mean(0, dtype=torch.float64).to(class_values.dtype)
        attention = class_values.new_full((count, 1), 1 / count)
        return HeadOutput(mean + self.classifier.bias, attention, class_values / count)


class MlpHead(Head):
    """Linear(ReLU(Linear(mean(x)))). No sum over tiles, so no attention and no evidence."""

    reads_mean = True

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.embed, hidden = projection(dim, settings)
        self.classifier = nn.Linear(hidden, outputs)

    def forward(self, embeddings: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`."""
        return HeadOutput(self.classifier(self.embed(embeddings.mean(0))))


class AbmilHead(Head):
    """sum of a_n (W h_n) + b, h = projection of x, a = softmax over tiles of a gated score."""

    branches = False  # whether each output has an attention of its own
    reads_blocks = True

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.embed, hidden = projection(dim, settings)
        self.attention = GatedAttention(
            hidden,
            settings.attention_dim,
            outputs if self.branches else 1,
            dropout=settings.dropout,
        )
        self.classifier = nn.Linear(hidden, outputs)

    def forward(self, embeddings: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`. Memory in inference: a block of BLOCK_ROWS tiles, 4 N (A + K)."""
        if self.training or len(embeddings) <= BLOCK_ROWS:
            return self.pool(self.embed(embeddings))
        # the loss of CLAM reads projected tiles
        keeps_hidden = self.bag_weight != 1
        parts = []
        projected = []
        for block in torch.split(embeddings, BLOCK_ROWS):
            hidden = self.embed(block)
            parts.append(self._of_hidden(hidden))
            if keeps_hidden:
                projected.append(hidden)
        instances = torch.cat(projected) if keeps_hidden else None
        values = (torch.cat(column) for column in zip(*parts, strict=True))
        return self.of_values(*values)._replace(instances=instances)

    def of_block(self, block: Tensor, survey: Survey = ()) -> tuple[Tensor, ...]:
        """Scores (n, A) and class values (n, K) of tiles (n, D)."""
        return self._of_hidden(self.embed(block))

    def _of_hidden(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (n, A) and class values (n, K) of projected tiles (n, H)."""
        return self.attention(hidden), hidden @ self.classifier.weight.T

    def of_values(self, *values: Tensor) -> HeadOutput:
        """See `Head.of_values`: the values are scores (N, A) and class values (N, K)."""
        scores, class_values = values
        attention = scores.softmax(0)
        evidence = attention * class_values
        logits = evidence.sum(0) + self.classifier.bias
        return HeadOutput(logits, attention, evidence)

    def pool(self, hidden: Tensor) -> HeadOutput:
        """Logits, attention and evidence of projected tiles (N, H)."""
        return self.of_values(*self._of_hidden(hidden))._replace(instances=hidden)


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
        hidden = output.instances
        assert output.attention is not None and hidden is not None
        labels = self._labels(target)
        count = min(self.settings.instances, len(hidden))
        losses = []
        for k, classifier in enumerate(self.instance_classifiers):
            if labels[k].isnan():
                continue
            score = output.attention[:, k if self.branches else 0].detach()
            top = score.topk(count).indices
            if labels[k]:
                low = (-score).topk(count).indices
                rows = torch.cat([top, low])
                truth = torch.cat([top.new_ones(count), top.new_zeros(count)])
                losses.append(F.cross_entropy(classifier(hidden[rows]), truth))
            elif self.settings.subtyping:
                truth = top.new_zeros(count)
                losses.append(F.cross_entropy(classifier(hidden[top]), truth))
        total = torch.stack(losses).sum() if losses else hidden.new_zeros(())
        return total / self.outputs if self.settings.subtyping else total

    def _labels(self, target: Tensor) -> Tensor:
        """1 for a class of the case, else 0, NaN for a blank label, (K,).

        Raises ConfigError: targets are no classes.
        """
        if target.ndim == 0 and not target.is_floating_point():
            return F.one_hot(target, self.outputs).float()
        known = target[~target.isnan()]
        if tuple(target.shape) != (self.outputs,) or not bool(
            ((known == 0) | (known == 1)).all()
        ):
            raise ConfigError(
                f"targets of CLAM's instance loss must be classes, got {target}; use head "
                "'abmil'"
            )
        return target


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
    reads_blocks = True
    surveys = True

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.instance_classifier = nn.Linear(dim, outputs)
        self.query = nn.Sequential(
            nn.Linear(dim, QUERY_DIM),
            nn.ReLU(),
            nn.Linear(QUERY_DIM, QUERY_DIM),
            nn.Tanh(),
        )
        self.classifier = nn.Conv1d(outputs, outputs, kernel_size=dim)

    def forward(self, embeddings: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`. Memory in inference: a block of BLOCK_ROWS tiles, 4 N (4 K + K²)."""
        blocks = self.parts_of(embeddings)
        instances = torch.cat([self.instance_classifier(block) for block in blocks])
        critical = embeddings[instances.argmax(0)]
        parts = [self._of_critical(block, critical) for block in blocks]
        values = (torch.cat(column) for column in zip(*parts, strict=True))
        return self.of_values(*values)._replace(instances=instances)

    def survey(self, block: Tensor, so_far: Survey) -> Survey:
        """Highest logits (K,) of any tile so far, and the embeddings (K, D) of these tiles."""
        instances = self.instance_classifier(block)
        rows = instances.argmax(0)
        highest = instances.gather(0, rows[None])[0]
        if not so_far:
            return highest, block[rows]
        before, critical = so_far
        is_higher = highest > before
        critical = torch.where(is_higher[:, None], block[rows], critical)
        return torch.where(is_higher, highest, before), critical

    def of_block(self, block: Tensor, survey: Survey = ()) -> tuple[Tensor, ...]:
        """Scores (n, K) and votes (n, K²) of tiles (n, D)."""
        _, critical = survey
        return self._of_critical(block, critical)

    def _of_critical(self, tiles: Tensor, critical: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (n, K) and votes (n, K²) of tiles (n, D) beside the critical tiles (K, D)."""
        score = self.query(tiles) @ self.query(critical).T
        weight = self.classifier.weight.flatten(0, 1)
        return score / QUERY_DIM**0.5, tiles @ weight.T

    def of_values(self, *values: Tensor) -> HeadOutput:
        """See `Head.of_values`: the values are scores (N, K) and votes (N, K²)."""
        scores, votes = values
        attention = scores.softmax(0)
        weighted = votes.view(-1, self.outputs, self.outputs) * attention[:, None]
        evidence = weighted.sum(2)
        bias = self.classifier.bias
        assert bias is not None
        logits = evidence.sum(0) + bias
        return HeadOutput(logits, attention, evidence)

    def extra_loss(
        self, output: HeadOutput, target: Tensor, criterion: Criterion
    ) -> Tensor:
        """The criterion on the highest logit of any tile."""
        assert output.instances is not None
        return criterion(output.instances.amax(0), target)
