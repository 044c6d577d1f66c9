"""Is an exact, bounded search as fast as torch.cdist + topk, and within its budget?

Each row is a process of its own. `cdist` forms the whole matrix; `cdist_rows` forms as many rows at
a time as the budget holds. Neighbours are checked against float64 differences before timing.
"""

import time
from typing import Any

import torch

from benchmarks.harness import arguments, finish
from thinsection.frames import explain, nearest_neighbors
from thinsection.testing import run_and_measure

MODULE = "benchmarks.bench_neighbors"
K = 8
BUDGET_BYTES = 256 * 2**20
CASES = (
    (5_000, ("auto", "blocks", "kdtree", "cdist", "cdist_rows")),
    (20_000, ("auto", "blocks", "kdtree", "cdist", "cdist_rows")),
    (50_000, ("auto", "cdist_rows")),
    (100_000, ("auto", "cdist_rows")),
    (1_000_000, ("auto",)),
)
SMOKE = ((5_000, ("auto", "cdist_rows")),)
_CHECKED_ROWS = 50


def prepare(num_points: int, impl: str, times: int) -> torch.Tensor:
    """Points; loads libraries and proves the answer on some rows of a smaller set."""
    torch.manual_seed(0)
    points = torch.rand(num_points, 3)
    some = points[:6000]
    distances, indices = _search(some, impl)
    for i in range(_CHECKED_ROWS):
        exact = (some.double() - some[i].double()).square().sum(dim=1).sqrt()
        exact[i] = torch.inf
        order = exact.argsort(stable=True)[:K]
        if not impl.startswith("cdist"):  # its matmul path picks others here and there
            assert torch.equal(indices[i], order), (impl, i)
            torch.testing.assert_close(
                distances[i].double(), exact[order], rtol=1e-6, atol=0
            )
    return points


def search(
    points: torch.Tensor, num_points: int, impl: str, times: int
) -> dict[str, float]:
    """Median seconds of a search."""
    seconds, cpu_seconds = [], []
    for _ in range(times):
        start, cpu = time.perf_counter(), time.process_time()
        _search(points, impl)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
    middle = times // 2
    return {
        "seconds": sorted(seconds)[middle],
        "cpu_seconds": sorted(cpu_seconds)[middle],
    }


def _search(points: torch.Tensor, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    if not impl.startswith("cdist"):
        return nearest_neighbors(points, k=K, impl=impl, budget_bytes=BUDGET_BYTES)
    rows = len(points) if impl == "cdist" else max(1, BUDGET_BYTES // (len(points) * 8))
    found = []
    for start in range(0, len(points), rows):
        matrix = torch.cdist(points[start : start + rows], points)
        matrix[torch.arange(len(matrix)), torch.arange(start, start + len(matrix))] = (
            torch.inf
        )
        found.append(torch.topk(matrix, K, dim=1, largest=False))
    return torch.cat([f.values for f in found]), torch.cat([f.indices for f in found])


def main() -> None:
    args = arguments(__doc__ or "")
    rows: list[dict[str, Any]] = []
    for num_points, impls in SMOKE if args.smoke else CASES:
        reference = None
        for impl in impls:
            times = 3 if num_points <= 50_000 else 1
            settings = {"num_points": num_points, "impl": impl, "times": times}
            measured = run_and_measure(MODULE, "search", setup="prepare", **settings)
            row = {
                **settings,
                **measured.result,
                "peak_beyond_inputs_bytes": measured.growth_bytes,
            }
            if impl == "auto":
                choice = explain(
                    torch.rand(num_points, 3), k=K, budget_bytes=BUDGET_BYTES
                )
                row["took"] = f"{choice.impl}: {choice.reason}"
                reference = row["cpu_seconds"]
            else:
                row["cpu_time_over_auto"] = row["cpu_seconds"] / (reference or 1)
            if not impl.startswith("cdist"):
                result = num_points * K * 16 * 2 + num_points * 36
                assert row["peak_beyond_inputs_bytes"] <= BUDGET_BYTES + result, row
            print(row, flush=True)
            rows.append(row)
    slower = [
        r for r in rows if r["impl"].startswith("cdist") and r["cpu_time_over_auto"] < 1
    ]
    assert args.smoke or not slower, slower
    finish(
        "bench_neighbors", {"k": K, "budget_bytes": BUDGET_BYTES, "rows": rows}, args
    )


if __name__ == "__main__":
    main()
