"""How fast and in how much memory are tiles read, next to OpenSlide and to the machine's limit?

A mosaic of real tissue comes first, a generated slide beside it, and the mosaic in JPEG with 4:2:0
chroma (`benchmarks/mosaic.py`). The ordinary job: 256 px tiles at 0.5 µm/px from a scan of 0.252
µm/px with levels 1, 4 and 16, against OpenSlide with Pillow's Lanczos, and against two limits: each
JPEG segment read and decoded once and the bare kernel, without and with the copies from segments
into tiles. Then tiles at the file's own resolution, and `--resample fast` and what it changes. Of
the real slide, too: figures by content (glass, smooth, crowded), two threads, tiles that cut
segments of 240 and 512 px, the stream's peak on 1, 4 and 16 times the area, and the stream into the
default encoder against that encoder on batches in memory. Every way runs in a process of its own
(`benchmarks/reading_ways.py`).
It takes 15 minutes of one idle core.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import mosaic
from benchmarks.harness import arguments, finish
from benchmarks.reading_ways import (
    CONTENTS,
    difference,
    fast_difference,
    retile,
)
from thinsection.testing import Measured, run_and_measure
from thinsection.testing.synthetic import write_he_slide

MODULE = "benchmarks.reading_ways"
# what each way opens before it is measured
WAYS = {
    "openslide_loop": "opened",
    "limit_of": "opened",
    "limit_with_copies": "opened_with_copies",
    "stream": "opened",
}
MPP = 0.252  # of level 0
HALF, NATIVE = "0.5", "native"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is done."""

    size: tuple[int, int]  # of the slides, px
    small: tuple[int, int]  # of the slide whose segments are cut anew, px
    areas: tuple[tuple[int, int], ...]  # px: 1, 4 and 16 times an area
    times: int  # measurements of each way
    every: int  # one tile in so many is compared with OpenSlide's
    compared: int  # tiles of exact and fast
    encoded: int  # tiles for the default encoder


FULL = Scale(
    size=(20_000, 16_000),
    small=(8192, 6144),
    areas=((10_000, 8_000), (20_000, 16_000), (40_000, 32_000)),
    times=3,
    every=40,
    compared=50,
    encoded=320,
)
SMOKE = Scale(
    size=(4096, 3072),
    small=(2048, 1536),
    areas=((1024, 1024), (2048, 2048)),
    times=1,
    every=7,
    compared=8,
    encoded=64,
)


def measure(function: str, *, times: int, setup: str, **kwargs: Any) -> Row:
    """Median over fresh processes: tiles/s by wall clock and by CPU time, and peak RSS."""
    return summary(
        [run_and_measure(MODULE, function, setup=setup, **kwargs) for _ in range(times)]
    )


