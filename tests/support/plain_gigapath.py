"""LongNet as Prov-GigaPath uses it, the plain way: zero padding in memory, dense softmax, float64.

Written from the published description alone and independent of `thinsection.pool`; the
yardstick of tests. O(g²) memory for segments of g tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

Weights = Mapping[str, torch.Tensor]
Branches = Sequence[tuple[int, int]]  # (segment length, dilation)


def plain_gigapath(
    weights: Weights,
    tiles: torch.Tensor,
    coords_l0: torch.Tensor,
    *,
    tile_px_l0: int,
    branches: Branches,
    num_heads: int,
    tokens: str = "mean",
) -> torch.Tensor:
    """Normed means over tiles ('mean') or cls tokens ('cls'), (layers + 2, C), in float64.

    The rows are the embedding layer, each layer, and the last one after `encoder.layer_norm`.
    """
    w = {name: value.double() for name, value in weights.items()}
    dim = w["cls_token"].shape[-1]
    x = F.linear(
        tiles.double(), w["patch_embed.proj.weight"], w["patch_embed.proj.bias"]
    )
    columns = coords_l0[:, 0] // tile_px_l0
    rows = coords_l0[:, 1] // tile_px_l0
    index = columns * 1000 + rows + 1
    places = [plain_position(int(i) - 1, dim) for i in index]
    x = torch.cat([w["cls_token"][0], x + torch.stack(places)])
    states = [x]
    for i in range(
        1 + max(int(n.split(".")[2]) for n in w if n.startswith("encoder.layers."))
    ):
        layer = {
            n.split(".", 3)[3]: v
            for n, v in w.items()
            if n.startswith(f"encoder.layers.{i}.")
        }
        states.append(_layer(states[-1], layer, branches, num_heads))
    last = (w["encoder.layer_norm.weight"], w["encoder.layer_norm.bias"])
    states.append(F.layer_norm(states[-1], (dim,), *last, eps=1e-5))
    if tokens == "cls":
        pooled = torch.stack([s[0] for s in states])
    else:
        pooled = torch.stack([s[1:].mean(0) for s in states])
    return F.layer_norm(pooled, (dim,), w["norm.weight"], w["norm.bias"], eps=1e-6)


def plain_position(flat: int, dim: int) -> torch.Tensor:
    """Row of the 1000 x 1000 sin-cos table, channel by channel, rounded to float32."""
    row, column = divmod(flat, 1000)
    quarter = dim // 4
    values = []
    for place in (column, row):
        angles = [place / 10000 ** (i / quarter) for i in range(quarter)]
        values += [torch.tensor(angles, dtype=torch.float64).sin()]
        values += [torch.tensor(angles, dtype=torch.float64).cos()]
    return torch.cat(values).float().double()


def plain_dilated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, branches: Branches
) -> torch.Tensor:
    """Dilated attention (L, H, D), every step of the published layout in memory."""
    tokens, heads, dim = q.shape
    outs, lses = [], []
    for length, dilation in branches:
        g = min(length, tokens)
        out = q.new_zeros(tokens, heads, dim)
        lse = q.new_full((tokens, heads), -1e8)
        pad = (-tokens) % g
        padded = [F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v)]
        for s in range((tokens + pad) // g):
            inner = (-g) % dilation
            segment = [x[s * g : (s + 1) * g] for x in padded]
            sq, sk, sv = (F.pad(x, (0, 0, 0, 0, 0, inner)) for x in segment)
            for h in range(heads):
                offset = h // (heads // dilation)
                seen = torch.arange(offset, g + inner, dilation)
                logits = sq[seen, h] @ sk[seen, h].T * dim**-0.5
                sums = logits.logsumexp(-1)
                values = logits.softmax(-1) @ sv[seen, h]
                for n, place in enumerate(seen.tolist()):
                    if place < g and s * g + place < tokens:
                        out[s * g + place, h] = values[n]
                        if sums[n] != 0:
                            lse[s * g + place, h] = sums[n]
        outs.append(out)
        lses.append(lse)
    mix = torch.stack(lses).softmax(0)
    return (mix[..., None] * torch.stack(outs)).sum(0)


def _layer(
    x: torch.Tensor, w: Weights, branches: Branches, num_heads: int
) -> torch.Tensor:
    tokens, dim = x.shape

    def linear(h: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(h, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(h: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(
            h, h.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5
        )

    h = norm(x, "self_attn_layer_norm")
    q, k, v = (
        linear(h, f"self_attn.{n}_proj").view(tokens, num_heads, -1) for n in "qkv"
    )
    attended = plain_dilated(q, k, v, branches=branches).reshape(tokens, dim)
    x = x + linear(norm(attended, "self_attn.inner_attn_ln"), "self_attn.out_proj")
    h = F.gelu(linear(norm(x, "final_layer_norm"), "ffn.fc1"))
    return x + linear(norm(h, "ffn.ffn_layernorm"), "ffn.fc2")


def plain_dilated_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    branches: Branches,
    head: int,
    num_heads: int,
    token: int,
) -> torch.Tensor:
    """One output (D,) in float64 of one head's q, k, v (L, D): O(L) memory, any length.

    Each branch that covers the token gives a softmax over its keys and its zero padding; branches
    are weighed by their sums.
    """
    outs, lses = [], []
    for length, dilation in branches:
        size = min(length, len(q))
        start, offset = token // size * size, head * dilation // num_heads
        if (token - start - offset) % dilation or token < start + offset:
            continue
        seen = slice(start + offset, min(start + size, len(q)), dilation)
        logits = k[seen].double() @ q[token].double() / q.shape[1] ** 0.5
        padding = -(-size // dilation) - len(logits)
        padded = torch.cat([logits, logits.new_zeros(padding)])
        lses.append(padded.logsumexp(0))
        outs.append((logits - lses[-1]).exp() @ v[seen].double())
    return torch.stack(lses).softmax(0) @ torch.stack(outs)
