"""Heads on a mean of rows: a linear layer, an MLP, and gated attention.

Source: Ilse et al., "Attention-based deep multiple instance learning", 2018. With the same weights
ours equals the authors' module, see docs/validation/predictions.md.
"""

from torch import Tensor, nn

from thinsection.pool.pooling import GatedAttention
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.heads.head import Head, HeadOutput, Recipe


def projection(dim: int, settings: HeadConfig) -> tuple[nn.Module, int]:
    """Linear, ReLU, dropout to `hidden_dim` channels, and their number; 0: nothing."""
    hidden = settings.hidden_dim
    if not hidden:
        return nn.Identity(), dim
    layers = nn.Sequential(
        nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(settings.dropout)
    )
    return layers, hidden


class LinearHead(Head):
    """W mean(x) + b. Evidence: w_k . x_n / N; attention: 1 / N."""

    recipe = Recipe(starts=1)  # a convex loss ends in the same place from all weights

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.classifier = nn.Linear(dim, outputs)

    def forward(self, features: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`."""
        logits = self.classifier(features.mean(0))
        if self.training:
            return HeadOutput(logits)
        count = len(features)
        attention = features.new_full((count, 1), 1 / count)
        evidence = features @ self.classifier.weight.T / count
        return HeadOutput(logits, attention, evidence)


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
        self.attention = GatedAttention(
            hidden,
            settings.attention_dim,
            outputs if self.branches else 1,
            dropout=settings.dropout,
        )
        self.classifier = nn.Linear(hidden, outputs)

    def forward(self, features: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`."""
        return self.pool(self.embed(features))

    def pool(self, hidden: Tensor) -> HeadOutput:
        """Logits, attention and evidence of projected tiles (N, H)."""
        attention = self.attention(hidden).softmax(0)
        evidence = attention * (hidden @ self.classifier.weight.T)
        logits = evidence.sum(0) + self.classifier.bias
        return HeadOutput(logits, attention, evidence, hidden)
