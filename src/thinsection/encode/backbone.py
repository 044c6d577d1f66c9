"""What every network looks like to an encoder: pixels in, one vector or a token map out.

Shapes: [B, 3, H, W] normalised pixels; features are [B, P + T, C] tokens with P prefix tokens
(class, registers) or a map [B, C, H', W'].
"""

import torch
from torch import Tensor, nn

from thinsection.encode.spec import Pooling


class Backbone(nn.Module):
    """A network, how many prefix tokens it has, and how its features are pooled.

    The weights are those of `network` alone, under the names that their publisher gave them.
    """

    def __init__(self, network: nn.Module, *, pooling: Pooling, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.network = network
        self.pooling = pooling
        self.num_prefix_tokens = num_prefix_tokens

    def features(self, pixels: Tensor) -> Tensor:
        """Tokens with their prefix, or a feature map."""
        out: Tensor = self.network(pixels)
        return out

    def head(self, features: Tensor) -> Tensor:
        """The architecture's own pooling, for `pooling='head'`."""
        raise NotImplementedError(f"{type(self).__name__} has no head of its own")

    def tokens(self, pixels: Tensor) -> Tensor:
        """[B, T, C]: patch tokens in row-major order, or the positions of the feature map."""
        return self._patch_tokens(self.features(pixels))

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, D] embeddings in float32."""
        return self._pooled(self.features(pixels))

    def pooled_and_tokens(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` and `tokens` give, from one pass."""
        features = self.features(pixels)
        return self._pooled(features), self._patch_tokens(features)

    def _pooled(self, features: Tensor) -> Tensor:
        if self.pooling == "head":
            return self.head(features).float()
        if self.pooling == "mean":
            return self._patch_tokens(features).float().mean(dim=1)
        if self.pooling == "cls":
            return features[:, 0].float()
        mean = self._patch_tokens(features).float().mean(dim=1)
        return torch.cat([features[:, 0].float(), mean], dim=1)

    def _patch_tokens(self, features: Tensor) -> Tensor:
        if features.ndim == 4:
            return features.flatten(2).transpose(1, 2)
        return features[:, self.num_prefix_tokens :]
