"""How much time and memory does a TITAN slide embedding take without the N x N bias?

Published way against ours at 2k to 8k tiles, ours alone to 62k, one attention layer against SDPA
with a ready-made bias, one head at 250k, accuracy against float64; and, where there is a CUDA
device, the kernel against FlexAttention and a dense float16 bias.
"""

from typing import Any

import numpy as np
import torch

from benchmarks.harness import arguments, finish
from benchmarks.titan_inputs import (
    DIM,
    HEADS,
    TILE_PX_L0,
    matmul_rate,
    slide,
    titan_of,
)
from thinsection.aggregate.titan import random_titan_weights
from thinsection.aggregate.titan_net import NUM_BLOCKS
from thinsection.testing import run_and_measure
from thinsection.testing.plain_titan import BiasWay, plain_titan
from thinsection.types import MIB

MODULE = "benchmarks.titan_inputs"
MAX_ABS, MIN_COSINE = 1e-5, 1 - 1e-10


def main() -> None:
    """Checks accuracy first, then measures; the JSON is written after every stage."""
    args = arguments(__doc__ or "")
    both = (200,) if args.smoke else (2_000, 4_000, 8_000)
    # memory peaks in each block alike and time is the same in each: some of six show both
    alone = ((400, 6),) if args.smoke else ((16_000, 2), (33_000, 1), (62_000, 1))
    results: dict[str, Any] = {"accuracy": accuracy(100 if args.smoke else 2_000)}
    rate = results["matmul_gflops_one_thread"] = matmul_rate()
    results["against_published"] = [against_published(n) for n in both]
    results["one_layer_against_sdpa"] = [against_sdpa(n) for n in both]
    ours = [row["ours"] for row in results["against_published"]]
    for num_tiles, blocks in alone:
        ours.append(measured(num_tiles, "auto", blocks=blocks))
        results["ours"] = [{**row, **arithmetic(row, rate)} for row in ours]
        results["memory_fit"] = memory_fit(ours)
        if not args.smoke:
            finish("bench_titan", results, args)
    if not args.smoke:
        results["one_head_250k"] = one_head(250_000)
    if torch.cuda.is_available():
        from benchmarks.titan_gpu import gpu_section

        results["gpu"] = gpu_section(smoke=args.smoke)
    else:
        results["gpu"] = "no CUDA device: the Triton kernel's speed and memory are not measured"
    finish("bench_titan", results, args)


def accuracy(num_tiles: int) -> dict[str, Any]:
    """Pooled embedding against float64: ours, and what others do to the bias."""
    weights = random_titan_weights(seed=0)
    tiles, coords = slide(num_tiles)
    tensors = torch.from_numpy(tiles), torch.from_numpy(coords)
    exact = plain_titan(weights, *tensors, TILE_PX_L0, dtype=torch.float64).numpy()
    rows = {}
    for precision in ("fp32", "bf16"):
        ours = titan_of("auto" if precision == "fp32" else precision)
        rows[f"ours {precision}"] = ours.encode(tiles, coords, tile_px_l0=TILE_PX_L0)
    ways: tuple[BiasWay, ...] = ("float32", "float16", "cdist")
    for way in ways:
        plain = plain_titan(weights, *tensors, TILE_PX_L0, dtype=torch.float32, bias_way=way)
        rows[f"dense bias {way}"] = plain.numpy()
    errors = {name: error(row, exact) for name, row in rows.items()}
    ours_error = errors["ours fp32"]
    assert ours_error["max_abs"] <= MAX_ABS, ours_error
    assert ours_error["one_minus_cosine"] <= 1 - MIN_COSINE, ours_error
    return {"num_tiles": num_tiles, **errors}


