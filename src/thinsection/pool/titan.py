"""TITAN as a slide encoder: published weights in, slide embeddings out, in bounded memory.

States are overwritten in place, in blocks of tokens and groups of heads. The memory is a few times
the size of the states.

Shapes: T tokens (cls first), H heads of D = 64 channels, C = H D channels of a state; N tiles, M
tokens of tiles, which are summed up by grid cell, without a dense grid.

Source: Ding et al., "A multimodal whole-slide foundation model for pathology", 2025; the
architecture is written from its description, without the hub's remote code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from thinsection.attention import alibi2d_attention, alibi_slopes
from thinsection.attention.blocks import blocks_of
from thinsection.encode.networks import mlp
from thinsection.errors import InvalidInputError
from thinsection.pool.encoder import Expects, TileLayout
from thinsection.pool.published import (
    ATTENTION_BYTES,
    TOKEN_BLOCK,
    HeadPlan,
    PublishedSlideEncoder,
    plan_heads,
)
from thinsection.types import CoordsL0, Size

DIM = 768
NUM_BLOCKS = 6
NUM_HEADS = 12
HEAD_DIM = DIM // NUM_HEADS
POOL_HEADS = 8
POOL_QUERIES = 128
BLOCK_ROWS = 1024  # tokens in a block of the search for all-zero cells

Tokens = Callable[[slice], Tensor]  # slice of tile tokens -> summed embeddings [m, C]


def plan_tokens(
    num_tokens: int, *, budget_bytes: int, element_bytes: int = 4
) -> HeadPlan:
    """Largest number of heads at a time that the budget allows.

    For each token, the states take 4 C bytes, and q, k and v of all heads take 3 C elements of
    `element_bytes`. With all heads at once the attention overwrites q; otherwise its output takes
    another C elements.

    Raises BudgetError: not even one head fits.
    """
    # hidden states of a block (4 C), their input and their output, each in float32 and in the dtype
    # of matrix products
    hidden = TOKEN_BLOCK * DIM * (4 + 1 + 1) * (4 + element_bytes)
    # scores of the pooling, log-sum-exps of the attention, and the cell of a token
    per_token = 8 * (POOL_HEADS + NUM_HEADS + 2)
    fixed = ATTENTION_BYTES + hidden + num_tokens * per_token

    def peak_bytes(heads: int) -> int:
        output_share = 0 if heads == NUM_HEADS else 1
        shares = 3 * heads / NUM_HEADS + output_share
        return int(num_tokens * DIM * (4 + element_bytes * shares)) + fixed

    return plan_heads(
        "titan",
        num_tokens,
        NUM_HEADS,
        peak_bytes=peak_bytes,
        budget_bytes=budget_bytes,
    )


class _Attention(nn.Module):
    """Parameters of the attention; `TitanBlock` computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)


