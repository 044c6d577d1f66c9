"""What can be laid over a slide: outlines, tiles with their values, what embeddings say, graphs."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinsection.errors import StoreError, require, rewording
from thinsection.files.json_text import read_json
from thinsection.pipeline.folder import Results
from thinsection.store.ledger import SLIDES
from thinsection.store.tile_tables import TILES, EmbeddingRows
from thinsection.store.tiles_h5 import TilesFile, open_h5, read_tiles, stored_dataset
from thinsection.types import PointL0

# kinds of layers whose tiles have values, and how these are sent
_DTYPES = {
    "grid": "u1",
    "values": "<f4",
    "colours": "u1",
    "classes": "u1",
    "edges": "<i4",
}
_FIT_ROWS, _BLOCK_ROWS = (
    8192,
    4096,
)  # from which components are found; projected at a time
_COMPONENTS = 32  # by which tiles are clustered; the first three are shown
_UNNAMED = (90, 90, 90)
_CANDIDATES = (
    4  # times as many tiles as wanted are found in float32, and ordered in float64
)
_Values = Callable[[TilesFile], npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer; `read` gives what is drawn.

    Of 'outlines' that is JSON, a list of GeoJSON's geometries. The others are little-endian: 5
    uint32 (N, tile width and height, stride x and y in level-0 px), int32 (N, 2) corners, then of
    'values' float32 (N,), 'colours' uint8 (N, 3), 'classes' uint8 (N,), 'edges' int32 (E, 2) rows.
    """

    group: str
    name: str
    kind: str
    color: str = ""
    read: Callable[[], bytes]


def layers_of(
    results: Results, slide_id: str, clusters: int, budget_bytes: int
) -> Iterator[Layer]:
    """The layers of a slide of a results folder. Memory: the text of its outlines."""
    stages = results.ledgers[slide_id].stages
    for address, record in stages.items():
        for path in (
            results.folder / name for name in record.files if name.endswith(".geojson")
        ):
            if path.is_file():
                yield from outline_layers(path, address.removeprefix(f"{SLIDES}/"))
    for grid in [
        address.partition("/")[0] for address in stages if address.endswith(f"/{TILES}")
    ]:
        tiles, *others = results.tile_tables(slide_id, grid)
        yield _tile_layer(grid, "tiles", "grid", tiles.path, lambda _: np.empty(0))
        for address in (a for a in stages if a.startswith(f"{grid}/graph_")):
            edges = partial(_edges, results.file(slide_id, address))
            yield _tile_layer(
                grid, address.partition("/")[2], "edges", tiles.path, edges
            )
        for table in (tiles, *others):
            for name in table.columns:
                column = partial(lambda tiles, name: tiles.columns[name], name=name)
                yield _tile_layer(
                    table.address, table.label(name), "values", table.path, column
                )
    for address in (address for address in results.features if address in stages):
        path = results.file(slide_id, address)
        scores = partial(_scores, EmbeddingRows(path), budget_bytes)
        for name, kind, values in (
            (
                "principal components",
                "colours",
                lambda _, scores=scores: _colours(scores()),
            ),
            (
                f"{clusters} clusters",
                "classes",
                lambda _, s=scores: _clusters(s(), clusters),
            ),
        ):
            yield _tile_layer(address, name, kind, path, values)


def _tile_layer(group: str, name: str, kind: str, path: Path, values: _Values) -> Layer:
    def read() -> bytes:
        tiles = read_tiles(path, embeddings=False)
        stride = np.ravel(tiles.attributes.get("stride_l0", tiles.size_l0))
        head = np.array([len(tiles.coords_l0), *tiles.size_l0, *stride], dtype="<u4")
        parts = (
            head,
            tiles.coords_l0.astype("<i4"),
            values(tiles).astype(_DTYPES[kind]),
        )
        return b"".join(part.tobytes() for part in parts)

    return Layer(group=group, name=name, kind=kind, read=read)


def outline_layers(path: Path, group: str) -> Iterator[Layer]:
    """A layer for each class of a GeoJSON file. Raises StoreError: it cannot be read."""
    found: dict[str, tuple[str, list[Any]]] = {}
    damaged = (OSError, ValueError, AttributeError, KeyError, TypeError)
    with rewording("outlines must be GeoJSON", path, *damaged, error=StoreError):
        document = read_json(path)
        for feature in document.get("features", [document]):
            told = feature.get("properties") or {}
            kind = told.get("classification") or {}
            name = str(kind.get("name") or told.get("name") or "annotation")
            rgb = kind.get("color") or told.get("color") or _UNNAMED
            color = "#{:02x}{:02x}{:02x}".format(*(int(part) & 255 for part in rgb))
            found.setdefault(name, (color, []))[1].append(feature["geometry"])
    for name, (color, shapes) in found.items():
        text = json.dumps(shapes).encode()
        yield Layer(
            group=group,
            name=name,
            kind="outlines",
            color=color,
            read=partial(bytes, text),
        )


def _edges(path: Path, tiles: TilesFile) -> npt.NDArray[Any]:
    """(E, 2) rows of the tiles, each pair once; of a slide without tiles there are none."""
    with open_h5(path) as file:
        found = (
            stored_dataset(file, "edge_index", path)[...]
            if len(file)
            else np.empty((2, 0))
        )
    return np.asarray(found[:, found[0] < found[1]].T)


