"""Tiles per CPU-second for every compression that the tiff reader decodes, next to other readers.

`pip install tiffslide pyvips pyvips-binary fastslide`, then
`python -m benchmarks.bench_compressions [--smoke]`. A peer that is not installed, or refuses a
file, is named with its reason. The same aligned tiles of 256 px, uint8 RGB, one after the other;
the readers take turns, each time in a process of its own (their libraries do not bear each other);
CPU time of all threads. Px are compared first: OpenSlide's with ours to the bit.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from PIL import Image

from benchmarks.harness import arguments, finish
from thinsection.slide import open_slide
from thinsection.testing import run_and_measure
from thinsection.testing.synthetic import he_texture

TILE_PX = 256
PREDICTOR = ", predictor"
MODULE = "benchmarks.bench_compressions"
BATCH = 16  # tiles that our reader is asked for together, as by the stream
ROUND_S = 0.3  # CPU time of one measurement, at least
APERIO = (
    "Aperio Image Library v12\r\n{0}x{0} [0,0 {0}x{0}] (256x256)|AppMag = 20|MPP = 0.5"
)
JPEG2000 = {
    "level": 40,
    "reversible": False,
    "mct": False,
    "codecformat": "j2k",
}  # about 1:7
# name -> tifffile's compression, and its arguments
FILES: dict[str, tuple[str | int | None, dict[str, Any]]] = {
    "JPEG": ("jpeg", {"level": 80}),
    "uncompressed": (None, {}),
    **{
        f"{name}{how}": (name, {})
        for name in ("zstd", "deflate", "lzw")
        for how in ("", PREDICTOR)
    },
    **{f"JPEG 2000, {code}": (code, JPEG2000) for code in (33003, 33005)},
    "WebP": ("webp", {"level": 80}),
    "JPEG XL": ("jpegxl", {"level": 90}),
}
MAX_DIFFERENCE = (
    16  # of a peer's px from ours, of 255: some decode JPEG roughly (fastslide: 14)
)
Read = Callable[[int, int], np.ndarray]  # x, y -> (256, 256, 3 or 4)


def write(path: Path, edge: int, name: str) -> None:
    """A level of H&E-like tissue, edge x edge px, in tiles of 256 px."""
    compression, how = FILES[name]
    repeats = -(-edge // 1024)
    pixels = np.tile(he_texture(np.random.default_rng(1)), (repeats, repeats, 1))[
        :edge, :edge
    ]
    options: dict[str, Any] = {
        "photometric": "rgb",
        "predictor": name.endswith(PREDICTOR),
    }
    stored: Any = pixels
    if compression == "jpeg":
        options |= {"photometric": "ycbcr", "subsampling": (2, 2)}
    if compression in ("jpeg", 33003):
        stored = np.asarray(Image.fromarray(pixels).convert("YCbCr"))
    if isinstance(compression, int):
        options["description"] = APERIO.format(edge)
        corners = (
            (slice(y, y + TILE_PX), slice(x, x + TILE_PX)) for y, x in places(edge)
        )
        tiles = (np.ascontiguousarray(stored[corner]) for corner in corners)
        stored = (bytes(imagecodecs.jpeg2k_encode(tile, **how)) for tile in list(tiles))
    elif how:
        options["compressionargs"] = how
    options |= {
        "shape": pixels.shape,
        "tile": (TILE_PX, TILE_PX),
        "compression": compression,
    }
    tifffile.imwrite(path, stored, dtype=np.uint8, metadata=None, **options)


def places(edge: int) -> list[tuple[int, int]]:
    """(y, x) of every tile, row by row."""
    return list(product(range(0, edge, TILE_PX), repeat=2))


def by_region(slide: Any) -> Read:
    """OpenSlide's alpha channel stays, as it costs to remove."""
    return lambda x, y: np.asarray(slide.read_region((x, y), 0, (TILE_PX, TILE_PX)))


def tiffslide_reader(package: Any, path: str) -> Read:
    """Into arrays."""
    read = package.TiffSlide(path).read_region
    return lambda x, y: read((x, y), 0, (TILE_PX, TILE_PX), as_array=True)


def cucim_reader(package: Any, path: str) -> Read:
    """cuCIM on the CPU, without its cache, as by default."""
    image = package.CuImage(path)
    return lambda x, y: np.asarray(
        image.read_region((x, y), (TILE_PX, TILE_PX), 0, device="cpu")
    )


def fastslide_reader(package: Any, path: str) -> Read:
    """fastslide, its cache emptied."""
    slide = package.FastSlide.from_file_path(path)
    slide.clear_cache()
    return lambda x, y: slide.read_region((x, y), 0, (TILE_PX, TILE_PX)).numpy()