def error(got: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Largest difference, and 1 - cosine in a form that float64 resolves."""
    a, b = got.astype(np.float64), exact
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return {
        "max_abs": float(np.abs(got - exact).max()),
        "one_minus_cosine": float(np.square(a - b).sum() / 2),
    }


def measured(num_tiles: int, way: str, *, blocks: int = NUM_BLOCKS) -> dict[str, Any]:
    """Time and memory of one embedding in a fresh process, weights and inputs not counted."""
    options: dict[str, Any] = {"num_tiles": num_tiles, "way": way, "blocks": blocks}
    run = run_and_measure(MODULE, "embed", setup="set_up", **options)
    row = {
        **options,
        "cpu_s": run.cpu_seconds,
        "wall_s": run.seconds,
        "peak_beyond_inputs_mib": run.growth_bytes / MIB,
        "peak_rss_mib": run.peak_bytes / MIB,
    }
    print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def against_published(num_tiles: int) -> dict[str, Any]:
    """The published way, ours, and ours with bfloat16 products, one after the other."""
    published, ours, low = (measured(num_tiles, way) for way in ("published", "auto", "bf16"))
    return {
        "num_tiles": num_tiles,
        "published": published,
        "ours": ours,
        "ours_bf16": low,
        "cpu_time_ratio": published["cpu_s"] / ours["cpu_s"],
        "cpu_time_ratio_bf16": published["cpu_s"] / low["cpu_s"],
        "peak_rss_ratio": published["peak_rss_mib"] / ours["peak_rss_mib"],
        "peak_beyond_inputs_ratio": published["peak_beyond_inputs_mib"]
        / max(1.0, ours["peak_beyond_inputs_mib"]),
    }


def against_sdpa(num_tiles: int) -> dict[str, Any]:
    """One attention layer: ours against SDPA with a ready-made bias, and the building of it."""
    common: dict[str, Any] = {"setup": "set_up_layer", "num_tiles": num_tiles, "heads": HEADS}
    ours = run_and_measure(MODULE, "layer", way="ours", **common)
    sdpa = run_and_measure(MODULE, "layer", way="sdpa", **common)
    row = {"num_tiles": num_tiles, "ours_cpu_s": ours.cpu_seconds, **sdpa.result}
    row["ours_beyond_inputs_mib"] = ours.growth_bytes / MIB
    row["sdpa_beyond_inputs_mib"] = sdpa.growth_bytes / MIB
    row["ratio_to_sdpa_and_build"] = (row["build_cpu_s"] + row["sdpa_cpu_s"]) / row["ours_cpu_s"]
    row["ratio_to_sdpa_alone"] = row["sdpa_cpu_s"] / row["ours_cpu_s"]
    assert abs(row.pop("checksum") - ours.result["checksum"]) < 1e-6 * num_tiles * HEADS * DIM
    return row


def one_head(num_tiles: int) -> dict[str, Any]:
    """One of the twelve heads of one layer: all queries, all keys."""
    run = run_and_measure(
        MODULE, "layer", setup="set_up_layer", num_tiles=num_tiles, heads=1, way="ours"
    )
    growth = run.growth_bytes / MIB
    return {"num_tiles": num_tiles, "cpu_s": run.cpu_seconds, "peak_beyond_inputs_mib": growth}


def memory_fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Straight line through peak memory beyond weights and inputs."""
    n = np.array([r["num_tiles"] for r in rows], dtype=float)
    peak = np.array([r["peak_beyond_inputs_mib"] for r in rows])
    slope, offset = np.polyfit(n, peak, 1)
    residual = float(np.abs(peak - (slope * n + offset)).max())
    return {
        "kib_per_tile": float(slope * 1024),
        "offset_mib": float(offset),
        "largest_residual_mib": residual,
        "largest_peak_mib": float(peak.max()),
    }


def arithmetic(row: dict[str, Any], gflops: float) -> dict[str, float]:
    """Operations of the whole forward pass, and how much of the matrix rate they reach.

    Attention: 4 T² C a block for q kᵀ and weights v; per score and head five cheap passes over a
    cache-resident block, and per score 1/12 of six for the distance. Linears: 24 T C² a block.
    """
    tokens, channels, blocks = row["num_tiles"] + 1, HEADS * DIM, row["blocks"]
    attention = 4 * tokens**2 * channels * blocks
    linears = 24 * tokens * channels**2 * blocks + 2 * tokens * channels**2
    scores = tokens**2 * HEADS * blocks
    floor = (attention + linears) / (gflops * 1e9)
    return {
        "matmul_gflop": (attention + linears) / 1e9,
        "scores_1e9": scores / 1e9,
        "cached_pass_bytes_1e9": scores * 4 * (7 + 9 / HEADS) / 1e9,
        "matmul_floor_s": floor,
        "fraction_of_matmul_rate": floor / row["cpu_s"],
    }


if __name__ == "__main__":
    main()
