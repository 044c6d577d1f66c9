"""TITAN as a slide encoder: published weights in, slide embeddings out, in bounded memory.

States are written over in place, in blocks of tokens and groups of heads: a few times their size.

Shapes: T tokens (cls first), H heads of D = 64 channels, C = H D channels of a state.

Source: Ding et al., "A multimodal whole-slide foundation model for pathology", 2025; the
architecture is written from its description, without the hub's remote code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from thinsection.attention import alibi2d_attention, alibi_slopes
from thinsection.attention.products import fast_products
from thinsection.attention.reach import blocks_of
from thinsection.encode.networks import mlp
from thinsection.errors import InvalidInputError, require
from thinsection.pool import pooling
from thinsection.pool.encoder import (
    Expects,
    SlideEmbedding,
    TileEmbeddings,
    TileLayout,
)
from thinsection.pool.pooling import (
    ATTENTION_BYTES,
    TOKEN_BLOCK,
    HeadPlan,
    checked_slide,
)
from thinsection.types import CoordsL0, Size

DIM, NUM_BLOCKS, NUM_HEADS, POOL_HEADS, POOL_QUERIES = 768, 6, 12, 8, 128
BLOCK_ROWS = 1024  # tokens a block of the pass that looks for all-zero cells

Tokens = Callable[[slice], Tensor]  # slice of tile tokens -> summed embeddings [m, C]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrid:
    """Which tiles make up each of M tokens: one per occupied cell, row-major, no dense grid."""

    cells: npt.NDArray[
        np.int64
    ]  # (M, 2), of each token; smallest row and column seen 0
    order: npt.NDArray[
        np.int64
    ]  # (N'), tiles sorted by token, without those of all-zero cells
    starts: npt.NDArray[
        np.int64
    ]  # (M + 1), token m sums up tiles order[starts[m]:starts[m + 1]]

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
        picked = torch.from_numpy(self.order[starts[0] : starts[-1]]).to(tiles.device)
        values = tiles.index_select(0, picked).to(device, dtype)
        if len(picked) == len(starts) - 1:  # one tile a cell: nothing to add up
            return values
        token = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        total = values.new_zeros(len(starts) - 1, values.shape[1])
        return total.index_add_(0, torch.from_numpy(token).to(device), values)


def check_no_overlap(coords_l0: CoordsL0, size_l0: Size) -> None:
    """Looks whether the tiles were laid with overlap, by the steps within rows and columns.

    Cells of the size of a tile would then add neighbouring tiles up to one token. Tiles of several
    grids, as CLAM lays one per piece of tissue, may share a cell now and then, as in TITAN's code.

    Raises InvalidInputError: most steps are shorter than a tile.
    """
    for axis in (0, 1):
        step = _median_step(coords_l0, axis)
        if step is not None and step < size_l0[axis]:
            raise InvalidInputError(
                f"coords_l0 must be of tiles without overlap for slide encoder 'titan', "
                f"got steps of {step} px between tiles of {size_l0[axis]} px; "
                "pass stride_l0, or tiles that say it"
            )


def _median_step(coords_l0: CoordsL0, axis: int) -> int | None:
    """Median distance to the next tile along an axis; None where no two tiles are in line."""
    places = np.unique(coords_l0, axis=0)
    order = np.lexsort((places[:, axis], places[:, 1 - axis]))
    steps = np.diff(places[order], axis=0)
    in_line = steps[:, 1 - axis] == 0
    if not in_line.any():
        return None
    return int(np.median(steps[in_line, axis]))


def token_grid(tiles: Tensor, coords_l0: CoordsL0, *, stride_l0: Size) -> TokenGrid:
    """The tokens of a slide, one per cell of the size of the tiles' stride.

    Tiles that share a cell add up, cells that sum to zero drop out.
    Memory: 5 N int64, and BLOCK_ROWS x D floats; never rows x columns of the slide.
    """
    cells = (coords_l0 - coords_l0.min(0)) // np.array(stride_l0)
    key = cells[:, 0] * (int(cells[:, 1].max()) + 1) + cells[:, 1]
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    grid = TokenGrid(
        cells=cells[order[first]], order=order, starts=np.append(first, len(order))
    )
    blocks = blocks_of(len(grid), BLOCK_ROWS)
    sums = (
        grid.features(tiles, rows, device="cpu", dtype=torch.float32) for rows in blocks
    )
    kept = np.concatenate([(block != 0).any(1).numpy() for block in sums])
    require(kept.any(), "tile_embeddings must hold a row that is not all zero", "none")
    if kept.all():
        return grid
    counts = np.diff(grid.starts)
    order, starts = (
        grid.order[np.repeat(kept, counts)],
        np.append(0, np.cumsum(counts[kept])),
    )
    return TokenGrid(cells=grid.cells[kept], order=order, starts=starts)


def plan_tokens(
    num_tokens: int, *, budget_bytes: int, element_bytes: int = 4
) -> HeadPlan:
    """As many heads at a time as the budget allows; a BudgetError where not even one fits.

    States take 4 C bytes a token, q, k and v of all heads 3 C elements; with all heads at once the
    attention writes over q, else its output takes another C elements.
    """
    hidden = TOKEN_BLOCK * DIM * (4 + 1 + 1) * (4 + element_bytes)
    fixed = ATTENTION_BYTES + hidden + 8 * num_tokens * (POOL_HEADS + NUM_HEADS + 2)

    def peak(heads: int) -> int:
        share = 3 * heads / NUM_HEADS + (0 if heads == NUM_HEADS else 1)
        return int(num_tokens * DIM * (4 + element_bytes * share)) + fixed

    return pooling.plan_heads("titan", num_tokens, NUM_HEADS, peak, budget_bytes)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)


class TitanBlock(nn.Module):
    """x += attention(norm1(x)); x += mlp(norm2(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(DIM, eps=1e-6),
            nn.LayerNorm(DIM, eps=1e-6),
        )
        self.attn, self.mlp = _Attention(), mlp(DIM, 4 * DIM)

    def forward_(self, x: Tensor, cells: Tensor, slopes: Tensor, at: int) -> None:
        """Writes the states [T, C] after this block over `x`, `at` heads at a time; inference."""
        attended, dtype = self._attend(x, cells, slopes, at), self.attn.qkv.weight.dtype
        for rows in blocks_of(x.shape[0], TOKEN_BLOCK):
            x[rows] += self.attn.proj(attended[rows].flatten(1))
            x[rows] += self.mlp(self.norm2(x[rows]).to(dtype))

    def _attend(self, x: Tensor, cells: Tensor, slopes: Tensor, step: int) -> Tensor:
        """Attention output [T, H, D] before the projection."""
        tokens, dtype, width = x.shape[0], self.attn.qkv.weight.dtype, DIM // NUM_HEADS
        qkv = x.new_empty(tokens, 3, step, width, dtype=dtype)
        all_at_once = step == NUM_HEADS
        out = (
            qkv[:, 0]
            if all_at_once
            else x.new_empty(tokens, NUM_HEADS, width, dtype=dtype)
        )
        for first in range(0, NUM_HEADS, step):
            heads = slice(first, first + step)
            weight = self.attn.qkv.weight.view(3, NUM_HEADS, -1, DIM)[:, heads].reshape(
                -1, DIM
            )
            bias = self.attn.qkv.bias.view(3, NUM_HEADS, -1)[:, heads].reshape(-1)
            for rows in blocks_of(tokens, TOKEN_BLOCK):
                normed = self.norm1(x[rows]).to(dtype)
                torch.addmm(bias, normed, weight.T, out=qkv[rows].flatten(1))
            q, k, v = qkv.permute(1, 2, 0, 3)[:, None]
            alibi2d_attention(
                q, k, v, cells, slopes[heads], budget_bytes=ATTENTION_BYTES, out=q
            )
            if not all_at_once:
                out[:, heads] = qkv[:, 0]
        return out


class _Pooler(nn.Module):
    """Attention of learned queries over all tokens; only one query is ever computed here."""

    def __init__(self, num_queries: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(num_queries, DIM))
        self.ln_q, self.ln_k = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, POOL_HEADS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Pooled [C] of the first query, from normed tokens [T, C].

        Keys and values need not be computed: q . (W_k x + b) differs from (W_kᵀ q) . x by a
        constant per head, the weighted sum of W_v x + b is W_v of the weighted sum: T C products.
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
    `attn_pool` (queries of tokens) and `proj` (into the text space) are loaded, but not used."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.patch_embed = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())
        self.blocks = nn.Module()
        self.blocks.modules_list = nn.ModuleList(
            TitanBlock() for _ in range(NUM_BLOCKS)
        )
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        self.attn_pool, self.attn_pool_contrastive = _Pooler(POOL_QUERIES), _Pooler(1)
        self.proj = nn.Parameter(torch.zeros(DIM, DIM))

    def pooled_(
        self, tokens: Tokens, num_tokens: int, cells: Tensor, plan: HeadPlan
    ) -> Tensor:
        """Slide embedding [C]; `tokens` gives num_tokens - 1 cells. Memory: `plan.peak_bytes`."""
        dtype = next(self.patch_embed.parameters()).dtype
        x = self.cls_token.new_empty(num_tokens, DIM)
        x[0] = self.cls_token[0, 0]
        for rows in blocks_of(num_tokens - 1, TOKEN_BLOCK):
            x[1 + rows.start : 1 + rows.stop] = self.patch_embed(tokens(rows).to(dtype))
        for block in self.blocks.modules_list:  # type: ignore[union-attr]
            block.forward_(x, cells, alibi_slopes(NUM_HEADS), plan.heads_at_a_time)
        for rows in blocks_of(num_tokens, TOKEN_BLOCK):
            x[rows] = self.norm(x[rows])
        return cast(Tensor, self.attn_pool_contrastive(x))


class TitanSlideEncoder(pooling.PublishedSlideEncoder):
    """TITAN's pooled slide embedding (768,), before the projection into the text space."""

    name = "titan"
    dim = DIM
    expects = Expects(
        tile_encoders=("conch_v15",), tile_dim=DIM, tile_px=512, tile_mpp=0.5
    )
    repository = "MahmoodLab/TITAN"
    revision = "dac6773d9961cfc75503440676ff157a2c6e8d2e"
    files = ("model.safetensors", "pytorch_model.bin")
    prefix = "vision_encoder."  # beside it lies the text tower
    version = 2  # a cell is as large as the step between tiles, no longer as a tile
    large = r"blocks\..*\.(qkv|proj|fc1|fc2)|patch_embed\.0"

    net: TitanNet

    @classmethod
    def build(cls, config: Any = None) -> TitanNet:
        return TitanNet()  # which comes in one size

    def encode(
        self, tile_embeddings: TileEmbeddings, coords_l0: CoordsL0, *, tile_px_l0: int
    ) -> SlideEmbedding:
        """Slide embedding (768,) float32 from CONCH v1.5 embeddings (N, 768).
        Memory: about 12 KiB a tile in float32, less as the budget demands; else a BudgetError."""
        layout = TileLayout.square(tile_px_l0)
        return self.encode_tiles(tile_embeddings, coords_l0, layout)

    @torch.inference_mode()
    @fast_products()
    def encode_tiles(
        self,
        tile_embeddings: TileEmbeddings,
        coords_l0: CoordsL0,
        layout: TileLayout,
    ) -> SlideEmbedding:
        """Slide embedding (768,), see `encode`, with a token for each step between tiles.

        Raises InvalidInputError: the tiles overlap and the layout does not say the stride.
        """
        tiles, coords, _ = checked_slide(
            tile_embeddings, coords_l0, layout.size_l0[0], tile_dim=DIM
        )
        if layout.stride_l0 is None:
            check_no_overlap(coords, layout.size_l0)
        grid = token_grid(tiles, coords, stride_l0=layout.stride_l0 or layout.size_l0)
        count, size = len(grid) + 1, 2 if self.precision == "bf16" else 4
        plan = plan_tokens(count, budget_bytes=self._budget_bytes, element_bytes=size)
        where, cells = self._device, torch.from_numpy(grid.cells).to(self._device)
        tokens = partial(
            grid.features, tiles, device=where, dtype=self.net.cls_token.dtype
        )
        pooled = self.net.pooled_(tokens, count, cells, plan)
        return cast(SlideEmbedding, pooled.cpu().numpy())
