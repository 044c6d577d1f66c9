"""Gradients of 2-D ALiBi attention by recomputing each block: nothing T x T is kept.

Shapes: H heads, T tokens, D channels; m queries and n keys of a block.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from thinsection.attention.chunked import BlockPlan, Buffers
from thinsection.attention.items import AttentionItem
from thinsection.attention.reach import LOG2E, blocks_of
from thinsection.errors import InvalidInputError

# output [H, T, D], in `out` where it is given, and log2-sum-exp2 [H, T]
Forward = Callable[
    [AttentionItem, BlockPlan, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]
]
Attend = Callable[[AttentionItem, torch.Tensor | None], torch.Tensor]  # attention of one item, out
How = tuple[AttentionItem, BlockPlan, Forward]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def differentiable(forward: Forward, plan: BlockPlan) -> Attend:
    """Attention [H, T, D] by `forward`, with gradients to q, k and v where they are wanted.

    The function raises InvalidInputError where `out` is given and a gradient is wanted.
    """

    def attend(item: AttentionItem, out: torch.Tensor | None) -> torch.Tensor:
        wanted = any(x.requires_grad for x in (item.q, item.k, item.v))
        if not (wanted and torch.is_grad_enabled()):
            return forward(item, plan, out)[0]
        if out is not None:
            raise InvalidInputError("out must be None where a gradient is wanted, got a tensor")
        result: torch.Tensor = _Attend.apply(item.q, item.k, item.v, (item, plan, forward))  # type: ignore[no-untyped-call]
        return result

    return attend


def gradients(
    item: AttentionItem, out: torch.Tensor, lse: torch.Tensor, d_out: torch.Tensor, plan: BlockPlan
) -> Gradients:
    """Gradients of q, k and v, [H, T, D] each, in the input's dtype.

    Of the forward come `out` [H, T, D] and `lse`, the log2-sum-exp2 [H, T] of its base-2 scores.
    No block is left out here: what a far key adds to another's gradient is all of its own gradient.

    Memory: `plan.working_bytes` and three accumulators [H, T, D] in the dtype of the arithmetic.

    Source: Dao et al., "FlashAttention", 2022, algorithm 4 (the bias takes no gradient).
    """
    tokens, dtype = item.q.shape[1], item.math_dtype
    d_q, d_k, d_v = (torch.zeros_like(item.q, dtype=dtype) for _ in range(3))
    buffers = Buffers(plan, item)
    prefix = item.num_prefix_tokens
    for rows in blocks_of(prefix, tokens, plan.queries):
        q = item.q[:, rows].to(dtype) * item.scale
        d_rows = d_out[:, rows].to(dtype)
        mean = (d_rows * out[:, rows].to(dtype)).sum(-1, keepdim=True)  # [H, m, 1]
        for columns in blocks_of(prefix, tokens, plan.keys):
            block = buffers.distances(item, rows, columns)
            for h, slope in enumerate(item.slopes):
                k, v = item.k[h, columns].to(dtype), item.v[h, columns].to(dtype)
                weights = torch.mul(block.distances, -slope, out=block.scores)
                weights.addmm_(q[h], k.T).mul_(LOG2E).sub_(lse[h, rows, None]).exp2_()
                d_v[h, columns].addmm_(weights.T, d_rows[h])
                d_scores = (d_rows[h] @ v.T).sub_(mean[h]).mul_(weights)
                d_q[h, rows].addmm_(d_scores, k, alpha=item.scale)
                d_k[h, columns].addmm_(d_scores.T, q[h])
    return d_q.to(item.q.dtype), d_k.to(item.q.dtype), d_v.to(item.q.dtype)


class _Attend(torch.autograd.Function):
    """Keeps q, k, v, the output and one number per row; recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
    ) -> torch.Tensor:
        item, plan, forward = how
        out, lse = forward(item, plan, None)
        ctx.save_for_backward(q, k, v, out, lse)
        none = q.new_empty(0)
        ctx.how = (replace(item, q=none, k=none, v=none), plan)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        item, plan = ctx.how
        item = replace(item, q=q, k=k, v=v)
        return *gradients(item, out, lse, d_out, plan), None
