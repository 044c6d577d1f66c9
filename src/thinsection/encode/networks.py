"""Networks of tile encoders in plain torch, with the parameter names of the published weights.

**CONCH v1.5**, TITAN's tile encoder: a ViT-L/16 and an attentional pooler with one learned query.
[B, 3, H, W] in, tokens [B, 1 + T, 1024] from the trunk, [B, 768] from the pooler. The positions
are interpolated in every forward pass, by a scale factor (not a size) and without antialias.
Source: Ding et al., arXiv:2411.19666; `conch_v1_5.py` and `ConchConfig` in MahmoodLab/TITAN.

**EfficientNet-Lite0**: inverted bottlenecks with ReLU6, no squeeze-and-excitation. [B, 3, H, W] in,
feature map [B, 1280, H/32, W/32] out; the checkpoint's classifier is not used.
Source: Tan and Le, arXiv:1905.11946; the Lite variant is Google's `efficientnet/lite`.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH_PX = 16
MLP_RATIO = 4
POOLER_HEADS = 8
TRUNK_EPS = 1e-6
POOLER_EPS = 1e-5
# DINO's safeguard against a scale that rounds down to one position less
INTERPOLATION_OFFSET = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConchConfig:
    """Sizes of the trunk and the pooler; the defaults are those of the published weights."""

    width: int = 1024
    depth: int = 24
    heads: int = 16
    table_px: int = 224
    init_values: float | None = 1e-6  # of the layer scale; None: there is none
    embed_dim: int = 768


def mlp(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers, `fc1` and `fc2`, with an exact GELU between them."""
    layers = OrderedDict(
        fc1=nn.Linear(width, hidden),
        gelu=nn.GELU(),
        fc2=nn.Linear(hidden, width),
    )
    return nn.Sequential(layers)


class Attention(nn.Module):
    """Multi-head self-attention with a fused qkv projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.proj(mixed.transpose(1, 2).reshape(b, n, c)))


class _LayerScale(nn.Module):
    """A learned factor per channel, `gamma`; nothing without an initial value."""

    def __init__(self, width: int, init_value: float | None) -> None:
        super().__init__()
        self.gamma = None
        if init_value is not None:
            self.gamma = nn.Parameter(torch.full((width,), init_value))

    def forward(self, x: Tensor) -> Tensor:
        return x if self.gamma is None else x * self.gamma


class Block(nn.Module):
    """A pre-norm transformer block with layer scale."""

    def __init__(self, config: ConchConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, eps=TRUNK_EPS)
        self.norm2 = nn.LayerNorm(width, eps=TRUNK_EPS)
        self.attn = Attention(width, config.heads)
        self.mlp = mlp(width, MLP_RATIO * width)
        self.ls1 = _LayerScale(width, config.init_values)
        self.ls2 = _LayerScale(width, config.init_values)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return cast(Tensor, x + self.ls2(self.mlp(self.norm2(x))))


class Trunk(nn.Module):
    """Vision transformer: class token first, position table interpolated to the input."""

    def __init__(self, config: ConchConfig) -> None:
        super().__init__()
        width = config.width
        self.table_edge = config.table_px // PATCH_PX
        projection = nn.Conv2d(3, width, PATCH_PX, PATCH_PX)
        self.patch_embed = nn.ModuleDict({"proj": projection})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        table = torch.randn(1, 1 + self.table_edge**2, width)
        self.pos_embed = nn.Parameter(table * 0.02)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(width, eps=TRUNK_EPS)

    def positions(self, rows: int, columns: int) -> Tensor:
        """Position table for this grid, [1, 1 + rows * columns, width]."""
        edge = self.table_edge
        if (rows, columns) == (edge, edge):
            return self.pos_embed
        table = self.pos_embed[:, 1:].reshape(1, edge, edge, -1).permute(0, 3, 1, 2)
        scale = tuple((n + INTERPOLATION_OFFSET) / edge for n in (rows, columns))
        grid = F.interpolate(table, scale_factor=scale, mode="bicubic")
        of_cls = self.pos_embed[:, :1]
        return torch.cat([of_cls, grid.flatten(2).transpose(1, 2)], dim=1)

    def forward(self, pixels: Tensor) -> Tensor:
        rows, columns = (n // PATCH_PX for n in pixels.shape[-2:])
        patch_map = self.patch_embed["proj"](pixels)
        patches = patch_map.flatten(2).transpose(1, 2)  # row-major
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1)
        return cast(Tensor, self.norm(self.blocks(x + self.positions(rows, columns))))


class AttentionalPooler(nn.Module):
    """Learned query that attends to all tokens, including the class token."""

    def __init__(self, config: ConchConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        width = config.width
        self.query = nn.Parameter(torch.randn(1, dim))
        self.ln_k = nn.LayerNorm(width, eps=POOLER_EPS)
        self.ln_q = nn.LayerNorm(dim, eps=POOLER_EPS)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(width, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        b = len(tokens)
        dim = self.query.shape[1]
        q = self.to_q(self.ln_q(self.query)).expand(b, -1, -1)
        k, v = self.to_kv(self.ln_k(tokens)).chunk(2, dim=-1)
        q, k, v = (
            t.unflatten(-1, (POOLER_HEADS, -1)).transpose(1, 2) for t in (q, k, v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.to_out(mixed.transpose(1, 2).reshape(b, -1, dim)))


class ConchV15(nn.Module):
    """Trunk and pooler; the embedding is the query's output, normalised."""

    def __init__(self, config: ConchConfig) -> None:
        super().__init__()
        self.trunk = Trunk(config)
        self.attn_pool_contrast = AttentionalPooler(config)
        self.ln_contrast = nn.LayerNorm(config.embed_dim, eps=POOLER_EPS)

    def pool(self, tokens: Tensor) -> Tensor:
        """Embedding [B, embed_dim] from the trunk's tokens."""
        return cast(Tensor, self.ln_contrast(self.attn_pool_contrast(tokens)[:, 0]))


