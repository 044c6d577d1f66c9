"""How near does the TIFF reader come to bare decoding of the same JPEG tiles, in one thread?

`python -m benchmarks.bench_segments [--smoke]`. CPU-seconds, so that other work on the machine
matters little. Every block is compared with OpenSlide's before it is timed.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import tifffile

from benchmarks.harness import arguments, finish
from thinsection.slide import Slide, open_slide
from thinsection.testing.synthetic import write_he_slide
from thinsection.types import Size

TILE_PX = 256
BLOCKS: tuple[Size, ...] = ((256, 256), (256, 1024), (1024, 1024), (2048, 256))


def tiles_per_cpu_second(
    function: Callable[[], None], tiles: int, *, times: int = 5
) -> float:
    """Median over `times` calls after one that is not counted."""
    function()
    rates = []
    for _ in range(times):
        start = time.process_time()
        function()
        rates.append(tiles / (time.process_time() - start))
    return statistics.median(rates)


def encoded_tiles(path: Path, edge: int) -> list[bytes]:
    """The JPEG streams of the level-0 tiles in the top-left square of `edge` px."""
    with tifffile.TiffFile(path) as tiff:
        page: Any = tiff.pages[0]
        columns = -(-page.imagewidth // TILE_PX)
        across = range(edge // TILE_PX)
        wanted = [row * columns + column for row in across for column in across]
        data = path.read_bytes()
        spans = ((page.dataoffsets[i], page.databytecounts[i]) for i in wanted)
        return [data[offset : offset + count] for offset, count in spans]


def read_blocks(slide: Slide, block: Size, edge: int) -> Callable[[], None]:
    """A function that reads the square block by block into one array."""
    out = np.empty((block[1], block[0], 3), np.uint8)

    def read() -> None:
        for top in range(0, edge, block[1]):
            for left in range(0, edge, block[0]):
                slide.read_region((left, top), 0, block, out=out)

    return read


def main() -> None:
    """Prints and writes tiles per CPU-second and the ratios."""
    args = arguments(__doc__ or "")
    edge = 2048 if args.smoke else 8192
    tiles = (edge // TILE_PX) ** 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "he.svs"
        write_he_slide(path, (edge, edge), seed=1)
        streams = encoded_tiles(path, edge)
        buffer = np.empty((TILE_PX, TILE_PX, 3), np.uint8)

        def bare() -> None:
            for stream in streams:
                simplejpeg.decode_jpeg(stream, "RGB", buffer=buffer)

        with (
            open_slide(path, reader="tiff") as slide,
            open_slide(path, reader="openslide") as reference,
        ):
            for origin in ((0, 0), (edge // 2, edge // 4)):
                ours = slide.read_region(origin, 0, (1024, 1024))
                assert np.array_equal(
                    ours, reference.read_region(origin, 0, (1024, 1024))
                )
            results: dict[str, Any] = {
                "tiles": tiles,
                "bare": tiles_per_cpu_second(bare, tiles),
            }
            for block in BLOCKS:
                rate = tiles_per_cpu_second(read_blocks(slide, block, edge), tiles)
                results[f"tiff {block[0]}x{block[1]}"] = {
                    "tiles_per_cpu_s": rate,
                    "of_bare": rate / results["bare"],
                }
            plain = read_blocks(reference, (TILE_PX, TILE_PX), edge)
            results["openslide 256x256"] = tiles_per_cpu_second(plain, tiles, times=3)
    finish("bench_segments", results, args)


if __name__ == "__main__":
    main()