class TitanBlock(nn.Module):
    """x += attention(norm1(x)); x += mlp(norm2(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM, eps=1e-6)
        self.norm2 = nn.LayerNorm(DIM, eps=1e-6)
        self.attn = _Attention()
        self.mlp = mlp(DIM, 4 * DIM)

    def forward_(
        self, x: Tensor, cells: Tensor, slopes: Tensor, heads_at_a_time: int
    ) -> None:
        """Write the states [T, C] after this block over `x`; for inference."""
        attended = self._attend(x, cells, slopes, heads_at_a_time)
        dtype = self.attn.qkv.weight.dtype
        for rows in blocks_of(x.shape[0], TOKEN_BLOCK):
            x[rows] += self.attn.proj(attended[rows].flatten(1))
            x[rows] += self.mlp(self.norm2(x[rows]).to(dtype))

    def _attend(
        self, x: Tensor, cells: Tensor, slopes: Tensor, heads_at_a_time: int
    ) -> Tensor:
        """Attention output [T, H, D] before the projection."""
        tokens = x.shape[0]
        dtype = self.attn.qkv.weight.dtype
        qkv = x.new_empty(tokens, 3, heads_at_a_time, HEAD_DIM, dtype=dtype)
        if heads_at_a_time == NUM_HEADS:
            self._attend_heads(x, cells, slopes, slice(0, NUM_HEADS), qkv)
            return qkv[:, 0]
        output = x.new_empty(tokens, NUM_HEADS, HEAD_DIM, dtype=dtype)
        for first in range(0, NUM_HEADS, heads_at_a_time):
            heads = slice(first, first + heads_at_a_time)
            self._attend_heads(x, cells, slopes, heads, qkv)
            output[:, heads] = qkv[:, 0]
        return output

    def _attend_heads(
        self, x: Tensor, cells: Tensor, slopes: Tensor, heads: slice, qkv: Tensor
    ) -> None:
        """Write q, k and v of these heads to `qkv` [T, 3, h, D], then their attention over q."""
        all_weights = self.attn.qkv.weight.view(3, NUM_HEADS, -1, DIM)
        all_biases = self.attn.qkv.bias.view(3, NUM_HEADS, -1)
        weight = all_weights[:, heads].reshape(-1, DIM)
        bias = all_biases[:, heads].reshape(-1)
        for rows in blocks_of(x.shape[0], TOKEN_BLOCK):
            normed = self.norm1(x[rows]).to(qkv.dtype)
            torch.addmm(bias, normed, weight.T, out=qkv[rows].flatten(1))
        q, k, v = qkv.permute(1, 2, 0, 3)[:, None]
        alibi2d_attention(
            q, k, v, cells, slopes[heads], budget_bytes=ATTENTION_BYTES, out=q
        )


class _Pooler(nn.Module):
    """Attention of learned queries over all tokens; only one query is ever computed here."""

    def __init__(self, num_queries: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(num_queries, DIM))
        self.ln_q = nn.LayerNorm(DIM)
        self.ln_k = nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, POOL_HEADS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Pooled vector [C] of the first query, from normed tokens [T, C].

        Keys and values need not be computed. The score q . (W_k x + b) differs from (W_kᵀ q) . x by
        a constant per head, and the weighted sum of W_v x + b is W_v times the weighted sum of x
        plus b. So T C products per head are enough.
        """
        w_q, w_k, w_v = self.attn.in_proj_weight.view(3, POOL_HEADS, -1, DIM)
        b_q, _, b_v = self.attn.in_proj_bias.view(3, POOL_HEADS, -1)
        q = torch.einsum("hdc,c->hd", w_q, self.ln_q(self.query[0])) + b_q
        directions = torch.einsum("hdc,hd->hc", w_k, q) * (DIM // POOL_HEADS) ** -0.5
        blocks = blocks_of(tokens.shape[0], TOKEN_BLOCK)
        scores = torch.cat([self.ln_k(tokens[rows]) @ directions.T for rows in blocks])
        weights = scores.softmax(0)
        mean = directions.new_zeros(POOL_HEADS, DIM)
        for rows in blocks:
            mean = mean + weights[rows].T @ self.ln_k(tokens[rows])
        heads = torch.einsum("hdc,hc->hd", w_v, mean) + b_v
        return cast(Tensor, self.attn.out_proj(heads.flatten()))


class TitanNet(nn.Module):
    """The slide transformer; parameter names are the published ones without `vision_encoder.`.

    `attn_pool` (queries of tokens) and `proj` (into the text space) are loaded, but not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.patch_embed = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())
        self.blocks = nn.Module()
        self.blocks.modules_list = nn.ModuleList(
            TitanBlock() for _ in range(NUM_BLOCKS)
        )
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        self.attn_pool = _Pooler(POOL_QUERIES)
        self.attn_pool_contrastive = _Pooler(1)
        self.proj = nn.Parameter(torch.zeros(DIM, DIM))

    def pooled_(
        self, tokens: Tokens, num_tokens: int, cells: Tensor, plan: HeadPlan
    ) -> Tensor:
        """Slide embedding [C] of cls and num_tokens - 1 tile tokens. Memory: `plan.peak_bytes`."""
        dtype = next(self.patch_embed.parameters()).dtype
        x = self.cls_token.new_empty(num_tokens, DIM)
        x[0] = self.cls_token[0, 0]
        for rows in blocks_of(num_tokens - 1, TOKEN_BLOCK):
            x[1 + rows.start : 1 + rows.stop] = self.patch_embed(tokens(rows).to(dtype))
        slopes = alibi_slopes(NUM_HEADS)
        for block in self.blocks.modules_list:  # type: ignore[union-attr]
            block.forward_(x, cells, slopes, plan.heads_at_a_time)
        for rows in blocks_of(num_tokens, TOKEN_BLOCK):
            x[rows] = self.norm(x[rows])
        return cast(Tensor, self.attn_pool_contrastive(x))


class TitanSlideEncoder(PublishedSlideEncoder[None]):
    """TITAN's pooled slide embedding (768,), before the projection into the text space.

    The slide is divided into cells of the size of the step between tiles; each cell with tiles is a
    token.

    Memory: about 12 KiB a tile in float32, or less if the budget is smaller; a BudgetError if it is
    too small.
    """

    name = "titan"
    dim = DIM
    expects = Expects(
        tile_encoders=("conch_v15",), tile_dim=DIM, tile_px=512, tile_mpp=0.5
    )
    repository = "MahmoodLab/TITAN"
    revision = "dac6773d9961cfc75503440676ff157a2c6e8d2e"
    files = ("model.safetensors", "pytorch_model.bin")
    prefix = "vision_encoder."  # the file also has the text tower
    # 2: a cell is as large as the step between tiles; 1: as large as a tile
    version = 2
    large_layers = r"blocks\..*\.(qkv|proj|fc1|fc2)|patch_embed\.0"

    net: TitanNet
    tile_dim = DIM

    @classmethod
    def build(cls, config: None = None) -> TitanNet:
        return TitanNet()

    def embed(self, tiles: Tensor, coords_l0: CoordsL0, layout: TileLayout) -> Tensor:
        """Slide embedding (768,).

        Raises InvalidInputError: the tiles overlap and the layout does not state the step.
        """
        if layout.stride_l0 is None:
            check_no_overlap(coords_l0, layout.size_l0)
        stride_l0 = layout.stride_l0 or layout.size_l0
        grid = token_grid(tiles, coords_l0, stride_l0=stride_l0)
        num_tokens = len(grid) + 1
        plan = plan_tokens(
            num_tokens,
            budget_bytes=self._budget_bytes,
            element_bytes=2 if self.precision == "bf16" else 4,
        )
        tokens = partial(
            grid.features,
            tiles,
            device=self._device,
            dtype=self.net.cls_token.dtype,
        )
        cells = torch.from_numpy(grid.cells).to(self._device)
        return self.net.pooled_(tokens, num_tokens, cells, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrid:
    """The tiles that make up each of M tokens: one token per occupied cell, row-major."""

    # (M, 2), cell of each token; cells count from the smallest coordinates of the tiles
    cells: npt.NDArray[np.int64]
    # indices of the tiles, sorted by token, without tiles of all-zero cells
    order: npt.NDArray[np.int64]
    # (M + 1); token m is the sum of the tiles order[starts[m]:starts[m + 1]]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.cells)

    def features(
        self,
        tiles: Tensor,
        rows: slice,
        *,
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """Summed tile embeddings (m, D) of a slice of tokens. Memory: the slice's tiles, twice."""
        starts = self.starts[rows.start : rows.stop + 1]
        num_tokens = len(starts) - 1
        picked = torch.from_numpy(self.order[starts[0] : starts[-1]]).to(tiles.device)
        values = tiles.index_select(0, picked).to(device, dtype)
        if len(picked) == num_tokens:
            # each cell has one tile, so nothing is added up
            return values
        token_of_tile = np.repeat(np.arange(num_tokens), np.diff(starts))
        sums = values.new_zeros(num_tokens, values.shape[1])
        return sums.index_add_(0, torch.from_numpy(token_of_tile).to(device), values)


def token_grid(tiles: Tensor, coords_l0: CoordsL0, *, stride_l0: Size) -> TokenGrid:
    """Tokens of a slide, one per cell of the size of the tiles' stride.

    The tiles of a cell are added up; a cell whose sum is zero has no token.

    Memory: 5 N int64, and BLOCK_ROWS x D floats; never rows x columns of the slide.
    Raises InvalidInputError: all cells sum to zero.
    """
    cells = (coords_l0 - coords_l0.min(0)) // np.array(stride_l0)
    num_columns = int(cells[:, 1].max()) + 1
    cell_number = cells[:, 0] * num_columns + cells[:, 1]
    order = np.argsort(cell_number, kind="stable")
    first_of_cell = np.flatnonzero(np.diff(cell_number[order], prepend=-1))
    grid = TokenGrid(
        cells=cells[order[first_of_cell]],
        order=order,
        starts=np.append(first_of_cell, len(order)),
    )
    parts = []
    for rows in blocks_of(len(grid), BLOCK_ROWS):
        sums = grid.features(tiles, rows, device="cpu", dtype=torch.float32)
        parts.append((sums != 0).any(1).numpy())
    is_kept = np.concatenate(parts)
    if not is_kept.any():
        raise InvalidInputError(
            "tile_embeddings must contain a row that is not all zero, got none"
        )
    if is_kept.all():
        return grid
    counts = np.diff(grid.starts)
    return TokenGrid(
        cells=grid.cells[is_kept],
        order=grid.order[np.repeat(is_kept, counts)],
        starts=np.append(0, np.cumsum(counts[is_kept])),
    )


def check_no_overlap(coords_l0: CoordsL0, size_l0: Size) -> None:
    """Raises InvalidInputError: most steps within rows or columns are shorter than a tile.

    Then neighbouring tiles would share a cell of the size of a tile, and be added up. A few shared
    cells are accepted, as in TITAN's code: CLAM has a grid of its own for each piece of tissue.
    """
    for axis in (0, 1):
        step = _median_step(coords_l0, axis)
        if step is not None and step < size_l0[axis]:
            raise InvalidInputError(
                "coords_l0 must be those of tiles without overlap for slide encoder 'titan', "
                f"got steps of {step} px between tiles of {size_l0[axis]} px; pass stride_l0, "
                "or tiles that state it"
            )


def _median_step(coords_l0: CoordsL0, axis: int) -> int | None:
    """Median distance to the next tile along an axis; None if no two tiles are in line."""
    corners = np.unique(coords_l0, axis=0)
    order = np.lexsort((corners[:, axis], corners[:, 1 - axis]))
    steps = np.diff(corners[order], axis=0)
    in_line = steps[:, 1 - axis] == 0
    if not in_line.any():
        return None
    return int(np.median(steps[in_line, axis]))
