"""2-D ALiBi attention: checks the input, chooses an implementation, and says why.

Shapes: B batch, H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels of a head.
"""

import importlib.util
import math
import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinsection.attention.chunked import (
    Attend,
    differentiable,
    forward_chunked,
    plan_blocks,
)
from thinsection.attention.reference import (
    AttentionItem,
    dense_bytes,
    math_dtype,
    reference,
)
from thinsection.errors import (
    BudgetError,
    ConfigError,
    DeviceError,
    InvalidInputError,
    require,
)
from thinsection.types import MIB, format_bytes

Impl = Literal["auto", "reference", "chunked", "triton"]
DEFAULT_BUDGET_BYTES = 512 * MIB
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (torch.float64, *TRITON_DTYPES)
TRITON_DIMS = (16, 32, 64, 128, 256)
# before, float16 spills some 1,500 registers on sm_75 and 3,500 on sm_70, as compiled
MIN_CAPABILITY = (8, 0)
MAX_EXTENT = (
    1 << 24
)  # cells are float32 in the fast paths: integers above are not exact

Item = tuple[
    AttentionItem, Tensor | None
]  # and int64 indices of its real tokens; None: all


@dataclass(frozen=True, slots=True)
class Decision:
    """Which implementation runs, and why."""

    impl: Literal["reference", "chunked", "triton"]
    why: str  # one sentence for a person
    working_bytes: int  # that it holds beyond inputs and output, per batch item


def alibi2d_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Tensor,
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
    input). Differentiable once in q, k and v: the backward pass recomputes blocks. A gradient of
    the gradient (`create_graph`) has 'reference' alone; the others refuse it.

    Args:
        q, k, v: [B, H, T, D], float64, float32, bfloat16 or float16; prefix tokens first.
        cells: int [N, 2] or [B, N, 2], grid cells of the tokens after the prefix.
        slopes: [H], >= 0 (see `alibi_slopes`).
        num_prefix_tokens: tokens in front without a place on the grid (cls).
        scale: factor of q . k; None = D^-0.5.
        key_mask: bool [B, T], True = a real token. Others are ignored as keys, and give zeros.
        impl: 'auto' or one of the implementations; `explain` says what 'auto' takes.
        budget_bytes: working memory beyond inputs and output.
        out: where to write the result, like q, without gradients; q itself is allowed, memory
            that k, v or other places of q share is not.

    Memory: O(T): budget_bytes and T floats per head ('reference': O(T²), refused above that).
    Raises InvalidInputError: an argument does not fit; ConfigError: unknown `impl`; BudgetError:
    too small a budget; DeviceError: 'triton' cannot run here.
    """
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
        _check_out(out, q, k, v)
    decision = explain(q, impl=impl, budget_bytes=budget_bytes)
    return attend_items(items, _attend(decision.impl, q, budget_bytes), q, out)


def explain(
    q: Tensor, *, impl: Impl = "auto", budget_bytes: int = DEFAULT_BUDGET_BYTES
) -> Decision:
    """What `alibi2d_attention` would run for q [B, H, T, D]; reads metadata only, raises alike."""
    known = get_args(Impl)
    require(
        impl in known,
        f"impl must be one of {', '.join(known)}",
        repr(impl),
        error=ConfigError,
    )
    require(q.ndim == 4, "q must be of shape [B, H, T, D]", tuple(q.shape))
    if impl == "reference":
        return Decision("reference", "asked for", dense_bytes(q))
    obstacle = _triton_obstacle(q)
    if impl == "triton" and obstacle:
        raise DeviceError(f"attention 'triton' {obstacle}; use 'chunked'")
    if impl == "triton" or (
        obstacle is None and q.device.type == "cuda" and impl == "auto"
    ):
        why = (
            "asked for"
            if impl == "triton"
            else "CUDA, and an input that the kernel takes"
        )
        return Decision("triton", why, 4 * q.shape[1] * q.shape[2])
    plan = plan_blocks(q, budget_bytes=budget_bytes)
    why = (
        "asked for"
        if impl == "chunked"
        else f"'triton' {obstacle or 'runs interpreted here'}"
    )
    why = f"{why}; blocks of {plan.queries} queries x {plan.keys} keys"
    return Decision("chunked", why, plan.working_bytes)


def _triton_obstacle(q: Tensor) -> str | None:
    """Why the Triton kernel cannot take q, or None."""
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, got {q.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if q.dtype not in TRITON_DTYPES:
        return f"takes float32, bfloat16 and float16, got {q.dtype}"
    if q.shape[-1] not in TRITON_DIMS:
        return f"takes D of {', '.join(map(str, TRITON_DIMS))}, got {q.shape[-1]}"
    if q.device.type == "cuda" and torch.version.hip is None:
        return capability_obstacle(torch.cuda.get_device_capability(q.device))
    return None


def capability_obstacle(capability: tuple[int, int]) -> str | None:
    """Why a card of this compute capability does not get the kernel, or None."""
    if capability >= MIN_CAPABILITY:
        return None
    least, got = ("sm_{}{}".format(*c) for c in (MIN_CAPABILITY, capability))
    return f"needs {least} or newer, got {got}"


def _attend(impl: str, q: Tensor, budget_bytes: int) -> Attend:
    """The chosen implementation, for one item of a batch like q [B, H, T, D]."""
    if impl == "reference":
        if (needed := dense_bytes(q)) > budget_bytes:
            needs = (
                f"attention 'reference' needs {format_bytes(needed)} for T={q.shape[2]}"
            )
            budget = f"the budget is {format_bytes(budget_bytes)}"
            raise BudgetError(f"{needs}, {budget}; use 'chunked'")
        return reference
    plan = plan_blocks(q, budget_bytes=budget_bytes)
    if impl == "chunked":
        return differentiable(forward_chunked, plan)
    from thinsection.attention.triton_kernel import forward_triton

    return differentiable(forward_triton, plan)


def checked_items(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Tensor,
    slopes: Tensor,
    *,
    num_prefix_tokens: int = 1,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> list[Item]:
    """Each item of the batch, its padding taken out."""
    _check_qkv(q, k, v)
    (batch, heads, tokens, dim), prefix = q.shape, num_prefix_tokens
    require(0 <= prefix <= tokens, f"num_prefix_tokens must be in 0..{tokens}", prefix)
    require(scale is None or math.isfinite(scale), "scale must be finite", scale)
    grid = _checked_cells(cells, (batch, tokens - prefix, 2)).to(
        q.device, math_dtype(q)
    )
    steep = _checked_slopes(slopes, heads)
    if key_mask is not None:
        fits = key_mask.dtype == torch.bool and tuple(key_mask.shape) == (batch, tokens)
        require(
            fits, f"key_mask must be bool of shape ({batch}, {tokens})", _form(key_mask)
        )
        require(
            key_mask[:, :prefix].all(), "key_mask must be True for prefix tokens", False
        )
    items: list[Item] = []
    for b in range(batch):
        qkv, places, valid = [x[b] for x in (q, k, v)], grid[b], None
        if key_mask is not None and not bool(key_mask[b].all()):
            valid = key_mask[b].to(q.device).nonzero()[:, 0]
            qkv = [x.index_select(1, valid) for x in qkv]
            places = places[valid[prefix:] - prefix]
        scale = dim**-0.5 if scale is None else scale
        places = places.T.contiguous()
        item = AttentionItem(qkv[0], qkv[1], qkv[2], places, steep, prefix, scale=scale)
        items.append((item, valid))
    return items


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    shaped = q.ndim == 4 and 0 not in q.shape
    require(shaped, "q must be of shape [B, H, T, D], none 0", tuple(q.shape))
    allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
    require(q.dtype in DTYPES, f"q must be one of {allowed}", q.dtype)
    wanted = f"{_form(q)} on {q.device}"
    for name, got in (
        ("k", f"{_form(k)} on {k.device}"),
        ("v", f"{_form(v)} on {v.device}"),
    ):
        require(got == wanted, f"{name} must be like q, {wanted}", got)


def _check_out(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises InvalidInputError: `out` is not like q, or writing it changes what is read later."""
    if (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device):
        raise InvalidInputError(f"out must be like q, got {_form(out)}")
    for name, read in (("k", k), ("v", v)):
        if _share_memory(out, read):
            raise InvalidInputError(
                f"out must share no memory with {name}, got memory of both; "
                "leave out out, or pass a copy"
            )
    is_q = out.data_ptr() == q.data_ptr() and out.stride() == q.stride()
    if not is_q and _share_memory(out, q):
        raise InvalidInputError(
            "out must be q itself or share no memory with it, got a part of it; "
            "leave out out, or pass a copy"
        )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether an element of one lies where one of the other does; reads no element."""
    return bool(np.shares_memory(_Places(one).array(), _Places(other).array()))


class _Places:
    """Addresses of a tensor's elements as NumPy knows them, whatever the dtype or device."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(x.shape),
            "strides": tuple(step * size for step in x.stride()),
            "data": (x.data_ptr(), True),
        }

    def array(self) -> npt.NDArray[Any]:
        """Array over the same addresses; its values must not be read."""
        return np.asarray(self)


