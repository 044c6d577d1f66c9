"""Is there a faster kernel for tiles at half the resolution, and does it give today's pixels?

Tiles of 512 px of real tissue are reduced to 256 px by an anti-aliased Lanczos filter, on one
thread: by PyTorch's uint8 kernel, as `thinsection` calls it; by the same function with other
layouts and types; by NumPy, as for the first tiles of a process without PyTorch; and by Pillow,
OpenCV and libvips where they are installed. Printed are CPU-milliseconds per tile, the least of 20
passes, and the difference from today's pixels.
"""

import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from benchmarks import mosaic
from benchmarks.harness import arguments, finish
from thinsection.slide import open_slide
from thinsection.slide.lanczos import reduce_tiles
from thinsection.slide.resize import resample
from thinsection.testing.synthetic import write_he_slide

SOURCE_PX = 512
TILE_PX = 256
# corners on tissue of the test slide
CORNERS = ((700, 700), (1100, 900), (600, 1400))
# PyTorch's integer weights for a factor of 2, of 65,536
WEIGHTS = (242, 987, -2228, -4367, 8880, 29254, 29254, 8880, -4367, -2228, 987, 242)
Tiles = npt.NDArray[np.uint8]


def ways() -> dict[str, Callable[[Tiles], Tiles]]:
    """Functions from tiles (b, 512, 512, 3) to tiles (b, 256, 256, 3), by name."""
    lanczos = torch.ops.aten._upsample_lanczos2d_aa
    size = [TILE_PX, TILE_PX]

    def today(tiles: Tiles) -> Tiles:
        out = np.empty((len(tiles), TILE_PX, TILE_PX, 3), np.uint8)
        resample(tiles, out)
        return out

    def planes(tiles: Tiles) -> Tiles:
        source = torch.from_numpy(tiles).permute(0, 3, 1, 2).contiguous()
        return np.asarray(lanczos(source, size, False).permute(0, 2, 3, 1).numpy())

    def floats(tiles: Tiles) -> Tiles:
        source = torch.from_numpy(tiles).permute(0, 3, 1, 2).float()
        out = lanczos(source, size, False).round().clamp(0, 255).byte()
        return np.asarray(out.permute(0, 2, 3, 1).numpy())

    def numpy_(tiles: Tiles) -> Tiles:
        out = np.empty((len(tiles), TILE_PX, TILE_PX, 3), np.uint8)
        reduce_tiles(tiles, out)
        return out

    def pillow(tiles: Tiles) -> Tiles:
        filter_ = Image.Resampling.LANCZOS
        images = [
            Image.fromarray(tile).resize((TILE_PX, TILE_PX), filter_) for tile in tiles
        ]
        return np.stack([np.asarray(image) for image in images])

    found = {
        "PyTorch, uint8, pixels interleaved (today)": today,
        "PyTorch, uint8, planes": planes,
        "PyTorch, float32": floats,
        "NumPy (the first tiles of a process without PyTorch)": numpy_,
        "Pillow": pillow,
    }
    if find_spec("cv2"):
        found |= _opencv()
    if find_spec("pyvips"):
        found["libvips, reduce, lanczos3"] = _vips
    return found


def _opencv() -> dict[str, Callable[[Tiles], Tiles]]:
    """Filters of OpenCV: the separable filter without decimation, and two of `resize`."""
    import cv2

    cv2.setNumThreads(1)
    weights = np.array(WEIGHTS) / 65536

    def filtered(tiles: Tiles) -> Tiles:
        border = cv2.BORDER_REFLECT
        return np.stack(
            [
                cv2.sepFilter2D(
                    tile, -1, weights, weights, anchor=(5, 5), borderType=border
                )[::2, ::2]
                for tile in tiles
            ]
        )

    def resized(kind: int) -> Callable[[Tiles], Tiles]:
        def call(tiles: Tiles) -> Tiles:
            size = (TILE_PX, TILE_PX)
            return np.stack([cv2.resize(t, size, interpolation=kind) for t in tiles])

        return call

    return {
        "OpenCV, sepFilter2D with these weights": filtered,
        "OpenCV, resize, INTER_LANCZOS4 (no anti-aliasing)": resized(
            cv2.INTER_LANCZOS4
        ),
        "OpenCV, resize, INTER_AREA (mean of 2 x 2)": resized(cv2.INTER_AREA),
    }


def _vips(tiles: Tiles) -> Tiles:
    import pyvips

    pyvips.cache_set_max(0)
    images = []
    for tile in tiles:
        height, width, bands = tile.shape
        image = pyvips.Image.new_from_memory(tile.data, width, height, bands, "uchar")
        images.append(image.reduce(2, 2, kernel="lanczos3").numpy())
    return np.stack(images)


def least_ms(call: Callable[[], object], times: int) -> float:
    """Fewest CPU-milliseconds of a call, after one that does not count."""
    call()
    spent = []
    for _ in range(times):
        start = time.process_time()
        call()
        spent.append(time.process_time() - start)
    return 1000 * min(spent)


def source_tiles() -> tuple[Tiles, str]:
    """Tiles of real tissue, or of a generated slide where the test slide is not there."""
    size = (SOURCE_PX, SOURCE_PX)
    with tempfile.TemporaryDirectory() as folder:
        path = mosaic.source()
        tissue = mosaic.REAL
        if path is None:
            path = Path(folder) / "generated.svs"
            write_he_slide(path, (2220, 2967))
            tissue = mosaic.GENERATED
        with open_slide(path) as slide:
            tiles = [slide.read_region(corner, 0, size) for corner in CORNERS]
    return np.stack(tiles), tissue


def main() -> None:
    """All ways."""
    args = arguments(__doc__ or "")
    torch.set_num_threads(1)
    tiles, tissue = source_tiles()
    results: dict[str, Any] = {}
    expected: Tiles | None = None
    for name, reduce in ways().items():
        reduced = reduce(tiles)
        if expected is None:
            expected = reduced
        error = np.abs(reduced.astype(int) - expected)
        ms = least_ms(lambda: reduce(tiles), 2 if args.smoke else 20) / len(tiles)  # noqa: B023
        results[name] = {
            "ms_per_tile": ms,
            "most_difference": int(error.max()),
            "mean_difference": float(error.mean()),
        }
        print(name, results[name], flush=True)
    finish("bench_resample", {"tissue": tissue, "ways": results}, args)


if __name__ == "__main__":
    main()
