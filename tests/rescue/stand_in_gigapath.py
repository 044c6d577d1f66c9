"""A small stand-in for prov-gigapath's encoder: names, call and attention of its modules, plainly.

As in the authors' code, attention goes through `attention_ops`, which asserts a FlashAttention that
is looked up in the module's own names.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

DIM, HEADS = 32, 16
flash_attn_func = None


class MultiheadAttention(nn.Module):
    """Projections, and attention by FlashAttention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.args = SimpleNamespace(
            segment_length=[32, 91, 512], dilated_ratio=[1, 2, 4]
        )
        self.num_heads, self.embed_dim, self.xpos = HEADS, DIM, None
        self.q_proj, self.k_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.v_proj, self.out_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.inner_attn_ln = nn.LayerNorm(DIM)

    def attention_ops(self, q, k, v):  # type: ignore[no-untyped-def]
        assert flash_attn_func is not None
        return flash_attn_func(q, k, v, 0.0, None, None, False)


class DilatedAttention(MultiheadAttention):
    """Every branch in memory, zero padding included, mixed by log-sum-exps."""

    def forward(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        self, query, key, value, incremental_state=None, key_padding_mask=None,
        attn_mask=None, rel_pos=None, is_first_step=False, is_causal=False,
    ):  # fmt: skip
        length = query.shape[1]
        q, k, v = (
            project(x)[0].unflatten(-1, (HEADS, -1))
            for project, x in (
                (self.q_proj, query),
                (self.k_proj, key),
                (self.v_proj, value),
            )
        )
        outs, sums = [], []
        for size, ratio in zip(
            self.args.segment_length, self.args.dilated_ratio, strict=True
        ):
            out, lse = self._branch((q, k, v), min(size, length), ratio)
            outs.append(out[:length])
            sums.append(lse[:length])
        weights = torch.stack(sums).softmax(0)[..., None]
        mixed = (weights.to(q.dtype) * torch.stack(outs)).sum(0)
        return self.out_proj(self.inner_attn_ln(mixed.flatten(1)[None])), None

    def _branch(self, qkv, size, ratio):  # type: ignore[no-untyped-def]
        length = len(qkv[0])
        segments = -(-length // size)
        seen = -(-size // ratio) * ratio
        # (segments, seen, H, D), zeros behind the tokens of each segment
        padded = [F.pad(x, (0, 0, 0, 0, 0, segments * size - length)) for x in qkv]
        parts = [
            F.pad(x.unflatten(0, (segments, size)), (0, 0, 0, 0, 0, seen - size))
            for x in padded
        ]
        out = torch.zeros_like(parts[0])
        lse = parts[0].new_full(parts[0].shape[:3], -1e8)
        for head in range(HEADS):
            offset = head * ratio // HEADS
            q, k, v = (x[:, offset::ratio, head : head + 1] for x in parts)
            values, sums = self.attention_ops(q, k, v)
            out[:, offset::ratio, head] = values[:, :, 0]
            lse[:, offset::ratio, head] = sums[:, 0].masked_fill(sums[:, 0] == 0, -1e8)
        return out[:, :size].flatten(0, 1), lse[:, :size].flatten(0, 1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.self_attn = nn.LayerNorm(DIM), DilatedAttention()

    def forward(self, x):  # type: ignore[no-untyped-def]
        normed = self.norm(x)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        attended, _ = self.self_attn(
            query=normed, key=normed, value=normed, key_padding_mask=padding,
            attn_mask=None, rel_pos=None, incremental_state=None,
        )  # fmt: skip
        return x + attended


def encoder() -> nn.Sequential:
    """Two layers with seeded weights."""
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer()).eval()
