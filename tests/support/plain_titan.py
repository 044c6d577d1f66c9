"""TITAN's slide encoder the plain way: dense grid, bias in full, one tensor after the other.

Written from the published description alone and independent of `thinsection.pool`, in any
floating dtype; the yardstick of tests and the published way of benchmarks. O(N²) memory.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

Weights = Mapping[str, torch.Tensor]
Attend = Callable[..., torch.Tensor]  # q, k, v [1, H, T, D] to the output, alike
BiasWay = Literal["float32", "float16", "cdist"]


def plain_titan(
    weights: Weights,
    tile_embeddings: torch.Tensor,
    coords_l0: torch.Tensor,
    tile_px_l0: int,
    *,
    dtype: torch.dtype = torch.float64,
    bias_way: BiasWay | None = None,
    attend_of: Callable[[torch.Tensor], Attend] | None = None,
) -> torch.Tensor:
    """Pooled slide embedding (768,).

    Args:
        bias_way: None builds the bias in `dtype`; 'float32' as published (differences in NumPy,
            the rest in float32); 'float16' rounds that; 'cdist' takes distances by matrix product.
        attend_of: gives another project's attention for the cells; None takes SDPA with the bias.
    """
    w = {k.removeprefix("vision_encoder."): v.to(dtype) for k, v in weights.items()}
    grid, cells = plain_grid(tile_embeddings.to(dtype), coords_l0, tile_px_l0)
    embedded = F.gelu(
        F.linear(grid.flatten(0, 1), w["patch_embed.0.weight"], w["patch_embed.0.bias"])
    )
    kept = cells[:, 0] * grid.shape[1] + cells[:, 1]
    x = torch.cat([w["cls_token"][0], embedded[kept]])[None]
    if attend_of is None:
        bias = plain_bias(cells, 12, dtype=dtype, way=bias_way)
        attend: Attend = partial(F.scaled_dot_product_attention, attn_mask=bias)
    else:
        attend = attend_of(cells)
    for i in range(6):
        x = _block(
            x,
            attend,
            {k.split(".", 3)[3]: v for k, v in w.items() if f"_list.{i}." in k},
        )
    x = F.layer_norm(x, (768,), w["norm.weight"], w["norm.bias"], eps=1e-6)
    pool = {
        k.split(".", 1)[1]: v
        for k, v in w.items()
        if k.startswith("attn_pool_contrastive.")
    }
    return _pool(x, pool)[0, 0]


def plain_grid(
    tiles: torch.Tensor, coords_l0: torch.Tensor, tile_px_l0: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense grid (rows, columns, C) of summed embeddings, and its non-zero cells, row-major."""
    cells = torch.div(
        coords_l0 - coords_l0.min(0).values, tile_px_l0, rounding_mode="floor"
    )
    rows, columns = (cells.max(0).values + 1).tolist()
    grid = tiles.new_zeros(rows, columns, tiles.shape[1])
    for cell, tile in zip(cells.tolist(), tiles, strict=True):
        grid[cell[0], cell[1]] += tile
    return grid, (grid != 0).any(-1).nonzero()


def plain_bias(
    cells: torch.Tensor, heads: int, *, dtype: torch.dtype, way: BiasWay | None
) -> torch.Tensor:
    """The bias [1, heads, T, T], cls first."""
    if way == "cdist":
        points = cells.float()
        distance = torch.cdist(points, points, compute_mode="use_mm_for_euclid_dist")
    else:
        pairs = cells.numpy()
        difference = pairs[:, None, :] - pairs[None, :, :]
        distance = torch.from_numpy(np.sqrt((difference**2).sum(-1)))
    kind = dtype if way is None else torch.float32
    slopes = torch.tensor(plain_slopes(heads), dtype=kind)[:, None, None]
    product = distance.to(kind)[None] * slopes * -1
    bias = torch.zeros(1, heads, len(cells) + 1, len(cells) + 1, dtype=kind)
    bias[:, :, 1:, 1:] = product
    del product
    rounded = bias.half() if way == "float16" else bias
    return rounded.repeat(1, 1, 1, 1).to(dtype)


def plain_slopes(heads: int) -> list[float]:
    """One slope per head, by recursion."""
    if math.log2(heads).is_integer():
        first = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [first * first**i for i in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return plain_slopes(lower) + plain_slopes(2 * lower)[0::2][: heads - lower]


def _block(x: torch.Tensor, attend: Attend, w: Weights) -> torch.Tensor:
    tokens = x.shape[1]
    h = F.layer_norm(x, (768,), w["norm1.weight"], w["norm1.bias"], eps=1e-6)
    qkv = F.linear(h, w["attn.qkv.weight"], w["attn.qkv.bias"])
    q, k, v = qkv.reshape(1, tokens, 3, 12, 64).permute(2, 0, 3, 1, 4)
    out = attend(q, k, v)
    out = out.transpose(1, 2).reshape(1, tokens, 768)
    x = x + F.linear(out, w["attn.proj.weight"], w["attn.proj.bias"])
    h = F.layer_norm(x, (768,), w["norm2.weight"], w["norm2.bias"], eps=1e-6)
    h = F.gelu(F.linear(h, w["mlp.fc1.weight"], w["mlp.fc1.bias"]))
    return x + F.linear(h, w["mlp.fc2.weight"], w["mlp.fc2.bias"])


def _pool(x: torch.Tensor, w: Weights) -> torch.Tensor:
    query = F.layer_norm(w["query"], (768,), w["ln_q.weight"], w["ln_q.bias"])
    keys = F.layer_norm(x, (768,), w["ln_k.weight"], w["ln_k.bias"])[0]
    out, _ = F.multi_head_attention_forward(
        query[:, None], keys[:, None], keys[:, None], 768, 8,
        w["attn.in_proj_weight"], w["attn.in_proj_bias"], None, None, False, 0.0,
        w["attn.out_proj.weight"], w["attn.out_proj.bias"], training=False, need_weights=False,
    )  # fmt: skip
    return out.transpose(0, 1)