def _scores(rows: EmbeddingRows, budget_bytes: int) -> npt.NDArray[np.float32]:
    """The first principal components (N, up to 32) of embeddings, the sign of each one fixed.

    They are found from up to 8192 rows spread evenly. Memory: 12 D bytes a row of these, which are
    fewer where the budget asks it, 8 D² of their products, 16 KiB D of a block, 128 N.
    """
    count, dim = rows.shape
    most = int(min(_FIT_ROWS, count, max(256, budget_bytes // (12 * dim))))
    sample = rows[np.linspace(0, count - 1, most).astype(np.int64)].astype(np.float32)
    mean = sample.mean(axis=0) if most else np.zeros(dim, dtype=np.float32)
    sample -= mean
    _, vectors = np.linalg.eigh(sample.T @ sample)
    axes = vectors[:, ::-1][:, :_COMPONENTS].astype(np.float32)
    axes *= np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])
    starts = range(0, count, _BLOCK_ROWS)
    parts = [
        (rows[s : s + _BLOCK_ROWS].astype(np.float32) - mean) @ axes for s in starts
    ]
    return np.concatenate([*parts, np.empty((0, axes.shape[1]), dtype=np.float32)])


def _colours(scores: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """The first three as red, green and blue: percentiles 1 and 99 become 0 and 255."""
    first = np.zeros((len(scores), 3), dtype=np.float32)
    first[:, : scores.shape[1]] = scores[:, :3]
    low, high = np.percentile(first, (1, 99), axis=0) if len(first) else (0, 1)
    return np.asarray(
        np.clip((first - low) / np.where(high > low, high - low, 1.0) * 255, 0, 255)
    )


def _clusters(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[Any]:
    """k-means by the scores, seeded; the largest cluster is 0."""
    from scipy.cluster.vq import kmeans, vq  # slow to import

    if len(scores) <= count:
        return np.arange(len(scores))
    labels, _ = vq(scores, kmeans(scores, count, iter=5, seed=0)[0])
    order = np.argsort(-np.bincount(labels), kind="stable")
    return np.asarray(np.argsort(order)[labels])


def similar_tiles(
    results: Results,
    slide_id: str,
    features: str,
    point_l0: PointL0,
    *,
    count: int,
    budget: int,
) -> Iterator[dict[str, Any]]:
    """The tiles whose embeddings have the largest cosine to one tile's: exact, slide by slide.

    Yields: `tile` in which the point lies; `slide` and `cohort`, the `count` most similar tiles of
    this slide (the tile left out) and of the others so far; `done` slides `of` all. A tile has
    slide, row, x, y, width, height, similarity.

    Memory: budget, in bytes, whatever the number of tiles: embeddings are read in blocks.

    Raises InvalidInputError: no tile is there.
    """
    from thinsection.probe.compute import (
        nearest_rows,
    )  # with PyTorch: when asked first

    rows = results.embedding_rows(slide_id, features)
    offset = np.array(point_l0) - rows.tiles.coords_l0
    inside = ((offset >= 0) & (offset < rows.tiles.size_l0)).all(axis=1)
    require(inside.any(), "point must lie in a tile", point_l0)
    far = np.abs(offset - np.array(rows.tiles.size_l0) / 2).max(axis=1)
    row = int(
        np.where(inside, far, np.inf).argmin()
    )  # of tiles that overlap the nearest centre
    query = rows[[row]].astype(np.float32)
    names = [n for n, ledger in results.ledgers.items() if features in ledger.stages]
    told = {"tile": _described(slide_id, rows, query, [row])[0], "of": len(names)}
    best: dict[str, list[dict[str, Any]]] = {"slide": [], "cohort": []}
    for done, name in enumerate(sorted(names, key=lambda name: name != slide_id), 1):
        rows, own = results.embedding_rows(name, features), name == slide_id
        if k := min(_CANDIDATES * count + own, len(rows)):
            (found,) = nearest_rows(query, rows, k, budget_bytes=budget)
            found = np.sort(found[(found != row) | (not own)])
            kind = "slide" if own else "cohort"
            best[kind] += _described(name, rows, query, found.tolist())
            best[kind] = sorted(best[kind], key=lambda tile: -tile["similarity"])[
                :count
            ]
        yield told | best | {"done": done}


def _described(
    slide_id: str, rows: EmbeddingRows, query: npt.NDArray[np.float32], found: list[int]
) -> list[dict[str, Any]]:
    tiles, near, one = (
        rows.tiles,
        rows[found].astype(np.float64),
        query[0].astype(np.float64),
    )
    lengths = np.linalg.norm(near, axis=1) * np.linalg.norm(one)
    cosines = near @ one / np.where(lengths > 0, lengths, 1.0)
    names = ("slide", "row", "x", "y", "width", "height", "similarity")
    places = zip(found, tiles.coords_l0[found].tolist(), cosines.tolist())
    return [
        dict(zip(names, (slide_id, row, *xy, *tiles.size_l0, c)))
        for row, xy, c in places
    ]
