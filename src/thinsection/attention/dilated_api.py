"""LongNet's dilated attention for networks of one's own: a batch, checks, and gradients.

Shapes: B batch, H heads, L tokens, D channels of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinsection.attention.api import DEFAULT_BUDGET_BYTES
from thinsection.attention.checks import check_qkv
from thinsection.attention.dilated import (
    Branch,
    dilated_gradients,
    dilated_with_log_sums,
)
from thinsection.errors import InvalidInputError


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branches: Sequence[Branch],
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> Tensor:
    """Dilated attention [B, H, L, D] in O(L) memory, with gradients to q, k and v.

    Each branch cuts the tokens into segments, in which a head sees every `dilation`-th token. The
    last segment is filled with zeros, which count as keys, as in the authors' code. The branches
    are mixed by their softmax weights. A token that no branch covers in a head gets zeros;
    a branch with dilation 1 covers all. A class token is a token like the others.

    The gradient is that of the formula. The authors' code takes the weights of the branches as
    constants in training, so its gradients differ where there are several branches.

    Args:
        q, k, v: [B, H, L, D], float64, float32, bfloat16 or float16. All items of a batch have L
            tokens; there is no mask.
        branches: segment lengths and dilations, each of which divides H.
        budget_bytes: memory for blocks of scores.

    Memory: the output, and 2 H L floats; in training also 3 H L D floats, and budget_bytes.

    Raises:
        InvalidInputError: shapes, dtypes, or a dilation that does not divide H.
        BudgetError: too small a budget.

    Source: Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens", 2023.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 100, 16)
        >>> branches = [Branch(length=16, dilation=1), Branch(length=64, dilation=2)]
        >>> dilated_attention(q, k, v, branches).shape
        torch.Size([1, 4, 100, 16])
    """
    check_qkv(q, k, v)
    for branch in branches:
        if not isinstance(branch, Branch):
            raise InvalidInputError(
                f"branches must be of thinsection.attention.Branch, got {branch!r}; pass "
                "Branch(length=16, dilation=1)"
            )
    call = _Call(tuple(branches), budget_bytes)
    outputs = []
    for item_q, item_k, item_v in zip(q, k, v, strict=True):
        output: Tensor = _Dilated.apply(item_q, item_k, item_v, call)  # type: ignore[no-untyped-call]
        outputs.append(output)
    return torch.stack(outputs)


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments beside the tensors that have a gradient."""

    branches: tuple[Branch, ...]
    budget_bytes: int


class _Dilated(torch.autograd.Function):
    """Dilated attention that keeps q, k, v, the output and one number per row for its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        out, log_sums = dilated_with_log_sums(
            (q, k, v), call.branches, budget_bytes=call.budget_bytes
        )
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.call = call
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        # gradients are recorded here under create_graph alone
        if torch.is_grad_enabled():
            raise InvalidInputError(
                "dilated attention must be differentiated only once, got create_graph=True"
            )
        q, k, v, out, log_sums = ctx.saved_tensors
        parts = dilated_gradients(
            (q, k, v),
            ctx.call.branches,
            out=out,
            log_sums=log_sums,
            d_out=d_out,
            budget_bytes=ctx.call.budget_bytes,
        )
        d_q, d_k, d_v = (part.to(q.dtype) for part in parts)
        return d_q, d_k, d_v, None
