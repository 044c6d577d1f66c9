"""Tiles as images: a folder of JPEG or PNG files for each slide, or tar shards for WebDataset.

    ID/export.json          identity of the images; written first
       000012.jpg           tile of row 12 of the slide's tile table
       tiles.csv            file, slide_id, row, x_l0, y_l0, and the columns of the tile table
    ID-000000.tar           WebDataset: 1,000 tiles, each as KEY.jpg and KEY.json

Files are written completely or not at all, and a stopped export continues with the missing files.
`export.json` must stay the same: images of different tiles are never mixed or replaced.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from thinsection.exchange.peer_export import Layout, PeerSlide, Source, Tables
from thinsection.files.atomic import write_json, write_table
from thinsection.slide import Slide
from thinsection.store.identity import file_sum
from thinsection.store.ledger import OF_COHORTS
from thinsection.tiles import TileTable, iter_tiles
from thinsection.types import Document, RgbArray

_JPEG_QUALITY = 95
# Tiles per tar file, and tiles that are decoded ahead in one batch.
_SHARD_TILES = 1000
_BATCH = 32

Encoder = Callable[[RgbArray], bytes]


def _encode_jpeg(tile: RgbArray) -> bytes:
    """JPEG of quality 95, without chroma subsampling."""
    return bytes(
        simplejpeg.encode_jpeg(tile, quality=_JPEG_QUALITY, colorsubsampling="444")
    )


def _encode_png(tile: RgbArray) -> bytes:
    """Lossless PNG."""
    stream = io.BytesIO()
    Image.fromarray(tile).save(stream, format="png")
    return stream.getvalue()


def _folder_files(
    slide: PeerSlide, suffix: str, encode: Encoder
) -> Iterator[tuple[str, Source]]:
    """Files of one slide, an image for each tile.

    Memory: `StreamConfig.memory` at most, for 96 to 160 decoded tiles.
    """
    folder = slide.slide_id
    yield f"{folder}/export.json", _identity(slide, suffix)
    names = [f"{row:06d}.{suffix}" for row in range(len(slide.tiles.coords_l0))]
    missing = [
        row
        for row, name in enumerate(names)
        if not (slide.out / folder / name).exists()
    ]
    if missing:
        with slide.tiled().open() as opened:
            table = slide.tiled().table(opened).select(np.array(missing))
            for place, tile in _read(opened, table):
                image = encode(tile)
                name = f"{folder}/{names[missing[place]]}"
                yield name, partial(Path.write_bytes, data=image)
    rows = [{"file": name, **_tile_facts(slide, row)} for row, name in enumerate(names)]
    yield f"{folder}/tiles.csv", partial(write_table, rows=rows)


def _shard_files(slide: PeerSlide) -> Iterator[tuple[str, Source]]:
    """Tar files of one slide. Memory: as `_folder_files`; a shard is written tile by tile."""
    yield f"{slide.slide_id}-export.json", _identity(slide, "webdataset")
    num_tiles = len(slide.tiles.coords_l0)
    missing = []
    for number, start in enumerate(range(0, num_tiles, _SHARD_TILES)):
        name = f"{slide.slide_id}-{number:06d}.tar"
        rows = range(start, min(start + _SHARD_TILES, num_tiles))
        if not (slide.out / name).exists():
            missing.append((name, rows))
    if missing:
        with slide.tiled().open() as opened:
            table = slide.tiled().table(opened)
            for name, rows in missing:
                write = partial(
                    _write_shard,
                    slide=slide,
                    opened=opened,
                    table=table.select(np.array(rows)),
                    first_row=rows.start,
                )
                yield name, write


def _identity(slide: PeerSlide, kind: str) -> Source:
    """Values that decide the images of a slide, as JSON."""
    tiled = slide.tiled()
    document = {
        "format": kind,
        "slide_id": slide.slide_id,
        "size_l0": tiled.size_l0,
        "reader": tiled.reader,
        "rendering": tiled.rendering,
        "plan": None if tiled.plan is None else asdict(tiled.plan),
        "tiles": file_sum(slide.tiles_path),
    }
    return partial(write_json, data=document)


def _read(slide: Slide, table: TileTable) -> Iterator[tuple[int, RgbArray]]:
    """Yields the row of each tile in the table, and its pixels, in order."""
    for batch in iter_tiles(slide, table, batch_size=_BATCH):
        yield from zip(batch.indices.tolist(), batch.tiles)


def _tile_facts(slide: PeerSlide, row: int) -> Document:
    """Slide, position and columns of a tile, as plain values."""
    x, y = slide.tiles.coords_l0[row].tolist()
    facts = {"slide_id": slide.slide_id, "row": row, "x_l0": x, "y_l0": y}
    for name, values in slide.tiles.columns.items():
        facts[name] = values[row].item()
    return facts


def _write_shard(
    path: Path, slide: PeerSlide, opened: Slide, table: TileTable, first_row: int
) -> None:
    """Writes one tar file; WebDataset groups files by their name up to the first dot."""
    key = slide.slide_id.replace(".", "-")
    cohort = {name: slide.facts.get(name) for name in OF_COHORTS}
    with tarfile.open(path, "w") as archive:
        for place, tile in _read(opened, table):
            row = first_row + place
            facts = _tile_facts(slide, row) | cohort
            _add(archive, f"{key}_{row:06d}.jpg", _encode_jpeg(tile))
            _add(archive, f"{key}_{row:06d}.json", json.dumps(facts).encode())


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Adds a file without time and owner, so that the same tiles give the same bytes."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _tables(slides: Sequence[PeerSlide]) -> Tables:
    """Table of the slides with their cohort columns."""
    rows = []
    for slide in slides:
        cohort = {name: slide.facts.get(name) for name in OF_COHORTS}
        num_tiles = len(slide.tiles.coords_l0)
        rows.append({"slide_id": slide.slide_id, **cohort, "num_tiles": num_tiles})
    return {"slides.csv": rows}


JPEG = Layout(
    files=partial(_folder_files, suffix="jpg", encode=_encode_jpeg),
    tables=_tables,
    embeddings=False,
)
PNG = Layout(
    files=partial(_folder_files, suffix="png", encode=_encode_png),
    tables=_tables,
    embeddings=False,
)
WEBDATASET = Layout(files=_shard_files, tables=_tables, embeddings=False)
