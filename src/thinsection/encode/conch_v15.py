"""CONCH v1.5, TITAN's tile encoder: a ViT-L/16 and an attentional pooler with one learned query.

Shapes: [B, 3, H, W] in, tokens [B, 1 + T, 1024] from the trunk, [B, 768] from the pooler. Names
follow the published state dict (`trunk.`, `attn_pool_contrast.`, `ln_contrast.`).

Source: Ding et al., arXiv:2411.19666 (TITAN); the layout is that of `conch_v1_5.py` and the values
those of `ConchConfig` in MahmoodLab/TITAN. The position table is for 224 px and is interpolated to
the 448 px grid in every forward pass, by a scale factor (not a size) and without antialias.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRUNK_EPS, POOLER_EPS = 1e-6, 1e-5
POOLER_HEADS = 8
# DINO's guard against a scale that rounds down to one position less
INTERPOLATION_OFFSET = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConchConfig:
    """Sizes of the trunk and the pooler; the defaults are those of the published weights."""

    width: int = 1024
    depth: int = 24
    heads: int = 16
    mlp_ratio: int = 4
    patch_px: int = 16
    table_px: int = 224
    init_values: float = 1e-6
    embed_dim: int = 768
    queries: int = 1


class Attention(nn.Module):
    """Multi-head self-attention with a fused qkv projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        out: Tensor = self.proj(mixed)
        return out


class LayerScale(nn.Module):
    """A learned factor per channel."""

    def __init__(self, width: int, init: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), init))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """A pre-norm transformer block with layer scale."""

    def __init__(self, config: ConchConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, eps=TRUNK_EPS)
        self.attn = Attention(width, config.heads)
        self.ls1 = LayerScale(width, config.init_values)
        self.norm2 = nn.LayerNorm(width, eps=TRUNK_EPS)
        hidden = config.mlp_ratio * width
        layers = {
            "fc1": nn.Linear(width, hidden),
            "act": nn.GELU(),
            "fc2": nn.Linear(hidden, width),
        }
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.ls2 = LayerScale(width, config.init_values)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


class Trunk(nn.Module):
    """The vision transformer: class token first, position table interpolated to the input."""

    def __init__(self, config: ConchConfig) -> None:
        super().__init__()
        self.patch_px, self.table_edge = config.patch_px, config.table_px // config.patch_px
        cut = nn.Conv2d(3, config.width, config.patch_px, config.patch_px)
        self.patch_embed = nn.ModuleDict({"proj": cut})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + self.table_edge**2, config.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(config.width, eps=TRUNK_EPS)

    def positions(self, rows: int, columns: int) -> Tensor:
        """[1, 1 + rows * columns, width]: the table for this grid."""
        edge = self.table_edge
        if (rows, columns) == (edge, edge):
            return self.pos_embed
        table = self.pos_embed[:, 1:].reshape(1, edge, edge, -1).permute(0, 3, 1, 2)
        scale = tuple((n + INTERPOLATION_OFFSET) / edge for n in (rows, columns))
        grid = F.interpolate(table, scale_factor=scale, mode="bicubic")
        return torch.cat([self.pos_embed[:, :1], grid.flatten(2).transpose(1, 2)], dim=1)

    def forward(self, pixels: Tensor) -> Tensor:
        rows, columns = (n // self.patch_px for n in pixels.shape[-2:])
        patches = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)  # row-major
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1)
        out: Tensor = self.norm(self.blocks(x + self.positions(rows, columns)))
        return out


class AttentionalPooler(nn.Module):
    """Learned queries that attend to all tokens, the class token included."""

    def __init__(self, config: ConchConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.query = nn.Parameter(torch.randn(config.queries, dim))
        self.ln_k = nn.LayerNorm(config.width, eps=POOLER_EPS)
        self.ln_q = nn.LayerNorm(dim, eps=POOLER_EPS)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(config.width, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        b, dim = len(tokens), self.query.shape[1]
        q = self.to_q(self.ln_q(self.query)).expand(b, -1, -1)
        k, v = self.to_kv(self.ln_k(tokens)).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (POOLER_HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, dim)
        out: Tensor = self.to_out(mixed)
        return out


class ConchV15(nn.Module):
    """Trunk and pooler; the embedding is the first query's output, normalised."""

    def __init__(self, config: ConchConfig | None = None) -> None:
        super().__init__()
        config = config or ConchConfig()
        self.trunk = Trunk(config)
        self.attn_pool_contrast = AttentionalPooler(config)
        self.ln_contrast = nn.LayerNorm(config.embed_dim, eps=POOLER_EPS)

    def pool(self, tokens: Tensor) -> Tensor:
        """[B, embed_dim] from the trunk's tokens."""
        out: Tensor = self.ln_contrast(self.attn_pool_contrast(tokens)[:, 0])
        return out

    def forward(self, pixels: Tensor) -> Tensor:
        return self.pool(self.trunk(pixels))
