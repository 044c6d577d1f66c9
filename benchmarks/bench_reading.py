"""How fast and in how much memory are tiles read, next to OpenSlide and to the machine's limit?

The ordinary job comes first: 256 px tiles at 0.5 µm/px from a scan of 0.252 µm/px with levels 1, 4
and 16, against OpenSlide with Pillow's Lanczos, and against the limit: each JPEG segment decoded
once and the bare kernel. Then tiles at the file's own resolution: whole segments of 256 px, and
tiles that cut segments of 240 and 512 px. Then the stream's peak on a slide of four times the area,
and the stream into the default encoder against that encoder on batches in memory. Every way runs
in a process of its own on the same generated slides (`benchmarks/reading_ways.py`).
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, finish
from benchmarks.reading_ways import difference, fast_difference, retile
from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import write_he_slide

MODULE = "benchmarks.reading_ways"
WAYS = ("openslide_loop", "limit_of", "stream")


def measure(function: str, *, times: int, setup: str, **kwargs: Any) -> dict[str, Any]:
    """Median over fresh processes: tiles/s by wall clock and by CPU time, and peak RSS."""
    runs = [
        run_and_measure(MODULE, function, setup=setup, **kwargs) for _ in range(times)
    ]
    runs.sort(key=lambda r: r.result / r.cpu_seconds)
    middle = runs[len(runs) // 2]
    return {
        "tiles": middle.result,
        "tiles_per_s": round(middle.result / middle.seconds, 1),
        "tiles_per_cpu_s": round(middle.result / middle.cpu_seconds, 1),
        "tiles_per_cpu_s_all": [round(r.result / r.cpu_seconds, 1) for r in runs],
        "peak_rss_mb": round(max(r.peak_bytes for r in runs) / 1e6, 1),
    }


def against(path: Path, mpp: str, *, threads: int, smoke: bool) -> dict[str, Any]:
    """OpenSlide, the limit and our stream on the same tiles, with the same number of threads."""
    options: dict[str, Any] = {
        "times": 1 if smoke else 3,
        "setup": "opened",
        "threads": threads,
    }
    options |= {"path": str(path), "mpp": mpp, "limit": 300 if smoke else 10**9}
    found: dict[str, Any] = {way: measure(way, **options) for way in WAYS}
    loop, limit, ours = (found[way] for way in WAYS)
    for unit in ("tiles_per_cpu_s", "tiles_per_s"):
        found[f"stream_over_openslide_{unit}"] = round(ours[unit] / loop[unit], 2)
        found[f"stream_over_limit_{unit}"] = round(ours[unit] / limit[unit], 3)
    return found


def fast(path: Path, exact: dict[str, Any], *, smoke: bool) -> dict[str, Any]:
    """`--resample fast`: its rate against OpenSlide's exact tiles, and what it changes."""
    options: dict[str, Any] = {"path": str(path), "mpp": "0.5", "threads": 1}
    options |= {
        "times": 1 if smoke else 3,
        "setup": "opened_fast",
        "limit": 300 if smoke else 10**9,
    }
    found = measure("stream", **options)
    loop = exact["openslide_loop"]["tiles_per_cpu_s"]
    ratio = round(found["tiles_per_cpu_s"] / loop, 2)
    # at 0.504 both ways cover the same px
    changes = fast_difference(str(path), "0.504", 8 if smoke else 100)
    found |= {"stream_over_openslide_tiles_per_cpu_s": ratio, "difference": changes}
    if (folder := os.environ.get("THINSECTION_TEST_SLIDES")) is not None:
        real = str(Path(folder) / "CMU-1-Small-Region.svs")
        found["difference_on_real_tissue"] = fast_difference(real, "0.998", 100)
    return found


def compare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures; pixels are checked before anything is timed."""
    smoke = args.smoke
    size = (4096, 3072) if smoke else (20_000, 16_000)
    half, plain, big = (folder / name for name in ("half.svs", "plain.svs", "big.svs"))
    write_he_slide(half, size, seed=1, mpp=0.252)
    write_he_slide(plain, size, seed=1)
    write_he_slide(big, (size[0] * 2, size[1] * 2), seed=1, mpp=0.252)
    every = 7 if smoke else 40
    results: dict[str, Any] = {"slide_px": size}
    results["difference_at_half"] = difference(str(half), "0.5", every)
    assert results["difference_at_half"]["max"] <= 1, results
    assert difference(str(plain), "native", every)["max"] == 0
    for name, path, mpp in (("half", half, "0.5"), ("native", plain, "native")):
        for threads in (1, 2):
            found = against(path, mpp, threads=threads, smoke=smoke)
            results[f"{name}_{threads}_threads"] = found
    results["fast"] = fast(half, results["half_1_threads"], smoke=smoke)
    for edge in (240, 512):
        other = folder / f"segments-{edge}.tif"
        retile(plain, other, edge)
        assert difference(str(other), "native", every)["max"] == 0
        results[f"native_segments_{edge}"] = against(
            other, "native", threads=1, smoke=smoke
        )
    options = {"setup": "opened", "mpp": "0.5", "limit": 10**9, "threads": 2}
    large = measure("stream", times=1, path=str(big), **options)
    small = results["half_2_threads"]["stream"]["peak_rss_mb"]
    results["four_times_the_area"] = {
        **large,
        "over": round(large["peak_rss_mb"] / small, 3),
    }
    count = 64 if smoke else 1280
    times = {"times": 1 if smoke else 3, "setup": "loaded"}
    memory = measure("encode_memory", path=str(plain), limit=count, **times)
    streamed = measure("encode_stream", path=str(plain), limit=count, **times)
    ratio = round(streamed["tiles_per_s"] / memory["tiles_per_s"], 3)
    results["default_encoder"] = {
        "in_memory": memory,
        "stream": streamed,
        "ratio": ratio,
    }
    return results


def main() -> None:
    """Generates the slides, checks, measures, writes."""
    args = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        finish("bench_reading", compare(Path(folder), args), args)


if __name__ == "__main__":
    main()
