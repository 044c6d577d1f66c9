"""How does the memory of a TITAN slide embedding grow to 62k tiles?

Memory peaks in each of the six blocks alike, and each takes the same time: one block is run.
"""

from typing import Any

import numpy as np

from benchmarks.harness import arguments, finish
from benchmarks.titan_inputs import arithmetic, matmul_rate, measured


def main() -> None:
    """Measures each size in a fresh process; the JSON is written after every one."""
    args = arguments(__doc__ or "")
    sizes = (300, 600) if args.smoke else (2_000, 8_000, 16_000, 33_000, 62_000)
    rate = matmul_rate()
    results: dict[str, Any] = {"matmul_gflops_one_thread": rate, "one_block": []}
    for num_tiles in sizes:
        row = measured(num_tiles, "auto", blocks=1)
        results["one_block"].append({**row, **arithmetic(row, rate)})
        if len(results["one_block"]) > 1:
            results["memory_fit"] = memory_fit(results["one_block"])
            if not args.smoke:
                finish("bench_titan_large", results, args)
    finish("bench_titan_large", results, args)


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


if __name__ == "__main__":
    main()
