"""Ways to read the tiles of a slide, each run by `bench_reading` in a process of its own."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from thinsection.slide import open_slide
from thinsection.slide.formats.tiff_decoder import JpegStreams
from thinsection.slide.resize import Resample
from thinsection.tiles import (
    StreamConfig,
    TilesConfig,
    TileTable,
    iter_tiles,
    tile_grid,
)
from thinsection.types import RgbArray, Size

# number of a tile, and an overlap with a segment as rows and columns of the tile and of the segment
_Copy = tuple[int, tuple[slice, slice], tuple[slice, slice]]
RESAMPLES: tuple[Resample, Resample] = ("exact", "fast")
_TISSUE_STD = 20  # of a tile's values; glass is below
BATCH = 32  # the default on a CPU
EDGE = 256  # px of a tile
# what a tile shows: glass, and the thirds of the others with the fewest and the most JPEG bytes
CONTENTS = ("glass", "smooth", "crowded")
_GLASS_STD = 6  # of level 1's values below a tile: glass has less
_GLASS_LEAST = 200  # and is brighter on average


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
    squared = np.square(difference, dtype=np.float64).mean()
    found = {
        "tiles": len(exact),
        "max": int(difference.max()),
        "mean": float(difference.mean()),
        "psnr_db": float(10 * np.log10(255**2 / squared)),
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


def opened(path: str, mpp: str, threads: int, content: str) -> dict[str, Any]:
    """Opened readers, the tile table and the segments: outside the measured part."""
    import openslide
    import tifffile
    import torch

    torch.set_num_threads(1)
    table = table_of(path, mpp)
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        edge = page.tilewidth
        spans = list(zip(page.dataoffsets, page.databytecounts))
        columns = -(-page.imagewidth // edge)
        streams = JpegStreams(page)
    touched = [segments_of(corner, table, edge, columns) for corner in table.coords_l0]
    if content:
        num_bytes = np.array(
            [sum(spans[index][1] for index in indices) for indices in touched]
        )
        chosen = tiles_with(content, path, table, num_bytes)
        table = table.select(chosen)
        touched = [touched[number] for number in chosen]
    needed = sorted({index for indices in touched for index in indices})
    return {
        "table": table,
        "openslide": openslide.OpenSlide(path),
        "ours": open_slide(path),
        "streams": streams,
        "edge": edge,
        "spans": [spans[index] for index in needed],
        "columns": columns,
    }


def segments_of(
    corner: np.ndarray, table: TileTable, edge: int, columns: int
) -> list[int]:
    """Indices of the segments of level 0 under a tile."""
    x, y = corner.tolist()
    width, height = table.plan.size_lv
    rows = range(y // edge, -(-(y + height) // edge))
    row = range(x // edge, -(-(x + width) // edge))
    return [r * columns + c for r, c in product(rows, row)]


def tiles_with(
    content: str, path: str, table: TileTable, num_bytes: np.ndarray
) -> np.ndarray:
    """Numbers of the tiles with this content; at most a third of the slide's tiles.

    Glass is bright and even on level 1. The others are ranked by the JPEG bytes below them.
    """
    edge = max(1, table.plan.size_l0[0] // 4)
    with open_slide(path) as slide:
        coarse = slide.read_region((0, 0), 1, slide.levels[1].size)
    glass = np.zeros(len(table), dtype=bool)
    for number, (x, y) in enumerate((table.coords_l0 // 4).tolist()):
        pixels = coarse[y : y + edge, x : x + edge]
        glass[number] = (
            pixels.std(axis=(0, 1)).max() < _GLASS_STD and pixels.mean() > _GLASS_LEAST
        )
    if content == "glass":
        return np.flatnonzero(glass)
    others = np.flatnonzero(~glass)
    ranked = others[np.argsort(num_bytes[others], kind="stable")]
    third = max(1, len(ranked) // 3)
    return np.sort(ranked[:third] if content == "smooth" else ranked[-third:])


def opened_fast(path: str, mpp: str, threads: int, content: str) -> dict[str, Any]:
    """The same for `--resample fast`."""
    import torch

    torch.set_num_threads(1)
    return {"table": table_of(path, mpp, "fast"), "ours": open_slide(path)}


def openslide_loop(state: dict[str, Any], *, threads: int, **_: Any) -> int:
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


def limit_of(state: dict[str, Any], *, path: str, threads: int, **_: Any) -> int:
    """Each segment read and decoded once, and the kernel where tiles are reduced: the limit."""
    _spread(partial(_decode, state, path), state["spans"], threads)
    num_tiles = len(state["table"])
    if state["table"].plan.size_lv != (EDGE, EDGE):
        _spread(partial(_reduce, state), list(range(num_tiles)), threads)
    return num_tiles


def opened_with_copies(
    path: str, mpp: str, threads: int, content: str
) -> dict[str, Any]:
    """As `opened`, with the copies from each segment into the tiles that it overlaps."""
    state = opened(path, mpp, threads, content)
    table, edge = state["table"], state["edge"]
    origins = table.coords_l0.tolist()
    size = table.plan.size_lv
    copies: dict[int, list[_Copy]] = {}
    for tile, origin in enumerate(origins):
        for index in segments_of(table.coords_l0[tile], table, edge, state["columns"]):
            row, column = divmod(index, state["columns"])
            corner = (column * edge, row * edge)
            in_tile = _overlap(origin, corner, size, (edge, edge))
            in_segment = _overlap(corner, origin, (edge, edge), size)
            copies.setdefault(index, []).append((tile, in_tile, in_segment))
    return state | {"copies": [copies[index] for index in sorted(copies)]}


def _overlap(
    corner: Sequence[int], other: Sequence[int], size: Size, other_size: Size
) -> tuple[slice, slice]:
    """Rows and columns of a rectangle that lie in another one."""
    x, y = (
        slice(max(0, b - a), min(length, b + other_length - a))
        for a, b, length, other_length in zip(corner, other, size, other_size)
    )
    return y, x


def limit_with_copies(
    state: dict[str, Any], *, path: str, threads: int, **_: Any
) -> int:
    """As `limit_of`, and the px of each segment are copied into the tiles that it overlaps.

    Without these copies no tile is made, unless each is exactly a segment.
    """
    table, edge = state["table"], state["edge"]
    if table.plan.size_lv == (edge, edge) and not (table.coords_l0 % edge).any():
        return limit_of(state, path=path, threads=threads)
    parts = list(zip(state["spans"], state["copies"]))
    _spread(partial(_decode_and_copy, state, path), parts, threads)
    if table.plan.resamples:
        _spread(partial(_reduce, state), list(range(len(table))), threads)
    return len(table)


def parts_of_limit(state: dict[str, Any], *, path: str, **_: Any) -> dict[str, float]:
    """CPU-seconds a tile of the parts of the limit, on one thread, after one pass of each."""
    num_tiles = len(state["table"])
    parts: dict[str, tuple[Callable[[list[Any]], None], list[Any]]] = {
        "read": (partial(_read, path), state["spans"]),
        "read_and_decode": (partial(_decode, state, path), state["spans"]),
    }
    if state["table"].plan.size_lv != (EDGE, EDGE):
        parts["kernel"] = (partial(_reduce, state), list(range(num_tiles)))
    found = {}
    for name, (work, items) in parts.items():
        work(items[: len(items) // 10])
        start = time.process_time()
        work(items)
        found[name] = (time.process_time() - start) / num_tiles
    return found


def _read(path: str, spans: list[tuple[int, int]]) -> None:
    with Path(path).open("rb") as file:
        for offset, count in spans:
            file.seek(offset + 2)
            file.read(count - 2)


def _decode(state: dict[str, Any], path: str, spans: list[tuple[int, int]]) -> None:
    deque(_decoded(state, path, spans), maxlen=0)


def _decoded(
    state: dict[str, Any], path: str, spans: list[tuple[int, int]]
) -> Iterator[RgbArray]:
    import simplejpeg

    streams, edge = state["streams"], state["edge"]
    out = np.empty((BATCH, edge, edge, 3), np.uint8)
    with Path(path).open("rb") as file:
        for index, (offset, count) in enumerate(spans):
            file.seek(offset)
            data, _ = streams.whole(file.read(count))
            pixels = out[index % BATCH]
            simplejpeg.decode_jpeg(data, "RGB", buffer=pixels)
            yield pixels


def _decode_and_copy(
    state: dict[str, Any], path: str, parts: list[tuple[tuple[int, int], list[_Copy]]]
) -> None:
    from thinsection.slide.resize import tiles_at_once

    plan = state["table"].plan
    # tiles in memory at a time, as in our stream; a later tile takes the place of an earlier one
    held = tiles_at_once(plan) if plan.resamples else BATCH
    tiles = np.empty((held, *plan.size_lv[::-1], 3), np.uint8)
    segments = _decoded(state, path, [span for span, _ in parts])
    for pixels, (_, copies) in zip(segments, parts):
        for tile, in_tile, in_segment in copies:
            tiles[tile % held][in_tile] = pixels[in_segment]


def _reduce(state: dict[str, Any], tiles: list[int]) -> None:
    import torch

    lanczos = torch.ops.aten._upsample_lanczos2d_aa.out
    shape = (1, *state["table"].plan.size_lv[::-1], 3)
    source = torch.zeros(shape, dtype=torch.uint8).permute(0, 3, 1, 2)
    target = torch.zeros((1, EDGE, EDGE, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    for _ in tiles:
        lanczos(source, [EDGE, EDGE], False, None, None, out=target)


def stream(state: dict[str, Any], *, threads: int, **_: Any) -> int:
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