def pyvips_reader(package: Any, path: str) -> Read:
    """libvips' regions, the way that reads one tile of the file for one that is asked for."""
    package.cache_set_max(0)  # else a second opening finds the first one's tiles
    region = package.Region.new(
        image := package.Image.new_from_file(path, access="random")
    )
    shape = (TILE_PX, TILE_PX, image.bands)
    return lambda x, y: np.frombuffer(region.fetch(x, y, *shape[:2]), np.uint8).reshape(
        shape
    )


READERS: dict[str, Callable[[Any, str], Read]] = {
    "openslide": lambda package, path: by_region(package.OpenSlide(path)),
    "tiffslide": tiffslide_reader,
    "cucim.clara": cucim_reader,
    "fastslide": fastslide_reader,
    "pyvips": pyvips_reader,
    "thinsection": lambda package, path: by_region(open_slide(path, reader="tiff")),
}


def one_pass(reader: str, path: str, edge: int) -> float:
    """CPU-seconds of one reader for all tiles, ours in batches; opening is not counted."""
    if reader != "thinsection":
        read = READERS[reader](import_module(reader), path)
        start = time.process_time()
        for y, x in places(edge):
            read(x, y)
        return time.process_time() - start
    origins = np.array([(x, y) for y, x in places(edge)], dtype=np.int64)
    out = np.empty((BATCH, TILE_PX, TILE_PX, 3), np.uint8)
    with open_slide(path, reader="tiff") as slide:
        start = time.process_time()
        for first in range(0, len(origins), BATCH):
            some = origins[first : first + BATCH]
            slide.read_regions(some, 0, out=out[: len(some)])
        return time.process_time() - start


def measure(reader: str, path: str, edge: int, seconds: float) -> dict[str, Any]:
    """How far a reader's px are from ours, and its tiles per CPU-second; or why there are none."""
    try:
        read, ours = (
            READERS[r](import_module(r), path) for r in (reader, "thinsection")
        )
        worst = 0
        for y, x in places(edge)[:: max(1, edge // 512)]:
            worst = max(
                worst, int(np.abs(ours(x, y).astype(int) - read(x, y)[..., :3]).max())
            )
    except ImportError as error:
        return {"why_not": f"not installed: {error}"}
    except Exception as error:  # noqa: BLE001 - each peer has its own errors; they are reported
        return {
            "why_not": f"refused: {(str(error).splitlines() or [repr(error)])[0][:120]}"
        }
    if worst > (0 if reader == "openslide" else MAX_DIFFERENCE):
        return {"why_not": f"wrong: px differ by up to {worst}"}
    one_pass(reader, path, edge)
    spent, tiles = 0.0, 0
    while spent < seconds:
        spent, tiles = spent + one_pass(reader, path, edge), tiles + len(places(edge))
    return {"px_differ_by": worst, "tiles_per_cpu_s": round(tiles / spent, 1)}


def compare(path: str, edge: int, *, times: int) -> dict[str, Any]:
    """One file: px, tiles per CPU-second of everybody, and ours over the best."""
    rounds: dict[str, list[dict[str, Any]]] = {reader: [] for reader in READERS}
    options = {"path": path, "edge": edge, "seconds": ROUND_S if times > 1 else 0.01}
    for _, reader in product(range(times), READERS):
        if any("why_not" in found for found in rounds[reader]):
            continue
        try:
            found = run_and_measure(MODULE, "measure", reader=reader, **options).result
        except (
            RuntimeError
        ) as error:  # cuCIM does, on compressions that it does not know
            assert reader != "thinsection", error
            found = {"why_not": f"crashed: {str(error).splitlines()[0]}"}
        rounds[reader].append(found)
    assert "wrong" not in rounds["openslide"][0].get("why_not", ""), rounds["openslide"]
    others = {
        r: found[-1]["why_not"] for r, found in rounds.items() if "why_not" in found[-1]
    }
    every = {
        r: [f["tiles_per_cpu_s"] for f in rounds[r]] for r in READERS if r not in others
    }
    rates = {
        reader: round(statistics.median(found), 1) for reader, found in every.items()
    }
    best = max(
        rates.keys() - {"thinsection"}, key=lambda reader: rates[reader], default=None
    )
    return {
        "tiles_per_cpu_s": rates,
        "of_each_round": every,
        "px_differ_by": {reader: rounds[reader][0]["px_differ_by"] for reader in rates},
        "not_measured": others,
        "best_peer": best,
        "ours_over_best": round(rates["thinsection"] / rates[best], 2)
        if best
        else None,
    }


def main() -> None:
    """Writes a file of each compression, compares, measures."""
    args = arguments(__doc__ or "")
    edge, times = (512, 1) if args.smoke else (2048, 5)
    results: dict[str, Any] = {"edge_px": edge}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slide.tif"
        for name in FILES:
            write(path, edge, name)
            results[name] = compare(str(path), edge, times=times)
    finish("bench_compressions", results, args)


if __name__ == "__main__":
    main()
