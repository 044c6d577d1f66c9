"""MaskTransformer head: patch tokens and learned class tokens, compared by cosine.

Shapes: B images, T = g * g tokens of D channels, K classes, C = width of the head.

Source: Strudel et al., Segmenter, arXiv:2105.05633, as THUNDER and nanopath use it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinsection.errors import InvalidInputError
from thinsection.probe.segment_settings import SegmentSettings

INIT_STD = 0.02
NORM_EPS = 1e-5


class Block(nn.Module):
    """Pre-norm transformer block: attention with biases, exact GELU, no dropout."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width, eps=NORM_EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width, eps=NORM_EPS)
        self.up = nn.Linear(width, mlp)
        self.down = nn.Linear(mlp, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T + K, C] -> the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))  # type: ignore[no-any-return]


class MaskTransformer(nn.Module):
    """[B, T, D] tokens -> [B, K, g, g] class scores per token."""

    def __init__(self, dim: int, num_classes: int, settings: SegmentSettings) -> None:
        super().__init__()
        width = settings.width
        self.project = nn.Linear(dim, width)
        self.class_tokens = nn.Parameter(torch.empty(1, num_classes, width))
        self.blocks = nn.ModuleList(
            Block(width, settings.heads, settings.mlp) for _ in range(settings.blocks)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.patch_projection = nn.Parameter(torch.empty(width, width))
        self.class_projection = nn.Parameter(torch.empty(width, width))
        self.norm_scores = nn.LayerNorm(num_classes, eps=NORM_EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        num_classes = self.class_tokens.shape[1]
        x = self.project(tokens)
        x = torch.cat([x, self.class_tokens.expand(len(x), -1, -1)], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        patches = F.normalize(x[:, :-num_classes] @ self.patch_projection, dim=-1)
        classes = F.normalize(x[:, -num_classes:] @ self.class_projection, dim=-1)
        scores = self.norm_scores(patches @ classes.transpose(1, 2))
        edge = grid_edge(tokens.shape[1])
        return scores.transpose(1, 2).reshape(len(x), num_classes, edge, edge)  # type: ignore[no-any-return]


def grid_edge(num_tokens: int) -> int:
    """g of T = g * g.

    Raises:
        InvalidInputError: T is no square.
    """
    edge = math.isqrt(num_tokens)
    if edge * edge != num_tokens:
        raise InvalidInputError(
            f"tokens must form a square grid, got {num_tokens}; "
            "the encoder must give patch tokens without prefix tokens"
        )
    return edge


def initial_head(
    dim: int, num_classes: int, settings: SegmentSettings, generator: torch.Generator
) -> MaskTransformer:
    """A head whose weights come from the generator alone: truncated normal 0.02, P and C scaled.

    The global random state is left as it was found.
    """
    with torch.device("meta"):
        head = MaskTransformer(dim, num_classes, settings)
    head = head.to_empty(device="cpu")
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=INIT_STD, generator=generator)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(head.class_tokens, std=INIT_STD, generator=generator)
        for projection in (head.patch_projection, head.class_projection):
            nn.init.normal_(projection, std=settings.width**-0.5, generator=generator)
    return head
