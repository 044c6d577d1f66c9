"""How soon does the viewer show a slide, and what does a tile cost, next to openslide-python?

Screens of 1600 x 1000 px at random places and zooms of one slide, the same for both: ours as the
viewer's server makes them, OpenSlide's by its DeepZoomGenerator (254 px tiles with an overlap of 1,
JPEG of quality 75, as its own deepzoom_server does), alternating, in CPU time. Then the viewer in a
process of its own over HTTP: seconds to the first screen of a pyramid of 100,000 x 100,000 px that
was never opened, latency of tiles that its cache does not hold, and peak memory within --memory.
"""

import http.client
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openslide
import simplejpeg
import tifffile
from openslide.deepzoom import DeepZoomGenerator

from benchmarks.harness import arguments, finish
from thinsection.files.sources import FileSource
from thinsection.slide import open_slide
from thinsection.slide.convert import copied_picture
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import MIB
from thinsection.view.pixels import DeepZoom

SCREEN = (1600, 1000)
EDGE = 256
DESCRIPTION = "Aperio Image Library v12.0.0|MPP = 0.25|AppMag = 40"
MEMORY = "1GiB"
Span = tuple[float, float, float, float]  # x, y, width, height in level-0 px


def repeated(folder: Path, size: int) -> Path:
    """A JPEG pyramid (1, 4, 16, 64) of the segments of a small generated slide, again and again."""
    write_he_slide(folder / "small.svs", (4096, 4096), seed=1, downsamples=(1,))
    path = folder / "big.svs"
    small_path = folder / "small.svs"
    with (
        tifffile.TiffFile(small_path) as small,
        tifffile.TiffWriter(path, bigtiff=True) as big,
    ):
        picture = copied_picture(small.pages[0], FileSource(str(small_path)))
        stored = list(picture.segments())
        for down in (1, 4, 16, 64):
            edge = size // down
            num_tiles = math.ceil(edge / EDGE) ** 2
            tiles = (stored[n * 7919 % len(stored)] for n in range(num_tiles))
            picture.write(
                big,
                tiles,
                shape=(edge, edge, 3),
                description=DESCRIPTION if down == 1 else None,
                subfiletype=None if down == 1 else 1,
            )
    return path


def screens(size: tuple[int, int], count: int, seed: int) -> list[tuple[float, Span]]:
    """(level-0 px per px of the screen, what the screen covers) at random."""
    rng = np.random.default_rng(seed)
    most = math.log2(max(size) / SCREEN[0])
    found = []
    for _ in range(count):
        down = float(2 ** rng.uniform(0, most))
        width, height = SCREEN[0] * down, SCREEN[1] * down
        x, y = (rng.uniform(0, max(1.0, s - e)) for s, e in zip(size, (width, height)))
        found.append((down, (x, y, width, height)))
    return found


