"""2-D ALiBi attention as one fused CUDA kernel: distances come from the coordinates, in registers.

One program per (query block, head) runs over all key blocks with an online softmax; nothing T x T
reaches memory. Under TRITON_INTERPRET=1 the same kernel runs on CPU tensors, for tests.

Shapes: H heads, P prefix tokens, N grid tokens, T = P + N tokens, D channels of a head.
"""

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from thinsection.attention.chunked import BlockPlan
from thinsection.attention.reach import LOG2E
from thinsection.attention.reference import AttentionItem


def launch_shape(dtype: torch.dtype, dim: int) -> tuple[int, int, int, int]:
    """Tokens of a query and of a key block, warps, and pipeline stages.

    On sm_80, sm_90 and sm_100 none spills registers or takes more than the smallest cards' 99 KiB
    of shared memory (tests/attention/test_compiled.py).
    """
    if dtype == torch.float32:  # exact products run on the CUDA cores
        return (*{256: (16, 32), 128: (32, 16)}.get(dim, (64, 16)), 8, 2)
    if dim <= 128:
        return 128, 64, 8, 3 if dim <= 64 else 2
    return 64, 32, 8, 2


def forward_triton(
    item: AttentionItem, plan: BlockPlan, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [H, T, D] in the input's dtype and log2-sum-exp2 [H, T] of the base-2 scores.

    Products of bfloat16 and float16 accumulate in float32; float32 products are IEEE, not TF32.
    `out` may be `item.q` itself: a program reads its queries before it writes, and no others.

    Memory: H T floats; `plan` is for the backward pass only.
    """
    heads, tokens, dim = item.q.shape
    q, k, v = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (item.q, item.k, item.v)
    )
    out = q.new_empty((heads, tokens, dim)) if out is None else out
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    slopes = torch.tensor(item.slopes, dtype=torch.float32, device=q.device) * LOG2E
    queries, keys, num_warps, num_stages = launch_shape(q.dtype, dim)
    # Triton launches on the current card, not on q's
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        _attend_kernel[triton.cdiv(tokens, queries), heads](
            q, k, v, item.cells, slopes, out, lse,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            out.stride(0), out.stride(1),
            tokens, item.num_prefix_tokens, item.scale * LOG2E,
            D=dim, BLOCK_M=queries, BLOCK_N=keys,
            UPCAST=isinstance(_attend_kernel, InterpretedFunction),
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out, lse


@triton.jit  # type: ignore[untyped-decorator]
def _key_block(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    q, row_y, row_x, row_slope, acc, den, top, k_base, v_base, cells_ptr, start,
    k_token, v_token, tokens, prefix, scale, D: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax. Not MASKED: all of its keys exist and lie on the grid."""
    keys, channels = start + tl.arange(0, BLOCK_N), tl.arange(0, D)
    k_at = k_base + keys.to(tl.int64)[:, None] * k_token + channels[None, :]
    v_at = v_base + keys.to(tl.int64)[:, None] * v_token + channels[None, :]
    y_at, x_at = (
        cells_ptr + keys - prefix,
        cells_ptr + (tokens - prefix) + keys - prefix,
    )
    if MASKED:
        inside = keys < tokens
        on_grid = (keys >= prefix) & inside
        k = tl.load(k_at, mask=inside[:, None], other=0.0)
        v = tl.load(v_at, mask=inside[:, None], other=0.0)
        key_y = tl.load(y_at, mask=on_grid, other=0.0)
        key_x = tl.load(x_at, mask=on_grid, other=0.0)
    else:
        k, v, key_y, key_x = tl.load(k_at), tl.load(v_at), tl.load(y_at), tl.load(x_at)
    if UPCAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    dy = row_y[:, None] - key_y[None, :]
    dx = row_x[:, None] - key_x[None, :]
    distance = tl.sqrt(
        dy * dy + dx * dx
    )  # the slope comes after: cells subtract exactly
    if MASKED:
        distance = tl.where(on_grid[None, :], distance, 0.0)
    scores = (
        tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        - row_slope[:, None] * distance
    )
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
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, D)
    num_grid = tokens - prefix
    # int64: token * stride passes 2^31 at a million tokens
    q_at = (
        q_ptr + head * q_head + rows.to(tl.int64)[:, None] * q_token + channels[None, :]
    )
    q = tl.load(q_at, mask=rows[:, None] < tokens, other=0.0)
    if UPCAST:  # the interpreter's bfloat16 product is wrong
        q = q.to(tl.float32)
    row_on_grid = (rows >= prefix) & (rows < tokens)
    row_y = tl.load(cells_ptr + rows - prefix, mask=row_on_grid, other=0.0)
    row_x = tl.load(cells_ptr + num_grid + rows - prefix, mask=row_on_grid, other=0.0)
    row_slope = tl.where(
        row_on_grid, tl.load(slopes_ptr + head), 0.0
    )  # a prefix row has no bias
    k_base, v_base = k_ptr + head * k_head, v_ptr + head * v_head
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    den = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    # masks cost as much as the bias: only blocks with prefix keys, and the last one, have them
    first = tl.minimum(tl.cdiv(prefix, BLOCK_N) * BLOCK_N, tokens)
    last = tl.maximum(tokens // BLOCK_N * BLOCK_N, first)
    for start in range(0, first, BLOCK_N):
        acc, den, top = _key_block(
            q, row_y, row_x, row_slope, acc, den, top, k_base, v_base, cells_ptr, start,
            k_token, v_token, tokens, prefix, scale, D, BLOCK_N, UPCAST, True,
        )  # fmt: skip
    for start in range(first, last, BLOCK_N):
        acc, den, top = _key_block(
            q, row_y, row_x, row_slope, acc, den, top, k_base, v_base, cells_ptr, start,
            k_token, v_token, tokens, prefix, scale, D, BLOCK_N, UPCAST, False,
        )  # fmt: skip
    for start in range(last, tokens, BLOCK_N):
        acc, den, top = _key_block(
            q, row_y, row_x, row_slope, acc, den, top, k_base, v_base, cells_ptr, start,
            k_token, v_token, tokens, prefix, scale, D, BLOCK_N, UPCAST, True,
        )  # fmt: skip
    inside_rows = rows < tokens
    out_at = (
        out_ptr
        + head * out_head
        + rows.to(tl.int64)[:, None] * out_token
        + channels[None, :]
    )
    out = (acc / den[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at, out, mask=inside_rows[:, None])
    tl.store(lse_ptr + head * tokens + rows, tl.log2(den) + top, mask=inside_rows)
