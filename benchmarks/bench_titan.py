"""How much time and memory does a TITAN slide embedding take without the N x N bias?

Published way (and slide2vec's row chunks, from the unpacked wheels that THINSECTION_TEST_PEERS
names) against ours at 2k to 12k tiles, one attention layer against SDPA with a ready-made bias,
accuracy against float64; and, where there is a CUDA device, the kernel against FlexAttention
and a dense float16 bias. `bench_slide_encoders` goes on to 100,000 tiles.
"""

from typing import Any

import numpy as np
import torch
from tests.support.plain_titan import BiasWay, plain_titan

from benchmarks.harness import arguments, finish
from benchmarks.titan_inputs import (
    DIM,
    HEADS,
    MODULE,
    TILE_PX_L0,
    arithmetic,
    matmul_rate,
    matmul_rates,
    measured,
    slide,
    slide2vec_rows,
    slide2vec_source,
    titan_of,
)
from thinsection.pool import TitanSlideEncoder
from thinsection.testing import run_and_measure
from thinsection.types import MIB

TURNS, MANY_TURNS = 2, 8_000  # tiles up to which there are so many turns
NO_SLIDE2VEC = (
    "not run: THINSECTION_TEST_PEERS names no folder with slide2vec, or a larger size"
)
MAX_ABS, MIN_COSINE = 1e-5, 1 - 1e-10


def main() -> None:
    """Checks accuracy first, then measures; the JSON is written after every stage."""
    args = arguments(__doc__ or "")
    sizes = (200,) if args.smoke else (2_000, 4_000, 8_000, 12_000)
    results: dict[str, Any] = {"accuracy": accuracy(100 if args.smoke else 2_000)}
    results["matmul_gflops_one_thread"] = matmul_rates()
    results["against_published"] = []
    for num_tiles in sizes:
        results["against_published"].append(against_published(num_tiles))
        if not args.smoke:
            finish("bench_titan", results, args)
    results["one_layer_against_sdpa"] = [against_sdpa(n) for n in sizes[:3]]
    finish("bench_titan", results, args)


def accuracy(num_tiles: int) -> dict[str, Any]:
    """Pooled embedding against float64: ours, and what others do to the bias."""
    weights = TitanSlideEncoder.random_weights(seed=0)
    tiles, coords = slide(num_tiles)
    tensors = torch.from_numpy(tiles), torch.from_numpy(coords)
    exact = plain_titan(weights, *tensors, TILE_PX_L0, dtype=torch.float64).numpy()
    rows = {}
    for precision in ("fp32", "bf16"):
        ours = titan_of("auto" if precision == "fp32" else precision)
        rows[f"ours {precision}"] = ours.encode(tiles, coords, tile_px_l0=TILE_PX_L0)
    ways: tuple[BiasWay, ...] = ("float32", "float16", "cdist")
    for way in ways:
        plain = plain_titan(
            weights, *tensors, TILE_PX_L0, dtype=torch.float32, bias_way=way
        )
        rows[f"dense bias {way}"] = plain.numpy()
    if slide2vec_source() is not None:
        plain = plain_titan(
            weights, *tensors, TILE_PX_L0, dtype=torch.float32, attend_of=slide2vec_rows
        )
        rows["slide2vec row chunks"] = plain.numpy()
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


def against_published(num_tiles: int) -> dict[str, Any]:
    """The published way, ours, and ours with bfloat16 products, in turns; the quickest counts."""
    ways = ("published", "auto", "bf16")
    if with_slide2vec(num_tiles):
        ways = (*ways, "slide2vec")
    count = TURNS if num_tiles <= MANY_TURNS else 1
    turns = [[measured(num_tiles, way) for way in ways] for _ in range(count)]
    published, ours, low, *rows = (
        min(runs, key=lambda r: float(r["cpu_s"])) for runs in zip(*turns, strict=True)
    )
    rate = matmul_rate()
    return {
        "num_tiles": num_tiles,
        "matmul_gflops_now": rate,
        "ours_arithmetic": arithmetic(ours, rate),
        "published": published,
        "ours": ours,
        "ours_bf16": low,
        "slide2vec_row_chunks": rows[0] if rows else NO_SLIDE2VEC,
        "cpu_time_ratio_slide2vec": rows[0]["cpu_s"] / ours["cpu_s"] if rows else None,
        "cpu_s_of_all_turns": [[row["cpu_s"] for row in turn] for turn in turns],
        "cpu_time_ratio": published["cpu_s"] / ours["cpu_s"],
        "cpu_time_ratio_bf16": published["cpu_s"] / low["cpu_s"],
        "peak_rss_ratio": published["peak_rss_mib"] / ours["peak_rss_mib"],
        "peak_beyond_inputs_ratio": published["peak_beyond_inputs_mib"]
        / max(1.0, ours["peak_beyond_inputs_mib"]),
    }


def with_slide2vec(num_tiles: int) -> bool:
    """Whether slide2vec's row chunks run beside; at sizes with several turns."""
    return slide2vec_source() is not None and num_tiles <= MANY_TURNS


def against_sdpa(num_tiles: int) -> dict[str, Any]:
    """One attention layer: ours against SDPA with a ready-made bias, and the building of it."""
    common: dict[str, Any] = {
        "setup": "set_up_layer",
        "num_tiles": num_tiles,
        "heads": HEADS,
    }
    ours = run_and_measure(MODULE, "layer", way="ours", **common)
    sdpa = run_and_measure(MODULE, "layer", way="sdpa", **common)
    row = {"num_tiles": num_tiles, "ours_cpu_s": ours.cpu_seconds, **sdpa.result}
    row["ours_beyond_inputs_mib"] = ours.growth_bytes / MIB
    row["sdpa_beyond_inputs_mib"] = sdpa.growth_bytes / MIB
    row["ratio_to_sdpa_and_build"] = (row["build_cpu_s"] + row["sdpa_cpu_s"]) / row[
        "ours_cpu_s"
    ]
    row["ratio_to_sdpa_alone"] = row["sdpa_cpu_s"] / row["ours_cpu_s"]
    assert (
        abs(row.pop("checksum") - ours.result["checksum"])
        < 1e-6 * num_tiles * HEADS * DIM
    )
    return row


if __name__ == "__main__":
    main()
