"""Prov-GigaPath as a slide encoder, without flash-attn and fairscale, in bounded memory.

Shapes: L tokens (cls first), N = L - 1 tiles, H heads of D channels, C = H D channels of a state.

Source: Xu et al., "A whole-slide foundation model for digital pathology from real-world data",
2024; the architecture (LongNet) is written from its description.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.attention.blocks import blocks_of
from thinsection.attention.dilated import Branch, dilated_heads
from thinsection.attention.products import fast_products
from thinsection.errors import ConfigError, InvalidInputError
from thinsection.pool.encoder import (
    Expects,
    LoadOptions,
    TileEmbeddings,
    TileLayout,
)
from thinsection.pool.pooling import checked_slide
from thinsection.pool.published import (
    ATTENTION_BYTES,
    TOKEN_BLOCK,
    PublishedSlideEncoder,
    plan_heads,
)
from thinsection.types import CoordsL0, Size

# cells along each axis of the published position table; a cell is a tile
GRID_CELLS = 1000
LAST = "last"  # the state after the last layer
FINAL = "final"  # that state after the encoder's layer norm: the authors' `encoder_out`
PUBLISHED_BRANCHES = (
    Branch(length=1_024, dilation=1),
    Branch(length=5_792, dilation=2),
    Branch(length=32_768, dilation=4),
    Branch(length=185_363, dilation=8),
    Branch(length=1_048_576, dilation=16),
)


@dataclass(frozen=True, slots=True)
class SlideOutput:
    """Tokens and states that make up the slide embedding, as in 'mean', 'cls' or 'mean-5-11'."""

    tokens: Literal["mean", "cls"] = "mean"  # mean over tiles, or the class token
    # number of a layer (0 is the embedding), LAST or FINAL; several are concatenated
    states: tuple[int | str, ...] = (LAST,)

    @classmethod
    def parse(cls, text: str, *, num_layers: int) -> "SlideOutput":
        """Output that the second part of a name means; '' is the authors' default, 'mean'.

        Raises ConfigError: there is no such output.
        """
        match = re.fullmatch(rf"(mean|cls)((?:-(?:\d+|{FINAL}))*)", text or "mean")
        if match is None:
            raise ConfigError(
                "output of GigaPath's slide encoder must be mean, cls, or one of them with "
                f"layers such as mean-11, cls-5-11 or mean-final, got {text!r}"
            )
        tokens: Literal["mean", "cls"] = "cls" if match[1] == "cls" else "mean"
        names = match[2].split("-")[1:]
        states = tuple(name if name == FINAL else int(name) for name in names)
        for state in states:
            if isinstance(state, int) and state > num_layers:
                raise ConfigError(
                    f"layer of GigaPath's slide encoder must be in 0..{num_layers}, "
                    f"got {state} in {text!r}"
                )
        return cls(tokens, states or (LAST,))

    def __str__(self) -> str:
        """Text that `parse` understands."""
        if self.states == (LAST,):
            return self.tokens
        return "-".join([self.tokens, *map(str, self.states)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LongNetConfig:
    """Sizes; the defaults are `gigapath_slide_enc12l768d`."""

    tile_dim: int = 1536
    dim: int = 768
    num_layers: int = 12
    num_heads: int = 16
    mlp_dim: int = 3072
    branches: tuple[Branch, ...] = PUBLISHED_BRANCHES

    @property
    def head_dim(self) -> int:
        """Channels D of a head."""
        return self.dim // self.num_heads


class _SelfAttention(nn.Module):
    """Parameters of the attention; `LongNetLayer` computes it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.inner_attn_ln = nn.LayerNorm(dim)