def _checked_cells(cells: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """int64 of that shape [B, N, 2], counted from the least row and column of each item."""
    integer = (
        not cells.is_floating_point()
        and not cells.is_complex()
        and cells.dtype != torch.bool
    )
    rule = f"cells must be int of shape {shape[1:]} or {shape}"
    require(integer and tuple(cells.shape) in (shape[1:], shape), rule, _form(cells))
    cells = cells.long().expand(shape)
    if shape[1]:
        cells = cells - cells.amin(1, keepdim=True)
        extent = int(cells.max())
        require(
            extent < MAX_EXTENT, f"cells must span less than {MAX_EXTENT} cells", extent
        )
    return cells


def _checked_slopes(slopes: Tensor, heads: int) -> tuple[float, ...]:
    got, shape = "one that does; none is computed for them", tuple(slopes.shape)
    require(not slopes.requires_grad, "slopes must not require a gradient", got)
    require(shape == (heads,), f"slopes must be of shape ({heads},)", shape)
    steep: list[float] = slopes.double().tolist()
    valid = all(math.isfinite(slope) and slope >= 0 for slope in steep)
    require(valid, "slopes must be finite and >= 0", steep)
    return tuple(steep)


def _form(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def attend_items(
    items: list[Item], attend: Attend, q: Tensor, out: Tensor | None = None
) -> Tensor:
    """The items of q's batch one after the other; padding was taken out before, gives zeros."""
    outputs = []
    for b, (item, valid) in enumerate(items):
        target = None if out is None else out[b]
        if valid is None:
            outputs.append(attend(item, target))
            continue
        result = q.new_zeros(q.shape[1:])
        if valid.numel():
            result = result.index_copy(1, valid, attend(item, None))
        outputs.append(result if target is None else target.copy_(result))
    if out is not None:
        return out
    return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)
