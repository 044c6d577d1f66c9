"""How fast and in how much memory are tiles read, next to OpenSlide and to bare decoding?

Every way runs in a process of its own on the same generated slide: (a) a plain OpenSlide loop,
bare decoding of the file's JPEG tiles by simplejpeg, and our stream with an encoder that does
nothing, each with the same number of threads; (b) the stream's peak memory, also on a slide of
four times the area; (c) the stream with the default encoder against that encoder on batches in
memory.
"""

import argparse
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import arguments, finish
from thinsection.slide import open_slide
from thinsection.stream import StreamConfig, iter_tiles
from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import TilesConfig, TileTable, tile_grid

MODULE = "benchmarks.bench_reading"
BATCH = 32  # the default on a CPU


def table_of(path: str) -> TileTable:
    """The whole grid of 256 px tiles."""
    with open_slide(path) as slide:
        return tile_grid(slide, TilesConfig())


def checksum(path: str, every: int) -> bool:
    """Whether the stream's tiles equal OpenSlide's, to the bit, for every n-th tile."""
    table = table_of(path)
    table = table.select(np.arange(0, len(table), every))
    with open_slide(path, reader="openslide") as reference, open_slide(path) as slide:
        for batch in iter_tiles(slide, table, batch_size=BATCH):
            for (x, y), tile in zip(batch.coords_l0.tolist(), batch.tiles):
                if (reference.read_region((x, y), 0, (256, 256)) != tile).any():
                    return False
    return True


def opened(path: str, limit: int, threads: int) -> dict[str, Any]:
    """Opened readers, the tile table and the segments: outside the measured part."""
    import openslide
    import tifffile

    table = table_of(path)
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        head = b"\xff\xd8" + (page.jpegtables or b"")[2:-2]
        spans = list(zip(page.dataoffsets, page.databytecounts))[:limit]
    return {
        "table": table.select(np.arange(min(limit, len(table)))),
        "openslide": openslide.OpenSlide(path),
        "ours": open_slide(path),
        "head": head,
        "spans": spans,
    }


def openslide_loop(state: dict[str, Any], path: str, limit: int, threads: int) -> int:
    """Tiles one after the other through openslide-python, as most pipelines do."""
    coords, slide = state["table"].coords_l0.tolist(), state["openslide"]

    def work(part: list[list[int]]) -> None:
        for x, y in part:
            np.asarray(slide.read_region((x, y), 0, (256, 256)).convert("RGB"))

    _spread(work, coords, threads)
    return len(coords)


def bare_decoding(state: dict[str, Any], path: str, limit: int, threads: int) -> int:
    """The file's JPEG tiles, read and decoded by simplejpeg into batches: the limit."""
    import simplejpeg

    head, spans = state["head"], state["spans"]

    def work(part: list[tuple[int, int]]) -> None:
        out = np.empty((BATCH, 256, 256, 3), np.uint8)
        with Path(path).open("rb") as file:
            for index, (offset, count) in enumerate(part):
                file.seek(offset + 2)
                data = head + file.read(count - 2)
                simplejpeg.decode_jpeg(data, "RGB", buffer=out[index % BATCH])

    _spread(work, spans, threads)
    return len(spans)


def stream(state: dict[str, Any], path: str, limit: int, threads: int) -> int:
    """Our stream, each batch dropped as it comes."""
    config = StreamConfig(decode_workers=threads)
    batches = iter_tiles(state["ours"], state["table"], batch_size=BATCH, config=config)
    return sum(len(batch) for batch in batches)


def loaded(path: str, limit: int) -> dict[str, Any]:
    """The default encoder, warm, and a batch in memory."""
    from thinsection.encode import load_encoder

    encoder = load_encoder("efficientnet_lite0", device="cpu")
    tiles = np.random.default_rng(0).integers(0, 256, (32, 256, 256, 3)).astype(np.uint8)
    encoder.encode(tiles)
    table = table_of(path)
    table = table.select(np.arange(min(limit, len(table))))
    return {"encoder": encoder, "tiles": tiles, "table": table, "slide": open_slide(path)}