class _Ffn(nn.Module):
    """MLP with a layer norm of its hidden states."""

    def __init__(self, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, dim)
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
        """Write the states (L, C) after this layer over `x`; for inference."""
        attended = self._attend(x, heads_at_a_time)
        attn = self.self_attn
        for rows in blocks_of(x.shape[0], TOKEN_BLOCK):
            normed = attn.inner_attn_ln(attended[rows])
            x[rows] += attn.out_proj(normed.to(attn.out_proj.weight.dtype))
            x[rows] += self.ffn(self.final_layer_norm(x[rows]))

    def _attend(self, x: Tensor, heads_at_a_time: int) -> Tensor:
        """Attention output (L, C) before the sub-LayerNorm."""
        head_dim = self._config.head_dim
        tokens = x.shape[0]
        attended = torch.empty_like(x)
        qkv = x.new_empty(
            3,
            tokens,
            heads_at_a_time * head_dim,
            dtype=self.self_attn.q_proj.weight.dtype,
        )
        for first in range(0, self._config.num_heads, heads_at_a_time):
            channels = slice(first * head_dim, (first + heads_at_a_time) * head_dim)
            self._project(x, channels, qkv)
            by_head = qkv.view(3, tokens, heads_at_a_time, head_dim).transpose(1, 2)
            q, k, v = by_head
            output = dilated_heads(
                (q, k, v),
                self._config.branches,
                first_head=first,
                num_heads=self._config.num_heads,
                budget_bytes=ATTENTION_BYTES,
            )
            attended[:, channels] = output.transpose(0, 1).flatten(1)
        return attended

    def _project(self, x: Tensor, channels: slice, qkv: Tensor) -> None:
        """Write these channels of q, k and v to `qkv` (3, L, channels)."""
        attn = self.self_attn
        for rows in blocks_of(x.shape[0], TOKEN_BLOCK):
            normed = self.self_attn_layer_norm(x[rows]).to(qkv.dtype)
            for i, layer in enumerate((attn.q_proj, attn.k_proj, attn.v_proj)):
                weight = layer.weight[channels]
                bias = layer.bias[channels]
                qkv[i, rows] = F.linear(normed, weight, bias)


class GigaPathNet(nn.Module):
    """The slide transformer; parameter names are those of `slide_encoder.pth`."""

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        self.sizes = config
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Linear(config.tile_dim, config.dim)}
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(
            LongNetLayer(config) for _ in range(config.num_layers)
        )
        self.encoder.layer_norm = nn.LayerNorm(config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)

    def states_(
        self, tiles: Tensor, cells: CoordsL0, *, budget_bytes: int
    ) -> Iterator[Tensor]:
        """Hidden states (L, C): embedding, then after each layer; one tensor, overwritten.

        Memory: states, attention output, q, k, v: 2.4 to 8 times L C floats, by the budget.
        """
        num_tokens = tiles.shape[0] + 1
        heads = heads_at_a_time(num_tokens, self.sizes, budget_bytes=budget_bytes)
        x = self.cls_token.new_empty(num_tokens, self.sizes.dim)
        x[0] = self.cls_token[0, 0]
        for rows in blocks_of(tiles.shape[0], TOKEN_BLOCK):
            embedded = self.patch_embed["proj"](tiles[rows].to(x.device, x.dtype))
            table = position_embedding(cells[rows], self.sizes.dim)
            x[1 + rows.start : 1 + rows.stop] = embedded + table.to(x.device, x.dtype)
        yield x
        for layer in self.encoder.layers:  # type: ignore[union-attr]
            layer.forward_(x, heads_at_a_time=heads)
            yield x


def heads_at_a_time(
    num_tokens: int, config: LongNetConfig, *, budget_bytes: int
) -> int:
    """Largest number of heads at a time that the budget allows.

    Raises BudgetError: not even one head fits.
    """
    state = 4 * num_tokens * config.dim
    hidden = 16 * TOKEN_BLOCK * config.mlp_dim
    fixed = ATTENTION_BYTES + hidden

    def peak_bytes(heads: int) -> int:
        # q, k, v, their attention's output and its copy, two sums of log-sum-exps, one head more
        head_states = 6 * heads + 2
        return int(state * (2 + head_states / config.num_heads)) + fixed

    plan = plan_heads(
        "gigapath",
        num_tokens,
        config.num_heads,
        peak_bytes=peak_bytes,
        budget_bytes=budget_bytes,
    )
    return plan.heads_at_a_time


def position_cells(coords_l0: CoordsL0, size_l0: Size) -> CoordsL0:
    """Cells (N, 2) of the position table: the tile's column and row, counted in tiles.

    A tile is the unit, so that the same tissue has the same cells at every magnification.

    Raises InvalidInputError: a tile lies outside of the table's 1000 x 1000 cells.
    """
    cells: CoordsL0 = coords_l0 // np.array(size_l0)
    if cells.min() < 0 or cells.max() >= GRID_CELLS:
        raise InvalidInputError(
            f"coords_l0 must be in 0..{GRID_CELLS - 1} tiles for GigaPath's slide encoder, got "
            f"{int(cells.min())}..{int(cells.max())} tiles of {size_l0[0]} x {size_l0[1]} px; "
            "its position table has no more, so check tile_px_l0"
        )
    return cells


