"""Prov-GigaPath as a slide encoder, without flash-attn and fairscale, in bounded memory.

Shapes: L tokens (cls first), N = L - 1 tiles, H heads of D channels, C = H D channels of a state.

Source: Xu et al., "A whole-slide foundation model for digital pathology from real-world data",
2024; the architecture (LongNet) is written from its description.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.attention.dilated import Branch, dilated_attention
from thinsection.attention.products import fast_products
from thinsection.attention.reach import blocks_of
from thinsection.errors import require
from thinsection.pool import pooling
from thinsection.pool.encoder import Expects, LoadOptions, SlideEmbedding, TileEmbeddings
from thinsection.pool.pooling import ATTENTION_BYTES, TOKEN_BLOCK, checked_slide, plan_heads
from thinsection.types import CoordsL0

TILE_PX_L0, GRID = 256, 1000  # of the published position table: px a cell, cells an axis
# tokens a segment, and which of them attend: every r-th
_BRANCHES = ((1024, 1), (5792, 2), (32768, 4), (185363, 8), (1048576, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongNetConfig:
    """Sizes; the defaults are `gigapath_slide_enc12l768d`."""

    tile_dim: int = 1536
    dim: int = 768
    num_layers: int = 12
    num_heads: int = 16
    mlp_dim: int = 3072
    branches: tuple[Branch, ...] = tuple(Branch(length=s, dilation=r) for s, r in _BRANCHES)


class _SelfAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))
        self.out_proj, self.inner_attn_ln = nn.Linear(dim, dim), nn.LayerNorm(dim)


class _Ffn(nn.Module):
    def __init__(self, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, mlp_dim), nn.Linear(mlp_dim, dim)
        self.ffn_layernorm = nn.LayerNorm(mlp_dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(x.to(self.fc1.weight.dtype)).to(x.dtype))
        hidden = self.ffn_layernorm(hidden).to(self.fc2.weight.dtype)
        return cast(Tensor, self.fc2(hidden))


class LongNetLayer(nn.Module):
    """Pre-norm layer with sub-LayerNorms, in place and in groups of heads."""

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        self._config = config
        self.self_attn = _SelfAttention(config.dim)
        self.self_attn_layer_norm = nn.LayerNorm(config.dim)
        self.ffn = _Ffn(config.dim, config.mlp_dim)
        self.final_layer_norm = nn.LayerNorm(config.dim)

    def forward_(self, x: Tensor, *, heads_at_a_time: int) -> None:
        """Writes the states (L, C) after this layer over `x`; for inference."""
        attended = self._attend(x, heads_at_a_time)
        attn = self.self_attn
        for rows in blocks_of(x.shape[0], TOKEN_BLOCK):
            normed = attn.inner_attn_ln(attended[rows])
            x[rows] += attn.out_proj(normed.to(attn.out_proj.weight.dtype))
            x[rows] += self.ffn(self.final_layer_norm(x[rows]))

    def _attend(self, x: Tensor, step: int) -> Tensor:
        """Attention output (L, C) before the sub-LayerNorm."""
        attn, total, tokens = self.self_attn, self._config.num_heads, x.shape[0]
        width, dtype = self._config.dim // total, attn.q_proj.weight.dtype
        attended, qkv = torch.empty_like(x), x.new_empty(3, tokens, step * width, dtype=dtype)
        for first in range(0, total, step):
            channels = slice(first * width, (first + step) * width)
            for rows in blocks_of(tokens, TOKEN_BLOCK):
                normed = self.self_attn_layer_norm(x[rows]).to(dtype)
                for i, proj in enumerate((attn.q_proj, attn.k_proj, attn.v_proj)):
                    qkv[i, rows] = F.linear(normed, proj.weight[channels], proj.bias[channels])
            q, k, v = qkv.view(3, tokens, step, width).transpose(1, 2)
            how = {"first_head": first, "num_heads": total, "budget_bytes": ATTENTION_BYTES}
            out = dilated_attention((q, k, v), self._config.branches, **how)
            attended[:, channels] = out.transpose(0, 1).flatten(1)
        return attended


class GigaPathNet(nn.Module):
    """The slide transformer; parameter names are those of `slide_encoder.pth`."""

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(config.tile_dim, config.dim)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(LongNetLayer(config) for _ in range(config.num_layers))
        self.encoder.layer_norm = nn.LayerNorm(config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)

    def states_(self, tiles: Tensor, coords_l0: CoordsL0, *, budget_bytes: int) -> Iterator[Tensor]:
        """The hidden states (L, C): embedding, then after each layer; one tensor, overwritten.
        Memory: states, attention output, q, k, v: 2.4 to 8 times L C floats, by the budget."""
        device, dtype = self.cls_token.device, self.cls_token.dtype
        step = heads_at_a_time(tiles.shape[0] + 1, self.config, budget_bytes=budget_bytes)
        positions = position_cells(coords_l0)
        x = self.cls_token.new_empty(tiles.shape[0] + 1, self.config.dim)
        x[0] = self.cls_token[0, 0]
        for rows in blocks_of(tiles.shape[0], TOKEN_BLOCK):
            embedded = self.patch_embed["proj"](tiles[rows].to(device, dtype))
            table = position_embedding(positions[rows], self.config.dim)
            x[1 + rows.start : 1 + rows.stop] = embedded + table.to(device, dtype)
        yield x
        for layer in self.encoder.layers:  # type: ignore[union-attr]
            layer.forward_(x, heads_at_a_time=step)
            yield x


def heads_at_a_time(num_tokens: int, config: LongNetConfig, *, budget_bytes: int) -> int:
    """As many heads at a time as the budget allows; a BudgetError where not even one fits."""
    state, fixed = 4 * num_tokens * config.dim, ATTENTION_BYTES + 16 * TOKEN_BLOCK * config.mlp_dim

    def peak(heads: int) -> int:
        # q, k, v, their attention's output and its copy, two sums of log-sum-exps, one head more
        return int(state * (2 + (6 * heads + 2) / config.num_heads)) + fixed

    return plan_heads("gigapath", num_tokens, config.num_heads, peak, budget_bytes).heads_at_a_time


def position_cells(coords_l0: CoordsL0) -> CoordsL0:
    """Cells (N, 2) of the position table, floor(x / 256) and floor(y / 256), of 1000 x 1000."""
    cells, limit = coords_l0 // TILE_PX_L0, TILE_PX_L0 * GRID
    if cells.size:
        got = f"{int(coords_l0.min())}..{int(coords_l0.max())}"
        remedy = "its position table ends there; scale coords_l0 to 0.5 µm/px"
        rule = f"coords_l0 must be in 0..{limit - 1} for slide encoder 'gigapath'"
        require(cells.min() >= 0 and cells.max() < GRID, rule, f"{got}; {remedy}")
    return cells


def position_embedding(cells: CoordsL0, dim: int) -> Tensor:
    """Rows (n, dim) float32 of the fixed 2-D sin-cos table: of y, then x, [sin, cos] each."""
    omega = 10000.0 ** (-np.arange(dim // 4) / (dim / 4))
    halves = [cells[:, axis, None] * omega for axis in (1, 0)]
    table = np.concatenate([f(half) for half in halves for f in (np.sin, np.cos)], axis=1)
    return torch.from_numpy(table.astype(np.float32))


class GigaPathSlideEncoder(pooling.PublishedSlideEncoder):
    """Prov-GigaPath's slide embedding (768,): the normed cls token after the last layer."""

    name = "gigapath"
    made_of = ("gigapath", "prov_gigapath")
    expects = Expects(tile_encoders=made_of, tile_dim=1536, tile_px=256, tile_mpp=0.5)
    repository = "prov-gigapath/prov-gigapath"
    revision = "64f9e26c15019f2d4f6d9113c6822f88bb16b01b"
    files = ("slide_encoder.safetensors", "slide_encoder.pth")
    large = r"encoder\.layers\..*(_proj|fc1|fc2)"

    net: GigaPathNet

    def __init__(self, net: GigaPathNet, *, options: LoadOptions) -> None:
        super().__init__(net, options=options)
        self.dim = net.config.dim

    @classmethod
    def build(cls, config: Any = None) -> GigaPathNet:
        return GigaPathNet(config or LongNetConfig())

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Slide embedding (768,) float32 from embeddings (N, 1536), in the order as given.
        Memory: 7 to 25 KiB per tile, as the budget allows; BudgetError for too many tiles."""
        layers = self.encode_layers(tile_embeddings, coords_l0, tile_px_l0=tile_px_l0)
        return cast(SlideEmbedding, layers[-1])

    @torch.inference_mode()
    @fast_products()
    def encode_layers(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> npt.NDArray[np.float32]:
        """Slide embeddings (13, 768): of the embedding layer and of each layer after it."""
        dim = self.net.config.tile_dim
        tiles, coords, _ = checked_slide(tile_embeddings, coords_l0, tile_px_l0, tile_dim=dim)
        layers = self.net.states_(tiles, coords, budget_bytes=self._budget_bytes)
        return np.stack([self.net.norm(states[0]).cpu().numpy() for states in layers])
