"""Do features on disk cost a score, time or memory? The cache against features in RAM.

Rows of 1024 x 1024 values (4 MiB in float32), full float32 mantissas and bf16-exact ones. Every
figure comes from a process of its own: `growth` is its peak RSS beyond what it had after imports.
A training step of a linear head runs beside the reads; `wait` is the time that it waited for data.
"""

import os
import tempfile
from typing import Any

import numpy as np
import psutil

from benchmarks.cache_processes import BATCH
from benchmarks.harness import arguments, finish
from thinsection.testing import Measured, run_and_measure
from thinsection.types import GIB, MIB

ROW, SMOKE_ROW = (1024, 1024), (256, 256)
RAM_LIMIT = 0.6  # of the host: what the RAM way may take here, beside others
MODULE = "benchmarks.cache_processes"


def figures(measured: Measured) -> dict[str, Any]:
    """The plain figures of one process."""
    found = dict(measured.result)
    if "losses" in found:
        found["last_loss"] = found.pop("losses")[-1]
    return {**found, "growth_mib": round(measured.growth_bytes / MIB)}


def write_case(
    n: int, kind: str, row: tuple[int, ...], root: str, budget: int
) -> dict[str, Any]:
    """Writing beyond what generating the features costs."""
    common: dict[str, Any] = {"setup": "prepare", "n": n, "row": row, "kind": kind}
    alone = run_and_measure(MODULE, "generate", **common)
    both = run_and_measure(MODULE, "write", root=root, budget=budget, **common)
    float32_mb = n * int(np.prod(row)) * 4 / 1e6
    return {
        "file_mb": both.result / 1e6,
        "generate_s": alone.seconds,
        "generate_and_write_s": both.seconds,
        "write_cpu_s": both.cpu_seconds - alone.cpu_seconds,
        "write_mb_per_cpu_s": float32_mb
        / max(both.cpu_seconds - alone.cpu_seconds, 1e-9),
        "growth_mib": round(both.growth_bytes / MIB),
        "growth_over_budget": both.growth_bytes / budget,
    }


def compare(
    n: int, kind: str, row: tuple[int, ...], root: str, budget: int, *, rounds: int
) -> dict[str, Any]:
    """One size and kind: writing and reading in bounded memory; equality and rates to RAM.

    Where `rounds` is not 0, training from either is timed that many times.
    """
    case: dict[str, Any] = {"n": n, "kind": kind, "budget_mib": budget / MIB}
    case["write"] = write_case(n, kind, row, root, budget)
    common: dict[str, Any] = {"setup": "prepare", "n": n, "row": row, "kind": kind}
    disk = {"root": root, "budget": budget, **common}
    read = run_and_measure(MODULE, "read_cache", trains=False, **disk)
    case["cache_read"] = figures(read)
    case["cache_growth_over_budget"] = read.growth_bytes / budget
    assert max(read.growth_bytes, case["write"]["growth_mib"] * MIB) <= 1.1 * budget, (
        case
    )
    for reuses in (False, True):
        mapped = run_and_measure(
            MODULE, "read_memmap", root=root, reuses=reuses, **common
        )
        assert mapped.result["sha256"] == read.result["sha256"]
        way = "memmap_read_into_one_array" if reuses else "memmap_read"
        case[way] = figures(mapped)
    needed = 2 * n * int(np.prod(row)) * 4
    if needed > RAM_LIMIT * psutil.virtual_memory().total:
        case["ram"] = {
            "not_run": "the list and its concatenation together do not fit beside others",
            "needs_gib": needed / GIB,
            "host_gib": psutil.virtual_memory().total / GIB,
        }
        return case
    plain = run_and_measure(MODULE, "read_ram", dtype="float32", trains=False, **common)
    half = run_and_measure(MODULE, "read_ram", dtype="float16", trains=False, **common)
    assert read.result["sha256"] == plain.result["sha256"], (
        "the cache must keep every bit"
    )
    case["ram_read"], case["ram_float16_read"] = figures(plain), figures(half)
    case["float16_is_equal"] = half.result["sha256"] == plain.result["sha256"]
    case["cpu_read_rate_to_ram"] = (
        read.result["read_mb_per_cpu_s"] / plain.result["read_mb_per_cpu_s"]
    )
    if rounds:
        case["training"] = compare_training(common, disk, budget, rounds=rounds)
    return case


def compare_training(
    common: dict[str, Any], disk: dict[str, Any], budget: int, *, rounds: int
) -> dict[str, Any]:
    """An epoch from the cache and from RAM, in turns; the quickest of each counts."""
    alone = run_and_measure(MODULE, "model_alone", **common)
    cached, plain = [], []
    for _ in range(rounds):
        cached.append(run_and_measure(MODULE, "read_cache", trains=True, **disk))
        plain.append(
            run_and_measure(MODULE, "read_ram", dtype="float32", trains=True, **common)
        )
    best = {
        name: min(runs, key=lambda m: float(m.result["train_s"]))
        for name, runs in (("cache", cached), ("ram", plain))
    }
    a, b = best["cache"].result, best["ram"].result
    assert a["losses"] == b["losses"], "losses must agree to the bit"
    beyond = max(m.growth_bytes for m in cached) - alone.growth_bytes
    assert beyond <= 1.1 * budget, beyond
    return {
        "cache": figures(best["cache"]),
        "ram": figures(best["ram"]),
        "losses_are_equal": True,
        "model_alone_growth_mib": round(alone.growth_bytes / MIB),
        "cache_growth_beyond_model_over_budget": beyond / budget,
        "wait_rate_to_ram_gather": b["wait_s"] / a["wait_s"],
        "train_time_to_ram": a["train_s"] / b["train_s"],
        "train_cpu_to_ram": a["train_cpu_s"] / b["train_cpu_s"],
        "train_s_of_all_rounds": {
            "cache": [m.result["train_s"] for m in cached],
            "ram": [m.result["train_s"] for m in plain],
        },
    }


def main() -> None:
    """Measures; raises where a bit or the budget is broken."""
    args = arguments(__doc__.splitlines()[0])
    row = SMOKE_ROW if args.smoke else ROW
    budget = 32 * MIB if args.smoke else GIB // 2
    parent = os.environ.get("THINSECTION_BENCH_DIR")
    cases = []
    full = ((400, "fp32", 2), (400, "bf16", 0), (4000, "fp32", 0))
    for n, kind, rounds in ((128, "fp32", 0),) if args.smoke else full:
        with tempfile.TemporaryDirectory(dir=parent) as root:
            cases.append(compare(n, kind, row, root, budget, rounds=rounds))
        print(cases[-1], flush=True)
    finish("bench_cache", {"row": row, "batch": BATCH, "cases": cases}, args)


if __name__ == "__main__":
    main()
