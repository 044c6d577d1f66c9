"""Ways to read the tiles of a slide, each run by `bench_reading` in a process of its own."""

import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.slide import open_slide
from thinsection.slide.resize import Resample
from thinsection.stream import StreamConfig, iter_tiles
from thinsection.tiles import TilesConfig, TileTable, tile_grid

RESAMPLES: tuple[Resample, Resample] = ("exact", "fast")
_TISSUE_STD = 20  # of a tile's values; glass is below
BATCH = 32  # the default on a CPU
EDGE = 256  # px of a tile


def table_of(path: str, mpp: str, resample: Resample = "exact") -> TileTable:
    """The whole grid of 256 px tiles."""
    with open_slide(path) as slide:
        return tile_grid(
            slide, TilesConfig(tile_px=EDGE, tile_mpp=mpp, resample=resample)
        )


def fast_difference(path: str, mpp: str, most: int) -> dict[str, float]:
    """Of fast from exact tiles, px and the cosines of embeddings; tissue only."""
    from torch.nn.functional import cosine_similarity

    from thinsection.encode import load_encoder

    tiles = {}
    with open_slide(path) as slide:
        for resample in RESAMPLES:
            table = table_of(path, mpp, resample)
            table = table.select(
                np.arange(0, len(table), max(1, len(table) // (2 * most)))
            )
            batches = iter_tiles(slide, table, batch_size=BATCH)
            tiles[resample] = np.concatenate([batch.tiles.copy() for batch in batches])
    tissue = tiles["exact"].std(axis=(1, 2, 3)) > _TISSUE_STD
    exact, fast = (tiles[resample][tissue][:most] for resample in RESAMPLES)
    difference = np.abs(exact.astype(np.int16) - fast)
    found = {
        "tiles": len(exact),
        "max": int(difference.max()),
        "mean": float(difference.mean()),
    }
    for name in ("efficientnet_lite0", "lunit_vits16"):
        own = name == "efficientnet_lite0"  # its weights come with the package
        encoder = load_encoder(name, device="cpu", pretrained=own)
        cosine = cosine_similarity(
            *(encoder.encode(some).float() for some in (exact, fast))
        )
        found |= {
            f"cosine_{name}": float(cosine.mean()),
            f"lowest_{name}": float(cosine.min()),
        }
    return found


def difference(path: str, mpp: str, every: int) -> dict[str, float]:
    """Of every n-th tile of the stream from OpenSlide's, reduced by Pillow where that is asked."""
    table = table_of(path, mpp)
    table = table.select(np.arange(0, len(table), every))
    found = []
    with open_slide(path, reader="openslide") as reference, open_slide(path) as slide:
        for batch in iter_tiles(slide, table, batch_size=BATCH):
            for (x, y), tile in zip(batch.coords_l0.tolist(), batch.tiles):
                pixels = reference.read_region(
                    (x, y), table.plan.level, table.plan.size_lv
                )
                found.append(np.abs(_reduced(pixels) - tile.astype(np.int16)))
    return {"max": float(np.max(found)), "mean": float(np.mean(found))}


def _reduced(pixels: np.ndarray) -> np.ndarray:
    from PIL import Image

    if pixels.shape[:2] == (EDGE, EDGE):
        return pixels
    return np.asarray(
        Image.fromarray(pixels).resize((EDGE, EDGE), Image.Resampling.LANCZOS)
    )


def opened(path: str, mpp: str, limit: int, threads: int) -> dict[str, Any]:
    """Opened readers, the tile table and the segments: outside the measured part."""
    import openslide
    import tifffile
    import torch

    torch.set_num_threads(1)
    table = table_of(path, mpp)
    table = table.select(np.arange(min(limit, len(table))))
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        columns = -(-page.imagewidth // page.tilewidth)
        spans = list(zip(page.dataoffsets, page.databytecounts))
        edge, (width, height) = page.tilewidth, table.plan.size_lv
        touched: set[int] = set()
        for x, y in table.coords_l0.tolist():
            rows = range(y // edge, -(-(y + height) // edge))
            row = range(x // edge, -(-(x + width) // edge))
            touched |= {r * columns + c for r, c in product(rows, row)}
        head = b"\xff\xd8" + (page.jpegtables or b"")[2:-2]
    return {
        "table": table,
        "openslide": openslide.OpenSlide(path),
        "ours": open_slide(path),
        "head": head,
        "edge": edge,
        "spans": [spans[index] for index in sorted(touched)],
    }


def opened_fast(path: str, mpp: str, limit: int, threads: int) -> dict[str, Any]:
    """The same for `--resample fast`."""
    import torch

    torch.set_num_threads(1)
    table = table_of(path, mpp, "fast")
    return {
        "table": table.select(np.arange(min(limit, len(table)))),
        "ours": open_slide(path),
    }


def openslide_loop(
    state: dict[str, Any], path: str, mpp: str, limit: int, threads: int
) -> int:
    """Tiles one after the other through openslide-python and Pillow, as most pipelines do."""
    coords, slide, plan = (
        state["table"].coords_l0.tolist(),
        state["openslide"],
        state["table"].plan,
    )

    def work(part: list[list[int]]) -> None:
        for x, y in part:
            region = slide.read_region((x, y), plan.level, plan.size_lv).convert("RGB")
            _reduced(np.asarray(region))

    _spread(work, coords, threads)
    return len(coords)


def limit_of(
    state: dict[str, Any], path: str, mpp: str, limit: int, threads: int
) -> int:
    """Each segment read and decoded once, and the kernel where tiles are reduced: the limit."""
    import simplejpeg
    import torch

    head, edge, num_tiles = state["head"], state["edge"], len(state["table"])
    lanczos, size_lv = (
        torch.ops.aten._upsample_lanczos2d_aa.out,
        state["table"].plan.size_lv,
    )

    def decode(part: list[tuple[int, int]]) -> None:
        out = np.empty((BATCH, edge, edge, 3), np.uint8)
        with Path(path).open("rb") as file:
            for index, (offset, count) in enumerate(part):
                file.seek(offset + 2)
                data = head + file.read(count - 2)
                simplejpeg.decode_jpeg(data, "RGB", buffer=out[index % BATCH])

    def reduce(part: list[int]) -> None:
        source = torch.zeros((1, *size_lv[::-1], 3), dtype=torch.uint8).permute(
            0, 3, 1, 2
        )
        target = torch.zeros((1, EDGE, EDGE, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        for _ in part:
            lanczos(source, [EDGE, EDGE], False, None, None, out=target)

    _spread(decode, state["spans"], threads)
    if size_lv != (EDGE, EDGE):
        _spread(reduce, list(range(num_tiles)), threads)
    return num_tiles


def stream(state: dict[str, Any], path: str, mpp: str, limit: int, threads: int) -> int:
    """Our stream, each batch dropped as it comes."""
    config = StreamConfig(decode_threads=threads)
    batches = iter_tiles(state["ours"], state["table"], batch_size=BATCH, config=config)
    return sum(len(batch) for batch in batches)


def loaded(path: str, limit: int) -> dict[str, Any]:
    """The default encoder, warm, and a batch in memory."""
    from thinsection.encode import load_encoder

    encoder = load_encoder("efficientnet_lite0", device="cpu")
    tiles = (
        np.random.default_rng(0)
        .integers(0, 256, (BATCH, EDGE, EDGE, 3))
        .astype(np.uint8)
    )
    encoder.encode(tiles)
    table = table_of(path, "native")
    table = table.select(np.arange(min(limit, len(table))))
    return {
        "encoder": encoder,
        "tiles": tiles,
        "table": table,
        "slide": open_slide(path),
    }


def encode_stream(state: dict[str, Any], path: str, limit: int) -> int:
    """The stream into the default encoder."""
    from thinsection.encode.embed import embed_tiles

    found, _ = embed_tiles(
        state["slide"], state["table"], state["encoder"], batch_size=BATCH
    )
    return len(found)


def encode_memory(state: dict[str, Any], path: str, limit: int) -> int:
    """The default encoder on one batch in memory, again and again."""
    for _ in range(limit // BATCH):
        state["encoder"].encode(state["tiles"]).cpu().numpy()
    return limit // BATCH * BATCH


def retile(path: Path, target: Path, edge: int) -> None:
    """Level 0 of a slide again, in JPEG segments of another edge; one row of them in memory."""
    import tifffile

    with open_slide(path) as slide, tifffile.TiffWriter(target, bigtiff=True) as writer:
        width, height = slide.size

        def segments() -> Iterator[np.ndarray]:
            for y in range(0, height, edge):
                row = slide.read_region((0, y), 0, (-(-width // edge) * edge, edge))
                yield from np.split(row, row.shape[1] // edge, axis=1)

        tags = {
            "photometric": "rgb",
            "compression": "jpeg",
            "compressionargs": {"level": 80},
        }
        resolution = {
            "resolution": (1e4 / 0.5, 1e4 / 0.5),
            "resolutionunit": "CENTIMETER",
        }
        shape = {"shape": (height, width, 3), "dtype": np.uint8, "tile": (edge, edge)}
        writer.write(segments(), **shape, **tags, **resolution)


def _spread(work: Callable[[list[Any]], None], items: list[Any], threads: int) -> None:
    parts = [items[i::threads] for i in range(threads)]
    running = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
