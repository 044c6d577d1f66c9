"""What does a tile cost a training: from the stream, by number in random order, by OpenSlide?

All ways read the same tiles of the same slides, one after the other in one process: `stream` is
`TileDataset`, `batch` its map-style dataset asked for 64 random tiles at a time (as a DataLoader
does), `single` the same one tile at a time, `openslide` and `openslide_in_order` OpenSlide with
Pillow's Lanczos filter. CPU-seconds count all threads.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import openslide
from PIL import Image

import thinsection as ts
from benchmarks.harness import arguments, finish
from benchmarks.mosaic import described, write_slides
from thinsection.testing import run_and_measure
from thinsection.types import RgbArray

MODULE = "benchmarks.bench_tile_dataset"
WAYS = ("stream", "batch", "single", "openslide", "openslide_in_order")
# µm/px of level 0: tiles are read as they are stored, or resampled
MPP = {"native": 0.5, "resampled": 0.252}
TILE_PX = 256
BATCH = 64
SLIDES = 2


def write_inputs(folder: Path, size: tuple[int, int], mpp: float) -> dict[str, Any]:
    """Writes slides and their tile grids: folder/KIND/results."""
    facts: dict[str, Any] = {}
    for number in range(SLIDES):
        paths = write_slides(folder, f"s{number}", size, mpp=mpp, seed=number)
        facts = described(paths, size)
        for kind, path in paths.items():
            home = folder / kind
            home.mkdir(exist_ok=True)
            path.rename(home / path.name)
    for home in sorted(folder.iterdir()):
        ts.run([home], out=home / "results", until="tiles", tile_px=TILE_PX)
    return facts


def open_dataset(out: str, way: str) -> ts.TileDataset:
    """Opens the dataset before the measurement."""
    return ts.TileDataset(out, memory="256MiB", open_slides=SLIDES)


def read(dataset: ts.TileDataset, out: str, way: str) -> dict[str, float]:
    """Reads every tile; returns tiles, CPU-seconds and the mean of all pixels."""
    tiles = dataset.map_style()
    order = np.random.default_rng(0).permutation(len(tiles)).tolist()
    start = time.process_time()
    total = 0
    if way == "stream":
        total = sum(int(item["image"].sum()) for item in dataset)
    elif way == "batch":
        for first in range(0, len(order), BATCH):
            for item in tiles.__getitems__(order[first : first + BATCH]):
                total += int(item["image"].sum())
    elif way == "single":
        total = sum(int(tiles[index]["image"].sum()) for index in order)
    else:
        total = read_plainly(Path(out), None if way.endswith("order") else order)
    return {
        "tiles": len(tiles),
        "cpu_seconds": time.process_time() - start,
        "mean": total / (len(tiles) * TILE_PX**2 * 3),
    }


def read_plainly(out: Path, order: list[int] | None) -> int:
    """Sum of all pixels, read by OpenSlide as a dataset of one's own would do."""
    results = ts.open_results(out)
    places = []
    slides = {}
    for slide_id in results.slides:
        slides[slide_id] = openslide.OpenSlide(
            results.ledgers[slide_id].slide["slide_path"]
        )
        table = results.tiles(slide_id)
        places += [(slide_id, table.plan, *xy) for xy in table.coords_l0.tolist()]
    total = 0
    for index in order or range(len(places)):
        slide_id, plan, x, y = places[index]
        region = slides[slide_id].read_region((x, y), plan.level, plan.size_lv)
        total += int(resized(region).sum(dtype=np.int64))
    return total


def resized(region: Image.Image) -> RgbArray:
    """Pixels of a region at the size of a tile."""
    size = (TILE_PX, TILE_PX)
    return np.asarray(region.convert("RGB").resize(size, Image.Resampling.LANCZOS))


def measure(size: tuple[int, int]) -> dict[str, Any]:
    """Tiles per CPU-second and peak bytes of each way."""
    rows: dict[str, Any] = {}
    for resolution, mpp in MPP.items():
        with tempfile.TemporaryDirectory() as name:
            rows["slides"] = write_inputs(Path(name), size, mpp)
            for home in sorted(Path(name).iterdir()):
                row = rows[f"{home.name} {resolution}"] = {}
                for way in WAYS:
                    found = run_and_measure(
                        MODULE,
                        "read",
                        setup="open_dataset",
                        out=str(home / "results"),
                        way=way,
                    )
                    rate = found.result["tiles"] / found.result["cpu_seconds"]
                    row[way] = {
                        **found.result,
                        "tiles_per_cpu_s": rate,
                        "peak_bytes": found.growth_bytes,
                    }
                    # another filter, so single values differ
                    assert abs(row[way]["mean"] - row["stream"]["mean"]) < 0.05, row
    return rows


if __name__ == "__main__":
    args = arguments(__doc__ or "")
    finish(
        "bench_tile_dataset",
        measure((1500, 1200) if args.smoke else (12_000, 9_000)),
        args,
    )