def encode_stream(state: dict[str, Any], path: str, limit: int) -> int:
    """The stream into the default encoder."""
    from thinsection.encode.embed import embed_tiles

    found, _ = embed_tiles(state["slide"], state["table"], state["encoder"], batch_size=32)
    return len(found)


def encode_memory(state: dict[str, Any], path: str, limit: int) -> int:
    """The default encoder on one batch in memory, again and again."""
    for _ in range(limit // 32):
        state["encoder"].encode(state["tiles"]).cpu().numpy()
    return limit // 32 * 32


def _spread(work: Callable[[list[Any]], None], items: list[Any], threads: int) -> None:
    parts = [items[i::threads] for i in range(threads)]
    running = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def measure(function: str, *, times: int, setup: str, **kwargs: Any) -> dict[str, Any]:
    """Median over fresh processes: tiles/s by wall clock and by CPU time, and peak RSS."""
    runs = []
    for _ in range(times):
        runs.append(run_and_measure(MODULE, function, setup=setup, **kwargs))
    runs.sort(key=lambda r: r.result / r.seconds)
    middle = runs[len(runs) // 2]
    return {
        "tiles": middle.result,
        "tiles_per_s": round(middle.result / middle.seconds, 1),
        "tiles_per_s_all": [round(r.result / r.seconds, 1) for r in runs],
        "tiles_per_cpu_s": round(middle.result / middle.cpu_seconds, 1),
        "peak_rss_mb": round(max(r.peak_bytes for r in runs) / 1e6, 1),
    }


def compare(path: str, big: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    limit, times = (400, 1) if args.smoke else (10**9, 5)
    results: dict[str, Any] = {"pixels_equal_openslide": checksum(path, 7 if args.smoke else 40)}
    assert results["pixels_equal_openslide"]
    for threads in (1, 2):
        found = {
            name: measure(
                name, times=times, setup="opened", path=path, limit=limit, threads=threads
            )
            for name in ("openslide_loop", "bare_decoding", "stream")
        }
        rate = found["stream"]["tiles_per_s"]
        found["stream_over_openslide"] = round(rate / found["openslide_loop"]["tiles_per_s"], 2)
        found["stream_over_bare"] = round(rate / found["bare_decoding"]["tiles_per_s"], 3)
        cpu = found["stream"]["tiles_per_cpu_s"]
        found["stream_over_openslide_cpu"] = round(
            cpu / found["openslide_loop"]["tiles_per_cpu_s"], 2
        )
        found["stream_over_bare_cpu"] = round(cpu / found["bare_decoding"]["tiles_per_cpu_s"], 3)
        results[f"threads_{threads}"] = found
    large = measure("stream", times=1, setup="opened", path=big, limit=limit, threads=2)
    results["four_times_the_area"] = large
    small_peak = results["threads_2"]["stream"]["peak_rss_mb"]
    results["peak_ratio_four_times_the_area"] = round(large["peak_rss_mb"] / small_peak, 3)
    count = 64 if args.smoke else 1280
    options: dict[str, Any] = {"times": 1 if args.smoke else 3, "setup": "loaded"}
    memory = measure("encode_memory", path=path, limit=count, **options)
    streamed = measure("encode_stream", path=path, limit=count, **options)
    results["default_encoder"] = {
        "in_memory": memory,
        "stream": streamed,
        "ratio": round(streamed["tiles_per_s"] / memory["tiles_per_s"], 3),
    }
    return results


def main() -> None:
    """Generates the slides, checks, measures, writes."""
    args = arguments(__doc__ or "")
    size = (4096, 3072) if args.smoke else (20_000, 16_000)
    with tempfile.TemporaryDirectory() as folder:
        path, big = Path(folder) / "slide.svs", Path(folder) / "big.svs"
        write_he_slide(path, size, seed=1)
        write_he_slide(big, (size[0] * 2, size[1] * 2), seed=1)
        results = {"slide_px": size, **compare(str(path), str(big), args)}
    finish("bench_reading", results, args)


if __name__ == "__main__":
    main()
