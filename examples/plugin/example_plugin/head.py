"""A head for `thinsection train`: the mean of the tiles with the highest logits."""

# --8<-- [start:head]
from torch import Tensor, nn

from thinsection.predict.heads import Head, HeadConfig, HeadOutput, Recipe


class TopMeanHead(Head):
    """Mean of the 10 highest logits of any tile, for each class."""

    recipe = Recipe(lr=1e-3)  # what `train` takes unless the user says otherwise

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        self.classifier = nn.Linear(dim, outputs)

    def forward(self, embeddings: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """Logits (K,) of one bag of embeddings (N, D), and what each tile adds to them (N, K)."""
        logits = self.classifier(embeddings)
        count = min(10, len(logits))
        top = logits.topk(count, dim=0).indices
        evidence = logits.new_zeros(logits.shape)
        evidence = evidence.scatter(0, top, logits.gather(0, top) / count)
        return HeadOutput(evidence.sum(dim=0), evidence=evidence)


# --8<-- [end:head]
