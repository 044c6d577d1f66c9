"""TITAN's attention on a CUDA card: the fused kernel beside FlexAttention and a dense bias.

Without a card nothing is measured, and no JSON is written.
"""

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.harness import arguments, finish
from benchmarks.titan_inputs import (
    DIM,
    HEADS,
    TILE_PX_L0,
    slide,
    tissue_cells,
    titan_of,
)
from thinsection.attention import alibi2d_attention, alibi_slopes
from thinsection.types import MIB

IMPLS: tuple[Literal["triton", "flex", "chunked"], ...] = ("triton", "flex", "chunked")


def main() -> None:
    """One layer, whole embeddings, and one layer with its gradient."""
    args = arguments(__doc__ or "")
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    sizes = (2_000,) if args.smoke else (18_000, 33_000, 62_000, 120_000)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "matmul_tflops_bf16": matmul_tflops(),
        "one_layer": [one_layer(n) for n in sizes],
        "embedding": [embedding(n) for n in sizes],
        "gradient": [
            gradient(n, impl)
            for n in ((2_000,) if args.smoke else (8_000, 33_000))
            for impl in IMPLS
        ],
    }
    finish("bench_titan_gpu", results, args)


def matmul_tflops() -> float:
    """bfloat16 rate of 8192 x 8192 products."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / timed(lambda: a @ a)["seconds"] / 1e12


def layer_inputs(
    num_tiles: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values in bfloat16, and the cells of the tiles, on the card."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (1, HEADS, num_tiles + 1, DIM)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    return q, k, v, torch.from_numpy(tissue_cells(num_tiles)).cuda()


def one_layer(num_tiles: int) -> dict[str, Any]:
    """Kernel, FlexAttention with the same score function, dense float16 bias where it fits."""
    q, k, v, cells = layer_inputs(num_tiles)
    slopes = alibi_slopes(HEADS)
    points = torch.cat([cells.new_zeros(1, 2), cells]).float()
    flex = torch.compile(flex_attention, dynamic=False)
    device_slopes = slopes.float().cuda()

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        d = points[i] - points[j]
        distance = torch.sqrt(d[0] * d[0] + d[1] * d[1])
        return s - torch.where((i > 0) & (j > 0), device_slopes[h] * distance, 0.0)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: alibi2d_attention(q, k, v, cells, slopes, impl="triton"),
        "flex_attention": lambda: flex(q, k, v, score_mod=score),
        "dense_fp16_bias": lambda: dense(q, k, v, points, device_slopes),
    }
    rows: dict[str, Any] = {"num_tiles": num_tiles}
    outputs = {}
    for name, way in ways.items():
        try:
            outputs[name] = way()
            rows[name] = timed(way)
        except torch.cuda.OutOfMemoryError:
            rows[name] = "out of memory"
            torch.cuda.empty_cache()
    flops = 4 * (num_tiles + 1) ** 2 * HEADS * DIM
    rows["ours"]["tflops"] = flops / rows["ours"]["seconds"] / 1e12
    for name in set(outputs) - {"ours"}:
        rows[f"largest_difference_to_{name}"] = float(
            (outputs[name].float() - outputs["ours"].float()).abs().max()
        )
    return rows


def gradient(
    num_tiles: int, impl: Literal["triton", "flex", "chunked"]
) -> dict[str, Any]:
    """Seconds of our attention in bfloat16, and of attention and gradient together."""
    q, k, v, cells = layer_inputs(num_tiles)
    slopes = alibi_slopes(HEADS)

    def attend() -> torch.Tensor:
        return alibi2d_attention(q, k, v, cells, slopes, impl=impl)

    def attend_and_derive() -> None:
        attend().float().sum().backward()  # type: ignore[no-untyped-call]

    forward = timed(attend)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    both = timed(attend_and_derive)
    return {
        "num_tiles": num_tiles,
        "impl": impl,
        "forward_s": forward["seconds"],
        "forward_and_gradient_s": both["seconds"],
        "peak_mib": torch.cuda.max_memory_allocated() // MIB,
    }


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    points: torch.Tensor,
    slopes: torch.Tensor,
) -> torch.Tensor:
    """The bias in float16 on the device, rows padded so that memory-efficient SDPA takes it."""
    tokens = q.shape[2]
    padded = (tokens + 7) // 8 * 8
    bias = torch.zeros(1, HEADS, tokens, padded, dtype=torch.float16, device=q.device)
    for start in range(1, tokens, 512):
        rows = points[start : start + 512]
        distance = (rows[:, None] - points[None, 1:]).square().sum(-1).sqrt()
        bias[0, :, start : start + 512, 1:tokens] = -slopes[:, None, None] * distance
    backend = torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION
    with torch.nn.attention.sdpa_kernel(backend):
        q, k, v = q.half(), k.half(), v.half()
        mask = bias[..., :tokens]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def embedding(num_tiles: int) -> dict[str, Any]:
    """A whole slide embedding with bfloat16 products."""
    titan = titan_of("bf16", budget_bytes=2 << 30, device="cuda")
    tiles, coords = slide(num_tiles)
    on_device = torch.from_numpy(tiles).cuda()
    row = timed(lambda: titan.encode(on_device, coords, tile_px_l0=TILE_PX_L0), times=2)
    return {"num_tiles": num_tiles, **row}


def timed(call: Callable[[], Any], *, times: int = 5) -> dict[str, float]:
    """Median seconds after one warm-up, and peak device memory beyond what was held before."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, seconds = torch.cuda.memory_allocated(), []
    for _ in range(times):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    return {
        "seconds": sorted(seconds)[len(seconds) // 2],
        "peak_beyond_inputs_mib": peak,
    }


if __name__ == "__main__":
    main()