def covering(
    span: Span, down: float, tile: tuple[int, int], size: tuple[int, int]
) -> list[Any]:
    """(column, row) of the tiles of a level that a span touches."""
    spans = []
    for start, length, edge, px in zip(span[:2], span[2:], tile, size):
        first, last = (
            int(start / down // edge),
            math.ceil((start + length) / down / edge),
        )
        spans.append(range(max(0, first), min(last, math.ceil(px / edge))))
    return [(column, row) for row in spans[1] for column in spans[0]]


def ours(deep: DeepZoom, down: float, span: Span) -> list[tuple[int, int, int]]:
    """The tiles of a screen: of the coarsest level that is not coarser, as the browser chooses."""
    index = next(
        i for i, lv in enumerate(deep.levels) if lv.downsample <= max(1.0, down) * 1.01
    )
    level = deep.levels[index]
    return [
        (index, *at) for at in covering(span, level.downsample, level.tile, level.size)
    ]


def theirs(
    deep: DeepZoomGenerator, down: float, span: Span
) -> list[tuple[int, tuple[int, int]]]:
    """The same of the DeepZoomGenerator, whose last level is the finest."""
    levels = range(deep.level_count - 1, -1, -1)
    index = next(
        i for i in [*levels][::-1] if 2.0 ** (deep.level_count - 1 - i) <= down * 1.01
    )
    scale = 2.0 ** (deep.level_count - 1 - index)
    size = deep.level_dimensions[index]
    return [(index, at) for at in covering(span, scale, (254, 254), size)]


def per_screen(path: Path, count: int) -> dict[str, Any]:
    """CPU time of the same screens by both, which take turns; px are compared before."""
    slide, other = open_slide(path), openslide.OpenSlide(path)
    deep, generator = DeepZoom(slide), DeepZoomGenerator(other, 254, 1)
    last = len(deep.levels) - 1
    x, y = 3, 2
    region = other.read_region((x * EDGE, y * EDGE), 0, (EDGE, EDGE)).convert("RGB")
    sent = simplejpeg.decode_jpeg(deep.tile(last, x, y))
    np.testing.assert_array_equal(sent, np.asarray(region))

    def made(name: str, wanted: list[Any]) -> tuple[float, int]:
        start = time.process_time()
        for at in wanted:
            if name == "ours":
                deep.tile(*at)
            else:
                generator.get_tile(*at).save(io.BytesIO(), "jpeg", quality=75)
        return time.process_time() - start, len(wanted)

    rows = []
    for n, (down, span) in enumerate(screens(slide.size, count, seed=5)):
        both = {
            "ours": ours(deep, down, span),
            "openslide": theirs(generator, down, span),
        }
        rows.append(
            {name: made(name, both[name]) for name in sorted(both, reverse=n % 2 == 0)}
        )
    found: dict[str, Any] = {}
    for name in ("ours", "openslide"):
        seconds, tiles = (sum(row[name][i] for row in rows) for i in (0, 1))
        found[name] = {
            "cpu_ms_per_screen": round(1e3 * seconds / count, 2),
            "tiles": tiles,
        }
        found[name]["cpu_ms_per_tile"] = round(1e3 * seconds / tiles, 3)
    ratios = [row["openslide"][0] / max(row["ours"][0], 1e-6) for row in rows]
    for unit in ("cpu_ms_per_screen", "cpu_ms_per_tile"):
        found[f"openslide_over_ours_{unit}"] = round(
            found["openslide"][unit] / found["ours"][unit], 2
        )
    found["ratio_of_screens"] = [
        round(f(ratios), 2) for f in (min, statistics.median, max)
    ]
    slide.close()
    return found


def over_http(path: Path, count: int) -> dict[str, Any]:
    """First screen, latency of tiles, and peak memory of the viewer as a person starts it."""
    command = [
        sys.executable,
        "-m",
        "thinsection",
        "view",
        str(path),
        "--memory",
        MEMORY,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        at = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(at.hostname or "", at.port)

        def get(path: str) -> bytes:
            connection.request("GET", at.path + path)
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status == 200, (path, data)
            return data

        base = f"slides/{path.stem}"
        start = time.perf_counter()
        for name in (
            "",
            "static/viewer.css",
            "static/viewer.js",
            "static/openseadragon.min.js",
        ):
            get(name)
        get("slides")
        levels = json.loads(get(base))["levels"]
        counts = [
            [math.ceil(s / t) for s, t in zip(lv["size"], lv["tile"])] for lv in levels
        ]
        first = next(i for i, lv in enumerate(levels) if max(lv["size"]) >= SCREEN[1])
        for column, row in np.ndindex(*counts[first]):
            get(f"{base}/tiles/{first}/{column}/{row}")
        first_s = time.perf_counter() - start
        rng, seconds = np.random.default_rng(9), []
        for _ in range(count):
            index = int(rng.integers(first, len(levels)))
            column, row = (int(rng.integers(most)) for most in counts[index])
            start = time.perf_counter()
            get(f"{base}/tiles/{index}/{column}/{row}")
            seconds.append(time.perf_counter() - start)
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) << 10
    finally:
        process.terminate()
        process.wait()
    worst = sorted(seconds)[math.ceil(0.95 * count) - 1]
    times = {"tile_p95_ms": worst, "tile_median_ms": statistics.median(seconds)}
    found = {"first_screen_s": round(first_s, 3), "peak_rss_mib": round(peak / MIB, 1)}
    return (
        found
        | {name: round(1e3 * value, 2) for name, value in times.items()}
        | {"of": MEMORY}
    )


def main() -> None:
    """Writes the slides, checks, measures."""
    args = arguments(__doc__ or "")
    results: dict[str, Any] = {"load_at_start": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = 16_384 if args.smoke else 100_000
        write_he_slide(
            folder / "he.svs", (6000, 4500) if args.smoke else (24_000, 18_000), seed=2
        )
        results["he"] = per_screen(folder / "he.svs", 6 if args.smoke else 60)
        big = repeated(folder, size)
        results["px"] = size
        results["big"] = per_screen(big, 6 if args.smoke else 60)
        results["http"] = over_http(big, 50 if args.smoke else 2000)
    finish("bench_view", results, args)


if __name__ == "__main__":
    main()
