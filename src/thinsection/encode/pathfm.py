"""GenBio-PathFM in plain torch, with the parameter names of the published weights.

A vision transformer of one colour channel sees red, green and blue as three pictures; the three
class tokens make one embedding. Positions are rotary, and their angles are computed in bfloat16, as
in training: in float32 the embeddings would differ. No network of timm does either, so this one is
written here. [B, 3, H, W] in, tokens [B, 1 + 4 + T, 3 C] out.

Source: GenBio AI 2026, doi:10.64898/2026.03.17.712534; the weights are those of
`genbio-ai/genbio-pathfm`.
"""

from dataclasses import dataclass
from math import pi
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH_PX = 16
NUM_REGISTERS = 4
EPS = 1e-6
CHANNELS = 3  # red, green, blue
ANGLE_DTYPE = torch.bfloat16
PERIOD_BASE = 100.0
# hidden channels are rounded up to a multiple of it
HIDDEN_STEP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFmConfig:
    """Sizes; the defaults are those of the published weights."""

    width: int = 1536
    depth: int = 40
    heads: int = 24
    mlp_ratio: int = 4
    init_values: float = 1e-5  # of the layer scale


class _Rotary(nn.Module):
    """Sine and cosine [T, D] of the angles of a grid of patches, for heads of D channels."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        steps = torch.arange(head_dim // 4, dtype=ANGLE_DTYPE)
        periods = PERIOD_BASE ** (2 * steps / (head_dim // 2))
        # the checkpoint has its own
        self.register_buffer("periods", periods.float())

    def forward(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        periods = cast(Tensor, self.periods).to(ANGLE_DTYPE)
        axes = [
            torch.arange(0.5, n, dtype=ANGLE_DTYPE, device=periods.device) / n
            for n in (rows, columns)
        ]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
        angles = 2 * pi * (2.0 * grid - 1.0)[:, :, None] / periods
        angles = angles.flatten(1).tile(2)
        return angles.sin(), angles.cos()


def _rotated(x: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
    """Queries or keys [B, H, N, D] turned by their positions; the first tokens have none."""
    num_prefix = x.shape[-2] - len(sine)
    rounded = x.to(ANGLE_DTYPE)
    prefix = rounded[:, :, :num_prefix]
    patches = rounded[:, :, num_prefix:]
    first, second = patches.chunk(2, dim=-1)
    turned = patches * cosine + torch.cat([-second, first], dim=-1) * sine
    return torch.cat([prefix, turned], dim=-2).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = _rotated(q, sine, cosine)
        k = _rotated(k, sine, cosine)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.proj(mixed.transpose(1, 2).reshape(b, n, c)))


class _GatedMlp(nn.Module):
    """SwiGLU: w3(silu(w1 x) * w2 x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden)
        self.w2 = nn.Linear(width, hidden)
        self.w3 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w3(F.silu(self.w1(x)) * self.w2(x)))


class _LayerScale(nn.Module):
    def __init__(self, width: int, init_values: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), init_values))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class _Block(nn.Module):
    def __init__(self, config: PathFmConfig) -> None:
        super().__init__()
        width = config.width
        gated = config.mlp_ratio * width * 2 // 3
        hidden = -(-gated // HIDDEN_STEP) * HIDDEN_STEP
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.attn = _Attention(width, config.heads)
        self.ls1 = _LayerScale(width, config.init_values)
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.mlp = _GatedMlp(width, hidden)
        self.ls2 = _LayerScale(width, config.init_values)

    def forward(self, x: Tensor, sine: Tensor, cosine: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x), sine, cosine))
        return cast(Tensor, x + self.ls2(self.mlp(self.norm2(x))))


class PathFm(nn.Module):
    """Tokens [B, 1 + 4 + T, 3 C]: class, registers, patches; channels of red, green, blue."""

    def __init__(self, config: PathFmConfig) -> None:
        super().__init__()
        width = config.width
        projection = nn.Conv2d(1, width, PATCH_PX, PATCH_PX)
        self.patch_embed = nn.ModuleDict({"proj": projection})
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.storage_tokens = nn.Parameter(0.02 * torch.randn(1, NUM_REGISTERS, width))
        self.rope_embed = _Rotary(width // config.heads)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        b, channels, height, width = pixels.shape
        pictures = pixels.reshape(b * channels, 1, height, width)
        patches = self.patch_embed["proj"](pictures)
        sine, cosine = self.rope_embed(*patches.shape[-2:])
        prefix = torch.cat([self.cls_token, self.storage_tokens], dim=1)
        prefix = prefix.expand(len(patches), -1, -1)
        x = torch.cat([prefix, patches.flatten(2).transpose(1, 2)], dim=1)
        for block in self.blocks:
            x = block(x, sine, cosine)
        tokens = self.norm(x).unflatten(0, (b, channels))
        return cast(Tensor, tokens.transpose(1, 2).flatten(2))
