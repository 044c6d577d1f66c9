"""Prov-GigaPath's slide transformer (LongNet): parameters under the published names.

Shapes: L tokens (cls first), N = L - 1 tiles, H heads of D channels, C = H D channels of a state.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from thinsection.attention.dilated import Branch, HeadPart, dilated_attention
from thinsection.errors import BudgetError, InvalidInputError
from thinsection.pool.token_grid import row_blocks
from thinsection.types import MIB, CoordsL0
from thinsection.units import format_bytes

TOKEN_BLOCK = 1024  # tokens a block of the MLP
ATTENTION_BYTES = 64 * MIB
TILE_PX_L0, GRID = 256, 1000  # of the published position table: px a cell, cells an axis


@dataclass(frozen=True, slots=True, kw_only=True)
class LongNetConfig:
    """Sizes; the defaults are `gigapath_slide_enc12l768d`."""

    tile_dim: int = 1536
    dim: int = 768
    num_layers: int = 12
    num_heads: int = 16
    mlp_dim: int = 3072
    branches: tuple[Branch, ...] = (
        Branch(length=1024, dilation=1),
        Branch(length=5792, dilation=2),
        Branch(length=32768, dilation=4),
        Branch(length=185363, dilation=8),
        Branch(length=1048576, dilation=16),
    )


class _SelfAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(dim, dim) for _ in range(4)
        )
        self.inner_attn_ln = nn.LayerNorm(dim)


class _Ffn(nn.Module):
    def __init__(self, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, mlp_dim), nn.Linear(mlp_dim, dim)
        self.ffn_layernorm = nn.LayerNorm(mlp_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.fc1(x.to(self.fc1.weight.dtype)).to(x.dtype))
        result: torch.Tensor = self.fc2(self.ffn_layernorm(hidden).to(self.fc2.weight.dtype))
        return result


class LongNetLayer(nn.Module):
    """Pre-norm layer with sub-LayerNorms, in place and in groups of heads."""

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        self._config = config
        self.self_attn = _SelfAttention(config.dim)
        self.self_attn_layer_norm = nn.LayerNorm(config.dim)
        self.ffn = _Ffn(config.dim, config.mlp_dim)
        self.final_layer_norm = nn.LayerNorm(config.dim)

    def forward_(self, x: torch.Tensor, *, heads_at_a_time: int) -> None:
        """Writes the states (L, C) after this layer over `x`; for inference."""
        attended = self._attend(x, heads_at_a_time)
        attn = self.self_attn
        for rows in row_blocks(x.shape[0], TOKEN_BLOCK):
            normed = attn.inner_attn_ln(attended[rows])
            x[rows] += attn.out_proj(normed.to(attn.out_proj.weight.dtype))
            x[rows] += self.ffn(self.final_layer_norm(x[rows]))

    def _attend(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Attention output (L, C) before the sub-LayerNorm."""
        total, tokens = self._config.num_heads, x.shape[0]
        width = self._config.dim // total
        attended = torch.empty_like(x)
        dtype = self.self_attn.q_proj.weight.dtype
        qkv = x.new_empty(3, tokens, step * width, dtype=dtype)
        for first in range(0, total, step):
            channels = slice(first * width, (first + step) * width)
            for rows in row_blocks(tokens, TOKEN_BLOCK):
                normed = self.self_attn_layer_norm(x[rows]).to(dtype)
                for i, proj in enumerate(self._projections()):
                    qkv[i, rows] = F.linear(normed, proj.weight[channels], proj.bias[channels])
            q, k, v = qkv.view(3, tokens, step, width).transpose(1, 2)
            part = HeadPart(first=first, total=total)
            out = dilated_attention(
                (q, k, v), self._config.branches, part, budget_bytes=ATTENTION_BYTES
            )
            attended[:, channels] = out.transpose(0, 1).flatten(1)
        return attended

    def _projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj


class GigaPathNet(nn.Module):
    """The slide transformer; parameter names are those of `slide_encoder.pth`."""

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Linear(config.tile_dim, config.dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(LongNetLayer(config) for _ in range(config.num_layers))
        self.encoder.layer_norm = nn.LayerNorm(config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)

    def states_(
        self, tiles: torch.Tensor, coords_l0: CoordsL0, *, budget_bytes: int
    ) -> Iterator[torch.Tensor]:
        """The hidden states (L, C): embedding, then after each layer; one tensor, overwritten.

        Memory: states, attention output, and 6 heads_at_a_time / H of them for q, k, v and the
        attention's own output: 2.4 to 8 times L C floats, as the budget allows.

        Raises:
            BudgetError: not even one head at a time fits.
        """
        device, dtype = self.cls_token.device, self.cls_token.dtype
        step = plan_heads(tiles.shape[0] + 1, self.config, budget_bytes=budget_bytes)
        positions = position_cells(coords_l0)
        x = self.cls_token.new_empty(tiles.shape[0] + 1, self.config.dim)
        x[0] = self.cls_token[0, 0]
        for rows in row_blocks(tiles.shape[0], TOKEN_BLOCK):
            embedded = self.patch_embed.proj(tiles[rows].to(device, dtype))  # type: ignore[operator]
            table = position_embedding(positions[rows], self.config.dim)
            x[1 + rows.start : 1 + rows.stop] = embedded + table.to(device, dtype)
        yield x
        for layer in self.layers():
            layer.forward_(x, heads_at_a_time=step)
            yield x

    def to_low_precision(self) -> None:
        """Puts the weights of the large products into bfloat16; all else stays as it is."""
        for layer in self.layers():
            attn, ffn = layer.self_attn, layer.ffn
            for linear in (attn.q_proj, attn.k_proj, attn.v_proj, attn.out_proj, ffn.fc1, ffn.fc2):
                linear.to(torch.bfloat16)

    def layers(self) -> list[LongNetLayer]:
        """The layers, typed."""
        return [x for x in self.encoder.layers if isinstance(x, LongNetLayer)]  # type: ignore[union-attr]


def plan_heads(num_tokens: int, config: LongNetConfig, *, budget_bytes: int) -> int:
    """As many heads at a time as the budget allows.

    Raises:
        BudgetError: not even one head at a time fits.
    """
    state = 4 * num_tokens * config.dim
    fixed = ATTENTION_BYTES + 16 * TOKEN_BLOCK * config.mlp_dim
    needed = 0
    for heads in (d for d in range(config.num_heads, 0, -1) if config.num_heads % d == 0):
        # q, k, v, their attention's output and its copy, two sums of log-sum-exps, one head more
        needed = int(state * (2 + (6 * heads + 2) / config.num_heads)) + fixed
        if needed <= budget_bytes:
            return heads
    message = f"gigapath needs {format_bytes(needed)} for {num_tokens} tokens"
    raise BudgetError(f"{message}, the budget is {format_bytes(budget_bytes)}; raise budget_bytes")


def position_cells(coords_l0: CoordsL0) -> CoordsL0:
    """Cells (N, 2) of the position table: floor(x / 256), floor(y / 256).

    Raises:
        InvalidInputError: a tile lies outside of the table of 1000 x 1000 cells.
    """
    cells = coords_l0 // TILE_PX_L0
    if cells.size and (cells.min() < 0 or cells.max() >= GRID):
        limit = TILE_PX_L0 * GRID
        got = f"{int(coords_l0.min())}..{int(coords_l0.max())}"
        remedy = "its position table ends there; scale coords_l0 to 0.5 µm/px"
        message = f"coords_l0 must be in 0..{limit - 1} for slide encoder 'gigapath'"
        raise InvalidInputError(f"{message}, got {got}; {remedy}")
    return cells


def position_embedding(cells: CoordsL0, dim: int) -> torch.Tensor:
    """Rows (n, dim) float32 of the fixed 2-D sin-cos table, computed for these cells only.

    The second coordinate fills the first half of the channels ("w goes first"); each half is
    [sin, cos] of cell * 10000^(-i / (dim / 4)), in float64.
    """
    omega = 10000.0 ** (-np.arange(dim // 4) / (dim / 4))
    halves = [cells[:, axis, None] * omega for axis in (1, 0)]
    table = np.concatenate([f(half) for half in halves for f in (np.sin, np.cos)], axis=1)
    return torch.from_numpy(table.astype(np.float32))
