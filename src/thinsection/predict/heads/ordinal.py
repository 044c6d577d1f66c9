"""Ordered classes: proportional odds on one score, which any head computes.

P(class > k) = sigmoid(score - threshold k). The thresholds rise by construction.

Source: McCullagh, "Regression models for ordinal data", JRSS B 42 (1980).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.errors import ConfigError
from thinsection.evaluation.target import Target
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.heads.head import Criterion, Head, HeadOutput, build_head

# their instance loss needs an output for each class
_BY_CLASS = ("clam_sb", "clam_mb")


class Thresholds(nn.Module):
    """Logarithms of the class probabilities (..., K) of scores (..., 1), K classes in order."""

    def __init__(self, num_classes: int) -> None:
        """Sets thresholds that make all classes equally probable for a score of 0."""
        super().__init__()
        shares = torch.arange(1, num_classes) / num_classes
        even = torch.logit(shares)
        self.first = nn.Parameter(even[:1].clone())
        self.log_gaps = nn.Parameter(even.diff().log())

    def forward(self, score: Tensor) -> Tensor:
        """Log probabilities, without a difference of two that are nearly equal."""
        gaps = self.log_gaps.float().exp()
        thresholds = torch.cat(
            [self.first.float(), self.first.float() + gaps.cumsum(0)]
        )
        below = F.logsigmoid(thresholds - score.float())  # log P(class <= k)
        above = F.logsigmoid(score.float() - thresholds)  # log P(class > k)
        # s(a) - s(b) = s(a) s(-b) (1 - exp(b - a))
        between = torch.log(-torch.expm1(-gaps))
        middle = below[..., 1:] + above[..., :-1] + between
        return torch.cat([below[..., :1], middle, above[..., -1:]], dim=-1)


class OrdinalHead(Head):
    """Logits are the log probabilities of ordered classes; evidence (N, 1) is that of the score."""

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        if settings.head in _BY_CLASS:
            raise ConfigError(
                f"head must not be {' or '.join(_BY_CLASS)} for an ordinal target, got "
                f"{settings.head!r}: its instance loss has no order; use 'abmil', or the task "
                "multiclass"
            )
        self.score = build_head(settings, dim, 1)
        self.thresholds = Thresholds(outputs)
        self.bag_weight = self.score.bag_weight
        self.needs_cells = self.score.needs_cells

    def forward(self, features: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`."""
        output: HeadOutput = self.score(features, coords)
        return output._replace(logits=self.thresholds(output.logits))

    def extra_loss(
        self, output: HeadOutput, target: Tensor, criterion: Criterion
    ) -> Tensor:
        """The extra loss of the head of the score, whose scores become classes first."""

        def of_score(score: Tensor, label: Tensor) -> Tensor:
            return criterion(self.thresholds(score), label)

        return self.score.extra_loss(output, target, of_score)


def head_for(settings: HeadConfig, dim: int, target: Target) -> Head:
    """A new head for a target and embeddings (D,), see `build_head`."""
    outputs = len(target.names)
    if target.kind == "ordinal":
        return OrdinalHead(dim, outputs, settings)
    return build_head(settings, dim, outputs)