class Stage(NamedTuple):
    """Inverted bottlenecks of EfficientNet-Lite0 with one number of channels."""

    expansion: int
    kernel: int
    stride: int  # stride of the first block
    channels: int
    blocks: int


STAGES = (
    Stage(1, 3, 1, 16, 1),
    Stage(6, 3, 2, 24, 2),
    Stage(6, 5, 2, 40, 2),
    Stage(6, 3, 2, 80, 3),
    Stage(6, 5, 1, 112, 3),
    Stage(6, 5, 2, 192, 4),
    Stage(6, 3, 1, 320, 1),
)
STEM_CHANNELS = 32
HEAD_CHANNELS = 1280
BN_EPS = 1e-3  # value of TensorFlow, in which the weights were trained
CLASSIFIER = "_fc."  # prefix of the 1000-class layer, which an encoder does not use


class SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's SAME padding: the odd pixel goes to the right and bottom."""

    def forward(self, x: Tensor) -> Tensor:
        vertical = self._padding(x.shape[-2])
        horizontal = self._padding(x.shape[-1])
        top = vertical // 2
        left = horizontal // 2
        x = F.pad(x, (left, horizontal - left, top, vertical - top))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, 1, self.groups)

    def _padding(self, length: int) -> int:
        """Total pixels of padding on both sides."""
        kernel = self.kernel_size[0]
        stride = self.stride[0]
        num_outputs = -(-length // stride)
        return max((num_outputs - 1) * stride + kernel - length, 0)


def _conv(
    c_in: int, c_out: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    if stride > 1:
        return SameConv2d(c_in, c_out, kernel, stride, groups=groups, bias=False)
    return nn.Conv2d(
        c_in, c_out, kernel, padding=kernel // 2, groups=groups, bias=False
    )


class InvertedBottleneck(nn.Module):
    """Expand (if the factor is above 1), depthwise, project; residual if the shape stays."""

    def __init__(
        self, c_in: int, c_out: int, expansion: int, kernel: int, stride: int
    ) -> None:
        super().__init__()
        mid = c_in * expansion
        self.expands = expansion > 1
        self.residual = stride == 1 and c_in == c_out
        if self.expands:
            self._expand_conv = _conv(c_in, mid, 1)
            self._bn0 = nn.BatchNorm2d(mid, eps=BN_EPS)
        self._depthwise_conv = _conv(mid, mid, kernel, stride=stride, groups=mid)
        self._bn1 = nn.BatchNorm2d(mid, eps=BN_EPS)
        self._project_conv = _conv(mid, c_out, 1)
        self._bn2 = nn.BatchNorm2d(c_out, eps=BN_EPS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        if self.expands:
            hidden = F.relu6(self._bn0(self._expand_conv(hidden)), inplace=True)
        hidden = F.relu6(self._bn1(self._depthwise_conv(hidden)), inplace=True)
        out: Tensor = self._bn2(self._project_conv(hidden))
        return out.add_(x) if self.residual else out


class EfficientNetLite0(nn.Module):
    """Feature extractor: stem, 16 bottlenecks, 1x1 head convolution."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _conv(3, STEM_CHANNELS, 3, stride=2)
        self._bn0 = nn.BatchNorm2d(STEM_CHANNELS, eps=BN_EPS)
        self._blocks = nn.Sequential()
        channels = STEM_CHANNELS
        for stage in STAGES:
            for number in range(stage.blocks):
                self._blocks.append(
                    InvertedBottleneck(
                        channels,
                        stage.channels,
                        stage.expansion,
                        stage.kernel,
                        stride=stage.stride if number == 0 else 1,
                    )
                )
                channels = stage.channels
        self._conv_head = _conv(channels, HEAD_CHANNELS, 1)
        self._bn1 = nn.BatchNorm2d(HEAD_CHANNELS, eps=BN_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self._bn0(self._conv_stem(x)), inplace=True)
        return F.relu6(self._bn1(self._conv_head(self._blocks(x))), inplace=True)