def summary(runs: Sequence[Measured]) -> Row:
    """The run with the median rate, and the highest peak."""
    runs = sorted(runs, key=rate_of)
    middle = runs[len(runs) // 2]
    return {
        "tiles": middle.result,
        "tiles_per_s": round(middle.result / middle.seconds, 1),
        "tiles_per_cpu_s": round(rate_of(middle), 1),
        "tiles_per_cpu_s_all": [round(rate_of(run), 1) for run in runs],
        "peak_rss_mb": round(max(run.peak_bytes for run in runs) / 1e6, 1),
    }


def rate_of(run: Measured) -> float:
    """Tiles per CPU-second."""
    return float(run.result / run.cpu_seconds)


def against(
    path: Path, mpp: str, *, times: int, threads: int = 1, content: str = ""
) -> Row:
    """OpenSlide, two limits and our stream on the same tiles, with the same number of threads.

    They run in turns, as a shared machine may change its speed within a minute. A ratio is the
    median over turns.
    """
    known = {"path": str(path), "mpp": mpp, "threads": threads, "content": content}
    turns = [
        [
            run_and_measure(MODULE, way, setup=setup, **known)
            for way, setup in WAYS.items()
        ]
        for _ in range(times)
    ]
    found: Row = {way: summary(runs) for way, runs in zip(WAYS, zip(*turns))}
    over_loop, over_limit, over_copies = (
        [rate_of(turn[-1]) / rate_of(turn[other]) for turn in turns]
        for other in range(3)
    )
    found["stream_over_openslide_tiles_per_cpu_s"] = round(median(over_loop), 2)
    found["stream_over_limit_tiles_per_cpu_s"] = round(median(over_limit), 3)
    found["stream_over_limit_with_copies"] = round(median(over_copies), 3)
    found["stream_over_limit_all"] = [round(ratio, 3) for ratio in sorted(over_limit)]
    return found


def fast(path: Path, exact: Row, scale: Scale) -> Row:
    """`--resample fast`: its rate against the exact tiles' and OpenSlide's, and what it changes."""
    found = measure(
        "stream",
        times=scale.times,
        setup="opened_fast",
        path=str(path),
        mpp=HALF,
        threads=1,
        content="",
    )
    rate = found["tiles_per_cpu_s"]
    for name, other in (("openslide", "openslide_loop"), ("exact", "stream")):
        ratio = rate / exact[other]["tiles_per_cpu_s"]
        found[f"stream_over_{name}_tiles_per_cpu_s"] = round(ratio, 2)
    # at twice the µm/px of level 0 both ways cover the same px
    found["difference"] = fast_difference(str(path), str(2 * MPP), scale.compared)
    return found


def of_slide(path: Path, scale: Scale) -> Row:
    """Figures of one slide on one thread; pixels are checked before anything is timed."""
    found: Row = {"difference_at_half": difference(str(path), HALF, scale.every)}
    assert found["difference_at_half"]["max"] <= 2, found
    assert difference(str(path), NATIVE, 4 * scale.every)["max"] == 0
    found |= speeds(path, scale)
    found["fast"] = fast(path, found["half_1_threads"], scale)
    return found


def speeds(path: Path, scale: Scale) -> Row:
    """The stream beside OpenSlide and the limits, resampled and not, and the parts of the limit."""
    found: Row = {}
    for name, mpp in (("half", HALF), ("native", NATIVE)):
        found[f"{name}_1_threads"] = against(path, mpp, times=scale.times)
        found[f"{name}_limit_ms"] = measure_parts(path, mpp)
    return found


def measure_parts(path: Path, mpp: str) -> Row:
    """CPU-milliseconds a tile of the parts of the limit: reading, decoding, the kernel."""
    known = {"path": str(path), "mpp": mpp, "threads": 1, "content": ""}
    run = run_and_measure(MODULE, "parts_of_limit", setup="opened", **known)
    return {name: round(1e3 * value, 4) for name, value in dict(run.result).items()}


def of_first(folder: Path, path: Path, kind: str, scale: Scale) -> Row:
    """What is measured on the first slide alone."""
    found: Row = {"half_2_threads": against(path, HALF, times=scale.times, threads=2)}
    for content in CONTENTS:
        found[f"half_{content}"] = against(
            path, HALF, times=scale.times, content=content
        )
    small = write(kind, folder / "small.svs", scale.small)
    for edge in (240, 512):
        other = folder / f"segments-{edge}.tif"
        retile(small, other, edge)
        assert difference(str(other), NATIVE, scale.every)["max"] == 0
        found[f"native_segments_{edge}"] = against(other, NATIVE, times=scale.times)
    found["areas"] = areas(folder, kind, scale)
    found["default_encoder"] = encoder(path, scale)
    return found


def write(kind: str, path: Path, size: tuple[int, int]) -> Path:
    """Writes one more slide of a kind."""
    if kind == mosaic.REAL:
        mosaic.write_mosaic(path, size, mpp=MPP)
    else:
        write_he_slide(path, size, seed=1, mpp=MPP)
    return path


def areas(folder: Path, kind: str, scale: Scale) -> list[Row]:
    """Rate and peak of the stream over whole slides of growing area."""
    known = {"setup": "opened", "mpp": HALF, "threads": 1, "content": ""}
    found: list[Row] = []
    for number, size in enumerate(scale.areas):
        path = write(kind, folder / f"area-{number}.svs", size)
        row = measure("stream", times=1, path=str(path), **known)
        path.unlink()
        first = found[0] if found else row
        growth = round(row["peak_rss_mb"] / first["peak_rss_mb"], 3)
        row |= {"times_the_area": 4**number, "slide_px": size}
        found.append(row | {"peak_over_the_first": growth})
    return found


def encoder(path: Path, scale: Scale) -> Row:
    """The stream into the default encoder against that encoder on batches in memory."""
    known = {"path": str(path), "limit": scale.encoded, "setup": "loaded"}
    memory = measure("encode_memory", times=scale.times, **known)
    streamed = measure("encode_stream", times=scale.times, **known)
    ratio = round(streamed["tiles_per_cpu_s"] / memory["tiles_per_cpu_s"], 3)
    return {"in_memory": memory, "stream": streamed, "ratio": ratio}


def compare(folder: Path, args: argparse.Namespace) -> Row:
    """All figures."""
    scale = SMOKE if args.smoke else FULL
    paths = mosaic.write_slides(folder, "slide", scale.size, mpp=MPP)
    results: Row = mosaic.described(paths, scale.size) | {"times": scale.times}
    for kind, path in paths.items():
        results[kind] = of_slide(path, scale)
    first = next(iter(paths))
    results[first] |= of_first(folder, paths[first], first, scale)
    if first == mosaic.REAL:
        other = folder / "subsampled.svs"
        mosaic.write_mosaic(other, scale.size, mpp=MPP, ycbcr=True)
        results[mosaic.SUBSAMPLED] = speeds(other, scale)
    return results


def main() -> None:
    """Writes the slides, checks, measures, writes the JSON."""
    args = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        finish("bench_reading", compare(Path(folder), args), args)


if __name__ == "__main__":
    main()
