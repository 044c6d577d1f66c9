"""How does the memory of Prov-GigaPath's slide encoder grow with the number of tiles?

One of its twelve layers at the published sizes, seeded random weights, to 62k tiles; checked
against the plain float64 implementation first. Memory peaks in each layer alike. With a budget that
holds all heads at once memory is a line in N; the default budget caps it by groups of heads.
"""

from typing import Any

import numpy as np
import torch
from tests.support.plain_gigapath import plain_dilated_row, plain_gigapath

from benchmarks.harness import arguments, finish
from benchmarks.titan_inputs import give_back_freed_memory, tissue_cells
from thinsection.attention.dilated import dilated_heads
from thinsection.pool import GigaPathSlideEncoder, LoadOptions
from thinsection.pool.encoder import DEFAULT_BUDGET_BYTES
from thinsection.pool.gigapath import LongNetConfig
from thinsection.testing import run_and_measure
from thinsection.types import GIB, MIB

TILE_PX_L0 = 512  # of 256 px tiles at 0.5 µm/px on a 40x slide
State = tuple[GigaPathSlideEncoder, np.ndarray, np.ndarray]


def main() -> None:
    """Checks, then measures each size in a fresh process."""
    args = arguments(__doc__ or "")
    sizes = (300, 600) if args.smoke else (2_000, 8_000, 16_000, 33_000, 62_000)
    results: dict[str, Any] = {"max_abs_to_float64": check(60)}
    lengths = (1_100,) if args.smoke else (6_000, 12_000)
    results["attention_max_abs_to_float64"] = {n: check_attention(n) for n in lengths}
    rows = results["one_layer_all_heads_at_once"] = [
        measured(n, 4 * GIB) for n in sizes
    ]
    results["one_layer_default_budget"] = measured(sizes[-1], DEFAULT_BUDGET_BYTES)
    n, peaks = (
        np.array([r[k] for r in rows]) for k in ("num_tiles", "peak_beyond_inputs_mib")
    )
    slope, offset = np.polyfit(n, peaks, 1)
    results["memory_fit"] = {
        "kib_per_tile": float(slope * 1024),
        "offset_mib": float(offset),
        "largest_residual_mib": float(np.abs(peaks - slope * n - offset).max()),
    }
    finish("bench_gigapath", results, args)


def measured(num_tiles: int, budget_bytes: int) -> dict[str, Any]:
    """Time and memory of one layer in a fresh process."""
    options = {"num_tiles": num_tiles, "budget_bytes": budget_bytes}
    run = run_and_measure(
        "benchmarks.bench_gigapath", "encode", setup="set_up", **options
    )
    peak = run.growth_bytes / MIB
    return {**options, "cpu_s": run.cpu_seconds, "peak_beyond_inputs_mib": peak}


def check(num_tiles: int) -> float:
    """Largest difference of the last embedding to float64."""
    encoder, tiles, coords = set_up(num_tiles=num_tiles, budget_bytes=GIB)
    config = encoder.net.sizes
    exact = plain_gigapath(
        GigaPathSlideEncoder.random_weights(config, seed=0),
        torch.from_numpy(tiles),
        torch.from_numpy(coords),
        tile_px_l0=TILE_PX_L0,
        branches=[(b.length, b.dilation) for b in config.branches],
        num_heads=config.num_heads,
    )[-2]  # of the last layer
    worst = float(
        np.abs(
            encoder.encode(tiles, coords, tile_px_l0=TILE_PX_L0) - exact.numpy()
        ).max()
    )
    assert worst <= 1e-5, worst
    return worst


def check_attention(num_tokens: int) -> float:
    """Largest difference to float64 of rows around the ends of the published segments."""
    config, generator = LongNetConfig(), torch.Generator().manual_seed(num_tokens)
    q, k, v = torch.randn(3, num_tokens, 16, 48, generator=generator).transpose(1, 2)
    got = dilated_heads(
        (q, k, v), config.branches, first_head=0, num_heads=16, budget_bytes=64 * MIB
    )
    plain = [(b.length, b.dilation) for b in config.branches]
    worst = 0.0
    ends = [
        n
        for end in (1_024, 5_792, 11_584)
        for n in (end - 1, end, end + 1)
        if n < num_tokens
    ]
    for token in (0, *ends, num_tokens - 1):
        for h in range(16):
            row = plain_dilated_row(
                q[h], k[h], v[h], branches=plain, head=h, num_heads=16, token=token
            )
            worst = max(worst, float((got[h, token].double() - row).abs().max()))
    assert worst <= 2e-6, worst
    return worst


def set_up(*, num_tiles: int, budget_bytes: int) -> State:
    """One layer of the published sizes, and a slide."""
    torch.set_num_threads(1)
    config = LongNetConfig(num_layers=1)
    weights = GigaPathSlideEncoder.random_weights(config, seed=0)
    options = LoadOptions(device="cpu", budget_bytes=budget_bytes)
    encoder = GigaPathSlideEncoder.from_state_dict(
        weights, config=config, options=options
    )
    tiles = np.random.default_rng(0).standard_normal(
        (num_tiles, 1536), dtype=np.float32
    )
    coords = tissue_cells(num_tiles) * TILE_PX_L0
    give_back_freed_memory()
    return encoder, tiles, coords


def encode(state: State, *, num_tiles: int, budget_bytes: int) -> float:
    """First value of the embedding."""
    encoder, tiles, coords = state
    return float(encoder.encode(tiles, coords, tile_px_l0=TILE_PX_L0)[0])


if __name__ == "__main__":
    main()