def position_embedding(cells: CoordsL0, dim: int) -> Tensor:
    """Rows (n, dim) float32 of the fixed 2-D sin-cos table: sin y, cos y, sin x, cos x."""
    frequencies = 10000.0 ** (-np.arange(dim // 4) / (dim / 4))
    angles_x = cells[:, 0, None] * frequencies
    angles_y = cells[:, 1, None] * frequencies
    table = np.concatenate(
        [np.sin(angles_y), np.cos(angles_y), np.sin(angles_x), np.cos(angles_x)],
        axis=1,
    )
    return torch.from_numpy(table.astype(np.float32))


class GigaPathSlideEncoder(PublishedSlideEncoder[LongNetConfig]):
    """Prov-GigaPath's slide embedding, by default as in the authors' notebook.

    'gigapath' is the mean over tiles of the last state, with a layer norm (the authors'
    `global_pool`). 'gigapath:cls' is the class token, which pretraining never trained.
    'gigapath:mean-11' uses layer 11, as TRIDENT does. 'gigapath:mean-5-11' concatenates layers.
    'gigapath:mean-final' is the result of the authors' forward without `all_layer_embed`.
    Overlapping tiles may share a position.

    Memory: 7 to 25 KiB per tile, depending on the budget; BudgetError if there are too many tiles.
    """

    name = "gigapath"
    expects = Expects(
        tile_encoders=("gigapath", "prov_gigapath"),
        tile_dim=1536,
        tile_px=256,
        tile_mpp=0.5,
    )
    version = 2  # 2: positions count in tiles; 1: in 256 px of level 0
    has_outputs = True
    repository = "prov-gigapath/prov-gigapath"
    revision: ClassVar[str | None] = "64f9e26c15019f2d4f6d9113c6822f88bb16b01b"
    files = ("slide_encoder.safetensors", "slide_encoder.pth")
    network = GigaPathNet
    published_sizes = LongNetConfig()
    large_layers = r"encoder\.layers\..*(_proj|fc1|fc2)"

    net: GigaPathNet

    def __init__(self, net: GigaPathNet, *, options: LoadOptions) -> None:
        super().__init__(net, options=options)
        num_layers = net.sizes.num_layers
        self.output = SlideOutput.parse(options.output, num_layers=num_layers)
        self.name = f"{type(self).name}:{self.output}"
        self.dim = net.sizes.dim * len(self.output.states)

    def embed(self, tiles: Tensor, coords_l0: CoordsL0, layout: TileLayout) -> Tensor:
        vectors = self._vectors(tiles, coords_l0, layout.size_l0)
        place_of = {FINAL: -1, LAST: -2}
        places = [place_of.get(str(state), state) for state in self.output.states]
        return torch.cat([vectors[int(place)] for place in places])

    @torch.inference_mode()
    @fast_products()
    def encode_layers(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> npt.NDArray[np.float32]:
        """Embeddings (13, 768) of the embedding layer and of each layer after it.

        They are means over tiles or class tokens, like the output of the encoder.
        """
        tiles, coords, edge = checked_slide(
            tile_embeddings, coords_l0, tile_px_l0, tile_dim=self.tile_dim
        )
        vectors = self._vectors(tiles, coords, (edge, edge))[:-1]
        return np.stack([vector.cpu().numpy() for vector in vectors])

    def _vectors(
        self, tiles: Tensor, coords_l0: CoordsL0, size_l0: Size
    ) -> list[Tensor]:
        """14 pooled states (768,): of the embedding layer, of each layer, and the final state."""
        cells = position_cells(coords_l0, size_l0)
        pooled = []
        for states in self.net.states_(tiles, cells, budget_bytes=self._budget_bytes):
            pooled.append(self._pooled(states))
        for rows in blocks_of(len(states), TOKEN_BLOCK):
            states[rows] = self.net.encoder.layer_norm(states[rows])  # type: ignore[operator]
        return [*pooled, self._pooled(states)]

    def _pooled(self, states: Tensor) -> Tensor:
        """Pools states (L, C) to one vector (C,), which gets a layer norm."""
        if self.output.tokens == "cls":
            vector = states[0]
        else:
            tiles = states[1:]
            total = tiles.new_zeros(tiles.shape[1], dtype=torch.float64)
            for rows in blocks_of(len(tiles), TOKEN_BLOCK):
                total += tiles[rows].double().sum(0)
            vector = (total / len(tiles)).to(states.dtype)
        return cast(Tensor, self.net.norm(vector))


class GigaPathFlashSlideEncoder(GigaPathSlideEncoder):
    """GigaPath-Flash's slide embedding: half the width, on tile embeddings of its own encoder.

    Outputs and positions are those of `GigaPathSlideEncoder`.

    Memory: 4 to 13 KiB per tile, depending on the budget; BudgetError if there are too many tiles.
    """

    name = "gigapath_flash"
    expects = Expects(
        tile_encoders=("gigapath_flash",),
        tile_dim=384,
        tile_px=256,
        tile_mpp=0.5,
    )
    repository = "prov-gigapath/prov-gigapath-flash"
    revision = None
    published_sizes = LongNetConfig(tile_dim=384, dim=384, mlp_dim=1536)
