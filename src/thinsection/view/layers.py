"""What can be laid over a slide: outlines, tiles with their values, what embeddings say, graphs."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from thinsection.errors import StoreError, rewording
from thinsection.pipeline.folder import Results
from thinsection.store.ledger import SLIDES
from thinsection.store.tile_tables import TILES, EmbeddingRows
from thinsection.store.tiles_h5 import TilesFile, open_h5, read_tiles, stored_dataset

Kind = Literal["outlines", "grid", "values", "colours", "classes", "edges"]
_FIT_ROWS, _BLOCK_ROWS = 8192, 4096  # from which components are found; projected at a time
_COMPONENTS = 32  # by which tiles are clustered; the first three are shown
_UNNAMED = (90, 90, 90)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer; `read` gives what is drawn.

    Outlines are JSON, geometries of GeoJSON. The others are little-endian: 5 uint32 (N, tile width
    and height, stride x and y in level-0 px), int32 (N, 2) corners, then per kind: nothing, float32
    (N,), uint8 (N, 3), uint8 (N,), int32 (E, 2) rows.
    """

    group: str
    name: str
    kind: Kind
    read: Callable[[], bytes]
    color: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """What the browser is told before it asks for the layer."""
        return {n: getattr(self, n) for n in ("group", "name", "kind", "color")}


def layers_of(
    results: Results, slide_id: str, *, clusters: int, budget_bytes: int
) -> Iterator[Layer]:
    """The layers of a slide of a results folder. Memory: the text of its outlines."""
    stages = results.ledgers[slide_id].stages
    for address, record in stages.items():
        for name in (n for n in record.files if n.endswith(".geojson")):
            yield from outline_layers(results.folder / name, address.removeprefix(f"{SLIDES}/"))
    for grid in (a.partition("/")[0] for a in stages if a.endswith(f"/{TILES}")):
        for table in results.tile_tables(slide_id, grid):
            if table.address == f"{grid}/{TILES}":
                yield Layer(group=grid, name="tiles", kind="grid", read=partial(_grid, table.path))
            for column in table.columns:
                read = partial(_values, table.path, column)
                yield Layer(
                    group=table.address, name=table.label(column), kind="values", read=read
                )
        for address in (a for a in stages if a.startswith(f"{grid}/graph_")):
            path = results.file(slide_id, address)
            read = partial(_edges, results.file(slide_id, f"{grid}/{TILES}"), path)
            yield Layer(group=grid, name=address.partition("/")[2], kind="edges", read=read)
    for address in (a for a in results.features if a in stages):
        scores = partial(_scores, results.embedding_rows(slide_id, address), budget_bytes)
        how: dict[str, tuple[Kind, Any]] = {
            "principal components": ("colours", _colours),
            f"{clusters} clusters": ("classes", partial(_clusters, count=clusters)),
        }
        for name, (kind, of) in how.items():
            read = partial(_of_scores, scores, of)
            yield Layer(group=address, name=name, kind=kind, read=read)


def outline_layers(path: Path, group: str) -> Iterator[Layer]:
    """A layer for each class of a GeoJSON file. Raises StoreError: it cannot be read."""
    found: dict[str, tuple[str, list[Any]]] = {}
    damaged = (OSError, ValueError, AttributeError, KeyError, TypeError)
    with rewording("outlines must be GeoJSON", path, *damaged, error=StoreError):
        document = json.loads(path.read_text(encoding="utf-8"))
        for feature in document["features"] if "features" in document else [document]:
            properties = feature.get("properties") or {}
            kind: Mapping[str, Any] = properties.get("classification") or {}
            name = str(kind.get("name") or properties.get("name") or "annotation")
            rgb = kind.get("color") or properties.get("color") or _UNNAMED
            color = "#{:02x}{:02x}{:02x}".format(*(int(part) & 255 for part in rgb))
            found.setdefault(name, (color, []))[1].append(feature["geometry"])
    for name, (color, shapes) in found.items():
        read = partial(json.dumps(shapes).encode)
        yield Layer(group=group, name=name, kind="outlines", read=read, color=color)


def _packed(tiles: TilesFile, values: npt.NDArray[Any] | None = None) -> bytes:
    width, height = tiles.size_l0
    stride = np.ravel(tiles.attributes.get("stride_l0", (width, height)))
    head = np.array([len(tiles.coords_l0), width, height, *stride], dtype="<u4")
    return b"".join(a.tobytes() for a in (head, tiles.coords_l0.astype("<i4"), values) if a is not None)


def _grid(path: Path) -> bytes:
    return _packed(read_tiles(path))


def _values(path: Path, column: str) -> bytes:
    tiles = read_tiles(path)
    return _packed(tiles, tiles.columns[column].astype("<f4"))


def _edges(tiles: Path, graph: Path) -> bytes:
    with open_h5(graph) as file:
        edges = np.asarray(stored_dataset(file, "edge_index", graph)) if "edge_index" in file else np.empty((2, 0))
    return _packed(read_tiles(tiles), edges[:, edges[0] < edges[1]].T.astype("<i4"))


def _of_scores(
    scores: Callable[[], tuple[TilesFile, npt.NDArray[np.float32]]],
    of: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.uint8]],
) -> bytes:
    tiles, found = scores()
    return _packed(tiles, of(found))


def _scores(rows: EmbeddingRows, budget_bytes: int) -> tuple[TilesFile, npt.NDArray[np.float32]]:
    """Tiles and their first principal components (N, up to 32), each component's sign fixed.

    They are found from up to 8192 rows spread evenly. Memory: 12 D bytes a row of these, 8 D² of
    the covariance, 128 N of the result; fewer rows where the budget asks it.
    """
    (count, dim), tiles = rows.shape, rows.tiles
    most = int(min(_FIT_ROWS, max(256, budget_bytes // (12 * dim))))
    places = np.unique(np.linspace(0, max(count - 1, 0), most).astype(np.int64))[:count]
    sample = rows[places].astype(np.float32)
    mean = sample.mean(axis=0) if count else np.zeros(dim, dtype=np.float32)
    sample -= mean
    _, vectors = np.linalg.eigh(sample.T @ sample)
    axes = vectors[:, ::-1][:, :_COMPONENTS].astype(np.float32)
    axes *= np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])
    starts = range(0, count, _BLOCK_ROWS)
    parts = [(rows[s : s + _BLOCK_ROWS].astype(np.float32) - mean) @ axes for s in starts]
    return tiles, np.concatenate([*parts, np.empty((0, axes.shape[1]), dtype=np.float32)])


def _colours(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The first three components as red, green, blue: percentiles 1 to 99 become 0 to 255."""
    first = np.zeros((len(scores), 3), dtype=np.float32)
    first[:, : scores.shape[1]] = scores[:, :3]
    low, high = np.percentile(first, (1, 99), axis=0) if len(first) else (0, 1)
    return np.clip((first - low) / np.maximum(high - low, 1e-12) * 255, 0, 255).astype(np.uint8)


def _clusters(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.uint8]:
    """k-means by the scores, seeded; the largest cluster is 0."""
    from scipy.cluster.vq import kmeans2

    if len(scores) <= count:
        return np.arange(len(scores), dtype=np.uint8)
    _, labels = kmeans2(scores, count, minit="++", seed=0, iter=30, missing="ignore")
    order = np.argsort(-np.bincount(labels, minlength=count), kind="stable")
    return np.argsort(order)[labels].astype(np.uint8)
