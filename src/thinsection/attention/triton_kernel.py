"""2-D ALiBi attention as one fused CUDA kernel: distances come from the coordinates, in registers.

One program per (query block, head) runs over all key blocks with an online softmax; nothing T x T
reaches memory. Under TRITON_INTERPRET=1 the same kernel runs on CPU tensors, for tests.

Shapes: H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels of a head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from thinsection.attention.blocks import BlockPlan
from thinsection.attention.reach import LOG2E
from thinsection.attention.reference import AttentionItem


class LaunchShape(NamedTuple):
    """Sizes of one program."""

    queries: int  # tokens of a query block
    keys: int  # tokens of a key block
    num_warps: int
    num_stages: int  # of the pipeline that loads keys and values


def launch_shape(dtype: torch.dtype, dim: int) -> LaunchShape:
    """Sizes for D = `dim` channels.

    On sm_80, sm_90 and sm_100 none spills registers or takes more than the smallest cards' 99 KiB
    of shared memory (tests/attention/test_compiled.py).
    """
    if dtype == torch.float32:  # exact products run on the CUDA cores
        if dim == 256:
            return LaunchShape(queries=16, keys=32, num_warps=8, num_stages=2)
        if dim == 128:
            return LaunchShape(queries=32, keys=16, num_warps=8, num_stages=2)
        return LaunchShape(queries=64, keys=16, num_warps=8, num_stages=2)
    if dim <= 64:
        return LaunchShape(queries=128, keys=64, num_warps=8, num_stages=3)
    if dim <= 128:
        return LaunchShape(queries=128, keys=64, num_warps=8, num_stages=2)
    return LaunchShape(queries=64, keys=32, num_warps=8, num_stages=2)


def forward_triton(
    item: AttentionItem, plan: BlockPlan, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [H, T, D] in the input's dtype and log2-sum-exp2 [H, T] of the base-2 scores.

    Products of bfloat16 and float16 accumulate in float32; float32 products are IEEE, not TF32.
    `out` may be `item.q` itself: a program reads its queries before it writes, and no others.

    Memory: H T floats; `plan` is for the backward pass only.
    """
    heads, tokens, dim = item.q.shape
    q = _with_dense_channels(item.q)
    k = _with_dense_channels(item.k)
    v = _with_dense_channels(item.v)
    if out is None:
        out = q.new_empty((heads, tokens, dim))
    log_sums = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    slopes = torch.tensor(item.slopes, dtype=torch.float32, device=q.device) * LOG2E
    shape = launch_shape(q.dtype, dim)
    # Triton launches on the current card, not on q's
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        _attend_kernel[triton.cdiv(tokens, shape.queries), heads](
            q, k, v, item.cells, slopes, out, log_sums,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            out.stride(0), out.stride(1),
            tokens, item.num_prefix_tokens, item.scale * LOG2E,
            D=dim, BLOCK_M=shape.queries, BLOCK_N=shape.keys,
            UPCAST=isinstance(_attend_kernel, InterpretedFunction),
            num_warps=shape.num_warps, num_stages=shape.num_stages,
        )  # fmt: skip
    return out, log_sums


def _with_dense_channels(x: torch.Tensor) -> torch.Tensor:
    """x, copied where the channels of a token do not lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def _add_key_block(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    q, row_y, row_x, row_slope, acc, den, top, k_base, v_base, cells_ptr, start,
    k_token, v_token, tokens, prefix, scale, D: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax. Not MASKED: all of its keys exist and lie on the grid."""
    keys = start + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, D)
    k_ptrs = k_base + keys.to(tl.int64)[:, None] * k_token + channels[None, :]
    v_ptrs = v_base + keys.to(tl.int64)[:, None] * v_token + channels[None, :]
    y_ptrs = cells_ptr + keys - prefix
    x_ptrs = cells_ptr + (tokens - prefix) + keys - prefix
    if MASKED:
        inside = keys < tokens
        on_grid = (keys >= prefix) & inside
        k = tl.load(k_ptrs, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=inside[:, None], other=0.0)
        key_y = tl.load(y_ptrs, mask=on_grid, other=0.0)
        key_x = tl.load(x_ptrs, mask=on_grid, other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
        key_y = tl.load(y_ptrs)
        key_x = tl.load(x_ptrs)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    # the slope comes after the distance: cells subtract exactly
    dy = row_y[:, None] - key_y[None, :]
    dx = row_x[:, None] - key_x[None, :]
    distance = tl.sqrt(dy * dy + dx * dx)
    if MASKED:
        distance = tl.where(on_grid[None, :], distance, 0.0)
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = products * scale - row_slope[:, None] * distance
    if MASKED:
        scores = tl.where(inside[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    den = den * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, den, new_top


@triton.jit  # type: ignore[untyped-decorator]
def _attend_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    q_ptr, k_ptr, v_ptr, cells_ptr, slopes_ptr, out_ptr, lse_ptr,
    q_head, q_token, k_head, k_token, v_head, v_token, out_head, out_token,
    tokens, prefix, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one query block of one head."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # int64: token * stride passes 2^31 at a million tokens
    long_rows = rows.to(tl.int64)[:, None]
    inside_rows = rows < tokens
    channels = tl.arange(0, D)
    num_grid = tokens - prefix
    q_ptrs = q_ptr + head * q_head + long_rows * q_token + channels[None, :]
    q = tl.load(q_ptrs, mask=inside_rows[:, None], other=0.0)
    if UPCAST:  # the interpreter's bfloat16 product is wrong
        q = q.to(tl.float32)
    row_on_grid = (rows >= prefix) & inside_rows
    row_y = tl.load(cells_ptr + rows - prefix, mask=row_on_grid, other=0.0)
    row_x = tl.load(cells_ptr + num_grid + rows - prefix, mask=row_on_grid, other=0.0)
    slope = tl.load(slopes_ptr + head)
    row_slope = tl.where(row_on_grid, slope, 0.0)  # a prefix row has no bias
    k_base = k_ptr + head * k_head
    v_base = v_ptr + head * v_head
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    den = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    # masks cost as much as the bias: only blocks with prefix keys, and the last one, have them
    first = tl.minimum(tl.cdiv(prefix, BLOCK_N) * BLOCK_N, tokens)
    last = tl.maximum(tokens // BLOCK_N * BLOCK_N, first)
    for start in range(0, first, BLOCK_N):
        acc, den, top = _add_key_block(
            q, row_y, row_x, row_slope, acc, den, top, k_base, v_base, cells_ptr, start,
            k_token, v_token, tokens, prefix, scale, D, BLOCK_N, UPCAST, True,
        )  # fmt: skip
    for start in range(first, last, BLOCK_N):
        acc, den, top = _add_key_block(
            q, row_y, row_x, row_slope, acc, den, top, k_base, v_base, cells_ptr, start,
            k_token, v_token, tokens, prefix, scale, D, BLOCK_N, UPCAST, False,
        )  # fmt: skip
    for start in range(last, tokens, BLOCK_N):
        acc, den, top = _add_key_block(
            q, row_y, row_x, row_slope, acc, den, top, k_base, v_base, cells_ptr, start,
            k_token, v_token, tokens, prefix, scale, D, BLOCK_N, UPCAST, True,
        )  # fmt: skip
    out_ptrs = out_ptr + head * out_head + long_rows * out_token + channels[None, :]
    out = (acc / den[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=inside_rows[:, None])
    lse_ptrs = lse_ptr + head * tokens + rows
    tl.store(lse_ptrs, tl.log2(den) + top, mask=inside_rows)
