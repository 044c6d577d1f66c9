"""What do the measures of a tile cost beside encoding it?

CPU time of one thread, the ways alternating over the same tiles of 256 px of a generated slide; the
encoder is the default one by torch in fp32, with seeded weights.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import arguments, finish
from thinsection.encode import load_encoder
from thinsection.slide import open_slide
from thinsection.slide.resize import read_tiles
from thinsection.stages.config import EncodeConfig
from thinsection.testing.synthetic import write_he_slide
from thinsection.tiles import TilesConfig, tile_grid
from thinsection.tiles.filters import FOCUS, MEASURES, measure_tiles


def check(tiles: np.ndarray) -> None:
    """Colours against NumPy's own means and deviations."""
    found, px = (
        measure_tiles(tiles),
        tiles.reshape(len(tiles), -1, 3).astype(np.float64),
    )
    want = np.concatenate(
        [px.mean(axis=1), px.std(axis=1), px.min(axis=1), px.max(axis=1)], axis=1
    )
    np.testing.assert_allclose(found[:, :12], want, rtol=1e-6, atol=1e-6)


def main() -> None:
    """Milliseconds of CPU time a tile, median, lowest and highest."""
    args = arguments(__doc__)
    torch.set_num_threads(1)
    times, edge = (1, 1024) if args.smoke else (7, 3072)
    encoder = load_encoder(EncodeConfig().encoders[0], pretrained=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.svs"
        write_he_slide(path, (edge, edge), seed=1, downsamples=(1,))
        with open_slide(path) as slide:
            config = TilesConfig(tile_mpp="native")
            table = tile_grid(slide, config).select(
                np.arange(min(64, (edge // 256) ** 2))
            )
            tiles = np.empty((len(table), 256, 256, 3), dtype=np.uint8)
            ways: dict[str, Callable[[], Any]] = {
                "measures": lambda: measure_tiles(tiles),
                "measures_without_focus": lambda: measure_tiles(
                    tiles, tuple(name for name in MEASURES if name != FOCUS)
                ),
                "encode": lambda: encoder.encode(torch.from_numpy(tiles)),
            }
            read_tiles(slide, table.plan, table.coords_l0, tiles)
            check(tiles)
            spent: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(times + 1):
                for name, way in ways.items():
                    start = time.process_time()
                    way()
                    if turn or args.smoke:  # the first turn warms up
                        ms = (time.process_time() - start) / len(tiles) * 1e3
                        spent[name].append(ms)
    results: dict[str, Any] = {
        name: {"median_ms": statistics.median(s), "min_ms": min(s), "max_ms": max(s)}
        for name, s in spent.items()
    }
    results["measures_of_encode"] = (
        results["measures"]["median_ms"] / results["encode"]["median_ms"]
    )
    finish(
        "bench_measures",
        results | {"engine": encoder.engine, "num_tiles": len(tiles)},
        args,
    )


if __name__ == "__main__":
    main()
