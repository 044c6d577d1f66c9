"""Gradients of attention in blocks: the backward pass recomputes each block, nothing is T x T.

It is the backward pass of the Triton kernel too.

Shapes: H heads, T tokens, D channels; m queries and n keys of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinsection.attention.blocks import BlockPlan, blocks_of
from thinsection.attention.chunked import Buffers
from thinsection.attention.products import fast_products
from thinsection.attention.reach import LOG2E
from thinsection.attention.reference import AttentionItem
from thinsection.errors import InvalidInputError

# the output [H, T, D], in the last argument where that is a tensor, and log2-sum-exp2 [H, T]
Forward = Callable[[AttentionItem, BlockPlan, Tensor | None], tuple[Tensor, Tensor]]
# the output [H, T, D] of one item, in the last argument where that is a tensor
Attend = Callable[[AttentionItem, Tensor | None], Tensor]


def differentiable(forward: Forward, plan: BlockPlan) -> Attend:
    """Attention [H, T, D] by `forward`, with gradients to q, k and v; not with `out` as well."""

    def attend(item: AttentionItem, out: Tensor | None) -> Tensor:
        needs_gradient = any(x.requires_grad for x in (item.q, item.k, item.v))
        if not (needs_gradient and torch.is_grad_enabled()):
            with fast_products():
                return forward(item, plan, out)[0]
        if out is not None:
            raise InvalidInputError(
                "out must be None when a gradient is needed, got a tensor"
            )
        call = _Call(item, plan, forward)
        result: Tensor = _Attention.apply(item.q, item.k, item.v, call)  # type: ignore[no-untyped-call]
        return result

    return attend


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of the forward pass beside the tensors that have a gradient."""

    item: AttentionItem
    plan: BlockPlan
    forward: Forward


class _Attention(torch.autograd.Function):
    """Attention that keeps q, k, v, the output and one number per row for its gradient."""

    @staticmethod
    @fast_products()
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        out, log_sums = call.forward(call.item, call.plan, None)
        ctx.save_for_backward(q, k, v, out, log_sums)
        nothing = q.new_empty(0)
        ctx.item_without_qkv = replace(call.item, q=nothing, k=nothing, v=nothing)
        ctx.plan = call.plan
        return out

    @staticmethod
    @fast_products()
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        # gradients are recorded here under create_graph alone
        if torch.is_grad_enabled():
            raise InvalidInputError(
                "attention in blocks must be differentiated only once, got create_graph=True; "
                "use impl='reference' for second derivatives"
            )
        q, k, v, out, log_sums = ctx.saved_tensors
        item = replace(ctx.item_without_qkv, q=q, k=k, v=v)
        d_q, d_k, d_v = gradients(item, out, log_sums, d_out, ctx.plan)
        return d_q, d_k, d_v, None


def gradients(
    item: AttentionItem, out: Tensor, log_sums: Tensor, d_out: Tensor, plan: BlockPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, [H, T, D] each, in the input's dtype.

    No block is left out: what a far key adds to another's gradient is all of its own gradient.

    Args:
        item: input of the forward pass.
        out: its output [H, T, D].
        log_sums: its log2-sum-exp2 [H, T].
        d_out: gradient of the output.
        plan: sizes of blocks.

    Memory: `plan.working_bytes` and three accumulators [H, T, D] in the dtype of the arithmetic.

    Source: Dao et al., "FlashAttention", 2022, algorithm 4 (the bias takes no gradient).
    """
    dtype = item.math_dtype
    prefix = item.num_prefix_tokens
    d_q, d_k, d_v = (torch.zeros_like(item.q, dtype=dtype) for _ in range(3))
    buffers = Buffers(plan, item)
    key_blocks = blocks_of(item.q.shape[1], plan.keys, prefix)
    for rows in blocks_of(item.q.shape[1], plan.queries, prefix):
        q = item.q[:, rows].to(dtype) * item.scale
        d_rows = d_out[:, rows].to(dtype)
        mean = (d_rows * out[:, rows].to(dtype)).sum(-1, keepdim=True)  # [H, m, 1]
        for columns in key_blocks:
            block = buffers.score_block(item, rows, columns)
            for head, slope in enumerate(item.slopes):
                k = item.k[head, columns].to(dtype)
                v = item.v[head, columns].to(dtype)
                weights = torch.mm(q[head], k.T, out=block.scores)
                if not block.is_flat:
                    weights.add_(block.distances, alpha=-slope)
                weights.mul_(LOG2E).sub_(log_sums[head, rows, None]).exp2_()
                d_v[head, columns].addmm_(weights.T, d_rows[head])
                d_scores = (d_rows[head] @ v.T).sub_(mean[head]).mul_(weights)
                d_q[head, rows].addmm_(d_scores, k, alpha=item.scale)
                d_k[head, columns].addmm_(d_scores.T, q[head])
    return d_q.to(item.q.dtype), d_k.to(item.q.dtype), d_v.to(item.q.dtype)
