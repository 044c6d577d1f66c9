"""2-D ALiBi attention: checks the input, chooses an implementation, and says why.

Shapes: B batch, H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels of a head.
"""

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.attention.blocks import plan_blocks
from thinsection.attention.checks import (
    BatchItem,
    cells_tensor,
    check_cells_form,
    check_out,
    check_prefix,
    check_qkv,
    check_slopes_form,
    checked_items,
)
from thinsection.attention.chunked import forward_chunked
from thinsection.attention.gradient import Attend, differentiable
from thinsection.attention.reference import attend_dense, dense_bytes, reference
from thinsection.attention.traced import (
    attend_flex,
    attend_item_flex,
    call,
    is_compiling,
    is_exporting,
    is_transformed,
)
from thinsection.errors import BudgetError, ConfigError, DeviceError, InvalidInputError
from thinsection.types import MIB, format_bytes

Impl = Literal["auto", "reference", "chunked", "triton", "flex"]
DEFAULT_BUDGET_BYTES = 512 * MIB
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRITON_DIMS = (16, 32, 64, 128, 256)
# compiled for older cards, float16 spills some 1,500 registers on sm_75 and 3,500 on sm_70
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The implementation that runs, and why."""

    impl: Literal["reference", "chunked", "triton", "flex"]
    why: str  # one sentence for a person
    working_bytes: int  # memory beyond inputs and output, per batch item


def alibi2d_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Tensor | npt.NDArray[np.integer],
    slopes: Tensor,
    *,
    num_prefix_tokens: int = 1,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    impl: Impl = "auto",
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    out: Tensor | None = None,
) -> Tensor:
    """Attention [B, H, T, D] with bias -slope_h * Euclidean distance of grid cells, never built.

    Pairs with a prefix token have bias 0. Softmax and sums are in float32 (float64 for float64
    input). Differentiable once in q, k and v: the backward pass recomputes blocks. Only 'reference'
    has a gradient of the gradient (`create_graph`); the others refuse it.

    torch.compile and torch.export trace 'flex' and 'reference'; transforms of torch.func take
    'reference'. There the values of cells, slopes and scale are not checked.

    Args:
        q, k, v: [B, H, T, D], float64, float32, bfloat16 or float16; prefix tokens first.
        cells: int [N, 2] or [B, N, 2], grid cells of the tokens after the prefix; a tensor or an
            array of NumPy.
        slopes: [H], >= 0 (see `alibi_slopes`).
        num_prefix_tokens: tokens in front without a place on the grid (cls).
        scale: factor of q . k; None = D^-0.5.
        key_mask: bool [B, T], True = a real token. Others are ignored as keys, and give zeros.
        impl: 'auto' or one of the implementations; `explain` says what 'auto' takes.
        budget_bytes: working memory beyond inputs and output.
        out: where to write the result, like q, without gradients; q itself is allowed, memory
            that k, v or other places of q share is not.

    Memory: O(T): budget_bytes and T floats per head ('reference': O(T²), refused above that).

    Raises:
        InvalidInputError: an argument does not fit.
        ConfigError: unknown `impl`.
        BudgetError: too small a budget.
        DeviceError: 'triton' cannot run here.
    """
    cells = cells_tensor(cells)
    if is_transformed() or is_compiling():
        traced = traced_impl(q, impl)
        if traced is not None:
            if key_mask is not None or out is not None:
                raise InvalidInputError(
                    "key_mask and out must be None where attention is traced by torch.compile, "
                    "torch.export or torch.func, got a tensor"
                )
            return _traced_attention(
                (q, k, v),
                cells,
                slopes,
                impl=traced,
                num_prefix_tokens=num_prefix_tokens,
                scale=scale,
                budget_bytes=budget_bytes,
            )
    run = call
    if is_compiling():
        # imports PyTorch's compiler, which takes seconds; here it is in use already
        from thinsection.attention.untraced import call_untraced

        run = call_untraced
    return run(
        _attention_by_values,
        q,
        k,
        v,
        cells,
        slopes,
        num_prefix_tokens=num_prefix_tokens,
        scale=scale,
        key_mask=key_mask,
        impl=impl,
        budget_bytes=budget_bytes,
        out=out,
    )


def traced_impl(q: Tensor, impl: Impl) -> Literal["flex", "reference"] | None:
    """Implementation that PyTorch can trace here; None = leave the trace, and run as always.

    Raises ConfigError: the implementation that was asked for cannot be traced here.
    """
    if impl in ("flex", "reference"):
        return impl
    if is_transformed():
        if impl == "auto":
            return "reference"
        raise ConfigError(
            "impl must be 'auto' or 'reference' within a transform of torch.func, got "
            f"{impl!r}; the others choose their blocks by the values of the input, which a "
            "transform hides"
        )
    if is_exporting() or (impl == "auto" and q.device.type == "cuda"):
        if impl != "auto":
            raise ConfigError(
                f"impl must be 'auto', 'flex' or 'reference' in torch.export, got {impl!r}; "
                "the others choose their blocks by the values of the input, which an export "
                "does not know"
            )
        return "flex"
    return None


def _traced_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    cells: Tensor,
    slopes: Tensor,
    *,
    impl: Literal["flex", "reference"],
    num_prefix_tokens: int,
    scale: float | None,
    budget_bytes: int,
) -> Tensor:
    """Attention [B, H, T, D] without a look at any value; arguments of `alibi2d_attention`."""
    q, k, v = qkv
    check_qkv(q, k, v)
    batch, heads, tokens, dim = q.shape
    check_prefix(num_prefix_tokens, tokens)
    shape = (batch, tokens - num_prefix_tokens, 2)
    check_cells_form(cells, shape)
    check_slopes_form(slopes, heads)
    grid = cells.expand(shape).to(q.device).transpose(1, 2)
    factor = dim**-0.5 if scale is None else scale
    if impl == "flex":
        attend = attend_flex
    else:
        check_dense_budget(dense_bytes(q), tokens, budget_bytes)
        attend = attend_dense
    return attend(
        q,
        k,
        v,
        grid,
        slopes,
        num_prefix_tokens=num_prefix_tokens,
        scale=factor,
    )


def _attention_by_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Tensor,
    slopes: Tensor,
    *,
    num_prefix_tokens: int,
    scale: float | None,
    key_mask: Tensor | None,
    impl: Impl,
    budget_bytes: int,
    out: Tensor | None,
) -> Tensor:
    """`alibi2d_attention` with all checks, in blocks whose order depends on values."""
    items = checked_items(
        q,
        k,
        v,
        cells,
        slopes,
        num_prefix_tokens=num_prefix_tokens,
        scale=scale,
        key_mask=key_mask,
    )
    if out is not None:
        check_out(out, q, k, v)
    decision = explain(q, impl=impl, budget_bytes=budget_bytes)
    attend = _implementation(decision, q, budget_bytes)
    return attend_items(items, attend, q, out)


def explain(
    q: Tensor, *, impl: Impl = "auto", budget_bytes: int = DEFAULT_BUDGET_BYTES
) -> Decision:
    """The implementation that `alibi2d_attention` would run for q [B, H, T, D], and why.

    Reads metadata only. Raises as `alibi2d_attention`.
    """
    if impl not in get_args(Impl):
        raise ConfigError(
            f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}"
        )
    if q.ndim != 4:
        raise InvalidInputError(
            f"q must be of shape [B, H, T, D], got {tuple(q.shape)}"
        )
    if impl == "reference":
        return Decision(impl=impl, why="asked for", working_bytes=dense_bytes(q))
    obstacle = _triton_obstacle(q)
    log_sums_bytes = 4 * q.shape[1] * q.shape[2]
    if impl == "triton":
        if obstacle is not None:
            raise DeviceError(f"attention 'triton' {obstacle}; use 'chunked'")
        return Decision(impl=impl, why="asked for", working_bytes=log_sums_bytes)
    if impl == "flex":
        if q.device.type != "cuda":
            raise DeviceError(
                f"attention 'flex' needs a CUDA device or torch.compile, got {q.device.type}; "
                "use 'chunked'"
            )
        return Decision(impl=impl, why="asked for", working_bytes=log_sums_bytes)
    is_on_cuda = obstacle is None and q.device.type == "cuda"
    needs_gradient = torch.is_grad_enabled() and q.requires_grad
    if impl == "auto" and is_on_cuda and needs_gradient:
        why = "CUDA, and a gradient: PyTorch's FlexAttention has a fused backward pass"
        return Decision(impl="flex", why=why, working_bytes=log_sums_bytes)
    if impl == "auto" and is_on_cuda:
        why = "CUDA, and an input that the kernel supports"
        return Decision(impl="triton", why=why, working_bytes=log_sums_bytes)
    plan = plan_blocks(q, budget_bytes=budget_bytes)
    reason = "asked for"
    if impl == "auto":
        reason = f"'triton' {obstacle or 'runs interpreted here'}"
    return Decision(
        impl="chunked",
        why=f"{reason}; blocks of {plan.queries} queries x {plan.keys} keys",
        working_bytes=plan.working_bytes,
    )


def check_dense_budget(needed: int, tokens: int, budget_bytes: int) -> None:
    """Raise BudgetError where matrices of all pairs do not fit."""
    if needed > budget_bytes:
        raise BudgetError(
            f"attention 'reference' needs {format_bytes(needed)} "
            f"for T={tokens}, the budget is {format_bytes(budget_bytes)}; "
            "use 'chunked'"
        )


def _triton_obstacle(q: Tensor) -> str | None:
    """Reason why the Triton kernel cannot take q, or None."""
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, got {q.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if q.dtype not in TRITON_DTYPES:
        return f"needs float32, bfloat16 or float16, got {q.dtype}"
    if q.shape[-1] not in TRITON_DIMS:
        return f"needs a head dimension D of {', '.join(map(str, TRITON_DIMS))}, got {q.shape[-1]}"
    if q.device.type == "cuda" and torch.version.hip is None:
        return capability_obstacle(torch.cuda.get_device_capability(q.device))
    return None


def capability_obstacle(capability: tuple[int, int]) -> str | None:
    """Reason why a card of this compute capability does not get the kernel, or None."""
    if capability >= MIN_CAPABILITY:
        return None
    least_major, least_minor = MIN_CAPABILITY
    major, minor = capability
    return f"needs sm_{least_major}{least_minor} or newer, got sm_{major}{minor}"


def _implementation(decision: Decision, q: Tensor, budget_bytes: int) -> Attend:
    """Function that computes one item of a batch like q [B, H, T, D]."""
    if decision.impl == "reference":
        check_dense_budget(decision.working_bytes, q.shape[2], budget_bytes)
        return reference
    if decision.impl == "flex":
        return attend_item_flex
    plan = plan_blocks(q, budget_bytes=budget_bytes)
    if decision.impl == "chunked":
        return differentiable(forward_chunked, plan)
    from thinsection.attention.triton_kernel import forward_triton

    return differentiable(forward_triton, plan)


def attend_items(
    items: list[BatchItem], attend: Attend, q: Tensor, out: Tensor | None = None
) -> Tensor:
    """Attention [B, H, T, D] of the items of q's batch, one after another; padding gives zeros."""
    outputs = []
    for index, (item, real_tokens) in enumerate(items):
        target = None if out is None else out[index]
        if real_tokens is None:
            outputs.append(attend(item, target))
            continue
        result = q.new_zeros(q.shape[1:])
        if real_tokens.numel():
            result = result.index_copy(1, real_tokens, attend(item, None))
        outputs.append(result if target is None else target.copy_(result))
    if out is not None:
        return out
    return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)
